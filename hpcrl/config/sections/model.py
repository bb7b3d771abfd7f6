"""Sections `trainer.policy`, `trainer.ref` and `trainer.critic`: the models, how they are sharded, adapted and optimized."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from hpcrl.config.effects import (
    OBJECTIVE,
    OTHER_MODEL,
    OTHER_MOMENTS,
    OTHER_REFERENCE,
    ROUNDING,
    SAME_NUMBERS,
    SPREAD,
    UPDATES,
    WRITTEN,
)
from hpcrl.config.fields import Location
from hpcrl.config.sections.diffusers import DiffusersConfig
from hpcrl.config.sections.megatron import MegatronConfig, RefMegatronConfig
from hpcrl.config.setting import (
    ALL_OR_COUNT,
    COUNT,
    NOT_NEGATIVE,
    POSITIVE,
    SHARE,
    SHARE_BELOW_1,
    Check,
    Effect,
    Range,
    Unimplemented,
    any_of,
    required,
    section,
    setting,
    when,
)

LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""For which vLLM can reserve room."""


@dataclass(frozen=True)
class Pretrained:
    """A model in Hugging Face format, wherever it is loaded.

    Attributes:
        path: directory or hub id.
        revision: branch, tag or commit on the hub; None: its main branch.
    """

    path: str
    revision: str | None = None

    def __str__(self) -> str:
        return self.path if self.revision is None else f"{self.path} (revision {self.revision})"

    @property
    def at_revision(self) -> dict[str, Any]:
        """The keyword arguments that say to transformers and huggingface_hub which revision is meant."""
        return {} if self.revision is None else {"revision": self.revision}


def rope_parameters(own: dict[str, Any], scaling: dict[str, Any], theta: float | None) -> dict[str, Any]:
    """Return the entry `rope_parameters` of config.json, for trainer and engines alike.

    All of its keys are set: transformers and vLLM prefer a base in the model's own rope_parameters to a rope_theta beside it.

    Args:
        own: the model's rope_parameters.
        scaling: replaces them but for the base; empty: the model's own.
        theta: the base; None: that of `scaling`, else the model's own.
    """
    parameters = {"rope_theta": own["rope_theta"], **(scaling or own)}
    return parameters if theta is None else parameters | {"rope_theta": theta}


WarmupShape = Literal["between", "to_lr", "from_start", "below_lr"]
Scheduler = Literal["constant_with_warmup", "linear", "cosine", "sqrt", "inverse_sqrt"]


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    rank: int = setting(0, range=NOT_NEGATIVE)
    """Rank of the adapters; 0: no adapters, all weights are trained."""

    alpha: float = setting(16.0, range=POSITIVE)
    """Adapters are scaled by alpha / rank."""

    dropout: float = setting(0.0, range=SHARE_BELOW_1)
    """Probability of dropping an input of an adapter in training."""

    target_modules: str | list[str] = "all-linear"
    """Modules that get adapters: "all-linear" (every linear layer but the output head), or parts of their names."""

    target_parameters: list[str] | None = None
    """Parameters of experts that get adapters too, each expert its own: parts of names, as transformers has them, such as "experts" or "experts.down_proj"; unset: none."""

    exclude_modules: str | list[str] | None = None
    """Modules that never get adapters, whatever target_modules and target_parameters say: parts of their names; unset: none."""

    init_method: Literal["kaiming", "xavier", "normal", "zero", "gaussian", "eva", "olora", "pissa"] = "kaiming"
    """How adapters start. kaiming, xavier, normal, zero, gaussian: the first matrix by that distribution, the second at 0. olora, pissa: both from the weights below them, which start without that part. eva: both from the activations of the model."""

    adapter_path: Location | None = None
    """Directory of adapters in PEFT's format, such as an export's adapter/, with which the run begins, instead of init_method. They adapt the
    same modules with the same ranks, and are scaled to this alpha. Unset: the run begins with the model as it is."""

    use_rslora: bool = False
    """Scale adapters by alpha / sqrt(rank) instead (arXiv:2312.03732)."""

    modules_to_save: list[str] | None = None
    """Modules that are trained whole and get no adapter: parts of their names; unset: none."""

    alpha_pattern: dict[str, float] = setting({})
    """Other alphas for the modules whose names match these regular expressions."""

    rank_pattern: dict[str, int] = setting(
        {},
        check=Check(
            "expected ranks of at least 1, found {value}", lambda ranks: all(rank >= 1 for rank in ranks.values())
        ),
    )
    """Other ranks for the modules whose names match these regular expressions."""

    @property
    def begins_from_weights(self) -> bool:
        """Whether adapters begin as a part of the weights below them, which begin without that part."""
        return self.rank > 0 and self.init_method in ("olora", "pissa") and self.adapter_path is None

    @property
    def begins_with_model(self) -> bool:
        """Whether version 0 of the policy is the model where it lies, and need not be published."""
        return self.rank == 0 or not (self.adapter_path is not None or self.begins_from_weights)

    @property
    def largest_rank(self) -> int:
        return max(self.rank, *self.rank_pattern.values(), 0)

    @property
    def loadable(self) -> bool:
        """Whether engines can load adapters of this kind."""
        return not (self.modules_to_save or self.target_parameters or self.begins_from_weights)

    @property
    def has_bits_where_loaded(self) -> bool:
        """Whether an engine that loads such adapters, whose second matrices are scaled then, can compute the trainer's numbers to the last bit."""
        others = self.dropout or self.use_rslora or self.alpha_pattern or self.rank_pattern
        # scaling by a power of two rounds nothing
        return self.loadable and not others and math.frexp(self.alpha / self.rank)[0] == 0.5


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    path: Location = required(why="the user names the model")
    """Directory or hub id of a model in Hugging Face format; its tokenizer and generation settings are used too, and the engines serve it."""

    revision: str | None = None
    """Branch, tag or commit of the model on the hub; unset: its main branch."""

    lora: LoraConfig = section(LoraConfig, used_by=when(".lora.rank"))

    @property
    def pretrained(self) -> Pretrained:
        return Pretrained(self.path, self.revision)


