"""A reward model has the loss, gradient and metrics of TRL's RewardTrainer, whatever is packed and however many ranks there are, and transformers' score when it is exported."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from hpcrl.config import Config
from hpcrl.config.sections.generator import ChatTemplateConfig
from hpcrl.config.sections.model import Pretrained
from hpcrl.controller.dataset_rows import DatasetRows
from hpcrl.controller.prompt_stream import PromptStream
from hpcrl.data.sources import Source
from hpcrl.data.token_file import open_tokens
from hpcrl.data.tokenize import Recipe, Rows, Tokenizer
from hpcrl.errors import DataError
from hpcrl.rundir.commit import write_json
from hpcrl.rundir.layout import Run
from hpcrl.trainer.backends.base import UpdateResult
from hpcrl.trainer.backends.build import build_policy
from hpcrl.trainer.batching import micro_batch_limits
from hpcrl.trainer.distributed import World
from hpcrl.trainer.metrics import describe_updates
from hpcrl.trainer.models.build import policy_source
from hpcrl.trainer.offline.build import objective_of, reduction_of
from hpcrl.trainer.offline.validation import Validation
from hpcrl.trainer.packing import pack
from hpcrl.trainer.read_batch import load_mini_batches
from hpcrl.trainer.saving.publish import ADAPTER, Publisher
from hpcrl.trainer.step import sum_over_ranks
from hpcrl.types import Batch, Row
from tests.golden.trl_dpo import LORA, fill_adapters
from tests.golden.trl_reward import MARGINS, PLACE, fill_head
from tests.trainer.material import QUICKSTART
from tests.trainer.ranks import Ranks
from tests.trainer.scenarios import laid_over

SAID: dict[str, Any] = json.loads(PLACE.read_text())
CASES: dict[str, dict[str, Any]] = SAID["cases"]
PAIRS = len(SAID["rows"])


def config(run: Run, settings: dict[str, Any], changes: dict[str, Any]) -> Config:
    """Return the configuration of a case of TRL's; what it names lies where `run` made it."""
    policy: dict[str, Any] = {"model": {"path": str(run.path / "model")}}
    if changes.get("strategy") != "megatron":
        policy["fsdp_config"] = {"mixed_precision": {"param_dtype": "fp32"}}
    if settings.get("lora"):
        policy["model"]["lora"] = {"rank": LORA["r"], "alpha": float(LORA["lora_alpha"])}
    center = settings.get("center_rewards_coefficient", 0.0)
    trainer = {"mode": "reward_model", "reward_model": {"center_rewards_coefficient": center}, "policy": policy}
    sizes = {"max_length": 64, "train_batch_size": PAIRS, "policy_mini_batch_size": PAIRS, "eval_batch_size": 3}
    trainer |= {"eval_interval": -1, "gradient_checkpointing": False, **sizes}
    data = {"train_data": ["unused"], **({"margin_column": "margin"} if settings.get("margins") else {})}
    return Config.from_dict({"data": data, "trainer": laid_over(trainer, changes)})


def fill(engine: Any) -> None:
    fill_adapters(engine._model.model)


def trained(
    run: Run, world: World, settings: dict[str, Any], changes: dict[str, Any], fill: Callable[[Any], None] = fill
) -> tuple[dict[str, float], ...]:
    """Return loss, gradient norm and metrics of one mini-batch of all pairs, and what is said of the pairs as a validation set.

    Args:
        fill: gives an engine its adapters.
    """
    trainer = (chosen := config(run, settings, changes)).trainer
    engine: Any = build_policy(trainer, 1.0, world)
    if settings.get("lora"):
        fill(engine)
    engine.schedule(1)
    file = open_tokens(run.dataset("train-1" if settings.get("margins") else "train-0"))
    limits = micro_batch_limits(trainer, trainer.max_tokens_per_micro_batch)
    rows = DatasetRows(run, [Rows(file, range(PAIRS))], [], 1)
    groups = [rows.in_order(PromptStream(PAIRS, PAIRS, 1, None))(index, 0) for index in range(PAIRS)]
    batch, reduction = Batch(1, groups, PAIRS), reduction_of(trainer, trainer.max_length or 0)
    (mini,) = load_mini_batches(run, batch, trainer, limits, engine.data, reduction)
    mini.rows.scores.margins = mini.rows.rewards
    validation = Validation.of(run, chosen, limits)
    measured = validation.measure.means(validation.sums(engine, [(file, row) for row in range(PAIRS)], lambda: None))
    sums = sum_over_ranks(engine.forward_backward(mini.micro_batches(), objective_of(trainer)), engine.data)
    assert (sums["pairs"], sums["tokens"]) == (PAIRS, mini.tokens)
    report = engine.step()
    described = describe_updates([UpdateResult(sums, report)])
    return {"loss": described["policy/final_loss"], "grad_norm": report.grad_norm, **_named(described)}, {
        "loss": measured["loss"],
        **_named(measured),
    }


