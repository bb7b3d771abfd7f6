"""Samples of a report, by group: the prompt once, and its ground truth; of each sample the text of each token.

Each token has its log-probability, mask, version and advantage.
Log-probability, mask and version are in the samples' files, which a run keeps for its last steps. Advantages, entropies, and differences
between engine and trainer are only in the dumps of `trainer.dump_data_batch`.
"""

from __future__ import annotations

import json
import random
from base64 import b64encode
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from hpcrl.data.batch_file import batch_steps, read_batch
from hpcrl.data.group_file import read_group, read_truth
from hpcrl.data.rollouts import Decode, Rollout, answer_of, evaluated_samples, role_at
from hpcrl.errors import DataError, RunError
from hpcrl.observe.report.curves import rounded
from hpcrl.rundir.commit import is_committed
from hpcrl.rundir.layout import Run, version_of
from hpcrl.types import Batch, GroupMeta, Row, TurnMeta

_LARGEST = 4 << 20  # bytes of all samples of a run
_PER_STEP, _PER_GROUP = 9, 3
_MOST_STEPS, _MOST_EVALUATIONS = 24, 12
_MOST_TOKENS, _MOST_LETTERS = 4000, 8000
_SHOWN = "what was shown"
_INCOMPLETE = "\ufffd"

Column = list[float | int | None]


def samples_of(run: Run, decode: Decode | None) -> dict[str, Any]:
    """Return groups of steps and of evaluations, evenly spread over the run, with samples of each from the best to the worst.

    Of each step these are the groups with the greatest spread of rewards, the worst, the best and others.

    Args:
        decode: token ids to text; None: the ids are shown.

    Returns:
        trained, evaluated: by step and by version, in ascending order.
    """
    trained, size = dict[int, Any](), 0
    for step in _spread([step for step in batch_steps(run)[::-1] if _is_there(run, step)], _MOST_STEPS):
        with suppress(DataError, RunError):
            found = list(_trained(run, step, decode))
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
            found = list(_evaluated(run, version))
            size += len(json.dumps(found))
            if size > _LARGEST and evaluated:
                break
            evaluated[version] = found
    return {
        "trained": [{"step": step, "groups": trained[step]} for step in sorted(trained)],
        "evaluated": [{"step": version, "groups": evaluated[version]} for version in sorted(evaluated)],
    }


def _with_pictures(run: Run, group: dict[str, Any]) -> dict[str, Any]:
    """Add to a group the pictures that all its samples were shown, and the others to its samples: what each is, and its content as a URL."""
    found = [_pictures(run, sample["name"]) for sample in group["samples"]]
    shown = [picture for picture in found[0] if picture[0] == _SHOWN and all(picture in own for own in found)]
    for sample, own in zip(group["samples"], found, strict=True):
        sample["pictures"] = [picture for picture in own if picture not in shown]
    return {**group, "pictures": shown}


def _pictures(run: Run, name: str) -> list[tuple[str, str]]:
    painted, found = run.picture(name), list[tuple[str, str]]()
    for path in run.pictures_of(name):
        with suppress(OSError):  # removed meanwhile, or another user's
            url = f"data:image/png;base64,{b64encode(path.read_bytes()).decode()}"
            found.append(("what was painted" if path == painted else _SHOWN, url))
    return found


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


