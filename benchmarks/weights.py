"""What a weight update costs: how long the trainer publishes a version, and how long a vLLM engine takes to have it.

    python benchmarks/weights.py [--parameters MILLIONS] [--ranks N] [--repetitions N] [--directory DIR]

A random Qwen2 in bfloat16, published by FSDP2 ranks of this machine and loaded by one vLLM replica. Figures are medians of wall-clock
seconds with the least and the most; the first of each kind, which allocates memory, is not counted. Before each update the files are dropped from the
page cache, as if another node had written them. "found to resumed" is all that a replica does for a new version, "paused" the part of it in which
nothing is generated, "paused at /..." a call of vLLM's in that, "paused, not fetched" the same where nobody has read the files before; these two
take turns. "read and digested" is what the reading of the files alone takes from the page cache. The last line is the same as JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict, deque
from contextlib import closing
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from hpcrl.config import AlgorithmConfig, InferenceEngineConfig, ModelConfig, PolicyConfig, TrainerConfig
from hpcrl.config.sections.model import Pretrained
from hpcrl.data.weight_files import PublishedWeights, WeightReader
from hpcrl.rollout.engines.vllm.client import EngineClient
from hpcrl.rollout.engines.vllm.server import Server, ServerOptions
from hpcrl.rollout.weights.fetch import fetch
from hpcrl.rundir.commit import committed, write_text
from hpcrl.rundir.layout import Run, version_of
from hpcrl.runtime.scratch import Scratch
from hpcrl.runtime.token import bearer
from hpcrl.trainer.backends.fsdp.engine import FsdpPolicy
from hpcrl.trainer.distributed import joined
from hpcrl.trainer.saving.publish import Publisher

_WIDTH, _START_S = 1024, 900.0
_TOKENIZER = Path(__file__).parents[1] / "configs" / "quickstart" / "model"


def make_model(millions: float, path: Path) -> None:
    """Write a random model of about that many parameters, with the tokenizer of the quickstart."""
    layers = max(1, round(millions * 1e6 / (12 * _WIDTH * _WIDTH)))
    config = Qwen2Config(
        vocab_size=256, hidden_size=_WIDTH, intermediate_size=8 * _WIDTH // 3, num_hidden_layers=layers, num_attention_heads=8,
        num_key_value_heads=8, max_position_embeddings=256, tie_word_embeddings=False, dtype=torch.bfloat16,
    )  # fmt: skip
    Qwen2ForCausalLM(config).to(torch.bfloat16).save_pretrained(path)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (path / name).write_bytes((_TOKENIZER / name).read_bytes())


def publish(place: Path, repetitions: int) -> None:
    """Publish versions, as one of several ranks; the first tells the seconds of each."""
    policy = PolicyConfig(model=ModelConfig(path=str(place / "model")))
    with joined() as world:
        engine = FsdpPolicy(TrainerConfig(policy=policy, algorithm=AlgorithmConfig(use_kl_loss=False)), 1.0, world)
        publisher, seconds = Publisher(Run(place / "run"), 1, world, torch.bfloat16, 2, longest=64), []
        for version in range(1, repetitions + 2):
            world.barrier()
            began = time.monotonic()
            publisher.publish(engine, version)
            seconds.append(time.monotonic() - began)
            publisher.retire()
        if world.first:
            (place / "published.json").write_text(json.dumps(seconds[1:]))


class TimedClient(EngineClient):
    """Notes the seconds of each call."""

    seconds: dict[str, float]

    async def _call(self, method: str, path: str, **request: Any) -> dict[str, Any]:
        began = time.monotonic()
        try:
            return await super()._call(method, path, **request)
        finally:
            self.seconds[path] = time.monotonic() - began


def forget(version: Path) -> None:
    """Drop the files of a version from the page cache."""
    for path in version.iterdir():
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


async def load(place: Path, server: Server, token: str, repetitions: int) -> dict[str, list[float]]:
    """Load the newest two versions in turns; return seconds."""
    run, found = Run(place / "run"), defaultdict[str, list[float]](list)
    versions = [run.weights_of(version) for version in committed(run.weights, version_of)[-2:]]
    engine = TimedClient(server.socket, bearer(token, "benchmark"))
    for number in range(2 * (repetitions + 1)):
        source, fetched, engine.seconds = versions[number // 2 % 2], number % 2 == 0, {}
        forget(source)
        began = time.monotonic()
        weights = fetch(source) if fetched else PublishedWeights.read(source)
        paused = (await engine.update_weights(weights))["weights/pause_seconds"]
        if number > 1 and fetched:
            found["found to resumed"].append(time.monotonic() - began)
            found["paused"].append(paused)
            for path, seconds in engine.seconds.items():
                found[f"paused at {path}"].append(seconds)
            began = time.monotonic()
            with closing(WeightReader(source)) as reader:
                deque(reader, maxlen=0)
            found["read and digested"].append(time.monotonic() - began)
        elif number > 1:
            found["paused, not fetched"].append(paused)
    differs = await engine.probe(weights, "bfloat16", None)
    print(f"log-probabilities of the probe differ by {differs:.4f}")
    await engine.close()
    return found


def measure(millions: float, ranks: int, repetitions: int, place: Path) -> dict[str, list[float]]:
    make_model(millions, place / "model")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    arguments = [__file__, "--publish", str(place), "--repetitions", str(repetitions)]
    subprocess.run([*torchrun, *arguments], check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    token = "a-token"
    write_text(place / "token", token, mode=0o600)
    options = ServerOptions(
        Pretrained(str(place / "model")),
        InferenceEngineConfig(max_num_seqs=8),
        1,
        128,
        True,
        "benchmark",
        place / "token",
    )
    scratch = Scratch("engine")
    server = Server(options, scratch.path, place / "engine.log")
    try:
        server.wait_ready(_START_S)
        loaded = asyncio.run(load(place, server, token, repetitions))
    finally:
        server.stop()
        scratch.remove()
    return {"publish": json.loads((place / "published.json").read_text()), **loaded}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--parameters", type=float, default=260.0, metavar="MILLIONS")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--directory", help="on the filesystem to measure (default: the temporary one)")
    parser.add_argument("--publish", type=Path, help=argparse.SUPPRESS)  # a rank's side
    arguments = parser.parse_args()
    if arguments.publish:
        publish(arguments.publish, arguments.repetitions)
        return
    place = Path(tempfile.mkdtemp(dir=arguments.directory))
    try:
        found = measure(arguments.parameters, arguments.ranks, arguments.repetitions, place)
    finally:
        shutil.rmtree(place)
    for name, seconds in found.items():
        print(f"{name:33} {median(seconds):.2f} s, {min(seconds):.2f} to {max(seconds):.2f}")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
