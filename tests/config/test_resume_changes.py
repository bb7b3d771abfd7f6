"""Every setting has an effect for a run that goes on, and the effect follows the path."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest

from hpcrl.config import Config
from hpcrl.config.fields import leaves, settings
from hpcrl.config.resume_changes import changes, changes_from_path, effect_of, evaluation_settings

BASE = {"data": {"train_data": ["/t.parquet"]}, "trainer": {"policy": {"model": {"path": "/m"}}, "eval_interval": 0}}


def config(**flat: Any) -> Config:
    return Config.from_dict({**BASE, **{name.replace("__", "."): value for name, value in flat.items()}})


def test_every_setting_has_a_verdict() -> None:
    assert [setting.path for setting in leaves(Config) if effect_of(setting.path) is None] == []


def test_no_verdict_covers_settings_that_have_little_in_common() -> None:
    """A new setting of these sections must get an effect of its own."""
    mixed = {"data", "trainer", "trainer.policy", "trainer.critic", "generator", "slurm", "vla"}
    assert [one.path for one in settings(Config) if one.path in mixed and one.facts.on_change] == []


@pytest.mark.parametrize(
    ("path", "kind", "from_path"),
    [
        ("trainer.policy.model.path", "refused", "refused"),
        ("trainer.policy.model.lora.rank", "refused", "refused"),
        ("trainer.strategy", "warning", "harmless"),
        ("data.train_data", "refused", "warning"),
        ("trainer.seed", "refused", "warning"),
        ("trainer.train_batch_size", "refused", "warning"),
        ("generator.chat_template_kwargs.enable_thinking", "refused", "warning"),
        ("generator.n_samples_per_prompt", "refused", "harmless"),
        ("slurm.root", "refused", "harmless"),
        ("config_class", "refused", "harmless"),
        ("trainer.resume_path", "refused", "harmless"),
        ("trainer.resume_mode", "warning", "harmless"),
        ("trainer.algorithm.eps_clip_high", "warning", "harmless"),
        ("trainer.algorithm.value_head_prefix", "refused", "refused"),
        ("trainer.policy.optimizer_config.lr", "warning", "harmless"),
        ("trainer.policy.optimizer_config.implementation", "harmless", "harmless"),
        ("trainer.max_steps", "warning", "harmless"),
        ("trainer.placement.policy_num_nodes", "warning", "harmless"),
        ("trainer.policy.fsdp_config.cpu_offload", "harmless", "harmless"),
        ("trainer.policy.fsdp_config.mixed_precision.param_dtype", "warning", "harmless"),
        ("trainer.policy.megatron_config.tensor_model_parallel_size", "warning", "harmless"),
        ("trainer.policy.megatron_config.pipeline_schedule", "warning", "harmless"),
        ("trainer.policy.megatron_config.transformer_config_kwargs", "refused", "refused"),
        ("trainer.policy.megatron_config.lora_type", "refused", "refused"),
        ("trainer.policy.megatron_config.moe_router_score_function", "refused", "warning"),
        ("trainer.policy.megatron_config.dtype", "warning", "harmless"),
        ("trainer.policy.megatron_config.ddp_config.overlap_grad_reduce", "harmless", "harmless"),
        ("trainer.policy.megatron_config.ddp_config.grad_reduce_in_fp32", "warning", "harmless"),
        ("generator.inference_engine.gpu_memory_utilization", "harmless", "harmless"),
        ("generator.inference_engine.quantization", "warning", "harmless"),
        ("generator.inference_engine.seed", "warning", "harmless"),
        ("trainer.ckpt_interval", "harmless", "harmless"),
        ("slurm.extra.nice", "harmless", "harmless"),
        ("slurm.setup", "warning", "harmless"),
    ],
)
def test_verdicts(path: str, kind: str, from_path: str) -> None:
    effect = effect_of(path)
    assert effect is not None
    assert (effect.kind, effect.from_path) == (kind, from_path)


FSDP2 = {"trainer__strategy": "fsdp2"}
MEGATRON: dict[str, Any] = {"trainer__strategy": "megatron", "trainer__flash_attn": True}


@pytest.mark.parametrize("back", [False, True])
def test_another_backend_goes_on_where_it_can(back: bool) -> None:
    def kinds(lora_type: str, rank: int, **more: object) -> dict[str, str]:
        lora = {"trainer__policy__model__lora__rank": rank, **more}
        kwargs = {"trainer__policy__megatron_config__transformer_config_kwargs": {"recompute_granularity": "selective"}}
        of_type = {"trainer__policy__megatron_config__lora_type": lora_type} if rank else {}
        pair = [config(**FSDP2, **lora), config(**MEGATRON, **lora, **kwargs, **of_type)]
        found = changes(*(reversed(pair) if back else pair))
        return {change.difference.path.removeprefix("trainer."): change.kind for change in found}

    plain = kinds("lora", 0)
    assert plain["strategy"] == "warning"
    assert "refused" not in plain.values()
    assert "refused" not in kinds("canonical_lora", 4).values()
    assert kinds("lora", 4)["strategy"] == "refused"
    experts = {"trainer__policy__model__lora__target_parameters": ["gate_up_proj"]}
    assert kinds("canonical_lora", 4, **experts)["strategy"] == "refused"


@pytest.mark.parametrize(("name", "kind"), [("Adam", "warning"), ("Muon", "refused"), ("ScheduleFreeAdamW", "refused")])
def test_an_optimizer_goes_on_with_moments_of_its_kind(name: str, kind: str) -> None:
    offline = {"trainer__mode": "sft", "trainer__max_length": 8} if name == "ScheduleFreeAdamW" else {}
    old, new = (config(**offline, **more) for more in ({}, {"trainer__policy__optimizer_config__name": name}))
    assert [change.kind for change in changes(old, new)] == [kind]
    assert [change.kind for change in changes_from_path(old, new)] == ([kind] if kind == "refused" else [])


@pytest.mark.parametrize(
    ("betas", "kind"), [([0.8, 0.999], "refused"), ([0.9, 0.99], "warning")], ids=["average", "moment"]
)
def test_an_average_of_weights_goes_on_with_its_share(betas: list[float], kind: str) -> None:
    """A checkpoint has the weights in training, and others of which the average follows by the first rate."""
    section = "trainer__policy__optimizer_config"
    offline = {"trainer__mode": "sft", "trainer__max_length": 8, f"{section}__name": "ScheduleFreeAdamW"}
    found = changes(config(**offline), config(**offline, **{f"{section}__adam_betas": betas}))
    assert [change.kind for change in found] == [kind]


def test_changes_name_the_setting_both_values_and_the_reason() -> None:
    old = config(slurm__extra={"nice": 1})
    new = config(trainer__max_steps=4, slurm__extra={"nice": 2}, trainer__seed=7)
    assert [str(change).partition(" (")[0] for change in changes(old, new)] == [
        "refused: trainer.seed: 42 -> 7",
        "warning: trainer.max_steps: unset -> 4",
        "harmless: slurm.extra.nice: 1 -> 2",
    ]
    assert all(change.reason for change in changes(old, new))
    assert changes(old, old) == []


def test_what_matters_to_a_run_that_starts_from_the_checkpoint_of_another() -> None:
    other = config(trainer__max_steps=4, trainer__seed=7, trainer__run_name="b", trainer__policy__model__path="/n")
    found = changes_from_path(config(), other)
    assert [(change.difference.path, change.kind) for change in found] == [
        ("trainer.seed", "warning"),
        ("trainer.policy.model.path", "refused"),
    ]


@dataclass(frozen=True, kw_only=True)
class Mine(Config):
    bonus: float = 0.0


def test_a_setting_of_the_users_own_is_a_warning() -> None:
    old = Mine.from_dict(BASE)
    (change,) = changes(old, replace(old, bonus=1.0))
    assert str(change).startswith("warning: bonus: 0.0 -> 1.0 (a setting of your own")


@pytest.mark.parametrize(
    ("setting", "value", "decides"),
    [
        ("generator.eval_sampling_params.temperature", 0.5, True),
        ("generator.sampling_params.max_generate_length", 7, True),
        ("generator.max_turns", 3, True),
        ("environment.env_class", "gsm8k", True),
        ("environment.eval_reward_function", {"format": 1.0}, True),
        ("generator.inference_engine.seed", 5, True),
        ("python_path", ["/code"], True),
        ("generator.inference_engine.num_engines", 7, False),
        ("generator.inference_engine.max_num_seqs", 7, False),
        ("environment.max_failed_ratio", 0.1, False),
        ("trainer.eval_batch_size", 7, False),
        ("trainer.policy.optimizer_config.lr", 0.1, False),
    ],
)
def test_what_decides_an_evaluation(setting: str, value: Any, decides: bool) -> None:
    """Rows that an earlier attempt has finished count only where nothing of it has changed."""
    changed = config(**{setting.replace(".", "__"): value})
    assert (evaluation_settings(changed) != evaluation_settings(config())) == decides
