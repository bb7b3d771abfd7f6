"""`hpcrl eval`: evaluate a checkpoint, or any model, on prompts."""

from __future__ import annotations

import argparse
from pathlib import Path

from hpcrl.cli._common import add_root, note_empty_values, positive, split


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_root(parser)
    parser.epilog = "example: hpcrl eval my-run --data math.jsonl -n 8 generator.eval_sampling_params.temperature=1.0"
    parser.set_defaults(action=_eval)
    parser.add_argument(
        "subject",
        nargs="?",
        metavar="RUN|MODEL",
        help="name, project/name or path of a run, a model directory, or the id of a model on the hub",
    )
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="settings to change")
    parser.add_argument(
        "--data", nargs="+", action="extend", metavar="FILE", required=True, help="datasets of prompts, then settings"
    )
    parser.add_argument("--checkpoint", metavar="STEP", help="of the run; 0: before training (default: the newest)")
    parser.add_argument("-n", type=positive, metavar="K", help="samples per prompt (default: as configured)")
    parser.add_argument(
        "--config", nargs="+", action="extend", default=[], metavar="FILE", help="further TOML files, then settings"
    )
    parser.add_argument(
        "-o", "--output", type=Path, metavar="DIR", help="default: RUN/evaluations/…, of a model ./evaluations/…"
    )
    parser.add_argument("--json", action="store_true", help="print results.json instead of a table")


def _eval(arguments: argparse.Namespace) -> int:
    from json import dumps
    from shlex import quote

    from hpcrl.errors import ConfigError
    from hpcrl.launch.local.evaluate import configured, default_place, evaluate, find_subject
    from hpcrl.launch.local.foreground import to_stderr
    from hpcrl.observe.eval_report import summary
    from hpcrl.rundir.layout import Run, default_root

    data, settings = split(arguments.data)
    files, more = split(arguments.config)
    behind = [*settings, *more]
    note_empty_values(behind)
    order = "hpcrl eval RUN|MODEL [KEY=VALUE …] --data FILE … [--config FILE …]"
    if arguments.subject is None:
        took = ", ".join([*data, *files])
        raise ConfigError(
            f"RUN|MODEL comes first: --data and --config take all words behind them, here {took}; expected {order}"
        )
    if not data:
        raise ConfigError(
            f"--data: expected a dataset of prompts, found settings alone, {' '.join(settings)}; expected {order}"
        )
    settings = [*behind, *arguments.settings]
    root = arguments.root or default_root()
    subject = find_subject(arguments.subject, arguments.checkpoint, root)
    config = configured(subject, data, arguments.n, [Path(file) for file in files], settings)
    place = (arguments.output or default_place(subject)).absolute()
    results = evaluate(subject, config, Run(place), to_stderr, root)
    if arguments.json:
        print(dumps(results, indent=2))
        return 0
    print("\n".join(summary(results)))
    print(f"{place / 'report.md'}\n  hpcrl samples {quote(str(place))} --eval --worst    shows the responses")
    return 0
