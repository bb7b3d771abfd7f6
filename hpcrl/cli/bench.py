"""`hpcrl bench`: measure a cluster by a run, and compare such measurements."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpcrl.cli._common import positive, split
from hpcrl.text import one_line, printable

if TYPE_CHECKING:
    from hpcrl.launch.bench.folder import Bench, Planned
    from hpcrl.rundir.layout import Run

_WORSE = 0.2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "hpcrl bench [-h] FILE... [KEY=VALUE...] | report RUN | compare A... B  [options]"
    assert parser.description
    parser.description += (
        " report writes the report of such a run again. compare shows two reports, each a JSON file or a run; of several before the last one, their medians."
        f" Exit code 1: a figure is out of line, or in the last report worse by more than {_WORSE:.0%}."
    )
    parser.epilog = "example: hpcrl bench my-site.toml --nodes 2 --minutes 30"
    parser.add_argument("settings", nargs="*", metavar="FILE|KEY=VALUE", help="files of the site, then overrides")
    parser.add_argument(
        "--nodes", type=positive, default=2, metavar="N", help="nodes (2); on one trainer and engine take turns"
    )
    parser.add_argument(
        "--minutes", type=positive, default=30, metavar="M", help="end after so many at the latest (30)"
    )
    parser.add_argument(
        "--model", metavar="PATH", help="policy (default: random weights that fit, or a tiny model without GPUs)"
    )
    parser.add_argument("--local", action="store_true", help="on this machine, without Slurm")
    parser.add_argument(
        "--root", type=Path, help="where report and compare look for runs (default: $HPCRL_ROOT, else ./runs)"
    )
    parser.add_argument(
        "-o", "--output", type=Path, default=Path(), metavar="DIR", help="where NAME.html and NAME.json are written (.)"
    )
    parser.set_defaults(action=_bench)


def _bench(arguments: argparse.Namespace) -> int:
    from hpcrl.errors import ConfigError
    from hpcrl.launch.manage.registry import find_run
    from hpcrl.rundir.layout import default_root

    words, root = arguments.settings, arguments.root or default_root()
    if words[:1] == ["compare"]:
        if len(words) < 3:
            raise ConfigError("hpcrl bench compare: expected two JSON files or runs, or more")
        return _compare(words[1:-1], words[-1], root)
    if words[:1] == ["report"]:
        if len(words) != 2:
            raise ConfigError("hpcrl bench report: expected one run")
        return _report(find_run(words[1], root), arguments.output)
    return _measure(arguments)


def _measure(arguments: argparse.Namespace) -> int:
    from dataclasses import asdict
    from time import strftime

    from hpcrl.cli._common import announce
    from hpcrl.launch.bench.experiment import make_experiment
    from hpcrl.launch.bench.measure import measure_nodes
    from hpcrl.launch.bench.survive import survive
    from hpcrl.launch.submit import submit
    from hpcrl.launch.submit.checked import checked_submission
    from hpcrl.rundir.commit import write_json

    if not arguments.local:
        submit.require_slurm()
    files, overrides = split(arguments.settings)
    name = f"bench-{strftime('%m%d-%H%M%S')}"
    bench, config = make_experiment(
        name, [Path(file) for file in files], overrides, nodes=arguments.nodes, minutes=arguments.minutes, model=arguments.model,
    )  # fmt: skip
    _say(f"measuring {arguments.nodes} node(s): network, filesystem, devices (log: {bench.log})")
    try:
        measure_nodes(bench, config, arguments.nodes, local=arguments.local)
        write_json(bench.plan, asdict(_estimate(bench)))
        submission, warnings = checked_submission(config, [], [[]])
    except BaseException:
        bench.clear()
        raise
    for warning in warnings:
        print(f"hpcrl: {printable(warning)}", file=sys.stderr)
    (run,) = submit.submit(submission, arguments.local)
    announce(run)
    try:
        survive(run, bench, 60 * arguments.minutes, _say)
    except KeyboardInterrupt:
        print(
            f"\nThe run goes on. hpcrl cancel {run.path} ends it, hpcrl bench report {run.path} reports what there is."
        )
        return 0
    return _report(run, arguments.output)


def _say(text: str) -> None:
    print(one_line(text), flush=True)


def _estimate(bench: Bench) -> Planned:
    """Return the memory of a trainer rank as `hpcrl plan` estimates it.

    That is a process of its own: what this one has imported of transformers for the checks of a submission works without torch.
    """
    import json
    import subprocess

    from hpcrl.launch.bench.folder import Planned

    command = [sys.executable, "-m", "hpcrl.cli.main", "plan", str(bench.config), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return Planned(0, one_line(done.stderr.strip().removeprefix("hpcrl: ")))
    plan = json.loads(done.stdout)
    if not plan["memory"]:
        return Planned(0, "; ".join(plan["unknown"]))
    return Planned(plan["memory"][0]["total"], "without temporary memory of kernels, communication and allocator")


def _report(run: Run, output: Path) -> int:
    from json import dumps

    from hpcrl.launch.bench.figures import bench_report, worst
    from hpcrl.launch.bench.page import bench_page, lines_of
    from hpcrl.rundir.commit import write_text

    report = bench_report(run)
    for line in lines_of(report):
        _say(line)
    output.mkdir(parents=True, exist_ok=True)
    page, values = output / f"{run.name}.html", output / f"{run.name}.json"
    write_text(page, bench_page(report))
    write_text(values, dumps(report, indent=2) + "\n")
    print(f"wrote {page} and {values}")
    return int(bool(worst(report["figures"])))


def _compare(earlier: Sequence[str], after: str, root: Path) -> int:
    from hpcrl.launch.bench.page import changes, medians
    from hpcrl.observe.eval_report import aligned

    before = earlier[0] if len(earlier) == 1 else f"median of {len(earlier)}"
    found = changes(medians([_read(name, root) for name in earlier]), _read(after, root))
    rows = [[one.title, one.before, one.after, _share(one.worse)] for one in found]
    for line in aligned(["", before, after, ""], rows):
        _say(line)
    return int(any(one.worse > _WORSE for one in found))


def _share(worse: float) -> str:
    return "the same" if not worse else f"{'worse' if worse > 0 else 'better'} by {abs(worse):.1%}"


def _read(name: str, root: Path) -> dict[str, Any]:
    from hpcrl.launch.bench.figures import bench_report
    from hpcrl.launch.bench.page import parse_report
    from hpcrl.launch.manage.registry import find_run

    path = Path(name)
    if path.is_file():
        return parse_report(path.read_bytes(), path)
    return bench_report(find_run(name, root))
