"""What follows from the configuration: pure functions of its sections."""

from __future__ import annotations

import math
import re
from dataclasses import fields, replace
from typing import Any, Literal

from hpcrl.config.family import family_of
from hpcrl.config.sections.algorithm import AlgorithmConfig
from hpcrl.config.sections.data import DataConfig
from hpcrl.config.sections.environment import EnvironmentConfig
from hpcrl.config.sections.generator import GeneratorConfig, InferenceEngineConfig, SamplingParams
from hpcrl.config.sections.megatron import MegatronModelConfig
from hpcrl.config.sections.model import (
    FSDPConfig,
    MixedPrecisionConfig,
    PolicyConfig,
    Pretrained,
    RefConfig,
    RefFSDPConfig,
    ShardingConfig,
    TeacherFSDPConfig,
)
from hpcrl.config.sections.slurm import SlurmConfig
from hpcrl.config.sections.trainer import TrainerConfig
from hpcrl.config.sections.tree import ConfigTree
from hpcrl.errors import DataError

MOST_KEPT = 256
"""The largest sampling mask: each of its tokens is 4 bytes in the sample's file, and much more in the engine's answer."""
_HIGHER = re.compile(
    r"score|avg_score|(avg_)?pass_at_\d+|((avg_raw|mean_positive)_)?reward|(\w+_)?accurac(y|ies)|margins"
)
_LOWER = re.compile(r"(\w+_)?loss|nll|perplexity")
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""For which vLLM can reserve room."""
_LEAST_TOKENS = 16384  # of a micro-batch on a GPU
_OF_PAIRS = ("dpo", "reward_model")  # values of trainer.mode


def eval_sampling(generator: GeneratorConfig) -> SamplingParams:
    """Return how evaluation samples: as training where it is not set, but greedy where nothing of it is set."""
    chosen = {name: value for name, value in vars(generator.eval_sampling_params).items() if value is not None}
    return replace(generator.sampling_params, **(chosen or {"temperature": 0.0}))


def reward_weights(environment: EnvironmentConfig, kind: Literal["train", "eval"]) -> dict[str, float]:
    """Return the named rewards of training or evaluation samples, with their weights; none where an environment or a service scores them."""
    own = environment.eval_reward_function if kind == "eval" else {}
    return own or environment.reward_function


def better_of(metric: str) -> Literal["max", "min"] | None:
    """Return whether the highest or the lowest value of a metric is the best, by the last part of its name; None of names that hpcrl does not know."""
    name = metric.rpartition("/")[2]
    return "max" if _HIGHER.fullmatch(name) else "min" if _LOWER.fullmatch(name) else None


def several_rows(config: ConfigTree) -> bool:
    """Return whether a sample may be several rows: turns, or conversations that an agent's program has."""
    return config.generator.step_wise_trajectories or config.generator.inference_engine.enable_http_endpoint


def names_own_code(config: ConfigTree) -> bool:
    """Return whether the configuration names code of the user's, or where it is."""
    environment = config.environment
    environments = [environment.env_class or "", *environment.allowed_env_classes]
    rewards = [
        *environment.reward_function,
        *environment.eval_reward_function,
        *environment.skyrl_gym.agent.reward_function,
    ]
    names = [*environments, *rewards]
    return bool(config.config_class or config.python_path) or any(":" in name for name in names)


def mask_size(params: SamplingParams) -> int:
    """Return how many tokens each token is sampled among at most, where sampling leaves tokens out; 0: it leaves none out."""
    return max(0, params.top_k)


def max_input_length(generator: GeneratorConfig, trainer: TrainerConfig) -> int:
    """Return the tokens before a turn at most; where it is not set: trainer.max_prompt_length."""
    return trainer.max_prompt_length if generator.max_input_length is None else generator.max_input_length


def max_seq_len(config: ConfigTree) -> int:
    """Return the divisor of seq_mean_token_sum_norm in tokens; where it is not set: the longest sample of one turn."""
    own = config.trainer.algorithm.max_seq_len
    return longest_sample(config) if own is None else own


