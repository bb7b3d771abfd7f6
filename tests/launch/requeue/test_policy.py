"""Whether a run goes on by itself after an attempt, and which nodes it avoids."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hpcrl.launch.requeue.policy import RequeueDecision, bad_hosts, decide
from hpcrl.rundir.ledger import Attempt, Kind, Outcome


def ended(attempt: int, kind: Kind, step: int = 0, message: str = "why", host: str = "") -> Outcome:
    return Outcome(attempt, kind, message, "agent-0", 0.0, step, host)


def judged(*outcomes: Outcome, budget: int = 3, resumes: bool = True, jobs: str = "7_0.0") -> RequeueDecision:
    attempts = [Attempt(outcome.attempt, jobs, [], 0.0) for outcome in outcomes]
    return decide(attempts, outcomes, budget, resumes)


@pytest.mark.parametrize(
    ("kind", "requeue"),
    [("done", False), ("cancelled", False), ("interrupted", True), ("lost", True), ("failed", True), ("hang", True)],
)
def test_each_kind_of_end(kind: Kind, requeue: bool) -> None:
    assert judged(ended(1, kind)).requeue == requeue
    assert not judged(ended(1, kind), resumes=False).requeue


def test_crashes_without_progress_use_the_budget_up() -> None:
    crashes = [ended(1, "failed", 4), ended(2, "hang", 4), ended(3, "failed", 4, "trainer-0: ValueError: no")]
    assert [judged(*crashes[:count]).requeue for count in (1, 2, 3)] == [True, True, False]
    assert judged(*crashes).why == "crash 3 of 3 without a new checkpoint (step 4): trainer-0: ValueError: no"
    between = [crashes[0], ended(2, "interrupted", 4), ended(3, "failed", 4), ended(4, "failed", 4)]
    assert not judged(*between).requeue, "a preemption between them is no progress"


def test_progress_between_crashes_counts_anew() -> None:
    assert judged(*[ended(number, "failed", step=number) for number in range(1, 20)]).requeue


def test_optimizer_steps_inside_a_step_are_progress() -> None:
    crashes = [replace(ended(number, "failed", step=4), updates=number) for number in range(1, 9)]
    assert judged(*crashes).requeue


def test_preemptions_never_use_it_up() -> None:
    assert judged(*[ended(number, "interrupted") for number in range(1, 50)]).requeue


def test_a_person_who_resumes_gives_a_new_budget() -> None:
    outcomes = [ended(number, "failed") for number in (1, 2, 3, 4)]
    attempts = [Attempt(number, f"7_0.{number - 1}" if number < 4 else "9_0.0", [], 0.0) for number in (1, 2, 3, 4)]
    assert not decide(attempts[:3], outcomes[:3], 3, True).requeue
    assert decide(attempts, outcomes, 3, True).requeue


def test_crashes_of_all_requests_use_one_budget_up() -> None:
    outcomes = [ended(number, "failed") for number in (1, 2, 3)]
    attempts = [Attempt(number, f"{7 + number % 2}_0.{number}", [], 0.0) for number in (1, 2, 3)]
    assert not decide(attempts, outcomes, 3, True, ["7_0", "8_0"]).requeue
    assert decide(attempts, outcomes, 3, True, ["9_0", "10_0"]).requeue, (
        "they are of a submission that has begun nothing"
    )


def test_what_only_a_person_can_mend_is_not_tried_again() -> None:
    found = judged(ended(1, "failed", message="controller: hpcrl.errors.DataError: no file x"))
    assert not found.requeue
    assert "another attempt would end the same way" in found.why
    damaged = judged(ended(1, "failed", message="trainer-0: hpcrl.errors.DamagedError: sample file x is damaged"))
    assert damaged.requeue, "the next attempt generates it again"
    theirs = "rollout-0: pandas.errors.DataError: no numeric types"
    assert judged(ended(1, "failed", message=theirs)).requeue, "another package's error may pass"


def test_a_host_that_crashes_twice_is_left_out() -> None:
    outcomes = [ended(1, "failed", 1, host="n1"), ended(2, "failed", 2, host="n2"), ended(3, "hang", 3, host="n1")]
    assert bad_hosts(outcomes) == ("n1",)
    assert judged(*outcomes).exclude == ("n1",)
    assert bad_hosts([ended(1, "interrupted", host="n1"), ended(2, "lost", host="n1")]) == ()
