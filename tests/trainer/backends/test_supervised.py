"""The loss of supervised fine-tuning is that of transformers, whatever is packed and however many ranks there are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from hpcrl.config import Config
from hpcrl.controller.dataset_rows import DatasetRows
from hpcrl.controller.prompt_stream import PromptStream
from hpcrl.data.conversations import Tokens
from hpcrl.data.token_file import open_tokens, write_tokens
from hpcrl.data.tokenize import Rows
from hpcrl.rundir.commit import write_json
from hpcrl.rundir.layout import Run
from hpcrl.trainer.backends.build import build_policy
from hpcrl.trainer.batching import micro_batch_limits
from hpcrl.trainer.distributed import World
from hpcrl.trainer.offline.build import objective_of, reduction_of
from hpcrl.trainer.offline.likelihood import score_by_teacher
from hpcrl.trainer.offline.validation import Validation
from hpcrl.trainer.read_batch import load_mini_batches
from hpcrl.trainer.step import sum_over_ranks
from hpcrl.types import Batch
from tests.trainer.material import VOCABULARY, write_teacher
from tests.trainer.ranks import Ranks
from tests.trainer.scenarios import laid_over

ROWS = 12


def make_rows(run: Run) -> list[Tokens]:
    """Write rows of different lengths of which any part is trained, and return them."""
    draw, rows = torch.Generator().manual_seed(3), list[Tokens]()
    for length in torch.randint(4, 30, (ROWS,), generator=draw).tolist():
        ids = torch.randint(0, VOCABULARY, (length,), generator=draw).tolist()
        mask = (torch.rand(length, generator=draw) < 0.6).tolist()
        rows.append(Tokens(ids, [*mask[:-1], True]))
    write_tokens(run.dataset("train-0"), 1, rows, name="rows", made_of={}, counts={})
    return rows


def batch_of(run: Run) -> Batch:
    rows = DatasetRows(run, [Rows(open_tokens(run.dataset("train-0")), range(ROWS))], [], 1)
    stream = PromptStream(ROWS, ROWS, 1, None)
    return Batch(1, [rows.in_order(stream)(index, 0) for index in range(ROWS)], ROWS)


def config(model: str, changes: dict[str, Any]) -> Config:
    policy = {"model": {"path": model}}
    if changes.get("strategy") != "megatron":
        policy |= {"fsdp_config": {"mixed_precision": {"param_dtype": "fp32"}}}
    sizes = {"max_length": 64, "train_batch_size": ROWS, "policy_mini_batch_size": ROWS, "eval_batch_size": 5}
    trainer = {"mode": "sft", "policy": policy, "eval_interval": -1, "gradient_checkpointing": False, **sizes}
    return Config.from_dict({"data": {"train_data": ["unused"]}, "trainer": laid_over(trainer, changes)})


def trained(run: Run, world: World, model: str, changes: dict[str, Any]) -> tuple[float, float, float]:
    """Return loss and gradient norm of one mini-batch of all rows, and the loss of the rows as a validation set."""
    trainer = (chosen := config(model, changes)).trainer
    engine = build_policy(trainer, 1.0, world)
    engine.schedule(1)
    limits = micro_batch_limits(trainer, trainer.max_tokens_per_micro_batch)
    reduction = reduction_of(trainer, trainer.max_length or 0)
    (mini,) = load_mini_batches(run, batch_of(run), trainer, limits, engine.data, reduction)
    if trainer.teaches_rows:
        score_by_teacher(batch_of(run), mini, engine, trainer.distillation, lambda: None)
    validation = Validation.of(run, chosen, limits)
    file = open_tokens(run.dataset("train-0"))
    measured = validation.sums(engine, [(file, row) for row in range(ROWS)], lambda: None)
    sums = sum_over_ranks(engine.forward_backward(mini.micro_batches(), objective_of(trainer)), engine.data)
    assert sums["tokens"] == measured["tokens"] == mini.tokens
    return sums["final_loss"], engine.step().grad_norm, validation.measure.means(measured)["loss"]


def on_ranks(world: World, options: dict[str, Any]) -> None:
    """A scenario of ranks."""
    found = trained(Run(Path(options["run"])), world, options["model"], options["changes"])
    if world.first:
        write_json(Path(options["out"]), found)
    if options["changes"].get("strategy") == "megatron":
        from tests.trainer.backends.megatron.leave import leave_groups  # its imports take seconds

        leave_groups(world)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = Run(tmp_path_factory.mktemp("supervised") / "run")
    make_rows(run)
    return run


@pytest.fixture(scope="module")
def expected(run: Run, model_path: Path) -> tuple[float, float]:
    """Loss and gradient norm of transformers' own loss, of a padded batch with labels of -100."""
    file, model = open_tokens(run.dataset("train-0")), AutoModelForCausalLM.from_pretrained(model_path)
    samples = [sample for row in range(ROWS) for sample in file.read(row)]
    longest = max(len(sample.token_ids) for sample in samples)
    ids, labels, seen = (torch.full((ROWS, longest), value) for value in (0, -100, 0))
    for at, sample in enumerate(samples):
        length = len(sample.token_ids)
        ids[at, :length], seen[at, :length] = torch.from_numpy(sample.token_ids), 1
        labels[at, :length] = torch.where(torch.from_numpy(sample.loss_mask) > 0, ids[at, :length], -100)
    loss = model(input_ids=ids, attention_mask=seen, labels=labels).loss
    loss.backward()
    norm = torch.nn.utils.get_total_norm(
        [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    )
    return loss.item(), norm.item()


def taught(model: Path, weight: float) -> dict[str, Any]:
    """Return the settings with which a teacher, the policy with other weights, is learned too."""
    distillation = {"enable": True, "model_path": str(model), "top_k": 5, "jsd_beta": 0.0, "loss_weight": weight}
    return {"distillation": distillation, "ref": {"fsdp_config": {"mixed_precision": {"param_dtype": "fp32"}}}}


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory, model_path: Path) -> Path:
    return write_teacher(tmp_path_factory.mktemp("teacher"), model_path)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("weight", [0.3, 1.0])
