"""Samples of a report: the text of each token, with its log-probability, mask, version and advantage.

Log-probability, mask and version are in the samples' files, which a run keeps for its last steps. Advantages, entropies, and differences
between engine and trainer are only in the dumps of `trainer.dump_data_batch`.
"""

from __future__ import annotations

import json
import random
from base64 import b64encode
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from hpcrl.data.batch_file import batch_steps, read_batch
from hpcrl.data.group_file import read_group
from hpcrl.data.rollouts import Decode, Rollout, evaluated_samples
from hpcrl.errors import DataError, RunError
from hpcrl.observe.report.curves import rounded
from hpcrl.rundir.commit import is_committed
from hpcrl.rundir.layout import Run, version_of
from hpcrl.types import Batch, GroupMeta, Row

_LARGEST = 4 << 20  # bytes of all samples of a run
_PER_STEP = 8
_MOST_STEPS, _MOST_EVALUATIONS = 24, 12
_MOST_TOKENS, _MOST_LETTERS = 4000, 8000
_INCOMPLETE = "\ufffd"

Column = list[float | int | None]


def samples_of(run: Run, decode: Decode | None) -> dict[str, Any]:
    """Return samples of steps and of evaluations, the best, the worst and some others of each, evenly spread over the run.

    Args:
        decode: token ids to text; None: the ids are shown.

    Returns:
        trained, evaluated: by step and by version, in ascending order.
    """
    trained, size = dict[int, Any](), 0
    for step in _spread([step for step in batch_steps(run)[::-1] if _is_there(run, step)], _MOST_STEPS):
        with suppress(DataError, RunError):
            found = [_with_pictures(run, _trained(run, *one, decode)) for one in _chosen(run, step)]
            size += len(json.dumps(found))
            if size > _LARGEST and trained:
                break
            trained[step] = found
    versions = sorted(
        {version for path in run.evals.glob("v*/*.jsonl") if (version := version_of(path.parent)) is not None}
    )
    evaluated, size = dict[int, Any](), 0
    for version in _spread(versions[::-1], _MOST_EVALUATIONS):
        with suppress(DataError, RunError):
            _, rollouts = evaluated_samples(run, version)
            places = _places([rollout.reward for rollout in rollouts], version)
            found = [_with_pictures(run, _evaluated(rollouts[place])) for place in places]
            size += sum(len(url) for one in found for _, url in one["pictures"])
            if size > _LARGEST and evaluated:
                break
            evaluated[version] = found
    return {
        "trained": [{"step": step, "samples": trained[step]} for step in sorted(trained)],
        "evaluated": [{"step": version, "samples": evaluated[version]} for version in sorted(evaluated)],
    }


def _with_pictures(run: Run, sample: dict[str, Any]) -> dict[str, Any]:
    painted, found = run.picture(sample["name"]), list[tuple[str, str]]()
    for path in run.pictures_of(sample["name"]):
        with suppress(OSError):  # removed meanwhile, or another user's
            url = f"data:image/png;base64,{b64encode(path.read_bytes()).decode()}"
            found.append(("what was painted" if path == painted else "what was shown", url))
    return {**sample, "pictures": found}


def _is_there(run: Run, step: int) -> bool:
    with suppress(DataError):
        file = read_batch(run.batch(step))
        return bool(file and file.batch.groups and all(run.inside(group.path).exists() for group in file.batch.groups))
    return False


def _spread(numbers: Sequence[int], most: int) -> list[int]:
    """Return at most so many of them, evenly spread, the first and the last among them."""
    if len(numbers) <= most:
        return list(numbers)
    return [numbers[round(at * (len(numbers) - 1) / (most - 1))] for at in range(most)]


def _places(rewards: Sequence[float], seed: int) -> list[int]:
    order = sorted(range(len(rewards)), key=lambda at: -rewards[at])
    most = _PER_STEP // 4
    ends = order[:most] + order[-most:]
    others = random.Random(seed).sample(order, min(len(order), _PER_STEP))
    return list(dict.fromkeys(ends + others))[:_PER_STEP]


def _chosen(run: Run, step: int) -> Iterator[tuple[Batch, int, int]]:
    file = read_batch(run.batch(step))
    assert file is not None, run.batch(step)
    places = [(place, at) for place, group in enumerate(file.batch.groups) for at in range(len(group.samples))]
    rewards = [file.batch.groups[place].samples[at].reward for place, at in places]
    for chosen in _places(rewards, step):
        yield file.batch, *places[chosen]


