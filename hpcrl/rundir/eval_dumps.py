"""Reads the samples of an evaluation: evals/v000040/<replica>.jsonl, a line per sample (hpcrl/rollout/evaluate.py)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from hpcrl.errors import DataError, RunError
from hpcrl.rundir.commit import parse_json, read_bytes
from hpcrl.rundir.evaluations import begun_evaluations
from hpcrl.rundir.layout import Run, version_of


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _are_messages(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(message, dict) and _is_text(message.get("role")) and _is_text(message.get("content"))
        for message in value
    )


def _are_parts(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(part, dict)
        and _is_text(part.get("by"))
        and _is_text(part.get("text"))
        and isinstance(part.get("tokens"), int | None)
        for part in value
    )


def _is_response(value: Any) -> bool:
    return _is_text(value) or _are_messages(value)


_REQUIRED: Mapping[str, Callable[[Any], bool]] = {
    "prompt": _are_messages,
    "data_source": _is_text,
    "score": _is_number,
    "stop_reason": _is_text,
    "env_metrics": lambda value: isinstance(value, dict) and all(map(_is_number, value.values())),
    "parts": _are_parts,
}


def dumped_samples(run: Run, version: int | None) -> tuple[int, dict[tuple[str, int], dict[str, Any]]]:
    """Return a version, the newest one whose evaluation is over where none is named, and the lines of its samples.

    Records are sorted by group and place in it; `replica` wrote them.

    Raises:
        RunError: there is no such evaluation, or its samples were not written.
    """
    dumps = [
        path for path in run.evals.glob("v*/*.jsonl") if version_of(path.parent) is not None and path.stem.isdecimal()
    ]
    versions = sorted({version_of(path.parent) or 0 for path in dumps})
    if not versions:
        raise RunError(
            f"{run.name} has no samples of an evaluation: none is over, or trainer.dump_eval_results is false, or "
            "trainer.eval_interval is 0"
        )
    chosen = _newest(run, versions) if version is None else version
    if chosen not in versions:
        raise RunError(
            f"{run.name} has no samples of an evaluation of version {chosen}; there are those of {', '.join(map(str, versions))}"
        )
    found = dict[
        tuple[str, int], dict[str, Any]
    ]()  # one that a worker could not report before it was killed is there twice
    for path in sorted(path for path in dumps if version_of(path.parent) == chosen):
        found |= dict(_samples(path))
    return chosen, {place: found[place] for place in sorted(found)}


def _newest(run: Run, versions: list[int]) -> int:
    """Return the newest version whose evaluation is over. Raises RunError where none is."""
    begun = begun_evaluations(run)
    over = [version for version in versions if version not in begun]
    if not over:
        raise RunError(
            f"{run.name} has no evaluation that is over; name a version to read what there is: {', '.join(map(str, versions))}"
        )
    return over[-1]


def _samples(path: Path) -> Iterator[tuple[tuple[str, int], dict[str, Any]]]:
    count = Counter[str]()
    for number, text in enumerate((read_bytes(path, most=None) or b"").split(b"\n"), 1):
        try:
            line = parse_json(text)
        except ValueError:  # cut off by a kill, or it is being written
            continue
        try:
            group = str(line["group_id"])
            place = group, int(line.get("sample", count[group]))
            wrong = [name for name, is_right in _REQUIRED.items() if not is_right(line[name])]
            if not _is_response(line.get("response", "")):
                wrong.append("response")
            if wrong:
                raise TypeError(f"{wrong[0]} is {line[wrong[0]]!r:.80}")
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            raise DataError(
                f"{path}, line {number} is no sample of an evaluation: {error!r}. Remove the line, or evaluate again with `hpcrl eval`"
            ) from error
        count[group] += 1
        yield place, {**line, "replica": int(path.stem)}
