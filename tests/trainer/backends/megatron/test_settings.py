"""Each setting of megatron_config arrives where Megatron-core looks for it, and what it cannot use is refused by its name."""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import tomli
import torch

from tests.paths import ROOT

pytest.importorskip("megatron.core")

from hpcrl.config import TrainerConfig
from hpcrl.config.fields import section_settings
from hpcrl.config.rules.model_fit import MEGATRON_FAMILIES
from hpcrl.config.sections.megatron import MegatronConfig, MegatronDDPConfig, MegatronModelConfig
from hpcrl.config.validate import build
from hpcrl.errors import DataError
from hpcrl.trainer.backends.megatron.architecture import architecture_of
from hpcrl.trainer.backends.megatron.layers import uses_transformer_engine
from hpcrl.trainer.backends.megatron.settings import ddp_config, optimizer_config, transformer_config
from hpcrl.trainer.models.build import policy_source, reference_source
from tests.trainer.backends.megatron.material import config_of, write_model
from tests.trainer.launcher import run_ranks

Table = dict[str, Any]

ENGINE = uses_transformer_engine()
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
NONE = dict.fromkeys(FULL)
INTERLEAVED = {
    "pipeline_model_parallel_size": 2,
    "pipeline_schedule": "Interleaved1F1B",
    "pipeline_layers_per_stage": 1,
}

