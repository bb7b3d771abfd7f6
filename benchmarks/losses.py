"""Each loss beside its source's formula, written again with numbers of Python: value, and gradient by finite differences in float64.

    python benchmarks/losses.py

One batch of twelve tokens in three samples, of pairs, or of single answers. What a formula holds is what its source takes no gradient of.
The exit code is 1 where a value or a gradient differs by more than 1e-6 of it.
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Callable, Sequence
from math import exp, fsum, log
from typing import NamedTuple

import torch

from hpcrl.algorithms.advantages import AdvantageInputs, online_dpo, optimal_token_baseline
from hpcrl.algorithms.distillation import contrastive_advantages, hint_contrasts, jensen_shannon, modulations
from hpcrl.algorithms.kl import KL_ESTIMATORS
from hpcrl.algorithms.likelihood import LIKELIHOOD_LOSSES
from hpcrl.algorithms.losses import POLICY_LOSSES, LossTokens, masked_sum, sample_means
from hpcrl.algorithms.preferences import PAIR_LOSSES, Pairs, pair_loss, unpaired_loss
from hpcrl.algorithms.values import clipped_value_loss
from hpcrl.config import AlgorithmConfig
from hpcrl.config.sections.dpo import UNPAIRED_LOSSES, DPOConfig
from hpcrl.config.validate import build
from hpcrl.trainer.loss import build_policy_loss

Numbers = Sequence[float]
Ours = Callable[[torch.Tensor], torch.Tensor]
Formula = Callable[[Numbers, Numbers], float]
"""(variables, the same held) -> the sum of the loss."""
STEP = TOLERANCE = 1e-6
LENGTHS, MASK = (4, 3, 5), [1, 1, 0, 1, 1, 1, 1, 1, 1, 1, 0, 1]
TRAINED = [at for at, one in enumerate(MASK) if one]
TURNS = [[0, 1], [3], [4, 5, 6], [7, 8, 9], [11]]
SAMPLE = [at for at, length in enumerate(LENGTHS) for _ in range(length)]
_draw = random.Random(3).uniform
LOGPROBS = [_draw(-2.0, -0.1) for _ in MASK]
OLD, ROLLOUT, REF = ([x + _draw(-0.4, 0.4) for x in LOGPROBS] for _ in range(3))
ADVANTAGES = [(0.8, -1.3, 0.4)[at] for at in SAMPLE]
SIZES, LABELS = [(3, 5), (2, 4), (6, 1)], [1, 0, 1, 1, 0, 0]
ANSWERS = [_draw(-5.0, -0.5) for _ in LABELS]
REFS = [x + _draw(-3.0, 3.0) for x in ANSWERS]
RIGHT, *WRONG = ([_draw(-0.8, -0.3) for _ in MASK] for _ in range(4))
SETTINGS = {
    "clip_ratio_c": 1.1,
    "ipa": {"ratio_high": 1.05},
    "aipo_rho": 1.1,
    "clip_cov": {"clip_ratio": 1.0, "clip_cov_lb": 0.05},
    "gmpo": {"log_clip_low": 0.1, "log_clip_high": 0.1},
    "cispo": {"cispo_eps_clip_low": 0.1, "cispo_eps_clip_high": 0.1},
    "dppo": {"delta_low": 0.05, "delta_high": 0.05, "kl_tau": 0.001},
}


class Token(NamedTuple):
    """Log-probabilities of a token, and its advantage a; covariance, and tokens of its sample and turn, are held."""

    x: float
    held: float
    old: float
    rollout: float
    ref: float
    a: float
    sample: list[int]
    turn: list[int]
    covariance: float


class Pair(NamedTuple):
    """Log-ratios c and r, tokens m and n, and log-probabilities x and y, of the chosen and of the rejected answer."""

    c: float
    r: float
    m: int
    n: int
    x: float
    y: float


def sigma(x: float) -> float:
    return 1 / (1 + exp(-x))


def clip(x: float, low: float, high: float) -> float:
    return min(max(x, low), high)


def mean(values: Numbers) -> float:
    return fsum(values) / len(values)


def tokens(x: Numbers, held: Numbers) -> list[Token]:
    """Return the trained tokens."""
    center, other = mean([ADVANTAGES[t] for t in TRAINED]), mean([held[t] for t in TRAINED])
    samples = {at: [t for t in TRAINED if SAMPLE[t] == at] for at in range(len(LENGTHS))}
    turns = {at: own for own in TURNS for at in own}
    covariances = [(a - center) * (h - other) for a, h in zip(ADVANTAGES, held, strict=True)]
    columns = (
        x,
        held,
        OLD,
        ROLLOUT,
        REF,
        ADVANTAGES,
        [samples[at] for at in SAMPLE],
        [turns.get(at, []) for at in range(len(MASK))],
        covariances,
    )
    found = [Token(*entries) for entries in zip(*columns, strict=True)]
    return [found[t] for t in TRAINED]


def each(one: Callable[[Token], float]) -> Formula:
    return lambda x, held: fsum(map(one, tokens(x, held)))


def ppo(ratio: float, a: float) -> float:
    return max(-ratio * a, -clip(ratio, 0.8, 1.2) * a)


def gspo(x: Numbers, held: Numbers) -> float:
    return fsum(ppo(exp(mean([held[s] - OLD[s] for s in t.sample]) + t.x - t.held), t.a) for t in tokens(x, held))


def turn_gspo(x: Numbers, held: Numbers) -> float:
    return fsum(ppo(exp(mean([held[s] - OLD[s] for s in t.turn]) + t.x - t.held), t.a) for t in tokens(x, held))


def ipa(x: Numbers, held: Numbers) -> float:
    def one(t: Token) -> float:
        ratio = exp(mean([held[s] - ROLLOUT[s] for s in t.turn]))
        return -(0 if ratio > 1.05 else 1 if t.a >= 0 else min(ratio, 1)) * t.a * t.x

    return fsum(map(one, tokens(x, held)))


def gmpo(x: Numbers, held: Numbers) -> float:
    logs = [min(p - old, 0.1) if a > 0 else max(p - old, -0.1) for p, old, a in zip(x, OLD, ADVANTAGES, strict=True)]
    return fsum(-exp(mean([logs[s] for s in t.sample])) * t.a for t in tokens(x, held))


def vespo(x: Numbers, held: Numbers) -> float:
    def one(t: Token) -> float:
        whole, (k, rate) = exp(fsum(held[s] - ROLLOUT[s] for s in t.sample)), (2, 3) if t.a >= 0 else (3, 2)
        return -(whole**k) * exp(rate * (1 - whole)) * t.a * t.x

    return fsum(map(one, tokens(x, held)))


def clip_cov(t: Token) -> float:
    free = ppo(exp(t.held - t.old), t.a) == -exp(t.held - t.old) * t.a
    return 0.0 if free and 0.05 < t.covariance < 5 else ppo(exp(t.x - t.old), t.a)


def kl_cov(x: Numbers, held: Numbers) -> float:
    found = sorted(tokens(x, held), key=lambda t: -t.covariance)
    return fsum(-exp(t.x - t.old) * t.a + (at < 2) * abs(t.x - t.old) for at, t in enumerate(found))  # a fifth of ten


def dppo(t: Token) -> float:
    out = (t.held - t.rollout) * t.a > 0 and abs(exp(t.held) - exp(t.rollout)) > 0.05
    return (0.0 if out else -exp(t.x - t.rollout) * t.a) + 0.001 * (t.x - t.rollout) ** 2


def m2po(x: Numbers, held: Numbers) -> float:
    found = sorted(tokens(x, held), key=lambda t: abs(t.held - t.rollout))
    pushed = [t for t in found if t.a * (t.held - t.rollout) > 0]
    squares = [(t.held - t.rollout) ** 2 for t in pushed]
    out = [t for at, t in enumerate(pushed) if mean(squares[: at + 1]) > 0.04]
    return fsum(-exp(t.x - t.rollout) * t.a for t in found if t not in out)


def jsd(t: Token, beta: float) -> float:
    m = log((1 - beta) * exp(t.x) + beta * exp(t.ref))
    return beta * exp(t.ref) * (t.ref - m) + (1 - beta) * exp(t.x) * (t.x - m)


OF_TOKENS: dict[str, tuple[str, Formula]] = {
    "regular": ("TRL, verl", each(lambda t: ppo(exp(t.x - t.old), t.a))),
    "dual_clip": ("verl", each(lambda t: min(ppo(exp(t.x - t.old), t.a), -1.1 * t.a if t.a < 0 else math.inf))),
    "gspo": ("TRL, verl", gspo),
    "turn_gspo": ("ROLL", turn_gspo),
    "ipa": ("2512.24873", ipa),
    "sapo": ("TRL, verl", each(lambda t: -sigma((k := 1 if t.a > 0 else 1.05) * (exp(t.x - t.old) - 1)) * 4 / k * t.a)),
    "cispo": ("verl", each(lambda t: -clip(exp(t.held - t.old), 0.9, 1.1) * t.a * t.x)),
    "rollout_is": ("IcePop", each(lambda t: -(u if 0.8 < (u := exp(t.held - t.rollout)) < 1.2 else 0) * t.a * t.x)),
    "clip_cov": ("verl", each(clip_cov)),
    "kl_cov": ("verl", kl_cov),
    "cross_entropy": ("", each(lambda t: -t.x)),
    "importance_sampling": ("1502.05477", each(lambda t: -exp(t.x - t.old) * t.a)),
    "aipo": ("2505.24034", each(lambda t: -min(exp(t.x - t.old), 1.1) * t.a)),
    "dppo": ("prime-rl", each(dppo)),
    "gpg": ("verl", each(lambda t: -t.a * t.x)),
    "gmpo": ("2507.20673", gmpo),
    "vespo": ("TRL", vespo),
    "dro": ("2405.19107", each(lambda t: (t.x - t.rollout) ** 2 / 2 - t.a * t.x)),
    "m2po": ("2510.01161", m2po),
    "k1": ("TRL, verl", each(lambda t: t.x - t.ref)),
    "k2": ("verl", each(lambda t: (t.x - t.ref) ** 2 / 2)),
    "k3": ("TRL, verl", each(lambda t: exp(t.ref - t.x) - 1 + t.x - t.ref)),
    "abs": ("verl", each(lambda t: abs(t.x - t.ref))),
    "nll": ("TRL", each(lambda t: -t.x)),
    "dft": ("TRL", each(lambda t: -exp(t.held) * t.x)),
    "jsd, beta 0": ("TRL", each(lambda t: exp(t.ref) * (t.ref - t.x))),
    "jsd, beta 0.3": ("TRL", each(lambda t: jsd(t, 0.3))),
    "jsd, beta 1": ("TRL", each(lambda t: exp(t.x) * (t.x - t.ref))),
    "value": ("verl", each(lambda t: max((t.x - t.ref) ** 2, (clip(t.x, t.old - 0.2, t.old + 0.2) - t.ref) ** 2) / 2)),
}
OF_PAIRS: dict[str, Callable[[Pair], float]] = {
    "sigmoid": lambda p: -log(sigma(0.1 * (p.c - p.r))),
    "sigmoid_norm": lambda p: -log(sigma(0.1 * (p.c / p.m - p.r / p.n))),
    "hinge": lambda p: max(0.0, 1 - 0.1 * (p.c - p.r)),
    "ipo": lambda p: (p.c / p.m - p.r / p.n - 5) ** 2,
    "robust": lambda p: (-0.8 * log(sigma(0.1 * (p.c - p.r))) + 0.2 * log(sigma(0.1 * (p.r - p.c)))) / 0.6,
    "bco_pair": lambda p: -log(sigma(0.1 * p.c)) - log(sigma(-0.1 * p.r)),
    "nca_pair": lambda p: -log(sigma(0.1 * p.c)) - (log(sigma(-0.1 * p.c)) + log(sigma(-0.1 * p.r))) / 2,
    "apo_zero": lambda p: 1 - sigma(0.1 * p.c) + sigma(0.1 * p.r),
    "apo_down": lambda p: sigma(0.1 * p.c) + 1 - sigma(0.1 * (p.c - p.r)),
    "simpo": lambda p: -log(sigma(0.1 * (p.x / p.m - p.y / p.n) - 0.5)),
    "orpo": lambda p: log(1 + (exp(-p.x / p.m) - 1) / (exp(-p.y / p.n) - 1)),
}


def of_tokens() -> dict[str, Ours]:
    """Return hpcrl's losses of tokens, [P] each."""
    old, rollout, ref, advantages, mask = (_tensor(one) for one in (OLD, ROLLOUT, REF, ADVANTAGES, MASK))

    def policy(name: str) -> Ours:
        loss = build_policy_loss(build(AlgorithmConfig, {"policy_loss_type": name, **SETTINGS}))
        return lambda x: loss(LossTokens(x, old, rollout, advantages, mask, torch.tensor(LENGTHS)))[0]

    found: dict[str, Ours] = {name: policy(name) for name in POLICY_LOSSES}
    found |= {name: lambda x, f=f: f(x, ref, 1.0) for name, f in KL_ESTIMATORS.items()} | LIKELIHOOD_LOSSES
    for beta in (0, 0.3, 1):
        found[f"jsd, beta {beta}"] = lambda x, beta=beta: jensen_shannon(x[:, None], ref[:, None], beta)
    return found | {"value": lambda x: clipped_value_loss(x, old, ref, mask, value_clip=0.2)[0]}


