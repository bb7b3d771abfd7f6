"""SkyRL's settings: their names in its old and its present layout, their defaults, and what becomes of each here.

`fields.tsv` lists the present layout, with each default as JSON, and then, without one, what only the old layout has under a name
that nothing in the present one replaces.
"""

from __future__ import annotations

import json
from typing import Any

from hpcrl.convert.mapping import Target, rows, target_of

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

# These the present SkyRL still takes for their new names.
STILL_TAKEN = {f"generator.{old}": _ENGINE + new for old, new in _ENGINE_OLD.items()}
STILL_TAKEN |= {f"generator.{name}": _ENGINE + name for name in sorted(_ENGINE_SAME)}

# Old path -> present path, where the value stays as it is.
RENAMED: dict[str, str] = STILL_TAKEN | {
    "trainer.algorithm.ppo_loss_type": "trainer.algorithm.policy_loss_type",
    "trainer.algorithm.init_kl_coef": "trainer.algorithm.kl_loss_coef",
    "trainer.algorithm.kl_target": "trainer.algorithm.kl_ctrl.kl_target",
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
HARMLESS: dict[str, tuple[Any, ...]] = {
    _ENGINE + "external_proxy_url": (None,),
    "generator.sampling_params.logprobs": (None, 0, 1),
    "generator.eval_sampling_params.logprobs": (None, 0, 1),
}

# Settings that one of SkyRL's examples adds, for a penalty on long responses, which has a place here.
OVERLONG = ("trainer.algorithm.overlong_buffer_len", "trainer.algorithm.overlong_buffer_penalty_factor")

# Every setting of SkyRL, by its name in either layout.
TARGETS: dict[str, Target] = {row["path"]: target_of(row) for row in _ROWS}
TARGETS |= {old: TARGETS[new] for old, new in RENAMED.items() if new in TARGETS}

# Names that only the old layout has, and those of them that the present SkyRL refuses.
ONLY_OLD = set(TARGETS) - set(SKYRL_DEFAULTS) - {"generator.model_name", "defaults", "hydra"}
REFUSED = ONLY_OLD - set(STILL_TAKEN)

# Paths above those of settings.
SECTIONS = {path[:end] for path in TARGETS for end, letter in enumerate(path) if letter == "."} - set(TARGETS)
