"""Two ranks that live as long as the tests and play what they are told: starting them costs more than most scenarios.

    ranks.play([("scenarios:variants", options), ...])     function of a module of tests.trainer, called with the world and the options

A scenario that fails ends them; the next one has new ones. What ends a rank on purpose, or wants ranks set up in another way, starts its own
(material.run_ranks).
"""

from __future__ import annotations

import importlib
import logging
import subprocess
import sys
import time
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

from hpcrl.rundir.commit import read_json, write_json
from hpcrl.runtime.signals import die_with_parent
from hpcrl.trainer.distributed import joined
from tests.trainer.material import environment, torchrun

_QUIET_S, _PATIENCE_S = 0.02, 300.0


class Ranks:
    """The tests' side."""

    def __init__(self, folder: Path, size: int = 2) -> None:
        self._folder, self._size = folder, size
        self._numbers = count()
        self._process: subprocess.Popen[bytes] | None = None

    def play(self, todo: Sequence[tuple[str, dict[str, Any]]]) -> str:
        """Play scenarios in order and return what the ranks logged; they must succeed."""
        if self._process is None or self._process.poll() is not None:
            self._start()
        number, said = next(self._numbers), self._log.stat().st_size
        write_json(self._folder / f"{number}.json", list(todo))
        deadline = time.monotonic() + _PATIENCE_S
        while not (self._folder / f"{number}.done").exists():
            assert self._process is not None
            ended = self._process.poll() is not None
            assert not ended or (self._folder / f"{number}.done").exists(), self._said(said)
            assert time.monotonic() < deadline, self._said(said)
            time.sleep(_QUIET_S)
        return self._said(said)

    def _start(self) -> None:
        first = next(self._numbers)
        self._log = self._folder / f"{first}.log"
        with self._log.open("wb") as log:
            command = torchrun(self._size, Path(__file__), self._folder, first + 1)
            self._process = subprocess.Popen(
                command, env=environment(), stdout=log, stderr=subprocess.STDOUT, preexec_fn=die_with_parent
            )

    def _said(self, start: int) -> str:
        return self._log.read_bytes()[start:].decode(errors="replace")

    def close(self) -> None:
        if self._process is not None and self._process.poll() is None:
            write_json(self._folder / f"{next(self._numbers)}.json", None)
            assert self._process.wait(300) == 0


def main(folder: Path, first: int) -> None:
    """A rank's side."""
    die_with_parent()
    logging.basicConfig(level=logging.INFO)
    with joined() as world:
        for number in count(first):
            path = folder / f"{number}.json"
            while not path.exists():
                time.sleep(_QUIET_S)
            todo = read_json(path)
            if todo is None:
                return
            for name, options in todo:
                module, _, scenario = name.partition(":")
                getattr(importlib.import_module(f"tests.trainer.{module}"), scenario)(world, options)
            world.barrier()
            if world.first:
                path.with_suffix(".done").touch()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