@dataclass(frozen=True, kw_only=True)
class RefModelConfig:
    path: Location | None = None
    """Model that the KL term compares with; unset: the policy's initial model."""

    revision: str | None = setting(None, used_by=when(".path"))
    """Branch, tag or commit of that model on the hub; unset: its main branch, or with path unset the policy's revision."""

    @property
    def pretrained(self) -> Pretrained | None:
        """The model; None: the policy's initial model."""
        return Pretrained(self.path, self.revision) if self.path else None


@dataclass(frozen=True, kw_only=True)
class CriticModelConfig:
    path: Location | None = None
    """Model that the critic starts from: any causal language model, or one with the critic's output layer (trainer.algorithm.value_head_prefix); unset: no critic. What it learns counts with advantage_estimator=gae or your own; with others it is trained and reported, no more."""

    revision: str | None = None
    """Branch, tag or commit of that model on the hub; unset: its main branch."""

    lora: LoraConfig = section(LoraConfig, used_by=when(".lora.rank"))

    @property
    def pretrained(self) -> Pretrained | None:
        """The model; None: there is no critic."""
        return Pretrained(self.path, self.revision) if self.path is not None else None


_FALLING = when(
    ".scheduler", test=lambda scheduler: scheduler != "constant_with_warmup", needs="a {section}.scheduler that falls"
)
_TO_AN_END = when(".scheduler", "linear", "cosine", "sqrt")
_SHARES_GPUS = any_of(when("trainer.placement.colocate_all"), when("trainer.placement.lend"))
_WARM_UP = any_of(
    when(".num_warmup_steps"), when(".warmup_ratio"), needs="a warm-up ({section}.num_warmup_steps or warmup_ratio)"
)


