"""Answers with labels have KTO's loss and gradient, worked out row by row with transformers alone, whatever is packed and however many ranks there are."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from hpcrl.config import Config
from hpcrl.controller.dataset_rows import DatasetRows
from hpcrl.controller.prompt_stream import PromptStream
from hpcrl.data.sources import Source
from hpcrl.data.token_file import open_tokens
from hpcrl.data.tokenize import Recipe, Rows, Tokenizer
from hpcrl.errors import DataError
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
from tests.golden.trl_dpo import rows as pairs
from tests.trainer.material import QUICKSTART, make_run
from tests.trainer.ranks import Ranks
from tests.trainer.scenarios import laid_over

LABELLED = [  # in TRL's form of unpaired preferences
    {"prompt": pair["prompt"], "completion": pair["chosen" if at % 3 else "rejected"], "label": at % 3 > 0}
    for at, pair in enumerate(pairs())
]
KTO = {"loss_type": ["kto"], "beta": 0.3, "desirable_weight": 1.5, "undesirable_weight": 0.75}
REFERENCE_SCALE = 1.3
"""Makes the reference more certain than the policy, so that wrong answers are less probable to it, and the estimate is above 0."""
DATASETS: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "labelled": (LABELLED, {"label_column": "label"}),
    "pairs": (pairs(), {}),
    "side by side": (
        [
            {"prompt": pair["prompt"], "completion": pair[column], "label": column == "chosen"}
            for pair in pairs()
            for column in ("chosen", "rejected")
        ],
        {"label_column": "label"},
    ),
    "one prompt": ([{**LABELLED[0], "label": label} for label in (True, False)], {"label_column": "label"}),
}


def config(run: Run, dataset: str, dpo: dict[str, Any], changes: dict[str, Any]) -> Config:
    rows, data = DATASETS[dataset]
    policy: dict[str, Any] = {"model": {"path": str(QUICKSTART)}}
    if changes.get("strategy") != "megatron":
        policy["fsdp_config"] = {"mixed_precision": {"param_dtype": "fp32"}}
    sizes = {"max_length": 64, "train_batch_size": len(rows), "policy_mini_batch_size": len(rows), "eval_batch_size": 3}
    ref = {"model": {"path": str(run.path / "reference")}}
    trainer = {"mode": "dpo", "dpo": dpo, "policy": policy, "ref": ref, "eval_interval": 1, **sizes}
    trainer = laid_over({**trainer, "gradient_checkpointing": False}, changes)
    return Config.from_dict({"data": {"train_data": ["unused"], "val_data": ["unused"], **data}, "trainer": trainer})


def trained(run: Run, world: World, dataset: str, dpo: dict[str, Any], changes: dict[str, Any]) -> dict[str, float]:
    """Return what is reported of a step that trains the whole dataset, and of the dataset as a validation set before."""
    world.rank0_broadcast(lambda: run.eval_losses(0).unlink(missing_ok=True))
    consensus = StopConsensus(world, StopSignal(), Heartbeat(run, 1, f"rank-{world.rank}"))
    settings, ranks, dumps = config(run, dataset, dpo, changes), ModelRanks(world, world), Dumps(run, 1, world)
    learner = load_learner(run, settings, ranks, consensus, lambda *_: ResumePoint(), dumps)
    learner.schedule(1)
    measured = learner.validate(0, 1, PhaseTimer())
    file = open_tokens(run.dataset("train-0"))
    count = len(file)
    in_order = DatasetRows(run, [Rows(file, range(count))], [], 1).in_order(PromptStream(count, count, 1, None))
    return measured | learner.train(Batch(1, [in_order(index, 0) for index in range(count)], count), PhaseTimer())


def on_ranks(world: World, options: dict[str, Any]) -> None:
    """A scenario of ranks."""
    found = trained(Run(Path(options["run"])), world, "labelled", KTO, options["changes"])
    if world.first:
        write_json(Path(options["out"]), found)
    if options["changes"].get("strategy") == "megatron":
        from tests.trainer.backends.megatron.leave import leave_groups  # its imports take seconds

        leave_groups(world)


def log_probability(model: PreTrainedModel, prompt: list[int], answer: list[int]) -> torch.Tensor:
    logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1].double()
    return logits.log_softmax(-1)[range(len(answer)), answer].sum()


def expected(run: Run, dataset: str, dpo: dict[str, Any]) -> dict[str, float]:
    """Return loss, gradient norm and metrics of section 4.1 of KTO (arXiv:2402.01306), one answer after the other."""
    policy = AutoModelForCausalLM.from_pretrained(QUICKSTART, dtype=torch.float32)
    reference = AutoModelForCausalLM.from_pretrained(run.path / "reference", dtype=torch.float32).requires_grad_(False)
    file = open_tokens(run.dataset("train-0"))
    rows = [[split(row) for row in file.read(at)] for at in range(len(file))]
    labels = [row.get("label") for row in DATASETS[dataset][0]]
    answers = list[tuple[bool, list[int], list[int], list[int]]]()  # label, prompt, answer, prompt of the next row
    for at, sequences in enumerate(rows):
        for index, (prompt, answer) in enumerate(sequences):
            label = index == 0 if len(sequences) == 2 else bool(labels[at])
            answers.append((label, prompt, answer, rows[(at + 1) % len(rows)][0][0]))
    shift = 0.0
    if dpo["loss_type"] == ["kto"]:
        with torch.no_grad():
            apart = [log_probability(policy, x, y) - log_probability(reference, x, y) for _, _, y, x in answers]
        shift = max(0.0, float(sum(apart)) / len(apart))
        assert shift > 0.01, "these rows compare with nothing"
    loss, rewards = torch.zeros(()), {True: list[float](), False: list[float]()}
    for label, prompt, answer, _ in answers:
        reward = dpo["beta"] * (log_probability(policy, prompt, answer) - log_probability(reference, prompt, answer))
        value = torch.sigmoid(reward - dpo["beta"] * shift if label else dpo["beta"] * shift - reward)
        loss = loss + dpo["desirable_weight" if label else "undesirable_weight"] * (1 - value) / len(answers)
        rewards[label].append(reward.item())
    loss.backward()
    gradients = [parameter.grad for parameter in policy.parameters() if parameter.grad is not None]
    means = {label: math.fsum(values) / len(values) for label, values in rewards.items()}
    return {
        "policy/final_loss": loss.item(),
        "policy/grad_norm": torch.nn.utils.get_total_norm(gradients).item(),
        "policy/kto_kl": shift,
        "rewards/chosen": means[True],
        "rewards/rejected": means[False],
        "rewards/margins": means[True] - means[False],
    }


def split(row: Any) -> tuple[list[int], list[int]]:
    """Return the prompt and the answer of a row."""
    begin = int(row.loss_mask.argmax())
    return row.token_ids[:begin].tolist(), row.token_ids[begin:].tolist()


def expect_same(found: dict[str, float], wanted: dict[str, float], what: str) -> None:
    assert {name: found[name] for name in wanted} == pytest.approx(wanted, rel=1e-4, abs=1e-6), what
    for name in ("rewards/chosen", "rewards/rejected", "rewards/margins"):
        assert found[f"eval/all/{name}"] == pytest.approx(wanted[name], rel=1e-4, abs=1e-6), what


def run_of(place: Path, dataset: str) -> Run:
    run = make_run(place / "run")
    source = run.path / "rows.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in DATASETS[dataset][0]))
    recipe = Recipe.of(config(run, dataset, KTO, {}))
    for folder in ("train-0", "validation-0"):
        Tokenizer(run, 1, recipe).dataset(folder, "rows", Source(str(source)))
    reference = AutoModelForCausalLM.from_pretrained(QUICKSTART)
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.mul_(REFERENCE_SCALE)
    reference.save_pretrained(run.path / "reference")
    return run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run with labelled answers as a dataset, and a reference."""
    return run_of(tmp_path_factory.mktemp("unpaired"), "labelled")


