"""The arithmetic of memory is that of the engines: to the byte for what they hold, nearly for what their passes keep."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hpcrl.config import Config, TrainerConfig
from hpcrl.config.load import nested
from hpcrl.config.sections.model import FSDPConfig, ModelConfig, PolicyConfig
from hpcrl.config.token_limits import largest_micro_batch, longest_sample
from hpcrl.config.validate import build
from hpcrl.launch.submit.models import folder_of
from hpcrl.planning.estimate import estimate
from hpcrl.planning.memory import (
    EMBEDDING,
    HEAD,
    Need,
    Weight,
    Width,
    activations,
    fsdp_gathered,
    fsdp_state,
    layer_activations,
    logprob_buffer,
    megatron_state,
    merged_experts,
    peak,
)
from hpcrl.planning.shapes import model_shapes, shapes
from hpcrl.trainer.distributed import World
from hpcrl.trainer.models.hf import ModelSource
from tests.planning.memory_scenarios import bytes_of
from tests.trainer.launcher import run_ranks
from tests.trainer.material import write_model

FROZEN = r"embed_tokens|layers\.0\.(?!mlp\.up_proj)"


def section(model: Path, **fsdp: Any) -> dict[str, Any]:
    precision = {"param_dtype": "fp32", **fsdp.pop("mixed_precision", {})}
    policy = {"model": {"path": str(model)}, "fsdp_config": {**fsdp, "mixed_precision": precision}}
    return {"policy": policy, "algorithm": {"use_kl_loss": False}}


def trainers(model: Path) -> dict[str, Any]:
    """Return sections whose engines hold different things."""
    plain = section(model)
    frozen = section(model)
    frozen["policy"]["freeze_pattern"] = [FROZEN]
    critic = {"model": {"path": str(model)}, "fsdp_config": {"mixed_precision": {"param_dtype": "fp32"}}}
    adapted = section(model, mixed_precision={"param_dtype": "bf16"})
    adapted["policy"]["model"]["lora"] = {"rank": 4}
    return {
        "plain": plain,
        "two-copies": section(model, fsdp_size=2),
        "bf16": section(model, mixed_precision={"param_dtype": "bf16"}),
        "master-bf16": section(model, mixed_precision={"param_dtype": "bf16", "master_dtype": "bf16"}),
        "for-loop": {**plain, "policy": plain["policy"] | {"optimizer_config": {"implementation": "for-loop"}}},
        "frozen": frozen,
        "follows": {**adapted, "algorithm": {"reference_reset_interval": 1}},
        "lora": {**adapted, "algorithm": {}, "critic": {**critic, "model": {"path": str(model), "lora": {"rank": 2}}}},
        "all-models": {**section(model, mixed_precision={"param_dtype": "bf16"}), "algorithm": {}, "critic": critic},
    }


ON_FOUR = "plain", "two-copies", "frozen", "lora", "all-models"
"""Those of which each rank's part is counted; the others differ in what is true of one rank too."""


def expected(table: dict[str, Any], ranks: int, index: int) -> dict[str, dict[str, int]]:
    """Return by role what the arithmetic says that rank `index` of `ranks` holds."""
    trainer = build(TrainerConfig, table)
    fsdp = {"policy": trainer.policy.fsdp_config, "ref": trainer.ref_sharding, "critic": trainer.critic.fsdp_config}
    found = {}
    for role, model in model_shapes(trainer, folder_of).items():
        sharding, precision = fsdp[role], fsdp[role].mixed_precision
        copy = sharding.copy_ranks(ranks, ranks)
        dtype = precision.param_dtype if role == "ref" else precision.master_dtype
        frozen = precision.param_dtype if role in trainer.adapters else None
        twice = role == "policy" and trainer.reference_has_values
        need = fsdp_state(model.weights, copy, dtype, index % copy, frozen_dtype=frozen, twice=twice)
        found[role] = {name: getattr(need, name) for name in ("weights", "gradients", "optimizer")}
    return found


def test_one_rank_holds_what_the_arithmetic_says(model_path: Path, alone: World) -> None:
    sections = trainers(model_path)
    held = bytes_of(alone, sections)
    assert len(held) == len(sections) + 3
    assert "lora/ref" not in held, "the reference is the policy without its adapters"
    for name, found in held.items():
        section, _, role = name.partition("/")
        assert expected(sections[section], 1, 0)[role] == found, name


