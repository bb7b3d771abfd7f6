"""Transformers models over packed samples, sharded over all ranks with FSDP2: a policy gives log-probabilities instead of logits, a
critic gives values, a reward model scores."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TypeVar

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from hpcrl.config.sections.model import CriticConfig, FSDPConfig, PolicyConfig
from hpcrl.data.action_tokens import action_tokens
from hpcrl.data.vision.families import family_of, placeholders
from hpcrl.data.vision.inputs import blank_image, has_planes, image_features, model_inputs, one_kind, plane_positions
from hpcrl.data.vision.reader import row_images
from hpcrl.trainer.backends.fsdp.sharding import set_whole, shard, units
from hpcrl.trainer.distributed import World
from hpcrl.trainer.models.experts.routing import Routing
from hpcrl.trainer.models.forward import DTYPES, ForwardConfig, score_places
from hpcrl.trainer.models.hf import ModelSource
from hpcrl.trainer.models.layers.choice import Kernels, choose_flash_attention, use_liger
from hpcrl.trainer.models.layers.low_precision import compute_in_fp8
from hpcrl.trainer.models.logits import LogitChange
from hpcrl.trainer.models.logprobs import Head, among_zeros, compiled_rows, plain_rows, token_logprobs, top_rows
from hpcrl.trainer.models.packed.attention import PACKED, PADDED, Packed, PackedSequences
from hpcrl.trainer.models.packed.blocks import BLOCK, SampleBlocks, compute_in_blocks, one_thread
from hpcrl.trainer.models.packed.sequence_parallel import SharedTokens, of_all, own_rows
from hpcrl.trainer.models.packed.states import keep_samples_apart
from hpcrl.trainer.models.packed.tree import PrefixTree
from hpcrl.trainer.models.trainable import mark_trained
from hpcrl.types import MicroBatch, to_device

Inputs = dict[str, torch.Tensor]


class PackedModel(nn.Module):
    """A transformer over packed samples, and its head.

    The head runs inside this forward: FSDP gathers what belongs to the root, a tied embedding and head, exactly there.

    Args:
        model: has the head as its output embeddings.

    Attributes:
        data: as World.sharing gives it, where ranks share the tokens of each sample; None: each computes its own samples.
    """

    def __init__(self, model: PreTrainedModel, forward: ForwardConfig) -> None:
        super().__init__()
        self.model = model
        self._bounds = keep_samples_apart(model) if forward.packing else None
        self.data: World | None = None
        self.routing = Routing(model, forward.experts, packing=forward.packing)
        self._sight = Sight(model) if family_of(model.config) else None
        self._in_blocks = False

    def hidden(
        self, token_ids: torch.Tensor, positions: torch.Tensor, sequences: Packed, images: Inputs
    ) -> torch.Tensor:
        """Return the last hidden states of the tokens that are computed, a row for each."""
        inputs = (token_ids, positions)
        if self._bounds is not None:
            self._bounds.now = sequences
            ids, places = (sequences.computed(values_P).unsqueeze(0) for values_P in inputs)
            return self._body(ids, places, sequences, images)[0]
        assert isinstance(sequences, PackedSequences), (
            "padded rows have no tokens in common, and are computed by one rank"
        )
        ids, places = (sequences.rows(values_P) for values_P in inputs)
        return sequences.flat(self._body(ids, places, None, images))

    def _body(self, ids: torch.Tensor, places: torch.Tensor, packed: Packed | None, images: Inputs) -> torch.Tensor:
        if places.ndim == 3:  # [B, T, planes]
            places = places.movedim(-1, 0)
        # before the layers of the language model, as with images: all ranks gather weights in the same order
        nothing = self._sight.nothing(ids.device) if self._sight and not images else None
        body = self.model.base_model
        found = body(input_ids=ids, position_ids=places, use_cache=False, packed=packed, **images).last_hidden_state
        return found if nothing is None else found + nothing

    @property
    def head(self) -> nn.Linear:
        head = self.model.get_output_embeddings()
        assert isinstance(head, nn.Linear)
        return head

    @property
    def _together(self) -> ProcessGroup | None:
        return self.data.sample_group if self.data else None

    def taken(self, batch: MicroBatch, device: torch.device) -> MicroBatch:
        """Return the inputs of `run` for a micro-batch on the CPU."""
        if self._together is not None:
            batch = replace(batch, head_rows=own_rows(batch, self._together))
        return batch.to(device)

    def run(self, batch: MicroBatch) -> tuple[torch.Tensor, ...]:
        """Return the outputs for a micro-batch on the model's device, [P] each; ranks that share its tokens have the same."""
        with self.running(batch) as outputs:
            return outputs

    @contextmanager
    def running(self, batch: MicroBatch, scale: float | None = None) -> Iterator[tuple[torch.Tensor, ...]]:
        """Yield the outputs for a micro-batch as `run` returns them.

        Args:
            scale: of the loss of them that is differentiated meanwhile; None: none is.
        """
        if self._in_blocks:
            sequences = SampleBlocks.of(batch.lengths, batch.cu_seqlens)
        elif batch.prefixes is None:
            sequences = PackedSequences.of(batch.lengths, batch.cu_seqlens)
        else:
            sequences = PrefixTree(batch.lengths, batch.cu_seqlens, batch.prefixes)
        if self._together is not None:
            sequences = SharedTokens(sequences, self._together)
        with self.routing.during(batch, sequences, scale):
            with one_thread() if self._in_blocks else nullcontext():
                outputs = self._outputs(batch, sequences)
            self.routing.turn_back()
            if self._together is not None:
                outputs = tuple(of_all(values_P, self._together) for values_P in outputs)
            yield outputs

    def _outputs(self, batch: MicroBatch, sequences: Packed) -> tuple[torch.Tensor, ...]:
        token_ids, positions, images = batch.token_ids, batch.positions, Inputs()
        if self._sight is not None:
            token_ids, positions, images = self._sight.inputs(batch)
        return self(
            token_ids,
            positions,
            batch.labels,
            sequences,
            batch.head_rows,
            images,
            batch.sampling_mask,
            batch.teacher_ids,
            batch.top_k,
        )


