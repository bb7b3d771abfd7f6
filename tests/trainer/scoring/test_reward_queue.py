"""Rewards that come when a group is finished: what is filtered by reward sees the whole of it, and nothing is judged or trained twice."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hpcrl.controller.schema import Schemas
from hpcrl.controller.score_queue import ScoreQueue
from hpcrl.controller.service import Service
from hpcrl.data.batch_file import read_batch
from hpcrl.data.score_file import GroupRewards, write_scores
from hpcrl.envs.rewards.judged import JudgedRewards
from hpcrl.errors import RunError
from hpcrl.observe.metrics import merged
from hpcrl.rundir.layout import Run
from hpcrl.runtime.http_server import BadRequest
from hpcrl.types import Batch, GroupMeta
from tests.controller.test_api import make_run, prompts
from tests.controller.test_dynamic_sampling import group, schedule
from tests.trainer.scoring.test_score_queue import ids, score

MODEL = "reward-1"
WORTH = JudgedRewards(2.0, -5.0, 5.0)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return make_run(tmp_path / "project" / "run")


def service(run: Run, attempt: int = 1, models: tuple[str, ...] = (MODEL,), **settings: Any) -> Service:
    found = schedule(**settings)
    found = replace(found, sampling=replace(found.sampling, later=["reward_model"]))
    controller = Service(run, attempt, found, prompts(9), [], scores=ScoreQueue(models, None, WORTH))
    controller.start(0)
    return controller


def generate(run: Run, controller: Service, rewards: list[list[float]]) -> list[str]:
    """Claim a group for each of the environment's rewards, and finish them all; return their names."""
    work = controller.claim("rollout-0", 0, len(rewards))
    assert len(work) == len(rewards), f"asked for {len(rewards)} groups, got {len(work)}"
    assert controller.complete([group(run, item, 0, paid) for item, paid in zip(work, rewards, strict=True)]) == {}
    return [item.group_id for item in work]


def judge(run: Run, controller: Service, scores: list[list[float | None]], scorer: str = "scorer-0") -> list[str]:
    """Let a scorer judge as many groups; return their names."""
    found = list[GroupMeta]()
    for _ in scores:
        found += controller.scores.claim(scorer, 1, ids(found))
    assert len(found) == len(scores)
    digests = write_scores(run, MODEL, zip(found, map(GroupRewards, scores), strict=True))
    rewards = {one.group_id: own for one, own in zip(found, scores, strict=True)}
    assert controller.scored(scorer, digests, rewards) == []
    return ids(found)


def batch_of(run: Run, step: int) -> Batch:
    file = read_batch(run.batch(step))
    assert file is not None
    return file.batch


def test_groups_are_dropped_by_their_whole_reward_and_others_begun_in_their_place(run: Run) -> None:
    """The first is worth nothing by the environment alone, the second by both together."""
    controller = service(run)
    good, bad = generate(run, controller, [[1.0, 1.0], [1.0, 0.0]])
    assert controller.claim("rollout-0", 0, 9) == []
    assert controller.batch(1) is None
    assert judge(run, controller, [[0.5, 0.0], [0.5, 1.0]]) == [good, bad]
    assert controller.batch(1) is None
    (other,) = generate(run, controller, [[0.0, 0.0]])
    judge(run, controller, [[1.0, -1.0]])
    assert controller.batch(1) is not None
    batch = batch_of(run, 1)
    assert ids(batch.groups) == [good, other]
    assert [one.rewards for one in batch.groups] == [[2.0, 1.0], [2.0, -2.0]]
    assert batch.dropped == {bad: 2.0}, "by what it is worth"
    assert controller.status()["unscored"] == 0
    metrics = merged(run)[1]
    assert metrics["reward/avg_raw_reward"] == 0.75
    assert metrics["environment/reward_model"] == 0.125


def test_other_models_do_not_score_what_is_dropped(run: Run) -> None:
    controller = service(run, models=(MODEL, "teacher-1"))
    first, second = generate(run, controller, [[1.0, 0.0], [1.0, 0.0]])
    judge(run, controller, [[0.0, 0.5]])
    assert score(run, controller, "scorer-1", "teacher-1") == [second]
    judge(run, controller, [[0.5, 0.5]])
    (third,) = generate(run, controller, [[0.0, 0.0]])
    judge(run, controller, [[0.0, 1.0]])
    assert controller.batch(1) is None
    assert score(run, controller, "scorer-1", "teacher-1") == [third]
    assert controller.batch(1) is not None
    assert batch_of(run, 1).dropped.keys() == {first}


def test_copies_take_the_place_of_groups_by_their_whole_reward(run: Run) -> None:
    controller = service(run, kind="replace")
    flat, good = generate(run, controller, [[1.0, 0.0], [0.0, 0.0]])
    assert judge(run, controller, [[0.0, 0.5]]) == [flat]
    assert controller.batch(1) is None, "the second one is not judged"
    judge(run, controller, [[0.5, 0.0]])
    assert controller.batch(1) is not None
    assert ids(batch_of(run, 1).groups) == [good, good]


