"""Refuses unsupported options of vision-language models at submit, where their config.json is on this machine."""

from __future__ import annotations

from collections.abc import Iterator

from hpcrl.config import Config
from hpcrl.config.backend import backend_of
from hpcrl.config.errors import Problem
from hpcrl.config.family import families
from hpcrl.data.vision.families import family_of
from hpcrl.launch.backend import launch_backend
from hpcrl.launch.submit.models import entries_of


def check_vision(config: Config) -> Iterator[Problem]:
    """Yield what a run asks of a policy that sees and that only language models do."""
    trainer, model = config.trainer, config.trainer.policy.model.pretrained
    entries = entries_of(model)
    if entries is None or "model_type" not in entries:  # of a pipeline, which paints
        return
    for each in families():
        yield from each.check_entries(config, entries)
    family = family_of(entries)
    if family is None:
        if trainer.multi_modal_log_interval is not None:
            yield Problem(
                "trainer.multi_modal_log_interval",
                f"{model} (trainer.policy) neither sees images nor paints any; leave it out",
            )
        return
    sees = f"{model} (trainer.policy) sees images"
    if trainer.strategy == "megatron":
        yield Problem("trainer.strategy", f'{sees}, which Megatron-core\'s models here do not; use "fsdp2"')
    if config.has_engines and (engine := launch_backend(backend_of(config.generator.inference_engine))):
        yield from engine.check_vision(config, family, sees)
    if trainer.critic.model.pretrained is not None:
        yield Problem(
            "trainer.algorithm.advantage_estimator",
            f"{sees}, and a critic would not; use an estimator without one, such as grpo",
        )
    if trainer.shared_prefixes:
        yield Problem("trainer.shared_prefixes", f"{sees}, whose prefixes are not shared; set it to false")
    for role, section in (("policy", trainer.policy), ("ref", trainer.ref)):
        if (section.sequence_parallel_size or 1) > 1:
            path = f"trainer.{role}.sequence_parallel_size"
            yield Problem(path, f"{sees}, and ranks do not share the tokens of images; set it to 1")
    if trainer.algorithm.observation_nll_coef:
        yield Problem(
            "trainer.algorithm.observation_nll_coef",
            f"{sees}, and the tokens of images in observations cannot be predicted; set it to 0",
        )
    if trainer.distillation.enable:
        yield Problem("trainer.distillation.enable", f"{sees}, and teachers would not; set it to false")
    if config.scoring_reward_model is not None:
        yield Problem(
            "environment.reward_model.model",
            f"{sees}, and a reward model would not; use environments or reward functions",
        )
    if trainer.mode == "reward_model":
        yield Problem("trainer.mode", f'{sees}, and a reward model would not; expected "rl", "sft" or "dpo"')
