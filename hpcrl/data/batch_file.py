"""Writes and reads the batch of a step, which the controller hands to the trainer and later attempts read as history.

JSON, with a checksum of its own text and that of the batch before it: a file that is changed, exchanged or gone is seen.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from hpcrl.data.group_file import check_group
from hpcrl.data.score_file import check_scores
from hpcrl.errors import DamagedError, DataError
from hpcrl.rundir.commit import committed, digest_of, read_bytes, write_text
from hpcrl.rundir.layout import Run, position_of, step_of
from hpcrl.rundir.records import parse_record, with_checksum
from hpcrl.types import Batch, GroupMeta

_AT_ONCE = 8
FIRST = ""
"""What the first batch of a run has in place of the checksum of the one before it."""


@dataclass(frozen=True)
class BatchFile:
    """A batch as it is on the disk.

    Attributes:
        checksum: of its text.
        previous: that of the batch of the step before; None: an earlier version of hpcrl wrote it, without checksums.
    """

    batch: Batch
    checksum: str
    previous: str | None


def write_batch(run: Run, batch: Batch, previous: str) -> str:
    """Write the file of a batch as a whole, and return its checksum.

    Args:
        previous: checksum of the batch of the step before, or `FIRST`.
    """
    text, checksum = with_checksum(batch.to_json() | {"previous": previous})
    write_text(run.batch(batch.step), text)
    return checksum


def read_batch(path: Path) -> BatchFile | None:
    """Return the content of a batch's file, or None where there is no such file. Raises DamagedError where it is damaged or has the name of another step."""
    if (content := read_bytes(path, most=None)) is None:
        return None
    try:
        value, checksum = parse_record(content)
        previous = value.pop("previous", None)
        batch = Batch.from_json(value)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise DamagedError(f"batch file {path} is damaged: {error}") from error
    if batch.step != step_of(path):
        raise DamagedError(f"batch file {path} is damaged: it holds the batch of step {batch.step}")
    return BatchFile(batch, checksum, previous)


def read_batches(run: Run, step: int) -> Iterator[BatchFile]:
    """Yield the batches of a run in the order of their steps, for a training that continues after `step`, up to the first one that is
    damaged or missing.

    Raises:
        DataError: that one was trained: what is in it might train again, or never.
    """
    before: BatchFile | None = None
    try:
        for number in batch_steps(run):
            if (file := read_batch(run.batch(number))) is not None:
                _check_follows(run, file, before)
                yield (before := file)
        if _is_missing(run, step, before):
            raise DataError(f"batch file {run.batch((before.batch.step if before else 0) + 1)} is missing")
    except DataError as error:
        if _is_missing(run, step, before):
            raise DataError(
                f"{error}. Step {step} was trained, and without this file nobody knows with which groups. Put it back from a backup; or "
                "submit a new run with trainer.resume_mode=from_path and trainer.resume_path set to the newest checkpoint of this one"
            ) from error
        newest = before.batch.step if before else 0
        print(f"{error}; what follows step {max(newest, step)} is composed again", flush=True)


def _is_missing(run: Run, step: int, newest: BatchFile | None) -> bool:
    """Return whether a run that was trained up to `step` lacks batches, where `newest` is the last that can be read."""
    if newest is None:
        return step > 0 and bool(committed(run.checkpoints, position_of))
    return newest.batch.step < step


_PASSING = ("replica", "path", "offset", "seconds", "failures")
"""Fields of a group that may differ between runs of the same bits: who generated it, where it lies, how long it took."""


def group_contents(batch: Batch) -> dict[str, str]:
    """Return a digest of what each group of a batch trains, by its id: tokens, log-probabilities, rewards; not who generated it, and when."""
    found = dict[str, str]()
    for at, group in enumerate(batch.groups):
        fields = {name: value for name, value in group.to_json().items() if name not in _PASSING}
        found[f"{group.group_id}.{at}"] = digest_of(json.dumps(fields, sort_keys=True).encode())
    return found


def batch_content(batch: Batch) -> str:
    """Return a digest of what a step trains, and of which groups it leaves out."""
    left_out = [sorted(batch.dropped.items()), sorted(batch.given_up), batch.cursor, batch.step]
    return digest_of(json.dumps([list(group_contents(batch).items()), left_out]).encode())


def check_batch(run: Run, batch: Batch) -> None:
    """Compare the files of all groups of a batch with their checksums, several at a time.

    Raises:
        DamagedError: one is missing or damaged, or holds another group.
        RunError: one lies outside the run directory.
    """

    def check(group: GroupMeta) -> None:
        check_group(run.inside(group.path), group)
        check_scores(run, group)

    with ThreadPoolExecutor(_AT_ONCE) as threads:
        for _ in threads.map(check, batch.groups):
            pass


def check_batches(run: Run) -> Iterator[str]:
    """Yield what is wrong with the batches of a run, a sentence for each."""
    before, damaged = None, None
    for number in batch_steps(run):
        try:
            if (file := read_batch(run.batch(number))) is None:
                continue
        except DataError as error:
            damaged = number
            yield str(error)
            continue
        try:
            if number - 1 != damaged:
                _check_follows(run, file, before if before and before.batch.step == number - 1 else None)
        except DataError as error:
            yield str(error)
        before = file


def batch_steps(run: Run) -> list[int]:
    """Return the steps that have a batch file, ascending."""
    return sorted(number for path in run.batches.glob("s*.json") if (number := step_of(path)) is not None)


def _check_follows(run: Run, file: BatchFile, before: BatchFile | None) -> None:
    """Check whether a batch follows `before`, the batch of the step before; None: that one is unknown."""
    number = file.batch.step
    follows = before is not None and before.batch.step == number - 1
    if not follows and (before or file.previous):
        raise DataError(f"batch file {run.batch(number - 1)} is missing")
    if before is not None and file.previous not in (None, before.checksum):
        raise DataError(f"batch file {run.batch(number - 1)} is not the one that {run.batch(number).name} follows")
