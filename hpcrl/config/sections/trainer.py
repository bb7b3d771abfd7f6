"""Section `trainer`: models, batching, schedule, checkpoints, evaluation."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal

from hpcrl.config.conditions import CRITIC, ENGINES, OFFLINE, RL, RL_OR_SFT
from hpcrl.config.effects import (
    ENDS_A_RUN,
    LAST_STEP,
    OBJECTIVE,
    OTHER_DIRECTORY,
    OTHER_FUNCTION,
    OTHER_PROMPTS,
    OTHER_RUN,
    OTHER_TOKENS,
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
from hpcrl.config.sections.model import CriticConfig, PolicyConfig, RefConfig
from hpcrl.config.sections.reward_model import RewardModelConfig
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

LOGGERS = ("tensorboard", "console", "wandb", "mlflow", "swanlab", "trackio")


_BESIDE_POLICY = "unset: beside the policy; SkyRL gives a critic GPUs of its own as soon as engines have theirs"


_AS_POLICY = "unset: as the policy; SkyRL's 1 is wrong as soon as the policy has more"


@dataclass(frozen=True, kw_only=True)
class PlacementConfig:
    policy_num_nodes: int = setting(1, range=COUNT)
    """Nodes of the trainer."""

    policy_num_gpus_per_node: int = setting(1, range=COUNT)
    """Trainer ranks per node, on CPU too."""

    critic_num_nodes: int | None = setting(None, range=COUNT, used_by=CRITIC, why=_BESIDE_POLICY)
    """Nodes of a critic that has its own, after the policy's; unset: as the policy. With neither this nor critic_num_gpus_per_node the critic is
    beside the policy, on the same ranks."""

    critic_num_gpus_per_node: int | None = setting(None, range=COUNT, used_by=CRITIC, why=_BESIDE_POLICY)
    """Ranks of such a critic per node; unset: as the policy."""

    ref_num_nodes: int | None = setting(None, range=NOT_NEGATIVE, why=_AS_POLICY)
    """Nodes of the reference model; unset: as the policy."""

    ref_num_gpus_per_node: int | None = setting(None, range=COUNT, why=_AS_POLICY)
    """Reference ranks per node; unset: as the policy."""

    colocate_policy_ref: bool = True
    """The reference model shares the policy's GPUs; otherwise it has nodes of its own, one copy on each of ref_num_nodes, shared by its ranks."""

    colocate_all: bool = setting(False, why="trainer and engines have nodes of their own")
    """Trainer and engines share GPUs and take turns; otherwise each has nodes of its own."""


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
    """Groups that are begun per group that a step trains. Above 1, a step does not wait for its slowest groups: surplus ones train in a
    later step where max_staleness_steps allows it, and are given up otherwise, so that long responses are trained less often."""


@dataclass(frozen=True, kw_only=True)
class ProfilerConfig:
    enable: bool = False
    """Record a PyTorch profile of the trainer into profile/ of the run directory, for chrome://tracing or Perfetto."""

    enable_nsys: bool = False
    """Record those steps with Nsight Systems instead, whose `nsys` has to be on the PATH of the nodes: the trainer's ranks are started under it, and phases are NVTX ranges."""

    nsys_engine_iterations: int = setting(0, range=NOT_NEGATIVE)
    """With enable_nsys: iterations of each vLLM engine that are recorded too, after its first 100; 0: engines are not started under it."""

    wait_steps: int = setting(1, range=NOT_NEGATIVE)
    """Steps that are skipped first; counted from where an attempt starts."""

    warmup_steps: int = setting(1, range=NOT_NEGATIVE)
    """Steps that warm the profiler up."""

    active_steps: int = setting(1, range=COUNT)
    """Steps that are recorded."""

    ranks: list[int] = setting(
        [0], why="a profile of no rank would be empty; SkyRL's megatron_config.torch_profiler_config.ranks is []"
    )
    """Ranks that record."""

    record_shape: bool = False
    """Record the shapes of tensors."""

    profile_memory: bool = False
    """Record allocations."""

    with_stack: bool = False
    """Record Python stacks."""

    with_modules: bool = False
    """Record which module each operation belongs to."""


