"""Rewards of whole groups in the rollout: which samples are compared, where their rewards stand, and what a failure costs."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import pytest

from hpcrl.config import EnvironmentConfig, GeneratorConfig
from hpcrl.config.sections.environment import SkyRLGymConfig
from hpcrl.data.group_file import group_bytes
from hpcrl.envs.base import Messages, Turn
from hpcrl.envs.rewards.response import GroupSample
from hpcrl.errors import ConfigError, ServiceError
from hpcrl.rollout.generate import GroupGenerator
from hpcrl.rollout.group import Group
from hpcrl.types import Prompt, Work
from tests.rollout.test_transcript import Script, ended, tokenizer_of

HERE = __name__
TOKENIZER = tokenizer_of("chatml")
SEEN: list[Sequence[GroupSample]] = []


class Pays:
    """Pays 1 for each turn but the last, and for that its number; "fail" fails."""

    def __init__(self, extras: Mapping[str, Any]) -> None:
        self._left = extras["turns"]

    def init(self, messages: Messages) -> Messages:
        return messages

    def step(self, action: str) -> Turn:
        if action == "fail":
            raise ConnectionError("gone")
        self._left -= 1
        done = not self._left
        return Turn([{"role": "user", "content": "more"}], float(action) if done else 1.0, done, {"left": self._left})

    def close(self) -> None:
        pass


def lengths(group: Sequence[GroupSample], environment: EnvironmentConfig) -> list[float]:
    SEEN.append(group)
    return [environment.custom.get("each", 1.0) * sample.n_tokens for sample in group]


def breaks(_group: Sequence[GroupSample], _environment: EnvironmentConfig) -> list[float]:
    raise ZeroDivisionError("cannot compare")


def misses_one(group: Sequence[GroupSample], _environment: EnvironmentConfig) -> list[float | ServiceError]:
    return [ServiceError("no grade") if sample.text == "2" else 1.0 + sample.reward for sample in group]


def lacks(_group: Sequence[GroupSample], _environment: EnvironmentConfig) -> list[float]:
    raise ConfigError("no key")


def generate(
    said: Sequence[str],
    weights: dict[str, float],
    turns: int = 1,
    kind: Literal["train", "eval"] = "train",
    workers: int = 0,
    cut: Sequence[int] = (),
    **settings: Any,
) -> Group:
    """Return the group of samples that answer so, turn after turn."""
    answers = [(ended(TOKENIZER, text)[0], "length" if at in cut else "stop") for at, text in enumerate(said)]
    environment = EnvironmentConfig(group_reward_function=weights, skyrl_gym=SkyRLGymConfig(max_env_workers=workers))
    config = GeneratorConfig(max_turns=9, **settings)
    row = {"turns": turns, "reward_spec": {"ground_truth": "4"}}
    prompt = Prompt("row3", [{"role": "user", "content": "n?"}], f"{HERE}:Pays", row, "numbers")
    generator = GroupGenerator(Script(answers), TOKENIZER, config, environment)  # type: ignore[arg-type]
    return asyncio.run(generator.generate(Work("g7", kind, prompt, len(said) // turns, seed=5)))


def test_the_rewards_of_the_group_take_the_place_of_the_samples_own() -> None:
    SEEN.clear()
    group = generate(["3", "40", "0"], {"rank": 2.0, f"{HERE}:lengths": 0.5, "best": 0.0}, workers=4)
    meta = group.meta(0, "path")
    assert meta.rewards == [2 * 0.0 + 0.5 * 2, 2 * 1.0 + 0.5 * 3, 2 * -1.0 + 0.5 * 2]
    assert [sample.raw_reward for sample in meta.samples] == [3.0, 40.0, 0.0], "shown as what it was"
    assert dict(meta.samples[1].env_metrics) == {"left": 0.0, "rank": 1.0, f"{HERE}:lengths": 3.0, "best": 1.0}
    for row, reward in zip(group.samples, meta.rewards, strict=True):
        assert row.rewards.nonzero()[0].tolist() in ([len(row.token_ids) - 1], []), "at the last token"
        assert float(row.rewards[-1]) == reward
    (seen,) = SEEN
    assert [(one.text, one.reward, one.ground_truth, one.data_source) for one in seen] == [
        ("3", 3.0, "4", "numbers"), ("40", 40.0, "4", "numbers"), ("0", 0.0, "4", "numbers"),
    ]  # fmt: skip
    assert seen[0].metrics == {"left": 0.0}
    assert group_bytes(group.samples, meta, group.judged, "")[1].rewards == meta.rewards


def test_own_rewards_stay_at_their_turns() -> None:
    said = ["7", "3", "7", "5"]
    SEEN.clear()
    group = generate(said, {"own": 0.5, f"{HERE}:lengths": 1.0}, turns=2)
    for row, last in zip(group.samples, (3.0, 5.0), strict=True):
        assert row.rewards[row.rewards != 0].tolist() == [0.5, 0.5 * last + 4]
    assert [one.reward for one in SEEN[0]] == [4.0, 6.0]
    assert [[message["content"] for message in one.conversation][:3] for one in SEEN[0]] == [
        ["7", "more", "3"],
        ["7", "more", "5"],
    ]


def test_a_step_wise_sample_is_compared_by_its_outcome_and_has_the_reward_in_its_last_row() -> None:
    group = generate(["7", "3", "7", "5"], {"rank": 1.0}, turns=2, step_wise_trajectories=True)
    assert group.meta(0, "path").rewards == [-1.0, 1.0]
    assert [row.rewards.sum().item() for rows in group.rows for row in rows] == [0.0, -1.0, 0.0, 1.0]
    assert all(row.env_metrics["rank"] in (-1.0, 1.0) for row in group.samples)


def test_a_failed_sample_is_not_compared_and_counts_as_the_mean() -> None:
    SEEN.clear()
    group = generate(["1", "fail", "2"], {"best": 1.0, f"{HERE}:lengths": 0.0})
    assert [one.text for one in SEEN[0]] == ["1", "2"]
    assert group.meta(0, "path").rewards == [0.0, 0.5, 1.0]
    assert group.meta(0, "path").stop_reasons == ["stop", "failed", "stop"]
    assert not generate(["fail", "fail"], {"best": 1.0}).meta(0, "path").scored_samples


@pytest.mark.parametrize("workers", [0, 2])
def test_a_group_reward_that_fails_costs_the_samples_of_its_group(workers: int) -> None:
    group = generate(["1", "2", "fail"], {f"{HERE}:breaks": 1.0}, workers=workers)
    assert set(group.meta(0, "path").stop_reasons) == {"failed"}
    assert not any(row.loss_mask.any() or row.rewards.any() for row in group.samples)
    assert len(group.failures) == 3
    told = f"group g7 (row row3): group reward '{HERE}:breaks' raised ZeroDivisionError: cannot compare"
    assert group.failures[:2] == [told, told]
    with pytest.raises(ConfigError, match=f"group reward '{HERE}:lacks': no key"):
        generate(["1"], {f"{HERE}:lacks": 1.0}, workers=workers)


def test_a_sample_without_a_value_has_failed_alone() -> None:
    group = generate(["1", "2", "3"], {"own": 1.0, f"{HERE}:misses_one": 1.0})
    assert group.meta(0, "path").stop_reasons == ["stop", "failed", "stop"]
    assert group.meta(0, "path").rewards == [3.0, 5.0, 7.0], "the mean of the others"
    assert group.failures == [f"group g7 (row row3): group reward '{HERE}:misses_one': no grade"]


def test_a_sample_that_a_limit_ended_is_compared_with_what_the_rule_leaves_it() -> None:
    """Its rank is the lowest, not the middle, where its own reward is 0."""
    plain = generate(["5", "9", "1"], {"rank": 1.0}, cut=[1])
    assert plain.meta(0, "path").rewards == [0.0, 1.0, -1.0]
    ruled = generate(["5", "9", "1"], {"rank": 1.0}, cut=[1], zero_reward_on_non_stop=True)
    assert ruled.meta(0, "path").rewards == [1.0, -1.0, 0.0]


def test_evaluation_keeps_the_rewards_of_samples() -> None:
    group = generate(["3", "4"], {f"{HERE}:breaks": 1.0}, kind="eval")
    assert group.meta(0, "path").rewards == [3.0, 4.0]
    assert [dict(row.env_metrics) for row in group.samples] == [{"left": 0.0}] * 2


def test_without_group_rewards_nothing_changes() -> None:
    said = ["7", "3", "7", "5"]
    plain, own = generate(said, {}, turns=2), generate(said, {"own": 1.0}, turns=2)
    for one, other in zip(plain.samples, own.samples, strict=True):
        assert one.rewards.tolist() == other.rewards.tolist()
