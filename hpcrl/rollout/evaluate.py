"""Plays an evaluation with one engine whose weights stay as they are."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from hpcrl.config import EnvironmentConfig, GeneratorConfig
from hpcrl.data.chat import decoder, load_tokenizer
from hpcrl.errors import EngineError
from hpcrl.rollout.client import EngineClient
from hpcrl.rollout.dump import append_evaluated
from hpcrl.rollout.generate import GroupGenerator
from hpcrl.rollout.progress import watch_progress
from hpcrl.rollout.server import Server
from hpcrl.run.call import headers, read_token
from hpcrl.run.layout import Run
from hpcrl.types import GroupMeta, Prompt, Work

_WATCH_S = 0.5
_REPLICA = 0


def evaluation_work(prompts: Sequence[Prompt], version: int, n_samples: int, seed: int) -> list[Work]:
    """Return the work of an evaluation: the same groups, with the same seeds, as that of a run on the same prompts."""
    return [
        Work(f"e{version:06d}-{row:08d}", "eval", prompt, n_samples, seed + row) for row, prompt in enumerate(prompts)
    ]


async def evaluate(
    place: Run,
    server: Server,
    model: str,
    work: Sequence[Work],
    version: int,
    generator: GeneratorConfig,
    environment: EnvironmentConfig,
    told: Callable[[int], None],
) -> list[GroupMeta]:
    """Return the groups of all work, in its order; what was said in them is appended to a dump.

    Args:
        place: directory of the evaluation, laid out as a run.
        server: one that is ready.
        model: HF directory or hub id of the tokenizer.
        version: of the weights that the server holds.
        told: is called with the number of groups that are finished, one after the other.

    Raises:
        EngineError: the engine failed.
        HpcrlError: an environment or a reward failed.
    """
    engine = EngineClient(server.socket, headers(read_token(place), place.name, 0), version)
    tokenizer, dump = load_tokenizer(model, generator.chat_template), place.eval_dump(version, _REPLICA)
    decode, play = decoder(tokenizer), GroupGenerator(engine, tokenizer, generator, environment)
    finished: list[str] = []
    settings = generator.inference_engine
    room = asyncio.Semaphore(max(1, settings.max_num_seqs // generator.eval_n_samples_per_prompt))

    async def one(item: Work) -> GroupMeta:
        async with room:
            group = await play.generate(item)
        append_evaluated(dump, group, decode)
        finished.append(item.group_id)
        told(len(finished))
        return group.meta(_REPLICA, str(dump.relative_to(place.path)))

    groups = [asyncio.create_task(one(item)) for item in work]
    whole = asyncio.gather(*groups)
    watching = asyncio.create_task(
        watch_progress(engine, settings.stall_timeout_seconds, settings.start_timeout_seconds)
    )
    dying = asyncio.create_task(_died(server))
    try:
        done, _ = await asyncio.wait([whole, watching, dying], return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
        return whole.result()
    except EngineError as error:
        if server.alive() and await engine.healthy():
            raise
        raise server.failure("died") from error
    finally:
        left: list[asyncio.Future[Any]] = [*groups, whole, watching, dying]
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        await engine.close()


async def _died(server: Server) -> None:
    while server.alive():
        await asyncio.sleep(_WATCH_S)
    raise EngineError("the inference engine ended")