def longest_sample(config: ConfigTree) -> int:
    """Return the tokens of a sample at most: what may come before its last turn, and that turn; of a dataset's row, or an answer of it, with its prompt."""
    if is_offline(config.trainer):
        return family_of(config).longest_row(config) or 0
    return max_input_length(config.generator, config.trainer) + config.generator.sampling_params.max_generate_length


def max_model_len(config: ConfigTree) -> int:
    """Return the tokens that an engine must hold of a sample at most, of training or evaluation."""
    generator = config.generator
    longest = max(generator.sampling_params.max_generate_length, eval_sampling(generator).max_generate_length)
    return max_input_length(generator, config.trainer) + longest


def largest_micro_batch(config: ConfigTree) -> int:
    """Return the tokens of a forward and backward pass at most, padding not counted."""
    longest, tokens = _longest_together(config), micro_batch_tokens(config)
    if tokens is not None:
        return max(tokens, longest)  # a longer sample has a pass of its own
    return (config.trainer.micro_train_batch_size_per_gpu or 1) * longest


def micro_batch_tokens(config: ConfigTree) -> int | None:
    """Return the tokens that limit a pass; None: the number of its samples does.

    Where neither is set, a GPU gets so many tokens that gathering the parameters for a pass takes less time than the pass; but one sample of a
    family whose passes tokens do not measure.
    """
    trainer = config.trainer
    if trainer.max_tokens_per_micro_batch is not None:
        return trainer.max_tokens_per_micro_batch
    samples = trainer.micro_train_batch_size_per_gpu, trainer.micro_forward_batch_size_per_gpu
    if any(samples) or gpu_count(config.slurm) == 0 or not family_of(config).limits_passes_by_tokens(config):
        return None
    return max(_LEAST_TOKENS, 2 * _longest_together(config))


def _longest_together(config: ConfigTree) -> int:
    """Return the tokens at most of what no pass divides: a sample, or both of a pair."""
    return longest_sample(config) * (2 if trains_pairs(config.trainer) else 1)


def order_seed(data: DataConfig, trainer: TrainerConfig) -> int | None:
    """Return the seed of the order of training prompts, where it is not set: trainer.seed; None for the dataset's own order."""
    if not data.shuffle:
        return None
    return trainer.seed if data.shuffle_seed is None else data.shuffle_seed


def sampling_seed(engine: InferenceEngineConfig, trainer: TrainerConfig) -> int:
    """Return the seed from which those of samples are made; where it is not set: trainer.seed."""
    return trainer.seed if engine.seed is None else engine.seed


def temperature(config: ConfigTree) -> float:
    """Return what divides the logits in training; where it is not set: the sampling temperature, and 1 where nothing is sampled."""
    if is_offline(config.trainer):
        return 1.0
    own = config.trainer.algorithm.temperature
    return config.generator.sampling_params.temperature if own is None else own


def policy_model(trainer: TrainerConfig) -> Pretrained:
    """Return the model that is trained."""
    own = trainer.policy.model
    return Pretrained(own.path, own.revision)


def ref_model(trainer: TrainerConfig) -> Pretrained:
    """Return the model that the policy is compared with, or that teaches rows of datasets; where it is not set: the policy's initial model."""
    own, distillation = trainer.ref.model, trainer.distillation
    if teaches_rows(trainer) and distillation.model_path is not None:
        return Pretrained(distillation.model_path, distillation.model_revision)
    return Pretrained(own.path, own.revision) if own.path else policy_model(trainer)


def critic_model(trainer: TrainerConfig) -> Pretrained | None:
    """Return the model that the critic starts from; None: there is no critic."""
    own = trainer.critic.model
    return Pretrained(own.path, own.revision) if own.path is not None else None


