"""Options of the engine section reach vLLM, and do there what they say."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from hpcrl.config import Config
from hpcrl.config.sections.generator import WITH_MODEL, SpeculativeConfig
from hpcrl.engines.vllm.answers import Running, generation_of
from hpcrl.engines.vllm.client import EngineClient
from hpcrl.engines.vllm.middleware import _choice
from hpcrl.engines.vllm.server import Server, ServerOptions, _command, server_options
from hpcrl.errors import ConfigError
from hpcrl.rollout.build import worker_options
from hpcrl.rollout.engines.base import Generation
from hpcrl.rundir.layout import Run
from hpcrl.runtime.token import bearer
from tests.paths import QUICKSTART
from tests.rollout.material import LONG_PROMPT, MAX_MODEL_LEN, RUN_NAME, TOKEN, as_version, logprobs, options, served

SAMPLING = {"temperature": 1.0, "max_tokens": 40, "ignore_eos": True}


def said_by(server: Server, weights: Path | None = None) -> list[Generation]:
    async def main() -> list[Generation]:
        engine = EngineClient(server.socket, bearer(TOKEN, RUN_NAME))
        try:
            if weights:
                await engine.update_weights(as_version(weights, 1))
            return await engine.generate(LONG_PROMPT, 4, 3, SAMPLING)
        finally:
            await engine.close()

    return asyncio.run(main())


def info_of(server: Server) -> str:
    """Return what the server says of its configuration."""
    with httpx.Client(
        transport=httpx.HTTPTransport(uds=str(server.socket)), headers=bearer(TOKEN, RUN_NAME), timeout=20
    ) as http:
        return str(http.get("http://engine/server_info").json())


@pytest.mark.parametrize(
    ("method", "lora_rank", "level"),
    [
        (None, 0, 2),
        (None, 8, 1),
        ("ngram", 0, 2),
        ("draft_model", 0, 1),
        ("eagle", 0, 1),
        ("eagle3", 0, 1),
        ("mtp", 0, 1),
    ],
)
def test_weights_that_no_version_brings_stay_while_the_engine_sleeps(
    models: list[Path], token_file: Path, method: Any, lora_rank: int, level: int
) -> None:
    given = options(str(models[0]), token_file)
    drafts = SpeculativeConfig(method=method, model="d" if method in WITH_MODEL else None)
    changed = replace(given, lora_rank=lora_rank, engine=replace(given.engine, speculative=drafts))
    assert changed.sleep_level == level


def with_changes(model: Path, folder: Path, rope: Mapping[str, Any], **entries: Any) -> Path:
    """Copy a model, with other rotary positions and entries in its config.json."""
    path = shutil.copytree(model, folder / "changed" / model.name)
    config = json.loads((path / "config.json").read_text())
    config["rope_parameters"] |= rope
    config |= entries
    (path / "config.json").write_text(json.dumps(config))
    return path


def farthest(said: list[Generation], model: Path) -> float:
    """Return by how much the engine's log-probabilities differ from transformers' at most."""
    return max(
        float((torch.tensor(one.logprobs) - logprobs(model, LONG_PROMPT, one.token_ids)).abs().max()) for one in said
    )


@pytest.mark.faults_slow
def test_rotary_positions_entries_seed_and_half_precision(models: list[Path], token_file: Path, tmp_path: Path) -> None:
    given = options(str(models[0]), token_file)
    engine = replace(given.engine, model_dtype="float16")
    linear = {"rope_type": "linear", "factor": 4.0}
    entries = {"rms_norm_eps": 0.5}
    given = replace(given, engine=engine, seed=77, model_config_kwargs=entries, rope_scaling=linear, rope_theta=100.0)
    twins = [with_changes(model, tmp_path, {**linear, "rope_theta": 100.0}, **entries) for model in models[:2]]
    with served(given, tmp_path / "engine.log") as server:
        first, info = said_by(server), info_of(server)
        later = said_by(server, models[1])
    for said, twin, model in zip((first, later), twins, models, strict=False):
        assert 1e-4 < farthest(said, twin) < 0.05, "half precision, but otherwise the same"
        assert farthest(said, model) > 0.3, "the model as it is says something else"
    assert "seed=77" in info
    assert "torch.float16" in info


@pytest.mark.parametrize(
    ("rope", "expected"),
    [
        ({"rope_theta": 500.0}, {"rope_type": "default", "rope_theta": 500.0}),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
            {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0},
        ),
    ],
)
def test_rotary_positions_keep_what_is_not_set(
    models: list[Path], token_file: Path, rope: dict[str, Any], expected: dict[str, Any]
) -> None:
    given = options(str(models[0]), token_file)
    command = _command(replace(given, **rope), Path("socket"))
    assert json.loads(command[command.index("--hf-overrides") + 1]) == {"rope_parameters": expected}
    own = replace(given.engine, engine_init_kwargs={"hf_overrides": {"max_position_embeddings": 512}})
    entries = {"max_position_embeddings": 256, "rms_norm_eps": 1e-5}
    command = _command(replace(given, engine=own, model_config_kwargs=entries, **rope), Path("socket"))
    assert json.loads(command[command.index("--hf-overrides") + 1]) == {
        "rope_parameters": expected,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
    }


def test_without_changes_the_engine_reads_the_models_configuration(models: list[Path], token_file: Path) -> None:
    assert "--hf-overrides" not in _command(options(str(models[0]), token_file), Path("socket"))


def test_a_model_without_rotary_positions_is_refused(token_file: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    with pytest.raises(ConfigError, match=r"generator\.rope_theta: the model at .* has no rotary positions"):
        _command(replace(options(str(tmp_path), token_file), rope_theta=100.0), Path("socket"))


def test_vllm_knows_the_options_of_gpus_by_these_names(models: list[Path], token_file: Path) -> None:
    """What this machine cannot run, vLLM's own parser reads."""
    from vllm.config import ProfilerConfig
    from vllm.config.attention import AttentionConfig
    from vllm.config.speculative import SpeculativeConfig as VLLMsDrafts
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    def parsed(*, on_cpu: bool = True, **engine: Any) -> AsyncEngineArgs:
        given = replace(options(str(models[0]), token_file), on_cpu=on_cpu)
        command = _command(replace(given, engine=replace(given.engine, **engine)), Path("socket"))
        arguments = command[command.index("hpcrl.engines.vllm.main") + 1 :]
        return AsyncEngineArgs.from_cli_args(make_arg_parser(FlexibleArgumentParser()).parse_args(arguments))

    def on_gpus(**engine: Any) -> AsyncEngineArgs:
        return parsed(on_cpu=False, **engine)

    def recording(iterations: int) -> ProfilerConfig:
        command = _command(replace(options(str(models[0]), token_file), recorded_iterations=iterations), Path("socket"))
        arguments = command[command.index("hpcrl.engines.vllm.main") + 1 :]
        return make_arg_parser(FlexibleArgumentParser()).parse_args(arguments).profiler_config

    window = recording(20)
    assert (window.profiler, window.delay_iterations, window.max_iterations) == ("cuda", 100, 20)
    assert recording(0).profiler is None

    plain = parsed()
    assert (plain.attention_backend, plain.pipeline_parallel_size, plain.seed) == (None, 1, 1)
    chosen = AttentionConfig(backend=parsed(use_flashinfer=True).attention_backend)
    assert chosen.backend is AttentionBackendEnum.FLASHINFER
    assert (plain.data_parallel_size, plain.enable_expert_parallel, plain.quantization) == (1, False, None)
    split = parsed(tensor_parallel_size=2, pipeline_parallel_size=3, data_parallel_size=4, expert_parallel_size=8)
    assert (split.tensor_parallel_size, split.pipeline_parallel_size, split.data_parallel_size) == (2, 3, 4)
    assert split.enable_expert_parallel
    for name in ("fp8", "fp8_per_channel", "fp8_per_block", "mxfp8", "mxfp4"):
        assert on_gpus(quantization=name).quantization == name
    assert (plain.enforce_eager, parsed(enforce_eager=False).enforce_eager) == (True, False)
    assert (on_gpus().enforce_eager, on_gpus(enforce_eager=True).enforce_eager) == (False, True)
    for method in ("ngram", "draft_model", "eagle", "eagle3", "mtp"):
        drafts = SpeculativeConfig(method=method, model="d" if method in WITH_MODEL else None)
        given = parsed(speculative=drafts).speculative_config
        assert given is not None
        assert given == drafts.options
        assert given.keys() <= VLLMsDrafts.__dataclass_fields__.keys()
        assert f"'{method}'" in str(VLLMsDrafts.__dataclass_fields__["method"].type)
    assert plain.speculative_config is None
    few: dict[str, Any] = {"max_num_seqs": 8, "max_num_batched_tokens": 16}
    read_in_parts, read_whole, on_cpu = on_gpus(**few), on_gpus(**few, enable_chunked_prefill=False), parsed(**few)
    assert (read_in_parts.enable_chunked_prefill, read_in_parts.max_num_batched_tokens) == (True, 16)
    for whole in (read_whole, on_cpu):
        assert (whole.enable_chunked_prefill, whole.max_num_batched_tokens) == (False, MAX_MODEL_LEN)