# setting -> (the table megatron_config, what TransformerConfig has then)
OF_LAYERS: dict[str, list[tuple[Table, Table]]] = {
    "dtype": [
        ({}, {"params_dtype": torch.bfloat16, "pipeline_dtype": torch.bfloat16, "bf16": True}),
        ({"dtype": "fp32"}, {"params_dtype": torch.float32, "pipeline_dtype": torch.float32, "bf16": False}),
    ],
    "tensor_model_parallel_size": [
        ({}, {"tensor_model_parallel_size": 1, "sequence_parallel": False}),
        ({"tensor_model_parallel_size": 2}, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    ],
    "pipeline_model_parallel_size": [({"pipeline_model_parallel_size": 4}, {"pipeline_model_parallel_size": 4})],
    "context_parallel_size": [({"context_parallel_size": 2}, {"context_parallel_size": 2})],
    "expert_model_parallel_size": [({"expert_model_parallel_size": 2}, {"expert_model_parallel_size": 2})],
    "expert_tensor_parallel_size": [
        ({"tensor_model_parallel_size": 2}, {"expert_tensor_parallel_size": 2}),
        (
            {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1},
            {"expert_tensor_parallel_size": 1},
        ),
    ],
    "pipeline_schedule": [
        (INTERLEAVED, {"virtual_pipeline_model_parallel_size": 2}),
        ({**INTERLEAVED, "pipeline_schedule": "1F1B"}, {"virtual_pipeline_model_parallel_size": None}),
    ],
    "pipeline_layers_per_stage": [
        ({**INTERLEAVED, "pipeline_layers_per_stage": 2}, {"virtual_pipeline_model_parallel_size": 1}),
        ({"pipeline_model_parallel_size": 2}, {"virtual_pipeline_model_parallel_size": None}),
    ],
    "pipeline_dynamic_shape": [
        ({}, {"variable_seq_lengths": False}),
        ({"pipeline_dynamic_shape": True}, {"variable_seq_lengths": True}),
    ],
    "moe_token_dispatcher_type": [
        ({}, {"moe_token_dispatcher_type": "alltoall"}),
        ({"moe_token_dispatcher_type": "allgather"}, {"moe_token_dispatcher_type": "allgather"}),
    ],
    "moe_router_load_balancing_type": [
        ({}, {"moe_router_load_balancing_type": "none"}),
        ({"moe_router_load_balancing_type": "aux_loss"}, {"moe_router_load_balancing_type": "aux_loss"}),
    ],
    "moe_grouped_gemm": [
        ({}, {"moe_grouped_gemm": ENGINE}),  # the kernel is TransformerEngine's
        ({"moe_grouped_gemm": False}, {"moe_grouped_gemm": False}),
    ],
    "moe_router_score_function": [
        ({}, {"moe_router_score_function": "softmax"}),
        ({"moe_router_score_function": "sigmoid"}, {"moe_router_score_function": "sigmoid"}),
    ],
    "moe_router_enable_expert_bias": [
        ({}, {"moe_router_enable_expert_bias": False}),
        (
            {"moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"},
            {"moe_router_enable_expert_bias": True},
        ),
    ],
    "transformer_config_kwargs": [
        ({}, {**FULL, "recompute_modules": ["core_attn"]}),
        ({"transformer_config_kwargs": {"recompute_num_layers": 2}}, {**FULL, "recompute_num_layers": 2}),
        ({"transformer_config_kwargs": {"moe_aux_loss_coeff": 0.25}}, {**FULL, "moe_aux_loss_coeff": 0.25}),
        ({"transformer_config_kwargs": {"layernorm_epsilon": 0.5}}, {"layernorm_epsilon": 0.5}),  # wins over the model
        (
            {"transformer_config_kwargs": {"recompute_granularity": "selective", "recompute_modules": ["mlp"]}},
            {**NONE, "recompute_granularity": "selective", "recompute_modules": ["mlp"]},
        ),
    ],
}

# setting of ddp_config -> (the table ddp_config, what DistributedDataParallelConfig has then)
OF_SUMS: dict[str, list[tuple[Table, Table]]] = {
    "grad_reduce_in_fp32": [
        ({}, {"grad_reduce_in_fp32": True}),
        ({"grad_reduce_in_fp32": False}, {"grad_reduce_in_fp32": False}),
    ],
    "overlap_grad_reduce": [
        ({}, {"overlap_grad_reduce": False}),
        ({"overlap_grad_reduce": True}, {"overlap_grad_reduce": True}),
    ],
    "overlap_param_gather": [
        ({}, {"overlap_param_gather": False}),
        ({"overlap_param_gather": True}, {"overlap_param_gather": True}),
    ],
    "average_in_collective": [
        ({}, {"average_in_collective": True}),
        ({"average_in_collective": False}, {"average_in_collective": False}),
    ],
}

# setting -> (the section trainer.policy, what OptimizerConfig has then)
OF_OPTIMIZER: dict[str, list[tuple[Table, Table]]] = {
    "optimizer_config_kwargs": [
        (
            {},
            {
                "optimizer": "adam",
                "use_distributed_optimizer": True,
                "decoupled_weight_decay": True,
                "clip_grad": 1.0,
                "overlap_cpu_optimizer_d2h_h2d": False,
                "use_precision_aware_optimizer": False,
                "optimizer_cpu_offload": False,
                "optimizer_offload_fraction": 0.0,
            },
        ),
        (
            {
                "optimizer_config": {
                    "lr": 0.5,
                    "weight_decay": 0.25,
                    "adam_betas": [0.7, 0.8],
                    "eps": 1e-3,
                    "max_grad_norm": -1.0,
                },
                "megatron_config": {"optimizer_config_kwargs": {"lr": 0.125, "optimizer_offload_fraction": 0.5}},
            },
            {
                "lr": 0.125,
                "weight_decay": 0.25,
                "adam_beta1": 0.7,
                "adam_beta2": 0.8,
                "adam_eps": 1e-3,
                "clip_grad": 0.0,
                "optimizer_offload_fraction": 0.5,
                "optimizer_cpu_offload": False,
            },
        ),
        ({"optimizer_config": {"name": "Adam"}}, {"decoupled_weight_decay": False}),
        (
            {"megatron_config": {"dtype": "fp32", "ddp_config": {"overlap_param_gather": True}}},
            {"bf16": False, "params_dtype": torch.float32, "overlap_param_gather": True},
        ),
    ],
}

ELSEWHERE = {"ddp_config", "model_config_kwargs", "empty_cuda_cache", "lora_type"}
"""Those that the tests below, or in test_lora.py, speak about by name."""


def trainer(policy: Table, **others: Table) -> TrainerConfig:
    return build(TrainerConfig, {"strategy": "megatron", "policy": {"model": {"path": "m"}, **policy}, **others})


def megatron(**settings: Any) -> MegatronConfig:
    return trainer({"megatron_config": settings}).policy.megatron_config


def layers(settings: MegatronModelConfig, *, recompute: bool = True, deterministic: bool = False) -> Any:
    architecture = architecture_of(config_of("qwen3-moe"), "m")
    return transformer_config(
        architecture, settings, "trainer.policy", recompute=recompute, deterministic=deterministic
    )


def optimizer(policy: Table) -> Any:
    section = trainer(policy).policy
    return optimizer_config(section.optimizer_config, section.megatron_config, "trainer.policy")


def found(config: Any, expected: Table) -> Table:
    return {name: getattr(config, name) for name in expected}


def each(cases: dict[str, list[tuple[Table, Table]]]) -> list[Any]:
    return [
        pytest.param(*case, id=f"{name}-{at}") for name, several in cases.items() for at, case in enumerate(several)
    ]


def test_each_setting_has_a_case() -> None:
    """A setting that is new fails here until it has one, or is among those that are not implemented yet (docs/config/status.md)."""
    unimplemented = {each.name for each in section_settings(MegatronConfig) if each.facts.unimplemented}
    assert {
        each.name for each in fields(MegatronConfig)
    } == OF_LAYERS.keys() | OF_OPTIMIZER.keys() | ELSEWHERE | unimplemented
    assert {each.name for each in fields(MegatronDDPConfig)} == OF_SUMS.keys()


@pytest.mark.parametrize(("given", "expected"), each(OF_LAYERS))
def test_layers(given: Table, expected: Table) -> None:
    assert found(layers(megatron(**given)), expected) == expected


@pytest.mark.parametrize(("given", "expected"), each(OF_SUMS))
def test_sums_of_gradients(given: Table, expected: Table) -> None:
    made = ddp_config(megatron(ddp_config=given), optimizer({}), torch.device("cuda"))
    assert found(made, expected) == expected
    assert made.use_distributed_optimizer


@pytest.mark.parametrize(("given", "expected"), each(OF_OPTIMIZER))
def test_optimizer(given: Table, expected: Table) -> None:
    assert found(optimizer(given), expected) == expected


def test_gloo_cannot_average() -> None:
    assert not ddp_config(megatron(), optimizer({}), torch.device("cpu")).average_in_collective


def test_sums_know_the_optimizer() -> None:
    whole = {"megatron_config": {"optimizer_config_kwargs": {"use_distributed_optimizer": False}}}
    assert not ddp_config(megatron(), optimizer(whole), torch.device("cpu")).use_distributed_optimizer


def test_nothing_is_computed_again_without_gradient_checkpointing() -> None:
    given = megatron(transformer_config_kwargs={"recompute_num_layers": 2, "layernorm_epsilon": 0.5})
    assert found(layers(given, recompute=False), NONE | {"layernorm_epsilon": 0}) == NONE | {"layernorm_epsilon": 0.5}


def test_deterministic() -> None:
    assert layers(megatron(), deterministic=True).deterministic_mode
    assert not layers(megatron()).deterministic_mode


def test_dense_models_have_no_router() -> None:
    architecture = architecture_of(config_of("qwen3"), "m")
    given = megatron(moe_router_load_balancing_type="aux_loss", moe_router_score_function="sigmoid")
    made = transformer_config(architecture, given, "trainer.policy", recompute=True, deterministic=False)
    assert made.num_moe_experts is None
    assert made.moe_router_score_function == "softmax"


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        (
            {"recompute_granularty": "full"},
            r"\.recompute_granularty: .* no such field; did you mean recompute_granular",
        ),
        ({"recompute_granularity": "half"}, r": Megatron-core refuses these settings: .*half"),
        ({"num_query_groups": 3}, r": Megatron-core refuses these settings: "),
    ],
)
def test_layers_that_cannot_be(kwargs: Table, message: str) -> None:
    path = r"trainer\.policy\.megatron_config\.transformer_config_kwargs"
    with pytest.raises(DataError, match=path + message):
        layers(megatron(transformer_config_kwargs=kwargs, tensor_model_parallel_size=2))


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"optimizer_cpu_ofload": True}, r"\.optimizer_cpu_ofload: .*; did you mean optimizer_cpu_offload\?"),
        ({"nothing_like_it": 1}, r"\.nothing_like_it: Megatron-core's OptimizerConfig has no such field$"),
        ({"main_grads_dtype": "bf16"}, r": Megatron-core refuses these settings: main_grads_dtype"),
        pytest.param(
            {"use_precision_aware_optimizer": True},
            r"\.use_precision_aware_optimizer: needs the optimizer of TransformerEngine",
            marks=pytest.mark.skipif(ENGINE, reason="TransformerEngine is installed"),
        ),
    ],
)
def test_optimizers_that_cannot_be(kwargs: Table, message: str) -> None:
    with pytest.raises(DataError, match=r"trainer\.policy\.megatron_config\.optimizer_config_kwargs" + message):
        optimizer({"megatron_config": {"optimizer_config_kwargs": kwargs}})