class ProbabilityModel(PackedModel):
    """A model with two outputs for each token, [P] each: log-probabilities and entropies.

    Attributes:
        forward_config: what it is asked for.
    """

    forward_config: ForwardConfig


class PackedPolicy(ProbabilityModel):
    """A causal language model with its head."""

    def __init__(self, model: PreTrainedModel, forward: ForwardConfig) -> None:
        super().__init__(model, forward)
        # of a mixture, which tokens an expert multiplies together differs anyway
        self._in_blocks = forward.in_blocks and self._sight is None and not self.routing.balance.layers
        if self._in_blocks:
            compute_in_blocks(model)
        self.head.__class__ = Head  # FSDP takes a method of its class for a forward
        acts = action_tokens(model.config)
        self.forward_config = replace(
            forward,
            never_said=() if acts else tuple(placeholders(model.config)),
            only_said=acts.ids if acts else None,
        )
        self._logits = LogitChange.of(model.config)
        softcap = self._logits.softcap
        self._rows = compiled_rows(softcap) if forward.compiled else partial(plain_rows, softcap=softcap)
        self._never = torch.tensor(
            self.forward_config.never_said, dtype=torch.int64
        )  # on the device from the first pass on
        self._top_rows = partial(top_rows, softcap=softcap)

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        labels: torch.Tensor,
        sequences: Packed,
        head_rows: torch.Tensor,
        images: Inputs,
        sampling_mask: torch.Tensor | None,
        teacher_ids: torch.Tensor | None = None,
        top_k: int = 0,
    ) -> tuple[torch.Tensor, ...]:
        """Return log-probabilities of the labels and entropies (ForwardConfig.entropy), both [P] float32, 0 but at `head_rows`.

        With gradients those of `teacher_ids` too, [P, K]. Without them, where `top_k` asks, the outputs are those of `top_rows`.
        """
        hidden, forward = self.hidden(token_ids, positions, sequences, images), self.forward_config
        trained = torch.is_grad_enabled()
        told, in_blocks = top_k > 0 and not trained, isinstance(sequences, SampleBlocks)
        rows = self._rows
        if forward.never_said or forward.only_said:
            self._never = self._never.to(token_ids.device)
            rows = partial(self._rows, never=self._never if forward.never_said else None, only=forward.only_said)

        def of_rows(values_P: torch.Tensor) -> torch.Tensor:
            return sequences.computed(values_P) if in_blocks else values_P.index_select(0, head_rows)

        def outputs(hidden_RD: torch.Tensor, head_VD: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return token_logprobs(
                hidden_RD.to(head_VD.dtype),  # some keep residuals in float32
                head_VD,
                of_rows(labels),
                forward.temperature / self._logits.factor,
                BLOCK if in_blocks else forward.chunk_rows,
                partial(self._top_rows, top_k, forward.vocabulary) if told else rows,
                forward.dtype,
                forward.entropy,
                None if sampling_mask is None else of_rows(sampling_mask),
                of_rows(teacher_ids) if teacher_ids is not None and (told or trained) else None,
            )

        head = self.head
        assert isinstance(head, Head)
        found = head.through(hidden if in_blocks else sequences.spread(hidden, head_rows), outputs)
        if in_blocks:
            found = tuple(sequences.spread(values_D, head_rows) for values_D in found)
        return tuple(among_zeros(values_R, head_rows, len(labels)) for values_R in found)


class PackedCritic(PackedModel):
    """A transformer whose head gives one number."""

    def __init__(self, model: PreTrainedModel, forward: ForwardConfig) -> None:
        super().__init__(model, forward)

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        _labels: torch.Tensor,
        sequences: Packed,
        _head_rows: torch.Tensor,
        images: Inputs,
        *_: object,
    ) -> tuple[torch.Tensor]:
        """Return the value at each position, [P] float32: the expected return before the next token is known."""
        hidden = self.hidden(token_ids, positions, sequences, images)
        return (sequences.spread(hidden.float() @ self.head.weight[0].float()),)


