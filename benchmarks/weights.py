"""What a weight update costs in each way: how long the trainer publishes a version, how long a node takes to have it, and how long its engine pauses.

    python benchmarks/weights.py [--ways WAYS] [--parameters MILLIONS] [--changed SHARE] [--ranks N] [--repetitions N] [--directory DIR]

A random Qwen2 in bfloat16, published by FSDP2 ranks of this machine and loaded by one vLLM replica. Between two versions a share of all elements
changes, spread evenly. The ways are

    files           the engine reads the run directory
    copies          the node copies the files, and the engine reads the copy
    changes         the files have what changed, and the node applies that to its copy
    gloo            the ranks send the files' bytes into the node's copy
    gloo+changes    the ranks send what changed

and take turns, version by version: each has ranks and a run of its own, and all the same engine. Figures are medians of wall-clock seconds with
the least and the most; the first version of each way, which is whole and for which memory is allocated, is not counted. Before a version is fetched its files
are dropped from the page cache, as if another node had written them. "published" is all that training waits for, "fetched" what a replica does
while it still generates, "paused" what it does while it does not. The last line is the same as JSON.
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
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path
from statistics import median

import torch
from torch.distributed.tensor import DTensor
from transformers import Qwen2Config, Qwen2ForCausalLM

from hpcrl.config import AlgorithmConfig, InferenceEngineConfig, ModelConfig, PolicyConfig, TrainerConfig
from hpcrl.config.sections.model import Pretrained
from hpcrl.data.weight_files import PublishedWeights
from hpcrl.engines.vllm.client import EngineClient
from hpcrl.engines.vllm.server import Server, ServerOptions
from hpcrl.rollout.weights.copies import NodeCopies
from hpcrl.rollout.weights.fetch import fetch
from hpcrl.rollout.weights.receive import Receiver
from hpcrl.rundir.commit import is_committed, write_text
from hpcrl.rundir.layout import Run
from hpcrl.runtime.scratch import Scratch
from hpcrl.runtime.signals import end_process
from hpcrl.runtime.token import bearer
from hpcrl.trainer.backends.fsdp.engine import FsdpPolicy
from hpcrl.trainer.distributed import joined
from hpcrl.trainer.saving.publish import Publisher
from hpcrl.trainer.saving.send import WeightSender

WAYS = ("files", "copies", "changes", "gloo", "gloo+changes")
_WIDTH, _START_S, _STAGE_S, _POLL_S, _HOST, _TOKEN = 1024, 900.0, 60.0, 0.01, "127.0.0.1", "a-token"
_TOKENIZER = Path(__file__).parents[1] / "configs" / "quickstart" / "model"


def make_model(millions: float, path: Path) -> None:
    """Write a random model of about that many parameters, with the tokenizer of the quickstart."""
    layers = max(1, round(millions * 1e6 / (12 * _WIDTH * _WIDTH)))
    config = Qwen2Config(
        vocab_size=256, hidden_size=_WIDTH, intermediate_size=8 * _WIDTH // 3, num_hidden_layers=layers, num_attention_heads=8,
        num_key_value_heads=8, max_position_embeddings=256, tie_word_embeddings=False, dtype=torch.bfloat16,
    )  # fmt: skip
    Qwen2ForCausalLM(config).bfloat16().save_pretrained(path)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (path / name).write_bytes((_TOKENIZER / name).read_bytes())


def publish(place: Path, way: str, changed: float, versions: int) -> None:
    """Publish a version whenever it is wanted, as one of several ranks; the first notes the seconds of each."""
    policy, run = PolicyConfig(model=ModelConfig(path=str(place / "model"))), Run(place / way)
    with joined() as world:
        engine = FsdpPolicy(TrainerConfig(policy=policy, algorithm=AlgorithmConfig(use_kl_loss=False)), 1.0, world)
        sender = WeightSender(run, 1, world.rank, torch.device("cpu"), _HOST, _STAGE_S) if "gloo" in way else None
        interval = versions + 1 if "changes" in way else 1
        publisher = Publisher(run, 1, world, torch.bfloat16, 2, longest=64, full_interval=interval, sender=sender)
        generator = torch.Generator().manual_seed(world.rank)
        for version in range(1, versions + 1):
            with torch.no_grad():
                for parameter in engine._model.parameters():
                    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
                    local.mul_(1 + 2**-6 * (torch.rand(local.shape, generator=generator) < changed))
            while not (run.path / f"wanted-{version}").exists():
                time.sleep(_POLL_S)
            world.barrier()
            began = time.monotonic()
            publisher.publish(engine, version)
            if world.first:
                write_text(run.path / f"published-{version}", str(time.monotonic() - began))
            publisher.retire()
        while not (run.path / "over").exists():
            time.sleep(_POLL_S)
    end_process()


def forget(version: Path) -> None:
    """Drop the files of a version from the page cache."""
    for path in version.iterdir():
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


class Way:
    """The ranks that publish in one way, and the node's part of it."""

    def __init__(self, place: Path, way: str, arguments: argparse.Namespace) -> None:
        self.name, self._run, self.found = way, Run(place / way), defaultdict[str, list[float]](list)
        write_text(self._run.token, _TOKEN, mode=0o600)
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        torchrun += [f"--nproc-per-node={arguments.ranks}", __file__]
        own = [f"--publish={place}", f"--ways={way}", f"--changed={arguments.changed}"]
        own += [f"--repetitions={arguments.repetitions}"]
        self._ranks = subprocess.Popen([*torchrun, *own], env={**os.environ, "OMP_NUM_THREADS": "1"})
        receiver = Receiver(self._run, 1, False, _HOST, _STAGE_S) if "gloo" in way else None
        self._copies = None if way == "files" else NodeCopies(place / "node", self._run, 1, receiver)

    async def update(self, engine: EngineClient, version: int) -> None:
        """Have a version published and loaded; note what it took, but of the first."""
        source = self._run.weights_of(version)
        (self._run.path / f"wanted-{version}").touch()
        while not (told := self._run.path / f"published-{version}").exists() or not is_committed(source):
            assert self._ranks.poll() is None, "the ranks have ended"
            await asyncio.sleep(_POLL_S)
        forget(source)
        began = time.monotonic()
        weights = fetch(source, self._copies)
        fetched = time.monotonic() - began
        paused = (await engine.update_weights(weights))["weights/pause_seconds"]
        if self._copies:
            assert self._copies.fetched.get("weights/received", 1.0) == 1.0, "it was not received, but read"
            self._copies.release()
        size = PublishedWeights.read(source).size
        if version > 1:
            took = {"published": float(told.read_text()), "fetched": fetched, "paused": paused, "GB": size / 1e9}
            for name, value in took.items():
                self.found[name].append(value)

    def end(self) -> None:
        (self._run.path / "over").touch()
        self._ranks.wait()
        if self._copies:
            self._copies.close()


