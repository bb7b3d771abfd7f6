"""A teacher whose ranks share layers, matrices, tokens or experts says what one of FSDP2 on one rank says of the same samples."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig

pytest.importorskip("megatron.core")

from hpcrl.config import Config
from hpcrl.config.scorers import scorer_sets
from hpcrl.data.batch_file import write_batch
from hpcrl.launch.submit.models import check_layouts
from hpcrl.rundir.commit import write_text
from hpcrl.rundir.layout import Run
from hpcrl.trainer.distributed import World
from hpcrl.trainer.scoring.model import ScoringModel
from hpcrl.types import Batch, GroupMeta
from tests.paths import QUICKSTART
from tests.rows import read_tensors, write_group
from tests.trainer.backends.megatron.material import EXPERTS, SHARED
from tests.trainer.material import QUICKSTART as POLICY
from tests.trainer.material import make_batch, make_run
from tests.trainer.ranks import Ranks
from tests.trainer.scoring.scenarios import columns

SECTION = "trainer.distillation"
FP32 = f"{SECTION}.fsdp_config.mixed_precision.param_dtype=fp32"
MEGATRON = f"{SECTION}.backend=megatron"
OWN = {"vocab_size": 18, "head_dim": 16}
TEACHERS = {"dense": Qwen3Config(**SHARED | OWN), "experts": Qwen3MoeConfig(**SHARED | OWN | EXPERTS)}
rarely = pytest.mark.faults_slow
TOP = [f"{SECTION}.top_k=5"]
GIVEN = [*TOP, f"{SECTION}.top_k_from_teacher=false"]


@pytest.fixture(scope="module")
def teachers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("teachers")
    for name, config in TEACHERS.items():
        torch.manual_seed(5)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder / name)
        for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            shutil.copy(POLICY / file, folder / name)
    return folder


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    ranks = Ranks(tmp_path_factory.mktemp("ranks"), 4)
    yield ranks
    ranks.close()


def configured(run: Run, teacher: Path, *settings: str) -> tuple[Config, Batch]:
    """Let a run have this teacher and one batch."""
    own = ["trainer.algorithm.use_kl_loss=false", f"{SECTION}.enable=true", f"{SECTION}.model_path={teacher}", FP32]
    config = Config.from_toml([QUICKSTART], [*own, f"{SECTION}.micro_batch_size_per_gpu=4", *settings])
    write_text(run.config, config.to_toml())
    batch = make_batch(run, 1, groups=4, size=3, masked=True)
    if config.trainer.distillation.top_k and not config.trainer.distillation.top_k_from_teacher:
        batch = naming_tokens(run, batch, config.trainer.distillation.top_k)
    write_batch(run, batch, "")
    return config, batch


def naming_tokens(run: Run, batch: Batch, count: int) -> Batch:
    """Let samples name tokens that the policy found most probable."""
    draw, groups = torch.Generator().manual_seed(1), list[GroupMeta]()
    for meta in batch.groups:
        rows = [
            replace(row, top_ids=torch.randint(0, 18, (len(row.token_ids), count), generator=draw).int())
            for row in read_tensors(run.path / meta.path)
        ]
        groups.append(write_group(run.path / meta.path, rows, replace(meta, digest="")))
    return replace(batch, groups=groups)


def sizes(**of: int) -> list[str]:
    return [MEGATRON, *(f"{SECTION}.placement.{name}_parallel_size={size}" for name, size in of.items())]


@pytest.mark.parametrize(
    ("teacher", "layout", "settings"),
    [
        ("dense", {"tensor": 2, "pipeline": 2}, TOP),
        ("experts", {"expert": 4}, []),
        pytest.param(
            "dense", {"tensor": 2, "pipeline": 2}, [f"{SECTION}.top_k=18"], marks=rarely
        ),  # more than a rank has
        pytest.param("dense", {"sequence": 2, "pipeline": 2}, [*TOP, f"{SECTION}.include_prompt=true"], marks=rarely),
        pytest.param("dense", {"sequence": 2, "tensor": 2}, GIVEN, marks=rarely),
        pytest.param("dense", {"sequence": 2, "pipeline": 2}, [], marks=rarely),
        pytest.param("experts", {"tensor": 2, "expert": 4}, TOP, marks=rarely),
        pytest.param("experts", {"pipeline": 2, "expert": 2}, GIVEN, marks=rarely),
    ],
)
def test_however_ranks_share_it_a_teacher_says_the_same(
    teacher: str,
    layout: dict[str, int],
    settings: list[str],
    teachers: Path,
    tmp_path: Path,
    alone: World,
    four: Ranks,
) -> None:
    run = make_run(tmp_path / "run")
    config, batch = configured(run, teachers / teacher, *settings)
    expected = ScoringModel(run, config, scorer_sets(config)[0], alone).scores(batch.groups, lambda: None)
    config, _ = configured(run, teachers / teacher, *sizes(**layout), *settings)
    assert config.trainer.distillation.ranks_per_replica == 4
    assert not list(check_layouts(config))
    scores = ("scoring.scenarios:scores", {"run": str(run.path), "out": str(tmp_path)})
    four.play([scores, ("backends.megatron.leave:leave", {})])
    parts: list[dict[str, torch.Tensor]] = [load_file(tmp_path / f"{rank}.safetensors") for rank in range(4)]
    found = {name: value for part in parts for name, value in part.items()}
    assert sum(map(len, parts)) == len(found), "one of the ranks that share a sample has its scores"
    wanted = {
        f"{name}.{at}.{kind}": column
        for name, rows in expected.items()
        for at, row in enumerate(rows)
        for kind, column in columns(row).items()
    }
    assert len(wanted) == 12 * (3 if settings else 1)
    assert found.keys() == wanted.keys()
    for name, column in wanted.items():
        assert column.any(), name
        torch.testing.assert_close(found[name], column, atol=1e-5, rtol=1e-5, msg=name)


@pytest.mark.parametrize(
    ("of", "ranks", "expert_tensor"),
    [
        ({"tensor": 2, "pipeline": 4, "sequence": 2}, 16, None),
        ({"tensor": 4, "expert": 8}, 8, 1),
        ({"tensor": 4, "expert": 2, "pipeline": 2}, 8, 1),
        ({"expert": 8}, 8, 1),
    ],
)
def test_a_copy_has_the_ranks_that_its_sizes_need(
    of: dict[str, int], ranks: int, expert_tensor: int | None, teachers: Path, tmp_path: Path
) -> None:
    config, _ = configured(make_run(tmp_path / "run"), teachers / "dense", *sizes(**of))
    distillation = config.trainer.distillation
    assert distillation.ranks_per_replica == ranks
    assert distillation.megatron_layout.expert_tensor_parallel_size == expert_tensor


@pytest.mark.parametrize(
    ("teacher", "of", "path"),
    [("dense", {"tensor": 8}, "tensor"), ("dense", {"pipeline": 3}, "pipeline"), ("dense", {"expert": 2}, "expert")],
)
def test_what_does_not_fit_the_teacher_is_refused_when_it_is_submitted(
    teacher: str, of: dict[str, Any], path: str, teachers: Path, tmp_path: Path
) -> None:
    config, _ = configured(make_run(tmp_path / "run"), teachers / teacher, *sizes(**of))
    (problem, *_) = check_layouts(config)
    assert problem.path == f"{SECTION}.placement.{path}_parallel_size"
    assert "teacher" in problem.message
