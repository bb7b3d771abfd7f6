"""A model that only computes log-probabilities of finished samples, sharded over the ranks of one scorer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

import torch

from hpcrl.config import Config, temperature
from hpcrl.config.derive import micro_batch_tokens, policy_model, ref_sharding
from hpcrl.config.scorers import TEACHER, ScorerSet, teacher_model
from hpcrl.config.sections.model import Pretrained
from hpcrl.data.chat import load_tokenizer
from hpcrl.errors import DataError
from hpcrl.rundir.layout import Run
from hpcrl.trainer.backends.base import MicroBatches
from hpcrl.trainer.backends.fsdp.model import PackedPolicy, free_gathered, load_model
from hpcrl.trainer.batching import (
    MicroBatchLimit,
    SampleRef,
    balanced,
    longest_first,
    micro_batch_limits,
    plan_mini_batch,
)
from hpcrl.trainer.distributed import World
from hpcrl.trainer.models.forward import forward_config
from hpcrl.trainer.models.hf import ModelSource, policy_source, reference_source
from hpcrl.trainer.packing import Before, MiniBatch
from hpcrl.trainer.samples import load_samples
from hpcrl.types import Batch, GroupMeta


class ScoringModel:
    """The model of one scorer. All its ranks have it, and call it alike.

    Args:
        run: whose samples are scored.

    Raises:
        DataError: there is no such model, or it has another vocabulary than the policy.
    """

    def __init__(self, run: Run, config: Config, scorers: ScorerSet, world: World) -> None:
        self._run, self._world = run, world
        trainer, own = config.trainer, config.trainer.distillation
        forward = forward_config(trainer, temperature(config))
        self._limits = micro_batch_limits(trainer, micro_batch_tokens(config))
        source, fsdp = reference_source(trainer), ref_sharding(trainer)
        if scorers.role == TEACHER:
            model = teacher_model(own)
            assert model is not None, "a run without a teacher starts no scorers for one"
            source = replace(policy_source(trainer), **vars(model), role="trainer.distillation", config_kwargs={})
            forward, fsdp = replace(forward, packing=own.use_sample_packing), own.fsdp_config
            limit = MicroBatchLimit(own.micro_batch_size_per_gpu, own.max_tokens_per_micro_batch)
            self._limits = limit, limit
            world.rank0_broadcast(lambda: require_same_vocabulary(model, policy_model(trainer), config))
        self._model = load_model(PackedPolicy, source, fsdp, forward, world)
        require_all_tokens(self._model.head.out_features, policy_source(trainer), source)

    def logprobs(self, groups: Sequence[GroupMeta], before: Before) -> dict[str, list[torch.Tensor]]:
        """Return the log-probabilities of this rank's part of the groups, by their ids: [T] float32 for each row.

        Entry t is about token t + 1; 0 where that is not trained. Rows at which the model fails, where a trained token has no finite
        log-probability, are nothing but NaN.

        Args:
            before: called before each forward pass.

        Raises:
            DataError: a sample file is missing or damaged.
        """
        rank = self._world.rank
        parts = balanced([sum(group.lengths) for group in groups], self._world.size)
        shares = [
            sorted((SampleRef(at, row, length) for at in part for row, length in enumerate(groups[at].lengths)), key=longest_first)
            for part in parts
        ]  # fmt: skip
        plan = plan_mini_batch(shares, *self._limits)
        samples = load_samples(self._run, Batch(1, list(groups), 0), plan.shares[rank])
        values_P = MiniBatch(plan, samples, rank).scored(self._forward, before)
        found = {groups[at].group_id: [torch.empty(0)] * len(groups[at].lengths) for at in parts[rank]}
        ends = torch.tensor([0, *samples.lengths]).cumsum(0).tolist()
        for ref, (start, end) in zip(samples.refs, pairwise(ends), strict=True):
            values_T, mask_T = values_P[start:end], samples.loss_mask[start:end]
            failed = not bool(torch.isfinite(values_T[mask_T > 0]).all())
            found[groups[ref.group].group_id][ref.index] = torch.full_like(values_T, torch.nan) if failed else values_T
        return found

    def _forward(self, batches: MicroBatches) -> Iterator[torch.Tensor]:
        for batch in batches:
            with torch.no_grad():
                logprobs_P, _ = self._model.run(batch.to(self._world.device))
                free_gathered(self._model)
            yield logprobs_P


def require_same_vocabulary(teacher: Pretrained, policy: Pretrained, config: Config) -> None:
    """Look whether two models mean the same text by each token; their chat templates may differ.

    Raises:
        DataError: they do not, or one has no tokenizer.
    """
    template = config.generator.chat_template
    theirs = load_tokenizer(teacher, template, "trainer.distillation.model_path").get_vocab()
    ours = load_tokenizer(policy, template).get_vocab()
    different = sorted(token for token in ours.keys() | theirs.keys() if ours.get(token) != theirs.get(token))
    if different:
        token = different[0]
        raise DataError(
            f"trainer.distillation.model_path: {teacher} and the policy {policy} have different vocabularies: {len(different)} tokens, such as "
            f"{token!r} ({theirs.get(token)} and {ours.get(token)}); the teacher judges the policy's own tokens, so choose one of the same family"
        )


def require_all_tokens(known: int, policy: ModelSource, own: ModelSource) -> None:
    """Raise DataError where a model has a smaller head than the policy, and would fail at tokens that it does not know.

    Args:
        known: tokens of its head.
    """
    wanted = policy.config().get_text_config().vocab_size
    if known < wanted:
        raise DataError(f"the model at {own.path} knows {known} tokens, fewer than the policy's {wanted}")
