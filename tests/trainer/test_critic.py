"""The critic under real torchrun: however its mini-batches are spread, values, returns and steps are those of plain transformers."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel

from hpcrl.errors import DataError, RunError
from hpcrl.observe.metrics import merged
from hpcrl.rundir.checkpoints import Retention
from hpcrl.rundir.commit import committed, verify
from hpcrl.rundir.layout import Run, step_of
from hpcrl.trainer.backends.fsdp.engine import FsdpCritic, FsdpPolicy
from hpcrl.trainer.batching import MicroBatchLimit
from hpcrl.trainer.critic.ranks import RemoteModel
from hpcrl.trainer.distributed import World
from hpcrl.trainer.models.build import critic_source
from hpcrl.trainer.packing import pack
from hpcrl.trainer.saving.checkpoint import Checkpoints
from hpcrl.types import Batch, Row
from tests.rows import read_tensors
from tests.trainer import critic_scenarios, test_job
from tests.trainer.material import StepBounds, make_batch, make_run, make_sample
from tests.trainer.ranks import Ranks

GAMMA, LAMBDA, CLIP, LR = 0.9, 0.8, 0.01, 5e-3
GROUPS, SIZE = 4, 3
HEAD = "value_head.weight"


def fsdp(**options: Any) -> dict[str, Any]:
    return {"critic": {"fsdp_config": options}}


ADAPTERS = {"critic": {"model": {"lora": {"rank": 4}}}}
VARIANTS: dict[int, dict[str, dict[str, Any]]] = {
    1: {
        "together": {"micro": 64},
        "one by one": {"micro": 1, "trainer": {"gradient_checkpointing": True}},
        "padded rows": {"micro": 4, "trainer": {"use_sample_packing": False}},
        "one step": {"micro": 4, "trainer": {"critic_mini_batch_size": 4}},
        "adapters": {"micro": 4, "trainer": ADAPTERS},
        "two epochs": {"micro": 4, "trainer": {"update_epochs_per_batch": 2}},
    },
    2: {
        "two ranks": {"micro": 2},
        "adapters of two ranks": {"micro": 2, "trainer": ADAPTERS},
        "by tokens": {"micro": 1, "tokens": 30},
        "policy trains all at once": {"micro": 2, "trainer": {"policy_mini_batch_size": 4}},
        "policy trains one by one": {"micro": 2, "trainer": {"policy_mini_batch_size": 1}},
        "small units": {"micro": 2, "trainer": fsdp(wrap_policy={"min_num_params": 1})},
        "one step of two ranks": {"micro": 1, "trainer": {"critic_mini_batch_size": 4}},
        "bf16": {"micro": 2, "trainer": fsdp(mixed_precision={"param_dtype": "bf16"})},
    },
}
APART = {"one step", "one step of two ranks", "two epochs", "bf16", "adapters", "adapters of two ranks"}
EXACT = [name for variants in VARIANTS.values() for name in variants if name not in APART]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, model_path: Path, alone: World, two: Ranks) -> Path:
    path = tmp_path_factory.mktemp("critic")
    run = make_run(path / "run")
    make_batch(run, 1, GROUPS, SIZE)
    for ranks, variants in VARIANTS.items():
        options = {"model": str(model_path), "run": str(run.path), "out": str(path), "variants": variants}
        if ranks == 1:
            critic_scenarios.one_batch(alone, options)
        else:
            two.play([("critic_scenarios:one_batch", options)])
    return path


class Truth:
    """One batch of a critic with nothing but transformers and torch: one sample at a time, one token after the other."""

    def __init__(self, model_path: Path, initial: dict[str, torch.Tensor], run: Run) -> None:
        self.model = AutoModel.from_pretrained(model_path, dtype=torch.float32, attn_implementation="eager")
        adapters = {name: value for name, value in initial.items() if ".lora_" in name}
        if adapters:
            peft.inject_adapter_in_model(peft.LoraConfig(r=4, lora_alpha=16, target_modules="all-linear"), self.model)
            assert not self.model.load_state_dict(adapters, strict=False).unexpected_keys
        self.model.value_head = torch.nn.Linear(initial[HEAD].shape[1], 1, bias=False)
        self.model.value_head.weight.data.copy_(initial[HEAD])
        batch = Batch.from_json(json.loads(run.batch(1).read_text()))
        self.samples = {
            f"{group}-{index}": sample
            for group, meta in enumerate(batch.groups)
            for index, sample in enumerate(read_tensors(run.path / meta.path))
        }
        with torch.no_grad():
            self.old = {key: self.values(sample) for key, sample in self.samples.items()}
        self.returns = {key: self.returns_of(sample, self.old[key]) for key, sample in self.samples.items()}
        self.optimizer = torch.optim.AdamW(self.model.parameters(), weight_decay=0.01)
        self.bounds = StepBounds(1e-4)
        self.losses: list[float] = []
        self.gradients: list[dict[str, torch.Tensor]] = []
        for start in range(0, GROUPS, 2):
            self.update([key for key in self.samples if int(key.split("-")[0]) in range(start, start + 2)])

    def values(self, sample: Row) -> torch.Tensor:
        return self.model.value_head(self.model(input_ids=sample.token_ids[None]).last_hidden_state)[0, :, 0]

    def returns_of(self, sample: Row, values: torch.Tensor) -> dict[int, float]:
        """Return, by trained token, its value and the discounted sum of later surprises."""
        found, surprise, following = {}, 0.0, 0.0
        for token in reversed([token for token in range(1, len(values)) if sample.loss_mask[token]]):
            value = values[token - 1].item()
            surprise = sample.rewards[token].item() + GAMMA * following - value + GAMMA * LAMBDA * surprise
            following, found[token] = value, value + surprise
        return found

    def update(self, keys: list[str]) -> None:
        total = torch.tensor(0.0)
        for key in keys:
            values, returns = self.values(self.samples[key]), self.returns[key]
            losses = []
            for token, expected in returns.items():
                value, old = values[token - 1], self.old[key][token - 1]
                near = torch.minimum(torch.maximum(value, old - CLIP), old + CLIP)
                losses.append(torch.maximum((value - expected) ** 2, (near - expected) ** 2) / 2)
            total = total + torch.stack(losses).mean() / len(keys)
        self.optimizer.zero_grad()
        total.backward()
        self.gradients.append({name: p.grad.clone() for name, p in self.model.named_parameters() if p.grad is not None})
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.param_groups[0]["lr"] = LR * (1 - len(self.losses) / 8)
        self.optimizer.step()
        self.bounds.add(self.optimizer)
        self.losses.append(total.item())


@pytest.fixture(scope="module")
def truth(results: Path, model_path: Path) -> Truth:
    return true(results, model_path, "together")


def true(results: Path, model_path: Path, name: str) -> Truth:
    """Return what comes of the values that a variant began with."""
    tensors = load_file(results / f"{name}.safetensors")
    initial = {key.removeprefix("initial."): value for key, value in tensors.items() if key.startswith("initial.")}
    return Truth(model_path, initial, Run.open(results / "run"))


def of_samples(results: Path, name: str, kind: str) -> dict[str, torch.Tensor]:
    files = sorted(results.glob(f"{name}.{kind}.*.safetensors"))
    return {key.removeprefix(f"{kind}."): value for file in files for key, value in load_file(file).items()}


def test_a_policy_on_other_ranks_has_a_reference_that_follows_it_slowly() -> None:
    """Ranks of the critic alone call what those of the policy do, such as for a teacher that is an average."""
    RemoteModel().reset_reference(fresh_optimizer=False, rate=0.05)


@pytest.mark.parametrize("name", [*EXACT, "one step", "two epochs"])
def test_values_returns_and_advantages(results: Path, truth: Truth, name: str) -> None:
    values, returns, advantages = (of_samples(results, name, kind) for kind in ("values", "returns", "advantages"))
    raw = {
        key: {token: value - truth.old[key][token - 1].item() for token, value in found.items()}
        for key, found in truth.returns.items()
    }
    everything = torch.tensor([value for found in raw.values() for value in found.values()])
    for key, sample in truth.samples.items():
        torch.testing.assert_close(values[key], truth.old[key], atol=1e-5, rtol=0)
        trained = {token: value for token, value in enumerate(returns[key].tolist()) if token in truth.returns[key]}
        assert trained == pytest.approx(truth.returns[key], abs=1e-5)
        expected = torch.zeros(len(sample.token_ids))
        for token, value in raw[key].items():
            expected[token] = (value - everything.mean()) / everything.std()
        torch.testing.assert_close(advantages[key], expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", EXACT)
def test_every_way_is_the_same_optimizer_step(results: Path, truth: Truth, name: str) -> None:
    expect_same_step(results, truth, name)


@pytest.mark.parametrize("name", ["adapters", "adapters of two ranks"])
def test_adapters_and_the_new_head_are_trained(results: Path, model_path: Path, name: str) -> None:
    expect_same_step(results, true(results, model_path, name), name)


def expect_same_step(results: Path, truth: Truth, name: str) -> None:
    told, tensors = json.loads((results / f"{name}.json").read_text()), load_file(results / f"{name}.safetensors")
    assert told["updates"] == 2
    assert told["kept"], "the weights of the policy's loss are not the critic's"
    assert told["metrics"]["critic/critic_loss"] == pytest.approx(sum(truth.losses) / 2, abs=1e-6)
    for key, parameter in truth.model.named_parameters():
        for number, gradients in enumerate(truth.gradients):
            assert (f"gradient.{number}.{key}" in tensors) == (key in gradients)
            if key in gradients:
                torch.testing.assert_close(tensors[f"gradient.{number}.{key}"], gradients[key], atol=1e-5, rtol=1e-4)
        truth.bounds.expect(tensors[f"parameter.{key}"], parameter)
    assert not torch.equal(tensors[f"parameter.{HEAD}"], tensors[f"initial.{HEAD}"])


def test_metrics(results: Path, truth: Truth) -> None:
    found = json.loads((results / "two ranks.json").read_text())["metrics"]
    expected = torch.tensor([value for of_sample in truth.returns.values() for value in of_sample.values()])
    old = torch.tensor([truth.old[key][token - 1] for key, of_sample in truth.returns.items() for token in of_sample])
    assert found["critic/returns_mean"] == pytest.approx(expected.mean().item(), abs=1e-5)
    explained = 1 - (expected - old).var() / expected.var()
    assert found["critic/explained_variance"] == pytest.approx(explained.item(), abs=1e-4)
    assert found["critic/critic_lr"] == pytest.approx(LR * (1 + 7 / 8) / 2)
    assert found["critic/skipped_updates"] == 0
    assert 0 < found["critic/values_clipfrac"] < 1, "the second update met values that the first had moved"
    assert found["critic/values_mean"] != pytest.approx(old.mean().item(), abs=1e-4)
    assert found["critic/grad_norm"] > 0
    for name in ("one by one", "by tokens"):
        assert json.loads((results / f"{name}.json").read_text())["metrics"] == pytest.approx(found, abs=1e-4)


def test_mini_batches_and_epochs_of_its_own(results: Path) -> None:
    one, two = (json.loads((results / f"{name}.json").read_text()) for name in ("one step", "one step of two ranks"))
    assert (one["updates"], two["updates"]) == (1, 1)
    assert two["metrics"] == pytest.approx(one["metrics"], abs=1e-5)
    assert one["metrics"]["critic/values_clipfrac"] == 0
    again = json.loads((results / "two epochs.json").read_text())
    assert again["updates"] == 4
    assert again["metrics"]["critic/critic_loss"] != one["metrics"]["critic/critic_loss"]


def test_bf16_stays_close(results: Path, truth: Truth) -> None:
    tensors = load_file(results / "bf16.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}
    for key, values in of_samples(results, "bf16", "values").items():
        torch.testing.assert_close(values, truth.old[key], atol=0.05, rtol=0)


def test_a_new_head_depends_on_the_seed_alone(results: Path, model_path: Path, alone: World) -> None:
    heads = [
        load_file(results / f"{name}.safetensors")[f"initial.{HEAD}"]
        for name in ("together", "two ranks", "small units")
    ]
    assert torch.equal(heads[0], heads[1])
    assert torch.equal(heads[0], heads[2])
    assert heads[0].std().item() == pytest.approx(1 / 33, rel=0.4)
    assert abs(heads[0].mean().item()) < 1 / 33
    other = FsdpCritic(critic_scenarios.section(str(model_path), {"trainer": {"seed": 6}}), alone)
    assert not torch.equal(critic_scenarios.parameters(other)[HEAD], heads[0])


@pytest.mark.parametrize("prefix", ["", "model."])
def test_a_head_on_disk_is_loaded(model_path: Path, tmp_path: Path, alone: World, prefix: str) -> None:
    """Under any name, beside a body with or without the prefix that it has in a language model."""
    shutil.copytree(model_path, tmp_path, dirs_exist_ok=True)
    body = AutoModel.from_pretrained(model_path, dtype=torch.float32)
    head = torch.randn(1, 32)
    save_file(
        {"score.weight": head, **{f"{prefix}{name}": value for name, value in body.state_dict().items()}},
        tmp_path / "model.safetensors",
        {"format": "pt"},
    )
    trainer = critic_scenarios.section(str(tmp_path), {"trainer": {"algorithm": {"value_head_prefix": "score"}}})
    sample = make_sample(torch.Generator().manual_seed(1), 9, prompt=3)
    (values,) = FsdpCritic(trainer, alone).values([pack([sample]).whole()])
    expected = (body(input_ids=sample.token_ids[None]).last_hidden_state @ head.T)[0, :, 0]
    torch.testing.assert_close(values, expected.detach(), atol=1e-5, rtol=0)


def test_what_is_no_critic(model_path: Path, tmp_path: Path) -> None:
    def load(path: Path, name: str = "value_head") -> None:
        trainer = critic_scenarios.section(str(path), {"trainer": {"algorithm": {"value_head_prefix": name}}})
        critic_source(trainer).whole(torch.float32, "eager")

    with pytest.raises(DataError, match=r"Check trainer\.critic\.model\.path"):
        load(tmp_path / "nowhere")
    with pytest.raises(DataError, match=r"value_head_prefix: Qwen2Model has a part norm; choose another name"):
        load(model_path, "norm")
    shutil.copytree(model_path, tmp_path, dirs_exist_ok=True)
    tensors = load_file(model_path / "model.safetensors")
    save_file({**tensors, HEAD: torch.zeros(2, 32)}, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(DataError, match=r"trainer\.critic\.model\.path"):
        load(tmp_path)
    save_file({k: v for k, v in tensors.items() if "norm" not in k}, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(DataError, match=r"no weights for layers\.0\.input_layernorm\.weight"):
        load(tmp_path)


def test_it_learns_a_constant_reward(model_path: Path, tmp_path: Path, alone: World) -> None:
    run = make_run(tmp_path / "run")
    batch = make_batch(run, 1, GROUPS, SIZE)
    algorithm = {"gamma": 1.0, "lambd": 1.0, "value_clip": 0.0}
    trainer = critic_scenarios.section(str(model_path), {"trainer": {"algorithm": algorithm}})
    critic, limit, means = critic_scenarios.make_critic(alone, trainer), MicroBatchLimit(64), []
    critic.schedule(10**6)
    for _ in range(40):
        minis = critic_scenarios.appraised(critic, run, batch, trainer, limit)
        for mini in minis:
            mini.rows.scores.returns = torch.full_like(mini.rows.rewards, 0.7)
        found = critic_scenarios.train_critic(critic, minis, batch, trainer, limit)
        means.append(found["critic/values_mean"])
    assert abs(means[0]) < 0.2
    assert means[-1] == pytest.approx(0.7, abs=0.05)
    assert found["critic/critic_loss"] < 0.005
    assert "critic/explained_variance" not in found, "all returns are equal"


def life(model_path: Path, run: Path, out: Path, **options: Any) -> dict[str, Any]:
    return {"model": str(model_path), "run": str(run), "out": str(out), "attempt": 1, "saves": [], **options}


def test_save_and_resume_on_other_ranks(model_path: Path, tmp_path: Path, alone: World, two: Ranks) -> None:
    """Two ranks train 3 steps; one goes on from the checkpoint of step 1, and two from its checkpoint of step 2."""
    run = make_run(tmp_path / "whole")
    for step in (1, 2, 3):
        make_batch(run, step, GROUPS, SIZE)
    whole = life(model_path, run.path, tmp_path / "whole.json", until=3, saves=[1])
    two.play([("critic_scenarios:lifetime", whole)])
    expected = json.loads((tmp_path / "whole.json").read_text())
    assert {"critic/.metadata", ".metadata"} <= set(verify(run.checkpoint(1))["files"])
    shutil.copytree(run.path, tmp_path / "resumed")

    resumed = life(model_path, tmp_path / "resumed", tmp_path / "one.json", until=2, saves=[2], attempt=2)
    critic_scenarios.lifetime(alone, resumed)
    one = json.loads((tmp_path / "one.json").read_text())
    assert one["started"] == 1
    assert one["metrics"] == [pytest.approx(expected["metrics"][1], abs=1e-5)]

    again = {**resumed, "out": str(tmp_path / "two.json"), "until": 3, "saves": [], "attempt": 3}
    two.play([("critic_scenarios:lifetime", again)])
    last = json.loads((tmp_path / "two.json").read_text())
    assert last["started"] == 2
    assert last["metrics"] == [pytest.approx(expected["metrics"][2], abs=1e-5)]
    assert last["updates"] == expected["updates"] == 6
    assert last["metrics"][0]["critic/critic_lr"] < one["metrics"][0]["critic/critic_lr"], "the schedule goes on"


def test_checkpoints_with_and_without_a_critic(
    model_path: Path, tmp_path: Path, alone: World, caplog: pytest.LogCaptureFixture
) -> None:
    run, trainer = make_run(tmp_path / "run"), critic_scenarios.section(str(model_path), {})
    policy, critic = FsdpPolicy(trainer, 1.0, alone), critic_scenarios.make_critic(alone, trainer)
    checkpoints = Checkpoints(run, 1, alone, keep=Retention(), seed=0)
    checkpoints.resume(policy, None, "latest", None)
    checkpoints.save(policy, None, make_batch(run, 1, GROUPS, SIZE), {})
    assert not (run.checkpoint(1) / "critic").exists()
    with pytest.raises(RunError, match=r"s000001 was saved without a critic: leave out trainer\.critic\.model\.path"):
        checkpoints.resume(policy, critic, "latest", None)
    checkpoints.save(policy, critic, make_batch(run, 2, GROUPS, SIZE), {})
    assert checkpoints.resume(policy, critic, "latest", None).step == 2
    with caplog.at_level(logging.WARNING):
        assert checkpoints.resume(policy, None, "latest", None).step == 2
    assert "has a critic, which this run does not train" in caplog.text


@pytest.mark.faults_slow
def test_a_job_trains_policy_and_critic(model_path: Path, tmp_path: Path) -> None:
    critic = {
        "model": {"path": str(model_path)},
        "warmup_steps": 1,
        "optimizer_config": {"lr": 1e-2},
        "fsdp_config": {"mixed_precision": {"param_dtype": "fp32"}},
    }
    changes = {"algorithm": {"advantage_estimator": "gae"}, "critic": critic, "critic_mini_batch_size": 4}
    run = test_job.make_run(tmp_path, model_path, {"trainer": {**changes, "max_steps": 2, "hf_save_interval": -1}})
    with test_job.controller(run, 1), test_job.trainer(run, 1, ranks=1) as process:
        test_job.work_until(run, 1, 2, process)
        test_job.wait_for(lambda: bool(committed(run.checkpoints, step_of)))
        process.terminate()
        output, _ = process.communicate(timeout=180)
        assert process.returncode == 0, output
    first, second = (merged(run)[step] for step in (1, 2))
    assert {name for name in second if name.startswith("critic/")} == {
        "critic/critic_loss", "critic/critic_lr", "critic/grad_norm", "critic/skipped_updates", "critic/values_mean",
        "critic/returns_mean", "critic/values_clipfrac", "critic/explained_variance",
    }  # fmt: skip
    assert second["timing/critic_train"] > 0
    assert "policy/grad_norm" in second
    assert "policy/grad_norm" not in first, "the first step trains the critic alone"
    assert abs(first["critic/values_mean"]) < abs(second["critic/values_mean"]), "rewards are positive"
    assert (run.checkpoint(2) / "critic" / ".metadata").is_file()