class PackedRewardModel(PackedModel):
    """A transformer whose head gives one number for a sample."""

    def __init__(self, model: PreTrainedModel, forward: ForwardConfig) -> None:
        super().__init__(model, forward)
        self._padding: int | None = model.config.get_text_config().pad_token_id

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        _labels: torch.Tensor,
        sequences: Packed,
        _head_rows: torch.Tensor,
        images: Inputs,
        *_: object,
    ) -> tuple[torch.Tensor]:
        """Return the score of each sample at its last position, and 0 at all others, [P] float32."""
        hidden = self.hidden(token_ids, positions, sequences, images)
        ends_B, last_B = score_places(token_ids, sequences.cu_seqlens, self._padding)
        scores_B = sequences.spread(hidden, last_B).float() @ self.head.weight[0].float()
        return (among_zeros(scores_B, ends_B, len(token_ids)),)


_PLAIN = Kernels()

AnyPacked = TypeVar("AnyPacked", bound=PackedModel)


def load_model(
    packed: Callable[[PreTrainedModel, ForwardConfig], AnyPacked],
    source: ModelSource,
    fsdp: FSDPConfig,
    forward: ForwardConfig,
    world: World,
    trained: PolicyConfig | CriticConfig | None = None,
    seed: int = 0,
    *,
    averaged: bool = False,
    kernels: Kernels = _PLAIN,
    data: World | None = None,
) -> AnyPacked:
    """Return the model of `source`, sharded; rank 0 reads it, in the type of its files, and each rank casts its shards.

    Args:
        packed: PackedPolicy, PackedCritic or PackedRewardModel.
        trained: section with what is trained; None: nothing. What is frozen as a whole, also below adapters, is kept in the type of the
            computation.
        seed: of the first values of adapters.
        kernels: that its layers are computed with.
        averaged: it becomes an average of what is trained, and is kept in the same type.
        data: as of PackedModel.
    """
    choose_flash_attention(forward.flash_version)
    precision = fsdp.mixed_precision
    adapted = trained is not None and trained.model.lora.rank > 0
    kept = precision.param_dtype if trained is None and not averaged else precision.master_dtype
    dtype = DTYPES[precision.param_dtype if adapted else kept]
    attention = PACKED if forward.flash else PADDED
    stored: list[PreTrainedModel] = []

    def read() -> dict[str, str]:
        whole = source.whole(source.stored_dtype() or dtype, attention)
        stored.append(whole)
        mark_trained(whole, trained, DTYPES[kept], seed)
        return {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in whole.state_dict().items()}

    # the others wait with the patience of control messages, which is longer than a collective's
    types = world.rank0_broadcast(read)
    empty = source.empty(dtype, attention)
    leave_out_dropout(empty)
    mark_trained(empty, trained, DTYPES[kept])
    if kernels.liger:
        use_liger(empty)
    compute_in_fp8(empty, kernels.low_precision, world.device)
    forward = replace(forward, in_blocks=forward.in_blocks and world.device.type == "cpu")
    model = packed(empty, forward).train(trained is not None)
    model.data = data
    for layer in units(empty, {}) if kernels.compiled else ():
        layer.compile(dynamic=True)
    shard(model, empty, fsdp, kept, world)
    offloaded = fsdp.cpu_offload and world.device.type == "cuda"
    model.to_empty(device="cpu" if offloaded else world.device)
    empty.tie_weights()  # to_empty gave tied parameters a storage each
    _fill(model, next(iter(stored), None), types, world)
    return model


