"""Evaluation with one engine whose weights stay as they are, and the dump of evaluated samples that a run writes too."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict
from typing import Any

from hpcrl.config import GeneratorConfig
from hpcrl.data.rollouts import Decode, segments_of
from hpcrl.envs.base import Messages
from hpcrl.envs.rewards.response import truth_text
from hpcrl.rollout.engines.base import Launched
from hpcrl.rollout.engines.watchdog import run_watched
from hpcrl.rollout.generate import Generator, Maker
from hpcrl.rollout.group import Group, sample_reward
from hpcrl.rundir.layout import Run
from hpcrl.rundir.records import append_text
from hpcrl.runtime.threads import in_thread
from hpcrl.text import said_in
from hpcrl.types import GroupMeta, Work

_REPLICA = 0


async def evaluate(
    directory: Run,
    launched: Launched,
    maker: Maker,
    decode: Decode,
    work: Sequence[Work],
    version: int,
    generator: GeneratorConfig,
    on_finished: Callable[[int], None],
) -> list[GroupMeta]:
    """Return the groups of all work, in its order; their samples are appended to a dump.

    Args:
        directory: of the evaluation, laid out as a run.
        launched: an engine that is ready.
        maker, decode: what makes groups with the engine, and of tokens of their rows texts.
        version: of the weights that it holds.
        on_finished: called with the number of groups that are finished, after each of them.
    """
    engine = launched.connect(version=version)
    settings, finished, dump = generator.inference_engine, 0, directory.eval_dump(version, _REPLICA)

    async def note(group: Group) -> GroupMeta:
        nonlocal finished
        await in_thread(append_text, dump, evaluated_text([group], decode))
        finished += 1
        on_finished(finished)
        return group.meta(_REPLICA, str(dump.relative_to(directory.path)))

    async def generate_all() -> list[GroupMeta]:
        async with maker(engine) as groups:
            return await generate_rows(groups, work, generator, note)

    stall_s, load_s = settings.stall_timeout_seconds, settings.start_timeout_seconds
    try:
        return await run_watched(launched, engine, [generate_all()], stall_s, load_s)
    finally:
        await engine.close()


async def generate_rows(
    groups: Generator,
    work: Sequence[Work],
    generator: GeneratorConfig,
    finished: Callable[[Group], Awaitable[GroupMeta]],
) -> list[GroupMeta]:
    """Return the groups of all work, in its order, as many at a time as the engine decodes together.

    Args:
        finished: called with each group as soon as it has ended.
    """
    at_once = generator.inference_engine.max_num_seqs // generator.eval_n_samples_per_prompt
    room = asyncio.Semaphore(max(1, at_once))

    async def generate(item: Work) -> GroupMeta:
        async with room:
            group = await groups.generate(item)
        return await finished(group)

    return await asyncio.gather(*map(generate, work))


def evaluated_text(groups: Sequence[Group], decode: Decode) -> str:
    """Return a line per sample of some groups; hpcrl/data/rollouts.py reads them.

    Args:
        decode: token ids to text, special tokens included.
    """
    lines = [line for group in groups for line in _lines(group, decode)]
    return "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)


def _lines(group: Group, decode: Decode) -> list[dict[str, Any]]:
    prompt = group.work.prompt
    several = any(len(messages) > 1 for messages in group.conversations)
    return [
        {
            "prompt": _as_texts(prompt.messages),
            "env_class": prompt.env_class,
            "data_source": prompt.data_source,
            "ground_truth": truth_text(prompt.extras),
            "response": _as_texts(messages) if several else text,
            "score": sample_reward(rows),
            "stop_reason": rows[-1].stop_reason,
            "env_metrics": rows[-1].env_metrics,
            "group_id": group.work.group_id,
            "sample": at,
            "parts": [asdict(part) for sample in rows for part in segments_of(sample, decode, sample.turns)],
        }
        for at, (text, messages, rows) in enumerate(zip(group.texts, group.conversations, group.rows, strict=True))
    ]


def _as_texts(messages: Messages) -> Messages:
    return [{**message, "content": said_in(message["content"])} for message in messages]
