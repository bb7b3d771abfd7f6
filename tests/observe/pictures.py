"""Pictures of what TensorBoard and reports show of runs, for README and docs: a headless Chromium, each page once.

python -m tests.observe.pictures FOLDER RUN... [--only NAME...]    wants Chromium (`make chromium`), and RUN as `hpcrl tensorboard` takes it
"""

from __future__ import annotations

import argparse
import shlex
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.observe.browser import Browser, browser

PAGES = {"overview": "custom_scalars", "histograms": "histograms", "texts": "text", "hyperparameters": "hparams"}
REPORT = {"report": "overview", "report-curves": "curves", "report-timeline": "timeline", "report-samples": "samples"}
_START_S, _DRAW_S = 60.0, 5.0
_SIZE = (1080, 900)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("runs", nargs="+")
    parser.add_argument("--only", choices=[*PAGES, *REPORT], nargs="*", default=[*PAGES, *REPORT])
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    sections = {name: REPORT[name] for name in arguments.only if name in REPORT}
    pages = {page: PAGES[page] for page in arguments.only if page in PAGES}
    with browser() as window:
        if sections:
            with tempfile.TemporaryDirectory() as place:
                report = Path(place, "report.html")
                hpcrl("report", *arguments.runs, "-o", str(report))
                for name, section in sections.items():
                    draw(window, report.as_uri(), arguments.folder / f"{name}.png", section)
        if pages:
            with serving(arguments.runs) as url:
                for page, anchor in pages.items():
                    draw(window, f"{url}/#{anchor}", arguments.folder / f"tensorboard-{page}.png")


def hpcrl(*words: str) -> str:
    command = [sys.executable, "-m", "hpcrl.cli.main", *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@contextmanager
def serving(runs: list[str]) -> Iterator[str]:
    """Have TensorBoard serve runs."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = hpcrl("tensorboard", *runs, "--port", str(port)).splitlines()[0]
    server = subprocess.Popen(shlex.split(command), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait(f"http://127.0.0.1:{port}/data/runs")
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait()


def wait(url: str) -> None:
    """Return once TensorBoard has read its runs."""
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(url) as answer:
                if answer.read().strip() != b"[]":
                    return
        except urllib.error.URLError:
            pass
        time.sleep(0.5)
    sys.exit(f"nothing at {url} after {_START_S:.0f} s")


def draw(window: Browser, url: str, picture: Path, section: str = "") -> None:
    window.open(url, *_SIZE)
    time.sleep(_DRAW_S)
    if section:
        window.run("document.getElementById(arguments[0]).scrollIntoView()", section)
        time.sleep(1.0)
    window.screenshot(picture)
    print(picture, picture.stat().st_size)


if __name__ == "__main__":
    main()
