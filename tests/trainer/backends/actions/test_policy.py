"""What a policy that moves robots trains is what its engine did: probabilities, checkpoints, adapters and weights, with a tiny PI0.5 in the simulated arm."""

from __future__ import annotations

import asyncio
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from hpcrl.config.sections.model import Pretrained
from hpcrl.data.weight_files import PublishedWeights
from hpcrl.errors import DataError
from hpcrl.families.pi05.architecture import own_name
from hpcrl.families.pi05.engine import ActionEngine
from hpcrl.families.pi05.policy import ActionPolicy, action_source
from hpcrl.families.pi05.samples import ACTIONS, IMAGES, PATH
from hpcrl.families.pi05.source import loaded
from hpcrl.families.pi05.statistics import statistics_of
from hpcrl.planning.whole_model import memory_of_parameters
from hpcrl.trainer.backends.fsdp.muon import matrices_of
from hpcrl.trainer.distributed import World
from hpcrl.trainer.saving.publish import Publisher
from tests.data.pi05.material import write_lerobot
from tests.paths import CONFIGS
from tests.trainer.backends.actions.material import (
    Played,
    configured,
    launched,
    minis,
    play,
    played,
    train_steps,
)
from tests.trainer.backends.actions.ranks import trained
from tests.trainer.material import load_weights
from tests.trainer.ranks import Ranks

pytest.importorskip("mujoco")

MODEL = CONFIGS / "reach_pi05" / "model"
LORA = (
    "trainer.policy.model.lora.rank=4",
    "trainer.policy.model.lora.alpha=8",
    "trainer.policy.optimizer_config.lr=0.05",
)


@pytest.fixture(scope="module")
def engine() -> ActionEngine:
    return launched(configured(MODEL))


@pytest.fixture(scope="module")
def episodes(tmp_path_factory: pytest.TempPathFactory, engine: ActionEngine) -> Played:
    return played(tmp_path_factory.mktemp("actions") / "run", configured(MODEL), engine)


def policy_of(episodes: Played, world: World) -> ActionPolicy:
    return ActionPolicy(episodes.config.trainer, world, episodes.config.vla.pi05)


def test_rows_are_turns_with_their_own_observations(episodes: Played, alone: World) -> None:
    (mini,) = minis(episodes, alone)
    metas, samples = episodes.batch.groups, mini.rows
    assert len(samples.lengths) == sum(len(meta.lengths) for meta in metas)
    for tensors in samples.tensors:
        done, size = tensors[ACTIONS].tolist()
        assert (1 <= done <= 2, size) == (True, 2)
        assert tensors[PATH].shape == (5, 2, 4)
        assert tensors[IMAGES].shape == (1, 16, 16, 3)
    assert samples.loss_mask.sum() == sum(int(tensors[ACTIONS][0]) for tensors in samples.tensors)
    assert not torch.equal(samples.tensors[0][IMAGES], samples.tensors[1][IMAGES])


@pytest.mark.parametrize("method", ["flow_sde", "flow_cps"])
def test_actions_have_the_log_probabilities_that_the_engine_told(method: str, tmp_path: Path, alone: World) -> None:
    config = configured(MODEL, f"vla.pi05.noise_method={method}", "trainer.micro_forward_batch_size_per_gpu=4")
    done = played(tmp_path / "run", config, launched(config))
    policy = policy_of(done, alone)
    (mini,) = minis(done, alone)
    told, mask = mini.rows.rollout_logprobs, mini.rows.loss_mask > 0
    assert told[mask].std() > 0.1
    before = mini.scored(policy.logprobs)
    torch.testing.assert_close(before[mask], told[mask], rtol=1e-4, atol=1e-4)
    sums = train_steps(policy, done, alone)[0]
    assert sums["current_abs_diff"] / sums["current_tokens"] < 1e-4
    assert (mini.scored(policy.logprobs) - before)[mask].abs().max() > 1e-3


def state(policy: ActionPolicy) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in policy._trained().items()}


def test_what_is_resumed_goes_on_as_if_it_had_never_stopped(episodes: Played, tmp_path: Path, alone: World) -> None:
    whole = policy_of(episodes, alone)
    train_steps(whole, episodes, alone)
    (tmp_path / "saved").mkdir()
    whole.save(tmp_path / "saved", torch.distributed.group.WORLD)  # pyright: ignore[reportArgumentType]
    train_steps(whole, episodes, alone)
    resumed = policy_of(episodes, alone)
    resumed.restore(tmp_path / "saved")
    train_steps(resumed, episodes, alone)
    for name, value in state(whole).items():
        torch.testing.assert_close(state(resumed)[name], value, rtol=0, atol=0)


