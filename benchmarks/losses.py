"""What the policy losses cost, and log-probabilities with entropy from hidden states: time and peak memory per token.

    python benchmarks/losses.py [--device cpu|cuda] [--tokens N] [--vocabulary V ...] [--only head|losses]

`naive` has the logits of all tokens at the same time, `chunked` (hpcrl/trainer/models/logprobs.py) those of a slice. Time and memory are
measured in two processes, because C's allocator works in two ways: for times it keeps what is freed, as the trainer's does; for
memory it gives back everything at once, so that what is resident is what is in use. Memory is what the high-water mark, set back just before, rises above what was held: the kernel's VmHWM, on a GPU torch's. Times are medians: on the
CPU the processor time of a single thread, which depends little on what else the machine does.
"""

from __future__ import annotations

import argparse
import os
import platform
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from statistics import median

import torch

from hpcrl.algorithms.losses import POLICY_LOSSES, Tokens
from hpcrl.algorithms.reductions import weighted_sum
from hpcrl.config import AlgorithmConfig
from hpcrl.trainer.loss import build_policy_loss
from hpcrl.trainer.models.logprobs import token_logprobs

_KEEP = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(1 << 30)}
_GIVE_BACK = {"MALLOC_MMAP_THRESHOLD_": str(64 << 10), "MALLOC_TRIM_THRESHOLD_": str(64 << 10)}
_SMALL = 8
_SAMPLE = 1024
_ON = {"cpu": (512, 896, 128, torch.float32), "cuda": (16384, 4096, 1024, torch.bfloat16)}
"""Device to tokens, hidden size, rows of a slice and number type."""


@dataclass(frozen=True)
class Case:
    """What one process measures.

    Attributes:
        loss: a policy loss; None: log-probabilities and entropy.
        chunk_rows: tokens whose logits exist at the same time.
        backward: also the gradient.
    """

    device: str
    tokens: int
    repetitions: int
    loss: str | None = None
    backward: bool = True
    vocabulary: int = 0
    hidden: int = 0
    chunk_rows: int = 0


@dataclass(frozen=True)
class Cost:
    """Seconds and bytes of one pass over all tokens."""

    seconds: float
    memory: float


def head(case: Case) -> Callable[[int], None]:
    dtype = _ON[case.device][3]
    hidden_PD = torch.randn(case.tokens, case.hidden, dtype=dtype, device=case.device).requires_grad_(case.backward)
    head_VD = torch.randn(case.vocabulary, case.hidden, dtype=dtype, device=case.device) / case.hidden**0.5
    head_VD.requires_grad_(case.backward)
    labels_P = torch.randint(case.vocabulary, (case.tokens,), device=case.device)

    def run(tokens: int) -> None:
        logprobs_P, entropies_P = token_logprobs(hidden_PD[:tokens], head_VD, labels_P[:tokens], 1.0, case.chunk_rows)
        if case.backward:
            (logprobs_P.sum() + 0.01 * entropies_P.sum()).backward()
            hidden_PD.grad = head_VD.grad = None

    return run


