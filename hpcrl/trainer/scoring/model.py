"""A model that only computes what it thinks of finished samples, sharded over the ranks of one scorer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import torch

from hpcrl.config import Config, temperature
from hpcrl.config.derive import micro_batch_tokens, policy_model, ref_sharding
from hpcrl.config.scorers import TEACHER, ScorerSet, learns_prompts
from hpcrl.config.sections.model import Pretrained
from hpcrl.data.chat import load_tokenizer
from hpcrl.data.score_file import RowScores
from hpcrl.errors import DataError
from hpcrl.rundir.layout import Run
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
from hpcrl.trainer.models.hf import ModelSource, policy_source, scorer_source
from hpcrl.trainer.packing import Before, MicroBatchStream
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
        self._prompts, self._given_ids = learns_prompts(own), 0
        source, fsdp = scorer_source(trainer, scorers), ref_sharding(trainer)
        if scorers.role == TEACHER:
            forward, fsdp = replace(forward, packing=own.use_sample_packing), own.fsdp_config
            limit = MicroBatchLimit(own.micro_batch_size_per_gpu, own.max_tokens_per_micro_batch)
            self._limits = limit, limit
            world.rank0_broadcast(lambda: require_same_vocabulary(scorers.model, policy_model(trainer), config))
        vocabulary = policy_source(trainer).config().get_text_config().vocab_size
        self._top_k = min(own.top_k, vocabulary) if scorers.role == TEACHER else 0
        self._given_ids = 0 if own.top_k_from_teacher else self._top_k
        compiled = own.compile_model and scorers.role == TEACHER
        forward = replace(forward, vocabulary=vocabulary)
        self._model = load_model(PackedPolicy, source, fsdp, forward, world, compiled=compiled)
        require_all_tokens(self._model.head.out_features, vocabulary, source)

    def scores(self, groups: Sequence[GroupMeta], before: Before) -> dict[str, list[RowScores]]:
        """Return what the model says of this rank's part of the groups, by their ids: for each row.

        Rows at which the model fails, where a trained token has no finite log-probability, have no other number than NaN.

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
        batch = Batch(1, list(groups), 0)
        samples = load_samples(self._run, batch, plan.shares[rank], prompts=self._prompts, top_ids=self._given_ids)
        columns = self._computed(MicroBatchStream(samples, plan.score[rank], before, self._top_k))
        found = {groups[at].group_id: dict[int, RowScores]() for at in parts[rank]}
        ends = torch.tensor([0, *samples.lengths]).cumsum(0).tolist()
        for ref, (start, end) in zip(samples.refs, pairwise(ends), strict=True):
            row = _row_scores([column_P[start:end] for column_P in columns], samples.loss_mask[start:end])
            found[groups[ref.group].group_id][ref.index] = row
        return {group_id: [rows[index] for index in range(len(rows))] for group_id, rows in found.items()}

    def _computed(self, batches: MicroBatchStream) -> list[torch.Tensor]:
        """Return the model's outputs for all samples of this rank, on the CPU: log-probabilities [P], and [P, K] of what else there is."""
        found = list[tuple[torch.Tensor, ...]]()
        for part, batch in zip(batches.parts, batches, strict=True):
            with torch.no_grad():
                outputs = self._model.run(batch.to(self._world.device))
                free_gathered(self._model)
            if part:  # an idle pass has outputs, but of no sample
                found.append(outputs)
        return [torch.cat(column).cpu() for column in zip(*found, strict=True)]


def _row_scores(columns: Sequence[torch.Tensor], mask_T: torch.Tensor) -> RowScores:
    trained = mask_T > 0
    known = len(columns) < 2 or bool((columns[1][trained] >= 0).all())
    if not known or not all(bool(torch.isfinite(column_T[trained]).all()) for column_T in columns):
        columns = [
            torch.full_like(column_T, torch.nan) if column_T.ndim == 1 else torch.zeros_like(column_T)
            for column_T in columns
        ]
    logprobs_T, *top = columns
    if len(top) < 2:
        return RowScores(logprobs_T.numpy())
    ids_TK, top_TK = top
    return RowScores(logprobs_T.numpy(), ids_TK.masked_fill(~trained[:, None], -1).int().numpy(), top_TK.numpy())


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


def require_all_tokens(known: int, wanted: int, own: ModelSource) -> None:
    """Raise DataError where a model has a smaller head than the policy, and would fail at tokens that it does not know.

    Args:
        known: tokens of its head.
        wanted: tokens of the policy's.
    """
    if known < wanted:
        raise DataError(f"the model at {own.path} knows {known} tokens, fewer than the policy's {wanted}")