def test_two_ranks_train_as_one_does(episodes: Played, alone: World, two: Ranks) -> None:
    options = {"run": str(episodes.run.path), "model": str(MODEL), "overrides": [], "version": 11}
    trained(alone, options)
    again = {"overrides": ["trainer.gradient_checkpointing=true"], "version": 12}
    two.play([("backends.actions.ranks:trained", options | again)])
    one, other = (load_weights(episodes.run.weights_of(version)) for version in (11, 12))
    before = loaded(Pretrained(str(MODEL)), torch.float32)
    assert max((before.get_parameter(str(own_name(name))) - value).abs().max() for name, value in one.items()) > 1e-4
    for name, value in one.items():
        torch.testing.assert_close(other[name], value, rtol=0, atol=1e-4, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("adapted", [False, True], ids=["whole", "adapters"])
def test_new_weights_reach_the_engine(adapted: bool, episodes: Played, alone: World) -> None:
    config = configured(MODEL, *(LORA if adapted else ()))
    episodes, engine = replace(episodes, config=config), launched(config)
    policy = policy_of(episodes, alone)
    train_steps(policy, episodes, alone)
    Publisher(episodes.run, 0, alone, torch.float32, 9, longest=16, adapters=adapted).publish(policy, 1 + adapted)
    weights = PublishedWeights.read(episodes.run.weights_of(1 + adapted))
    before = play(config, engine, "eval", groups=1, size=1)[0]

    async def take() -> float | None:
        await engine.update_weights(weights)
        return await engine.probe(weights, "float32", None)

    difference = asyncio.run(take())
    assert difference is not None
    assert difference < 1e-4
    after = play(config, engine, "eval", groups=1, size=1)[0]
    assert (before.newest_version, after.newest_version) == (0, 1 + adapted)


def test_an_export_is_a_model_that_a_run_begins_from(tmp_path: Path, episodes: Played, alone: World) -> None:
    shutil.copytree(MODEL, tmp_path / "model")
    write_lerobot(tmp_path / "model")
    config = configured(tmp_path / "model")
    policy = ActionPolicy(config.trainer, alone, config.vla.pi05)
    train_steps(policy, episodes, alone)
    model = episodes.config.trainer.policy.model
    path = Publisher(episodes.run, 0, alone, torch.float32, 2).export(
        policy, 1, Pretrained(str(model.path)), episodes.config.generator.chat_template
    )
    exported = dict(loaded(Pretrained(str(path)), torch.float32).named_parameters())
    for name, value in policy._model.model.named_parameters():
        assert torch.equal(exported[name], value), name
    assert launched(configured(path)).vocabulary == policy.vocabulary
    assert statistics_of(Pretrained(str(path)))["actions"].high.tolist() == [3.0]


def test_evaluation_draws_nothing_and_samples_depend_on_their_seeds_alone(engine: ActionEngine) -> None:
    config = configured(MODEL, "generator.max_turns=2")
    (once,), (alone,) = play(config, engine, groups=1), play(config, engine, groups=1, size=1)
    first, same, other = once.rows[0][0].tensors[PATH], alone.rows[0][0].tensors[PATH], once.rows[1][0].tensors[PATH]
    np.testing.assert_allclose(first, same, rtol=1e-4, atol=1e-4)
    assert not np.allclose(first, other)
    (evaluated,) = play(config, engine, "eval", groups=1, size=1)
    assert all(not row.tensors and not row.rollout_logprobs.any() for row in evaluated.samples)


@pytest.mark.parametrize("call", ["reset", "step"])
def test_a_simulator_that_fails_fails_its_sample_only(call: str, engine: ActionEngine) -> None:
    robot = "environment.skyrl_gym.robot"
    failing = f'{robot}.simulator="tests.envs.simulators.troubled:Failing"', f'{robot}.options={{fails = "{call}"}}'
    (group,) = play(configured(MODEL, *failing), engine, groups=1, size=2)
    assert len(group.failures) == 2
    assert [[row.stop_reason for row in rows] for rows in group.rows] == [["failed"], ["failed"]]
    assert not any(row.loss_mask.any() for row in group.samples)


def test_more_actions_than_a_chunk_has_are_refused(engine: ActionEngine) -> None:
    config = configured(MODEL, "environment.skyrl_gym.robot.actions_per_turn=3")
    with pytest.raises(DataError, match="actions_per_turn: expected at most 2"):
        play(config, engine)


def test_muon_moves_the_matrices_of_layers() -> None:
    """Not what takes and gives actions; `plan` counts the same."""
    with_adam, with_muon = (
        configured(MODEL, f"trainer.policy.optimizer_config.name={name}") for name in ("AdamW", "Muon")
    )
    model = action_source(with_muon.trainer).empty(torch.float32, "")
    moved = matrices_of(model)
    names = {name for name, each in model.named_parameters() if each in moved}
    assert "expert.layers.0.self_attn.q_proj.weight" in names
    assert not [name for name in names if name.startswith(("action_", "time_"))]
    saved = [memory_of_parameters(config, model, 0)[1]["gradients and optimizer"] for config in (with_adam, with_muon)]
    steps = 4 * len(names)  # which Adam counts for each parameter
    assert saved[0] - saved[1] == sum(4 * each.numel() for each in moved) + steps
