"""LoRA on FSDP2: however it is spread, it is what PEFT and transformers compute; checkpoints hold adapters, exports merged weights, engines get either."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemReader
from transformers import AutoModelForCausalLM, Qwen2Config

from hpcrl.config.sections.model import CriticConfig, CriticModelConfig, LoraConfig, Pretrained
from hpcrl.data.weight_files import PublishedWeights
from hpcrl.errors import DataError
from hpcrl.rundir.layout import Run
from hpcrl.trainer.distributed import World
from hpcrl.trainer.models.hf import CriticSource
from hpcrl.trainer.models.lora import add_adapters, gather_adapter
from hpcrl.trainer.models.trainable import mark_trained
from hpcrl.trainer.packing import pack
from hpcrl.trainer.saving.publish import ADAPTER
from tests.trainer import scenarios
from tests.trainer.backends.test_engine import GROUPS, SIZE, expect_same, true, variant
from tests.trainer.material import make_sample, run_of_two, spread_singular_values
from tests.trainer.ranks import Ranks
from tests.trainer.saving.test_checkpoint import life, losses, steps

SEED = 42  # trainer.seed
ONLY_ADAPTERS = r"^(?!.*\.lora_)"
PLAIN: dict[str, Any] = {"rank": 4}
PATTERNS: dict[str, Any] = {
    "rank": 4,
    "alpha": 8.0,
    "use_rslora": True,
    "target_modules": ["q_proj", "layers.1.mlp"],
    "exclude_modules": "down_proj",
    "rank_pattern": {"q_proj": 2},
    "alpha_pattern": {"layers.1.mlp.up_proj": 3.0},
    "init_method": "gaussian",
}
KEPT: dict[str, Any] = {
    "rank": 4,
    "modules_to_save": ["embed_tokens", "layers.1.post_attention_layernorm", "layers.0.mlp.up"],
}
OURS = {"all": PLAIN, "some": PATTERNS, "kept": KEPT}
TRAINED = {"kept": r"^(?!.*(\.lora_|embed_tokens|layers\.1\.post_attention_layernorm|layers\.0\.mlp\.up))"}
THEIRS = {
    "kept": peft.LoraConfig(
        r=4, lora_alpha=16, target_modules="all-linear", exclude_modules=r".*layers\.0\.mlp\.up_proj"
    ),
    "all": peft.LoraConfig(r=4, lora_alpha=16, target_modules="all-linear"),
    "some": peft.LoraConfig(
        r=4,
        lora_alpha=8,
        use_rslora=True,
        target_modules=r".*\.(q_proj|layers\.1\.mlp\.(gate|up)_proj)",
        rank_pattern={"q_proj": 2},
        alpha_pattern={"layers.1.mlp.up_proj": 3.0},
    ),
}


def with_lora(lora: dict[str, Any], micro: int = 4, **options: Any) -> dict[str, Any]:
    policy = options.pop("policy", {})
    return variant(micro, policy={"model": {"lora": lora}, **policy}, **options)


VARIANTS = {
    1: {
        "all": with_lora(PLAIN),
        "kept": with_lora(KEPT, gradient_checkpointing=True),
        "some": with_lora(PATTERNS, logprobs_chunk_size=5, gradient_checkpointing=True),
    },
    2: {
        "all-two-ranks": with_lora(PLAIN, 1),
        "kept-two-ranks": with_lora(KEPT, 2),
        "some-reentrant": with_lora(
            PATTERNS, 2, gradient_checkpointing=True, gradient_checkpointing_use_reentrant=True
        ),
        "all-bf16": with_lora(PLAIN, 2, policy={"fsdp_config": {"mixed_precision": {"param_dtype": "bf16"}}}),
    },
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, model_path: Path, alone: World, two: Ranks) -> Path:
    path = tmp_path_factory.mktemp("lora")
    run = run_of_two(path / "run", GROUPS, SIZE)
    options = {"model": str(model_path), "run": str(run.path), "out": str(path)}
    scenarios.variants(alone, {**options, "variants": VARIANTS[1]})
    two.play([("scenarios:variants", {**options, "variants": VARIANTS[2]})])
    return path


def adapt(kind: str, model: torch.nn.Module) -> None:
    """Give a model PEFT's adapters, with the first values that ours have."""
    peft.inject_adapter_in_model(THEIRS[kind], model)
    path = model.config._name_or_path  # pyright: ignore[reportAttributeAccessIssue]
    own = AutoModelForCausalLM.from_pretrained(path)
    add_adapters(own, LoraConfig(**OURS[kind]), "trainer.policy", torch.float32, SEED)
    drawn = {name: value for name, value in own.state_dict().items() if ".lora_" in name}
    missing, unexpected = model.load_state_dict(drawn, strict=False)
    assert not unexpected
    assert not [name for name in missing if ".lora_" in name]


