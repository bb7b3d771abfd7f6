"""Transformers models over packed samples, sharded over all ranks with FSDP2: a policy gives log-probabilities instead of logits, a
critic gives values, a reward model scores."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TypeVar

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from hpcrl.config.sections.model import CriticConfig, FSDPConfig, PolicyConfig
from hpcrl.trainer.backends.fsdp.sharding import set_whole, shard, units
from hpcrl.trainer.distributed import World
from hpcrl.trainer.models.attention import PACKED, PADDED, Packed, PackedSequences, require_attention_only
from hpcrl.trainer.models.forward import DTYPES, ForwardConfig, score_places
from hpcrl.trainer.models.hf import ModelSource
from hpcrl.trainer.models.logprobs import among_zeros, compiled_rows, plain_rows, token_logprobs, top_rows
from hpcrl.trainer.models.trained import mark_trained
from hpcrl.trainer.models.tree import PrefixTree
from hpcrl.types import MicroBatch


class PackedModel(nn.Module):
    """A transformer over packed samples, and its head.

    The head runs inside this forward: FSDP gathers what belongs to the root, the (maybe tied) embedding and head, exactly there.

    Args:
        model: has the head as its output embeddings.
        packing: samples lie end to end; otherwise each is a padded row.
    """

    def __init__(self, model: PreTrainedModel, packing: bool) -> None:
        super().__init__()
        self.model = model
        self._packing = packing

    def hidden(self, token_ids: torch.Tensor, positions: torch.Tensor, sequences: Packed) -> torch.Tensor:
        """Return the last hidden states of the tokens that are computed, a row for each."""
        inputs = (token_ids, positions)
        if self._packing:
            ids, places = (sequences.computed(values_P).unsqueeze(0) for values_P in inputs)
            return self._body(ids, places, sequences)[0]
        assert isinstance(sequences, PackedSequences), "padded rows have no tokens in common"
        ids, places = (sequences.rows(values_P) for values_P in inputs)
        return sequences.flat(self._body(ids, places, None))

    def _body(self, ids: torch.Tensor, places: torch.Tensor, packed: Packed | None) -> torch.Tensor:
        body = self.model.base_model
        return body(input_ids=ids, position_ids=places, use_cache=False, packed=packed).last_hidden_state

    @property
    def head(self) -> nn.Linear:
        head = self.model.get_output_embeddings()
        assert isinstance(head, nn.Linear)
        return head

    def run(self, batch: MicroBatch) -> tuple[torch.Tensor, ...]:
        """Return the outputs for a micro-batch on the model's device, [P] each."""
        if batch.prefixes is None:
            sequences = PackedSequences.of(batch.lengths, batch.cu_seqlens)
        else:
            sequences = PrefixTree(batch.lengths, batch.cu_seqlens, batch.prefixes)
        return self(
            batch.token_ids,
            batch.positions,
            batch.labels,
            sequences,
            batch.head_rows,
            batch.sampling_mask,
            batch.teacher_ids,
            batch.top_k,
        )


class PackedPolicy(PackedModel):
    """A causal language model with its head."""

    def __init__(self, model: PreTrainedModel, forward: ForwardConfig) -> None:
        super().__init__(model, forward.packing)
        self.forward_config = forward
        self._rows = compiled_rows() if forward.compiled else plain_rows

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        labels: torch.Tensor,
        sequences: Packed,
        head_rows: torch.Tensor,
        sampling_mask: torch.Tensor | None,
        teacher_ids: torch.Tensor | None = None,
        top_k: int = 0,
    ) -> tuple[torch.Tensor, ...]:
        """Return log-probabilities of the labels and entropies (ForwardConfig.entropy), both [P] float32, 0 but at `head_rows`.

        With gradients those of `teacher_ids` too, [P, K]. Without them, where `top_k` asks, the outputs are those of `top_rows`.
        """
        hidden, forward = self.hidden(token_ids, positions, sequences), self.forward_config
        trained = torch.is_grad_enabled()
        told = top_k > 0 and not trained
        found = token_logprobs(
            sequences.spread(hidden, head_rows),
            self.head.weight,
            labels.index_select(0, head_rows),
            forward.temperature,
            forward.chunk_rows,
            partial(top_rows, top_k, forward.vocabulary) if told else self._rows,
            forward.dtype,
            forward.entropy,
            None if sampling_mask is None else sampling_mask.index_select(0, head_rows),
            teacher_ids.index_select(0, head_rows) if teacher_ids is not None and (told or trained) else None,
        )
        return tuple(among_zeros(values_R, head_rows, len(labels)) for values_R in found)


