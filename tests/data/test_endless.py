"""Prompts that a function makes, in the place of a dataset: without end, the same after a restart, checked before and while they are trained."""

from __future__ import annotations

import asyncio
import sys
import threading
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from hpcrl.cli.main import main
from hpcrl.config import Config
from hpcrl.controller import prompts_ahead
from hpcrl.controller.admission import Admission
from hpcrl.controller.build import build_service, load_prompts
from hpcrl.controller.prompt_stream import group_id
from hpcrl.controller.prompts_ahead import PromptsAhead
from hpcrl.controller.service import Service
from hpcrl.data import endless
from hpcrl.data.endless import ENDLESS, EndlessPrompts
from hpcrl.errors import DataError, HpcrlError, RunError
from hpcrl.launch.submit.preflight import check_files
from hpcrl.rundir.commit import write_json
from hpcrl.rundir.layout import Run
from hpcrl.runtime.controller_client import ControllerClient
from hpcrl.runtime.process_status import StatusWriter
from hpcrl.types import GroupMeta, Prompt, Work
from tests.controller.test_api import SCHEDULE, end, finish, make_run, prompts, serve_attempt, work_of
from tests.paths import QUICKSTART

MODULE = """
import random

def rows(seed, index, letters=3):
    word = "".join(random.Random(f"{seed}-{index}").sample("abcdefgh", letters))
    if index == 5:
        word *= 40
    if letters == 4 and index >= 2:
        raise RuntimeError("no more words")
    return {
        "prompt": f"sort: {word}", "env_class": "sort_letters", "data_source": "letters",
        "reward_spec": {"ground_truth": "".join(sorted(word))},
    }
"""
GIVEN = [
    "data.train_data=[]", "data.val_data=[]", "trainer.eval_interval=0", "trainer.max_steps=6",
    "data.train_function=words_made:rows", "trainer.train_batch_size=2", "trainer.policy_mini_batch_size=2",
]  # fmt: skip