@pytest.mark.parametrize("name", ["all", "some", "kept", "all-two-ranks", "kept-two-ranks", "some-reentrant"])
def test_every_way_is_what_peft_computes(results: Path, model_path: Path, name: str) -> None:
    kind = name.partition("-")[0]
    truth = true(results, model_path, frozen=TRAINED.get(kind, ONLY_ADAPTERS), adapt=partial(adapt, kind))
    expect_same(results, truth, name)


def test_what_lies_below_adapters_is_kept_in_the_type_of_the_computation(results: Path) -> None:
    tensors = load_file(results / "all-bf16.safetensors")
    types = {name: value.dtype for name, value in tensors.items() if name.startswith("parameter.")}
    assert {type_ for name, type_ in types.items() if ".lora_" in name} == {torch.float32}
    assert {type_ for name, type_ in types.items() if ".lora_" not in name} == {torch.bfloat16}
    exact, rounded = (json.loads((results / f"{name}.json").read_text()) for name in ("all", "all-bf16"))
    assert [u["final_loss"] for u in rounded] == pytest.approx([u["final_loss"] for u in exact], abs=0.05)


@dataclass
class TwoThenOne:
    """A run whose first step two ranks save, and what one rank makes of it."""

    run: Run
    on: Run
    scores: dict[str, torch.Tensor]
    model_path: Path

    @classmethod
    def trained(
        cls, model_path: Path, place: Path, alone: World, two: Ranks, trainer: dict[str, Any], most: float = 1e-6
    ) -> TwoThenOne:
        """Train it, and compare losses, in which the reference counts too, and what transformers and PEFT compute with the export."""
        run, scores = run_of_two(place / "run", GROUPS, SIZE), place / "scores.safetensors"
        saved = life(model_path, run.path, place / "saved.json", until=2, saves=[1], trainer=trainer)
        two.play([("scenarios:lifetime", saved)])
        scenarios.rewind(alone, {"run": str(run.path), "to": str(place / "on"), "steps": [1]})
        options = {"until": 2, "attempt": 2, "trainer": trainer, "export": str(scores)}
        scenarios.lifetime(alone, life(model_path, place / "on", place / "on.json", **options))
        assert losses(steps(place, "on")) == pytest.approx(losses(steps(place, "saved"))[2:], abs=most)
        found = cls(run, Run.open(place / "on"), load_file(scores), model_path)
        export = found.on.export(2)
        expect_scores(AutoModelForCausalLM.from_pretrained(export, dtype=torch.float32), found.scores)
        expect_scores(found.adapted(export / ADAPTER), found.scores, 10 * most)
        return found

    def adapted(self, adapter: Path) -> torch.nn.Module:
        base = AutoModelForCausalLM.from_pretrained(self.model_path, dtype=torch.float32)
        return peft.PeftModel.from_pretrained(base, str(adapter))

    def saved(self, folder: str) -> list[str]:
        """Return the names in a folder of the checkpoint."""
        names = FileSystemReader(self.run.checkpoint(1)).read_metadata().state_dict_metadata
        return [name for name in names if name.startswith(folder)]


def test_a_checkpoint_holds_adapters_and_weights_are_merged(
    model_path: Path, tmp_path: Path, alone: World, two: Ranks
) -> None:
    found = TwoThenOne.trained(model_path, tmp_path, alone, two, {"policy": {"model": {"lora": PATTERNS}}})
    for folder in ("model.", "optimizer.state."):
        tensors = found.saved(folder)
        assert tensors
        assert all(".lora_" in name for name in tensors)
    for published, most in ((found.on, 1e-5), (found.run, 1e-4)):  # by one rank and by two
        weights = PublishedWeights.read(published.weights_of(2))
        assert weights.adapter
        expect_scores(found.adapted(weights.path), found.scores, most)


