"""Reward functions of a user's own, called on a few rows before anything is queued: one that raises would end the run behind the queue.

Rewards that ask a service are none of these; a call that finds no file, package or service says nothing of the nodes, and is a warning.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from hpcrl.config import Config
from hpcrl.config.errors import Problem
from hpcrl.config.family import family_of
from hpcrl.data.datasets import prompt_datasets
from hpcrl.envs.tools.supervised import end_supervised, supervised
from hpcrl.launch.submit.reward_process import RewardCall, own_group_rewards, own_rewards

_SECONDS = 30.0
"""Time in which all calls end, the start of their process included."""
_found: dict[str, tuple[list[Problem], list[str]]] = {}


def check_own_rewards(config: Config) -> tuple[list[Problem], list[str]]:
    """Call the reward functions of a user's own on the first rows; elements of a sweep mostly have the same, which are called once.

    Returns:
        A problem for each function that raises or returns no number. Warnings where the right answer is worth no more than none, where rows
        have no ground truth, and of calls that do not end in time.
    """
    datasets = prompt_datasets(config)
    names = [
        own
        for _, sources, kinds in datasets
        if sources
        for kind in kinds
        for own in (*own_rewards(config, kind), *own_group_rewards(config, kind))
    ]
    if not names or not family_of(config).writes_texts:
        return [], []
    if (key := repr((config.environment, config.data, config.generator, datasets))) not in _found:
        _found[key] = _judged(*_calls(config))
    return _found[key]


def _calls(config: Config) -> tuple[list[RewardCall], int | None]:
    """Return the calls, the last of them without a result where its process ended before it, and the exit status; None: it took too long."""
    with tempfile.TemporaryDirectory() as folder:
        path, answers = Path(folder, "config.toml"), Path(folder, "calls.jsonl")
        path.write_text(config.to_toml(), encoding="utf-8")
        with answers.open("wb") as output:
            command = supervised([sys.executable, "-m", "hpcrl.launch.submit.reward_process", str(path)])
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, start_new_session=True)
        status: int | None = None
        try:
            with suppress(subprocess.TimeoutExpired):
                status = process.wait(_SECONDS)
        finally:
            end_supervised(process)  # with what a function has left running
        lines = answers.read_bytes().split(b"\n")[:-1]
    calls = dict[tuple[str, ...], RewardCall]()
    for call in (RewardCall(**json.loads(line)) for line in lines):
        calls[call.setting, call.reward, call.data, call.file, str(call.row), str(call.answer)] = call
    return list(calls.values()), status


def _judged(calls: Sequence[RewardCall], status: int | None) -> tuple[list[Problem], list[str]]:
    problems, warnings = list[Problem](), [*_unended(calls, status), *_without_truth(calls)]
    for own in _by(calls, "setting"):
        warnings += _worth(own)
    for failed in (next((call for call in own if call.error), None) for own in _by(calls, "setting", "reward")):
        if failed is None:
            continue
        said = f"{failed.error}; it was called with {_response(failed)}"
        if failed.away:
            warnings.append(f"{failed.setting}: {said}. This machine may lack what the nodes have")
        else:
            problems.append(Problem(failed.setting, said))
    return problems, warnings


def _unended(calls: Sequence[RewardCall], status: int | None) -> Iterator[str]:
    if status == 0:
        return
    how = (
        f"did not end within {_SECONDS:g} s" if status is None else f"ended with status {status}; see the output above"
    )
    last = f"; the last was {calls[-1].reward} with {_response(calls[-1])}" if calls else ""
    yield f"environment.reward_function: the process that calls reward functions on a few rows {how}{last}"


def _without_truth(calls: Sequence[RewardCall]) -> Iterator[str]:
    for own in _by(calls, "data", "file"):
        rows, lacking = {call.row for call in own}, {call.row for call in own if call.answer is None}
        if lacking:
            yield (
                f"{own[0].data}: {len(lacking)} of the first {len(rows)} rows of {own[0].file} have no ground truth: response.ground_truth "
                "is None in rewards. It is read from `ground_truth` in the column `reward_spec`, or from the column that "
                "data.response_column names"
            )


def _worth(calls: Sequence[RewardCall]) -> Iterator[str]:
    """Yield a warning where no function of a setting finds a ground truth, as the answer to its row, worth more than an empty answer."""
    worth = {(call.reward, call.file, call.row, call.answer): call.value for call in calls if call.value is not None}
    truths = [(call, call.value) for call in calls if call.is_truth and call.value is not None and not call.compares]
    empty = [worth.get((call.reward, call.file, call.row, ""), -math.inf) for call, _ in truths]
    if not truths or any(value > other for (_, value), other in zip(truths, empty, strict=True)):
        return
    first, value = truths[0]
    best, form = max(
        (value, key[3] or "") for key, value in worth.items() if key[:3] == (first.reward, first.file, first.row)
    )
    better = f'; written as "{form:.80}" it is worth {best}' if best > empty[0] else ""
    yield (
        f"{first.setting}: the right answer is worth {value} to {first.reward}: {_response(first)}, where an empty answer is worth {empty[0]}{better}"
    )


def _response(call: RewardCall) -> str:
    if call.group:
        return f"{call.group} samples of row {call.row} of {call.file}, which answer with the ground truth and with nothing in turns"
    said = (
        f'the ground truth "{call.answer:.80}"'
        if call.is_truth
        else f'"{call.answer:.80}"'
        if call.answer
        else "an empty answer"
    )
    return f"{said} as the response to row {call.row} of {call.file}"


def _by(calls: Sequence[RewardCall], *names: str) -> list[list[RewardCall]]:
    found = dict[tuple[str, ...], list[RewardCall]]()
    for call in calls:
        found.setdefault(tuple(getattr(call, name) for name in names), []).append(call)
    return list(found.values())
