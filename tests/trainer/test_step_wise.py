"""Samples whose turns are rows of their own: each counts once, and teaches what it would teach as a whole."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hpcrl.algorithms.advantages import ESTIMATORS, is_per_token, is_per_turn
from hpcrl.algorithms.reductions import Reduction
from hpcrl.config import AlgorithmConfig
from hpcrl.config.validate import build
from hpcrl.errors import ConfigError
from hpcrl.rundir.commit import write_json
from hpcrl.rundir.layout import Run
from hpcrl.trainer.advantages import carried_numbers, estimate_advantages, named_numbers
from hpcrl.trainer.backends.base import UpdateResult
from hpcrl.trainer.batching import MicroBatchLimit, mini_batches, trained_groups
from hpcrl.trainer.distributed import World
from hpcrl.trainer.loss import build_objective
from hpcrl.trainer.read_batch import load_rows
from hpcrl.types import Batch, Row
from tests.rows import read_tensors, with_columns, write_group
from tests.trainer.launcher import run_ranks
from tests.trainer.material import load, make_batch, make_run, score, train, views
from tests.trainer.scenarios import make_engine, parameters
from tests.trainer.test_advantages import SETTINGS, told

GROUPS, SIZE = 4, 4
FIRST_TURN = 5  # tokens up to the one in the middle that the policy did not choose
BY_SAMPLE = [name for name, one in ESTIMATORS.items() if not is_per_token(one) and not is_per_turn(one)]
BY_TURN = [name for name, one in ESTIMATORS.items() if is_per_turn(one)]


def turns_of(sample: Row) -> list[Row]:
    """Return a sample as its turns, as a template writes them that keeps the past; the first turn is rewarded too."""
    if len(sample.token_ids) <= FIRST_TURN + 2:
        return [sample]
    first = replace(sample, **{name: getattr(sample, name)[:FIRST_TURN].clone() for name in COLUMNS})
    first.rewards[-1] = 7.0
    mask_T = sample.loss_mask * (torch.arange(len(sample.token_ids)) > FIRST_TURN)
    return [first, replace(sample, loss_mask=mask_T)]


COLUMNS = ("token_ids", "loss_mask", "rollout_logprobs", "versions", "rewards")


def both(path: Path) -> tuple[tuple[Run, Batch], tuple[Run, Batch]]:
    """Return four groups of four whole samples, and the same with a row for each turn."""
    whole, turned = make_run(path / "whole"), make_run(path / "turns")
    batch = make_batch(whole, 1, GROUPS, SIZE)
    groups = []
    for at, group in enumerate(batch.groups):
        reported = [{"form": float((at + number) % 3)} for number in range(SIZE)]
        batch.groups[at] = with_columns(group, baseline=0.1 * at, env_metrics=reported)
        rows = [turns_of(sample) for sample in read_tensors(whole.path / group.path)]
        flat = [row for own in rows for row in own]
        meta = with_columns(
            batch.groups[at], shared=[], rows=[len(own) for own in rows], lengths=[len(row.token_ids) for row in flat]
        )
        groups.append(write_group(turned.path / group.path, flat, meta))
    other = replace(batch, groups=groups)
    write_json(turned.batch(1), other.to_json())
    assert 0 < sum(len(one.lengths) == 1 for group in groups for one in group.samples) < GROUPS * SIZE, (
        "some have one turn"
    )
    return (whole, batch), (turned, other)


def with_turns(batch: Batch, *, roles: bool) -> Batch:
    """Return a batch of `both` whose groups know the turns of each row: rewards of tenths, and one of two states."""
    groups = []
    for at, group in enumerate(batch.groups):
        turns, ends, numbers = list[int](), list[int](), list[int]()
        for sample in group.samples:
            length = sample.lengths[-1]
            own = [FIRST_TURN, length] if length > FIRST_TURN + 2 else [length]
            turns += [len(own)] if len(sample.lengths) == 1 else [1] * len(own)
            ends += own
            numbers += range(len(own))
        places = range(len(ends))
        columns = {
            "turn_ends": ends,
            "turn_rewards": [(7 * place + at) % 5 / 10 for place in places],
            "turn_roles": [("asks", "answers")[number] if roles else "" for number in numbers],
            "turn_anchors": [2 * number + (place % 3 == 0) for number, place in zip(numbers, places, strict=True)],
        }
        groups.append(with_columns(group, turns=turns, **columns))
    return replace(batch, groups=groups)


def worth(run: Run, batch: Batch, penalty: float = 0.0, **settings: Any) -> list[list[float]]:
    """Return the advantages of each sample's trained tokens, whatever its rows."""
    (refs,) = mini_batches(batch, GROUPS)
    packed = load_rows(run, batch, refs)
    packed.scores.penalties = penalty * packed.labels.double() * packed.loss_mask
    estimate_advantages(batch, [packed], build(AlgorithmConfig, settings), list)
    found: list[list[float]] = [[] for _ in range(GROUPS * SIZE)]
    for row in views([packed]):
        sample = batch.groups[row.ref.group].owners[row.ref.index]
        trained = row.of(packed.loss_mask) > 0
        found[row.ref.group * SIZE + sample] += row.of(packed.scores.advantages)[trained].tolist()
    return found


