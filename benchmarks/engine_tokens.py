"""How many tokens a second one vLLM server gives its client, and what its API server and its engine take of a core meanwhile.

    python benchmarks/engine_tokens.py MODEL [--prompts 32] [--samples 32] [--tokens 512] [--logprobs 0 20] [--tiny]

MODEL is a folder with the random Qwen3 of benchmarks/random_qwen3.py, which gets the quickstart's tokenizer. Prompts are asked for together, as a rollout
worker asks; a first round, which is not measured, warms up. Prints one line of JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from hpcrl.config import InferenceEngineConfig
from hpcrl.config.sections.model import Pretrained
from hpcrl.engines.vllm.processes import group_of
from hpcrl.engines.vllm.server import Server, ServerOptions
from hpcrl.errors import EngineError

_TOKENIZER = Path(__file__).parents[1] / "configs" / "quickstart" / "model"
_RUN, _TOKEN = "measured", "a-token-of-the-benchmark"
_START_S = 600.0


def processor_seconds(leader: int) -> dict[str, float]:
    """Return the processor time of each process of a group, by its name."""
    found: dict[str, float] = {}
    for pid in group_of(leader):
        stat = Path(f"/proc/{pid}/stat").read_text()
        name, fields = stat[stat.index("(") + 1 : stat.rindex(")")], stat[stat.rindex(")") + 2 :].split()
        seconds = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        found[name] = found.get(name, 0.0) + seconds
    return found


async def measure(server: Server, given: argparse.Namespace) -> list[dict[str, Any]]:
    engine, rows = server.connect(), list[dict[str, Any]]()
    sampling = {"temperature": 1.0, "max_tokens": given.tokens, "ignore_eos": True}
    try:
        for number, logprobs in enumerate([given.logprobs[0], *given.logprobs]):
            before, began = processor_seconds(server.pid), time.monotonic()
            own = {**sampling, "logprobs": logprobs}
            requests = (
                engine.generate([5 + prompt, 7, 9, 11], given.samples, 1000 * prompt, own)
                for prompt in range(given.prompts)
            )
            await asyncio.gather(*requests)
            seconds = time.monotonic() - began
            after = processor_seconds(server.pid)
            cores = {name: round((after[name] - before.get(name, 0.0)) / seconds, 2) for name in after}
            rate = round(given.prompts * given.samples * given.tokens / seconds)
            if number:
                rows.append({"logprobs": logprobs, "tokens/s": rate, "seconds": round(seconds, 2), "cores": cores})
    finally:
        await engine.close()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--logprobs", type=int, nargs="+", default=[0, 20])
    parser.add_argument("--tiny", action="store_true", help="sizes for a CPU")
    given = parser.parse_args()
    if given.tiny:
        given.prompts, given.samples, given.tokens = 2, 4, 16
        given.logprobs = [0]  # with more the engine core of vLLM 0.31's CPU build ends without a word
        given.model = _TOKENIZER  # vLLM's CPU build has no heads as small as those of the random model
    on_cpu = not torch.cuda.is_available()
    section = InferenceEngineConfig(
        model_dtype="bfloat16", max_num_seqs=64 if given.tiny else 1024, max_num_batched_tokens=8192
    )
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        for name in ("config.json", "model.safetensors"):
            (folder / name).symlink_to(given.model / name)
        for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            (folder / name).write_bytes((_TOKENIZER / name).read_bytes())
        token = folder / "token"
        token.write_text(_TOKEN + "\n")
        token.chmod(0o600)
        options = ServerOptions(Pretrained(place), section, 1, 256 if given.tiny else 1024, on_cpu, _RUN, token)
        began = time.monotonic()
        server = Server(options, folder, folder / "engine.log")
        try:
            server.wait_ready(_START_S)
            started = round(time.monotonic() - began, 1)
            try:
                print(json.dumps({"start": started, "rows": asyncio.run(measure(server, given))}))
            except EngineError as error:
                raise server.failure("failed") from error
        finally:
            server.stop()


if __name__ == "__main__":
    main()
