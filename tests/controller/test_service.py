"""What the controller does at the seams: resumed runs, repeated requests, evaluations that overlap training."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hpcrl.config import Config
from hpcrl.controller import dataset_rows, prompt_stream
from hpcrl.controller.build import build_schedule, build_service, load_prompts
from hpcrl.controller.dataset_rows import DatasetRows, Mixture
from hpcrl.controller.replicas import MinReplicas
from hpcrl.controller.schedule import Schedule
from hpcrl.controller.service import Service
from hpcrl.data.batch_file import read_batch
from hpcrl.data.conversations import Tokens
from hpcrl.data.token_file import open_tokens, write_tokens
from hpcrl.data.tokenize import Rows
from hpcrl.errors import RunError
from hpcrl.observe.metrics import merged
from hpcrl.rundir.commit import read_json
from hpcrl.rundir.layout import Run
from hpcrl.rundir.ledger import open_attempt
from hpcrl.runtime.process_status import StatusWriter
from hpcrl.types import GroupMeta, Work
from tests.controller.test_api import finish, make_run, prompts
from tests.paths import QUICKSTART

SCHEDULE = Schedule(
    batch_size=2,
    n_samples=2,
    staleness=0,
    total_steps=4,
    seed=1,
    eval_interval=1,
    eval_before_train=False,
    eval_n_samples=1,
    order_seed=1,
    groups_at_once=None,
    eval_prompts_at_once=1024,
)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return make_run(tmp_path / "project" / "run")


def service(run: Run, attempt: int = 1, **changes: Any) -> Service:
    return Service(run, attempt, replace(SCHEDULE, **changes), prompts(9), prompts(3))


def do(run: Run, controller: Service, work: list[Work], version: int) -> list[GroupMeta]:
    groups = [finish(run, item, version) for item in work]
    assert controller.complete(groups) == {}
    return groups


def train_to(run: Run, controller: Service, first: int, last: int) -> None:
    """Generate and train the steps from `first` to `last`, evaluations included."""
    for step in range(first, last + 1):
        while controller.batch(step) is None:
            work = controller.claim("rollout-0", step - 1, 2)
            assert work, f"nothing to do for step {step}"
            do(run, controller, work, step - 1)
        while controller.status()["eval_open"]:
            do(run, controller, controller.claim("rollout-0", step - 1, 2), step - 1)
        controller.published(step)


def test_evaluations_of_steps_that_are_given_up_are_done_again(run: Run) -> None:
    first = service(run)
    first.start(0)
    train_to(run, first, 1, 3)
    assert (run.evals_of(2) / "summary.json").exists()
    again = service(run, 2)
    again.start(1)
    assert (run.evals_of(1) / "summary.json").exists(), "the checkpoint's own evaluation stays"
    assert not run.evals_of(2).exists()
    train_to(run, again, 2, 4)
    do(run, again, again.claim("rollout-0", 4, 2), 4)
    assert [step for step, metrics in sorted(merged(run).items()) if "eval/all/avg_score" in metrics] == [1, 2, 3, 4]
    assert again.stop == "finished"


def test_a_colocated_run_trains_nothing_while_an_evaluation_is_open(run: Run) -> None:
    """Also where the next batch is there already."""
    first = service(run, eval_interval=0)
    first.start(0)
    train_to(run, first, 1, 2)
    again = service(run, 2, eval_before_train=True, colocated=True)
    again.start(0)
    assert again.batch(1) is None, "the batch of the first attempt is there, but version 0 is to be evaluated"
    work = again.claim("rollout-0", 0, 9)
    assert [item.kind for item in work] == ["eval"] * 3
    do(run, again, work, 0)
    assert again.batch(1) is not None


def test_evaluation_with_more_samples_than_the_workers_have_room_for(run: Run) -> None:
    controller = service(run, eval_before_train=True, eval_n_samples=16)
    controller.start(0)
    assert len(controller.claim("rollout-0", 0, 1)) == 1
    assert controller.claim("rollout-0", 0, 0) == []


def test_groups_of_another_runs_steps_stay_used(run: Run) -> None:
    """A run that began at another run's step 2 continues after its own step 3 with the groups of step 4."""
    first = service(run, eval_interval=0)
    first.start(2)
    train_to(run, first, 3, 3)
    again = service(run, 2, eval_interval=0)
    again.start(3)
    assert [item.group_id for item in again.claim("rollout-0", 3, 9)] == ["g00000006", "g00000007"]


