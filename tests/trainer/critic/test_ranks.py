"""A critic on ranks of its own: every number of a run is that of the same run with the critic beside the policy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from hpcrl.config import Config
from hpcrl.config.validate import build
from hpcrl.observe.metrics import merged
from hpcrl.rundir.commit import verify, write_text
from hpcrl.rundir.layout import Run
from tests.trainer.saving.test_mid_batch import CRITIC, STEPS, Attempts, assert_same, made, told_by
from tests.trainer.scenarios import laid_over

APART = {"1+1": (1, 1), "2+1": (2, 1), "2+2": (2, 2)}
TOGETHER = {"1": (1, None), "2": (2, None)}
STOPS: list[tuple[str, int | None]] = [
    ("load.policy:signal=SIGTERM", 1),
    ("score.micro_batch@2:signal=SIGTERM", 1),  # one model's ranks hear it, the others when both meet
    ("score.micro_batch@2:signal=SIGTERM", 0),
    ("update.micro_batch@4:signal=SIGUSR2", 1),
    ("update.micro_batch@3:signal=SIGTERM", 0),
    ("update.micro_batch@6:signal=SIGTERM", None),
    ("publish:signal=SIGTERM", 1),
    ("wait@2:signal=SIGTERM", 1),
    ("", None),
]


def settings(model: Path, policy: int, critic: int | None) -> dict[str, Any]:
    """Return those of a run with so many ranks of the policy and, where it has its own, of the critic."""
    placement = {"policy_num_gpus_per_node": policy} | ({"critic_num_gpus_per_node": critic} if critic else {})
    return laid_over(CRITIC, {"trainer": {"critic": {"model": {"path": str(model)}}, "placement": placement}})


def place_anew(run: Run, **placement: int) -> None:
    tree = Config.from_toml([run.config]).to_dict()
    tree["trainer"]["placement"] = placement
    write_text(run.config, build(Config, tree).to_toml())


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, model_path: Path) -> dict[str, Run]:
    folder = tmp_path_factory.mktemp("apart")
    sizes = {**APART, **TOGETHER, "stopped": (1, 1), "joined": (1, 1), "parted": (2, None)}
    runs = {name: made(folder / name, model_path, settings(model_path, *own)) for name, own in sizes.items()}
    for ranks in (1, 2, 3, 4):
        attempts = Attempts(folder)
        for name, (policy, critic) in {**APART, **TOGETHER}.items():
            if policy + (critic or 0) == ranks:
                attempts.of(runs[name], [""])
        if ranks == 2:
            for number, (fault, rank) in enumerate(STOPS, start=1):
                attempts.of(runs["stopped"], [fault], number, rank)
            attempts.of(runs["joined"], ["update.micro_batch@7:signal=SIGTERM"])
            attempts.of(runs["parted"], ["update.micro_batch@7:signal=SIGTERM"])
        attempts.make(ranks)
    place_anew(runs["joined"], policy_num_gpus_per_node=2)
    place_anew(runs["parted"], critic_num_nodes=1)
    again = Attempts(folder)
    for name in ("joined", "parted"):
        again.of(runs[name], [""], first=2)
    again.make(2)
    return runs


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
        ("2+2", "2", 0.0),
        ("2+1", "1", 1e-5),
        ("2+1", "2", 1e-5),
    ],
)
def test_every_number_is_that_of_a_critic_beside_the_policy(
    runs: dict[str, Run], tmp_path: Path, apart: str, together: str, tolerance: float
) -> None:
    assert_same(runs[apart], runs[together], tolerance)
    found, expected = (critic_of(runs[name], tmp_path) for name in (apart, together))
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, atol=tolerance, rtol=0)
    assert found["updates"] == 4 * STEPS


def test_stops_lose_nothing_whoever_hears_of_them(runs: dict[str, Run]) -> None:
    assert_same(runs["stopped"], runs["1+1"], 0.0)
    told = told_by(runs["stopped"])
    assert [each["said"] for each in told] == ["stopped"] * (len(STOPS) - 1) + ["finished"]
    print([each["positions"] for each in told])


@pytest.mark.parametrize("name", ["joined", "parted"])
def test_a_run_goes_on_where_the_critic_has_another_place(runs: dict[str, Run], name: str) -> None:
    ((_, updates),) = told_by(runs[name])[0]["positions"]
    assert updates > 0, "it was stopped inside of a step"
    assert_same(runs[name], runs["2"], 1e-5)


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