def test_a_teacher_is_learned_beside_the_answers(
    run: Run, alone: World, two: Ranks, tmp_path: Path, model_path: Path, teacher: Path, weight: float, ranks: int
) -> None:
    """(1 - w) cross entropy + w KL(teacher || policy) over the teacher's five most probable tokens, as transformers' logits give it."""
    changes = {"max_tokens_per_micro_batch": 60, **taught(teacher, weight)}
    if ranks == 2:
        options = {"run": str(run.path), "model": str(model_path), "changes": changes, "out": str(tmp_path / "found")}
        two.play([("backends.test_supervised:on_ranks", options)])
        loss, norm, validation = json.loads((tmp_path / "found").read_text())
    else:
        loss, norm, validation = trained(run, alone, str(model_path), changes)
    file = open_tokens(run.dataset("train-0"))
    policy, other = (AutoModelForCausalLM.from_pretrained(path) for path in (model_path, teacher))
    likelihoods, divergences = list[torch.Tensor](), list[torch.Tensor]()
    for sample in (sample for row in range(ROWS) for sample in file.read(row)):
        ids, places = torch.from_numpy(sample.token_ids), torch.from_numpy(sample.loss_mask)[1:].nonzero()[:, 0]
        own_RV = policy(ids[None]).logits[0][places].log_softmax(-1)
        likelihoods += (-own_RV.gather(1, ids[places + 1][:, None])[:, 0]).unbind()
        with torch.no_grad():
            top_RK = other(ids[None]).logits[0][places].log_softmax(-1).topk(5)
        divergence_RK = top_RK.values.exp() * (top_RK.values - own_RV.gather(1, top_RK.indices))
        divergences += divergence_RK.sum(-1).unbind()
    likelihood = torch.stack(likelihoods).mean()
    expected = (1 - weight) * likelihood + weight * torch.stack(divergences).mean()
    expected.backward()
    gradients = [parameter.grad for parameter in policy.parameters() if parameter.grad is not None]
    assert loss == pytest.approx(expected.item(), rel=1e-5)
    assert norm == pytest.approx(torch.nn.utils.get_total_norm(gradients).item(), rel=1e-4)
    assert validation == pytest.approx(likelihood.item(), rel=1e-5), "a validation set is measured by its answers"


