"""`hpcrl report`: write one HTML file about runs: verdict, curves, timeline and samples."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from hpcrl.cli._common import RUNS, add_root
from hpcrl.cli.samples import decoder_of
from hpcrl.text import one_line

if TYPE_CHECKING:
    from hpcrl.rundir.layout import Run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_root(parser)
    parser.add_argument("runs", nargs="+", metavar="RUN", help=RUNS)
    parser.add_argument("-o", "--output", type=Path, help="file that is written (RUN-report.html)")
    parser.add_argument("--live", action="store_true", help="serve it instead, and follow the runs; Ctrl-C ends it")
    parser.add_argument("--port", type=int, default=0, help="of the server on 127.0.0.1 (default: any that is free)")
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

    from hpcrl.observe.report.live import LiveReport

    live = LiveReport(runs, decoder_of, port)
    print(f"{live.url}\nfrom your own machine: ssh -L {live.port}:127.0.0.1:{live.port} {gethostname()}", flush=True)
    with suppress(KeyboardInterrupt):
        live.serve()
    return 0