def models_of(trainer: TrainerConfig) -> dict[str, Pretrained]:
    """Return the models of the trainer that there are, by role: policy, ref, critic."""
    models = {"policy": policy_model(trainer)}
    if uses_reference(trainer):
        models["ref"] = ref_model(trainer)
    if (critic := critic_model(trainer)) is not None:
        models["critic"] = critic
    return models


def ref_sharding(trainer: TrainerConfig) -> FSDPConfig:
    """Return how the reference model is sharded, and its number type; where that is not set: the policy's."""
    return forward_sharding(trainer.ref.fsdp_config, trainer)


def forward_sharding(own: RefFSDPConfig | TeacherFSDPConfig, trainer: TrainerConfig) -> FSDPConfig:
    """Return how a model that only computes is sharded, and its number type; where that is not set: the policy's."""
    dtype = own.mixed_precision.param_dtype or trainer.policy.fsdp_config.mixed_precision.param_dtype
    shared = {field.name: getattr(own, field.name) for field in fields(ShardingConfig)}
    return FSDPConfig(**shared, mixed_precision=MixedPrecisionConfig(param_dtype=dtype))


def needs_baselines(algorithm: AlgorithmConfig) -> bool:
    """Return whether each training group needs the reward of a greedy response."""
    return algorithm.advantage_estimator == "remax"


def is_offline(trainer: TrainerConfig) -> bool:
    """Return whether rows of datasets are trained as they are: nothing is sampled, and no rewards are given."""
    return trainer.mode != "rl"


def trains_pairs(trainer: TrainerConfig) -> bool:
    """Return whether these rows are pairs of a chosen and a rejected answer to one prompt, which are trained together."""
    return trainer.mode in _OF_PAIRS


def has_engines(config: ConfigTree) -> bool:
    """Return whether there are rollout nodes: always where samples are trained, and where training on datasets is evaluated by generating."""
    return not is_offline(config.trainer) or bool(config.data.val_prompts and config.trainer.eval_interval > 0)


def samples_per_prompt(config: ConfigTree) -> int:
    """Return how many samples of a group can train on different ranks; a row of a dataset, a pair too, is trained by one."""
    return 1 if is_offline(config.trainer) else config.generator.n_samples_per_prompt


def uses_reference(trainer: TrainerConfig) -> bool:
    """Return whether there is a reference model at all."""
    own_teacher = teaches_rows(trainer) and trainer.distillation.precomputed_logprobs is None
    return compares_with_reference(trainer) or self_teacher(trainer) in ("initial", "ema") or own_teacher


def compares_with_reference(trainer: TrainerConfig) -> bool:
    """Return whether the loss or the reward compares with a reference model."""
    if is_offline(trainer):
        return trainer.mode == "dpo" and not trainer.dpo.reference_free
    return trainer.algorithm.use_kl_loss or trainer.algorithm.use_kl_in_reward


def teaches_rows(trainer: TrainerConfig) -> bool:
    """Return whether a teacher tells what it would have said in rows of datasets: one in the place of the reference, or in files that were written
    before (trainer.distillation.precomputed_logprobs)."""
    return trainer.mode == "sft" and trainer.distillation.enable


def self_teacher(trainer: TrainerConfig) -> str | None:
    """Return which policy teaches itself by hints, as of trainer.distillation.self_teacher.model; None: none does."""
    return trainer.distillation.self_teacher.model if trainer.distillation.enable else None


def trainer_ranks(trainer: TrainerConfig) -> int:
    """Return the ranks of the policy, and of all that is beside it: the first ones of the trainer."""
    return trainer.placement.policy_num_nodes * trainer.placement.policy_num_gpus_per_node


def model_parallel_size(trainer: TrainerConfig) -> int:
    """Return how many trainer ranks share the computation of each sample."""
    policy = trainer.policy
    return _megatron_size(policy.megatron_config) if trainer.strategy == "megatron" else policy.sequence_parallel_size


def critic_model_parallel_size(trainer: TrainerConfig) -> int:
    """Return how many ranks of the critic share the computation of each sample."""
    own = trainer.critic.sequence_parallel_size
    return model_parallel_size(trainer) if trainer.strategy == "megatron" or own is None else own


