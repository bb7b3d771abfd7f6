"""Settings without their switch: refused with the switch's name, whatever section they are in, and fine with it."""

from __future__ import annotations

import json
from functools import reduce
from typing import Any

import pytest

from hpcrl.config import Config
from hpcrl.config.fields import settings
from hpcrl.config.load import nested
from hpcrl.config.rules.combinations import impossible
from hpcrl.config.validate import build
from tests.paths import ROOT

BASE = {"data.train_data": ["t"], "data.val_data": ["v"], "trainer.policy.model.path": "m"}
ALGORITHM, CORRECTION = "trainer.algorithm", "trainer.algorithm.off_policy_correction"
CRITIC, NO_KL = {"trainer.critic.model.path": "c"}, {f"{ALGORITHM}.use_kl_loss": False}
LORA = "trainer.policy.model.lora"

IDLE: list[tuple[str, Any, dict[str, Any], dict[str, Any]]] = [
    (f"{ALGORITHM}.kl_loss_coef", 0.1, NO_KL, {}),
    (f"{ALGORITHM}.kl_estimator_type", "k1", NO_KL, {**NO_KL, f"{ALGORITHM}.use_kl_in_reward": True}),
    (f"{ALGORITHM}.gamma", 0.9, {}, {f"{ALGORITHM}.advantage_estimator": "reinforce++"}),
    (f"{ALGORITHM}.lambd", 0.9, {}, CRITIC),
    (f"{ALGORITHM}.critic_lambd", 1.0, {}, CRITIC),
    (f"{ALGORITHM}.value_clip", 0.3, {}, CRITIC),
    (f"{ALGORITHM}.grpo_norm_by_std", False, {f"{ALGORITHM}.advantage_estimator": "rloo"}, {}),
    (f"{CORRECTION}.token_tis_ratio_clip_high", 3.0, {}, {f"{CORRECTION}.tis_ratio_type": "token"}),
    (f"{CORRECTION}.sequence_tis_ratio_clip_high", 3.0, {}, {f"{CORRECTION}.tis_ratio_type": "sequence"}),
    (f"{ALGORITHM}.filter_reward_metric", ["m"], {}, {f"{ALGORITHM}.zero_variance_filter": True}),
    ("trainer.critic.optimizer_config.lr", 1e-4, {}, CRITIC),
    ("trainer.critic_mini_batch_size", 512, {}, CRITIC),
    ("trainer.placement.critic_num_nodes", 1, {}, CRITIC),
    ("trainer.placement.critic_num_gpus_per_node", 2, {}, CRITIC),
    (f"{LORA}.alpha", 64.0, {}, {f"{LORA}.rank": 8}),
    (f"{LORA}.target_modules", ["q_proj"], {}, {f"{LORA}.rank": 8}),
    (f"{LORA}.use_rslora", True, {}, {f"{LORA}.rank": 8}),
    ("trainer.critic.model.lora.alpha", 64.0, CRITIC, {**CRITIC, "trainer.critic.model.lora.rank": 8}),
]


def found(values: dict[str, Any]) -> list[tuple[str, str]]:
    problems = impossible(build(Config, nested({**BASE, **values})))
    return [(problem.path, problem.message) for problem in problems]


@pytest.mark.parametrize(("path", "value", "off", "on"), IDLE, ids=[case[0] for case in IDLE])
def test_a_setting_has_an_effect_or_is_refused(path: str, value: Any, off: dict[str, Any], on: dict[str, Any]) -> None:
    ((where, message),) = found({**off, path: value})
    assert where == path
    assert message.startswith("has no effect without ")
    assert found({**on, path: value}) == []


@pytest.mark.parametrize(
    ("path", "value"),
    [("timesteps_fraction", 0.5), ("sample.num_steps", 20), ("ema.decay", 0.9), ("dtype", "bfloat16")],
)
def test_a_diffusion_pipeline_is_switched_on(path: str, value: Any) -> None:
    setting, switch = f"trainer.policy.diffusers.{path}", "trainer.policy.diffusers.enable"
    assert found({setting: value}) == [(setting, f"has no effect without {switch}; leave it out, or set that")]
    Config.from_toml([ROOT / "configs" / "diffusion_tiny.toml"], [f"{setting}={json.dumps(value)}"])


def test_conditions_are_on_settings_that_there_are() -> None:
    """The others are properties of sections."""
    known = {setting.path for setting in settings(Config)}
    named = {
        setting.path.rpartition(".")[0] + path if path.startswith(".") else path
        for setting in settings(Config)
        for condition in setting.facts.used_by
        for path, _ in condition.tests
    }
    config = Config.from_dict({"data.train_data": ["t"], "trainer.policy.model.path": "m", "trainer.eval_interval": 0})
    derived = {path: reduce(getattr, path.split("."), config) for path in named - known}
    assert derived == {
        "data.curriculum.is_on": False,
        "has_engines": True,
        "has_scorers": False,
        "trainer.uses_reference": True,
        "trainer.policy.model.lora.loadable": True,
    }


@pytest.mark.parametrize("name", ["policy_loss_type", "advantage_estimator"])
def test_own_functions_may_read_any_setting_of_the_algorithm(name: str) -> None:
    own = {f"{ALGORITHM}.{name}": "mine:function"}
    assert found({**own, f"{ALGORITHM}.gamma": 0.9, f"{ALGORITHM}.clip_ratio_c": 4.0}) == []
    assert found({**own, "trainer.critic.optimizer_config.lr": 1e-4}) != []


@pytest.mark.parametrize(
    "kept",
    [
        {"slurm.elastic.partition": "preemptible", "slurm.container.mounts": ["/scratch"]},
        {**NO_KL, "trainer.ref.fsdp_config.cpu_offload": True},
        {"trainer.profiler.active_steps": 2},
    ],
)
def test_how_a_part_runs_that_is_off_may_stay(kept: dict[str, Any]) -> None:
    """For site files, and for overrides and sweeps that switch it."""
    assert found(kept) == []
