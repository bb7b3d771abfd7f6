"""What a batch's tokens were worth does not depend on the number of ranks; and each setting does what it says."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from statistics import fmean, pstdev, stdev
from typing import Any

import pytest
import torch

from hpcrl.algorithms.advantages import ESTIMATORS, AdvantageInputs, grpo, per_token
from hpcrl.config import AlgorithmConfig
from hpcrl.config.sections.distillation import DistillationConfig
from hpcrl.config.validate import build
from hpcrl.data.group_file import read_group
from hpcrl.errors import ConfigError, DataError
from hpcrl.rollout.group import Row
from hpcrl.rundir.commit import write_json
from hpcrl.rundir.layout import Run
from hpcrl.trainer.advantages import Advantages, estimate_advantages, subtract_divergence
from hpcrl.trainer.batching import MicroBatchLimit, RowRef, trained_groups
from hpcrl.trainer.distributed import World
from hpcrl.trainer.loss import build_objective
from hpcrl.trainer.metrics import describe_batch, describe_updates
from hpcrl.trainer.packing import PackedRows, pack
from hpcrl.types import Batch
from tests.rows import group_meta, read_tensors, with_columns, write_group
from tests.trainer.launcher import run_ranks
from tests.trainer.material import View, load, make_batch, make_run, score, train, views
from tests.trainer.ranks import Ranks
from tests.trainer.scenarios import make_engine, parameters, train_steps, worth

EQUAL = 1  # a group whose rewards are all equal
MUTED = (2, 0)  # a sample without a trained token, as overlong filtering leaves it
OWN = "tests.trainer.test_advantages"
SETTINGS: dict[str, dict[str, Any]] = {
    **{name: {"advantage_estimator": name, "gamma": 0.9} for name in ESTIMATORS if name not in ("gae", "gdpo")},
    "gdpo": {"advantage_estimator": "gdpo", "gdpo": {"rewards": {"reward": 1.0, "form": 0.5}}},
    "normalized": {"advantage_batch_normalize": True},
    "clipped": {"advantage_clip_low": -0.25, "advantage_clip_high": 0.5, "grpo_norm_by_std": False},
    "clipped above": {"advantage_clip_high": 0.5},
    "filtered": {"zero_variance_filter": True, "advantage_estimator": "reinforce++_baseline"},
    "penalized": {"use_kl_loss": False, "use_kl_in_reward": True, "kl_loss_coef": 0.1},
    "penalized per token": {
        "use_kl_loss": False,
        "use_kl_in_reward": True,
        "kl_loss_coef": 0.1,
        "advantage_estimator": "reinforce++",
        "kl_ctrl": {"type": "adaptive", "kl_target": 0.01, "horizon": 100},
    },
    "own": {"advantage_estimator": f"{OWN}:rank_of_reward"},
    "own per token": {"advantage_estimator": f"{OWN}:share_of_tokens"},
}


def rank_of_reward(inputs: AdvantageInputs, algorithm: AlgorithmConfig) -> torch.Tensor:
    assert len(inputs.lengths) == 16, "every sample of the batch, on every rank"
    assert algorithm.advantage_estimator.startswith(OWN)
    return inputs.rewards_P.argsort().argsort().double()


@per_token
def share_of_tokens(inputs: AdvantageInputs) -> torch.Tensor:
    return inputs.mask_P / inputs.total(inputs.mask_P.sum()[None])


def some_batch(path: Path) -> tuple[Run, Batch]:
    """Four groups of four."""
    run = make_run(path)
    batch = make_batch(run, step=1, groups=4, size=4)
    for at, group in enumerate(batch.groups):
        samples = read_tensors(run.path / group.path)
        if at == MUTED[0]:
            samples[MUTED[1]].loss_mask.zero_()
        reported = [{"form": float((at + number) % 3)} for number in range(4)]
        rewards = [0.3] * 4 if at == EQUAL else group.rewards
        meta = with_columns(group, rewards=rewards, baseline=0.1 * at, env_metrics=reported)
        batch.groups[at] = write_group(run.path / group.path, samples, meta)
    write_json(run.batch(1), batch.to_json())
    return run, batch


def everything(run: Run, batch: Batch) -> PackedRows:
    refs = [RowRef(at, index, 0) for at in range(4) for index in range(4)]
    packed = pack([sample for group in batch.groups for sample in read_group(run.path / group.path)], refs)
    packed.scores.squared_norms = packed.labels / 20
    return packed


def one_rank(run: Run, batch: Batch, **settings: Any) -> tuple[list[View], Advantages]:
    """Return the samples with their advantages, and what is reported of these."""
    samples = everything(run, batch)
    advantages = estimate_advantages(batch, [samples], build(AlgorithmConfig, settings), list)
    return views([samples]), advantages


def of(sample: View) -> torch.Tensor:
    return sample.of(sample.packed.scores.advantages)


def mask(sample: View) -> torch.Tensor:
    return sample.of(sample.packed.loss_mask) > 0


def trained(samples: list[View]) -> list[float]:
    return [x for sample in samples for x in of(sample)[mask(sample)].tolist()]


def test_every_number_of_ranks_gives_the_same(tmp_path: Path, alone: World, two: Ranks) -> None:
    run, _ = some_batch(tmp_path / "run")
    options = {"run": str(run.path), "out": str(tmp_path), "settings": SETTINGS}
    worth(alone, options)
    two.play([("scenarios:worth", options)])
    three = run_ranks(3, json.dumps([["worth", options]]))
    assert three.returncode == 0, three.stderr
    (one,) = told(tmp_path, 1)
    for ranks in (2, 3):
        for name, expected in one.items():
            parts = [part[name] for part in told(tmp_path, ranks)]
            for part in parts:
                assert part["means"] == pytest.approx(expected["means"], abs=1e-12)
                assert part["tokens"] == expected["tokens"]
            for fact in ("advantages", "weights"):
                joined = {key: value for part in parts for key, value in part[fact].items()}
                assert sum(len(part[fact]) for part in parts) == len(joined) == len(expected[fact])
                for key, values in expected[fact].items():
                    assert joined[key] == pytest.approx(values, abs=1e-6), (name, fact)


def told(path: Path, ranks: int) -> list[dict[str, Any]]:
    return [json.loads((path / f"{rank}-of-{ranks}.json").read_text()) for rank in range(ranks)]


def test_a_group_advantage_is_that_of_every_trained_token(tmp_path: Path) -> None:
    run, batch = some_batch(tmp_path / "run")
    rows, _ = one_rank(run, batch)
    rewards = [reward for group in batch.groups for reward in group.rewards]
    inputs = AdvantageInputs(
        rewards_P=torch.tensor(rewards, dtype=torch.float64),
        mask_P=torch.ones(16, dtype=torch.float64),
        lengths=[1] * 16,
        groups_B=torch.arange(4).repeat_interleave(4),
    )
    for row, expected in zip(rows, grpo(inputs, grpo_norm_by_std=True), strict=True):
        assert of(row).dtype == torch.float32
        torch.testing.assert_close(of(row), torch.where(mask(row), expected.float(), 0.0))


@pytest.mark.parametrize("name", [name for name in SETTINGS if not name.startswith(("own", "penalized"))])
def test_samples_that_failed_do_not_change_what_the_others_are_worth(tmp_path: Path, name: str) -> None:
    """As in a batch that they were never part of, whatever number stands for their rewards."""
    run, batch = some_batch(tmp_path / "run")
    lost, algorithm = {(0, 3), (2, 1), (2, 2), (EQUAL, 0)}, build(AlgorithmConfig, SETTINGS[name])

    def worths(*, there: bool) -> list[list[float]]:
        samples, refs = list[Row](), list[RowRef]()
        changed = replace(batch, groups=list(batch.groups))
        for at, group in enumerate(batch.groups):
            kept = [number for number in range(4) if there or (at, number) not in lost]
            failed = [(at, number) in lost for number in kept]
            changed.groups[at] = group_meta(
                group_id=group.group_id,
                path=group.path,
                baseline=group.baseline,
                digest=group.digest,
                lengths=[group.lengths[number] for number in kept],
                response_lengths=[group.response_lengths[number] for number in kept],
                rewards=[9.0 if gone else group.rewards[number] for number, gone in zip(kept, failed, strict=True)],
                stop_reasons=["failed" if gone else "stop" for gone in failed],
                env_metrics=[group.samples[number].env_metrics for number in kept],
            )
        for at in trained_groups(changed, algorithm):
            group, rows = changed.groups[at], read_group(run.path / batch.groups[at].path)
            rows = [row for number, row in enumerate(rows) if there or (at, number) not in lost]
            for place, (row, reason) in enumerate(zip(rows, group.stop_reasons, strict=True)):
                samples.append(replace(row, loss_mask=row.loss_mask * (reason != "failed")))
                refs.append(RowRef(at, place, 0))
        packed = pack(samples, refs)
        packed.scores.squared_norms = packed.labels / 20
        estimate_advantages(changed, [packed], algorithm, list)
        return [row for sample in views([packed]) if (row := of(sample)[mask(sample)].tolist())]

    for one, other in zip(worths(there=True), worths(there=False), strict=True):
        assert one == pytest.approx(other, rel=1e-6)


def test_returns_come_from_the_rewards_of_tokens(tmp_path: Path) -> None:
    run, batch = some_batch(tmp_path / "run")
    rows, _ = one_rank(run, batch, advantage_estimator="reinforce++", gamma=0.5)
    raw = [
        0.5**later * row.of(row.packed.rewards).sum().item() for row in rows for later in reversed(range(row.trained))
    ]
    found = trained(rows)
    mean, deviation = fmean(raw), stdev(raw)
    assert found == pytest.approx([(x - mean) / deviation for x in raw], rel=1e-5, abs=1e-6)


def test_a_critic_learns_returns_by_a_lambda_of_its_own(tmp_path: Path) -> None:
    run, batch = some_batch(tmp_path / "run")
    found = dict[float | None, tuple[torch.Tensor, torch.Tensor]]()
    for own in (None, 1.0, 0.5):
        samples = everything(run, batch)
        samples.scores.values = torch.linspace(-1, 1, len(samples.token_ids))
        settings = {"advantage_estimator": "gae", "lambd": 0.5, "critic_lambd": own}
        estimate_advantages(batch, [samples], build(AlgorithmConfig, settings), list)
        assert samples.scores.advantages is not None
        assert samples.scores.returns is not None
        found[own] = samples.scores.advantages, samples.scores.returns
    for advantages, _ in found.values():
        torch.testing.assert_close(advantages, found[None][0])
    torch.testing.assert_close(found[0.5][1], found[None][1])
    # with lambda 1 and gamma 1, the returns are the rewards to come, whatever the values are
    rewards_P = torch.cat([part.flip(0).cumsum(0).flip(0) for part in samples.rewards.split(samples.lengths)])
    trained_P = samples.loss_mask > 0
    torch.testing.assert_close(found[1.0][1][trained_P], rewards_P[trained_P])


def test_normalized_over_the_trained_tokens_of_the_batch(tmp_path: Path) -> None:
    run, batch = some_batch(tmp_path / "run")
    (rows, raw), (normal_rows, normal) = one_rank(run, batch), one_rank(run, batch, advantage_batch_normalize=True)
    before = trained(rows)
    mean, deviation = fmean(before), pstdev(before)
    assert trained(normal_rows) == pytest.approx([(x - mean) / deviation for x in before], rel=1e-5)
    assert (normal.mean, normal.mean_abs) == (raw.mean, raw.mean_abs)  # what is told is what the estimator gave


def test_clipped_after_all_else(tmp_path: Path) -> None:
    run, batch = some_batch(tmp_path / "run")
    normal = trained(one_rank(run, batch, advantage_batch_normalize=True)[0])
    bounds = {"advantage_clip_low": -0.5, "advantage_clip_high": 0.25}
    found = trained(one_rank(run, batch, advantage_batch_normalize=True, **bounds)[0])
    assert found == pytest.approx([min(max(x, -0.5), 0.25) for x in normal])
    assert {-0.5, 0.25} <= set(found)
    only_above, free = one_rank(run, batch, advantage_clip_high=0.25)[0], one_rank(run, batch)[0]
    assert min(trained(only_above)) == min(trained(free))


def test_metrics_are_means_over_the_trained_tokens(tmp_path: Path) -> None:
    run, batch = some_batch(tmp_path / "run")
    for settings in ({}, {"advantage_estimator": "reinforce++", "gamma": 0.9}):
        rows, advantages = one_rank(run, batch, **settings)
        values = trained(rows)
        described = describe_batch(batch, advantages, AlgorithmConfig())
        assert described["loss/avg_raw_advantages"] == pytest.approx(fmean(values), abs=1e-6)
        assert described["loss/avg_raw_advantages_abs"] == pytest.approx(fmean(map(abs, values)))


def test_groups_of_equal_rewards_are_not_there_at_all(tmp_path: Path) -> None:
    run, batch = some_batch(tmp_path / "run")
    algorithm = AlgorithmConfig(zero_variance_filter=True, advantage_estimator="reinforce++_baseline")
    assert trained_groups(batch, AlgorithmConfig()) == [0, 1, 2, 3]
    assert trained_groups(batch, algorithm) == [0, 2, 3]
    assert trained_groups(batch, replace(algorithm, zero_variance_filter_tol=9.0)) == []
    kept = [at for at in range(4) if at != EQUAL]
    refs = [RowRef(at, index, 0) for at in kept for index in range(4)]
    samples = pack([sample for at in kept for sample in read_group(run.path / batch.groups[at].path)], refs)
    estimate_advantages(batch, [samples], algorithm, list)
    values = trained(views([samples]))
    assert fmean(values) == pytest.approx(0, abs=1e-6)  # whitened without them
    assert stdev(values) == pytest.approx(1, rel=1e-5)


def test_the_filter_judges_by_what_the_environment_reports(tmp_path: Path) -> None:
    _, batch = some_batch(tmp_path / "run")
    right, wrong = {"accuracy": 1.0, "form": 0.0}, {"accuracy": 0.0, "form": 1.0}
    reported = {0: [right] * 4, EQUAL: [right, wrong, right, wrong], 2: [right, wrong, {"accuracy": 1.0}, wrong]}
    for at, metrics in {**reported, 3: [{}, {}, {"form": 1.0, "accuracy": 0.0}, {}]}.items():
        batch.groups[at] = with_columns(batch.groups[at], env_metrics=metrics)

    def found(*names: str) -> list[int]:
        return trained_groups(batch, AlgorithmConfig(zero_variance_filter=True, filter_reward_metric=list(names)))

    assert found("accuracy") == [1, 2]
    assert found("accuracy", "form") == [3], "by the sum; a sample that does not report it has 0"
    assert found() == [0, 2, 3]
    with pytest.raises(DataError, match=r"g1-0.*'acuracy'.*it reports accuracy, form"):
        found("accuracy", "acuracy")
    assert trained_groups(batch, AlgorithmConfig(filter_reward_metric=["acuracy"])) == [0, 1, 2, 3]


def test_several_rewards_of_a_sample_are_those_that_the_environment_reports(tmp_path: Path) -> None:
    run, batch = some_batch(tmp_path / "run")
    gdpo = {"advantage_estimator": "gdpo", "gdpo": {"rewards": {"reward": 1.0, "form": 0.5}}}
    rows, _ = one_rank(run, batch, **gdpo)
    summed = []
    for group in batch.groups:
        forms = [sample.env_metrics["form"] for sample in group.samples]
        for reward, form in zip(group.rewards, forms, strict=True):
            parts = (
                (reward - fmean(group.rewards)) / (stdev(group.rewards) + 1e-6),
                (form - fmean(forms)) / stdev(forms),
            )
            summed.append(parts[0] + 0.5 * parts[1])
    counted = [one for at, one in enumerate(summed) if at != 4 * MUTED[0] + MUTED[1]]
    expected = [(one - fmean(counted)) / stdev(counted) for one in summed]
    for row, worth_of_it in zip(rows, expected, strict=True):
        assert of(row)[mask(row)].tolist() == pytest.approx([worth_of_it] * row.trained, rel=1e-4, abs=1e-4)
    assert any(of(row).any() for row in rows[4 * EQUAL : 4 * EQUAL + 4]), "its rewards are equal, the others are not"
    misnamed = {"advantage_estimator": "gdpo", "gdpo": {"rewards": {"reward": 1.0, "from": 0.5}}}
    with pytest.raises(
        DataError,
        match=r"no sample has the metric 'from', which trainer.algorithm.gdpo.rewards names; .* it reports form",
    ):
        one_rank(run, batch, **misnamed)


def test_remax_compares_with_the_greedy_response(tmp_path: Path) -> None:
    run, batch = some_batch(tmp_path / "run")
    rows, _ = one_rank(run, batch, advantage_estimator="remax")
    for row in rows:
        group = batch.groups[row.ref.group]
        better = group.rewards[row.ref.index] - 0.1 * row.ref.group
        assert of(row)[mask(row)].tolist() == pytest.approx([better] * row.trained)
    batch.groups[2] = replace(batch.groups[2], baseline=None)
    with pytest.raises(DataError, match="group g1-2 was generated without a greedy response"):
        one_rank(run, batch, advantage_estimator="remax")


def test_the_filter_in_the_mini_batches(tmp_path: Path, two: Ranks) -> None:
    run, batch = some_batch(tmp_path / "run")
    (run.path / batch.groups[EQUAL].path).unlink()  # not even read
    options = {"run": str(run.path), "out": str(tmp_path), "settings": {"on": SETTINGS["filtered"]}}
    two.play([("scenarios:worth", options)])
    parts = [part["on"] for part in told(tmp_path, 2)]
    lengths = {
        at: sum(int(s.loss_mask.sum()) for s in read_tensors(run.path / batch.groups[at].path)) for at in (0, 2, 3)
    }
    assert all(part["tokens"] == [lengths[0], lengths[2] + lengths[3]] for part in parts)
    weights = [weight for part in parts for weight in part["weights"].values()]
    assert len(weights) == 12
    assert set(weights) <= {0.0, 1 / lengths[0], 1 / (lengths[2] + lengths[3])}


def test_a_batch_that_teaches_nothing_moves_nothing(tmp_path: Path, model_path: Path, alone: World) -> None:
    run, batch = some_batch(tmp_path / "run")
    engine = make_engine(alone, str(model_path), {})
    train_steps(engine, run, range(1, 2), {"micro": 4})  # momentum and weight decay would move it from here on
    batch = replace(batch, groups=[with_columns(group, rewards=[1.0] * 4) for group in batch.groups])
    algorithm = AlgorithmConfig(zero_variance_filter=True)
    (mini,) = load(run, batch, algorithm, 4, MicroBatchLimit(4), alone)
    score(engine, mini, MicroBatchLimit(4), old=True, reference=True)
    advantages = estimate_advantages(batch, [mini.rows], algorithm, alone.sum)
    before, updates = parameters(engine), engine.updates
    update = train(engine, mini, build_objective(algorithm))
    assert update.report.skipped
    assert engine.updates == updates
    assert all(torch.equal(value, before[name]) for name, value in parameters(engine).items())
    described = describe_batch(batch, advantages, algorithm) | describe_updates([update])
    assert described["reward/trained_groups_without_spread"] == 1, "none is left to train"
    assert all(math.isfinite(value) for value in described.values())


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no.such:thing", "cannot import 'no.such'"),
        (f"{OWN}:nothing", "has no function 'nothing'"),
        ("grop", "did you mean grpo"),
    ],
)
def test_an_estimator_that_is_not_there(tmp_path: Path, name: str, message: str) -> None:
    run, batch = some_batch(tmp_path / "run")
    with pytest.raises(ConfigError, match=message):
        one_rank(run, batch, advantage_estimator=name)


def test_a_contrast_of_hints_modulates_instead_of_the_divergence() -> None:
    """Of three trained tokens the first gets 0.5 tanh(2) more, the others nothing; a rank without samples has the same metrics."""
    zeros = torch.zeros(4)
    samples = pack([Row(torch.arange(4), torch.tensor([0.0, 1, 1, 1]), zeros, zeros.int(), zeros, "stop")])
    samples.scores.old_logprobs, samples.scores.teacher_logprobs = -torch.ones(4), torch.tensor([-2.0, -3.0, -4.0, 0.0])
    samples.scores.advantages, samples.scores.contrasts = torch.ones(4), torch.tensor([0.04, 0.0, 0.0, 9.0])
    settings = {"enable": True, "use_rewards": True, "self_teacher": {"model": "policy", "wrong_hints": 1}}
    distillation = build(DistillationConfig, settings)
    metrics = subtract_divergence([samples], distillation, AlgorithmConfig(), list)
    assert samples.scores.advantages.tolist() == pytest.approx([3 * 1.4820138, 1.5, 1.5, 1])
    assert metrics["distillation/modulated"] == pytest.approx(1 / 3)
    assert metrics["distillation/penalty"] == pytest.approx((3 - 3 * 1.4820138 - 3) / 3)
    assert subtract_divergence([pack([])], distillation, AlgorithmConfig(), list).keys() == metrics.keys()


def test_what_a_teacher_subtracts_is_weighed_by_the_drift_from_it() -> None:
    """Divergences of 1, 2 and 3 nats; of these 6, 0, 1 and 3 came before."""
    zeros = torch.zeros(4)
    row = Row(torch.arange(4), torch.tensor([0.0, 1, 1, 1]), zeros, zeros.int(), zeros, "stop")
    found = dict[float, list[float]]()
    for gamma in (0.0, 0.5):
        samples = pack([row])
        samples.scores.old_logprobs = torch.tensor([-1.0, -1.0, -1.0, 0.0])
        samples.scores.teacher_logprobs = torch.tensor([-2.0, -3.0, -4.0, 0.0])
        samples.scores.advantages = torch.ones(4)
        distillation = DistillationConfig(enable=True, kl_penalty_coef=2.0, iw_opd_gamma=gamma)
        metrics = subtract_divergence([samples], distillation, AlgorithmConfig(), list)
        assert metrics["distillation/reverse_kl"] == pytest.approx(2.0)
        found[gamma] = samples.scores.advantages.tolist()
    assert found[0.0] == pytest.approx([1 - 2 * 1, 1 - 2 * 2, 1 - 2 * 3, 1])
    assert found[0.5] == pytest.approx([1 - 2 * 1.5, 1 - 2 * 2 * (1.5 - 0.5 / 6), 1 - 2 * 3 * (1.5 - 0.5 / 2), 1])
