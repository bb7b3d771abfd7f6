"""What becomes of ranks on which torch's compiler fails: really, with /bin/false as the compiler."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hpcrl.config import TrainerConfig
from hpcrl.config.validate import build
from hpcrl.trainer.backends.build import with_compilation
from hpcrl.trainer.distributed import World
from hpcrl.trainer.models.layers import compilation
from tests.trainer.launcher import run_ranks
from tests.trainer.material import run_of_two
from tests.trainer.scenarios import laid_over


@dataclass
class Played:
    code: int
    log: str
    told: dict[str, list[dict[str, Any]]]
    """By way, of each rank."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("compiling")
    run_of_two(path / "run", 4, 3)
    return path


def play(place: Path, model: Path, ways: Sequence[str], without: str) -> Played:
    """Train in these ways, one after the other, on two ranks; `without` names those without a compiler."""
    out = place / "-".join(ways).replace(" ", "-")
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("TORCHINDUCTOR_CACHE_DIR", str(place / "cache"))
        given = model, place / "run", out, without, *ways
        done = run_ranks(2, *given, script="trainer/kernels/compiling.py", limit_s=600)
    found = [json.loads(path.read_text()) for rank in range(2) if (path := Path(f"{out}.{rank}")).exists()]
    return Played(done.returncode, done.stderr, {way: [one[way] for one in found] for way in ways})


@pytest.fixture(scope="module")
def asked(place: Path, model_path: Path) -> Played:
    found = play(place, model_path, ["eager", "asked"], "1")
    assert found.code == 0, found.log
    return found


def test_all_ranks_compute_eagerly_where_one_has_no_compiler(asked: Played) -> None:
    assert [one["works"] for one in asked.told["asked"]] == [False, False]
    assert [one["losses"] for one in asked.told["asked"]] == [one["losses"] for one in asked.told["eager"]]
    (line,) = [line for line in asked.log.splitlines() if "torch.compile fails" in line]
    assert "torch.compile fails on 1 of 2 ranks (rank 1: InductorError: " in line
    assert "/bin/false" in line
    assert "trainer.policy.compile_model=true" in line


@pytest.mark.faults_slow
def test_what_cannot_be_compiled_runs_eagerly_on_the_rank_that_cannot(
    place: Path, model_path: Path, asked: Played
) -> None:
    mixed = play(place, model_path, ["falls back"], "1")
    assert mixed.code == 0, mixed.log
    for one, other in zip(mixed.told["falls back"], asked.told["eager"], strict=True):
        assert one["losses"] == pytest.approx(other["losses"], abs=1e-5)
    assert mixed.log.count("torch.compile failed, and this code runs without it: ") == 1
    assert "WON'T CONVERT" not in mixed.log


@pytest.mark.faults_slow
def test_what_is_set_to_true_fails_aloud(place: Path, model_path: Path) -> None:
    found = play(place, model_path, ["set"], "0,1")
    assert found.code != 0
    assert "InductorError" in found.log


ON = {"policy": {"fsdp_config": {"mixed_precision": {"param_dtype": "bf16"}}}}
LIGER = {"policy": {"enable_liger_kernel": True}}


@pytest.mark.parametrize(
    ("device", "changes", "works", "expected"),
    [
        ("cpu", {}, True, (False, False)),
        ("cuda", {}, True, (True, True)),
        ("cuda", {}, False, (False, False)),
        ("cuda", {"policy": {"compile_model": False}}, True, (False, True)),
        ("cuda", {"policy": {"compile_model": True, "use_torch_compile": False}}, False, (True, False)),
        ("cuda", LIGER, True, (False, False)),
        ("cuda", {"shared_prefixes": True}, True, (False, False)),
        ("cuda", {"flash_attn": False}, True, (False, False)),
        ("cuda", {"policy": {"fsdp_config": {"mixed_precision": {"param_dtype": "fp16"}}}}, True, (False, False)),
    ],
)
def test_where_it_is_the_default(
    model_path: Path,
    alone: World,
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    changes: dict[str, Any],
    works: bool,
    expected: tuple[bool, bool],
) -> None:
    """Of a dense model on a GPU, here one by name only."""
    monkeypatch.setattr(compilation, "compiler_works", lambda _: works)
    monkeypatch.setattr(compilation, "fall_back_to_eager", lambda: None)
    table = laid_over(laid_over({"policy": {"model": {"path": str(model_path)}}}, ON), changes)
    found = with_compilation(build(TrainerConfig, table), replace(alone, device=torch.device(device))).policy
    assert (found.compile_model, found.use_torch_compile) == expected
