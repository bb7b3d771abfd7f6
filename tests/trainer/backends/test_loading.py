"""Models are read in the type of their files, on one rank, and cast where they are kept."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedConfig, PreTrainedModel

from hpcrl.config import FSDPConfig, MixedPrecisionConfig, ModelConfig, PolicyConfig
from hpcrl.trainer.backends.fsdp.engine import FsdpPolicy
from hpcrl.trainer.backends.fsdp.model import PackedPolicy, load_model
from hpcrl.trainer.backends.fsdp.optimizer import LossScale
from hpcrl.trainer.distributed import World
from hpcrl.trainer.models.forward import ForwardConfig
from hpcrl.trainer.models.hf import CriticSource, ModelSource
from tests.trainer.ranks import Ranks
from tests.trainer.scenarios import make_engine


@dataclass(frozen=True, kw_only=True)
class Watched(ModelSource):
    """Keeps what was read, and its type then."""

    read: list[tuple[torch.dtype, PreTrainedModel]] = field(default_factory=list)

    def whole(self, dtype: torch.dtype, attention: str) -> PreTrainedModel:
        model = super().whole(dtype, attention)
        self.read.append((next(model.parameters()).dtype, model))
        return model


@dataclass(frozen=True, kw_only=True)
class Counted(CriticSource):
    """Keeps each configuration that is read."""

    read: list[PreTrainedConfig] = field(default_factory=list)

    def config(self) -> PreTrainedConfig:
        self.read.append(super().config())
        return self.read[-1]


@pytest.fixture
def halved(model_path: Path, tmp_path: Path) -> Path:
    """The tiny model in bfloat16."""
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(model_path / "model.safetensors").items()}
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_bytes((model_path / "config.json").read_bytes())
    return tmp_path


def test_rank_0_reads_in_the_type_of_the_files_and_lets_go_of_it(halved: Path, alone: World) -> None:
    source = Watched(path=str(halved), role="trainer.policy")
    fsdp = FSDPConfig(mixed_precision=MixedPrecisionConfig(param_dtype="fp32"))
    section = PolicyConfig(model=ModelConfig(path=str(halved)), fsdp_config=fsdp)
    model = load_model(PackedPolicy, source, fsdp, ForwardConfig(temperature=1.0, chunk_rows=8), alone, trained=section)
    ((dtype, whole),) = source.read
    assert dtype == torch.bfloat16
    assert all(parameter.numel() == 0 for parameter in whole.parameters())
    expected = load_file(halved / "model.safetensors")
    for name, parameter in model.model.named_parameters():
        assert parameter.dtype == torch.float32
        assert torch.equal(parameter, expected[name].float())


def test_a_load_reads_the_configuration_once(halved: Path) -> None:
    source = Counted(path=str(halved), role="trainer.critic", head="value_head", seed=3)
    model = source.whole(torch.bfloat16, "sdpa")
    assert len(source.read) == 1
    # the classes of the body and of its head are found with a model of float32 without attention kernels
    assert (model.dtype, model.config.dtype, model.config._attn_implementation) == (
        torch.bfloat16,
        torch.bfloat16,
        "sdpa",
    )
    assert source.empty(torch.float32, "eager").config.dtype == torch.float32
    assert len(source.read) == 2


def test_no_file_loses_digits(halved: Path) -> None:
    source = ModelSource(path=str(halved), role="trainer.policy")
    assert source.stored_dtype() == torch.bfloat16
    tensors = load_file(halved / "model.safetensors")
    name = "model.norm.weight"
    save_file({**tensors, name: tensors[name].float()}, halved / "model.safetensors", {"format": "pt"})
    assert source.stored_dtype() == torch.float32
    (halved / "model.safetensors").unlink()
    assert source.stored_dtype() is None


def test_a_model_that_cannot_be_read_ends_all_ranks(halved: Path, tmp_path: Path, two: Ranks) -> None:
    """The second rank would wait in a collective."""
    (halved / "model.safetensors").write_bytes(b"0123456789")
    out = tmp_path / "out"
    two.play([("scenarios:unreadable", {"model": str(halved), "out": str(out)})])
    said = [json.loads(out.with_suffix(f".{rank}").read_text()) for rank in (0, 1)]
    assert said[0] == said[1]
    assert "cannot be loaded" in said[0]


def test_a_checkpoint_of_another_number_type_has_no_scale_of_the_loss(
    alone: World, model_path: Path, tmp_path: Path
) -> None:
    def engine(dtype: str) -> FsdpPolicy:
        precision = {"policy": {"fsdp_config": {"mixed_precision": {"param_dtype": dtype}}}}
        return make_engine(alone, str(model_path), {"trainer": precision})

    engine("fp32").save(tmp_path / "whole", alone.control)
    half = engine("fp16")
    half.restore(tmp_path / "whole")
    assert half._scale == LossScale.of("fp16")
    half._scale.follow(finite=False)
    half.save(tmp_path / "half", alone.control)
    resumed = engine("fp16")
    resumed.restore(tmp_path / "half")
    assert resumed._scale == half._scale
    engine("fp32").restore(tmp_path / "half")
