"""What hpcrl does with models of a family, each compared with transformers' own forward pass, with its own attention, of one sample at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel

from hpcrl.config.sections.model import LoraConfig
from hpcrl.config.sections.trainer import TrainerConfig
from hpcrl.config.validate import build
from hpcrl.data.model_config import ConfiguredModel
from hpcrl.engines.embedded.batch import DecodingBatch, DecodingRequest
from hpcrl.engines.embedded.model import load_model
from hpcrl.engines.embedded.sampling import Sampling
from hpcrl.errors import DataError, EngineError
from hpcrl.trainer.backends.build import build_policy
from hpcrl.trainer.backends.fsdp.engine import FsdpPolicy
from hpcrl.trainer.backends.fsdp.model import PackedCritic, PackedPolicy, leave_out_dropout
from hpcrl.trainer.loss import build_objective
from hpcrl.trainer.models.build import policy_source
from hpcrl.trainer.models.forward import ForwardConfig
from hpcrl.trainer.models.hf import CriticSource
from hpcrl.trainer.models.lora import add_adapters, is_B
from hpcrl.trainer.models.packed.attention import PACKED
from hpcrl.trainer.packing import untrained_micro_batch
from hpcrl.types import MicroBatch
from tests.trainer.families.models import Family, config_of, model_of, write_model
from tests.trainer.material import world_of_one
from tests.trainer.models.trees import ALGORITHM, FORWARD, A, B, C, D, E, both, trained

# longer than the windows, and of lengths that no padding hides
TREE = [A + B + C, A + B + D + E, A + E, B, D + C]


def one_by_one(model: PreTrainedModel, batch: MicroBatch) -> dict[str, torch.Tensor]:
    """Return gradients by name of the objective, with the logits that transformers gives for each sample alone."""
    parts = zip(batch.token_ids.split(batch.lengths), batch.labels.split(batch.lengths), strict=True)
    logprobs, entropies = [], []
    for ids_T, labels_T in parts:
        logits_TV = model(input_ids=ids_T[None], use_cache=False).logits[0].float() / FORWARD.temperature
        logprobs_TV = logits_TV.log_softmax(-1)
        logprobs.append(logprobs_TV.gather(1, labels_T[:, None])[:, 0])
        entropies.append(-(logprobs_TV.exp() * logprobs_TV).sum(-1))
    kept_P = torch.zeros(len(batch.token_ids)).index_fill(0, batch.head_rows, 1.0)
    loss, _ = build_objective(ALGORITHM)(batch, torch.cat(logprobs) * kept_P, torch.cat(entropies) * kept_P)
    model.zero_grad()
    loss.backward()
    return {"loss": loss.detach()} | {
        name: each.grad for name, each in model.named_parameters() if each.grad is not None
    }


def expect_close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert any(bool(gradient.any()) for gradient in expected.values())
    for name, value in expected.items():
        bound = 3e-5 * (1 + float(value.abs().max()))  # what rounding makes of the gradients of deep random models
        torch.testing.assert_close(
            found[name], value, atol=bound, rtol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
        )


def of_packed(policy: PackedPolicy, batch: MicroBatch) -> dict[str, torch.Tensor]:
    told, gradients = trained(policy, batch)
    return {"loss": told["loss"]} | {name.removeprefix("model."): value for name, value in gradients.items()}


def packed_samples(family: Family, _: Path) -> None:
    policy = PackedPolicy(model_of(family, PACKED), FORWARD)
    whole, _ = both(TREE)
    expected = one_by_one(model_of(family, "eager"), whole)
    expect_close(of_packed(policy, whole), expected)
    policy.train()
    leave_out_dropout(policy.model)
    policy.model.gradient_checkpointing_enable({"use_reentrant": False})
    expect_close(of_packed(policy, whole), expected)


def common_prefixes(family: Family, _: Path) -> None:
    policy = PackedPolicy(model_of(family, PACKED), FORWARD)
    whole, shared = both(TREE)
    assert shared.prefixes is not None
    expect_close(of_packed(policy, shared), of_packed(policy, whole))


def adapters(family: Family, _: Path) -> None:
    whole, shared = both(TREE)
    models = model_of(family, PACKED), model_of(family, "eager")
    for model in models:
        add_adapters(model, LoraConfig(rank=3), "trainer.policy", torch.float32, 0)
        draw = torch.Generator().manual_seed(2)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if is_B(name):
                    parameter.copy_(0.1 * torch.randn(parameter.shape, generator=draw))
    policy, expected = PackedPolicy(models[0], FORWARD), one_by_one(models[1], whole)
    expect_close(of_packed(policy, whole), expected)
    expect_close(of_packed(policy, shared), expected)


def critic(family: Family, path: Path) -> None:
    source = CriticSource(path=str(write_model(family, path)), role="trainer.critic", head="value_head", seed=0)
    models = [source.whole(torch.float32, attention).eval() for attention in (PACKED, "eager")]
    whole, _ = both(TREE)
    draw = torch.randn(len(whole.token_ids), generator=torch.Generator().manual_seed(3))
    (values_P,) = PackedCritic(models[0], FORWARD).run(whole)
    head = cast(Any, models[1].get_output_embeddings())
    rows = [
        models[1](input_ids=ids_T[None], use_cache=False).last_hidden_state[0] @ head.weight[0]
        for ids_T in whole.token_ids.split(whole.lengths)
    ]
    torch.testing.assert_close(values_P, torch.cat(rows), atol=1e-5, rtol=1e-5)
    gradients = []
    for model, values in zip(models, (values_P, torch.cat(rows)), strict=True):
        (values * draw).sum().backward()
        gradients.append({name: each.grad for name, each in model.named_parameters() if each.grad is not None})
    expect_close(*gradients)


def embedded_engine(family: Family, path: Path) -> None:
    source = ConfiguredModel(path=str(write_model(family, path)), role="trainer.policy")
    batch = DecodingBatch(load_model(source, "float32", torch.device("cpu")), [], str, prefill_tokens=100)
    requests = [DecodingRequest(prompt, [1, 2], Sampling(max_tokens=9, ignore_eos=True), 9) for prompt in (A + B, C)]
    batch.join(requests, 0)
    while batch.living:
        batch.step(0)
    policy = PackedPolicy(model_of(family, PACKED), ForwardConfig(temperature=1.0, chunk_rows=100))
    for request in requests:
        for said in request.responses.result():
            tokens = untrained_micro_batch([*request.prompt, *said.token_ids])
            with torch.no_grad():
                logprobs_P, *_ = policy.run(tokens)
            torch.testing.assert_close(
                torch.tensor(said.logprobs), logprobs_P[len(request.prompt) - 1 : -1], atol=1e-4, rtol=1e-4
            )


def loading_and_exports(family: Family, path: Path) -> None:
    """What is read for training computes what was written, and what is written again is the same."""
    exact = {"mixed_precision": {"param_dtype": "fp32"}}
    trainer = build(
        TrainerConfig, {"policy": {"model": {"path": str(write_model(family, path))}, "fsdp_config": exact}}
    )
    whole, _ = both(TREE)
    policy_source(trainer).empty(torch.float32, PACKED)  # what is refused, before ranks have joined
    PackedPolicy(model_of(family, PACKED), FORWARD)
    with world_of_one() as world:
        engine = build_policy(trainer, FORWARD.temperature, world)
        assert isinstance(engine, FsdpPolicy)
        (found_P,) = engine.logprobs([whole])
        pieces = engine.export_pieces(torch.float32)
        written: dict[str, torch.Tensor] = {}
        for piece in engine.export_weights(torch.float32, [0] * len(pieces)):
            written |= piece
    with torch.no_grad():
        expected_P, *_ = PackedPolicy(model_of(family, PACKED), FORWARD).run(whole)
    torch.testing.assert_close(found_P, expected_P, atol=1e-5, rtol=1e-5)
    stored = load_file(path / "model.safetensors")
    assert written.keys() == stored.keys()
    for name, tensor in stored.items():
        assert torch.equal(written[name], tensor.float()), name


def megatron(family: Family, path: Path) -> None:
    """Whether it is a model that Megatron's layers compute; tests/trainer/backends/megatron compares what they do."""
    from hpcrl.trainer.backends.megatron.architecture import architecture_of

    config = config_of(family)
    config.sliding_window = None  # of models that have one by choice
    architecture_of(config, str(path))


def vllm(family: Family, _: Path) -> None:
    """Whether vLLM has the architecture, not whether it runs on this machine."""
    from vllm import ModelRegistry

    name = type(model_of(family, "eager")).__name__
    if name not in ModelRegistry.get_supported_archs():
        raise EngineError(f"vLLM has no {name}")


@dataclass(frozen=True)
class Feature:
    """A column of the table.

    Attributes:
        check: raises DataError or EngineError where hpcrl refuses it, and AssertionError where it is wrong.
        quick: as of Family.
    """

    name: str
    check: Callable[[Family, Path], None]
    quick: bool = True


FEATURES = [
    Feature("packed", packed_samples),
    Feature("shared prefixes", common_prefixes),
    Feature("LoRA", adapters),
    Feature("critic", critic),
    Feature("load, export", loading_and_exports),
    Feature("embedded engine", embedded_engine),
    Feature("vLLM", vllm, quick=False),
    Feature("Megatron", megatron, quick=False),
]


def works(family: Family, feature: Feature, path: Path) -> bool:
    """Return whether hpcrl does it, and False where it says that it does not."""
    try:
        feature.check(family, path)
    except (DataError, EngineError):
        return False
    return True
