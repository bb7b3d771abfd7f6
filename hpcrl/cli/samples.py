"""`hpcrl samples`: show prompts, responses and rewards of a run, or its trained rows."""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING

from hpcrl.cli._common import add_run, named_run, positive
from hpcrl.text import one_line, printable

if TYPE_CHECKING:
    from hpcrl.data.rollouts import Rollout, Segment
    from hpcrl.rundir.layout import Run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run(parser)
    parser.add_argument(
        "--step", type=int, metavar="N", help="that trained them, or version with --eval (default: the newest)"
    )
    order = parser.add_mutually_exclusive_group()
    for name, text in (
        ("worst", "lowest reward first"),
        ("best", "highest reward first"),
        ("random", "in a random order"),
    ):
        order.add_argument(f"--{name}", dest="order", action="store_const", const=name, help=text)
    parser.add_argument("-n", type=positive, default=3, metavar="K", help="how many (3)")
    parser.add_argument("--seed", type=int, default=0, help="of --random (0)")
    parser.add_argument("--eval", action="store_true", help="those of an evaluation")
    parser.add_argument("--json", action="store_true", help="a JSON list, one object per sample")
    parser.set_defaults(action=_samples)


def _samples(arguments: argparse.Namespace) -> int:
    from hpcrl.data.rollouts import find_samples

    run = named_run(arguments)
    at, count, shown = find_samples(
        run, arguments.step, evaluated=arguments.eval, order=arguments.order, seed=arguments.seed, most=arguments.n
    )
    if arguments.json:
        _print_json(run, shown)
        return 0
    order = f", {arguments.order}{' first' if arguments.order != 'random' else f', seed {arguments.seed}'}"
    of = f"the evaluation of version {at}" if arguments.eval else f"step {at}"
    print(f"{run.name}: {len(shown)} of {count} samples of {of}{order if arguments.order else ''}")
    for rollout in shown:
        print("\n".join(["", *_lines(rollout)]))
        for path in run.pictures_of(rollout.name):
            print(one_line(f"--- picture {path}"))
    return 0


def _print_json(run: Run, rollouts: list[Rollout]) -> None:
    from dataclasses import asdict
    from json import dumps

    found = [{**asdict(one), "pictures": [str(path) for path in run.pictures_of(one.name)]} for one in rollouts]
    print(printable(dumps(found, indent=2, ensure_ascii=False)))


def _lines(rollout: Rollout) -> list[str]:
    if rollout.row is not None:
        answer = f", {rollout.answer}" if rollout.answer else ""
        title = f"=== {rollout.name}: row {rollout.row} of {rollout.data_source}{answer}"
        return [one_line(title), *(line for part in rollout.parts for line in part_lines(part, _heading(part, 0)))]
    was = f" (was {rollout.raw_reward:g})" if rollout.raw_reward is not None else ""
    facts = [f"reward {rollout.reward:g}{was}", rollout.stop_reason]
    if rollout.versions:
        oldest, newest = rollout.versions
        facts.append(f"version {oldest}" if oldest == newest else f"versions {oldest} to {newest}")
    facts += [f"replica {rollout.replica}", f"source {rollout.data_source}"]
    facts += [f"{name} {value:g}" for name, value in rollout.env_metrics.items()]
    lines, turn = [one_line(f"=== {rollout.name}: {', '.join(facts)}")], 0
    for part in rollout.parts:
        turn += part.by == "policy"
        lines += part_lines(part, _heading(part, turn))
    truth = ["--- ground truth", *printable(rollout.ground_truth).split("\n")] if rollout.ground_truth else []
    return lines + truth


def part_lines(part: Segment, heading: str) -> list[str]:
    """Return a part of a sample with its heading. Where a terminal shows it, what is trained is green."""
    lines = [one_line(f"--- {heading}"), *printable(part.text).split("\n")]
    coloured = part.trained and sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    return [f"\x1b[32m{line}\x1b[0m" for line in lines] if coloured else lines


def _heading(part: Segment, turn: int) -> str:
    facts = [f"turn {turn}, policy" if part.by == "policy" else part.by]
    facts += [f"as {part.role}"] if part.role else []
    if part.tokens is not None:
        facts.append(f"{part.tokens} tokens")
    if part.by == "policy" and part.trained is not None and part.trained != part.tokens:
        facts.append(f"{part.trained} trained" if part.trained else "not trained")
    if part.reward:
        facts.append(f"reward {part.reward:g}")
    return ", ".join(facts)
