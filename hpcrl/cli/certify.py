"""`hpcrl certify`: write the digests of all bits of a run, check them, and compare two runs by theirs."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from hpcrl.cli._common import add_run, named_run
from hpcrl.text import one_line

if TYPE_CHECKING:
    from hpcrl.launch.manage.certificate import Certificate
    from hpcrl.rundir.layout import Run

_MOST_LISTED = 12


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run(parser)
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="write the certificate there, too")
    act = parser.add_mutually_exclusive_group()
    act.add_argument(
        "--check", action="store_true", help="compare the run with the certificate that it has; write nothing"
    )
    act.add_argument(
        "--against",
        metavar="RUN|FILE",
        help="compare the run with another one, or with a certificate; write nothing, and name the first difference",
    )
    parser.set_defaults(action=_certify)


def _certify(arguments: argparse.Namespace) -> int:
    from hpcrl.launch.manage.certificate import certificate_of, read_certificate, write_certificate

    run = named_run(arguments)
    if arguments.against:
        return _compare(run, arguments.against, arguments.root)
    _require_whole(run)
    certificate = certificate_of(run)
    if arguments.check:
        return _report(run.name, certificate, str(run.certificate), read_certificate(run.certificate), given=True)
    for path in [run.certificate, *([arguments.output] if arguments.output else [])]:
        write_certificate(path, certificate)
    print("\n".join(map(one_line, _summary(run, certificate))))
    return 0


def _require_whole(run: Run) -> None:
    from hpcrl.errors import DamagedError
    from hpcrl.launch.manage.verify import PARTS

    for part in PARTS:
        for sentence in part.damaged(run):
            raise DamagedError(f"{sentence}; `hpcrl verify {run.name}` lists everything")


def _summary(run: Run, certificate: Certificate) -> list[str]:
    chain = certificate["steps"][-1][1] if certificate["steps"] else "none"
    last = [
        f"{name}  {digest}" for name, digest in (*certificate["weights"].items(), *certificate["checkpoints"].items())
    ]
    unsure = [] if certificate["deterministic"] else ["without trainer.deterministic another run may have other bits"]
    return [f"{run.certificate}", f"{len(certificate['steps'])} steps  {chain}", *last, *unsure]


def _compare(run: Run, other: str, root: Path | None) -> int:
    from hpcrl.launch.manage.certificate import certificate_of, read_certificate
    from hpcrl.launch.manage.registry import find_run
    from hpcrl.rundir.layout import default_root

    if Path(other).is_file():
        return _report(run.name, certificate_of(run), other, read_certificate(Path(other)))
    beside = find_run(other, root or default_root())
    return _report(run.name, certificate_of(run), beside.name, certificate_of(beside), runs=(run, beside))


def _report(
    name: str,
    one: Certificate,
    other_name: str,
    other: Certificate,
    *,
    given: bool = False,
    runs: tuple[Run, Run] | None = None,
) -> int:
    """Print in what two certificates differ and return the exit code.

    Args:
        given: whether a difference in what the runs were given counts.
        runs: of the certificates, where both are here.
    """
    from hpcrl.launch.manage.certificate import compared, first_difference, given_differences

    print(one_line(f"{name} and {other_name}"))
    others = given_differences(one, other)
    for line in others[:_MOST_LISTED]:
        print(one_line(f"  given: {line}"))
    if len(others) > _MOST_LISTED:
        print(f"  given: {len(others) - _MOST_LISTED} more")
    if found := first_difference(one, other):
        step, what = found
        print(one_line(f"  first difference: step {step}: {what}{_groups(runs, step)}"))
        return 1
    if given and len(one["steps"]) < len(other["steps"]):
        print(f"  {len(other['steps'])} steps were certified, and {len(one['steps'])} are there")
        return 1
    print(f"  the same bits: {compared(one, other)}")
    return 1 if given and others else 0


def _groups(runs: tuple[Run, Run] | None, step: int) -> str:
    """Return which groups of a step differ, as the end of a sentence."""
    from hpcrl.data.batch_file import read_batch
    from hpcrl.launch.manage.certificate import differing_groups

    files = [read_batch(run.batch(step)) for run in runs] if runs else []
    one, other = files if len(files) == 2 else (None, None)
    names = differing_groups(one.batch, other.batch) if one and other else []
    more = f" and {len(names) - _MOST_LISTED} more" if len(names) > _MOST_LISTED else ""
    return f": {', '.join(names[:_MOST_LISTED])}{more}" if names else ""
