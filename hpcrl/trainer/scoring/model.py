"""The model of a scorer, sharded over its ranks, which computes log-probabilities of finished samples."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise

import torch

from hpcrl.config import Config
from hpcrl.config.scorers import TEACHER, ScorerSet
from hpcrl.config.sections.model import Pretrained
from hpcrl.config.token_limits import micro_batch_tokens
from hpcrl.data.alignment import TokenAligner, aligner_of
from hpcrl.data.score_file import RowScores
from hpcrl.data.tokenizer import load_tokenizer
from hpcrl.errors import DataError
from hpcrl.rundir.layout import Run
from hpcrl.trainer.backends.fsdp.model import PackedModel, PackedPolicy, free_gathered, load_model
from hpcrl.trainer.batching import MicroBatchLimit, micro_batch_limits, plan_shares, rows_of, whole_groups
from hpcrl.trainer.distributed import World
from hpcrl.trainer.models.build import forward_config, policy_source, scorer_source
from hpcrl.trainer.models.flops import ModelFlops
from hpcrl.trainer.models.hf import ModelSource
from hpcrl.trainer.models.layers.choice import Kernels
from hpcrl.trainer.models.packed.attention import PACKED
from hpcrl.trainer.packing import Before, MicroBatchStream
from hpcrl.trainer.read_batch import load_rows
from hpcrl.trainer.scoring.aligned import aligned_scores, outputs
from hpcrl.types import Batch, GroupMeta


class ScoringModel:
    """The model of one scorer. All its ranks have it, and call it alike.

    Args:
        run: whose samples are scored.
    """

    def __init__(self, run: Run, config: Config, scorers: ScorerSet, world: World) -> None:
        self._run = run
        trainer, own, source = config.trainer, config.trainer.distillation, scorer_source(config.trainer, scorers)
        forward = forward_config(trainer, config.temperature)
        quadratic = ModelFlops.of(source.empty(torch.float32, PACKED)).quadratic
        self._limits = micro_batch_limits(trainer, micro_batch_tokens(config), quadratic)
        self._prompts, self._top_k, self._given_ids = own.learns_prompts, 0, 0
        if scorers.role == TEACHER:
            shared, tokens = trainer.shared_prefixes, own.max_tokens_per_micro_batch
            shared = shared and own.use_sample_packing and tokens is not None and own.backend == "fsdp2"
            forward = replace(forward, packing=own.use_sample_packing)
            limit = MicroBatchLimit(own.micro_batch_size_per_gpu, tokens, shared, quadratic)
            self._limits = limit, limit
        self._aligner = None
        vocabulary = policy_source(trainer).config().get_text_config().vocab_size
        if scorers.role == TEACHER and own.cross_tokenizer:
            self._aligner = aligner_of(trainer.policy.model.pretrained, scorers.model, config.generator.chat_template)
            vocabulary = source.config().get_text_config().vocab_size
        elif scorers.role == TEACHER:
            world.rank0_broadcast(
                lambda: require_same_vocabulary(scorers.model, trainer.policy.model.pretrained, config)
            )
        if scorers.role == TEACHER:
            self._top_k = min(own.top_k, vocabulary)
            self._given_ids = 0 if own.top_k_from_teacher else self._top_k
        experts = None if scorers.role == TEACHER else trainer.reference_experts
        forward, self._data = replace(forward, vocabulary=vocabulary, experts=experts), world
        if scorers.role == TEACHER and own.backend == "megatron":
            from hpcrl.trainer.scoring.megatron import forward_passes  # megatron-core is installed on its own

            require_all_tokens(source.config().get_text_config().vocab_size, vocabulary, source)
            layout, forward = own.megatron_layout, replace(forward, packing=True)
            role = "trainer.distillation"
            self._passes, self._data = forward_passes(trainer, layout, source, forward, role, world)
            return
        kernels = Kernels(compiled=own.compile_model and scorers.role == TEACHER)
        self._data = world.sharing(scorers.sharing)
        self._model = load_model(PackedPolicy, source, scorers.fsdp, forward, world, kernels=kernels, data=self._data)
        require_all_tokens(self._model.head.out_features, vocabulary, source)
        self._passes = partial(passes, self._model, device=world.device)

    def scores(self, groups: Sequence[GroupMeta], before: Before) -> dict[str, list[RowScores]]:
        """Return the scores of the rows of this rank's groups, by group id. Of ranks that share samples, one has them.

        Rows at which the model fails, where a trained token has no finite log-probability, have no other number than NaN.

        Args:
            before: called before each forward pass.
        """
        rank = self._data.rank
        shared = self._limits[0].shared
        refs = [rows_of(at, group, shared=shared) for at, group in enumerate(groups)]
        parts = whole_groups(refs, self._data.size, self._limits[0])
        shares = [[ref for at in part for ref in refs[at]] for part in parts]
        plan, batch = plan_shares(shares, self._limits), Batch(1, list(groups), 0)
        samples = load_rows(
            self._run, batch, plan.shares[rank], prompts=self._prompts, top_ids=self._given_ids, shared=shared
        )
        if self._aligner is None:
            stream = MicroBatchStream(samples, plan.score[rank], before, self._top_k)
            columns = outputs(stream.parts, self._passes(stream))
        else:
            columns = aligned_scores(self._passes, self._aligner, samples, self._limits, self._data, before)
        if not columns or not self._data.is_leader:
            return {}
        found = {groups[at].group_id: dict[int, RowScores]() for at in parts[rank]}
        ends = torch.tensor([0, *samples.lengths]).cumsum(0).tolist()
        for ref, (start, end) in zip(samples.refs, pairwise(ends), strict=True):
            row = _row_scores([column_P[start:end] for column_P in columns], samples.loss_mask[start:end])
            found[groups[ref.group].group_id][ref.index] = row
        return {group_id: [rows[index] for index in range(len(rows))] for group_id, rows in found.items()}


def passes(model: PackedModel, batches: MicroBatchStream, device: torch.device) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yield a model's outputs for each micro-batch: [P], and [P, K] of what has more columns."""
    for batch in batches:
        with torch.no_grad():
            of_batch = model.run(model.taken(batch, device))
            free_gathered(model)
        yield of_batch


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


