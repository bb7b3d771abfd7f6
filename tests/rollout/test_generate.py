"""From a piece of work to a group, with a real engine."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from hpcrl.config import GeneratorConfig, SamplingParams
from hpcrl.errors import ConfigError, HpcrlError
from hpcrl.rollout.client import EngineClient
from hpcrl.rollout.generate import Group, GroupGenerator
from hpcrl.types import Prompt, Work
from tests.rollout import environments
from tests.rollout.conftest import WithEngine
from tests.rollout.material import EOS, QUICKSTART, distribution, logprobs

TOKENIZER = AutoTokenizer.from_pretrained(QUICKSTART)
CONFIG = GeneratorConfig(sampling_params=SamplingParams(max_generate_length=30, temperature=0.8))
HERE = "tests.rollout.environments"


def work(env_class: str = "CountLetters", kind: Any = "train", n_samples: int = 6) -> Work:
    messages = [{"role": "user", "content": "sort: bca"}]
    return Work(
        "g7", kind, Prompt("row3", messages, f"{HERE}:{env_class}", {"name": "closed"}, "letters"), n_samples, seed=40
    )


def generate(with_engine: WithEngine[Group], item: Work, config: GeneratorConfig = CONFIG) -> Group:
    return with_engine(lambda engine: GroupGenerator(engine, TOKENIZER, config).generate(item))


def test_samples_say_who_chose_each_token(with_engine: WithEngine[Any], models: list[Path]) -> None:
    environments.CLOSED.clear()
    group = generate(with_engine, work())
    prompt = TOKENIZER.apply_chat_template(work().prompt.messages, add_generation_prompt=True, return_dict=False)
    assert len(group.samples) == len(group.texts) == 6
    for sample, text in zip(group.samples, group.texts, strict=True):
        said = sample.token_ids[len(prompt) :].tolist()
        assert sample.token_ids[: len(prompt)].tolist() == prompt
        assert sample.loss_mask.tolist() == [0.0] * len(prompt) + [1.0] * len(said)
        assert sample.versions.tolist() == [-1] * len(prompt) + [0] * len(said)
        assert (said[-1] == EOS) == (sample.stop_reason == "stop")
        assert text == TOKENIZER.decode(said, skip_special_tokens=True)
        assert sample.rewards.tolist() == [0.0] * (len(prompt) + len(said) - 1) + [float(len(text))]
        assert sample.env_metrics == {"seen": 1.0}
        expected = logprobs(models[0], prompt, said, temperature=0.8)
        torch.testing.assert_close(sample.rollout_logprobs[len(prompt) :], expected, atol=1e-3, rtol=0)
        assert not sample.rollout_logprobs[: len(prompt)].any()
        assert (sample.token_ids.dtype, sample.versions.dtype) == (torch.int64, torch.int32)
    assert environments.CLOSED == ["closed"] * 6


def test_meta_describes_the_samples(with_engine: WithEngine[Any]) -> None:
    group = generate(with_engine, work())
    meta = group.meta(replica=3, path="samples/3/g7.safetensors")
    assert (meta.group_id, meta.kind, meta.replica, meta.data_source) == ("g7", "train", 3, "letters")
    assert meta.rewards == [float(len(text)) for text in group.texts]
    assert meta.lengths == [len(sample.token_ids) for sample in group.samples]
    assert meta.response_lengths == [int(sample.loss_mask.sum()) for sample in group.samples]
    assert meta.stop_reasons == [sample.stop_reason for sample in group.samples]
    assert (meta.oldest_version, meta.newest_version) == (0, 0)
    assert 0 < meta.seconds < 30


def test_a_group_does_not_depend_on_when_it_is_generated(with_engine: WithEngine[Any]) -> None:
    async def play(engine: EngineClient) -> None:
        generator = GroupGenerator(engine, TOKENIZER, CONFIG)
        together = await asyncio.gather(*(generator.generate(work()) for _ in range(3)))
        alone = await generator.generate(work())
        assert all(group.texts == alone.texts for group in together)

    with_engine(play)


def test_evaluation_is_greedy(with_engine: WithEngine[Any], models: list[Path]) -> None:
    group = generate(with_engine, work(kind="eval", n_samples=2))
    assert group.texts[0] == group.texts[1]
    sample = group.samples[0]
    said = sample.token_ids[sample.loss_mask > 0].tolist()
    prompt = sample.token_ids[sample.loss_mask == 0].tolist()
    scores = distribution(models[0], prompt, said)
    assert (scores.gather(1, torch.tensor(said)[:, None])[:, 0] > scores.max(1).values - 1e-3).all()


def test_an_environment_may_open_each_sample_differently(with_engine: WithEngine[Any]) -> None:
    group = generate(with_engine, work("OwnPrompt"))
    prompts = {tuple(sample.token_ids[sample.loss_mask == 0].tolist()) for sample in group.samples}
    assert len(prompts) == 6


def test_chat_template_kwargs_reach_the_template(with_engine: WithEngine[Any]) -> None:
    bare = {"chat_template": "{{ messages[0]['content'] }}{% if more is defined %}{{ more }}{% endif %}", "more": "abc"}
    group = generate(
        with_engine, work(), GeneratorConfig(sampling_params=CONFIG.sampling_params, chat_template_kwargs=bare)
    )
    sample = group.samples[0]
    assert sample.token_ids[sample.loss_mask == 0].tolist() == TOKENIZER("sort: bcaabc")["input_ids"]


@pytest.mark.parametrize(
    ("env_class", "kind", "said"),
    [
        ("Raises", HpcrlError, "ZeroDivisionError: cannot score True"),
        ("Unmade", HpcrlError, "KeyError: 'ground_truth'"),
        ("Talks", ConfigError, "wants another turn"),
        ("Nothing", ConfigError, "has no class"),
    ],
)
def test_what_an_environment_does_wrong_is_named(
    with_engine: WithEngine[Any], env_class: str, kind: type[HpcrlError], said: str
) -> None:
    environments.CLOSED.clear()
    with pytest.raises(kind, match=said) as caught:
        generate(with_engine, work(env_class))
    assert f"{HERE}:{env_class}" in str(caught.value)
    assert "g7" in str(caught.value)
    assert (["closed"] * 6 if env_class in ("Raises", "Talks") else []) == environments.CLOSED
