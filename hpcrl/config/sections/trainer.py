"""Section `trainer`: models, batching, schedule, checkpoints, evaluation."""

from __future__ import annotations

import json
import math
import re
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from hpcrl.config.conditions import CRITIC, ENGINES, OFFLINE, RL, RL_OR_SFT, SFT
from hpcrl.config.effects import (
    ENDS_A_RUN,
    LAST_STEP,
    OBJECTIVE,
    OTHER_DIRECTORY,
    OTHER_FUNCTION,
    OTHER_PROMPTS,
    OTHER_RUN,
    OTHER_TOKENS,
    ROUNDING,
    SAME_NUMBERS,
    SPREAD,
    UPDATES,
    WRITTEN,
)
from hpcrl.config.fields import Location
from hpcrl.config.sections.alerts import AlertsConfig
from hpcrl.config.sections.algorithm import AlgorithmConfig
from hpcrl.config.sections.distillation import DistillationConfig
from hpcrl.config.sections.dpo import DPOConfig
from hpcrl.config.sections.megatron import MegatronModelConfig
from hpcrl.config.sections.model import (
    CriticConfig,
    ExpertsConfig,
    FSDPConfig,
    LoraConfig,
    MixedPrecisionConfig,
    PolicyConfig,
    Pretrained,
    RefConfig,
    RefFSDPConfig,
    ShardingConfig,
    TeacherFSDPConfig,
)
from hpcrl.config.sections.placement import PlacementConfig
from hpcrl.config.sections.profiler import ProfilerConfig
from hpcrl.config.sections.reward_model import RewardModelConfig
from hpcrl.config.sections.sft import SFTConfig
from hpcrl.config.sections.upload import UploadConfig
from hpcrl.config.setting import (
    COUNT,
    NOT_NEGATIVE,
    POSITIVE,
    SHARE,
    Check,
    Effect,
    Range,
    Unimplemented,
    section,
    setting,
    when,
)
from hpcrl.errors import DataError

LOGGERS = ("tensorboard", "console", "wandb", "mlflow", "swanlab", "trackio")


@dataclass(frozen=True, kw_only=True)
class FullyAsyncConfig:
    max_staleness_steps: int = setting(
        0,
        range=NOT_NEGATIVE,
        why="one training loop serves both kinds, and is on-policy by default; SkyRL reads its 4 only in its fully asynchronous trainer",
    )
    """How many steps old the policy may be that generated a sample; 0: strictly on-policy."""

    num_parallel_generation_workers: int | None = setting(
        None, range=COUNT, why="unset: computed from batch size and staleness; SkyRL's 768 fits one batch size only"
    )
    """Groups that are generated at the same time, by all replicas together; unset: as many as max_staleness_steps allows."""

    sync_weight_interval: int = setting(1, range=COUNT)
    """Steps between weight updates of the engines; at most max_staleness_steps + 1. What is evaluated, and the last step, is published
    in any case."""

    oversampling_ratio: float = setting(1.0, range=Range(1, 1000))
    """Groups that are begun per group that a step trains. Above 1, a step does not wait for its slowest groups. Surplus groups train
    in a later step where max_staleness_steps allows it, and are dropped otherwise, so that long responses are trained less often."""

    @property
    def kept_versions(self) -> int:
        """Versions of the weights that stay readable: all that engines may still load or generate with."""
        return self.max_staleness_steps + 2


_HIGHER = re.compile(
    r"score|avg_score|(avg_)?pass_at_\d+|((avg_raw|mean_positive)_)?reward|(\w+_)?accurac(y|ies)|margins"
)
_LOWER = re.compile(r"(\w+_)?loss|nll|perplexity")
_PAIRWISE = ("dpo", "reward_model")  # values of trainer.mode
_PASS = "unset: a GPU gets passes of many tokens, since each pass gathers all parameters; one sample on a CPU"


_DIRECTORY_NAME = Check(
    "expected a directory name of at most 128 letters, digits, '.', '_' and '-' that starts with a letter or digit, found "
    "{value!r:.140}",
    # a sweep makes longer names of it, and a filesystem takes 255
    lambda name: re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", name) is not None,
)


