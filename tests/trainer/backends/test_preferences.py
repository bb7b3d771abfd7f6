"""Pairs become the tokens that TRL makes of them, and loss, gradient and metrics are those of its DPOTrainer, whatever is packed and however many ranks there are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

from hpcrl.config import Config
from hpcrl.controller.dataset_rows import DatasetRows
from hpcrl.controller.prompt_stream import PromptStream
from hpcrl.data.sources import Source
from hpcrl.data.token_file import open_tokens
from hpcrl.data.tokenize import Recipe, Rows, Tokenizer
from hpcrl.rundir.commit import write_json
from hpcrl.rundir.layout import Run
from hpcrl.runtime.heartbeat import Heartbeat
from hpcrl.runtime.signals import StopSignal
from hpcrl.trainer.build import load_learner
from hpcrl.trainer.critic.ranks import ModelRanks
from hpcrl.trainer.distributed import World
from hpcrl.trainer.metrics import PhaseTimer
from hpcrl.trainer.saving.checkpoint import ResumePoint
from hpcrl.trainer.saving.dump import Dumps
from hpcrl.trainer.stop import StopConsensus
from hpcrl.types import Batch
from tests.golden.trl_dpo import LORA, METRICS, PLACE, fill_adapters, scaled
from tests.trainer.material import QUICKSTART, make_run
from tests.trainer.ranks import Ranks
from tests.trainer.scenarios import laid_over

SAID: dict[str, Any] = json.loads(PLACE.read_text())
CASES: dict[str, dict[str, Any]] = SAID["cases"]
PAIRS = len(SAID["rows"])


def config(run: Run, settings: dict[str, Any], changes: dict[str, Any]) -> Config:
    """Return the configuration of a case of TRL's; what it names lies where `run` made it."""
    dpo = {name: value for name, value in settings.items() if name != "lora"}
    policy: dict[str, Any] = {"model": {"path": str(QUICKSTART)}}
    trainer: dict[str, Any] = {"mode": "dpo", "dpo": dpo, "policy": policy}
    if settings.get("lora"):
        lora = {"rank": LORA["r"], "alpha": float(LORA["lora_alpha"]), "target_modules": LORA["target_modules"]}
        policy["model"]["lora"] = {**lora, "adapter_path": str(run.path / "adapter")}
    else:
        trainer["ref"] = {"model": {"path": str(run.path / "reference")}}
    if changes.get("strategy") != "megatron":
        policy["fsdp_config"] = {"mixed_precision": {"param_dtype": "fp32"}}
    sizes = {"max_length": 64, "train_batch_size": PAIRS, "policy_mini_batch_size": PAIRS, "eval_batch_size": 3}
    trainer |= {"eval_interval": 1, "gradient_checkpointing": False, **sizes}
    data = {"train_data": ["unused"], "val_data": ["unused"]}
    return Config.from_dict({"data": data, "trainer": laid_over(trainer, changes)})


def trained(run: Run, world: World, settings: dict[str, Any], changes: dict[str, Any]) -> tuple[dict[str, float], ...]:
    """Return loss, gradient norm and metrics of a step that trains all pairs at once, and what is said of them as a validation set before."""
    world.rank0_broadcast(lambda: run.eval_losses(0).unlink(missing_ok=True))
    consensus = StopConsensus(world, StopSignal(), Heartbeat(run, 1, f"rank-{world.rank}"))
    learner = load_learner(
        run,
        config(run, settings, changes),
        ModelRanks(world, world),
        consensus,
        lambda *_: ResumePoint(),
        Dumps(run, 1, world),
    )
    learner.schedule(1)
    measured = learner.validate(0, 1, PhaseTimer())
    rows = DatasetRows(run, [Rows(open_tokens(run.dataset("train-0")), range(PAIRS))], [], 1)
    groups = [rows.in_order(PromptStream(PAIRS, PAIRS, 1, None))(index, 0) for index in range(PAIRS)]
    metrics = learner.train(Batch(1, groups, PAIRS), PhaseTimer())
    own = {"loss": metrics["policy/final_loss"], "grad_norm": metrics["policy/grad_norm"]}
    own |= {name: metrics[name] for name in METRICS}
    return own, {name: measured[f"eval/all/{name}"] for name in ("loss", *METRICS)}


def on_ranks(world: World, options: dict[str, Any]) -> None:
    """A scenario of ranks."""
    run = Run(Path(options["run"]))
    found = {name: trained(run, world, CASES[name]["settings"], options["changes"]) for name in options["cases"]}
    if world.first:
        write_json(Path(options["out"]), found)
    if options["changes"].get("strategy") == "megatron":
        from tests.trainer.backends.megatron.leave import leave_groups  # its imports take seconds

        leave_groups(world)


