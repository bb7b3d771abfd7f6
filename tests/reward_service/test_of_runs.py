"""Services that the run has started: found by their process statuses, signed, and asked in turns, also when one is started anew elsewhere."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import httpx
import pytest

from hpcrl.config.sections.environment import RemoteRewardConfig, RewardServiceConfig
from hpcrl.envs.base import Turn
from hpcrl.envs.rewards.remote import RemoteRewards
from hpcrl.envs.rewards.response import Response
from hpcrl.errors import ServiceError
from hpcrl.rollout.reward_services import RewardServices
from hpcrl.rundir.commit import write_text
from hpcrl.rundir.layout import Run
from hpcrl.runtime.http_server import Bearer, Signed
from hpcrl.runtime.process_status import SERVING, StatusWriter
from tests.reward_service.material import Slow, running

REMOTE = RemoteRewardConfig(enable=True, service=RewardServiceConfig(model="r"), clip_max=100.0)
RESPONSE = Response(text="abc", messages=[{"role": "user", "content": "x"}])


@pytest.fixture
def run(tmp_path: Path) -> Run:
    run = Run(tmp_path / "run")
    write_text(run.token, "s3cret\n", mode=0o600)
    return run


def model() -> Slow:
    free = Slow()
    free.may.release(1000)
    return free


def proof(name: str, token: str = "s3cret") -> Signed:
    return Signed(token, f"run/{name}", 1)


def tell(run: Run, name: str, url: str, attempt: int = 1) -> None:
    StatusWriter(run, name, attempt).write(SERVING, url=url)


def test_requests_go_to_the_services_in_turns_and_to_no_other(run: Run) -> None:
    first, second = model(), model()
    with running(first, proof("reward-0")) as one, running(second, proof("reward-1")) as other:
        tell(run, "reward-0", one.url)
        services = RewardServices(run, 1, 2, 20.0)
        waited = list[int]()
        threading.Timer(0.5, lambda: tell(run, "reward-1", other.url)).start()
        services.wait(lambda: waited.append(1))
        assert waited
        rewards = RemoteRewards(REMOTE, services.choose)
        assert [rewards(RESPONSE).reward for _ in range(4)] == [4.0] * 4
        assert (len(first.passes), len(second.passes)) == (2, 2)
        # a stranger's request, one with the run's token shown, and one of another service's name
        for headers in ({}, {"authorization": "Bearer s3cret"}):
            assert httpx.get(f"{one.url}/health", headers=headers).status_code == 409
        tell(run, "reward-0", other.url)
        time.sleep(1.1)
        impatient = RemoteRewards(REMOTE, RewardServices(run, 1, 1, 1.0).choose)
        with pytest.raises(
            ServiceError, match=r"reward-0 of the run \(enqueue\) at .*not signed with the token of the run"
        ):
            impatient(RESPONSE)


def test_a_service_that_is_started_anew_gets_what_the_other_had_lost(run: Run) -> None:
    before, found = Slow(), list[Turn]()
    services = RewardServices(run, 1, 1, 60.0)
    with running(before, proof("reward-0")) as one:
        tell(run, "reward-0", one.url)
        rewards = RemoteRewards(REMOTE, services.choose)
        asking = threading.Thread(target=lambda: found.append(rewards(RESPONSE)))
        asking.start()
        deadline = time.monotonic() + 10
        while not before.begun and time.monotonic() < deadline:
            time.sleep(0.05)
        with running(model(), proof("reward-0")) as again:
            tell(run, "reward-0", again.url)
            asking.join(30)
        before.may.release(100)
    assert [turn.reward for turn in found] == [4.0]


def test_a_server_that_only_shows_a_token_is_not_believed(run: Run) -> None:
    with running(model(), Bearer("s3cret")) as stranger:
        tell(run, "reward-0", stranger.url)
        rewards = RemoteRewards(REMOTE, RewardServices(run, 1, 1, 1.0).choose)
        with pytest.raises(ServiceError, match="not signed with the token of the run"):
            rewards(RESPONSE)


def test_services_of_an_earlier_attempt_are_not_asked(run: Run) -> None:
    tell(run, "reward-0", "http://127.0.0.1:9", attempt=1)
    rewards = RemoteRewards(REMOTE, RewardServices(run, 2, 1, 0.5).choose)
    with pytest.raises(ServiceError, match=r"reward-0 of the run \(enqueue\): it is away, after"):
        rewards(RESPONSE)