def test_samples_of_a_policy_that_is_yet_to_be_trained_are_not_used(run: Run) -> None:
    """Batch 2 lost a file, so it is composed anew; the groups of version 2 that an earlier attempt left must not train in it."""
    first = service(run, eval_interval=0)
    first.start(0)
    train_to(run, first, 1, 2)
    do(run, first, first.claim("rollout-0", 2, 1), 2)
    lost = read_json(run.batch(2))["groups"][0]["path"]
    run.inside(lost).unlink()
    again = service(run, 2, eval_interval=0)
    again.start(0)
    train_to(run, again, 1, 2)
    assert {group["oldest_version"] for group in read_json(run.batch(2))["groups"]} == {1}


def test_start_beyond_the_end_is_refused(run: Run) -> None:
    with pytest.raises(RunError, match="after step 5, but this run ends at step 4; raise"):
        service(run).start(5)


def test_requests_whose_answer_got_lost_may_come_again(run: Run) -> None:
    controller = service(run, eval_before_train=True, colocated=True)
    assert controller.start(0) == controller.start(0) == 4
    claimed = controller.claim("rollout-0", 0, 2)
    assert [item.kind for item in claimed].count("eval") == 3
    controller.published(0)
    do(run, controller, [item for item in claimed if item.kind == "eval"], 0)
    assert read_json(run.evals_of(0) / "summary.json")["eval/all/avg_score"] == 1.0


def test_a_worker_that_was_silent_goes_on_with_its_groups(run: Run) -> None:
    controller = service(run, eval_interval=0)
    controller.start(0)
    controller.seen("rollout-0", 0, "waiting")
    (held,) = controller.claim("rollout-0", 0, 1)
    controller.workers["rollout-0"].seen -= 999
    assert controller.expire() == ["rollout-0"]
    controller.reconcile("rollout-0", 0, [held.group_id])
    assert [item.group_id for item in controller.claim("rollout-0", 0, 9)] == ["g00000001"]
    do(run, controller, [held], 0)


def test_a_late_engine_gets_nothing_before_it_holds_the_newest_weights(run: Run) -> None:
    controller = service(run, eval_interval=0, staleness=3)
    controller.start(0)
    train_to(run, controller, 1, 2)
    assert [controller.claim("rollout-1", version, 9) for version in (0, 1)] == [[], []]
    assert controller.claim("rollout-1", 2, 9)


def test_a_batch_is_shared_by_the_workers_that_are_there(run: Run) -> None:
    controller = service(run, eval_interval=0, batch_size=6)
    controller.start(0)
    for name in ("rollout-0", "rollout-1", "rollout-2"):
        controller.seen(name, 0, "waiting")
    first = controller.claim("rollout-0", 0, 9)
    assert [len(first), len(controller.claim("rollout-0", 0, 9))] == [2, 0]
    assert len(controller.claim("rollout-1", 0, 9)) == 2
    assert controller.leave("rollout-0") == 2
    assert len(controller.claim("rollout-2", 0, 9)) == 3, "two are left, and share it"


def test_workers_hold_as_much_as_staleness_allows(run: Run) -> None:
    controller = service(run, eval_interval=0, batch_size=4, staleness=2)
    controller.start(0)
    names = [f"rollout-{index}" for index in range(4)]
    for name in names:
        controller.seen(name, 0, "waiting")
    assert [len(controller.claim(name, 0, 2)) for name in names] == [2] * 4, "all that the engines can hold"
    assert [len(controller.claim(name, 0, 9)) for name in names] == [4, 0, 0, 0], "and never more than three batches"


def test_engines_that_get_weights_at_every_second_step(run: Run) -> None:
    controller, trained = service(run, eval_interval=0, staleness=1), list[int]()
    controller.start(0)
    for version in (0, 2):
        work = controller.claim("rollout-0", version, 9)
        assert len(work) == 4, "two steps"
        do(run, controller, work, version)
        for step in (version + 1, version + 2):
            assert controller.batch(step)
            trained.append(max(merged(run)[step]["async/staleness_max"], -1))
        assert controller.claim("rollout-0", version, 9) == []
        controller.published(version + 2)
    assert trained == [0, 1, 0, 1]
    assert controller.stop == "finished"


