"""What earlier attempts left on disk: batches and finished groups. The controller has no other memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from hpcrl.controller.prompt_stream import group_index
from hpcrl.data.group_file import read_meta
from hpcrl.errors import DataError
from hpcrl.rundir.commit import read_json
from hpcrl.rundir.layout import Run, step_of
from hpcrl.types import Batch, GroupMeta


@dataclass
class History:
    """What can be used again.

    Attributes:
        composed: newest step whose batch is complete on disk, at least the step that training continues after.
        used: indices of all groups in those batches, and of those that were dropped or given up for them.
        finished: complete groups that no batch has used; some may be of the kind that dynamic sampling drops.
        batches: batches that training has still to do.
    """

    composed: int
    used: set[int] = field(default_factory=set)
    finished: dict[int, GroupMeta] = field(default_factory=dict)
    batches: dict[int, Batch] = field(default_factory=dict)


def read_history(
    run: Run,
    step: int,
    batch_size: int,
    usable: Callable[[GroupMeta], bool],
    keep: Callable[[int, GroupMeta], bool],
    pruned: int = 0,
) -> History:
    """Read what is on disk for a training that continues after `step`.

    Batches that cannot be trained again, because a file of theirs is gone or a group of theirs is not usable, are removed with all
    later ones: their groups may train in other batches now.

    A run that starts from another run's checkpoint has no batches of the steps before it: their groups count as used, in order.

    Args:
        usable: tells whether a group of a batch may train with the settings of now.
        keep: tells, given the next step to compose and a finished group, whether the group may still train.
        pruned: samples of the steps up to this one are removed; nothing will train them again.
    """
    batches = {
        number: Batch.from_json(value)
        for path in run.batches.glob("s*.json")
        if (number := step_of(path)) is not None and (value := read_json(path)) is not None
    }
    inherited = min([*batches, step + 1]) - 1  # steps that another run has done
    history = History(step, used=set(range(inherited * batch_size)))
    for number in sorted(batches):
        batch = batches[number]
        if number > step:
            if number != history.composed + 1 or not _complete(run, batch, usable):
                for void in (later for later in batches if later >= number):
                    run.batch(void).unlink()
                break
            history.composed = number
            history.batches[number] = batch
        history.used |= {index for name in batch.generated if (index := group_index(name)) is not None}
    expired = {name for number, batch in batches.items() if number <= pruned for name in batch.generated}
    for path in run.samples.glob("*/g*.safetensors"):
        index = group_index(path.stem)
        if path.stem in expired:
            path.unlink()
            continue
        if index is None or index in history.used:
            continue
        meta = _meta(path)
        if meta and keep(history.composed + 1, meta):
            history.finished[index] = meta
        else:
            path.unlink()
    return history


def _complete(run: Run, batch: Batch, usable: Callable[[GroupMeta], bool]) -> bool:
    return all(usable(group) and run.inside(group.path).is_file() for group in batch.groups)


def _meta(path: Path) -> GroupMeta | None:
    try:
        return read_meta(path)
    except DataError:
        return None
