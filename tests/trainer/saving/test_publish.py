"""Weights and exports: what transformers loads is what the trainer computes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, Qwen3MoeConfig, Qwen3MoeForCausalLM

from hpcrl import faults as fault
from hpcrl.config import (
    AlgorithmConfig,
    FSDPConfig,
    MixedPrecisionConfig,
    ModelConfig,
    PolicyConfig,
    RefConfig,
    TrainerConfig,
)
from hpcrl.config.sections.generator import ChatTemplateConfig
from hpcrl.config.sections.model import Pretrained
from hpcrl.errors import DataError
from hpcrl.rundir.commit import committed, is_committed, verify, write_text
from hpcrl.rundir.layout import Run, version_of
from hpcrl.trainer.backends.base import ExportPiece
from hpcrl.trainer.backends.fsdp.engine import FsdpPolicy
from hpcrl.trainer.distributed import World
from hpcrl.trainer.models.build import policy_source, reference_source
from hpcrl.trainer.models.hf import export_config
from hpcrl.trainer.packing import PackedRows, pack
from hpcrl.trainer.saving.publish import Publisher
from hpcrl.trainer.saving.shards import ShardPlan, ShardWriter
from tests.paths import CONFIGS
from tests.trainer.material import make_run, make_sample


def make_engine(
    path: Path, world: World, temperature: float = 1.0, of_policy: dict[str, Any] | None = None, **of_trainer: Any
) -> FsdpPolicy:
    precision = FSDPConfig(mixed_precision=MixedPrecisionConfig(param_dtype="fp32"))
    policy = PolicyConfig(**{"model": ModelConfig(path=str(path)), "fsdp_config": precision, **(of_policy or {})})
    algorithm = AlgorithmConfig(use_kl_loss=False)
    return FsdpPolicy(TrainerConfig(policy=policy, algorithm=algorithm, **of_trainer), temperature, world)


@pytest.fixture(scope="module")
def engine(model_path: Path, alone: World) -> FsdpPolicy:
    """An engine whose policy is no longer the model it started from."""
    engine = make_engine(model_path, alone, temperature=0.7)
    with torch.no_grad():
        for number, parameter in enumerate(engine._model.parameters()):
            parameter.mul_(1 + number / 50)
    return engine


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return make_run(tmp_path / "run")


def packed() -> PackedRows:
    generator = torch.Generator().manual_seed(5)
    return pack([make_sample(generator, length, prompt=2) for length in (9, 5, 12)])


def expect_same_logprobs(path: Path, engine: FsdpPolicy, temperature: float, atol: float = 5e-5) -> None:
    """Compare the engine's log-probabilities with those of transformers, sample by sample."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    batch = packed().whole()
    batch.head_rows = torch.arange(len(batch.token_ids))
    logprobs_P = next(engine.logprobs([batch]))
    parts = zip(batch.token_ids.split(batch.lengths), logprobs_P.split(batch.lengths), strict=True)
    for ids, logprobs in parts:
        with torch.no_grad():
            expected = (model(input_ids=ids[None]).logits[0, :-1] / temperature).log_softmax(-1)
        torch.testing.assert_close(logprobs[:-1], expected.gather(-1, ids[1:, None])[:, 0], atol=atol, rtol=1e-5)


def test_an_export_is_a_model(run: Run, alone: World, engine: FsdpPolicy, model_path: Path) -> None:
    Publisher(run, 1, alone, torch.float32, 2).export(engine, 3, Pretrained(str(model_path)), ChatTemplateConfig())
    assert is_committed(run.export(3))
    expect_same_logprobs(run.export(3), engine, temperature=0.7)
    text = [{"role": "user", "content": "a"}]
    assert AutoTokenizer.from_pretrained(run.export(3)).apply_chat_template(text) == AutoTokenizer.from_pretrained(
        model_path
    ).apply_chat_template(text)


