"""From a piece of work to a group, with a real engine."""

from __future__ import annotations

import asyncio
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from hpcrl.config import EnvironmentConfig, GeneratorConfig, SamplingParams
from hpcrl.config.sections.environment import SkyRLGymConfig
from hpcrl.config.sections.generator import EvalSamplingParams
from hpcrl.data.chat.prompt_tokens import cut_at_stop
from hpcrl.engines.vllm.client import EngineClient
from hpcrl.envs.tools.sandboxes import Sandboxes
from hpcrl.errors import ConfigError
from hpcrl.rollout.generate import GroupGenerator
from hpcrl.rollout.group import Group
from hpcrl.types import Prompt, Work
from tests.envs import skyrl_calc
from tests.rollout import environments
from tests.rollout.conftest import WithEngine
from tests.rollout.material import EOS, QUICKSTART, distribution, logprobs

TOKENIZER = AutoTokenizer.from_pretrained(QUICKSTART)
CONFIG = GeneratorConfig(sampling_params=SamplingParams(max_generate_length=30, temperature=0.8))
ENVIRONMENT = EnvironmentConfig()
GREEDY = EvalSamplingParams(temperature=0.0)
HERE = "tests.rollout.environments"


def work(env_class: str = "CountLetters", kind: Any = "train", n_samples: int = 6) -> Work:
    messages = [{"role": "user", "content": "sort: bca"}]
    return Work(
        "g7", kind, Prompt("row3", messages, f"{HERE}:{env_class}", {"name": "closed"}, "letters"), n_samples, seed=40
    )


def generate(
    with_engine: WithEngine[Group],
    item: Work,
    config: GeneratorConfig = CONFIG,
    environment: EnvironmentConfig = ENVIRONMENT,
    baselines: bool = False,
    **more: Any,
) -> Group:
    return with_engine(
        lambda engine: GroupGenerator(engine, TOKENIZER, config, environment, baselines, **more).generate(item)
    )


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
        np.testing.assert_allclose(sample.rollout_logprobs[len(prompt) :], expected, atol=1e-3)
        assert not sample.rollout_logprobs[: len(prompt)].any()
        assert (sample.token_ids.dtype, sample.versions.dtype) == (np.int64, np.int32)
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
        generator = GroupGenerator(engine, TOKENIZER, CONFIG, ENVIRONMENT)
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


def test_a_greedy_response_beside_the_samples(with_engine: WithEngine[Any]) -> None:
    """Only its reward is kept, the samples are as without it, and it has an environment of its own."""
    plain = generate(with_engine, work())
    greedy = generate(with_engine, work(kind="eval", n_samples=1), replace(CONFIG, eval_sampling_params=GREEDY))
    environments.CLOSED.clear()
    compared = generate(with_engine, work(), baselines=True)
    assert compared.baseline == greedy.raw_rewards[0]
    assert compared.texts == plain.texts
    assert compared.meta(0, "path").baseline == compared.baseline
    assert len(compared.samples) == 6
    assert environments.CLOSED == ["closed"] * 7
    assert plain.meta(0, "path").baseline is None
    assert generate(with_engine, work(kind="eval"), baselines=True).baseline is None
    assert len(generate(with_engine, work("OwnPrompt"), baselines=True).samples) == 6


def test_a_greedy_response_that_does_not_end_by_itself_is_judged_too(with_engine: WithEngine[Any]) -> None:
    endless = replace(CONFIG.sampling_params, additional_kwargs={"ignore_eos": True})
    paid = GeneratorConfig(sampling_params=endless)
    assert generate(with_engine, work(), paid, baselines=True).baseline > 0
    assert generate(with_engine, work(), replace(paid, zero_reward_on_non_stop=True), baselines=True).baseline == 0


def test_rewards_by_name_pay_a_greedy_response_too(with_engine: WithEngine[Any]) -> None:
    item = replace(work(), prompt=replace(work().prompt, extras={"reward_spec": {"ground_truth": "abc"}}))
    named = EnvironmentConfig(reward_function={"format": 1.0})
    assert generate(with_engine, item, environment=named, baselines=True).baseline is not None


