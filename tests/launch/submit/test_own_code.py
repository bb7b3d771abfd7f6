"""What a user wrote is looked for before anything is queued: named with setting, file and line where it cannot work."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpcrl.config import Config
from hpcrl.config.root import source_of
from hpcrl.errors import DataError
from hpcrl.launch.submit.preflight import check_files
from tests.paths import QUICKSTART

MODULE = """
from hpcrl.envs.base import Environment, Turn


class Mine(Environment):
    def __init__(self, extras):
        self.target = extras["target"]

    def step(self, action):
        return Turn([], float(action == self.target), done=True)


class Tidy(Mine):
    pass


def reward(response, environment):
    return 1.0


def loss(tokens, *, clip_cov):
    return tokens.logprobs, {}


def greedy_loss(tokens, *, surprise):
    return tokens.logprobs, {}


def estimator(inputs):
    return inputs
"""


def overrides(folder: Path, name: str, text: str, *given: str) -> list[str]:
    (folder / f"{name}.py").write_text(text)
    return [f'python_path=["{folder}"]', *given]


def told(given: list[str], *files: Path) -> str:
    paths = [QUICKSTART, *files]
    with pytest.raises(DataError) as caught:
        check_files(Config.from_toml(paths, given), lambda path: source_of(paths, given, path))
    return str(caught.value)


@pytest.mark.parametrize(
    ("setting", "name", "message"),
    [
        ("trainer.algorithm.policy_loss_type", "none_such:loss", "cannot import 'none_such'"),
        ("trainer.algorithm.policy_loss_type", "own_a:los", "module 'own_a' has no function 'los'"),
        ("trainer.algorithm.policy_loss_type", "own_a:greedy_loss", "its parameter 'surprise' is no setting"),
        ("trainer.algorithm.advantage_estimator", "own_a:estimate", "has no function 'estimate'"),
        ("environment.env_class", "own_a:Your", "has no class 'Your'"),
        ("environment.env_class", "subprocess:Popen", "has no method 'init'"),
        ("environment.env_class", "hpcrl.nothing:Your", "cannot import 'hpcrl.nothing'"),
    ],
)
def test_own_code_that_is_not_there_is_refused_with_file_and_line(
    tmp_path: Path, setting: str, name: str, message: str
) -> None:
    file = tmp_path / "mine.toml"
    section, _, key = setting.rpartition(".")
    file.write_text(f'[{section}]\n{key} = "{name}"\n')
    found = told(overrides(tmp_path, "own_a", MODULE), file)
    assert found.startswith(f"{file}:2: {setting}")
    assert message in found
    assert "Traceback" not in found


def test_names_of_environments_are_looked_for(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('[environment.names]\nmine = "own_n:Mine"\nyour = "own_n:Your"\n')
    found = told(overrides(tmp_path, "own_n", MODULE), file)
    assert "environment.names" in found
    assert "module 'own_n' has no class 'Your'" in found
    assert "'Mine'" not in found


def test_rows_of_a_name_are_tried_and_need_no_further_setting(tmp_path: Path) -> None:
    train = f'data.train_data=["{rows(tmp_path, env_class="mine", target="4")}"]'
    given = overrides(tmp_path, "own_m", MODULE, train, "data.val_data=[]", "trainer.eval_interval=0")
    named = [*given, "environment.names.mine=own_m:Mine"]
    for chosen in ("environment.env_class=", "environment.env_class=mine"):
        assert not any("env_class" in line for line in check_files(Config.from_toml([QUICKSTART], [*named, chosen])))
    (tmp_path / "rows.jsonl").write_text('{"prompt": "2+2", "env_class": "mine"}\n')
    assert "environment 'own_m:Mine' raised KeyError: 'target'" in told(named)
    assert "unknown environment 'mine'" in told(given)


def test_rewards_are_looked_for(tmp_path: Path) -> None:
    given = overrides(tmp_path, "own_r", MODULE, 'environment.reward_function={"own_r:reward"=1.0}')
    given += ["environment.env_class="]
    check_files(Config.from_toml([QUICKSTART], given))
    assert "override: environment.reward_function" in told([*given, 'environment.reward_function={"own_r:none"=1.0}'])


@pytest.mark.parametrize(
    "text",
    ["def broken(:\n", "import json\njson.nothing\n", "import json.nothing\n", "raise RuntimeError('not today')\n"],
)
def test_a_module_that_cannot_be_imported_is_refused(tmp_path: Path, text: str) -> None:
    name = f"own_broken_{abs(hash(text))}"
    found = told(overrides(tmp_path, name, text, f"environment.env_class={name}:Mine"))
    assert "environment.env_class" in found
    assert name in found


@pytest.mark.parametrize(
    "where",
    [
        "import absent_here\n",
        "class Mine:\n init = step = close = print\n def __init__(self, extras):\n  import absent_here\n",
    ],
)
def test_a_package_that_only_this_machine_lacks_is_a_warning(tmp_path: Path, where: str) -> None:
    name = f"own_lacking_{len(where)}"
    given = overrides(tmp_path, name, where + MODULE.partition("class Mine")[0], f"environment.env_class={name}:Mine")
    given += ["data.val_data=[]", "trainer.eval_interval=0", f'data.train_data=["{rows(tmp_path)}"]']
    warnings = check_files(Config.from_toml([QUICKSTART], given))
    assert any("no package 'absent_here'; the job finds out" in line for line in warnings)


def rows(folder: Path, **columns: object) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": "2+2", **columns}) + "\n" for _ in range(64)))
    return path


def test_the_first_row_is_tried_on_ones_own_environment(tmp_path: Path) -> None:
    given = overrides(tmp_path, "own_env", MODULE, "environment.env_class=own_env:Mine", "trainer.eval_interval=0")
    given += ["data.val_data=[]"]
    found = told([*given, f'data.train_data=["{rows(tmp_path)}"]'])
    assert "data.train_data" in found
    assert "row uid 0: environment 'own_env:Mine' raised KeyError: 'target'" in found
    check_files(Config.from_toml([QUICKSTART], [*given, f'data.train_data=["{rows(tmp_path, target="4")}"]']))


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    table = tmp_path / "rows.csv"
    table.write_text("prompt\n2+2\n")
    assert "expected a .parquet, .json, .jsonl or .arrow file" in told([f'data.train_data=["{table}"]'])
