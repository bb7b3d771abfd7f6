"""Checkpoints of a stranger: real ones whose index runs code where it is unpickled, and loads as before."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

from hpcrl.rundir.checkpoint_index import INDEX
from hpcrl.rundir.commit import COMMIT, MANIFEST, committed_by, digest_of, listing, read_json, write_json, write_text

REFUSED = r"\.metadata names builtins\.eval, which no checkpoint of hpcrl does: .* Do not use this checkpoint"


class _Runs:
    def __init__(self, index: bytes, marker: Path) -> None:
        self._code = f"open({str(marker)!r}, 'w').close() or __import__('pickle').loads({index!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return eval, (self._code,)


def make_hostile(checkpoint: Path, folder: str = "") -> Path:
    """Let the index in a folder of a checkpoint run code, and the manifest and the mark fit it; return the file that the code makes."""
    index, marker = checkpoint / folder / INDEX, checkpoint.parent / f"{checkpoint.name}-ran"
    index.write_bytes(pickle.dumps(_Runs(index.read_bytes(), marker)))
    if (by := committed_by(checkpoint)) is not None:
        files = listing(checkpoint, lambda path: path.name not in (MANIFEST, COMMIT))
        text = json.dumps((read_json(checkpoint / MANIFEST) or {}) | {"files": files})
        write_text(checkpoint / MANIFEST, text)
        write_json(checkpoint / COMMIT, {"attempt": by, "manifest": digest_of(text.encode())})
    return marker
