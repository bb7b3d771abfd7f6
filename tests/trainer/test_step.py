"""The way from the loop of jobs/train.py to the formula of a loss, measured while a step is trained."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from hpcrl.algorithms.kl import adapted
from hpcrl.algorithms.losses import LossTokens, Values
from hpcrl.config import AlgorithmConfig
from hpcrl.config.validate import build
from hpcrl.data.group_file import read_group
from hpcrl.errors import ConfigError
from hpcrl.rundir.commit import write_json
from hpcrl.rundir.layout import Run
from hpcrl.runtime.heartbeat import Heartbeat
from hpcrl.runtime.signals import StopSignal
from hpcrl.trainer.advantages import KlRewardPenalty
from hpcrl.trainer.backends.fsdp.engine import FsdpPolicy
from hpcrl.trainer.batching import micro_batch_limits
from hpcrl.trainer.critic.ranks import ModelRanks
from hpcrl.trainer.distributed import World
from hpcrl.trainer.loss import build_policy_loss
from hpcrl.trainer.metrics import PhaseTimer, step_line
from hpcrl.trainer.mismatch import MismatchLimit
from hpcrl.trainer.models.flops import ModelFlops
from hpcrl.trainer.offline.build import objective_of
from hpcrl.trainer.packing import pack
from hpcrl.trainer.saving.checkpoint import ResumePoint
from hpcrl.trainer.saving.dump import Dumps
from hpcrl.trainer.step import Learner
from hpcrl.trainer.stop import StopConsensus, Stopping
from hpcrl.types import Batch
from tests.paths import ROOT
from tests.rows import with_columns
from tests.trainer.critic_scenarios import make_critic, section
from tests.trainer.material import make_batch, make_run
from tests.trainer.ranks import Ranks
from tests.trainer.scenarios import make_engine, parameters

OWN = f"{__name__}:recorded"
WARNED = MismatchLimit(0.3, "warn")  # samples are made up
MOST_CALLS = 4
TEMPERATURE = 0.9  # of make_engine
stacks: list[list[str]] = []


def recorded(tokens: LossTokens, *, eps_clip_low: float, algorithm: Any) -> Values:
    """A user's own loss: notes who called it."""
    assert eps_clip_low == algorithm.eps_clip_low
    frame, names = sys._getframe(), list[str]()
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(ROOT / "hpcrl") or path.is_relative_to(ROOT / "jobs"):
            names.append(f"{path.relative_to(ROOT)}:{frame.f_code.co_name}")
        frame = frame.f_back
    stacks.append(names)
    return -tokens.logprobs * tokens.advantages, {}


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return make_run(tmp_path / "run")


def learner(
    run: Run,
    world: World,
    model_path: Path,
    limits: tuple[int, int],
    algorithm: dict[str, Any],
    mismatch: MismatchLimit = WARNED,
    dumped: bool = False,
    critic: dict[str, Any] | None = None,
) -> Learner:
    """Return what trains batches of two groups in two mini-batches, with a critic if it has settings; limits: samples in training and in scoring."""
    changes = {"algorithm": {"advantage_estimator": "grpo", **algorithm}, "train_batch_size": 2}
    sizes = {"policy_mini_batch_size": 1, "micro_train_batch_size_per_gpu": limits[0]}
    sizes |= {"micro_forward_batch_size_per_gpu": limits[1], "dump_data_batch": dumped}
    sizes |= {"critic_mini_batch_size": 2, "critic": critic or {}}
    trainer = section(str(model_path), {"trainer": {**changes, **sizes}})
    engine = make_engine(world, str(model_path), {"trainer": {"algorithm": changes["algorithm"]}})
    consensus = StopConsensus(world, StopSignal(), Heartbeat(run, 1, "rank-0"))
    return Learner(
        run, ModelRanks(world, world), trainer, engine, make_critic(world, trainer) if critic else None,
        objective=objective_of(trainer), limits=micro_batch_limits(trainer, None), model_flops=ModelFlops(1.0, 1, 1), max_seq_len=40, mismatch=mismatch,
        dumps=Dumps(run, 1, world), consensus=consensus, start=ResumePoint(),
    )  # fmt: skip


def test_four_calls_from_the_loop_to_the_formula(run: Run, alone: World, model_path: Path) -> None:
    batch = make_batch(run, step=1, groups=2, size=3)
    stacks.clear()
    timer = PhaseTimer()
    learner(run, alone, model_path, (2, 2), {"policy_loss_type": OWN}).train(batch, timer)
    assert len(stacks) == 4, "two mini-batches of three samples, two at a time"
    assert (timer.begun, timer.expected, timer.phase) == (4, 4, "")
    # the call of learner.train by the loop, those below it, and that of the formula
    calls = {len(stack) + 1 for stack in stacks}
    print(f"calls from the loop to the formula: {max(calls)}: {' < '.join(stacks[0])}")
    assert max(calls) <= MOST_CALLS


