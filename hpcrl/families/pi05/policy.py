"""A policy that moves robots by a flow, on FSDP2: PI0.5 as a model whose outputs are log-probabilities of actions.

All else, references, adapters, checkpoints, exports, is that of language models (hpcrl/trainer/backends/fsdp/engine.py).
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from hpcrl.algorithms.diffusion.actions import action_logprobs, noise_levels
from hpcrl.config.sections.trainer import TrainerConfig
from hpcrl.config.sections.vla import Pi05Config
from hpcrl.families.pi05 import source
from hpcrl.families.pi05.architecture import file_name
from hpcrl.families.pi05.network import Pi05
from hpcrl.families.pi05.probe import probe_velocity
from hpcrl.families.pi05.rows import TurnRows
from hpcrl.families.pi05.statistics import statistics_files
from hpcrl.trainer.backends.fsdp.engine import FsdpPolicy
from hpcrl.trainer.backends.fsdp.model import ProbabilityModel, free_gathered
from hpcrl.trainer.distributed import World
from hpcrl.trainer.models.flops import ModelFlops
from hpcrl.trainer.models.forward import ForwardConfig
from hpcrl.trainer.models.hf import ModelSource
from hpcrl.trainer.models.trainable import mark_trained
from hpcrl.types import MicroBatch, to_device


@dataclass(frozen=True, kw_only=True)
class Pi05Source(ModelSource):
    """PI0.5; errors as of ModelSource."""

    def empty(self, dtype: torch.dtype, attention: str) -> Any:  # noqa: ARG002
        return source.empty(self, dtype)

    def whole(self, dtype: torch.dtype, attention: str) -> Any:  # noqa: ARG002
        return source.loaded(self, dtype)

    def stored_dtype(self) -> torch.dtype | None:
        return source.stored_dtype(self)

    def _named_dtype(self) -> None:
        return None


def action_source(trainer: TrainerConfig) -> Pi05Source:
    """Return the source of the trained model."""
    return Pi05Source(**vars(trainer.policy.model.pretrained), role="trainer.policy")


class ActionModel(ProbabilityModel):
    """PI0.5 as an FSDP policy: its outputs are log-probabilities of actions.

    Args:
        sampling: vla.pi05, by which the actions were drawn.
    """

    def __init__(self, network: Any, forward: ForwardConfig, sampling: Pi05Config) -> None:
        super().__init__(network, replace(forward, packing=False, experts=None))
        self.forward_config, self._sampling = forward, sampling

    @property
    def network(self) -> Pi05:
        network: Any = self.model
        return network

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        """Return the velocity; arguments and result as of Pi05.forward."""
        return self.model(*inputs)

    @contextmanager
    def running(self, batch: MicroBatch, scale: float | None = None) -> Iterator[tuple[torch.Tensor, ...]]:  # noqa: ARG002
        rows, method = TurnRows.of(batch, self.network.architecture), self._sampling
        steps = rows.path.shape[1] - 1
        t = to_device(torch.tensor(noise_levels(steps)[:-1]), rows.path.device).expand(len(rows.path), -1)
        velocity = self(*rows.inputs, rows.path[:, :-1], t)
        outputs = action_logprobs(velocity, rows.path, rows.sizes, method.noise_method, method.noise_level)
        yield tuple(rows.scattered(values, len(batch.token_ids)) for values in outputs)


class ActionPolicy(FsdpPolicy):
    """The policy.

    Args:
        sampling: vla.pi05.
    """

    _model: ActionModel

    def __init__(self, trainer: TrainerConfig, world: World, sampling: Pi05Config) -> None:
        super().__init__(trainer, 1.0, world, partial(ActionModel, sampling=sampling), action_source(trainer))

    @property
    def vocabulary(self) -> int:
        return int(self._model.network.architecture.vlm.text_config.vocab_size)

    def probe(self, token_ids: Sequence[int]) -> list[float]:
        with torch.no_grad():
            found = probe_velocity(self._model, self._model.network.architecture, token_ids, self._world.device)
            free_gathered(self._model)
        return found

    def _named_on_the_hub(self, piece: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {file_name(name): tensor for name, tensor in piece.items()}

    def export_config(self, directory: Path, dtype: torch.dtype) -> None:  # noqa: ARG002
        """Write the configuration of an exported model, with its robot's statistics."""
        if self._world.first:
            (directory / "config.json").write_text(self._model.network.architecture.written())
            for file in statistics_files(self.source):
                shutil.copyfile(file, directory / file.name)


def action_flops(trainer: TrainerConfig, sampling: Pi05Config) -> ModelFlops:
    """Return the operations of training: PaliGemma's layers for each token of the text, and the expert's at each denoising step of each
    executed action.

    Attention, images, and actions of a chunk that are not done are not counted.
    """
    network: Any = action_source(trainer).empty(torch.float32, "")
    mark_trained(network, trainer.policy, torch.float32)
    text = list(network.vlm.language_model.layers.parameters())
    expert = list(network.expert.parameters())
    return ModelFlops(
        sum(each.numel() for each in text),
        sampling.num_steps * sum(each.numel() for each in expert),
        0,
        sum(each.numel() for each in text if not each.requires_grad),
        not all(each.requires_grad for each in expert),
    )
