"""Batches wait for the scores of their groups, whoever dies meanwhile, and hold the groups that they would hold without scorers."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hpcrl.controller.replicas import SILENCE_S
from hpcrl.controller.schema import Schemas
from hpcrl.controller.score_queue import ScoreQueue
from hpcrl.controller.service import Service
from hpcrl.data.batch_file import read_batch
from hpcrl.data.score_file import RowScores, read_scores, write_scores
from hpcrl.errors import DataError
from hpcrl.observe.metrics import merged
from hpcrl.rundir.layout import Run
from hpcrl.runtime.http_server import BadRequest
from hpcrl.types import Batch, GroupMeta, Work
from tests.controller.test_api import finish, make_run, prompts
from tests.controller.test_service import SCHEDULE
from tests.rows import group_meta

TEACHERS, BOTH = ["teacher-1", "teacher-1"], ["teacher-1", "reference-2"]
EVAL_OFF = replace(SCHEDULE, eval_interval=0)


def group(number: int, rows: int = 2) -> GroupMeta:
    name = f"g{number:08d}"
    return group_meta(
        group_id=name, kind="train", replica=0, path=f"samples/0/{name}.safetensors", rewards=[1.0] * rows, lengths=[5] * rows,
        response_lengths=[2] * rows, stop_reasons=["stop"] * rows, oldest_version=0, newest_version=0, data_source="x", seconds=0.0,
    )  # fmt: skip


def ids(groups: list[GroupMeta]) -> list[str]:
    return [each.group_id for each in groups]


def test_scorers_share_groups_and_claim_about_what_they_have_room_for() -> None:
    queue, groups = ScoreQueue(TEACHERS), [group(number) for number in range(5)]
    queue.add(groups)
    assert ids(queue.claim("scorer-0", 3, [])) == ids(groups[:2])  # two of two samples each
    assert ids(queue.claim("scorer-1", 1, [])) == ids(groups[2:3])
    assert queue.waiting == 5
    assert queue.complete("scorer-0", {groups[0].group_id: "a"}) == []
    assert queue.waiting == 4


def test_what_an_answer_lost_or_a_scorer_held_goes_to_others_first() -> None:
    queue, groups = ScoreQueue(TEACHERS), [group(number) for number in range(4)]
    queue.add(groups)
    assert ids(queue.claim("scorer-0", 4, [])) == ids(groups[:2])
    assert ids(queue.claim("scorer-0", 2, [groups[1].group_id])) == ids(groups[:1])  # the first one never arrived
    assert queue.release("scorer-0") == 2
    assert ids(queue.claim("scorer-1", 99, [])) == ids(groups)


def test_a_score_counts_once_whoever_gives_it() -> None:
    """One that was thought dead scores nevertheless, as does the one that took its place."""
    queue, late = ScoreQueue(TEACHERS), group(1)
    queue.add([late])
    queue.claim("scorer-0", 9, [])
    queue.release("scorer-0")
    assert queue.claim("scorer-1", 9, []) == [late]
    assert queue.complete("scorer-0", {late.group_id: "a"}) == []
    assert queue.complete("scorer-1", {late.group_id: "b"}) == [late.group_id]
    assert queue.complete("scorer-1", {"g00000009": "b"}) == ["g00000009"]
    scored = queue.scored(Batch(1, [late], 1))
    assert scored is not None
    assert scored.groups[0].scores == {"teacher-1": "a"}


def test_a_batch_waits_for_all_models_and_is_then_forgotten() -> None:
    queue, groups = ScoreQueue(BOTH), [group(number) for number in range(2)]
    queue.add(groups)
    batch = Batch(1, groups, 2)
    for scorer in ("scorer-0", "scorer-1"):
        assert queue.scored(batch) is None
        assert ids(queue.claim(scorer, 9, [])) == ids(groups)
        queue.complete(scorer, dict.fromkeys(ids(groups), scorer))
    scored = queue.scored(batch)
    assert scored is not None
    assert scored.groups[1].scores == {"teacher-1": "scorer-0", "reference-2": "scorer-1"}
    queue.forget(batch.generated)
    assert queue.waiting == 0
    assert queue.claim("scorer-0", 9, []) == []


def test_a_group_waits_for_the_models_that_are_to_judge_it_alone() -> None:
    judged = {"x": ["teacher-1"], "y": ["reference-2"], "z": []}
    queue = ScoreQueue(BOTH, judged.__getitem__)
    groups = [replace(group(number), data_source=source) for number, source in enumerate("xyz")]
    queue.add(groups)
    assert queue.waiting == 2
    assert ids(queue.claim("scorer-0", 9, [])) == ids(groups[:1])
    assert ids(queue.claim("scorer-1", 9, [])) == ids(groups[1:2])
    queue.complete("scorer-0", {groups[0].group_id: "a"})
    assert queue.scored(Batch(1, groups, 3)) is None
    queue.complete("scorer-1", {groups[1].group_id: "b"})
    scored = queue.scored(Batch(1, groups, 3))
    assert scored is not None
    assert [each.scores for each in scored.groups] == [{"teacher-1": "a"}, {"reference-2": "b"}, {}]


def test_a_silent_scorer_loses_its_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    queue = ScoreQueue(TEACHERS)
    queue.add([group(1)])
    now = [0.0]
    monkeypatch.setattr(queue.registry.clock, "now", lambda: now[0])
    queue.registry.seen("scorer-0", 0, "scoring")
    queue.claim("scorer-0", 9, [])
    now[0] = SILENCE_S - 1
    assert queue.expire() == []
    now[0] = SILENCE_S + 1
    assert queue.expire() == ["scorer-0"]
    assert ids(queue.claim("scorer-1", 9, [])) == ["g00000001"]


def test_what_a_scorer_has_that_leaves_goes_to_others(run: Run) -> None:
    controller = service(run, 1, TEACHERS)
    controller.start(0)
    made = generate(run, controller, 0)
    for scorer in ("scorer-0", "scorer-1"):
        controller.scores.registry.seen(scorer, 0, "scoring")
    assert ids(controller.scores.claim("scorer-0", 99, [])) == made
    assert controller.scores.claim("scorer-0", 0, made) == [], "it only says that it is there, and what it has"
    assert controller.status()["scorers"] == {"scorer-0": {"groups": 2}, "scorer-1": {"groups": 0}}
    assert controller.leave("scorer-0") == 2
    assert controller.leave("scorer-0") == 0
    assert controller.status()["scorers"] == {"scorer-1": {"groups": 0}}
    assert score(run, controller, "scorer-1", "teacher-1") == made
    assert controller.batch(1) is not None
    told = merged(run)[1]
    assert (told["scorers/ready"], told["scorers/total"], told["scorers/groups_taken_back"]) == (1, 2, 2)


@pytest.mark.parametrize("models", [pytest.param(TEACHERS, marks=pytest.mark.faults_slow), BOTH, [*BOTH, "teacher-1"]])
def test_every_group_is_scored_once_by_each_model_whatever_happens(models: list[str]) -> None:
    """Two hundred thousand random events: claims, answers that get lost, deaths, late scores, batches."""
    draw, queue = random.Random(7), ScoreQueue(models)
    held: dict[str, dict[str, None]] = {f"scorer-{number}": {} for number in range(len(models))}
    open_groups, composed, counted = dict[str, GroupMeta](), 0, 0
    for event in range(200_000):
        scorer = draw.choice(list(held))
        kind = draw.random()
        if kind < 0.3 and len(open_groups) < 64:
            new = group(event, rows=draw.randint(1, 3))
            open_groups[new.group_id] = new
            queue.add([new])
        elif kind < 0.6:
            given = queue.claim(scorer, draw.randint(1, 8), list(held[scorer]))
            if draw.random() < 0.9:  # else the answer gets lost
                held[scorer].update(dict.fromkeys(ids(given)))
        elif kind < 0.9 and held[scorer]:
            done = next(iter(held[scorer]))
            del held[scorer][done]
            counted += queue.complete(scorer, {done: scorer}) == []
        elif kind < 0.92:
            queue.release(scorer)  # thought dead; it may still hand over what it has
        elif kind < 0.94:
            queue.release(scorer)
            held[scorer].clear()
        elif len(open_groups) >= 4:
            batch = Batch(1, list(open_groups.values())[:4], 0)
            if (scored := queue.scored(batch)) is not None:
                assert all(each.scores.keys() == set(models) for each in scored.groups)
                queue.forget(batch.generated)
                composed += len(batch.groups)
                for each in batch.groups:
                    del open_groups[each.group_id]
    assert composed > 5000
    assert counted >= composed * len(set(models))
    assert queue.waiting <= len(open_groups) <= 64


# The controller with them.


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return make_run(tmp_path / "project" / "run")


def service(run: Run, attempt: int, models: list[str]) -> Service:
    return Service(run, attempt, EVAL_OFF, prompts(9), prompts(3), scores=ScoreQueue(models))


def score(run: Run, controller: Service, scorer: str, model: str, value: float = -1.0) -> list[str]:
    """Let a scorer do all that there is; return the groups."""
    groups = controller.scores.claim(scorer, 99, [])
    rows = [(each, [RowScores(np.full(length, value, np.float32)) for length in each.lengths]) for each in groups]
    assert controller.scored(scorer, write_scores(run, model, rows)) == []
    return ids(groups)


def generate(run: Run, controller: Service, version: int) -> list[str]:
    work: list[Work] = controller.claim("rollout-0", version, 9)
    assert controller.complete([finish(run, item, version) for item in work]) == {}
    return [item.group_id for item in work]


def batch_of(run: Run, step: int) -> Batch:
    file = read_batch(run.batch(step))
    assert file is not None
    return file.batch


def test_a_step_begins_when_its_groups_are_scored(run: Run) -> None:
    controller = service(run, 1, BOTH)
    controller.start(0)
    made = generate(run, controller, 0)
    assert controller.batch(1) is None
    assert score(run, controller, "scorer-0", "teacher-1") == made
    assert controller.batch(1) is None
    assert controller.status()["unscored"] == 2
    score(run, controller, "scorer-1", "reference-2")
    assert controller.batch(1) is not None
    assert [set(each.scores) for each in batch_of(run, 1).groups] == [set(BOTH)] * 2
    assert controller.status()["unscored"] == 0


def test_scores_of_an_earlier_attempt_count_and_what_is_damaged_is_scored_again(run: Run) -> None:
    first = service(run, 1, TEACHERS)
    first.start(0)
    generate(run, first, 0)
    first.scores.claim("scorer-0", 1, [])
    rows = [RowScores(np.zeros(5, np.float32))] * 2
    one, other = (
        finish_of for finish_of in first.scores.claim("scorer-1", 1, []) + first.scores.claim("scorer-0", 1, [])
    )
    digests = write_scores(run, "teacher-1", [(one, rows), (other, rows)])
    (run.scores_of("teacher-1") / f"{other.group_id}-{digests[other.group_id]}.safetensors").write_bytes(b"torn")
    again = service(run, 2, TEACHERS)
    again.start(0)
    assert again.batch(1) is None
    assert score(run, again, "scorer-0", "teacher-1") == [other.group_id]
    assert again.batch(1) is not None


def test_with_another_teacher_nothing_of_the_old_one_is_trained(run: Run) -> None:
    """Neither scores of finished groups, nor a batch that is composed and not trained."""
    first = service(run, 1, TEACHERS)
    first.start(0)
    made = generate(run, first, 0)
    score(run, first, "scorer-0", "teacher-1")
    assert first.batch(1) is not None
    again = service(run, 2, ["teacher-2"])
    again.start(0)
    assert again.batch(1) is None
    assert sorted(score(run, again, "scorer-0", "teacher-2")) == sorted(made)
    assert {name for each in batch_of(run, 1).groups for name in each.scores} == {"teacher-2"}


def test_a_batch_whose_scores_are_gone_is_composed_again(run: Run) -> None:
    first = service(run, 1, TEACHERS)
    first.start(0)
    made = generate(run, first, 0)
    score(run, first, "scorer-0", "teacher-1")
    for path in run.scores_of("teacher-1").glob(f"{made[0]}-*"):
        path.unlink()
    again = service(run, 2, TEACHERS)
    again.start(0)
    assert again.batch(1) is None
    assert score(run, again, "scorer-0", "teacher-1", -2.0) == made[:1]
    assert again.batch(1) is not None


def test_scores_leave_with_their_samples(run: Run) -> None:
    first = service(run, 1, TEACHERS)
    first.start(0)
    generate(run, first, 0)
    score(run, first, "scorer-0", "teacher-1")
    stray = run.scores_of("teacher-1") / f"g00000077-{'0' * 32}.safetensors"
    stray.write_bytes(b"of a group that nobody knows")
    service(run, 2, TEACHERS).start(0)
    assert not stray.exists()
    assert len(list(run.scores_of("teacher-1").iterdir())) == 2


def test_scores_are_of_the_samples_that_are_there(run: Run) -> None:
    """A group that was generated again has its old name."""
    controller = service(run, 1, TEACHERS)
    controller.start(0)
    generate(run, controller, 0)
    (one, *_) = controller.scores.claim("scorer-0", 9, [])
    digests = write_scores(
        run, "teacher-1", [(replace(one, digest="0" * 32), [RowScores(np.zeros(5, np.float32))] * 2)]
    )
    named = replace(one, scores={"teacher-1": digests[one.group_id]})
    with pytest.raises(DataError, match="about other samples"):
        read_scores(run, "teacher-1", named)


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        ({"scorer": "scorer-2", "digests": {}}, "expected a scorer of this run: scorer-0, scorer-1"),
        ({"scorer": "scorer-0", "digests": {"g1": "x"}}, "expected checksums of scores by ids of groups"),
        ({"scorer": "scorer-0", "digests": {"../g": "0" * 32}}, "expected checksums of scores by ids of groups"),
        ({"scorer": "scorer-0", "digests": {"g00000001": ""}}, "expected checksums of scores by ids of groups"),
        ({"scorer": "scorer-0", "digests": ["g00000001"]}, "expected checksums of scores by ids of groups"),
    ],
)
def test_messages_of_scorers_are_checked(message: dict[str, object], problem: str) -> None:
    schema = Schemas(1, 4, 2, 1, ScoreQueue(TEACHERS).scorers).scored
    schema.check({"scorer": "scorer-1", "digests": {"g00000001": "0" * 32}})
    with pytest.raises(BadRequest, match=problem):
        schema.check(message)


def test_a_worker_cannot_say_what_scorers_say() -> None:
    schemas = Schemas(1, 4, 2, 1, ScoreQueue(TEACHERS).scorers)
    schemas.groups([group(1).to_json()])
    with pytest.raises(BadRequest, match="scores"):
        schemas.groups([group(1).to_json() | {"scores": {"teacher-1": "0" * 32}}])
