"""What the tests of the rollout worker share: tiny models, what transformers thinks of tokens, and looks at processes."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from hpcrl.config import InferenceEngineConfig
from hpcrl.config.sections.model import Pretrained
from hpcrl.data.group_file import groups_of
from hpcrl.data.model_config import ConfiguredModel
from hpcrl.data.weight_files import Probe, PublishedWeights, WeightFile, WeightReader, weight_facts
from hpcrl.engines.embedded.rollout import Embedded, EmbeddedOptions
from hpcrl.engines.vllm.processes import shared_memory
from hpcrl.engines.vllm.server import Server, ServerOptions
from hpcrl.rollout.engines.weight_check import TOLERANCES
from hpcrl.rundir.commit import begin, finish, is_committed
from hpcrl.rundir.layout import Run
from hpcrl.runtime.scratch import Scratch
from hpcrl.types import GroupMeta, Row
from tests.paths import CONFIGS, ON_GPU, ROOT
from tests.rows import read_tensors

QUICKSTART = CONFIGS / "quickstart" / "model"
RUN_NAME, TOKEN = "tested", "a-token-of-the-tests"
VOCABULARY, EOS = 18, 1
MAX_MODEL_LEN, BATCHED_TOKENS = 768, 2048
SLOWLY: dict[str, Any] = {"logits_processors": ["tests.rollout.engines.vllm.slowly:Slowly"]}
ENGINE = InferenceEngineConfig(
    model_dtype="bfloat16" if ON_GPU else "float32",
    max_num_seqs=512 if ON_GPU else 64,
    max_num_batched_tokens=BATCHED_TOKENS,
    # on a GPU a logits processor of one's own would replace the model runner that runs use
    # with a size, vLLM measures no memory while it starts, which others on the GPU would disturb
    engine_init_kwargs={"block_size": 32, **({"kv_cache_memory_bytes": 4_000_000_000} if ON_GPU else SLOWLY)},
)
MEMORY_SHARE = 0.2
PROMPT = [5, 9, 4, 12, 7]
START_S = 420.0  # of an engine, while other tests have the cores
LONG_PROMPT = [4 + (7 * i + i * i) % 13 for i in range(100)]  # fills three blocks of the prefix cache


def make_model(path: Path, seed: int, kv_heads: int = 1) -> Path:
    """Write a random model with sharp preferences, and the tokenizer of the quickstart."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=128 if ON_GPU else 64,  # heads of 64, the smallest that FlashAttention 3 has
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=kv_heads,
        max_position_embeddings=MAX_MODEL_LEN,
        tie_word_embeddings=False,
        initializer_range=0.2,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=EOS,
    )
    model = Qwen2ForCausalLM(config)
    (model.bfloat16().float() if ON_GPU else model).save_pretrained(path)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (path / name).write_bytes((QUICKSTART / name).read_bytes())
    return path


def publish(
    model: Path, target: Path, version: int, attempt: int = 1, *, probe: Probe | None = None
) -> PublishedWeights:
    """Commit a model's weights as the trainer does."""
    with closing(WeightReader(model)) as reader:
        tensors = {name: tensor for name, tensor, _ in reader}
    directory = begin(target, attempt)
    file = WeightFile(
        directory / "model-00001.safetensors", {name: tensor.to("meta") for name, tensor in tensors.items()}
    )
    digests = {name: file.write(name, tensor) for name, tensor in tensors.items()}
    file.close()
    finish(target, attempt, version=version, **weight_facts(digests, probe))
    return PublishedWeights.read(target)


def as_version(model: Path, version: int) -> PublishedWeights:
    """Return a model's weights as a version that was published, beside the model."""
    target = model.parent / "published" / f"{model.name}-v{version:06d}"
    return PublishedWeights.read(target) if is_committed(target) else publish(model, target, version)


def probe_of(model: Path) -> Probe:
    """Return the probe that a trainer of this model publishes."""
    return Probe(LONG_PROMPT[:16], logprobs(model, LONG_PROMPT[:1], LONG_PROMPT[1:16]).tolist(), "float32")


@contextmanager
def slowly(model: Path) -> Iterator[None]:
    """Let engines of the models of `model`'s folder take 0.1 s for each token."""
    file = model.parent / "slowly"  # for engines/vllm/slowly.py
    file.touch()
    try:
        yield
    finally:
        file.unlink()