@dataclass(frozen=True, kw_only=True)
class ParameterGroupConfig:
    """Trained parameters with a learning rate and a weight decay of their own."""

    match: str
    """Regular expression that is searched in the names of trained parameters, which are those of freeze_pattern. Adapters are named as in PEFT's files: "lora_B" finds their second matrices. It has to find one, and none of another group."""

    lr_factor: float = setting(1.0, range=NOT_NEGATIVE)
    """Factor of the learning rate; 0: they stay as they are, as with freeze_pattern, which saves their gradients and moments too."""

    weight_decay: float | None = setting(None, range=NOT_NEGATIVE)
    """Weight decay; unset: that of the section."""


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    name: Literal["AdamW", "Adam", "Muon", "ScheduleFreeAdamW"] = setting("AdamW", on_change=OTHER_MOMENTS)
    """AdamW decays weights independently of the gradient, Adam adds the decay to it. Muon moves matrices of the layers by the orthogonal factor of their momentum, scaled so that learning rates and decay of AdamW fit (arXiv:2502.16982). AdamW moves all else: embeddings, head, vectors, and what comes before and behind the layers. Muon keeps one moment of matrices in place of two. ScheduleFreeAdamW needs no falling learning rate: it evaluates and exports an average of weights (arXiv:2405.15682), and learns from datasets only, with FSDP2."""

    muon_momentum: float = setting(0.95, range=Range(0, 1, high_open=True), used_by=when(".name", "Muon"))
    """Decay rate of the momentum of matrices, per optimizer step; the step looks ahead by it (Nesterov)."""

    implementation: Literal["fused", "foreach", "for-loop"] = setting("fused", on_change=SAME_NUMBERS)
    """Which of PyTorch's implementations makes the step."""

    moments: Literal["bf16", "8bit"] | None = None
    """Number type of Adam's moments, by torchao's optimizers, which compute in fp32. 8bit: one byte each, with a scale for 256 of them (arXiv:2110.02861), except for parameters with less than 4096 elements on a rank. Unset: the type of the parameters, mixed_precision.master_dtype. FSDP2 only."""

    lr: float = setting(1e-6, range=NOT_NEGATIVE)
    """Learning rate after the warm-up."""

    adam_betas: list[float] = setting(
        [0.9, 0.999],
        check=Check(
            "expected two numbers from 0 to below 1, found {value}",
            lambda betas: len(betas) == 2 and all(0 <= beta < 1 for beta in betas),
        ),
    )
    """Decay rates of Adam's first and second moment, per optimizer step."""

    eps: float = setting(1e-8, range=POSITIVE)
    """Added to the root of Adam's second moment, against division by 0."""

    weight_decay: float = setting(0.01, range=NOT_NEGATIVE)
    """Weight decay: AdamW takes lr * weight_decay of each weight away at each optimizer step."""

    groups: dict[str, ParameterGroupConfig] = setting({})
    """Parameters that learn at another rate or decay otherwise, by names of your own: tables [trainer.policy.optimizer_config.groups.NAME]. What is in none learns as this section says (docs/large_models.md)."""

    max_grad_norm: float = 1.0
    """Bound on the 2-norm of all gradients together, above which they are scaled down; 0 or less: none."""

    offload_after_step: bool = setting(True, used_by=_SHARES_GPUS, on_change=SAME_NUMBERS)
    """With engines on the trainer's GPUs: move the optimizer's state to host memory while they generate."""

    num_warmup_steps: int = setting(0, range=NOT_NEGATIVE)
    """Optimizer steps (mini-batches) over which the learning rate rises linearly to lr."""

    warmup_ratio: float | None = setting(None, range=SHARE)
    """The same as a share of all optimizer steps of the run, rounded, instead of num_warmup_steps."""

    warmup_start_factor: float = setting(0.0, range=SHARE, used_by=_WARM_UP)
    """Share of lr from which the warm-up rises."""

    warmup_shape: WarmupShape = setting("between", used_by=_WARM_UP)
    """Where step t (from 0) of a warm-up of w steps lies on the way from warmup_start_factor to lr. between: (t + 1) / (w + 1), so that every step moves, with less than lr. to_lr: (t + 1) / w, so that the last has lr, as in Cosmos-RL of January 2026. from_start: t / (w - 1), so that the first has warmup_start_factor too, as in later Cosmos-RL. below_lr: t / w, so that the first has warmup_start_factor and the last less than lr, as in transformers and SkyRL."""

    scheduler: Scheduler = "constant_with_warmup"
    """Learning rate after the warm-up: constant, or falling linearly, as a half cosine, as 1 - sqrt(progress of the decay), or as inverse_sqrt. With inverse_sqrt it is sqrt(w / (w + t)) of lr, t steps after a warm-up of w steps, and 10000 stands for w without one. Of transformers' other names, constant has no warm-up, cosine_with_min_lr a min_lr_factor, and warmup_stable_decay a decay_ratio. There, polynomial is linear with a decay_power, and cosine_with_restarts is cosine with decay_cycles."""

    decay_ratio: float | None = setting(None, range=SHARE, used_by=_TO_AN_END)
    """Share of all optimizer steps of the run, at its end, over which a learning rate falls; unset: all after the warm-up, which is also the most."""

    min_lr_factor: float = setting(0.0, range=SHARE, used_by=_FALLING)
    """Share of lr at which a falling learning rate ends."""

    decay_power: float = setting(1.0, range=POSITIVE, used_by=_TO_AN_END)
    """Power of the falling part of the learning rate: with 2 and scheduler="linear" the rate falls as (1 - progress of the decay)^2."""

    decay_cycles: int = setting(1, range=COUNT, used_by=_TO_AN_END)
    """Times that the learning rate falls, each over the same number of steps; it jumps back to lr in between."""


