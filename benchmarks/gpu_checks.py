"""What a GPU computes, against float32 and transformers, in checks of one process each; benchmarks/gpu_first.py runs them with whole commands.

    python benchmarks/gpu_checks.py NAME MODEL [--tiny]

Prints one line of JSON. MODEL is a folder with the random Qwen3 of benchmarks/random_qwen3.py; nothing is downloaded, and vLLM is not needed.
"""

from __future__ import annotations

import argparse
import inspect
import json
import multiprocessing
import os
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from itertools import accumulate
from pathlib import Path
from statistics import median
from threading import Thread
from typing import Any

import torch
from random_qwen3 import ALONE, peak_memory
from safetensors import safe_open
from torch.nn.attention.varlen import varlen_attn
from transformers import AutoConfig, AutoModelForCausalLM

from hpcrl.config import AlgorithmConfig, TrainerConfig
from hpcrl.config.validate import build
from hpcrl.data.weights.stream import PART, RECEIVER, SENDER, Pair, receive_files, send_files, sizes_of
from hpcrl.errors import DeviceError
from hpcrl.trainer.backends.base import Objective, PolicyEngine
from hpcrl.trainer.backends.build import build_policy
from hpcrl.trainer.distributed import World, joined
from hpcrl.trainer.loss import build_objective
from hpcrl.trainer.models.flops import peak_tflops
from hpcrl.trainer.models.logprobs import compiled_rows, plain_rows, token_logprobs
from hpcrl.trainer.models.packed.attention import PackedSequences, attend
from hpcrl.trainer.models.packed.kernels import AttentionKind, last_tokens
from hpcrl.trainer.models.packed.tree import PrefixTree
from hpcrl.trainer.packing import shared_prefixes
from hpcrl.trainer.profiling.by_length import random_micro_batch
from hpcrl.types import MicroBatch

_TIMES = 5
_STAGE_S = 15.0

Found = dict[str, Any]


