"""The Megatron backend: models split by tensor, pipeline, context and expert parallelism, trained by Megatron-core's optimizers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from torch import nn

from hpcrl.config.sections.megatron import MegatronModelConfig
from hpcrl.config.sections.model import CriticConfig, PolicyConfig
from hpcrl.config.sections.trainer import TrainerConfig
from hpcrl.trainer.backends.base import ExportPiece, MicroBatches, Objective, StepReport, Writer
from hpcrl.trainer.backends.megatron import shims
from hpcrl.trainer.backends.megatron.adapters.layer import adapted_weights
from hpcrl.trainer.backends.megatron.adapters.whole import merging, whole_adapters, whole_modules, without_adapters
from hpcrl.trainer.backends.megatron.architecture import Architecture, architecture_of
from hpcrl.trainer.backends.megatron.experts.routing import MegatronRouting
from hpcrl.trainer.backends.megatron.host_storages import HostStorages, hook_gradients
from hpcrl.trainer.backends.megatron.models import CriticModel, PolicyModel, StageModel
from hpcrl.trainer.backends.megatron.muon import MegatronMuon
from hpcrl.trainer.backends.megatron.pipeline import Pipeline, top_columns
from hpcrl.trainer.backends.megatron.process_groups import join_groups
from hpcrl.trainer.backends.megatron.settings import ddp_config, optimizer_config, transformer_config, virtual_stages
from hpcrl.trainer.backends.megatron.shard_layout import shard_layout
from hpcrl.trainer.backends.megatron.state import ShardedState
from hpcrl.trainer.backends.megatron.trainable import group_overrides, mark_trained
from hpcrl.trainer.backends.megatron.weights import export, export_pieces, load
from hpcrl.trainer.backends.reference import REFERENCE, exchanged, forget_moments, require_same_shape
from hpcrl.trainer.backends.schedule import lr_factor
from hpcrl.trainer.distributed import World
from hpcrl.trainer.models.adapter import Adapter, made_adapter
from hpcrl.trainer.models.build import critic_source, forward_config, policy_source, reference_source
from hpcrl.trainer.models.forward import DTYPES, ForwardConfig, computing, score_places
from hpcrl.trainer.models.hf import CriticSource, ModelSource, export_config
from hpcrl.trainer.models.logprobs import among_zeros
from hpcrl.trainer.packing import untrained_micro_batch
from hpcrl.types import MicroBatch

Model = TypeVar("Model", bound=StageModel)


class MegatronEngine(Generic[Model]):
    """Engine (hpcrl/trainer/backends/base.py) on Megatron-core: the part that policies, critics and reward models have in common.

    Args:
        kind: of the model.
        section: the trainer's section about it.
        role: its name, such as "trainer.policy"; for errors.
    """

    def __init__(
        self,
        kind: type[Model],
        source: ModelSource,
        forward: ForwardConfig,
        section: PolicyConfig | CriticConfig,
        role: str,
        trainer: TrainerConfig,
        world: World,
    ) -> None:
        megatron, self._world = trainer.policy.megatron_config, world
        self._megatron, self._optimizer_config = megatron, section.optimizer_config
        self.updates = 0
        self._total_updates = 0
        self._chunks, self._architecture, self.data = build(kind, source, forward, megatron, role, trainer, world)
        lora_type, self._lora = megatron.lora_type, section.model.lora
        mark_trained(self._chunks, self._architecture, source, section, world, lora_type=lora_type, seed=trainer.seed)
        settings = optimizer_config(section.optimizer_config, megatron, role)
        config: Any = self._chunks[0].config
        config.finalize_model_grads_func = finalize_model_grads
        ddp = ddp_config(megatron, settings, world.device)
        self._wrapped: list[Any] = [
            DistributedDataParallel(config, ddp, chunk, disable_bucketing=number > 0)
            for number, chunk in enumerate(self._chunks)
        ]
        if megatron.ddp_config.overlap_grad_reduce:
            waits = [chunk.no_sync for chunk in self._wrapped]
            config.no_sync_func = waits if len(waits) > 1 else waits[0]
        # nothing else is exempt from weight decay, as with FSDP2
        overrides = group_overrides(self._chunks, self._architecture, section.optimizer_config, role, world)
        self._optimizer: Any = get_megatron_optimizer(settings, self._wrapped, config_overrides=overrides)
        self._muon = self._made_muon() if section.optimizer_config.name == "Muon" else None
        state = self._chunks, self._architecture, self._optimizer
        self._saved = ShardedState(*state, world, adapted=self._lora.rank > 0)
        self._host = HostStorages(world.device)
        experts = section.experts if isinstance(section, PolicyConfig) else None
        self._routing = MegatronRouting(self._chunks, experts, self.data.size) if experts else None
        dynamic = megatron.pipeline_dynamic_shape
        self._pipeline = Pipeline(self._wrapped, self.data, dynamic=dynamic, routing=self._routing)

    def _made_muon(self) -> MegatronMuon:
        layout = shard_layout(self._chunks, self._architecture)
        return MegatronMuon(self._optimizer, layout, self._optimizer_config.muon_momentum, self._world)

    def schedule(self, total_updates: int) -> None:
        self._total_updates = total_updates

    def forward_backward(self, batches: MicroBatches, objective: Objective) -> dict[str, torch.Tensor]:
        return self._pipeline.train(batches, objective)

    def step(self) -> StepReport:
        optimizer, lr = self._optimizer, self._lr()
        if self._megatron.empty_cuda_cache:
            torch.cuda.empty_cache()
        overflow = optimizer.prepare_grads()
        norm = optimizer.get_grad_norm()
        done = math.isfinite(norm) and not overflow
        if done:
            self._clip(norm)
            for group in optimizer.param_groups:
                group["lr"] = lr * group["lr_mult"]
            if self._muon:
                self._muon.step()
            optimizer.step_with_ready_grads()
            self.updates += 1
        self._forget_gradients()
        experts = self._routing.balance.metrics(self._world) if self._routing else {}
        return StepReport(norm, lr, skipped=not done, experts=experts)

    def skip(self) -> StepReport:
        self._forget_gradients()
        if self._routing:
            self._routing.balance.forget()
        return StepReport(0.0, self._lr(), skipped=True)

    def _clip(self, norm: float) -> None:
        for optimizer in self._optimizer.chained_optimizers:
            config, parameters = optimizer.config, optimizer.get_parameters()
            if config.clip_grad > 0 and parameters:
                apart = config.use_precision_aware_optimizer_no_fp8_or_ds_fp8
                clip_grad_by_total_norm_fp32(parameters, config.clip_grad, norm, apart)

    def _forget_gradients(self) -> None:
        for chunk in self._wrapped:
            chunk.zero_grad_buffer()
        self._optimizer.zero_grad()

    def _lr(self) -> float:
        return self._optimizer_config.lr * lr_factor(self._optimizer_config, self.updates, self._total_updates)

    def _gather(self) -> None:
        """Complete the parameters, which with overlap_param_gather are gathered as the next forward pass needs them."""
        if self._megatron.ddp_config.overlap_param_gather and not self._host.away:
            for chunk in self._wrapped:
                chunk.start_param_sync(force_sync=True)

    def to_host(self) -> None:
        if self._world.device.type != "cpu":
            self._leave()

    def _leave(self) -> None:
        self._gather()
        stepped, moments = self._saved.stepped()
        state = [*stepped, *moments] if self._optimizer_config.offload_after_step else []
        buffers = [each for chunk in self._wrapped for each in (*chunk.buffers, *chunk.expert_parallel_buffers)]
        self._host.take([*self._weights(), *state], stepped, [each.grad_data for each in buffers])

    def to_device(self) -> None:
        if self._host.away:
            self._host.give_back()
            for chunk in self._wrapped:
                hook_gradients(chunk)

    def _weights(self) -> list[torch.Tensor]:
        return [parameter for chunk in self._chunks for parameter in chunk.parameters()]

    def save(self, directory: Path, group: dist.ProcessGroup) -> None:
        self._writer(copied=False)(directory, group)

    def snapshot(self) -> Writer:
        return self._writer(copied=True)

    def _writer(self, *, copied: bool) -> Writer:
        self._gather()
        return self._saved.writer(self.updates, copied=copied)

    def restore(self, directory: Path) -> None:
        self.updates = self._saved.load(directory)

    def restore_weights(self, directory: Path) -> None:
        self._saved.load_weights(directory)


class MegatronExported(MegatronEngine[Model]):
    """An engine whose model is exported."""

    def __init__(
        self, kind: type[Model], source: ModelSource, forward: ForwardConfig, trainer: TrainerConfig, world: World
    ) -> None:
        super().__init__(kind, source, forward, trainer.policy, "trainer.policy", trainer, world)
        self.source, self.dtype = source, DTYPES[trainer.policy.megatron_config.dtype]
        self._first_values = self._copied() if self._lora.begins_from_weights else {}

    def _weights(self) -> list[torch.Tensor]:
        return [*super()._weights(), *self._first_values.values()]

    def export_pieces(self, dtype: torch.dtype) -> list[ExportPiece]:
        return export_pieces(self._chunks, self._architecture, dtype, self._world)

    def export_weights(self, dtype: torch.dtype, owners: Sequence[int]) -> Iterator[dict[str, torch.Tensor]]:
        self._gather()
        return export(self._chunks, self._architecture, merging(self._chunks), dtype, owners)

    def export_config(self, directory: Path, dtype: torch.dtype) -> None:
        if self._world.first:
            classifier = type(self.source.empty(dtype, "eager")).__name__ if self.source.gives_scores else None
            export_config(self.source, directory, dtype, classifier)

    def end_batch(self, step: int) -> None:
        pass

    def evaluated(self) -> AbstractContextManager[None]:
        return nullcontext()

    def sampling_adapter(self) -> Adapter | None:
        return self.adapter()

    def adapter(self) -> Adapter | None:
        if not self._lora.rank:
            return None
        self._gather()
        newest = self._adapter()
        if not self._first_values:
            return newest
        with self._holding(self._first_values):
            return newest.beyond(self._adapter())

    def _adapter(self) -> Adapter:
        layers = whole_adapters(self._chunks, lambda matrix: matrix.data, self._world)
        kept = whole_modules(self._chunks, self._architecture, self.dtype, self._world)
        return made_adapter(layers, self._lora, self.source, kept)

    def _copied(self) -> dict[nn.Parameter, torch.Tensor]:
        trained = (parameter for chunk in self._chunks for parameter in chunk.parameters() if parameter.requires_grad)
        return {parameter: parameter.detach().clone() for parameter in trained}

    def _holding(self, values: dict[nn.Parameter, torch.Tensor]) -> AbstractContextManager[None]:
        """Replace the values of trained parameters for a while; `values` holds theirs meanwhile."""
        return exchanged((parameter.data, value) for parameter, value in values.items())


class MegatronPolicy(MegatronExported[PolicyModel]):
    """PolicyEngine on Megatron-core.

    Args:
        temperature: divides the logits of policy and reference.
    """

    def __init__(self, trainer: TrainerConfig, temperature: float, world: World) -> None:
        forward = forward_config(trainer, temperature)
        super().__init__(PolicyModel, policy_source(trainer), forward, trainer, world)
        self._reference: list[PolicyModel] | None = None
        self._reference_is_base = trainer.reference_is_base
        if trainer.colocated_reference and not self._reference_is_base:
            megatron = trainer.megatron_layout("ref")
            source = reference_source(trainer)
            known = replace(forward, vocabulary=self.vocabulary)
            chunks, *_ = build(PolicyModel, source, known, megatron, "trainer.ref", trainer, world)
            for chunk in chunks:
                chunk.requires_grad_(False)
            self._reference = chunks
            experts = trainer.reference_experts
            self._reference_pipeline = Pipeline(
                chunks, self.data, dynamic=megatron.pipeline_dynamic_shape,
                routing=MegatronRouting(chunks, experts, self.data.size) if experts else None,
            )  # fmt: skip
            if trainer.reference_follows:
                self._require_same_shape()
        self._reference_values = self._without_adapters() if trainer.reference_has_values else {}
        self._reference_moved = False

    def logprobs(self, batches: MicroBatches, *, reference: bool = False) -> Iterator[torch.Tensor]:
        return self._outputs(Pipeline.first_output, batches, reference=reference)

    def entropies(self, batches: MicroBatches) -> Iterator[torch.Tensor]:
        with self._computing(scored="metric"):
            yield from self._outputs(Pipeline.second_output, batches, reference=False)

    def logprobs_and_norms(self, batches: MicroBatches) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        with self._computing(scored="norms"):
            found = self._outputs(Pipeline.both_outputs, batches, reference=False)
            yield from ((both_2P[0], both_2P[1]) for both_2P in found)

    def top_logprobs(
        self, batches: MicroBatches, *, reference: bool = False
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        return map(top_columns, self._outputs(Pipeline.top_outputs, batches, reference=reference))

    def _outputs(
        self,
        computed: Callable[[Pipeline, MicroBatches], Iterator[torch.Tensor]],
        batches: MicroBatches,
        *,
        reference: bool,
    ) -> Iterator[torch.Tensor]:
        if not reference:
            return computed(self._pipeline, batches)
        if self._reference_is_base:
            return self._by_adapters_of_reference(computed(self._pipeline, batches))
        assert self._reference is not None, "this engine was made without a reference"
        return computed(self._reference_pipeline, batches)

    def _by_adapters_of_reference(self, found: Iterator[torch.Tensor]) -> Iterator[torch.Tensor]:
        self._gather()
        while True:
            with self._as_reference():  # not while others compute in between
                outputs = next(found, None)
            if outputs is None:
                return
            yield outputs

    @contextmanager
    def _as_reference(self) -> Iterator[None]:
        held = self._holding(self._reference_values) if self._reference_values else without_adapters(self._chunks)
        with held:
            yield

    def _weights(self) -> list[torch.Tensor]:
        reference = [parameter for chunk in self._reference or () for parameter in chunk.parameters()]
        return [*super()._weights(), *reference, *self._reference_values.values()]

    def _without_adapters(self) -> dict[nn.Parameter, torch.Tensor]:
        """Return trained parameters as before training: with first values, and B = 0 unless it is taken from the weights."""
        values = self._copied()
        matrices = [matrix for _, adapter in adapted_weights(self._chunks) for matrix in adapter.matrices()]
        for B in [matrix for letter, _, matrix in matrices if letter == "B" and matrix in values]:
            if not self._first_values:
                values[B].zero_()
        return values

    def _require_same_shape(self) -> None:
        assert self._reference is not None
        require_same_shape(nn.ModuleList(self._reference), nn.ModuleList(self._chunks))

    def reset_reference(self, *, fresh_optimizer: bool, rate: float = 1.0) -> None:
        self._gather()
        if self._reference_is_base:
            for parameter, value in self._copied().items():
                self._reference_values[parameter].lerp_(value, rate)
        else:
            assert self._reference is not None, "this engine was made without a reference"
            with torch.no_grad():
                for reference, policy in zip(self._reference, self._chunks, strict=True):
                    for parameter, value in zip(reference.parameters(), policy.parameters(), strict=True):
                        parameter.lerp_(value.to(parameter.dtype), rate)
        self._reference_moved = True
        if fresh_optimizer:
            for optimizer in self._optimizer.chained_optimizers:
                if optimizer.optimizer is not None:  # on a stage of which nothing is trained
                    forget_moments(optimizer.optimizer)

    def _writer(self, *, copied: bool) -> Writer:
        own = super()._writer(copied=copied)
        if not self._reference_moved:
            return own
        if self._reference is not None:
            reference = self._of_reference(self._reference).writer(self.updates, copied=copied)
        else:
            with self._as_reference():  # which lasts no longer than this
                reference = self._of_reference(self._chunks).writer(self.updates, copied=True)

        def write(directory: Path, group: dist.ProcessGroup) -> None:
            own(directory, group)
            if self._world.first:
                (directory / REFERENCE).mkdir()
            dist.barrier(group)
            reference(directory / REFERENCE, group)

        return write

    def restore(self, directory: Path) -> None:
        super().restore(directory)
        has_one = self._reference is not None or self._reference_is_base
        if not has_one or not self._world.rank0_broadcast(lambda: (directory / REFERENCE).is_dir()):
            return
        if self._reference is not None:
            self._require_same_shape()
            self._of_reference(self._reference).load_weights(directory / REFERENCE)
        else:
            if not self._reference_values:  # it follows no more, and stays what it was
                self._reference_values = self._without_adapters()
            with self._as_reference():
                self._of_reference(self._chunks).load_weights(directory / REFERENCE)
        self._reference_moved = True

    def _of_reference(self, chunks: list[PolicyModel]) -> ShardedState:
        return ShardedState(chunks, self._architecture, None, self._world, adapted=self._reference_is_base)

    @property
    def vocabulary(self) -> int:
        return self._architecture.vocab_size

    def probe(self, token_ids: Sequence[int]) -> list[float]:
        with self._computing(temperature=1.0):
            (logprobs_P,) = self.logprobs([untrained_micro_batch(token_ids)])
        return logprobs_P[:-1].tolist()

    @contextmanager
    def _computing(self, **changes: Any) -> Iterator[None]:
        with ExitStack() as stack:
            for chunk in self._chunks:
                if chunk.post_process:
                    stack.enter_context(computing(chunk.output_layer, **changes))
            yield


class MegatronRewardModel(MegatronExported[CriticModel]):
    """A reward model in training, on Megatron-core: it has `values` as a critic, and is exported as a policy."""

    def __init__(self, trainer: TrainerConfig, world: World) -> None:
        super().__init__(CriticModel, policy_source(trainer), forward_config(trainer), trainer, world)

    def forward_backward(self, batches: MicroBatches, objective: Objective) -> dict[str, torch.Tensor]:
        return super().forward_backward(
            batches, lambda batch, values_P: objective(batch, self._scores(batch, values_P))
        )

    def values(self, batches: MicroBatches) -> Iterator[torch.Tensor]:
        return self._pipeline.first_output(batches, self._scores)

    def _scores(self, batch: MicroBatch, values_P: torch.Tensor) -> torch.Tensor:
        ends_B, last_B = score_places(batch.token_ids, batch.cu_seqlens, self._architecture.padding)
        return among_zeros(values_P.index_select(0, last_B), ends_B, len(values_P))

    def adapter(self) -> Adapter | None:
        found = super().adapter()
        if found is None:
            return None
        return replace(found, config=replace(found.config, task_type="SEQ_CLS"))


class MegatronCritic(MegatronEngine[CriticModel]):
    """CriticEngine on Megatron-core, split as the policy is."""

    def __init__(self, trainer: TrainerConfig, world: World) -> None:
        source, forward = critic_source(trainer), forward_config(trainer)
        super().__init__(CriticModel, source, forward, trainer.critic, "trainer.critic", trainer, world)

    def values(self, batches: MicroBatches) -> Iterator[torch.Tensor]:
        return self._pipeline.first_output(batches)


def build(
    kind: type[Model],
    source: ModelSource,
    forward: ForwardConfig,
    megatron: MegatronModelConfig,
    role: str,
    trainer: TrainerConfig,
    world: World,
) -> tuple[list[Model], Architecture, World]:
    """Return this rank's chunks of the model of `source`, its architecture, and the ranks that train other samples."""
    if world.device.type != "cuda":
        shims.install()
    head = source.head if isinstance(source, CriticSource) else None
    architecture = architecture_of(source.config(), source.path, head, classifier=source.gives_scores)
    virtual = virtual_stages(architecture, megatron)
    data = join_groups(megatron, virtual, world, trainer.seed)
    config = transformer_config(
        architecture, megatron, role, recompute=trainer.gradient_checkpointing, deterministic=trainer.deterministic
    )
    numbers = [None] if virtual is None else range(virtual)
    chunks = [kind(config, architecture, forward, number) for number in numbers]
    load(chunks, architecture, source, world)
    return chunks, architecture, data