@dataclass(frozen=True, kw_only=True)
class CriticOptimizerConfig(OptimizerConfig):
    lr: float = setting(5e-6, range=NOT_NEGATIVE)
    """Learning rate after the warm-up."""


@dataclass(frozen=True, kw_only=True)
class MixedPrecisionConfig:
    param_dtype: Literal["bf16", "fp32", "fp16"] = "bf16"
    """Number type of parameters and activations in forward and backward."""

    reduce_dtype: Literal["bf16", "fp32"] = "fp32"
    """Number type in which gradients are summed over ranks."""

    master_dtype: Literal["bf16", "fp32"] = "fp32"
    """Type of the parameters that the optimizer changes, and of its moments; in bf16, changes below 1/256 of a parameter are lost."""


@dataclass(frozen=True, kw_only=True)
class RefPrecisionConfig:
    param_dtype: Literal["bf16", "fp32", "fp16"] | None = setting(None, why="unset: the number type of the policy")
    """Number type of the parameters and activations of this model, which is not trained; unset: as the policy."""


@dataclass(frozen=True, kw_only=True)
class TeacherPrecisionConfig:
    param_dtype: Literal["bf16", "fp32", "fp16"] = "bf16"
    """Number type of the teacher's parameters and activations."""


@dataclass(frozen=True, kw_only=True)
class ShardingConfig:
    cpu_offload: bool = False
    """Keep parameters, gradients and optimizer state in host memory outside forward and backward."""

    reshard_after_forward: bool | int = setting(
        True,
        check=Check(
            "expected true, false or at least 1 rank, found {value}", lambda ranks: ranks is False or ranks >= 1
        ),
    )
    """Free gathered parameters after the forward pass and gather them again in backward: less memory, more traffic; a number: keep them sharded over so many ranks."""

    fsdp_size: int | None = setting(
        None,
        check=ALL_OR_COUNT,
        why="unset: a node holds a copy where it can, so that parameters are not gathered over the network",
    )
    """Ranks that share one copy of the parameters; further ranks hold further copies; -1, or more than there are: all ranks share one. Unset: the ranks of a node, where there are several nodes and parameters, gradients and optimizer take at most a third of its GPUs' memory; else all. Parameters are then gathered within a node."""

    expert_parallel_size: int = setting(1, range=COUNT)
    """Ranks that share the experts of each layer of a mixture: tokens go to the ranks that have their experts, in place of weights to all ranks (docs/large_models.md). It divides the experts and the ranks of a copy."""

    wrap_policy: dict[str, Any] = setting({})
    """Modules that are sharded as units: transformer_layer_cls_to_wrap (class names), min_num_params or disable (one unit only). min_num_params makes a module a unit when so many of its parameters are in none yet. Empty: each decoder layer. Embedding and head are units of their own unless they are tied (docs/large_models.md)."""

    def copy_ranks(self, ranks: int, on_node: int, state: float = 0.0, memory: float | None = None) -> int:
        """Return how many ranks share one copy of a model's parameters with FSDP2.

        Args:
            on_node: ranks of a node.
            state: bytes of parameters, gradients and optimizer of a whole copy.
            memory: bytes of a GPU; None: not known, or there is none.
        """
        if self.fsdp_size is None:
            fits = memory is not None and state / on_node <= memory / 3 and on_node % self.expert_parallel_size == 0
            return on_node if fits and ranks > on_node and ranks % on_node == 0 else ranks
        return ranks if self.fsdp_size == -1 else min(self.fsdp_size, ranks)


@dataclass(frozen=True, kw_only=True)
class FSDPConfig(ShardingConfig):
    mixed_precision: MixedPrecisionConfig = section(MixedPrecisionConfig, on_change=ROUNDING)

    def is_needed(self, ranks: int, dtype: str, *, on_gpu: bool) -> bool:
        """Return whether FSDP2 has anything to do: to shard, to cast, or to offload.

        Args:
            dtype: that parameters are kept in.
        """
        return ranks > 1 or self.mixed_precision.param_dtype != dtype or (self.cpu_offload and on_gpu)