def test_an_environment_of_skyrl_gym_plays_with_each_engine(with_each_engine: WithEngine[Any]) -> None:
    """Its prompt, observations, rewards per turn, metrics and end are those of the sample."""
    skyrl_calc.CLOSED.clear()
    extras = {"name": "row 3", "reward_spec": {"ground_truth": "5"}}
    item = replace(work(), prompt=replace(work().prompt, env_class="tests.envs.skyrl_calc:Letters", extras=extras))
    environment = EnvironmentConfig(custom={"hint": " cba"})
    group = generate(with_each_engine, item, replace(CONFIG, max_turns=2), environment)
    shown = [{"role": "user", "content": "sort: bca cba"}]
    prompt = TOKENIZER.apply_chat_template(shown, add_generation_prompt=True, return_dict=False)
    for sample in group.samples:
        assert sample.token_ids[: len(prompt)].tolist() == prompt
        assert np.count_nonzero(np.diff(sample.loss_mask) == 1) == 2, "the two turns of the policy are trained"
        assert "abc" in TOKENIZER.decode(sample.token_ids[len(prompt) :][sample.loss_mask[len(prompt) :] == 0])
        (ends,) = np.nonzero(sample.rewards)
        assert (sample.loss_mask[ends] == 1).all()
        assert sample.env_metrics == {"turns": 2.0, "used": 1.0}
    assert skyrl_calc.CLOSED == ["row 3"] * 6


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


def test_additional_sampling_parameters_reach_the_engine(with_engine: WithEngine[Any]) -> None:
    """In training; evaluation has its own, or the same where it has none."""
    plain = replace(CONFIG.sampling_params, additional_kwargs={"allowed_token_ids": [7, 9], "min_tokens": 5})
    own = EvalSamplingParams(additional_kwargs={"allowed_token_ids": [6]})
    same = EvalSamplingParams(temperature=0.5)
    for kind, evaluation, allowed in (("train", own, {7, 9}), ("eval", own, {6}), ("eval", same, {7, 9})):
        config = GeneratorConfig(sampling_params=plain, eval_sampling_params=evaluation)
        for sample in generate(with_engine, work(kind=kind), config).samples:
            chosen = sample.token_ids[sample.versions >= 0].tolist()
            assert set(chosen) <= allowed
            assert len(chosen) == 30


@pytest.mark.parametrize("stop", [["c"], ["ab", "c"], ["zz", "c", "b"]])
def test_the_environment_sees_the_stop_text_or_not(with_engine: WithEngine[Any], stop: list[str]) -> None:
    """What the policy said stays as it is either way."""
    endless = {"ignore_eos": True}
    groups = {}
    for keep in (True, False):
        params = replace(
            CONFIG.sampling_params,
            stop=stop,
            include_stop_str_in_output=keep,
            additional_kwargs=endless,
            temperature=1.5,
        )
        groups[keep] = generate(with_engine, work(n_samples=16), GeneratorConfig(sampling_params=params))
    stopped = 0
    for kept, cut, text, shorter in zip(
        groups[True].samples, groups[False].samples, groups[True].texts, groups[False].texts, strict=True
    ):
        assert kept.token_ids.tolist() == cut.token_ids.tolist()
        if kept.stop_reason == "stop":
            stopped += 1
            assert any(text == shorter + one for one in stop)
            assert not any(one in shorter for one in stop)
        else:
            assert text == shorter
        assert (kept.rewards.sum(), cut.rewards.sum()) == (len(text), len(shorter))
    assert stopped


def test_stop_text_that_a_token_completes() -> None:
    assert cut_at_stop("abcd", 2, ["bc"], keep=True) == "abc"
    assert cut_at_stop("abcd", 2, ["bc"], keep=False) == "a"
    assert cut_at_stop("abcd", 2, ["cd", "bc"], keep=True) == "abc", "the one that was complete first"
    assert cut_at_stop("abcab", 4, ["ab"], keep=False) == "abc", "not the one before the shortest length was reached"
    assert cut_at_stop("abcd", 4, ["b"], keep=True) == "abcd"