def cases() -> list[tuple[str, str, Numbers, Ours, Formula]]:
    """Return name, source, variables, hpcrl's sum and the formula of each loss."""
    mask, refs, sizes, found = (
        _tensor(MASK),
        _tensor(REFS),
        _tensor(SIZES),
        list[tuple[str, str, Numbers, Ours, Formula]](),
    )
    for name, loss in of_tokens().items():
        found.append((name, OF_TOKENS[name][0], LOGPROBS, lambda x, f=loss: masked_sum(f(x), mask), OF_TOKENS[name][1]))
    for name in PAIR_LOSSES:
        dpo = DPOConfig(loss_type=[name], label_smoothing=0.2)

        def pairs(x: torch.Tensor, dpo: DPOConfig = dpo) -> torch.Tensor:
            return pair_loss(Pairs(x[::2], x[1::2], refs[::2], refs[1::2], sizes[:, 0], sizes[:, 1]), dpo).sum()

        def by_pairs(x: Numbers, _: Numbers, name: str = name) -> float:
            rows = zip(x[::2], x[1::2], REFS[::2], REFS[1::2], SIZES, strict=True)
            return fsum(OF_PAIRS[name](Pair(c - rc, r - rr, m, n, c, r)) for c, r, rc, rr, (m, n) in rows)

        found.append((name, {"simpo": "2405.14734", "orpo": "2403.07691"}.get(name, "TRL"), ANSWERS, pairs, by_pairs))
    for name, z in zip(UNPAIRED_LOSSES, (0.7, 0.0), strict=True):
        dpo = DPOConfig(loss_type=[name], desirable_weight=1.5, undesirable_weight=0.5)

        def answers(x: torch.Tensor, dpo: DPOConfig = dpo, z: float = z) -> torch.Tensor:
            return unpaired_loss(x - refs, _tensor(LABELS), torch.full_like(x, z), dpo).sum()

        def by_answers(x: Numbers, _: Numbers, z: float = z) -> float:
            rows = zip(x, REFS, LABELS, strict=True)
            return fsum(
                1.5 * (1 - sigma(0.1 * (c - r - z))) if one else 0.5 * (1 - sigma(0.1 * (z - c + r)))
                for c, r, one in rows
            )

        found.append((name, "TRL", ANSWERS, answers, by_answers))

    def online(x: torch.Tensor) -> torch.Tensor:
        penalties, better = 0.1 * (x.detach() - refs), _tensor([1, 0, 1, 0, 1, 0])
        groups = torch.tensor([0, 0, 1, 1, 2, 2])
        own = AdvantageInputs(better - penalties, torch.ones_like(x), [1] * 6, groups, earned_P=better)
        return -(online_dpo(own, kl_loss_coef=0.1) * x).sum()

    def by_online(x: Numbers, held: Numbers) -> float:
        ratios = [h - r for h, r in zip(held, REFS, strict=True)]
        rows = zip(x[::2], x[1::2], ratios[::2], ratios[1::2], strict=True)
        return fsum(-0.1 * sigma(-0.1 * (c - r)) * (best - worst) for best, worst, c, r in rows)

    found.append(("online_dpo", "2402.04792", ANSWERS, online, by_online))
    found.append(("contrastive", "2606.11709", LOGPROBS, by_hints, contrastive))
    return [*found, ("optimal_token_baseline", "verl", LOGPROBS, by_positions, token_baseline)]