PACKINGS = {
    "one row per pass": {},
    "several rows per pass": {"micro_train_batch_size_per_gpu": 5, "micro_forward_batch_size_per_gpu": 3},
    "by tokens": {"max_tokens_per_micro_batch": 60},
    "all at once": {"max_tokens_per_micro_batch": 1000},
    "padded": {"max_tokens_per_micro_batch": 60, "use_sample_packing": False},
}


@pytest.mark.parametrize("packing", PACKINGS)
def test_loss_and_gradient_are_those_of_transformers(
    run: Run, alone: World, model_path: Path, expected: tuple[float, float], packing: str
) -> None:
    loss, norm, validation = trained(run, alone, str(model_path), PACKINGS[packing])
    assert (loss, norm) == pytest.approx(expected, rel=1e-5)
    assert validation == pytest.approx(expected[0], rel=1e-5)


def test_dft_weighs_tokens_by_their_probability(run: Run, alone: World, model_path: Path) -> None:
    changes = {"max_tokens_per_micro_batch": 60, "sft": {"loss_type": "dft"}}
    loss, norm, validation = trained(run, alone, str(model_path), changes)
    file, model = open_tokens(run.dataset("train-0")), AutoModelForCausalLM.from_pretrained(model_path)
    rows = list[torch.Tensor]()
    for sample in (sample for row in range(ROWS) for sample in file.read(row)):
        ids, trained_T = torch.from_numpy(sample.token_ids), torch.from_numpy(sample.loss_mask)[1:] > 0
        distribution_TV = model(ids[None]).logits[0, :-1].softmax(-1)
        rows.append(distribution_TV.gather(1, ids[1:, None])[:, 0][trained_T])
    probabilities = torch.cat(rows)
    (-probabilities.mean()).backward()  # the gradient of the weighted loss, which is that of the probability
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert loss == pytest.approx(-(probabilities * probabilities.log()).mean().item(), rel=1e-5)
    assert norm == pytest.approx(torch.nn.utils.get_total_norm(gradients).item(), rel=1e-4)
    assert validation == pytest.approx(-probabilities.log().mean().item(), rel=1e-5), "by the cross entropy"


LAYOUTS: dict[str, dict[str, Any]] = {
    "megatron": {"strategy": "megatron", "policy": {"megatron_config": {"dtype": "fp32"}}},
    **{
        f"megatron, {parallel} parallel": {
            "strategy": "megatron",
            "policy": {"megatron_config": {"dtype": "fp32", f"{parallel}_model_parallel_size": 2}},
        }
        for parallel in ("tensor", "pipeline")
    },
    "megatron, context parallel": {
        "strategy": "megatron",
        "policy": {"megatron_config": {"dtype": "fp32", "context_parallel_size": 2}},
    },
}


def assert_two_ranks_agree(
    ranks: Ranks, layouts: dict[str, dict[str, Any]], run: Run, model: Path, expected: tuple[float, float], place: Path
) -> None:
    scenarios = list[tuple[str, dict[str, Any]]]()
    for name, layout in layouts.items():
        changes = {"max_tokens_per_micro_batch": 60, "placement": {"policy_num_gpus_per_node": 2}, **layout}
        options = {"run": str(run.path), "model": str(model), "changes": changes, "out": str(place / name)}
        scenarios.append(("backends.test_supervised:on_ranks", options))
    ranks.play(scenarios)
    for name in layouts:
        loss, norm, validation = json.loads((place / name).read_text())
        assert (loss, norm) == pytest.approx(expected, rel=1e-5), name
        assert validation == pytest.approx(expected[0], rel=1e-5), name


def test_two_ranks_have_one_loss_by_all_their_tokens(
    run: Run, two: Ranks, model_path: Path, expected: tuple[float, float], tmp_path: Path
) -> None:
    assert_two_ranks_agree(two, {"fsdp2": {}}, run, model_path, expected, tmp_path)


@pytest.mark.faults_slow
def test_ranks_of_megatron_have_the_same_loss_however_they_share_the_model(
    run: Run, model_path: Path, expected: tuple[float, float], tmp_path: Path
) -> None:
    ranks = Ranks(tmp_path)  # of their own: Megatron-core leaves random states behind
    try:
        assert_two_ranks_agree(ranks, LAYOUTS, run, model_path, expected, tmp_path)
    finally:
        ranks.close()
