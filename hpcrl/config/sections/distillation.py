"""Section `trainer.distillation`: a teacher that scores the policy's own samples (on-policy distillation)."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal

from hpcrl.config.conditions import RL, SFT
from hpcrl.config.effects import NO_TOKENS, SAME_NUMBERS
from hpcrl.config.fields import Location
from hpcrl.config.sections.megatron import MegatronModelConfig
from hpcrl.config.sections.model import Pretrained, TeacherFSDPConfig
from hpcrl.config.setting import (
    ALL_OR_COUNT,
    COUNT,
    NOT_NEGATIVE,
    POSITIVE,
    SHARE,
    SHARE_ABOVE_0,
    When,
    section,
    setting,
    when,
)

IN_RANKS = ("fsdp2", "megatron")
"""Backends that compute a teacher in the scorer's ranks; all others are engines."""


def _with(*backends: str) -> When:
    return when("trainer.distillation.backend", *backends)


_IN_ENGINE = when(
    "trainer.distillation.backend",
    test=lambda backend: backend not in IN_RANKS,
    needs='trainer.distillation.backend="vllm" or another engine',
)
_ALIGNED = when("trainer.distillation.cross_tokenizer")
_OWN_TEACHER = when(
    "trainer.distillation.self_teacher.model",
    test=lambda model: model is None,
    needs="a teacher of its own (trainer.distillation.self_teacher.model unset)",
)
_WRONG = "trainer.distillation.self_teacher.wrong_hints"
_CONTRAST, _NO_CONTRAST = when(_WRONG), when(_WRONG, 0)
_REWARDS_COUNT = when(".loss_weight", test=lambda weight: weight < 1, needs="{section}.loss_weight below 1")


@dataclass(frozen=True, kw_only=True)
class TeacherPlacementConfig:
    num_replicas: int = setting(1, range=NOT_NEGATIVE)
    """Copies of the teacher."""

    tensor_parallel_size: int = setting(1, range=COUNT, used_by=_with("megatron"))
    """Ranks of the teacher that share each layer's matrices, with backend="megatron"."""

    pipeline_parallel_size: int = setting(1, range=COUNT, used_by=_with("megatron"))
    """Ranks of the teacher that share the layers, with backend="megatron"."""

    sequence_parallel_size: int = setting(1, range=COUNT, used_by=_with("fsdp2", "megatron"))
    """Ranks of the teacher that share the tokens of a sample, with backend="fsdp2" or "megatron"."""

    expert_parallel_size: int = setting(1, range=COUNT, used_by=_with("megatron"))
    """Ranks of the teacher that share the experts, with backend="megatron"; where those that share layers and tokens are fewer, a copy has as many ranks, which then score different samples."""

    nodes_per_replica: int = setting(1, range=COUNT)
    """Nodes that a copy's ranks are on, equally many on each; with backend="fsdp2" or "megatron"."""

    fsdp_size: int = setting(1, check=ALL_OR_COUNT, used_by=_with("fsdp2"))
    """Ranks of a copy of the teacher, with backend="fsdp2"; fsdp_config.fsdp_size says how many of them share its parameters."""


@dataclass(frozen=True, kw_only=True)
class TeacherEngineConfig:
    tensor_parallel_size: int = setting(1, range=COUNT)
    """GPUs that share the weights of one copy of the teacher, on one node."""

    model_dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Number type of its weights and of the computation."""

    max_num_batched_tokens: int = setting(4096, range=COUNT)
    """Tokens per forward pass; each takes room for the logits of the whole vocabulary, several times. Raised to the longest sample where prompts are read whole, without GPUs."""

    max_model_len: int | None = setting(None, range=COUNT, used_by=_ALIGNED)
    """Longest context of the engine, in the teacher's tokens; a sample has to be shorter, or gets no score. Unset: twice the policy's longest sample, at most the teacher's own longest context."""

    gpu_memory_utilization: float = setting(0.8, range=SHARE_ABOVE_0)
    """Share of a GPU's memory that the engine may use; no effect on CPU."""

    engine_init_kwargs: dict[str, Any] = setting({})
    """Further options of the vLLM server, by their names there."""

    start_timeout_seconds: int = setting(1800, range=COUNT)
    """How long it may take until it answers; then it counts as failed."""


@dataclass(frozen=True, kw_only=True)
class ContrastConfig:
    """How the contrast of a right hint with wrong ones modulates advantages (RLCSD, arXiv:2606.11709, whose numbers these are)."""

    scale: float = setting(0.5, range=POSITIVE)
    """The most that is added to the advantage of a token, or subtracted; it never changes the sign."""

    width: float = setting(0.02, range=POSITIVE)
    """Difference of log-probabilities, in nats, at which 76 % of that is reached."""

    threshold: float = setting(0.02, range=NOT_NEGATIVE)
    """Tokens to whose advantage no more than this would be added are not modulated."""

    weight: float = setting(1.0, range=POSITIVE)
    """Weight of the mean loss of a sample's modulated tokens beside that of its others."""


