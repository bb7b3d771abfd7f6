"""Uploads committed directories of a run to a store: python -m hpcrl.upload.send RUN STORE

It goes on until its standard input ends, and then until the store has everything that is due. A process of its own, because a store may be
slow, hang or be away.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from hpcrl.config import Config
from hpcrl.config.sections.upload import UploadConfig
from hpcrl.errors import HpcrlError
from hpcrl.rundir.checkpoints import line_of
from hpcrl.rundir.commit import COMMIT, committed, read_bytes
from hpcrl.rundir.layout import Run, step_of
from hpcrl.rundir.ledger import read_outcome
from hpcrl.runtime.followers import more
from hpcrl.units import duration, readable_size
from hpcrl.upload.hub import HubStore
from hpcrl.upload.s3 import S3Store
from hpcrl.upload.state import UploadState
from hpcrl.upload.store import Away, Committed, Patience, Store, Vanished, name_of

STORES: dict[str, Callable[[Run, UploadConfig, Patience], Store]] = {"hf": HubStore, "s3": S3Store}
_EVERY_S = 5.0
_REPORT_EVERY_S = 2.0
_AGAIN_S, _LONGEST_AGAIN_S = 30.0, 600.0


def stores_of(upload: UploadConfig) -> list[str]:
    """Return the stores to which a run is uploaded."""
    return [*(["hf"] if upload.hf else []), *(["s3"] if upload.s3 else [])]


def commands(run: Run, upload: UploadConfig) -> dict[str, Sequence[str]]:
    """Return the process of each store, as `Followers` takes them."""
    return {f"upload-{name}": (__name__, str(run.path), name) for name in stores_of(upload)}


def wanted(run: Run, store: str, upload: UploadConfig, done: bool) -> list[Path]:
    """Return the exports and checkpoints that a store is to have, newest first.

    Args:
        done: whether the run is: then its last ones are final.
    """
    every = store == "s3" and upload.s3 == "all"
    if not every and not done:
        return []
    found = [committed(run.exports, step_of)]
    if store == "s3" and upload.s3_checkpoints:
        found.append([step for path in line_of(run) if (step := step_of(path)) is not None])
    places, first = (run.export, run.checkpoint), 0 if every else -1
    paths = [(step, place(step)) for steps, place in zip(found, places, strict=False) for step in steps[first:]]
    return [path for _, path in sorted(paths, key=lambda one: -one[0])]


def unsent(run: Run, upload: UploadConfig) -> list[Path]:
    """Return the exports and checkpoints of a run that is done that a store is to have and lacks."""
    states = {store: UploadState.read(run.upload(store)) for store in stores_of(upload)}
    return [
        path
        for store, state in states.items()
        for path in wanted(run, store, upload, done=True)
        if not _is_sent(path, state)
    ]


def _is_sent(path: Path, state: UploadState) -> bool:
    """Return whether the store has a directory as it is now, or there is no such directory."""
    mark = read_bytes(path / COMMIT)
    return mark is None or mark.decode() == state.sent.get(name_of(path), {}).get("mark")


class Uploader:
    """Uploads of a run to one store.

    Args:
        upload: trainer.upload.

    Attributes:
        away: what could not be sent because the store is away.
    """

    def __init__(self, run: Run, name: str, upload: UploadConfig, patience: Patience | None = None) -> None:
        self.name, self.away = name, set[str]()
        self._run, self._upload, self._path = run, upload, run.upload(name)
        self._patience = patience or Patience()
        self._state, self._store, target = UploadState.read(self._path), None, _target(name, upload)
        if self._state.target != target:
            self._state = UploadState(target)
        # when each that failed is tried again, and after how long
        self._again = dict[str, tuple[float, float]]()
        self._lock, self._reported = threading.Lock(), 0.0

    def send(self, path: Path) -> str:
        """Make the store have an export or a checkpoint; return a sentence about it."""
        name, began, state = name_of(path), time.monotonic(), self._state
        try:
            self._store = self._store or STORES[self.name](self._run, self._upload, self._patience)
            directory = Committed.read(path)
            total = sum(directory.files.values())
            state.now = {"name": name, "bytes": 0, "total": total, "time": time.time()}
            state.write(self._path)
            count = self._store.send(directory, self._count)
        except Vanished as error:
            state.failed.pop(name, None)
            state.given_up[name] = str(error)
            raise
        except (HpcrlError, OSError) as error:
            state.failed[name] = str(error)
            raise
        else:
            state.place = self._store.place
            state.sent[name] = {"mark": directory.mark.decode(), "bytes": total, "time": time.time()}
            state.failed.pop(name, None)
            state.given_up.pop(name, None)
        finally:
            state.now = None
            state.write(self._path)
        took = duration(time.monotonic() - began)
        how = f"{readable_size(count)} sent in {took}" if count else "there already"
        return f"{name}: {how}, {readable_size(total)} in {state.place}"

    def _count(self, count: int) -> None:
        with self._lock:
            if self._state.now is None:
                return
            self._state.now |= {"bytes": self._state.now["bytes"] + count, "time": time.time()}
            if time.monotonic() - self._reported > _REPORT_EVERY_S:
                self._reported = time.monotonic()
                self._state.write(self._path)

    def send_due(self, done: bool) -> None:
        """Send wanted directories that the store lacks and that did not fail just now; print failures."""
        while path := next(filter(self._due, self._wanted(done)), None):
            name = name_of(path)
            self.away.discard(name)
            try:
                message = self.send(path)
                self._again.pop(name, None)
            except (HpcrlError, OSError) as error:
                if isinstance(error, Away):
                    self.away.add(name)
                wait = min(_LONGEST_AGAIN_S, 2 * self._again.get(name, (0.0, _AGAIN_S / 2))[1])
                self._again[name] = (time.monotonic() + wait, wait)
                message = f"{name}: {type(error).__name__}: {error}"
            print(message, flush=True)

    def _wanted(self, done: bool) -> list[Path]:
        """Return the directories for the store, and forget failed ones that the run has deleted."""
        paths = wanted(self._run, self.name, self._upload, done)
        gone = self._state.failed.keys() - {name_of(path) for path in paths}
        for name in gone:
            self._state.given_up[name] = f"deleted by its run before it could be sent; {self._state.failed.pop(name)}"
            self.away.discard(name)
        if gone:
            self._state.write(self._path)
        return paths

    def _due(self, path: Path) -> bool:
        again, _ = self._again.get(name_of(path), (0.0, 0.0))
        return not _is_sent(path, self._state) and again <= time.monotonic()

    @property
    def failed(self) -> dict[str, str]:
        """Directories that could not be sent, with the reasons."""
        return self._state.failed

    def try_again(self) -> None:
        """Let what failed be due at once."""
        self._again.clear()


def follow(run: Run, uploaders: Sequence[Uploader], more: Callable[[], bool], patience_s: float = float("inf")) -> bool:
    """Upload until `more` returns False, then the due directories of stores that are away meanwhile.

    Args:
        more: waits for a moment.
        patience_s: for how long such a store is awaited at the end.

    Returns:
        Whether no store is away.
    """
    ended: float | None = None
    while True:
        if ended is None and not more():
            ended = time.monotonic()
            for one in uploaders:
                one.try_again()
        for one in uploaders:
            try:
                one.send_due(ended is not None and _is_done(run))
            except (HpcrlError, OSError) as error:  # a file of the run is damaged, or the filesystem is away
                print(f"{type(error).__name__}: {error}", flush=True)
        if ended is not None:
            away = any(one.away for one in uploaders)
            if not away or time.monotonic() - ended > patience_s:
                return not away
            time.sleep(_EVERY_S)


def job(path: str, patience_s: float) -> None:
    """Upload what a run that has ended has left, to each of its stores; ends the process, with 1 where something is missing then."""
    try:
        run = Run.open(path)
        upload = Config.from_toml([run.config]).trainer.upload
        uploaders = [Uploader(run, name, upload) for name in stores_of(upload)]
        follow(run, uploaders, lambda: False, patience_s)
    except HpcrlError as error:
        print(f"{type(error).__name__}: {error}", flush=True)
        sys.exit(error.exit_code)
    sys.exit(int(any(one.failed for one in uploaders)))


def _target(store: str, upload: UploadConfig) -> str:
    if store == "hf":
        return f"{upload.hf_endpoint or ''} {upload.hf_repo_name}"
    return f"{upload.s3_endpoint or ''} {upload.s3_bucket}/{upload.s3_prefix}"


def _is_done(run: Run) -> bool:
    outcome = read_outcome(run)
    return outcome is not None and outcome.kind == "done"


def main(path: str, name: str) -> None:
    run = Run.open(path)
    follow(run, [Uploader(run, name, Config.from_toml([run.config]).trainer.upload)], partial(more, _EVERY_S))


if __name__ == "__main__":
    try:
        main(sys.argv[1], sys.argv[2])
    except HpcrlError as error:
        sys.exit(f"{type(error).__name__}: {error}")