@pytest.mark.parametrize("penalty", [0.0, 0.01])
@pytest.mark.parametrize("name", BY_SAMPLE)
def test_every_turn_has_what_its_sample_is_worth(tmp_path: Path, name: str, penalty: float) -> None:
    """Rewards of earlier turns do not count, penalties of all do; mean and deviation are those of samples, not of rows."""
    whole, turned = both(tmp_path)
    settings = SETTINGS[name] if name == "gdpo" else {"advantage_estimator": name}
    expected = worth(*whole, penalty, **settings)
    for found, values in zip(worth(*turned, penalty, **settings), expected, strict=True):
        assert found == pytest.approx(values, abs=1e-6)
    if name != "online_dpo" or penalty:  # without penalties all pairs have one weight
        assert len({value for values in expected for value in values}) > GROUPS


@pytest.mark.parametrize("penalty", [0.0, 0.01])
@pytest.mark.parametrize("roles", [False, True])
def test_a_turn_is_worth_the_same_as_a_row_and_within_one(tmp_path: Path, roles: bool, penalty: float) -> None:
    (run, whole), (other, turned) = both(tmp_path)
    whole, turned = with_turns(whole, roles=roles), with_turns(turned, roles=roles)
    found = dict[str, list[list[float]]]()
    for name in ["grpo", "gdpo", *BY_TURN, "rae"]:
        settings = SETTINGS[name] if name == "gdpo" else {"advantage_estimator": name, "gamma": 0.9}
        found[name] = worth(run, whole, penalty, **settings)
        for one, expected in zip(worth(other, turned, penalty, **settings), found[name], strict=True):
            assert one == pytest.approx(expected, abs=1e-6), name
    kinds = {name: sum(len(set(values)) > 1 for values in samples) for name, samples in found.items()}
    assert kinds["gigpo"] > 0
    assert (kinds["grpo"] > 0) == roles, "an estimator of samples compares roles by themselves"


def test_each_role_is_compared_with_itself(tmp_path: Path) -> None:
    """By hand: the rewards of a role's turns in each sample against those of the same role in the group."""
    (run, batch), _ = both(tmp_path)
    batch = with_turns(batch, roles=True)
    found = worth(run, batch, advantage_estimator="grpo", grpo_norm_by_std=False)
    for at, group in enumerate(batch.groups):
        rewards = {
            role: {
                number: turn.reward
                for number, sample in enumerate(group.samples)
                for turn in sample.turns[0]
                if turn.role == role
            }
            for role in group.roles
        }
        for number, sample in enumerate(group.samples):
            expected = set()
            for turn in sample.turns[0]:
                of_role = rewards[turn.role]
                mean = sum(of_role.values()) / len(of_role) if len(of_role) > 1 else 0.0
                expected.add(round(turn.reward - mean, 6))
            assert {round(value, 6) for value in found[at * SIZE + number]} <= expected
    assert len({round(value, 6) for values in found for value in values}) > 3


def test_what_knows_one_reward_of_a_sample_is_refused_with_roles(tmp_path: Path) -> None:
    (run, batch), _ = both(tmp_path)
    batch = with_turns(batch, roles=True)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"advantage_estimator": "remax"}, "advantage_estimator=remax needs one reward of a sample"),
        ({"positive_nll_coef": 0.1}, "positive_nll_coef needs one reward of a sample"),
        ({"advantage_estimator": "reinforce++"}, "this environment has several roles in a sample"),
    ]
    for settings, said in cases:
        with pytest.raises(ConfigError, match=said):
            worth(run, batch, **settings)


def test_a_group_whose_roles_win_and_lose_is_worth_training(tmp_path: Path) -> None:
    """In a game of two sides every sample has the sum 0."""
    (_, batch), _ = both(tmp_path)
    algorithm = AlgorithmConfig(zero_variance_filter=True)
    batch = with_turns(batch, roles=True)
    (group, *others) = batch.groups
    count = sum(len(row) for sample in group.samples for row in sample.turns)
    won = [(-1.0) ** place for place in range(count)]
    for rewards, kept in ((won, 4), ([0.0] * count, 3)):
        first = with_columns(group, rewards=[0.0] * SIZE, turn_rewards=rewards)
        assert len(trained_groups(replace(batch, groups=[first, *others]), algorithm)) == kept


def test_turns_that_nobody_knows_are_not_compared(tmp_path: Path) -> None:
    _, turned = both(tmp_path)
    with pytest.raises(ConfigError, match="compares turns, and nothing says where those of these samples end"):
        worth(*turned, advantage_estimator="gigpo")