@dataclass(frozen=True, kw_only=True)
class SelfTeacherConfig:
    """A teacher that is the policy itself, shown a hint: the answer of another sample of the group that earned `success_reward`."""

    model: Literal["initial", "policy", "ema"] | None = None
    """Which policy teaches: `initial`, the reference; `policy`, the one that the step begins with; `ema`, an exponential moving average. Unset: none, teachers are models of their own."""

    ema_rate: float = setting(0.05, range=SHARE, used_by=(when(".model"), when(".model", "ema")))
    """Share of the policy in the moving average after each step."""

    success_reward: float = setting(1.0, used_by=when(".model"))
    """Reward from which on an answer is shown to the others of its group."""

    template: str = setting(
        "{prompt}\n\nHere is an answer that was found to be right:\n\n{answer}\n\n{feedback}\n\nAnswer the question.",
        used_by=when(".model"),
    )
    """What the last message of the user becomes: {prompt} is that message, {answer} the answer that is shown, {feedback} the environment's answers in the sample itself."""

    wrong_hints: int = setting(0, range=NOT_NEGATIVE, used_by=when(".model"))
    """At most this many answers of the group below success_reward are shown too, each in a prompt of its own. What they change as the right one does is style, which is then not taught: contrastive self-distillation (RLCSD, arXiv:2606.11709, 4 there). Each costs a forward pass; 0: none."""

    contrast: ContrastConfig = section(ContrastConfig, used_by=_CONTRAST)


