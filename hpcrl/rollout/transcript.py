"""Lays the turns of a sample end to end, token by token.

The engine's own prompts and responses are trained; nothing is ever tokenized a second time. So the prompt of each turn
begins with the prompt of the turn before and the answer to it, exactly, also where a template would write the past differently. Only
with generator.step_wise_trajectories it may: then each turn is laid down for itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from hpcrl.data.vision.reader import Context, SeenImage, named_tensors
from hpcrl.rollout.engines.base import Generation
from hpcrl.types import ROUTED_EXPERTS, Row, SamplingMask, StopReason, TurnEnd

if TYPE_CHECKING:
    from numpy.typing import NDArray


class Transcript:
    """One row as it grows.

    Args:
        prompt: token ids of the first turn's prompt.
        images: that it shows.

    Attributes:
        token_ids: everything so far.
        images: all that it shows so far.
    """

    def __init__(self, prompt: Sequence[int], images: Sequence[SeenImage] = ()) -> None:
        self.prompt, self.token_ids, self.images = prompt, list(prompt), tuple(images)
        self._mask = [0.0] * len(prompt)
        self._logprobs = [0.0] * len(prompt)
        self._versions = [-1] * len(prompt)
        self._masks: list[Sequence[int]] = [()] * len(prompt)
        self._tops: list[Sequence[int]] = [()] * len(prompt)
        self._experts: NDArray[np.int16] | None = None
        self._rewards: dict[int, float] = {}
        self._turns: list[TurnEnd] = []

    def add_response(self, said: Generation, length: int | None = None, *, trained: bool = True) -> None:
        """Add the first `length` tokens of a response, all where it is None."""
        self.token_ids += said.token_ids[:length]
        self._logprobs += said.logprobs[:length]
        self._versions += said.versions[:length]
        self._masks += (said.sampling_mask or [()] * len(said.token_ids))[:length]
        self._tops += (said.top_ids or [()] * len(said.token_ids))[:length]
        self._mask += [float(trained)] * (len(self.token_ids) - len(self._mask))
        if said.experts is not None:  # an earlier turn's experts count: its tokens were generated with them
            known = self._experts if self._experts is not None else said.experts[:0]
            self._experts = np.concatenate([known, said.experts[len(known) : len(self.token_ids) - 1]])

    def add_context(self, token_ids: Sequence[int], images: Sequence[SeenImage] = ()) -> None:
        """Add tokens that the policy did not choose, and the images among them."""
        self.token_ids += token_ids
        self.images += tuple(images)
        self._mask += [0.0] * len(token_ids)
        self._logprobs += [0.0] * len(token_ids)
        self._versions += [-1] * len(token_ids)
        self._masks += [()] * len(token_ids)
        self._tops += [()] * len(token_ids)

    def follow(self, prompt: Context) -> None:
        """Add the part of a prompt beyond this row, with which it begins."""
        self.add_context(prompt.token_ids[len(self.token_ids) :], prompt.images[len(self.images) :])

    def add_reward(self, reward: float) -> None:
        """Add a reward at the newest token."""
        at = len(self.token_ids) - 1
        self._rewards[at] = self._rewards.get(at, 0.0) + reward

    def end_turn(self, role: str, anchor: str) -> None:
        """End a turn with the newest token; arguments as of TurnEnd."""
        self._turns.append(TurnEnd(len(self.token_ids), role, anchor))

    def reward_role(self, role: str, reward: float) -> bool:
        """Add a reward at the last token of the role's last turn. Returns whether it has one here."""
        end = next((turn.end for turn in reversed(self._turns) if turn.role == role), 0)
        if end:
            self._rewards[end - 1] = self._rewards.get(end - 1, 0.0) + reward
        return end > 0

    def sample(self, stop_reason: StopReason, env_metrics: dict[str, float]) -> Row:
        rewards_T = np.zeros(len(self.token_ids), np.float32)
        for at, reward in self._rewards.items():
            rewards_T[at] = reward
        return Row(
            token_ids=np.array(self.token_ids, np.int64),
            loss_mask=np.array(self._mask, np.float32),
            rollout_logprobs=np.array(self._logprobs, np.float32),
            versions=np.array(self._versions, np.int32),
            rewards=rewards_T,
            stop_reason=stop_reason,
            env_metrics=env_metrics,
            sampling_mask=self._sampling_mask(),
            top_ids=self._top_ids(),
            tensors=named_tensors(self.images) | self._routed_experts(),
            turns=tuple(self._turns),
        )

    def _routed_experts(self) -> dict[str, np.ndarray]:
        if self._experts is None:
            return {}
        experts = np.full((len(self.token_ids), *self._experts.shape[1:]), -1, np.int16)
        experts[: len(self._experts)] = self._experts
        return {ROUTED_EXPERTS: experts}

    def _sampling_mask(self) -> SamplingMask[np.ndarray] | None:
        if not any(self._masks):
            return None
        kept = np.array([token_id for mask in self._masks for token_id in mask], np.int32)
        return SamplingMask(kept, np.array([len(mask) for mask in self._masks], np.int32))

    def _top_ids(self) -> np.ndarray | None:
        if not (width := max(map(len, self._tops))):
            return None
        ids_TK = np.full((len(self._tops), width), -1, np.int32)
        for at, ids in enumerate(self._tops):
            ids_TK[at, : len(ids)] = ids
        return ids_TK
