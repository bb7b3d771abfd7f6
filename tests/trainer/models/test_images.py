"""Images and a video on ranks of which some have none: each weight's gradient is that of all samples, and nobody waits for ever."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hpcrl.trainer.backends.fsdp.model import PackedPolicy
from hpcrl.trainer.models.forward import ForwardConfig
from hpcrl.trainer.models.hf import ModelSource
from hpcrl.trainer.models.packed.attention import PACKED
from hpcrl.trainer.packing import pack
from tests.rows import group_meta, write_group
from tests.trainer.ranks import Ranks
from tests.vision.material import make_rows, write_model


@pytest.mark.parametrize(
    ("kind", "dtype", "bound"),
    [
        ("qwen3_vl", "fp32", 1e-4),
        pytest.param("qwen3_vl", "bf16", 0.1, marks=pytest.mark.faults_slow),
        ("qwen2_5_vl", "fp32", 1e-4),
    ],
)
def test_one_rank_has_all_images(tmp_path: Path, two: Ranks, kind: str, dtype: str, bound: float) -> None:
    """The embedding of the second kind is not tied to the head."""
    model = write_model(tmp_path / "model", kind)
    rows = make_rows(model, (1,), (2, 3, 4, 5), (), ())
    lengths, count = [len(row.token_ids) for row in rows], len(rows)
    meta = group_meta(
        group_id="g", path="g", rewards=[0.0] * count, lengths=lengths, response_lengths=[2] * count,
        stop_reasons=["stop"] * count, data_source="drawn", seconds=1.0,
    )  # fmt: skip
    write_group(tmp_path / "g", rows, meta)
    out = tmp_path / "out"
    options = {"model": str(model), "group": str(tmp_path / "g"), "out": str(out), "dtype": dtype}
    two.play([("vision_scenarios:unequal", options)])
    whole = ModelSource(path=str(model), role="trainer.policy").whole(torch.float32, PACKED)
    policy = PackedPolicy(whole, ForwardConfig(temperature=0.9, chunk_rows=64))
    for name, own in (("mixed", rows), ("plain", [*rows[2:], *rows[2:]])):
        batch = pack(own).whole()
        whole.zero_grad()
        (policy.run(batch)[0] * batch.loss_mask).sum().backward()
        found = load_file(f"{out}-{name}")
        for key, parameter in whole.named_parameters():
            if key not in found:  # tied to another
                continue
            expected = parameter.grad
            assert expected is not None
            largest = float(expected.abs().max())
            torch.testing.assert_close(found[key], expected, rtol=0, atol=bound * largest + 1e-6, msg=f"{name} {key}")
            assert largest > 0 or name == "plain", key
