"""What a teacher says of rows before a run is what it says beside the policy, whoever writes it, and is told from what is said of other rows."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from hpcrl.data.token_file import open_tokens, write_tokens
from hpcrl.errors import DamagedError, DataError
from hpcrl.rundir.layout import Run
from hpcrl.trainer.distributed import World
from hpcrl.trainer.offline.teacher_file import open_teacher_file
from hpcrl.trainer.scoring import rows
from hpcrl.trainer.scoring.rows import RowTeacher
from tests.trainer.backends.test_supervised import ROWS, config, make_rows, trained
from tests.trainer.material import write_teacher
from tests.trainer.ranks import Ranks

TOP_K = 5


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = Run(tmp_path_factory.mktemp("rows") / "run")
    make_rows(run)
    return run


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory, model_path: Path) -> Path:
    return write_teacher(tmp_path_factory.mktemp("teacher"), model_path)


def taught(teacher: Path, **changes: Any) -> dict[str, Any]:
    distillation = {"enable": True, "model_path": str(teacher), "top_k": TOP_K, "jsd_beta": 0.0, "loss_weight": 0.5}
    precision = {"ref": {"fsdp_config": {"mixed_precision": {"param_dtype": "fp32"}}}}
    return {"distillation": distillation, **precision, **changes}


@pytest.fixture(scope="module")
def written(run: Run, alone: World, model_path: Path, teacher: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A directory of what the teacher says, computed row by row, several parts of rows one after the other."""
    place, done = Run(tmp_path_factory.mktemp("written")), list[int]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows, "_ROWS_AT_ONCE", 5)
        judge = RowTeacher(config(str(model_path), taught(teacher)), alone)
        judge.write(place.teacher_file("train-0"), open_tokens(run.dataset("train-0")), done.append)
    assert done == [5, 10, ROWS]
    return place


def test_it_is_what_the_model_says(run: Run, written: Run, teacher: Path) -> None:
    tokens, file = open_tokens(run.dataset("train-0")), open_teacher_file(written.teacher_file("train-0"))
    model, places = AutoModelForCausalLM.from_pretrained(teacher), 0
    for row in range(ROWS):
        (sample,) = tokens.read(row)
        ids, logprobs = file.read(row, tokens.digest(row), TOP_K)
        where = np.flatnonzero(sample.loss_mask[1:])
        places += len(where)
        with torch.no_grad():
            top = model(torch.from_numpy(sample.token_ids)[None]).logits[0][where].log_softmax(-1).topk(TOP_K)
        assert ids.tolist() == top.indices.tolist()
        np.testing.assert_allclose(logprobs, top.values.numpy(), atol=1e-6)
    assert places > ROWS


@pytest.mark.parametrize("top_k", [TOP_K, 3])
def test_a_run_learns_from_it_what_it_learns_from_the_teacher_itself(
    run: Run, written: Run, alone: World, model_path: Path, teacher: Path, top_k: int, tmp_path: Path
) -> None:
    """To the last bit where the passes are the same, here one row each; the teacher itself need not be there."""
    live = taught(teacher)
    live["distillation"]["top_k"] = top_k
    expected = trained(run, alone, str(model_path), live)
    moved = str(shutil.copytree(written.path, tmp_path / "moved"))
    files = taught(Path("/gone"), distillation=live["distillation"] | {"precomputed_logprobs": moved})
    assert trained(run, alone, str(model_path), files) == expected
    packed = {"max_tokens_per_micro_batch": 60}
    several = trained(run, alone, str(model_path), live | packed)
    assert trained(run, alone, str(model_path), files | packed) == pytest.approx(several, rel=1e-5)


def test_ranks_write_what_one_writes(
    run: Run, written: Run, two: Ranks, model_path: Path, teacher: Path, tmp_path: Path
) -> None:
    options = {"run": str(run.path), "model": str(model_path), "changes": taught(teacher), "out": str(tmp_path)}
    two.play([("scoring.scenarios:rows_written", options)])
    tokens = open_tokens(run.dataset("train-0"))
    one, other = (open_teacher_file(place.teacher_file("train-0")) for place in (written, Run(tmp_path)))
    for row in range(ROWS):
        expected, found = (file.read(row, tokens.digest(row), TOP_K) for file in (one, other))
        assert found[0].tolist() == expected[0].tolist()
        np.testing.assert_allclose(found[1], expected[1], atol=1e-5)


def test_other_rows_and_more_tokens_are_refused(run: Run, written: Run, tmp_path: Path) -> None:
    file, tokens = open_teacher_file(written.teacher_file("train-0")), open_tokens(run.dataset("train-0"))
    with pytest.raises(DataError, match="has the 5 most probable tokens of each place"):
        file.read(0, tokens.digest(0), TOP_K + 1)
    with pytest.raises(DataError, match="has not row 12 "):
        file.read(ROWS, tokens.digest(0), TOP_K)
    changed = make_rows(Run(tmp_path / "changed"))
    changed[3].token_ids[1] ^= 1
    write_tokens(tmp_path / "dataset", 1, changed, name="rows", made_of={}, counts={})
    others = open_tokens(tmp_path / "dataset")
    file.read(2, others.digest(2), TOP_K)
    with pytest.raises(DataError, match="has not row 3 of the run's dataset, whose tokens are others"):
        file.read(3, others.digest(3), TOP_K)


def test_what_is_damaged_or_was_not_finished_is_refused(run: Run, written: Run, tmp_path: Path) -> None:
    tokens, path = open_tokens(run.dataset("train-0")), tmp_path / "teacher"
    shutil.copytree(written.teacher_file("train-0"), path)
    with (path / "logprobs.f32").open("r+b") as file:
        file.write(b"\0\0\0\0")
    with pytest.raises(DamagedError, match="the entry of row 0 is damaged"):
        open_teacher_file(path).read(0, tokens.digest(0), TOP_K)
    open_teacher_file(path).read(1, tokens.digest(1), TOP_K)
    (path / "COMMIT").unlink()
    open_teacher_file.cache_clear()
    with pytest.raises(DamagedError, match="was never committed"):
        open_teacher_file(path)


def test_an_index_is_of_all_rows(written: Run) -> None:
    manifest = json.loads((written.teacher_file("train-0") / "manifest.json").read_text())
    assert manifest["top_k"] == TOP_K
    assert sorted(manifest["files"]) == ["ids.i32", "logprobs.f32", "rows.npy"]