def by_hints(x: torch.Tensor) -> torch.Tensor:
    """Return PPO's loss with advantages that a contrast of hints modulates, a mean over tokens of each sample."""
    mask, lengths, advantages = _tensor(MASK), torch.tensor(LENGTHS), _tensor(ADVANTAGES)
    contrasts = hint_contrasts(_tensor(RIGHT), torch.stack([_tensor(one) for one in WRONG]))
    added = modulations(contrasts, mask, scale=1.0, width=0.5, threshold=0.3)
    advantages = contrastive_advantages(advantages, added, mask, lengths, weight=0.7)
    ppo_loss = build_policy_loss(build(AlgorithmConfig, {"policy_loss_type": "regular"}))
    loss, _ = ppo_loss(LossTokens(x, _tensor(OLD), _tensor(ROLLOUT), advantages, mask, lengths))
    return sample_means(loss, mask, lengths).sum()


def contrastive(x: Numbers, held: Numbers) -> float:
    def mean_of(part: list[Token]) -> float:
        return mean([ppo(exp(t.x - t.old), t.a) for t in part]) if part else 0.0

    loss, found = 0.0, dict(zip(TRAINED, tokens(x, held), strict=True))
    for at in range(len(LENGTHS)):
        parts: tuple[list[Token], list[Token]] = [], []
        for s in (s for s in TRAINED if SAMPLE[s] == at):
            t, added = found[s], math.tanh(2 * (RIGHT[s] - log(mean([exp(one[s]) for one in WRONG]))))
            own = max(0, t.a + added) if t.a > 0 else min(0, t.a + added)
            parts[abs(added) > 0.3].append(t._replace(a=own if abs(added) > 0.3 else t.a))
        loss += mean_of(parts[0]) + 0.7 * mean_of(parts[1])
    return loss


