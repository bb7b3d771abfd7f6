"""Rules about scorers: teachers, the reference or a reward model on nodes of their own."""

from __future__ import annotations

from collections.abc import Iterator

from hpcrl.config.errors import Problem
from hpcrl.config.scorers import COPIES, POOLS, REFERENCE, REWARD, SECTIONS, TEACHER, scorer_sets
from hpcrl.config.sections.generator import MOST_KEPT
from hpcrl.config.sections.trainer import TrainerConfig
from hpcrl.config.sections.tree import ConfigTree

_TEACHER, _PLACEMENT = "trainer.distillation", "trainer.placement"
_OF_BACKENDS = {"fsdp2": f"{_TEACHER}.placement.fsdp_size", "megatron": f"{_TEACHER}.placement"}
_OF_ENGINES = f"{_TEACHER}.engine.tensor_parallel_size"
_WHAT = {TEACHER: "teacher", REFERENCE: "reference", REWARD: "reward model"}
_RANKS = {
    REFERENCE: f"{_PLACEMENT}.ref_num_gpus_per_node",
    REWARD: "environment.reward_model.ranks_per_replica",
}


def teacher(config: ConfigTree) -> Iterator[Problem]:
    distillation = config.trainer.distillation
    if config.trainer.teaches_rows:
        yield from _teacher_of_rows(config.trainer)
    if not distillation.enable or config.trainer.offline:
        return
    own = distillation.self_teacher.model is not None
    if (distillation.model_path is None) != own:
        what = "leave it out, or self_teacher.model" if own else "the teacher; or set self_teacher.model"
        yield Problem(
            f"{_TEACHER}.model_path",
            f"{'there is another teacher, the policy itself' if own else 'required with trainer.distillation.enable'}: {what}",
        )
    if distillation.backend == "megatron":
        yield from _megatron(config)
    if distillation.placement.fsdp_size < 1:
        yield Problem(
            f"{_TEACHER}.placement.fsdp_size",
            f"expected the number of ranks of one copy of the teacher, found {distillation.placement.fsdp_size}",
        )
    if not (distillation.use_rewards or distillation.kl_penalty_coef or distillation.loss_weight):
        yield Problem(
            f"{_TEACHER}.kl_penalty_coef",
            "0 without trainer.distillation.use_rewards or loss_weight would make every advantage 0; raise it, or set use_rewards=true",
        )
    if distillation.include_prompt and distillation.use_rewards:
        yield Problem(
            f"{_TEACHER}.include_prompt",
            "expected false with trainer.distillation.use_rewards: a reward says nothing of tokens that the policy did not choose",
        )
    if distillation.include_prompt and config.trainer.algorithm.use_rollout_logprobs_for_loss:
        yield Problem(
            f"{_TEACHER}.include_prompt",
            "expected false with trainer.algorithm.use_rollout_logprobs_for_loss: engines give prompts no log-probabilities",
        )
    if distillation.cross_tokenizer:
        yield from _other_tokens(config)
    yield from _without_advantages(config)
    if not distillation.use_rewards and config.trainer.critic.model.path is not None:
        yield Problem(
            "trainer.critic.model.path",
            "a critic learns from rewards, which count for nothing here; set trainer.distillation.use_rewards=true, or leave the critic out",
        )


def _without_advantages(config: ConfigTree) -> Iterator[Problem]:
    distillation = config.trainer.distillation
    subtracts = (
        distillation.kl_penalty_coef and distillation.loss_weight < 1 and not distillation.self_teacher.wrong_hints
    )
    if subtracts and config.trainer.algorithm.policy_loss_type == "cross_entropy":
        yield Problem(
            "trainer.algorithm.policy_loss_type",
            'expected another than "cross_entropy" with a teacher: it has no advantages from which a divergence could be subtracted; choose '
            f'"importance_sampling", or set {_TEACHER}.kl_penalty_coef=0 and loss_weight',
        )


def _other_tokens(config: ConfigTree) -> Iterator[Problem]:
    path, sampling = f"{_TEACHER}.cross_tokenizer", config.generator.sampling_params
    if config.trainer.distillation.include_prompt:
        yield Problem(
            path,
            "tokens are compared by the policy's log-probabilities when it sampled, which prompts have not (include_prompt); set it to false",
        )
    if sampling.mask_size:
        yield Problem(
            path,
            "the teacher's log-probabilities are over all its tokens, and sampling leaves some of the policy's out "
            f"(generator.sampling_params.top_k = {sampling.top_k}); leave one of them out",
        )


def _megatron(config: ConfigTree) -> Iterator[Problem]:
    if config.trainer.distillation.fsdp_config.mixed_precision.param_dtype == "fp16":
        yield Problem(
            f"{_TEACHER}.fsdp_config.mixed_precision.param_dtype",
            'expected bf16 or fp32 with backend="megatron", found fp16',
        )


