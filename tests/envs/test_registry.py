"""Environments are found by name or by module path, and a wrong name says what the right one is."""

import sys
from dataclasses import dataclass

import pytest

from hpcrl.config import EnvironmentConfig, make_config
from hpcrl.config.sections import environment as section
from hpcrl.envs.base import Turn
from hpcrl.envs.registry import ENVIRONMENTS, common_extras, make_environment
from hpcrl.envs.rewards.response import Response
from hpcrl.envs.rewards.weighted import WeightedRewards
from hpcrl.envs.tasks.sort_letters import SortLetters
from hpcrl.errors import ConfigError

OWN = """
from hpcrl.envs.base import Turn

LIMIT = 3

class Shout:
    def __init__(self, extras):
        self.word = extras["word"]

    def init(self, messages):
        return [*messages, {"role": "user", "content": self.word}]

    def step(self, action):
        return Turn([], float(action == self.word.upper()), done=True)

    def close(self):
        pass

class Haggle:
    def __init__(self, extras):
        self.settings = extras["environment"]

    def init(self, messages):
        return messages

    def step(self, action):
        return Turn([], self.settings.haggling * len(action) + self.settings.custom["bonus"], done=True)

    def close(self):
        pass

def pay(response, environment):
    return environment.haggling * len(response.text)
"""


@pytest.fixture
def own_module(tmp_path, monkeypatch):
    (tmp_path / "shouting_env.py").write_text(OWN)
    (tmp_path / "broken_env.py").write_text("import a_package_that_is_not_there\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("shouting_env", None)


def test_known_name():
    environment = make_environment("sort_letters", {"reward_spec": {"ground_truth": "ab"}})
    assert isinstance(environment, SortLetters)


@pytest.mark.usefixtures("own_module")
def test_users_own_class():
    environment = make_environment("shouting_env:Shout", {"word": "hey"})
    assert environment.init([])[-1]["content"] == "hey"
    assert environment.step("HEY") == Turn([], 1.0, True)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("sort_leters", "did you mean sort_letters"),
        ("chess", "known: agent, arithmetic, .*, sort_letters"),
        ("", "known: agent"),
        ("no_such_module:Env", "cannot import 'no_such_module'"),
        ("broken_env:Env", "a_package_that_is_not_there"),
        ("shouting_env:Whisper", "no class 'Whisper'"),
        ("shouting_env:LIMIT", "no class 'LIMIT'"),
        ("shouting_env:", "no class ''"),
        (":Shout", "cannot import ''"),
        ("subprocess:Popen", "'subprocess:Popen' has no method 'init'"),
    ],
)
@pytest.mark.usefixtures("own_module")
def test_wrong_name_is_a_clear_error(name, message):
    with pytest.raises(ConfigError, match=message):
        make_environment(name, {"word": "hey"})


@dataclass(frozen=True, kw_only=True)
class OwnEnvironment(EnvironmentConfig):
    haggling: float = 0.5
    """Factor of what is paid."""


@pytest.mark.usefixtures("own_module")
def test_users_own_class_and_reward_read_settings_of_their_own():
    """They are fields of the section, checked like hpcrl's own."""
    own = make_config(environment_cls=OwnEnvironment)
    tree = {
        "data.train_data": ["t"],
        "trainer.eval_interval": 0,
        "trainer.policy.model.path": "m",
        "environment.custom.bonus": 10.0,
        "environment.env_class": "shouting_env:Haggle",
    }
    with pytest.raises(ConfigError, match=r"environment\.hagling.*haggling"):
        own.from_dict({**tree, "environment.hagling": 2.0})
    section = own.from_dict({**tree, "environment.haggling": 2.0}).environment
    environment = make_environment("shouting_env:Haggle", common_extras(section, max_turns=1))
    assert environment.step("abc").reward == 16.0
    rewards = WeightedRewards("environment.reward_function", {"shouting_env:pay": 1.0}, section)
    assert rewards(Response(text="abcd")).reward == 8.0


def test_the_configuration_knows_every_environment() -> None:
    assert set(section.ENVIRONMENTS) == set(ENVIRONMENTS)