@dataclass(frozen=True, kw_only=True)
class UploadConfig:
    """Copies of exports and checkpoints elsewhere; slurm.upload says who makes them. docs/uploads.md."""

    hf: bool = False
    """Push the last export to the Hugging Face hub, once the run is done."""

    hf_repo_name: str | None = setting(None, used_by=when(".hf"))
    """Repository on the hub, <owner>/<name>, or <name> alone for the owner of the token; the run's name is appended to it."""

    hf_private: bool = setting(True, used_by=when(".hf"))
    """Whether a repository that is made for it is private."""

    hf_token_file: Location | None = setting(None, used_by=when(".hf"))
    """File with a token that may write; unset: $HF_TOKEN, or the file $HF_TOKEN_PATH, or what `hf auth login` has left."""

    hf_endpoint: str | None = setting(None, used_by=when(".hf"))
    """Address of another hub; unset: $HF_ENDPOINT, else https://huggingface.co."""

    s3: Literal["final", "all"] | None = None
    """Copy to S3 the last export and checkpoint, once the run is done, or all of them, as soon as each is there."""

    s3_checkpoints: bool = setting(True, used_by=when(".s3"))
    """Copy checkpoints beside exports; false: exports alone, which are several times smaller."""

    s3_bucket: str | None = setting(None, used_by=when(".s3"))
    """Bucket of the copies."""

    s3_prefix: str = setting("outputs", used_by=when(".s3"))
    """Beginning of the keys in the bucket; <project>/<run> follows."""

    s3_endpoint: str | None = setting(None, used_by=when(".s3"))
    """Address of an S3-compatible store; unset: $AWS_ENDPOINT_URL_S3, else AWS."""

    s3_credentials_file: Location | None = setting(None, used_by=when(".s3"))
    """Credentials file as of the AWS command line; unset: AWS's own variables and files, $AWS_SHARED_CREDENTIALS_FILE among them."""


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

    deterministic: bool = setting(False, on_change=SAME_NUMBERS)
    """Use deterministic kernels only in the trainer, at a cost in speed; an operation that has none is an error."""

    placement: PlacementConfig = section(PlacementConfig, on_change=SPREAD)

    policy: PolicyConfig

    ref: RefConfig = section(RefConfig)

    critic: CriticConfig = section(CriticConfig, used_by=(CRITIC, RL))

    algorithm: AlgorithmConfig = section(AlgorithmConfig, used_by=RL, on_change=OBJECTIVE)

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
    """Teraflops per second that one device can do in the number type of training, of which throughput/mfu is the share; unset: the maker's figure for bf16, where the GPU is a known one."""

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
    """Where an attempt starts; latest: at the run's newest checkpoint, none: always at step 0 (such a run is never requeued), from_path: the same as latest, but the first attempt starts at resume_path."""

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

    ckpt_interval: int = setting(10, on_change=WRITTEN)
    """Steps between checkpoints, with one more after the last step; 0 or less: none at all."""

    ckpt_interval_epochs: int | None = setting(None, range=COUNT, on_change=WRITTEN)
    """Passes over the training prompts between checkpoints, instead of ckpt_interval, with one more after the last step; a pass has as many steps as the dataset has full batches."""

    ckpt_mode: Literal["sync", "async"] = setting("async", on_change=WRITTEN)
    """Whether training waits until a checkpoint is written (sync), or only until it is copied to host memory (async), which needs as much of that as the checkpoint is large."""

    ckpt_on_error: Literal["stop", "continue"] = setting("stop", on_change=WRITTEN)
    """What follows when a checkpoint cannot be written, because the disk is full or fails: the attempt ends as failed, or goes on with a warning until the next one is due. The last one of an attempt must succeed."""

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
    """Tokens per forward pass of one rank, with and without gradient, instead of the numbers of samples above, which then have no effect; a longer sample or pair has a pass of its own, and padding is not counted. Ranks get equally many tokens instead of equally many samples. Unset: samples are counted, where their number is set or the run is on CPUs; else twice the longest sample, 16384 at least."""

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
    """Tokens of a dataset's row at most, of a pair each answer with its prompt, which has to be set with another trainer.mode than "rl"; data.too_long says what becomes of longer ones."""

    dump_data_batch: bool = setting(False, on_change=WRITTEN)
    """Write what each step trains, with log-probabilities and advantages, into dumps/ of the run directory, one safetensors file per optimizer step and rank; nothing removes them but a resume before that step."""

    dump_eval_results: bool = setting(True, on_change=WRITTEN)
    """Write texts and scores of each evaluation into the run directory."""

    multi_modal_log_interval: int | None = setting(None, range=COUNT, used_by=ENGINES, on_change=WRITTEN)
    """Versions of a policy between those of whose training samples the pictures are kept as PNG files in pictures/ of the run directory, for `hpcrl samples` and reports: the images that a vision-language model was shown, in every turn, or what a diffusion pipeline painted; those of evaluations are kept too. Unset: none."""
