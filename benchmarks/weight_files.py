"""How fast a node reads a version's files: into the page cache in several threads, and from it by a rank that digests all tensors or a share.

    python benchmarks/weight_files.py [--gib N] [--repetitions N] [--directory DIR]

GB/s, medians with the least and the most; the ways take turns. The files are dropped from the page cache before each fetch, and in it before each load.
The last line is the same as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from statistics import median

import torch
from safetensors.torch import save_file

from hpcrl.data.weight_files import WeightReader
from hpcrl.rollout.weights.fetch import read_ahead

_FILES, _TENSORS, _RANKS, _PART = 4, 16, 8, 8 << 20


def in_one_thread(files: Sequence[Path]) -> None:
    buffer = bytearray(_PART)
    for path in files:
        with path.open("rb", buffering=0) as opened:
            while opened.readinto(buffer):
                pass


def load(directory: Path, digested: int) -> None:
    """Read all tensors, and digest one of `digested`."""
    names = [f"{file}.{at}" for file in range(_FILES) for at in range(_TENSORS)]
    undigested = {name for at, name in enumerate(names) if at % digested}
    with closing(WeightReader(directory, undigested=undigested)) as reader:
        for _ in reader:
            pass


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gib", type=float, default=2.0)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--directory", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.directory) as place:
        directory, size = Path(place), int(given.gib * 2**30) // (_FILES * _TENSORS)
        for file in range(_FILES):
            tensors = {f"{file}.{at}": torch.randint(256, (size,), dtype=torch.uint8) for at in range(_TENSORS)}
            save_file(tensors, directory / f"{file}.safetensors")
        os.sync()
        files = sorted(directory.iterdir())
        ways: dict[str, tuple[bool, Callable[[], object]]] = {
            "fetch in one thread": (False, lambda: in_one_thread(files)),
            "fetch": (False, lambda: read_ahead(files)),
            "load, all digested": (True, lambda: load(directory, 1)),
            f"load, one of {_RANKS} digested": (True, lambda: load(directory, _RANKS)),
        }
        found = defaultdict[str, list[float]](list)
        for _ in range(given.repetitions):
            for name, (cached, way) in ways.items():
                _prepare(files, cached)
                began = time.monotonic()
                way()
                found[name].append(_FILES * _TENSORS * size / 1e9 / (time.monotonic() - began))
    for name, speeds in found.items():
        print(f"{name:24} {median(speeds):6.2f} GB/s ({min(speeds):.2f} to {max(speeds):.2f})")
    print(json.dumps(found))


def _prepare(files: Sequence[Path], cached: bool) -> None:
    if cached:
        in_one_thread(files)
        return
    for path in files:
        with path.open("rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


if __name__ == "__main__":
    main()
