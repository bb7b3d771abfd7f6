"""What the losses promise beyond the numbers of others: no dependence on layout, true gradients, no NaN."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, get_args, get_type_hints

import pytest
import torch

from hpcrl.algorithms import losses, off_policy
from hpcrl.algorithms.kl import KL_ESTIMATORS, k3
from hpcrl.algorithms.losses import POLICY_LOSSES, LossTokens, clipped_surrogate, masked_sum
from hpcrl.algorithms.reductions import Reduction
from hpcrl.config import AlgorithmConfig
from hpcrl.config.sections.algorithm import OffPolicyCorrectionConfig
from hpcrl.config.validate import build
from hpcrl.errors import ConfigError
from hpcrl.trainer.loss import build_objective, build_policy_loss
from tests.algorithms.material import Sample, joined, make_samples, micro_batch, run, tokens_of, weights_of

OF_A_MICRO_BATCH = {"clip_cov", "kl_cov", "m2po"}  # they compare a token with the others of its micro-batch
BY_TOKEN = sorted(set(POLICY_LOSSES) - OF_A_MICRO_BATCH)
REDUCTIONS = sorted(set(get_args(get_type_hints(AlgorithmConfig)["loss_reduction"])) - {"token_mean_legacy"})
EVERYTHING: dict[str, Any] = {
    "use_kl_loss": True, "kl_loss_coef": 0.1, "use_entropy_loss": True, "entropy_loss_coef": 0.02, "positive_nll_coef": 0.3,
    "kl_importance_weighted": True,
}  # fmt: skip
CORRECTIONS: dict[str, dict[str, Any]] = {
    "token": {"tis_ratio_type": "token", "token_tis_ratio_clip_high": 1.2},
    "dropped": {"tis_ratio_type": "token", "token_tis_ratio_drop_high": 1.2},
    "sequence": {"tis_ratio_type": "sequence", "sequence_tis_ratio_clip_high": 1.3},
    "geometric": {"sequence_mask_metric": "geometric", "geo_mask_low": 0.85, "geo_mask_high": 1.2},
    "product": {"sequence_mask_metric": "product", "product_mask_low": 0.6, "product_mask_high": 1.5},
    "outliers": {"outlier_token_is_threshold_low": 0.5, "outlier_token_is_threshold_high": 1.8},
    "tokens": {"token_mask_is_threshold_low": 0.7, "token_mask_is_threshold_high": 1.5},
    "divergent": {"token_mask_kl_threshold": 0.01},
    "negative": {"negative_sample_mask_delta": 0.01},
}
CORRECTION = CORRECTIONS["token"] | CORRECTIONS["geometric"]
ORDERS = [[[4, 1, 5, 0, 3, 2]], [[0], [1], [2], [3], [4], [5]], [[5, 2, 0], [1, 3], [4]]]


def reduction(name: str) -> Reduction:
    return Reduction(name, max_seq_len=11)


def test_everything_documented_is_there() -> None:
    assert {name for table in CORRECTIONS.values() for name in table} == set(vars(OffPolicyCorrectionConfig()))


@pytest.mark.parametrize("order", ORDERS, ids=["permuted", "one by one", "uneven"])
@pytest.mark.parametrize("name", REDUCTIONS)
@pytest.mark.parametrize("loss", BY_TOKEN)
def test_layout_does_not_matter(loss: str, name: str, order: list[list[int]]) -> None:
    algorithm = {**EVERYTHING, "policy_loss_type": loss, "off_policy_correction": CORRECTION}
    samples = make_samples()
    expected = run(samples, algorithm, reduction(name), [[0, 1, 2, 3, 4, 5]])
    found = run(samples, algorithm, reduction(name), order)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    assert expected[0] != 0


@pytest.mark.parametrize("name", CORRECTIONS)
def test_corrections_are_those_of_samples_whatever_the_layout(name: str) -> None:
    plain = {"use_kl_loss": False}
    algorithm = {**plain, "off_policy_correction": CORRECTIONS[name]}
    samples = make_samples()
    expected = run(samples, algorithm, Reduction(), [[0, 1, 2, 3, 4, 5]])
    assert expected[0] != run(samples, plain, Reduction(), [[0, 1, 2, 3, 4, 5]])[0]
    for order in ORDERS:
        torch.testing.assert_close(run(samples, algorithm, Reduction(), order), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", KL_ESTIMATORS)
def test_divergences_are_those_of_tokens_whatever_the_layout(name: str) -> None:
    algorithm = {"kl_estimator_type": name, "kl_loss_coef": 1.0}
    samples = make_samples()
    expected = run(samples, algorithm, Reduction(), [[0, 1, 2, 3, 4, 5]])
    for order in ORDERS:
        torch.testing.assert_close(run(samples, algorithm, Reduction(), order), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("loss", sorted(OF_A_MICRO_BATCH))
def test_order_within_a_micro_batch_does_not_matter(loss: str) -> None:
    # so wide that every candidate is drawn, whatever chance says
    algorithm = {"policy_loss_type": loss, "use_kl_loss": False, "clip_cov": {"clip_ratio": 1.0, "clip_cov_lb": 0.1}}
    samples = make_samples()
    expected = run(samples, algorithm, reduction("token_mean"), [[0, 1, 2, 3, 4, 5]])
    found = run(samples, algorithm, reduction("token_mean"), [[3, 5, 1, 0, 2, 4]])
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def test_the_legacy_mean_is_one_of_micro_batches() -> None:
    samples, algorithm = make_samples(), {"kl_loss_coef": 0.1}
    pairs = [run(samples[at : at + 2], algorithm, Reduction(), [[0, 1]])[0] for at in (0, 2, 4)]
    found, _ = run(samples, algorithm, reduction("token_mean_legacy"), [[0, 1], [2, 3], [4, 5]])
    torch.testing.assert_close(found, torch.stack(pairs).mean())
    assert found.item() != pytest.approx(run(samples, algorithm, Reduction(), [[0, 1, 2, 3, 4, 5]])[0].item())


@pytest.mark.parametrize("loss", sorted(POLICY_LOSSES))
def test_gradients_are_those_of_the_value(loss: str) -> None:
    """Losses that stop a gradient inside are not gradients of their value; their weights are held fixed here."""
    algorithm = build(
        AlgorithmConfig, {"policy_loss_type": loss, "clip_cov": {"clip_cov_lb": 0.01}, "gmpo": {"log_clip_low": 0.02}}
    )
    policy_loss = build_policy_loss(algorithm)
    (sample,) = make_samples([6], seed=3, spread=0.05)
    stopped = loss in ("cispo", "rollout_is", "gspo", "turn_gspo", "ipa", "vespo")

    def value(logprobs: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(0)  # clip_cov draws tokens
        tokens = tokens_of([sample], logprobs)
        return masked_sum(policy_loss(tokens)[0], tokens.mask)

    leaf = sample.logprobs.clone().requires_grad_()
    if not stopped:
        assert torch.autograd.gradcheck(value, (leaf,), eps=1e-6, atol=1e-8)
        return
    (gradient,) = torch.autograd.grad(value(leaf), leaf)
    before = sample.rollout_logprobs if loss in ("rollout_is", "ipa", "vespo") else sample.old_logprobs
    least = {"cispo": 1.0, "vespo": 0.0, "ipa": 0.0}.get(loss, 0.8)
    ratio, kept = (sample.logprobs - before).exp(), sample.mask > 0
    if loss == "gspo":
        ratio = (sample.logprobs - before)[kept].mean().exp().expand_as(ratio)
    if loss in ("turn_gspo", "ipa"):  # the second of six tokens is the environment's
        difference = sample.logprobs - before
        ratio = torch.cat([difference[:1], difference[1:2], difference[2:].mean().expand(4)]).exp()
    if loss == "ipa":
        ratio = ratio.clamp(max=1) if sample.advantages[0] < 0 else torch.ones_like(ratio)
    if loss == "vespo":
        k, rate = (2, 3) if sample.advantages[0] >= 0 else (3, 2)
        whole = ratio[kept].prod()
        ratio = (whole**k * torch.exp(rate * (1 - whole))).expand_as(ratio)
    torch.testing.assert_close(gradient, -ratio.clamp(least) * sample.advantages * sample.mask)


@pytest.mark.parametrize("name", KL_ESTIMATORS)
@pytest.mark.parametrize("weighted", [False, True])
def test_gradients_of_divergences(name: str, weighted: bool) -> None:
    (sample,) = make_samples([6])

    def value(logprobs: torch.Tensor) -> torch.Tensor:
        ratio = losses.ratio(logprobs, sample.old_logprobs) if weighted else 1.0
        return KL_ESTIMATORS[name](logprobs, sample.ref_logprobs, ratio).sum()

    assert torch.autograd.gradcheck(value, (sample.logprobs.clone().requires_grad_(),), atol=1e-8)


def test_gspo_is_the_gradient_of_the_samples_ratio() -> None:
    """The token form moves the policy as the paper's loss of whole samples does, where advantages are one per sample."""
    (sample,) = make_samples([6], spread=0.05)
    leaf = sample.logprobs.clone().requires_grad_()
    wide = {"eps_clip_low": 1.0, "eps_clip_high": 9.0}
    (masked_sum(losses.gspo(tokens_of([sample], leaf), **wide)[0], sample.mask) / sample.mask.sum()).backward()
    other = sample.logprobs.clone().requires_grad_()
    mean = masked_sum(other - sample.old_logprobs, sample.mask) / sample.mask.sum()
    (-mean.exp() * sample.advantages[0]).backward()
    torch.testing.assert_close(leaf.grad, other.grad)


