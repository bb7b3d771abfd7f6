"""Which settings are not implemented yet, and which defaults differ from SkyRL's, with the reason.

A setting that is not implemented yet is accepted at its default only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from hpcrl.config.errors import Problem, shown
from hpcrl.config.fields import Setting, leaves
from hpcrl.config.sections.tree import ConfigTree


@dataclass(frozen=True)
class Unimplemented:
    """Why a setting, or each setting of a section, cannot be changed yet.

    Attributes:
        feature: what they belong to, which is not implemented yet.
        works: the values that work already, beside the default.
    """

    feature: str
    works: tuple[Any, ...] = ()


_FP4 = Unimplemented("training in FP4, which torchao has not; use fp8")


UNIMPLEMENTED: dict[str, Unimplemented] = {
    "trainer.sequence_parallel_backend": Unimplemented("another way to share tokens than Ulysses"),
    "trainer.policy.low_precision.fp8_recipe": Unimplemented("scales of earlier steps, which torchao no longer has"),
    "trainer.policy.low_precision.fp4": _FP4,
    "trainer.policy.low_precision.fp4_recipe": _FP4,
    "trainer.policy.low_precision.fp4_granularity": _FP4,
    "vla.vla_type": Unimplemented("Cosmos Policy, which Cosmos-RL only evaluates", works=("openvla-oft", "pi05")),
}


def unimplemented_at(path: str) -> Unimplemented | None:
    """Return why the setting at a dotted path is not implemented yet, or None where it works."""
    while path:
        if path in UNIMPLEMENTED:
            return UNIMPLEMENTED[path]
        path = path.rpartition(".")[0]
    return None


def unimplemented_values(given: Iterable[tuple[Setting, Any]]) -> Iterator[Problem]:
    """Yield a problem for each setting that is not implemented yet and has another value than one that works.

    Settings that a user's subclass adds are not looked at.
    """
    own = {setting.path: setting for setting in leaves(ConfigTree)}
    for found, value in given:
        setting, missing = own.get(found.path), unimplemented_at(found.path)
        if setting and missing and not setting.is_default(value) and value not in missing.works:
            yield Problem(
                setting.path, f"{shown(value)} is not implemented yet ({missing.feature}); {_instead(setting, missing)}"
            )


def _instead(setting: Setting, missing: Unimplemented) -> str:
    working = (setting.default, *missing.works)
    values = [shown(value) for value in working if value not in (None, [], "")]
    return f"supported: {', '.join(values)}" if values else "leave it out"


_BESIDE_POLICY = "unset: beside the policy; SkyRL gives a critic GPUs of its own as soon as engines have theirs"
_AS_POLICY = "unset: as the policy; SkyRL's 1 is wrong as soon as the policy has more"
_AS_POLICY_SIZE = (
    "unset: as the policy, whose samples it gets; SkyRL's 1 would compute each on every rank that shares it"
)
_AS_TRAINING = "unset: as in training; SkyRL uses fixed values as soon as one setting of the section is given"
_EMPTY = "an empty table means what SkyRL's null means"
_USERS_OWN = "the user names the data; SkyRL's default is a path in its authors' setup"
_COPY = "unset: a node holds a copy where it can, so that parameters are not gathered over the network"
_PASS = "unset: a GPU gets passes of many tokens, since each pass gathers all parameters; one sample on a CPU"

# Dotted path -> why the default is not SkyRL's.
DIFFERENT_DEFAULTS: dict[str, str] = {
    "data.train_data": _USERS_OWN,
    "data.val_data": _USERS_OWN,
    "trainer.policy.model.path": "the user names the model",
    "trainer.placement.colocate_all": "trainer and engines have nodes of their own",
    "trainer.placement.critic_num_nodes": _BESIDE_POLICY,
    "trainer.placement.critic_num_gpus_per_node": _BESIDE_POLICY,
    "trainer.placement.ref_num_nodes": _AS_POLICY,
    "trainer.placement.ref_num_gpus_per_node": _AS_POLICY,
    "trainer.ref.sequence_parallel_size": _AS_POLICY_SIZE,
    "trainer.critic.sequence_parallel_size": _AS_POLICY_SIZE,
    "trainer.fully_async.max_staleness_steps": "one training loop serves both kinds, and is on-policy by default; SkyRL reads its 4 only in its fully asynchronous trainer",
    "trainer.fully_async.num_parallel_generation_workers": "unset: computed from batch size and staleness; SkyRL's 768 fits one batch size only",
    "trainer.max_ckpts_to_keep": "SkyRL's -1 keeps all, which fills a quota: a checkpoint of a model of 8 billion parameters has 96 GB",
    "trainer.project_name": "it names a directory of hpcrl's runs",
    "trainer.run_name": "a run is a directory, so two runs cannot share SkyRL's one name",
    "trainer.logger": "needs neither an account nor a network",
    "trainer.profiler.ranks": "a profile of no rank would be empty; SkyRL's megatron_config.torch_profiler_config.ranks is []",
    "trainer.ref.fsdp_config.mixed_precision.param_dtype": "unset: the number type of the policy",
    "trainer.micro_train_batch_size_per_gpu": _PASS,
    "trainer.micro_forward_batch_size_per_gpu": _PASS,
    **{f"trainer.{role}.fsdp_config.fsdp_size": _COPY for role in ("policy", "ref", "critic")},
    "trainer.policy.use_torch_compile": "unset: compiled with the layers on GPUs, which gave 1.9 times the tokens/s on an H200",
    "trainer.rope_scaling": _EMPTY,
    "generator.rope_scaling": _EMPTY,
    "generator.sampling_params.additional_kwargs": _EMPTY,
    "generator.inference_engine.weight_sync_backend": "every replica can read files, also one that starts later or on another partition",
    "generator.inference_engine.http_endpoint_port": "unset: each replica finds a free port, also beside others on its node",
    "generator.inference_engine.enforce_eager": "unset: CUDA graphs wherever there are GPUs, without which decoding waits for kernel launches",
    "generator.eval_sampling_params.max_generate_length": _AS_TRAINING,
    "generator.eval_sampling_params.temperature": _AS_TRAINING,
    "generator.eval_sampling_params.top_p": _AS_TRAINING,
    "generator.eval_sampling_params.top_k": _AS_TRAINING,
    "generator.eval_sampling_params.min_p": _AS_TRAINING,
    "generator.eval_sampling_params.repetition_penalty": _AS_TRAINING,
    "environment.env_class": "no environment fits every run; the rows or the user name it",
    "environment.skyrl_gym.text2sql.db_path": "the user names the folder; SkyRL's default is a path in its container image",
    "environment.skyrl_gym.llm_as_a_judge.model": "the user names the judge",
}
