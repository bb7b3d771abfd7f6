"""What tests/trainer/backends/megatron/test_weights.py runs in its ranks: weights_scenarios.py JSON, as scenarios.py beside this folder."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from hpcrl.config.sections.model import ModelConfig, PolicyConfig
from hpcrl.errors import DataError
from hpcrl.trainer.backends.megatron import shims
from hpcrl.trainer.backends.megatron.architecture import Architecture, architecture_of
from hpcrl.trainer.backends.megatron.names import hf_names
from hpcrl.trainer.backends.megatron.trainable import mark_trained
from hpcrl.trainer.backends.megatron.weights import export, export_pieces, load
from hpcrl.trainer.distributed import World
from hpcrl.trainer.models.hf import CriticSource, ModelSource
from hpcrl.trainer.saving.shards import ShardPlan
from tests.trainer.backends.megatron.material import CONFIGS, VOCABULARY, build, config_of, named, start
from tests.trainer.scenarios import main


def source_of(path: Path) -> ModelSource:
    return ModelSource(path=str(path), role="trainer.policy")


def architecture(name: str) -> Architecture:
    return architecture_of(config_of(name), name)


def chosen(layout: dict[str, int]) -> list[str]:
    """Return the models that ranks can share so."""
    mixtures = layout.get("ep", 1) > 1
    return [name for name in CONFIGS if not mixtures or "num_moe_experts" in architecture(name).transformer]


def on_disk(path: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in path.glob("*.safetensors") for name, tensor in load_file(file).items()}


def exported(
    chunks: Any, name: str, value: Any, dtype: torch.dtype, world: World, path: Path
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return what this rank gets to write, and what it should get of the files at `path`."""
    pieces, found, expected = export_pieces(chunks, architecture(name), dtype, world), {}, {}
    owners = ShardPlan.of(pieces, world.size).owners
    given = export(chunks, architecture(name), value, dtype, owners)
    there = on_disk(path)
    assert sorted(there) == sorted(name for piece in pieces for name in piece.tensors)
    assert set(owners) == set(range(world.size)), "each rank writes"
    for piece, owner, got in zip(pieces, owners, given, strict=True):
        assert not got.keys() & found.keys()
        assert all(tensor.device.type == "cpu" and tensor.dtype == dtype for tensor in got.values())
        found |= got
        expected |= {name: there[name] for name in piece.tensors} if owner == world.rank else {}
    return found, expected


def whole(chunks: Any, model: Architecture, value: Any, world: World) -> dict[str, torch.Tensor]:
    """Return all that is exported, in float32, on rank 0."""
    owners = [piece.ranks[0] for piece in export_pieces(chunks, model, torch.float32, world)]
    pieces = export(chunks, model, value, torch.float32, owners)
    mine = {name: tensor.clone() for piece in pieces for name, tensor in piece.items()}
    everyones: list[Any] = [None] * world.size
    torch.distributed.all_gather_object(everyones, mine, world.control)
    return {name: tensor for found in everyones for name, tensor in found.items()} if world.first else {}