def test_a_turn_is_a_run_of_trained_tokens() -> None:
    """Two samples, of two turns and of one, with what has no meaning where nothing is trained."""
    values = torch.tensor([torch.nan, 1.0, 3.0, torch.nan, 5.0, 7.0, 2.0, 6.0], dtype=torch.float64)
    mask = torch.tensor([0, 1, 1, 0, 1, 1, 1, 1], dtype=torch.float64)
    found = losses.turn_means(values, mask, torch.tensor([6, 2]))
    assert found[mask > 0].tolist() == [2.0, 2.0, 6.0, 6.0, 4.0, 4.0]
    whole = losses.turn_means(values, mask, torch.tensor([8]))
    assert whole[mask > 0].tolist() == [2.0, 2.0, 5.0, 5.0, 5.0, 5.0]


def turned(logprobs: list[float], before: list[float], advantage: float) -> losses.LossTokens:
    """One sample of two turns of two tokens each, with one of the environment between them."""
    both = [torch.tensor([*values[:2], 0.0, *values[2:]], dtype=torch.float64) for values in (logprobs, before)]
    mask = torch.tensor([1, 1, 0, 1, 1], dtype=torch.float64)
    return losses.LossTokens(both[0], both[1], both[1], torch.full_like(mask, advantage), mask, torch.tensor([5]))


