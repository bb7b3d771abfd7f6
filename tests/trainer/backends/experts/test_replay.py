"""Router replay: the trainer takes tokens to the experts that samples tell of, and gradients still reach the routers."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM

from hpcrl.config.sections.model import ExpertsConfig
from hpcrl.data.models.routers import routers
from hpcrl.errors import DataError
from hpcrl.rundir.layout import Run
from hpcrl.trainer.distributed import World
from hpcrl.trainer.models.experts.replay import Chosen
from hpcrl.trainer.models.experts.routing import Routing
from hpcrl.types import ROUTED_EXPERTS, Batch
from tests.trainer import scenarios
from tests.trainer.backends.test_engine import GROUPS, SIZE, AdamW, Truth, expect_same, variant
from tests.trainer.backends.test_lora_experts import write_mixture
from tests.trainer.material import VOCABULARY, run_of_two
from tests.trainer.ranks import Ranks

EPS = 1e-3  # Adam makes whole steps of gradients that are no more than rounding, but for this
REPLAYED: dict[str, Any] = {"experts": {"router_replay": "R3"}, "optimizer_config": {"eps": EPS}}
ALONE = {
    "one-by-one": variant(1, policy=REPLAYED),
    "all-at-once": variant(64, gradient_checkpointing=True, policy=REPLAYED),
    "padded-rows": variant(4, use_sample_packing=False, policy=REPLAYED),
}
TWO = {
    "two-ranks": variant(2, gradient_checkpointing=True, policy=REPLAYED),
    "experts-shared": variant(2, policy={**REPLAYED, "fsdp_config": {"expert_parallel_size": 2}}),
}


class Replayed(Truth):
    """Transformers, with routers that are told what to choose, one sample at a time."""

    def score(self, model: torch.nn.Module, sample: Any) -> tuple[torch.Tensor, torch.Tensor]:
        for layer, router in enumerate(routers(model).values()):  # pyright: ignore[reportArgumentType]
            router.forward = partial(self.routed, router, sample.tensors[ROUTED_EXPERTS][:-1, layer].long())
        return super().score(model, sample)

    def routed(self, router: Any, given_Tk: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        logits_TE = F.linear(hidden.flatten(0, -2), router.weight)
        probabilities_TE = logits_TE.softmax(-1)
        # the last token's experts are not known, and nothing is asked of what it computes
        given_Tk = torch.cat([given_Tk, given_Tk.new_zeros(1, given_Tk.shape[1])])
        own_Tk = probabilities_TE.topk(router.top_k).indices
        experts_Tk = torch.where(given_Tk < 0, own_Tk, given_Tk)
        scores_Tk = probabilities_TE.gather(1, experts_Tk)
        scores_Tk = scores_Tk / scores_Tk.sum(-1, keepdim=True) if router.norm_topk_prob else scores_Tk
        return logits_TE, scores_Tk, experts_Tk


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_mixture(tmp_path_factory.mktemp("mixture"), norm_topk_prob=True)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, mixture: Path, alone: World, two: Ranks) -> Path:
    path = tmp_path_factory.mktemp("replay")
    run = run_of_two(path / "run", GROUPS, SIZE, routed=True)
    options = {"model": str(mixture), "run": str(run.path), "out": str(path)}
    scenarios.variants(alone, {**options, "variants": ALONE})
    two.play([("scenarios:variants", {**options, "variants": TWO})])
    return path


@pytest.fixture(scope="module")
def truth(results: Path, mixture: Path) -> Replayed:
    run = Run.open(results / "run")
    batches = [Batch.from_json(json.loads(run.batch(step).read_text())) for step in (1, 2)]
    return Replayed(mixture, run, batches, optimizer=partial(AdamW, eps=EPS))


@pytest.mark.parametrize("name", [*ALONE, *TWO])
def test_tokens_go_to_the_experts_that_samples_tell_of(results: Path, truth: Replayed, name: str) -> None:
    expect_same(results, truth, name)
    told = json.loads((results / f"{name}.json").read_text())[-1]
    assert 0.7 < told["experts/replayed_share"] < 1
    assert truth.gradients["model.layers.0.mlp.gate.weight"].abs().max() > 1e-4


SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "num_experts_per_tok": 2, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2_moe": {"num_experts": 4, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 16},
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 24, "norm_topk_prob": True},
    "mixtral": {"num_local_experts": 4},
    "olmoe": {"num_experts": 4},
    "gpt_oss": {"num_local_experts": 4},
    "minimax_m2": {"num_local_experts": 4},
}


def made(family: str, device: str = "meta") -> Any:
    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SIZES | FAMILIES[family]))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_router_that_repeats_its_own_choice_says_the_same(family: str) -> None:
    Routing(made(family), ExpertsConfig(router_replay="R3"), packing=True)  # it is not refused
    model = made(family, "cpu")
    hidden = torch.randn(7, 32)
    for router in routers(model).values():
        arguments = (hidden, torch.zeros(4)) if family == "minimax_m2" else (hidden,)
        logits, scores, experts = router(*arguments)
        others = (experts + 1) % 4
        with Chosen(experts):
            again = router(*arguments)
        for one, other in zip((logits, scores, experts), again, strict=True):
            assert torch.equal(one, other)
        with Chosen(others.masked_fill(torch.arange(7)[:, None] < 3, -1)):
            _, other_scores, told = router(*arguments)
        assert torch.equal(told, torch.where(torch.arange(7)[:, None] < 3, experts, others))
        assert not torch.equal(other_scores[3:], scores[3:])


@pytest.mark.parametrize(
    ("family", "experts", "said"),
    [
        ("llama", {"aux_loss_coef": 0.1}, r"experts\.aux_loss_coef: LlamaForCausalLM has no routers"),
        ("minimax_m2", {"aux_loss_coef": 0.1}, "balances its experts by a bias, not by a loss; use 0"),
        ("phimoe", {"router_replay": "R3"}, "choose by something else than one topk"),
    ],
)
def test_what_a_model_cannot_do_is_refused(family: str, experts: dict[str, Any], said: str) -> None:
    more = FAMILIES.get(family, {"num_local_experts": 4} if family == "phimoe" else {})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SIZES | more))
    with pytest.raises(DataError, match=said):
        Routing(model, ExpertsConfig(**experts), packing=True)
