"""Finds the evaluations of a run that have begun and are not over: what they need stays until then."""

from __future__ import annotations

import time
from typing import Any

from hpcrl.rundir.commit import children, read_json, write_json
from hpcrl.rundir.layout import Run, version_of

MOST_OPEN = 4
"""Evaluations that may be open while training goes on: the weights of each stay on disk."""


def begun_evaluations(run: Run) -> list[int]:
    """Return the versions whose evaluations have begun and have no scores yet."""
    versions = (version_of(run.evals / name) for name in children(run.evals))
    return sorted(
        version
        for version in versions
        if version is not None and run.eval_begun(version).exists() and not run.eval_summary(version).exists()
    )


def attempt_of_evaluation(run: Run, version: int) -> int | None:
    """Return the attempt to which a version belongs whose evaluation has begun; None: it has not, or that attempt gave it up."""
    return (read_json(run.eval_begun(version)) or {}).get("attempt")


def note_generated(run: Run, version: int, attempt: int, damaged: bool = False) -> None:
    """Note that the evaluation job has all rows of a version on disk, or cannot have them because its weights are damaged."""
    write_json(run.eval_job(version), {"attempt": attempt, "damaged": damaged, "time": time.time()})


def generated_at(run: Run, version: int) -> float | None:
    """Return the Unix time at which the evaluation job had all rows of a version, or None; damaged ones have none."""
    noted = _noted(run, version)
    return noted["time"] if noted and not noted["damaged"] else None


def note_failure(run: Run, version: int, job: str, most: int) -> None:
    """Count a failure of the evaluation job `job` at a version, which the job leaves out after `most` of them."""
    failures = _failures(run, version, job) + 1
    attempt = attempt_of_evaluation(run, version)
    noted = {"attempt": attempt, "job": job, "failures": failures, "left_out": failures >= most}
    write_json(run.eval_failures(version), noted)


def _failures(run: Run, version: int, job: str | None) -> int:
    noted = read_json(run.eval_failures(version))
    if not noted or noted["job"] != job or noted["attempt"] != attempt_of_evaluation(run, version):
        return 0
    return noted["failures"]


def why_left_out(run: Run, version: int) -> str:
    """Return why the evaluation job passes over a version, or nothing: its weights are damaged, or the job failed at it too often."""
    if (noted := _noted(run, version)) and noted["damaged"]:
        return "damaged"
    failed = read_json(run.eval_failures(version))
    if not failed or not failed["left_out"]:
        return ""
    failures = _failures(run, version, (read_json(run.submission) or {}).get("evaluation"))
    return f"failed {failures} times" if failures else ""


def _noted(run: Run, version: int) -> dict[str, Any] | None:
    """Return the note of `note_generated`; None also where it is of an attempt that the version does not belong to any more."""
    noted = read_json(run.eval_job(version))
    return noted if noted and noted["attempt"] == attempt_of_evaluation(run, version) else None


def versions_of_element(run: Run, element: int, elements: int, interval: int) -> list[int]:
    """Return the versions of one element of the evaluation job that have no scores yet: the elements take the evaluations in turn.

    Args:
        interval: steps between evaluations.
    """
    own = (version for version in begun_evaluations(run) if -(-version // interval) % elements == element)
    return [
        version for version in own if attempt_of_evaluation(run, version) is not None and not why_left_out(run, version)
    ]


def discard_rows(run: Run, version: int) -> None:
    """Remove what an evaluation has generated; losses of validation sets stay."""
    for name in children(run.evals_of(version)):
        if name.endswith((".rows", ".jsonl")):
            (run.evals_of(version) / name).unlink(missing_ok=True)


def give_up_evaluation(run: Run, version: int) -> None:
    """Remove what an evaluation has generated, and the note that it has begun: nothing is kept for it any more."""
    discard_rows(run, version)
    run.eval_begun(version).unlink(missing_ok=True)