def expect_same(name: str, found: Any, *, what: str) -> None:
    expected, (own, measured) = dict(CASES[name]["expected"]), found
    assert own == pytest.approx(expected, rel=1e-5, abs=1e-6), (what, name)
    del expected["grad_norm"]
    assert measured == pytest.approx(expected, rel=1e-5, abs=1e-6), (what, name)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run with the pairs as a dataset, the reference, and adapters."""
    run = make_run(tmp_path_factory.mktemp("preferences") / "run")
    source = run.path / "pairs.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in SAID["rows"]))
    recipe = Recipe.of(config(run, {}, {}))
    for folder in ("train-0", "validation-0"):
        Tokenizer(run, 1, recipe).dataset(folder, "pairs", Source(str(source)))
    scaled(AutoModelForCausalLM.from_pretrained(QUICKSTART)).save_pretrained(run.path / "reference")
    base = AutoModelForCausalLM.from_pretrained(QUICKSTART, dtype=torch.float32)
    adapted = peft.get_peft_model(base, peft.LoraConfig(task_type="CAUSAL_LM", **LORA))
    fill_adapters(adapted)
    adapted.save_pretrained(run.path / "adapter")
    return run


def test_tokens_are_those_of_trl(run: Run) -> None:
    file = open_tokens(run.dataset("train-0"))
    for row, said in enumerate(SAID["tokens"]):
        for sample, name in zip(file.read(row), ("chosen_ids", "rejected_ids"), strict=True):
            assert sample.token_ids.tolist() == said["prompt_ids"] + said[name]
            assert sample.loss_mask.tolist() == [0.0] * len(said["prompt_ids"]) + [1.0] * len(said[name])


@pytest.mark.parametrize("name", CASES)
def test_loss_gradient_and_metrics_are_those_of_trl(run: Run, alone: World, name: str) -> None:
    settings = {"max_tokens_per_micro_batch": 60}
    expect_same(name, trained(run, alone, CASES[name]["settings"], settings), what="by tokens")


PACKINGS = {
    "one pair per pass": {},
    "several pairs per pass": {"micro_train_batch_size_per_gpu": 3, "micro_forward_batch_size_per_gpu": 2},
    "all at once": {"max_tokens_per_micro_batch": 1000},
    "padded": {"max_tokens_per_micro_batch": 60, "use_sample_packing": False},
    "prompts computed once": {"max_tokens_per_micro_batch": 60, "shared_prefixes": True},
}


@pytest.mark.parametrize("packing", PACKINGS)
def test_packing_does_not_matter(run: Run, alone: World, packing: str) -> None:
    expect_same("several", trained(run, alone, CASES["several"]["settings"], PACKINGS[packing]), what=packing)


def test_packing_does_not_matter_to_losses_without_a_reference(run: Run, alone: World) -> None:
    settings = {"loss_type": ["sft", "simpo", "orpo"], "beta": 2.0, "simpo_gamma": 0.3}
    ref = {"ref": {"model": {"path": None}}}  # no path of its own: where there is no reference, one is refused
    assert not config(run, settings, ref).trainer.colocated_reference
    own, measured = trained(run, alone, settings, PACKINGS["one pair per pass"] | ref)
    assert own == pytest.approx(trained(run, alone, settings, PACKINGS["all at once"] | ref)[0], rel=1e-5, abs=1e-6)
    assert measured == pytest.approx({name: own[name] for name in measured}, rel=1e-5, abs=1e-6)


def assert_two_ranks_agree(
    ranks: Ranks, layouts: dict[str, dict[str, Any]], run: Run, cases: list[str], place: Path
) -> None:
    scenarios = list[tuple[str, dict[str, Any]]]()
    for name, layout in layouts.items():
        changes = {"max_tokens_per_micro_batch": 60, "placement": {"policy_num_gpus_per_node": 2}, **layout}
        options = {"run": str(run.path), "changes": changes, "cases": cases, "out": str(place / name)}
        scenarios.append(("backends.test_preferences:on_ranks", options))
    ranks.play(scenarios)
    for name in layouts:
        for case, found in json.loads((place / name).read_text()).items():
            expect_same(case, found, what=name)


def test_two_ranks_have_one_loss_by_all_their_pairs(run: Run, two: Ranks, tmp_path: Path) -> None:
    assert_two_ranks_agree(two, {"fsdp2": {}}, run, ["several", "lora"], tmp_path)


def layout(**sizes: int) -> dict[str, Any]:
    policy = {
        "dtype": "fp32",
        "lora_type": "canonical_lora",
        **sizes,
    }  # PEFT's adapters have one A per layer of transformers
    ref = {"dtype": "fp32", **sizes}
    return {"strategy": "megatron", "policy": {"megatron_config": policy}, "ref": {"megatron_config": ref}}


LAYOUTS = {
    "megatron": layout(),
    "megatron, tensor parallel": layout(tensor_model_parallel_size=2),
    "megatron, pipeline parallel": layout(pipeline_model_parallel_size=2),
    "megatron, context parallel": layout(context_parallel_size=2),
}


@pytest.mark.faults_slow
def test_ranks_of_megatron_have_the_same_loss_however_they_share_the_model(run: Run, tmp_path: Path) -> None:
    ranks = Ranks(tmp_path)  # of their own: Megatron-core leaves random states behind
    try:
        assert_two_ranks_agree(ranks, LAYOUTS, run, ["several", "ipo", "reference_free", "lora"], tmp_path)
    finally:
        ranks.close()
