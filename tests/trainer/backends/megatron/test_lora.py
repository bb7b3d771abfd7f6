"""LoRA on Megatron-core: however ranks share the model, it is what PEFT computes with FSDP2."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from typing import Any

import peft
import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader
from transformers import AutoModelForCausalLM

pytest.importorskip("megatron.core")

from tests.trainer.backends.megatron.material import write_model
from tests.trainer.backends.megatron.parity import PROBE
from tests.trainer.backends.megatron.seam import Seam, Told, Way, expect_same, megatron
from tests.trainer.material import spread_singular_values
from tests.trainer.scenarios import laid_over

TP2, PP2 = {"tensor_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2}
CP2, EP2 = {"context_parallel_size": 2}, {"expert_model_parallel_size": 2}
VPP = PP2 | {"pipeline_schedule": "Interleaved1F1B", "pipeline_layers_per_stage": 1}
OVERLAP = {"ddp_config": {"overlap_grad_reduce": True, "overlap_param_gather": True}}
WHOLE = {"optimizer_config_kwargs": {"use_distributed_optimizer": False}}
ETP1, ALLGATHER = {"expert_tensor_parallel_size": 1}, {"moe_token_dispatcher_type": "allgather"}
CANONICAL = {"lora_type": "canonical_lora"}

PLAIN: dict[str, Any] = {"rank": 4}
PATTERNS: dict[str, Any] = {
    "rank": 4,
    "alpha": 8.0,
    "use_rslora": True,
    "target_modules": ["q_proj", "v_proj", "layers.1.mlp"],
    "exclude_modules": "gate_proj",
    "rank_pattern": {"q_proj": 2},
    "alpha_pattern": {"layers.1.mlp.up_proj": 3.0},
    "init_method": "gaussian",
}
FUSED: dict[str, Any] = PLAIN | {"target_modules": ["q_proj", "k_proj", "v_proj", "layers.1.mlp"]}
KEPT: dict[str, Any] = PLAIN | {
    "modules_to_save": ["embed_tokens", "layers.1.post_attention_layernorm", "layers.0.mlp"]
}
MIXTURE: dict[str, Any] = PLAIN | {"target_parameters": ["experts"]}
SOME_EXPERTS: dict[str, Any] = PLAIN | {
    "alpha": 4.0,
    "use_rslora": True,
    "exclude_modules": "expert_gate",
    "target_parameters": ["layers.1.mlp.experts", "layers.3.mlp.experts.gate_up_proj"],
    "rank_pattern": {"experts.down_proj": 2},
    "alpha_pattern": {r"layers\.3\.mlp\.experts\.gate_up_proj": 2.0},
    "init_method": "olora",
}


def adapted(lora: dict[str, Any], **policy: Any) -> dict[str, Any]:
    return {"policy": {"model": {"lora": lora}, **policy}}


RECOMPUTED = {"gradient_checkpointing": True}
CLIPPED = {"optimizer_config": {"max_grad_norm": 0.05, "weight_decay": 1.0}}
CRITIC: dict[str, Any] = {
    "algorithm": {"advantage_estimator": "gae", "lambd": 0.8, "gamma": 0.9, "use_kl_loss": False, "value_clip": 0.01},
    "critic": {"model": {"lora": PLAIN}},
}
DO = [("train", 1), ("train", 2)]
MOVED = {"do": [("train", 1), ("reset_reference", True), ("train", 2)]}
# what one rank of FSDP2 does: the model, the section of the trainer, and what is special about the way
TRUTHS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "each": ("tied", adapted(PLAIN), {}),
    "some": ("untied", adapted(PATTERNS, **CLIPPED), {}),
    "frozen": ("untied", adapted(PLAIN, freeze_pattern=[r"layers\.[01]\."]), {}),
    "experts": ("moe", adapted(PLAIN), {}),
    "beside-experts": ("shared", adapted(PLAIN | {"exclude_modules": "expert_gate"}), {}),
    "together": ("tied", adapted(PLAIN), {"one_A": True}),
    "fused": ("untied", adapted(FUSED, **CLIPPED), {"one_A": True}),
    "critic": ("tied", CRITIC, {"critic": True}),
    "kept": ("tied", adapted(KEPT), MOVED),
    "kept-taken": ("spread", adapted(KEPT | {"init_method": "pissa"}), MOVED),
    "of-experts": ("moe", adapted(MIXTURE), {}),
    "of-some-experts": ("shared", adapted(SOME_EXPERTS, **CLIPPED), MOVED),
    "kept-experts": ("moe", adapted(PLAIN | {"modules_to_save": ["layers.1.mlp.experts"]}), {}),
    "olora": ("untied", adapted(PATTERNS | {"init_method": "olora"}, **CLIPPED), {}),
}
# number of ranks, megatron's options, the rest of the section, what it is like
Row = tuple[int, dict[str, Any], dict[str, Any], str]
WAYS: dict[str, Row] = {
    "each-tp2": (2, TP2 | CANONICAL, {}, "each"),
    "together-tp2": (2, TP2, {}, "together"),
    "together-pp2-recomputed": (2, PP2, RECOMPUTED, "together"),
    "kept-tp2": (2, TP2 | CANONICAL, {}, "kept-taken"),
    "of-experts-ep2": (2, EP2 | CANONICAL, {}, "of-experts"),
}
MORE: dict[str, Row] = {
    "each": (1, CANONICAL, {}, "each"),
    "together": (1, {}, {}, "together"),
    "each-pp2": (2, PP2 | CANONICAL, {}, "each"),
    "some-tp2-recomputed": (2, TP2 | CANONICAL, RECOMPUTED, "some"),
    "some-dp2-overlap": (2, CANONICAL | OVERLAP, {}, "some"),
    "frozen-pp2": (2, PP2 | CANONICAL, {}, "frozen"),
    "experts-ep2": (2, EP2 | CANONICAL, {}, "experts"),
    "beside-experts-tp2": (2, TP2 | CANONICAL | {"expert_tensor_parallel_size": 1}, {}, "beside-experts"),
    "together-vpp2-recomputed": (2, VPP, RECOMPUTED, "together"),
    "fused-tp2": (2, TP2 | WHOLE, {}, "fused"),
    "fused-cp2": (2, CP2, {}, "fused"),
    "critic-tp2": (2, TP2 | CANONICAL, {}, "critic"),
    "kept-pp2": (2, PP2 | CANONICAL, RECOMPUTED, "kept"),
    "kept-dp2-overlap": (2, CANONICAL | OVERLAP, {}, "kept"),
    "of-experts-pp2-recomputed": (2, PP2 | CANONICAL, RECOMPUTED, "of-experts"),
    "of-experts-etp1": (2, TP2 | CANONICAL | ETP1, {}, "of-experts"),
    "of-experts-etp2": (2, TP2 | CANONICAL | ALLGATHER, {}, "of-experts"),
    "of-some-experts-ep2": (2, EP2 | CANONICAL, {}, "of-some-experts"),
    "of-some-experts-etp2": (2, TP2 | CANONICAL | ALLGATHER | WHOLE, {}, "of-some-experts"),
    "of-experts-tp2-ep2": (4, TP2 | EP2 | CANONICAL | ETP1, {}, "of-experts"),
    "kept-experts-ep2": (2, EP2 | CANONICAL, {}, "kept-experts"),
    "kept-taken-pp2": (2, PP2 | CANONICAL, {}, "kept-taken"),
    "olora-dp2": (2, CANONICAL, {}, "olora"),
    "olora-tp4": (4, {"tensor_model_parallel_size": 4} | CANONICAL, {}, "olora"),
    "each-tp4": (4, {"tensor_model_parallel_size": 4} | CANONICAL, {}, "each"),  # more ranks than groups of queries
    "together-tp2-pp2": (4, TP2 | PP2, {}, "together"),
}
SAVED = ("each-tp2", "kept-tp2", "of-experts-ep2")
# what it goes on from, number of ranks, megatron's options
RESTORED: dict[str, tuple[str, int, dict[str, Any]]] = {
    "each-on-pp2": ("each-tp2", 2, PP2 | CANONICAL),
    "kept-on-pp2": ("kept-tp2", 2, PP2 | CANONICAL),
    "of-experts-on-tp2": ("of-experts-ep2", 2, TP2 | ETP1 | CANONICAL),
    "each-on-one": ("each-tp2", 1, CANONICAL),
}
EXPORTED = ("each-tp2", "together-pp2-recomputed", "kept-tp2", "of-experts-ep2")
SELDOM = ("together-tp2-pp2", "kept-pp2", "kept-experts-ep2")
rarely = pytest.mark.faults_slow


REFUSED: dict[str, tuple[str, dict[str, Any], dict[str, Any], list[str]]] = {
    "a-part": (
        "tied",
        TP2,
        PLAIN | {"target_modules": ["q_proj"]},
        ["lora_type=lora, q_proj, k_proj, v_proj of model.layers.0.self_attn", "lora_type=canonical_lora"],
    ),
    "ranks": (
        "tied",
        PP2,
        PLAIN | {"rank_pattern": {"up_proj": 2}},
        ["gate_proj, up_proj of model.layers.0.mlp", "ranks or alphas differ"],
    ),
    "no-such-layer": (
        "shared",
        EP2,
        PLAIN,
        ["cannot adapt model.layers.1.mlp.shared_expert_gate", "trainer.policy.model.lora.exclude_modules"],
    ),
    "unknown": ("tied", {}, PLAIN | {"target_modules": ["linear_qkv"]}, ['target_modules "linear_qkv"', "q_proj"]),
    "tokens": (
        "tied",
        TP2 | {"transformer_config_kwargs": {"sequence_parallel": False}},
        PLAIN,
        ["transformer_config_kwargs.sequence_parallel=false does not work with LoRA"],
    ),
}


class Played:
    """What comes of ways; those of one number of ranks are gone at once."""

    def __init__(self, seam: Seam) -> None:
        self.seam = seam
        self._gone: dict[str, Way] = {}
        write_model("qwen2-moe", seam.folder / "shared")
        model = AutoModelForCausalLM.from_pretrained(seam.folder / "tied")
        spread_singular_values(model)
        model.save_pretrained(seam.folder / "spread")

    def go(self, size: int, ways: dict[str, Way]) -> None:
        new = {name: way for name, way in ways.items() if name not in self._gone}
        if new:
            self.seam.play(size, list(new.values()))
            self._gone |= new

    def go_all(self, table: dict[str, Row]) -> None:
        self.go(1, {f"truth-{row[3]}": self._truth(row[3]) for row in table.values()})
        for size in (1, 2, 4):
            self.go(size, {name: self._way(name, *row[1:]) for name, row in table.items() if row[0] == size})

    def _truth(self, like: str) -> Way:
        model, trainer, special = TRUTHS[like]
        return self.seam.way(f"truth-{like}", model, trainer, **special)

    def _way(self, name: str, options: dict[str, Any], more: dict[str, Any], like: str) -> Way:
        model, trainer, special = TRUTHS[like]
        do = list(special.get("do", DO))
        if name in SAVED:
            do.insert(-1, ("save", self.place(name)))
        if name in EXPORTED + SELDOM:
            do.append(("export", self.place(f"exported-{name}")))
        more = laid_over(laid_over(megatron(**options), trainer), more)
        return self.seam.way(name, model, more, do, critic=special.get("critic", False))

    def place(self, name: str) -> str:
        return str(self.seam.folder / f"of-{name}")

    def told(self, name: str) -> Told:
        return self.seam.told(self._gone[name])


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Played]:
    seam = Seam(tmp_path_factory.mktemp("adapted"))
    played = Played(seam)
    played.go_all(WAYS)
    yield played
    seam.close()


@pytest.fixture(scope="module")
def all_played(played: Played) -> Played:
    played.go_all(MORE)
    return played


@pytest.mark.parametrize("name", WAYS)
def test_layouts_train_as_peft(played: Played, name: str) -> None:
    expect_truth(played, name, WAYS[name][3])


@rarely
@pytest.mark.parametrize("name", MORE)
def test_every_layout_trains_as_peft(all_played: Played, name: str) -> None:
    expect_truth(all_played, name, MORE[name][3])


def expect_truth(played: Played, name: str, like: str) -> None:
    truth = played.told(f"truth-{like}")
    assert any(".gradient." in name and ".lora_A." in name for name in truth.tensors)
    expect_same(without_probe(played.told(name)), truth)


def without_probe(told: Told) -> Told:
    return Told(told.told, {name: value for name, value in told.tensors.items() if name != "probe"}, told.samples)


def test_what_is_compared_does_something(played: Played) -> None:
    each, together = played.told("truth-each"), played.told("truth-together")
    moved = [name for name in each.tensors if name.startswith("weights.")]
    assert max((each.tensors[name] - together.tensors[name]).abs().max().item() for name in moved) > 1e-3
    scored = {name: value for name, value in each.samples.items() if name.startswith("2.policy.")}
    base = torch.cat([each.samples[name.replace("policy", "reference")] for name in scored])
    assert (torch.cat(list(scored.values())) - base).abs().max() > 1e-3, "the reference has no adapters"


@rarely
def test_gradients_are_clipped(all_played: Played) -> None:
    norms = [update["grad_norm"] for update in all_played.told("truth-some").told["updates"]]
    assert min(norms) > CLIPPED["optimizer_config"]["max_grad_norm"]


@pytest.mark.parametrize("name", [*list(RESTORED)[:3], pytest.param("each-on-one", marks=rarely)])
def test_another_layout_goes_on_from_a_checkpoint_of_adapters(played: Played, name: str) -> None:
    saved, size, options = RESTORED[name]
    like = WAYS[saved][3]
    model, trainer, _ = TRUTHS[like]
    do = [("restore", played.place(saved)), ("train", 2)]
    played.go(size, {name: played.seam.way(name, model, laid_over(megatron(**options), trainer), do)})
    expect_same(played.told(name), played.told(f"truth-{like}").from_step_2())


def test_a_checkpoint_has_adapters_only(played: Played) -> None:
    names = FileSystemReader(played.place("each-tp2")).read_metadata().state_dict_metadata
    matrices = {name for name in names if ".lora_" in name}
    assert len(matrices) == 4 * 2 * 4 * 7, "A and B of seven layers, in the model, and Adam's count and moments"
    assert "model.model.model.layers.3.mlp.down_proj.lora_A.default.weight" in matrices
    others = names.keys() - matrices
    assert not [name for name in others if "weight" in name or "bias" in name], others


@pytest.mark.parametrize("name", EXPORTED)
def test_exports_are_what_transformers_and_peft_compute(played: Played, name: str) -> None:
    expect_export(played, name)


@rarely
@pytest.mark.parametrize("name", SELDOM)
def test_exports_of_four_ranks(all_played: Played, name: str) -> None:
    expect_export(all_played, name)


def expect_export(played: Played, name: str) -> None:
    export, ids = played.place(f"exported-{name}"), torch.tensor([PROBE])
    like = (WAYS | MORE)[name][3]
    base = AutoModelForCausalLM.from_pretrained(played.seam.folder / TRUTHS[like][0], dtype=torch.float32)
    merged = AutoModelForCausalLM.from_pretrained(export, dtype=torch.float32)
    for model in (merged, peft.PeftModel.from_pretrained(base, f"{export}/adapter")):
        with torch.no_grad():
            logits = model(input_ids=ids).logits[0, :-1]
        said = logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        torch.testing.assert_close(played.told(name).tensors["probe"], said, atol=1e-5, rtol=0)


@rarely
def test_training_begins_with_given_adapters(played: Played) -> None:
    """Of other ranks and another strategy, with another alpha; one A for layers that have one is refused where they have several."""
    each, together = (f"{played.place(f'exported-{name}')}/adapter" for name in EXPORTED[:2])
    given = {
        name: adapted(PLAIN | {"alpha": 2.0, "adapter_path": path})
        for name, path in (("each", each), ("together", together))
    }
    given["experts"] = adapted(MIXTURE | {"adapter_path": f"{played.place('exported-of-experts-ep2')}/adapter"})
    given["critic"] = laid_over(CRITIC, {"critic": {"model": {"lora": PLAIN | {"adapter_path": each}}}})
    played.go(
        1,
        {
            "given": played.seam.way("given", "tied", given["each"]),
            "given-together": played.seam.way("given-together", "tied", given["together"], one_A=True),
            "given-experts": played.seam.way("given-experts", "moe", given["experts"]),
            "given-critic": played.seam.way("given-critic", "tied", given["critic"], critic=True),
        },
    )
    ways = {
        "given-tp2": laid_over(megatron(**TP2, **CANONICAL), given["each"]),
        "given-together-pp2": laid_over(megatron(**PP2), given["together"]),
        "given-refused": laid_over(megatron(**TP2), given["each"]),
    }
    all_ways = {name: played.seam.way(name, "tied", trainer) for name, trainer in ways.items()}
    experts = laid_over(megatron(**TP2, **EP2, **ETP1, **CANONICAL), given["experts"])
    all_ways["given-experts-ep2"] = played.seam.way("given-experts-ep2", "moe", experts)
    critic = laid_over(megatron(**TP2, **CANONICAL), given["critic"])
    all_ways["given-critic-tp2"] = played.seam.way("given-critic-tp2", "tied", critic, critic=True)
    played.go(2, all_ways)
    for name in ("given-experts-ep2", "given-critic-tp2"):
        expect_same(played.told(name), played.told(name.rpartition("-")[0]))
    expect_same(played.told("given-tp2"), played.told("given"))
    expect_same(played.told("given-together-pp2"), played.told("given-together"))
    assert "adapter_path: model.layers.0.self_attn.q_proj" in played.told("given-refused").told["error"]


def test_what_cannot_be_adapted_is_refused_on_every_rank(played: Played) -> None:
    ways = {
        name: played.seam.way(name, model, laid_over(megatron(**options), adapted(lora)))
        for name, (model, options, lora, _) in REFUSED.items()
    }
    played.go(2, ways)
    for name in REFUSED:
        error = played.told(name).told["error"]
        assert all(part in error for part in REFUSED[name][3]), error


@rarely
def test_inputs_of_adapters_are_dropped_in_training_only(played: Played) -> None:
    """The same ones where layers are computed again."""
    dropping = adapted(PLAIN | {"dropout": 0.5})
    ways = {
        name: played.seam.way(
            f"dropout-{name}",
            "tied",
            laid_over(laid_over(megatron(**options), dropping), more),
            [("seed", seed), ("train", 1)],
        )
        for name, options, more, seed in (
            ("tp2", TP2, {}, 1),
            ("tp2-recomputed", TP2, RECOMPUTED, 1),
            ("tp2-others", TP2, {}, 2),
            ("dp2", {}, {}, 1),
            ("dp2-recomputed", {}, RECOMPUTED, 1),
        )
    }
    played.seam.play(2, list(ways.values()))
    plain, told = played.told("together-tp2"), {name: played.seam.told(way) for name, way in ways.items()}
    for found in told.values():
        for name, value in found.samples.items():
            if name.startswith("1."):  # before anything was trained
                torch.testing.assert_close(value, plain.samples[name], atol=1e-5, rtol=1e-5)
    norms = [found.told["updates"][0]["grad_norm"] for found in (plain, told["tp2"], told["tp2-others"])]
    assert min(abs(one - other) for one, other in combinations(norms, 2)) > 0.01
    for name in ("tp2", "dp2"):
        expect_same(told[f"{name}-recomputed"], told[name])


@rarely
def test_bf16_trains_nearly_alike(played: Played) -> None:
    """The frozen model and the adapters in bf16, the optimizer in fp32."""
    options = megatron(dtype="bf16", **TP2, **CANONICAL)
    played.go(2, {"bf16": played.seam.way("bf16", "tied", laid_over(options, adapted(PLAIN)))})
    found, truth = played.told("bf16"), played.told("truth-each")
    first, other = (each.told["updates"][0]["grad_norm"] for each in (found, truth))
    assert first == pytest.approx(other, rel=0.02)
    for part in ("1.0.gradient", "weights."):
        names = [name for name in truth.tensors if name.startswith(part)]
        ours, theirs = (torch.cat([each.tensors[name].flatten().float() for name in names]) for each in (found, truth))
        assert torch.nn.functional.cosine_similarity(ours, theirs, 0) > 0.99, part
