"""A reward model that scores finished samples as whole conversations, sharded over the ranks of one scorer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import torch

from hpcrl.config import Config
from hpcrl.config.scorers import ScorerSet
from hpcrl.data.chat.judged import JudgedConversations
from hpcrl.data.group_file import Conversation, read_conversations
from hpcrl.data.model_config import longest_input
from hpcrl.data.score_file import GroupRewards
from hpcrl.errors import DataError
from hpcrl.rundir.layout import Run
from hpcrl.trainer.backends.fsdp.model import PackedRewardModel, load_model
from hpcrl.trainer.batching import MicroBatchLimit, RowRef, longest_first, plan_mini_batch, whole_groups
from hpcrl.trainer.distributed import World
from hpcrl.trainer.models.build import forward_config, scorer_source
from hpcrl.trainer.models.flops import ModelFlops
from hpcrl.trainer.models.packed.attention import PACKED
from hpcrl.trainer.packing import Before, MicroBatchStream, pack
from hpcrl.trainer.scoring.aligned import outputs
from hpcrl.trainer.scoring.model import passes
from hpcrl.types import GroupMeta, Row

_SECTION = "environment.reward_model"


class RewardScoringModel:
    """The reward model of one scorer. All its ranks have it, and call it alike.

    Args:
        run: whose samples are scored.
    """

    def __init__(self, run: Run, config: Config, scorers: ScorerSet, world: World) -> None:
        self._run, self._world, own = run, world, config.environment.reward_model
        source = scorer_source(config.trainer, scorers)
        conversations = JudgedConversations.of(
            scorers.model, own.chat_template, f"{_SECTION}.model", f"{_SECTION}.chat_template"
        )
        self._conversations = replace(conversations, longest=longest_input(source.config()))
        quadratic = ModelFlops.of(source.empty(torch.float32, PACKED)).quadratic
        self._limit = MicroBatchLimit(1, own.max_tokens_per_micro_batch, quadratic=quadratic)
        self._model = load_model(PackedRewardModel, source, scorers.fsdp, forward_config(config.trainer), world)

    def scores(self, groups: Sequence[GroupMeta], before: Before) -> dict[str, GroupRewards]:
        """Return the rewards of the samples of this rank's groups, by group id.

        It fails at a sample whose conversation its chat template refuses, or that is too long for it, and where its score is not finite.

        Args:
            before: called before each forward pass.
        """
        said = [read_conversations(self._run.inside(group.path), group) for group in groups]
        tokens = [[self._tokens(one, group) for one in own] for own, group in zip(said, groups, strict=True)]
        whole = [[RowRef(at, index, len(ids)) for index, ids in enumerate(own) if ids] for at, own in enumerate(tokens)]
        parts = whole_groups(whole, self._world.size, self._limit)
        shares = [sorted((ref for at in part for ref in whole[at]), key=longest_first) for part in parts]
        plan, rank = plan_mini_batch(shares, self._limit, self._limit), self._world.rank
        refs = plan.shares[rank]
        samples = pack([_unrewarded(tokens[ref.group][ref.index]) for ref in refs], refs)
        stream = MicroBatchStream(samples, plan.score[rank], before)
        columns = outputs(stream.parts, passes(self._model, stream, self._world.device))
        found = {groups[at].group_id: GroupRewards([None] * len(tokens[at])) for at in parts[rank]}
        for ref, end in zip(samples.refs, accumulate(samples.lengths), strict=True):
            score = columns[0][end - 1].item()
            found[groups[ref.group].group_id].scores[ref.index] = score if math.isfinite(score) else None
        return found

    def _tokens(self, conversation: Conversation, group: GroupMeta) -> list[int]:
        """Return the tokens of a sample; none where the model cannot read it."""
        try:
            return self._conversations.tokens(conversation)
        except DataError as error:
            print(f"a sample of group {group.group_id} is not scored: {error}", flush=True)
            return []


def _unrewarded(token_ids: Sequence[int]) -> Row[torch.Tensor]:
    zeros_T = torch.zeros(len(token_ids))
    return Row(
        token_ids=torch.tensor(token_ids),
        loss_mask=zeros_T,
        rollout_logprobs=zeros_T,
        versions=zeros_T.int() - 1,
        rewards=zeros_T,
        stop_reason="stop",
    )