def loss(case: Case) -> Callable[[int], None]:
    name = str(case.loss)
    policy_loss = build_policy_loss(AlgorithmConfig(policy_loss_type=name))
    logprobs_P = (-torch.rand(case.tokens, device=case.device) * 3).requires_grad_(case.backward)
    near_P = [logprobs_P.detach() + 0.1 * torch.randn(case.tokens, device=case.device) for _ in range(2)]
    advantages_P = torch.randn(case.tokens, device=case.device)
    mask_P = torch.ones(case.tokens, device=case.device)

    def run(tokens: int) -> None:
        lengths = [min(_SAMPLE, tokens)] * max(1, tokens // _SAMPLE)
        now, old, rollout, advantages, mask = (
            values[:tokens] for values in (logprobs_P, *near_P, advantages_P, mask_P)
        )
        loss_P, _ = policy_loss(Tokens(now, old, rollout, advantages, mask, torch.tensor(lengths, device=case.device)))
        if case.backward:
            weighted_sum(loss_P, mask / tokens).backward()
            logprobs_P.grad = None

    return run


def seconds(case: Case) -> float:
    """Return the median duration of a pass."""
    run, durations = _prepared(case), []
    clock = time.process_time if case.device == "cpu" else time.perf_counter
    with torch.set_grad_enabled(case.backward):
        run(case.tokens)
        for _ in range(case.repetitions):
            _wait(case.device)
            began = clock()
            run(case.tokens)
            _wait(case.device)
            durations.append(clock() - began)
    return median(durations)


def memory(case: Case) -> float:
    """Return the bytes of a pass."""
    run = _prepared(case)
    with torch.set_grad_enabled(case.backward):
        return _peak(lambda: run(case.tokens), case.device)


def _prepared(case: Case) -> Callable[[int], None]:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    run = head(case) if case.loss is None else loss(case)
    with torch.set_grad_enabled(case.backward):
        run(min(_SMALL, case.tokens))  # libraries are loaded, and have memory of their own
    return run


def _peak(run: Callable[[], None], device: str) -> float:
    """Return by how many bytes the peak of `run` is above what was held before."""
    if device == "cuda":
        _wait(device)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        _wait(device)
        return torch.cuda.max_memory_allocated() - before
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM becomes VmRSS
    before = _status("VmRSS")
    run()
    return _status("VmHWM") - before


def _status(name: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(float(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


class Processes:
    """Two processes that measure, one after the other."""

    def __init__(self, stack: ExitStack) -> None:
        self._timing, self._weighing = (stack.enter_context(_process(how)) for how in (_KEEP, _GIVE_BACK))

    def measure(self, case: Case) -> Cost:
        return Cost(self._timing.submit(seconds, case).result(), self._weighing.submit(memory, case).result())


@contextmanager
def _process(environment: dict[str, str]) -> Iterator[ProcessPoolExecutor]:
    os.environ.update(environment)
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        process.submit(os.getpid).result()  # starts it, with this environment
        yield process


def head_rows(arguments: argparse.Namespace, processes: Processes) -> Iterable[list[str]]:
    tokens, chunk = arguments.tokens, arguments.chunk
    yield [
        "vocabulary",
        "pass",
        "naive µs/token",
        "chunked µs/token",
        "ratio",
        "naive KiB/token",
        "chunked KiB/token",
        "ratio",
    ]
    for vocabulary in arguments.vocabulary:
        for backward, name in ((False, "forward"), (True, "forward + backward")):
            case = Case(
                arguments.device, tokens, arguments.repetitions, None, backward, vocabulary, arguments.hidden, tokens
            )
            naive, chunked = (processes.measure(one) for one in (case, replace(case, chunk_rows=chunk)))
            yield [
                str(vocabulary),
                name,
                *_pair(naive.seconds / tokens * 1e6, chunked.seconds / tokens * 1e6),
                *_pair(naive.memory / tokens / 1024, chunked.memory / tokens / 1024),
            ]


def loss_rows(arguments: argparse.Namespace, processes: Processes) -> Iterable[list[str]]:
    tokens = arguments.loss_tokens
    yield ["policy loss", "ns/token", "bytes/token"]
    for name in POLICY_LOSSES:
        cost = processes.measure(Case(arguments.device, tokens, arguments.repetitions, name))
        yield [f"`{name}`", f"{cost.seconds / tokens * 1e9:.0f}", f"{cost.memory / tokens:.0f}"]


def _pair(naive: float, chunked: float) -> list[str]:
    return [f"{naive:.0f}", f"{chunked:.0f}", f"{chunked / naive:.2f}"]


def show(rows: Iterable[list[str]]) -> None:
    for at, row in enumerate(rows):
        print(f"| {' | '.join(row)} |", flush=True)
        if at == 0:
            print("|---" * len(row) + "|")
    print()


def report(arguments: argparse.Namespace, dtype: torch.dtype, processes: Processes) -> None:
    if arguments.only != "losses":
        sizes = f"{arguments.tokens} tokens of {arguments.hidden} numbers, {dtype}, slices of {arguments.chunk} tokens"
        print(f"Log-probabilities and entropy: {sizes}\n")
        show(head_rows(arguments, processes))
    if arguments.only != "head":
        print(f"Policy losses: {arguments.loss_tokens} tokens in samples of {_SAMPLE}, float32, forward and backward\n")
        show(loss_rows(arguments, processes))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=list(_ON), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", choices=["head", "losses"])
    parser.add_argument("--vocabulary", type=int, nargs="+", default=[32_000, 150_000], metavar="V")
    parser.add_argument("--tokens", type=int, help="of log-probabilities (default: 512 on the CPU, 16384 on a GPU)")
    parser.add_argument("--hidden", type=int, help="size of a hidden state (default: 896; 4096)")
    parser.add_argument(
        "--chunk", type=int, help="rows of a slice (default: 128; 1024, as trainer.logprobs_chunk_size)"
    )
    parser.add_argument("--loss-tokens", type=int, default=1 << 18, help="of policy losses (default: %(default)s)")
    parser.add_argument("--repetitions", type=int, default=3, help="of which the median counts (default: %(default)s)")
    arguments = parser.parse_args()
    tokens, hidden, chunk, dtype = _ON[arguments.device]
    arguments.tokens, arguments.hidden = arguments.tokens or tokens, arguments.hidden or hidden
    arguments.chunk = arguments.chunk or chunk
    where = torch.cuda.get_device_name() if arguments.device == "cuda" else platform.processor() or platform.machine()
    print(f"{where}, {os.cpu_count()} cores, Python {platform.python_version()}, torch {torch.__version__}\n")
    with ExitStack() as stack:
        report(arguments, dtype, Processes(stack))


if __name__ == "__main__":
    main()
