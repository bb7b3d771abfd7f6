"""Section `trainer`: batching, schedule, checkpoints, evaluation."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from hpcrl.config.algorithm import AlgorithmConfig
from hpcrl.config.location import Location
from hpcrl.config.model import PolicyConfig, RefConfig


@dataclass(frozen=True, kw_only=True)
class PlacementConfig:
    policy_num_nodes: int = 1
    """Nodes of the trainer."""

    policy_num_gpus_per_node: int = 1
    """Trainer ranks per node, on CPU too."""


@dataclass(frozen=True, kw_only=True)
class FullyAsyncConfig:
    max_staleness_steps: int = 0
    """How many steps old the policy may be that generated a sample; 0: strictly on-policy."""


@dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    strategy: Literal["fsdp2"] = "fsdp2"
    """Training backend."""

    project_name: str = "hpcrl"
    """Directory of a project's runs under slurm.root."""

    run_name: str | None = None
    """Name of the run; unset: name of the first TOML file and the time."""

    seed: int = 42
    """Seed of everything that is drawn."""

    placement: PlacementConfig = field(default_factory=PlacementConfig)

    policy: PolicyConfig

    ref: RefConfig = field(default_factory=RefConfig)

    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)

    fully_async: FullyAsyncConfig = field(default_factory=FullyAsyncConfig)

    gradient_checkpointing: bool = True
    """Compute activations again in backward instead of keeping them."""

    resume_mode: Literal["latest", "from_path"] = "latest"
    """Where training starts: at step 0, at this run's newest checkpoint if it has one, or at resume_path."""

    resume_path: Location | None = None
    """Checkpoint directory (checkpoints/sNNNNNN) of any run, for resume_mode from_path."""

    max_ckpts_to_keep: int = -1
    """Newest checkpoints that are kept, never fewer than two; negative: all."""

    ckpt_interval: int = 10
    """Steps between checkpoints; 0 or less: none."""

    hf_save_interval: int = -1
    """Steps between exports in Hugging Face format; 0 or less: none."""

    epochs: int = 1
    """Passes over the training prompts."""

    max_steps: int | None = None
    """Last step, if the epochs do not end earlier."""

    update_epochs_per_batch: int = 1
    """Passes over the samples of one step."""

    train_batch_size: int = 1024
    """Prompts per step."""

    policy_mini_batch_size: int = 256
    """Prompts per optimizer step."""

    micro_train_batch_size_per_gpu: int = 1
    """Samples per forward and backward pass of one rank."""

    micro_forward_batch_size_per_gpu: int = 1
    """Samples per forward pass of one rank where no gradient is needed."""

    logprobs_chunk_size: int = 1024
    """Tokens whose logits exist at the same time."""

    eval_before_train: bool = True
    """Evaluate before the first step too."""

    eval_interval: int = 5
    """Steps between evaluations, with one more after the last step; 0 or less: no evaluation at all."""

    max_prompt_length: int = 512
    """Tokens; longer prompts are dropped."""

    dump_eval_results: bool = True
    """Write texts and scores of each evaluation into the run directory."""
