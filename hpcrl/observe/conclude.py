"""Writes the scores of finished evaluations: those of the evaluation job from its rows on disk, in the order of versions."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from hpcrl.data.cache_files import EvalRow, read_rows
from hpcrl.observe.metrics import MetricsWriter
from hpcrl.observe.scores import scores
from hpcrl.rundir.commit import children, write_json
from hpcrl.rundir.evaluations import attempt_of_evaluation, begun_evaluations, generated_at, why_left_out
from hpcrl.rundir.layout import Run
from hpcrl.types import GroupMeta

_HELD_BACK_S = 4 * 3600.0


def write_summary(run: Run, version: int, metrics: Mapping[str, float]) -> None:
    """Write the scores, and remove the rows."""
    write_json(run.eval_summary(version), metrics)
    for path in [*row_files(run, version), run.eval_begun(version), run.eval_job(version)]:
        path.unlink(missing_ok=True)


def conclude_generated(run: Run, process: str, success_reward: float) -> list[int]:
    """Write the scores of versions whose rows the evaluation job has all generated, and return them.

    Trackers and alerts take no value of a metric at a step before its last one, so versions are concluded in order. One that waits for its
    element holds later ones back for four hours at most.

    Args:
        process: that writes the metrics.
    """
    concluded, waits = list[int](), False
    for version in begun_evaluations(run):
        attempt, since = attempt_of_evaluation(run, version), generated_at(run, version)
        if attempt is None or why_left_out(run, version):
            continue
        if since is None or (waits and time.time() - since < _HELD_BACK_S):
            waits = True
            continue
        rows = {row.group.group_id: row.group for path in row_files(run, version) for row in read_finished(path)}
        groups = [rows[name] for name in sorted(rows)]
        if conclude_by_job(run, version, attempt, process, groups, success_reward):
            concluded.append(version)
    return concluded


def conclude_by_job(
    run: Run, version: int, attempt: int, process: str, groups: Sequence[GroupMeta], success_reward: float
) -> bool:
    """Write the scores of an evaluation that a job of its own has made; return whether the version still belongs to that attempt.

    Where it does not, a later attempt trains it again, or has taken it over from the checkpoint with which it began.

    Args:
        attempt: of the run, to which the version belonged when the evaluation began.
        process: that writes the metrics.
    """
    if attempt_of_evaluation(run, version) != attempt:
        return False
    metrics = scores(groups, success_reward)
    with MetricsWriter(run, process, attempt, None) as writer:
        writer.write(version, metrics)  # first: where there is a summary, nobody waits for the scores
    if attempt_of_evaluation(run, version) != attempt:
        return False
    write_summary(run, version, metrics)
    return True


def row_files(run: Run, version: int) -> list[Path]:
    """Return the files of an evaluation's finished rows."""
    folder = run.evals_of(version)
    return [folder / name for name in sorted(children(folder)) if name.endswith(".rows")]


def read_finished(path: Path) -> list[EvalRow]:
    """Return the rows of such a file; damaged lines are counted in a warning."""
    rows, damaged = read_rows(path)
    if damaged:
        print(f"{path}: {damaged} of its lines are damaged; these rows are generated again", flush=True)
    return rows
