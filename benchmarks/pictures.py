"""Pictures of what TensorBoard and reports show of runs, for README and docs: a headless Chromium, each page once.

python benchmarks/pictures.py FOLDER RUN...    wants Chromium, Debian's package chromium, and RUN as `hpcrl tensorboard` takes it
"""

from __future__ import annotations

import argparse
import shlex
import shutil
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

PAGES = {"overview": "custom_scalars", "histograms": "histograms", "texts": "text", "hyperparameters": "hparams"}
REPORT = "report"
_START_S, _DRAW_S = 60.0, 20.0
_LOW, _HIGH = (1080, 700), (1080, 1180)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("runs", nargs="+")
    parser.add_argument("--only", choices=[*PAGES, REPORT], nargs="*", default=[*PAGES, REPORT])
    arguments = parser.parse_args()
    chromium = shutil.which("chromium")
    if chromium is None:
        sys.exit("no chromium here; on Debian: apt-get install chromium")
    arguments.folder.mkdir(parents=True, exist_ok=True)
    if REPORT in arguments.only:
        with tempfile.TemporaryDirectory() as place:
            page = Path(place, "report.html")
            hpcrl("report", *arguments.runs, "-o", str(page))
            draw(chromium, page.as_uri(), arguments.folder / "report.png", _HIGH)
    if pages := {page: PAGES[page] for page in arguments.only if page in PAGES}:
        with serving(arguments.runs) as url:
            for page, anchor in pages.items():
                draw(chromium, f"{url}/#{anchor}", arguments.folder / f"tensorboard-{page}.png", _LOW)


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


def draw(chromium: str, url: str, picture: Path, size: tuple[int, int]) -> None:
    width, height = size
    options = [
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        f"--window-size={width},{height}",
    ]
    budget = f"--virtual-time-budget={1000 * _DRAW_S:.0f}"
    subprocess.run(
        [chromium, *options, budget, f"--screenshot={picture}", url], check=True, capture_output=True, timeout=120
    )
    print(picture, picture.stat().st_size)


if __name__ == "__main__":
    main()
