"""What a request to vLLM costs the rollout worker, by how many are under way.

    python benchmarks/vllm_client.py [--requests 64 512 1500] [--samples 8] [--tokens 16] [--repeats 3]

A server on a unix socket answers each request after a fifth of a second with samples of vLLM's form; no model computes. All requests begin
together, as those of a batch do. Processor time is this process's own, per request, the best of the repeats: from the tokens of the prompt
to the tokens and log-probabilities of the samples, with versions.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import platform
import tempfile
import time
from pathlib import Path
from typing import Any

from hpcrl.rollout.engines.vllm.client import EngineClient

_ANSWER_S, _START_S = 0.2, 30.0
_PROMPT = list(range(200, 232))


def answer(samples: int, tokens: int) -> bytes:
    """Return what vLLM answers."""
    said = [{"token": f"token_id:{id}", "logprob": -1.234567, "top_logprobs": []} for id in range(tokens)]
    one = {"token_ids": list(range(tokens)), "finish_reason": "stop", "logprobs": {"content": said}}
    return json.dumps({"choices": [{"index": index, **one} for index in range(samples)]}).encode()


def serve(socket: str, said: bytes) -> None:
    import uvicorn

    length = str(len(said)).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", length)]

    async def app(_scope: Any, receive: Any, send: Any) -> None:
        while (await receive()).get("more_body"):
            pass
        await asyncio.sleep(_ANSWER_S)
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": said})

    uvicorn.run(app, uds=socket, lifespan="off", log_level="warning")


async def ask(socket: Path, requests: int, samples: int) -> tuple[float, float]:
    """Return the seconds of processor per request, and the seconds that all took."""
    engine = EngineClient(socket, {"authorization": "Bearer token"})
    try:
        began, cpu = time.perf_counter(), time.process_time()
        asked = (engine.generate(_PROMPT, samples, 1, {"temperature": 1.0}) for _ in range(requests))
        await asyncio.gather(*asked)
        return (time.process_time() - cpu) / requests, time.perf_counter() - began
    finally:
        await engine.close()


def main() -> None:
    parser = argparse.ArgumentParser(description="What a request to vLLM costs the rollout worker.")
    parser.add_argument("--requests", type=int, nargs="+", default=[64, 512, 1500], help="requests at once")
    parser.add_argument("--samples", type=int, default=8, help="samples of a request")
    parser.add_argument("--tokens", type=int, default=16, help="tokens of a sample")
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    print(f"{platform.machine()}, Python {platform.python_version()}")
    with tempfile.TemporaryDirectory() as folder:
        socket = Path(folder) / "socket"
        said = answer(arguments.samples, arguments.tokens)
        server = multiprocessing.Process(target=serve, args=(str(socket), said), daemon=True)
        server.start()
        try:
            deadline = time.monotonic() + _START_S
            while not socket.exists():
                assert time.monotonic() < deadline, "the server does not start"
                time.sleep(0.1)
            for requests in arguments.requests:
                found = [asyncio.run(ask(socket, requests, arguments.samples)) for _ in range(arguments.repeats)]
                cpu, wall = map(min, zip(*found, strict=True))
                print(f"{requests:6d} requests at once: {cpu * 1e3:.2f} ms of processor each, {wall:.2f} s in all")
        finally:
            server.terminate()
            server.join()


if __name__ == "__main__":
    main()
