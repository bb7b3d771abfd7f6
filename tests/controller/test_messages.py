"""What messages may hold: each is refused as a whole, with the field that is wrong, and changes nothing. tests/fuzz looks for more."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from hpcrl.controller.schema import BadRequest, Schema, Schemas
from hpcrl.controller.service import Service
from hpcrl.envs.base import Turn
from hpcrl.errors import RunError, UserCodeError
from hpcrl.rollout.env_session import _checked
from hpcrl.runtime.controller_client import ControllerClient
from hpcrl.types import is_plain_text, plain_text
from tests.controller.test_api import SCHEDULE as TWO_STEPS
from tests.controller.test_api import batch_of, end, finish, make_run, prompts, serve_attempt
from tests.controller.test_service import service

SCHEMAS = Schemas(replicas=3, total_steps=4, n_samples=2, eval_n_samples=1)
CALL = {"worker": "rollout-0", "version": 0, "capacity": 1, "holding": []}
GROUP: dict[str, Any] = {
    "group_id": "g00000007",
    "kind": "train",
    "replica": 0,
    "path": "samples/0/g00000007.safetensors",
    "rewards": [0.0, 1],
    "lengths": [5, 5],
    "response_lengths": [2, 0],
    "stop_reasons": ["stop", "length"],
    "oldest_version": 0,
    "newest_version": 0,
    "data_source": "letters",
    "seconds": 0.5,
}


def refusal(schema: Schema, body: Any) -> str:
    with pytest.raises(BadRequest) as refused:
        schema.parse(body if isinstance(body, bytes) else json.dumps(body).encode())
    assert str(refused.value).isprintable()
    return str(refused.value)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"worker": "\ud800"}, "'worker': expected a worker of this run, rollout-0 to rollout-2, found '\\ud800'"),
        ({"worker": "rollout-3"}, "expected a worker of this run"),
        ({"worker": "rollout-00"}, "expected a worker of this run"),
        ({"worker": ["rollout-0"]}, "expected a worker of this run"),
        ({"version": -1}, "'version': expected a whole number from 0 to 4, found -1"),
        ({"version": 5}, "found 5"),
        ({"version": 1.0}, "found 1.0"),
        ({"version": True}, "found True"),
        ({"capacity": -1}, "'capacity': expected a whole number from 0 to 1000000, found -1"),
        ({"capacity": 10**100}, "found 1000000"),
        ({"holding": "g00000000"}, "'holding': expected a list of ids of groups"),
        ({"holding": ["g٣٣٣٣٣٣٣٣"]}, "ids of groups"),
        ({"holding": ["g" + "9" * 5000]}, "ids of groups"),
        ({"holding": ["g7"]}, "ids of groups"),
        ({"more": 1}, "'more' is unknown: expected worker, version, capacity, holding"),
    ],
    ids=str,
)
def test_a_claim(changes: dict[str, Any], said: str) -> None:
    assert SCHEMAS.claim.parse(json.dumps(CALL).encode()) == CALL
    assert said in refusal(SCHEMAS.claim, {**CALL, **changes})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"rewards": [float("nan"), "x"]},
            "rewards': expected a list of numbers from -1e+30 to 1e+30, found [nan, 'x']",
        ),
        ({"rewards": [1.0, float("nan")]}, "rewards'"),
        ({"rewards": [float("inf"), 1.0]}, "rewards'"),
        ({"rewards": [1.0, 1e308]}, "rewards'"),
        ({"rewards": [1.0]}, "rewards': expected 2 entries, one per sample, found [1.0]"),
        ({"lengths": [-5, 5]}, "lengths': expected a list of whole numbers from 0 to"),
        ({"lengths": [5, 5, 5]}, "lengths': expected one entry per row"),
        ({"rows": [2, 1]}, "lengths': expected one entry per row"),
        ({"shared": [0]}, "shared': expected one entry per row, or none, found [0]"),
        ({"shared": [0, -1]}, "shared': expected a list of whole numbers from 0 to"),
        ({"response_lengths": [2.0, 1]}, "response_lengths'"),
        ({"stop_reasons": ["stop", None]}, "stop_reasons': expected a list of names"),
        ({"env_metrics": [{"x": float("inf")}, {}]}, "env_metrics'"),
        ({"env_metrics": [{"\x1b[2J": 1.0}, {}]}, "env_metrics'"),
        ({"env_metrics": [{"x": 1.0}]}, "env_metrics': expected 2 entries, one per sample, or none"),
        ({"failures": ["\x1b[2J"]}, "failures'"),
        ({"failures": ["x"] * 4}, "failures': expected at most one per sample, 2, and one more"),
        ({"baseline": "x"}, "baseline': expected null, or a number"),
        ({"oldest_version": 1}, "oldest_version': expected at most 0, found 1"),
        ({"kind": "eval"}, "kind': expected the epoch in the group's id, found 'eval'"),
        ({"path": 7}, "path': expected a name"),
        ({"path": "../../x"}, "path': expected a file of samples in samples/0, found '../../x'"),
        ({"path": "samples/1/g00000007.safetensors"}, "path': expected a file of samples in samples/0"),
        ({"path": "samples/0/../g00000007.safetensors"}, "path': expected a file of samples in samples/0"),
        ({"path": "samples/0/.safetensors"}, "path': expected a file of samples in samples/0"),
        ({"offset": -1}, "offset': expected a whole number from 0 to"),
        ({"replica": 3}, "replica': expected a whole number from 0 to 2"),
        ({"data_source": "a\nb"}, "data_source': expected a name: 1 to 200 characters that can be printed"),
        ({"seconds": -1}, "seconds'"),
        ({"mine": 1}, "'mine' is unknown"),
    ],
    ids=str,
)
def test_a_group(changes: dict[str, Any], said: str) -> None:
    (group,) = SCHEMAS.groups([GROUP])
    assert group.rewards == [0.0, 1]
    with pytest.raises(BadRequest) as refused:
        SCHEMAS.groups([GROUP, {**GROUP, **changes}])
    assert said in str(refused.value)
    assert "groups[1]." in str(refused.value) or "mine" in changes


@pytest.mark.parametrize("depth", [960, 20_000])
def test_deep_json(depth: int) -> None:
    deep = b"[" * depth + b"]" * depth
    refusal(SCHEMAS.leave, deep)
    refusal(SCHEMAS.leave, b'{"worker": ' + deep + b"}")


@pytest.mark.parametrize("wait", [b"NaN", b"Infinity", b"1e300", b"-1", b"61", b'"1"'])
def test_nobody_waits_for_ever(wait: bytes) -> None:
    assert "'wait': expected a number from 0 to 60" in refusal(SCHEMAS.next, b'{"step": 1, "wait": ' + wait + b"}")


def unchanged(controller: Service, ask: Any, said: str) -> None:
    before = pickle.dumps(controller)
    with pytest.raises(RunError, match=said):
        ask()
    assert pickle.dumps(controller) == before


def test_what_a_run_has_not_come_to_yet_changes_nothing(tmp_path: Path) -> None:
    run = make_run(tmp_path / "project" / "run")
    controller = service(run, eval_interval=0, baselines=False)
    unchanged(controller, lambda: controller.published(1), "the trainer has not started")
    unchanged(controller, lambda: controller.check_version(1), "no engine can hold version 1: the trainer has not")
    controller.start(0)
    unchanged(controller, lambda: controller.start(1), "started after step 0 already: it cannot start after step 1")
    unchanged(controller, lambda: controller.published(1), "version 0 is, and step 0 is the newest that has a batch")
    unchanged(controller, controller.check_trained, "training ends after step 4, and the newest version is 0")
    first, second = (finish(run, item, 0) for item in controller.claim("rollout-0", 0, 2))
    newer = finish(run, controller.work.train_work(1), 1)
    unchanged(controller, lambda: controller.complete([first, newer]), "no engine can hold version 1")
    other = type(second)(**{**vars(second), "data_source": "another"})
    unchanged(controller, lambda: controller.complete([first, other]), "is of the data source 'letters', not 'another'")
    assert controller.complete([first, second]) == {}
    controller.published(1)
    unchanged(controller, lambda: controller.published(0), "version 0 cannot be published: version 1 is")


def test_a_start_beyond_the_end_is_told_with_its_remedy(tmp_path: Path) -> None:
    controller = service(make_run(tmp_path / "project" / "run"))
    asked = controller.schemas().start.parse(b'{"step": 5000}')
    with pytest.raises(RunError, match=r"after step 5000, but this run ends at step \d+; raise trainer.max_steps"):
        controller.start(**asked)


def test_a_score_belongs_to_one_version(tmp_path: Path) -> None:
    run = make_run(tmp_path / "project" / "run")
    controller = service(run, eval_before_train=True, staleness=1)
    controller.start(0)
    controller.complete([finish(run, item, 0) for item in controller.claim("rollout-0", 0, 9)])
    (row, *_) = controller.claim("rollout-0", 0, 9)
    controller.published(1)
    mixed = replace(finish(run, row, 0), newest_version=1)
    unchanged(
        controller, lambda: controller.complete([mixed]), "evaluates version 0, and has tokens of the versions 0 to 1"
    )


def test_a_group_without_the_baseline_that_the_run_compares_with(tmp_path: Path) -> None:
    run = make_run(tmp_path / "project" / "run")
    controller = service(run, eval_interval=0, baselines=True)
    controller.start(0)
    (work,) = controller.claim("rollout-0", 0, 1)
    unchanged(controller, lambda: controller.complete([finish(run, work, 0)]), "lacks the reward of a greedy response")


@pytest.mark.parametrize(
    ("turn", "said"),
    [
        (Turn([], 1e300, True), "reward: 1e\\+300; expected a finite number of at most 1e\\+30"),
        (Turn([], float("nan"), True), "reward: nan; expected a finite number"),
        (Turn([], cast(Any, None), True), "reward: None; expected a finite number"),
        (Turn([], cast(Any, "1"), True), "reward: '1'; expected a finite number"),
        (Turn([], 0.0, True, {"x": float("nan")}), "metric 'x': nan; expected a finite number"),
        (Turn([], 0.0, True, action=cast(Any, 3)), "action: expected a text or None, found 3"),
        (Turn([], 0.0, True, {"x": cast(Any, None)}), "metric 'x': None; expected a finite number"),
        (Turn([{"role": "user", "content": [{"type": "image", "image": "no.png"}]}], 0.0, False), "no.png"),
        (Turn([], 0.0, True, {"a\x1b": 1.0}), r"a metric is called 'a\\x1b'; expected a text"),
    ],
)
def test_what_an_environment_says_can_be_handed_over(turn: Turn, said: str) -> None:
    """So that its user hears of it, and not of a message that the controller refuses; and it costs the sample alone."""
    with pytest.raises(UserCodeError, match=said):
        _checked(turn)


def test_numbers_of_numpy_and_booleans_are_numbers() -> None:
    turn = _checked(
        Turn(
            [],
            cast(Any, np.float32(0.5)),
            True,
            {"hit": cast(Any, np.int64(1)), "done": cast(Any, np.True_), "on": True},
        )
    )
    assert (turn.reward, turn.metrics) == (0.5, {"hit": 1.0, "done": 1.0, "on": 1.0})
    assert [type(value) for value in (turn.reward, *turn.metrics.values())] == [float] * 4


def test_what_a_failure_says_can_be_handed_over() -> None:
    told = plain_text("line\n\ttab \x1b[2J\ud800 é" + "x" * 5000, 2000)
    assert told.startswith("line\n\ttab \N{REPLACEMENT CHARACTER}[2J\N{REPLACEMENT CHARACTER} éxxx")
    assert is_plain_text(told, 2000)


def test_others_are_answered_while_much_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A named pipe takes as long to read as the test likes."""
    monkeypatch.setattr("hpcrl.controller.api._READ_S", 0.1)
    run = make_run(tmp_path / "project" / "run")
    first = Service(run, 1, TWO_STEPS, prompts(5), [])
    first.start(0)
    first.complete([finish(run, work, 0) for work in first.claim("rollout-0", 0, 9)])
    slow = run.path / batch_of(run, 1).groups[0].path
    slow.unlink()
    os.mkfifo(slow)
    served = serve_attempt(run, 2)
    controller = ControllerClient(run, 2, patience_s=10)
    try:
        assert controller.call("start", step=0) == {"total_steps": None, "steps_per_epoch": None}
        assert controller.call("report", worker="rollout-0", version=0, state="ready")["version"] is None

        def write() -> None:
            while slow.exists():
                with contextlib.suppress(OSError):  # nobody reads just now
                    os.close(os.open(slow, os.O_WRONLY | os.O_NONBLOCK))
                time.sleep(0.01)

        writer = threading.Thread(target=write)
        writer.start()
        while (answer := controller.call("start", step=0))["total_steps"] is None:
            pass
        assert answer["total_steps"] == TWO_STEPS.total_steps
        assert not run.batch(1).exists(), "a group of it is gone"
        writer.join(10)
        assert not writer.is_alive()
    finally:
        end(run, 2, served)
