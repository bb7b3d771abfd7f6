"""Settings of the controller in numbers."""

from __future__ import annotations

from dataclasses import dataclass, field

from hpcrl.config.sections.data import CurriculumConfig
from hpcrl.controller.dynamic_sampling import DynamicSampling
from hpcrl.controller.replicas import MinReplicas


@dataclass(frozen=True)
class Schedule:
    """Settings of the controller, derived from the configuration.

    Attributes:
        batch_size: groups per step.
        n_samples, eval_n_samples: samples per group.
        staleness: bound in steps.
        order_seed, drop_last: as of `PromptStream`.
        groups_at_once: training groups that are generated at the same time at most; None for no bound but the staleness.
        surplus: training groups that are begun beyond those that steps need.
        eval_prompts_at_once: prompts that are evaluated at the same time at most.
        eval_interval: steps between evaluations; 0 or less for none.
        eval_settings: as `evaluation_work`.
        sampling: what becomes of groups whose samples are all equally good.
        curriculum: which prompts come more seldom.
        baselines: whether groups have the reward of a greedy response.
        colocated: whether trainer and engines take turns.
        lent: names of the workers whose engines have the trainer's GPUs while it waits, as far as that pays.
        engines_begin_with_model: whether engines hold version 0 when they start; else its weights are published as any other's.
        min_replicas: when there are too few replicas to go on.
        evaluators: workers that only evaluate.
        eval_by_job: whether a job of its own evaluates, and no worker (slurm.evaluation).
        max_failed_ratio: share of samples whose environments may fail.
        success_reward: reward from which on a sample has solved its prompt.
    """

    batch_size: int
    n_samples: int
    staleness: int
    total_steps: int
    seed: int
    eval_interval: int
    eval_before_train: bool
    eval_n_samples: int
    order_seed: int | None
    groups_at_once: int | None
    eval_prompts_at_once: int
    surplus: int = 0
    drop_last: bool = True
    sampling: DynamicSampling = field(default_factory=DynamicSampling)
    curriculum: CurriculumConfig = field(default_factory=CurriculumConfig)
    baselines: bool = False
    colocated: bool = False
    lent: tuple[str, ...] = ()
    engines_begin_with_model: bool = True
    min_replicas: MinReplicas = field(default_factory=MinReplicas)
    evaluators: frozenset[str] = frozenset()
    eval_by_job: bool = False
    max_failed_ratio: float = 0.5
    eval_settings: str = ""
    success_reward: float = 1.0

    @property
    def replicas(self) -> int:
        """Replicas, those that only evaluate included, when all are well."""
        return self.min_replicas.replicas + len(self.evaluators)
