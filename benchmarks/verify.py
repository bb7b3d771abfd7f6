"""How fast a committed directory is verified, as a run does when it resumes.

    python benchmarks/verify.py [--files N] [--mib M] [--repetitions R] [--directory DIR]

Files of random bytes, read before, so that the page cache holds them where it has room. Figures are medians of wall-clock seconds.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path
from statistics import median

from hpcrl.rundir.checkpoints import size_of
from hpcrl.rundir.commit import committed_directory, verify

_BLOCK = 1 << 24


def measure(files: int, mib: int, repetitions: int, target: Path) -> None:
    with committed_directory(target, 1) as directory:
        block = os.urandom(_BLOCK)
        for number in range(files):
            with (directory / f"{number}.bin").open("wb") as file:
                for _ in range((mib << 20) // _BLOCK):
                    file.write(block)
    seconds, gigabytes = list[float](), size_of(verify(target)) / 1e9
    for _ in range(repetitions):
        began = time.monotonic()
        verify(target)
        seconds.append(time.monotonic() - began)
    print(f"{files} files, {gigabytes:.2f} GB, {os.cpu_count()} cores")
    for name, value in (("median", median(seconds)), ("fastest", min(seconds)), ("slowest", max(seconds))):
        print(f"{name:8} {value:.2f} s, {gigabytes / value:.2f} GB/s")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--files", type=int, default=4)
    parser.add_argument("--mib", type=int, default=512, help="of each file, a multiple of 16")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--directory", help="on the filesystem to measure (default: the temporary one)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.directory) as place:
        measure(arguments.files, arguments.mib, arguments.repetitions, Path(place) / "committed")


if __name__ == "__main__":
    main()
