"""Scorers whose ranks share the tokens of each sample find what one rank finds, and one of the ranks tells it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from hpcrl.config import Config
from hpcrl.config.scorers import REFERENCE, TEACHER, scorer_sets
from hpcrl.data.token_file import open_tokens
from hpcrl.rundir.commit import write_text
from hpcrl.rundir.layout import Run
from hpcrl.trainer.distributed import World
from hpcrl.trainer.offline.teacher_file import open_teacher_file
from hpcrl.trainer.scoring.model import ScoringModel
from hpcrl.trainer.scoring.rows import RowTeacher
from tests.trainer.backends.test_supervised import config, make_rows
from tests.trainer.ranks import Ranks
from tests.trainer.scoring.scenarios import columns
from tests.trainer.scoring.test_rows import ROWS, TOP_K, taught
from tests.trainer.scoring.test_scores import OFF, TEACHER_IS_ENABLED, batch_of, configured

PLACEMENT, OF_TEACHER = "trainer.placement", "trainer.distillation.placement"
SETTINGS = {
    TEACHER: [OFF, *TEACHER_IS_ENABLED, "trainer.distillation.top_k=3"],
    REFERENCE: [f"{PLACEMENT}.colocate_policy_ref=false", "trainer.micro_forward_batch_size_per_gpu=4"],
}
SHARING = {
    TEACHER: [f"{OF_TEACHER}.fsdp_size=2", f"{OF_TEACHER}.sequence_parallel_size=2"],
    REFERENCE: [f"{PLACEMENT}.ref_num_gpus_per_node=2", "trainer.ref.sequence_parallel_size=2"],
}


@pytest.mark.parametrize("role", [REFERENCE, TEACHER])
def test_groups_of_samples(role: str, tmp_path: Path, alone: World, two: Ranks) -> None:
    run = configured(tmp_path / "run", *SETTINGS[role])
    one = Config.from_toml([run.config])
    found = ScoringModel(run, one, scorer_sets(one)[0], alone).scores(batch_of(run).groups, lambda: None)
    write_text(run.config, Config.from_toml([run.config], SHARING[role]).to_toml())
    two.play([("scoring.scenarios:scores", {"run": str(run.path), "out": str(tmp_path)})])
    first, second = (load_file(tmp_path / f"{rank}.safetensors") for rank in range(2))
    assert not second, "the first of them tells"
    expected = {
        f"{name}.{at}.{kind}": column
        for name, rows in found.items()
        for at, row in enumerate(rows)
        for kind, column in columns(row).items()
    }
    assert first.keys() == expected.keys()
    for name, column in expected.items():
        torch.testing.assert_close(first[name], column, atol=1e-5, rtol=1e-5)


def test_rows_of_datasets(tmp_path: Path, alone: World, two: Ranks, model_path: Path) -> None:
    run = Run(tmp_path / "run")
    make_rows(run)
    changes = taught(model_path)
    one, several = (Run(tmp_path / name) for name in ("one", "several"))
    RowTeacher(config(str(model_path), changes), alone).write(
        one.teacher_file("train-0"), tokens := open_tokens(run.dataset("train-0")), lambda _: None
    )
    changes |= {"policy": {"sequence_parallel_size": 2}, "placement": {"policy_num_gpus_per_node": 2}}
    options = {"run": str(run.path), "model": str(model_path), "changes": changes, "out": str(several.path)}
    two.play([("scoring.scenarios:rows_written", options)])
    for row in range(ROWS):
        (ids, logprobs), (expected, theirs) = (
            open_teacher_file(place.teacher_file("train-0")).read(row, tokens.digest(row), TOP_K)
            for place in (several, one)
        )
        assert ids.tolist() == expected.tolist()
        np.testing.assert_allclose(logprobs, theirs, atol=1e-5)