PACKINGS = {
    "by tokens": {"max_tokens_per_micro_batch": 60},
    "one answer per pass": {},
    "padded": {"max_tokens_per_micro_batch": 60, "use_sample_packing": False},
}


def test_loss_gradient_and_metrics_are_those_of_the_paper_however_answers_are_packed(run: Run, alone: World) -> None:
    wanted = expected(run, "labelled", KTO)
    for name, packing in PACKINGS.items():
        expect_same(trained(run, alone, "labelled", KTO, packing), wanted, name)


def test_pairs_are_answers_with_labels_and_without_an_estimate_nothing_is_compared(
    tmp_path: Path, alone: World
) -> None:
    run = run_of(tmp_path, "pairs")
    for dpo in (KTO, KTO | {"loss_type": ["apo_zero_unpaired"]}):
        found = trained(run, alone, "pairs", dpo, PACKINGS["by tokens"])
        expect_same(found, expected(run, "pairs", dpo), str(dpo["loss_type"]))


def test_two_ranks_compare_with_one_estimate(run: Run, two: Ranks, tmp_path: Path) -> None:
    changes = {"max_tokens_per_micro_batch": 60, "placement": {"policy_num_gpus_per_node": 2}}
    options = {"run": str(run.path), "changes": changes, "out": str(tmp_path / "found")}
    two.play([("backends.test_unpaired:on_ranks", options)])
    expect_same(json.loads((tmp_path / "found").read_text()), expected(run, "labelled", KTO), "two ranks")


