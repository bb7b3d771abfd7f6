"""What becomes of a run after an attempt: whether the next one starts by itself, and on which nodes it had better not."""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from hpcrl.run.layout import Run
from hpcrl.run.ledger import Attempt, Outcome, read_attempts, read_outcomes

_CRASHES = ("failed", "hang")
_CRASHES_OF_A_BAD_NODE = 2
# hpcrl's own: what is wrong is in files that only a person changes
_ALIKE = re.compile(r"(?<![\w.])(?:hpcrl\.errors\.)?(?:ConfigError|DataError): ")


@dataclass(frozen=True)
class Verdict:
    """What becomes of a run.

    Attributes:
        goes_on: whether the next attempt may start without a person.
        why: one sentence for people.
        exclude: hosts that the next attempt should avoid.
        held: the crash budget is spent.
    """

    goes_on: bool
    why: str
    exclude: tuple[str, ...] = ()
    held: bool = False


def verdict(attempts: Sequence[Attempt], outcomes: Sequence[Outcome], crash_budget: int, resumes: bool) -> Verdict:
    """Judge a run by how its attempts ended.

    Crashes count as long as no checkpoint was committed between them, and since a person last started the run.

    Args:
        outcomes: oldest first; the last one is of the newest attempt.
        crash_budget: crashes without progress after which the run is held.
        resumes: whether attempts continue from checkpoints at all.
    """
    last = outcomes[-1]
    if last.final:
        return Verdict(False, last.message)
    if not resumes:
        return Verdict(False, f"{last.message}; not requeued, because trainer.resume_mode is none")
    exclude = bad_hosts(outcomes)
    if last.kind not in _CRASHES:
        return Verdict(True, last.message, exclude)
    if _ALIKE.search(last.message):
        return Verdict(False, f"{last.message}; another attempt would end the same way")
    jobs = {attempt.number: attempt.job_id for attempt in attempts}
    crashes = [
        outcome
        for outcome in outcomes
        if outcome.kind in _CRASHES
        and outcome.position == last.position
        and jobs.get(outcome.attempt) == jobs.get(last.attempt)
    ]
    told = f"crash {len(crashes)} of {crash_budget} without a new checkpoint (step {last.step}): {last.message}"
    spent = len(crashes) >= crash_budget
    return Verdict(not spent, told, exclude, held=spent and len(crashes) > 1)


def bad_hosts(outcomes: Sequence[Outcome]) -> tuple[str, ...]:
    """Return the hosts from which the error of two or more attempts came."""
    blamed = Counter(outcome.host for outcome in outcomes if outcome.kind in _CRASHES and outcome.host)
    return tuple(sorted(host for host, crashes in blamed.items() if crashes >= _CRASHES_OF_A_BAD_NODE))


def judge(run: Run) -> Verdict:
    """Return the verdict on a run whose newest attempt has an outcome."""
    # not by Config, which would import the modules of a user's config_class once more
    config = tomllib.loads(run.config.read_text())
    resumes = config["trainer"]["resume_mode"] != "none"
    return verdict(read_attempts(run), read_outcomes(run), config["slurm"]["crash_budget"], resumes)
