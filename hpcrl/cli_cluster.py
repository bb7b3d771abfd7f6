"""The commands that look at the cluster and at the nodes of a run: `hpcrl doctor`, `hpcrl attach`."""

from __future__ import annotations

import argparse
from pathlib import Path

from hpcrl.cli_run import add_run_command, named_run


def add_cluster(commands: argparse._SubParsersAction) -> None:
    """Add these commands to those of hpcrl."""
    text = "say what this cluster, its filesystem and a compute node mean for a run"
    doctor = commands.add_parser(
        "doctor",
        help=text,
        description=text[0].upper() + text[1:] + ". Exit code 1 if something is wrong.",
        epilog="example: hpcrl doctor slurm/sites/devcluster.toml --partition nograce",
    )
    doctor.add_argument("settings", nargs="*", metavar="FILE|KEY=VALUE", help="a site file, and settings of slurm")
    doctor.add_argument("--partition", metavar="P", help="where to look (default: slurm.partition, else the cluster's)")
    doctor.add_argument("--root", type=Path, help="slurm.root (default: of the files, else $HPCRL_ROOT, else ./runs)")
    doctor.add_argument("--wait", type=int, default=60, metavar="S", help="seconds to wait for a free node (60)")
    doctor.add_argument("--json", action="store_true", help="one JSON value")
    doctor.set_defaults(action=_doctor)
    text = "open a shell, or run a command, on a node of a running run, with its environment"
    attach = add_run_command(commands, "attach", text, _attach)
    attach.usage = "hpcrl attach [-h] [--root ROOT] [--node N] [--role {trainer,rollout}] RUN [-- COMMAND ...]"
    attach.epilog = "example: hpcrl attach my-run --role rollout -- nvidia-smi"
    attach.add_argument("--node", metavar="N", help="number of the node in the run, or its name (default: the first)")
    attach.add_argument("--role", choices=("trainer", "rollout"), help="the first node of this role")
    attach.set_defaults(command=[])


def _doctor(arguments: argparse.Namespace) -> int:
    from dataclasses import asdict
    from json import dumps

    from hpcrl.config import Config
    from hpcrl.config.load import read
    from hpcrl.launch.doctor.examine import examine
    from hpcrl.launch.registry import default_root

    files = [item for item in arguments.settings if "=" not in item]
    slurm = read(files, [item for item in arguments.settings if "=" in item], Config).tree.get("slurm", {})
    if arguments.partition:
        slurm["partition"] = arguments.partition
    findings = []
    for finding in examine(arguments.root or Path(slurm.get("root", default_root())), slurm, arguments.wait):
        findings.append(finding)
        if not arguments.json:
            print(f"{finding.level:8} {finding.subject:18} {finding.found}", flush=True)
            if finding.remedy:
                print(f"{'':8} {'':18} -> {finding.remedy}", flush=True)
    if arguments.json:
        print(dumps([asdict(finding) for finding in findings], indent=2))
    return int(any(finding.level == "error" for finding in findings))


def _attach(arguments: argparse.Namespace) -> int:
    from hpcrl.launch.attach import attach

    run = named_run(arguments)
    attach(run, arguments.node, arguments.role, arguments.command)