@pytest.mark.faults_slow
@pytest.mark.parametrize("sizes", [{"pipeline_model_parallel_size": 2}, {"context_parallel_size": 2}], ids=str)
def test_ranks_of_megatron_have_the_same_loss(run: Run, sizes: dict[str, int], tmp_path: Path) -> None:
    model = {"megatron_config": {"dtype": "fp32", **sizes}}
    place = {"policy_num_gpus_per_node": 2}
    ref = {**model, "model": {"path": str(run.path / "reference")}}
    changes = {
        "strategy": "megatron",
        "policy": model,
        "ref": ref,
        "placement": place,
        "max_tokens_per_micro_batch": 60,
    }
    ranks = Ranks(tmp_path)  # of their own: Megatron-core leaves random states behind
    try:
        options = {"run": str(run.path), "changes": changes, "out": str(tmp_path / "found")}
        ranks.play([("backends.test_unpaired:on_ranks", options)])
    finally:
        ranks.close()
    expect_same(json.loads((tmp_path / "found").read_text()), expected(run, "labelled", KTO), str(sizes))


def test_answers_to_one_prompt_side_by_side_are_compared_behind_another(tmp_path: Path, alone: World) -> None:
    """They are the answers of pairs, of which each is compared behind the next pair's prompt."""
    wanted = expected(run_of(tmp_path / "pairs", "pairs"), "pairs", KTO)
    run = run_of(tmp_path / "answers", "side by side")
    expect_same(trained(run, alone, "side by side", KTO, PACKINGS["by tokens"]), wanted, "side by side")


def test_a_dataset_of_one_prompt_is_refused(tmp_path: Path, alone: World) -> None:
    run = run_of(tmp_path, "one prompt")
    with pytest.raises(DataError, match=r"all rows of rows have one prompt; add rows to data\.train_data, or use"):
        trained(run, alone, "one prompt", KTO, {})
    found = trained(run, alone, "one prompt", KTO | {"loss_type": ["apo_zero_unpaired"]}, {})
    assert found["policy/kto_kl"] == 0


@pytest.mark.parametrize("label", ["yes", None, 2])
def test_labels_are_true_or_false(run: Run, tmp_path: Path, label: Any) -> None:
    source = tmp_path / "rows.jsonl"
    source.write_text(json.dumps({**LABELLED[0], "label": label}) + "\n")
    recipe = Recipe.of(config(run, "labelled", KTO, {}))
    with pytest.raises(DataError, match="column `label`"):
        Tokenizer(make_run(tmp_path / "run"), 1, recipe).dataset("train-0", "rows", Source(str(source)))
