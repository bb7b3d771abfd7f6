"""An engine that does not hold the version that it was given is found at once, whatever went wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import torch
from safetensors.torch import load_file, save_file

from hpcrl.config import InferenceEngineConfig
from hpcrl.data.weight_files import Probe, PublishedWeights
from hpcrl.engines.vllm.client import EngineClient
from hpcrl.errors import EngineError
from hpcrl.rollout.engines.weight_check import check_ranks, difference, tolerance
from tests.rollout.conftest import WithEngine
from tests.rollout.material import (
    as_version,
    probe_of,
    publish,
)

LAST = "model.layers.1.mlp.down_proj.weight"


def rewritten(weights: PublishedWeights, change: Callable[[dict[str, torch.Tensor]], Any]) -> PublishedWeights:
    """Change the file of a version, whose digests stay as they were published; its size is right all the same."""
    (file,) = weights.path.glob("*.safetensors")
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)
    manifest = json.loads((weights.path / "manifest.json").read_text())
    manifest["files"][file.name]["size"] = file.stat().st_size
    return recommitted(weights, manifest)


def recommitted(weights: PublishedWeights, manifest: dict[str, Any]) -> PublishedWeights:
    from hashlib import blake2b

    text = json.dumps(manifest)
    (weights.path / "manifest.json").write_text(text)
    mark = {"attempt": 1, "manifest": blake2b(text.encode(), digest_size=16).hexdigest()}
    (weights.path / "COMMIT").write_text(json.dumps(mark))
    return PublishedWeights.read(weights.path)


def test_what_was_published_is_proven(with_engine: WithEngine[Any], models: list[Path], tmp_path: Path) -> None:
    async def play(engine: EngineClient) -> None:
        weights = publish(models[1], tmp_path / "v000001", 1, probe=probe_of(models[1]))
        await engine.update_weights(weights)
        found = await engine.probe(weights, "float32", None)
        assert found is not None
        assert 0 < found < 1e-4
        assert await engine.probe(as_version(models[1], 1), "float32", None) is None, "there was no probe"

    with_engine(play)


def test_decoding_that_differs_from_prefill(with_engine: WithEngine[Any], models: list[Path], tmp_path: Path) -> None:
    """As with CUDA graphs that hold other weights; it is looked for once per start of the engine."""
    weights = publish(models[1], tmp_path / "v000001", 1, probe=probe_of(models[1]))
    biased = models[1].parent / "biased"  # for engines/vllm/slowly.py

    async def play(engine: EngineClient) -> None:
        engine._who = "the inference engine of rollout-5"
        assert not engine._unchecked, "without graphs there is nothing to compare"
        engine._unchecked = True
        await engine.update_weights(weights)
        biased.touch()
        with pytest.raises(EngineError, match=r"rollout-5 decodes with other weights than version 1: .* 0\.01 is"):
            await engine.probe(weights, "float32", None)
        biased.unlink()
        await engine.probe(weights, "float32", None)
        biased.touch()
        await engine.probe(weights, "float32", None)

    try:
        with_engine(play)
    finally:
        biased.unlink()


def test_a_tensor_that_is_withheld(with_engine: WithEngine[Any], models: list[Path], tmp_path: Path) -> None:
    """vLLM itself takes k_proj to be there where q_proj is: they are one parameter."""
    name = "model.layers.1.self_attn.k_proj.weight"
    weights = rewritten(publish(models[1], tmp_path / "v000001", 1), lambda tensors: tensors.pop(name))

    async def play(engine: EngineClient) -> None:
        engine._who = "the inference engine of rollout-5"
        with pytest.raises(EngineError, match=rf"rollout-5 was given .* version 1, but its rank 0 of 1 holds .*{name}"):
            await engine.update_weights(weights)
        assert engine.version == 0

    with_engine(play)


def test_a_tensor_that_even_the_trainer_forgot(
    with_engine: WithEngine[Any], models: list[Path], tmp_path: Path
) -> None:
    """Digests agree, since it was not published; what the model computes does not."""
    name = "model.layers.1.self_attn.k_proj.weight"
    weights = publish(models[1], tmp_path / "v000001", 1, probe=probe_of(models[1]))
    weights = rewritten(weights, lambda tensors: tensors.pop(name))
    manifest = json.loads((weights.path / "manifest.json").read_text())
    del manifest["tensors"][name]
    weights = recommitted(weights, manifest)

    async def play(engine: EngineClient) -> None:
        engine._who = "the inference engine of rollout-5"
        await engine.update_weights(weights)
        with pytest.raises(EngineError, match=r"rollout-5 .* version 1: .* differ by [\d.]+ in the mean, and 0\.01 is"):
            await engine.probe(weights, "float32", None)
        assert (await engine.probe(weights, "float32", 1e6) or 0) > 0.01, "the setting decides"

    with_engine(play)


def test_a_file_of_the_version_before(with_engine: WithEngine[Any], models: list[Path], tmp_path: Path) -> None:
    weights = publish(models[1], tmp_path / "v000002", 2)
    (new,), (old,) = weights.path.glob("*.safetensors"), as_version(models[0], 0).path.glob("*.safetensors")
    new.write_bytes(old.read_bytes())

    async def play(engine: EngineClient) -> None:
        with pytest.raises(
            EngineError, match=r"version 2, but its rank 0 of 1 holds version 2, other tensors than were"
        ):
            await engine.update_weights(weights)

    with_engine(play)


def test_a_single_bit(with_engine: WithEngine[Any], models: list[Path], tmp_path: Path) -> None:
    weights = publish(models[1], tmp_path / "v000002", 2)
    (file,) = weights.path.glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)

    async def play(engine: EngineClient) -> None:
        with pytest.raises(EngineError, match=r"other tensors than were published: \S+$"):
            await engine.update_weights(weights)

    with_engine(play)


def test_ranks_that_do_not_answer_or_have_nothing(models: list[Path], tmp_path: Path) -> None:
    weights = publish(models[1], tmp_path / "v000003", 3)
    good = {"of": 2, **weights.held(weights.tensors)}
    check_ranks([{"rank": 0, **good}, {"rank": 1, **good}], weights, "it")
    halves = [{"rank": rank, "of": 2, **weights.held(weights.share(rank, 2), rank, 2)} for rank in (0, 1)]
    check_ranks(halves, weights, "it")
    for proofs, said in (
        ([], r"only \[\] report"),
        ([{"rank": 0, **good}], r"of its ranks only \[0\] report"),
        ([{"rank": 0, **good}, {"rank": 1, "of": 2}], "rank 1 of 2 has loaded nothing"),
        ([{"rank": 0, **good}, {"rank": 1, **good, "version": 2}], "rank 1 of 2 holds version 2"),
        ([halves[0], {**halves[0], "rank": 1}], "rank 1 of 2 has looked at share 0 of 2"),
        ([halves[0], {**halves[1], "digest": good["digest"]}], "rank 1 of 2 holds version 3"),
        ([{**halves[0], "of": 1}], "rank 0 of 1 has looked at share 0 of 2"),
    ):
        with pytest.raises(EngineError, match=said):
            check_ranks(proofs, weights, "it")


def test_differences_and_what_is_allowed() -> None:
    probe = Probe([4, 7, 9], [-1.0, -2.0], "float32")
    assert difference(probe.logprobs, [-1.5, -2.1]) == pytest.approx(0.3)
    assert tolerance(probe, "float32", None) < tolerance(probe, "bfloat16", None)
    assert tolerance(replace(probe, dtype="bfloat16"), "float32", None) == tolerance(probe, "bfloat16", None)
    assert tolerance(probe, "float32", 0.7) == 0.7
    for name in get_args(get_type_hints(InferenceEngineConfig)["quantization"]):
        for own in get_args(name):
            assert tolerance(probe, own, None) > tolerance(probe, "bfloat16", None), "quantized weights are coarser"
