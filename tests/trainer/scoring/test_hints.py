"""A policy that is shown hints judges its own samples: the same tokens behind another prompt, on any number of ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from hpcrl.config import AlgorithmConfig
from hpcrl.config.sections.distillation import DistillationConfig
from hpcrl.data.batch_file import write_batch
from hpcrl.rundir.layout import Run
from hpcrl.trainer.distributed import World
from hpcrl.trainer.loss import build_objective
from hpcrl.trainer.packing import idle_micro_batch
from hpcrl.types import Batch, Hint
from tests.rows import read_tensors, write_group
from tests.trainer.material import make_batch, make_run
from tests.trainer.ranks import Ranks
from tests.trainer.scoring import scenarios

TEMPERATURE = 0.9
Row = tuple[int, int]


def hint_of(group: int, row: int) -> Hint[torch.Tensor] | None:
    """Return the hint of a sample, with as many wrong ones as the number of its group; the second of each, and the last group, have none."""
    if row == 1 or group == 3:
        return None
    draw = torch.Generator().manual_seed(10 * group + row)
    right, *wrong = (torch.randint(0, 18, (4 + 3 * row + group + at,), generator=draw) for at in range(group + 1))
    return Hint(right, 3, tuple(wrong))


@pytest.fixture
def run(tmp_path: Path) -> Run:
    run = make_run(tmp_path / "run")
    groups = list(make_batch(run, 1, groups=4, size=3, masked=True).groups)
    for number, meta in enumerate(groups):
        rows = [replace(one, hint=hint_of(number, at)) for at, one in enumerate(read_tensors(run.path / meta.path))]
        groups[number] = write_group(run.path / meta.path, rows, replace(meta, digest=""))
    write_batch(run, Batch(1, groups, 4), "")
    return run


def options(run: Run, model: Path, out: Path, **distillation: Any) -> dict[str, Any]:
    return {"run": str(run.path), "model": str(model), "out": str(out), "distillation": distillation}


def by_hand(run: Run, model: Path, wrong: int | None = None) -> dict[str, torch.Tensor]:
    """Return the whole distribution behind the hint, of each trained token of each sample that has one, as transformers computes it.

    Or behind a wrong hint, of the samples that have one of that number.
    """
    policy, found = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), dict[str, torch.Tensor]()
    for group in range(4):
        for at, row in enumerate(read_tensors(run.path / f"samples/0/g1-{group}.safetensors")):
            if row.hint is None or (wrong is not None and wrong >= len(row.hint.wrong)):
                continue
            shown = row.hint.token_ids if wrong is None else row.hint.wrong[wrong]
            ids = torch.cat([shown, row.token_ids[row.hint.replaces :]])
            with torch.no_grad():
                logits_TV = policy(ids[None]).logits[0] / TEMPERATURE
            places = row.loss_mask.nonzero()[:, 0] + len(shown) - row.hint.replaces - 1
            found[f"{group}.{at}"] = logits_TV[places].log_softmax(-1)
    return found


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_answers_tokens_are_judged_behind_the_hint(
    ranks: int, run: Run, tmp_path: Path, alone: World, two: Ranks, model_path: Path
) -> None:
    given = options(run, model_path, tmp_path, top_k=3)
    if ranks == 1:
        scenarios.hinted(alone, given)
    else:
        two.play([("scoring.scenarios:hinted", given)])
    told = {name: value for rank in range(ranks) for name, value in load_file(tmp_path / f"{rank}.safetensors").items()}
    expected = by_hand(run, model_path)
    assert sorted(name.removesuffix(".ids") for name in told if name.endswith(".ids")) == [
        f"{group}.{at}" for group in range(4) for at in range(3)
    ]
    for group in range(4):
        for at in range(3):
            name = f"{group}.{at}"
            if name not in expected:
                assert (told[f"{name}.ids"] == -1).all()
                assert torch.equal(told[f"{name}.logprobs"], told[f"{name}.old"]), (
                    "it does not diverge from its teacher"
                )
                continue
            top = expected[name].topk(3)
            assert told[f"{name}.ids"].tolist() == top.indices.tolist()
            torch.testing.assert_close(told[f"{name}.top"], top.values, atol=1e-5, rtol=1e-5)
            whole = told[f"{name}.unmasked"] > 0  # those that were sampled among the whole vocabulary
            label = expected[name].gather(1, told[f"{name}.labels"][:, None])[:, 0]
            torch.testing.assert_close(told[f"{name}.logprobs"][whole], label[whole], atol=1e-5, rtol=1e-5)
            assert (told[f"{name}.logprobs"] >= label - 1e-5).all()
            assert not torch.allclose(told[f"{name}.old"], told[f"{name}.logprobs"], atol=1e-2)
    assert told["hinted"].item() == pytest.approx(6 / 12)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_right_hint_is_contrasted_with_the_mean_of_wrong_ones(
    ranks: int, run: Run, tmp_path: Path, alone: World, two: Ranks, model_path: Path
) -> None:
    """Groups have 0, 1, 2 and no wrong hints; more are asked for than any has."""
    given = options(run, model_path, tmp_path, self_teacher={"model": "policy", "wrong_hints": 3}, use_rewards=True)
    if ranks == 1:
        scenarios.hinted(alone, given)
    else:
        two.play([("scoring.scenarios:hinted", given)])
    told = {name: value for rank in range(ranks) for name, value in load_file(tmp_path / f"{rank}.safetensors").items()}
    right, *wrong = (by_hand(run, model_path, number) for number in (None, 0, 1))
    compared = 0
    for group in range(4):
        for at in range(3):
            name = f"{group}.{at}"
            contrasts, mean = told[f"{name}.contrasts"], [one[name].exp() for one in wrong if name in one]
            if not mean:
                assert not contrasts.any()
                continue
            assert len(mean) == group
            expected = right[name] - torch.stack(mean).mean(0).log()
            label = expected.gather(1, told[f"{name}.labels"][:, None])[:, 0]
            whole = told[f"{name}.unmasked"] > 0  # those that were sampled among the whole vocabulary
            torch.testing.assert_close(contrasts[whole], label[whole], atol=2e-5, rtol=1e-5)
            assert contrasts.isfinite().all()
            compared += int(whole.sum())
    assert compared > 10


def test_hints_are_shared(tmp_path: Path, alone: World, model_path: Path) -> None:
    run = make_run(tmp_path / "run")
    batch = make_batch(run, 1, groups=4, size=3, masked=True, alike=5)
    hint = Hint(torch.arange(6), 3)
    groups = [
        write_group(
            run.path / meta.path,
            [replace(one, hint=hint) for one in read_tensors(run.path / meta.path)],
            replace(meta, digest=""),
        )
        for meta in batch.groups
    ]
    write_batch(run, Batch(1, groups, 4), "")
    found = []
    for shared in (False, True):
        scenarios.hinted(alone, {**options(run, model_path, tmp_path, top_k=3), "tokens": 40, "shared": shared})
        found.append(load_file(tmp_path / "0.safetensors"))
    torch.testing.assert_close(found[1], found[0], atol=1e-5, rtol=1e-5)


def test_one_token_of_each_place_is_enough(run: Run, tmp_path: Path, alone: World, model_path: Path) -> None:
    scenarios.hinted(alone, options(run, model_path, tmp_path, top_k=3))
    several = load_file(tmp_path / "0.safetensors")
    scenarios.hinted(alone, options(run, model_path, tmp_path))
    one = load_file(tmp_path / "0.safetensors")
    assert "0.0.ids" not in one
    for name in (name for name in one if name.endswith(".logprobs")):
        torch.testing.assert_close(one[name], several[name], atol=1e-6, rtol=1e-6)


def test_the_loss_has_the_divergence_where_there_is_a_teacher() -> None:
    """(1 - w) policy loss + w divergence, with 0 where nobody teaches; a micro-batch without samples has the same metrics."""
    draw = torch.Generator().manual_seed(2)
    top, teacher = (torch.randn(5, 3, generator=draw).log_softmax(-1) - 0.1 for _ in range(2))
    mask, weights = torch.tensor([1.0, 1, 0, 1, 0]), torch.tensor([0.25, 0.25, 0, 0.5, 0])
    ids = torch.tensor([[4, 5, 6], [-1, -1, -1], [0, 0, 0], [7, 8, 9], [0, 0, 0]])
    batch = replace(
        idle_micro_batch(), token_ids=torch.arange(5), positions=torch.arange(5), lengths=[5], labels=torch.arange(5), loss_mask=mask,
        weights=weights, nll_weights=weights, rollout_logprobs=-mask, old_logprobs=-mask, advantages=2 * mask, teacher_ids=ids,
        teacher_top=teacher, cu_seqlens=torch.tensor([0, 5]), current=mask,
    )  # fmt: skip
    settings = DistillationConfig(enable=True, top_k=3, jsd_beta=0.0, loss_weight=0.25, kl_penalty_coef=0.0)
    objective, nothing = build_objective(AlgorithmConfig(use_kl_loss=False), settings), torch.zeros(5)
    loss, sums = objective(batch, -mask, nothing, top.requires_grad_())
    divergence_P = (teacher.exp() * (teacher - top)).sum(-1)
    expected = 0.25 * divergence_P[0] + 0.5 * divergence_P[3]
    torch.testing.assert_close(loss, 0.75 * torch.tensor(-2.0) + 0.25 * expected)
    torch.testing.assert_close(sums["teacher_divergence"].float(), (divergence_P[0] + divergence_P[3]).detach())
    (gradient,) = torch.autograd.grad(loss, top)
    torch.testing.assert_close(gradient, -0.25 * weights[:, None] * teacher.exp() * (ids >= 0) * mask[:, None])
    _, idle = objective(idle_micro_batch(), torch.zeros(1), torch.zeros(1))
    assert idle.keys() == sums.keys()


@pytest.mark.parametrize("quantile", [1.0, 0.2])
def test_a_micro_batch_without_rows_has_the_metrics_of_the_others(quantile: float) -> None:
    """Also where only tokens of high entropy count."""
    algorithm = AlgorithmConfig(use_kl_loss=False, top_entropy_quantile=quantile)
    idle, ones = idle_micro_batch(), torch.ones(1)
    full = replace(idle, loss_mask=ones, selected=ones if quantile < 1 else None)
    objective = build_objective(algorithm, None)
    (_, found), (_, expected) = (objective(batch, torch.zeros(1), torch.zeros(1)) for batch in (idle, full))
    assert found.keys() == expected.keys()


def test_the_average_follows_the_policy(run: Run, tmp_path: Path, alone: World, model_path: Path) -> None:
    scenarios.averaged(alone, options(run, model_path, tmp_path / "found"))
    found = load_file(tmp_path / "found")
    for name, value in found.items():
        kind, _, parameter = name.partition(".")
        if kind == "average":
            torch.testing.assert_close(value, 0.75 * found[f"first.{parameter}"] + 0.25 * found[f"policy.{parameter}"])
            assert torch.equal(value, found[f"restored.{parameter}"])
    assert (
        max((found[name] - found[name.replace("policy", "first")]).abs().max() for name in found if "policy" in name)
        > 1e-4
    )
