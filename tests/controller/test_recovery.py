"""What is left on disk: files of finished groups, until nobody needs one of them, and of groups that somebody has begun, for who generates them next."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpcrl.controller.admission import Admission, staleness
from hpcrl.data.cache_files import turn_file
from hpcrl.rundir.checked_lines import append_lines
from hpcrl.rundir.commit import committed_directory, write_json
from hpcrl.rundir.layout import Run
from tests.controller.test_admission import meta
from tests.controller.test_api import batch_of, finish, make_run, write_together
from tests.controller.test_service import do, service, train_to


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return make_run(tmp_path / "project" / "run")


def leave_turns(run: Run, worker: str, group_id: str, version: int) -> str:
    """Leave a file as a worker does; return its name as work has it."""
    path = turn_file(run, worker, group_id, version)
    append_lines(path, [{"versions": [version]}])
    return str(path.relative_to(run.path))


def test_what_a_worker_leaves_is_given_with_its_groups(run: Run) -> None:
    controller = service(run, eval_before_train=True, eval_n_samples=2, colocated=True)
    controller.start(0)
    for name in ("rollout-0", "rollout-1"):
        controller.seen(name, 0, "waiting")
    lost = controller.claim("rollout-0", 0, 9)
    left = {item.group_id: leave_turns(run, "rollout-0", item.group_id, 0) for item in lost}
    assert {item.kind for item in lost} == {"eval", "train"}
    assert not any(item.turns for item in lost)
    controller.leave("rollout-0")
    again = controller.claim("rollout-1", 0, 9)
    assert {item.group_id: item.turns for item in again if item.group_id in left} == {
        name: [path] for name, path in left.items()
    }


def test_a_worker_that_was_started_again_is_told_too(run: Run) -> None:
    controller = service(run, eval_interval=0)
    controller.start(0)
    first = controller.claim("rollout-0", 0, 2)
    left = [leave_turns(run, "rollout-0", item.group_id, 0) for item in first]
    controller.reconcile("rollout-0", 0, [])
    again = controller.claim("rollout-0", 0, 2)
    assert [item.turns for item in again] == [[path] for path in left]
    do(run, controller, again, 0)


def test_the_next_attempt_goes_on_with_what_it_may_use(run: Run) -> None:
    first = service(run, eval_interval=1, colocated=True)
    first.start(0)
    train_to(run, first, 1, 2)
    useful = [
        leave_turns(run, "rollout-0", "g00000004", 2),
        leave_turns(run, "rollout-3", "g00000005", 2),
        leave_turns(run, "rollout-1", "e000002-00000001", 2),
    ]
    useless = {
        "trained": leave_turns(run, "rollout-0", "g00000000", 0),
        "of a policy that is yet to be trained": leave_turns(run, "rollout-0", "g00000005", 3),
        "an evaluation that is over": leave_turns(run, "rollout-0", "e000001-00000000", 1),
    }
    (run.evals_of(2) / "summary.json").unlink(missing_ok=True)
    controller = service(run, 2, eval_interval=1, colocated=True)
    controller.start(2)
    assert {name for name, path in useless.items() if (run.path / path).exists()} == set()
    work = {item.group_id: item.turns for item in controller.claim("rollout-0", 2, 9)}
    assert [work["g00000004"], work["g00000005"], work["e000002-00000001"]] == [[path] for path in useful]
    assert sum(map(len, work.values())) == 3


def test_turns_that_are_too_old_are_not_given(run: Run) -> None:
    """On policy: a group that an older version began may not train any more, so it begins anew."""
    first = service(run, eval_interval=0)
    first.start(0)
    train_to(run, first, 1, 2)
    leave_turns(run, "rollout-0", "g00000004", 1)
    newer = leave_turns(run, "rollout-1", "g00000004", 2)
    for staleness_bound, given in ((0, [[newer], []]), (1, None)):
        controller = service(run, 2, eval_interval=0, staleness=staleness_bound)
        controller.start(2)
        work = controller.claim("rollout-0", 2, 2)
        assert [item.group_id for item in work] == ["g00000004", "g00000005"]
        if given is not None:
            assert [item.turns for item in work] == given
        else:
            assert len(work[0].turns) == 2


def test_groups_that_go_on_stay_within_the_staleness() -> None:
    """Workers come, generate, and are lost with turns on the disk; whatever they leave, no step trains what is too old, and all steps are done."""
    assert sum(gone_on_with(random.Random(seed), steps=20) for seed in range(30)) > 30


def gone_on_with(drawn: random.Random, steps: int) -> int:
    """Play a run to its end; return how many groups went on as those of an older version."""
    size, bound = drawn.randint(1, 5), drawn.randint(0, 3)
    admission = Admission(size, bound, steps, surplus=drawn.choice([0, 0, 2]))
    left: dict[int, set[int]] = {}
    admission.note_left(left)
    version = gone_on = 0
    for _ in range(1000 * steps):
        choice, worker = drawn.random(), f"rollout-{drawn.randrange(3)}"
        if choice < 0.35:
            begun = admission.claim(worker, version, drawn.randint(1, 4))
            gone_on += sum(admission.version_of(index) < version for index in begun)
        elif choice < 0.7:
            running = [index for index in range(admission.cursor) if admission.worker_of(index)]
            for index in drawn.sample(running, min(1, len(running))):
                assert admission.complete(index, meta(index, admission.version_of(index))) is None
                left.pop(index, None)
        elif choice < 0.75:
            oldest = {
                index: admission.version_of(index) for index in range(admission.cursor) if admission.worker_of(index)
            }
            for index in admission.release(worker):
                left.setdefault(index, set()).add(oldest[index])
        elif version < admission.composed:
            version += 1
        elif ready := admission.ready():
            assert all(0 <= staleness(admission.composed + 1, one) <= bound for _, one in ready)
            admission.take([index for index, _ in ready])
        if version == steps:
            return gone_on
    raise AssertionError("it came to no end")


def test_samples_go_when_two_newer_checkpoints_are_there(run: Run) -> None:
    controller = service(run, eval_interval=0)
    controller.start(0)
    train_to(run, controller, 1, 4)
    for step in (2, 3):
        commit(run, step)
        controller.committed()
    assert sorted(path.stem for path in run.samples.glob("*/*")) == [f"g{index:08d}" for index in range(4, 8)]


def test_samples_of_earlier_attempts_go_too_and_nothing_looks_for_them_again(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    controller = service(run, eval_interval=0, total_steps=9)
    controller.start(0)
    train_to(run, controller, 1, 6)
    commit(run, 3, 4)
    again = service(run, 2, eval_interval=0, total_steps=9)
    again.start(4)  # the first attempt died before it heard of the commit
    assert min(path.stem for path in run.samples.glob("*/*")) == "g00000006"
    passes, glob = list[str](), Path.glob

    def counted(path: Path, pattern: str) -> Iterator[Path]:
        passes.append(f"{path.name}/{pattern}")
        return glob(path, pattern)

    monkeypatch.setattr(Path, "glob", counted)
    run.batch(1).write_text("not looked at")
    again.committed()
    commit(run, 5, 6)
    again.committed()
    monkeypatch.undo()
    assert not [one for one in passes if one.startswith("samples/")]
    assert sorted(path.stem for path in run.samples.glob("*/*")) == ["g00000010", "g00000011"]


def test_a_file_of_samples_goes_with_the_last_of_its_groups(run: Run) -> None:
    first = service(run, eval_interval=0, total_steps=9, staleness=1)
    first.start(0)
    groups = write_together(run, [finish(run, item, 0) for item in first.claim("rollout-0", 0, 4)])
    assert len(groups) == 4
    assert first.complete(groups) == {}
    first.published(1)
    assert [group.offset for group in batch_of(run, 2).groups] == [group.offset for group in groups[2:]]
    commit(run, 1, 2)
    first.committed()
    (path,) = run.samples.glob("*/*")
    again = service(run, 2, eval_interval=0, total_steps=9, staleness=1)
    again.start(2)
    train_to(run, again, 3, 3)
    assert path.exists(), "step 2 may be trained again"
    commit(run, 3)
    again.committed()
    assert not path.exists()


def test_a_damaged_group_is_generated_again_without_the_others_of_its_file(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    first = service(run, eval_interval=0, staleness=1)
    first.start(0)
    groups = write_together(run, [finish(run, item, 0) for item in first.claim("rollout-0", 0, 4)])
    assert first.complete(groups) == {}
    path = run.path / groups[0].path
    content = bytearray(path.read_bytes())
    content[groups[2].offset - 1] ^= 1
    path.write_bytes(content)
    again = service(run, 2, eval_interval=0, staleness=1)
    again.start(0)
    assert f"group {groups[1].group_id}: sample file {path} is damaged" in capsys.readouterr().out
    work = again.claim("rollout-0", 0, 9)
    assert [item.group_id for item in work] == [groups[1].group_id]
    do(run, again, work, 0)
    trained = {group.group_id: group.path for step in (1, 2) for group in batch_of(run, step).groups}
    anew = {work[0].group_id: f"samples/0/{work[0].group_id}.safetensors"}
    assert trained == {group.group_id: groups[0].path for group in groups} | anew


def commit(run: Run, *steps: int) -> None:
    for step in steps:
        with committed_directory(run.checkpoint(step), 1, step=step) as directory:
            write_json(directory / "x.json", step)
