"""Asks verl, TRL and prime-rl for losses and advantages of one batch: makes peers.json, which is beside it.

    /path/to/environment/bin/python -m tests.golden.peers verl trl prime_rl      in an environment that has what is named; what is not keeps its numbers

Their own functions are called, in float64 where they allow it. Numbers are a loss and its gradient over the log-probabilities of trained
tokens, or what there is of each trained token. prime-rl is no package of an index: its version is that of git, the object of its loss.py, or a commit.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from importlib import import_module, metadata
from math import sin
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from tests.golden.trl_grpo import LONGEST, trainer_of

PLACE = Path(__file__).with_suffix(".json")
LENGTHS = (5, 3, 6, 1, 4, 6)
GROUPS, WITH_ONE_ALONE = (0, 0, 0, 1, 1, 1), (0, 0, 0, 1, 1, 2)
REWARDS, GREEDY = (1.0, -0.5, 0.0, 0.75, 0.5, -1.0), (0.5, 0.5, 0.5, -0.25, -0.25, -0.25)
ADVANTAGES = (1.2, -0.7, 0.3, -1.5, 0.0, 0.9)
FORMAT, WEIGHTS = (1.0, 0.0, 0.0, 1.0, 0.0, 1.0), (1.0, 0.3)
LOW, HIGH, DUAL = 0.1, 0.15, 1.2
GAMMA, LAMBDA = 0.95, 0.9
Answer = tuple[str, dict[str, Any], list[float]]
"""Name, settings, numbers."""


def waves(phase: float) -> torch.Tensor:
    rows, columns = range(len(LENGTHS)), range(max(LENGTHS))
    return torch.tensor(
        [[sin(7 * row + 3 * column + phase) for column in columns] for row in rows], dtype=torch.float64
    )


def batch() -> dict[str, torch.Tensor]:
    """Return what is known of the batch, [B, T] float64; two samples have a token inside that is not trained."""
    within = (torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]).double()
    mask, logprobs = within.clone(), -1.8 + 1.1 * waves(0)
    mask[2, 1] = mask[5, 3] = 0
    old = logprobs + 0.3 * waves(1)
    last = torch.nn.functional.one_hot(torch.tensor(LENGTHS) - 1, max(LENGTHS)).double()
    outcomes = last * torch.tensor(REWARDS, dtype=torch.float64)[:, None]
    found = {"logprobs": logprobs, "old": old, "rollout": old + 0.2 * waves(2), "ref": logprobs + 0.4 * waves(3)}
    found |= {"values": 0.5 * waves(4), "returns": 0.7 * waves(5), "outcomes": outcomes, "entropies": 1 + waves(8)}
    found |= {"rewards": outcomes + 0.1 * mask * waves(6), "within": within, "mask": mask}
    found["squares"] = old.exp().square() + (1 - old.exp()).square() * (0.5 + 0.4 * waves(7))
    return found | {"advantages": torch.tensor(ADVANTAGES, dtype=torch.float64)[:, None].expand_as(mask).clone()}


def with_gradient(
    loss_of: Callable[[torch.Tensor], torch.Tensor], start: torch.Tensor, mask: torch.Tensor
) -> list[float]:
    """Return the loss, and its gradient where the mask is not 0."""
    leaf = start.clone().requires_grad_()
    loss = loss_of(leaf)
    (gradient,) = torch.autograd.grad(loss, leaf)
    return [loss.item(), *gradient[mask > 0].tolist()]


def verl() -> Iterator[Answer]:
    """Policy losses, means of losses, divergences, the loss of values, advantages and corrections."""
    from verl.trainer.ppo import core_algos as algos

    given = batch()
    mask, old = given["mask"], given["old"]
    everything = {"dp_size": 1, "batch_num_tokens": mask.sum(), "global_batch_size": len(LENGTHS)}
    for mode, settings in POLICY_LOSSES.items():
        config = _actor(settings, everything)

        def loss(leaf: torch.Tensor, mode: str = mode, config: Any = config) -> torch.Tensor:
            return algos.get_policy_loss_fn(mode)(old, leaf, given["advantages"], mask, config.loss_agg_mode, config)[0]

        yield f"policy loss {mode}", settings, with_gradient(loss, given["logprobs"], mask)
    for mode in ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean"):

        def mean(leaf: torch.Tensor, mode: str = mode) -> torch.Tensor:
            return algos.agg_loss(leaf.square(), mask, mode, loss_scale_factor=LONGEST, **everything)

        yield f"loss_agg_mode {mode}", {"loss_scale_factor": LONGEST}, with_gradient(mean, given["logprobs"], mask)
    for kind in ("kl", "abs", "mse", "low_var_kl", "k3+"):

        def divergence(leaf: torch.Tensor, kind: str = kind) -> torch.Tensor:
            return (algos.kl_penalty(leaf, given["ref"], kind) * mask).sum()

        yield f"kl_penalty {kind}", {}, with_gradient(divergence, given["logprobs"], mask)

    def values(leaf: torch.Tensor) -> torch.Tensor:
        return algos.compute_value_loss(leaf, given["returns"], given["values"], mask, 0.2)[0]

    yield "value loss", {"cliprange_value": 0.2}, with_gradient(values, given["logprobs"], mask)
    controller = algos.AdaptiveKLController(0.1, 6.0, 1000)
    controller.update(6.9, 64)
    yield "adaptive kl", {"kl_coef": 0.1, "target_kl": 6.0, "horizon": 1000}, [float(controller.value)]
    yield from _advantages_of_verl(algos, given)
    yield from _corrections_of_verl(given)


POLICY_LOSSES: dict[str, dict[str, Any]] = {
    "vanilla": {"clip_ratio_low": LOW, "clip_ratio_high": HIGH, "clip_ratio_c": DUAL},
    "dppo_tv": {"clip_ratio_low": 0.03, "clip_ratio_high": 0.02},
    "dppo_kl": {"clip_ratio_low": 0.02, "clip_ratio_high": 0.001},
    "gspo": {"clip_ratio_low": 0.03, "clip_ratio_high": 0.04, "loss_agg_mode": "seq-mean-token-mean"},
    "sapo": {"tau_pos": 1.0, "tau_neg": 1.05, "loss_agg_mode": "seq-mean-token-mean"},
    "gpg": {},
    "clip_cov": {
        "clip_ratio_low": LOW, "clip_ratio_high": HIGH, "policy_loss": {"clip_cov_ratio": 1.0, "clip_cov_lb": 0.05, "clip_cov_ub": 5.0},
    },
    "kl_cov": {"policy_loss": {"kl_cov_ratio": 0.2, "ppo_kl_coef": 1.0}},
    "geo_mean": {"clip_ratio_low": LOW, "clip_ratio_high": HIGH},
    "dro": {"policy_loss": {"dro_beta": 0.8}},
    "cispo": {"clip_ratio_low": LOW, "clip_ratio_high": HIGH},
}  # fmt: skip


def _actor(settings: dict[str, Any], everything: dict[str, Any]) -> Any:
    from verl.workers.config import ActorConfig, PolicyLossConfig

    policy_loss = PolicyLossConfig(**settings.get("policy_loss", {}))
    common = {"strategy": "fsdp", "rollout_n": 3, "ppo_micro_batch_size_per_gpu": 1, "global_batch_info": everything}
    return ActorConfig(**common | settings | {"policy_loss": policy_loss})


def _advantages_of_verl(algos: Any, given: dict[str, torch.Tensor]) -> Iterator[Answer]:
    import numpy as np

    mask, outcomes, rewards = given["mask"], given["outcomes"], given["rewards"]
    config = SimpleNamespace(
        gamma=GAMMA, get=lambda name, default=None: {"norm_adv_by_std_in_grpo": True}.get(name, default)
    )
    by_std: dict[str, dict[str, Any]] = {"": {}, " without deviation": {"norm_adv_by_std_in_grpo": False}}

    def of(
        name: str, groups: tuple[int, ...] = GROUPS, own: torch.Tensor = mask, of: torch.Tensor = outcomes, **more: Any
    ) -> list[float]:
        common = {"response_mask": own, "token_level_rewards": of.clone()}
        own_groups = {} if name in ("gae", "reinforce_plus_plus", "remax") else {"index": np.array(groups)}
        return algos.get_adv_estimator_fn(name)(**common, **own_groups, **more)[0][own > 0].tolist()

    for suffix, settings in by_std.items():
        yield f"advantages grpo{suffix}", settings, of("grpo", WITH_ONE_ALONE, **settings)
        yield f"advantages grpo_vectorized{suffix}", settings, of("grpo_vectorized", WITH_ONE_ALONE, **settings)
    for name in ("rloo", "rloo_vectorized", "opo", "reinforce_plus_plus_baseline", "gpg"):
        yield f"advantages {name}", {}, of(name, WITH_ONE_ALONE, config=config)
    yield "advantages grpo_passk", {}, of("grpo_passk", config=config)
    yield "advantages reinforce_plus_plus", {"gamma": GAMMA}, of("reinforce_plus_plus", of=rewards, config=config)
    greedy = torch.tensor(GREEDY, dtype=torch.float64)
    yield "advantages remax", {}, of("remax", reward_baselines=greedy)
    yield "advantages remax of rewards per token", {}, of("remax", of=rewards, reward_baselines=greedy)
    critic = {"values": given["values"], "gamma": GAMMA, "lam": LAMBDA}
    yield "advantages gae", {"gamma": GAMMA, "lam": LAMBDA}, of("gae", of=rewards, **critic)
    _, returns = algos.compute_gae_advantage_return(rewards, response_mask=mask, **critic)
    yield "returns of gae", {"gamma": GAMMA, "lam": LAMBDA}, returns[mask > 0].tolist()
    policy = {"old_log_probs": given["old"], "sum_pi_squared": given["squares"]}
    inside = rewards * given["within"]
    yield (
        "advantages optimal_token_baseline",
        {},
        of("optimal_token_baseline", own=given["within"], of=inside, **policy),
    )
    yield (
        "advantages tir_optimal_token_baseline",
        {},
        of("tir_optimal_token_baseline", WITH_ONE_ALONE, of=rewards, **policy),
    )
    named = {"gdpo_reward_keys": ["outcome", "format"], "gdpo_reward_weights": WEIGHTS}
    scored = {"outcome": np.array(REWARDS), "format": np.array(FORMAT)}
    shape = {
        "prompts": torch.zeros(len(LENGTHS), 1),
        "attention_mask": torch.nn.functional.pad(given["within"], (1, 0), value=1.0).long(),
    }
    settings = SimpleNamespace(get=lambda name, default=None: named.get(name, default))
    yield "advantages gdpo", named, of("gdpo", config=settings, non_tensor_batch=scored, batch=shape)


CORRECTIONS: dict[str, dict[str, Any]] = {
    "token": {"rollout_is": "token", "rollout_is_threshold": 1.05},
    "sequence": {"rollout_is": "sequence", "rollout_is_threshold": 1.1},
    "IcePop": {"rollout_is": "token", "rollout_is_threshold": "0.9_1.1"},
    "token_k1": {"rollout_rs": "token_k1", "rollout_rs_threshold": "0.9_1.15"},
    "seq_sum_k1": {"rollout_rs": "seq_sum_k1", "rollout_rs_threshold": "0.8_1.15"},
    "seq_mean_k1": {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.97_1.05"},
}


def _corrections_of_verl(given: dict[str, torch.Tensor]) -> Iterator[Answer]:
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask as correct

    mask = given["mask"]
    for name, settings in CORRECTIONS.items():
        weights, kept, _ = correct(given["old"], given["rollout"], mask, **settings)
        found = kept if weights is None else kept * weights.batch["rollout_is_weights"]
        yield f"rollout_correction {name}", settings, found[mask > 0].tolist()


GRPO_LOSSES: dict[str, dict[str, Any]] = {
    "grpo": {"loss_type": "grpo"},
    "bnpo": {"loss_type": "bnpo"},
    "dr_grpo": {"loss_type": "dr_grpo"},
    "dapo": {"loss_type": "dapo"},
    "delta": {"loss_type": "dapo", "delta": DUAL},
    "cispo": {"loss_type": "cispo", "epsilon_high": 1.1},
    "sapo": {"loss_type": "sapo", "sapo_temperature_pos": 0.8, "sapo_temperature_neg": 1.3},
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 0.03, "epsilon_high": 0.04},
    "divergence": {"loss_type": "dapo", "beta": 0.1, "use_bias_correction_kl": False},
    "divergence by ratio": {"loss_type": "dapo", "beta": 0.1, "use_bias_correction_kl": True},
    "off_policy_mask_threshold": {"loss_type": "dapo", "off_policy_mask_threshold": 0.02},
    "top_entropy_quantile": {"loss_type": "dapo", "top_entropy_quantile": 0.3},
    "gmpo": {"epsilon": LOW, "epsilon_high": HIGH},
}


def trl() -> Iterator[Answer]:
    """Losses of GRPOTrainer and GMPOTrainer, of pairs, and of distillation."""
    sys.modules["vllm"] = None  # pyright: ignore[reportArgumentType]  as where it is not installed: TRL would import it
    from trl.experimental.gkd import GKDTrainer
    from trl.experimental.gmpo import GMPOTrainer

    given = batch()
    mask, ids = given["mask"], torch.ones(given["mask"].shape, dtype=torch.int64)
    inputs = {
        "prompt_ids": ids[:, :1], "prompt_mask": ids[:, :1], "completion_ids": ids, "completion_mask": mask, "num_items_in_batch": mask.sum(),
        "advantages": given["advantages"][:, 0], "old_per_token_logps": given["old"], "ref_per_token_logps": given["ref"],
        "sampling_per_token_logps": given["rollout"],
    }  # fmt: skip
    for name, settings in GRPO_LOSSES.items():
        with tempfile.TemporaryDirectory() as output:
            trainer = trainer_of(output, **{"epsilon": LOW, "epsilon_high": HIGH} | settings)
        compute = GMPOTrainer._compute_loss if name == "gmpo" else type(trainer)._compute_loss

        def loss(leaf: torch.Tensor, compute: Any = compute, trainer: Any = trainer) -> torch.Tensor:
            trainer._get_per_token_logps_and_entropies = lambda *_, **__: (leaf, given["entropies"], None)
            return compute(trainer, trainer.model, inputs)

        yield f"GRPO {name}", settings, with_gradient(loss, given["logprobs"], mask)
    yield from _pairs_of_trl(given)
    yield from _answers_of_trl(given)
    for beta in (0, 0.3, 1):

        def distilled(leaf: torch.Tensor, beta: float = beta) -> torch.Tensor:
            return GKDTrainer.generalized_jsd_loss(leaf[None], given["ref"][None], beta=beta, reduction="sum")

        yield f"GKD {beta}", {"beta": beta}, with_gradient(distilled, given["logprobs"], torch.ones_like(mask))


def _pairs_of_trl(given: dict[str, torch.Tensor]) -> Iterator[Answer]:
    from trl.experimental.cpo import CPOTrainer
    from trl.experimental.orpo import ORPOTrainer

    tokens = given["mask"].sum(1)
    here = SimpleNamespace(device="cpu")
    simpo = SimpleNamespace(
        alpha=0.0, loss_type="simpo", simpo_gamma=0.5, beta=2.0, label_smoothing=0.0, accelerator=here
    )
    orpo = SimpleNamespace(beta=1.0, accelerator=here)

    def pairs(leaf: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        means = (leaf * given["mask"]).sum(1) / tokens
        return means[::2], means[1::2]

    yield (
        "CPO simpo",
        {"beta": 2.0, "simpo_gamma": 0.5},
        with_gradient(lambda leaf: CPOTrainer.cpo_loss(simpo, *pairs(leaf))[0].sum(), given["logprobs"], given["mask"]),
    )
    yield (
        "ORPO",
        {"beta": 1.0},
        with_gradient(
            lambda leaf: -ORPOTrainer.odds_ratio_loss(orpo, *pairs(leaf))[0].sum(), given["logprobs"], given["mask"]
        ),
    )


KTO: dict[str, dict[str, Any]] = {
    "kto": {"beta": 0.5, "desirable_weight": 1.5, "undesirable_weight": 0.5},
    "apo_zero_unpaired": {"beta": 0.5, "desirable_weight": 1.0, "undesirable_weight": 1.0},
}
LABELS = (1, 0, 0, 1, 1, 0)


def _answers_of_trl(given: dict[str, torch.Tensor]) -> Iterator[Answer]:
    """Let KTOTrainer have log-probabilities in the place of a model's outputs; `old` and `rollout` are the policy's and the reference's of mismatched answers."""
    from accelerate import Accelerator
    from trl import KTOTrainer

    mask = given["mask"]
    shown = {name: (given[name] * mask).sum(1) for name in ("ref", "rollout", "old")}
    whole = torch.nn.functional.pad(mask, (1, 0)).long()
    rows = {"input_ids": whole, "attention_mask": whole, "completion_mask": whole, "label": torch.tensor(LABELS)}
    rows |= {"ref_logps": shown["ref"], "ref_KL_logps": shown["rollout"]}
    for name, settings in KTO.items():
        trainer = SimpleNamespace(
            loss_type=name, calculate_KL=name == "kto", _compute_kl_logps=lambda *_: shown["old"], precompute_ref_logps=True,
            aux_loss_enabled=False, accelerator=Accelerator(cpu=True), model=torch.nn.Identity().eval(), _metrics={"eval": defaultdict(list)},
            _total_train_tokens=0, **settings,
        )  # fmt: skip

        def loss(leaf: torch.Tensor, trainer: Any = trainer) -> torch.Tensor:
            outputs = SimpleNamespace(log_probs=leaf * mask, entropy=given["entropies"], mean_logits=leaf.detach())
            return KTOTrainer._compute_loss(trainer, lambda **_: outputs, rows, False)

        yield f"KTO {name}", settings, with_gradient(loss, given["logprobs"], mask)


