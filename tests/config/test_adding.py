"""A new loss with a number and a new setting, added to a copy of the checkout: the files that are changed by hand, and what follows by itself."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.paths import ROOT

COPIED = ("hpcrl", "jobs", "docs", "tests/config", "tests/algorithms")
FILES = ("README.md", "pyproject.toml", "tests/__init__.py", "tests/conftest.py", "tests/paths.py")
GENERATED = {
    "README.md",
    "docs/algorithms.md",
    "docs/config/hpcrl.schema.json",
    "docs/config/reference.md",
    "docs/config/status.md",
    "hpcrl/config/sections/functions.py",
}

LOSS = '''
def margin(tokens: Tokens, *, eps_clip_high: float, slack: Share = 0.5) -> Values:
    """Return the advantage against a margin (a test's, arXiv:2601.00001).

    Formula:
        -min(r, 1 + eps_clip_high) A + slack
    Use:
        never
    Args:
        slack: what is added to each token's loss.
    """
    ratio_P = ratio(tokens.logprobs, tokens.old_logprobs)
    return slack - ratio_P.clamp(max=1 + eps_clip_high) * tokens.advantages, {}


POLICY_LOSSES: dict[str, Loss] = {
    "margin": margin,
'''
ITS_TEST = """
import torch

from hpcrl.config import AlgorithmConfig
from hpcrl.config.validate import build
from hpcrl.trainer.loss import build_policy_loss
from tests.algorithms.material import make_samples, tokens_of


def test_its_number_is_in_the_loss() -> None:
    tokens = tokens_of(make_samples())
    plain, more = (
        build_policy_loss(build(AlgorithmConfig, {"policy_loss_type": "margin", "margin": {"slack": slack}}))(tokens)[0]
        for slack in (0.25, 0.5)
    )
    torch.testing.assert_close(more - plain, torch.full_like(plain, 0.25))
"""
SETTING = '''
    nap_seconds: float = setting(0.0, range=NOT_NEGATIVE, used_by=when(".profiler.enable"), on_change=WRITTEN)
    """Seconds for which the trainer pauses after each step."""

    eval_before_train: bool'''
CONSUMER = """

def nap(trainer: TrainerConfig) -> float:
    return trainer.nap_seconds
"""

ITS_OWN_TEST = """
from hpcrl.config import TrainerConfig
from hpcrl.config.token_limits import nap
from hpcrl.config.validate import build


def test_nap() -> None:
    assert nap(build(TrainerConfig, {"nap_seconds": 1.5, "policy": {"model": {"path": "m"}}})) == 1.5
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    for folder in COPIED:
        shutil.copytree(ROOT / folder, tmp_path / folder)
    for file in FILES:
        shutil.copy(ROOT / file, tmp_path / file)
    return tmp_path


def python(checkout: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # the next process reads what one has compiled
    command = [sys.executable, *words]
    return subprocess.run(command, cwd=checkout, env=environment, check=False, capture_output=True, text=True)


def succeeds(checkout: Path, *words: str) -> str:
    done = python(checkout, *words)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


CODE = """
import json, sys
from hpcrl.config import Config
from hpcrl.errors import ConfigError

for settings in json.loads(sys.argv[1]):
    try:
        Config.from_cli_overrides(settings)
        print("[]")
    except ConfigError as error:
        print(json.dumps([line.partition("override: ")[2] for line in str(error).splitlines() if "override: " in line]))
"""


def refused(checkout: Path, *configurations: list[str]) -> list[list[str]]:
    """Return the problems of each of some configurations."""
    required = ['data.train_data=["t"]', "trainer.policy.model.path=m", "trainer.eval_interval=0"]
    given = [required + settings for settings in configurations]
    return [json.loads(line) for line in succeeds(checkout, "-c", CODE, json.dumps(given)).splitlines()]


def replace(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert text.count(old) == 1, old
    path.write_text(text.replace(old, new))


def changed(checkout: Path) -> set[str]:
    """Return the files of the copy that the checkout has not, or has with other contents."""
    files = [
        path.relative_to(checkout)
        for path in checkout.rglob("*")
        if path.is_file() and not {".pytest_cache", "__pycache__"} & set(path.parts)
    ]
    return {
        str(path)
        for path in files
        if not (ROOT / path).is_file() or (ROOT / path).read_bytes() != (checkout / path).read_bytes()
    }


def test_a_loss_with_a_number_is_two_files_and_a_setting_its_line_its_consumer_and_its_test(checkout: Path) -> None:
    replace(checkout / "hpcrl/algorithms/losses.py", "\nPOLICY_LOSSES: dict[str, Loss] = {\n", LOSS)
    (checkout / "tests/algorithms/test_margin.py").write_text(ITS_TEST)
    of_loss = changed(checkout)
    assert of_loss == {"hpcrl/algorithms/losses.py", "tests/algorithms/test_margin.py"}
    replace(checkout / "hpcrl/config/sections/trainer.py", "\n    eval_before_train: bool", SETTING)
    with (checkout / "hpcrl/config/token_limits.py").open("a") as module:
        module.write(CONSUMER)
    (checkout / "tests/config/test_nap.py").write_text(ITS_OWN_TEST)
    by_hand = changed(checkout)
    assert by_hand - of_loss == {
        "hpcrl/config/sections/trainer.py", "hpcrl/config/token_limits.py", "tests/config/test_nap.py",
    }  # fmt: skip

    succeeds(checkout, "-m", "hpcrl.docs.describe")
    assert changed(checkout) - by_hand <= GENERATED
    assert "| `eps_clip_high`, `margin.slack` | never |" in (checkout / "docs/algorithms.md").read_text()
    explained = succeeds(checkout, "-m", "hpcrl.cli.main", "config", "explain", "trainer.algorithm.margin.slack")
    assert "margin: what is added to each token's loss." in explained
    assert "a number, at least 0 and at most 1" in explained
    loss, slack = "trainer.algorithm.policy_loss_type=margin", "trainer.algorithm.margin.slack"
    of_good, of_ranges, of_idle = refused(
        checkout,
        [loss, f"{slack}=0.25"],
        [loss, f"{slack}=2", "trainer.profiler.enable=true", "trainer.nap_seconds=-1"],
        [f"{slack}=0.25", "trainer.nap_seconds=1"],
    )
    assert of_good == []
    assert of_ranges == [
        f"{slack}: expected at least 0 and at most 1, found 2.0",
        "trainer.nap_seconds: expected at least 0, found -1.0",
    ]
    of_number, of_nap = of_idle
    assert "has no effect without trainer.algorithm.policy_loss_type=margin" in of_number
    assert "has no effect without trainer.profiler.enable" in of_nap
    of_algorithms = ["tests/algorithms/test_margin.py", "tests/algorithms/test_losses.py"]
    of_config = ["test_nap.py", "test_reads.py", "test_resume_changes.py", "rules/test_single_values.py"]
    named = ["-k", "margin or every_setting or every_number or nap"]
    tests = [*of_algorithms, *(f"tests/config/{name}" for name in of_config)]
    assert " passed" in succeeds(checkout, "-m", "pytest", "-q", *tests, *named)


def test_a_loss_without_its_documents_is_named(checkout: Path) -> None:
    replace(checkout / "hpcrl/algorithms/losses.py", "\nPOLICY_LOSSES: dict[str, Loss] = {\n", LOSS)
    replace(
        checkout / "hpcrl/algorithms/losses.py",
        "        slack: what is added to each token's loss.\n",
        "        other: nothing.\n",
    )
    told = python(checkout, "-m", "hpcrl.docs.describe").stderr
    assert "hpcrl/algorithms/losses.py: margin: its setting slack has no meaning" in told
