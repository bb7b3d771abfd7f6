"""The experts that the embedded engine took tokens to, on their way to the trainer: through generations, turns, the group's file, and routers."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3MoeConfig, Qwen3MoeForCausalLM

from hpcrl.config import (
    AlgorithmConfig,
    EnvironmentConfig,
    FSDPConfig,
    GeneratorConfig,
    MixedPrecisionConfig,
    ModelConfig,
    PolicyConfig,
    SamplingParams,
    TrainerConfig,
)
from hpcrl.config.sections.model import ExpertsConfig
from hpcrl.data.group_file import read_group
from hpcrl.data.models.routers import routers
from hpcrl.engines.embedded.rollout import Embedded
from hpcrl.errors import EngineError
from hpcrl.rollout.engines.base import Generation
from hpcrl.rollout.engines.experts import experts_of, experts_text
from hpcrl.rollout.generate import GroupGenerator
from hpcrl.rollout.group import Group
from hpcrl.rollout.transcript import Transcript
from hpcrl.trainer.backends.fsdp.engine import FsdpPolicy
from hpcrl.trainer.packing import PackedRows, pack
from hpcrl.types import ROUTED_EXPERTS, Prompt, Work
from tests.rollout.engines.embedded.test_batch import LONG, SIZES, saved, staggered
from tests.rollout.material import LONG_PROMPT, QUICKSTART, START_S, embedded_options
from tests.rows import write_group
from tests.trainer.material import world_of_one

LAYERS, CHOSEN = 4, 4
SAMPLING = SamplingParams(max_generate_length=40, temperature=1.0)
ENVIRONMENT = "tests.rollout.environments:CountLetters"
WORK = Work("g7", "train", Prompt("row3", [{"role": "user", "content": "sort: bca"}], ENVIRONMENT), 32, 40)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose routers are often undecided, so that rounding changes what they choose."""
    torch.manual_seed(3)
    sizes = {**SIZES, "num_hidden_layers": LAYERS, "initializer_range": 0.1}
    config = Qwen3MoeConfig(
        **sizes, num_experts=32, num_experts_per_tok=CHOSEN, moe_intermediate_size=24, norm_topk_prob=True
    )
    path = tmp_path_factory.mktemp("mixture")
    (path / "chat_template.jinja").write_bytes((QUICKSTART / "chat_template.jinja").read_bytes())
    return saved(Qwen3MoeForCausalLM(config), path)


def launched(model: Path, **engine: Any) -> Embedded:
    found = Embedded(replace(embedded_options(model, **engine), records_experts=True))
    found.wait_ready(START_S)
    return found


def generated(model: Path, dtype: str) -> Group:
    engine = launched(model, model_dtype=dtype)
    config = GeneratorConfig(sampling_params=SAMPLING)
    generator = GroupGenerator(engine.connect(), AutoTokenizer.from_pretrained(QUICKSTART), config, EnvironmentConfig())
    try:
        return asyncio.run(generator.generate(WORK))
    finally:
        engine.stop()


def chosen_by_transformers(model: Path, token_ids: list[int]) -> torch.Tensor:
    """Return the experts of each token, [T, L, k]."""
    policy, seen = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), list[torch.Tensor]()
    for router in routers(policy).values():
        router.register_forward_hook(lambda _module, _inputs, outputs: seen.append(outputs[2]))
    with torch.no_grad():
        policy(torch.tensor([token_ids]))
    return torch.stack(seen, 1)


def test_rows_that_come_and_go_tell_of_their_own_tokens(mixture: Path) -> None:
    engine = launched(mixture)
    try:
        said = asyncio.run(staggered(engine.connect()))
    finally:
        engine.stop()
    same = 0
    for prompt, one in said:
        assert one.experts is not None
        assert one.experts.dtype == np.int16
        assert one.experts.shape == (len(prompt) + len(one.token_ids) - 1, LAYERS, CHOSEN)
        expected = chosen_by_transformers(mixture, prompt + one.token_ids)[:-1].sort(-1).values
        same += int((torch.from_numpy(one.experts).sort(-1).values == expected).all(-1).sum())
    # in float32 other shapes of matrices round otherwise, which moves one choice in thousands
    assert same > 0.999 * sum(len(prompt) + len(one.token_ids) - 1 for prompt, one in said) * LAYERS


