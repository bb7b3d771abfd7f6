"""Evaluation beside training: who keeps a version for it, what a lost worker or attempt leaves, and when a score is there."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from hpcrl.controller.service import Service
from hpcrl.data.cache_files import EvalRow, append_rows
from hpcrl.data.weight_files import PublishedWeights
from hpcrl.observe.metrics import merged
from hpcrl.rundir.commit import read_json
from hpcrl.rundir.evaluations import MOST_OPEN, begun_evaluations
from hpcrl.rundir.layout import Run
from hpcrl.types import Work
from tests.controller.test_api import finish, make_run
from tests.controller.test_evaluation import publish
from tests.controller.test_service import do, service

FIRST, SECOND = "rollout-0", "rollout-1"


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return make_run(tmp_path / "project" / "run")


def begin(run: Run, *workers: str, **changes: Any) -> Service:
    """Start training with workers that wait."""
    controller = service(run, **changes)
    controller.start(0)
    for name in workers:
        controller.seen(name, 0, "waiting")
    return controller


def train(run: Run, controller: Service, step: int, worker: str = FIRST) -> None:
    """Generate and train a step with one worker's groups; rows that it gets stay with it."""
    while controller.batch(step) is None:
        work = controller.claim(worker, step - 1, 9)
        assert work, f"nothing to do for step {step}"
        do(run, controller, [item for item in work if item.kind == "train"], step - 1)


def kinds(work: list[Work]) -> list[str]:
    return [item.kind for item in work]


def scores_of(run: Run) -> list[int]:
    return [step for step, metrics in sorted(merged(run).items()) if "eval/all/avg_score" in metrics]


def test_rows_fill_the_time_of_the_trainer(run: Run) -> None:
    controller = begin(run, FIRST)
    train(run, controller, 1)
    controller.published(1)
    work = controller.claim(FIRST, 1, 9)
    assert kinds(work) == ["train"] * 2, "what the trainer waits for comes first"
    assert controller.claim(FIRST, 1, 9) == []
    do(run, controller, work, 1)
    rows = controller.claim(FIRST, 1, 9)
    assert kinds(rows) == ["eval"] * 3
    assert controller.batch(2), "it is trained meanwhile"
    controller.published(2)
    assert controller.wanted(FIRST, 1) == 2
    assert controller.keeps(FIRST, 1), "its rows are of version 1"
    do(run, controller, rows[:2], 1)
    assert controller.keeps(FIRST, 1)
    do(run, controller, rows[2:], 1)
    assert not controller.keeps(FIRST, 1)
    assert scores_of(run) == [1], "at the step of the version, which is not the newest any more"


def test_rows_that_still_wait_come_before_all_else_when_the_next_version_is_there(run: Run) -> None:
    controller = begin(run, FIRST, staleness=1, batch_size=4)
    train(run, controller, 1)
    controller.published(1)
    assert kinds(controller.claim(FIRST, 1, 4)) == ["train"] * 4
    assert controller.batch(2)
    controller.published(2)
    assert (controller.wanted(FIRST, 1), controller.keeps(FIRST, 1)) == (1, True)
    rows = controller.claim(FIRST, 1, 1)
    assert kinds(rows) == ["eval"] * 2, "as many samples as a group has"
    rows += controller.claim(FIRST, 1, 4)
    assert kinds(rows) == ["eval"] * 3, "no group of version 1 could begin now and train in time"
    assert controller.claim(FIRST, 2, 0) == []
    do(run, controller, rows, 1)
    assert (controller.wanted(FIRST, 1), controller.keeps(FIRST, 1)) == (2, False)


def test_an_engine_that_keeps_a_version_begins_groups_with_it_as_staleness_allows(run: Run) -> None:
    controller = begin(run, FIRST, SECOND, staleness=2)
    train(run, controller, 1)
    controller.published(1)
    train(run, controller, 2, SECOND)
    rows = controller.claim(FIRST, 1, 1)
    assert controller.batch(2)
    controller.published(2)
    more = controller.claim(FIRST, 1, 9)
    assert rows or more
    assert "eval" in kinds([*rows, *more])
    assert "train" in kinds([*rows, *more]), "until step 4"
    indices = [int(item.group_id[1:]) for item in [*rows, *more] if item.kind == "train"]
    assert max(indices) < 4 * 2


