"""One vLLM server of a rollout worker: started, watched and ended as its child.

It listens on a unix socket in the worker's scratch directory, so it opens no TCP port and can find none taken. Its temporary
files, the sockets between its own processes included, lie there too.
"""

from __future__ import annotations

import json
import os
import re
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx

from hpcrl.config import Config, InferenceEngineConfig
from hpcrl.config.sections.generator import MOST_KEPT
from hpcrl.config.sections.model import LORA_RANKS, Pretrained, rope_parameters
from hpcrl.engines.vllm.address import Address, Listen
from hpcrl.engines.vllm.main import HEADLESS, PARENT
from hpcrl.engines.vllm.middleware import LEASED, RUN_NAME, TOKEN_FILE
from hpcrl.engines.vllm.processes import computes, group_of, shared_memory
from hpcrl.errors import ConfigError, EngineError
from hpcrl.rollout.engines.base import Engine, Launched
from hpcrl.rundir.commit import make_directory
from hpcrl.rundir.evaluations import MOST_OPEN
from hpcrl.rundir.layout import Run
from hpcrl.runtime.heartbeat import SuspendAwareClock
from hpcrl.runtime.numa import nodes_of_gpus
from hpcrl.runtime.scratch import note_shared_memory, remove_shared_memory
from hpcrl.runtime.token import bearer, read_token_file

