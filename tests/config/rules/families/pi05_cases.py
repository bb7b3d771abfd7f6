"""Combinations of settings about policies whose actions are made by a flow."""

from __future__ import annotations

from typing import Any

from tests.config.rules.families.vla_cases import ACTS, SAMPLING
from tests.config.rules.skyrl_cases import ALGORITHM, ENGINE, Case

FLOWS: dict[str, Any] = {name: value for name, value in ACTS.items() if not name.startswith(SAMPLING)} | {
    "vla.vla_type": "pi05"
}
ONE_TURN = {**FLOWS, "generator.max_turns": 1, "generator.step_wise_trajectories": False}

OF_FLOWS = [
    Case(
        "settings of a flow are for flows",
        {**ACTS, "vla.pi05.num_steps": 4},
        "vla.pi05",
        "has no effect without",
        {**FLOWS, "vla.pi05.num_steps": 4},
    ),
    Case(
        "a flow's numbers have statistics of their own",
        {**FLOWS, "vla.unnorm_key": "libero_10"},
        "vla.unnorm_key",
        "has no effect with",
        {**FLOWS, "vla.save_video": True},
    ),
    Case("vLLM has no flows", {**FLOWS, f"{ENGINE}.backend": "vllm"}, f"{ENGINE}.backend", '"transformers"', FLOWS),
    Case("Megatron-core has no flows", {**FLOWS, "trainer.strategy": "megatron"}, "trainer.strategy", "fsdp2", FLOWS),
    Case(
        "a flow moves robots",
        {**FLOWS, "environment.env_class": "gsm8k"},
        "environment.env_class",
        'expected "robot"',
        {**FLOWS, "environment.env_class": "robot"},
    ),
    Case(
        "the last step of flow_cps is no draw",
        {**FLOWS, "vla.pi05.noise_method": "flow_cps", "vla.pi05.num_steps": 1},
        "vla.pi05.noise_method",
        "num_steps of at least 2",
        {**FLOWS, "vla.pi05.noise_method": "flow_cps", "vla.pi05.num_steps": 2},
    ),
    Case(
        "numbers are not sampled by temperature",
        {**FLOWS, f"{SAMPLING}.temperature": 0.7},
        SAMPLING,
        "choose among tokens",
        FLOWS,
    ),
    Case(
        "numbers have no vocabulary whose probabilities are squared",
        {**ONE_TURN, f"{ALGORITHM}.advantage_estimator": "optimal_token_baseline"},
        f"{ALGORITHM}.advantage_estimator",
        "choose among tokens",
        {**ONE_TURN, f"{ALGORITHM}.advantage_estimator": "opo"},
    ),
]