def test_the_others_go_on(run: Run) -> None:
    controller = begin(run, FIRST, SECOND)
    train(run, controller, 1)
    controller.published(1)
    groups = controller.claim(FIRST, 1, 1) + controller.claim(SECOND, 1, 1)
    do(run, controller, groups, 1)
    rows = controller.claim(FIRST, 1, 9)
    others = controller.claim(SECOND, 1, 9)
    assert sorted(kinds(rows + others)) == ["eval"] * 3
    assert controller.batch(2)
    controller.published(2)
    do(run, controller, others, 1)
    assert (controller.keeps(FIRST, 1), controller.keeps(SECOND, 1)) == (True, False)
    assert kinds(controller.claim(SECOND, 2, 9)) == ["train"] * 2, "none is kept for the one that evaluates"


def test_nobody_leaves_the_initial_model_before_its_evaluation_is_over(run: Run) -> None:
    """There may be no weights of it to come back to."""
    controller = begin(run, FIRST, SECOND, eval_before_train=True)
    groups = controller.claim(FIRST, 0, 9) + controller.claim(SECOND, 0, 9)
    do(run, controller, groups, 0)
    rows = controller.claim(FIRST, 0, 9)
    others = controller.claim(SECOND, 0, 9)
    controller.published(1)
    do(run, controller, others, 0)
    assert controller.wanted(SECOND, 0) == 0
    controller.leave(FIRST)
    again = controller.claim(SECOND, 0, 9)
    assert {item.group_id for item in again} == {item.group_id for item in rows}
    do(run, controller, again, 0)
    assert controller.wanted(SECOND, 0) == 1


def of_versions(work: list[Work]) -> list[int | None]:
    return [item.version for item in work]


def test_an_engine_that_serves_several_versions_waits_for_no_evaluation(run: Run) -> None:
    controller = begin(run, FIRST, SECOND)
    for name in (FIRST, SECOND):
        controller.seen(name, 0, "waiting", any_version=True)
    train(run, controller, 1)
    controller.published(1)
    do(run, controller, controller.claim(FIRST, 1, 9) + controller.claim(SECOND, 1, 9), 1)
    rows = controller.claim(FIRST, 1, 9)
    assert (kinds(rows), of_versions(rows)) == (["eval"] * 2, [1, 1])
    assert controller.batch(2)
    controller.published(2)
    assert (controller.wanted(FIRST, 1), controller.keeps(FIRST, 1)) == (2, False)
    more = controller.claim(FIRST, 2, 9) + controller.claim(SECOND, 2, 9)
    assert sorted(kinds(more)) == ["eval", "train", "train"]
    assert [item.version for item in more if item.kind == "eval"] == [1], "the oldest evaluation comes first"
    do(run, controller, [item for item in [*rows, *more] if item.kind == "eval"], 1)
    assert scores_of(run) == [1]
    assert begun_evaluations(run) == [2]


def test_rows_that_a_lost_worker_left_go_to_an_engine_that_serves_several_versions(run: Run) -> None:
    controller = begin(run, FIRST, SECOND)
    controller.seen(SECOND, 0, "waiting", any_version=True)
    lose_rows(run, controller)
    controller.seen(SECOND, 2, "waiting", any_version=True)
    assert controller.wanted(SECOND, 2) == 2
    work = controller.claim(SECOND, 2, 9)
    assert of_versions(work) == [1, 1, 1, None, None], "rows of the older version come first, and groups beside them"
    held = [item.group_id for item in work[:3]]
    controller.leave(SECOND)
    controller.seen(SECOND, 2, "waiting", any_version=True)
    controller.reconcile(SECOND, 2, held)
    assert controller.unwanted(SECOND, held) == []
    assert "eval" not in kinds(controller.claim(SECOND, 2, 9)), "they are its own again"
    do(run, controller, work[:3], 1)
    assert scores_of(run) == [1]


def test_replicas_that_only_evaluate(run: Run) -> None:
    controller = begin(run, FIRST, SECOND, evaluators=frozenset([SECOND]), total_steps=3)
    assert controller.claim(SECOND, 0, 9) == []
    train(run, controller, 1)
    controller.published(1)
    assert kinds(controller.claim(FIRST, 1, 9)) == ["train"] * 2, "none is left to the one that evaluates"
    assert controller.claim(FIRST, 1, 9) == []
    rows = controller.claim(SECOND, 1, 9)
    assert kinds(rows) == ["eval"] * 3
    do(run, controller, rows[:1], 1)
    assert controller.leave(SECOND) == 2
    again = controller.claim(FIRST, 1, 9)
    assert kinds(again) == [], "its groups come first"


