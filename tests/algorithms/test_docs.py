"""docs/algorithms.md names what there is, its settings exist, and its code and configurations work."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import tomli
import torch

from hpcrl.algorithms.advantages import ESTIMATORS, AdvantageInputs
from hpcrl.algorithms.losses import POLICY_LOSSES
from hpcrl.config import AlgorithmConfig, Config, EnvironmentConfig
from hpcrl.config.fields import leaves, section_settings
from hpcrl.envs.registry import make_environment
from hpcrl.envs.rewards.response import Response
from hpcrl.envs.rewards.weighted import WeightedRewards
from hpcrl.trainer.advantages import build_estimator
from hpcrl.trainer.loss import build_objective, build_policy_loss
from tests.algorithms.material import make_samples, tokens_of
from tests.paths import ROOT

PAGE = (ROOT / "docs" / "algorithms.md").read_text(encoding="utf-8")
SECTIONS = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL))
PATHS = [setting.path for setting in leaves(Config)]
ALGORITHM = "trainer.algorithm."
REDUCTIONS = get_args(get_type_hints(AlgorithmConfig)["loss_reduction"])


def rows(section: str) -> list[list[str]]:
    """Return the cells of a section's table, row by row."""
    lines = [line for line in SECTIONS[section].splitlines() if line.startswith("|")]
    found = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert found[0] == ["name", "formula", "source", "settings", "when to use it"]
    assert all(len(row) == len(found[0]) for row in found), f"{section}: a cell too many or too few"
    return found[2:]


def blocks(language: str, text: str = PAGE) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def settings() -> list[tuple[str, str]]:
    """Return each setting of a table, with the section that names it."""
    tables = [section for section in SECTIONS if "| when to use it |" in SECTIONS[section]]
    return [(section, name) for section in tables for row in rows(section) for name in re.findall(r"`(.+?)`", row[3])]


def test_the_table_of_reductions_has_the_names_of_the_setting() -> None:
    assert sorted(row[0].strip("`") for row in rows("Reductions")) == sorted(REDUCTIONS)


def test_every_setting_of_a_table_exists() -> None:
    assert [(where, name) for where, name in settings() if name not in PATHS and ALGORITHM + name not in PATHS] == []


def test_every_setting_of_the_algorithm_is_on_the_page() -> None:
    told = set(re.findall(r"`([\w.]+?)`", PAGE))
    own = [path.removeprefix(ALGORITHM) for path in PATHS if path.startswith(ALGORITHM)]
    assert [name for name in own if name not in told] == []


def configurations() -> Iterator[Any]:
    for at, text in enumerate(blocks("toml", SECTIONS["Published recipes"])):
        chosen = tomli.loads(text)["trainer"]["algorithm"]
        yield pytest.param(text, id=f"{at}-{chosen.get('policy_loss_type', chosen['advantage_estimator'])}")


def whole(text: str) -> Config:
    """Return the configuration that a fragment gives, with the little that a run needs beside it."""
    config = tomli.loads(text)
    config.setdefault("data", {}).update(train_data=["./train.parquet"], val_data=["./validation.parquet"])
    config["trainer"].setdefault("policy", {}).update(model={"path": "./model"})
    config.setdefault("environment", {}).setdefault("env_class", "sort_letters")
    if "reward_function" in config["environment"]:
        del config["environment"]["env_class"]
    return Config.from_dict(config)


@pytest.mark.parametrize("text", list(configurations()))
def test_a_recipe_is_a_valid_configuration(text: str) -> None:
    algorithm = whole(text).trainer.algorithm
    assert algorithm.policy_loss_type in POLICY_LOSSES
    assert algorithm.advantage_estimator in ESTIMATORS
    build_objective(algorithm)


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Config]:
    """The page's own functions, importable, and the configuration that names them."""
    (code,), (fragment,) = (blocks(language, SECTIONS["Your own"]) for language in ("python", "toml"))
    (tmp_path / "my_rl.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield whole(fragment)
    sys.modules.pop("my_rl", None)


def test_ones_own_estimator_and_loss(own: Config) -> None:
    algorithm = own.trainer.algorithm
    mask_P = torch.tensor([2.0, 3.0, 1.0, 4.0], dtype=torch.float64)
    rewards_P = torch.tensor([1.0, 0.0, 0.5, 0.5], dtype=torch.float64)
    inputs = AdvantageInputs(rewards_P, mask_P, [1] * 4, torch.tensor([0, 0, 1, 1]))
    assert build_estimator(algorithm)(inputs).tolist() == [0.5, 0.0, 0.0, 0.0]
    tokens = tokens_of(make_samples())
    loss_P, sums = build_policy_loss(algorithm)(tokens)
    torch.testing.assert_close(
        loss_P, -torch.tanh((tokens.logprobs - tokens.old_logprobs).exp() - 1) * tokens.advantages
    )
    assert sums.keys() == {"far"}
    build_objective(algorithm)


def test_ones_own_environment_and_reward(own: Config) -> None:
    environment = make_environment(str(own.environment.env_class), {"reward_spec": {"ground_truth": "abc"}})
    assert environment.init([]) == []
    assert [environment.step(said).reward for said in ("cba", "abc")] == [1.0, 0.0]
    environment.close()
    weights = tomli.loads("reward_function = " + PAGE.split("or: reward_function = ")[1].splitlines()[0])
    assert EnvironmentConfig(**weights).reward_function == {"my_rl:brevity": 1.0}
    pay = WeightedRewards("environment.reward_function", weights["reward_function"], own.environment)
    assert pay(Response(text="", n_tokens=3, max_tokens=4)).reward == 0.25


def test_a_number_is_refused_where_the_loss_does_not_read_it() -> None:
    """Each setting of the section that losses read is one that the other losses are refused with, and no other."""
    for setting in section_settings(AlgorithmConfig):
        names = {one.name for one in section_settings(setting.subsection)} if setting.subsection else {setting.name}
        reading = {name for name, loss in POLICY_LOSSES.items() if names & set(inspect.signature(loss).parameters)}
        tests = [test for one in setting.facts.used_by for path, test in one.tests if path == ".policy_loss_type"]
        assert {name for name in POLICY_LOSSES if any(test(name) for test in tests)} == reading, setting.name
