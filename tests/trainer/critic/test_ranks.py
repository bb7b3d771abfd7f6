"""A critic on ranks of its own: every number of a run is that of the same run with the critic beside the policy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from hpcrl.observe.metrics import merged
from hpcrl.rundir.commit import verify
from hpcrl.rundir.layout import Run
from tests.trainer.saving.test_mid_batch import CRITIC, STEPS, Attempts, assert_same, made, told_by
from tests.trainer.scenarios import laid_over

APART = {"1+1": (1, 1), "2+1": (2, 1)}
TOGETHER = {"1": (1, None), "2": (2, None)}
STOPS: list[tuple[str, int | None]] = [
    ("load.policy:signal=SIGTERM", 1),
    ("score.micro_batch@2:signal=SIGTERM", 1),  # one model's ranks hear it, the others when both meet
    ("update.micro_batch@1:signal=SIGUSR2", 0),
    ("update.micro_batch@3:signal=SIGTERM", 1),
    ("update.micro_batch@6:signal=SIGTERM", None),
    ("publish:signal=SIGTERM", 1),
    ("", None),
]


def settings(model: Path, policy: int, critic: int | None) -> dict[str, Any]:
    """Return those of a run with so many ranks of the policy and, where it has its own, of the critic."""
    placement = {"policy_num_gpus_per_node": policy} | ({"critic_num_gpus_per_node": critic} if critic else {})
    copies = {
        "fsdp_size": 1 if policy > (critic or policy) else None
    }  # two copies of the policy, beside one of the critic
    changes = {"critic": {"model": {"path": str(model)}}, "placement": placement, "policy": {"fsdp_config": copies}}
    return laid_over(CRITIC, {"trainer": changes})


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, model_path: Path) -> dict[str, Run]:
    folder = tmp_path_factory.mktemp("apart")
    sizes = APART | TOGETHER
    runs = {name: made(folder / name, model_path, settings(model_path, *own)) for name, own in sizes.items()}
    for ranks in (1, 2, 3):
        attempts = Attempts(folder)
        for name, (policy, critic) in sizes.items():
            if policy + (critic or 0) == ranks:
                attempts.of(runs[name], [""])
        attempts.make(ranks)
    return runs


@pytest.fixture(scope="module")
def stopped_runs(tmp_path_factory: pytest.TempPathFactory, model_path: Path, runs: dict[str, Run]) -> dict[str, Run]:
    folder = tmp_path_factory.mktemp("stopped")
    stopped = {name: made(folder / name, model_path, settings(model_path, 1, 1)) for name in ("stopped", "moved")}
    attempts = Attempts(folder)
    for number, (fault, rank) in enumerate(STOPS, start=1):
        attempts.of(stopped["stopped"], [fault], number, rank=rank)
    attempts.of(stopped["moved"], ["update.micro_batch@7:signal=SIGTERM"])
    attempts.of(stopped["moved"], ["update.micro_batch@9:signal=SIGTERM"], 2, config=runs["2"].config)
    attempts.of(stopped["moved"], [""], 3)
    attempts.make(2)
    return stopped


@pytest.mark.slow
def test_two_and_two_ranks_are_the_same_to_the_last_bit(runs: dict[str, Run], tmp_path: Path, model_path: Path) -> None:
    run, attempts = made(tmp_path / "run", model_path, settings(model_path, 2, 2)), Attempts(tmp_path)
    attempts.of(run, [""])
    attempts.make(4)
    assert_same_models(run, runs["2"], tmp_path, 0.0)


def critic_of(run: Run, folder: Path) -> dict[str, torch.Tensor]:
    """Return weights, moments and step counts of a run's critic after its last step."""
    dcp_to_torch_save(run.checkpoint(STEPS) / "critic", folder / "critic.pt")
    state = torch.load(folder / "critic.pt")
    moments = {
        f"{name}.{kind}": value for name, own in state["optimizer"]["state"].items() for kind, value in own.items()
    }
    return {**state["model"], **moments, "updates": state["updates"]}


@pytest.mark.parametrize(
    ("apart", "together", "tolerance"),
    [
        ("1+1", "1", 0.0),  # the same sums in the same order
        ("2+1", "1", 1e-5),
        ("2+1", "2", 1e-5),
    ],
)
def test_every_number_is_that_of_a_critic_beside_the_policy(
    runs: dict[str, Run], tmp_path: Path, apart: str, together: str, tolerance: float
) -> None:
    assert_same_models(runs[apart], runs[together], tmp_path, tolerance)


def assert_same_models(run: Run, together: Run, folder: Path, tolerance: float) -> None:
    assert_same(run, together, tolerance)
    found, expected = (critic_of(each, folder) for each in (run, together))
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        # softmax hardly sees a bias of all keys: its gradient is little more than rounding, which Adam's division makes as large as any
        atol = tolerance * (10 if ".k_proj.bias" in name else 1)
        torch.testing.assert_close(found[name], value, atol=atol, rtol=0, msg=lambda text, name=name: f"{name}: {text}")
    assert found["updates"] == 4 * STEPS


@pytest.mark.faults_slow
def test_stops_lose_nothing_whoever_hears_of_them(runs: dict[str, Run], stopped_runs: dict[str, Run]) -> None:
    assert_same(stopped_runs["stopped"], runs["1+1"], 0.0)
    told = told_by(stopped_runs["stopped"])
    assert [each["said"] for each in told] == ["stopped"] * (len(STOPS) - 1) + ["finished"]
    left = [(each["positions"][-1] if each["positions"] else None) for each in told]
    assert left == [None, None, [0, 4], [1, 4], [1, 5], [2, 0], [4, 0]]
    assert told[2]["has_progress"] == [True, True], "the critic had trained, and nobody leaves without the others"


@pytest.mark.faults_slow
def test_a_run_goes_on_where_the_critic_has_another_place(runs: dict[str, Run], stopped_runs: dict[str, Run]) -> None:
    """Apart, beside the policy, apart again, each time from the inside of a step."""
    stopped = [told["positions"][-1] for told in told_by(stopped_runs["moved"])[:2]]
    assert all(updates for _, updates in stopped), stopped
    assert_same(stopped_runs["moved"], runs["2"], 1e-5)


def test_what_the_critics_ranks_tell(runs: dict[str, Run]) -> None:
    for name in APART:
        for step, metrics in merged(runs[name]).items():
            assert metrics["timing/critic_train"] > 0, step
            assert metrics["timing/wait_for_critic"] >= 0
            assert metrics["timing/wait_for_policy"] >= 0
            assert metrics["memory/critic_peak_host_gib"] > 0
    assert not any("critic_peak" in name or "wait_for_critic" in name for name in merged(runs["2"])[1])


def test_the_critics_ranks_write_the_critic(runs: dict[str, Run]) -> None:
    files = verify(runs["2+1"].checkpoint(STEPS))["files"]
    assert files["critic/__2_0.distcp"]["size"] > files["critic/__0_0.distcp"]["size"] == 0
    assert files["__2_0.distcp"]["size"] == 0
    assert {f"rng-{rank}.safetensors" for rank in range(3)} <= set(files)
    assert {path.name for path in runs["2+1"].dump(1).glob("mini-0-*")} == {
        "mini-0-rank-0.safetensors", "mini-0-rank-1.safetensors",
    }  # fmt: skip