@pytest.mark.faults_slow
def test_each_of_four_ranks_holds_what_the_arithmetic_says(model_path: Path, tmp_path: Path) -> None:
    """18 rows of the embedding over 4 ranks: 5, 5, 5, 3."""
    sections = {name: section for name, section in trainers(model_path).items() if name in ON_FOUR}
    done = run_ranks(4, json.dumps({"trainers": sections, "out": str(tmp_path)}), script="planning/memory_scenarios.py")
    assert done.returncode == 0, done.stderr
    shares = set()
    for rank in range(4):
        for name, found in json.loads((tmp_path / f"{rank}.json").read_text()).items():
            section, _, role = name.partition("/")
            assert expected(sections[section], 4, rank)[role] == found, (rank, name)
            shares.add((name, found["weights"]))
    assert len({share for name, share in shares if name == "plain/policy"}) == 2


def test_rows_of_each_rank_are_those_of_the_matrix() -> None:
    for rows in (1, 3, 18, 19, 64):
        for ranks in (1, 2, 4, 7):
            held = [Weight("", (rows, 5)).on(ranks, index) for index in range(ranks)]
            chunks = torch.empty(rows, 5).chunk(ranks)
            assert held == [chunk.numel() for chunk in chunks] + [0] * (ranks - len(chunks))


def width(**changes: Any) -> Width:
    sizes: dict[str, Any] = {
        "layers": 3,
        "hidden": 64,
        "heads": 4,
        "kv_heads": 2,
        "head": 16,
        "ffn": 160,
        "vocabulary": 50,
    }
    return Width(**(sizes | changes))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "llama"])
