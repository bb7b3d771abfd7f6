"""A reward function of a launch script of Cosmos-RL, in its form for groups, rewards the samples of a group."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcrl.config import EnvironmentConfig
from hpcrl.envs.rewards.grouped import WeightedGroupRewards
from hpcrl.envs.rewards.response import GroupSample
from hpcrl.errors import UserCodeError

SCRIPT = '''
from hpcrl.envs.rewards.cosmos import of_group


def nearest(to_be_evaluated, reference, *args, prompt, config, **kwargs):
    """1 for the numbers that are nearest to the right one, as a launch script would rank them."""
    assert isinstance(to_be_evaluated, list)
    assert prompt[-1]["content"] == "2 + 2?"
    assert kwargs.keys() == {"data_packer", "tokenizer"}
    distances = [abs(float(text) - float(reference)) for text in to_be_evaluated]
    values = [config.custom["best"] * (one == min(distances)) for one in distances]
    return values, [{"distance": one} for one in distances]


def lengths(to_be_evaluated, reference=None, **kwargs):
    return [len(text) for text in to_be_evaluated]


def one_alone(to_be_evaluated, reference=None, **kwargs):
    return 1.0


pair, plain, wrong = of_group(nearest), of_group(lengths), of_group(one_alone)
'''


def test_a_function_of_a_launch_script_gets_the_texts_of_its_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "script_of_cosmos.py").write_text(SCRIPT)
    monkeypatch.syspath_prepend(tmp_path)
    prompt = [{"role": "user", "content": "2 + 2?"}]
    group = [GroupSample(text=text, reward=0.0, ground_truth="4", messages=prompt) for text in ("9", "4.5", "3.5")]
    weights = {"script_of_cosmos:pair": 1.0, "script_of_cosmos:plain": 0.5}
    rewards = WeightedGroupRewards(weights, EnvironmentConfig(custom={"best": 2.0}))
    found = rewards(group)
    assert [one["script_of_cosmos:pair"] for one in found] == [0.0, 2.0, 2.0]
    assert [rewards.added(one) for one in found] == [0.5, 3.5, 3.5]
    with pytest.raises(UserCodeError, match=r"'script_of_cosmos:wrong': .*a list of 3 numbers"):
        WeightedGroupRewards({"script_of_cosmos:wrong": 1.0}, EnvironmentConfig())(group)
