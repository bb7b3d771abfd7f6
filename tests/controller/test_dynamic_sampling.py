"""Groups whose samples are all equally good: dropped or replaced, and every group counts exactly once, whatever dies when."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hpcrl.config.sections.algorithm import DynamicSamplingConfig
from hpcrl.controller.api import Api
from hpcrl.controller.dynamic_sampling import DynamicSampling
from hpcrl.controller.recovery import group_index
from hpcrl.controller.schedule import Schedule
from hpcrl.controller.service import Service
from hpcrl.errors import RunError
from hpcrl.observe.metrics import merged
from hpcrl.rundir.commit import committed_directory, write_json
from hpcrl.rundir.layout import Run
from hpcrl.runtime.process_status import StatusWriter
from hpcrl.types import GroupMeta, Work
from tests.controller.test_api import batch_of, finish, make_run, prompts, write
from tests.controller.test_service import SCHEDULE
from tests.rows import with_columns

GOOD, ALL_RIGHT, ALL_WRONG = [1.0, 0.0], [1.0, 1.0], [0.0, 0.0]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return make_run(tmp_path / "project" / "run")


def rewarded_by(*names: str) -> Schedule:
    return replace(SCHEDULE, eval_interval=0, sampling=DynamicSampling(rewards=names))


def schedule(kind: str | None = "filter", metrics: tuple[str, ...] = (), **changes: Any) -> Schedule:
    settings = {name: changes.pop(name) for name in ("max_sample_batches", "min_replace_ratio") if name in changes}
    sampling = DynamicSampling(DynamicSamplingConfig(type=kind, **settings), metrics, seed=1)
    return replace(SCHEDULE, eval_interval=0, sampling=sampling, **changes)


def service(run: Run, attempt: int = 1, start: int = 0, **settings: Any) -> Service:
    found = Service(run, attempt, schedule(**settings), prompts(9), [])
    found.start(start)
    return found


def group(run: Run, work: Work, version: int, rewards: list[float], **more: Any) -> GroupMeta:
    """Finish a group with these rewards."""
    return write(run, with_columns(finish(run, work, version), rewards=rewards, **more))


def play(run: Run, controller: Service, version: int, rewards: list[list[float]]) -> list[str]:
    """Claim a group for each of the rewards and finish them all; return their names."""
    work = controller.claim("rollout-0", version, len(rewards))
    assert len(work) == len(rewards), f"asked for {len(rewards)} groups, got {len(work)}"
    done = [group(run, item, version, paid) for item, paid in zip(work, rewards, strict=True)]
    assert controller.complete(done) == {}
    return [item.group_id for item in work]


def names(run: Run, step: int) -> list[str]:
    return [meta.group_id for meta in batch_of(run, step).groups]


def test_dropped_groups_are_made_good_by_as_many_others(run: Run) -> None:
    controller = service(run)
    first = play(run, controller, 0, [GOOD, ALL_WRONG])
    assert controller.batch(1) is None
    assert controller.status()["dropped"] == 1
    second = play(run, controller, 0, [ALL_RIGHT])
    assert len(controller.claim("rollout-0", 0, 9)) == 1, "exactly one is missing"
    controller.reconcile("rollout-0", 0, [])
    third = play(run, controller, 0, [GOOD])
    assert controller.batch(1)
    assert names(run, 1) == [first[0], third[0]]
    assert batch_of(run, 1).dropped == {first[1]: 0.0, second[0]: 1.0}
    metrics = merged(run)[1]
    assert metrics["generate/dropped_groups"] == 2
    assert metrics["generate/sample_batches"] == 2.0
    assert metrics["reward/groups_without_spread"] == 0.5, "of the groups that were generated"
    assert (metrics["generate/filtered_positive"], metrics["generate/filtered_negative"]) == (1, 1)
    assert metrics["reward/avg_pass_at_2"] == 1.0, "of the groups that train"
    controller.published(1)
    play(run, controller, 1, [GOOD, GOOD])
    assert batch_of(run, 2).dropped == {}


def test_groups_whose_samples_all_failed_are_counted_by_themselves(run: Run) -> None:
    controller = service(run)
    failed = {"env_metrics": [{}, {}], "stop_reasons": ["failed", "failed"], "failures": ["it raised"] * 2}
    first, second = controller.claim("rollout-0", 0, 2)
    assert controller.complete([group(run, first, 0, ALL_WRONG, **failed), group(run, second, 0, GOOD)]) == {}
    made = play(run, controller, 0, [ALL_WRONG])
    play(run, controller, 0, [GOOD])
    assert controller.batch(1)
    assert batch_of(run, 1).dropped == {first.group_id: None, made[0]: 0.0}
    metrics = merged(run)[1]
    assert {name: metrics[f"generate/filtered_{name}"] for name in ("positive", "negative", "failed")} == {
        "positive": 0, "negative": 1, "failed": 1
    }  # fmt: skip


def test_without_dynamic_sampling_every_group_trains(run: Run) -> None:
    controller = service(run, kind=None, max_sample_batches=1)
    trained = play(run, controller, 0, [ALL_WRONG, ALL_RIGHT])
    assert controller.batch(1)
    assert names(run, 1) == trained
    assert "generate/dropped_groups" not in merged(run)[1]


@pytest.mark.parametrize("kind", ["filter", "replace"])
def test_groups_of_one_sample_are_kept(run: Run, kind: str) -> None:
    controller = service(run, kind=kind, n_samples=1)
    trained = play(run, controller, 0, [[0.0], [1.0]])
    assert names(run, 1) == trained


def test_what_decides_may_be_other_than_the_reward(run: Run) -> None:
    controller = service(run, metrics=("accuracy", "form"))
    work = controller.claim("rollout-0", 0, 2)
    same = [{"accuracy": 1.0, "form": 0.0}, {"accuracy": 0.0, "form": 1.0}]
    other = [{"accuracy": 1.0, "form": 0.0}, {"accuracy": 0.0}]
    controller.complete(
        [
            group(run, work[0], 0, [1.0, 0.0], env_metrics=same),
            group(run, work[1], 0, [1.0, 1.0], env_metrics=other),
        ]
    )
    (more,) = controller.claim("rollout-0", 0, 9)
    controller.complete([group(run, more, 0, [1.0, 1.0], env_metrics=other)])
    assert names(run, 1) == [work[1].group_id, more.group_id]
    assert batch_of(run, 1).dropped == {work[0].group_id: 1.0}


@pytest.mark.parametrize("kind", ["filter", "replace"])
@pytest.mark.parametrize("reported", [{}, {"form": 1.0}])
def test_a_metric_that_nobody_reports_ends_the_run(run: Run, kind: str, reported: dict[str, float]) -> None:
    controller = service(run, kind=kind, metrics=("acuracy",))
    work = controller.claim("rollout-0", 0, 2)
    assert controller.complete([group(run, item, 0, GOOD, env_metrics=[reported] * 2) for item in work]) == {}
    assert "'acuracy'" in str(controller.failure)
    assert "it reports " + (", ".join(reported) or "none") in str(controller.failure)
    assert controller.claim("rollout-0", 0, 2) == []
    again = service(run, 2, kind=kind, metrics=("accuracy",))
    assert again.failure is None, "groups of earlier attempts are generated again"
    work = again.claim("rollout-0", 0, 9)
    assert [item.group_id for item in work] == ["g00000000", "g00000001"]
    right = [{"accuracy": 1.0}, {"accuracy": 0.0}]
    assert again.complete([group(run, item, 0, GOOD, env_metrics=right) for item in work]) == {}
    assert again.batch(1)


def test_a_reward_of_gdpo_that_nobody_reports_is_found_with_the_first_group(run: Run) -> None:
    controller = Service(run, 1, rewarded_by("reward", "acuracy"), prompts(9), [])
    controller.start(0)
    work = controller.claim("rollout-0", 0, 2)
    failed = {"env_metrics": [{}, {}], "stop_reasons": ["failed", "failed"], "failures": ["it raised"] * 2}
    assert controller.complete([group(run, work[0], 0, GOOD, **failed)]) == {}
    assert controller.failure is None, "where all failed, nobody knows what would have been reported"
    assert controller.complete([group(run, work[1], 0, GOOD, env_metrics=[{"accuracy": 1.0}, {}])]) == {}
    assert "'acuracy', which trainer.algorithm.gdpo.rewards names" in str(controller.failure)
    assert "it reports accuracy" in str(controller.failure)
    again = Service(run, 2, rewarded_by("reward", "accuracy"), prompts(9), [])
    again.start(0)
    assert again.failure is None


def test_batches_that_cannot_be_judged_by_the_metrics_of_now_are_made_anew(run: Run) -> None:
    play(run, service(run), 0, [GOOD, GOOD])
    assert run.batch(1).exists()
    again = service(run, 2, metrics=("accuracy",))
    assert again.batch(1) is None
    assert len(again.claim("rollout-0", 0, 9)) == 2


def test_a_resume_with_baselines_generates_anew_what_has_none(run: Run) -> None:
    first = service(run, kind=None, staleness=1)
    play(run, first, 0, [GOOD, GOOD, GOOD])
    assert run.batch(1).exists()
    again = service(run, 2, kind=None, staleness=1, baselines=True)
    assert again.batch(1) is None
    assert not list(run.samples.glob("*/*"))
    work = again.claim("rollout-0", 0, 3)
    assert [item.group_id for item in work] == ["g00000000", "g00000001", "g00000002"]
    assert again.complete([group(run, item, 0, GOOD, baseline=0.5) for item in work]) == {}
    third = service(run, 3, kind=None, staleness=1, baselines=True)
    assert third.batch(1)
    assert third.status()["finished"] == 1, "what has a baseline is used again"


def test_the_run_fails_when_as_many_batches_as_may_be_have_no_good_groups(run: Run) -> None:
    controller = service(run, max_sample_batches=3)
    play(run, controller, 0, [ALL_WRONG, GOOD])
    for _ in range(3):
        play(run, controller, 0, [ALL_WRONG])
        assert controller.failure is None
    play(run, controller, 0, [ALL_WRONG])
    assert isinstance(controller.failure, RunError)
    for words in (
        "step 1: 6 groups",
        "5 of them dropped",
        "max_sample_batches = 3",
        "n_samples_per_prompt",
        "0: no bound",
    ):
        assert words in str(controller.failure)
    assert controller.claim("rollout-0", 0, 9) == []
    assert "5 of them dropped" in str(service(run, 2, max_sample_batches=3).failure)
    resumed = service(run, 3, max_sample_batches=4)
    assert resumed.failure is None
    play(run, resumed, 0, [GOOD])
    assert len(batch_of(run, 1).dropped) == 5


def test_the_last_batch_that_may_be_generated_is_trained(run: Run) -> None:
    controller = service(run, max_sample_batches=2)
    play(run, controller, 0, [ALL_WRONG, ALL_WRONG])
    play(run, controller, 0, [GOOD, GOOD])
    assert controller.failure is None
    assert len(batch_of(run, 1).dropped) == 2


@pytest.mark.parametrize("kind", ["filter", "replace"])
@pytest.mark.parametrize("most", [0, -1])
def test_there_may_be_no_bound(run: Run, kind: str, most: int) -> None:
    controller = service(run, kind=kind, max_sample_batches=most)
    for _ in range(12):
        play(run, controller, 0, [ALL_WRONG, ALL_WRONG])
    assert controller.failure is None
    play(run, controller, 0, [GOOD, GOOD])
    assert len(batch_of(run, 1).dropped) == 24


def test_the_failure_ends_the_controller(run: Run) -> None:
    controller = service(run, max_sample_batches=1)
    play(run, controller, 0, [ALL_WRONG, GOOD])
    StatusWriter(run, "trainer", 1).write("stopped")
    with pytest.raises(RunError, match="max_sample_batches = 1"):
        asyncio.run(asyncio.wait_for(Api(controller, save_seconds=60).watch(run, 1, print), 10))


@pytest.mark.parametrize(("save_seconds", "error"), [(0.1, RunError), (0, asyncio.TimeoutError)])
def test_the_trainer_may_take_its_time_to_save(run: Run, save_seconds: float, error: type[Exception]) -> None:
    controller = service(run, max_sample_batches=1)
    play(run, controller, 0, [ALL_WRONG, GOOD])
    with pytest.raises(error):
        asyncio.run(asyncio.wait_for(Api(controller, save_seconds).watch(run, 1, print), 2))


def test_good_groups_take_the_places_of_others(run: Run) -> None:
    controller = service(run, kind="replace", batch_size=6)
    made = play(run, controller, 0, [GOOD, ALL_WRONG, GOOD, ALL_RIGHT, GOOD, GOOD])
    found = names(run, 1)
    good = [made[at] for at in (0, 2, 4, 5)]
    assert [found[at] for at in (0, 2, 4, 5)] == good
    assert len({found[1], found[3]}) == 2, "without replacement"
    assert {found[1], found[3]} <= set(good)
    assert batch_of(run, 1).dropped == {made[1]: 0.0, made[3]: 1.0}
    controller.batch(1)
    assert merged(run)[1]["generate/sample_batches"] == 1.0
    assert merged(run)[1]["generate/dropped_groups"] == 2


def test_few_good_groups_are_taken_several_times(run: Run) -> None:
    controller = service(run, kind="replace", batch_size=9, n_samples=2, min_replace_ratio=0.2)
    made = play(run, controller, 0, [GOOD, *[ALL_WRONG] * 7, GOOD])
    found = Counter(names(run, 1))
    assert set(found) == {made[0], made[8]}
    assert found.total() == 9


def test_too_few_good_groups_are_generated_again(run: Run) -> None:
    """The share must be greater than the setting."""
    controller = service(run, kind="replace", min_replace_ratio=0.5, max_sample_batches=3)
    first = play(run, controller, 0, [GOOD, ALL_WRONG])
    assert controller.batch(1) is None
    second = play(run, controller, 0, [GOOD, GOOD])
    assert names(run, 1) == second
    assert batch_of(run, 1).dropped == {first[0]: 0.5, first[1]: 0.0}
    controller.batch(1)
    assert merged(run)[1]["generate/sample_batches"] == 2.0
    controller.published(1)
    for _ in range(3):
        assert controller.failure is None
        play(run, controller, 1, [GOOD, ALL_WRONG])
    for words in ("step 2: 6 groups", "in no batch did the rewards differ", "min_replace_ratio = 0.5 of the groups"):
        assert words in str(controller.failure)
    assert "dropped" not in str(controller.failure)


def test_a_restart_replaces_alike(run: Run, tmp_path: Path) -> None:
    """The controller dies between the last group and the batch."""
    rewards = [GOOD, ALL_WRONG, GOOD, ALL_RIGHT, GOOD, ALL_WRONG]
    other = make_run(tmp_path / "other" / "run")
    play(other, service(other, kind="replace", batch_size=6), 0, rewards)
    controller = service(run, kind="replace", batch_size=6)
    for item, paid in zip(controller.claim("rollout-0", 0, 6), rewards, strict=True):
        group(run, item, 0, paid)
    service(run, 2, kind="replace", batch_size=6)
    assert names(run, 1) == names(other, 1)


def test_dropped_groups_stay_dropped_when_the_controller_dies_before_the_batch(run: Run) -> None:
    first = service(run)
    made = play(run, first, 0, [GOOD, ALL_WRONG])
    (unseen,) = first.claim("rollout-0", 0, 1)
    group(run, unseen, 0, ALL_RIGHT)  # written, and the controller died before it heard
    again = service(run, 2)
    assert again.status()["dropped"] == 2
    more = play(run, again, 0, [GOOD])
    assert not set(more) & {*made, unseen.group_id}
    assert names(run, 1) == [made[0], *more]
    assert batch_of(run, 1).dropped == {made[1]: 0.0, unseen.group_id: 1.0}


def test_dropped_groups_stay_dropped_when_the_controller_dies_after_the_batch(run: Run) -> None:
    first = service(run)
    made = play(run, first, 0, [GOOD, ALL_WRONG]) + play(run, first, 0, [GOOD])
    for path in run.samples.glob(f"*/{made[1]}.safetensors"):
        path.unlink()  # the batch itself remembers
    for attempt, step in ((2, 0), (3, 1)):
        again = service(run, attempt, start=step)
        assert again.status()["dropped"] == 0
        assert again.batch(1) or step == 1
        assert names(run, 1) == [made[0], made[2]]
        if step == 1:
            assert not {item.group_id for item in again.claim("rollout-0", 1, 9)} & set(made)


def test_a_batch_that_is_made_anew_leaves_no_later_one_behind(run: Run) -> None:
    """Batch 2 lost a file; what batch 3 trained may be in the new batch 2, and the controller dies before there is another batch 3."""
    play(run, service(run, staleness=2), 0, [GOOD] * 6)
    assert run.batch(3).exists()
    run.inside(batch_of(run, 2).groups[0].path).unlink()
    service(run, 2, staleness=2)
    assert run.batch(2).exists()
    assert not run.batch(3).exists()
    assert not set(names(run, 1)) & set(names(run, 2))


def test_files_of_dropped_groups_go_with_those_that_trained(run: Run) -> None:
    controller, kept = service(run), list[str]()
    for step in (1, 2, 3, 4):
        made = play(run, controller, step - 1, [GOOD, ALL_WRONG]) + play(run, controller, step - 1, [GOOD])
        kept += made if step > 2 else []
        controller.published(step)
    for step in (2, 3):
        with committed_directory(run.checkpoint(step), 1, step=step) as directory:
            write_json(directory / "x.json", step)
        controller.committed()
    assert sorted(path.stem for path in run.samples.glob("*/*")) == sorted(kept)


def test_a_group_that_trains_twice_in_a_batch_goes_once(run: Run) -> None:
    controller = service(run, kind="replace", min_replace_ratio=0.0)
    for step in (1, 2, 3):
        play(run, controller, step - 1, [GOOD, ALL_WRONG])
        assert len(set(names(run, step))) == 1
        with committed_directory(run.checkpoint(step), 1, step=step) as directory:
            write_json(directory / "x.json", step)
        controller.published(step)
        controller.committed()
    assert sorted(path.stem for path in run.samples.glob("*/*")) == ["g00000004", "g00000005"]


@pytest.mark.parametrize("kind", ["filter", "replace"])
@pytest.mark.parametrize("staleness", [0, 2])
@pytest.mark.parametrize("seed", range(3))
def test_every_group_counts_once_whatever_dies_when(run: Run, kind: str, staleness: int, seed: int) -> None:
    """Controllers die at any moment, also before they hear of a file; the trainer falls back to earlier steps."""
    chance, steps, attempt = random.Random(seed), 8, 1
    settings: dict[str, Any] = {"kind": kind, "staleness": staleness, "total_steps": steps, "batch_size": 3}
    controller, version, saved = service(run, **settings, max_sample_batches=0), 0, 0
    trained: dict[int, list[str]] = {}
    while version < steps:
        work = controller.claim("rollout-0", version, chance.randint(1, 4))
        made = [group(run, item, version, chance.choice([GOOD, ALL_RIGHT, ALL_WRONG])) for item in work]
        if chance.random() < 0.1:
            attempt += 1
            controller, version = service(run, attempt, saved, **settings, max_sample_batches=0), saved
            continue
        assert controller.complete(made) == {}
        assert controller.failure is None
        if controller.batch(version + 1):
            version += 1
            trained[version] = names(run, version)
            assert max(version - 1 - meta.oldest_version for meta in batch_of(run, version).groups) <= staleness
            controller.published(version)
            saved = version if chance.random() < 0.5 else saved
    batches = [batch_of(run, step) for step in range(1, steps + 1)]
    assert attempt > 1
    assert [trained[one.step] for one in batches] == [[meta.group_id for meta in one.groups] for one in batches]
    used = [name for one in batches for name in one.generated]
    assert len(used) == len(set(used)), "no group trains in two steps, or trains and is dropped"
    if kind == "filter":
        assert all(len(one.groups) == len({meta.group_id for meta in one.groups}) for one in batches)
    assert all(meta.rewards == GOOD for one in batches for meta in one.groups)
    begun = sorted(index for name in used if (index := group_index(name)) is not None)
    if staleness == 0:
        assert begun == list(range(len(begun))), "none is left out"