def chosen(rewards: Sequence[Sequence[float]], seed: int) -> Iterator[tuple[int, list[int]]]:
    """Yield groups that are shown and, the best first, samples of each.

    Args:
        rewards: of the samples of each group.
    """
    if not rewards:
        return
    per_group = min(_PER_GROUP, max(map(len, rewards)))
    places, means = range(len(rewards)), [sum(own) / len(own) for own in rewards]
    ends = (
        max(places, key=lambda at: max(rewards[at]) - min(rewards[at])),
        min(places, key=means.__getitem__),
        max(places, key=means.__getitem__),
    )
    others = random.Random(seed).sample(places, min(len(places), _PER_STEP))
    for place in list(dict.fromkeys([*ends, *others]))[: _PER_STEP // per_group]:
        own = rewards[place]
        yield place, _spread(sorted(range(len(own)), key=lambda at, own=own: -own[at]), per_group)


def _trained(run: Run, step: int, decode: Decode | None) -> Iterator[dict[str, Any]]:
    file = read_batch(run.batch(step))
    assert file is not None, run.batch(step)
    for place, samples in chosen([group.rewards for group in file.batch.groups], step):
        yield _group(run, file.batch, place, samples, decode)


def _group(run: Run, batch: Batch, place: int, samples: Sequence[int], decode: Decode | None) -> dict[str, Any]:
    group = batch.groups[place]
    path, of_dataset = run.inside(group.path), group.row is not None
    indices = {at: [row for row, owner in enumerate(group.owners) if owner == at] for at in samples}
    rows = {at: read_group(path, own, group) for at, own in indices.items()}
    prompt_ids = _common_prompt([own[0] for own in rows.values()])
    dumped = _dumped(run, batch.step, place, [row for own in indices.values() for row in own])

    def rows_of(at: int) -> Iterator[dict[str, Any]]:
        turns = group.samples[at].turns or [()] * len(rows[at])
        for number, (index, row, own) in enumerate(zip(indices[at], rows[at], turns, strict=True)):
            yield _row(row, dumped.get(index, {}), own, decode, 0 if number else len(prompt_ids))

    found = {
        "name": f"row {group.row}" if of_dataset else group.group_id,
        "source": group.data_source,
        "prompt": "".join(token_texts(prompt_ids, decode))[-_MOST_LETTERS:],
        "truth": read_truth(path, group),
        "rewards": None if of_dataset else [rounded(reward) for reward in group.rewards],
        "samples": [
            {**_about(group, at, rows[at][-1]), "name": f"{group.group_id}.{at}", "rows": list(rows_of(at))}
            for at in samples
        ],
    }
    return _with_pictures(run, found)


def _common_prompt(rows: Sequence[Row]) -> list[int]:
    """Return the tokens before the first that the policy chose, or that is trained; empty where they are not the same in all rows."""
    prompts = set[tuple[int, ...]]()
    for row in rows:
        answer = np.flatnonzero((row.versions >= 0) | (row.loss_mask > 0))[:1]
        prompts.add(tuple(row.token_ids[: int(answer.sum())].tolist()))
    return list(prompts.pop()) if len(prompts) == 1 else []


def _about(group: GroupMeta, at: int, row: Row) -> dict[str, Any]:
    """Return reward, stop reason and facts of a sample; of a row of a dataset its tokens, and which answer of a pair it is."""
    sample = group.samples[at]
    if group.row is not None:
        return {"answer": answer_of(group, at), "facts": {"tokens": sample.response_length}}
    changed = sample.raw_reward != sample.reward
    raw = {"reward before zero_reward_on_non_stop": sample.raw_reward} if changed else {}
    metrics = sample.env_metrics or row.env_metrics
    facts = {"tokens": sample.response_length, "replica": group.replica, **raw, **metrics}
    return {
        "reward": rounded(sample.reward),
        "stop": str(row.stop_reason),
        "facts": {name: rounded(value) for name, value in facts.items()},
    }


def _row(
    row: Row, dumped: dict[str, np.ndarray], turns: Sequence[TurnMeta], decode: Decode | None, start: int
) -> dict[str, Any]:
    """Return the tokens of a row from `start` on, and columns of numbers about them.

    None stands where a number is not known of a token.
    """
    size = len(row.token_ids) - start
    shown = slice(start, start + min(size, _MOST_TOKENS))
    chosen, trained = row.versions[shown] >= 0, row.loss_mask[shown] > 0
    begins = np.flatnonzero(np.diff(chosen, prepend=False) & chosen).tolist()
    columns: dict[str, Column] = {
        "logprob": _column(row.rollout_logprobs[shown], chosen),
        "version": _column(row.versions[shown], chosen),
    }
    if "advantages" in dumped:
        columns["advantage"] = _column(dumped["advantages"][shown], trained)
    if "entropies" in dumped:
        columns["entropy"] = _column(dumped["entropies"][shown], trained)
    if "old_logprobs" in dumped:
        columns["mismatch"] = _column(dumped["old_logprobs"][shown] - row.rollout_logprobs[shown], chosen)
    return {
        "text": token_texts(row.token_ids[shown].tolist(), decode),
        "by": "".join("p" if policy else "c" for policy in chosen),
        "mask": "".join("1" if is_trained else "0" for is_trained in trained),
        "columns": {name: column for name, column in columns.items() if any(value is not None for value in column)},
        "rewards": {at: rounded(float(row.rewards[shown][at])) for at in np.flatnonzero(row.rewards[shown]).tolist()},
        "roles": {at: role for at in begins if (role := role_at(turns, start + at))},
        "left_out": max(0, size - _MOST_TOKENS),
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


def _evaluated(run: Run, version: int) -> Iterator[dict[str, Any]]:
    _, rollouts = evaluated_samples(run, version)
    groups = [list(own) for _, own in groupby(rollouts, lambda rollout: rollout.name.rpartition(".")[0])]
    for place, samples in chosen([[rollout.reward for rollout in own] for own in groups], version):
        own = groups[place]
        prompts = {part.text for rollout in own for part in rollout.parts[:1] if part.by == "prompt"}
        begin = int(len(prompts) == 1 and all(rollout.parts for rollout in own))
        yield _with_pictures(
            run,
            {
                "name": own[0].name.rpartition(".")[0],
                "source": own[0].data_source,
                "prompt": prompts.pop()[-_MOST_LETTERS:] if begin else "",
                "truth": own[0].ground_truth,
                "rewards": [rounded(rollout.reward) for rollout in own],
                "samples": [_sample(own[at], begin) for at in samples],
            },
        )


def _sample(rollout: Rollout, begin: int) -> dict[str, Any]:
    return {
        "name": rollout.name,
        "reward": rounded(rollout.reward),
        "stop": rollout.stop_reason,
        "facts": {name: rounded(value) for name, value in rollout.env_metrics.items()},
        "parts": [
            {"by": part.by, "role": part.role, "text": part.text[:_MOST_LETTERS]} for part in rollout.parts[begin:]
        ],
    }