def by_positions(x: torch.Tensor) -> torch.Tensor:
    """Return -A log π of the three samples as one group, where a token's alternative has the rest of its probability."""
    mask, norms = _tensor(MASK), 2 * (1 - x.detach().exp()).square()
    groups = torch.zeros(len(LENGTHS), dtype=torch.int64)
    own = AdvantageInputs(_tensor(ADVANTAGES), mask, LENGTHS, groups, norms_P=norms, longest=[4])
    return -masked_sum(optimal_token_baseline(own) * x, mask)


def token_baseline(x: Numbers, held: Numbers) -> float:
    def power(t: int) -> float:
        own = [exp(held[s]) for s in TRAINED if SAMPLE[s] == SAMPLE[t] and s <= t]
        return 1e-8 + fsum(1 - 2 * p + p**2 + (1 - p) ** 2 for p in own)

    place = {t: sum(SAMPLE[s] == SAMPLE[t] for s in TRAINED if s < t) for t in TRAINED}
    worth = {t: fsum(ADVANTAGES[s] for s in range(t, len(MASK)) if SAMPLE[s] == SAMPLE[t]) for t in TRAINED}
    loss = 0.0
    for t in TRAINED:
        same = [s for s in TRAINED if place[s] == place[t]]
        least = fsum(power(s) * worth[s] for s in same) / fsum(map(power, same)) if len(same) > 1 else 0.0
        loss -= (worth[t] - least) * x[t]
    return loss


