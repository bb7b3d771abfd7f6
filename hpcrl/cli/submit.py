"""`hpcrl submit`: start a run, or a sweep, from TOML files."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from hpcrl.cli._common import announce, follow, split
from hpcrl.text import printable

if TYPE_CHECKING:
    from hpcrl.launch.layouts import AttemptLayout
    from hpcrl.launch.submit.executors import Submission


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Start a run from TOML files, merged from left to right, and overrides such as trainer.seed=1."
    parser.epilog = "example: hpcrl submit configs/quickstart.toml slurm/sites/devcluster.toml trainer.seed=1"
    parser.add_argument("settings", nargs="+", metavar="FILE|KEY=VALUE", help="configuration files, then overrides")
    parser.add_argument("--local", action="store_true", help="run on this machine, without Slurm")
    parser.add_argument("--dry-run", action="store_true", help="print configuration and plan; submit nothing")
    parser.add_argument("--script", action="store_true", help="with --dry-run: the batch scripts too")
    parser.add_argument("--follow", action="store_true", help="show progress until the run is over")
    parser.add_argument(
        "--sweep", action="append", default=[], metavar="KEY=V1,V2", help="one array element per value; repeatable"
    )
    parser.add_argument("--seeds", metavar="1,2,3|0:4", help="one array element per trainer.seed")
    parser.add_argument(
        "--sweep-file", type=Path, metavar="FILE", help="one array element per line: KEY=VALUE [KEY=VALUE ...]"
    )
    parser.set_defaults(action=_submit)


def _submit(arguments: argparse.Namespace) -> int:
    from dataclasses import replace

    from hpcrl.launch.doctor.disk_space import Sizes
    from hpcrl.launch.layouts import describe_layouts
    from hpcrl.launch.submit import submit
    from hpcrl.launch.submit.checked import checked_submission
    from hpcrl.launch.submit.models import folder_of
    from hpcrl.launch.submit.requests import describe_requests
    from hpcrl.launch.submit.sweep import elements
    from hpcrl.planning.disk import describe_disk
    from hpcrl.planning.layouts import memory_problems_apart

    files, overrides = split(arguments.settings)
    varied = elements(arguments.sweep, arguments.seeds, arguments.sweep_file)
    submission, warnings = checked_submission([Path(name) for name in files], overrides, varied)
    for warning in warnings:
        print(f"hpcrl: {printable(warning)}", file=sys.stderr)
    checks = (memory_problems_apart,)
    submission = replace(submission, elements=[replace(each, checks=checks) for each in submission.elements])
    if arguments.dry_run:
        _show_dry_run(submission, scripts=arguments.script)
        return 0
    if not arguments.local:
        submit.require_slurm()
    first = submission.elements[0]
    config = submission.planned
    disk = describe_disk(config, Sizes.of(config, folder_of))
    table = describe_layouts(first.every_layout, requests=bool(config.slurm.requests))
    requests = describe_requests(config.slurm, _layouts_of_requests(submission))
    print("\n".join([*table, *requests, *disk]))
    runs = submit.submit(submission, arguments.local)
    for run in runs:
        announce(run)
    return follow(runs) if arguments.follow else 0


def _layouts_of_requests(submission: Submission) -> dict[str, list[AttemptLayout]]:
    requests = submission.elements[0].config.slurm.requests
    return {name: submission.asked_by(name).elements[0].every_layout for name in requests}


def _show_dry_run(submission: Submission, *, scripts: bool) -> None:
    from hpcrl.launch.doctor.disk_space import Sizes
    from hpcrl.launch.layouts import describe_layouts
    from hpcrl.launch.nodes import describe_plan, make_plan
    from hpcrl.launch.pools import describe_evaluation, describe_pools, elastic_pools
    from hpcrl.launch.submit.executors import batch_scripts
    from hpcrl.launch.submit.models import folder_of
    from hpcrl.launch.submit.requests import describe_requests
    from hpcrl.planning.disk import describe_disk

    first = submission.elements[0]
    config = submission.planned
    print("# configuration: what is not the default\n" + first.config.to_toml(only_changed=True))
    print("# plan")
    for run, element in zip(submission.runs, submission.elements, strict=True):
        print(f"{run.path}  {' '.join(element.overrides)}".rstrip())
    disk = describe_disk(config, Sizes.of(config, folder_of))
    jobs = [
        *describe_pools(elastic_pools(config), config),
        *describe_evaluation(config),
        *describe_requests(config.slurm, _layouts_of_requests(submission)),
    ]
    table = describe_layouts(first.every_layout, requests=bool(config.slurm.requests))
    print("\n".join([*table, *describe_plan(make_plan(config)), *jobs, *disk]))
    for title, script in batch_scripts(submission).items() if scripts else ():
        print(f"# {title}\n{script}")
    print("dry run: nothing was submitted" + ("" if scripts else "; --script shows the batch scripts"))
