"""Reads the samples that a step trained or an evaluation scored, turn by turn, for people."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise
from typing import Literal

import numpy as np

from hpcrl.config import Config
from hpcrl.data.batch_file import batch_steps, read_batch
from hpcrl.data.family import data_family
from hpcrl.data.group_file import read_group, read_truth
from hpcrl.errors import DataError, RunError
from hpcrl.rundir.eval_dumps import dumped_samples
from hpcrl.rundir.layout import Run
from hpcrl.types import Batch, GroupMeta, Row, TurnEnd, TurnMeta

Decode = Callable[[list[int]], str]
Order = Literal["best", "worst", "random"]
Answer = Literal["chosen", "rejected"]
_ANSWERS: tuple[Answer, Answer] = ("chosen", "rejected")  # in the order of a pair's sequences


@dataclass(frozen=True)
class Segment:
    """Tokens that follow one another and come from one side.

    Attributes:
        by: prompt, policy, or environment for what came between two turns of the policy; of a row of a dataset trained, or context.
        tokens: how many; None where only the text is known.
        trained: of these tokens, those that enter the loss.
        reward: of a policy's turn: what it earned.
        role: in which the policy took the turn; empty: the environment names none.
    """

    by: Literal["prompt", "policy", "environment", "trained", "context"]
    text: str
    tokens: int | None = None
    trained: int | None = None
    reward: float | None = None
    role: str = ""


@dataclass(frozen=True)
class Rollout:
    """One sample.

    Attributes:
        name: of the group, and its place in it.
        reward: the sum over its turns; the last one's with step-wise trajectories.
        parts: with step-wise trajectories each turn begins with a prompt of its own.
        raw_reward: before generator.zero_reward_on_non_stop, where that changed it.
        versions: the oldest and the newest policy that chose one of its tokens; None where it is not known.
        row: of its dataset, where it is one of a dataset.
        answer: of a pair of a dataset: which of the two it is.
        ground_truth: of the prompt; empty: it has none, or an earlier hpcrl wrote the sample.
    """

    name: str
    replica: int
    data_source: str
    reward: float
    stop_reason: str
    parts: list[Segment]
    raw_reward: float | None = None
    versions: tuple[int, int] | None = None
    env_metrics: dict[str, float] = field(default_factory=dict)
    row: int | None = None
    answer: Answer | None = None
    ground_truth: str = ""


def ordered(rewards: Sequence[float], order: Order | None, seed: int) -> list[int]:
    """Return the places of `rewards` in the order asked for, equal ones as they stand; None: all as they stand.

    Args:
        seed: of a random order.
    """
    places = list(range(len(rewards)))
    if order == "random":
        random.Random(seed).shuffle(places)
    elif order is not None:
        places.sort(key=lambda at: rewards[at] if order == "worst" else -rewards[at])
    return places


def trained_samples(run: Run, step: int | None) -> tuple[int, list[tuple[GroupMeta, int]]]:
    """Return a step, the newest one with a batch where none is named, and its samples: group, and place in the group."""
    chosen = max(batch_steps(run), default=0) if step is None else step
    return chosen, [(group, at) for group in require_samples(run, chosen).groups for at in range(len(group.samples))]


def require_samples(run: Run, step: int) -> Batch:
    """Return the batch of a step. Raises RunError where there is none or its samples were removed, DataError where its file is damaged."""
    steps = batch_steps(run)
    if not steps:
        raise RunError(f"{run.name} has no batch yet, so nothing was trained")
    if step not in steps:
        raise RunError(f"{run.name} has no batch of step {step}; there are those of steps {steps[0]} to {steps[-1]}")
    if (batch := _whole(run, step)) is not None:
        return batch
    left = [number for number in steps if number > step and _whole(run, number)]
    there = f"those of steps {left[0]} to {left[-1]} are there" if left else "no later ones are there either"
    dump = f"; what step {step} trained is in {run.dump(step)}" if run.dump(step).is_dir() else ""
    raise RunError(
        f"the samples of step {step} are gone: they are removed once two checkpoints of their step or later are committed; {there}{dump}"
    )


def _whole(run: Run, step: int) -> Batch | None:
    file = read_batch(run.batch(step))
    return file.batch if file and all(run.inside(group.path).exists() for group in file.batch.groups) else None


def read_trained(run: Run, samples: Sequence[tuple[GroupMeta, int]], decode: Decode) -> list[Rollout]:
    """Return samples that `trained_samples` names.

    Args:
        decode: token ids to text.
    """
    groups: dict[str, tuple[list[Row], str]] = {}
    for group, _ in samples:
        if group.group_id not in groups:
            path = run.inside(group.path)
            groups[group.group_id] = read_group(path, None, group), read_truth(path, group)
    return [_rollout(group, at, *groups[group.group_id], decode) for group, at in samples]


def _rollout(group: GroupMeta, at: int, of_group: Sequence[Row], truth: str, decode: Decode) -> Rollout:
    sample, rows = group.samples[at], [row for row, owner in zip(of_group, group.owners, strict=True) if owner == at]
    versions = np.concatenate([row.versions for row in rows])
    chosen, turns = versions[versions >= 0], sample.turns or [()] * len(rows)
    parts = (
        segments_of(row, decode, own, of_dataset=group.row is not None) for row, own in zip(rows, turns, strict=True)
    )
    return Rollout(
        name=f"{group.group_id}.{at}",
        replica=group.replica,
        data_source=group.data_source,
        reward=sample.reward,
        stop_reason=str(rows[-1].stop_reason),
        parts=[*chain.from_iterable(parts)],
        raw_reward=sample.raw_reward if sample.raw_reward != sample.reward else None,
        versions=(int(chosen.min()), int(chosen.max())) if len(chosen) else None,
        env_metrics=dict(sample.env_metrics or rows[-1].env_metrics),
        row=group.row,
        answer=answer_of(group, at),
        ground_truth=truth,
    )


def answer_of(group: GroupMeta, at: int) -> Answer | None:
    """Return which answer of a pair of a dataset a sample is; None: it is none of a pair."""
    return _ANSWERS[at] if group.row is not None and len(group.samples) > 1 else None


def role_at(turns: Sequence[TurnEnd | TurnMeta], at: int) -> str:
    """Return the role in which the policy took the turn that token `at` is in; empty where it is not known."""
    return next((turn.role for turn in turns if turn.end > at), "")


def segments_of(
    sample: Row, decode: Decode, turns: Sequence[TurnEnd | TurnMeta] = (), *, of_dataset: bool = False
) -> list[Segment]:
    """Return the turns of a sample, in order.

    A reward at or after the tokens of a turn, and before the next turn, is what that turn earned.

    Args:
        turns: of the sample, with their roles.
        of_dataset: the sample is a dataset's row, without a policy's response; part of it is trained.
    """
    token_ids, loss_mask, versions, rewards = sample.token_ids, sample.loss_mask, sample.versions, sample.rewards
    by_policy = loss_mask > 0 if of_dataset else versions >= 0
    bounds = [0, *(np.flatnonzero(np.diff(by_policy)) + 1).tolist(), len(token_ids)]
    parts: list[Segment] = []
    for start, end in pairwise(bounds):
        text, tokens, trained = decode(token_ids[start:end].tolist()), end - start, int(loss_mask[start:end].sum())
        if of_dataset:
            parts.append(Segment("trained" if by_policy[start] else "context", text, tokens, trained))
        elif by_policy[start]:
            until = next((after for after in bounds if after > end), len(token_ids))
            reward, role = float(rewards[start:until].sum()), role_at(turns, start)
            parts.append(Segment("policy", text, tokens, trained, reward, role))
        else:
            parts.append(Segment("environment" if parts else "prompt", text, tokens, trained))
    return parts


def evaluated_samples(run: Run, version: int | None) -> tuple[int, list[Rollout]]:
    """Return a version, the newest one whose evaluation is over where none is named, and its samples by row; errors as of `dumped_samples`."""
    chosen, lines = dumped_samples(run, version)
    try:
        return chosen, [
            Rollout(
                name=f"{group}.{at}",
                replica=line["replica"],
                data_source=line["data_source"],
                reward=line["score"],
                stop_reason=line["stop_reason"],
                parts=[Segment(**part) for part in line["parts"]],
                versions=(chosen, chosen),
                env_metrics=line["env_metrics"],
                ground_truth=str(line.get("ground_truth", "")),
            )
            for (group, at), line in lines.items()
        ]
    except TypeError as error:
        raise DataError(f"{run.evals_of(chosen)}: a sample has parts of another kind: {error}") from error


def find_samples(
    run: Run, step: int | None, *, evaluated: bool, order: Order | None, seed: int, most: int | None
) -> tuple[int, int, list[Rollout]]:
    """Return a step, or with `evaluated` the version of an evaluation, the number of its samples, and at most `most` of them in an order.

    Args:
        step: that trained them, or version; None: the newest.
        order, seed: as of `ordered`.
        most: None: all.

    Raises:
        RunError: there are none of this step or version, or they cannot be decoded on this machine.
        DataError: a file is damaged.
    """
    if evaluated:
        at, found = evaluated_samples(run, step)
        places = ordered([rollout.reward for rollout in found], order, seed)
        return at, len(found), [found[place] for place in places[:most]]
    at, trained = trained_samples(run, step)
    places = ordered([group.rewards[place] for group, place in trained], order, seed)
    return at, len(trained), read_trained(run, [trained[place] for place in places[:most]], decoder_of(run))


def decoder_of(run: Run) -> Decode:
    """Return the decoder of a run's tokens.

    Raises:
        RunError: they cannot be decoded on this machine.
    """
    config = Config.from_toml([run.config])
    try:
        return data_family(config).decoder(config)
    except ImportError as error:
        raise RunError(f"samples are decoded with {error.name}, which is not here: look where the jobs run") from error
    except (OSError, ValueError) as error:
        model = config.trainer.policy.model.pretrained
        raise RunError(f"the tokenizer of {model} cannot be loaded, and samples are tokens: {error}") from error