def differing(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> list[str]:
    return sorted(
        name
        for name in found.keys() | expected.keys()
        if name not in found or name not in expected or not torch.equal(found[name], expected[name])
    )


def round_trip(world: World, options: dict[str, Any]) -> None:
    """Load each model and export it again, in each layout; tell what is not what it was."""
    told = {}
    for layout in options["layouts"]:
        start(layout, world)
        for name in chosen(layout):
            chunks, path = build(architecture(name), layout), Path(options["models"]) / name
            load(chunks, architecture(name), source_of(path), world)
            found, expected = exported(chunks, name, lambda parameter: parameter.data, torch.float32, world, path)
            told[f"{layout} {name}"] = differing(found, expected) + padding(chunks, layout)
    everywhere = world.sum([float(len(found)) for found in told.values()])
    if world.first:
        Path(options["out"]).write_text(json.dumps({"differing": told, "everywhere": everywhere}))


def padding(chunks: Any, layout: dict[str, int]) -> list[str]:
    """Return the padded matrices that are not 0 where they are padded: the last row of the last rank."""
    tensor, wrong = layout.get("tp", 1), []
    rest = -VOCABULARY % tensor
    for name, value in named(chunks).items():
        if ("word_embeddings" in name or "output_layer" in name) and value.tensor_model_parallel and rest:  # pyright: ignore[reportAttributeAccessIssue]
            last = torch.distributed.get_rank() % tensor == tensor - 1
            if last and value[-rest:].any():
                wrong.append(name)
    return wrong


def cast(world: World, options: dict[str, Any]) -> None:
    """Export something else than the data, in another type."""
    start(options["layout"], world)
    chunks = build(architecture("qwen2-tied"), options["layout"])
    path = Path(options["models"]) / "qwen2-tied"
    load(chunks, architecture("qwen2-tied"), source_of(path), world)
    found, there = exported(chunks, "qwen2-tied", lambda parameter: 2 * parameter.data, torch.bfloat16, world, path)
    expected = {name: (2 * value).bfloat16() for name, value in there.items()}
    if world.first:
        Path(options["out"]).write_text(json.dumps(differing(found, expected)))


def logits(world: World, options: dict[str, Any]) -> None:
    """Compare logits with those of transformers, without pipelines; tell the largest differences, and the spread."""
    ids, told = torch.randint(0, VOCABULARY, (3, 40), generator=torch.Generator().manual_seed(5)), {}
    places = torch.arange(ids.shape[1]).expand_as(ids)
    for layout in options["layouts"]:
        start(layout, world)
        for name in chosen(layout):
            path = Path(options["models"]) / name
            (chunk,) = build(architecture(name), layout)
            load([chunk], architecture(name), source_of(path), world)
            chunk.rotary_pos_emb.inv_freq = architecture(name).inv_freq
            model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
            with torch.no_grad():
                found: Any = chunk.eval()(ids, places, None)
                expected = model(ids).logits
            difference = (found[..., :VOCABULARY] - expected).abs().max().item()
            told[f"{layout} {name}"] = [*world.max([difference]), expected.std().item()]
    if world.first:
        Path(options["out"]).write_text(json.dumps(told))


def critic(world: World, options: dict[str, Any]) -> None:
    """A head that is not on disk is the one that transformers get; one that is there is read."""
    told = {}
    for layout in options["layouts"]:
        start(layout, world)
        for kind in ("fresh", "saved"):
            source = CriticSource(path=options[kind], role="trainer.critic", head="score", seed=4)
            expected = source.whole(torch.float32, "sdpa").get_output_embeddings().weight  # pyright: ignore[reportOptionalMemberAccess]
            model = replace(architecture("qwen2-tied"), tied=False, value_head="score")
            chunks = build(model, layout)
            load(chunks, model, source, world)
            found = whole(chunks, model, lambda parameter: parameter.data, world)
            if world.first:
                body = {
                    f"model.{name.removeprefix('model.')}": value
                    for name, value in on_disk(Path(options[kind])).items()
                }
                body = {name: value for name, value in body.items() if "score" not in name}
                told[f"{layout} {kind}"] = differing(found, body | {"score.weight": expected.detach()})
    if world.first:
        Path(options["out"]).write_text(json.dumps(told))


def _attempt(world: World, what: Callable[[], None]) -> str:
    """Return the DataError that all ranks raise, or what went otherwise."""
    told = ""
    try:
        what()
    except DataError as error:
        told = str(error)
    alike = world.sum([float(bool(told))])[0]
    return told if alike == world.size else f"{alike:g} of {world.size} ranks raised: {told}"


def refused(world: World, options: dict[str, Any]) -> None:
    """What cannot be loaded is an error on all ranks."""
    start(options["layout"], world)
    told = {}
    for name, (model, path) in options["models"].items():
        chunks = build(architecture(model), options["layout"])

        def attempt(chunks: Any = chunks, model: str = model, path: str = path) -> None:
            load(chunks, architecture(model), source_of(Path(path)), world)

        told[name] = _attempt(world, attempt)
    if world.first:
        Path(options["out"]).write_text(json.dumps(told))


def freezing(world: World, options: dict[str, Any]) -> None:
    """Tell what is trained after each way of freezing, or how it is refused."""
    start(options["layout"], world)
    told = {}
    for case, (model, trainable_map, pattern) in options["cases"].items():
        chunks, path = build(architecture(model), options["layout"]), Path(options["models"]) / model

        def attempt(
            chunks: Any = chunks,
            model: str = model,
            path: Path = path,
            maps: Any = trainable_map,
            patterns: Any = pattern,
        ) -> None:
            section = PolicyConfig(model=ModelConfig(path=""), trainable_map=maps, freeze_pattern=patterns)
            mark_trained(chunks, architecture(model), source_of(path), section, world)

        error = _attempt(world, attempt)
        names = hf_names(chunks, architecture(model))
        trained = sorted({name for parameter, held in names.items() if parameter.requires_grad for name in held})
        everywhere = world.all_gather(lambda trained=trained: trained)
        told[case] = {"error": error, "trained": sorted({name for rank in everywhere for name in rank})}
    if world.first:
        Path(options["out"]).write_text(json.dumps(told))


SCENARIOS = {
    "round_trip": round_trip,
    "cast": cast,
    "logits": logits,
    "critic": critic,
    "refused": refused,
    "freezing": freezing,
}

if __name__ == "__main__":
    shims.install()
    main(SCENARIOS)
