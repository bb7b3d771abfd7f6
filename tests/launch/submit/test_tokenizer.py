"""A tokenizer.json of a stranger takes no more than its share of a login node."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from hpcrl.config.sections.model import Pretrained
from hpcrl.launch.submit import tokenizer
from hpcrl.launch.submit.tokenizer import bomb
from tests.paths import CONFIGS


def test_a_tokenizer_that_makes_texts_grow_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Path(shutil.copytree(CONFIGS / "quickstart" / "model", tmp_path / "model"))
    assert bomb(Pretrained(str(model), "main")) == "", "of this machine"
    entries = json.loads((model / "tokenizer.json").read_text())
    tenfold = {"type": "Replace", "pattern": {"Regex": "."}, "content": "aaaaaaaaaa"}
    entries["normalizer"] = {"type": "Sequence", "normalizers": [tenfold] * 9}
    (model / "tokenizer.json").write_text(json.dumps(entries))
    monkeypatch.setattr(tokenizer, "_SECONDS", 2)
    assert "needs more than 2 s of processor time, or 4 GiB" in bomb(Pretrained(str(model)))