async def update_all(ways: list[Way], server: Server, versions: int) -> None:
    engine = EngineClient(server.socket, bearer(_TOKEN, "benchmark"))
    for version in range(1, versions + 1):
        for way in ways:
            await way.update(engine, version)
    await engine.close()


def measure(place: Path, arguments: argparse.Namespace) -> dict[str, dict[str, list[float]]]:
    make_model(arguments.parameters, place / "model")
    write_text(place / "token", _TOKEN, mode=0o600)
    engine, model = InferenceEngineConfig(max_num_seqs=8), Pretrained(str(place / "model"))
    with ExitStack() as stack:
        scratch = Scratch("engine")
        stack.callback(scratch.remove)
        options = ServerOptions(model, engine, 1, 128, True, "benchmark", place / "token")
        server = Server(options, scratch.path, place / "engine.log")
        stack.callback(server.stop)
        ways = []
        for name in arguments.ways.split(","):
            ways.append(Way(place, name, arguments))
            stack.callback(ways[-1].end)
        server.wait_ready(_START_S)
        asyncio.run(update_all(ways, server, arguments.repetitions + 1))
        return {way.name: way.found for way in ways}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ways", default=",".join(WAYS), help=f"of {', '.join(WAYS)}")
    parser.add_argument("--parameters", type=float, default=75.0, metavar="MILLIONS")
    parser.add_argument(
        "--changed", type=float, default=0.015, metavar="SHARE", help="of the elements, from version to version"
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--directory", help="on the filesystem to measure (default: the temporary one)")
    parser.add_argument("--publish", type=Path, help=argparse.SUPPRESS)  # a rank's side
    arguments = parser.parse_args()
    if arguments.publish:
        publish(arguments.publish, arguments.ways, arguments.changed, arguments.repetitions + 1)
        return
    place = Path(tempfile.mkdtemp(dir=arguments.directory))
    try:
        found = measure(place, arguments)
    finally:
        shutil.rmtree(place)
    for way, values in found.items():
        for name, each in values.items():
            print(f"{way:13} {name:10} {median(each):.3f}, {min(each):.3f} to {max(each):.3f}")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
