"""`hpcrl doctor`: check this cluster, its filesystem and a compute node for a run."""

from __future__ import annotations

import argparse
from pathlib import Path

from hpcrl.cli._common import split
from hpcrl.text import printable


def add_arguments(parser: argparse.ArgumentParser) -> None:
    assert parser.description
    parser.description += " Exit code 1 if something is wrong."
    parser.description += " Of a MODEL, a directory or an id on the hub: its tokenizer and chat template alone."
    parser.epilog = "example: hpcrl doctor slurm/sites/devcluster.toml --partition nograce"
    parser.add_argument(
        "settings", nargs="*", metavar="FILE|KEY=VALUE|MODEL", help="a site file, and settings; or a model"
    )
    parser.add_argument("--partition", metavar="P", help="where to look (default: slurm.partition, else the cluster's)")
    parser.add_argument("--root", type=Path, help="slurm.root (default: of the files, else $HPCRL_ROOT, else ./runs)")
    parser.add_argument("--wait", type=int, default=60, metavar="S", help="seconds to wait for a free node (60)")
    parser.add_argument("--json", action="store_true", help="one JSON value")
    parser.set_defaults(action=_doctor)


def _doctor(arguments: argparse.Namespace) -> int:
    from dataclasses import asdict
    from itertools import chain
    from json import dumps

    from hpcrl.config import Config
    from hpcrl.config.load import read
    from hpcrl.config.sections.generator import ChatTemplateConfig
    from hpcrl.config.sections.model import Pretrained
    from hpcrl.config.validate import build
    from hpcrl.launch.doctor.examine import examine
    from hpcrl.launch.doctor.tokenizer import of_tokenizer
    from hpcrl.rundir.layout import default_root

    models = [one for one in arguments.settings if "=" not in one and not one.endswith(".toml")]
    files, overrides = split([one for one in arguments.settings if one not in models])
    tree = read(files, overrides, Config).tree
    slurm = tree.get("slurm", {})
    if arguments.partition:
        slurm["partition"] = arguments.partition
        slurm.pop("requests", None)
    if models:
        generator = tree.get("generator", {})
        template = build(ChatTemplateConfig, generator.get("chat_template", {}))
        options = generator.get("chat_template_kwargs", {})
        found = chain.from_iterable(of_tokenizer(Pretrained(model), template, options) for model in models)
    else:
        found = examine(arguments.root or Path(slurm.get("root") or default_root()), slurm, arguments.wait)
    findings = []
    for finding in found:
        findings.append(finding)
        if not arguments.json:
            print(printable(f"{finding.level:8} {finding.subject:22} {finding.found}"), flush=True)
            if finding.remedy:
                print(printable(f"{'':8} {'':22} -> {finding.remedy}"), flush=True)
    if arguments.json:
        print(dumps([asdict(finding) for finding in findings], indent=2))
    return int(any(finding.level == "error" for finding in findings))
