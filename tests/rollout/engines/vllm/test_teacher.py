"""A teacher that is a vLLM engine says what one of FSDP2 says of the same samples."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hpcrl.config import Config
from hpcrl.config.scorers import scorer_sets
from hpcrl.config.sections.generator import ChatTemplateConfig
from hpcrl.config.sections.model import Pretrained
from hpcrl.config.token_limits import longest_sample
from hpcrl.data.alignment import TokenAligner
from hpcrl.data.score_file import RowScores
from hpcrl.data.tokenizer import load_tokenizer
from hpcrl.engines.vllm.server import Server
from hpcrl.engines.vllm.teacher import EngineTeacher, row_scores, teacher_options
from hpcrl.launch.nodes import make_plan
from hpcrl.rollout.engines.base import Engine
from hpcrl.rundir.commit import write_text
from hpcrl.rundir.layout import Run
from hpcrl.trainer.scoring.model import ScoringModel, fitting_teacher
from hpcrl.types import Batch, Row
from tests.data.chat.forms import CHATML, made
from tests.other_tokens import write_other_tokens
from tests.paths import QUICKSTART
from tests.rollout.conftest import WithEngine
from tests.rollout.material import MAX_MODEL_LEN
from tests.rows import read_tensors
from tests.trainer.material import QUICKSTART as MODEL
from tests.trainer.material import make_batch, make_run, world_of_one

SECTION = "trainer.distillation"
OFF = "trainer.algorithm.use_kl_loss=false"


@pytest.fixture
def awake(server: Server, with_engine: WithEngine[None]) -> Server:
    """The server of all tests; one whose weights were refused has left it paused."""

    async def nothing(_engine: Engine) -> None:
        pass

    with_engine(nothing)
    return server


@pytest.mark.parametrize("top_k", [0, 5])
def test_an_engine_says_what_fsdp2_says(top_k: int, awake: Server, models: list[Path], tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    settings = [OFF, f"{SECTION}.enable=true", f"{SECTION}.model_path={models[0]}", f"{SECTION}.top_k={top_k}"]
    fp32 = f"{SECTION}.fsdp_config.mixed_precision.param_dtype=fp32"
    config = Config.from_toml([QUICKSTART], [*settings, fp32])
    write_text(run.config, config.to_toml())
    batch = make_batch(run, 1, groups=3, size=3)
    expected = of_ranks(run, config, batch)
    beats = list[int]()
    found = EngineTeacher(run, awake, top_k).scores(batch.groups, lambda: beats.append(1))
    assert len(beats) == 9
    assert found.keys() == expected.keys()
    for name, rows in expected.items():
        for own, theirs in zip(found[name], rows, strict=True):
            trained = np.append(theirs.logprobs[:-1] != 0, False)
            assert trained.sum() > 1
            np.testing.assert_allclose(own.logprobs, np.where(trained, theirs.logprobs, 0), atol=1e-4)
            if top_k:
                assert own.top_ids is not None
                assert theirs.top_ids is not None
                assert own.top_ids[trained].tolist() == theirs.top_ids[trained].tolist()
                np.testing.assert_allclose(own.top_logprobs[trained], theirs.top_logprobs[trained], atol=1e-4)
            else:
                assert own.top_ids is None


def of_ranks(run: Run, config: Config, batch: Batch) -> dict[str, list[RowScores]]:
    with world_of_one() as world:  # for this call alone: others of this process have their own
        return ScoringModel(run, config, scorer_sets(config)[0], world).scores(batch.groups, lambda: None)


def test_an_engine_reads_samples_in_its_own_tokens(awake: Server, models: list[Path], tmp_path: Path) -> None:
    write_other_tokens(tmp_path / "policy")
    run, fp32 = make_run(tmp_path / "run"), f"{SECTION}.fsdp_config.mixed_precision.param_dtype=fp32"
    own = [OFF, f"{SECTION}.enable=true", f"{SECTION}.cross_tokenizer=true", f"{SECTION}.model_path={models[0]}"]
    config = Config.from_toml([QUICKSTART], [*own, f"trainer.policy.model.path={tmp_path / 'policy'}", fp32])
    write_text(run.config, config.to_toml())
    batch = make_batch(run, 1, groups=3, size=3)
    expected = of_ranks(run, config, batch)
    aligner = fitting_teacher(config, scorer_sets(config)[0])
    assert aligner is not None
    beats = list[int]()
    found = EngineTeacher(run, awake, 0, aligner).scores(batch.groups, lambda: beats.append(1))
    assert len(beats) == 2 * 9, "each row is aligned, and scored"
    assert found.keys() == expected.keys()
    longer = 0
    for meta in batch.groups:
        for row, one, theirs in zip(
            read_tensors(run.path / meta.path), found[meta.group_id], expected[meta.group_id], strict=True
        ):
            assert (theirs.logprobs != 0).sum() == row.loss_mask.sum() > 1
            np.testing.assert_allclose(one.logprobs, theirs.logprobs, atol=1e-4)
            aligned = aligner.align(row.token_ids.tolist(), row.loss_mask.tolist())
            longer += len(aligned.token_ids) > len(row.token_ids)
    assert longer > 3, "tokens of two letters are two of the teacher's"


def test_there_is_room_for_samples_in_other_tokens(models: list[Path], tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    settings = [OFF, f"{SECTION}.enable=true", f"{SECTION}.model_path={models[0]}", f"{SECTION}.backend=vllm"]
    settings.append(f"{SECTION}.cross_tokenizer=true")

    def room(*more: str) -> int:
        config = Config.from_toml([QUICKSTART], [*settings, *more])
        own, (scorers,) = config.trainer.distillation, scorer_sets(config)
        return teacher_options(run, config, scorers, own.engine).max_model_len

    longest = longest_sample(Config.from_toml([QUICKSTART]))
    assert room() == 2 * (longest + 1) < MAX_MODEL_LEN
    assert room("trainer.max_prompt_length=500") == MAX_MODEL_LEN
    assert room("trainer.max_prompt_length=900") == 909, "as for a teacher that reads the policy's tokens"
    assert room(f"{SECTION}.engine.max_model_len={MAX_MODEL_LEN}") == MAX_MODEL_LEN, (
        "vLLM refuses more than the model's"
    )


@pytest.mark.parametrize("refuses", ["engine", "aligner"])
def test_a_row_that_is_refused_has_failed(refuses: str, awake: Server, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    (group,) = make_batch(run, 1, groups=1, size=1).groups
    theirs = load_tokenizer(Pretrained(str(MODEL)), ChatTemplateConfig())
    unlike = TokenAligner(made("bytes", CHATML, "<|im_end|>"), theirs, "the teacher")
    of_each = {"engine": (100_000, None), "aligner": (0, unlike)}
    teacher = EngineTeacher(run, awake, *of_each[refuses])
    scored = list[None]()
    ((found,),) = teacher.scores([group], lambda: scored.append(None)).values()
    assert np.isnan(found.logprobs).all()
    assert scored == [None]


def test_a_row_without_a_finite_number_has_failed() -> None:
    row = Row(
        token_ids=np.array([5, 6, 7]), loss_mask=np.array([0, 1, 1], np.float32), rollout_logprobs=np.zeros(3, np.float32),
        versions=np.zeros(3, np.int32), rewards=np.zeros(3, np.float32), stop_reason="stop",
    )  # fmt: skip
    said = [
        None,
        {"6": {"logprob": -1.0, "rank": 1}},
        {"7": {"logprob": -9999.0, "rank": 18}, "2": {"logprob": 0.0, "rank": 1}},
    ]
    assert np.isnan(row_scores(row, said, 0).logprobs).all()
    found = row_scores(replace(row, loss_mask=np.array([0, 1, 0], np.float32)), said, 1)
    assert found.logprobs.tolist() == [-1.0, 0.0, 0.0], "what is not trained is not looked at"
    assert found.top_ids is not None
    assert found.top_ids.tolist() == [[6], [-1], [-1]]


def test_an_engine_is_one_process_on_its_devices(tmp_path: Path) -> None:
    settings = [
        *(OFF, f"{SECTION}.enable=true", f"{SECTION}.model_path=t", f"{SECTION}.backend=vllm"),
        *(f"{SECTION}.engine.tensor_parallel_size=2", "slurm.gpus_per_node=4"),
    ]
    config = Config.from_toml([QUICKSTART], settings)
    (node,) = (node for node in make_plan(config) if node.role == "scorer")
    assert (node.scorer_ranks, node.gpus, node.torchrun) == (2, 2, False)
    (scorers,) = scorer_sets(config)
    options = teacher_options(make_run(tmp_path / "run"), config, scorers, config.trainer.distillation.engine)
    assert (options.model.path, options.engine.tensor_parallel_size, options.on_cpu) == ("t", 2, False)
    fsdp = [*settings[:3], f"{SECTION}.placement.fsdp_size=2", settings[-1]]
    ranks = Config.from_toml([QUICKSTART], fsdp)
    assert [node.torchrun for node in make_plan(ranks) if node.role == "scorer"] == [True]
    names = {scorer_sets(Config.from_toml([QUICKSTART], [*settings, f"{SECTION}.engine.model_dtype={dtype}"]))[0].name for dtype in ("float32", "bfloat16")}  # fmt: skip
    assert len({*names, scorer_sets(ranks)[0].name}) == 3, "scores of one number type are not those of another"