def logprobs(samples: PackedRows, model: Path, replay: Any, dtype: Any = "fp32") -> torch.Tensor:
    """Return the trainer's log-probabilities of trained tokens less the engine's."""
    exact = FSDPConfig(mixed_precision=MixedPrecisionConfig(param_dtype=dtype))
    policy = PolicyConfig(
        model=ModelConfig(path=str(model)), fsdp_config=exact, experts=ExpertsConfig(router_replay=replay)
    )
    trainer = TrainerConfig(policy=policy, algorithm=AlgorithmConfig(use_kl_loss=False))
    with world_of_one() as world:
        (found_P,) = FsdpPolicy(trainer, SAMPLING.temperature, world).logprobs([samples.whole()])
    return (found_P - samples.rollout_logprobs)[samples.loss_mask > 0]


def from_file(group: Group, folder: Path) -> PackedRows:
    write_group(folder / "group", group.samples, group.meta(0, "group"))
    return pack(read_group(folder / "group"))


def test_replay_brings_trainer_and_engine_together(mixture: Path, tmp_path: Path) -> None:
    samples = from_file(generated(mixture, "bfloat16"), tmp_path)
    for sample, length in zip(samples.tensors, samples.lengths, strict=True):
        experts = sample[ROUTED_EXPERTS]
        assert experts.dtype == torch.int16
        assert experts.shape == (length, LAYERS, CHOSEN)
        assert (experts[-1] == -1).all()
        assert (experts[:-1] >= 0).all()
    for dtype in ("fp32", "bf16"):
        plain, replayed = (logprobs(samples, mixture, replay, dtype).abs().mean() for replay in ("none", "R3"))
        assert replayed < 0.9 * plain, dtype


def test_in_float32_nothing_is_left(mixture: Path, tmp_path: Path) -> None:
    samples = from_file(generated(mixture, "float32"), tmp_path)
    assert logprobs(samples, mixture, "R3").abs().max() < 1e-5


def test_turns_keep_what_their_tokens_were_said_with() -> None:
    def said(first: int, prompt: int, count: int) -> Generation:
        experts = np.full((prompt + count - 1, 1, 1), first, np.int16)
        return Generation([5] * count, [-1.0] * count, "stop", [0] * count, experts=experts)

    row = Transcript([1, 2, 3])
    row.add_response(said(7, 3, 4), 2)  # the environment lets two of four tokens stand
    row.add_context([4])
    row.add_response(said(8, 6, 2))
    experts = row.sample("stop", {}).tensors[ROUTED_EXPERTS][:, 0, 0].tolist()
    assert experts == [7, 7, 7, 7, 8, 8, 8, -1]
    assert Transcript([1]).sample("stop", {}).tensors == {}


def test_experts_as_text() -> None:
    experts = np.arange(-1, 11, dtype=np.int16).reshape(2, 3, 2)
    assert (experts_of(experts_text(experts)) == experts).all()
    assert experts_of(experts_text((experts + 1).astype(np.uint8))).dtype == np.int16  # as vLLM has few experts


def test_a_model_without_routers_is_refused(models: list[Path]) -> None:
    with pytest.raises(EngineError, match=r"router_replay: Qwen2ForCausalLM has no routers"):
        launched(models[0])


def test_nobody_asks(mixture: Path) -> None:
    engine = Embedded(embedded_options(mixture))
    engine.wait_ready(START_S)
    try:
        said = asyncio.run(engine.connect().generate(LONG_PROMPT, 2, 1, LONG))
    finally:
        engine.stop()
    assert [one.experts for one in said] == [None, None]