def test_modules_that_are_trained_whole_are_saved_and_exported(
    model_path: Path, tmp_path: Path, alone: World, two: Ranks
) -> None:
    trainer = {"policy": {"model": {"lora": KEPT}}, "algorithm": {"use_kl_loss": True, "kl_loss_coef": 0.5}}
    found = TwoThenOne.trained(model_path, tmp_path, alone, two, trainer)
    assert {name.rpartition("model.layers.")[2] for name in found.saved("model.") if ".lora_" not in name} == {
        "model.model.model.embed_tokens.weight",
        "1.post_attention_layernorm.weight",
        "0.mlp.up_proj.weight",
    }


@pytest.mark.parametrize("method", [pytest.param("olora", marks=pytest.mark.faults_slow), "pissa"])
def test_adapters_that_begin_as_a_part_of_the_weights(
    model_path: Path, tmp_path: Path, alone: World, two: Ranks, method: str
) -> None:
    """Exports are for the model as it was; weights are split anew at each start."""
    trainer = {"policy": {"model": {"lora": {**PLAIN, "init_method": method}}}, "algorithm": {"use_kl_loss": True}}
    TwoThenOne.trained(model_path, tmp_path, alone, two, trainer, most=1e-5)


@pytest.mark.parametrize("method", ["olora", "pissa"])
def test_what_is_taken_from_the_weights_is_what_peft_takes(model_path: Path, method: Any) -> None:
    ours, theirs = (AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32) for _ in range(2))
    for model in (ours, theirs):
        spread_singular_values(model)
    token_ids = torch.tensor([[4, 9, 2, 7]])
    with torch.no_grad():
        before = ours(token_ids).logits
        add_adapters(ours, LoraConfig(rank=4, init_method=method), "trainer.policy", torch.float32, SEED)
        theirs = peft.get_peft_model(
            theirs, peft.LoraConfig(r=4, lora_alpha=16, target_modules="all-linear", init_lora_weights=method)
        )
        torch.testing.assert_close(ours(token_ids).logits, before, atol=1e-5, rtol=1e-5)
    given = theirs.base_model.model.state_dict()
    found = {name: value for name, value in ours.state_dict().items() if ".base_layer." in name}
    assert found
    for name, value in found.items():
        torch.testing.assert_close(value, given[name], atol=1e-5, rtol=1e-4)


def expect_scores(plain: torch.nn.Module, found: dict[str, torch.Tensor], most: float = 1e-5) -> None:
    for name, ids in found.items():
        number, _, what = name.partition(".")
        if what == "ids":
            with torch.no_grad():
                logprobs = (plain(input_ids=ids[None]).logits[0, :-1] / 0.9).log_softmax(-1)
            expected = logprobs.gather(-1, ids[1:, None])[:, 0]
            scored = found[f"{number}.logprobs"][:-1]
            torch.testing.assert_close(scored[scored != 0], expected[scored != 0], atol=most, rtol=0)


def test_an_update_is_small() -> None:
    """The shapes of Qwen2.5-1.5B: adapters of rank 8 are less than a fiftieth of the model."""
    sizes = {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12}
    config = Qwen2Config(**sizes, num_key_value_heads=2, vocab_size=151936, tie_word_embeddings=True)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    whole = model.num_parameters()
    add_adapters(model, LoraConfig(rank=8), "trainer.policy", torch.bfloat16, SEED)
    adapters = sum(parameter.numel() for name, parameter in model.named_parameters() if ".lora_" in name)
    assert (whole, adapters) == (1_543_714_304, 9_232_384)
    assert adapters < 0.02 * whole


def test_inputs_of_adapters_are_dropped_in_training_only(results: Path, model_path: Path, alone: World) -> None:
    run, options = Run.open(results / "run"), with_lora({**PLAIN, "dropout": 0.5})
    engine = scenarios.make_engine(alone, str(model_path), options)
    scenarios.train_steps(engine, run, range(1, 2), options)
    batch = pack([make_sample(torch.Generator().manual_seed(1), 12, prompt=3)]).whole()
    scored = [next(engine.logprobs([batch])) for _ in range(2)]
    trained = [
        engine.forward_backward([batch], lambda _, logprobs_P, *_others: (logprobs_P.sum(), {"sum": logprobs_P.sum()}))
        for _ in range(2)
    ]
    engine.skip()
    assert torch.equal(*scored)
    assert len({scored[0].sum().item(), *(found["sum"].item() for found in trained)}) == 3