@pytest.mark.parametrize("score", [1, 3, 64])
def test_another_limit_in_scoring_changes_nothing(run: Run, alone: World, model_path: Path, score: int) -> None:
    batch = make_batch(run, step=1, groups=2, size=3)
    settings = {"use_kl_loss": True}
    expected, found = (
        learner(run, alone, model_path, limits, settings).train(batch, PhaseTimer()) for limits in ((2, 2), (2, score))
    )
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, abs=1e-5), name


class Counted(FsdpPolicy):
    """Counts the passes that score samples."""

    passes: int = 0

    def logprobs(self, batches: Any, *, reference: bool = False) -> Iterator[torch.Tensor]:
        self.passes += 1
        return super().logprobs(batches, reference=reference)

    def logprobs_and_norms(self, batches: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        self.passes += 1
        return super().logprobs_and_norms(batches)


def test_old_logprobs_of_later_mini_batches_are_estimated_without_a_pass(
    run: Run, alone: World, model_path: Path
) -> None:
    batch = make_batch(run, step=3, groups=2, size=3)  # by version 0: two steps old
    found, passes = {}, {}
    for estimated in (False, True):
        own = learner(run, alone, model_path, (2, 2), {"use_kl_loss": False, "approximate_old_logprobs": estimated})
        own.policy.__class__ = Counted
        found[estimated] = own.train(batch, PhaseTimer())
        assert isinstance(own.policy, Counted)
        passes[estimated] = own.policy.passes
    assert passes == {False: 1, True: 0}, "the first of two mini-batches meets the old policy itself"
    mean, exact = (found[estimated]["policy/loss_metrics/ratio"] for estimated in (True, False))
    assert mean != pytest.approx(exact, abs=1e-3)
    assert found[True]["policy/grad_norm"] > 0


def test_norms_and_old_logprobs_are_of_one_pass(run: Run, alone: World, model_path: Path) -> None:
    """With old log-probabilities or without, and however micro-batches are divided."""
    batch = make_batch(run, step=1, groups=2, size=3)
    settings = {"use_kl_loss": False, "advantage_estimator": "optimal_token_baseline"}
    found = []
    for limits, rollout in (((1, 1), False), ((2, 64), False), ((2, 2), True)):
        own = learner(run, alone, model_path, limits, {**settings, "use_rollout_logprobs_for_loss": rollout})
        own.policy.__class__ = Counted
        found.append(own.train(batch, PhaseTimer()))
        assert isinstance(own.policy, Counted)
        assert own.policy.passes == 2, "one for each mini-batch"
    for name, value in found[0].items():
        assert found[1][name] == pytest.approx(value, abs=1e-5), name
    assert found[2]["loss/avg_raw_advantages_abs"] == pytest.approx(found[0]["loss/avg_raw_advantages_abs"])
    assert found[0]["policy/grad_norm"] > 0
    compared = learner(run, alone, model_path, (2, 2), {**settings, "advantage_estimator": "opo"})
    other = compared.train(batch, PhaseTimer())["loss/avg_raw_advantages_abs"]
    assert other != pytest.approx(found[0]["loss/avg_raw_advantages_abs"], rel=1e-3)


def test_what_the_environment_answers_is_learned_too(run: Run, alone: World, model_path: Path) -> None:
    """Its likelihood alone is trained where advantages are 0: it rises."""
    batch = make_batch(run, step=1, groups=2, size=3)
    batch = replace(batch, groups=[with_columns(group, rewards=[1.0] * 3) for group in batch.groups])
    settings = {"use_kl_loss": False, "observation_nll_coef": 1.0, "policy_loss_type": "gpg"}
    own = learner(run, alone, model_path, (2, 2), settings)
    losses = [own.train(batch, PhaseTimer())["policy/observation_nll"] for _ in range(3)]
    assert losses[0] > losses[1] > losses[2] > 0
    silent = learner(run, alone, model_path, (2, 2), {**settings, "observation_nll_coef": None})
    described = silent.train(batch, PhaseTimer())
    assert "policy/observation_nll" not in described
    assert described["policy/grad_norm"] == 0


def test_what_an_estimator_keeps_is_saved_and_goes_back_with_a_batch_that_is_not_begun(
    run: Run, alone: World, model_path: Path
) -> None:
    first, second = (make_batch(run, step, groups=2, size=3) for step in (1, 2))
    settings = {"advantage_estimator": "rae", "use_kl_loss": False, "use_rollout_logprobs_for_loss": True}
    own = learner(run, alone, model_path, (2, 2), settings)
    own.train(first, PhaseTimer())
    rewards = [reward for group in first.groups for reward in group.rewards]
    saved = own.extra_state()
    assert saved == {"rae/random": pytest.approx((1 - 0.95**6) * sum(rewards) / 6)}
    own.consensus.mark_stopped()
    with pytest.raises(Stopping, match=r"update\.micro_batch"):
        own.train(second, PhaseTimer())
    assert own.extra_state() == saved


def test_log_probabilities_of_another_model_end_the_run_before_it_trains_on_them(
    run: Run, alone: World, model_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = {"use_kl_loss": False}
    first, second = (make_batch(run, step, groups=2, size=3) for step in (1, 2))
    strict = learner(run, alone, model_path, (2, 2), settings, MismatchLimit(0.3))
    with pytest.raises(
        ConfigError, match=r"step 1: .* differ by \d.* version 0; generator.max_logprob_mismatch is 0\.3\."
    ):
        strict.train(first, PhaseTimer())
    assert strict.policy.updates == 0
    assert "policy/logprob_mismatch" not in strict.train(second, PhaseTimer()), "its tokens are older than the weights"
    assert learner(run, alone, model_path, (2, 2), settings, MismatchLimit(9.0)).train(first, PhaseTimer())
    assert not caplog.records
    metrics = learner(run, alone, model_path, (2, 2), settings).train(first, PhaseTimer())
    assert metrics["policy/logprob_mismatch"] > 0.3
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_a_few_odd_tokens_are_no_other_model() -> None:
    def sums(*apart: float) -> dict[str, float]:
        squared = sum(value**2 for value in apart)
        return {"current_tokens": len(apart), "current_abs_diff": sum(apart), "current_abs_diff_squared": squared}

    limit = MismatchLimit(0.3)
    limit.check(1, sums(9.0, *[0.01] * 9), speaks=True)
    limit.check(1, sums(), speaks=True)
    with pytest.raises(ConfigError, match=r"differ by 0\.5 on average over 2000 tokens"):
        limit.check(1, sums(*[0.1, 0.9] * 1000), speaks=True)


def algorithm_section(**changes: Any) -> AlgorithmConfig:
    control = {"type": "adaptive", "kl_target": 0.1, "horizon": 100}
    return build(AlgorithmConfig, {"use_kl_loss": False, "use_kl_in_reward": True, "kl_ctrl": control, **changes})


@pytest.mark.parametrize("divergence", [0.0, 0.1, 10.0])
def test_a_batch_larger_than_the_horizon_does_not_turn_the_penalty_around(divergence: float) -> None:
    assert 0.8 <= adapted(1.0, divergence, 1e6, target=0.1, horizon=100) <= 1.2
    assert adapted(1.0, 1.0, 50, target=0.1, horizon=100) == pytest.approx(1.1)


def test_a_restart_goes_on_where_it_was() -> None:
    first = KlRewardPenalty(algorithm_section(kl_loss_coef=0.5), {})
    first.adapt(1.0, 50)
    assert first.coefficient == pytest.approx(0.55)
    assert KlRewardPenalty(algorithm_section(kl_loss_coef=0.5), first.extra_state()).coefficient == first.coefficient


def test_another_start_is_what_a_user_asks_for() -> None:
    first = KlRewardPenalty(algorithm_section(kl_loss_coef=0.5), {})
    first.adapt(1.0, 50)
    assert KlRewardPenalty(algorithm_section(kl_loss_coef=0.2), first.extra_state()).coefficient == 0.2
    fixed = KlRewardPenalty(algorithm_section(kl_loss_coef=0.5, kl_ctrl={}), first.extra_state())
    fixed.adapt(1.0, 50)
    assert (fixed.coefficient, fixed.extra_state()) == (0.5, {})


@dataclass(frozen=True, kw_only=True)
class Surprising(AlgorithmConfig):
    surprise: float = 0.5
    """Weight of the surprise in my loss."""


def surprised(tokens: LossTokens, *, surprise: float) -> Values:
    return -tokens.logprobs * (tokens.advantages + surprise), {}


def misspelt(tokens: LossTokens, *, surprize: float) -> Values:
    return tokens.logprobs * surprize, {}


def test_a_loss_of_ones_own_has_its_settings() -> None:
    found = build_policy_loss(Surprising(policy_loss_type=f"{__name__}:surprised", surprise=0.25))
    assert found.keywords == {"surprise": 0.25}
    with pytest.raises(ConfigError, match=r"misspelt.*parameter 'surprize' is no setting.*did you mean 'surprise'"):
        build_policy_loss(Surprising(policy_loss_type=f"{__name__}:misspelt"))


def test_a_step_in_the_log() -> None:
    metrics = {
        "loss/avg_final_rewards": 0.4125,
        "policy/final_loss": -0.00312,
        "policy/grad_norm": 1.5,
        "timing/step": 7.84,
    }
    assert step_line(12, 128, metrics) == "step 12/128: reward 0.4125, loss -0.00312, grad norm 1.5, 7.8 s"


FORKS = {"use_kl_loss": False, "top_entropy_quantile": 0.25}


def forks_on_ranks(world: World, options: dict[str, Any]) -> None:
    """A scenario of ranks: train on the tokens of highest entropy."""
    run = Run.open(options["run"])
    batch = Batch.from_json(json.loads(run.batch(1).read_text()))
    found = learner(run, world, Path(options["model"]), (2, 2), FORKS).train(batch, PhaseTimer())
    if world.first:
        write_json(Path(options["out"]), found)


def test_the_share_of_high_entropy_is_of_each_mini_batch_however_it_is_divided(
    run: Run, alone: World, two: Ranks, model_path: Path, tmp_path: Path
) -> None:
    batch = make_batch(run, step=1, groups=2, size=3)
    write_json(run.batch(1), batch.to_json())
    expected = learner(run, alone, model_path, (1, 1), FORKS).train(batch, PhaseTimer())
    found = learner(run, alone, model_path, (64, 2), FORKS).train(batch, PhaseTimer())
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, abs=1e-5), name
    options = {"run": str(run.path), "model": str(model_path), "out": str(tmp_path / "found")}
    two.play([("test_step:forks_on_ranks", options)])
    found = json.loads((tmp_path / "found").read_text())
    for name in ("policy/loss_metrics/selected", "policy/final_loss", "policy/grad_norm"):
        assert found[name] == pytest.approx(expected[name], abs=1e-5), name
    tokens = [sum(pack(read_group(run.path / group.path)).trained) for group in batch.groups]
    kept = sum(math.floor(0.25 * (count - 1)) + 1 for count in tokens)
    assert expected["policy/loss_metrics/selected"] == pytest.approx(kept / sum(tokens), rel=1e-6)


def test_the_critic_is_trained_alone_first(run: Run, alone: World, model_path: Path) -> None:
    algorithm = {"advantage_estimator": "gae", **FORKS}
    own = learner(run, alone, model_path, (2, 2), algorithm, critic={"warmup_steps": 1})
    own.schedule(3)
    engines: list[Any] = [own.policy, own.critic]
    policy, critic = ({name: value.clone() for name, value in parameters(each).items()} for each in engines)

    def moved(engine: Any, before: dict[str, torch.Tensor]) -> bool:
        return any(not torch.equal(value, before[name]) for name, value in parameters(engine).items())

    batch = make_batch(run, step=1, groups=2, size=3)
    entropies, own.policy.entropies = (
        own.policy.entropies,
        lambda *_: pytest.fail("a pass for tokens that no loss counts"),
    )
    first = own.train(batch, PhaseTimer())
    own.policy.entropies = entropies
    assert moved(engines[1], critic)
    assert not moved(engines[0], policy)
    assert first["critic/grad_norm"] > 0
    assert first.keys() & {"policy/final_loss", "policy/policy_lr", "policy/grad_norm"} == set()
    cost = own.cost(batch, {"step": 2.0, "critic_train": 1.0})
    assert cost["throughput/tokens_per_second"] > 0
    assert "throughput/train_tokens_per_second_per_rank" not in cost
    second = own.train(make_batch(run, step=2, groups=2, size=3), PhaseTimer())
    assert moved(engines[0], policy)
    at_once = learner(run, alone, model_path, (2, 2), algorithm, critic={"warmup_steps": 0})
    at_once.schedule(2)
    expected = at_once.train(make_batch(run, step=1, groups=2, size=3), PhaseTimer())
    assert second["policy/policy_lr"] == expected["policy/policy_lr"]


def test_a_dump_has_the_entropy_of_the_policy_before_the_update(run: Run, alone: World, model_path: Path) -> None:
    trained = learner(run, alone, model_path, (2, 2), {}, dumped=True)
    batch, before = make_batch(run, step=1, groups=2, size=3), AutoModelForCausalLM.from_pretrained(model_path)
    trained.train(batch, PhaseTimer())
    for number in range(2):
        found = load_file(run.dump(1) / f"mini-{number}-rank-0.safetensors")
        for part in zip(
            *(found[name].split(found["lengths"].tolist()) for name in ("token_ids", "loss_mask", "entropies")),
            strict=True,
        ):
            ids_T, mask_T, entropies_T = part
            with torch.no_grad():
                distribution = torch.distributions.Categorical(logits=before(ids_T[None]).logits[0] / TEMPERATURE)
            torch.testing.assert_close(entropies_T, distribution.entropy() * mask_T, rtol=1e-4, atol=1e-5)
