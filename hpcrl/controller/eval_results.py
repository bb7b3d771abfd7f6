"""What evaluations leave on disk: rows that are finished, which count in the next attempt too, until the summary is there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from hpcrl.data.eval_file import EvalRow, read_rows
from hpcrl.data.weight_files import PublishedWeights
from hpcrl.errors import CommitError
from hpcrl.rundir.commit import children, discard, is_committed, write_json
from hpcrl.rundir.layout import Run, version_of
from hpcrl.types import GroupMeta, Work


def is_evaluated(run: Run, version: int) -> bool:
    return run.eval_summary(version).exists()


def discard_after(run: Run, step: int) -> None:
    """Remove evaluations of versions that will be trained anew."""
    for path in run.evals.glob("v*"):
        if (version_of(path) or 0) > step:
            discard(path)


def write_summary(run: Run, version: int, metrics: Mapping[str, float]) -> None:
    """Write the scores; the rows have served."""
    write_json(run.eval_summary(version), metrics)
    for path in _row_files(run, version):
        path.unlink(missing_ok=True)


def finished_rows(run: Run, version: int, work: Iterable[Work]) -> dict[str, GroupMeta]:
    """Return which rows of an evaluation that is not over are finished, by their names.

    None are where one of them was asked for something else than now, or generated with other weights than those that are published as
    `version`: then what lies there is of another evaluation. Where none are, all of it is removed.

    Args:
        work: of all rows; looked at only where some are finished.
    """
    kept = [row for path in _row_files(run, version) for row in _read(path)]
    if kept:
        asked, weights = {item.group_id: item.asked for item in work}, _digest(run, version)
        expected = {name: (what, weights, version, version) for name, what in asked.items()}
        if all(_known(row) == expected.get(row.group.group_id) for row in kept):
            finished = {row.group.group_id: row.group for row in kept}
            print(f"version {version}: {len(finished)} of {len(asked)} rows were evaluated before", flush=True)
            return finished
        print(f"version {version} is evaluated anew: it was with other settings, prompts or weights", flush=True)
    discard(run.evals_of(version))
    return {}


def _known(row: EvalRow) -> tuple[str, str, int, int]:
    return row.asked, row.weights, row.group.oldest_version, row.group.newest_version


def _row_files(run: Run, version: int) -> list[Path]:
    folder = run.evals_of(version)
    return [folder / name for name in sorted(children(folder)) if name.endswith(".rows")]


def _read(path: Path) -> list[EvalRow]:
    rows, damaged = read_rows(path)
    if damaged:
        print(f"{path}: {damaged} of its lines are damaged; these rows are generated again", flush=True)
    return rows


def _digest(run: Run, version: int) -> str | None:
    """Return that of the weights that are published as `version`, as `EvalRow` has it; None where they cannot be read."""
    try:
        published = run.weights_of(version)  # version 0 is not, where it is the initial model
        return PublishedWeights.read(published).digest if version or is_committed(published) else ""
    except CommitError as error:
        print(error, flush=True)
        return None