def fitting_teacher(config: Config, scorers: ScorerSet) -> TokenAligner | None:
    """Return what writes samples in the tokens of an engine's teacher; None: it reads the policy's own tokens.

    Raises:
        DataError: it cannot judge the policy's tokens.
    """
    trainer, source = config.trainer, scorer_source(config.trainer, scorers)
    policy = trainer.policy.model.pretrained
    if trainer.distillation.cross_tokenizer:
        return aligner_of(policy, scorers.model, config.generator.chat_template)
    require_same_vocabulary(scorers.model, policy, config)
    vocabulary = policy_source(trainer).config().get_text_config().vocab_size
    require_all_tokens(source.config().get_text_config().vocab_size, vocabulary, source)
    return None


def require_same_vocabulary(teacher: Pretrained, policy: Pretrained, config: Config) -> None:
    """Check that two models have the same text for each token; their chat templates may differ.

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
            f"trainer.distillation.model_path: {teacher} and the policy {policy} differ in {len(different)} tokens, such as "
            f"{token!r} ({theirs.get(token)} and {ours.get(token)}). The teacher judges the policy's own tokens: choose one of the same family, or set trainer.distillation.cross_tokenizer"
        )


def require_all_tokens(known: int, wanted: int, own: ModelSource) -> None:
    """Raise DataError where a model has a smaller head than the policy, and would fail at tokens that it does not know.

    Args:
        known: tokens of its head.
        wanted: tokens of the policy's.
    """
    if known < wanted:
        raise DataError(f"the model at {own.path} knows {known} tokens, fewer than the policy's {wanted}")