@dataclass(frozen=True, kw_only=True)
class DistillationConfig:
    enable: bool = False
    """Learn from the divergence from a teacher instead of rewards."""

    use_rewards: bool = setting(False, used_by=(_REWARDS_COUNT, RL))
    """Learn from rewards as well: the divergence is subtracted from the advantages that they give."""

    model_path: Location | None = None
    """Directory or hub id of the teacher."""

    source_models: dict[str, Location] = setting({}, used_by=(_OWN_TEACHER, RL))
    """Further teachers, directories or hub ids, by the `data_source` of the rows that each of them judges; model_path judges all others. Each has placement.num_replicas copies."""

    model_revision: str | None = setting(None, used_by=_OWN_TEACHER)
    """Branch, tag or commit of the teacher on the hub."""

    precomputed_logprobs: Location | None = setting(None, used_by=SFT, on_change=SAME_NUMBERS)
    """Directory that `hpcrl score` wrote, with what the teacher says of the rows of data.train_data: trainer.mode="sft" reads that, and loads no teacher."""

    cross_tokenizer: bool = setting(False, used_by=(when(".top_k", 0), _OWN_TEACHER, RL), on_change=SAME_NUMBERS)
    """Let the teacher read samples in its own tokens, where its tokenizer is another than the policy's. Log-probabilities of sampled tokens are compared over the shortest texts of whole tokens of both (arXiv:2606.09456)."""

    backend: str = setting("fsdp2", used_by=(_OWN_TEACHER, RL), on_change=SAME_NUMBERS)
    """Backend of the teacher: fsdp2, or megatron for the parallel sizes of placement, in the scorer's ranks; or vllm, an engine of each scorer. Log-probabilities of prompts from vllm are of whole distributions at temperature 1."""

    engine: TeacherEngineConfig = section(
        TeacherEngineConfig, used_by=(_IN_ENGINE, _OWN_TEACHER, RL), on_change=SAME_NUMBERS
    )

    self_teacher: SelfTeacherConfig = section(SelfTeacherConfig, used_by=RL)

    placement: TeacherPlacementConfig = section(
        TeacherPlacementConfig, used_by=(_OWN_TEACHER, RL), on_change=SAME_NUMBERS
    )

    fsdp_config: TeacherFSDPConfig = section(
        TeacherFSDPConfig, used_by=(_with("fsdp2"), _OWN_TEACHER, RL), on_change=SAME_NUMBERS
    )

    compile_model: bool = setting(False, used_by=(_with("fsdp2"), _OWN_TEACHER, RL), on_change=SAME_NUMBERS)
    """Compile the layers of the teacher with torch.compile: its first passes take minutes, later ones less time."""

    micro_batch_size_per_gpu: int = setting(
        1, range=COUNT, used_by=(_with(*IN_RANKS), _OWN_TEACHER, RL), on_change=SAME_NUMBERS
    )
    """Samples per forward pass of the teacher on one rank."""

    batch_size_per_replica: int = setting(8, range=COUNT, used_by=(_OWN_TEACHER, RL), on_change=SAME_NUMBERS)
    """Samples that one copy of the teacher scores at a time."""

    max_tokens_per_micro_batch: int | None = setting(
        None, range=COUNT, used_by=(_with(*IN_RANKS), _OWN_TEACHER, RL), on_change=SAME_NUMBERS
    )
    """Tokens per forward pass of the teacher, instead of a number of samples."""

    use_sample_packing: bool = setting(True, used_by=(_with("fsdp2"), _OWN_TEACHER, RL), on_change=SAME_NUMBERS)
    """Lay samples end to end in the teacher's forward pass."""

    kl_penalty_coef: float = setting(1.0, range=NOT_NEGATIVE, used_by=(_REWARDS_COUNT, _NO_CONTRAST, RL))
    """Weight of the divergence that is subtracted from the advantage of each token."""

    kl_discount_factor: float = setting(0.0, range=SHARE, used_by=(_REWARDS_COUNT, _NO_CONTRAST, RL))
    """Discount per token with which later tokens' divergences count for a token; 0: they do not."""

    iw_opd_gamma: float = setting(
        0.0, range=NOT_NEGATIVE, used_by=(when(".top_k", 0), when(".kl_discount_factor", 0.0), _NO_CONTRAST, RL)
    )
    """Weigh a token's divergence by 1 + iw_opd_gamma times the share of the sample's absolute divergences that is still to come (arXiv:2606.22600, 0.5 there); 0: all alike."""

    include_prompt: bool = setting(False, used_by=RL)
    """Learn also the tokens that the policy did not choose: the prompt, and the environment's answers."""

    top_k: int = setting(0, range=NOT_NEGATIVE, used_by=_NO_CONTRAST)
    """Compare the probabilities of this many tokens by a generalized Jensen-Shannon divergence; 0: only of the sampled one, by reverse KL."""

    loss_weight: float = setting(0.0, range=SHARE, used_by=when(".top_k"))
    """Weight w, from 0 to 1, of the divergence over the top_k tokens as a term of the loss: (1 - w) policy loss + w divergence."""

    jsd_beta: float = setting(0.5, range=SHARE, used_by=when(".top_k"))
    """Mixture of policy (1 - jsd_beta) and teacher in that divergence; 0: KL(teacher || policy), 1: KL(policy || teacher)."""

    top_k_from_teacher: bool = setting(True, used_by=(when(".top_k"), RL), on_change=NO_TOKENS)
    """The top_k tokens are those that the teacher finds most probable; otherwise those that the policy did when it generated."""

    rollout_top_k_recompute: bool = setting(
        False, used_by=(when(".top_k"), when(".top_k_from_teacher", False), RL), on_change=NO_TOKENS
    )
    """Engines find the policy's top_k tokens in one more pass over each finished sample, its prompt included, instead of as they sample."""

    @property
    def self_teacher_model(self) -> str | None:
        """Which policy teaches itself by hints, as of self_teacher.model; None: none does."""
        return self.self_teacher.model if self.enable else None

    @property
    def batch_settings(self) -> dict[str, Any]:
        """Settings that advantages and scores of a half-trained batch depend on, by names below `trainer.distillation`."""
        own = self.self_teacher
        found = {
            "self_teacher.model": own.model,
            "self_teacher.wrong_hints": own.wrong_hints,
            "self_teacher.contrast": asdict(own.contrast),
        }
        names = ("enable", "use_rewards", "include_prompt", "top_k", "loss_weight", "jsd_beta")
        for name in (*names, "kl_penalty_coef", "kl_discount_factor", "iw_opd_gamma"):
            found[name] = getattr(self, name)
        return found

    @property
    def rewards_count(self) -> bool:
        """Whether advantages are estimated from rewards: always but where a teacher takes their place."""
        return self.use_rewards or not self.enable

    @property
    def learns_prompts(self) -> bool:
        """Whether the tokens that the policy did not choose are learned too."""
        return self.enable and self.include_prompt

    @property
    def teachers(self) -> dict[Pretrained, tuple[str, ...] | None]:
        """The teachers, each with the data sources that it judges, None for all others; empty: there is no teacher."""
        if not self.enable or self.model_path is None:
            return {}
        found: dict[Pretrained, tuple[str, ...] | None] = {Pretrained(self.model_path, self.model_revision): None}
        for source, path in self.source_models.items():
            own = found.get(model := Pretrained(path), ())
            found[model] = None if own is None else (*own, source)
        return found

    @property
    def megatron_layout(self) -> MegatronModelConfig:
        """How Megatron-core's ranks share a copy of the teacher."""
        sizes, experts = self.placement, self.placement.expert_parallel_size
        return MegatronModelConfig(
            dtype="fp32" if self.fsdp_config.mixed_precision.param_dtype == "fp32" else "bf16",
            tensor_model_parallel_size=sizes.tensor_parallel_size,
            pipeline_model_parallel_size=sizes.pipeline_parallel_size,
            context_parallel_size=sizes.sequence_parallel_size,
            expert_model_parallel_size=experts,
            expert_tensor_parallel_size=1 if experts > 1 else None,
        )

    @property
    def ranks_per_replica(self) -> int:
        """Ranks that share a copy of a teacher, or devices, where it is an engine."""
        sizes = self.placement
        if self.backend not in IN_RANKS:
            return self.engine.tensor_parallel_size
        if self.backend == "fsdp2":
            return sizes.fsdp_size
        together = sizes.tensor_parallel_size * sizes.sequence_parallel_size
        return sizes.pipeline_parallel_size * math.lcm(together, sizes.expert_parallel_size)