def prime_rl() -> Iterator[Answer]:
    """What loss.py has of the default loss, its later one with bounds of the ratio, and cross entropy."""
    theirs = import_module("prime_rl.trainer.rl.loss")
    given = batch()
    dppo = {"dppo_mask_low": 0.03, "dppo_mask_high": 0.02, "adv_tau": 1.0, "teacher_tau": 0.0, "kl_tau": 0.01}
    icepop = {"ratio_low": 0.85, "ratio_high": 1.2, "adv_tau": 1.0}
    losses: dict[str, tuple[dict[str, Any], Callable[[Any], Any]]] = {}
    if hasattr(theirs, "default_loss_fn"):
        losses["default"] = dppo, lambda inputs: theirs.default_loss_fn(inputs, SimpleNamespace(**dppo))
    if hasattr(theirs, "IcePopLoss"):
        losses["icepop"] = icepop, theirs.IcePopLoss(SimpleNamespace(**icepop)).loss
    for name, (settings, one) in losses.items():

        def loss(leaf: torch.Tensor, one: Callable[[Any], Any] = one) -> torch.Tensor:
            rows = zip(leaf, given["rollout"], given["advantages"], given["mask"] > 0, strict=True)
            samples = [theirs.LossInputs(policy, rollout, None, own, mask) for policy, rollout, own, mask in rows]
            return torch.stack([one(sample).loss for sample in samples]).sum() / given["mask"].sum()

        yield name, settings, with_gradient(loss, given["logprobs"], given["mask"])


def version(name: str) -> str:
    if name != "prime_rl":
        return metadata.version(name)
    text = Path(import_module("prime_rl.trainer.rl.loss").__file__ or "").read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(text) + text).hexdigest()


def main() -> None:
    torch.set_num_threads(1)
    found = json.loads(PLACE.read_text()) if PLACE.exists() else {}
    for peer in sys.argv[1:]:
        for name, settings, numbers in {"verl": verl, "trl": trl, "prime_rl": prime_rl}[peer]():
            rounded = [float(f"{number:.10g}") for number in numbers]
            found[f"{peer}: {name}"] = {"version": version(peer), "settings": settings, "numbers": rounded}
    lines = [f"  {json.dumps(name)}: {json.dumps(case)}" for name, case in found.items()]
    PLACE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