def model_config_kwargs(section: PolicyConfig | RefConfig) -> dict[str, Any]:
    """Return the entries of a model's config.json that are replaced."""
    return section.model_config_kwargs | section.megatron_config.model_config_kwargs


def ref_model_parallel_size(trainer: TrainerConfig) -> int:
    """Return how many ranks of the reference model share the computation of each sample."""
    ref = trainer.ref
    if trainer.strategy == "megatron":
        return _megatron_size(ref.megatron_config)
    return model_parallel_size(trainer) if ref.sequence_parallel_size is None else ref.sequence_parallel_size


def _megatron_size(sizes: MegatronModelConfig) -> int:
    return sizes.tensor_model_parallel_size * sizes.pipeline_model_parallel_size * sizes.context_parallel_size


def needs_fsdp(fsdp: FSDPConfig, ranks: int, dtype: str, *, on_gpu: bool) -> bool:
    """Return whether FSDP2 has anything to do: to shard, to cast, or to offload.

    Args:
        dtype: that parameters are kept in.
    """
    return ranks > 1 or fsdp.mixed_precision.param_dtype != dtype or (fsdp.cpu_offload and on_gpu)


def copy_ranks(
    size: int | None, ranks: int, on_node: int, state: float = 0.0, memory: float | None = None, experts: int = 1
) -> int:
    """Return how many ranks share one copy of a model's parameters with FSDP2.

    Args:
        size: fsdp_config.fsdp_size.
        on_node: ranks of a node.
        state: bytes of parameters, gradients and optimizer of a whole copy.
        memory: bytes of a GPU; None: not known, or there is none.
        experts: ranks that share those of a layer, which are in one copy.
    """
    if size is None:
        fits = memory is not None and state / on_node <= memory / 3 and on_node % experts == 0
        return on_node if fits and ranks > on_node and ranks % on_node == 0 else ranks
    return ranks if size == -1 else min(size, ranks)


def has_own_critic(trainer: TrainerConfig) -> bool:
    """Return whether the critic has ranks of its own, after the policy's; otherwise it is beside the policy."""
    placement = trainer.placement
    sizes = placement.critic_num_nodes, placement.critic_num_gpus_per_node
    return trainer.critic.model.path is not None and not placement.colocate_all and sizes != (None, None)


def critic_nodes(trainer: TrainerConfig) -> tuple[int, int]:
    """Return the nodes of the critic, and its ranks on each; what is not set: the policy's."""
    placement = trainer.placement
    nodes, ranks = placement.critic_num_nodes, placement.critic_num_gpus_per_node
    return nodes or placement.policy_num_nodes, ranks or placement.policy_num_gpus_per_node


def critic_ranks(trainer: TrainerConfig) -> int:
    """Return the ranks of the critic; where they are not set: the policy's."""
    nodes, ranks = critic_nodes(trainer)
    return nodes * ranks


def ref_ranks(trainer: TrainerConfig) -> int:
    """Return the ranks of the reference model; where they are not set: the policy's."""
    placement = trainer.placement
    nodes, ranks = placement.ref_num_nodes, placement.ref_num_gpus_per_node
    return (nodes or placement.policy_num_nodes) * (ranks or placement.policy_num_gpus_per_node)


def engine_gpus(engine: InferenceEngineConfig) -> int:
    """Return the GPUs of one replica."""
    return engine.tensor_parallel_size * engine.pipeline_parallel_size * engine.data_parallel_size


