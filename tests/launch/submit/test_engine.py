"""What engines would refuse when they start is refused at submit: lengths beyond the model's, options that vLLM does not have."""

from __future__ import annotations

import json
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from hpcrl.config import Config
from hpcrl.engines.vllm.launch import loads_lora, vllm_options
from hpcrl.errors import DataError
from hpcrl.launch.submit.engine import check_engine, layers_over_nodes, position_limit
from hpcrl.launch.submit.preflight import check_files
from tests.paths import QUICKSTART

KWARGS = "generator.inference_engine.engine_init_kwargs"
VLLM = "generator.inference_engine.backend=vllm"
DRAFTS = "generator.inference_engine.speculative"


def test_samples_longer_than_the_model_takes_are_refused() -> None:
    given = ["trainer.max_prompt_length=100"]
    check_files(Config.from_toml([QUICKSTART], [*given, "generator.sampling_params.max_generate_length=156"]))
    with pytest.raises(DataError, match=r"trainer.max_prompt_length: 100 .* and 157 .* are 257, more than the 256"):
        check_files(Config.from_toml([QUICKSTART], [*given, "generator.sampling_params.max_generate_length=157"]))
    with pytest.raises(DataError, match=r"are 300, more than the 256"):  # evaluation counts
        check_files(Config.from_toml([QUICKSTART], [*given, "generator.eval_sampling_params.max_generate_length=200"]))


