"""The FSDP2 backend: master weights sharded over ranks, compute in the configured type, Adam or Muon."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_state_dict
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import revert_weight_conversion

from hpcrl.config.sections.model import CriticConfig, OptimizerConfig, PolicyConfig
from hpcrl.config.sections.trainer import Recomputation, TrainerConfig
from hpcrl.trainer.backends.base import ExportPiece, MicroBatches, Objective, StepReport, Writer, merge
from hpcrl.trainer.backends.fsdp.host_state import HostState
from hpcrl.trainer.backends.fsdp.model import (
    PackedCritic,
    PackedModel,
    PackedPolicy,
    PackedRewardModel,
    ProbabilityModel,
    free_gathered,
    load_model,
    own_state,
)
from hpcrl.trainer.backends.fsdp.optimizer import LossScale, make_optimizer, make_step, numbers, set_numbers
from hpcrl.trainer.backends.fsdp.schedule_free import ScheduleFreeAdamW
from hpcrl.trainer.backends.fsdp.sharding import accumulated, copy_parameters, local, one_copy, whole
from hpcrl.trainer.backends.reference import (
    REFERENCE,
    exchanged,
    forget_moments,
    require_same_shape,
)
from hpcrl.trainer.backends.schedule import lr_factor
from hpcrl.trainer.backends.shards import names_in, read, write_folders
from hpcrl.trainer.distributed import World
from hpcrl.trainer.models.adapter import Adapter
from hpcrl.trainer.models.build import critic_source, forward_config, policy_source, reference_source
from hpcrl.trainer.models.forward import DTYPES, ForwardConfig, computing
from hpcrl.trainer.models.hf import ModelSource, export_config
from hpcrl.trainer.models.layers.choice import Kernels
from hpcrl.trainer.models.layers.low_precision import without_fp8
from hpcrl.trainer.models.layers.recompute import recompute
from hpcrl.trainer.models.lora import (
    gather_adapter,
    is_B,
    merging,
    own_parameters,
    without_adapters,
    without_dropout,
)
from hpcrl.trainer.packing import untrained_micro_batch

log = logging.getLogger(__name__)
_MOMENTUM = "momentum_buffer"

Model = TypeVar("Model", bound=PackedModel)


class FsdpEngine(Generic[Model]):
    """Engine (hpcrl/trainer/backends/base.py) on FSDP2: the part that policies, critics and reward models have in common.

    Args:
        section: the trainer's section about `model`.
        recomputation: None: all activations are kept.
    """

    def __init__(
        self, model: Model, section: PolicyConfig | CriticConfig, recomputation: Recomputation | None, world: World
    ) -> None:
        self._model, self._world, self.data = model, world, model.data or world
        self._optimizer_config: OptimizerConfig = section.optimizer_config
        self._stager: tuple[set[str], DefaultStager] | None = None
        self._host_state = HostState(world.device)
        self._lora, self._offloaded = section.model.lora, section.fsdp_config.cpu_offload
        self._scale = LossScale.of(section.fsdp_config.mixed_precision.param_dtype)
        self.updates = 0
        self._total_updates = 0
        if recomputation is not None:
            offload = isinstance(section, PolicyConfig) and section.activation_offload
            recompute(model.model, recomputation, offload=offload)
        role = "trainer.policy" if isinstance(section, PolicyConfig) else "trainer.critic"
        self._optimizer = make_optimizer(model.model, self._optimizer_config, role)

    def schedule(self, total_updates: int) -> None:
        self._total_updates = total_updates

    def forward_backward(self, batches: MicroBatches, objective: Objective) -> dict[str, torch.Tensor]:
        totals: dict[str, torch.Tensor] = {}
        for batch in accumulated(self._model, batches, offloaded=self._offloaded):
            batch = self._model.taken(batch, self._world.device)
            with self._model.running(batch, self._scale.value) as outputs:
                loss, sums = objective(batch, *outputs)
                (loss * self._scale.value if self._scale.changes else loss).backward()
            merge(totals, sums)
        return totals

    def step(self) -> StepReport:
        optimizer, lr = self._optimizer_config, self._lr()
        gradients = [local(p.grad) for p in self._model.parameters() if p.grad is not None]
        scale = self._scale.value
        norm = self._norm(gradients) / scale
        finite = math.isfinite(norm)
        self._scale.follow(finite)
        if finite:
            clips = 0 < optimizer.max_grad_norm < norm
            if clips or scale != 1.0:
                for gradient in gradients:
                    gradient.mul_((optimizer.max_grad_norm / norm if clips else 1.0) / scale)
            make_step(self._optimizer, lr)
            self.updates += 1
        self._optimizer.zero_grad(set_to_none=True)
        return StepReport(
            norm, lr, skipped=not finite, loss_scale=scale, experts=self._model.routing.balance.metrics(self._world)
        )

    def skip(self) -> StepReport:
        self._optimizer.zero_grad(set_to_none=True)
        self._model.routing.balance.forget()
        return StepReport(0.0, self._lr(), skipped=True)

    def _lr(self) -> float:
        return self._optimizer_config.lr * lr_factor(self._optimizer_config, self.updates, self._total_updates)

    def _norm(self, gradients: list[torch.Tensor]) -> float:
        # torch.nn.utils.get_total_norm calls this too, but in the type of the gradients
        norms = torch._foreach_norm(gradients, 2.0, dtype=torch.float32)  # pyright: ignore[reportPrivateImportUsage]
        squared = torch.stack(norms).square().sum()
        dist.all_reduce(squared, group=one_copy(self._model, self._world))
        return squared.sqrt().item()

    def to_host(self) -> None:
        if self._world.device.type != "cpu":
            self._make_moments()  # a save makes them too, where the weights are at that time
            optimizer = self._optimizer if self._optimizer_config.offload_after_step else None
            self._host_state.take(self._models(), optimizer)

    def to_device(self) -> None:
        self._host_state.give_back()

    def _models(self) -> list[PackedModel]:
        return [self._model]

    def save(self, directory: Path, group: dist.ProcessGroup) -> None:
        write_folders(self._states(), directory, group)

    def snapshot(self) -> Writer:
        states = self._states()
        places = {each.device.type for each in self._model.parameters()}
        places |= {value.device.type for state in self._optimizer.state.values() for value in state.values()}
        if self._stager is None or self._stager[0] != places:  # copies of what is elsewhere now are let go of
            cuda = "cuda" in places  # pinning takes long, and copies of host memory are no faster for it
            self._stager = places, DefaultStager(StagingOptions(cuda, False, False, cuda))
        copy = self._stager[1].stage(states)
        assert isinstance(copy, dict)
        return partial(write_folders, copy)

    def restore(self, directory: Path) -> None:
        state, scale = self._state(), self._scale.state()
        if self._optimizer_config.name == "Muon":
            self._leave_out_momentum(state["optimizer"]["state"], directory)
        read({name: value for name, value in state.items() if name not in scale}, directory, self._world)
        self.updates = int(state["updates"])
        for name, parameter in self._model.named_parameters():
            for key, values in state["optimizer"]["state"].get(name, {}).items():
                set_numbers(self._optimizer.state[parameter][key], values)
        if scale:
            read(scale, directory, self._world, partly=True)  # what was trained in another number type has none
            self._scale.restore(scale)

    def _leave_out_momentum(self, moments: dict[str, dict[str, torch.Tensor]], directory: Path) -> None:
        """Leave out parameters that Muon moved where the checkpoint was saved, and Adam does now: their moments begin at 0.

        Earlier versions of hpcrl moved more matrices by Muon: those before the layers and behind them, and tables.
        """
        saved = names_in(directory, self._world)
        own = [
            name
            for name, kept in moments.items()
            if _MOMENTUM not in kept and f"optimizer.state.{name}.{_MOMENTUM}" in saved
        ]
        for name in own:
            del moments[name]
        if own and self._world.first:
            log.warning(
                "Muon moved %d parameters before that AdamW moves now, such as %s: their moments begin at 0",
                len(own),
                own[0],
            )

    def restore_weights(self, directory: Path) -> None:
        read({"model": self._saved()}, directory, self._world)
        if isinstance(self._optimizer, ScheduleFreeAdamW):  # of which what is evaluated and exported is made
            read({"optimizer": self._state()["optimizer"]}, directory, self._world)

    def _states(self) -> dict[str, dict[str, Any]]:
        return {"": self._state()}

    def _make_moments(self) -> None:
        if not self._optimizer.state:
            get_state_dict(self._model, self._optimizer)
            forget_moments(self._optimizer)  # which that makes by a step without gradients, and counts

    def _state(self) -> dict[str, Any]:
        self._make_moments()
        model, named = self._saved(), self._model.named_parameters()
        moments = {
            name: {key: numbers(value) for key, value in self._optimizer.state[each].items()}
            for name, each in named
            if each.requires_grad
        }
        return {
            "model": model,
            "optimizer": {"state": moments},
            "updates": torch.tensor(self.updates),
            **self._scale.state(),
        }

    def _saved(self) -> dict[str, torch.Tensor]:
        """Return the part of a model's state that changes: with LoRA the trained parameters."""
        state = own_state(self._model)
        frozen = {name for name, each in self._model.named_parameters() if self._lora.rank and not each.requires_grad}
        return {name: value for name, value in state.items() if name not in frozen}

    def _each_without_gradient(self, model: PackedModel, batches: MicroBatches) -> Iterator[tuple[torch.Tensor, ...]]:
        for batch in batches:
            with torch.no_grad(), without_dropout(model, self._lora.dropout):
                outputs = model.run(model.taken(batch, self._world.device))
                free_gathered(model)
            yield outputs