_SCORERS = when(
    "has_scorers",
    needs="trainer.distillation.enable, a reference on nodes of its own (trainer.placement.colocate_policy_ref=false), or environment.reward_model.model",
)


@dataclass(frozen=True)
class Recomputation:
    """Activations that are computed again in backward, as trainer.gradient_checkpointing_* say."""

    every: int
    keep: Literal["nothing", "attention"]
    reentrant: bool


@dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    mode: Literal["rl", "sft", "dpo", "reward_model"] = setting("rl", on_change=OTHER_RUN)
    """Learn from rewards, from given conversations and texts (supervised fine-tuning), or from pairs of answers of which one is preferred: a policy (DPO), or a reward model."""

    strategy: Literal["fsdp2", "megatron"] = setting(
        "fsdp2", on_change=Effect("warning", "the other backend goes on from the same state, and rounds in another way")
    )
    """Training backend."""

    sequence_parallel_backend: Literal["ulysses"] = setting(
        "ulysses", on_change=SAME_NUMBERS, unimplemented=Unimplemented("another way to share tokens than Ulysses")
    )
    """Implementation of sequence parallelism."""

    project_name: str = setting(
        "hpcrl", check=_DIRECTORY_NAME, on_change=OTHER_DIRECTORY, why="it names a directory of hpcrl's runs"
    )
    """Directory of a project's runs under slurm.root."""

    run_name: str | None = setting(
        None,
        check=_DIRECTORY_NAME,
        on_change=OTHER_DIRECTORY,
        why="a run is a directory, so two runs cannot share SkyRL's one name",
    )
    """Name of the run; unset: name of the first TOML file and the time."""

    group_name: str | None = setting(None, on_change=WRITTEN)
    """Group of runs that a tracker shows together; unset: the sweep, of runs of one."""

    logger: str | list[str] = setting("tensorboard", on_change=WRITTEN, why="needs neither an account nor a network")
    """Where metrics can be seen, beside metrics/ and tensorboard/ of the run directory: tensorboard, console, wandb, mlflow, swanlab, trackio, or your own function as "package.module:function"; or several of them."""

    alerts: AlertsConfig = section(AlertsConfig, on_change=ENDS_A_RUN)

    seed: int = setting(42, range=NOT_NEGATIVE, on_change=OTHER_PROMPTS)
    """Seed of everything that is drawn."""

    deterministic: bool = setting(False, on_change=ROUNDING)
    """One set of bits: the same tokens, losses and weights whatever is preempted, restarted or generated by another replica, at a cost in speed (docs/determinism.md). The trainer uses deterministic kernels only; an operation that has none is an error."""

    placement: PlacementConfig = section(PlacementConfig, on_change=SPREAD)

    policy: PolicyConfig

    ref: RefConfig = section(RefConfig)

    critic: CriticConfig = section(CriticConfig, used_by=(CRITIC, RL))

    algorithm: AlgorithmConfig = section(AlgorithmConfig, used_by=RL, on_change=OBJECTIVE)

    sft: SFTConfig = section(SFTConfig, used_by=SFT, on_change=OBJECTIVE)

    dpo: DPOConfig = section(DPOConfig, used_by=when("trainer.mode", "dpo"), on_change=OBJECTIVE)

    reward_model: RewardModelConfig = section(
        RewardModelConfig, used_by=when("trainer.mode", "reward_model"), on_change=OBJECTIVE
    )

    distillation: DistillationConfig = section(
        DistillationConfig, used_by=(when(".distillation.enable"), RL_OR_SFT), on_change=OBJECTIVE
    )

    max_unscored_ratio: float = setting(0.1, range=SHARE, used_by=_SCORERS, on_change=OBJECTIVE)
    """Share of a step's samples at which a teacher, or a reference on nodes of its own, may fail; those are not trained. More end the run."""

    fully_async: FullyAsyncConfig = section(
        FullyAsyncConfig,
        used_by=RL,
        on_change=Effect("warning", "groups that wait to be trained and are too old under it are generated again"),
    )

    profiler: ProfilerConfig = section(ProfilerConfig, on_change=WRITTEN)

    peak_tflops: float | None = setting(None, range=POSITIVE, on_change=WRITTEN)
    """Teraflops per second of one device in the number type of training, of which throughput/mfu is the share. Unset: the maker's figure for bf16, where the GPU is known."""

    upload: UploadConfig = section(UploadConfig, on_change=WRITTEN)

    gradient_checkpointing: bool = setting(True, on_change=SAME_NUMBERS)
    """Compute activations again in backward instead of keeping them."""

    gradient_checkpointing_use_reentrant: bool = setting(
        False, used_by=when(".gradient_checkpointing", True), on_change=SAME_NUMBERS
    )
    """Use PyTorch's older, reentrant implementation of that; FSDP2 only."""

    gradient_checkpointing_every: int = setting(
        1, range=COUNT, used_by=when(".gradient_checkpointing", True), on_change=SAME_NUMBERS
    )
    """Compute activations again in every n-th layer only, from the first; the others keep theirs; FSDP2 only."""

    gradient_checkpointing_keep: Literal["nothing", "attention"] = setting(
        "nothing", used_by=when(".gradient_checkpointing", True), on_change=SAME_NUMBERS
    )
    """What is kept of the layers that are computed again, beside their inputs; attention: the results of attention, which then is not computed again; FSDP2 only."""

    flash_attn: bool = setting(True, on_change=SAME_NUMBERS)
    """Use flash attention: on CUDA, packed samples of different lengths in one kernel; false: other kernels, samples padded for them."""

    flash_attn_version: Literal[2, 3] | None = setting(None, on_change=SAME_NUMBERS)
    """Version of FlashAttention, on GPUs with FSDP2; 2: PyTorch's own, 3: the package of its authors, on Hopper; unset: PyTorch's choice, 2."""

    rope_scaling: dict[str, Any] = setting(
        {}, on_change=OTHER_FUNCTION, why="an empty table means what SkyRL's null means"
    )
    """Scaling of rotary positions in policy and reference, as rope_parameters of config.json (rope_type, factor …); exports carry it; empty: the model's own."""

    rope_theta: float | None = setting(None, range=POSITIVE, on_change=OTHER_FUNCTION)
    """Base of rotary positions in policy and reference; unset: the model's own."""

    resume_mode: Literal["latest", "none", "from_path"] = setting(
        "latest", on_change=Effect("warning", "it decides whether this attempt and later ones continue a checkpoint")
    )
    """Where an attempt starts. latest: at the run's newest checkpoint; none: always at step 0 (such a run is never requeued); from_path: as latest, but the first attempt starts at resume_path."""

    resume_path: Location | None = setting(None, on_change=Effect("refused", "a run's own checkpoints come before it"))
    """Checkpoint directory (checkpoints/sNNNNNN) of any run, for resume_mode from_path."""

    max_ckpts_to_keep: int = setting(
        3,
        on_change=WRITTEN,
        why="SkyRL's -1 keeps all, which fills a quota: a checkpoint of a model of 8 billion parameters has 96 GB",
    )
    """Newest checkpoints after a whole step that are kept, never fewer than two; negative: all. The newest two inside a step stay until
    the next one after a step."""

    ckpt_keep_every: int = setting(0, range=NOT_NEGATIVE, on_change=WRITTEN)
    """Checkpoints whose step is a multiple of it are kept beside the newest; 0: none."""

    ckpt_keep_best: str | None = setting(None, on_change=WRITTEN)
    """Metric, such as eval/all/avg_score or reward/avg_raw_reward; the checkpoint whose step has the best value of it is kept beside the newest. Unset: none."""

    ckpt_keep_best_mode: Literal["max", "min"] | None = setting(
        None, used_by=when(".ckpt_keep_best"), on_change=WRITTEN
    )
    """Whether the highest or the lowest value of ckpt_keep_best is the best; unset: as its name says, the lowest loss, the highest score, reward or accuracy. Required for other metrics."""

    keep_when_done: Literal["all", "last", "export"] = setting("all", on_change=WRITTEN)
    """What a run that is done keeps. all: what is there. last: of checkpoints the last one and those of ckpt_keep_best and ckpt_keep_every, no published weights and no tokens of datasets. export: as last, without checkpoints whose step is exported. Exports, samples, metrics and logs stay."""

    ckpt_interval: int = setting(10, on_change=WRITTEN)
    """Steps between checkpoints, with one more after the last step; 0 or less: none at all."""

    ckpt_interval_epochs: int | None = setting(None, range=COUNT, on_change=WRITTEN)
    """Passes over the training prompts between checkpoints, instead of ckpt_interval, with one more after the last step; a pass has as many steps as the dataset has full batches."""

    ckpt_mode: Literal["sync", "async"] = setting("async", on_change=WRITTEN)
    """Whether training waits until a checkpoint is written (sync), or only until it is copied to host memory (async), which needs as much of that as the checkpoint is large."""

    ckpt_on_error: Literal["stop", "continue"] = setting("stop", on_change=WRITTEN)
    """What follows when a checkpoint cannot be written, because the disk is full or fails. stop: the attempt ends as failed; continue: it goes on with a warning until the next checkpoint is due. The last one of an attempt must succeed."""

    hf_save_interval: int = setting(-1, on_change=WRITTEN)
    """Steps between exports of the policy in Hugging Face format, with one more after the last step; 0 or less: none at all."""

    epochs: int = setting(1, range=COUNT, on_change=LAST_STEP)
    """Passes over the training prompts."""

    max_steps: int | None = setting(None, range=COUNT, on_change=LAST_STEP)
    """Last step, if the epochs do not end earlier; unset: they do."""

    update_epochs_per_batch: int = setting(1, range=COUNT, on_change=UPDATES)
    """Passes over the samples of one step; each makes train_batch_size / policy_mini_batch_size optimizer steps."""

    train_batch_size: int = setting(1024, range=COUNT, on_change=OTHER_PROMPTS)
    """Prompts per step; each has generator.n_samples_per_prompt samples."""

    policy_mini_batch_size: int = setting(256, range=COUNT, on_change=UPDATES)
    """Prompts per optimizer step."""

    critic_mini_batch_size: int = setting(256, range=COUNT, used_by=(CRITIC, RL), on_change=UPDATES)
    """Prompts per optimizer step of the critic."""

    micro_train_batch_size_per_gpu: int | None = setting(None, range=COUNT, on_change=SAME_NUMBERS, why=_PASS)
    """Samples, or pairs, per forward and backward pass of one rank; unset: max_tokens_per_micro_batch limits it, or on CPUs it is one."""

    micro_forward_batch_size_per_gpu: int | None = setting(None, range=COUNT, on_change=SAME_NUMBERS, why=_PASS)
    """Samples, or pairs, per forward pass of one rank where no gradient is needed; unset: as in training."""

    max_tokens_per_micro_batch: int | None = setting(None, range=COUNT, on_change=SAME_NUMBERS)
    """Tokens per forward pass of one rank, with and without gradient, instead of the numbers of samples above, which then have no effect. A longer sample or pair has a pass of its own, and padding is not counted. Ranks get equally many tokens instead of equally many samples. Unset: samples are counted, where their number is set or the run is on CPUs; else twice the longest sample, at least 16384."""

    logprobs_chunk_size: int = setting(1024, range=COUNT, on_change=SAME_NUMBERS)
    """Tokens whose logits exist at the same time."""

    use_sample_packing: bool = setting(True, on_change=SAME_NUMBERS)
    """Lay the samples of a micro-batch end to end, without padding; otherwise each is a row of its own, padded to the longest."""

    shared_prefixes: bool = setting(False, on_change=SAME_NUMBERS)
    """Compute once what samples of a micro-batch begin with alike, such as the prompt of a group, in training and in passes without gradient, with FSDP2; see docs/large_models.md. Losses and gradients stay the same, but for rounding. max_tokens_per_micro_batch then counts such tokens once, and samples of a group are kept together as far as it lets them."""

    update_ref_every_epoch: bool = setting(False, on_change=OBJECTIVE)
    """Make the policy the new reference at the end of each epoch: whenever so many steps are done as the dataset has full batches."""

    eval_batch_size: int = setting(1024, range=COUNT, on_change=WRITTEN)
    """Prompts that are evaluated at the same time."""

    eval_before_train: bool = setting(True, on_change=WRITTEN)
    """Evaluate before the first step too."""

    eval_interval: int = setting(5, on_change=WRITTEN)
    """Steps between evaluations, with one more after the last step; 0 or less: no evaluation at all."""

    max_prompt_length: int = setting(512, range=COUNT, used_by=ENGINES, on_change=OTHER_PROMPTS)
    """Longest prompt in tokens, chat template included; longer ones are dropped."""

    max_length: int | None = setting(None, range=COUNT, used_by=OFFLINE, on_change=OTHER_TOKENS)
    """Largest number of tokens of a dataset's row; in a pair, of each answer with its prompt. Required unless trainer.mode is "rl"; data.too_long decides about longer rows."""

    dump_data_batch: bool = setting(False, on_change=WRITTEN)
    """Write what each step trains, with log-probabilities and advantages, into dumps/ of the run directory, one safetensors file per optimizer step and rank. Only a resume before that step removes them."""

    dump_eval_results: bool = setting(True, on_change=WRITTEN)
    """Write texts and scores of each evaluation into the run directory."""

    multi_modal_log_interval: int | None = setting(None, range=COUNT, used_by=ENGINES, on_change=WRITTEN)
    """Versions of a policy from one whose training samples' pictures are kept to the next. Pictures are PNG files in pictures/ of the run directory, for `hpcrl samples` and reports. They are the input images of a vision-language model, in every turn, or the output of a diffusion pipeline. Those of evaluations are kept too. Unset: none."""

    @property
    def offline(self) -> bool:
        """Whether rows of datasets are trained as they are: nothing is sampled, and no rewards are given."""
        return self.mode != "rl"

    @property
    def learns_from_rewards(self) -> bool:
        """Whether rewards alone teach the policy, no dataset and no teacher."""
        return not (self.offline or self.distillation.enable)

    @property
    def pairwise(self) -> bool:
        """Whether these rows are pairs of a chosen and a rejected answer to one prompt, which are trained together."""
        return self.mode in _PAIRWISE and not self.unpaired

    @property
    def unpaired(self) -> bool:
        """Whether answers of datasets are trained each by itself, by whether it is desirable."""
        return self.mode == "dpo" and self.dpo.unpaired

    @property
    def trains_reward_model(self) -> bool:
        """Whether what is trained in the policy's place gives one number for a conversation, and generates nothing."""
        return self.mode == "reward_model"

    @property
    def teaches_rows(self) -> bool:
        """Whether a teacher scores rows of datasets: in the reference's place, or by its files (distillation.precomputed_logprobs)."""
        return self.mode == "sft" and self.distillation.enable

    @property
    def models(self) -> dict[str, Pretrained]:
        """Models of the trainer that there are, by role: policy, ref, critic."""
        models = {"policy": self.policy.model.pretrained}
        if self.uses_reference:
            models["ref"] = self.ref_model
        if (critic := self.critic.model.pretrained) is not None:
            models["critic"] = critic
        return models

    @property
    def adapters(self) -> dict[str, LoraConfig]:
        """Settings of adapters by the role of the models that are trained with some: policy, critic."""
        found = {"policy": self.policy.model.lora, "critic": self.critic.model.lora}
        return {role: lora for role, lora in found.items() if lora.rank > 0}

    @property
    def ref_model(self) -> Pretrained:
        """Model that the policy is compared with, or that teaches rows of datasets; where it is not set: the policy's initial model."""
        teacher = self.distillation
        if self.teaches_rows and teacher.model_path is not None:
            return Pretrained(teacher.model_path, teacher.model_revision)
        return self.ref.model.pretrained or self.policy.model.pretrained

    @property
    def uses_reference(self) -> bool:
        """Whether there is a reference model at all."""
        own_teacher = self.teaches_rows and self.distillation.precomputed_logprobs is None
        return self.compares_with_reference or self.distillation.self_teacher_model in ("initial", "ema") or own_teacher

    @property
    def compares_with_reference(self) -> bool:
        """Whether the loss or the reward compares with a reference model."""
        if self.offline:
            return self.mode == "dpo" and self.dpo.uses_reference
        return self.algorithm.use_kl_loss or self.algorithm.use_kl_in_reward

    @property
    def has_own_reference(self) -> bool:
        """Whether the reference model is on nodes of its own."""
        return self.uses_reference and not (self.placement.colocate_policy_ref or self.placement.colocate_all)

    @property
    def colocated_reference(self) -> bool:
        """Whether trainer ranks have the reference model beside the policy."""
        return self.uses_reference and not self.has_own_reference

    @property
    def reference_is_base(self) -> bool:
        """Whether the reference is the policy with other adapters, or none, and needs no second model."""
        policy, ref = self.policy, self.ref
        if self.strategy == "megatron":
            own = ref.megatron_config.dtype != policy.megatron_config.dtype
        else:
            own = self.ref_sharding.mixed_precision.param_dtype != policy.fsdp_config.mixed_precision.param_dtype
        same = self.ref_model == policy.model.pretrained and ref.config_overrides == policy.config_overrides
        return policy.model.lora.rank > 0 and same and not own

    @property
    def reference_follows(self) -> bool:
        """Whether the policy of later steps becomes the reference."""
        resets = self.algorithm.reference_reset_interval is not None or self.update_ref_every_epoch
        return resets or self.distillation.self_teacher_model == "ema"

    @property
    def reference_has_values(self) -> bool:
        """Whether what is trained of the policy is kept a second time, with the values that it has in the reference."""
        lora = self.policy.model.lora
        apart = self.reference_follows or bool(lora.modules_to_save) or lora.begins_from_weights
        return self.uses_reference and self.reference_is_base and apart

    def resets_reference(self, step: int, epoch: int) -> bool:
        """Return whether the policy after `step` becomes the reference.

        Args:
            epoch: steps of one.
        """
        interval = self.algorithm.reference_reset_interval
        return step % interval == 0 if interval is not None else self.update_ref_every_epoch and step % epoch == 0

    @property
    def reference_experts(self) -> ExpertsConfig | None:
        """Section of the reference's routers, which repeat what those of the policy do, where it is the same model."""
        return self.policy.experts if self.ref_model == self.policy.model.pretrained else None

    @property
    def ref_sharding(self) -> FSDPConfig:
        """Sharding of the reference model, and its number type; where that is not set: the policy's."""
        return self.forward_sharding(self.ref.fsdp_config)

    def megatron_layout(self, role: str) -> MegatronModelConfig:
        """Return Megatron-core's layout and options of a role, policy or ref; sizes of ref that are not set are the policy's."""
        policy = self.policy.megatron_config
        return self.ref.megatron_config.beside(policy) if role == "ref" else policy

    def forward_sharding(self, own: RefFSDPConfig | TeacherFSDPConfig) -> FSDPConfig:
        """Return the sharding of a model that only computes, and its number type; where that is not set: the policy's."""
        dtype = own.mixed_precision.param_dtype or self.policy.fsdp_config.mixed_precision.param_dtype
        shared = {field.name: getattr(own, field.name) for field in fields(ShardingConfig)}
        return FSDPConfig(**shared, mixed_precision=MixedPrecisionConfig(param_dtype=dtype))

    @property
    def model_parallel_size(self) -> int:
        """Trainer ranks that share the computation of each sample."""
        megatron = self.strategy == "megatron"
        return self.policy.megatron_config.model_parallel_size if megatron else self.policy.sequence_parallel_size

    @property
    def ref_model_parallel_size(self) -> int:
        """Ranks of the reference model that share the computation of each sample."""
        if self.strategy == "megatron":
            return self.megatron_layout("ref").model_parallel_size
        own = self.ref.sequence_parallel_size
        return self.model_parallel_size if own is None else own

    @property
    def critic_model_parallel_size(self) -> int:
        """Ranks of the critic that share the computation of each sample."""
        own = self.critic.sequence_parallel_size
        return self.model_parallel_size if self.strategy == "megatron" or own is None else own

    @property
    def has_own_critic(self) -> bool:
        """Whether the critic has ranks of its own, after the policy's; otherwise it is beside the policy."""
        sizes = self.placement.critic_num_nodes, self.placement.critic_num_gpus_per_node
        return self.critic.model.path is not None and not self.placement.colocate_all and sizes != (None, None)

    @property
    def recomputation(self) -> Recomputation | None:
        """Activations that are computed again; None: all are kept."""
        if not self.gradient_checkpointing:
            return None
        reentrant = self.gradient_checkpointing_use_reentrant
        return Recomputation(self.gradient_checkpointing_every, self.gradient_checkpointing_keep, reentrant)

    def updates_per_batch(self, mini_batch_size: int) -> int:
        """Return the optimizer steps that a model makes in one full batch, with mini-batches of so many groups."""
        return -(-self.train_batch_size // mini_batch_size) * self.update_epochs_per_batch

    @property
    def end(self) -> tuple[float, float]:
        """Epochs and steps after which training ends, whichever comes first."""
        return self.epochs, math.inf if self.max_steps is None else self.max_steps

    @property
    def batch_settings(self) -> dict[str, Any]:
        """Settings that a half-trained batch depends on, by names below `trainer`, as JSON gives them back."""
        names = ("policy_mini_batch_size", "critic_mini_batch_size", "update_epochs_per_batch")
        found = {name: getattr(self, name) for name in names}
        for part in ("algorithm", "sft", "dpo"):
            found |= {f"{part}.{name}": value for name, value in asdict(getattr(self, part)).items()}
        found |= {f"distillation.{name}": value for name, value in self.distillation.batch_settings.items()}
        return json.loads(json.dumps(found | {"critic.model.path": self.critic.model.path}))

    @property
    def surplus_groups(self) -> int:
        """Training groups that are begun beyond those that steps need; at least one where there are to be any."""
        return math.ceil((self.fully_async.oversampling_ratio - 1) * self.train_batch_size - 1e-9)

    def publishes(self, step: int, total: int) -> bool:
        """Return whether engines, if there are any, get the weights that `step` of `total` leaves."""
        evaluated = self.eval_interval > 0 and step % self.eval_interval == 0
        if evaluated or step == total or self.offline:
            return evaluated or step == total
        return step % self.fully_async.sync_weight_interval == 0

    @property
    def saves_checkpoints(self) -> bool:
        """Whether there are checkpoints at all."""
        return self.ckpt_interval > 0 or self.ckpt_interval_epochs is not None

    def checkpoint_interval(self, epoch: int) -> int:
        """Return the steps between checkpoints; 0 or less: there are none.

        Args:
            epoch: steps of one.
        """
        return self.ckpt_interval if self.ckpt_interval_epochs is None else self.ckpt_interval_epochs * epoch

    @property
    def best_mode(self) -> Literal["max", "min"] | None:
        """Whether the highest or the lowest value of ckpt_keep_best is the best; where that is not set: by the last part of its name.
        None: a metric that hpcrl does not know."""
        if self.ckpt_keep_best_mode is not None:
            return self.ckpt_keep_best_mode
        name = (self.ckpt_keep_best or "").rpartition("/")[2]
        return "max" if _HIGHER.fullmatch(name) else "min" if _LOWER.fullmatch(name) else None

    def total_steps(self, n_prompts: int, drop_last: bool = True) -> int:
        """Return the last step of the run.

        Args:
            drop_last: data.drop_last.

        Raises:
            DataError: `n_prompts` do not fill one batch, or all epochs together do not.
        """
        full = steps_per_epoch(n_prompts, self.train_batch_size, drop_last)
        steps = self.epochs * full if drop_last else self.epochs * n_prompts // self.train_batch_size
        if not steps:
            raise DataError(
                f"data.train_data has {n_prompts} usable prompts, and trainer.epochs = {self.epochs} of them do not fill one batch of "
                f"trainer.train_batch_size = {self.train_batch_size}; lower it, or raise trainer.epochs"
            )
        return steps if self.max_steps is None else min(steps, self.max_steps)


def steps_per_epoch(n_prompts: int, batch_size: int, drop_last: bool = True) -> int:
    """Return the full batches of `batch_size` prompts in `n_prompts`, or 1 where a batch has several epochs.

    Args:
        drop_last: data.drop_last: a remainder is not trained.

    Raises:
        DataError: there is not one full batch, and none may have several epochs.
    """
    if n_prompts < (batch_size if drop_last else 1):
        raise DataError(
            f"data.train_data has {n_prompts} usable prompts, fewer than trainer.train_batch_size = {batch_size}; lower "
            "train_batch_size, add data, or raise trainer.max_prompt_length (trainer.max_length where trainer.mode is not rl) if some were dropped "
            "as too long"
        )
    return max(1, n_prompts // batch_size)