@pytest.mark.parametrize(
    ("entries", "rope", "limit"),
    [
        ({"max_position_embeddings": 4096}, {}, 4096),
        ({"n_positions": 1024}, {}, 1024),
        ({"hidden_size": 8}, {}, None),
        ({"text_config": {"max_position_embeddings": 512}}, {}, 512),
        ({"max_position_embeddings": 4096, "rope_scaling": {"type": "linear", "factor": 2.0}}, {}, 8192),
        ({"max_position_embeddings": 4096}, {"rope_type": "dynamic", "factor": 4.0}, 16384),
        ({"max_position_embeddings": 4096, "rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, {}, 4096),
        ({"max_position_embeddings": 64, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, {}, 64),
        ({"max_position_embeddings": 4096, "model_max_length": 8192}, {}, 8192),
    ],
)
def test_limits_of_models(entries: dict[str, Any], rope: dict[str, Any], limit: int | None) -> None:
    assert position_limit(entries, rope) == limit


def test_changed_entries_of_the_model_count() -> None:
    given = ["generator.sampling_params.max_generate_length=1000"]
    with pytest.raises(DataError, match="more than the 256"):
        check_files(Config.from_toml([QUICKSTART], given))
    check_files(
        Config.from_toml([QUICKSTART], [*given, "trainer.policy.model_config_kwargs.max_position_embeddings=4096"])
    )


@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
def test_models_for_which_vllm_loads_no_adapters(tmp_path: Path) -> None:
    own = {
        name: loads_lora(name)
        for name in ("Qwen2ForCausalLM", "MistralForCausalLM", "BloomForCausalLM", "NewForCausalLM")
    }
    assert own == {
        "Qwen2ForCausalLM": True,
        "MistralForCausalLM": True,
        "BloomForCausalLM": False,
        "NewForCausalLM": None,
    }
    model = tmp_path / "bloom"
    shutil.copytree(QUICKSTART.parent / "quickstart" / "model", model)
    entries = json.loads((model / "config.json").read_text()) | {"architectures": ["BloomForCausalLM"]}
    (model / "config.json").write_text(json.dumps(entries))
    given = [VLLM, "trainer.policy.model.lora.rank=8", f"trainer.policy.model.path={model}"]
    with pytest.raises(
        DataError, match=r"merge_lora: .* loads no adapters for models of BloomForCausalLM; set it to true"
    ):
        check_files(Config.from_toml([QUICKSTART], given))
    check_files(Config.from_toml([QUICKSTART], [*given, "generator.inference_engine.merge_lora=true"]))


@pytest.mark.parametrize("special", ['modules_to_save=["norm"]', 'target_parameters=["experts"]', "init_method=pissa"])
def test_what_engines_get_where_they_cannot_load_adapters_is_said(special: str) -> None:
    lora = "trainer.policy.model.lora"
    given = [f"{lora}.rank=8", f"{lora}.{special}"]
    (said,) = check_files(Config.from_toml([QUICKSTART], given))
    assert "each version is the whole policy, merged" in said
    assert check_files(Config.from_toml([QUICKSTART], [*given, "generator.inference_engine.merge_lora=true"])) == []
    assert check_files(Config.from_toml([QUICKSTART], given[:1])) == []


def test_drafts_that_the_policy_cannot_have_are_refused(tmp_path: Path) -> None:
    model = QUICKSTART.parent / "quickstart" / "model"
    policy, drafts = (shutil.copytree(model, tmp_path / name) for name in ("policy", "drafts"))
    given = [VLLM, f"trainer.policy.model.path={policy}", f"{DRAFTS}.method=draft_model", f"{DRAFTS}.model={drafts}"]
    config = Config.from_toml([QUICKSTART], given)
    assert list(check_engine(config)) == []
    tokenizer = json.loads((drafts / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first, second = list(vocabulary)[-2:]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (drafts / "tokenizer.json").write_text(json.dumps(tokenizer))
    (problem,) = check_engine(config)
    assert problem.path == f"{DRAFTS}.model"
    assert f"its tokens are others than those of the policy at {policy}, such as {first!r}" in problem.message
    entries = json.loads((drafts / "config.json").read_text())
    (drafts / "config.json").write_text(json.dumps(entries | {"vocab_size": 7}))
    (problem,) = check_engine(config)
    assert f"expected the {entries['vocab_size']} tokens of the policy" in problem.message

    config = Config.from_toml([QUICKSTART], [VLLM, f"trainer.policy.model.path={policy}", f"{DRAFTS}.method=mtp"])
    (problem,) = check_engine(config)
    assert (problem.path, "has no heads for several tokens" in problem.message) == (f"{DRAFTS}.method", True)
    (policy / "config.json").write_text(json.dumps(entries | {"num_nextn_predict_layers": 1}))
    assert list(check_engine(config)) == []


@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
def test_options_that_vllm_does_not_have_are_refused_without_importing_it() -> None:
    known = [VLLM, f"{KWARGS}.block-size=16", f"{KWARGS}.no_async_scheduling=true"]
    check_files(Config.from_toml([QUICKSTART], known))
    with pytest.raises(DataError, match=rf"{KWARGS}\.block_siz: .* no option 'block_siz'; did you mean block_size"):
        check_files(Config.from_toml([QUICKSTART], [VLLM, f"{KWARGS}.block_siz=16"]))
    assert {"max_model_len", "quantization", "chat_template"} <= vllm_options()


def test_a_vllm_with_other_files_refuses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    vllm_options.cache_clear()
    try:
        check_files(Config.from_toml([QUICKSTART], [VLLM, f"{KWARGS}.nosuch=1"]))
    finally:
        vllm_options.cache_clear()
    assert "vllm" not in sys.modules


def test_a_machine_without_vllm_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is queued; where torch is missing as well, and in another environment, nothing is known."""
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(DataError, match=r"backend: vllm is not installed here; install it .* or set transformers"):
        check_files(Config.from_toml([QUICKSTART], [VLLM]))
    check_files(Config.from_toml([QUICKSTART]))
    container = ["slurm.container.kind=apptainer", "slurm.container.image=/images/hpcrl.sif"]
    check_files(Config.from_toml([QUICKSTART], [VLLM, *container]))
    check_files(Config.from_toml([QUICKSTART], [VLLM, "slurm.python=/env/bin/python"]))
    for package in ("torch", "transformers"):
        monkeypatch.setitem(sys.modules, package, None)
    check_files(Config.from_toml([QUICKSTART], [VLLM]))


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("tensor_parallel_size=3", r"tensor_parallel_size: expected a divisor of 2, the attention heads"),
        ("pipeline_parallel_size=5", r"pipeline_parallel_size: expected at most 2, the layers"),
        ("expert_parallel_size=2", r"expert_parallel_size: expected 1, as there are no experts"),
    ],
)
def test_sizes_that_a_model_cannot_be_shared_by(setting: str, said: str) -> None:
    more = ["slurm.gpus_per_node=5"]
    more += ["generator.inference_engine.tensor_parallel_size=2"] if setting.startswith("expert") else []
    with pytest.raises(DataError, match=said):
        check_files(Config.from_toml([QUICKSTART], [VLLM, *more, f"generator.inference_engine.{setting}"]))


@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
def test_options_of_a_teachers_engine_are_looked_at_too(tmp_path: Path) -> None:
    teacher = ["enable=true", f"model_path={tmp_path}", "backend=vllm", "engine.engine_init_kwargs.swap_spaces=1"]
    with pytest.raises(
        DataError, match=r"trainer\.distillation\.engine\.engine_init_kwargs\.swap_spaces: .* has no option"
    ):
        check_files(Config.from_toml([QUICKSTART], [VLLM, *(f"trainer.distillation.{setting}" for setting in teacher)]))


def test_copies_of_a_mixture_want_gpus(tmp_path: Path) -> None:
    model = tmp_path / "mixture"
    shutil.copytree(QUICKSTART.parent / "quickstart" / "model", model)
    entries = json.loads((model / "config.json").read_text()) | {"num_experts": 4}
    (model / "config.json").write_text(json.dumps(entries))
    copies = "generator.inference_engine.data_parallel_size=2"
    given = [VLLM, copies, f"trainer.policy.model.path={model}"]
    found = list(check_engine(Config.from_toml([QUICKSTART], given)))
    assert [(problem.path, "use num_engines" in problem.message) for problem in found] == [
        (copies.partition("=")[0], True)
    ]
    assert list(check_engine(Config.from_toml([QUICKSTART], [*given, "slurm.gpus_per_node=2"]))) == []
    assert list(check_engine(Config.from_toml([QUICKSTART], [VLLM, copies]))) == [], "a dense model"


def test_layers_that_nodes_share_are_pointed_out() -> None:
    def told(tensor: int, pipeline: int) -> list[str]:
        sizes = {"tensor": tensor, "pipeline": pipeline}
        words = [f"generator.inference_engine.{kind}_parallel_size={size}" for kind, size in sizes.items()]
        return list(layers_over_nodes(Config.from_toml([QUICKSTART], [VLLM, "slurm.gpus_per_node=4", *words])))

    assert [line.partition(":")[0] for line in told(8, 1)] == [
        "generator.inference_engine.tensor_parallel_size=8 is more than a node's 4 GPUs"
    ]
    assert told(4, 2) == told(4, 1) == []
