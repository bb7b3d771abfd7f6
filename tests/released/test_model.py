"""A released model through hpcrl and out again: what it exports answers in plain transformers and in vLLM, and stops by itself."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.paths import ROOT
from tests.released.material import SMOLLM2

pytestmark = [
    pytest.mark.released,
    pytest.mark.skipif(not SMOLLM2.is_dir(), reason=f"{SMOLLM2} is not there; make released makes it"),
]

RECIPE = SMOLLM2.parent
LONGEST = 40
ANSWER = re.compile(r"\d+ \+ \d+ = \d+")


def hpcrl(*words: str) -> str:
    command = [sys.executable, "-m", "hpcrl.cli.main", *words]
    return subprocess.run(command, check=True, cwd=ROOT, capture_output=True, text=True).stdout


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """The export of a short supervised run of the recipe, and rows that it has not seen."""
    place = tmp_path_factory.mktemp("smollm2")
    subprocess.run([sys.executable, str(RECIPE / "rows.py"), str(place / "data")], check=True)
    data = [
        f'data.train_data=["{place}/data/sft_train.jsonl"]',
        f'data.val_data=["{place}/data/sft_validation.jsonl"]',
    ]
    short = ["trainer.max_steps=8", "trainer.eval_interval=-1", "trainer.eval_before_train=false"]
    saved = ["trainer.hf_save_interval=8", "trainer.ckpt_interval=-1"]
    hpcrl(
        "submit",
        str(RECIPE / "sft.toml"),
        *data,
        *short,
        *saved,
        f"slurm.root={place}",
        "trainer.run_name=r",
        "--local",
        "--follow",
    )
    (export,) = place.glob("*/r/exports/s*")
    lines = (place / "data" / "sft_validation.jsonl").read_text().splitlines()
    return export, [json.loads(line) for line in lines[:16]]


def check(texts: list[str]) -> None:
    """Check that answers are whole: in the form that was trained, and nothing behind it."""
    assert sum(bool(ANSWER.fullmatch(text)) for text in texts) >= len(texts) - 1, texts


def test_it_answers_in_transformers_and_stops(made: tuple[Path, list[dict[str, Any]]]) -> None:
    export, rows = made
    tokenizer = AutoTokenizer.from_pretrained(export)
    model = AutoModelForCausalLM.from_pretrained(export)
    texts = list[str]()
    for row in rows:
        asked = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, return_tensors="pt")
        with torch.inference_mode():
            said = model.generate(**asked, max_new_tokens=LONGEST, do_sample=False)[0, asked.input_ids.shape[1] :]
        assert len(said) < LONGEST, "it does not stop"
        assert said.tolist().count(tokenizer.convert_tokens_to_ids("<|im_end|>")) == 1
        texts.append(tokenizer.decode(said[:-1]))
    check(texts)


IN_VLLM = """
import json, sys
from vllm import LLM, SamplingParams

export, rows, longest = sys.argv[1], json.load(sys.stdin), int(sys.argv[2])
engine = LLM(export, enforce_eager=True, max_model_len=256, gpu_memory_utilization=0.2)
answers = engine.chat([row["prompt"] for row in rows], SamplingParams(temperature=0.0, max_tokens=longest))
print("ANSWERS", json.dumps([(one.outputs[0].text, one.outputs[0].finish_reason) for one in answers]))
"""


def test_it_answers_in_vllm_and_stops(made: tuple[Path, list[dict[str, Any]]]) -> None:
    export, rows = made
    command = [sys.executable, "-c", IN_VLLM, str(export), str(LONGEST)]
    done = subprocess.run(command, input=json.dumps(rows), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("ANSWERS "))
    answers = json.loads(line.removeprefix("ANSWERS "))
    assert {reason for _, reason in answers} == {"stop"}
    check([text for text, _ in answers])