def gradients(start: Numbers, ours: Ours, formula: Formula) -> tuple[list[float], list[float]]:
    """Return the gradient of hpcrl's loss, and the finite differences of the formula."""
    x = _tensor(start).requires_grad_()
    (gradient,) = torch.autograd.grad(ours(x), x)
    moved = [[[*start[:at], one + step, *start[at + 1 :]] for step in (STEP, -STEP)] for at, one in enumerate(start)]
    return gradient.tolist(), [(formula(up, start) - formula(down, start)) / (2 * STEP) for up, down in moved]


def main() -> int:
    failed = False
    print(f"{'loss':<24} {'source':<12} {'hpcrl':>12} {'formula':>12} {'gradient differs by':>20}")
    for name, source, start, ours, formula in cases():
        value, expected = ours(_tensor(start)).item(), formula(start, start)
        worst = max(abs(a - b) / max(1.0, abs(b)) for a, b in zip(*gradients(start, ours, formula), strict=True))
        wrong = abs(value - expected) > TOLERANCE * max(1.0, abs(expected)) or worst > TOLERANCE
        print(f"{name:<24} {source:<12} {value:>12.8f} {expected:>12.8f} {worst:>20.1e}{'  WRONG' * wrong}")
        failed = failed or wrong
    return int(failed)


def _tensor(values: Sequence[float] | Sequence[tuple[int, int]]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


if __name__ == "__main__":
    sys.exit(main())
