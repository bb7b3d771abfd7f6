"""A transformers model, sharded over all ranks with FSDP2, that answers with log-probabilities instead of logits."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from hpcrl.config.model import FSDPConfig
from hpcrl.errors import DataError
from hpcrl.trainer.attention import PACKED, Layout
from hpcrl.trainer.logprobs import token_logprobs
from hpcrl.trainer.world import World
from hpcrl.types import MicroBatch

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "bfloat16": torch.bfloat16, "float32": torch.float32}


_LOGIT_CHANGES = ("logits_scaling", "logit_scale", "final_logit_softcapping")


class PackedPolicy(nn.Module):
    """A causal language model over packed samples.

    The head runs inside this forward: FSDP gathers what belongs to the root, the (maybe tied) embedding and head, exactly there.

    Args:
        model: the language model with its head.
        chunk_rows: tokens whose logits exist at the same time.
    """

    def __init__(self, model: PreTrainedModel, temperature: float, chunk_rows: int) -> None:
        super().__init__()
        self.model = model
        self._temperature, self._chunk_rows = temperature, chunk_rows

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, labels: torch.Tensor, packed: Layout
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return log-probabilities of the labels and entropies, both [P] float32."""
        hidden = self.model.base_model(
            input_ids=token_ids.unsqueeze(0), position_ids=positions.unsqueeze(0), use_cache=False, packed=packed
        ).last_hidden_state[0]
        head = self.model.get_output_embeddings()
        assert isinstance(head, nn.Linear)
        return token_logprobs(hidden, head.weight, labels, self._temperature, self._chunk_rows)

    def run(self, batch: MicroBatch, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Call the model on a micro-batch that lies on `device`."""
        layout = Layout.of(batch.lengths, device)
        return self(batch.token_ids, batch.positions, batch.labels, layout)


def load_policy(
    path: str, fsdp: FSDPConfig, world: World, *, trained: bool, temperature: float, chunk_rows: int
) -> PackedPolicy:
    """Return the model at `path`, sharded; rank 0 reads it and each rank receives its shards.

    Args:
        trained: keep fp32 parameters that want gradients; otherwise parameters of the compute type that do not.

    Raises:
        DataError: `path` is no causal language model in Hugging Face format.
    """
    dtype = torch.float32 if trained else DTYPES[fsdp.mixed_precision.param_dtype]
    whole = _read(path, dtype) if world.first else None
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(read_config(path), dtype=dtype, attn_implementation=PACKED)
    policy = PackedPolicy(empty, temperature, chunk_rows).train(trained).requires_grad_(trained)
    for module in policy.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0  # old and new log-probabilities of a policy must come from the same function
    _check_head(empty, path)
    _shard(policy, fsdp, init_device_mesh(world.device.type, (world.size,)))
    offloaded = fsdp.cpu_offload and world.device.type == "cuda"
    policy.to_empty(device="cpu" if offloaded else world.device)
    empty.tie_weights()  # to_empty gave tied parameters a storage each
    _fill(policy, whole, world)
    return policy


def _check_head(model: PreTrainedModel, path: str) -> None:
    """Refuse models whose logits are more than the hidden state times the head's weight: their log-probabilities would be wrong.

    Raises:
        DataError: names what the model has.
    """
    found = [name for name in _LOGIT_CHANGES if getattr(model.config, name, None) not in (None, 1.0)]
    if getattr(model.get_output_embeddings(), "bias", None) is not None:
        found.append("a bias in its output head")
    if found:
        raise DataError(f"the model at {path} has {', '.join(found)}, which this version of hpcrl cannot train")


def read_config(path: str) -> PreTrainedConfig:
    """Return the transformers configuration at `path`.

    Raises:
        DataError: there is none.
    """
    try:
        return AutoConfig.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise _not_a_model(path, error) from error


def _read(path: str, dtype: torch.dtype) -> PreTrainedModel:
    disable_progress_bar()  # of no use in a log file
    try:
        return AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation=PACKED)
    except (OSError, ValueError) as error:
        raise _not_a_model(path, error) from error


def _not_a_model(path: str, error: Exception) -> DataError:
    return DataError(
        f"model {path!r} cannot be loaded: expected a directory or hub id of a causal language model in Hugging Face "
        f"format (config.json, *.safetensors, tokenizer). Check trainer.policy.model.path and trainer.ref.model.path. ({error})"
    )


def _shard(policy: PackedPolicy, fsdp: FSDPConfig, mesh: DeviceMesh) -> None:
    precision = MixedPrecisionPolicy(
        param_dtype=DTYPES[fsdp.mixed_precision.param_dtype], reduce_dtype=DTYPES[fsdp.mixed_precision.reduce_dtype]
    )
    offload = CPUOffloadPolicy() if fsdp.cpu_offload and mesh.device_type == "cuda" else OffloadPolicy()
    layer_names = set(policy.model._no_split_modules or ())
    for module in policy.modules():
        if type(module).__name__ in layer_names:
            fully_shard(
                module,
                mesh=mesh,
                reshard_after_forward=fsdp.reshard_after_forward,
                mp_policy=precision,
                offload_policy=offload,
            )
    # backward starts with the root's head, so freeing it after forward would only gather it twice
    fully_shard(policy, mesh=mesh, reshard_after_forward=False, mp_policy=precision, offload_policy=offload)
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            # losses arrive divided by the global token count: gradients of ranks are added. Sum is also all that gloo has.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def _fill(policy: PackedPolicy, whole: PreTrainedModel | None, world: World) -> None:
    state = {f"model.{name}": tensor for name, tensor in whole.state_dict().items()} if whole is not None else {}
    set_model_state_dict(policy, state, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
    # buffers outside the state dict (rotary frequencies) are computed at construction, which the meta device made void;
    # FSDP leaves buffers where they are, so they go to the computing device also where parameters are offloaded
    sources = dict(whole.named_buffers()) if whole is not None else {}
    for name, empty in list(policy.model.named_buffers()):
        buffer = sources[name].to(world.device) if world.first else torch.empty_like(empty, device=world.device)
        torch.distributed.broadcast(buffer, src=0)
        owner, _, leaf = name.rpartition(".")
        setattr(policy.model.get_submodule(owner), leaf, buffer)


def free_gathered(policy: PackedPolicy) -> None:
    """Free what forward passes without backward left gathered."""
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