def test_an_engine_that_generates_goes_on_while_others_evaluate(run: Run) -> None:
    controller = begin(run, FIRST, SECOND, evaluators=frozenset([SECOND]), total_steps=9)
    for step in range(1, 4):
        train(run, controller, step)
        controller.published(step)
        assert controller.wanted(FIRST, step - 1) == step
        assert not controller.keeps(FIRST, step - 1)
    assert controller.wanted(SECOND, 0) == 1
    for step in range(1, 4):
        rows = controller.claim(SECOND, step, 9)
        assert kinds(rows) == ["eval"] * 3
        do(run, controller, rows, step)
    assert scores_of(run) == [1, 2, 3]
    assert controller.wanted(SECOND, 3) == 3


def test_the_others_evaluate_where_none_that_only_evaluates_is_there(run: Run) -> None:
    controller = begin(run, FIRST, evaluators=frozenset([SECOND]))
    train(run, controller, 1)
    controller.published(1)
    do(run, controller, controller.claim(FIRST, 1, 9), 1)
    assert kinds(controller.claim(FIRST, 1, 1)) == ["eval"] * 2
    controller.seen(SECOND, 1, "waiting")
    assert kinds(controller.claim(SECOND, 1, 9)) == ["eval"]


THIRD = "rollout-2"


def lose_rows_of_the_model(run: Run, **changes: Any) -> Service:
    """Leave three rows of version 0 behind, with the only replica that evaluates; the others hold version 1, and two steps are trained."""
    some = {"evaluators": frozenset([FIRST]), "eval_before_train": True, "eval_interval": 2, "total_steps": 2}
    controller = begin(run, FIRST, SECOND, THIRD, **some, **changes)
    assert kinds(controller.claim(FIRST, 0, 9)) == ["eval"] * 3
    train(run, controller, 1, SECOND)
    controller.published(1)
    for name in (SECOND, THIRD):
        assert controller.wanted(name, 0) == 1
        controller.seen(name, 1, "waiting")
    assert controller.leave(FIRST) == 3
    train(run, controller, 2, SECOND)
    return controller


def test_rows_of_the_model_wait_for_an_engine_that_starts(run: Run) -> None:
    """It has no weights that an engine could load: nobody goes back to it while there is something to train."""
    controller = lose_rows_of_the_model(run)
    assert [controller.wanted(name, 1) for name in (SECOND, THIRD)] == [1, 1]
    controller.published(2)
    controller.seen(FIRST, 0, "waiting")
    assert [controller.wanted(name, 1) for name in (SECOND, THIRD)] == [2, 2]
    assert controller.wanted(FIRST, 0) == 0
    do(run, controller, controller.claim(FIRST, 0, 9), 0)
    do(run, controller, controller.claim(FIRST, 2, 9), 2)
    assert (scores_of(run), controller.stop) == ([0, 2], "finished")