def _named(found: dict[str, float]) -> dict[str, float]:
    """Return metrics by TRL's names."""
    mean = (found["rewards/chosen"] + found["rewards/rejected"]) / 2
    return {"accuracy": found["rewards/accuracies"], "margin": found["rewards/margins"], "mean_reward": mean}


def on_ranks(world: World, options: dict[str, Any]) -> None:
    """A scenario of ranks."""
    run = Run(Path(options["run"]))
    found = {name: trained(run, world, CASES[name]["settings"], options["changes"]) for name in options["cases"]}
    if world.first:
        write_json(Path(options["out"]), found)


def expect_same(name: str, found: Any, *, what: str) -> None:
    expected, (own, measured) = dict(CASES[name]["expected"]), found
    assert own == pytest.approx(expected, rel=1e-5, abs=1e-5), (what, name)
    del expected["grad_norm"]
    assert measured == pytest.approx(expected, rel=1e-5, abs=1e-5), (what, name)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run with the pairs as datasets, without and with margins, and a model with the head that TRL had."""
    return make_pairs(tmp_path_factory.mktemp("reward_model") / "run")


def make_pairs(path: Path) -> Run:
    run = Run(path)
    run.path.mkdir()
    model = AutoModelForSequenceClassification.from_pretrained(QUICKSTART, num_labels=1, dtype=torch.float32)
    fill_head(model)
    model.save_pretrained(run.path / "model")
    AutoTokenizer.from_pretrained(QUICKSTART).save_pretrained(run.path / "model")
    for number, settings in enumerate(({}, {"margins": True})):
        rows = [row | {"margin": margin} for row, margin in zip(SAID["rows"], MARGINS, strict=True)]
        source = run.path / f"pairs-{number}.jsonl"
        source.write_text("".join(json.dumps(row) + "\n" for row in rows))
        Tokenizer(run, 1, Recipe.of(config(run, settings, {}))).dataset(f"train-{number}", "p", Source(str(source)))
    return run


def test_tokens_are_those_of_trl(run: Run) -> None:
    file = open_tokens(run.dataset("train-0"))
    for row, said in enumerate(SAID["tokens"]):
        found = [sample.token_ids.tolist() for sample in file.read(row)]
        assert found == [said["chosen_ids"], said["rejected_ids"]]


@pytest.mark.parametrize("name", CASES)
def test_loss_gradient_and_metrics_are_those_of_trl(run: Run, alone: World, name: str) -> None:
    expect_same(
        name, trained(run, alone, CASES[name]["settings"], {"max_tokens_per_micro_batch": 60}), what="by tokens"
    )


PACKINGS = {
    "one pair per pass": {},
    "several pairs per pass": {"micro_train_batch_size_per_gpu": 3, "micro_forward_batch_size_per_gpu": 2},
    "all at once": {"max_tokens_per_micro_batch": 1000},
    "padded": {"max_tokens_per_micro_batch": 60, "use_sample_packing": False},
    "recomputed": {"max_tokens_per_micro_batch": 60, "gradient_checkpointing": True},
}


@pytest.mark.parametrize("packing", PACKINGS)
def test_packing_does_not_matter(run: Run, alone: World, packing: str) -> None:
    expect_same("margins", trained(run, alone, CASES["margins"]["settings"], PACKINGS[packing]), what=packing)


def test_two_ranks_have_one_loss_by_all_their_pairs(run: Run, two: Ranks, tmp_path: Path) -> None:
    changes = {"max_tokens_per_micro_batch": 60, "placement": {"policy_num_gpus_per_node": 2}}
    options = {"run": str(run.path), "changes": changes, "cases": ["margins"], "out": str(tmp_path / "found")}
    two.play([("backends.test_reward_model:on_ranks", options)])
    expect_same("margins", json.loads((tmp_path / "found").read_text())["margins"], what="two ranks")


def scores(engine: Any, rows: list[list[int]]) -> list[float]:
    """Return the engine's scores of rows of tokens, which share a pass."""
    samples = list[Row[torch.Tensor]]()
    for row in rows:
        nothing = torch.zeros(len(row))
        samples.append(Row(torch.tensor(row), nothing, nothing, torch.full((len(row),), -1), nothing, "stop"))
    (values_P,) = engine.values([pack(samples).whole()])
    ends = torch.tensor([len(row) for row in rows]).cumsum(0) - 1
    return values_P[ends].tolist()


