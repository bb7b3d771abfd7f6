"""Finds the evaluations of a run that have begun and are not over: what they need stays until then."""

from __future__ import annotations

from hpcrl.rundir.commit import children
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
