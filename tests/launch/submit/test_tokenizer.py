"""A tokenizer.json of a stranger takes no more than its share of a login node."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hpcrl.config.sections.model import Pretrained
from hpcrl.launch.submit import tokenizer
from hpcrl.launch.submit.tokenizer import bomb
from tests.paths import CONFIGS


def let_texts_grow(model: Path) -> None:
    entries = json.loads((model / "tokenizer.json").read_text())
    tenfold = {"type": "Replace", "pattern": {"Regex": "."}, "content": "aaaaaaaaaa"}
    entries["normalizer"] = {"type": "Sequence", "normalizers": [tenfold] * 9}
    (model / "tokenizer.json").write_text(json.dumps(entries))


def test_a_tokenizer_that_makes_texts_grow_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Path(shutil.copytree(CONFIGS / "quickstart" / "model", tmp_path / "model"))
    assert bomb(Pretrained(str(model), "main")) == "", "of this machine"
    let_texts_grow(model)
    monkeypatch.setattr(tokenizer, "_SECONDS", 2)
    assert "needs more than 2 s of processor time, or 4 GiB" in bomb(Pretrained(str(model)))


def test_a_machine_of_many_cores_checks_as_any_other(tmp_path: Path) -> None:
    """`tokenizers` starts a thread for each core, and malloc keeps 64 MiB of addresses for each thread."""
    model = Path(shutil.copytree(CONFIGS / "quickstart" / "model", tmp_path / "model"))
    let_texts_grow(model)
    script = f"""
from hpcrl.config.sections.model import Pretrained
from hpcrl.launch.submit import tokenizer
tokenizer._SECONDS = 2
print([tokenizer.bomb(Pretrained(path)) != "" for path in ({str(CONFIGS / "quickstart" / "model")!r}, {str(model)!r})])
"""
    many = os.environ | {"RAYON_NUM_THREADS": "256", "MALLOC_ARENA_MAX": "2048"}
    found = subprocess.run([sys.executable, "-c", script], env=many, capture_output=True, text=True, timeout=300)
    assert (found.returncode, found.stdout) == (0, "[False, True]\n"), found.stderr