class PackedCritic(PackedModel):
    """A transformer whose head gives one number."""

    def __init__(self, model: PreTrainedModel, forward: ForwardConfig) -> None:
        super().__init__(model, forward.packing)

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        _labels: torch.Tensor,
        sequences: Packed,
        *_: object,
    ) -> tuple[torch.Tensor]:
        """Return the value at each position, [P] float32: what is expected before the next token is known."""
        hidden = self.hidden(token_ids, positions, sequences)
        return (sequences.spread(hidden.float() @ self.head.weight[0].float()),)


class PackedRewardModel(PackedModel):
    """A transformer whose head gives one number for a sample."""

    def __init__(self, model: PreTrainedModel, forward: ForwardConfig) -> None:
        super().__init__(model, forward.packing)
        self._padding: int | None = model.config.get_text_config().pad_token_id

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        _labels: torch.Tensor,
        sequences: Packed,
        *_: object,
    ) -> tuple[torch.Tensor]:
        """Return the score of each sample at its last position, and 0 at all others, [P] float32."""
        hidden = self.hidden(token_ids, positions, sequences)
        ends_B, last_B = score_places(token_ids, sequences.cu_seqlens, self._padding)
        scores_B = sequences.spread(hidden, last_B).float() @ self.head.weight[0].float()
        return (among_zeros(scores_B, ends_B, len(token_ids)),)


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
    compiled: bool = False,
) -> AnyPacked:
    """Return the model of `source`, sharded; rank 0 reads it, in the type of its files, and each rank casts its shards.

    Args:
        packed: PackedPolicy, PackedCritic or PackedRewardModel.
        trained: section with what is trained; None: nothing. What is frozen as a whole, also below adapters, is kept in the type of the
            computation.
        seed: of the first values of adapters.
        compiled: its layers are compiled, for packed samples of any lengths.
        averaged: it becomes an average of what is trained, and is kept in the same type.

    Raises:
        DataError: `source` is no model in Hugging Face format, or does not have what the configuration names.
    """
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
    if forward.packing:
        require_attention_only(empty)
    for module in empty.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0  # old and new log-probabilities of a policy must come from the same function
    mark_trained(empty, trained, DTYPES[kept])
    model = packed(empty, forward).train(trained is not None)
    for layer in units(empty, {}) if compiled else ():
        layer.compile(dynamic=True)
    shard(model, empty, fsdp, kept, world)
    offloaded = fsdp.cpu_offload and world.device.type == "cuda"
    model.to_empty(device="cpu" if offloaded else world.device)
    empty.tie_weights()  # to_empty gave tied parameters a storage each
    _fill(model, next(iter(stored), None), types, world)
    return model


@torch.no_grad()
def _fill(model: PackedModel, whole: PreTrainedModel | None, types: Mapping[str, str], world: World) -> None:
    """Give each parameter its values, one after the other, and let go of what rank 0 has read of it.

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
    """Free what forward passes without backward left gathered."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def own_state(model: PackedModel) -> dict[str, torch.Tensor]:
    """Return parameters and buffers as they are saved, and loaded in place: what is tied to another one, under that one's name only."""
    free_gathered(model)
    held = {name for name, _ in model.named_parameters()} | {name for name, _ in model.named_buffers()}
    return {name: value for name, value in model.state_dict().items() if name in held}