def test_experts_are_asked_of_vllm_and_read_from_its_answers(models: list[Path], token_file: Path) -> None:
    """Its CPU build tells of none: the option by its own parser, the answers as its own code writes them."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.logprobs import Logprob
    from vllm.outputs import CompletionOutput
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    from vllm.utils.serial_utils import numpy2base64

    for asked in (True, False):
        command = _command(replace(options(str(models[0]), token_file), records_experts=asked), Path("socket"))
        arguments = command[command.index("hpcrl.engines.vllm.main") + 1 :]
        parsed = AsyncEngineArgs.from_cli_args(make_arg_parser(FlexibleArgumentParser()).parse_args(arguments))
        assert parsed.enable_return_routed_experts is asked
    experts = np.arange(5 * 3 * 2, dtype=np.uint8).reshape(5, 3, 2)  # of a prompt of four tokens and two said ones
    tops: Any = [{7: Logprob(-0.5)}, {8: Logprob(-0.25)}]
    said = CompletionOutput(0, "", [7, 8], None, tops, routed_experts=experts, finish_reason="stop")
    content = [{"logprob": -0.5}, {"logprob": -0.25}]
    at_the_end = {"index": 0, "token_ids": [7, 8], "finish_reason": "stop", "logprobs": {"content": content}}
    for choice in (_choice(said, 1), {**at_the_end, "routed_experts": numpy2base64(experts)}):
        found = generation_of(choice, Running(None, False, 0, 3, 4))
        assert (found.token_ids, found.logprobs, found.versions) == ([7, 8], [-0.5, -0.25], [3, 3])
        assert found.experts is not None
        assert found.experts.dtype == np.int16
        assert (found.experts == experts).all()
    assert generation_of({**at_the_end, "routed_experts": None}, Running(None, False, 0, 3, 4)).experts is None


def test_what_the_job_asks_of_the_server(token_file: Path) -> None:
    def asked(**generator: Any) -> ServerOptions:
        policy = {"model": {"path": "m"}, "model_config_kwargs": {"rms_norm_eps": 0.5}}
        trainer = {"policy": policy, "eval_interval": 0, "seed": 5, "max_prompt_length": 10}
        config = Config.from_dict({"data": {"train_data": ["t"]}, "trainer": trainer, "generator": generator})
        return server_options(Run(token_file.parent), config)

    plain = asked(sampling_params={"max_generate_length": 20})
    assert (plain.seed, plain.rope_scaling, plain.rope_theta, plain.max_model_len) == (5, {}, None, 30)
    assert plain.model_config_kwargs == {"rms_norm_eps": 0.5}
    own = asked(inference_engine={"seed": 0}, rope_theta=9.0, rope_scaling={"rope_type": "linear", "factor": 2.0})
    assert (own.seed, own.rope_scaling, own.rope_theta) == (0, {"rope_type": "linear", "factor": 2.0}, 9.0)


def test_greedy_responses_take_room_in_the_engine(token_file: Path) -> None:
    run = Run(token_file.parent)

    def config(estimator: str) -> Config:
        trainer = {
            "policy": {"model": {"path": "m"}},
            "eval_interval": 0,
            "train_batch_size": 64,
            "policy_mini_batch_size": 64,
        }
        engine = {"max_num_seqs": 20}
        return Config.from_dict(
            {
                "data": {"train_data": ["t"]},
                "trainer": {**trainer, "algorithm": {"advantage_estimator": estimator}},
                "generator": {"n_samples_per_prompt": 4, "inference_engine": engine},
            }
        )

    plain, remax = config("grpo"), config("remax")
    assert server_options(run, plain) == server_options(run, remax), "they are requests like others"
    found = [worker_options(run, chosen, 1, 0) for chosen in (plain, remax)]
    assert [(options.baselines, options.capacity, options.n_samples) for options in found] == [
        (False, 5, 4),
        (True, 4, 4),
    ]


def test_images_come_normalized_and_room_is_made_for_as_large_ones(models: list[Path], token_file: Path) -> None:
    given = options(str(models[0]), token_file)
    assert "--mm-processor-kwargs" not in _command(given, Path("socket"))
    command = _command(replace(given, image_processor_kwargs={"max_pixels": 501760}), Path("socket"))
    assert command[command.index("--mm-processor-kwargs") + 1] == '{"max_pixels": 501760}'
    assert "--no-mm-device-do-normalize" in command


def test_an_engine_leaves_less_memory_where_a_trainer_keeps_some(tmp_path: Path) -> None:
    def share(*settings: str) -> str:
        config = Config.from_toml(
            [QUICKSTART], ["slurm.gpus_per_node=1", "generator.inference_engine.backend=vllm", *settings]
        )
        command = _command(server_options(Run(tmp_path), config), Path("socket"))
        return command[command.index("--gpu-memory-utilization") + 1]

    assert share() == "0.9"
    assert share("trainer.placement.colocate_all=true") == "0.8"
    assert share("generator.inference_engine.gpu_memory_utilization=0.7") == "0.7"