def test_entries_of_the_model(tmp_path: Path) -> None:
    """model_config_kwargs wins over the one beside the section, and the reference has its own."""
    config_of("qwen3").save_pretrained(tmp_path)
    model = {"path": str(tmp_path)}
    given = trainer(
        {
            "model": model,
            "model_config_kwargs": {"max_position_embeddings": 48, "rms_norm_eps": 0.5},
            "megatron_config": {"model_config_kwargs": {"max_position_embeddings": 40}},
        },
        ref={"model": model, "megatron_config": {"model_config_kwargs": {"max_position_embeddings": 56}}},
    )
    policy, reference = (architecture_of(of(given).config(), "m") for of in (policy_source, reference_source))
    assert (policy.max_positions, policy.transformer["layernorm_epsilon"]) == (40, 0.5)
    assert (reference.max_positions, reference.transformer["layernorm_epsilon"]) == (56, 1e-6)


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Table:
    """What two ranks told, by scenario."""
    folder = tmp_path_factory.mktemp("settings")
    write_model("qwen2", folder / "model")
    todo = [[name, {"model": str(folder / "model"), "out": f"{folder}/{name}"}] for name in ("groups", "engine")]
    result = run_ranks(2, json.dumps(todo), script="trainer/backends/megatron/settings_scenarios.py")
    assert result.returncode == 0, result.stderr
    return {name: json.loads((folder / name).read_text()) for name, _ in todo} | {"said": result.stderr}