def test_evaluation_fills_the_engines_whatever_the_batch(run: Run) -> None:
    schedule = replace(SCHEDULE, eval_before_train=True, colocated=True)
    controller = Service(run, 1, schedule, prompts(9), prompts(20))
    controller.start(0)
    for name in ("rollout-0", "rollout-1"):
        controller.seen(name, 0, "waiting")
    work = controller.claim("rollout-0", 0, 9)
    assert [item.kind for item in work] == ["eval"] * 10 + ["train"]


def test_evaluation_is_shared_too(run: Run) -> None:
    controller = service(run, eval_before_train=True, colocated=True)
    controller.start(0)
    for name in ("rollout-0", "rollout-1"):
        controller.seen(name, 0, "waiting")
    assert [item.kind for item in controller.claim("rollout-0", 0, 9)] == ["eval"] * 2 + ["train"]
    assert controller.claim("rollout-0", 0, 9) == []
    assert [item.kind for item in controller.claim("rollout-1", 0, 9)] == ["eval", "train"]


def test_workers_that_come_back_and_groups_that_are_taken_back_are_counted(run: Run) -> None:
    controller = service(run, eval_interval=0, min_replicas=MinReplicas(replicas=3))
    controller.start(0)
    for name in ("rollout-0", "rollout-1"):
        controller.seen(name, 0, "waiting")
    assert controller.claim("rollout-0", 0, 9)
    assert controller.leave("rollout-0") == 1
    assert controller.leave("rollout-0") == 0, "its agent tells it too"
    controller.seen("rollout-0", 0, "waiting")
    train_to(run, controller, 1, 1)
    values = {name: value for name, value in merged(run)[1].items() if name.startswith("replicas/")}
    assert values == {
        "replicas/ready": 2,
        "replicas/total": 3,
        "replicas/restarts": 1,
        "replicas/groups_taken_back": 1,
    }


@pytest.mark.parametrize("order_seed", [None, 1, 2])
def test_a_resumed_run_trains_the_same_prompts_in_the_same_order(
    run: Run, tmp_path: Path, order_seed: int | None
) -> None:
    """Also over the end of an epoch: 9 prompts make 4 steps of 2."""

    def trained(run: Run, attempt: int, first: int, last: int) -> list[tuple[str, str, int]]:
        controller = service(run, attempt, eval_interval=0, total_steps=8, order_seed=order_seed)
        controller.start(first - 1)
        seen = []
        for step in range(first, last + 1):
            work = controller.claim("rollout-0", step - 1, 2)
            seen += [(item.group_id, item.prompt.uid, item.seed) for item in work]
            do(run, controller, work, step - 1)
            assert controller.batch(step)
            controller.published(step)
        return seen

    whole = trained(make_run(tmp_path / "project" / "whole"), 1, 1, 8)
    parts = trained(run, 1, 1, 3) + trained(run, 2, 4, 6) + trained(run, 3, 7, 8)
    assert parts == whole
    in_order = [f"p{i}" for i in [*range(8), *range(8)]]
    assert ([uid for _, uid, _ in whole] == in_order) == (order_seed is None)


def test_a_controller_that_was_thought_dead_composes_nothing(run: Run) -> None:
    open_attempt(run, "7.0", ["node-1"])
    older = service(run, eval_interval=0)
    older.start(0)
    train_to(run, older, 1, 1)
    work = older.claim("rollout-0", 1, 2)
    open_attempt(run, "7.1", ["node-2"])
    older.complete([finish(run, item, 1) for item in work])
    assert "attempt 1 of" in str(older.failure)
    assert older.batch(2) is None
    assert not run.batch(2).exists()


def test_prompts_that_are_evaluated_at_the_same_time_are_bounded(run: Run) -> None:
    controller = service(run, eval_before_train=True, eval_prompts_at_once=2, colocated=True)
    controller.start(0)
    first = [item for item in controller.claim("rollout-0", 0, 9) if item.kind == "eval"]
    assert len(first) == 2
    assert [item.kind for item in controller.claim("rollout-1", 0, 9)] == []
    do(run, controller, first[:1], 0)
    assert [item.group_id for item in controller.claim("rollout-1", 0, 9)] == ["e000000-00000002"]


def test_groups_in_flight_are_bounded_over_all_workers(run: Run) -> None:
    controller = service(run, eval_interval=0, staleness=1, groups_at_once=3)
    controller.start(0)
    work = controller.claim("rollout-0", 0, 2) + controller.claim("rollout-1", 0, 9)
    assert len(work) == 3
    assert controller.claim("rollout-1", 0, 9) == []
    do(run, controller, work[:1], 0)
    assert len(controller.claim("rollout-1", 0, 9)) == 1


