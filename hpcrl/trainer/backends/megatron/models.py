"""Megatron-core's GPTModel with heads for reinforcement learning: a policy gives log-probabilities instead of logits, a critic gives values."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from torch import nn

from hpcrl.config.rules.megatron_groups import padded
from hpcrl.trainer.backends.megatron.architecture import Architecture
from hpcrl.trainer.backends.megatron.head import VocabularyShare
from hpcrl.trainer.backends.megatron.layers import layer_specs
from hpcrl.trainer.backends.megatron.packed import Packing
from hpcrl.trainer.backends.megatron.process_groups import tensor_group
from hpcrl.trainer.models.forward import ForwardConfig
from hpcrl.trainer.models.logprobs import among_zeros, token_logprobs


class StageModel(GPTModel):
    """A pipeline stage, or a part of one, over packed samples.

    Its forward takes `input_ids` [1, P_own] and `packed_seq_params`, a Packing, and `labels` [P]. It returns hidden states, or in the last stage
    the outputs for the micro-batch [K, P] float32.

    Args:
        chunk: which of the stage's parts, with an interleaved schedule; None: it has one.
    """

    def __init__(
        self, config: TransformerConfig, architecture: Architecture, forward: ForwardConfig, chunk: int | None
    ) -> None:
        tensor = parallel_state.get_tensor_model_parallel_world_size()
        specs: Any = layer_specs(config, chunk)  # it takes a whole block too
        super().__init__(
            config,
            specs,
            padded(architecture.vocab_size, tensor),
            architecture.max_positions,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=chunk),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=chunk),
            share_embeddings_and_output_weights=architecture.tied,
            position_embedding_type="rope",
            vp_stage=chunk,
        )
        self._padding, self._forward_config = architecture.padding, forward
        self.rotary_pos_emb.inv_freq = architecture.inv_freq.to(self.rotary_pos_emb.inv_freq.device)
        for name, parameter in self.named_parameters():
            if ".experts." in name:
                # Megatron-core marks them only where ranks share the experts; their optimizer is one of its own then, and a checkpoint
                # of a layout with two could not be loaded by one with one
                marked: Any = parameter
                marked.allreduce = False

    def _preprocess(self, input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        hidden, *rest = super()._preprocess(input_ids, *args, **kwargs)
        if hidden is not None and self._padding is not None:
            ids = input_ids[0]
            if self.config.sequence_parallel:
                ids = ids.chunk(tensor_group().size())[tensor_group().rank()]
            hidden = torch.where((ids == self._padding)[:, None, None], hidden.detach(), hidden)
        if hidden is not None and self.training and self.config.recompute_granularity is not None:
            # what is recomputed only runs backward where an input wants a gradient, which a frozen embedding's would not
            hidden.requires_grad_(True)
        return hidden, *rest

    def _postprocess(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, hidden_states: torch.Tensor, *, labels: torch.Tensor, packed_seq_params: Packing, **_: Any
    ) -> torch.Tensor:
        return self.outputs(hidden_states, packed_seq_params, labels) if self.post_process else hidden_states

    def outputs(self, hidden: torch.Tensor, packing: Packing, labels_P: torch.Tensor) -> torch.Tensor:
        """Return [K, P] for the last hidden states [P_own, 1, D], or their part where tokens are shared by tensor parallelism."""
        raise NotImplementedError


class PolicyModel(StageModel):
    """A causal language model: its outputs are log-probabilities of the labels and entropies, or as `LogprobHead` has them."""

    def __init__(
        self, config: TransformerConfig, architecture: Architecture, forward: ForwardConfig, chunk: int | None
    ) -> None:
        super().__init__(config, architecture, forward, chunk)
        if self.post_process:
            tied_here = self.pre_process and self.share_embeddings_and_output_weights
            self.output_layer = LogprobHead(config, architecture.vocab_size, forward, skip_weight=tied_here)
        if self.pre_process or self.post_process:  # again, for this head; the first and the last stage do it together
            self.setup_embeddings_and_output_layer()

    def outputs(self, hidden: torch.Tensor, packing: Packing, labels_P: torch.Tensor) -> torch.Tensor:
        weight = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        return packing.whole(self.output_layer(hidden, packing.share(labels_P), weight, packing)).T


class LogprobHead(ColumnParallelLinear):
    """The output head with what follows it. Called as the module that has the weight, it meets the hooks that wait for that weight."""

    def __init__(
        self, config: TransformerConfig, vocabulary: int, forward: ForwardConfig, *, skip_weight: bool
    ) -> None:
        group, init = tensor_group(), config.init_method
        assert init is not None
        super().__init__(
            config.hidden_size,
            padded(vocabulary, group.size()),
            config=config,
            init_method=init,
            bias=False,
            skip_weight_param_allocation=skip_weight,
            tp_group=group,
        )
        self._share = VocabularyShare.of(group, self.output_size_per_partition, vocabulary)
        self.forward_config = forward

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        hidden: torch.Tensor,
        labels: torch.Tensor,
        weight: torch.Tensor | None,
        packing: Packing,
    ) -> torch.Tensor:
        """Return log-probabilities and entropies of labels [P_own] for hidden states as `outputs` takes them, [P_own, 2]; 0 but at `own_rows`.

        With gradients log-probabilities of `own_ids` too, [P_own, 2 + K]. Without them, where `top_k` asks, log-probabilities of the labels, and
        ids and log-probabilities as of `top_rows`, [P_own, 1 + 2 K].
        """
        forward, group, rows = self.forward_config, self._share.group, packing.own_rows
        trained = torch.is_grad_enabled()
        told = packing.top_k > 0 and not trained
        assert rows is not None
        if self.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, True, group).index_select(0, rows)
        else:
            hidden = copy_to_tensor_model_parallel_region(hidden.index_select(0, rows), group)
        weight = self.weight if weight is None else weight
        assert weight is not None
        found = token_logprobs(
            hidden[:, 0],
            weight,
            labels.index_select(0, rows),
            forward.temperature,
            forward.chunk_rows,
            partial(self._share.top_rows, packing.top_k, forward.vocabulary) if told else self._share.rows,
            forward.dtype,
            forward.entropy,
            packing.own_mask,
            packing.own_ids if told or trained else None,
        )
        # of ids float32 has every number up to 2^24
        columns = [column.float() if column.ndim > 1 else column[:, None] for column in found]
        return among_zeros(torch.cat(columns, -1), rows, len(labels))


class CriticModel(StageModel):
    """A transformer whose head gives one number: its outputs are values, what is expected before the next token is known."""

    def __init__(
        self, config: TransformerConfig, architecture: Architecture, forward: ForwardConfig, chunk: int | None
    ) -> None:
        super().__init__(config, architecture, forward, chunk)
        if self.post_process:
            del self.output_layer
            device, dtype = torch.cuda.current_device(), config.params_dtype
            self.value_head = nn.Linear(config.hidden_size, 1, bias=False, device=device, dtype=dtype)

    def outputs(self, hidden: torch.Tensor, packing: Packing, labels_P: torch.Tensor) -> torch.Tensor:  # noqa: ARG002 - as a policy
        if self.config.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, False)
        return packing.whole(self.value_head(hidden[:, 0]).float()).T

    def sharded_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        # GPTModel's looks for the head of the vocabulary
        return MegatronModule.sharded_state_dict(self, *args, **kwargs)