def _teacher_of_rows(trainer: TrainerConfig) -> Iterator[Problem]:
    distillation, mode = trainer.distillation, 'with trainer.mode="sft"'
    if distillation.model_path is None:
        yield Problem(f"{_TEACHER}.model_path", "required with trainer.distillation.enable: the teacher")
    if not distillation.top_k:
        yield Problem(
            f"{_TEACHER}.top_k", f"expected how many of the teacher's most probable tokens are learned {mode}, found 0"
        )
    elif not distillation.loss_weight:
        yield Problem(f"{_TEACHER}.loss_weight", f"expected above 0 {mode}: nothing else is learned from the teacher")
    if trainer.ref.model.path is not None:
        yield Problem("trainer.ref.model.path", f"leave it out {mode}: the teacher is in the place of the reference")


def own_teacher(config: ConfigTree) -> Iterator[Problem]:
    trainer, distillation, path = config.trainer, config.trainer.distillation, f"{_TEACHER}.self_teacher"
    model = trainer.distillation.self_teacher_model
    if model is None:
        return
    if config.generator.n_samples_per_prompt < 2:
        yield Problem(
            "generator.n_samples_per_prompt",
            f"expected at least 2 with {path}.model: hints are answers of other samples of the group",
        )
    yield from _wrong_hints(config)
    if "{answer}" not in distillation.self_teacher.template:
        yield Problem(f"{path}.template", "expected a text with {answer}, the answer that is shown")
    if distillation.include_prompt:
        yield Problem(f"{_TEACHER}.include_prompt", f"expected false with {path}.model, whose prompts are others")
    if model != "policy" and not (trainer.placement.colocate_policy_ref or trainer.placement.colocate_all):
        yield Problem(
            f"{_PLACEMENT}.colocate_policy_ref",
            f'expected true with {path}.model="{model}", the reference beside the policy',
        )
    if model != "ema":
        return
    resets = trainer.algorithm.reference_reset_interval is not None or trainer.update_ref_every_epoch
    if trainer.compares_with_reference or resets:
        yield Problem(
            f"{path}.model",
            'the reference is the average with "ema", which nothing else may compare with or reset; leave out trainer.algorithm.use_kl_loss, '
            "use_kl_in_reward, reference_reset_interval and trainer.update_ref_every_epoch",
        )
    if trainer.strategy == "megatron" and trainer.ref.megatron_config.dtype != "fp32" and not trainer.reference_is_base:
        yield Problem(
            f"{path}.model",
            'with trainer.strategy="megatron" an average wants trainer.ref.megatron_config.dtype="fp32": small changes are lost in 16 bits',
        )


def _wrong_hints(config: ConfigTree) -> Iterator[Problem]:
    distillation, path = config.trainer.distillation, f"{_TEACHER}.self_teacher"
    wanted, contrast = distillation.self_teacher.wrong_hints, distillation.self_teacher.contrast
    if not wanted:
        return
    most = max(config.generator.n_samples_per_prompt - 2, 0)
    if wanted > most:
        yield Problem(
            f"{path}.wrong_hints",
            f"expected at most {most}, the samples of a group beside the one that is taught and one that succeeded, found {wanted}; "
            "raise generator.n_samples_per_prompt",
        )
    if not distillation.use_rewards:
        yield Problem(
            f"{_TEACHER}.use_rewards",
            f"expected true with {path}.wrong_hints: a contrast of hints only modulates the advantages that rewards give",
        )
    if config.trainer.algorithm.policy_loss_type == "cross_entropy":
        yield Problem(
            "trainer.algorithm.policy_loss_type",
            f'expected another than "cross_entropy" with {path}.wrong_hints: it has no advantages that a contrast could modulate',
        )
    if contrast.threshold >= contrast.scale:
        yield Problem(
            f"{path}.contrast.threshold",
            f"expected below {path}.contrast.scale = {contrast.scale:g}, the most that is added to an advantage, found {contrast.threshold:g}: "
            "no token would be modulated",
        )


def tokens_of_the_policy(config: ConfigTree) -> Iterator[Problem]:
    distillation, sampling = config.trainer.distillation, config.generator.sampling_params
    if not distillation.enable or distillation.top_k_from_teacher:
        return
    if distillation.top_k >= MOST_KEPT:
        yield Problem(
            f"{_TEACHER}.top_k",
            f"expected at most {MOST_KEPT - 1} with top_k_from_teacher=false, found {distillation.top_k}: engines tell of no more",
        )
    if distillation.rollout_top_k_recompute:
        return
    missing = (
        "" if not distillation.include_prompt else "trainer.distillation.include_prompt: of a prompt nothing is sampled"
    )
    if sampling.mask_size:
        missing = "generator.sampling_params.top_k: of the tokens that sampling leaves out engines say nothing"
    if missing:
        yield Problem(
            f"{_TEACHER}.rollout_top_k_recompute", f"expected true with top_k_from_teacher=false and {missing}"
        )