def test_what_a_long_run_has_used_is_one_number(run: Run) -> None:
    first = service(run, eval_interval=0)
    first.start(0)
    train_to(run, first, 1, 3)
    history = service(run, 2, eval_interval=0).history(3)
    assert (history.below, history.used) == (6, set())
    run.batch(3).unlink()
    (one, other) = read_json(run.batch(2))["groups"]
    history = service(run, 3, eval_interval=0).history(2)
    assert history.below == 4
    history.use(["g00000005"])
    assert (history.below, history.used) == (4, {5})
    assert [history.is_used(index) for index in (3, 4, 5, 6)] == [True, False, True, False]
    history.use(["g00000004", one["group_id"], other["group_id"]])
    assert (history.below, history.used) == (6, set())


def rows_of(run: Run, *sizes: int, weights: tuple[float, ...] = ()) -> DatasetRows:
    """Write datasets of so many rows, and return them as a controller has them."""
    files = list[Rows]()
    for at, size in enumerate(sizes):
        tokens = [Tokens([at, number, number], [False, True, number % 2 == 0]) for number in range(size)]
        if not run.dataset(f"train-{at}").exists():
            write_tokens(run.dataset(f"train-{at}"), 1, tokens, name=f"data{at}", made_of={}, counts={})
        files.append(Rows(open_tokens(run.dataset(f"train-{at}")), range(size)))
    return DatasetRows(run, files, weights, 5)


def supervised(run: Run, attempt: int = 1, **changes: Any) -> Service:
    schedule = replace(SCHEDULE, n_samples=1, eval_interval=0, min_replicas=MinReplicas(0, replicas=0), **changes)
    return Service(run, attempt, schedule, [], [], rows_of(run, 5, 4))


def trained_rows(run: Run, step: int) -> list[tuple[str, int | None]]:
    file = read_batch(run.batch(step))
    assert file is not None
    return [(group.path, group.row) for group in file.batch.groups]


def test_rows_of_datasets_need_no_worker_and_go_on_where_an_attempt_ended(run: Run) -> None:
    first = supervised(run)
    assert first.start(0) == 4
    for step in (1, 2):
        assert first.batch(step) == f"batches/s{step:06d}.json"
        assert first.batch(step + 1) is None, "a step before it is trained"
        assert first.claim("rollout-0", step - 1, 4) == []
        first.published(step)
    assert first.batch(3)
    before = [trained_rows(run, step) for step in (1, 2, 3)]
    open_attempt(run, "job-2", ["node"])
    second = supervised(run, 2)
    second.start(1)
    assert trained_rows(run, 3) == before[2], "the batches that were composed are trained"
    for step in (2, 3, 4):
        assert second.batch(step)
        second.published(step)
    assert [trained_rows(run, step) for step in (1, 2, 3)] == before
    everything = [row for step in (1, 2, 3, 4) for row in trained_rows(run, step)]
    assert len(set(everything)) == 8, "of nine rows one does not fill a batch"
    assert second.stop == "finished"
    assert merged(run)[2]["data/trained_tokens"] == sum(
        1 + (number % 2 == 0) for _, number in everything[2:4] if number is not None
    )


def test_a_batch_of_rows_that_are_others_by_now_is_composed_again(run: Run) -> None:
    first = supervised(run)
    first.start(0)
    assert first.batch(1)
    for at, count in enumerate((5, 4)):
        again = [Tokens([7, 8, 9], [True] * 3)] * count
        write_tokens(run.dataset(f"train-{at}"), 2, again, name=f"data{at}", made_of={}, counts={})
    open_tokens.cache_clear()
    open_attempt(run, "job-2", ["node"])
    second = supervised(run, 2)
    second.start(0)
    (file,) = [read_batch(run.batch(1))]
    assert file is not None
    assert [group.response_lengths for group in file.batch.groups] == [[3], [3]]


