"""What a curriculum and a group reward gain where they must: trials of three seeds each, of the quickstart with other prompts or rewards.

Slow; benchmarks/RESULTS.md has what they found.
"""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

import pytest

from hpcrl.data.sources import READERS
from tests.jobs.small_run import hpcrl
from tests.paths import QUICKSTART

TRAIN = QUICKSTART.parent / "quickstart" / "data" / "train.parquet"
REWARDS = '''
"""Rewards of the quickstart's words."""

import random


def right(response, environment):
    return float(response.text == response.ground_truth)


def or_broken(response, environment):
    """Whether the letters are in order; one reward in five has nothing to do with the answer, and is far from 0."""
    return random.choice([-50.0, 50.0]) if random.random() < 1 / 5 else right(response, environment)
'''
BASE = """
python_path = ["."]

[trainer]
train_batch_size = 32
policy_mini_batch_size = 32
eval_interval = 16
eval_before_train = false
ckpt_interval = 100

[trainer.algorithm]
kl_loss_coef = 0.1
"""
TRIALS = {
    "curriculum": (
        """
[trainer]
max_steps = 64
epochs = 32

[data]
train_data = ["./words.jsonl"]
""",
        {"uniform": "", "seldom": "[data.curriculum]\nhard = 0.05\n"},
    ),
    "rank": (
        """
[trainer]
max_steps = 48

[environment]
reward_function = { "gain_rewards:or_broken" = 1.0 }
eval_reward_function = { "gain_rewards:right" = 1.0 }
""",
        {"own": "", "rank": "[environment.group_reward_function]\nrank = 1.0\n"},
        "environment.env_class=",
    ),
}
"""The settings that both recipes of a trial have, and what each has of its own, the one that learns less first; then overrides."""


def write_words(path: Path) -> None:
    """Write 512 words of the quickstart, of which one in sixteen has a right answer."""
    words = [row["prompt"][-1]["content"] for row in islice(READERS[".parquet"](TRAIN), 512)]
    truths = ["".join(sorted(word.split()[-1])) if at % 16 == 0 else "none" for at, word in enumerate(words)]
    rows = [{"prompt": word, "reward_spec": {"ground_truth": truth}} for word, truth in zip(words, truths, strict=True)]
    path.write_text("\n".join(map(json.dumps, rows)))


@pytest.mark.slow
@pytest.mark.parametrize("name", TRIALS)
def test_three_seeds_show_the_gain(tmp_path: Path, name: str) -> None:
    shared, recipes, *overrides = TRIALS[name]
    (tmp_path / "gain_rewards.py").write_text(REWARDS)
    write_words(tmp_path / "words.jsonl")
    files = {"base": BASE, "task": shared, **recipes}
    for file, text in files.items():
        (tmp_path / f"{file}.toml").write_text(text)
    bases = ["--base", str(QUICKSTART), "--base", "base.toml", "--base", "task.toml"]
    of_recipes = [f"{recipe}.toml" for recipe in recipes]
    options = ["--seeds", "3", "--name", name, "--local", "--follow", *overrides]
    done = hpcrl("trial", *of_recipes, *bases, *options, cwd=tmp_path, timeout=3600)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr
    print(hpcrl("trial", "status", name, cwd=tmp_path).stdout)
    found = json.loads(hpcrl("trial", "status", name, "--json", cwd=tmp_path).stdout)
    less, more = recipes
    assert [(one["leader"], one["other"], one["verdict"]) for one in found["pairs"]] == [(more, less, "worse")]