def test_a_metric_that_comes_later_filters_too(run: Run) -> None:
    controller = service(run, metrics=("reward_model",))
    kept, dropped = generate(run, controller, [[1.0, 1.0], [1.0, 0.0]])
    judge(run, controller, [[0.5, 0.0], [0.5, 0.5]])
    generate(run, controller, [[1.0, 1.0]])
    judge(run, controller, [[0.5, 0.0]])
    assert controller.batch(1) is not None
    assert ids(batch_of(run, 1).groups)[0] == kept
    assert batch_of(run, 1).dropped.keys() == {dropped}


@pytest.mark.parametrize("metrics", [(), ("reward_model",)])
def test_what_was_judged_before_the_controller_died_is_not_judged_again(run: Run, metrics: tuple[str, ...]) -> None:
    first = service(run, metrics=metrics)
    good, _ = generate(run, first, [[1.0, 1.0], [1.0, 1.0]])
    judge(run, first, [[0.5, 0.0]])
    second = service(run, 2, metrics=metrics)
    assert second.batch(1) is None
    assert second.claim("rollout-0", 0, 9) == [], "both groups are there"
    (late,) = judge(run, second, [[0.5, 0.5]])
    assert second.scores.claim("scorer-0", 9, []) == []
    third = service(run, 3, metrics=metrics)
    (other,) = generate(run, third, [[1.0, 1.0]])
    judge(run, third, [[0.25, 0.0]])
    assert third.batch(1) is not None
    assert ids(batch_of(run, 1).groups) == [good, other]
    assert batch_of(run, 1).dropped.keys() <= {late}
    assert [one.rewards for one in batch_of(run, 1).groups] == [[2.0, 1.0], [1.5, 1.0]]


def test_a_weight_that_is_changed_on_resume_holds_for_what_waits(run: Run) -> None:
    first = service(run)
    generate(run, first, [[1.0, 1.0], [1.0, 1.0]])
    judge(run, first, [[0.5, 0.0]])
    changed = ScoreQueue((MODEL,), None, JudgedRewards(10.0, -5.0, 5.0))
    again = Service(run, 2, schedule(), prompts(9), [], scores=changed)
    again.start(0)
    judge(run, again, [[0.0, 1.0]])
    assert again.batch(1) is not None
    assert [one.rewards for one in batch_of(run, 1).groups] == [[6.0, 1.0], [1.0, 11.0]]


def test_what_a_reward_model_says_twice_counts_once(run: Run) -> None:
    controller = service(run, models=(MODEL, MODEL))
    generate(run, controller, [[1.0, 1.0], [1.0, 1.0]])
    (one,) = controller.scores.claim("scorer-0", 1, [])
    controller.scores.release("scorer-0")
    (name, *_) = judge(run, controller, [[0.5, 0.0]], "scorer-1")
    assert name == one.group_id
    digests = write_scores(run, MODEL, [(one, GroupRewards([9.0, 9.0]))])
    assert controller.scored("scorer-0", digests, {name: [9.0, 9.0]}) == [name]
    judge(run, controller, [[0.5, 0.0]])
    assert controller.batch(1) is not None
    assert batch_of(run, 1).groups[0].rewards == [2.0, 1.0]


def test_scorers_that_say_the_wrong_kind_of_thing_are_refused(run: Run) -> None:
    controller = service(run, models=(MODEL, "teacher-1"))
    (name, _) = generate(run, controller, [[1.0, 1.0], [1.0, 1.0]])
    for scorer, rewards in (
        ("scorer-0", {}),
        ("scorer-1", {name: [1.0, 1.0]}),
        ("scorer-0", {"g00000009": [1.0, 1.0]}),
    ):
        with pytest.raises(RunError, match=f"{scorer}: expected rewards of"):
            controller.scored(scorer, {name: "0" * 32}, rewards)
    schema = Schemas(1, 4, 2, 1, controller.scores.scorers)
    message: dict[str, Any] = {"scorer": "scorer-0", "digests": {name: "0" * 32}}
    schema.scored.check({**message, "rewards": {name: [1.0, None]}})
    for rewards in ({name: [1.0]}, {name: [1.0, float("nan")]}, {name: "ab"}, {"x": [1.0, 1.0]}, [[1.0, 1.0]]):
        with pytest.raises(BadRequest, match="expected by ids of groups 2 entries"):
            schema.scored.check({**message, "rewards": rewards})
    with pytest.raises(BadRequest, match="model_rewards"):
        schema.groups([controller.scores.groups([name])[0].to_json() | {"model_rewards": [1.0, 1.0]}])
