"""docs/rewards.md lists every reward, says which of them compare, and its code and configurations work."""

from __future__ import annotations

import re
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import tomli

from hpcrl.config import Config, EnvironmentConfig
from hpcrl.config.fields import leaves
from hpcrl.config.sections.environment import LLMJudgeConfig
from hpcrl.config.sections.functions import COMPARING_REWARDS, REWARDS
from hpcrl.envs.rewards.boxed import SECONDS
from hpcrl.envs.rewards.grouped import GROUP_REWARDS, WeightedGroupRewards
from hpcrl.envs.rewards.response import GroupSample, Response
from hpcrl.envs.rewards.weighted import BY_DATA_SOURCE, WeightedRewards
from hpcrl.envs.sandbox import program as confined
from hpcrl.envs.tasks import search, text2sql
from hpcrl.envs.tools import judge as judge_tool
from hpcrl.envs.tools import python as python_program
from hpcrl.envs.tools import retrieve, sqlite_query
from tests.paths import ROOT

PATH = ROOT / "docs"
PAGE = (PATH / "rewards.md").read_text(encoding="utf-8")
NEEDED = '[data]\ntrain_data = ["t"]\n[trainer]\neval_interval = 0\n[trainer.policy.model]\npath = "m"\n'
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


def test_the_table_lists_every_reward_and_which_compare() -> None:
    rows = re.findall(r"^\| `(\w+)` \|.*\| (yes|no) \|$", PAGE, re.MULTILINE)
    comparing = {*COMPARING_REWARDS, BY_DATA_SOURCE}
    assert dict(rows) == {name: "yes" if name in comparing else "no" for name in REWARDS}
    assert f"more than {SECONDS:g} seconds" in PAGE
    of_groups = PAGE[PAGE.index("## Rewards of a whole group") : PAGE.index("## A reward service")]
    assert re.findall(r"^\| `(\w+)` \|", of_groups, re.MULTILINE) == list(GROUP_REWARDS)
    added = {field.name for field in fields(GroupSample)} - {field.name for field in fields(Response)}
    assert all(f"`{name}`" in of_groups for name in added)
    assert f"`comparisons` times ({LLMJudgeConfig.comparisons})" in of_groups


def test_the_page_names_what_a_response_has_and_settings_that_exist() -> None:
    own = PAGE[PAGE.index("`response` has") :]
    assert all(f"`{field.name}`" in own for field in fields(Response))
    paths = {setting.path for setting in leaves(Config)}
    for name in re.findall(r"`((?:data|trainer|environment|skyrl_gym)\.[\w.]+)`", PAGE):
        assert name in paths or f"environment.{name}" in paths, name


def test_configurations_of_the_page_load(tmp_path: Path) -> None:
    (tmp_path / "base.toml").write_text(NEEDED)
    texts = [text for kind, text in BLOCKS if kind == "toml"]
    assert len(texts) == 5
    for text in texts:
        path = tmp_path / "page.toml"
        path.write_text(text)
        given, loaded = tomli.loads(text)["environment"], Config.from_toml([tmp_path / "base.toml", path]).environment
        assert loaded.reward_function == given.get("reward_function", {})
        assert loaded.group_reward_function == given.get("group_reward_function", {})
        wanted = given.get("remote_reward", {})
        for table, section in (
            (wanted, loaded.remote_reward),
            (wanted.pop("service", {}), loaded.remote_reward.service),
        ):
            assert {name: getattr(section, name) for name in table} == table


def test_the_reward_of_the_page_pays(tmp_path: Path, monkeypatch) -> None:
    code = "\n".join(text for kind, text in BLOCKS if kind == "python")
    (tmp_path / "my_rewards.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    rewards = WeightedRewards("", {"my_rewards:brief": 1.0}, EnvironmentConfig(custom={"bonus": 0.1}))
    turn = rewards(Response(text="it is 42\n", ground_truth=42, n_tokens=5, max_tokens=10))
    assert turn.reward == 1.05
    assert rewards(Response(text="41", ground_truth=42, n_tokens=5, max_tokens=10)).reward == 0
    together = WeightedGroupRewards({"my_rewards:shorter": 1.0}, EnvironmentConfig())
    group = [GroupSample(text="", n_tokens=n, reward=reward) for n, reward in ((5, 1.0), (3, 1.0), (2, 0.0))]
    assert [one["my_rewards:shorter"] for one in together(group)] == [0.0, 1.0, 0.0]
    sys.modules.pop("my_rewards")


def test_the_limits_in_the_pages_of_environments_are_those_of_the_code() -> None:
    pages = PATH / "environments"
    sql, python, searched, judge = (
        (pages / f"{name}.md").read_text(encoding="utf-8")
        for name in ("text2sql", "python_tool", "search", "llm_as_a_judge")
    )
    assert f"{text2sql.ROWS} rows and {text2sql.CHARACTERS} characters" in sql
    assert f"bounded**: {text2sql.SECONDS:g} seconds, values of {sqlite_query.LONGEST_VALUE >> 20} MiB" in sql
    assert (
        f"{sqlite_query.MOST_COLUMNS} columns, {sqlite_query.MOST_BYTES >> 20} MiB of rows; {text2sql.MOST_ROWS:,} rows"
        in sql
    )
    assert all(f"`{name}`" in sql for name in sqlite_query.TELLING)
    assert python_program.SECONDS == confined.SECONDS
    assert f"| {confined.SECONDS} seconds" in python
    assert (
        f"| {confined.MEMORY >> 30} GiB of address space, {confined.FILE >> 20} MiB per file, {confined.OPEN} open files |"
        in python
    )
    assert f"{confined.DIRECTORY >> 20} MiB and {confined.FILES} files" in python
    assert f"to {python_program.CHARACTERS} characters" in python
    assert f"at most {search.LONGEST_QUERY} characters" in searched
    assert f"share {search.CHARACTERS} characters" in searched
    assert f"A try takes {judge_tool.TIMEOUT_S:g} seconds at most" in judge
    assert (retrieve._PATIENCE_S, judge_tool.PATIENCE_S) == (60.0, 120.0)
    assert "for a minute" in searched
    assert "for two minutes" in judge


@pytest.mark.parametrize(
    "page", [PATH / "agents.md", *sorted((PATH / "environments").glob("*.md"))], ids=lambda page: page.stem
)
def test_configurations_of_the_pages_of_environments_load(page: Path, tmp_path: Path) -> None:
    for text in re.findall(r"^```toml\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL):
        (tmp_path / "base.toml").write_text(NEEDED)
        (tmp_path / "page.toml").write_text(text)
        Config.from_toml([tmp_path / "base.toml", tmp_path / "page.toml"])