class FsdpExported(FsdpEngine[Model]):
    """An engine whose model is exported.

    Args:
        source: of `model`.
    """

    def __init__(
        self,
        model: Model,
        source: ModelSource,
        section: PolicyConfig,
        recomputation: Recomputation | None,
        world: World,
    ) -> None:
        super().__init__(model, section, recomputation, world)
        self.source = source
        self._first_values = self._copied() if section.model.lora.begins_from_weights else {}

    def export_pieces(self, dtype: torch.dtype) -> list[ExportPiece]:
        everyone, model = range(self._world.size), self._model.model
        pieces = [
            {name: torch.empty(parameter.shape, dtype=dtype, device="meta")}
            for name, parameter, _ in own_parameters(model)
        ]
        return [ExportPiece(self._named_on_the_hub(piece), everyone) for piece in pieces] + [
            ExportPiece({name: buffer.to("meta")}, everyone) for name, buffer in self._saved_buffers()
        ]

    def export_weights(self, dtype: torch.dtype, owners: Sequence[int]) -> Iterator[dict[str, torch.Tensor]]:
        free_gathered(self._model)
        remaining = iter(owners)
        for name, parameter, adapter in own_parameters(self._model.model):
            # cast first: what is gathered is then no larger than what is written
            value = whole(parameter.detach() if adapter else parameter.detach().to(dtype))
            merge = merging(adapter, whole) if adapter else None
            if next(remaining) != self._world.rank:
                yield {}
                continue
            yield self._named_on_the_hub({name: (merge(value).to(dtype) if merge else value).cpu()})
        for name, buffer in self._saved_buffers():
            yield {name: buffer.cpu()} if next(remaining) == self._world.rank else {}

    def _named_on_the_hub(self, piece: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        # transformers fuses experts and the like at load; files keep the names of the hub
        model = self._model.model
        return (
            revert_weight_conversion(model, piece) if get_model_conversion_mapping(model, add_legacy=False) else piece
        )

    def _saved_buffers(self) -> list[tuple[str, torch.Tensor]]:
        model = self._model.model
        kept = model.state_dict().keys()
        return [(name, buffer) for name, buffer in model.named_buffers() if name in kept]

    def export_config(self, directory: Path, dtype: torch.dtype) -> None:
        if not self._world.first:
            return
        classifier = type(self._model.model).__name__ if self.source.gives_scores else None
        export_config(self.source, directory, dtype, classifier)

    def end_batch(self, step: int) -> None:
        pass

    @contextmanager
    def evaluated(self) -> Iterator[None]:
        optimizer = self._optimizer
        if not isinstance(optimizer, ScheduleFreeAdamW):
            yield
            return
        trained = {name: each for name, each in self._model.named_parameters() if each.requires_grad}
        with self._holding({name: optimizer.average(each) for name, each in trained.items()}):
            yield

    def sampling_adapter(self) -> Adapter | None:
        return self.adapter()

    def adapter(self) -> Adapter | None:
        if not self._lora.rank:
            return None
        newest = self._adapter()
        if not self._first_values:
            return newest
        with self._holding(self._first_values):
            return newest.beyond(self._adapter())

    def _adapter(self) -> Adapter:
        free_gathered(self._model)
        return gather_adapter(self._model.model, self._lora, self.source, whole)

    def _trained(self) -> dict[str, torch.Tensor]:
        return {name: each.detach() for name, each in self._model.named_parameters() if each.requires_grad}

    def _copied(self) -> dict[str, torch.Tensor]:
        return {name: value.clone() for name, value in self._trained().items()}

    @contextmanager
    def _holding(self, values: dict[str, torch.Tensor]) -> Iterator[None]:
        """Replace the values of trained parameters for a while; `values` holds theirs meanwhile."""

        free_gathered(self._model)
        with exchanged((local(values[name]), local(value)) for name, value in self._trained().items()):
            try:
                yield
            finally:
                free_gathered(self._model)


class FsdpPolicy(FsdpExported[ProbabilityModel]):
    """PolicyEngine on FSDP2.

    Args:
        temperature: divides the logits of policy and reference.
        packed: makes the model that gives log-probabilities.
        source: of that model; None: a language model.
    """

    def __init__(
        self,
        trainer: TrainerConfig,
        temperature: float,
        world: World,
        packed: Callable[[Any, ForwardConfig], ProbabilityModel] = PackedPolicy,
        source: ModelSource | None = None,
    ) -> None:
        forward, section = forward_config(trainer, temperature), trainer.policy
        source = source or policy_source(trainer)
        data = world.sharing(section.sequence_parallel_size)
        forward = replace(forward, experts=section.experts)
        model = load_model(
            packed, source, section.fsdp_config, forward, world,
            trained=section, seed=trainer.seed, kernels=Kernels.of(section), data=data,
        )  # fmt: skip
        super().__init__(model, source, section, trainer.recomputation, world)
        self._reference: ProbabilityModel | None = None
        self._reference_is_base = trainer.reference_is_base
        if trainer.colocated_reference and not self._reference_is_base:
            known = replace(forward, vocabulary=model.head.out_features, experts=trainer.reference_experts)
            averaged = trainer.distillation.self_teacher_model == "ema"
            self._reference = load_model(
                packed, reference_source(trainer, source), trainer.ref_sharding, known, world,
                averaged=averaged, kernels=Kernels.of(section), data=data,
            )  # fmt: skip
            if trainer.reference_follows:
                require_same_shape(self._reference, model)
        self._reference_values = self._without_adapters() if trainer.reference_has_values else {}
        self._reference_moved = False
        self.dtype = DTYPES[section.fsdp_config.mixed_precision.param_dtype]

    def logprobs(self, batches: MicroBatches, *, reference: bool = False) -> Iterator[torch.Tensor]:
        return (logprobs_P for logprobs_P, *_ in self._outputs(batches, reference=reference))

    def entropies(self, batches: MicroBatches) -> Iterator[torch.Tensor]:
        with computing(self._model, scored="metric"):
            yield from (entropies_P for _, entropies_P, *_ in self._outputs(batches, reference=False))

    def logprobs_and_norms(self, batches: MicroBatches) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        with computing(self._model, scored="norms"):
            yield from ((logprobs_P, norms_P) for logprobs_P, norms_P, *_ in self._outputs(batches, reference=False))

    def top_logprobs(
        self, batches: MicroBatches, *, reference: bool = False
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        found: Iterator[Any] = self._outputs(batches, reference=reference)
        return found

    def _outputs(self, batches: MicroBatches, *, reference: bool) -> Iterator[tuple[torch.Tensor, ...]]:
        if not reference:
            yield from self._each_without_gradient(self._model, batches)
        elif self._reference_is_base:
            for batch in batches:
                with self._as_reference():  # not while others compute in between
                    (outputs,) = self._each_without_gradient(self._model, [batch])
                yield outputs
        else:
            assert self._reference is not None, "this engine was made without a reference"
            yield from self._each_without_gradient(self._reference, batches)

    def _models(self) -> list[PackedModel]:
        return [self._model, *([self._reference] if self._reference is not None else [])]

    def _without_adapters(self) -> dict[str, torch.Tensor]:
        """Return trained parameters as before training: with first values, and B = 0 unless it is taken from the weights."""
        values = self._copied()
        for adapted in [name for name in values if is_B(name) and not self._first_values]:
            values[adapted].zero_()
        return values

    @contextmanager
    def _as_reference(self) -> Iterator[None]:
        with self._holding(self._reference_values) if self._reference_values else without_adapters(self._model):
            yield

    def reset_reference(self, *, fresh_optimizer: bool, rate: float = 1.0) -> None:
        free_gathered(self._model)
        with self.evaluated():
            if self._reference_is_base:
                for name, value in self._trained().items():
                    held = local(self._reference_values[name])
                    held.lerp_(local(value).to(held.device), rate)  # the policy may be in host memory
            else:
                assert self._reference is not None, "this engine was made without a reference"
                free_gathered(self._reference)
                copy_parameters(self._model, self._reference, rate)
        self._reference_moved = True
        if fresh_optimizer and isinstance(self._optimizer, ScheduleFreeAdamW):
            self._optimizer.restart()
        elif fresh_optimizer:
            forget_moments(self._optimizer)

    def _states(self) -> dict[str, dict[str, Any]]:
        states = super()._states()
        if self._reference_moved:
            states[REFERENCE] = self._state_of_reference()
        return states

    def _state_of_reference(self) -> dict[str, Any]:
        if self._reference is not None:
            return own_state(self._reference)
        return self._reference_values

    def restore(self, directory: Path) -> None:
        super().restore(directory)
        has_one = self._reference is not None or self._reference_is_base
        if has_one and self._world.rank0_broadcast(lambda: (directory / REFERENCE).is_dir()):
            if self._world.first:
                log.info("the reference is the policy of an earlier step, from %s", directory)
            if self._reference is not None:
                require_same_shape(self._reference, self._model)
            elif not self._reference_values:  # it follows no more, and stays what it was
                self._reference_values = self._without_adapters()
            read(self._state_of_reference(), directory / REFERENCE, self._world)
            self._reference_moved = True

    @property
    def vocabulary(self) -> int:
        return self._model.head.out_features

    def probe(self, token_ids: Sequence[int]) -> list[float]:
        # engines compute without FP8, and are asked for the log-probabilities of all tokens
        with computing(self._model, temperature=1.0, never_said=(), only_said=None), without_fp8(self._model):
            (logprobs_P,) = self.logprobs([untrained_micro_batch(token_ids)])
        return logprobs_P[:-1].tolist()


class FsdpRewardModel(FsdpExported[PackedRewardModel]):
    """A reward model in training, on FSDP2: it has `values` as a critic, and is exported as a policy."""

    def __init__(self, trainer: TrainerConfig, world: World) -> None:
        section, forward, source = trainer.policy, forward_config(trainer), policy_source(trainer)
        data = world.sharing(section.sequence_parallel_size)
        forward = replace(forward, experts=section.experts)
        model = load_model(
            PackedRewardModel, source, section.fsdp_config, forward, world,
            trained=section, seed=trainer.seed, kernels=Kernels.of(section), data=data,
        )  # fmt: skip
        super().__init__(model, source, section, trainer.recomputation, world)

    def values(self, batches: MicroBatches) -> Iterator[torch.Tensor]:
        return (values_P for values_P, *_ in self._each_without_gradient(self._model, batches))


class FsdpCritic(FsdpEngine[PackedCritic]):
    """CriticEngine on FSDP2."""

    def __init__(self, trainer: TrainerConfig, world: World) -> None:
        section, forward = trainer.critic, forward_config(trainer)
        data = world.sharing(trainer.critic_model_parallel_size)
        model = load_model(
            PackedCritic, critic_source(trainer), section.fsdp_config, forward, world,
            trained=section, seed=trainer.seed, data=data,
        )  # fmt: skip
        super().__init__(model, section, trainer.recomputation, world)

    def values(self, batches: MicroBatches) -> Iterator[torch.Tensor]:
        return (values_P for values_P, *_ in self._each_without_gradient(self._model, batches))
