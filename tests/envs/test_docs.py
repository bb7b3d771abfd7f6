"""docs/rewards.md lists every reward, says which of them compare, and its code and configurations work."""

from __future__ import annotations

import re
import sys
import tomllib
from dataclasses import fields
from pathlib import Path

from hpcrl.config import Config, EnvironmentConfig
from hpcrl.config.environment import COMPARING_REWARDS, REWARDS
from hpcrl.config.surface import leaves
from hpcrl.envs.rewards.boxed import SECONDS
from hpcrl.envs.rewards.response import Response
from hpcrl.envs.rewards.weighted import WeightedRewards

PAGE = (Path(__file__).parents[2] / "docs" / "rewards.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


def test_the_table_lists_every_reward_and_which_compare() -> None:
    rows = re.findall(r"^\| `(\w+)` \|.*\| (yes|no) \|$", PAGE, re.MULTILINE)
    assert dict(rows) == {name: "yes" if name in COMPARING_REWARDS else "no" for name in REWARDS}
    assert f"more than {SECONDS:g} seconds" in PAGE


def test_the_page_names_what_a_response_has_and_settings_that_exist() -> None:
    own = PAGE[PAGE.index("`response` has") :]
    assert all(f"`{field.name}`" in own for field in fields(Response))
    paths = {setting.path for setting in leaves(Config)}
    for name in re.findall(r"`((?:data|trainer|environment|skyrl_gym)\.[\w.]+)`", PAGE):
        assert name in paths or f"environment.{name}" in paths, name


def test_configurations_of_the_page_load(tmp_path: Path) -> None:
    needed = '[data]\ntrain_data = ["t"]\n[trainer]\neval_interval = 0\n[trainer.policy.model]\npath = "m"\n'
    (tmp_path / "base.toml").write_text(needed)
    texts = [text for kind, text in BLOCKS if kind == "toml"]
    assert len(texts) == 3
    for text in texts:
        path = tmp_path / "page.toml"
        path.write_text(text)
        given, loaded = tomllib.loads(text)["environment"], Config.from_toml([tmp_path / "base.toml", path]).environment
        assert loaded.reward_function == given.get("reward_function", {})
        remote = {name: getattr(loaded.remote_reward, name) for name in given.get("remote_reward", {})}
        assert remote == given.get("remote_reward", {})


def test_the_reward_of_the_page_pays(tmp_path: Path, monkeypatch) -> None:
    (code,) = [text for kind, text in BLOCKS if kind == "python"]
    (tmp_path / "my_rewards.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    rewards = WeightedRewards("", {"my_rewards:brief": 1.0}, EnvironmentConfig(custom={"bonus": 0.1}))
    turn = rewards(Response(text="it is 42\n", ground_truth=42, n_tokens=5, max_tokens=10))
    assert turn.reward == 1.05
    assert rewards(Response(text="41", ground_truth=42, n_tokens=5, max_tokens=10)).reward == 0
    sys.modules.pop("my_rewards")
