"""Two ranks that live as long as the tests and play what they are told: starting them costs more than most scenarios.

    ranks.play([("scenarios:variants", options), ...])     function of a module of tests.trainer, called with the world and the options

A scenario that fails ends them; the next one has new ones. What ends a rank on purpose, or wants ranks set up in another way, starts its own
(launcher.run_ranks).
"""

from __future__ import annotations

import importlib
import logging
import sys
import time
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

from hpcrl.rundir.commit import read_json, write_json
from hpcrl.trainer.distributed import joined
from tests.trainer.launcher import Started, start_ranks

_QUIET_S, _PATIENCE_S = 0.02, 300.0


class Ranks:
    """The tests' side."""

    def __init__(self, folder: Path, size: int = 2) -> None:
        self._folder, self._size = folder, size
        self._numbers = count()
        self._started: Started | None = None

    def play(self, todo: Sequence[tuple[str, dict[str, Any]]]) -> str:
        """Play scenarios in order and return what the ranks logged; they must succeed."""
        if self._started is None or self._started.poll() is not None:
            self._started = self._start()
        number, begin = next(self._numbers), self._started.err.stat().st_size
        done = self._folder / f"{number}.done"
        write_json(done.with_suffix(".json"), list(todo))
        deadline = time.monotonic() + _PATIENCE_S
        while not done.exists():
            ended = self._started.poll() is not None
            assert not ended or done.exists(), self._log(begin)
            assert time.monotonic() < deadline, self._log(begin)
            time.sleep(_QUIET_S)
        return self._log(begin)

    def _start(self) -> Started:
        first = next(self._numbers)
        folder = self._folder / str(first)
        folder.mkdir()
        return start_ranks(folder, self._size, self._folder, first + 1, script="trainer/ranks.py")

    def _log(self, begin: int) -> str:
        assert self._started is not None
        return self._started.err.read_bytes()[begin:].decode(errors="replace")

    def close(self) -> None:
        """Let them end."""
        if self._started is not None and self._started.poll() is None:
            write_json(self._folder / f"{next(self._numbers)}.json", None)
            deadline = time.monotonic() + _PATIENCE_S
            while (code := self._started.poll()) is None:
                assert time.monotonic() < deadline, self._log(0)
                time.sleep(_QUIET_S)
            assert code == 0, self._log(0)


def main(folder: Path, first: int) -> None:
    """A rank's side."""
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