def test_samples_that_do_not_end_by_themselves(with_engine: WithEngine[Any]) -> None:
    params = replace(CONFIG.sampling_params, max_generate_length=6)
    plain = generate(with_engine, work(n_samples=32), GeneratorConfig(sampling_params=params))
    config = GeneratorConfig(sampling_params=params, zero_reward_on_non_stop=True, apply_overlong_filtering=True)
    for kind in ("train", "eval"):
        config = replace(config, eval_sampling_params=EvalSamplingParams(temperature=params.temperature))
        group = generate(with_engine, work(kind=kind, n_samples=32), config)
        assert {sample.stop_reason for sample in group.samples} == {"stop", "length"}
        for sample, other in zip(group.samples, plain.samples, strict=True):
            ended = sample.stop_reason == "stop"
            assert sample.rewards.tolist() == (other.rewards * ended).tolist()
            assert sample.loss_mask.tolist() == (other.loss_mask * ended).tolist()
            assert sample.token_ids.tolist() == other.token_ids.tolist()
            assert sample.versions.tolist() == other.versions.tolist()
        meta, before = group.meta(0, "path"), plain.meta(0, "path")
        assert [sample.raw_reward for sample in meta.samples] == before.rewards != meta.rewards
        assert meta.rewards == [float(sample.rewards.sum()) for sample in group.samples]
        assert meta.response_lengths == before.response_lengths, "what was said counts, trained or not"
        assert (meta.oldest_version, meta.newest_version) == (0, 0)


def test_each_of_the_two_judgements_alone(with_engine: WithEngine[Any]) -> None:
    params = replace(CONFIG.sampling_params, additional_kwargs={"ignore_eos": True})
    zeroed = generate(with_engine, work(), GeneratorConfig(sampling_params=params, zero_reward_on_non_stop=True))
    left_out = generate(with_engine, work(), GeneratorConfig(sampling_params=params, apply_overlong_filtering=True))
    assert all(not sample.rewards.any() and sample.loss_mask.any() for sample in zeroed.samples)
    assert all(sample.rewards.any() and not sample.loss_mask.any() for sample in left_out.samples)


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_environments_step_in_so_many_threads(with_engine: WithEngine[Any], workers: int) -> None:
    environments.STEPS.clear()
    config = EnvironmentConfig(skyrl_gym=SkyRLGymConfig(max_env_workers=workers))
    generate(with_engine, work("Slow"), environment=config)
    steps = environments.STEPS
    together = max(sum(begun <= moment < ended for _, begun, ended in steps) for _, moment, _ in steps)
    assert len(steps) == 6
    assert together == max(workers, 1)
    assert ({name for name, _, _ in steps} == {threading.current_thread().name}) == (workers == 0)


def test_custom_settings_reach_every_environment(with_engine: WithEngine[Any]) -> None:
    group = generate(with_engine, work("Configured"), environment=EnvironmentConfig(custom={"bonus": 2.5}))
    assert group.raw_rewards == [2.5] * 6
    own = replace(work("Configured"), prompt=replace(work("Configured").prompt, extras={"custom": {"bonus": 7.0}}))
    group = generate(with_engine, own, environment=EnvironmentConfig(custom={"bonus": 2.5}))
    assert group.raw_rewards == [7.0] * 6, "a column of the row comes first"


def test_an_unknown_environment_ends_the_run(with_engine: WithEngine[Any]) -> None:
    with pytest.raises(ConfigError, match=rf"{HERE}:Nothing.*g7.*has no class"):
        generate(with_engine, work("Nothing"))


@pytest.mark.parametrize(
    ("env_class", "said"),
    [("Raises", "ZeroDivisionError: cannot score True"), ("Unmade", "KeyError: 'ground_truth'")],
)
def test_a_sample_whose_environment_fails_is_marked(with_engine: WithEngine[Any], env_class: str, said: str) -> None:
    environments.CLOSED.clear()
    group = generate(with_engine, work(env_class))
    assert [sample.stop_reason for sample in group.samples] == ["failed"] * 6
    assert not any(sample.loss_mask.any() or sample.rewards.any() for sample in group.samples)
    meta = group.meta(0, "path")
    assert len(meta.failures) == 6
    for name in (said, f"{HERE}:{env_class}", "g7", "row3"):
        assert name in meta.failures[0]
    assert (["closed"] * 6 if env_class == "Raises" else []) == environments.CLOSED
    assert (meta.oldest_version, meta.newest_version) == (0, 0)