def test_what_went_astray_in_one_turn_is_clipped_without_the_other() -> None:
    """The logarithms of ratios are 0.5 and 0.1, mean 0.3, in the first turn, and -0.1 and 0.1, mean 0, in the second."""
    given = turned([-1.0, -1.0, -1.0, -1.0], [-1.5, -1.1, -0.9, -1.1], 2.0)
    loss, sums = losses.turn_gspo(given, eps_clip_low=0.2, eps_clip_high=0.2)
    assert loss[given.mask > 0].tolist() == pytest.approx([-2.4, -2.4, -2.0, -2.0])
    assert sums["clip_ratio"] == 2
    whole, sums = losses.gspo(given, eps_clip_low=0.2, eps_clip_high=0.2)
    assert whole[given.mask > 0].tolist() == pytest.approx([-2 * math.exp(0.15)] * 4)
    assert sums["clip_ratio"] == 0


def test_ipa_imitates_what_is_good_and_weighs_what_is_not() -> None:
    """Ratios of turns are exp(-0.3) and exp(0.2)."""
    logprobs, before = [-1.0, -2.0, -1.0, -2.0], [-0.8, -1.6, -1.2, -2.2]
    better, worse = turned(logprobs, before, 2.0), turned(logprobs, before, -2.0)
    kept = better.mask > 0
    loss, sums = losses.ipa(better, ratio_high=5.0)
    assert loss[kept].tolist() == pytest.approx([2.0, 4.0, 2.0, 4.0])
    assert sums["clip_ratio"] == 0
    loss, sums = losses.ipa(worse, ratio_high=5.0)
    assert loss[kept].tolist() == pytest.approx([-2 * math.exp(-0.3), -4 * math.exp(-0.3), -2.0, -4.0])
    assert sums["clip_ratio"] == 2
    loss, sums = losses.ipa(better, ratio_high=1.1)
    assert loss[kept].tolist() == pytest.approx([2.0, 4.0, 0.0, 0.0])
    assert sums["clip_ratio"] == 2