def test_groups_of_ranks(told: Table) -> None:
    alone = {"tensor": 1, "pipeline": 1, "context": 1, "expert": 1, "expert_tensor": 1, "virtual": None}
    together = {"rank": [0, 0], "size": 1, "leads": [True, False]}
    apart = {"rank": [0, 1], "size": 2, "leads": [True, True]}
    assert told["groups"] == {
        "tensor_model_parallel_size": {**alone, "tensor": 2, "expert_tensor": 2, **together},
        "pipeline_model_parallel_size": {**alone, "pipeline": 2, **together},
        "pipeline_layers_per_stage": {**alone, "pipeline": 2, "virtual": 2, **together},
        "context_parallel_size": {**alone, "context": 2, **together},
        "expert_model_parallel_size": {**alone, "expert": 2, **apart},
        "expert_tensor_parallel_size": {**alone, "tensor": 2, "expert": 2, **together},
    }


def test_the_cache_of_cuda_is_emptied_before_the_step(told: Table) -> None:
    assert told["engine"]["emptied"] == {"null": 0, "false": 0, "true": 1}


def test_logs_are_quiet(told: Table) -> None:
    """What Megatron-core says of packages that nobody was asked to install is left out, what hpcrl uses is said once."""
    said = told["said"]
    assert "Apex" not in said
    assert "Params for bucket" not in said
    assert said.count("hpcrl.trainer.backends.build:layers: ") == 3  # once for each engine


def test_warnings_about_settings_stay() -> None:
    program = "import hpcrl.trainer.backends.megatron, warnings, logging; warnings.warn('about a setting'); logging.getLogger('megatron.core').warning('W')"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "about a setting" in result.stderr
    assert "W" in result.stderr.splitlines()
    assert logging.getLogger("megatron").level == logging.WARNING


def test_the_documents_say_what_is_true() -> None:
    text = (ROOT / "docs" / "megatron.md").read_text()
    assert re.findall(r"^\| `(\w+)` \| [A-Z]", text, re.MULTILINE) == list(MEGATRON_FAMILIES)
    (example,) = re.findall(r"```toml\n(.*?)```", text, re.DOTALL)
    table = tomli.loads(example)["trainer"]
    made = build(TrainerConfig, {**table, "policy": {**table["policy"], "model": {"path": "m"}}})
    assert made.policy.megatron_config.tensor_model_parallel_size == 4