def test_failed_samples_move_no_baseline(with_engine: WithEngine[Any]) -> None:
    group, whole = generate(with_engine, work("Flaky")), generate(with_engine, work())
    failed = [sample.stop_reason == "failed" for sample in group.samples]
    assert sum(failed) == 3
    paid = [reward for reward, lost in zip(whole.raw_rewards, failed, strict=True) if not lost]
    for sample, lost, expected in zip(group.samples, failed, whole.samples, strict=True):
        assert sample.token_ids.tolist() == expected.token_ids.tolist()
        assert sample.loss_mask.any() != lost
        assert float(sample.rewards.sum()) == pytest.approx(sum(paid) / 3 if lost else float(expected.rewards.sum()))
    assert [reward for reward, lost in zip(group.raw_rewards, failed, strict=True) if lost] == [0.0] * 3
    assert "the service is gone" in group.failures[0]
    evaluated = generate(with_engine, work("Flaky", kind="eval"))
    assert sorted(sample.rewards.sum() > 0 for sample in evaluated.samples) == [False] * 3 + [True] * 3


def test_an_environment_that_takes_too_long(with_engine: WithEngine[Any]) -> None:
    """Its sample is marked, the others go on, and it is closed when it is done, never while it steps."""
    environments.CLOSED.clear()
    environments.Stuck.go.clear()
    group = generate(with_engine, work("Stuck"), environment=EnvironmentConfig(timeout_seconds=0.2))
    assert len(group.failures) == 6
    assert "took longer than environment.timeout_seconds (0.2 s)" in group.failures[0]
    assert environments.CLOSED == []
    environments.Stuck.go.set()
    deadline = time.monotonic() + 10
    while len(environments.CLOSED) < 12 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert sorted(environments.CLOSED) == ["closed"] * 6 + ["stepped"] * 6


@pytest.mark.parametrize(("turns", "limits"), [(5, {}), (5, {"max_input_length": 40}), (1, {})])
def test_samples_with_a_place_go_on_while_others_wait_for_one(
    with_engine: WithEngine[Any], turns: int, limits: dict[str, int]
) -> None:
    """Also one that ends at a limit leaves its place, and one that has a single turn."""
    sandboxes = Sandboxes(list)
    group = generate(with_engine, work("OnePlace"), replace(CONFIG, max_turns=turns, **limits), sandboxes=sandboxes)
    assert group.failures == []
    assert len(group.conversations) == 6


def test_an_answer_that_is_lost_with_its_sandbox_is_asked_for_again(with_engine: WithEngine[Any]) -> None:
    config = replace(CONFIG, max_turns=5)
    environments.Loses.lost[:] = ["init", "state", "step", "state"]
    group = generate(with_engine, work("Loses", n_samples=1), config)
    assert (group.failures, environments.Loses.lost) == ([], [])
    assert group.samples[0].env_metrics["answered"] == 3
    environments.Loses.lost[:] = ["none", "step"]
    group = generate(with_engine, work("Loses", n_samples=1), config)
    assert "its node is gone" in group.failures[0], "the state before is not that after the newest answer"
    environments.Loses.lost[:] = ["step"] * 3
    group = generate(with_engine, work("Loses", n_samples=1), config)
    assert "its node is gone" in group.failures[0]


def test_several_turns_with_an_engine(with_engine: WithEngine[Any], models: list[Path]) -> None:
    """Logprobs of every turn are those of the whole, and the seeds make it reproducible."""
    config = replace(CONFIG, max_turns=5)
    group, again = (generate(with_engine, work("Talks"), config) for _ in range(2))
    for sample, other, messages in zip(group.samples, again.samples, group.conversations, strict=True):
        assert sample.token_ids.tolist() == other.token_ids.tolist()
        assert [message["role"] for message in messages] == ["assistant", "user"] * 3
        said = [len(message["content"]) for message in messages[::2]]
        assert sample.rewards[sample.rewards > 0].tolist() == [float(length) for length in said if length]
        first = int(sample.loss_mask.argmax())
        expected = logprobs(models[0], sample.token_ids[:first].tolist(), sample.token_ids[first:].tolist(), 0.8)
        mask = sample.loss_mask[first:] > 0
        np.testing.assert_allclose(sample.rollout_logprobs[first:][mask], expected[mask], atol=1e-3)
    assert len({tuple(sample.token_ids.tolist()) for sample in group.samples}) == 6
    assert (
        generate(with_engine, work("Talks"), replace(CONFIG, max_turns=2)).conversations[0][-2]["role"] == "assistant"
    )