@dataclass(frozen=True, kw_only=True)
class ForwardShardingConfig(ShardingConfig):
    cpu_offload: bool = False
    """Keep parameters in host memory outside the forward pass."""

    fsdp_size: int | None = None
    """Of the ranks that compute this model, those that share one copy of its parameters; further ranks hold further copies; -1: all share one. Unset: those of a node, where there are several nodes and parameters take at most a third of its GPUs' memory; else all."""


@dataclass(frozen=True, kw_only=True)
class RefFSDPConfig(ForwardShardingConfig):
    mixed_precision: RefPrecisionConfig = section(RefPrecisionConfig, on_change=ROUNDING)


@dataclass(frozen=True, kw_only=True)
class ScorerFSDPConfig(RefFSDPConfig):
    mixed_precision: RefPrecisionConfig = section(RefPrecisionConfig, on_change=SAME_NUMBERS)


@dataclass(frozen=True, kw_only=True)
class TeacherFSDPConfig(ForwardShardingConfig):
    mixed_precision: TeacherPrecisionConfig = section(
        TeacherPrecisionConfig, used_by=when("trainer.distillation.backend", "fsdp2", "megatron")
    )


@dataclass(frozen=True, kw_only=True)
class LowPrecisionConfig:
    fp8: bool = False
    """Compute products of linear layers in FP8 by torchao, forward and backward, in policy and reference. Layers have inputs and outputs in multiples of 16; the head and routers of experts are excluded. Needs GPUs of compute capability 8.9 or above; CPUs compute with numbers rounded alike; FSDP2 only; excludes fp4."""

    fp4: bool = setting(False, unimplemented=Unimplemented("training in FP4, which torchao has not; use fp8"))
    """Train eligible linear layers in NVFP4; needs Blackwell GPUs; excludes fp8."""

    fp8_recipe: Literal["dynamic_scaling", "delayed_scaling"] = setting(
        "dynamic_scaling", unimplemented=Unimplemented("scales of earlier steps, which torchao no longer has")
    )
    """How FP8 scales are found: from the tensor itself, or from earlier steps."""

    fp8_granularity: Literal["rowwise", "tensorwise"] = "rowwise"
    """What shares one FP8 scale: a row, or a whole tensor."""

    fp4_recipe: Literal["dynamic_scaling", "delayed_scaling"] = setting(
        "dynamic_scaling", unimplemented=Unimplemented("training in FP4, which torchao has not; use fp8")
    )
    """How FP4 scales are found: from the tensor itself, or from earlier steps."""

    fp4_granularity: Literal["rowwise", "tensorwise"] = setting(
        "rowwise", unimplemented=Unimplemented("training in FP4, which torchao has not; use fp8")
    )
    """What shares one FP4 scale: a row, or a whole tensor."""


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig:
    aux_loss_coef: float = setting(0.0, range=NOT_NEGATIVE)
    """Weight of the loss that keeps experts equally busy (arXiv:2101.03961), taken over each sample and added over the layers; 0: none."""

    z_loss_coef: float = setting(0.0, range=NOT_NEGATIVE)
    """Weight of the loss that keeps the logits of routers small (arXiv:2202.08906), taken as that; 0: none."""

    router_replay: Literal["none", "R3"] = setting(
        "none",
        on_change=Effect(
            "warning", "groups that wait to be trained tell of no experts, and go to those of the trainer's routers"
        ),
    )
    """R3: tokens go to the experts that the engine took them to, in training and in scoring (arXiv:2510.11370); none: to those that the routers of the trainer choose."""