def options(model: str, token_file: Path) -> ServerOptions:
    return ServerOptions(
        Pretrained(model), ENGINE, 1, MAX_MODEL_LEN, not ON_GPU, RUN_NAME, token_file, MEMORY_SHARE, sleeps=True
    )


def embedded_options(model: Path, **engine: Any) -> EmbeddedOptions:
    """Return the same for the embedded engine."""
    own = replace(ENGINE, engine_init_kwargs={}, **engine)
    return EmbeddedOptions(
        ConfiguredModel(path=str(model), role="trainer.policy"), own, MAX_MODEL_LEN, not ON_GPU, False, MEMORY_SHARE
    )


@contextmanager
def started(model: Path, *, deterministic: bool = False, **engine: Any) -> Iterator[Embedded]:
    found = Embedded(replace(embedded_options(model, **engine), deterministic=deterministic))
    try:
        found.wait_ready(START_S)
        yield found
    finally:
        found.stop()


def break_head(engine: Embedded) -> None:
    """Let the engine's next token fail in the thread that computes."""
    model, _ = engine._loaded.result()
    model.lm_head = torch.nn.Linear(1, 1)


@functools.cache
def _policy(model: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)


def distribution(model: Path, prompt: Sequence[int], said: Sequence[int], temperature: float = 1.0) -> torch.Tensor:
    """Return transformers' log-probabilities of all tokens at the places of `said`, [len(said), VOCABULARY]."""
    with torch.no_grad():
        logits = _policy(model)(torch.tensor([[*prompt, *said]])).logits[0]
    return torch.log_softmax(logits / temperature, -1)[len(prompt) - 1 : -1]


def logprobs(model: Path, prompt: Sequence[int], said: Sequence[int], temperature: float = 1.0) -> torch.Tensor:
    """Return transformers' log-probabilities of the tokens `said` after `prompt`, [len(said)]."""
    return distribution(model, prompt, said, temperature).gather(1, torch.tensor(said)[:, None])[:, 0]


def close(logprobs: torch.Tensor, others: torch.Tensor) -> bool:
    """Check that log-probabilities of the same tokens, [T] both, differ by rounding alone: each of them in float32, in the mean in bf16."""
    differences = (logprobs - others).abs()
    if ON_GPU:
        return not len(differences) or differences.mean().item() < TOLERANCES["bfloat16"]
    return bool((differences < 1e-3).all())


def processes(match: Callable[[int, list[str]], bool]) -> list[int]:
    """Return the living processes for which `match(pid, fields of /proc/<pid>/stat after the name)`."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                fields = Path(f"/proc/{name}/stat").read_text().rsplit(")", 1)[1].split()
            except OSError:
                continue
            if fields[0] != "Z" and match(int(name), fields):
                found.append(int(name))
    return found


def group_of(leader: int) -> list[int]:
    """Return the processes of the group that `leader` leads; the leader need not live any more."""
    return processes(lambda _pid, fields: int(fields[2]) == leader)


def children_of(pid: int) -> list[int]:
    return processes(lambda _pid, fields: int(fields[1]) == pid)


def wait_for(condition: Callable[[], Any], seconds: float, what: str) -> Any:
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, what
        time.sleep(0.05)
    return value


@contextmanager
def served(given: ServerOptions, log: Path, *paths: Path) -> Iterator[Server]:
    """Have a server; it finds Python's modules in `paths` too."""
    scratch = Scratch("engine")
    with pytest.MonkeyPatch.context() as patch:
        found = filter(None, [os.environ.get("PYTHONPATH")])
        patch.setenv("PYTHONPATH", os.pathsep.join([*map(str, (ROOT, *paths)), *found]))  # of the logits processor
        server = Server(given, scratch.path, log)
    try:
        server.wait_ready(START_S)
        made = shared_memory(server.pid)
        yield server
    finally:
        server.stop()
        scratch.remove()
    assert not made & set(os.listdir("/dev/shm")), "vLLM leaves some behind even when it ends by itself"


def handed_over(run: Run, replica: int) -> set[str]:
    """Return the groups whose samples a worker has written."""
    return {group.group_id for path in run.samples_of(replica).iterdir() for group in groups_of(path)}


def rows_of(run: Run, meta: GroupMeta) -> list[Row[torch.Tensor]]:
    return read_tensors(run.inside(meta.path), None, meta)