def test_moving_means_go_on_with_a_checkpoint(tmp_path: Path) -> None:
    """Two batches in one process, and in two of which the second continues from what the first has saved."""
    (run, batch), _ = both(tmp_path)
    batch = with_turns(batch, roles=True)
    algorithm = build(AlgorithmConfig, {"advantage_estimator": "rae", "rae": {"decay": 0.9}})
    (refs,) = mini_batches(batch, GROUPS)

    def trained(carried: dict[str, float]) -> torch.Tensor:
        packed = load_rows(run, batch, refs)
        estimate_advantages(batch, [packed], algorithm, list, carried)
        assert packed.scores.advantages is not None
        return packed.scores.advantages

    carried = dict[str, float]()
    first = trained(carried)
    saved = named_numbers(algorithm, carried)
    assert set(saved) == {f"rae/{batch.groups[0].data_source}/{role}" for role in ("asks", "answers")}
    second = trained(carried)
    assert not torch.equal(first, second)
    assert torch.equal(trained(carried_numbers(algorithm, saved)), second)
    assert carried_numbers(AlgorithmConfig(), saved) == {}, "another estimator has none"


def test_estimators_that_need_every_token_are_refused(tmp_path: Path) -> None:
    _, turned = both(tmp_path)
    with pytest.raises(
        ConfigError,
        match=r"step_wise_trajectories or enable_http_endpoint: estimators that are marked per_token, such as gae,",
    ):
        worth(*turned, advantage_estimator="reinforce++")


def test_every_number_of_ranks_gives_the_same(tmp_path: Path) -> None:
    """The turns of a sample may be on several ranks, and ranks need not have equally many."""
    _, (run, batch) = both(tmp_path)
    names = [*BY_SAMPLE, *BY_TURN, "normalized", "penalized", "own"]
    batch = with_turns(batch, roles=False)
    write_json(run.batch(1), batch.to_json())
    options = {"run": str(run.path), "out": str(tmp_path), "settings": {name: SETTINGS[name] for name in names}}
    for ranks in (1, 2, 3):
        result = run_ranks(ranks, json.dumps([["worth", options]]))
        assert result.returncode == 0, result.stderr
    (one,) = told(tmp_path, 1)
    for ranks in (2, 3):
        parts = told(tmp_path, ranks)
        assert {len(part["grpo"]["weights"]) for part in parts} != {0}
        for name in names:
            for part in parts:
                assert part[name]["means"] == pytest.approx(one[name]["means"], abs=1e-12)
                assert part[name]["tokens"] == one[name]["tokens"]
            for fact in ("advantages", "weights"):
                joined = {key: value for part in parts for key, value in part[name][fact].items()}
                assert len(joined) == sum(len(group.lengths) for group in batch.groups)
                for key, values in one[name][fact].items():
                    assert joined[key] == pytest.approx(values, abs=1e-6), (name, fact)


def test_an_optimizer_step_is_that_of_whole_samples(tmp_path: Path, model_path: Path, alone: World) -> None:
    """With the mean over tokens, where the template keeps the past: the same tokens after the same ones, weighed alike."""
    made: list[UpdateResult] = []
    models = []
    algorithm = AlgorithmConfig(use_kl_loss=True, kl_loss_coef=0.1)
    for run, batch in both(tmp_path):
        engine, limit = make_engine(alone, str(model_path), {}), MicroBatchLimit(3)
        (mini,) = load(run, batch, algorithm, GROUPS, limit, alone)
        score(engine, mini, limit, old=True, reference=True)
        estimate_advantages(batch, [mini.rows], algorithm, alone.sum)
        made.append(train(engine, mini, build_objective(algorithm)))
        models.append(parameters(engine))
    whole, turned = made
    assert turned.sums["tokens"] == whole.sums["tokens"]
    assert turned.sums["final_loss"] == pytest.approx(whole.sums["final_loss"], abs=1e-6)
    assert turned.report.grad_norm == pytest.approx(whole.report.grad_norm, rel=1e-4)
    for name, value in models[0].items():
        torch.testing.assert_close(models[1][name], value, atol=1e-5, rtol=0)


def test_means_of_samples_are_means_of_rows(tmp_path: Path, alone: World) -> None:
    """Each turn is a sample to the loss; the likelihood of positive samples is that of all turns of a sample which was rewarded."""
    _, (run, batch) = both(tmp_path)
    for at, group in enumerate(batch.groups):
        batch.groups[at] = with_columns(
            group, rewards=[0.0 if number == 1 else one for number, one in enumerate(group.rewards)]
        )
    (mini,) = load(run, batch, AlgorithmConfig(), 4, MicroBatchLimit(2), alone, Reduction("sequence_mean"))
    rows = views([mini.rows])
    assert [row.weight * row.trained for row in rows] == pytest.approx([1 / len(rows)] * len(rows))
    tokens = 0
    for row in rows:
        rewarded = batch.groups[row.ref.group].owners[row.ref.index] != 1
        assert (row.nll_weight > 0) == rewarded
        tokens += row.trained * rewarded
    assert {row.nll_weight for row in rows} == {0.0, 1 / tokens}


def test_groups_are_judged_by_their_outcomes(tmp_path: Path) -> None:
    _, (_, batch) = both(tmp_path)
    batch.groups[2] = with_columns(batch.groups[2], rewards=[0.5] * SIZE)
    assert trained_groups(batch, AlgorithmConfig(zero_variance_filter=True)) == [0, 1, 3]