@dataclass(frozen=True, kw_only=True)
class PolicyConfig:
    model: ModelConfig = required(on_change=OTHER_MODEL)

    optimizer_config: OptimizerConfig = section(OptimizerConfig, on_change=UPDATES)

    fsdp_config: FSDPConfig = section(FSDPConfig, on_change=SAME_NUMBERS)

    megatron_config: MegatronConfig = section(MegatronConfig, on_change=SPREAD)

    low_precision: LowPrecisionConfig = section(LowPrecisionConfig, on_change=ROUNDING)

    experts: ExpertsConfig = section(ExpertsConfig, on_change=OBJECTIVE)

    diffusers: DiffusersConfig = section(DiffusersConfig, used_by=when(".diffusers.enable"), on_change=OBJECTIVE)

    sequence_parallel_size: int = setting(1, range=COUNT, on_change=SPREAD)
    """Ranks that share the tokens of each sample, at most as many as the model has query heads (docs/large_models.md); FSDP2 only."""

    use_torch_compile: bool | None = setting(
        None,
        on_change=SAME_NUMBERS,
        why="unset: compiled with the layers on GPUs, which gave 1.9 times the tokens/s on an H200",
    )
    """Compile the chunked computation of log-probabilities and entropy; unset: as compile_model where that is unset."""

    compile_model: bool | None = setting(None, on_change=SAME_NUMBERS)
    """Compile the layers of policy and reference with torch.compile: the first passes take minutes, later ones less time; FSDP2 only. Unset: on GPUs where a compiler works, for dense language models with settings that it was measured with (docs/large_models.md)."""

    activation_offload: bool = setting(
        False, used_by=when("trainer.gradient_checkpointing", True), on_change=SAME_NUMBERS
    )
    """Move what gradient checkpointing keeps, the inputs of layers, to host memory between forward and backward; on GPUs with FSDP2 only."""

    enable_liger_kernel: bool = setting(False, on_change=SAME_NUMBERS)
    """Compute norms, MLPs and rotary positions of policy and reference by the kernels of the package liger-kernel, on GPUs with FSDP2; the loss stays the same code."""

    record_memory: bool = setting(False, on_change=WRITTEN)
    """Write a snapshot of each rank's GPU memory after each step, and when memory runs out, into profile/ of the run directory; the newest four stay."""

    model_config_kwargs: dict[str, Any] = setting({}, on_change=OTHER_MODEL)
    """Replaces entries of the model's config.json in the trainer, the engines and exports; engines take generator.inference_engine.engine_init_kwargs.hf_overrides before it."""

    trainable_map: dict[str, bool] = setting({}, on_change=OTHER_MODEL)
    """Parameters or modules, by full name, that are trained (true) or frozen (false); in this order."""

    freeze_pattern: list[str] = setting([], on_change=OTHER_MODEL)
    """Regular expressions; parameters whose names contain a match are frozen, whatever trainable_map says."""

    @property
    def config_overrides(self) -> dict[str, Any]:
        """Entries of the model's config.json that are replaced."""
        return self.model_config_kwargs | self.megatron_config.model_config_kwargs


_AS_POLICY_SIZE = (
    "unset: as the policy, whose samples it gets; SkyRL's 1 would compute each on every rank that shares it"
)


@dataclass(frozen=True, kw_only=True)
class RefConfig:
    model: RefModelConfig = section(RefModelConfig, on_change=OTHER_REFERENCE)

    sequence_parallel_size: int | None = setting(None, range=COUNT, on_change=SPREAD, why=_AS_POLICY_SIZE)
    """Ranks that share the tokens of each sample in the reference's forward pass; not set: as many as of the policy, and on its ranks no other number."""

    fsdp_config: RefFSDPConfig = section(RefFSDPConfig, on_change=SAME_NUMBERS)

    megatron_config: RefMegatronConfig = section(RefMegatronConfig, on_change=SPREAD)

    model_config_kwargs: dict[str, Any] = setting({}, on_change=OTHER_REFERENCE)
    """Replaces entries of the reference model's config.json."""

    @property
    def config_overrides(self) -> dict[str, Any]:
        """Entries of the model's config.json that are replaced."""
        return self.model_config_kwargs | self.megatron_config.model_config_kwargs


@dataclass(frozen=True, kw_only=True)
class CriticConfig:
    model: CriticModelConfig = section(CriticModelConfig, on_change=OTHER_MODEL)

    warmup_steps: int = setting(0, range=NOT_NEGATIVE, on_change=UPDATES)
    """Steps at the beginning that train the critic alone (VAPO, arXiv:2504.05118, whose authors use 50). The policy generates, and its learning rate begins after them."""

    optimizer_config: CriticOptimizerConfig = section(CriticOptimizerConfig, on_change=UPDATES)

    fsdp_config: FSDPConfig = section(FSDPConfig, on_change=SAME_NUMBERS)

    sequence_parallel_size: int | None = setting(None, range=COUNT, on_change=SPREAD, why=_AS_POLICY_SIZE)
    """Ranks that share the tokens of each sample in the critic; not set: as many as of the policy, and on its ranks no other number."""

    model_config_kwargs: dict[str, Any] = setting({}, on_change=OTHER_MODEL)
    """Replaces entries of the critic's config.json."""
