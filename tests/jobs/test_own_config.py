"""A user's own configuration class and environment, in a package beside the TOML file that names them, through a whole run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import permutations
from pathlib import Path

import pytest
import tomli

from hpcrl.rundir.layout import Run
from tests.jobs.small_run import SMALL, curve, hpcrl, logs_of
from tests.paths import QUICKSTART

CONFIG = '''
from dataclasses import dataclass, field

from hpcrl.config import AlgorithmConfig
from hpcrl.config.root import make_config

from mine import task


@dataclass(frozen=True, kw_only=True)
class ShapedConfig(AlgorithmConfig):
    shaping: float = 0.0
    """Added to every reward."""


@dataclass(frozen=True, kw_only=True)
class PayConfig:
    right: float = 1.0
    """Reward of any response."""


@dataclass(frozen=True, kw_only=True)
class MyConfig(make_config(algorithm_cls=ShapedConfig)):
    pay: PayConfig = field(default_factory=PayConfig)

    def __post_init__(self):
        task.PAYS.append(self.pay.right + self.trainer.algorithm.shaping)
'''

TASK = """
from hpcrl.envs.base import Turn

PAYS = []


class Paid:
    def __init__(self, extras):
        pass

    def init(self, messages):
        return messages

    def step(self, action):
        return Turn([], PAYS[-1], done=True)

    def close(self):
        pass
"""

STUDY = """
config_class = "mine.config:MyConfig"
python_path = ["."]

[data]
train_data = ["./prompts.jsonl"]

[trainer]
project_name = "study"

[trainer.algorithm]
shaping = 0.5

[pay]
right = 0.25

[environment]
env_class = "mine.task:Paid"
"""


@pytest.fixture
def study(tmp_path: Path) -> Path:
    package = tmp_path / "study" / "mine"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "config.py").write_text(CONFIG)
    (package / "task.py").write_text(TASK)
    rows = [{"prompt": [{"role": "user", "content": f"sort: {''.join(letters)}"}]} for letters in permutations("abcde")]
    (tmp_path / "study" / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "study" / "study.toml").write_text(STUDY)
    return tmp_path / "study" / "study.toml"


@pytest.mark.faults_slow
def test_run_of_a_users_own_class_trains(study: Path, tmp_path: Path) -> None:
    """The environment pays what the new settings say: the worker has loaded the class that declares them."""
    settings = [*SMALL, "trainer.max_steps=2", "trainer.eval_interval=0", "trainer.run_name=paid"]
    done = hpcrl("submit", str(QUICKSTART), str(study), "--local", "--follow", *settings, cwd=tmp_path)
    run = Run.open(tmp_path / "runs" / "study" / "paid")
    assert done.returncode == 0, done.stdout + done.stderr + logs_of(run)
    assert curve(run, "reward/avg_raw_reward") == {1: 0.75, 2: 0.75}
    written = tomli.loads(run.config.read_text())
    assert written["config_class"] == "mine.config:MyConfig"
    assert written["python_path"] == [str(study.parent)]
    assert written["pay"] == {"right": 0.25}
    assert written["trainer"]["algorithm"]["shaping"] == 0.5

    noted = json.loads(run.checksums.read_text())[str(study.parent)]
    assert list(noted) == ["mine/__init__.py", "mine/config.py", "mine/task.py"]

    code = (
        f"from pathlib import Path; from hpcrl.config import Config; c = Config.from_toml([Path({str(run.config)!r})])"
    )
    read = subprocess.run(
        [sys.executable, "-c", f"{code}; print(type(c).__module__, c.pay.right)"],
        cwd="/",
        capture_output=True,
        text=True,
        check=False,
    )
    assert read.stdout == "mine.config 0.25\n", read.stderr


def test_without_its_folder_the_remedy_is_named(study: Path, tmp_path: Path) -> None:
    study.write_text(STUDY.replace('python_path = ["."]\n', ""))
    arguments = ["submit", str(QUICKSTART), str(study), "--dry-run"]
    done = hpcrl(*arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert "No module named 'mine'" in done.stderr
    assert 'python_path = ["."] is the folder of the TOML file' in done.stderr
    assert hpcrl(*arguments, 'python_path=["study"]', cwd=tmp_path).returncode == 0
    environment = os.environ | {"PYTHONPATH": str(study.parent)}
    command = [str(Path(sys.executable).parent / "hpcrl"), *arguments]
    assert subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, check=False).returncode == 0


def test_mistakes_in_ones_own_settings_are_told_like_any_other(study: Path, tmp_path: Path) -> None:
    done = hpcrl(
        "submit", str(QUICKSTART), str(study), "--dry-run", "pay.rihgt=1", "trainer.algorithm.shaping=x", cwd=tmp_path
    )
    assert done.returncode == 2
    assert "pay.rihgt: unknown setting; did you mean pay.right?" in done.stderr
    assert "trainer.algorithm.shaping: expected a number" in done.stderr
