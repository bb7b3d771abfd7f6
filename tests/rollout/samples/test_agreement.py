"""What the engine says of a sampled token is what the trainer computes, also where sampling leaves tokens out: a real engine, a real trainer."""

from __future__ import annotations

import asyncio
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

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
from hpcrl.config.sections.generator import EvalSamplingParams
from hpcrl.data.group_file import read_group
from hpcrl.engines.vllm.server import Server
from hpcrl.errors import ConfigError
from hpcrl.rollout.engines.base import Engine, Launched
from hpcrl.rollout.generate import GroupGenerator
from hpcrl.rollout.group import Group
from hpcrl.rollout.teacher_inputs import TeacherInputs
from hpcrl.runtime.heartbeat import Heartbeat
from hpcrl.runtime.signals import StopSignal
from hpcrl.trainer.backends.fsdp.engine import FsdpPolicy
from hpcrl.trainer.batching import MicroBatchLimit
from hpcrl.trainer.critic.ranks import ModelRanks
from hpcrl.trainer.distributed import World
from hpcrl.trainer.metrics import PhaseTimer
from hpcrl.trainer.mismatch import MismatchLimit
from hpcrl.trainer.models.flops import ModelFlops
from hpcrl.trainer.offline.build import objective_of
from hpcrl.trainer.packing import PackedRows, pack
from hpcrl.trainer.saving.checkpoint import ResumePoint
from hpcrl.trainer.saving.dump import Dumps
from hpcrl.trainer.step import Learner
from hpcrl.trainer.stop import StopConsensus
from hpcrl.types import Batch, Prompt, Work
from tests.rollout.conftest import WithEngine
from tests.rollout.material import QUICKSTART, VOCABULARY, as_version, distribution
from tests.rows import read_tensors, write_group
from tests.trainer.material import make_run, world_of_one

TOKENIZER = AutoTokenizer.from_pretrained(QUICKSTART)
SAMPLING = SamplingParams(max_generate_length=30, temperature=0.8)
WORK = Work(
    "g7",
    "train",
    Prompt("row3", [{"role": "user", "content": "sort: bca"}], "tests.rollout.environments:CountLetters"),
    48,
    40,
)


async def group_of(engine: Engine, sampling: SamplingParams, work: Work = WORK, **generator: Any) -> Group:
    config = GeneratorConfig(sampling_params=sampling, **generator)
    return await GroupGenerator(engine, TOKENIZER, config, EnvironmentConfig()).generate(work)


def packed(group: Group, folder: Path) -> PackedRows:
    """Return a group as the trainer gets it: from its file."""
    write_group(folder / "group", group.samples, group.meta(0, "group"))
    return pack(read_group(folder / "group"))


def section(model: Path) -> TrainerConfig:
    exact = FSDPConfig(mixed_precision=MixedPrecisionConfig(param_dtype="fp32"))
    policy = PolicyConfig(model=ModelConfig(path=str(model)), fsdp_config=exact)
    return TrainerConfig(policy=policy, algorithm=AlgorithmConfig(use_kl_loss=False))


def ratios(samples: PackedRows, model: Path) -> torch.Tensor:
    """Return the trainer's probability over the engine's, of each trained token."""
    with world_of_one() as world:
        engine = FsdpPolicy(section(model), SAMPLING.temperature, world)
        (logprobs_P,) = engine.logprobs([samples.whole()])
    return (logprobs_P - samples.rollout_logprobs).exp()[samples.loss_mask > 0]


@pytest.mark.parametrize(
    "options", [{"top_p": 0.8, "top_k": 5}, {"top_k": 3}, {"min_p": 0.3, "top_k": VOCABULARY + 9}], ids=str
)
def test_an_unchanged_policy_has_the_ratio_1(
    with_each_engine: WithEngine[Any], models: list[Path], tmp_path: Path, options: dict[str, Any]
) -> None:
    group = with_each_engine(lambda engine: group_of(engine, replace(SAMPLING, **options)))
    samples = packed(group, tmp_path)
    ratio = ratios(samples, models[0])
    assert len(ratio) > 500
    assert ratio.mean().item() == pytest.approx(1, abs=0.01)
    assert (ratio - 1).abs().max() < 0.01, "of each token, not only in the mean"
    whole = replace(samples, sampling_mask=None)
    assert ratios(whole, models[0]).mean() < 0.95, "over the whole vocabulary it is the mass that sampling kept"


def test_a_mask_has_the_tokens_that_sampling_kept(with_each_engine: WithEngine[Any], models: list[Path]) -> None:
    group = with_each_engine(lambda engine: group_of(engine, replace(SAMPLING, top_p=0.8, top_k=5)))
    sizes = set[int]()
    for sample in group.samples:
        mask, first = sample.sampling_mask, int(sample.loss_mask.argmax())
        assert mask is not None
        assert not mask.counts[:first].any()
        said = sample.token_ids[first:].tolist()
        logprobs_TV = distribution(models[0], sample.token_ids[:first].tolist(), said, SAMPLING.temperature)
        parts = np.split(mask.token_ids, mask.counts[first:].cumsum()[:-1])
        for probabilities_V, kept in zip(logprobs_TV.exp(), parts, strict=True):
            ordered = probabilities_V.sort(descending=True)
            best = ordered.values[:5] / ordered.values[:5].sum()
            expected = 1 + int((best.cumsum(0) < 0.8).sum())  # as few of the five as have 0.8 of their mass
            assert set(kept.tolist()) == set(ordered.indices[:expected].tolist())
            sizes.add(expected)
    assert len(sizes) > 2