EXTREME = {
    "apart": [1e4, -1e4, 1e4, -1e4, 0.0],
    "up": [1e4] * 5,
    "down": [-1e4] * 5,
}


def extreme(case: str, dtype: torch.dtype) -> list[Sample]:
    """Return samples whose log-ratios, masks or lengths are extreme."""
    lengths = [1] if case == "one token" else [2, 3]
    samples = [_cast(sample, dtype) for sample in make_samples(lengths)]
    if case in EXTREME:
        shifts = torch.tensor(EXTREME[case]).split(lengths)
        samples = [
            replace(
                s, old_logprobs=s.logprobs - shift, rollout_logprobs=s.logprobs + shift, ref_logprobs=s.logprobs - shift
            )
            for s, shift in zip(samples, shifts, strict=True)
        ]
    if case == "masked":
        samples = [replace(sample, mask=torch.zeros_like(sample.mask)) for sample in samples]
    return samples


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", [*EXTREME, "masked", "one token"])
@pytest.mark.parametrize("loss", sorted(POLICY_LOSSES))
def test_everything_is_finite(loss: str, case: str, dtype: torch.dtype) -> None:
    samples = extreme(case, dtype)
    correction = {
        **CORRECTION, "tis_ratio_type": "sequence", "negative_sample_mask_delta": 0.1, "outlier_token_is_threshold_low": 1e-9,
        "token_mask_is_threshold_low": 0.0, "token_mask_is_threshold_high": 1e9, "token_mask_kl_threshold": 1e-3,
    }  # fmt: skip
    algorithm = {**EVERYTHING, "policy_loss_type": loss, "off_policy_correction": correction}
    for name in (*REDUCTIONS, "token_mean_legacy"):
        total, gradients = run(samples, algorithm, reduction(name), [list(range(len(samples)))])
        assert torch.isfinite(total)
        assert all(torch.isfinite(gradient).all() for gradient in gradients)
        if case == "masked":
            assert total == 0
            assert not torch.cat(gradients).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("name", KL_ESTIMATORS)
def test_divergences_are_finite(name: str, weighted: bool, dtype: torch.dtype) -> None:
    logprobs = torch.tensor([-0.5, -1e4, -1e4, -0.5, 0.0], dtype=dtype, requires_grad=True)
    reference, old = torch.tensor([[-1e4, -0.5, -1e4, -0.5, 0.0], [-0.5, -0.5, -0.5, -1e4, 0.0]], dtype=dtype)
    weights = losses.ratio(logprobs, old) if weighted else 1.0
    values = KL_ESTIMATORS[name](logprobs, reference, weights)
    assert values.dtype == torch.float32
    assert values.isfinite().all()
    values.sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", [*EXTREME, "masked", "one token"])
@pytest.mark.parametrize("name", CORRECTIONS)
def test_corrections_are_finite(name: str, case: str, dtype: torch.dtype) -> None:
    samples, algorithm = extreme(case, dtype), {"off_policy_correction": CORRECTIONS[name]}
    total, gradients = run(samples, algorithm, Reduction(), [list(range(len(samples)))])
    assert torch.isfinite(total)
    assert all(torch.isfinite(gradient).all() for gradient in gradients)


def test_a_loss_of_ones_own() -> None:
    algorithm = {"policy_loss_type": f"{__name__}:mine", "use_kl_loss": False, "loss_reduction": "token_sum"}
    samples = make_samples()
    total, _ = run(samples, algorithm, reduction("token_sum"), [[0, 1, 2, 3, 4, 5]])
    torch.testing.assert_close(total, 2 * masked_sum(joined(samples, "logprobs"), joined(samples, "mask")))


def test_a_loss_that_nobody_knows_is_an_error() -> None:
    with pytest.raises(ConfigError, match="policy_loss_type: nothing is called 'gspoo'; did you mean gspo"):
        build_objective(build(AlgorithmConfig, {"policy_loss_type": "gspoo"}))