def _trained(run: Run, batch: Batch, place: int, at: int, decode: Decode | None) -> dict[str, Any]:
    group = batch.groups[place]
    indices = [row for row, owner in enumerate(group.owners) if owner == at]
    rows = read_group(run.inside(group.path), indices, group)
    dumped = _dumped(run, batch.step, place, indices)
    parts = [_row(row, dumped.get(index, {}), decode) for index, row in zip(indices, rows, strict=True)]
    return {
        "name": f"{group.group_id}.{at}",
        "reward": rounded(group.samples[at].reward),
        "group": [rounded(reward) for reward in group.rewards],
        "stop": str(rows[-1].stop_reason),
        "source": group.data_source,
        "facts": {name: rounded(value) for name, value in _facts(group, at, rows[-1]).items()},
        "rows": parts,
    }


def _facts(group: GroupMeta, at: int, row: Row) -> dict[str, float]:
    sample = group.samples[at]
    changed = sample.raw_reward != sample.reward
    raw = {"reward before zero_reward_on_non_stop": sample.raw_reward} if changed else {}
    metrics = sample.env_metrics or row.env_metrics
    return {"tokens": sample.response_length, "replica": group.replica, **raw, **metrics}


def _row(row: Row, dumped: dict[str, np.ndarray], decode: Decode | None) -> dict[str, Any]:
    """Return the tokens of a row, and a column of numbers for each thing that is known of them; None where it is not known of a token."""
    size = min(len(row.token_ids), _MOST_TOKENS)
    chosen = row.versions[:size] >= 0
    columns: dict[str, Column] = {
        "logprob": _column(row.rollout_logprobs[:size], chosen),
        "version": _column(row.versions[:size], chosen),
    }
    if "advantages" in dumped:
        columns["advantage"] = _column(dumped["advantages"][:size], row.loss_mask[:size] > 0)
    if "entropies" in dumped:
        columns["entropy"] = _column(dumped["entropies"][:size], row.loss_mask[:size] > 0)
    if "old_logprobs" in dumped:
        apart = dumped["old_logprobs"][:size] - row.rollout_logprobs[:size]
        columns["mismatch"] = _column(apart, chosen)
    rewards = {at: rounded(float(row.rewards[at])) for at in np.flatnonzero(row.rewards[:size]).tolist()}
    return {
        "text": token_texts(row.token_ids[:size].tolist(), decode),
        "by": "".join("p" if policy else "c" for policy in chosen),
        "mask": "".join("1" if trained else "0" for trained in row.loss_mask[:size] > 0),
        "columns": columns,
        "rewards": rewards,
        "left_out": len(row.token_ids) - size,
    }


def _column(values: np.ndarray, known: np.ndarray) -> Column:
    return [rounded(float(f"{value:.3g}")) if is_known else None for value, is_known in zip(values, known, strict=True)]


def token_texts(token_ids: Sequence[int], decode: Decode | None) -> list[str]:
    """Return the text that each token adds; of several tokens of one letter, the last one has it."""
    if decode is None:
        return [f"{token} " for token in token_ids]
    texts, begun = list[str](), list[int]()
    for token in token_ids:
        begun.append(token)
        text = decode(begun)
        if text.endswith(_INCOMPLETE) and len(begun) < 4:
            texts.append("")
        else:
            texts.append(text)
            begun = []
    return texts


def _dumped(run: Run, step: int, place: int, indices: Sequence[int]) -> dict[int, dict[str, np.ndarray]]:
    """Return by row of a group what the trainer wrote down of its tokens; empty where it wrote nothing."""
    folder = run.dump(step)
    if not is_committed(folder):
        return {}
    found = dict[int, dict[str, np.ndarray]]()
    for path in sorted(folder.glob("mini-*.safetensors")):
        for index, columns in _rows_of_dump(path, place):
            if index in indices:
                found[index] = columns
    return found


def _rows_of_dump(path: Path, place: int) -> Iterator[tuple[int, dict[str, np.ndarray]]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            named = {name: file.get_tensor(name) for name in ("lengths", "groups", "samples")}
            names = [name for name in ("advantages", "entropies", "old_logprobs") if name in file.keys()]  # noqa: SIM118
            if place not in named["groups"]:
                return
            columns = {name: file.get_tensor(name) for name in names}
    except (SafetensorError, OSError) as error:
        raise DataError(f"{path} is damaged: {error}") from error
    start = 0
    for length, group, index in zip(*(named[name].tolist() for name in ("lengths", "groups", "samples")), strict=True):
        if group == place:
            # an entry is about the token after it: what is known of a sample's first token is nothing
            yield index, {name: np.roll(column[start : start + length], 1) for name, column in columns.items()}
        start += length


def _evaluated(rollout: Rollout) -> dict[str, Any]:
    return {
        "name": rollout.name,
        "reward": rounded(rollout.reward),
        "stop": rollout.stop_reason,
        "source": rollout.data_source,
        "facts": {name: rounded(value) for name, value in rollout.env_metrics.items()},
        "parts": [{"by": part.by, "text": part.text[:_MOST_LETTERS]} for part in rollout.parts],
    }