_CPU_CACHE_BYTES = 256 << 20  # vLLM would take, and zero, a large share of the machine's memory
_POLL_S = 0.1
_LOOK_S = 2.0
_ANSWER_S = 5.0
_GRACE_S = 5.0
_TAIL_LINES = 15
_ONE_NODE = {"VLLM_HOST_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
_UNRECORDED = 100  # iterations before those that are recorded: the first requests come one by one
_ERROR_LINE = re.compile(r"((?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Exit|Interrupt)): \S|error: \S")
_USAGE = 2  # exit status of argparse
_REFUSED = re.compile(
    r"ValidationError: \d+ validation errors? for "
)  # of vLLM's configuration, unsupported models included
_UNREACHABLE = re.compile(r"ConnectionError|ConnectError|Timeout|LocalEntryNotFoundError|OfflineModeIsEnabled")
_HARMLESS = re.compile(r"^(?:\(\w+ pid=\d+\) )?(?:WARNING|INFO|DEBUG) ")
_PREFIX = re.compile(r"^\(\w+ pid=\d+\) (?:[A-Z]+ [\d-]+ [\d:]+ \[[\w.]+:\d+\] ?)?")


@dataclass(frozen=True)
class EngineNode:
    """One node's part of an engine that is on several.

    Attributes:
        nodes: that it is on.
        index: of this one among them; the first has the server.
        address, port, rpc_port: of the first, where all meet.
    """

    nodes: int
    index: int
    address: str
    port: int
    rpc_port: int

    @property
    def options(self) -> dict[str, Any]:
        """vLLM's options."""
        return {
            "nnodes": self.nodes,
            "node-rank": self.index,
            "master-addr": self.address,
            "master-port": self.port,
            "data-parallel-rpc-port": self.rpc_port,
            "distributed-executor-backend": "mp",
            HEADLESS.removeprefix("--"): True if self.index else None,
        }


@dataclass(frozen=True)
class ServerOptions:
    """Options of one replica's server.

    Attributes:
        model: has the initial weights and the tokenizer.
        max_model_len: tokens of prompt and response together at most.
        on_cpu: whether this is vLLM's CPU build.
        memory_share: of each GPU's memory, that it may use.
        run_name, token_file: who may call it.
        model_config_kwargs: entries of the model's config.json that are replaced.
        rope_scaling, rope_theta: replace the model's rotary positions; empty and None: the model's own.
        lora_rank: largest rank of the adapters that it loads; 0: it gets whole policies.
        lora_slots, lora_count: adapters that requests may use at the same time, and that are loaded.
        recorded_iterations: that it has Nsight Systems record, under which this process runs; 0: none.
        sleeps: whether it leaves its GPUs to the trainer in between.
        listen: where it serves others than this process, one at a time; None: this one alone, at a socket.
        node: of an engine on several nodes; None: it is on one.
        records_experts: whether it returns the experts of tokens.
        image_processor_kwargs: data.image_processor_kwargs; it makes room for the largest images that they allow.
        deterministic: whether its kernels compute a sample alike whatever is in its batch.
    """

    model: Pretrained
    engine: InferenceEngineConfig
    seed: int
    max_model_len: int
    on_cpu: bool
    run_name: str
    token_file: Path
    memory_share: float = 0.9
    model_config_kwargs: dict[str, Any] = field(default_factory=dict)
    rope_scaling: dict[str, Any] = field(default_factory=dict)
    rope_theta: float | None = None
    lora_rank: int = 0
    lora_slots: int = 1
    lora_count: int = 1
    recorded_iterations: int = 0
    sleeps: bool = False
    listen: Listen | None = None
    node: EngineNode | None = None
    records_experts: bool = False
    image_processor_kwargs: Mapping[str, Any] = field(default_factory=dict)
    deterministic: bool = False

    @property
    def sleep_level(self) -> int:
        """vLLM's: 1 keeps weights in host memory, where some do not come with each version; 2 drops them.

        Adapters leave out the model's own weights. Published weights leave out those of drafts, which vLLM has in the same memory.
        """
        return 1 if self.lora_rank or self.engine.speculative.method not in (None, "ngram") else 2


class Server(Launched):
    """A running vLLM server. Call from the main thread: the server dies with the thread that started it.

    Args:
        directory: for its sockets and temporary files; only this user can enter it.
        log: file to which its output is appended.

    Attributes:
        socket: path of the unix socket, where it listens at one.
        address: where it answers.
    """

    def __init__(self, options: ServerOptions, directory: Path, log: Path) -> None:
        self._log, self._options, self._directory = log, options, directory
        self._computing: list[int] | None = None
        self._lost, self._looked = False, float("-inf")
        self._recorded = options.recorded_iterations > 0
        self.socket = directory / "http"
        self.address = options.listen.address if options.listen else Address(socket=self.socket)
        self._headers = bearer(read_token_file(options.token_file), options.run_name)
        make_directory(log.parent)
        with log.open("ab") as file:
            self._start = file.tell()
            self._process = subprocess.Popen(
                _command(options, self.socket),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=_environment(options, directory),
                cwd=directory,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def alive(self) -> bool:
        """Return whether the server is there, and each process that computed when it was ready: of several cores it misses none."""
        if time.monotonic() - self._looked > _LOOK_S:
            self._looked = time.monotonic()
            if self._computing is not None:
                self._lost = self._lost or not all(map(computes, self._computing))
            else:
                self._note_shared_memory()
        return not self._lost and self._process.poll() is None

    def _note_shared_memory(self) -> None:
        """Write the names of shared memory to remove, for the case that this process is killed."""
        if found := shared_memory(self.pid):
            note_shared_memory(self._directory, found)

    def wait_ready(self, timeout_s: float, still_waiting: Callable[[], object] = lambda: None) -> None:
        clock = SuspendAwareClock(2 * _ANSWER_S)
        with httpx.Client(**self.address.client(), headers=self._headers, timeout=_ANSWER_S) as http:
            while clock.now() < timeout_s:
                still_waiting()
                if not self.alive():
                    raise self._refusal() or self.failure("did not start")
                try:
                    if http.get("/health").status_code == 200:
                        if self._recorded and http.post("/start_profile").status_code != 200:
                            raise self.failure("does not record itself")
                        self._note_shared_memory()
                        self._computing = [pid for pid in group_of(self.pid) if computes(pid)]
                        return
                except httpx.TransportError:
                    pass
                time.sleep(_POLL_S)
        raise self.failure(
            f"did not answer within {timeout_s:.0f} s (generator.inference_engine.start_timeout_seconds)"
        )

    def connect(self, *, version: int = 0, replica: str = "") -> Engine:
        from hpcrl.engines.vllm.client import (
            EngineClient,  # torch, which takes seconds to import, while the server starts
        )

        engine = self._options.engine
        return EngineClient(
            self.socket, self._headers, version, replica=replica, keep_cache=engine.keep_cache_on_update,
            sleep_level=self._options.sleep_level, share=self._options.memory_share, graphs=not engine.runs_eagerly(on_cpu=self._options.on_cpu),
            adapters=self._options.lora_rank > 0,
        )  # fmt: skip

    def failure(self, what: str) -> EngineError:
        """Return the error that its log shows first, and the end of the log."""
        status = self._process.poll()
        ended = "" if status is None else f" (exit status {status})"
        if status is None and self._lost:
            ended = " (one of its processes has ended, and its server has not)"
        lines = [line for line in self._said().splitlines() if line.strip()]
        errors = (at for at, line in enumerate(lines) if _ERROR_LINE.search(line) and not _HARMLESS.match(line))
        at = next(errors, len(lines))
        first = _PREFIX.sub("", " ".join(lines[at : at + 1])).strip() or "no error in its log"
        if _REFUSED.search(first):  # what is wrong stands below it
            first += f": {_PREFIX.sub('', ' '.join(lines[at + 1 : at + 2])).strip()}"
        tail = "\n".join(f"  | {_PREFIX.sub('', line)}" for line in lines[-_TAIL_LINES:])
        return EngineError(f"the inference engine {what}{ended}: {first}\n{tail}\n  whole log: {self._log}")

    def _refusal(self) -> ConfigError | None:
        """Return the error where vLLM refuses its options or the model, which no further start changes; None: another reason."""
        said = self._said()
        refused = self._process.poll() == _USAGE or _REFUSED.search(said)
        return ConfigError(str(self.failure("did not start"))) if refused and not _UNREACHABLE.search(said) else None

    def stop(self) -> None:
        if self._process.poll() is None:
            if self._computing is None:
                self._note_shared_memory()
            self._process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_GRACE_S)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        remove_shared_memory(self._directory)

    def _said(self) -> str:
        with self._log.open("rb") as file:
            file.seek(self._start)
            return file.read().decode(errors="replace")


def _command(options: ServerOptions, socket: Path) -> list[str]:
    engine = options.engine
    # vLLM 0.31 sets a seeded request's random numbers back after each part of its prompt, which it cannot on a processor: the engine dies
    chunked = engine.enable_chunked_prefill and not options.on_cpu
    arguments: dict[str, Any] = {
        **(options.listen.options if options.listen else {"uds": str(socket)}),
        "middleware": "hpcrl.engines.vllm.middleware.TokenRequired",
        "enable-scale-out": True,  # the token-in token-out route
        "disable-uvicorn-access-log": True,
        "uvicorn-log-level": "warning",
        "model": options.model.path,
        "revision": options.model.revision,
        "tokenizer-revision": options.model.revision,
        "seed": options.seed,
        "max-model-len": options.max_model_len,
        "dtype": engine.model_dtype,
        "tensor-parallel-size": engine.tensor_parallel_size,
        "pipeline-parallel-size": engine.pipeline_parallel_size,
        "data-parallel-size": engine.data_parallel_size,
        "enable-expert-parallel": True if engine.expert_parallel_size > 1 else None,
        "quantization": engine.quantization,
        "attention-backend": "FLASHINFER" if engine.use_flashinfer else None,
        "speculative-config": engine.speculative.options,
        "enable-prefix-caching": engine.enable_prefix_caching,
        "enable-chunked-prefill": chunked,
        "max-num-batched-tokens": max(engine.max_num_batched_tokens, 0 if chunked else options.max_model_len),
        "max-num-seqs": engine.max_num_seqs,
        "enforce-eager": engine.runs_eagerly(on_cpu=options.on_cpu),
        "gpu-memory-utilization": options.memory_share,
        # vLLM's build for CPUs refuses the option, and takes the calls as if it had it
        "enable-sleep-mode": True if options.sleeps and not options.on_cpu else None,
        "logprobs-mode": "processed_logprobs",  # of the distribution that is sampled from: after temperature, top_k, top_p, ...
        "max-logprobs": MOST_KEPT,
        "weight-transfer-config": {"backend": "shared_fs"},
        "worker-extension-cls": "hpcrl.engines.vllm.weight_engine.WeightProof",
        "enable-return-routed-experts": True if options.records_experts else None,
        "mm-device-do-normalize": False,  # images come as the trainer has them, normalized
        "mm-processor-kwargs": dict(options.image_processor_kwargs) or None,  # how large they are at most
        **_of_adapters(options),
        **_binding(options),
    }
    if options.node:
        arguments |= options.node.options
    if options.recorded_iterations:
        window = {"delay_iterations": _UNRECORDED, "max_iterations": options.recorded_iterations}
        arguments["profiler-config"] = {"profiler": "cuda", **window}
    if options.on_cpu:
        arguments["kv-cache-memory-bytes"] = _CPU_CACHE_BYTES
    arguments |= {name.replace("_", "-"): value for name, value in engine.engine_init_kwargs.items()}
    entries = {**options.model_config_kwargs, **arguments.get("hf-overrides", {})}
    if options.rope_scaling or options.rope_theta is not None:
        entries["rope_parameters"] = _rope(options)
    if entries:
        arguments["hf-overrides"] = entries
    return [
        sys.executable,
        "-m",
        "hpcrl.engines.vllm.main",
        *(text for item in arguments.items() for text in _argument(*item)),
    ]


def _of_adapters(options: ServerOptions) -> dict[str, Any]:
    if not options.lora_rank:
        return {}
    return {
        "enable-lora": True,
        "max-lora-rank": min(rank for rank in LORA_RANKS if rank >= options.lora_rank),
        "max-loras": options.lora_slots,
        "max-cpu-loras": max(options.lora_count, options.lora_slots),
        "fully-sharded-loras": options.engine.fully_sharded_loras,
    }


def _binding(options: ServerOptions) -> dict[str, Any]:
    """Return what binds each process of the engine to the NUMA node of its GPU, where it can be."""
    if options.on_cpu or "numa_bind" in options.engine.engine_init_kwargs:
        return {}
    nodes = nodes_of_gpus(os.environ.get("CUDA_VISIBLE_DEVICES", ""))
    return {"numa-bind": True, "numa-bind-nodes": nodes} if nodes else {}


def _rope(options: ServerOptions) -> dict[str, Any]:
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(options.model.path, trust_remote_code=False, **options.model.at_revision)
    own = getattr(config, "rope_parameters", None)
    if not own or "rope_theta" not in own:
        raise ConfigError(
            f"generator.rope_scaling and generator.rope_theta: the model at {options.model} has no rotary positions, or other "
            "ones per kind of layer; leave them out"
        )
    return rope_parameters(own, options.rope_scaling, options.rope_theta)


def _argument(name: str, value: Any) -> list[str]:
    if value is None:
        return []
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--no-{name}"]
    if isinstance(value, list):
        return [f"--{name}", *map(str, value)]
    return [f"--{name}", json.dumps(value) if isinstance(value, dict) else str(value)]


def _environment(options: ServerOptions, directory: Path) -> dict[str, str]:
    environment = {
        **os.environ,
        "VLLM_SERVER_DEV_MODE": "1",  # the weight-update routes
        **(_ONE_NODE if options.node is None else {"VLLM_HOST_IP": os.environ["HPCRL_ADDRESS"]}),
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_RPC_BASE_PATH": str(directory),
        "TMPDIR": str(directory),
        TOKEN_FILE: str(options.token_file.absolute()),
        RUN_NAME: options.run_name,
        PARENT: str(os.getpid()),
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # see main.py
    }
    if options.listen:
        environment[LEASED] = "1"
    if options.deterministic:
        environment["VLLM_BATCH_INVARIANT"] = "1"
    if options.lora_rank:
        environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
    # on GPUs its log names the attention backend, the model runner and the size of the cache
    level = "WARNING" if options.on_cpu else "INFO"
    environment["VLLM_LOGGING_LEVEL"] = environment.get("VLLM_LOGGING_LEVEL") or level
    if not options.on_cpu:
        # it gives no log-probabilities of what it samples from, which all requests want, and has its kernels compiled
        environment["VLLM_USE_FLASHINFER_SAMPLER"] = environment.get("VLLM_USE_FLASHINFER_SAMPLER") or "0"
        environment.pop("OMP_NUM_THREADS", None)  # where it is unset, vLLM chooses one thread per worker
    if options.on_cpu:
        environment |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        if options.engine.gpus == 1:
            environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = (
                "0"  # the engine core runs the model itself: one process less
            )
    if options.on_cpu and options.engine.runs_eagerly(on_cpu=True):
        environment["TORCHDYNAMO_DISABLE"] = "1"  # else the sampler is compiled at the first request, for seconds
    else:
        # by default below the home, which may be missing, read-only, small, or shared by nodes of different GPUs
        kept = compile_cache() or directory
        for name in ("VLLM_CACHE_ROOT", "TRITON_CACHE_DIR", "FLASHINFER_WORKSPACE_BASE"):
            environment[name] = environment.get(name) or str(kept / name.partition("_")[0].lower())
    return environment


def compile_cache() -> Path | None:
    """Return the node's directory for kernels that vLLM, Triton and FlashInfer compile; None where another user has made it.

    It lies in the temporary directory and stays there, so that later engines on the node compile nothing again.
    """
    path = Path(tempfile.gettempdir(), f"hpcrl-cache-{os.getuid()}")
    with suppress(FileExistsError):
        path.mkdir(mode=0o700, parents=True)
    found = path.lstat()
    return path if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022 else None


def server_options(run: Run, config: Config, replica: int = 0) -> ServerOptions:
    """Return the options of a replica's engine."""
    return _options(config, run.name, run.token, shared=config.shares_gpus(replica))


def served_options(config: Config, key_file: Path, listen: Listen) -> ServerOptions:
    """Return the options of an engine that runs of this configuration may use as an external one."""
    return replace(_options(config, "", key_file, shared=False), listen=listen, recorded_iterations=0)


def _options(config: Config, run_name: str, token_file: Path, *, shared: bool) -> ServerOptions:
    generator, (rope_scaling, rope_theta) = config.generator, config.engine_rope
    versions, evaluates = config.trainer.fully_async.kept_versions, config.trainer.eval_interval > 0
    return ServerOptions(
        model=config.trainer.policy.model.pretrained,
        engine=generator.inference_engine,
        memory_share=config.engine_memory_share(shared=shared),
        seed=config.sampling_seed,
        max_model_len=config.max_model_len,
        on_cpu=config.slurm.gpus == 0,
        run_name=run_name,
        token_file=token_file,
        model_config_kwargs=config.trainer.policy.config_overrides,
        rope_scaling=rope_scaling,
        rope_theta=rope_theta,
        lora_rank=config.trainer.policy.model.lora.largest_rank if config.loads_adapters else 0,
        lora_slots=versions + evaluates,
        lora_count=versions + evaluates * MOST_OPEN,
        recorded_iterations=config.trainer.profiler.nsys_engine_iterations,
        sleeps=shared,
        records_experts=config.trainer.policy.experts.router_replay != "none",
        image_processor_kwargs=config.data.image_processor_kwargs,
        deterministic=config.trainer.deterministic,
    )