def test_an_export_keeps_the_chat_template_of_the_run(
    run: Run, alone: World, engine: FsdpPolicy, model_path: Path, tmp_path: Path
) -> None:
    file = tmp_path / "own.jinja"
    file.write_text("{% for message in messages %}{{ message.content }}{% endfor %} b")
    own = ChatTemplateConfig(source="file", name_or_path=str(file))
    Publisher(run, 1, alone, torch.float32, 2).export(engine, 1, Pretrained(str(model_path)), own)
    text = [{"role": "user", "content": "a"}]
    assert AutoTokenizer.from_pretrained(run.export(1)).apply_chat_template(text, tokenize=False) == "a b"


def stored_types(path: Path) -> set[torch.dtype]:
    with safe_open(path / "model-00001.safetensors", "pt") as file:
        return {file.get_tensor(name).dtype for name in file.keys()}  # noqa: SIM118


def test_an_export_has_the_models_files_and_number_type(run: Run, alone: World, tmp_path: Path) -> None:
    """Whatever the engine's type is: of a model in transformers 4's form, which no generation settings of transformers may change."""
    model = tmp_path / "model"
    shutil.copytree(CONFIGS / "quickstart" / "model", model)
    entries = json.loads((model / "config.json").read_text())
    del entries["rope_parameters"], entries["dtype"]
    entries |= {"rope_theta": 500.0, "rope_scaling": None, "torch_dtype": "bfloat16", "own": {"kept": 1}}
    (model / "config.json").write_text(json.dumps(entries))
    (model / "generation_config.json").write_text('{"do_sample": false, "temperature": 0.9, "eos_token_id": [1]}')
    engine = make_engine(model, alone)
    Publisher(run, 1, alone, torch.float32, 2).export(engine, 1, Pretrained(str(model)), ChatTemplateConfig())
    assert json.loads((run.export(1) / "config.json").read_text()) == entries
    for name in ("generation_config.json", "tokenizer.json", "chat_template.jinja"):
        assert (run.export(1) / name).read_bytes() == (model / name).read_bytes(), name
    assert stored_types(run.export(1)) == {torch.bfloat16}
    verify(run.export(1))


@pytest.mark.parametrize(
    ("named", "stored", "expected"),
    [
        ("bfloat16", torch.float32, torch.bfloat16),
        (None, torch.bfloat16, torch.bfloat16),
        (None, torch.float64, torch.float32),
        ("float64", torch.float64, torch.float32),
    ],
)
def test_the_number_type_of_an_export(
    model_path: Path, tmp_path: Path, named: str | None, stored: torch.dtype, expected: torch.dtype
) -> None:
    AutoModelForCausalLM.from_pretrained(model_path, dtype=stored).save_pretrained(tmp_path / "model")
    entries = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps(entries | {"dtype": named}))
    source = policy_source(TrainerConfig(policy=PolicyConfig(model=ModelConfig(path=str(tmp_path / "model")))))
    assert source.export_dtype() == expected
    export_config(source, tmp_path, source.export_dtype())
    told = json.loads((tmp_path / "config.json").read_text())["dtype"]
    assert told == (named and str(expected).removeprefix("torch."))