def test_activations_are_about_those_that_autograd_keeps(kind: str, dtype: torch.dtype) -> None:
    sizes = width(norms_heads=kind == "qwen3")
    config = AutoConfig.for_model(
        kind,
        num_hidden_layers=sizes.layers,
        hidden_size=sizes.hidden,
        intermediate_size=sizes.ffn,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.kv_heads,
        head_dim=sizes.head,
        vocab_size=sizes.vocabulary,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa").base_model
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(input_ids=torch.zeros(1, 32, dtype=torch.int64), use_cache=False)
    measured = sum(storage.nbytes() for storage in kept.values())
    counted = activations(sizes, 32, dtype.itemsize, fused=False, recompute=False, layers=sizes.layers)
    assert counted == pytest.approx(measured, rel=0.15)


def test_activations_of_a_pipeline() -> None:
    sizes, plain = width(), {"fused": True, "layers": 3}
    one = layer_activations(sizes, 2, fused=True)
    # 2 norms and 2 linear inputs of 64, 4 + 4 heads of queries and results, 2 + 2 of keys and values, 3 x 160; 4 bytes a head
    assert one == 2 * (4 * 64 + 12 * 16 + 3 * 160) + 4 * 4
    assert activations(sizes, 10, 2, recompute=False, passes=2, **plain) == 10 * 3 * 2 * one
    assert activations(sizes, 10, 2, recompute=True, passes=2, **plain) == 10 * (3 * 2 * 64 * 2 + one)
    assert activations(sizes, 10, 2, recompute=True, every=2, **plain) == 10 * (2 * 64 * 2 + 2 * one)
    assert logprob_buffer(1024, 151936, 4) == 5 * 4 * 1024 * 151936


def test_megatron_holds_what_its_documentation_says() -> None:
    def each(copies: int, **options: Any) -> float:
        need = megatron_state(1000 * copies, 0, copies, 1, **options)
        return need.resident / (1000 * copies)

    assert each(1) == 18
    assert each(8) == 6 + 12 / 8
    assert each(8, bf16=False) == 8 + 8 / 8
    assert each(8, distributed=False) == 18
    assert each(8, fp32_gradients=False) == 4 + 12 / 8
    assert each(8, frozen=8000) == 6 + 12 / 8 + 2
    assert each(1, offloaded=0.5) == 6 + 6
    experts = megatron_state(0, 800, 8, 2)
    assert experts.optimizer == 12 * 800 / 2
    assert each(8, by_muon=(8000, 0)) == 6 + 8 / 8, "one moment"
    assert megatron_state(80, 800, 8, 2, by_muon=(40, 600)).optimizer == 12 * (10 + 400) - 4 * (5 + 300)


def test_what_fsdp_gathers() -> None:
    root, layers = Weight("embed", (10, 10)), [Weight(f"l{unit}", (20,), unit=unit) for unit in (1, 2, 3)]
    weights = [root, *layers]
    # the root and its gradient, two units, and the gradient of the root on its way in float32
    assert fsdp_gathered(weights, 4, "bf16", "fp32", keep=True) == 2 * 100 * 2 + 40 * 2 + 100 * 4
    assert fsdp_gathered(weights, 4, "bf16", "fp32", keep=False) == 2 * 100 * 2 + 60 * 2 + 100 * 4
    assert fsdp_gathered(weights, 4, "bf16", "fp32", keep=2) == 2 * 100 * 2 + 40 * 2 + 60 * 2 // 2 + 100 * 4
    frozen = [Weight("embed", (10, 10), trained=False), *layers]
    assert fsdp_gathered(frozen, 4, "bf16", "fp32", keep=True) == 100 * 2 + 40 * 2 + 20 * (2 + 4)


def test_what_units_of_embedding_and_head_gather() -> None:
    def most(embedding: int, head: int, *, trained: bool = True) -> int:
        ends = [Weight("embed", (embedding,), trained, EMBEDDING), Weight("head", (head,), trained, HEAD)]
        layers = [Weight(f"l{unit}", (20,), trained, unit) for unit in (1, 2, 3)]
        return fsdp_gathered([Weight("norm", (1,), trained), *ends, *layers], 4, "bf16", "fp32", keep=True)

    assert most(1, 1) == 2 * 2 + 40 * 2 + 20 * (2 + 4), "layers need most"
    assert most(100, 1) == 2 * 2 + 100 * (2 + 4), "the embedding's gradient, once more on its way"
    assert most(100, 100) == 2 * 2 + 100 * 2 + 100 * (2 + 4) + 20 * 2, (
        "the head, its gradient and that in float32, a layer"
    )
    assert most(100, 1, trained=False) == 2 + 2 * 100 * 2, "what arrives, and the weight"


def test_embedding_and_head_are_counted_as_units_where_they_are_two(tmp_path: Path) -> None:
    units = {}
    for tied in (True, False):
        path = write_model(tmp_path / str(tied), tied=tied)
        found = shapes(ModelSource(path=str(path), role="trainer.policy"), FSDPConfig(), None)
        units[tied] = {weight.name: weight.unit for weight in found.weights if weight.unit <= 0}
    assert units[True] == {"model.embed_tokens.weight": 0, "model.norm.weight": 0}
    assert units[False] == {**units[True], "model.embed_tokens.weight": EMBEDDING, "lm_head.weight": HEAD}


def test_one_model_at_a_time_is_computed() -> None:
    policy = Need(weights=1, gradients=2, optimizer=4, activations=8)
    critic = Need(weights=10, gradients=20, optimizer=40, gathered=80, logprobs=160)
    buffers = Need(weights=1, gradients=2, optimizer=4, activations=8, stays=True)
    assert peak([policy, critic]) == 5 + 50 + 260
    assert peak([policy]) == 15
    assert peak([buffers, critic]) == 7 + 50 + 260
    assert peak([]) == 0


def configuration(model: Path, **settings: Any) -> Config:
    base = {"data.train_data": ["t"], "data.val_data": ["v"], "trainer.policy.model.path": str(model)}
    return build(Config, nested({**base, **settings}))


def test_the_largest_micro_batch(model_path: Path) -> None:
    config = configuration(model_path, **{"trainer.micro_train_batch_size_per_gpu": 3})
    assert (longest_sample(config), largest_micro_batch(config)) == (512 + 1024, 3 * 1536)
    for tokens, largest in ((1000, 1536), (9000, 9000)):
        config = configuration(model_path, **{"trainer.max_tokens_per_micro_batch": tokens})
        assert largest_micro_batch(config) == largest
    gpus = {"slurm.gpus_per_node": 1}
    assert largest_micro_batch(configuration(model_path)) == 1536
    assert largest_micro_batch(configuration(model_path, **gpus)) == 16384
    long = {"generator.sampling_params.max_generate_length": 20000}
    assert largest_micro_batch(configuration(model_path, **gpus, **long)) == 2 * 20512
    assert (
        largest_micro_batch(configuration(model_path, **gpus, **{"trainer.micro_forward_batch_size_per_gpu": 4}))
        == 1536
    )
    pairs = {"trainer.mode": "dpo", "trainer.max_length": 9000}
    assert longest_sample(configuration(model_path, **pairs)) == 9000
    assert largest_micro_batch(configuration(model_path, **pairs)) == 18000, "both answers are in one pass"
    assert largest_micro_batch(configuration(model_path, **pairs, **gpus)) == 36000


def test_parameters_in_host_memory_are_not_the_devices(model_path: Path) -> None:
    offload = {"trainer.policy.fsdp_config.cpu_offload": True, "trainer.algorithm.use_kl_loss": False}
    on_gpu = configuration(model_path, **offload, **{"slurm.gpus_per_node": 1})
    models = model_shapes(on_gpu.trainer, folder_of)
    assert estimate(on_gpu, models).needs["policy"].resident == 0
    on_cpu = configuration(model_path, **offload)
    assert estimate(on_cpu, models).needs["policy"].resident > 0


@pytest.mark.parametrize(("ranks", "dtype", "gathers"), [(1, "fp32", False), (1, "bf16", True), (2, "fp32", True)])
def test_one_rank_gathers_nothing_unless_it_casts(model_path: Path, ranks: int, dtype: str, gathers: bool) -> None:
    config = configuration(model_path, **{
        "trainer.placement.policy_num_gpus_per_node": ranks,
        "trainer.policy.fsdp_config.mixed_precision.param_dtype": dtype,
    })  # fmt: skip
    need = estimate(config, model_shapes(config.trainer, folder_of)).needs["policy"]
    assert (need.gathered > 0) == gathers


@pytest.mark.parametrize(("copies", "size"), [(1, 2), (2, 4)])
def test_copies_add_gradients_up_in_the_type_of_the_reduction(model_path: Path, copies: int, size: int) -> None:
    config = configuration(model_path, **{
        "trainer.algorithm.use_kl_loss": False,
        "trainer.placement.policy_num_gpus_per_node": 4,
        "trainer.policy.fsdp_config.fsdp_size": 4 // copies,
        "trainer.policy.fsdp_config.mixed_precision.master_dtype": "bf16",
        "trainer.policy.fsdp_config.mixed_precision.param_dtype": "bf16",
    })  # fmt: skip
    need = estimate(config, model_shapes(config.trainer, folder_of)).needs["policy"]
    assert need.gradients == need.weights // 2 * size


def test_a_pipeline_needs_most_where_most_lies(tmp_path: Path) -> None:
    # Qwen2.5-0.5B, which has 494,032,768 parameters
    AutoConfig.for_model(
        "qwen2",
        vocab_size=151936,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    ).save_pretrained(tmp_path)
    model = shapes(
        ModelSource(path=str(tmp_path), role="trainer.policy"), FSDPConfig(), PolicyConfig(model=ModelConfig(path=""))
    )
    assert model.count == 494_032_768
    megatron = "trainer.policy.megatron_config"
    settings = {
        "trainer.strategy": "megatron",
        "trainer.algorithm.use_kl_loss": False,
        "trainer.placement.policy_num_gpus_per_node": 8,
        f"{megatron}.tensor_model_parallel_size": 2,
        f"{megatron}.pipeline_model_parallel_size": 2,
    }
    found = estimate(configuration(tmp_path, **settings), {"policy": model})
    first, last = found.counts["policy"]
    assert last - first == 896  # the last norm; both have the embedding, which is tied
    need = found.needs["policy"]
    assert found.ranks == range(4, 8)
    assert (need.weights, need.gradients) == (2 * last, 4 * last)
    assert need.optimizer == 12 * -(-last // 2)  # two copies
    assert need.logprobs == 5 * 4 * 1024 * 151936 // 2
    interleaved = {f"{megatron}.pipeline_schedule": "Interleaved1F1B", f"{megatron}.pipeline_layers_per_stage": 4}
    more = estimate(configuration(tmp_path, **settings, **interleaved), {"policy": model})
    assert more.needs["policy"].activations > need.activations
    muon = configuration(tmp_path, **settings, **{"trainer.policy.optimizer_config.name": "Muon"})
    matrices = 12 * (2 * 896 * 896 + 2 * 128 * 896 + 3 * 4864 * 896) // 2  # of 12 layers, on two ranks
    assert need.optimizer - estimate(muon, {"policy": model}).needs["policy"].optimizer == 4 * matrices // 2


def test_adapters_of_a_reference_that_follows_are_counted_with_megatron(model_path: Path) -> None:
    settings = {
        "trainer.strategy": "megatron",
        "trainer.algorithm.use_kl_loss": True,
        "trainer.policy.model.lora.rank": 4,
    }
    needs = []
    for follows in (False, True):
        config = configuration(model_path, **settings, **{"trainer.update_ref_every_epoch": follows})
        needs.append(estimate(config, model_shapes(config.trainer, folder_of)).needs["policy"])
    alone, twice = needs
    assert twice.weights - alone.weights == alone.gradients // 2, "bf16, beside gradients in fp32"
    assert twice.gradients == alone.gradients


def test_experts_are_merged_with_their_adapters_one_layer_after_the_other() -> None:
    weights = [
        Weight(f"layers.{unit}.mlp.experts.base_layer.{name}", (4, *shape), trained=False, unit=unit)
        for unit in (1, 2)
        for name, shape in (("base_layer.gate_up_proj", (48, 32)), ("base_layer.down_proj", (32, 24)))
    ]
    one = 2 * 4 * (48 * 32 + 32 * 24)
    assert merged_experts(weights, "bf16", recompute=True) == 2 * one
    assert merged_experts(weights, "bf16", recompute=False) == 3 * one
    plain = [Weight("layers.1.mlp.experts.gate_up_proj", (4, 48, 32), trained=True, unit=1)]
    assert merged_experts(plain, "bf16", recompute=True) == 0
