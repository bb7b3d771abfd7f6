"""`hpcrl advise`: print for what each role of a run waits, and the settings that would help."""

from __future__ import annotations

import argparse

from hpcrl.cli._common import add_run, named_run
from hpcrl.text import one_line


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run(parser)
    parser.add_argument("--json", action="store_true", help="a JSON object")
    parser.set_defaults(action=_advise)


def _advise(arguments: argparse.Namespace) -> int:
    from json import dumps

    from hpcrl.errors import RunError
    from hpcrl.observe.advice import advise

    run = named_run(arguments)
    advised = advise(run)
    if advised is None:
        raise RunError(
            f"{run.name}: the newest attempt has too few steps for advice; it needs 5, of which 3 are looked at"
        )
    if arguments.json:
        print(dumps(advised.to_json(), indent=2))
        return 0
    lines = list(advised.lines())
    for line in lines or [f"no role waits for a tenth of its time ({advised.based_on})"]:
        print(one_line(line))
    return 0
