"""Removes runs that are over, as a whole or in part."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Literal

from hpcrl.config import Config
from hpcrl.errors import RunError, SubmitError
from hpcrl.launch.manage.registry import all_runs, states_of
from hpcrl.launch.requeue.evaluation import end_evaluation
from hpcrl.launch.retention import shrink, uses_of
from hpcrl.launch.scheduler import cancel_slurm
from hpcrl.rundir.checkpoints import Retention
from hpcrl.rundir.commit import children, committed, discard
from hpcrl.rundir.evaluations import begun_evaluations, give_up_evaluation
from hpcrl.rundir.layout import Run, step_of
from hpcrl.rundir.other_roots import own_homes, readable_homes, require_own
from hpcrl.rundir.starts import note


def sizes_of(run: Run) -> dict[str, int]:
    """Return the bytes of each folder of a run that has files, the largest first; files beside the folders count as ""."""
    sizes = dict[str, int]()
    homes = readable_homes(run)
    for root in (run.path, *(place for place in run.elsewhere.values() if place.parent in homes)):
        for folder, _, files in os.walk(root):
            name = os.path.relpath(folder, run.path if root == run.path else root.parent).partition(os.sep)[0]
            for file in files:
                with suppress(OSError):  # the run has removed it meanwhile, or its owner has closed the folder
                    part = "" if name == "." else name
                    sizes[part] = sizes.get(part, 0) + os.lstat(os.path.join(folder, file)).st_size
    return dict(sorted(sizes.items(), key=lambda item: -item[1]))


def remove(run: Run, keep: Literal["metrics", "last", "export"] | None = None) -> None:
    """Remove a run that is over.

    Args:
        keep: metrics: what `hpcrl status`, `report`, `compare` and TensorBoard read stays: configuration, ledger, metrics, curves,
            evaluations, alerts and logs. last, export: as trainer.keep_when_done.

    Raises:
        RunError: the run is not over, so that its processes may write; it leads to folders that are not known to be its own; or another
            run needs it. Also as `shrink`.
        SubmitError: Slurm could not be asked.
        CommitError, DataError: as `shrink`.
    """
    state = states_of([run])[0]
    if not state.over:
        raise RunError(f"{run.name} is {state.kind}: {state.detail}; `hpcrl cancel {run.name}` ends it first")
    if keep:
        require_own(run, run.checkpoints, run.exports)
        _give_evaluations_up(run)
    if keep in ("last", "export"):
        trainer = Config.from_toml([run.config]).trainer
        for _ in shrink(run, keep, Retention.of(trainer), trainer.upload):
            pass
        return
    if uses := uses_of(run):
        other, path = uses[0]
        raise RunError(f"{run.name} stays: the configuration of {other.path} names {path}; remove that run first")
    if upload := state.submission.get("upload"):
        with suppress(SubmitError):  # it has ended
            cancel_slurm(upload)
    if keep == "metrics":
        if steps := committed(run.checkpoints, step_of):
            note(run, {"attempt": state.attempt, "kept": [], "step": steps[-1]})
        for path in _large(run):
            discard(path)
        return
    end_evaluation(run)
    submissions, shared = Path(os.path.realpath(run.path.parent / ".slurm")), Path(os.path.realpath(run.slurm))
    homes = own_homes(run)
    discard(run.path)
    for home in homes:
        discard(home)
    if shared.parent == submissions and not any(
        os.path.realpath(other.slurm) == str(shared) for other in all_runs(run.root)
    ):
        discard(shared)
    for folder in (submissions, run.path.parent, *(home.parent for home in homes)):
        with suppress(OSError):  # other runs are in it
            folder.rmdir()


def _give_evaluations_up(run: Run) -> None:
    """Cancel the evaluation job of a run, and keep nothing for versions that it has not evaluated."""
    end_evaluation(run)
    for version in begun_evaluations(run):
        give_up_evaluation(run, version)


def _large(run: Run) -> list[Path]:
    """Return the folders that only training, exports and uploads read. The list of starts stays, by which curves are read."""
    folders = [
        run.weights, run.samples, run.scores, run.datasets, run.teacher, run.turns, run.snapshots, run.batches, run.dumps,
        run.pictures,
    ]  # fmt: skip
    saved = [folder / name for folder in (run.checkpoints, run.exports) for name in children(folder)]
    return [*filter(Path.is_dir, [*saved, *folders])]
