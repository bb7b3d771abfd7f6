"""The FSDP2 backend: master weights sharded over ranks, compute in the configured type, Adam."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor
from transformers import GenerationConfig
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import revert_weight_conversion

from hpcrl.config.derive import ref_model_path, ref_sharding
from hpcrl.config.model import OptimizerConfig
from hpcrl.config.trainer import TrainerConfig
from hpcrl.trainer.engine import Objective, StepReport
from hpcrl.trainer.model import PackedPolicy, Passes, free_gathered, load_policy
from hpcrl.trainer.schedule import lr_factor
from hpcrl.trainer.sharding import one_copy
from hpcrl.trainer.source import Source
from hpcrl.trainer.world import World
from hpcrl.types import MicroBatch


class FsdpEngine:
    """Engine (hpcrl/trainer/engine.py) on FSDP2.

    Args:
        temperature: divides the logits of policy and reference.
    """

    def __init__(self, trainer: TrainerConfig, temperature: float, world: World) -> None:
        self._config, self._world = trainer.policy, world
        self.updates = 0
        self._total_updates = 0
        passes = Passes(
            temperature=temperature,
            chunk_rows=trainer.logprobs_chunk_size,
            packing=trainer.use_sample_packing,
            flash=trainer.flash_attn,
            compiled=trainer.policy.use_torch_compile,
        )
        self._policy = load_policy(
            policy_source(trainer), trainer.policy.fsdp_config, passes, world, trained=trainer.policy
        )
        if trainer.gradient_checkpointing:
            reentrant = trainer.gradient_checkpointing_use_reentrant
            self._policy.model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            if reentrant:  # it only runs backward where an input wants a gradient, which a frozen embedding's would not
                self._policy.model.enable_input_require_grads()
        self._reference: PackedPolicy | None = None
        if trainer.algorithm.use_kl_loss:
            self._reference = load_policy(reference_source(trainer), ref_sharding(trainer), passes, world)
        trained = [parameter for parameter in self._policy.parameters() if parameter.requires_grad]
        self._optimizer = torch.optim.Adam(trained, **adam_settings(trainer.policy.optimizer_config))

    def schedule(self, total_updates: int) -> None:
        self._total_updates = total_updates

    def logprobs(self, batch: MicroBatch, *, reference: bool = False) -> torch.Tensor:
        policy = self._reference if reference else self._policy
        assert policy is not None, "this engine was made without a reference"
        with torch.no_grad():
            logprobs_P, _ = policy.run(self._moved(batch), self._world.device)
            free_gathered(policy)
            return logprobs_P.cpu()

    def forward_backward(self, batch: MicroBatch, objective: Objective) -> dict[str, torch.Tensor]:
        batch = self._moved(batch)
        logprobs_P, entropies_P = self._policy.run(batch, self._world.device)
        loss, sums = objective(batch, logprobs_P, entropies_P)
        loss.backward()
        return sums

    def step(self) -> StepReport:
        optimizer = self._config.optimizer_config
        lr = optimizer.lr * lr_factor(optimizer, self.updates, self._total_updates)
        gradients = [_local(p.grad) for p in self._policy.parameters() if p.grad is not None]
        norm = self._norm(gradients)
        finite = math.isfinite(norm)
        if finite:
            if 0 < optimizer.max_grad_norm < norm:
                for gradient in gradients:
                    gradient.mul_(optimizer.max_grad_norm / norm)
            for group in self._optimizer.param_groups:
                group["lr"] = lr
            self._optimizer.step()
            self.updates += 1
        self._optimizer.zero_grad(set_to_none=True)
        return StepReport(norm, lr, skipped=not finite)

    def _norm(self, gradients: list[torch.Tensor]) -> float:
        # torch.nn.utils.get_total_norm calls this too, but in the type of the gradients
        norms = torch._foreach_norm(gradients, 2.0, dtype=torch.float32)  # pyright: ignore[reportPrivateImportUsage]
        squared = torch.stack(norms).square().sum()
        dist.all_reduce(squared, group=one_copy(self._policy))
        return squared.sqrt().item()

    def save(self, directory: Path) -> None:
        save(self._state(), checkpoint_id=directory, process_group=self._world.control)

    def restore(self, directory: Path) -> None:
        state = self._state()
        load(state, checkpoint_id=directory, process_group=self._world.control)
        for group in state["optimizer"]["param_groups"]:  # not the settings of the run that saved
            group |= adam_settings(self._config.optimizer_config)
        set_state_dict(
            self._policy, self._optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )
        self.updates = int(state["updates"])

    def _state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self._policy, self._optimizer)
        return {"model": model, "optimizer": optimizer, "updates": torch.tensor(self.updates)}

    def export_weights(self, dtype: torch.dtype) -> Iterator[dict[str, torch.Tensor]]:
        model = self._policy.model
        free_gathered(self._policy)
        # transformers fuses experts and the like at load; files keep the names of the hub
        converted = bool(get_model_conversion_mapping(model, add_legacy=False))
        for name, parameter in model.named_parameters():
            # cast first: what is gathered is then no larger than what is written
            cast = parameter.detach().to(dtype)
            assert isinstance(cast, DTensor)
            whole = cast.full_tensor()
            piece = {name: whole.cpu()} if self._world.first else {}
            yield revert_weight_conversion(model, piece) if converted and piece else piece
        kept = model.state_dict().keys() if self._world.first else ()
        yield {name: buffer.cpu() for name, buffer in model.named_buffers() if name in kept}

    def export_config(self, directory: Path, dtype: torch.dtype) -> None:
        if not self._world.first:
            return
        config = type(self._policy.model.config).from_dict(self._policy.model.config.to_dict())
        config.dtype = dtype
        config.save_pretrained(directory)
        with suppress(OSError):  # a model need not have one
            GenerationConfig.from_pretrained(self._config.model.path).save_pretrained(directory)

    def _moved(self, batch: MicroBatch) -> MicroBatch:
        device = self._world.device
        tensors = {name: value.to(device) for name, value in vars(batch).items() if isinstance(value, torch.Tensor)}
        return replace(batch, **tensors)


def policy_source(trainer: TrainerConfig) -> Source:
    """Return the model that is trained, as it is loaded."""
    return Source(
        path=trainer.policy.model.path,
        role="trainer.policy",
        config_kwargs=trainer.policy.model_config_kwargs,
        rope_scaling=trainer.rope_scaling,
        rope_theta=trainer.rope_theta,
    )


def reference_source(trainer: TrainerConfig) -> Source:
    """Return the model of the KL term, as it is loaded."""
    return replace(
        policy_source(trainer),
        path=ref_model_path(trainer),
        role="trainer.ref",
        config_kwargs=trainer.ref.model_config_kwargs,
    )


def adam_settings(optimizer: OptimizerConfig) -> dict[str, Any]:
    """Return what torch.optim.Adam is made with."""
    return {
        "lr": optimizer.lr,
        "betas": tuple(optimizer.adam_betas),
        "eps": optimizer.eps,
        "weight_decay": optimizer.weight_decay,
        "decoupled_weight_decay": optimizer.name == "AdamW",
        "fused": optimizer.implementation == "fused",
        "foreach": optimizer.implementation == "foreach",
    }


def _local(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient
