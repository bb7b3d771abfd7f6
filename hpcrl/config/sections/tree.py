"""Declares the tree of all sections, with properties that follow from several of them. hpcrl.config.root.Config loads and checks it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from hpcrl.config.conditions import ENGINES
from hpcrl.config.effects import OTHER_RUN, SOFTWARE
from hpcrl.config.fields import Location
from hpcrl.config.sections.data import DataConfig
from hpcrl.config.sections.environment import EnvironmentConfig, ScoringRewardModelConfig
from hpcrl.config.sections.generator import GeneratorConfig
from hpcrl.config.sections.slurm import SlurmConfig
from hpcrl.config.sections.trainer import TrainerConfig
from hpcrl.config.sections.vla import VLAConfig
from hpcrl.config.setting import Effect, section, setting


@dataclass(frozen=True, kw_only=True)
class ConfigTree:
    """What one run does, as rules and derived values see it."""

    config_class: str | None = setting(None, on_change=OTHER_RUN)
    """Your own subclass of hpcrl.config.Config that adds settings, as "package.module:Class"."""

    python_path: list[Location] = setting([], on_change=SOFTWARE)
    """Folders in which config_class and your other classes are looked for, after PYTHONPATH; "." is the folder of the file that sets it."""

    data: DataConfig
    trainer: TrainerConfig
    generator: GeneratorConfig = section(GeneratorConfig)
    environment: EnvironmentConfig = section(
        EnvironmentConfig,
        used_by=ENGINES,
        on_change=Effect("warning", "rewards change; groups that wait to be trained have the old ones"),
    )
    vla: VLAConfig = section(VLAConfig)
    slurm: SlurmConfig = section(SlurmConfig)

    @property
    def names_own_code(self) -> bool:
        """Whether the configuration names code of the user's, or where it is."""
        environment = self.environment
        environments = [environment.env_class or "", *environment.allowed_env_classes, *environment.names.values()]
        rewards = [
            *environment.reward_function,
            *environment.eval_reward_function,
            *environment.group_reward_function,
            *environment.skyrl_gym.agent.reward_function,
        ]
        return bool(self.config_class or self.python_path or self.data.train_function) or any(
            ":" in name for name in (*environments, *rewards)
        )

    @property
    def has_engines(self) -> bool:
        """Whether there are rollout nodes: always where samples are trained, and where training on datasets is evaluated by generating."""
        return not self.trainer.offline or bool(self.data.val_prompts and self.trainer.eval_interval > 0)

    @property
    def has_scorers(self) -> bool:
        """Whether processes beside the trainer score finished samples: teachers, a reference on nodes of its own, a reward model."""
        teachers = not self.trainer.offline and self.trainer.distillation.teachers
        return bool(teachers) or self.trainer.has_own_reference or self.scoring_reward_model is not None

    @property
    def scoring_reward_model(self) -> ScoringRewardModelConfig | None:
        """Section of the reward model that scores finished groups; None: there is none."""
        own = self.environment.reward_model
        return own if own.model is not None and not self.trainer.offline else None

    @property
    def reward_services(self) -> int:
        """Processes that serve a reward model in a run."""
        kinds: tuple[Literal["train", "eval"], ...] = ("eval",) if self.trainer.offline else ("train", "eval")
        used = self.has_engines and any(self.environment.uses_reward_service(kind) for kind in kinds)
        service = self.environment.remote_reward.service
        return service.num_services if used and service.model is not None else 0

    @property
    def samples_per_prompt(self) -> int:
        """Samples of a group that can train on different ranks; a row of a dataset, a pair too, is trained by one."""
        return 1 if self.trainer.offline else self.generator.n_samples_per_prompt

    @property
    def several_rows(self) -> bool:
        """Whether a sample may be several rows: turns, or conversations that an agent's program has."""
        return self.generator.step_wise_trajectories or self.generator.inference_engine.enable_http_endpoint

    @property
    def max_input_length(self) -> int:
        """Tokens before a turn at most; where it is not set: trainer.max_prompt_length."""
        own = self.generator.max_input_length
        return self.trainer.max_prompt_length if own is None else own

    @property
    def max_model_len(self) -> int:
        """Tokens that an engine must hold of a sample at most, of training or evaluation."""
        training, evaluation = self.generator.sampling_params, self.generator.eval_sampling
        return self.max_input_length + max(training.max_generate_length, evaluation.max_generate_length)

    @property
    def order_seed(self) -> int | None:
        """Seed of the order of training prompts; None for the dataset's own order, which rows of a function have too."""
        return self.prompt_seed if self.data.shuffle and self.data.train_function is None else None

    @property
    def prompt_seed(self) -> int:
        """Seed of an order of training prompts, or of those that a function makes; where it is not set: trainer.seed."""
        return self.trainer.seed if self.data.shuffle_seed is None else self.data.shuffle_seed

    @property
    def sampling_seed(self) -> int:
        """Seed from which those of samples are made; where it is not set: trainer.seed."""
        own = self.generator.inference_engine.seed
        return self.trainer.seed if own is None else own

    @property
    def temperature(self) -> float:
        """Divisor of the logits in training; where it is not set: the sampling temperature, and 1 where nothing is sampled."""
        if self.trainer.offline:
            return 1.0
        own = self.trainer.algorithm.temperature
        return self.generator.sampling_params.temperature if own is None else own

    @property
    def engine_nodes(self) -> int:
        """Nodes of one replica: several where it has more GPUs than a node, of which it then has all."""
        gpus = self.slurm.gpus
        return max(1, -(-self.generator.inference_engine.gpus // gpus)) if gpus else 1

    def engine_memory_share(self, *, shared: bool) -> float:
        """Return the share of a GPU's memory that an engine may use; where it is not set: less where the GPU is `shared` with the trainer."""
        own = self.generator.inference_engine.gpu_memory_utilization
        return own if own is not None else 0.8 if shared else 0.9

    @property
    def replicas_per_trainer_node(self) -> int:
        """Replicas for which each of the policy's nodes has GPUs."""
        return self.trainer.placement.policy_num_gpus_per_node // max(1, self.generator.inference_engine.gpus)

    @property
    def lent_replicas(self) -> range:
        """Numbers of the replicas that have GPUs of the trainer while it waits: after all others."""
        placement, first = self.trainer.placement, self.max_replicas
        lent = placement.policy_nodes * self.replicas_per_trainer_node if placement.lend else 0
        return range(first, first + lent)

    @property
    def shared_gpus(self) -> bool:
        """Whether trainer and engines use GPUs in turns, all the time or while the trainer waits."""
        return self.slurm.gpus > 0 and (self.trainer.placement.colocate_all or len(self.lent_replicas) > 0)

    def shares_gpus(self, replica: int) -> bool:
        """Return whether a replica has GPUs of the trainer."""
        return self.trainer.placement.colocate_all or replica in self.lent_replicas

    @property
    def engine_rope(self) -> tuple[dict[str, Any], float | None]:
        """Scaling and base of the engines' rotary positions; each where it is not set: the trainer's."""
        generator, trainer = self.generator, self.trainer
        scaling = generator.rope_scaling or trainer.rope_scaling
        return scaling, trainer.rope_theta if generator.rope_theta is None else generator.rope_theta

    @property
    def replicas_per_node(self) -> int:
        """Replicas that one rollout node holds; where it is not set: as many as its GPUs allow, at least 1."""
        if self.slurm.replicas_per_node is not None:
            return self.slurm.replicas_per_node
        return max(1, self.slurm.gpus // max(1, self.generator.inference_engine.gpus))

    @property
    def sandbox_servers(self) -> int:
        """Servers of sandboxes: those on nodes of their own, and then one on each node of the run that has replicas."""
        own = self.slurm.sandboxes
        if own.per_rollout_node == 0:
            return own.nodes
        if self.trainer.placement.colocate_all:
            return own.nodes + self.trainer.placement.policy_nodes
        return own.nodes + -(-self.generator.inference_engine.engines // self.replicas_per_node)

    @property
    def evaluators(self) -> range:
        """Numbers of the replicas that only evaluate."""
        engines = self.generator.inference_engine.engines
        return range(engines - self.slurm.eval_replicas, engines)

    @property
    def max_replicas(self) -> int:
        """Replicas on nodes of their own, or colocated ones, when all are there, elastic ones included."""
        return self.generator.inference_engine.engines + self.slurm.elastic.replicas if self.has_engines else 0

    @property
    def loads_adapters(self) -> bool:
        """Whether engines get the policy's adapters after each step, instead of the whole policy."""
        lora, merged = self.trainer.policy.model.lora, self.generator.inference_engine.merge_lora
        return self.has_engines and lora.rank > 0 and not merged and lora.loadable

    @property
    def engines_begin_with_model(self) -> bool:
        """Whether engines hold version 0 when they start. Those that somebody else started may hold anything, and get it as any other."""
        return self.trainer.policy.model.lora.begins_with_model and not self.generator.inference_engine.remote_urls
