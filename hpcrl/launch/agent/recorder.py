"""Reads NCCL's flight recorder: each rank records its last collectives, and writes them when one hangs.

torch writes a file per rank when a collective times out, and when something is written to the rank's named pipe. Which rank came too late, or
called something else, is what `torchfrtrace DIRECTORY`, a program of torch, reads from all of them. gloo's ranks remember too, but write nothing.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from hpcrl.rundir.commit import make_directory

_COLLECTIVES = 2000
_FILES = "rank"


class FlightRecorder:
    """Of the ranks of one node.

    Args:
        pipes: directory on this node for the named pipes.
        records: directory of the run for what ranks write.
    """

    def __init__(self, pipes: Path, records: Path) -> None:
        self._pipes, self._records = pipes, records
        pipes.mkdir()

    def prepare(self) -> dict[str, str]:
        """Create the directory of the files, which torch does not; return torch's environment variables that enable the recorder."""
        make_directory(self._records)
        recorded = os.environ.get("TORCH_FR_BUFFER_SIZE") or str(_COLLECTIVES)
        return {
            "TORCH_FR_BUFFER_SIZE": recorded,
            "TORCH_NCCL_TRACE_BUFFER_SIZE": recorded,  # ProcessGroupNCCL looks at this one, for its pipe and its dump
            "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
            "TORCH_NCCL_DEBUG_INFO_PIPE_FILE": str(self._pipes / _FILES),
            "TORCH_FR_DUMP_TEMP_FILE": str(self._records / _FILES),
        }

    def write(self) -> None:
        """Let each rank of this node write its file, which takes a second."""
        for pipe in self._pipes.iterdir():
            with suppress(OSError):  # its rank has ended
                number = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
                os.write(number, b"1")
                os.close(number)

    def found(self) -> str:
        """Return where the files are, as the end of a message; empty where no rank has written one."""
        if not (self._records.is_dir() and any(self._records.iterdir())):
            return ""
        return f"; the last collectives of the ranks: {self._records} (torchfrtrace {self._records})"
