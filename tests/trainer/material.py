"""Random samples and batches, and real torchrun."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from hpcrl.data.samples import write_group
from hpcrl.run.commit import write_json
from hpcrl.run.layout import Run
from hpcrl.types import Batch, GroupMeta, Sample

VOCABULARY = 18
REPOSITORY = Path(__file__).parents[2]


def make_sample(generator: torch.Generator, length: int, prompt: int) -> Sample:
    """Return a sample whose policy chose everything after the first `prompt` tokens, but one in the middle (as of a tool)."""
    mask = (torch.arange(length) >= prompt).float()
    if length - prompt > 4:
        mask[prompt + 2] = 0
    return Sample(
        token_ids=torch.randint(0, VOCABULARY, (length,), generator=generator),
        loss_mask=mask,
        rollout_logprobs=-3 * torch.rand(length, generator=generator) * mask,
        versions=torch.where(mask > 0, 0, -1).int(),
        rewards=torch.zeros(length),
        stop_reason="stop",
    )


def make_batch(run: Run, step: int, groups: int, size: int) -> Batch:
    """Write random groups and their batch into the run directory; the same for the same step."""
    generator = torch.Generator().manual_seed(step)
    metas = []
    for number in range(groups):
        lengths = torch.randint(5, 16, (size,), generator=generator).tolist()
        rewards = torch.rand(size, generator=generator).tolist()
        samples = [make_sample(generator, length, prompt=3) for length in lengths]
        for sample, reward in zip(samples, rewards, strict=True):
            sample.rewards[-1] = reward
        meta = GroupMeta(
            group_id=f"g{step}-{number}",
            kind="train",
            replica=0,
            path=f"samples/0/g{step}-{number}.safetensors",
            rewards=rewards,
            lengths=lengths,
            response_lengths=[int(sample.loss_mask.sum()) for sample in samples],
            stop_reasons=["stop"] * size,
            oldest_version=step - 1,
            newest_version=step - 1,
            data_source="random",
            seconds=1.0,
        )
        write_group(run.path / meta.path, samples, meta)
        metas.append(meta)
    batch = Batch(step, metas, cursor=step * groups)
    write_json(run.batch(step), batch.to_json())
    return batch


def expect_same_metrics(
    found: Mapping[str, float], expected: Mapping[str, float], *, absolute: float, relative: float | None = None
) -> None:
    """Compare what was computed in another order, or on other ranks.

    A token whose ratio lies on the bound of a clip is clipped or not by rounding, which also differs between processors: it may be one of ten.
    """
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        bound = max(absolute, 0.1) if "clip" in name else absolute
        assert found[name] == pytest.approx(value, rel=relative, abs=bound, nan_ok=True), name


def make_run(path: Path) -> Run:
    path.mkdir(parents=True)
    (path / "config.toml").touch()
    return Run.open(path)


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY), "HPCRL_ATTEMPT": "1"}


def torchrun(ranks: int, script: Path, *arguments: object) -> list[str]:
    """Return the command that starts `script` on a port that nobody else uses."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return [*launcher, str(script), *map(str, arguments)]


def run_ranks(ranks: int, *arguments: object, script: str = "scenarios.py") -> subprocess.CompletedProcess[str]:
    command = torchrun(ranks, Path(__file__).parent / script, *arguments)
    return subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=300, check=False)