def adapter_of(model_path: Path, lora: LoraConfig, target: Path) -> torch.nn.Module:
    """Write random adapters of a model; return what PEFT makes of both."""
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    add_adapters(model, lora, "trainer.policy", torch.float32, SEED)
    for name, parameter in model.named_parameters():
        if ".lora_B." in name:
            torch.nn.init.normal_(parameter, std=0.1)
    gather_adapter(model, lora, Pretrained(str(model_path)), lambda parameter: parameter).write(target)
    return peft.PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32), str(target)
    )


def test_a_run_begins_with_given_adapters(model_path: Path, tmp_path: Path) -> None:
    theirs = adapter_of(model_path, LoraConfig(**PATTERNS), tmp_path / "adapter")
    given = {
        **PATTERNS,
        "alpha": 5.0,
        "alpha_pattern": {},
        "use_rslora": False,
        "adapter_path": str(tmp_path / "adapter"),
    }
    ours = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    add_adapters(ours, LoraConfig(**given), "trainer.policy", torch.float32, SEED)
    token_ids = torch.tensor([[4, 9, 2, 7]])
    with torch.no_grad():
        torch.testing.assert_close(ours(token_ids).logits, theirs(token_ids).logits, atol=1e-6, rtol=1e-5)


def test_a_critic_begins_with_adapters_of_a_policy(model_path: Path, tmp_path: Path) -> None:
    theirs = adapter_of(model_path, LoraConfig(**PATTERNS), tmp_path)
    ours = CriticSource(path=str(model_path), role="trainer.critic", head="value_head", seed=1).whole(
        torch.float32, "eager"
    )
    lora = LoraConfig(**{**PATTERNS, "adapter_path": str(tmp_path)})
    mark_trained(ours, CriticConfig(model=CriticModelConfig(path=str(model_path), lora=lora)), torch.float32, SEED)
    token_ids = torch.tensor([[4, 9, 2, 7]])
    with torch.no_grad():
        expected = theirs(token_ids, output_hidden_states=True).hidden_states[-1]
        found = ours.base_model(token_ids).last_hidden_state
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)
    assert {name for name, each in ours.named_parameters() if each.requires_grad and ".lora_" not in name} == {
        "value_head.weight"
    }


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rank": 8}, r"has rank 4 and 32 inputs for .*gate_proj, and expected were rank 8 and 32; set rank and rank_pattern"),
        ({"exclude_modules": None}, r"adapts other modules, by model.layers.1.mlp.down_proj.lora_A.weight; set target_modules"),
        ({"adapter_path": "nowhere"}, r"nowhere has no adapters that PEFT reads"),
    ],
)  # fmt: skip
def test_given_adapters_for_other_modules_or_ranks(
    model_path: Path, tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    adapter_of(model_path, LoraConfig(**PATTERNS), tmp_path)
    model = AutoModelForCausalLM.from_pretrained(model_path)
    with pytest.raises(DataError, match=f"trainer.policy.model.lora.adapter_path: .*{said}"):
        add_adapters(
            model,
            LoraConfig(**{**PATTERNS, "adapter_path": str(tmp_path), **changes}),
            "trainer.policy",
            torch.float32,
            SEED,
        )


@pytest.mark.parametrize(
    ("lora", "said"),
    [
        ({"target_modules": ["q_porj"]}, 'target_modules "q_porj": the model has no linear layer with that in its name; did you mean'),
        ({"exclude_modules": "proj"}, " exclude_modules and modules_to_save leave no module to adapt"),
        ({"exclude_modules": ["head"]}, 'exclude_modules "head": the model has no linear layer'),
        ({"modules_to_save": ["embed_tokns"]}, 'modules_to_save "embed_tokns": the model has no module with parameters with that in its name; did you mean embed_tokens'),
    ],
)  # fmt: skip
def test_names_that_find_nothing(model_path: Path, lora: dict[str, Any], said: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(model_path)
    with pytest.raises(DataError, match=f"trainer.policy.model.lora.{said}"):
        add_adapters(model, LoraConfig(rank=2, **lora), "trainer.policy", torch.float32, SEED)
