"""configs/fix_line.toml as an ordinary user: a tiny policy learns by the tools of a sandbox, and a released model tries them.

Slow; see docs/development.md.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from itertools import groupby
from pathlib import Path
from typing import Any

import httpx
import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from hpcrl.data.group_file import read_group
from hpcrl.rundir.layout import Run
from hpcrl.types import Row
from tests.jobs.small_run import curve, eval_score, groups_in, logs_of
from tests.paths import CONFIGS, ROOT
from tests.released.material import SMOLLM2
from tests.sandboxes.material import python_of_users

STEPS = 12
SMALL = (
    *("trainer.run_name=tries", f"trainer.policy.model.path={SMOLLM2}", "trainer.max_prompt_length=256"),
    *("trainer.max_steps=2", "trainer.train_batch_size=2", "trainer.policy_mini_batch_size=2"),
    *("trainer.micro_train_batch_size_per_gpu=1", "trainer.micro_forward_batch_size_per_gpu=1"),
    *("trainer.eval_interval=-1", "trainer.eval_before_train=false", "trainer.ckpt_interval=-1", "data.val_data=[]"),
    *("generator.n_samples_per_prompt=2", "generator.max_turns=3", "generator.max_input_length=512"),
    *("generator.sampling_params.max_generate_length=40", "generator.sampling_params.temperature=0.3"),
)
OBSERVED = re.compile(r"\n<\|im_start\|>tool\n(.*?)<\|im_end\|>\n<\|im_start\|>assistant\n", re.DOTALL)


def hpcrl(*words: str, cwd: Path, timeout: float = 600) -> subprocess.CompletedProcess[str]:
    """Run a command with a Python that the ordinary user of the tests has."""
    packages = f"{ROOT}:{Path(httpx.__file__).parents[1]}"
    environment = os.environ | {"PYTHONPATH": packages, "TMPDIR": str(cwd), "HOME": str(cwd)}
    command = [python_of_users(), "-m", "hpcrl.cli.main", *words]
    return subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=timeout, check=False
    )


@pytest.fixture
def user(user: Path) -> Path:
    """The directory of the ordinary user, with the image of the configuration."""
    subprocess.run([python_of_users(), CONFIGS / "fix_line" / "image.py", "image"], cwd=user, check=True)
    added = hpcrl("image", "add", "shell", "image", "--root", "runs", cwd=user)
    assert added.returncode == 0, added.stderr
    return user


@pytest.mark.slow
def test_a_policy_learns_to_correct_a_line(user: Path) -> None:
    """Greedy decoding writes `+` at the start, which is right for a third of the scripts."""
    words = ["submit", str(CONFIGS / "fix_line.toml"), "--local", "--follow", "trainer.run_name=learns"]
    done = hpcrl(*words, cwd=user, timeout=3600)
    run = Run(user / "runs" / "fix_line" / "learns")
    assert done.returncode == 0, done.stderr + logs_of(run)
    before, after = eval_score(run, 0), eval_score(run, STEPS)
    print(f"fix_line: {before:.3f} -> {after:.3f}")
    assert set(curve(run, "generate/failed_samples").values()) == {0.0}
    assert before == pytest.approx(1 / 3)
    assert after >= 0.9


def call(name: str, **arguments: str) -> dict[str, str]:
    return {
        "role": "assistant",
        "content": f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>",
    }


EXAMPLE = [
    {"role": "system", "content": "Correct a line of a shell script with the tools view, edit and submit."},
    {"role": "user", "content": "fix f.sh: plus 3"},
    call("view", path="f.sh"),
    {"role": "tool", "content": "1  echo $(($1-3))"},
    call("edit", path="f.sh", old="-", new="+"),
    {"role": "tool", "content": "f.sh is changed in line 1"},
    call("submit"),
]


@pytest.mark.released
@pytest.mark.skipif(not SMOLLM2.is_dir(), reason=f"{SMOLLM2} is not there; make released makes it")
def test_a_released_model_tries_it(user: Path) -> None:
    """SmolLM2 copies the calls of an example; each row is what its own chat template writes, and its answers alone are trained."""
    lines = (CONFIGS / "fix_line" / "data" / "train.jsonl").read_text(encoding="utf-8").splitlines()[:4]
    rows = [json.loads(line) for line in lines]
    shown = [{**row, "prompt": [*EXAMPLE, *row["prompt"]]} for row in rows]
    (user / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in shown))
    data = f'data.train_data=["{user}/rows.jsonl"]'
    done = hpcrl("submit", str(CONFIGS / "fix_line.toml"), "--local", "--follow", data, *SMALL, cwd=user, timeout=3600)
    run = Run(user / "runs" / "fix_line" / "tries")
    assert done.returncode == 0, done.stderr + logs_of(run)
    assert set(curve(run, "generate/failed_samples").values()) == {0.0}
    tokenizer = AutoTokenizer.from_pretrained(SMOLLM2)
    prompts = [row["prompt"] for row in shown]
    longest = 0
    for path, meta in groups_in(run):
        for row, sample in zip(read_group(path, None, meta), meta.samples, strict=True):
            assert sample.reward == sample.env_metrics["solved"]
            assert sample.env_metrics["tests_ended"] == 0.0
            assert sample.env_metrics["calls"] >= sample.env_metrics["failed_calls"]
            longest = max(longest, answers_of(row, tokenizer, prompts))
    assert longest > 1
    verified = hpcrl("verify", str(run.path), cwd=user)
    assert verified.returncode == 0, verified.stdout


def answers_of(row: Row[Any], tokenizer: PreTrainedTokenizerBase, prompts: list[list[dict[str, str]]]) -> int:
    """Return how many answers a row has, once it is found to be the conversation that transformers writes of a prompt, them, and what tools said."""
    places = groupby(range(len(row.token_ids)), lambda at: row.loss_mask[at] > 0)
    parts = [(trained, str(tokenizer.decode(row.token_ids[list(ats)].tolist()))) for trained, ats in places]
    (prompt,) = (one for one in prompts if written(tokenizer, one, True) == parts[0][1])
    answers, between = parts[1::2], parts[2::2]
    assert all(trained for trained, _ in answers)
    messages = list(prompt)
    for at, (_, answer) in enumerate(answers):
        assert answer.count("<|im_end|>") == answer.endswith("<|im_end|>")
        messages.append({"role": "assistant", "content": answer.removesuffix("<|im_end|>")})
        if at < len(between):
            (said,) = OBSERVED.findall(between[at][1])
            messages.append({"role": "tool", "content": said})
    assert written(tokenizer, messages, False).startswith("".join(text for _, text in parts))
    return len(answers)


def written(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]], prompt: bool) -> str:
    return str(tokenizer.apply_chat_template(messages, add_generation_prompt=prompt, tokenize=False))