pytestmark = pytest.mark.usefixtures("own")


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delitem(sys.modules, "words_made", raising=False)
    (tmp_path / "words_made.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def config_of(*more: str) -> Config:
    return Config.from_toml([QUICKSTART], [*GIVEN, *more])


def status_of(path: Path, attempt: int = 1) -> StatusWriter:
    return StatusWriter(Run(path), "controller", attempt)


def words(prompts: object, indices: range) -> list[str]:
    assert isinstance(prompts, EndlessPrompts)
    return [prompts[index].messages[-1]["content"] for index in indices]


def test_a_prompt_follows_from_seed_and_index(own: Path) -> None:
    train, validation, sizes = load_prompts(config_of(), status_of(own))
    assert (len(train), validation, sizes) == (ENDLESS, [], [])
    found = words(train, range(30))
    assert len(set(found)) > 25
    assert found == words(load_prompts(config_of(), status_of(own))[0], range(30))
    assert found != words(load_prompts(config_of("trainer.seed=9"), status_of(own))[0], range(30))
    assert found != words(load_prompts(config_of("data.shuffle_seed=9"), status_of(own))[0], range(30))
    assert all(len(word) == len("sort: abc") for word in found), "the long one, row 5, makes way for another"
    assert len(train[10**9].messages[-1]["content"]) == len("sort: abc")
    longer = load_prompts(config_of("data.train_function_args={letters = 5}"), status_of(own))[0]
    assert len(longer[0].messages[-1]["content"]) == len("sort: abcde")


def test_a_run_that_is_killed_trains_the_same_prompts(own: Path) -> None:
    asked = dict[str, Prompt]()

    def train(run: Run, attempt: int, first: int, last: int) -> None:
        one = build_service(run, attempt, config_of(), status_of(run.path, attempt))
        assert one.start(first - 1) == 6
        for step in range(first, last + 1):
            while one.batch(step) is None:
                work = one.claim("rollout-0", step - 1, 2)
                assert all(asked.setdefault(item.group_id, item.prompt) == item.prompt for item in work)
                assert one.complete([finish(run, item, step - 1) for item in work]) == {}
            one.published(step)

    run = make_run(own / "project" / "run")
    train(run, 1, 1, 4)
    train(run, 2, 3, 6)
    prompts = load_prompts(config_of(), status_of(own))[0]
    assert [asked[name] for name in sorted(asked)] == [prompts[index] for index in range(12)]


def test_a_function_that_fails_in_the_middle_ends_the_attempt(own: Path) -> None:
    run = make_run(own / "project" / "run")
    one: Service = build_service(run, 1, config_of("data.train_function_args={letters = 4}"), status_of(run.path))
    one.start(0)
    work: list[Work] = one.claim("rollout-0", 0, 2)
    one.complete([finish(run, item, 0) for item in work])
    one.published(1)
    assert one.claim("rollout-0", 1, 2) == []
    assert str(one.failure) == "data.train_function='words_made:rows', row 2 raised RuntimeError: no more words"


def test_the_controller_answers_while_a_function_takes_long(own: Path) -> None:
    """Groups get their prompts as these are made, in order, also those that an earlier attempt has left out."""
    run, gate, made = make_run(own / "project" / "run"), threading.Event(), list[int]()

    def make(index: int) -> Prompt:
        if index != 1:
            assert gate.wait(120)
        made.append(index)
        return prompts(9)[index]

    schedule = replace(SCHEDULE, eval_interval=0, staleness=1, total_steps=3, order_seed=None)
    left = Service(run, 1, schedule, prompts(9), [])
    left.start(0)
    claimed = left.claim("rollout-0", 0, 3)
    left.complete([finish(run, item, 0) for item in claimed if item.group_id != group_id(1)])
    served = serve_attempt(run, 2, schedule, train=EndlessPrompts(make, lambda _: True))
    controller = ControllerClient(run, 2, patience_s=30)
    controller.call("start", step=0)
    work = work_of(controller.call("claim", worker="rollout-0", version=0, capacity=4, holding=[]))
    assert [item.group_id for item in work] == [group_id(1)], "another one waits for its prompt"
    controller.call("complete", worker="rollout-0", groups=[finish(run, item, 0).to_json() for item in work])
    assert controller.call("next", step=1)["path"], "it answers"
    assert (made, gate.is_set()) == ([1], False)
    gate.set()
    work = work_of(controller.call("claim", worker="rollout-0", version=0, capacity=4, holding=[]))
    assert [(item.group_id, item.prompt) for item in work] == [(group_id(3), prompts(9)[3])]
    controller.leave("rollout-0")
    controller.close()
    end(run, 2, served, steps=3)
    assert made == [1, 2, 3, 4, 5][: len(made)], "once each, and those of a step ahead at most"


def test_a_function_that_hangs_does_not_keep_the_controller_from_its_end() -> None:
    gate = threading.Event()

    def make(index: int) -> Prompt:
        assert gate.wait(300)
        return prompts(9)[index]

    async def controller() -> None:
        making = PromptsAhead(EndlessPrompts(make, lambda _: True), Admission(2, 0, 3), 2).start(
            lambda: asyncio.sleep(0)
        )
        await asyncio.sleep(0.05)
        assert not making.done()

    thread = threading.Thread(target=lambda: asyncio.run(controller()), daemon=True)
    thread.start()
    thread.join(60)
    ended = not thread.is_alive()
    gate.set()
    assert ended


def test_a_function_that_hangs_ends_the_attempt(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompts_ahead, "_LONGEST_S", 0.1)
    run, gate, failed = make_run(own / "project" / "run"), threading.Event(), list[HpcrlError]()
    hangs = EndlessPrompts(lambda index: prompts(9)[index] if gate.wait(300) else prompts(9)[0], lambda _: True)
    schedule = replace(SCHEDULE, eval_interval=0, total_steps=3, order_seed=None)
    served = serve_attempt(run, 1, schedule, failed, train=hangs)
    controller = ControllerClient(run, 1, patience_s=30)
    with suppress(RunError):  # the controller may have ended
        controller.call("start", step=0)
        controller.call("claim", worker="rollout-0", version=0, capacity=4, holding=[])
    StatusWriter(run, "trainer", 1).write("stopped")
    served.thread.join(60)
    gate.set()
    controller.close()
    assert [str(error) for error in failed] == ["data.train_function: row 0 is not there after 0 s; mend the function"]


def test_a_function_that_hangs_is_no_fault_of_a_run_that_ends(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It needs no more prompts."""
    monkeypatch.setattr(prompts_ahead, "_LONGEST_S", 0.0)
    run, gate, failed = make_run(own / "project" / "run"), threading.Event(), list[HpcrlError]()
    hangs = EndlessPrompts(lambda index: prompts(9)[index] if gate.wait(300) else prompts(9)[0], lambda _: True)
    write_json(run.stop, {"attempt": 1, "reason": "finished"})
    served = serve_attempt(run, 1, replace(SCHEDULE, eval_interval=0, order_seed=None), failed, train=hangs)
    controller = ControllerClient(run, 1, patience_s=30)
    controller.call("start", step=0)
    end(run, 1, served)
    gate.set()
    controller.close()
    assert not failed


def test_no_more_prompts_are_made_than_the_run_may_train() -> None:
    """A function may have no further ones, or wait for them."""
    made = list[int]()

    def make(index: int) -> Prompt:
        made.append(index)
        return prompts(9)[index]

    async def controller() -> None:
        admission = Admission(2, 0, 1)
        ahead = PromptsAhead(EndlessPrompts(make, lambda _: True), admission, 2)
        making = ahead.start(lambda: asyncio.sleep(0))

        async def waits() -> list[int]:
            ahead.claimed.set()
            while ahead.claimed.is_set() and not making.done():
                await asyncio.sleep(0.01)
            return made

        assert await waits() == [0, 1]
        assert admission.claim("rollout-0", 0, 9) == [0, 1]
        assert await waits() == [0, 1]
        admission.complete(0, GroupMeta("g0", "train", 0, "", [], 0, 0, "letters", 1.0))
        admission.drop([0])
        assert await waits() == [0, 1, 2]
        admission.release("rollout-0")
        assert await waits() == [0, 1, 2]
        making.cancel()

    asyncio.run(controller())


def test_prompts_are_kept_until_their_groups_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many are made meanwhile: the event loop would make one again, and wait for another that takes minutes."""
    monkeypatch.setattr(endless, "_KEPT", 2)
    made = list[int]()

    def make(index: int) -> Prompt:
        made.append(index)
        return Prompt(str(index), [], "e")

    async def controller() -> None:
        admission, prompts = Admission(2, 2, 9), EndlessPrompts(make, lambda _: True)
        ahead = PromptsAhead(prompts, admission, 2)
        making = ahead.start(lambda: asyncio.sleep(0))
        begun = list[int]()
        while len(begun) < 6:
            begun += admission.claim("rollout-0", 0, 9)
            ahead.claimed.set()
            await asyncio.sleep(0.01)
        for index in begun:
            assert prompts[index].uid == str(index), "of a group that runs"
            admission.complete(index, GroupMeta(f"g{index}", "train", 0, "", [], 0, 0, "letters", 1.0))
        admission.drop([3])
        assert [prompts[index].uid for index in (0, 5)] == ["0", "5"], "of groups that may begin again"
        assert made == sorted(set(made))
        while len(made) < 16:
            admission.claim("rollout-0", 2, 9)
            admission.drop([index for index in begun if admission.is_finished(index)])
            ahead.claimed.set()
            await asyncio.sleep(0.01)
        assert made == sorted(set(made))
        assert prompts[0]
        assert made.count(0) == 2, "of one that is used it is not kept"
        making.cancel()

    asyncio.run(asyncio.wait_for(controller(), 60))


def test_a_fault_while_a_prompt_is_made_is_raised() -> None:
    def make(index: int) -> Prompt:
        raise RuntimeError(f"no row {index}")

    async def controller() -> None:
        ahead = PromptsAhead(EndlessPrompts(make, lambda _: True), Admission(2, 0, 3), 2)
        await asyncio.wait_for(ahead.start(lambda: asyncio.sleep(0)), 60)

    with pytest.raises(RuntimeError, match="no row 0"):
        asyncio.run(controller())


def test_prompts_that_are_all_too_long_are_refused() -> None:
    made = EndlessPrompts(lambda number: Prompt(str(number), [], "e"), lambda prompt: int(prompt.uid) >= 3 * ENDLESS)
    assert made[7].uid == str(7 + 3 * ENDLESS)
    with pytest.raises(
        DataError, match=r"10 rows in a row are longer than trainer\.max_prompt_length, the first is row 7"
    ):
        EndlessPrompts(lambda number: Prompt(str(number), [], "e"), lambda prompt: prompt.uid == "0")[7]


def test_the_function_is_tried_before_anything_is_queued(capsys: pytest.CaptureFixture[str]) -> None:
    check_files(config_of())
    with pytest.raises(DataError) as caught:
        check_files(config_of("data.train_function=words_made:others"))
    assert str(caught.value) == (
        "data.train_function: 'words_made:others': module 'words_made' has no function 'others'"
    )
    assert main(["data", "check", str(QUICKSTART), *GIVEN, "trainer.max_prompt_length=16"]) == 0
    assert "words_made:rows: 256 prompts, 1 of them left out as too long" in capsys.readouterr().out
