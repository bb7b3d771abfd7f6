"""`hpcrl compare`: two evaluations of the same prompts, and whether they differ."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpcrl.cli._common import add_root
from hpcrl.text import one_line

if TYPE_CHECKING:
    from hpcrl.observe.evaluations import Comparison, Evaluation
    from hpcrl.observe.scores import ScoreDifference

EVALUATION = "RUN, RUN@VERSION, or the directory of an evaluation that `hpcrl eval` or `hpcrl rescore` made"
_LEAST_P = 1e-4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_root(parser)
    parser.epilog = "example: hpcrl compare my-run@0 my-run@40"
    for name in ("before", "after"):
        parser.add_argument(name, metavar="EVALUATION", help=EVALUATION)
    parser.add_argument("--json", action="store_true", help="print the comparison as JSON")
    parser.set_defaults(action=_compare)


def find_evaluation(name: str, root: Path) -> Evaluation:
    """Return the evaluation that a name means: of a run that of a version, or the newest one.

    Raises:
        RunError: there is no such run, or it has no samples of that evaluation.
    """
    from hpcrl.errors import RunError
    from hpcrl.launch.manage.registry import find_run
    from hpcrl.observe.evaluations import Evaluation

    run, separator, version = name.rpartition("@")
    if separator and not version.isdecimal():
        raise RunError(f"{name}: expected RUN@VERSION with the steps that the policy was trained, such as {run}@40")
    found = find_run(run if separator else name, root)
    return Evaluation.read(found, int(version) if separator else None)


def _compare(arguments: argparse.Namespace) -> int:
    from json import dumps

    from hpcrl.observe.evaluations import compared
    from hpcrl.rundir.layout import default_root

    root = arguments.root or default_root()
    before, after = find_evaluation(arguments.before, root), find_evaluation(arguments.after, root)
    found = compared(before, after, after.success_reward)
    if arguments.json:
        print(dumps(_json(before, after, found), indent=2))
        return 0
    print("\n".join(one_line(line) for line in _lines(before, after, found)))
    return 0


def _json(before: Evaluation, after: Evaluation, found: Comparison) -> dict[str, Any]:
    return {
        "before": {"evaluation": str(before.run.path), "version": before.version, "prompts_of_its_own": found.only[0]},
        "after": {"evaluation": str(after.run.path), "version": after.version, "prompts_of_its_own": found.only[1]},
        "prompts": found.prompts,
        "solved": found.solved,
        "metrics": {
            name: {"before": found.means[name][0], "after": found.means[name][1], **asdict(difference)}
            for name, difference in found.differences.items()
        },
    }


def _lines(before: Evaluation, after: Evaluation, found: Comparison) -> list[str]:
    from hpcrl.observe.eval_report import aligned, column_of

    names = sorted(found.differences, key=lambda name: (_source(name) == "all", _source(name), len(name), name))
    several = len(found.prompts) > 2
    rows = [
        [
            f"{_source(name)} {column_of(name.rpartition('/')[2], found.solved)}",
            str(found.differences[name].prompts),
            *(f"{mean:.4g}" for mean in found.means[name]),
            *_cells(found.differences[name]),
        ]
        for name in names
        if several or _source(name) == "all"
    ]
    heads = ["", "prompts", before.name, after.name, "difference, 95 %", "p", "better", "same", "worse"]
    lines = aligned(heads, rows)
    for evaluation, count in zip((before, after), found.only, strict=True):
        if count:
            lines.append(f"{count} prompts are in {evaluation.name} only, and left out")
    if found.worst:
        lines += ["", "fell most:"]
    for mine, theirs in found.worst:
        response = mine.messages[-1]["content"] if mine.messages else ""
        lines.append(f"  {mine.mean_reward:.4g} -> {theirs.mean_reward:.4g}  {theirs.group_id}  {response:.80}")
    return lines


def _source(metric: str) -> str:
    return metric.split("/")[1]


def _cells(difference: ScoreDifference) -> list[str]:
    low, high = difference.interval
    interval = "" if difference.error != difference.error else f" [{low:+.3f}, {high:+.3f}]"
    p = f"{difference.p:.2g}" if difference.p > _LEAST_P else "≤ 0.0001"
    return [f"{difference.mean:+.4g}{interval}", p, *map(str, (difference.better, difference.same, difference.worse))]
