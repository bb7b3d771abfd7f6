"""Decides whether a run is requeued after an attempt, and which nodes the next attempt should avoid."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import tomli

from hpcrl.launch.requeue.requests import recorded_requests
from hpcrl.rundir.layout import Run
from hpcrl.rundir.ledger import Attempt, Outcome, read_attempts, read_outcomes

_CRASHES = ("failed", "hang")
_CRASHES_OF_A_BAD_NODE = 2
# hpcrl's own: what is wrong is in files that only a person changes
_REPEATS = re.compile(r"(?<![\w.])(?:hpcrl\.errors\.)?(?:ConfigError|DataError): ")


@dataclass(frozen=True)
class RequeueDecision:
    """Decision whether a run is requeued after its newest attempt.

    Attributes:
        requeue: the next attempt starts by itself.
        why: one sentence for people.
        exclude: hosts that the next attempt should avoid.
        held: the crash budget is spent.
        repeats: another attempt ends the same way, until somebody changes a file that the run reads.
    """

    requeue: bool
    why: str
    exclude: tuple[str, ...] = ()
    held: bool = False
    repeats: bool = False


def decide(
    attempts: Sequence[Attempt],
    outcomes: Sequence[Outcome],
    crash_budget: int,
    resumes: bool,
    jobs: Collection[str] = (),
) -> RequeueDecision:
    """Decide by how the attempts of a run ended.

    Crashes count as long as no checkpoint was committed between them, and since a person last started the run.

    Args:
        outcomes: oldest first; the last one is of the newest attempt.
        crash_budget: crashes without progress after which the run is held.
        resumes: whether attempts continue from checkpoints at all.
        jobs: those of the newest submission; where it does not name the newest attempt's job, that one alone.
    """
    last = outcomes[-1]
    if last.final:
        return RequeueDecision(False, last.message)
    if not resumes:
        return RequeueDecision(False, f"{last.message}; not requeued, because trainer.resume_mode is none")
    exclude = bad_hosts(outcomes)
    if last.kind not in _CRASHES:
        return RequeueDecision(True, last.message, exclude)
    if repeats(last):
        return RequeueDecision(False, f"{last.message}; another attempt would end the same way", repeats=True)
    job_of = {attempt.number: attempt.job_id for attempt in attempts}
    own = job_of.get(last.attempt)
    together = jobs if own in jobs else [own]
    crashes = [
        outcome
        for outcome in outcomes
        if outcome.kind in _CRASHES and outcome.position == last.position and job_of.get(outcome.attempt) in together
    ]
    message = f"crash {len(crashes)} of {crash_budget} without a new checkpoint (step {last.step}): {last.message}"
    spent = len(crashes) >= crash_budget
    return RequeueDecision(not spent, message, exclude, held=spent and len(crashes) > 1)


def repeats(outcome: Outcome) -> bool:
    """Return whether another attempt ends as this one, until the user changes a file that the run reads."""
    return outcome.kind in _CRASHES and _REPEATS.search(outcome.message) is not None


def bad_hosts(outcomes: Sequence[Outcome]) -> tuple[str, ...]:
    """Return the hosts from which the error of two or more attempts came."""
    blamed = Counter(outcome.host for outcome in outcomes if outcome.kind in _CRASHES and outcome.host)
    return tuple(sorted(host for host, crashes in blamed.items() if crashes >= _CRASHES_OF_A_BAD_NODE))


def requeue_decision(run: Run) -> RequeueDecision:
    """Decide whether a run whose newest attempt has an outcome is requeued."""
    # not by Config, which would import the modules of a user's config_class once more
    config = tomli.loads(run.config.read_text())
    resumes = config["trainer"]["resume_mode"] != "none"
    jobs = list(recorded_requests(run).values())
    return decide(read_attempts(run), read_outcomes(run), config["slurm"]["crash_budget"], resumes, jobs)