@pytest.mark.parametrize("afterwards", [False, True])
def test_the_policys_most_probable_tokens_are_told(
    with_each_engine: WithEngine[Any], models: list[Path], tmp_path: Path, afterwards: bool
) -> None:
    """As each token is sampled, or in one more pass, where the prompt has them too; the sampled one is often not among them."""

    async def play(engine: Engine) -> Group:
        config = GeneratorConfig(sampling_params=SAMPLING)
        generator = GroupGenerator(
            engine, TOKENIZER, config, EnvironmentConfig(), teacher_inputs=TeacherInputs(3, afterwards)
        )
        return await generator.generate(replace(WORK, n_samples=8))

    group = with_each_engine(play)
    write_group(tmp_path / "group", group.samples, group.meta(0, "group"))
    outside = 0
    for sample in read_tensors(tmp_path / "group"):
        ids = sample.token_ids.tolist()
        start = 1 if afterwards else int(sample.loss_mask.argmax())
        ordered = distribution(models[0], ids[:start], ids[start:]).topk(3).indices
        assert sample.top_ids is not None
        assert sample.top_ids[start:].tolist() == ordered.tolist()
        assert (sample.top_ids[:start] == -1).all()
        outside += sum(one not in best for one, best in zip(ids[start:], ordered.tolist(), strict=True))
    assert outside > 5


def test_tokens_that_share_the_last_place(
    launched: Launched, with_each_engine: WithEngine[Any], models: list[Path], tmp_path: Path
) -> None:
    """top_k keeps all of them, which are more than vLLM tells of."""
    tied = shutil.copytree(models[0], tmp_path / "tied")
    weights = load_file(tied / "model.safetensors")
    weights["lm_head.weight"][8:] = weights["lm_head.weight"][7]
    save_file(weights, tied / "model.safetensors", {"format": "pt"})

    async def play(engine: Engine) -> Group:
        await engine.update_weights(as_version(tied, 1))
        return await group_of(engine, replace(SAMPLING, top_k=4))

    samples = packed(with_each_engine(play), tmp_path)
    assert (ratios(samples, tied) - 1).abs().max() < 0.01
    assert samples.sampling_mask is not None
    told = samples.sampling_mask.counts.max()
    assert told <= 5 if isinstance(launched, Server) else told > 5


def test_what_is_not_trained_has_no_mask(with_each_engine: WithEngine[Any], tmp_path: Path) -> None:
    truncated, evaluation = replace(SAMPLING, top_p=0.8, top_k=5), EvalSamplingParams(top_p=0.5, repetition_penalty=1.5)

    async def play(engine: Engine) -> tuple[Group, Group]:
        few = replace(WORK, n_samples=2)
        return await asyncio.gather(
            group_of(engine, truncated, replace(few, kind="eval"), eval_sampling_params=evaluation),
            group_of(engine, SAMPLING, few),
        )

    for group in with_each_engine(play):
        assert all(sample.sampling_mask is None for sample in group.samples)
        assert packed(group, tmp_path).whole().sampling_mask is None


@pytest.mark.parametrize(
    "options", [pytest.param({}, marks=pytest.mark.faults_slow), {"top_p": 0.8, "top_k": 5}], ids=str
)
def test_a_trainer_with_other_weights_than_the_engine_is_told(
    with_each_engine: WithEngine[Any], models: list[Path], tmp_path: Path, options: dict[str, Any]
) -> None:
    run = make_run(tmp_path / "run")
    group = with_each_engine(lambda engine: group_of(engine, replace(SAMPLING, **options)))
    batch = Batch(1, [write_group(run.path / "group", group.samples, group.meta(0, "group"))], cursor=1)

    def step(world: World, model: Path) -> dict[str, float]:
        policy = FsdpPolicy(section(model), SAMPLING.temperature, world)
        consensus = StopConsensus(world, StopSignal(), Heartbeat(run, 1, "rank-0"))
        learner = Learner(
            run, ModelRanks(world, world), section(model), policy, None,
            objective=objective_of(section(model)), limits=(MicroBatchLimit(1), MicroBatchLimit(1)), model_flops=ModelFlops(1.0, 1, 1), max_seq_len=40, mismatch=MismatchLimit(GeneratorConfig().max_logprob_mismatch),
            dumps=Dumps(run, 1, world), consensus=consensus, start=ResumePoint(),
        )  # fmt: skip
        learner.schedule(1)
        return learner.train(batch, PhaseTimer())

    with world_of_one() as world:
        assert step(world, models[0])["policy/logprob_mismatch"] < 1e-3
        with pytest.raises(ConfigError, match="They are not the same model"):
            step(world, models[1])
