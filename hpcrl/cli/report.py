"""`hpcrl report`: write one HTML file about runs: verdict, curves, timeline and samples."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from hpcrl.cli._common import RUNS, add_root
from hpcrl.text import one_line

if TYPE_CHECKING:
    from hpcrl.rundir.layout import Run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_root(parser)
    parser.add_argument("runs", nargs="*", metavar="RUN", help=RUNS)
    parser.add_argument(
        "--project",
        metavar="NAME|DIR",
        help="all runs of a project, or of a root, that you may read: one table, with a link to each run's report",
    )
    parser.add_argument("-o", "--output", type=Path, help="file that is written (RUN-report.html)")
    parser.add_argument("--live", action="store_true", help="serve it instead, and follow the runs; Ctrl-C ends it")
    parser.add_argument("--port", type=int, default=0, help="of the server on 127.0.0.1 (default: any that is free)")
    parser.set_defaults(action=_report)


def _report(arguments: argparse.Namespace) -> int:
    from hpcrl.errors import ConfigError

    if bool(arguments.runs) == bool(arguments.project):
        raise ConfigError("name runs, or a project with --project")
    return _report_project(arguments) if arguments.project else _report_runs(arguments)


def _report_project(arguments: argparse.Namespace) -> int:
    from hpcrl.errors import ConfigError, RunError
    from hpcrl.launch.manage.registry import all_runs
    from hpcrl.observe.report.page import project_page
    from hpcrl.observe.report.project import project_of
    from hpcrl.observe.trial.plan import all_trials
    from hpcrl.rundir.commit import write_text
    from hpcrl.rundir.layout import default_root, expanded

    if arguments.live:
        raise ConfigError("--live follows runs, and a project's page is of one moment: leave out one of them")
    root, name = (arguments.root or default_root()).absolute(), arguments.project
    wanted = [run for run in all_runs(root) if run.project == name]
    if not wanted and (folder := expanded(name).absolute()).is_dir():
        root, name = folder, folder.name
        wanted = all_runs(folder)
        if not wanted:  # the folder of one project, not of all
            root = folder.parent
            wanted = [run for run in all_runs(root) if run.project == name]
    if not wanted:
        raise RunError(f"no run of a project {name!r} under {root} that you may read")
    projects = {run.project for run in wanted}
    runs, trials = wanted, [trial for trial in all_trials(root) if trial.project.name in projects]
    path = arguments.output or Path(f"{name}-report.html")
    reports = path.with_suffix("")
    made = {run: _write_report(run, reports) for run in runs}
    write_text(path, project_page(project_of(name, runs, trials, lambda run: made[run])))
    print(one_line(f"{path}: {len(runs)} runs, {len(trials)} trials; their reports are in {reports}/, without samples"))
    return 0


def _write_report(run: Run, folder: Path) -> Path | None:
    """Write the report of a run without its samples, unless the run is as it was when that was written.

    Returns:
        Its path relative to the page; None where the run cannot be read.
    """
    import os

    from hpcrl.errors import HpcrlError, RunError
    from hpcrl.observe.report.content import Decode, content_of
    from hpcrl.observe.report.page import page
    from hpcrl.observe.report.project import last_change
    from hpcrl.rundir.commit import write_text

    path, changed = folder / run.project / f"{run.name}.html", last_change(run)
    relative = path.relative_to(folder.parent)
    if changed and path.is_file() and path.stat().st_mtime_ns == changed:
        return relative

    def no_decoder(run: Run) -> Decode:
        raise RunError(f"hpcrl report {run.name} shows the samples")

    try:
        text = page([content_of(run, no_decoder, with_samples=False)])
    except (HpcrlError, OSError, ValueError):  # the table has the error
        return None
    write_text(path, text)
    if changed:
        os.utime(path, ns=(changed, changed))
    return relative


def _report_runs(arguments: argparse.Namespace) -> int:
    from hpcrl.data.rollouts import decoder_of
    from hpcrl.launch.manage.registry import find_runs
    from hpcrl.observe.report.content import content_of
    from hpcrl.observe.report.page import page
    from hpcrl.rundir.commit import write_text
    from hpcrl.rundir.layout import default_root
    from hpcrl.units import readable_size

    root = arguments.root or default_root()
    runs = list(dict.fromkeys(run for name in arguments.runs for run in find_runs(name, root)))
    if arguments.live:
        return _serve(runs, arguments.port)
    contents = [content_of(run, decoder_of) for run in runs]
    for content in contents:
        for finding in content["findings"]:
            print(one_line(f"{content['name']}  {finding['status']:4}  {finding['name']}: {finding['text']}"))
    path = arguments.output or Path(f"{runs[0].name}-report.html")
    write_text(path, page(contents))
    print(f"{path}: {readable_size(path.stat().st_size)}, opens in a browser without a server")
    return 0


def _serve(runs: list[Run], port: int) -> int:
    from contextlib import suppress
    from socket import gethostname

    from hpcrl.data.rollouts import decoder_of
    from hpcrl.observe.report.live import LiveReport

    live = LiveReport(runs, decoder_of, port)
    print(f"{live.url}\nfrom your own machine: ssh -L {live.port}:127.0.0.1:{live.port} {gethostname()}", flush=True)
    with suppress(KeyboardInterrupt):
        live.serve()
    return 0