def mine(tokens: LossTokens) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    return 2 * tokens.logprobs, {"mine": masked_sum(tokens.logprobs, tokens.mask)}


def test_rollouts_stand_for_the_old_policy() -> None:
    samples = make_samples()
    rolled = [replace(sample, old_logprobs=sample.rollout_logprobs) for sample in samples]
    algorithm = {"use_kl_loss": False}
    expected = run(rolled, algorithm, Reduction(), [[0, 1, 2, 3, 4, 5]])
    found = run(samples, {**algorithm, "use_rollout_logprobs_for_loss": True}, Reduction(), [[0, 1, 2, 3, 4, 5]])
    torch.testing.assert_close(found, expected)


def test_at_the_old_policy_the_gradient_is_the_advantage() -> None:
    (sample,) = make_samples([9])
    leaf = sample.logprobs.clone().requires_grad_()
    tokens = replace(tokens_of([sample], leaf), old_logprobs=sample.logprobs, mask=torch.ones_like(sample.mask))
    loss, metrics = clipped_surrogate(tokens, eps_clip_low=0.2, eps_clip_high=0.2)
    loss.sum().backward()
    torch.testing.assert_close(leaf.grad, -sample.advantages)
    assert metrics["clip_ratio"] == 0


def test_nan_outside_the_mask_does_no_harm() -> None:
    assert masked_sum(torch.tensor([1.0, float("nan")]), torch.tensor([1.0, 0.0])) == 1.0


def test_kl_pulls_towards_the_reference() -> None:
    logprobs = torch.tensor([-1.0, -3.0], requires_grad=True)
    k3(logprobs, torch.tensor([-2.0, -2.0])).sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad[0] > 0 > logprobs.grad[1]


def test_entropy_has_a_gradient() -> None:
    samples = make_samples([4])
    objective = build_objective(build(AlgorithmConfig, {"use_kl_loss": False, "use_entropy_loss": True}))
    entropies = samples[0].entropies.requires_grad_()
    batch = micro_batch(samples, weights_of(samples, Reduction()), [0.0])
    objective(batch, samples[0].logprobs, entropies)[0].backward()
    torch.testing.assert_close(entropies.grad, -0.01 * batch.weights)


def test_shapes_are_checked() -> None:
    with pytest.raises(AssertionError, match="all tensors are"):
        LossTokens(torch.zeros(2), torch.zeros(2), torch.zeros(2), torch.zeros(2, 1), torch.ones(2), torch.tensor([2]))


def test_negative_samples_that_fell_are_left_out() -> None:
    settings = build(
        AlgorithmConfig, {"off_policy_correction": {"negative_sample_mask_delta": 0.5}}
    ).off_policy_correction
    logprobs = torch.tensor([-2.0, -2.0, -2.0, -2.0, -1.2, -1.2])
    old, advantages = torch.full((6,), -1.0), torch.tensor([-1.0, -1.0, 1.0, 1.0, -1.0, -1.0])
    tokens = LossTokens(logprobs, old, old, advantages, torch.ones(6), torch.tensor([2, 2, 2]))
    found = off_policy.correct(tokens, settings)
    assert found.mask.tolist() == [0, 0, 1, 1, 1, 1]
    assert found.sums["negative_sample_masked_ratio"] == 1


def test_dropping_is_not_capping() -> None:
    table = {"off_policy_correction": {"tis_ratio_type": "token", "token_tis_ratio_drop_high": 3.0}}
    settings = build(AlgorithmConfig, table).off_policy_correction
    old, rollout = torch.zeros(3), -torch.tensor([0.5, 2.5, 3.5]).log()
    found = off_policy.correct(LossTokens(old, old, rollout, old, torch.ones(3), torch.tensor([3])), settings)
    assert found.weights is not None
    torch.testing.assert_close(found.weights, torch.tensor([0.5, 2.5, 0.0]))


def _cast(sample: Sample, dtype: torch.dtype) -> Sample:
    tensors = {name: value.to(dtype) for name, value in vars(sample).items() if isinstance(value, torch.Tensor)}
    return replace(sample, **tensors)