@pytest.mark.parametrize("lora", [False, True])
def test_an_export_scores_in_transformers_as_in_training(run: Run, alone: World, tmp_path: Path, lora: bool) -> None:
    trainer = config(run, {"lora": lora}, {}).trainer
    engine: Any = build_policy(trainer, 1.0, alone)
    if lora:
        fill_adapters(engine._model.model)
    publisher = Publisher(run, 0, alone, torch.float32, 1, engines=False)
    place = publisher.export(
        engine, 3, Pretrained(str(run.path / "model")), ChatTemplateConfig(), target=tmp_path / "export"
    )
    rows = [ids for row in SAID["tokens"] for ids in row.values()]
    rows += [[*rows[0], 0], [*rows[1], 0, 0], [0, 0]]  # that end with the padding token
    found = scores(engine, rows)
    loaded = AutoModelForSequenceClassification.from_pretrained(place)
    assert type(loaded).__name__ == "Qwen2ForSequenceClassification"
    assert (loaded.config.num_labels, loaded.config.pad_token_id) == (1, 0)
    assert AutoTokenizer.from_pretrained(place).chat_template
    models = [loaded]
    if lora:
        base = AutoModelForSequenceClassification.from_pretrained(QUICKSTART, num_labels=1, dtype=torch.float32)
        models.append(peft.PeftModel.from_pretrained(base, place / ADAPTER))
    for model in models:
        with torch.no_grad():
            expected = [model(torch.tensor([row])).logits.item() for row in rows]
        assert found == pytest.approx(expected, abs=1e-5)
    assert found[-3] == pytest.approx(found[0], abs=1e-6)
    again: Any = build_policy(config(run, {}, {"policy": {"model": {"path": str(place)}}}).trainer, 1.0, alone)
    assert scores(again, rows) == pytest.approx(found, abs=1e-5)


def test_a_head_that_is_not_on_disk_is_drawn_by_the_seed(run: Run, alone: World) -> None:
    heads = [
        build_policy(
            config(run, {}, {"seed": seed, "policy": {"model": {"path": str(QUICKSTART)}}}).trainer, 1.0, alone
        )._model.head.weight  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
        for seed in (1, 1, 2)
    ]
    assert torch.equal(heads[0], heads[1])
    assert not torch.equal(heads[0], heads[2])
    assert heads[0].std() < 0.05


def test_a_model_whose_head_is_another_layer_is_named(run: Run, tmp_path: Path) -> None:
    from transformers import DistilBertConfig

    DistilBertConfig(dim=8, hidden_dim=8, n_heads=2, n_layers=1).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(QUICKSTART).save_pretrained(tmp_path)
    trainer = config(run, {}, {"policy": {"model": {"path": str(tmp_path)}}}).trainer
    with pytest.raises(DataError, match="DistilBertForSequenceClassification has no linear layer `score`"):
        policy_source(trainer).empty(torch.float32, "eager")
