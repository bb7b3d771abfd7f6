"""`hpcrl report`: one HTML file that shows runs: whether they learn, their curves, what they do when, and samples."""

from __future__ import annotations

import argparse
from pathlib import Path

from hpcrl.cli._common import RUNS, add_root
from hpcrl.cli.samples import decoder_of
from hpcrl.text import one_line


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_root(parser)
    parser.add_argument("runs", nargs="+", metavar="RUN", help=RUNS)
    parser.add_argument("-o", "--output", type=Path, help="file that is written (RUN-report.html)")
    parser.set_defaults(action=_report)


def _report(arguments: argparse.Namespace) -> int:
    from hpcrl.launch.manage.registry import find_runs
    from hpcrl.observe.report.content import content_of
    from hpcrl.observe.report.page import page
    from hpcrl.rundir.commit import write_text
    from hpcrl.rundir.layout import default_root
    from hpcrl.units import readable_size

    root = arguments.root or default_root()
    runs = list(dict.fromkeys(run for name in arguments.runs for run in find_runs(name, root)))
    contents = [content_of(run, decoder_of) for run in runs]
    for content in contents:
        for finding in content["findings"]:
            print(one_line(f"{content['name']}  {finding['status']:4}  {finding['name']}: {finding['text']}"))
    path = arguments.output or Path(f"{runs[0].name}-report.html")
    write_text(path, page(contents))
    print(f"{path}: {readable_size(path.stat().st_size)}, opens in a browser without a server")
    return 0