def reference_apart(config: ConfigTree) -> Iterator[Problem]:
    trainer, path = config.trainer, f"{_PLACEMENT}.colocate_policy_ref"
    if trainer.placement.colocate_policy_ref or trainer.placement.colocate_all:
        return
    if not trainer.uses_reference:
        yield Problem(
            path, "there is no reference model to have nodes of its own (trainer.algorithm.use_kl_loss); leave it out"
        )
    elif trainer.offline:
        yield Problem(path, f'expected true with trainer.mode="{trainer.mode}", whose reference is beside the policy')
    elif trainer.reference_follows:
        yield Problem(
            path,
            "expected true with a reference that follows the policy (trainer.algorithm.reference_reset_interval, trainer.update_ref_every_epoch)",
        )


def enough_scorers(config: ConfigTree) -> Iterator[Problem]:
    least, sets = config.slurm.min_scorers, {each.role: each for each in scorer_sets(config)}
    for role, each in sets.items():
        pool = f"{POOLS[role]}.replicas"
        if each.copies < 1:
            yield Problem(COPIES[role], f"expected at least 1, or copies of an elastic pool ({pool}), found 0")
        elif each.copies < least:
            together = f"{COPIES[role]}{f' and {pool} together' if each.pool.replicas else ''}"
            yield Problem(
                "slurm.min_scorers",
                f"expected at most {each.copies}, the copies of the {each.title} ({together}), found {least}",
            )
    elastic = config.slurm.elastic_scorers
    for each in sets.values():
        if each.pool.replicas and each.nodes > 1:
            yield Problem(
                f"{POOLS[each.role]}.replicas",
                f"expected 0: an element of a pool has one node, and a copy of the {each.title} {each.nodes} ({_TEACHER}.placement.nodes_per_replica)",
            )
    for role, asked in ((TEACHER, elastic.teacher), (REFERENCE, elastic.reference), (REWARD, elastic.reward_model)):
        if asked.replicas and role not in sets:
            yield Problem(
                f"{POOLS[role]}.replicas", f"no {_WHAT[role]} judges finished samples on nodes of its own; leave it out"
            )


def ranks_of_scorers(config: ConfigTree) -> Iterator[Problem]:
    gpus, own = config.slurm.gpus, config.trainer.distillation
    if own.placement.fsdp_size < 1:
        return
    for each in scorer_sets(config):
        shared = each.fsdp.fsdp_size or 0
        if not each.engine and each.role != REFERENCE and shared > each.ranks:
            yield Problem(
                f"{SECTIONS[each.role]}.fsdp_config.fsdp_size",
                f"expected at most the {each.ranks} rank(s) of a copy of the {each.title}, found {shared}; more ranks: "
                f"{_OF_BACKENDS['fsdp2'] if each.role == TEACHER else _RANKS[each.role]}",
            )
        if each.ranks % each.nodes:
            yield Problem(
                f"{_TEACHER}.placement.nodes_per_replica",
                f"expected a divisor of the ranks of a copy of the teacher, {each.ranks} ({_OF_BACKENDS.get(own.backend, _OF_ENGINES)}), found {each.nodes}",
            )
        elif each.ranks % each.sharing:
            teaches = each.role == TEACHER
            yield Problem(
                f"{_TEACHER}.placement.sequence_parallel_size" if teaches else "trainer.ref.sequence_parallel_size",
                f"expected a divisor of the ranks of a copy of the {each.title}, {each.ranks} "
                f"({_OF_BACKENDS['fsdp2'] if teaches else _RANKS[each.role]}), found {each.sharing}",
            )
        elif each.ranks % each.fsdp.expert_parallel_size:
            yield Problem(
                f"{SECTIONS[each.role]}.fsdp_config.expert_parallel_size",
                f"expected a divisor of the ranks of a copy of the {each.title}, {each.ranks}, found {each.fsdp.expert_parallel_size}",
            )
        elif each.sharing > 1 and not (own if each.role == TEACHER else config.trainer).use_sample_packing:
            yield Problem(
                f"{_TEACHER if each.role == TEACHER else 'trainer'}.use_sample_packing",
                f"ranks of the {each.title} share the tokens of packed samples, and not of padded rows; set it to true",
            )
        elif gpus and each.ranks_per_node > gpus:
            more = f"; or spread them over more nodes ({_TEACHER}.placement.nodes_per_replica)"
            teaches = each.role == TEACHER
            yield Problem(
                _OF_BACKENDS.get(own.backend, _OF_ENGINES) if teaches else _RANKS[each.role],
                f"{each.ranks_per_node} ranks share a copy of the {each.title} on one node, which has {gpus} GPUs (slurm.gpus_per_node)"
                f"{more if teaches and not each.engine else ''}",
            )