class Machine:
    """What checks run on.

    Attributes:
        device: a GPU, or with `tiny` maybe the CPU.
        model: directory of a random model.
    """

    def __init__(self, model: Path, *, tiny: bool) -> None:
        self.model, self.tiny = model, tiny
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def seconds(self, run: Callable[[], object]) -> float:
        """Return the median time of a call; the first, which may compile and allocate, is not counted."""
        run()
        took = []
        for _ in range(_TIMES):
            self.synchronize()
            began = time.monotonic()
            run()
            self.synchronize()
            took.append(time.monotonic() - began)
        return median(took)

    def engine(self, world: World, **trainer: Any) -> PolicyEngine:
        table = {"policy": {"model": {"path": str(self.model)}}, "algorithm": {"use_kl_loss": False}, **trainer}
        engine = build_policy(build(TrainerConfig, table), 1.0, world)
        engine.schedule(100)
        return engine

    def batch(self, tokens: int, sample: int) -> MicroBatch:
        vocabulary = AutoConfig.from_pretrained(self.model).vocab_size
        return random_micro_batch([sample] * (tokens // sample), vocabulary, 1 / tokens)


def versions(machine: Machine) -> Found:
    gpu = machine.device.type == "cuda"
    return {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "gpu": torch.cuda.get_device_name() if gpu else None,
        "gib": round(torch.cuda.get_device_properties(0).total_memory / 2**30, 1) if gpu else None,
        "peak_tflops": peak_tflops(torch.cuda.get_device_name()) if gpu else None,
        "varlen_attn": list(inspect.signature(varlen_attn).parameters),
    }


def attention(machine: Machine) -> Found:
    """Outputs and gradients in bf16 against float32 without flash attention; uneven lengths. Errors are shares of the largest value."""
    lengths, found = [7, 130, 64, 1], Found()
    for head in (16,) if machine.tiny else (64, 128, 256):
        for groups in (1, 2) if machine.tiny else (1, 4, 8):
            torch.manual_seed(0)
            counts = (8, 8 // groups, 8 // groups)
            heads = [torch.randn(sum(lengths), count, head, device=machine.device) for count in counts]
            bounds = torch.tensor([0, 7, 137, 201, 202], dtype=torch.int32, device=machine.device)
            packed, outputs = PackedSequences.of(lengths, bounds), []
            for dtype, flash in ((torch.float32, False), (torch.bfloat16, True)):
                query, key, value = (values.to(dtype, copy=True).requires_grad_() for values in heads)
                output = attend(query, key, value, packed, AttentionKind(flash=flash))
                output.float().square().sum().backward()
                outputs.append([output.detach(), query.grad, key.grad, value.grad])
            found[f"head {head}, {groups} queries per key"] = _errors(*outputs)
    return found


def kinds(machine: Machine) -> Found:
    """Windows, capped scores and sinks in bf16 against float32 with all scores in memory, sample by sample."""
    lengths, head, found = [7, 130, 64, 1], 16 if machine.tiny else 128, Found()
    sinks = torch.linspace(-1, 2, 8, device=machine.device)
    for name, kind in {
        "window": AttentionKind(window=40),
        "softcap": AttentionKind(softcap=5.0),
        "sinks and window": AttentionKind(window=40, sinks=sinks),
    }.items():
        torch.manual_seed(0)
        heads = [torch.randn(sum(lengths), count, head, device=machine.device) for count in (8, 4, 4)]
        bounds = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=machine.device)
        packed, outputs = PackedSequences.of(lengths, bounds), []
        for dtype in (torch.float32, torch.bfloat16):
            given = [values.to(dtype, copy=True).requires_grad_() for values in heads]
            if dtype == torch.float32:
                rows = zip(*(values[None].transpose(1, 2).split(lengths, 2) for values in given), strict=True)
                whole = [last_tokens(query, key, value, kind)[0].transpose(0, 1) for query, key, value in rows]
                output = torch.cat(whole)
            else:
                query, key, value = given
                output = attend(query, key, value, packed, kind)
            output.float().square().sum().backward()
            outputs.append([output.detach(), *(values.grad for values in given)])
        found[name] = _errors(*outputs)
    return found


def prefixes(machine: Machine) -> Found:
    """The same where prefixes are computed once: against whole samples in float32, which have copies of them. The last but one has one token of its own."""
    lengths, common = [130, 140, 90, 90, 70], [0, 120, 64, 90, 0]
    shared = shared_prefixes(lengths, common)
    assert shared is not None
    shared, found = shared.to(machine.device), Found()
    bounds = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=machine.device)
    whole, tree = PackedSequences.of(lengths, bounds), PrefixTree(lengths, bounds, shared)
    head = 16 if machine.tiny else 128
    for groups in (1, 2) if machine.tiny else (1, 4, 8):
        torch.manual_seed(0)
        counts, outputs = (8, 8 // groups, 8 // groups), []
        heads = [torch.randn(len(shared.kept), count, head, device=machine.device) for count in counts]
        for dtype, packed in ((torch.float32, whole), (torch.bfloat16, tree)):
            given = [values.to(dtype, copy=True).requires_grad_() for values in heads]
            query, key, value = (values[shared.places] for values in given) if packed is whole else given
            output = packed.attend(query, key, value, AttentionKind(flash=packed is tree))
            output = output[shared.kept] if packed is whole else output
            output.float().square().sum().backward()
            outputs.append([output.detach(), *(values.grad for values in given)])
        found[f"{groups} queries per key"] = _errors(*outputs)
    return found


def _errors(exact: list[Any], found: list[Any]) -> list[float]:
    """Return the largest difference of each pair of tensors, as a share of the largest exact value."""
    pairs = zip(exact, found, strict=True)
    return [round(((got.float() - right).abs().max() / right.abs().max()).item(), 5) for right, got in pairs]


def attention_speed(machine: Machine) -> Found:
    """TFLOP/s of forward and backward, causal work only."""
    found = Found()
    shapes = ((4, 32), (1, 128)) if machine.tiny else ((8, 2048), (1, 16384), (1, 65536))
    for count, length in shapes:
        query, key, value = (
            torch.randn(count * length, heads, 128, device=machine.device, dtype=torch.bfloat16, requires_grad=True)
            for heads in (16, 8, 8)
        )
        bounds = torch.arange(0, (count + 1) * length, length, dtype=torch.int32, device=machine.device)
        packed = PackedSequences.of([length] * count, bounds)
        for flash in (True, False):
            run = partial(attend, query, key, value, packed, AttentionKind(flash=flash))
            took = machine.seconds(lambda run=run: run().sum().backward())
            work = 6 * 16 * 128 * count * length**2
            found[f"{count} x {length}, {'flash' if flash else 'other'}"] = round(work / took / 1e12, 2)
    return found


def head(machine: Machine) -> Found:
    """Milliseconds and GiB of the head with its log-probabilities, forward and backward."""
    vocabulary, tokens, found = (512, 256, Found()) if machine.tiny else (151936, 16384, Found())
    for width in (64,) if machine.tiny else (1024, 4096):
        hidden = torch.randn(tokens, width, device=machine.device, dtype=torch.bfloat16, requires_grad=True)
        weight = torch.randn(vocabulary, width, device=machine.device, dtype=torch.bfloat16, requires_grad=True)
        labels = torch.randint(vocabulary, (tokens,), device=machine.device)
        for name, rows in (("plain", plain_rows), ("compiled", compiled_rows())):
            for chunk in (64, 128) if machine.tiny else (1024, 4096, 8192):
                outputs = partial(token_logprobs, hidden, weight, labels, 1.0, chunk, rows, entropy="metric")
                if machine.device.type == "cuda":
                    torch.cuda.reset_peak_memory_stats()
                took = machine.seconds(lambda outputs=outputs: outputs()[0].sum().backward())
                gib = peak_memory(machine.device) / 2**30
                found[f"D {width}, {chunk} rows, {name}"] = [round(1000 * took, 1), round(gib, 2)]
    return found


def engine(machine: Machine) -> Found:
    """Log-probabilities against float32 transformers, alone and packed; the loss of three steps on the same samples."""
    with joined() as world:
        policy = machine.engine(world, policy={"model": {"path": str(machine.model)}, "optimizer_config": {"lr": 1e-3}})
        sample = 32 if machine.tiny else 512
        packed = machine.batch(4 * sample, sample)
        together = torch.cat(list(policy.logprobs([packed]))).cpu()
        alone = [_part(packed, number, sample) for number in range(4)]
        apart = torch.cat([logprobs.cpu() for logprobs in policy.logprobs(alone)])
        model: Any = AutoModelForCausalLM.from_pretrained(machine.model, dtype=torch.float32)
        model = model.to(machine.device.type)
        with torch.no_grad():
            logits = model(packed.token_ids.view(4, sample).to(machine.device)).logits.log_softmax(-1).flatten(0, 1)
        exact = logits.gather(-1, packed.labels[:, None].to(machine.device))[:, 0].cpu()
        trained = packed.loss_mask > 0
        objective = build_objective(AlgorithmConfig(policy_loss_type="cross_entropy", use_kl_loss=False))
        losses = []
        for _ in range(3):
            losses.append(policy.forward_backward([packed], objective)["final_loss"].item())
            policy.step()
    return {
        "mean error": (together - exact)[trained].abs().mean().item(),
        "packed against alone": (together - apart)[trained].abs().max().item(),
        "losses": losses,
    }


def _part(batch: MicroBatch, number: int, sample: int) -> MicroBatch:
    part = slice(number * sample, (number + 1) * sample)
    columns: dict[str, Any] = {
        name: value[part]
        for name, value in vars(batch).items()
        if isinstance(value, torch.Tensor) and name not in ("cu_seqlens", "head_rows")
    }
    return MicroBatch(lengths=[sample], **columns)


def waits(machine: Machine) -> Found:
    """How often the host waits for the GPU in one micro-batch; torch warns of each."""
    with joined() as world:
        policy = machine.engine(world)
        objective, batch = build_objective(AlgorithmConfig(use_kl_loss=False)), machine.batch(256, 64)
        policy.forward_backward([batch], objective)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if machine.device.type == "cuda":
                torch.cuda.set_sync_debug_mode("warn")
            policy.forward_backward([batch], objective)
            if machine.device.type == "cuda":
                torch.cuda.set_sync_debug_mode("default")
    synchronized = [one for one in caught if "called a synchronizing CUDA operation" in str(one.message)]
    waited = [f"{one.filename}:{one.lineno}" for one in synchronized]
    return {"waits": len(waited), "where": sorted(set(waited)), "counted": machine.device.type == "cuda"}


def _step(policy: PolicyEngine, batches: list[MicroBatch], objective: Objective) -> tuple[float, float]:
    """Return loss and norm of the gradient."""
    loss = policy.forward_backward(batches, objective)["final_loss"].item()
    return loss, policy.step().grad_norm


def checkpoint(machine: Machine) -> Found:
    """Seconds of saving, of the copy after which training goes on, and of loading; whether the next step is bitwise the same."""
    with joined() as world, tempfile.TemporaryDirectory() as place:
        policy, objective = machine.engine(world), build_objective(AlgorithmConfig(use_kl_loss=False))
        found, step = Found(), partial(_step, policy, [machine.batch(256, 64)], objective)
        step()
        for name, run in {
            "save": lambda: policy.save(Path(place), world.control),
            "snapshot": policy.snapshot,
            "snapshot again": policy.snapshot,
        }.items():
            began = time.monotonic()
            run()
            found[name] = round(time.monotonic() - began, 2)
        before = step()
        began = time.monotonic()
        policy.restore(Path(place))
        found["restore"] = round(time.monotonic() - began, 2)
        found["bitwise"] = step() == before
        found["gib"] = round(sum(path.stat().st_size for path in Path(place).rglob("*") if path.is_file()) / 2**30, 2)
    return found


def weights_between(machine: Machine) -> Found:
    """Seconds per GiB of weights from process to process, whether the bytes are the same, and whether a sender outlives its receiver.

    Over NCCL both are on the one GPU, each with a host id of its own (NCCL_HOSTID): else NCCL refuses two ranks of a GPU.
    """
    size, spawn = (1 << 22 if machine.tiny else 1 << 30), multiprocessing.get_context("spawn")
    found = Found()
    with tempfile.TemporaryDirectory() as place:
        for name, dies in (("whole", False), ("receiver dies", True)):
            ends, answers = spawn.Pipe(), spawn.Queue()
            both = [
                spawn.Process(target=_one_end, args=(rank, machine.device, end, answers, size, place, dies))
                for rank, end in zip((SENDER, RECEIVER), ends, strict=True)
            ]
            for process in both:
                process.start()
            found[name] = answers.get(timeout=4 * _STAGE_S)
            for process in both:
                process.join(_STAGE_S)
            found[f"{name}, exit codes"] = [process.exitcode for process in both]
    return found


def _one_end(rank: int, device: torch.device, other: Any, answers: Any, size: int, place: str, dies: bool) -> None:
    os.environ |= {"NCCL_HOSTID": str(rank), "NCCL_SOCKET_IFNAME": "lo"}
    torch.manual_seed(0)
    files = {"file": {"tensor": torch.randint(256, (size,), dtype=torch.uint8)}}
    pair = Pair(device, rank, "127.0.0.1", _STAGE_S)
    if rank == RECEIVER:
        other.send(pair.own_rendezvous())
        pair.add_rendezvous(other.recv())
        if dies:
            pair.receive(min(PART, *sizes_of(files).values()))
            os._exit(1)
        receive_files(pair, sizes_of(files), Path(place))
        with safe_open(Path(place) / "file", "pt") as read:
            other.send(bool(torch.equal(read.get_tensor("tensor"), files["file"]["tensor"])))
        return
    pair.add_rendezvous(other.recv())
    began, failed = time.monotonic(), ""
    sending = Thread(target=lambda: other.send(pair.own_rendezvous()))
    sending.start()
    try:
        send_files(pair, files)
    except RuntimeError as error:
        failed = str(error)[:200]
    seconds = time.monotonic() - began
    sending.join()
    if failed:
        pair.close()  # as the trainer does: a group with a broken peer would keep the process from ending
    answers.put(
        {"seconds": round(seconds, 2), **({"raised": failed} if dies else {"same": other.recv(), "failed": failed})}
    )


def no_gpu(_machine: Machine) -> Found:
    """A rank that is to have a GPU, and sees none, ends."""
    try:
        with joined(on_gpu=True):
            return {"refused": False}
    except DeviceError as error:
        return {"refused": True, "message": str(error)}


CHECKS: dict[str, Callable[[Machine], Found]] = {
    check.__name__: check
    for check in (
        versions, attention, kinds, prefixes, attention_speed, head, engine, waits, checkpoint, weights_between, no_gpu,
    )
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("name", choices=CHECKS)
    parser.add_argument("model", type=Path)
    parser.add_argument("--tiny", action="store_true", help="sizes for a CPU")
    given = parser.parse_args()
    os.environ |= ALONE
    print(json.dumps(CHECKS[given.name](Machine(given.model, tiny=given.tiny))))


if __name__ == "__main__":
    main()
