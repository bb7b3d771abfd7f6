"""Replays golden cases of other frameworks through hpcrl: python tests/golden/run.py FILE.json [--verbose]

A case passes if hpcrl's own functions give the same answer; it is skipped if it is listed in differences.toml, or if its function
has no adapter; it fails otherwise. The last line is `N passed, M failed, K skipped`, the exit code is 1 if any failed.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

if __name__ == "__main__":  # run by path: the packages are those of this checkout
    sys.path[0] = str(Path(__file__).parents[2])

from hpcrl.errors import HpcrlError
from tests.golden.adapters import adapter_of
from tests.golden.case import Case, load
from tests.golden.compare import differences
from tests.golden.deliberate import Difference, read

_REFUSALS = (HpcrlError, ValueError, NotImplementedError)
_CRASHES = (ArithmeticError, AssertionError, AttributeError, LookupError, OSError, RuntimeError, TypeError)
_MOST_SHOWN = 5


@dataclass(frozen=True)
class Outcome:
    """What became of one case.

    Attributes:
        lines: why it failed, was skipped, or was refused as it should be; else which of its outputs were not compared.
    """

    case: Case
    state: Literal["passed", "failed", "skipped"]
    lines: tuple[str, ...] = ()
    no_adapter: bool = False


def replay(case: Case, deliberate: Iterable[Difference]) -> Outcome:
    """Return what hpcrl's answer to a case is worth."""
    ours = [difference for difference in deliberate if difference.matches(case)]
    for difference in ours:
        if not difference.outputs:
            return Outcome(case, "skipped", (f"{difference.reason}; here: {difference.instead}",))
    adapter = adapter_of(case.fn)
    if adapter is None:
        return Outcome(case, "skipped", no_adapter=True)
    try:
        found = adapter(case)
    except (*_REFUSALS, *_CRASHES) as error:
        if case.refusal and (isinstance(error, _REFUSALS) or type(error).__name__ == case.refusal):
            return Outcome(case, "passed", (f"refused: {error}",))
        return Outcome(case, "failed", tuple(f"{type(error).__name__}: {error}".splitlines()))
    if case.refusal:
        return Outcome(case, "failed", (f"expected a refusal ({case.refusal}), found {found!r:.200}",))
    asked = {name: found[name] for name in case.outputs if name in found}
    patterns = {pattern for difference in ours for pattern in difference.excused(case)}
    expected, excused = _without(patterns, case.outputs)
    lines = tuple(differences(expected, _without(patterns, asked)[0]))
    return Outcome(case, "failed" if lines else "passed", lines or tuple(f"not compared: {name}" for name in excused))


def _without(patterns: Collection[str], outputs: Any, prefix: str = "") -> tuple[Any, list[str]]:
    """Return the outputs that are compared, and the dotted names of those that are not; entries of lists count from 0."""
    outputs = outputs.tolist() if hasattr(outputs, "tolist") else outputs
    if not patterns or not isinstance(outputs, Mapping | list | tuple):
        return outputs, []
    kept, excused = {}, []
    for name, value in outputs.items() if isinstance(outputs, Mapping) else enumerate(outputs):
        path = f"{prefix}{name}"
        if any(fnmatchcase(path, pattern) for pattern in patterns):
            excused.append(path)
        else:
            kept[name], below = _without(patterns, value, path + ".")
            excused += below
    return (kept if isinstance(outputs, Mapping) else list(kept.values())), excused


def replay_file(path: Path) -> list[Outcome]:
    """Return the outcomes of all cases of a file, in its order.

    Raises:
        ValueError: the file holds no golden cases.
    """
    deliberate = read()
    return [replay(case, deliberate) for case in load(path)]


def report(outcomes: list[Outcome], verbose: bool) -> None:
    for outcome in outcomes:
        told = outcome.state == "failed" or (verbose and not outcome.no_adapter)
        lines = outcome.lines if verbose else outcome.lines[:_MOST_SHOWN]
        if told:
            print(f"{outcome.state}: {outcome.case.fn} {outcome.case.id}", *lines, sep="\n    ")
        if told and len(lines) < len(outcome.lines):
            print(f"    … {len(outcome.lines) - len(lines)} more (--verbose)")
    missing = Counter(outcome.case.fn for outcome in outcomes if outcome.no_adapter)
    states = Counter(outcome.state for outcome in outcomes)
    if verbose:
        for fn, count in sorted(missing.items()):
            print(f"no adapter: {fn} ({count})")
    if states["skipped"]:
        deliberate = states["skipped"] - missing.total()
        print(
            f"skipped: {deliberate} deliberate differences, {missing.total()} cases of {len(missing)} functions without an adapter"
        )
    print(f"{states['passed']} passed, {states['failed']} failed, {states['skipped']} skipped")


def main(command: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Replay golden cases of other frameworks through hpcrl.")
    parser.add_argument("file", type=Path, metavar="FILE.json")
    parser.add_argument("--verbose", action="store_true", help="also tell what was skipped, and why")
    arguments = parser.parse_args(command)
    try:
        outcomes = replay_file(arguments.file)
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    report(outcomes, arguments.verbose)
    return 1 if any(outcome.state == "failed" for outcome in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
