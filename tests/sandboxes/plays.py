"""A rollout worker without an engine, for episodes in sandboxes: plays the groups that its input names, a line each, and prints their ends.

python plays.py RUN WORKER SERVERS
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hpcrl.config import EnvironmentConfig, GeneratorConfig
from hpcrl.rollout import generation_cache
from hpcrl.rollout.engines.base import Generation
from hpcrl.rollout.generate import GroupGenerator
from hpcrl.rollout.generation_cache import GenerationCache
from hpcrl.rollout.own_services import sandboxes_of
from hpcrl.rundir.layout import Run
from hpcrl.types import Prompt, Work
from tests.golden.letters import Letters

STEP = "read n < /count; echo x$n > /count; cat /count"
SAYS = [f"<tool_call>{json.dumps({'name': 'shell', 'arguments': {'command': STEP}})}</tool_call>"] * 3
SAYS += ['<tool_call>{"name": "submit", "arguments": {}}</tool_call>']
ROW = {"image": "tiny", "files": {"/count": "\n"}, "tests": {"command": "read n < /count; test $n = xxx"}}
"""Its tests pass where each turn has changed the file once."""


class Policy:
    """Says the next turn, and notes in a file that it was asked."""

    version = 0

    def __init__(self, asked: Path) -> None:
        self._asked = asked

    async def generate(self, prompt: Sequence[int], n: int, *_: object) -> list[Generation]:
        turn = Letters().decode(prompt).count("[assistant]") - 1
        with self._asked.open("a") as file:
            file.write(f"{turn}\n")
        tokens = [*Letters().encode(SAYS[turn]), Letters.eos_token_id]
        return [Generation(tokens, [0.0] * len(tokens), "stop", [0] * len(tokens))] * n

    async def ended(self) -> dict[str, Any]:
        return {}


async def main(run: Run, worker: str, servers: int) -> None:
    engine: Any = Policy(run.path / "asked")
    cache, loop = GenerationCache(run, worker, engine), asyncio.get_running_loop()
    config = GeneratorConfig(max_turns=len(SAYS), n_samples_per_prompt=1)
    tokenizer: Any = Letters()
    sandboxes = sandboxes_of(run, 1, servers, worker)
    generator = GroupGenerator(engine, tokenizer, config, EnvironmentConfig(), sandboxes=sandboxes)

    async def play(group_id: str, turns: list[str]) -> None:
        prompt = Prompt(group_id, [{"role": "user", "content": "count"}], "sandbox", ROW)
        group = await generator.generate(work := Work(group_id, "train", prompt, 1, 0, turns), await cache.begin(work))
        ended = {"group": group_id, "reward": group.raw_rewards[0], "failures": group.failures}
        print(json.dumps(ended | {"found": group.cached_tokens}), flush=True)
        cache.remove([group_id])

    tasks = {asyncio.create_task(cache.write_periodically())}
    asked = loop.run_in_executor(None, sys.stdin.readline)
    while not (asked.done() and not asked.result()):
        done, _ = await asyncio.wait({asked, *tasks}, return_when=asyncio.FIRST_COMPLETED)
        for task in done & tasks:
            task.result()
            tasks.remove(task)
        if asked in done and (line := asked.result()):
            tasks.add(asyncio.create_task(play(**json.loads(line))))
            asked = loop.run_in_executor(None, sys.stdin.readline)


if __name__ == "__main__":
    generation_cache.KEEP_S = 0.5  # an episode takes a second
    asyncio.run(main(Run(Path(sys.argv[1])), sys.argv[2], int(sys.argv[3])))
