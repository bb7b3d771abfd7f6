"""Environments are found by name or by module path, and a wrong name says what the right one is."""

import sys

import pytest

from hpcrl.envs.environment import Turn
from hpcrl.envs.make import make_environment
from hpcrl.envs.sort_letters import SortLetters
from hpcrl.errors import ConfigError

OWN = """
from hpcrl.envs.environment import Turn

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
        ("sort_leters", "Did you mean 'sort_letters'"),
        ("chess", "Known: arithmetic, calculator, .*, sort_letters"),
        ("", "Known: arithmetic"),
        ("no_such_module:Env", "cannot import 'no_such_module'"),
        ("broken_env:Env", "a_package_that_is_not_there"),
        ("shouting_env:Whisper", "no class 'Whisper'"),
        ("shouting_env:LIMIT", "no class 'LIMIT'"),
        ("shouting_env:", "no class ''"),
        (":Shout", "cannot import ''"),
    ],
)
@pytest.mark.usefixtures("own_module")
def test_wrong_name_is_a_clear_error(name, message):
    with pytest.raises(ConfigError, match=message):
        make_environment(name, {"word": "hey"})
