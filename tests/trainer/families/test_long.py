"""Long samples and many steps, of the trainer alone."""

from __future__ import annotations

import gc
import json
import mmap
from pathlib import Path

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from hpcrl.trainer.batching import MicroBatchLimit
from hpcrl.trainer.distributed import World
from hpcrl.trainer.loss import build_objective
from hpcrl.types import Batch
from tests.rows import with_columns, write_group
from tests.trainer.material import load, make_batch, make_run, make_sample, score, train, write_model
from tests.trainer.scenarios import ALGORITHM, make_engine

LONG = 65536
STEPS, SETTLED = 1000, 250


def resident() -> float:
    """Return the memory of this process, MiB."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE / (1 << 20)


def one_head(path: Path) -> Path:
    """Write a model of one layer and one head that takes as many tokens."""
    write_model(path)
    entries = json.loads((path / "config.json").read_text())
    sizes = {
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "layer_types": ["full_attention"],
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
    }
    Qwen2ForCausalLM(Qwen2Config.from_dict({**entries, **sizes, "max_position_embeddings": LONG})).save_pretrained(path)
    return path


@pytest.mark.faults_slow
def test_a_batch_with_a_sample_of_65536_tokens(tmp_path: Path, alone: World) -> None:
    """It is read, scored and trained, in a micro-batch of its own, beside short ones that share theirs; one by one the loss is the same."""
    model, run, draw = one_head(tmp_path / "model"), make_run(tmp_path / "run"), torch.Generator().manual_seed(0)
    samples = [make_sample(draw, length, prompt=3) for length in (LONG, 9, 2000, 700)]
    (meta,) = make_batch(run, step=1, groups=1, size=4).groups
    lengths, trained = [len(each.token_ids) for each in samples], [int(each.loss_mask.sum()) for each in samples]
    meta = write_group(
        run.path / meta.path, samples, with_columns(meta, lengths=lengths, response_lengths=trained, shared=[])
    )
    losses = []
    for tokens in (8192, 1):
        (mini,) = load(run, Batch(1, [meta], 1), ALGORITHM, 1, MicroBatchLimit(1, tokens, quadratic=0.01), alone)
        assert [len(part) for part in mini.plan.train[0]] == ([1, 3] if tokens > 1 else [1] * 4)
        engine = make_engine(alone, str(model), {})
        score(engine, mini, MicroBatchLimit(1, tokens), old=True, reference=True)
        mini.rows.scores.advantages = torch.ones(len(mini.rows.token_ids))
        losses.append(train(engine, mini, build_objective(ALGORITHM)).sums)
    assert losses[0].keys() == losses[1].keys()
    for name, value in losses[0].items():
        torch.testing.assert_close(torch.as_tensor(losses[1][name]), torch.as_tensor(value), atol=1e-3, rtol=1e-4)


@pytest.mark.faults_slow
def test_host_memory_stays_the_same_over_1000_steps(tmp_path: Path, alone: World, model_path: Path) -> None:
    """Of reading, scoring and training; tests/jobs/test_growth.py does so for whole runs."""
    run, limit = make_run(tmp_path / "run"), MicroBatchLimit(1, 64, quadratic=0.01)
    engine, objective = make_engine(alone, str(model_path), {}), build_objective(ALGORITHM)
    batches, memory = [make_batch(run, step, groups=2, size=4) for step in range(1, 9)], list[float]()
    for step in range(STEPS):
        (mini,) = load(run, batches[step % len(batches)], ALGORITHM, 2, limit, alone)
        score(engine, mini, limit, old=True, reference=True)
        mini.rows.scores.advantages = torch.ones(len(mini.rows.token_ids))
        train(engine, mini, objective)
        if step % 50 == 49:
            gc.collect()
            memory.append(resident())
    grown = memory[-1] - memory[SETTLED // 50 - 1]
    assert grown < 8, memory