def engine_nodes(config: ConfigTree) -> int:
    """Return the nodes of one replica: several where it has more GPUs than a node, of which it then has all."""
    gpus = gpu_count(config.slurm)
    return max(1, -(-engine_gpus(config.generator.inference_engine) // gpus)) if gpus else 1


def runs_eagerly(engine: InferenceEngineConfig, *, on_cpu: bool) -> bool:
    """Return whether engines run without compiled code and CUDA graphs; where it is not set: if there is no GPU."""
    return on_cpu if engine.enforce_eager is None else engine.enforce_eager


def engine_memory_share(config: ConfigTree) -> float:
    """Return the share of a GPU's memory that an engine may use; where it is not set: less beside a trainer that is away."""
    own = config.generator.inference_engine.gpu_memory_utilization
    return own if own is not None else 0.8 if config.trainer.placement.colocate_all else 0.9


def engine_rope(config: ConfigTree) -> tuple[dict[str, Any], float | None]:
    """Return scaling and base of the engines' rotary positions; each where it is not set: the trainer's."""
    generator, trainer = config.generator, config.trainer
    scaling = generator.rope_scaling or trainer.rope_scaling
    return scaling, trainer.rope_theta if generator.rope_theta is None else generator.rope_theta


def replicas_per_node(config: ConfigTree) -> int:
    """Return how many replicas one rollout node holds; where it is not set: as many as its GPUs allow, at least 1."""
    if config.slurm.replicas_per_node is not None:
        return config.slurm.replicas_per_node
    return max(1, gpu_count(config.slurm) // max(1, engine_gpus(config.generator.inference_engine)))


def gpu_count(slurm: SlurmConfig) -> int:
    """Return how many GPUs are asked for on each node, without their type."""
    if isinstance(slurm.gpus_per_node, int):
        return max(0, slurm.gpus_per_node)
    count = slurm.gpus_per_node.rpartition(":")[2]
    return int(count) if count.isdecimal() else 0


def max_replicas(config: ConfigTree) -> int:
    """Return how many replicas there are when all are there, elastic ones included."""
    if not has_engines(config):
        return 0
    return config.generator.inference_engine.num_engines + config.slurm.elastic.replicas


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


def surplus_groups(trainer: TrainerConfig) -> int:
    """Return how many training groups are begun beyond those that steps need; at least one where there are to be any."""
    return math.ceil((trainer.fully_async.oversampling_ratio - 1) * trainer.train_batch_size - 1e-9)


def publishes(trainer: TrainerConfig, step: int, total: int) -> bool:
    """Return whether engines, if there are any, get the weights that `step` of `total` leaves."""
    evaluated = trainer.eval_interval > 0 and step % trainer.eval_interval == 0
    if evaluated or step == total or is_offline(trainer):
        return evaluated or step == total
    return step % trainer.fully_async.sync_weight_interval == 0


def kept_versions(trainer: TrainerConfig) -> int:
    """Return how many versions of the weights stay readable: all that engines may still load or generate with."""
    return trainer.fully_async.max_staleness_steps + 2


def saves_checkpoints(trainer: TrainerConfig) -> bool:
    """Return whether there are checkpoints at all."""
    return trainer.ckpt_interval > 0 or trainer.ckpt_interval_epochs is not None


def checkpoint_interval(trainer: TrainerConfig, epoch: int) -> int:
    """Return the steps between checkpoints; 0 or less: there are none.

    Args:
        epoch: steps of one.
    """
    return trainer.ckpt_interval if trainer.ckpt_interval_epochs is None else trainer.ckpt_interval_epochs * epoch


def total_steps(n_prompts: int, trainer: TrainerConfig, drop_last: bool = True) -> int:
    """Return the last step of the run.

    Args:
        drop_last: data.drop_last.

    Raises:
        DataError: `n_prompts` do not fill one batch, or all epochs together do not.
    """
    full = steps_per_epoch(n_prompts, trainer.train_batch_size, drop_last)
    steps = trainer.epochs * full if drop_last else trainer.epochs * n_prompts // trainer.train_batch_size
    if not steps:
        raise DataError(
            f"data.train_data has {n_prompts} usable prompts, and trainer.epochs = {trainer.epochs} of them do not fill one batch of "
            f"trainer.train_batch_size = {trainer.train_batch_size}; lower it, or raise trainer.epochs"
        )
    return steps if trainer.max_steps is None else min(steps, trainer.max_steps)
