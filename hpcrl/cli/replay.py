"""`hpcrl replay`: train a step of a run again, by the trainer alone."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpcrl.cli._common import add_run, named_run, positive
from hpcrl.text import printable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hpcrl.launch.local.replay import Plan


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run(parser)
    parser.add_argument(
        "settings", nargs="*", metavar="KEY=VALUE", help="settings to change (default: as the step was trained)"
    )
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--step", type=positive, metavar="N", help="step to train again")
    which.add_argument(
        "--all",
        action="store_true",
        help="train all steps whose samples are there, and compare each with the run to the last bit; ends at the first difference",
    )
    parser.add_argument(
        "--times", type=positive, default=1, metavar="K", help="train it so often, each time from the checkpoint (1)"
    )
    parser.add_argument(
        "--ranks",
        type=positive,
        metavar="R",
        help="trainer ranks (default: those of one of its nodes, or those that share a model)",
    )
    parser.add_argument(
        "-o", "--output", type=Path, metavar="DIR", help="keep configuration, results, logs and dumps here"
    )
    parser.add_argument("--json", action="store_true", help="a JSON list, one object per time and step")
    parser.set_defaults(action=_replay)


def _replay(arguments: argparse.Namespace) -> int:
    from json import dumps

    from hpcrl.config import Config
    from hpcrl.errors import ConfigError
    from hpcrl.launch.local.replay import config_of, plan_all, plan_replay, ranks_here, replay
    from hpcrl.observe.metrics import merged
    from hpcrl.rundir.layout import Run

    run = named_run(arguments)
    if arguments.all and arguments.times > 1:
        raise ConfigError("--times: expected 1 with --all, which trains each step once")
    plan = plan_all(run) if arguments.all else plan_replay(run, arguments.step, arguments.times)
    config = Config.from_toml([config_of(run, plan.step)], arguments.settings).largest()
    of_run = config.trainer.placement.policy_ranks if arguments.all else None
    ranks = ranks_here(config.trainer, arguments.ranks or of_run)
    with _place(arguments.output) as place:
        results = replay(plan, config, ranks, Run(place))
    if arguments.json:
        print(dumps(results, indent=2))
    if arguments.all:
        return _verdict(run.name, plan, ranks, results, quiet=arguments.json)
    if arguments.json:
        return 0
    print(_title(run.name, plan, ranks))
    replayed = [one["metrics"] for one in results if one["step"] == plan.step]
    print(printable("\n".join(_table(merged(run)[plan.step], replayed))))
    return 0


def _verdict(name: str, plan: Plan, ranks: int, results: Sequence[Mapping[str, Any]], *, quiet: bool) -> int:
    """Print the first difference between the run and its replay, and return the exit code."""
    from dataclasses import asdict

    from hpcrl.launch.local.replay import differences

    found = differences(asdict(plan), results[-1])
    weights = f", and weights of {len(plan.versions)} versions" if plan.versions else ""
    lines = [f"  the same bits: {len(results)} steps{weights}"]
    if found:
        lines = [f"  first difference: step {results[-1]['step']}", *(f"    {line}" for line in found)]
    if not quiet:
        print(printable("\n".join([_title(name, plan, ranks), *lines])))
    return 1 if found else 0


@contextmanager
def _place(output: Path | None) -> Iterator[Path]:
    """Yield a directory for the replay; it is removed at the end, unless it was named or the replay failed: its logs say why."""
    from shutil import rmtree
    from tempfile import mkdtemp

    from hpcrl.errors import RunError

    if output is not None and output.exists():
        raise RunError(f"{output} exists; move it away, or choose another --output")
    place = Path(mkdtemp(prefix="hpcrl-replay-")) if output is None else output.absolute()
    yield place
    if output is None:
        rmtree(place)


def _title(name: str, plan: Plan, ranks: int) -> str:
    start = "the initial model" if plan.checkpoint is None else Path(plan.checkpoint).name
    passed = range(plan.first, plan.step)
    between = f" over step{'s' if len(passed) > 1 else ''} {', '.join(map(str, passed))}" if passed else ""
    times = f", {plan.times} times" if plan.times > 1 else ""
    return f"{name}, step {plan.step} from {start}{between}{times}, {ranks} rank{'s' if ranks > 1 else ''}"


def _table(recorded: Mapping[str, float], replayed: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a line per metric: what the run recorded, and each time's value; then what differs most."""
    from hpcrl.launch.local.replay import COMPARED

    names = [name for name in replayed[0] if name.startswith(COMPARED)]
    width = max(map(len, names))
    heads = ["run", *(f"replay {number}" for number in range(1, len(replayed) + 1))]
    lines = ["  ".join([" " * width, *(f"{head:>13}" for head in heads)])]
    worst, apart = "", 0.0
    for name in names:
        values = [recorded.get(name, math.nan), *(metrics[name] for metrics in replayed)]
        lines.append("  ".join([f"{name:{width}}", *(f"{value:13.7g}" for value in values)]))
        known = [value for value in values if not math.isnan(value)]
        if known and max(known) - min(known) > apart:
            worst, apart = name, max(known) - min(known)
    return [*lines, f"largest difference: {apart:.2g} of {worst}" if worst else "no difference"]
