"""A teacher with another tokenizer scores the texts of samples, and its log-probabilities go to the policy's tokens."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from hpcrl.config import Config
from hpcrl.config.scorers import scorer_sets
from hpcrl.config.sections.generator import ChatTemplateConfig
from hpcrl.config.sections.model import Pretrained
from hpcrl.data.alignment import aligner_of
from hpcrl.data.batch_file import write_batch
from hpcrl.launch.submit.teacher import check_teacher_tokens
from hpcrl.rundir.commit import write_text
from hpcrl.rundir.layout import Run
from hpcrl.trainer.distributed import World
from hpcrl.trainer.scoring.model import ScoringModel
from hpcrl.types import Batch
from tests.data.chat.forms import CHATML, made
from tests.rows import read_tensors, write_group
from tests.trainer.material import QUICKSTART as MODEL
from tests.trainer.ranks import Ranks
from tests.trainer.scoring.test_scores import FP32, OFF, batch_of, configured


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model whose tokenizer merges letters that the policy's does not."""
    place, tokenizer = tmp_path_factory.mktemp("teacher"), made("bytes", CHATML, "<|im_end|>")
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
    }
    Qwen2ForCausalLM(Qwen2Config(vocab_size=len(tokenizer), **sizes)).save_pretrained(place)
    tokenizer.save_pretrained(place)
    return place


def unlike(path: Path, teacher: Path, *settings: str) -> tuple[Run, Config, Batch]:
    """Return a run whose teacher has other tokens, and one batch, without sampling masks, which are of the policy's tokens."""
    own = ["trainer.distillation.enable=true", "trainer.distillation.cross_tokenizer=true", *settings]
    run = configured(path, OFF, *own, f"trainer.distillation.model_path={teacher}", FP32)
    batch = batch_of(run)
    for number, meta in enumerate(batch.groups):
        rows = [replace(row, sampling_mask=None) for row in read_tensors(run.path / meta.path)]
        batch.groups[number] = write_group(run.path / meta.path, rows, replace(meta, digest=""))
    write_batch(run, batch, "")
    return run, Config.from_toml([run.config]), batch


@pytest.mark.faults_slow
@pytest.mark.parametrize("backend", ["fsdp2", "megatron"])
def test_two_ranks_find_what_one_does(backend: str, teacher: Path, tmp_path: Path, alone: World, two: Ranks) -> None:
    """Each has samples of its own, or both share the matrices of the teacher."""
    limit = "trainer.distillation.max_tokens_per_micro_batch=60"
    run, config, batch = unlike(tmp_path / "run", teacher, limit)
    expected = ScoringModel(run, config, scorer_sets(config)[0], alone).scores(batch.groups, lambda: None)
    layout = {"fsdp2": "placement.fsdp_size=2", "megatron": "placement.tensor_parallel_size=2"}[backend]
    settings = [f"trainer.distillation.{one}" for one in (f"backend={backend}", layout)]
    if backend == "megatron":
        pytest.importorskip("megatron.core")
    write_text(run.config, Config.from_toml([run.config], settings).to_toml())
    scores = ("scoring.scenarios:scores", {"run": str(run.path), "out": str(tmp_path)})
    two.play([scores, *([("backends.megatron.leave:leave", {})] if backend == "megatron" else [])])
    parts = [load_file(tmp_path / f"{rank}.safetensors") for rank in range(2)]
    assert [bool(part) for part in parts] == [True, backend == "fsdp2"]
    together = parts[0] | parts[1]
    assert len(together) == sum(map(len, expected.values())) == 12
    for name, rows in expected.items():
        for at, row in enumerate(rows):
            assert abs(row.logprobs).sum() > 1
            found = together[f"{name}.{at}.logprobs"]
            torch.testing.assert_close(found, torch.from_numpy(row.logprobs), rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    "tokens", ["trainer.micro_forward_batch_size_per_gpu=4", "trainer.distillation.max_tokens_per_micro_batch=60"]
)
def test_the_teacher_reads_texts_in_its_own_tokens(tokens: str, teacher: Path, tmp_path: Path, alone: World) -> None:
    run, config, batch = unlike(tmp_path / "run", teacher, tokens)
    assert not list(check_teacher_tokens(config))
    beats = list[int]()
    found = ScoringModel(run, config, scorer_sets(config)[0], alone).scores(batch.groups, lambda: beats.append(1))
    assert len(beats) > sum(map(len, found.values())), "also whenever a row is aligned, and not only in forward passes"
    model = AutoModelForCausalLM.from_pretrained(teacher, dtype=torch.float32)
    aligner, merged = aligner_of(Pretrained(str(MODEL)), Pretrained(str(teacher)), ChatTemplateConfig()), 0
    for meta in batch.groups:
        for row, scores in zip(read_tensors(run.path / meta.path), found[meta.group_id], strict=True):
            aligned = aligner.align(row.token_ids.tolist(), row.loss_mask.tolist())
            ids = torch.from_numpy(aligned.token_ids)
            with torch.no_grad():
                logprobs_UV = model(ids[None]).logits[0].log_softmax(-1)
            teacher_U = logprobs_UV[:-1].gather(1, ids[1:, None])[:, 0].numpy()
            of_policy_T = np.roll(scores.logprobs, 1)
            assert (of_policy_T[aligned.spans_T < 0] == 0).all()
            for span in range(aligned.spans_T.max() + 1):
                expected = teacher_U[aligned.spans_U[1:] == span].sum()
                assert of_policy_T[aligned.spans_T == span].sum() == pytest.approx(expected, abs=1e-4)
                merged += (aligned.spans_T == span).sum() != (aligned.spans_U == span).sum()
    assert merged > 10


def test_another_tokenizer_is_refused_at_submit_unless_its_texts_are_aligned(teacher: Path, tmp_path: Path) -> None:
    own = [OFF, "trainer.distillation.enable=true"]
    named = f"trainer.distillation.model_path={teacher}"
    (problem,) = check_teacher_tokens(Config.from_toml([configured(tmp_path / "a", *own, named, FP32).config]))
    assert problem.path == "trainer.distillation.model_path"
    assert "or set trainer.distillation.cross_tokenizer" in problem.message
    cross = "trainer.distillation.cross_tokenizer=true"
    policy = f"trainer.policy.model.path={teacher}", f"trainer.distillation.model_path={MODEL}"
    (problem,) = check_teacher_tokens(Config.from_toml([configured(tmp_path / "b", *own, cross, *policy, FP32).config]))
    assert "the texts of the policy cannot be aligned" in problem.message
    assert problem.path == "trainer.distillation.model_path"
