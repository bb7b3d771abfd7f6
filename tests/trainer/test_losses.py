"""Losses, reductions and corrections of whole mini-batches depend neither on ranks nor on micro-batches, and their metrics do not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hpcrl.config.sections.functions import POLICY_LOSSES
from hpcrl.trainer.distributed import World
from tests.trainer import scenarios
from tests.trainer.material import expect_same_metrics, make_batch, make_run
from tests.trainer.ranks import Ranks

CORRECTIONS: dict[str, dict[str, Any]] = {
    "token": {"tis_ratio_type": "token", "token_mask_is_threshold_low": 0.1, "token_mask_is_threshold_high": 3.0},
    "dropped": {"tis_ratio_type": "token", "token_tis_ratio_drop_high": 1.5},
    "divergent": {"token_mask_kl_threshold": 0.5},
    "sequence": {"tis_ratio_type": "sequence", "sequence_mask_metric": "product", "product_mask_low": 0.001},
    "outliers": {
        "outlier_token_is_threshold_high": 1.5,
        "sequence_mask_metric": "geometric",
        "geo_mask_low": 0.1,
        "geo_mask_high": 2.0,
        "negative_sample_mask_delta": 0.001,
    },
}
LOSSES = {
    "token": "regular",
    "divergent": "regular",
    "dropped": "cross_entropy",
    "sequence": "regular",
    "outliers": "rollout_is",
}
ALGORITHMS: dict[str, dict[str, Any]] = {
    "gspo": {"policy_loss_type": "gspo", "loss_reduction": "sequence_mean"},
    "sapo": {"policy_loss_type": "sapo", "loss_reduction": "seq_mean_token_sum_norm", "kl_estimator_type": "k2"},
    "cispo": {
        "policy_loss_type": "cispo",
        "loss_reduction": "prompt_mean",
        "use_entropy_loss": True,
        "cispo": {"cispo_eps_clip_low": 0.01},  # by default the bound is 1, and rounding decides who is below at first
    },
    "aipo": {"policy_loss_type": "aipo", "loss_reduction": "seq_mean_token_mean", "unbiased_loss_max_tokens": 16},
    "dual_clip": {
        "policy_loss_type": "dual_clip",
        "loss_reduction": "seq_mean_token_sum",
        "kl_importance_weighted": True,
    },
    "likelihood": {"policy_loss_type": "importance_sampling", "loss_reduction": "token_sum", "positive_nll_coef": 0.5},
    "dppo": {"policy_loss_type": "dppo", "dppo": {"delta_high": 0.001, "delta_low": 0.001}},
    "gmpo": {"policy_loss_type": "gmpo", "loss_reduction": "sequence_mean", "gmpo": {"log_clip_high": 0.001}},
    "gpg": {"policy_loss_type": "gpg"},
    "vespo": {"policy_loss_type": "vespo", "loss_reduction": "seq_mean_token_sum"},
    "dro": {"policy_loss_type": "dro", "observation_nll_coef": 0.5},
    "rollout": {"policy_loss_type": "regular", "use_rollout_logprobs_for_loss": True},
    **{name: {"off_policy_correction": table, "policy_loss_type": LOSSES[name]} for name, table in CORRECTIONS.items()},
    "legacy": {"loss_reduction": "token_mean_legacy"},
}
OF_A_MICRO_BATCH = {"clip_cov", "kl_cov", "m2po"}  # they compare a token with the others of its micro-batch
USED = {table["policy_loss_type"] for table in ALGORITHMS.values() if "policy_loss_type" in table}
ALGORITHMS |= {name: {"policy_loss_type": name} for name in POLICY_LOSSES if name not in USED | OF_A_MICRO_BATCH}
WAYS: dict[str, tuple[int, int, int | None]] = {
    "together": (1, 64, None),
    "one by one": (1, 1, None),
    "two ranks by tokens": (2, 1, 13),
}
"""Ranks, samples and tokens of a micro-batch."""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, model_path: Path, alone: World, two: Ranks) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("losses")
    run = make_run(path / "run")
    make_batch(run, step=1, groups=4, size=3)
    for way, (ranks, micro, tokens) in WAYS.items():
        options = {"model": str(model_path), "run": str(run.path), "algorithms": ALGORITHMS}
        options |= {"micro": micro, "tokens": tokens, "out": str(path / f"{way}.json")}
        if ranks == 1:
            scenarios.weighed(alone, options)
        else:
            two.play([("scenarios:weighed", options)])
    return {way: json.loads((path / f"{way}.json").read_text()) for way in WAYS}


@pytest.mark.parametrize("way", [way for way in WAYS if way != "together"])
@pytest.mark.parametrize("name", [name for name in ALGORITHMS if name != "legacy"])
def test_every_way_is_the_same(results: dict[str, Any], name: str, way: str) -> None:
    for found, expected in zip(results[way][name], results["together"][name], strict=True):
        expect_same_metrics(found, expected, relative=1e-4, absolute=1e-5)
        assert found["policy/grad_norm"] > 0


def test_the_legacy_mean_depends_on_micro_batches(results: dict[str, Any]) -> None:
    norms = {way: found["legacy"][0]["policy/grad_norm"] for way, found in results.items()}
    assert norms["one by one"] != pytest.approx(norms["together"], rel=1e-3)
    assert norms["two ranks by tokens"] != pytest.approx(norms["together"], rel=1e-3)


def test_corrections_are_reported(results: dict[str, Any]) -> None:
    def metrics(name: str) -> dict[str, float]:
        prefix = "policy/loss_metrics/"
        return {
            key.removeprefix(prefix): v for key, v in results["together"][name][0].items() if key.startswith(prefix)
        }

    general = {"is_ratio_mean", "is_ratio_std", "is_ratio_max", "is_ratio_min", "ratio", "clip_ratio"}
    assert set(metrics("token")) == general | {"tis_token_clip_high_ratio", "token_mask_ratio"}
    assert set(metrics("dropped")) == general | {"tis_token_drop_high_ratio"}
    assert set(metrics("divergent")) == general | {"token_mask_kl_ratio"}
    assert set(metrics("vespo")) == {"ratio", "sample_weight"}
    assert set(metrics("dro")) == {"ratio", "squared_log_ratio"}
    assert results["together"]["dro"][0]["policy/observation_nll"] > 0
    assert set(metrics("likelihood")) == {"ratio", "importance_ratio"}
    assert {"tis_seq_clip_high_ratio", "product_sequence_mask_masked_ratio"} < set(metrics("sequence"))
    assert {"outlier_seq_masked_ratio", "geo_sequence_mask_masked_ratio"} < set(metrics("outliers"))
    for name in CORRECTIONS:
        assert metrics(name)["is_ratio_min"] < metrics(name)["is_ratio_mean"] < metrics(name)["is_ratio_max"]
    assert 0 < metrics("token")["token_mask_ratio"] < 1
    assert 0 < metrics("divergent")["token_mask_kl_ratio"] < 1
    assert 0 < metrics("dppo")["clip_ratio"] < 1
    assert 0 < metrics("sequence")["product_sequence_mask_masked_ratio"] <= 1
