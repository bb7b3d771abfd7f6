"""Named rewards in the place of an environment, with a real engine."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from urllib.parse import parse_qs

import numpy as np
import pytest

from hpcrl.config import EnvironmentConfig, GeneratorConfig, SamplingParams
from hpcrl.config.sections.environment import OverlongRewardConfig, RemoteRewardConfig
from hpcrl.config.sections.generator import EvalSamplingParams
from hpcrl.engines.vllm.client import EngineClient
from hpcrl.envs.rewards.response import Response
from hpcrl.errors import ConfigError, DataError, HpcrlError, SandboxError
from hpcrl.rollout.generate import GroupGenerator
from hpcrl.rollout.group import Group
from hpcrl.types import Prompt, Work
from tests.envs.server import Asked, serving
from tests.rollout.conftest import WithEngine
from tests.rollout.test_generate import CONFIG, TOKENIZER

HERE = "tests.rollout.test_rewards"
LENGTH = f"{HERE}:length"
TRUTH = {"reward_spec": {"ground_truth": "abc"}}
SEEN: list[Response] = []


def length(response: Response, environment: EnvironmentConfig) -> float:
    SEEN.append(response)
    return len(response.text) * environment.custom.get("per_letter", 1.0)


def fails(response: Response, environment: EnvironmentConfig) -> float:  # noqa: ARG001
    raise ZeroDivisionError("cannot score")


def in_sandbox(*_: object, **__: object) -> float:
    raise SandboxError("/answer: No such file or directory")


WORTH: Iterator[Any] = iter([])


def worth(response: Response, environment: EnvironmentConfig) -> Any:  # noqa: ARG001
    return next(WORTH)


def generate(
    with_engine: WithEngine[Group],
    environment: EnvironmentConfig,
    config: GeneratorConfig = CONFIG,
    kind: Any = "train",
    extras: dict[str, Any] = TRUTH,
) -> Group:
    prompt = Prompt("row3", [{"role": "user", "content": "sort: bca"}], "", extras, "letters")

    def play(engine: EngineClient) -> Any:
        return GroupGenerator(engine, TOKENIZER, config, environment).generate(Work("g7", kind, prompt, 6, seed=40))

    return with_engine(play)


def test_the_weighted_sum_pays_and_every_reward_is_reported(with_engine: WithEngine[Group]) -> None:
    SEEN.clear()
    weights = {LENGTH: 0.5, "overlong": 2.0, "format": 0.0}
    overlong = OverlongRewardConfig(buffer_length=20, penalty_factor=3.0)
    group = generate(
        with_engine, EnvironmentConfig(reward_function=weights, overlong_reward=overlong, custom={"per_letter": 4.0})
    )
    penalties = set()
    for sample, text, n_tokens in zip(group.samples, group.texts, group.response_lengths, strict=True):
        penalty = -3.0 * max(0, n_tokens - 10) / 20
        penalties.add(penalty)
        assert sample.env_metrics == {LENGTH: 4.0 * len(text), "overlong": pytest.approx(penalty), "format": 0.0}
        assert (
            float(sample.rewards.sum()) == float(sample.rewards[-1]) == pytest.approx(2.0 * len(text) + 2.0 * penalty)
        )
    assert len(penalties) > 1
    assert [one.env_metrics for one in group.meta(0, "p").samples] == [row.env_metrics for row in group.samples]
    assert {(seen.ground_truth, seen.max_tokens) for seen in SEEN} == {("abc", 30)}
    assert sorted((seen.text, seen.n_tokens) for seen in SEEN) == sorted(
        zip(group.texts, group.response_lengths, strict=True)
    )
    assert SEEN[0].extras == TRUTH
    assert SEEN[0].messages == [{"role": "user", "content": "sort: bca"}]


def test_evaluation_has_its_own_rewards_and_length_or_those_of_training(with_engine: WithEngine[Group]) -> None:
    config = replace(CONFIG, eval_sampling_params=EvalSamplingParams(max_generate_length=12))
    training = EnvironmentConfig(reward_function={"single_choice": 1.0})
    own = replace(training, eval_reward_function={LENGTH: 1.0})
    only = EnvironmentConfig(eval_reward_function={LENGTH: 1.0})
    for environment, expected in ((training, "single_choice"), (own, LENGTH), (only, LENGTH)):
        SEEN.clear()
        group = generate(with_engine, environment, config, "eval")
        assert all(list(sample.env_metrics) == [expected] for sample in group.samples)
        assert {seen.max_tokens for seen in SEEN} == ({12} if expected == LENGTH else set())


def test_a_policy_that_is_cut_short_is_judged_as_with_an_environment(with_engine: WithEngine[Group]) -> None:
    params = SamplingParams(max_generate_length=6, additional_kwargs={"ignore_eos": True})
    config = GeneratorConfig(sampling_params=params, zero_reward_on_non_stop=True)
    group = generate(with_engine, EnvironmentConfig(reward_function={LENGTH: 1.0}), config)
    assert not any(sample.rewards.any() for sample in group.samples)
    assert all(group.raw_rewards)


def test_a_service_pays_and_where_it_does_not_answer_the_sample_has_failed(
    with_engine: WithEngine[Group], monkeypatch: pytest.MonkeyPatch
) -> None:
    remote = RemoteRewardConfig(
        enable=True, reward_function={"length": 1.0}, score_key="n", clip_max=99.0, batch_size=4
    )
    asked: list[list[str]] = []

    def answer(request: Asked) -> tuple[int, Any]:
        if request.path == "/enqueue":
            asked.append(request.json["completions"])
            return 200, {"uuid": str(len(asked) - 1)}
        if request.path == "/closed":
            return 403, "not for you"
        uuid = int(parse_qs(request.body.decode())["uuid"][0])
        return 200, {"scores": {"n": [len(text) for text in asked[uuid]]}}

    with serving(answer) as server:
        monkeypatch.setenv("REMOTE_REWARD_TOKEN", "s3cret")
        monkeypatch.setenv("REMOTE_REWARD_ENQUEUE_URL", f"{server.url}/enqueue")
        monkeypatch.setenv("REMOTE_REWARD_FETCH_URL", f"{server.url}/fetch")
        group = generate(with_engine, EnvironmentConfig(remote_reward=remote))
        for sample, text in zip(group.samples, group.texts, strict=True):
            assert sample.env_metrics == {"length": float(len(text))}
            assert float(sample.rewards.sum()) == len(text)
        assert sorted(text for batch in asked for text in batch) == sorted(group.texts)
        assert len(asked) < 6
        monkeypatch.setenv("REMOTE_REWARD_ENQUEUE_URL", f"{server.url}/closed")
        failed = generate(with_engine, EnvironmentConfig(remote_reward=remote))
    assert len(failed.failures) == 6
    assert "group g7 (row row3): reward service (REMOTE_REWARD_ENQUEUE_URL)" in failed.failures[0]
    assert not any(sample.loss_mask.any() for sample in failed.samples)


def test_a_reward_that_raises_costs_its_samples(with_engine: WithEngine[Group]) -> None:
    group = generate(with_engine, EnvironmentConfig(reward_function={f"{HERE}:fails": 1.0}), extras=TRUTH)
    meta = group.meta(0, "path")
    assert set(meta.stop_reasons) == {"failed"}
    assert f"group g7 (row row3): reward '{HERE}:fails' raised ZeroDivisionError: c" in meta.failures[0]


def test_what_a_sandbox_refuses_costs_its_samples(with_engine: WithEngine[Group]) -> None:
    group = generate(with_engine, EnvironmentConfig(reward_function={f"{HERE}:in_sandbox": 1.0}), extras=TRUTH)
    assert set(group.meta(0, "path").stop_reasons) == {"failed"}
    assert "/answer: No such file or directory" in group.failures[0]


def test_a_reward_that_is_no_finite_number_costs_its_sample(
    with_engine: WithEngine[Group], monkeypatch: pytest.MonkeyPatch
) -> None:
    values = [float("inf"), "0.5", None, True, np.float32(0.5), np.nan]
    monkeypatch.setattr(sys.modules[HERE], "WORTH", iter(values))
    group = generate(with_engine, EnvironmentConfig(reward_function={f"{HERE}:worth": 1.0}))
    reasons = [rows[-1].stop_reason for rows in group.rows]
    assert reasons.count("failed") == 4
    rewards = [meta for meta, reason in zip(group.meta(0, "path").rewards, reasons, strict=True) if reason != "failed"]
    assert sorted(rewards) == [0.5, 1.0]
    told = " ".join(group.failures)
    for value in ("inf;", "'0.5';", "None;", "nan"):
        assert f"reward '{HERE}:worth': {value}" in told
    assert "expected a finite number of at most 1e+30" in told


@pytest.mark.parametrize(
    ("name", "extras", "kind", "said"),
    [
        (f"{HERE}:missing", TRUTH, ConfigError, "has no function 'missing'"),
        (
            "single_choice",
            {},
            DataError,
            r"row row3\): reward 'single_choice': the row needs a ground truth",
        ),
        ("gsm8k", {"reward_spec": "5"}, DataError, "found None"),
    ],
)
def test_what_a_reward_does_wrong_is_named(
    with_engine: WithEngine[Group], name: str, extras: dict[str, Any], kind: type[HpcrlError], said: str
) -> None:
    with pytest.raises(kind, match=said):
        generate(with_engine, EnvironmentConfig(reward_function={name: 1.0}), extras=extras)


@pytest.mark.parametrize(
    ("weights", "setting"),
    [
        ({"reward_function": {"nothing": 1.0}}, "environment.reward_function"),
        ({"eval_reward_function": {"nothing": 1.0}}, "environment.eval_reward_function"),
        (
            {"reward_function": {"format": 1.0}, "eval_reward_function": {"nothing": 1.0}},
            "environment.eval_reward_function",
        ),
    ],
)
def test_an_unknown_reward_is_told_with_the_setting_that_names_it(
    with_engine: WithEngine[Group], weights: dict[str, Any], setting: str
) -> None:
    with pytest.raises(ConfigError, match=rf"^{setting}: nothing is called 'nothing'"):
        generate(with_engine, EnvironmentConfig(**weights))
