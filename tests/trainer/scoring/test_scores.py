"""What scorers find is what the trainer would find itself, on any number of ranks, and reaches the loss of the token that it is about."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from hpcrl.algorithms.distillation import teacher_advantages
from hpcrl.config import AlgorithmConfig, Config, TrainerConfig
from hpcrl.config.scorers import REFERENCE, TEACHER, judges_of, scorer_sets
from hpcrl.config.sections.distillation import DistillationConfig
from hpcrl.config.sections.model import Pretrained
from hpcrl.config.validate import build
from hpcrl.data.batch_file import write_batch
from hpcrl.data.score_file import RowScores, write_scores
from hpcrl.errors import DamagedError, DataError
from hpcrl.rundir.commit import write_text
from hpcrl.rundir.layout import Run
from hpcrl.trainer.advantages import no_advantages, subtract_divergence
from hpcrl.trainer.batching import MicroBatchLimit, mini_batches
from hpcrl.trainer.distributed import World
from hpcrl.trainer.packing import PackedRows, Scores
from hpcrl.trainer.read_batch import load_mini_batches, load_rows
from hpcrl.trainer.scoring.model import ScoringModel, require_same_vocabulary
from hpcrl.types import Batch
from tests.paths import QUICKSTART
from tests.rows import read_tensors, write_group
from tests.trainer.material import QUICKSTART as MODEL
from tests.trainer.material import load, make_batch, make_run, score, views
from tests.trainer.ranks import Ranks
from tests.trainer.scenarios import make_engine

NAME = "teacher-0"
OFF = "trainer.algorithm.use_kl_loss=false"
TEACHER_IS_ENABLED = ["trainer.distillation.enable=true", f"trainer.distillation.model_path={MODEL}"]
FP32 = "trainer.distillation.fsdp_config.mixed_precision.param_dtype=fp32"


def configured(path: Path, *settings: str) -> Run:
    """Return a run of the quickstart with one batch of random samples."""
    run = make_run(path)
    write_text(
        run.config,
        Config.from_toml([QUICKSTART], [FP32, *settings] if "enable" in str(settings) else settings).to_toml(),
    )
    batch = make_batch(run, 1, groups=4, size=3, masked=True)
    write_batch(run, batch, "")
    return run


def batch_of(run: Run) -> Batch:
    return make_batch(run, 1, groups=4, size=3, masked=True)


@pytest.mark.parametrize("role", [REFERENCE, TEACHER])
def test_scorers_find_what_the_trainer_finds_beside_the_policy(
    role: str, tmp_path: Path, alone: World, two: Ranks
) -> None:
    own = [OFF, *TEACHER_IS_ENABLED, "trainer.distillation.micro_batch_size_per_gpu=4"]
    apart = ["trainer.placement.colocate_policy_ref=false", "trainer.micro_forward_batch_size_per_gpu=4"]
    run = configured(tmp_path / "run", *(own if role == TEACHER else apart))
    config = Config.from_toml([run.config])
    batch = batch_of(run)
    engine = make_engine(alone, str(MODEL), {})
    algorithm = AlgorithmConfig(use_kl_loss=True)
    (mini,) = load(run, batch, algorithm, 4, MicroBatchLimit(4), alone)
    engine._model.forward_config = replace(engine._model.forward_config, temperature=1.0)
    assert engine._reference is not None
    engine._reference.forward_config = engine._model.forward_config
    score(engine, mini, MicroBatchLimit(4), old=False, reference=True)
    expected = {(view.ref.group, view.ref.index): view.of(mini.rows.scores.ref_logprobs) for view in views([mini.rows])}
    (scorers,) = scorer_sets(config)
    assert scorers.role == role
    one = ScoringModel(run, config, scorers, alone).scores(batch.groups, lambda: None)
    two.play([("scoring.scenarios:scores", {"run": str(run.path), "out": str(tmp_path)})])
    parts = [load_file(tmp_path / f"{rank}.safetensors") for rank in range(2)]
    assert all(parts), "both ranks have some of the groups"
    together = parts[0] | parts[1]
    assert len(together) == 12
    for (at, row), values_T in expected.items():
        name = batch.groups[at].group_id
        assert values_T.abs().sum() > 1
        torch.testing.assert_close(torch.from_numpy(one[name][row].logprobs), values_T, atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(together[f"{name}.{row}.logprobs"], values_T, atol=1e-6, rtol=1e-6)


def test_scorers_share_prefixes(tmp_path: Path, alone: World) -> None:
    apart = ["trainer.placement.colocate_policy_ref=false", "trainer.max_tokens_per_micro_batch=40"]
    run = configured(tmp_path / "run", *apart)
    batch = make_batch(run, 2, groups=4, size=3, alike=5)
    found, tokens = [], [0, 0]
    for shared in (False, True):
        config = Config.from_toml([run.config], [f"trainer.shared_prefixes={str(shared).lower()}"])
        model = ScoringModel(run, config, scorer_sets(config)[0], alone)

        def count(_: object, given: tuple[torch.Tensor], *__: object, shared: bool = shared) -> None:
            tokens[shared] += given[0].numel()

        model._model.model.get_input_embeddings().register_forward_hook(count)
        found.append(model.scores(batch.groups, lambda: None))
    for group in batch.groups:
        for one, other in zip(*(scores[group.group_id] for scores in found), strict=True):
            np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)
    assert tokens[0] == sum(sum(group.lengths) for group in batch.groups)
    assert tokens[1] <= tokens[0] - 4 * 2 * 4, (
        "four tokens at least of two samples of each group, whose last one is its own"
    )


@pytest.mark.parametrize("chunk", [3, 1024])
def test_the_most_probable_tokens_are_those_of_the_teacher(chunk: int, tmp_path: Path, alone: World) -> None:
    settings = ["trainer.distillation.top_k=5", f"trainer.logprobs_chunk_size={chunk}"]
    run = configured(tmp_path / "run", OFF, *TEACHER_IS_ENABLED, *settings)
    config, batch = Config.from_toml([run.config]), batch_of(run)
    scored = ScoringModel(run, config, scorer_sets(config)[0], alone).scores(batch.groups, lambda: None)
    digests = write_scores(run, NAME, [(group, scored[group.group_id]) for group in batch.groups])
    named = replace(batch, groups=[replace(one, scores={NAME: digests[one.group_id]}) for one in batch.groups])
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    packed = load_rows(run, named, mini_batches(named, 4)[0])
    for view in views([packed]):
        with torch.no_grad():
            whole_TV = model(view.of(packed.token_ids)[None]).logits[0].log_softmax(-1)
        trained = view.of(packed.loss_mask) > 0
        top, ids = whole_TV[trained].topk(5)
        torch.testing.assert_close(view.of(packed.scores.teacher_top)[trained], top, atol=1e-5, rtol=1e-5)
        assert view.of(packed.scores.teacher_ids)[trained].tolist() == ids.tolist()
        assert not view.of(packed.scores.teacher_top)[~trained].any()
    one = packed.micro_batch(range(1, 3))
    assert one.teacher_ids is not None
    assert one.teacher_ids.shape == (sum(one.lengths), 5)


def test_prompts_are_scored_and_learned_where_they_are_to_be(tmp_path: Path, alone: World) -> None:
    """All tokens but the first; no engine has given a prompt log-probabilities, so that it counts as sampled from the old policy."""
    settings = ["trainer.distillation.include_prompt=true", "trainer.distillation.top_k=2"]
    run = configured(tmp_path / "run", OFF, *TEACHER_IS_ENABLED, *settings)
    config, batch = Config.from_toml([run.config]), batch_of(run)
    scored = ScoringModel(run, config, scorer_sets(config)[0], alone).scores(batch.groups, lambda: None)
    digests = write_scores(run, NAME, [(group, scored[group.group_id]) for group in batch.groups])
    named = replace(batch, groups=[replace(one, scores={NAME: digests[one.group_id]}) for one in batch.groups])
    limits = MicroBatchLimit(4), MicroBatchLimit(4)
    (mini,) = load_mini_batches(run, named, config.trainer, limits, alone, reduction())
    (whole,) = load_mini_batches(run, named, trainer(), limits, alone, reduction())
    assert mini.tokens == sum(length - 1 for group in batch.groups for length in group.lengths)
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    mini.rows.scores.old_logprobs = torch.full_like(mini.rows.loss_mask, -0.25)
    mini.rows.complete_rollout()
    chosen = {(view.ref.group, view.ref.index): view for view in views([whole.rows])}
    for view in views([mini.rows]):
        own = chosen[view.ref.group, view.ref.index]
        mask_T, told_T = own.of(whole.rows.loss_mask) > 0, own.of(whole.rows.rollout_logprobs)
        expected = torch.where(mask_T, told_T, -0.25)
        expected[-1] = 0  # nothing is predicted there
        torch.testing.assert_close(view.of(mini.rows.rollout_logprobs), expected)
        with torch.no_grad():
            logits_TV = model(view.of(mini.rows.token_ids)[None]).logits[0]
        top = logits_TV.log_softmax(-1).topk(2)
        assert view.of(mini.rows.scores.teacher_ids)[:-1].tolist() == top.indices[:-1].tolist()


def test_a_teacher_judges_the_tokens_that_the_policy_names(tmp_path: Path, alone: World) -> None:
    """A sample that lacks some, because it was generated before they were asked for, is not trained."""
    settings = ["trainer.distillation.top_k_from_teacher=false", "trainer.distillation.top_k=3"]
    run = configured(tmp_path / "run", OFF, *TEACHER_IS_ENABLED, *settings)
    config, draw = Config.from_toml([run.config]), torch.Generator().manual_seed(1)
    groups = list(batch_of(run).groups)
    named = dict[tuple[int, int], torch.Tensor]()
    for number, meta in enumerate(groups):
        rows = read_tensors(run.path / meta.path)
        for at, row in enumerate(rows):
            named[number, at] = torch.randint(0, 18, (len(row.token_ids), 3), generator=draw).int()
            rows[at] = replace(row, top_ids=None if (number, at) == (1, 2) else named[number, at])
        groups[number] = write_group(run.path / meta.path, rows, replace(meta, digest=""))
    scored = ScoringModel(run, config, scorer_sets(config)[0], alone).scores(groups, lambda: None)
    assert [at for at, row in enumerate(scored[groups[1].group_id]) if np.isnan(row.logprobs).any()] == [2]
    digests = write_scores(run, NAME, [(group, scored[group.group_id]) for group in groups])
    batch = Batch(1, [replace(one, scores={NAME: digests[one.group_id]}) for one in groups], 4)
    packed = load_rows(run, batch, mini_batches(batch, 4)[0])
    assert packed.unscored == 1
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    for view in views([packed]):
        with torch.no_grad():
            whole_TV = model(view.of(packed.token_ids)[None]).logits[0].log_softmax(-1)
        trained, ids_TK = view.of(packed.loss_mask) > 0, named[view.ref.group, view.ref.index].roll(-1, 0)[:]
        assert trained.any() == ((view.ref.group, view.ref.index) != (1, 2))
        assert torch.equal(view.of(packed.scores.teacher_ids)[trained], ids_TK[trained])
        expected = whole_TV.gather(-1, ids_TK.long())[trained]
        torch.testing.assert_close(view.of(packed.scores.teacher_top)[trained], expected, atol=1e-5, rtol=1e-5)


def test_a_sample_of_which_nothing_is_trained_has_no_prompt_to_learn(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    (meta,) = make_batch(run, 1, groups=1, size=2).groups
    first, second = read_tensors(run.path / meta.path)
    failed = replace(second, loss_mask=torch.zeros_like(second.loss_mask))
    (run.path / meta.path).unlink()
    batch = Batch(1, [write_group(run.path / meta.path, [first, failed], meta)], 1)
    packed = load_rows(run, batch, mini_batches(batch, 1)[0], prompts=True)
    assert sorted(packed.trained) == [0, len(first.token_ids) - 1]


@pytest.mark.slow
def test_a_compiled_teacher_says_the_same(tmp_path: Path, alone: World) -> None:
    run = configured(tmp_path / "run", OFF, *TEACHER_IS_ENABLED)
    batch, found = batch_of(run), list[dict[str, list[RowScores]]]()
    for compiled in (False, True):
        config = Config.from_toml([run.config], [f"trainer.distillation.compile_model={str(compiled).lower()}"])
        found.append(ScoringModel(run, config, scorer_sets(config)[0], alone).scores(batch.groups, lambda: None))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    for name, rows in found[0].items():
        for one, other in zip(rows, found[1][name], strict=True):
            np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)


def test_each_data_source_has_its_teacher() -> None:
    """One that is named twice judges both, and the same model once more is no other one."""
    more = "{a='x', b='y', c='x', d='" + str(MODEL) + "'}"
    settings = [OFF, *TEACHER_IS_ENABLED, f"trainer.distillation.source_models={more}"]
    sets = scorer_sets(Config.from_toml([QUICKSTART], settings))
    assert [(Path(each.model.path).name, each.sources) for each in sets] == [
        ("model", None),
        ("x", ("a", "c")),
        ("y", ("b",)),
    ]
    default, x, y = (each.name for each in sets)
    assert [judges_of(sets, source) for source in "abcde"] == [[x], [y], [x], [default], [default]]
    with_reference = scorer_sets(
        Config.from_toml([QUICKSTART], [*settings[1:], "trainer.placement.colocate_policy_ref=false"])
    )
    assert judges_of(with_reference, "b") == [y, with_reference[-1].name]


def with_scores(run: Run, batch: Batch, role: str, values: list[list[np.ndarray]]) -> Batch:
    digests = write_scores(
        run, f"{role}-0", zip(batch.groups, [[RowScores(row) for row in rows] for rows in values], strict=True)
    )
    return replace(batch, groups=[replace(one, scores={f"{role}-0": digests[one.group_id]}) for one in batch.groups])


def made_up(batch: Batch) -> list[list[np.ndarray]]:
    """Return other numbers for each token of a batch."""
    draw = np.random.default_rng(3)
    return [[-draw.random(length, dtype=np.float32) for length in group.lengths] for group in batch.groups]


@pytest.mark.parametrize(("role", "column"), [(REFERENCE, "ref_logprobs"), (TEACHER, "teacher_logprobs")])
def test_scores_lie_beside_the_tokens_that_they_are_about(role: str, column: str, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    batch = make_batch(run, 1, groups=3, size=2)
    values = made_up(batch)
    scored = with_scores(run, batch, role, values)
    refs = [ref for refs in mini_batches(scored, 3) for ref in refs][::-1]
    found = load_rows(run, scored, refs)
    assert found.unscored == 0
    for view in views([found]):
        expected = torch.from_numpy(values[view.ref.group][view.ref.index])
        torch.testing.assert_close(view.of(getattr(found.scores, column)), expected)
    assert load_rows(run, scored, []).scores == Scores()


def trainer(**settings: Any) -> TrainerConfig:
    return build(TrainerConfig, {"policy": {"model": {"path": "m"}}, "policy_mini_batch_size": 4, **settings})


def test_a_sample_at_which_the_teacher_failed_is_left_out_and_counted(tmp_path: Path, alone: World) -> None:
    run = make_run(tmp_path / "run")
    batch = make_batch(run, 1, groups=4, size=3)
    values = made_up(batch)
    values[2][1][:] = np.nan
    scored, limits = with_scores(run, batch, TEACHER, values), (MicroBatchLimit(4), MicroBatchLimit(4))
    (mini,) = load_mini_batches(run, scored, trainer(), limits, alone, reduction())
    (whole,) = load_mini_batches(run, batch, trainer(), limits, alone, reduction())
    lost = {(view.ref.group, view.ref.index): view.trained for view in views([whole.rows])}[2, 1]
    assert mini.unscored == 1
    assert mini.tokens == whole.tokens - lost
    (failed,) = [view for view in views([mini.rows]) if (view.ref.group, view.ref.index) == (2, 1)]
    assert (failed.trained, failed.of(mini.rows.scores.teacher_logprobs).sum().item()) == (0, 0)
    with pytest.raises(
        DataError, match=r"failed at 1 of the 12 rows of step 1, more than trainer.max_unscored_ratio = 0.05"
    ):
        load_mini_batches(run, scored, trainer(max_unscored_ratio=0.05), limits, alone, reduction())


def reduction() -> Any:
    from hpcrl.algorithms.reductions import Reduction

    return Reduction()


def test_a_score_that_is_gone_or_changed_is_named(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    batch = make_batch(run, 1, groups=2, size=2)
    scored = with_scores(run, batch, TEACHER, made_up(batch))
    refs = mini_batches(scored, 2)[0]
    (first, second) = sorted(run.scores_of(NAME).iterdir())
    content = bytearray(first.read_bytes())
    content[-3] ^= 1
    first.write_bytes(content)
    with pytest.raises(DamagedError, match=f"score file {first} is damaged"):
        load_rows(run, scored, refs)
    first.unlink()
    with pytest.raises(DamagedError, match=f"score file {first} is missing"):
        load_rows(run, scored, refs)
    assert second.exists()


@pytest.mark.parametrize("rollout", [False, True])
@pytest.mark.parametrize("discount", [0.0, 0.9])
def test_advantages_are_less_by_the_divergence_from_the_teacher(rollout: bool, discount: float, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    batch = make_batch(run, 1, groups=2, size=2)
    scored = with_scores(run, batch, TEACHER, made_up(batch))
    samples = load_rows(run, scored, mini_batches(scored, 2)[0])
    no_advantages([samples])
    samples.scores.old_logprobs = torch.full_like(samples.loss_mask, -0.25)
    settings = DistillationConfig(enable=True, kl_penalty_coef=0.5, kl_discount_factor=discount)
    algorithm = AlgorithmConfig(use_rollout_logprobs_for_loss=rollout)
    described = subtract_divergence([samples, empty()], settings, algorithm, list)
    policy_P = samples.rollout_logprobs if rollout else samples.scores.old_logprobs
    assert samples.scores.teacher_logprobs is not None
    divergence_P = (policy_P - samples.scores.teacher_logprobs) * samples.loss_mask
    expected = list[float]()
    for start, end in pairwise([0, *np.cumsum(samples.lengths).tolist()]):
        sums, later = [], 0.0
        for at in reversed(range(start, end)):  # by hand: time passes with trained tokens only
            later = divergence_P[at].item() + discount * later if samples.loss_mask[at] else later
            sums.append(-0.5 * (later if samples.loss_mask[at] else 0.0))
        expected += sums[::-1]
    torch.testing.assert_close(samples.scores.advantages, torch.tensor(expected))
    tokens = samples.loss_mask.sum().item()
    assert described["distillation/reverse_kl"] == pytest.approx(divergence_P.sum().item() / tokens, rel=1e-5)
    assert described["distillation/penalty"] == pytest.approx(-sum(expected) / tokens, rel=1e-5)
    assert math.isfinite(
        teacher_advantages(*[torch.ones(1)] * 3, [1], kl_penalty_coef=1.0, kl_discount_factor=1.0).item()
    )


def empty() -> PackedRows:
    """A rank may have no samples at all."""
    from hpcrl.trainer.packing import pack

    return pack([])


def test_a_teacher_of_another_vocabulary_is_refused(tmp_path: Path, alone: World) -> None:
    other = tmp_path / "other"
    AutoModelForCausalLM.from_pretrained(MODEL).save_pretrained(other)
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    tokenizer.add_tokens(["<thought>"])
    tokenizer.save_pretrained(other)
    settings = [OFF, "trainer.distillation.enable=true", f"trainer.distillation.model_path={other}"]
    run = configured(tmp_path / "run", *settings)
    config = Config.from_toml([run.config])
    with pytest.raises(DataError, match=r"differ in 1 tokens, such as '<thought>' \(18 and None\)"):
        ScoringModel(run, config, scorer_sets(config)[0], alone)


def test_a_teacher_may_have_another_chat_template(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    tokenizer.save_pretrained(tmp_path)
    config = Config.from_toml([QUICKSTART])
    require_same_vocabulary(Pretrained(str(tmp_path)), config.trainer.policy.model.pretrained, config)


def test_scores_have_another_name_where_settings_decide_what_they_are() -> None:
    def name(*settings: str) -> str:
        return scorer_sets(Config.from_toml([QUICKSTART], [OFF, *TEACHER_IS_ENABLED, *settings]))[0].name

    same = ["trainer.distillation.batch_size_per_replica=4", "trainer.distillation.placement.num_replicas=3"]
    assert name(*same) == name()
    assert (
        len({name(), name(FP32), name("trainer.distillation.model_revision=v2"), name("trainer.rope_theta=7.0")}) == 4
    )
