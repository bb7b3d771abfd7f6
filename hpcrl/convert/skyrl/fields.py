"""SkyRL's settings: their names in its old and its present layout, their defaults, and what becomes of each here.

`fields.tsv` lists the present layout, with each default as JSON, and then, without one, what only the old layout has under a name
that nothing in the present one replaces. `sft_fields.tsv` lists those of its program for supervised fine-tuning (main_sft).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from hpcrl.convert.mapping import Target, harmless, rows, target_of

_ROWS = rows("skyrl/fields.tsv")

# Dotted path in the present layout -> default.
SKYRL_DEFAULTS: dict[str, Any] = {row["path"]: json.loads(row["default"]) for row in _ROWS if row["default"]}

_ENGINE = "generator.inference_engine."
_ENGINE_OLD = {
    "num_inference_engines": "num_engines",
    "inference_engine_tensor_parallel_size": "tensor_parallel_size",
    "inference_engine_pipeline_parallel_size": "pipeline_parallel_size",
    "inference_engine_expert_parallel_size": "expert_parallel_size",
    "inference_engine_data_parallel_size": "data_parallel_size",
    "remote_inference_engine_urls": "remote_urls",
}
_ENGINE_SAME = {path.removeprefix(_ENGINE) for path in SKYRL_DEFAULTS if path.startswith(_ENGINE)}
_ENGINE_SAME -= {*_ENGINE_OLD.values(), "distributed_executor_backend"}
# of August 2026, which have never been flat names
_ENGINE_NEW = (
    "delta_weight_sync.",
    "serialized_weight_sync_mode",
    "enable_return_routed_experts",
    "offload_kv_for_weight_sync",
)
_ENGINE_NEW += (
    "use_expandable_segments",
    "language_model_only",
    "speculative_config",
    "enable_pd",
    "num_prefill",
    "router_init_kwargs",
)
_ENGINE_SAME = {name for name in _ENGINE_SAME if not name.startswith(_ENGINE_NEW)}

# These the present SkyRL still takes for their new names.
STILL_TAKEN = {f"generator.{old}": _ENGINE + new for old, new in _ENGINE_OLD.items()}
STILL_TAKEN |= {f"generator.{name}": _ENGINE + name for name in sorted(_ENGINE_SAME)}

# Old path -> present path, where the value stays as it is.
RENAMED: dict[str, str] = STILL_TAKEN | {
    "trainer.algorithm.ppo_loss_type": "trainer.algorithm.policy_loss_type",
    "trainer.algorithm.init_kl_coef": "trainer.algorithm.kl_loss_coef",
    "trainer.algorithm.kl_target": "trainer.algorithm.kl_ctrl.kl_target",
}

# Names that SkyRL has given to settings since March 2026 -> those of its layout before.
NEWER: dict[str, str] = {
    "trainer.remove_microbatch_padding": "trainer.use_sample_packing",
    "trainer.eval.interval": "trainer.eval_interval",
    "trainer.eval.before_train": "trainer.eval_before_train",
    "trainer.eval.batch_size": "trainer.eval_batch_size",
    "trainer.eval.dump_results": "trainer.dump_eval_results",
    "trainer.eval.num_logger_samples": "trainer.num_logger_eval_samples",
    _ENGINE + "router_type": _ENGINE + "router_init_kwargs",
    _ENGINE + "fp8_weight_sync_mode": _ENGINE + "serialized_weight_sync_mode",
}

# Present path -> default where a file of the old layout leaves the setting out.
OLD_DEFAULTS: dict[str, Any] = {
    "trainer.placement.policy_num_gpus_per_node": 4,
    "trainer.placement.critic_num_gpus_per_node": 4,
    "trainer.placement.ref_num_gpus_per_node": 4,
    "trainer.ref.fsdp_config.cpu_offload": True,
    "trainer.algorithm.loss_reduction": "sequence_mean",
    "generator.inference_engine.tensor_parallel_size": 4,
    "generator.inference_engine.enforce_eager": False,
    "generator.batched": True,
    "generator.use_conversation_multi_turn": False,
    "generator.eval_sampling_params.temperature": 1.0,
}

# Settings without a place here that nevertheless change what a run does, unless they have one of these values.
HARMLESS: dict[str, tuple[Any, ...]] = harmless(_ROWS)

# Settings that one of SkyRL's examples adds, for a penalty on long responses, which has a place here.
OVERLONG = ("trainer.algorithm.overlong_buffer_len", "trainer.algorithm.overlong_buffer_penalty_factor")

# Every setting of SkyRL, by its name in either layout.
TARGETS: dict[str, Target] = {row["path"]: target_of(row) for row in _ROWS}
TARGETS |= {old: TARGETS[new] for old, new in (RENAMED | NEWER).items() if new in TARGETS}

# Names that only the old layout has, and those of them that the present SkyRL refuses.
ONLY_OLD = set(TARGETS) - set(SKYRL_DEFAULTS) - set(NEWER) - {"generator.model_name", "defaults", "hydra"}
REFUSED = ONLY_OLD - set(STILL_TAKEN)


@dataclass(frozen=True)
class Layout:
    """The settings of one of SkyRL's programs.

    Attributes:
        targets: every setting, by each of its names.
        defaults: by dotted path.
        renamed: other name -> dotted path.
        harmless: settings without a place here, with the values that change nothing.
        old_defaults: dotted path -> default where a file of the old layout leaves the setting out.
        only_old: names that only the old layout has.
        refused: those of them that the present SkyRL refuses.
    """

    targets: Mapping[str, Target]
    defaults: Mapping[str, Any]
    renamed: Mapping[str, str]
    harmless: Mapping[str, tuple[Any, ...]]
    old_defaults: Mapping[str, Any] = field(default_factory=dict)
    only_old: frozenset[str] = frozenset()
    refused: frozenset[str] = frozenset()

    def present(self, name: str) -> str | None:
        """Return the present path of a setting; None: there is none of this name."""
        return self.renamed.get(name, name) if name in self.targets else None

    @cached_property
    def sections(self) -> set[str]:
        """Paths above those of settings."""
        return {path[:end] for path in self.targets for end, letter in enumerate(path) if letter == "."} - set(
            self.targets
        )


RL = Layout(TARGETS, SKYRL_DEFAULTS, RENAMED | NEWER, HARMLESS, OLD_DEFAULTS, frozenset(ONLY_OLD), frozenset(REFUSED))

_SFT_ROWS = rows("skyrl/sft_fields.tsv")
_POLICY = "trainer.policy."
_SHARED = (
    "model",
    "optimizer_config",
    "fsdp_config",
    "megatron_config",
    "torch_profiler_config",
    "sequence_parallel_size",
)
_SHARED += ("use_torch_compile", "record_memory", "model_config_kwargs")


def _shared(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a table has for the settings of the policy that supervised fine-tuning has too, by their names there."""
    found = {path.removeprefix(_POLICY): value for path, value in table.items() if path.startswith(_POLICY)}
    return {path: value for path, value in found.items() if path.partition(".")[0] in _SHARED}


SFT_DEFAULTS: dict[str, Any] = _shared(SKYRL_DEFAULTS) | {row["path"]: json.loads(row["default"]) for row in _SFT_ROWS}
SFT_TARGETS: dict[str, Target] = {row["path"]: target_of(row) for row in _SFT_ROWS} | {
    path: target for path, target in _shared(TARGETS).items() if path not in {row["path"] for row in _SFT_ROWS}
}
_SFT_RENAMED = {"use_sample_packing": "remove_microbatch_padding", "hf_export_path": "export_path"} | {
    old + path.removeprefix(new): path
    for old, new in {"optimizer": "optimizer_config", "fsdp": "fsdp_config", "megatron": "megatron_config"}.items()
    for path in SFT_TARGETS
    if path.startswith(new + ".")
}
SFT = Layout(
    SFT_TARGETS | {old: SFT_TARGETS[new] for old, new in _SFT_RENAMED.items()},
    SFT_DEFAULTS,
    _SFT_RENAMED,
    harmless(_SFT_ROWS) | _shared(HARMLESS),
)