@pytest.mark.parametrize(("weights", "counts"), [((1.0, 1.0), [7, 10]), ((2.0, 0.5), [14, 5]), ((1.5, 0.1), [10, 1])])
def test_weights_say_how_often_an_epoch_has_the_rows_of_a_dataset(
    weights: tuple[float, float], counts: list[int]
) -> None:
    mixture = Mixture((7, 10), weights, 3)
    assert mixture.counts == counts
    epochs = [[mixture.place(epoch, at) for at in range(len(mixture))] for epoch in range(40)]
    assert epochs == [
        [Mixture((7, 10), weights, 3).place(epoch, at) for at in range(sum(counts))] for epoch in range(40)
    ]
    for epoch in epochs:
        for dataset, weight in enumerate(weights):
            often = Counter(row for number, row in epoch if number == dataset)
            assert sum(often.values()) == counts[dataset]
            assert set(often.values()) <= {int(weight), int(weight) + (weight % 1 > 0)}, "evenly"
    seen = {row for epoch in epochs for number, row in epoch if number == 1}
    assert seen == set(range(10)), "each epoch draws others"


def test_prompts_of_weighted_datasets_are_those_of_a_run_that_nothing_interrupts(tmp_path: Path) -> None:
    """An epoch has the three rows of the first dataset twice and half of the others: nine prompts, which batches of two cut off anywhere."""
    asked = dict[str, dict[str, str]]()

    def trained(run: Run, attempt: int, first: int, last: int) -> None:
        dataset_rows._drawn.cache_clear()  # each attempt is another process
        prompt_stream._permutation.cache_clear()
        mixture = Mixture((3, 6), (2.0, 0.5), 7)
        schedule = replace(SCHEDULE, total_steps=27, eval_interval=0, drop_last=False)
        controller = Service(run, attempt, schedule, prompts(9), [], mixture=mixture)
        controller.start(first - 1)
        for step in range(first, last + 1):
            while controller.batch(step) is None:
                work = controller.claim("rollout-0", step - 1, 2)
                asked.setdefault(run.name, {}).update((item.group_id, item.prompt.uid) for item in work)
                do(run, controller, work, step - 1)
            controller.published(step)

    whole, cut = make_run(tmp_path / "whole" / "run"), make_run(tmp_path / "cut" / "again")
    trained(whole, 1, 1, 27)
    trained(cut, 1, 1, 7)
    trained(cut, 2, 6, 27)  # from a checkpoint before the end
    assert asked["again"] == asked["run"]
    order = [asked["run"][name] for name in sorted(asked["run"])]
    assert len(order) == 54
    epochs = [order[at : at + 9] for at in range(0, 54, 9)]
    for epoch in epochs:
        often = Counter(epoch)
        assert {often[f"p{row}"] for row in range(3)} == {2}
        assert sorted(often.values()) == [1, 1, 1, 2, 2, 2]
    assert {uid for epoch in epochs for uid in epoch} == {f"p{row}" for row in range(9)}, "others in each epoch"


def test_weights_are_of_the_prompts_that_are_left_of_each_dataset(run: Run, tmp_path: Path) -> None:
    """Prompts that are set aside or too long count nowhere."""
    for name, texts in (("one", ["a", "b", "c"]), ("two", ["d" * 400, "e"]), ("three", ["f", "g"])):
        rows = [{"prompt": text, "env_class": "format"} for text in texts]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = [str(tmp_path / f"{name}.jsonl") for name in ("one", "two", "three")]
    given = [
        f"data.train_data={json.dumps(files)}", "data.val_data=[]", "data.test_size=2", "data.weights=[1.0, 3.0, 0.5]",
        "trainer.max_prompt_length=64", "trainer.train_batch_size=2", "trainer.policy_mini_batch_size=2",
    ]  # fmt: skip
    config = Config.from_toml([QUICKSTART], given)
    train, validation, sizes = load_prompts(config, StatusWriter(run, "controller", 1))
    assert [prompt.messages[-1]["content"] for prompt in train] == ["c", "e", "f", "g"]
    assert ([prompt.uid for prompt in validation], sizes) == (["0", "1"], [1, 1, 2])
    begun = build_service(run, 1, config, StatusWriter(run, "controller", 1))
    assert begun.start(0) == 2 * config.trainer.epochs, "five prompts are two steps of two"


def test_samples_follow_the_seed_of_the_engines_and_prompts_that_of_the_run() -> None:
    required = {"data.train_data": ["t.parquet"], "trainer.policy.model.path": "m", "trainer.eval_interval": 0}
    config = Config.from_dict({**required, "trainer.seed": 7, "generator.inference_engine.seed": 5})
    found = build_schedule(config, 2048)
    assert (found.seed, found.order_seed) == (5, 7)