def test_one_engine_starts_again_for_rows_of_the_model_where_nothing_else_is_left(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same one as long as it is away, which takes minutes, but not for ever."""
    controller = lose_rows_of_the_model(run)
    controller.published(2)
    for name in (SECOND, THIRD):
        controller.seen(name, 2, "waiting")
    do(run, controller, controller.claim(SECOND, 2, 9) + controller.claim(THIRD, 2, 9), 2)
    assert [controller.wanted(name, 2) for name in (SECOND, THIRD)] == [0, 2]
    controller.leave(SECOND)
    assert controller.wanted(THIRD, 2) == 2, "that one is on its way"
    now = controller._registry.clock.now() + controller.min_replicas.patience_s + 1
    monkeypatch.setattr(controller._registry.clock, "now", lambda: now)
    assert controller.wanted(THIRD, 2) == 0
    controller.leave(THIRD)
    controller.seen(THIRD, 0, "waiting")
    controller.seen(SECOND, 0, "waiting")
    rows = controller.claim(THIRD, 0, 9) + controller.claim(SECOND, 0, 9)
    do(run, controller, rows, 0)
    assert (scores_of(run), controller.stop) == ([0, 2], "finished")


def test_those_that_wait_get_rows_as_soon_as_the_last_that_only_evaluates_has_left(run: Run) -> None:
    controller = begin(run, SECOND, THIRD, evaluators=frozenset([THIRD]), total_steps=3)
    train(run, controller, 1, SECOND)
    controller.published(1)
    for name in (SECOND, THIRD):
        controller.seen(name, 1, "waiting")
    do(run, controller, controller.claim(SECOND, 1, 9), 1)
    rows = controller.claim(THIRD, 1, 9)
    assert kinds(rows) == ["eval"] * 3
    controller.wait(SECOND, 1, 9)
    assert list(controller.assignments()) == []
    controller.leave(THIRD)
    assert [(name, kinds(work)) for name, work in controller.assignments()] == [(SECOND, ["eval"] * 3)]


def test_one_that_waits_for_groups_holds_up_none_that_only_evaluates(run: Run) -> None:
    """It waited before there was one that only evaluates."""
    controller = begin(run, FIRST, evaluators=frozenset([SECOND]), total_steps=3, eval_prompts_at_once=1)
    train(run, controller, 1)
    controller.published(1)
    do(run, controller, controller.claim(FIRST, 1, 9), 1)
    first = controller.claim(FIRST, 1, 9)
    controller.wait(FIRST, 1, 8)
    controller.seen(SECOND, 1, "waiting")
    assert controller.claim(SECOND, 1, 9) == []
    controller.wait(SECOND, 1, 9)
    do(run, controller, first, 1)
    assert [(name, kinds(work)) for name, work in controller.assignments()] == [(SECOND, ["eval"])]


def test_an_initial_policy_whose_weights_are_published_is_left_as_any_other_version(run: Run) -> None:
    controller = begin(run, FIRST, SECOND, eval_before_train=True, engines_begin_with_model=False)
    groups = controller.claim(FIRST, 0, 9) + controller.claim(SECOND, 0, 9)
    do(run, controller, groups, 0)
    rows, others = controller.claim(FIRST, 0, 9), controller.claim(SECOND, 0, 9)
    controller.published(1)
    do(run, controller, others, 0)
    assert (controller.wanted(SECOND, 0), controller.keeps(SECOND, 0)) == (1, False)
    assert kinds(controller.claim(SECOND, 1, 9)) == ["train"] * 2
    do(run, controller, rows, 0)
    assert scores_of(run) == [0]


def lose_rows(run: Run, controller: Service) -> None:
    """Leave three rows of version 1 behind: the first worker is lost with them, and the second one holds version 2."""
    train(run, controller, 1)
    controller.published(1)
    controller.seen(SECOND, 1, "waiting")
    do(run, controller, controller.claim(FIRST, 1, 9) + controller.claim(SECOND, 1, 9), 1)
    controller.leave(SECOND)
    assert kinds(controller.claim(FIRST, 1, 9)) == ["eval"] * 3
    controller.published(2)
    controller.seen(SECOND, 2, "waiting")
    assert controller.leave(FIRST) == 3


def test_rows_of_a_silent_worker_that_another_one_has_are_unwanted(run: Run) -> None:
    """Else it would ask for more of their version all the while, and get none."""
    controller = begin(run, FIRST)
    train(run, controller, 1)
    controller.published(1)
    do(run, controller, controller.claim(FIRST, 1, 9), 1)
    held = [item.group_id for item in controller.claim(FIRST, 1, 9)]
    assert controller.unwanted(FIRST, held) == []
    assert controller.leave(FIRST) == 3
    assert controller.unwanted(FIRST, held) == [], "they wait"
    controller.seen(SECOND, 1, "waiting")
    rows = controller.claim(SECOND, 1, 9)
    assert {item.group_id for item in rows} == set(held)
    controller.published(2)
    controller.seen(FIRST, 1, "generating")
    controller.reconcile(FIRST, 1, held)
    assert not controller.keeps(FIRST, 1)
    assert controller.unwanted(FIRST, held) == held
    do(run, controller, rows[:1], 1)
    assert controller.unwanted(SECOND, held) == [rows[0].group_id]


def test_rows_of_a_silent_worker_that_still_wait_are_its_own_again(run: Run) -> None:
    controller = begin(run, FIRST)
    train(run, controller, 1)
    controller.published(1)
    do(run, controller, controller.claim(FIRST, 1, 9), 1)
    rows = controller.claim(FIRST, 1, 9)
    controller.leave(FIRST)
    controller.published(2)
    controller.seen(FIRST, 1, "generating")
    controller.reconcile(FIRST, 1, [item.group_id for item in rows[:2]])
    assert controller.keeps(FIRST, 1)
    assert [item.group_id for item in controller.claim(FIRST, 1, 9)] == [rows[2].group_id]
    do(run, controller, rows, 1)
    assert scores_of(run) == [1]


def test_what_a_lost_worker_leaves_is_for_an_engine_that_starts(run: Run) -> None:
    controller = begin(run, FIRST, SECOND)
    lose_rows(run, controller)
    assert controller.wanted(SECOND, 2) == 2
    controller.seen(FIRST, 0, "waiting")
    assert controller.wanted(FIRST, 0) == 1
    while controller.wanted(FIRST, 1) == 1:
        do(run, controller, controller.claim(FIRST, 1, 9), 1)
    assert scores_of(run) == [1]


def test_one_engine_goes_back_where_nothing_else_is_left(run: Run) -> None:
    controller = begin(run, FIRST, SECOND, eval_interval=1, total_steps=3)
    lose_rows(run, controller)
    do(run, controller, controller.claim(SECOND, 2, 9), 2)
    do(run, controller, controller.claim(SECOND, 2, 9), 2)
    assert controller.batch(3)
    controller.published(3)
    do(run, controller, controller.claim(SECOND, 3, 9), 3)
    controller.seen("rollout-2", 3, "waiting")
    assert [controller.wanted(name, 3) for name in (SECOND, "rollout-2")] == [1, 3]
    assert scores_of(run) == [], "scores come in the order of versions"
    assert controller.stop is None, "all evaluations are waited for"
    while controller.wanted(SECOND, 1) == 1:
        do(run, controller, controller.claim(SECOND, 1, 9), 1)
    assert scores_of(run) == [1, 2, 3]
    assert controller.stop == "finished"


def test_training_waits_when_too_many_evaluations_are_open(run: Run) -> None:
    controller = begin(run, FIRST, total_steps=9)
    for step in range(1, MOST_OPEN + 1):
        train(run, controller, step)
        assert controller.status()["waits_for_evaluation"] is False
        controller.published(step)
    assert begun_evaluations(run) == [*range(1, MOST_OPEN + 1)]
    do(run, controller, controller.claim(FIRST, MOST_OPEN, 9), MOST_OPEN)
    assert controller.batch(MOST_OPEN + 1) is None
    assert controller.phase == "evaluate"
    assert controller.status()["waits_for_evaluation"] is True
    assert controller.wanted(FIRST, MOST_OPEN) == MOST_OPEN, "its own rows come first"
    do(run, controller, controller.claim(FIRST, MOST_OPEN, 9), MOST_OPEN)
    assert controller.wanted(FIRST, MOST_OPEN) == 1
    do(run, controller, controller.claim(FIRST, 1, 9), 1)
    assert controller.batch(MOST_OPEN + 1)


def test_the_next_attempt_goes_on_with_evaluations_of_older_versions(run: Run) -> None:
    controller = begin(run, FIRST, eval_settings="greedily")
    digests = {step: publish(run, step, str(step)) for step in (1, 2)}
    for step in (1, 2):
        train(run, controller, step)
        controller.published(step)
    item, *_ = controller.claim(FIRST, 1, 9)
    append_rows(run.eval_rows(1, 0), [EvalRow(finish(run, item, 1), item.asked, digests[1])])
    again = service(run, 2, eval_settings="greedily")
    again.start(2)
    again.seen(FIRST, 0, "waiting")
    assert again.wanted(FIRST, 0) == 1
    rows = again.claim(FIRST, 1, 9)
    assert [work.group_id for work in rows] == ["e000001-00000001", "e000001-00000002"]
    do(run, again, rows, 1)
    assert again.wanted(FIRST, 1) == 2
    assert scores_of(run) == [1]


def test_an_evaluation_whose_weights_are_gone_holds_nothing_back(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    controller = begin(run, FIRST)
    for step in (1, 2):
        train(run, controller, step)
        controller.published(step)
    run.eval_losses(1).write_text("{}")
    again = service(run, 2)
    again.start(2)
    assert begun_evaluations(run) == [2]
    assert "version 1 is not evaluated any more" in capsys.readouterr().out
    assert run.eval_losses(1).exists()


@pytest.mark.parametrize(("from_model", "published"), [(True, False), (False, True), (False, False)])
def test_the_evaluation_of_version_0_goes_on_where_engines_can_have_it(
    run: Run, from_model: bool, published: bool
) -> None:
    changes = {"eval_before_train": True, "engines_begin_with_model": from_model}
    controller = begin(run, FIRST, **changes)
    train(run, controller, 1)
    controller.published(1)
    if published:
        publish(run, 0, "0")
    again = service(run, 2, **changes)
    again.start(1)
    assert (0 in begun_evaluations(run)) == (from_model or published)
    assert again.wanted(FIRST, 0) == (0 if from_model or published else 1)


class Attempt:
    """One attempt of a run that is killed somewhere, played with what chance says next.

    Args:
        serves: whether engines serve several versions.

    Attributes:
        held: the version of each worker's engine; groups: what it has begun.
    """

    def __init__(
        self, run: Run, number: int, step: int, draw: random.Random, workers: int, staleness: int, serves: bool
    ) -> None:
        self._serves = serves
        self.run, self.number, self.draw, self.step = run, number, draw, step
        self.controller = service(
            run, number, staleness=staleness, total_steps=6, eval_settings="s", eval_before_train=True
        )
        if step:
            publish(run, step, str(step))
        self.controller.start(step)
        self.held = {f"rollout-{at}": 0 for at in range(workers)}
        self.groups: dict[str, list[Work]] = {name: [] for name in self.held}
        self.asked = list[tuple[str, str]]()

    def turn(self) -> None:
        """Let a worker, or the trainer, do one thing."""
        name, controller = self.draw.choice(list(self.held)), self.controller
        controller.seen(name, self.held[name], "waiting", self._serves)
        what = self.draw.random()
        if what < 0.03:
            controller.leave(name)
            self.held[name], self.groups[name] = 0, []
        elif what < 0.4:
            self._claim(name)
        elif what < 0.8:
            self._complete(name)
        elif controller.batch(self.step + 1):
            self.step += 1
            publish(self.run, self.step, str(self.step))
            controller.published(self.step)

    def _claim(self, name: str) -> None:
        held, wanted = self.held[name], self.controller.wanted(name, self.held[name])
        evaluating = not self._serves and any(item.kind == "eval" for item in self.groups[name])
        assert wanted is not None
        if wanted != held and not evaluating and (wanted > held or not self.groups[name]):
            self.held[name] = wanted
            return
        if wanted == held or evaluating:
            self.groups[name] += self.controller.claim(name, held, 3)

    def _complete(self, name: str) -> None:
        if not self.groups[name]:
            return
        item = self.groups[name].pop(self.draw.randrange(len(self.groups[name])))
        meta = finish(self.run, item, self.held[name] if item.version is None else item.version)
        if item.kind == "eval":
            version = int(item.group_id[1:7])
            assert version == item.version
            assert self._serves or version == self.held[name]
            digest = PublishedWeights.read(self.run.weights_of(version)).digest if version else ""
            append_rows(self.run.eval_rows(version, int(name[-1])), [EvalRow(meta, item.asked, digest)])
        self.controller.complete([meta])


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("staleness", [0, 2])
@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(more, marks=pytest.mark.faults_slow) for more in (2, 3, 4))])
@pytest.mark.parametrize("serves", [False, True])
def test_every_version_has_its_score_once_whatever_is_killed(
    run: Run, serves: bool, seed: int, staleness: int, workers: int
) -> None:
    draw = random.Random(seed)
    attempt, saved = Attempt(run, 1, 0, draw, workers, staleness, serves), 0
    for _ in range(20_000):
        if attempt.controller.stop:
            break
        attempt.turn()
        assert attempt.controller.failure is None
        if draw.random() < 0.05:
            saved = attempt.step
        if draw.random() < 0.04 and attempt.number < 12:
            attempt = Attempt(run, attempt.number + 1, saved, draw, workers, staleness, serves)
    assert attempt.controller.stop == "finished"
    assert scores_of(run) == [*range(7)]
    for version in range(7):
        summary = read_json(run.eval_summary(version))
        assert summary is not None
        assert summary["eval/all/avg_score"] == 1.0
    assert begun_evaluations(run) == []
    assert not list(run.evals.glob("*/*.rows"))