def test_weights_have_the_engines_type_and_tied_ones_come_once(run: Run, alone: World, engine: FsdpPolicy) -> None:
    Publisher(run, 1, alone, torch.bfloat16, 2).publish(engine, 1)
    assert stored_types(run.weights_of(1)) == {torch.bfloat16}
    with safe_open(run.weights_of(1) / "model-00001.safetensors", "pt") as file:
        names = set(file.keys())
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names
    index = json.loads((run.weights_of(1) / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == names


def test_versions(run: Run, alone: World, engine: FsdpPolicy) -> None:
    publisher = Publisher(run, 1, alone, torch.float32, kept_versions=3)
    for version in range(1, 5):
        publisher.publish(engine, version)
        publisher.retire()
        write_text(run.eval_begun(2), "{}")
    assert committed(run.weights, version_of) == [2, 3, 4], "max_staleness + 2 stay readable"
    publisher.publish(engine, 5)
    publisher.retire()
    assert committed(run.weights, version_of) == [2, 3, 4, 5], "version 2 is being evaluated"
    inode = run.weights_of(4).stat().st_ino
    publisher.publish(engine, 4)
    assert run.weights_of(4).stat().st_ino == inode, "a committed version is being read"
    (run.weights / ".tmp-v000005.1").mkdir()
    Publisher(run, 2, alone, torch.float32, kept_versions=3).resume(engine, 2)
    assert [path.name for path in run.weights.iterdir()] == ["v000002"]
    Publisher(run, 3, alone, torch.float32, kept_versions=3).resume(engine, 1)
    assert committed(run.weights, version_of) == [1], "a version that retention removed is published again"


def test_shards(tmp_path: Path) -> None:
    tensors = {f"t{number}": torch.full((100,), float(number)) for number in range(5)} | {"big": torch.zeros(1000)}
    pieces = [ExportPiece({name: tensor.to("meta")}, [0]) for name, tensor in tensors.items()]
    plan = ShardPlan.of(pieces, 1, shard_bytes=800)
    writer = ShardWriter(tmp_path, plan, 0)
    for name, tensor in tensors.items():
        writer.put({name: tensor})
    assert writer.finish().keys() == tensors.keys()
    index: dict[str, Any] = plan.index
    assert index["metadata"]["total_size"] == 6000
    assert [list(shard.tensors) for shard in plan.shards] == [["t0", "t1"], ["t2", "t3"], ["t4"], ["big"]]
    for name, file in index["weight_map"].items():
        with safe_open(tmp_path / file, "pt") as shard:
            assert torch.equal(shard.get_tensor(name), tensors[name])


def test_pieces_are_divided_by_bytes_among_the_ranks_that_can_have_them() -> None:
    sizes, everyone = [90, 10, 20, 30, 40, 50], [0, 1, 2]
    pieces = [ExportPiece({f"t{n}": torch.empty(n, device="meta")}, everyone) for n in sizes]
    plan = ShardPlan.of(pieces, 3)
    loads = [sum(n for n, owner in zip(sizes, plan.owners, strict=True) if owner == rank) for rank in everyone]
    assert sorted(loads) == [70, 80, 90]
    stages = [ExportPiece({f"s{n}": torch.empty(n, device="meta")}, [n % 2, n % 2 + 2]) for n in [*sizes, 1, 1, 1]]
    assert all(owner in piece.ranks for owner, piece in zip(ShardPlan.of(stages, 4).owners, stages, strict=True))


def test_a_writer_keeps_no_more_than_a_shard_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow the disk is."""
    monkeypatch.setattr("hpcrl.trainer.saving.shards.SHARD_BYTES", 100)
    monkeypatch.setenv("HPCRL_FAULT", "weights.shard@1:sleep=0.5")
    fault._passed.clear()
    pieces = [ExportPiece({f"t{n}": torch.empty(10, device="meta")}, [0]) for n in range(8)]
    writer, held = ShardWriter(tmp_path, ShardPlan.of(pieces, 1, 100), 0), list[int]()
    for piece in pieces:
        writer.put({name: torch.zeros(10) for name in piece.tensors})
        held.append(sum(not future.done() for future in writer._written))
    writer.finish()
    assert max(held) == 2, "40 bytes each"


def test_fused_experts_are_exported_under_their_names_on_the_hub(run: Run, alone: World, tmp_path: Path) -> None:
    """transformers fuses experts at load; files, and vLLM, have one tensor per expert."""
    torch.manual_seed(1)
    sizes = {"vocab_size": 18, "hidden_size": 16, "intermediate_size": 24, "moe_intermediate_size": 8, "head_dim": 8}
    layers = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "num_experts": 4}
    config = Qwen3MoeConfig(**sizes, **layers, num_experts_per_tok=2, initializer_range=0.2)
    Qwen3MoeForCausalLM(config).save_pretrained(tmp_path / "moe")
    engine = make_engine(tmp_path / "moe", alone)
    Publisher(run, 1, alone, torch.float32, 2).publish(engine, 1)
    with (
        safe_open(run.weights_of(1) / "model-00001.safetensors", "pt") as new,
        safe_open(tmp_path / "moe" / "model.safetensors", "pt") as old,
    ):
        assert set(new.keys()) == set(old.keys())
        assert "model.layers.0.mlp.experts.3.up_proj.weight" in new.keys()  # noqa: SIM118
        assert all(torch.equal(new.get_tensor(name), old.get_tensor(name)) for name in old.keys())  # noqa: SIM118
    expect_same_logprobs(tmp_path / "moe", engine, temperature=1.0)


def test_exports_carry_rotary_positions_and_replaced_entries(run: Run, alone: World, model_path: Path) -> None:
    own = make_engine(model_path, alone)
    batch = packed().whole()
    for number, (options, expected) in enumerate(
        [
            ({"rope_theta": 100.0}, {"rope_type": "default", "rope_theta": 100.0}),
            (
                {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
                {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0},
            ),
            (
                {"of_policy": {"model_config_kwargs": {"rms_norm_eps": 0.5}}},
                {"rope_type": "default", "rope_theta": 10000.0},
            ),
        ],
        start=1,
    ):
        changed = make_engine(model_path, alone, **options)
        assert (next(changed.logprobs([batch])) - next(own.logprobs([batch]))).abs().max() > 1e-3, options
        Publisher(run, 1, alone, torch.float32, 2).export(
            changed, number, Pretrained(str(model_path)), ChatTemplateConfig()
        )
        assert AutoConfig.from_pretrained(run.export(number)).rope_parameters == expected
        expect_same_logprobs(run.export(number), changed, temperature=1.0)


def test_the_reference_gets_its_own_entries_and_the_same_rotary_positions(model_path: Path) -> None:
    ref = RefConfig(model_config_kwargs={"rms_norm_eps": 0.5})
    policy = PolicyConfig(model=ModelConfig(path=str(model_path)), model_config_kwargs={"rms_norm_eps": 0.25})
    trainer = TrainerConfig(policy=policy, ref=ref, rope_theta=100.0)
    configs = [policy_source(trainer).config(), reference_source(trainer).config()]
    assert [config.rms_norm_eps for config in configs] == [0.25, 0.5]
    assert [config.rope_parameters["rope_theta"] for config in configs] == [100.0, 100.0]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"of_policy": {"model_config_kwargs": {"rms_norm_esp": 1.0}}}, "did you mean rms_norm_eps"),
        ({"of_policy": {"model_config_kwargs": {"num_hidden_layers": 3}}}, "trainer.policy.model_config_kwargs"),
        ({"of_policy": {"model_config_kwargs": {"intermediate_size": 40}}}, "trainer.policy.model_config_kwargs"),
        ({"rope_scaling": {"rope_type": "liner", "factor": 2.0}}, "rope_scaling"),
        ({"of_policy": {"trainable_map": {"model.layer.0": False}}}, "did you mean model.layers"),
        ({"of_policy": {"freeze_pattern": ["embed_token$"]}}, "did you mean model.embed_tokens"),
        ({"of_policy": {"freeze_pattern": ["."]}}, "freeze every parameter"),
        (
            {"of_policy": {"fsdp_config": FSDPConfig(wrap_policy={"transformer_layer_cls_to_wrap": ["Qwen3DecoderLayer"]})}},
            "no Qwen3DecoderLayer; did you mean Qwen2DecoderLayer",
        ),
        (
            {"of_policy": {"fsdp_config": FSDPConfig(wrap_policy={"transformer_layer_cls_to_wrap": ["Qwen2Model"]})}},
            "Qwen2Model cannot be a unit",
        ),
    ],
)  # fmt: skip
def test_what_the_model_does_not_have_is_said(
    model_path: Path, alone: World, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(DataError, match=words):
        make_engine(model_path, alone, **options)


@pytest.mark.parametrize("name", ["missing", "."])
def test_what_is_no_model_is_said(tmp_path: Path, alone: World, name: str) -> None:
    with pytest.raises(
        DataError, match=r"cannot be loaded: expected a directory or hub id.*trainer\.policy\.model\.path"
    ):
        make_engine(tmp_path / name, alone)
