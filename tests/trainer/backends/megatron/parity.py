"""What test_parity.py has its ranks do (tests/trainer/ranks.py): engines of both kinds train the same batches, and tell what they saw."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from safetensors.torch import save_file
from torch.utils.flop_counter import FlopCounterMode
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import revert_weight_conversion

from hpcrl.config import TrainerConfig
from hpcrl.config.validate import build
from hpcrl.errors import HpcrlError
from hpcrl.rundir.commit import read_json
from hpcrl.rundir.layout import Run
from hpcrl.trainer.advantages import estimate_advantages
from hpcrl.trainer.backends.base import Objective, UpdateResult
from hpcrl.trainer.backends.build import build_critic, build_policy
from hpcrl.trainer.backends.fsdp import sharding
from hpcrl.trainer.backends.fsdp.optimizer import make_optimizer
from hpcrl.trainer.backends.megatron.adapters.whole import merging, whole_adapters
from hpcrl.trainer.backends.megatron.engine import MegatronEngine
from hpcrl.trainer.batching import MicroBatchLimit
from hpcrl.trainer.critic.loss import CRITIC_REDUCTION, build_critic_objective
from hpcrl.trainer.distributed import World
from hpcrl.trainer.loss import build_objective
from hpcrl.trainer.models.lora import merging as merged_by_peft
from hpcrl.trainer.models.lora import own_parameters
from hpcrl.trainer.packing import MiniBatch, regrouped
from hpcrl.trainer.rng import random_state, set_random_state
from hpcrl.types import Batch
from tests.trainer.backends.megatron.leave import leave_groups
from tests.trainer.backends.megatron.weights_scenarios import whole as whole_export
from tests.trainer.material import load, score, train, views
from tests.trainer.scenarios import ALGORITHM, laid_over, loaded

Values = dict[str, torch.Tensor]

LAYOUT = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "pipeline_layers_per_stage",
)
_OPTIMIZER = {
    "lr": 2e-3,
    "scheduler": "linear",
    "num_warmup_steps": 1,
    "eps": 1e-3,  # Adam makes whole steps of gradients that are no more than rounding, but for this
}
DEFAULTS: dict[str, Any] = {
    "policy": {
        "optimizer_config": _OPTIMIZER,
        "fsdp_config": {"mixed_precision": {"param_dtype": "fp32"}},
        "megatron_config": {"dtype": "fp32"},
    },
    "critic": {
        "optimizer_config": _OPTIMIZER,
        "fsdp_config": {"mixed_precision": {"param_dtype": "fp32"}},
    },
    "ref": {"megatron_config": {"dtype": "fp32"}},
    "algorithm": {"use_kl_loss": True, "use_entropy_loss": True},
    "train_batch_size": 4,
    "policy_mini_batch_size": 2,
    "critic_mini_batch_size": 2,
    "gradient_checkpointing": False,
    "seed": 5,
}


def play(world: World, options: dict[str, Any]) -> None:
    """Go each way with an engine of its own; ways of one layout that follow each other share its groups."""
    for way in options["ways"]:
        trainer = build(TrainerConfig, laid_over(DEFAULTS, way["trainer"]))
        if trainer.strategy == "megatron":
            _lay_out(world, tuple(getattr(trainer.policy.megatron_config, name) for name in LAYOUT))
        kind = CriticWay if way.get("critic") else PolicyWay
        kind(world, trainer, way).go()


_layout: tuple[int | None, ...] = ()


def _lay_out(world: World, layout: tuple[int | None, ...]) -> None:
    global _layout
    if layout != _layout and parallel_state.model_parallel_is_initialized():
        leave_groups(world)
    _layout = layout


class Way:
    """An engine that does what it is told, and what is seen of it: verbs by name, each with an argument."""

    engine: Any

    def __init__(self, world: World, trainer: TrainerConfig, way: dict[str, Any]) -> None:
        self.world, self.trainer, self.way = world, trainer, way
        self.run, self.limit = Run.open(way["run"]), MicroBatchLimit(way.get("micro", 2), way.get("tokens"))
        self.told: dict[str, Any] = {"updates": [], "error": ""}
        self.tensors: Values = {}
        self.of_samples: Values = {}
        self.written: list[tuple[Any, Path]] = []

    def go(self) -> None:
        try:
            self.engine = self.made()
            self.engine.schedule(8)
            for verb, argument in self.way["do"]:
                getattr(self, verb)(argument)
        except HpcrlError as error:
            self.told["error"] = f"{type(error).__name__}: {error}"
        alike = self.world.sum([float(bool(self.told["error"]))])[0]
        assert alike in (0, self.world.size), self.told["error"]
        self.tell()

    def tell(self) -> None:
        out = self.way["out"]
        if not self.told["error"]:
            self.told["done"] = self.engine.updates
            self.tensors |= {f"weights.{name}": value for name, value in weights(self.engine, self.world).items()}
            if self.engine.data.is_leader:
                save_file(self.of_samples, f"{out}.{self.engine.data.rank}.samples")
        if self.world.first:
            save_file({name: value.contiguous() for name, value in self.tensors.items()}, out)
            Path(f"{out}.json").write_text(json.dumps(self.told))
        self.world.barrier()

    def made(self) -> Any:
        raise NotImplementedError

    def updates(self, step: int) -> list[tuple[MiniBatch, Objective]]:
        """Return the mini-batches of a step, scored, each with its objective."""
        raise NotImplementedError

    def batch(self, step: int) -> Batch:
        written: Any = read_json(self.run.batch(step))
        return Batch.from_json(written)

    def train(self, step: int) -> None:
        for number, (mini, objective) in enumerate(self.updates(step)):
            gradients: Values = {}
            update = self._watching(lambda mini=mini, objective=objective: self._trained(mini, objective), gradients)
            self.told["updates"].append(
                update.sums | update.report.experts | {"grad_norm": update.report.grad_norm, "lr": update.report.lr}
            )
            assert not update.report.skipped
            self.tensors |= {f"{step}.{number}.gradient.{name}": value for name, value in gradients.items()}

    def _trained(self, mini: MiniBatch, objective: Objective) -> UpdateResult:
        return train(self.engine, mini, objective)

    def _watching(self, what: Callable[[], UpdateResult], seen: Values) -> UpdateResult:
        step = self.engine.step

        def stepping() -> Any:
            seen.update(gradients(self.engine, self.world))
            return step()

        self.engine.step = stepping
        try:
            return what()
        finally:
            self.engine.step = step

    def skip(self, step: int) -> None:
        """Make gradients and forget them."""
        mini, objective = self.updates(step)[0]
        mini.tokens = 0
        assert self._trained(mini, objective).report.skipped

    def poison(self, step: int) -> None:
        """Make gradients that are not finite on one rank."""
        mini, objective = self.updates(step)[0]
        if self.engine.data.rank == 0 and mini.rows.weights:
            mini.rows.weights[0] = math.inf
        report = self._trained(mini, objective).report
        assert report.skipped
        assert not math.isfinite(report.grad_norm)

    def seed(self, number: int) -> None:
        """Let what is drawn at random follow from a number."""
        torch.manual_seed(number)
        state = torch.get_rng_state()
        set_random_state(dict.fromkeys(random_state(self.world.device), state), self.world.device)

    def save(self, path: str) -> None:
        self.engine.save(self._directory(path), self.world.control)

    def snapshot(self, path: str) -> None:
        self.written.append((self.engine.snapshot(), self._directory(path)))

    def write(self, _argument: None) -> None:
        for writer, path in self.written:
            writer(path, self.world.control)

    def _directory(self, path: str) -> Path:
        if self.world.first:
            Path(path).mkdir()
        self.world.barrier()
        return Path(path)

    def leave(self, _argument: None) -> None:
        """Move the state to host memory as for engines on the same GPUs; on CPUs too, from one place to another."""
        self.engine._leave()
        chunks = self.engine._wrapped
        for parameter in [each for chunk in chunks for each in chunk.parameters() if each.requires_grad]:
            held = parameter.data
            parameter.data = held.double()  # torch drops the accumulator of its gradient, as with another device
            parameter.data = held
        buffers = [buffer for chunk in chunks for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]
        held = [data for buffer in buffers for data in (buffer.param_data, buffer.grad_data) if data is not None]
        assert held
        assert not any(data.untyped_storage().nbytes() for data in held)

    def come_back(self, _argument: None) -> None:
        self.engine.to_device()

    def restore(self, path: str) -> None:
        self.engine.restore(Path(path))

    def restore_weights(self, path: str) -> None:
        self.engine.restore_weights(Path(path))

    def keep(self, name: str) -> None:
        """Show the weights as they are now."""
        self.tensors |= {f"{name}.{key}": value.clone() for key, value in weights(self.engine, self.world).items()}


class PolicyWay(Way):
    def made(self) -> Any:
        engine = build_policy(self.trainer, 0.9, self.world)
        if self.way.get("one_A"):
            have_one_A(engine)
        return engine

    def updates(self, step: int) -> list[tuple[MiniBatch, Objective]]:
        batch = self.batch(step)
        minis = loaded(self.run, batch, ALGORITHM, 2, self.engine.data, self.limit)
        for mini in minis:
            score(self.engine, mini, MicroBatchLimit(4, self.limit.tokens), old=True, reference=True)
            mini.rows.scores.entropies = mini.scored(self.engine.entropies)
            if step == 1:
                self._norms(mini)
            for row in views([mini.rows]):
                place, scores = f"{row.ref.group}.{row.ref.index}", mini.rows.scores
                self.of_samples[f"{step}.policy.{place}"] = row.of(scores.old_logprobs).clone()
                self.of_samples[f"{step}.reference.{place}"] = row.of(scores.ref_logprobs).clone()
                self.of_samples[f"{step}.entropy.{place}"] = row.of(scores.entropies).clone()
        distillation = self.trainer.distillation
        if distillation.enable:
            for mini in minis:
                self._taught(step, mini, distillation.top_k)
        return [(mini, build_objective(ALGORITHM, distillation)) for mini in minis]

    def _norms(self, mini: MiniBatch) -> None:
        logprobs_P, norms_P = mini.scored_both(self.engine.logprobs_and_norms)
        assert mini.rows.scores.old_logprobs is not None
        assert torch.equal(logprobs_P, mini.rows.scores.old_logprobs)
        for row in views([mini.rows]):
            self.of_samples[f"1.norms.{row.ref.group}.{row.ref.index}"] = row.of(norms_P).clone()

    def _taught(self, step: int, mini: MiniBatch, top_k: int) -> None:
        """Let the reference be the teacher, at the tokens that it finds most probable, and show what the policy says of these."""
        scores, reference = mini.rows.scores, partial(self.engine.top_logprobs, reference=True)
        logprobs_P, scores.teacher_ids, scores.teacher_top = mini.scored_top(reference, top_k)
        _, ids_PK, policy_PK = mini.scored_top(self.engine.top_logprobs, top_k)
        assert torch.equal(ids_PK, scores.teacher_ids), "those that are given"
        assert scores.ref_logprobs is not None
        torch.testing.assert_close(logprobs_P, scores.ref_logprobs)
        trained_P = mini.rows.loss_mask > 0
        for row in views([mini.rows]):
            place, trained = f"{row.ref.group}.{row.ref.index}", row.of(trained_P)
            self.of_samples[f"{step}.ids.{place}"] = row.of(scores.teacher_ids)[trained].float()
            self.of_samples[f"{step}.top.{place}"] = row.of(scores.teacher_top)[trained].clone()
            self.of_samples[f"{step}.policy_top.{place}"] = row.of(policy_PK)[trained].clone()

    def head_operations(self, step: int) -> None:
        """Tell what scoring all tokens takes more than scoring the trained ones, all ranks together, and the tokens that it is more."""
        (mini, *_) = loaded(self.run, self.batch(step), ALGORITHM, 2, self.engine.data, self.limit)
        batch, counts = mini.rows.whole(), []
        for given in (batch, replace(batch, head_rows=torch.arange(len(batch.token_ids)))):
            with FlopCounterMode(display=False) as counter:
                list(self.engine.logprobs([given]))
            counts.append(counter.get_total_flops())
        tokens = len(batch.token_ids) - len(batch.head_rows) if self.engine.data.is_leader else 0
        self.told["head_operations"] = self.world.sum([float(counts[1] - counts[0]), float(tokens)])

    def reset_reference(self, fresh: bool) -> None:
        self.engine.reset_reference(fresh_optimizer=fresh)

    def average(self, rate: float) -> None:
        self.engine.reset_reference(fresh_optimizer=False, rate=rate)
        self.updates(2)

    def export(self, path: str) -> None:
        """Write the policy as a model of Hugging Face."""
        whole, target = weights(self.engine, self.world), self._directory(path)
        self.engine.export_config(target, torch.float32)
        said = self.engine.probe(PROBE)
        everyones = self.world.all_gather(lambda: said)
        assert all(other == everyones[0] for other in everyones), "ranks agree"
        self.tensors["probe"] = torch.tensor(said)
        adapter = self.engine.adapter()
        if self.world.first:
            merged = {name: value for name, value in whole.items() if ".lora_" not in name}
            save_file(merged, target / "model.safetensors", {"format": "pt"})
            if adapter:
                (target / "adapter").mkdir()
                adapter.write(target / "adapter")
        self.world.barrier()


class CriticWay(Way):
    def made(self) -> Any:
        return build_critic(self.trainer, self.world)

    def updates(self, step: int) -> list[tuple[MiniBatch, Objective]]:
        batch = self.batch(step)
        algorithm, data = self.trainer.algorithm, self.engine.data
        minis = load(self.run, batch, algorithm, 2, self.limit, data)
        for mini in minis:
            mini.rows.scores.values = mini.scored(self.engine.values)
            for row in views([mini.rows]):
                values_T = row.of(mini.rows.scores.values).clone()
                self.of_samples[f"{step}.values.{row.ref.group}.{row.ref.index}"] = values_T
        estimate_advantages(batch, [mini.rows for mini in minis], algorithm, data.sum)
        own = regrouped(
            minis, batch, self.trainer.critic_mini_batch_size, (self.limit, self.limit), data, CRITIC_REDUCTION
        )
        return [(mini, build_critic_objective(algorithm.value_clip)) for mini in own]


PROBE = [3, 11, 7, 0, 16, 5, 9, 2]


def have_one_A(engine: Any) -> None:
    """Let PEFT's layers for q, k and v, and those for gate and up, share their A on FSDP2's one rank."""
    for name, module in engine._model.named_modules():
        names = ("q_proj", "k_proj", "v_proj") if name.endswith(".self_attn") else ("gate_proj", "up_proj")
        layers = [getattr(module, each) for each in names if hasattr(getattr(module, each, None), "lora_A")]
        for layer in layers[1:]:
            layer.lora_A.default.weight = layers[0].lora_A.default.weight
    engine._optimizer = make_optimizer(engine._model, engine._optimizer_config)


def weights(engine: Any, world: World) -> Values:
    """Return whole weights under Hugging Face names, on rank 0, merged with adapters, and the adapters; of a critic too."""
    if isinstance(engine, MegatronEngine):
        engine._gather()
        return _exported(engine, world, merging(engine._chunks)) | _adapters(engine, world, torch.Tensor.detach)
    model = engine._model.model
    adapters = _adapters_of_peft(model)
    if hasattr(engine, "export_weights"):
        exported = engine.export_weights(torch.float32, [0] * len(engine.export_pieces(torch.float32)))
        return {name: value for piece in exported for name, value in piece.items()} | _whole(adapters)
    merged = {
        name: merged_by_peft(layer, sharding.whole)(value) if layer else value
        for name, value, layer in own_parameters(model)
    }
    return _named(_whole(merged | adapters), engine)


def _adapters_of_peft(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    # each layer's A, also where it is another's
    return {name: p for name, p in model.named_parameters(remove_duplicate=False) if ".lora_" in name}


def gradients(engine: Any, world: World) -> Values:
    """Return whole gradients of what is trained under Hugging Face names, on rank 0."""
    if not isinstance(engine, MegatronEngine):
        model = engine._model.model
        named = dict(model.named_parameters()) | _adapters_of_peft(model)
        found = _named(_whole({name: p.grad for name, p in named.items() if p.grad is not None}), engine)
        return (
            revert_weight_conversion(model, found) if get_model_conversion_mapping(model, add_legacy=False) else found
        )
    for chunk in engine._wrapped:
        for group in chunk.bucket_groups + chunk.expert_parallel_bucket_groups:
            if chunk.ddp_config.use_distributed_optimizer:
                _complete(group)

    def gradient(parameter: Any) -> torch.Tensor:
        return parameter.main_grad if parameter.requires_grad else torch.full_like(parameter, math.nan)

    found = _exported(engine, world, gradient) | _adapters(engine, world, gradient)
    return {name: value for name, value in found.items() if not value.isnan().all()}


def _adapters(engine: Any, world: World, value: Callable[[Any], torch.Tensor]) -> Values:
    return {
        f"{each.name}.lora_{letter}.default.weight": matrix.clone()
        for each in whole_adapters(engine._chunks, value, world)
        for letter, matrix in (("A", each.A), ("B", each.B))
    }


def _named(tensors: Values, engine: Any) -> Values:
    # a critic's body has no prefix there
    if hasattr(engine, "export_weights"):
        return tensors
    return {name if name == "value_head.weight" else f"model.{name}": value for name, value in tensors.items()}


def _complete(group: Any) -> None:
    """Gather the gradients of buckets, of which each rank has the sum of its share only."""
    ranks = group.intra_distributed_optimizer_instance_group
    for bucket in group.buckets:
        shares = list(bucket.grad_data.chunk(ranks.size()))
        dist.all_gather(shares, shares[ranks.rank()].clone(), group=ranks)


def _exported(engine: Any, world: World, value: Callable[[Any], torch.Tensor]) -> Values:
    return whole_export(engine._chunks, engine._architecture, value, world)


def _whole(tensors: dict[str, Any]) -> Values:
    return {name: sharding.whole(tensor).detach().clone() for name, tensor in tensors.items()}
