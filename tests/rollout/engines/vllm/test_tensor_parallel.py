"""A replica whose weights are shared by two workers, as on two GPUs: what it says, and new weights while it says it."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import torch

from hpcrl.rollout.engines.base import Generation
from hpcrl.rollout.engines.vllm.client import EngineClient
from hpcrl.runtime.controller_client import headers
from tests.rollout.engines.test_contract import LENGTH, assert_close, updated_while_running
from tests.rollout.material import LONG_PROMPT, RUN_NAME, TOKEN, logprobs, options, served

WHOLE = {"temperature": 1.0, "max_tokens": 24}


def test_two_workers_share_the_weights(models: list[Path], token_file: Path, tmp_path: Path) -> None:
    given = options(str(models[0]), token_file)
    given = replace(given, engine=replace(given.engine, tensor_parallel_size=2))

    async def play(socket: Path) -> tuple[list[Generation], list[Generation], list[Generation]]:
        engine = EngineClient(socket, headers(TOKEN, RUN_NAME, 1))
        try:
            first = await engine.generate(LONG_PROMPT, 4, 3, WHOLE)
            return (
                first,
                await updated_while_running(engine, models[1]),
                await engine.generate(LONG_PROMPT, 4, 3, WHOLE),
            )
        finally:
            await engine.close()

    with served(given, tmp_path / "engine.log") as server:
        first, running, later = asyncio.run(play(server.socket))
    for said, model in ((first, models[0]), (later, models[1])):
        for one in said:
            assert_close(one, model, LONG_PROMPT)
    for one in running:
        given_T, switch = torch.tensor(one.logprobs), one.versions.count(0)
        assert one.versions == [0] * switch + [1] * (LENGTH - switch)
        assert 0 < switch < LENGTH
        for part, model in ((slice(None, switch), models[0]), (slice(switch, None), models[1])):
            expected = logprobs(model, LONG_PROMPT, one.token_ids)[part]
            torch.testing.assert_close(given_T[part], expected, atol=1e-3, rtol=0)
