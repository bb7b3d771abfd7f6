"""Pictures of what TensorBoard shows of runs, for docs/tensorboard.md: TensorBoard and a headless Chromium, each page once.

python benchmarks/tensorboard_pages.py FOLDER RUN...    wants Chromium, Debian's package chromium, and RUN as `hpcrl tensorboard` takes it
"""

from __future__ import annotations

import argparse
import shlex
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

PAGES = {"overview": "custom_scalars", "histograms": "histograms", "texts": "text", "hyperparameters": "hparams"}
_START_S, _DRAW_S = 60.0, 20.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("runs", nargs="+")
    parser.add_argument("--only", choices=PAGES, nargs="*", default=list(PAGES))
    arguments = parser.parse_args()
    chromium = shutil.which("chromium")
    if chromium is None:
        sys.exit("no chromium here; on Debian: apt-get install chromium")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [sys.executable, "-m", "hpcrl.cli.main", "tensorboard", *arguments.runs, "--port", str(port)]
    command = subprocess.run(words, check=True, capture_output=True, text=True).stdout.splitlines()[0]
    arguments.folder.mkdir(parents=True, exist_ok=True)
    server = subprocess.Popen(shlex.split(command), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait(f"http://127.0.0.1:{port}/data/runs")
        for page in arguments.only:
            picture = arguments.folder / f"tensorboard-{page}.png"
            draw(chromium, f"http://127.0.0.1:{port}/#{PAGES[page]}", picture)
            print(picture, picture.stat().st_size)
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


def draw(chromium: str, url: str, picture: Path) -> None:
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--window-size=1080,700"]
    budget = f"--virtual-time-budget={1000 * _DRAW_S:.0f}"
    subprocess.run(
        [chromium, *options, budget, f"--screenshot={picture}", url], check=True, capture_output=True, timeout=120
    )


if __name__ == "__main__":
    main()