def leave_out_dropout(model: PreTrainedModel) -> None:
    """Set dropout to 0, also in modules that hold only its rate: old and new log-probabilities must come from the same function."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name in [name for name, value in vars(module).items() if "dropout" in name and isinstance(value, float)]:
            setattr(module, name, 0.0)


@torch.no_grad()
def _fill(model: PackedModel, whole: PreTrainedModel | None, types: Mapping[str, str], world: World) -> None:
    """Copy rank 0's values into the sharded parameters, one after the other, and free rank 0's copy of each.

    Args:
        types: of what rank 0 has read, by name.
    """
    for name, parameter in model.model.named_parameters():
        if whole is not None:
            held = whole.get_parameter(name)
            tensor, held.data = held.detach().to(world.device).contiguous(), torch.empty(0, dtype=held.dtype)
        else:
            tensor = torch.empty(parameter.shape, dtype=getattr(torch, types[name]), device=world.device)
        torch.distributed.broadcast(tensor, group=world.tensors, group_src=0)
        set_whole(parameter, tensor)
    # buffers outside the state dict (rotary frequencies) are computed at construction, which the meta device made void;
    # FSDP leaves buffers where they are, so they go to the computing device also where parameters are offloaded
    sources = dict(whole.named_buffers()) if whole is not None else {}
    for name, empty in list(model.model.named_buffers()):
        buffer = (
            sources[name].to(world.device, empty.dtype) if world.first else torch.empty_like(empty, device=world.device)
        )
        torch.distributed.broadcast(buffer, group=world.tensors, group_src=0)
        owner, _, leaf = name.rpartition(".")
        setattr(model.model.get_submodule(owner), leaf, buffer)


def free_gathered(model: PackedModel) -> None:
    """Free parameters that forward passes without backward left gathered."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def own_state(model: PackedModel) -> dict[str, torch.Tensor]:
    """Return parameters and buffers for saving and loading in place; a tied one has one name only."""
    free_gathered(model)
    held = {name for name, _ in model.named_parameters()} | {name for name, _ in model.named_buffers()}
    return {name: value for name, value in model.state_dict().items() if name in held}


class Sight:
    """Inputs of a vision-language model: pixels and positions beside its tokens."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model

    def inputs(self, batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor, Inputs]:
        """Return the inputs of the model for a micro-batch.

        Returns:
            Its tokens [P], with the placeholder of images for those of videos. Their positions, [P], or [P, 3] where the model has three.
            The pixels of images in the order of their placeholders, empty without any.
        """
        images = [image for row in batch.tensors for image in row_images(row)]
        device = batch.token_ids.device
        inputs = model_inputs(images, device) if images else Inputs()
        token_ids = one_kind(self._model, batch.token_ids) if images else batch.token_ids
        if not inputs or not has_planes(self._model):
            return token_ids, batch.positions, inputs
        rows_BT, lengths = _rows(batch), to_device(torch.tensor(batch.lengths), device)
        filled_BT = torch.arange(rows_BT.shape[1], device=device) < lengths[:, None]
        positions = plane_positions(self._model, rows_BT, filled_BT, images)
        return token_ids, positions.movedim(0, -1)[filled_BT], inputs

    def nothing(self, device: torch.device) -> torch.Tensor:
        """Return 0, which depends on all of the vision tower: ranks whose micro-batch shows no image take part in gathering its weights and
        adding its gradients."""
        features = image_features(self._model, blank_image(self._model, device))
        return torch.stack([feature.sum() for feature in features]).sum() * 0.0


def _rows(batch: MicroBatch) -> torch.Tensor:
    """Return the tokens as [B, Tmax], zeros on the right."""
    return torch.nn.utils.rnn.pad_sequence(list(batch.token_ids.split(batch.lengths)), batch_first=True)
