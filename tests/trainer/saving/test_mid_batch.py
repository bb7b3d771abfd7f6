"""A stop request between two micro-batches: what is committed, and that training goes on from there as if nothing had happened."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from hpcrl.config import Config
from hpcrl.data.batch_file import read_batch, write_batch
from hpcrl.data.weight_files import weight_facts
from hpcrl.observe.metrics import MetricsReader, merged, read_metrics, values_of
from hpcrl.rundir.checkpoints import line_of
from hpcrl.rundir.commit import committed_directory, read_json, verify, write_json, write_text
from hpcrl.rundir.layout import Run, position_of, step_of
from hpcrl.trainer.batching import MicroBatchLimit, RowRef, plan_mini_batch
from hpcrl.trainer.packing import MiniBatch, pack
from hpcrl.trainer.saving import mid_batch
from hpcrl.trainer.saving.mid_batch import unusable
from hpcrl.types import Batch, Prompt, Row, Work
from tests.trainer.launcher import run_ranks
from tests.trainer.material import expect_same_metrics, load_weights
from tests.trainer.scenarios import laid_over
from tests.trainer.test_job import STEPS, children, controller, finish, make_run, said, trainer

CRITIC = {
    "trainer": {
        "critic": {
            "optimizer_config": {"lr": 5e-3, "scheduler": "linear"},
            "fsdp_config": {"mixed_precision": {"param_dtype": "fp32"}},
        },
        "critic_mini_batch_size": 2,
        "update_epochs_per_batch": 2,
        "max_tokens_per_micro_batch": 16,
        "hf_save_interval": 2,
        "algorithm": {"advantage_estimator": "gae", "lambd": 0.8, "gamma": 0.9},
    }
}
# leaves tokens out that it draws at random; old log-probabilities are estimated by ages of tokens, which a checkpoint keeps
RANDOM = {
    "trainer": {
        "policy_mini_batch_size": 1,
        "max_tokens_per_micro_batch": 16,
        "dump_data_batch": False,
        "algorithm": {
            "policy_loss_type": "clip_cov",
            "approximate_old_logprobs": True,
            "use_kl_loss": True,
            "use_kl_in_reward": False,
            "kl_ctrl": {"type": "fixed", "kl_target": 0.1, "horizon": 10000},
            "clip_cov": {"clip_ratio": 0.4, "clip_cov_lb": -5.0, "clip_cov_ub": 5.0},
        },
    }
}
MUON = {
    "trainer": {
        "policy": {"optimizer_config": {"name": "Muon"}, "fsdp_config": {"fsdp_size": 1}},
        "policy_mini_batch_size": 1,
        "max_tokens_per_micro_batch": 16,
    }
}
CRITIC_UPDATES = 4
SECONDS = "resilience/signal_to_commit_seconds"
TIMES = re.compile("timing/|throughput/|memory/|resilience/")


def made(path: Path, model: Path, changes: dict[str, Any]) -> Run:
    """Return a run whose groups are all generated and whose batches are all composed."""
    run = make_run(path, model, laid_over({"trainer": {"profiler": {"enable": False}}}, changes))
    for step in range(1, STEPS + 1):
        indices = range(4 * (step - 1), 4 * step)
        prompt = Prompt("p", [], "sort_letters", {}, "letters")
        groups = [finish(run, Work(f"g{i:08d}", "train", prompt, 3, seed=100 * i), version=step - 1) for i in indices]
        write_json(run.batch(step), Batch(step, groups, cursor=4 * step).to_json())
    return run


class Attempts:
    """Attempts to be made by the same ranks."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.todo = folder, list[dict[str, Any]]()

    def of(
        self, run: Run, faults: Sequence[str], first: int = 1, *, rank: int | None = None, config: Path | None = None
    ) -> None:
        shared = {"run": str(run.path), "rank": rank, "config": str(config or run.config), "out": f"{run.path}/told"}
        self.todo += [{**shared, "attempt": at, "fault": fault} for at, fault in enumerate(faults, start=first)]

    def make(self, ranks: int) -> None:
        (self.folder / f"{ranks}.json").write_text(json.dumps(self.todo))
        done = run_ranks(ranks, self.folder / f"{ranks}.json", script="trainer/saving/mid_batch_scenarios.py")
        assert done.returncode == 0, done.stdout + done.stderr


def told_by(run: Run) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run.path / "told").read_text().splitlines()]


def curve(run: Run) -> dict[int, dict[str, float]]:
    return {
        step: {name: value for name, value in metrics.items() if not TIMES.match(name)}
        for step, metrics in merged(run).items()
        if any(not TIMES.match(name) for name in metrics)
    }


def assert_same(run: Run, whole: Run, tolerance: float) -> None:
    assert curve(run).keys() == curve(whole).keys() == set(range(1, STEPS + 1))
    for step, metrics in curve(whole).items():
        expect_same_metrics(curve(run)[step], metrics, absolute=tolerance)
    found = load_weights(run.weights_of(STEPS))
    for name, tensor in load_weights(whole.weights_of(STEPS)).items():
        torch.testing.assert_close(found[name], tensor, atol=tolerance, rtol=0)


def with_critic(model_path: Path) -> dict[str, Any]:
    return laid_over(CRITIC, {"trainer": {"critic": {"model": {"path": str(model_path)}}}})


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, model_path: Path) -> dict[str, Run]:
    """Runs of two ranks, and what one rank made of one of them and of a run of its own."""
    folder = tmp_path_factory.mktemp("midstep")
    names = ("whole", "broken", "moved")
    runs = {name: made(folder / name, model_path, with_critic(model_path)) for name in names}
    two = Attempts(folder)
    two.of(runs["whole"], [""])
    two.of(runs["broken"], BROKEN)
    two.of(runs["moved"], ["update.micro_batch@20:signal=SIGTERM"])
    two.make(2)
    runs["inside"] = Run(folder / "inside" / "project" / "run")
    shutil.copytree(runs["moved"].path, runs["inside"].path)
    one = Attempts(folder)
    one.of(runs["moved"], [""], first=2)
    runs["unsaved"] = made(folder / "unsaved", model_path, {"trainer": {"ckpt_interval": -1}})
    one.of(runs["unsaved"], ["wait@2:signal=SIGTERM"])
    one.make(1)
    return runs


@pytest.fixture(scope="module")
def random_runs(tmp_path_factory: pytest.TempPathFactory, model_path: Path) -> dict[str, Run]:
    """Runs of one rank."""
    folder = tmp_path_factory.mktemp("random")
    runs = {name: made(folder / name, model_path, RANDOM) for name in ("whole", "broken")}
    attempts = Attempts(folder)
    attempts.of(runs["whole"], [""])
    attempts.of(runs["broken"], [f"update.micro_batch@{n}:signal=SIGUSR2" for n in (2, 6, 1, 9, 3)] + [""])
    attempts.make(1)
    return runs


BROKEN = [
    "load.critic:signal=SIGTERM",
    "score.micro_batch@3:signal=SIGTERM",
    "update.micro_batch@5:signal=SIGUSR2 update.micro_batch@6:signal=SIGTERM",
    "score.micro_batch@1:signal=SIGTERM update.micro_batch@1:signal=SIGTERM",
    "update.micro_batch@8:signal=SIGTERM",
    "update.micro_batch@11:signal=SIGTERM",
    "publish:signal=SIGTERM",
    "score.micro_batch@2:signal=SIGTERM",
    "update.micro_batch@3:signal=SIGTERM",
    "export:signal=SIGTERM",
    "wait@2:signal=SIGTERM",
    "",
]


def test_the_curve_is_that_of_a_run_that_was_never_stopped(runs: dict[str, Run]) -> None:
    assert_same(runs["broken"], runs["whole"], 1e-6)


def test_what_each_stop_left(runs: dict[str, Run]) -> None:
    """Nothing where nothing was trained; what is not needed any more goes with the next complete step."""
    left = [told["positions"] for told in told_by(runs["broken"])]
    assert left == [
        [], [], [[0, 1]], [[0, 1]], [[0, 1], [0, 3]], [[0, 3], [0, 6]],
        [[1, 0]], [[1, 0]], [[1, 0], [1, 1]], [[1, 0], [2, 0]], [[1, 0], [2, 0], [3, 0]], [[1, 0], [2, 0], [3, 0], [4, 0]],
    ]  # fmt: skip
    stopped_in_critic, stopped_in_policy = [0, 3], [0, 6]
    assert stopped_in_critic[1] < CRITIC_UPDATES < stopped_in_policy[1]
    said = [told["said"] for told in told_by(runs["broken"])]
    assert said == ["stopped"] * (len(BROKEN) - 1) + ["finished"]


def test_only_training_is_at_stake(runs: dict[str, Run]) -> None:
    """Loading and scoring are done again."""
    assert [any(told["has_progress"]) for told in told_by(runs["broken"])][:5] == [False, False, True, False, True]


@pytest.mark.faults_slow
def test_random_numbers_go_on(random_runs: dict[str, Run]) -> None:
    assert_same(random_runs["broken"], random_runs["whole"], 1e-6)
    ratios = {step: metrics["policy/loss_metrics/clip_ratio"] for step, metrics in curve(random_runs["whole"]).items()}
    assert all(ratio > 0 for ratio in ratios.values()), "tokens are drawn"
    assert any(updates for _, updates in told_by(random_runs["broken"])[1]["positions"])


@pytest.mark.faults_slow
def test_copies_that_muon_moves_go_on_in_the_middle_of_a_batch(tmp_path: Path, model_path: Path) -> None:
    whole, broken = (made(tmp_path / name, model_path, MUON) for name in ("whole", "broken"))
    two = Attempts(tmp_path)
    two.of(whole, [""])
    two.of(broken, ["update.micro_batch@4:signal=SIGTERM", ""])
    two.make(2)
    (position,) = told_by(broken)[0]["positions"]
    assert position[0] == 0
    assert position[1] > 0
    assert_same(broken, whole, 1e-6)


def test_one_rank_goes_on_for_two(runs: dict[str, Run]) -> None:
    assert told_by(runs["moved"])[0]["positions"] == [[0, 6]]
    assert_same(runs["moved"], runs["whole"], 1e-5)


@pytest.mark.faults_slow
def test_a_step_that_was_begun_otherwise_begins_again(tmp_path: Path, model_path: Path) -> None:
    run = made(tmp_path, model_path, with_critic(model_path))
    two, one = Attempts(tmp_path), Attempts(tmp_path)
    two.of(run, ["update.micro_batch@60:signal=SIGTERM"])
    two.make(2)
    text = run.config.read_text()
    write_text(run.config, text.replace("update_epochs_per_batch = 2", "update_epochs_per_batch = 1"))
    one.of(run, ["update.micro_batch@3:signal=SIGTERM"], first=2)
    one.make(1)
    before, after = told_by(run)
    assert before["positions"] == [[2, 0], [2, 5]]
    assert (after["said"], after["positions"], after["has_progress"]) == ("stopped", [[2, 0]], [False])
    assert [path.name for path in run.checkpoints.glob(".given-up-*")] == [".given-up-s000002u5.2"]


def test_exports_that_a_stop_left_out_are_made_up_for(runs: dict[str, Run]) -> None:
    assert [told["exports"] for told in told_by(runs["broken"])][-3:] == [[], [2], [2, 4]]


def test_how_long_it_took_is_told(runs: dict[str, Run]) -> None:
    """Of each interruption; where several attempts ended at one step, the last counts."""
    told = [record for record in MetricsReader(runs["broken"]).poll()[0] if SECONDS in record.metrics]
    assert [(record.attempt, record.step) for record in told] == [
        (2, 0), (3, 0), (4, 0), (5, 0), (6, 0), (7, 1), (8, 1), (9, 1), (10, 2), (11, 3),
    ]  # fmt: skip
    assert all(0 < record.metrics[SECONDS] < 30 for record in told)
    counts = [record for record in read_metrics(runs["broken"]) if SECONDS in record.metrics]
    assert [(record.attempt, record.step) for record in counts] == [(6, 0), (9, 1), (10, 2), (11, 3)]
    assert values_of(runs["broken"], SECONDS) == {record.step: record.metrics[SECONDS] for record in told}


def test_a_step_tells_the_size_of_one_checkpoint(runs: dict[str, Run]) -> None:
    told = [
        record.step
        for record in MetricsReader(runs["broken"]).poll()[0]
        if "throughput/checkpoint_gib" in record.metrics
    ]
    assert told
    assert len(told) == len(set(told))


def test_a_run_without_checkpoints_does_not_claim_to_have_saved(runs: dict[str, Run]) -> None:
    assert [(told["said"], told["positions"]) for told in told_by(runs["unsaved"])] == [("stopped", [])]
    assert 1 in merged(runs["unsaved"]), "a step was trained"
    assert not [record for record in read_metrics(runs["unsaved"]) if SECONDS in record.metrics]


def test_seconds_of_a_step_are_those_of_all_its_attempts(runs: dict[str, Run]) -> None:
    facts = json.loads((runs["inside"].checkpoint(0, 6) / "batch.json").read_text())
    step = merged(runs["moved"])[1]
    assert 0 < facts["seconds"]["critic_train"] <= step["timing/critic_train"], "done before the stop"
    assert facts["seconds"]["step"] < step["timing/step"]


def test_a_checkpoint_inside_a_step_names_its_batch(runs: dict[str, Run]) -> None:
    manifest = verify(runs["inside"].checkpoint(0, 6))
    facts = {name: manifest[name] for name in ("step", "updates", "batch", "world_size")}
    assert facts == {"step": 0, "updates": 6, "batch": "batches/s000001.json", "world_size": 2}
    names = {name for name in manifest["files"] if name.startswith("batch")}
    assert names == {"batch.json", "batch-0.safetensors", "batch-1.safetensors"}


def moved_file(run: Run) -> None:
    min(run.samples_of(0).iterdir()).unlink()


def other_batch(run: Run) -> None:
    shutil.copy(run.batch(2), run.batch(1))


def other_loss(run: Run) -> None:
    text = run.config.read_text()
    assert "gamma = 0.9" in text
    write_text(run.config, text.replace("gamma = 0.9", "gamma = 0.8"))


def other_size(run: Run) -> None:
    text = run.config.read_text()
    assert "critic_mini_batch_size = 2" in text
    write_text(run.config, text.replace("critic_mini_batch_size = 2", "critic_mini_batch_size = 4"))


def earlier_layout(run: Run) -> None:
    facts = run.checkpoint(0, 6) / "batch.json"
    write_json(facts, {name: value for name, value in read_json(facts).items() if name != "layout"})


def another_rate(run: Run) -> None:
    write_text(run.config, run.config.read_text().replace("lr = 0.001", "lr = 0.002"))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda _: None, None),
        (another_rate, None),
        (moved_file, r"samples/0/g0000000.*is missing"),
        (lambda run: run.batch(1).unlink(), "s000001.json is not the batch that was begun"),
        (other_batch, "s000001.json is damaged: it holds the batch of step 2"),
        (other_loss, r"another trainer\.algorithm\.gamma$"),
        (other_size, r"another trainer\.critic_mini_batch_size$"),
        (lambda run: (run.checkpoint(0, 6) / "batch.json").unlink(), "it has no batch.json"),
        (earlier_layout, "an earlier version of hpcrl saved it"),
    ],
    ids=[
        "nothing",
        "another rate",
        "no sample",
        "no batch",
        "another batch",
        "another loss",
        "another size",
        "no facts",
        "an earlier layout",
    ],
)
def test_what_makes_it_unusable(
    runs: dict[str, Run], tmp_path: Path, change: Callable[[Run], None], why: str | None
) -> None:
    run = Run(tmp_path / "run")
    shutil.copytree(runs["inside"].path, run.path)
    change(run)
    found = unusable(run, Config.from_toml([run.config]).trainer, run.checkpoint(0, 6))
    if why is None:
        assert found is None
    else:
        assert found is not None
        assert re.search(why, found), found


def test_weights_of_its_step_must_be_there(runs: dict[str, Run], tmp_path: Path) -> None:
    """They are those of the policy before it went on, which is gone."""
    run = Run(tmp_path / "run")
    shutil.copytree(runs["inside"].path, run.path)
    first = read_batch(run.batch(1))
    assert first
    write_batch(run, replace(first.batch, step=2), first.checksum)
    os.rename(run.checkpoint(0, 6), run.checkpoint(1, 6))
    trainer = Config.from_toml([run.config]).trainer
    assert "v000001 was never committed" in (unusable(run, trainer, run.checkpoint(1, 6)) or "")
    with committed_directory(run.weights_of(1), 1, version=1, **weight_facts({}, None)):
        pass
    assert unusable(run, trainer, run.checkpoint(1, 6)) is None


@pytest.mark.faults_slow
def test_one_rank_hears_it(model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several signals, in the middle of a step, to one of two ranks; neither lives to see Python end, where a thread of gloo may abort it."""
    (tmp_path / "sitecustomize.py").write_text(
        "import atexit, os\nif 'TORCHELASTIC_RUN_ID' in os.environ: atexit.register(os.abort)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    run = made(tmp_path, model_path, {"trainer": {"max_tokens_per_micro_batch": 16}})
    monkeypatch.setenv("HPCRL_FAULT", "update.micro_batch@5:sleep=1")
    with controller(run, 1), trainer(run, 1, ranks=2) as process:
        assert process.stdout is not None
        while "fault point" not in (line := process.stdout.readline()):
            assert line, "the trainer has ended"
        for number in (signal.SIGUSR2, signal.SIGTERM, signal.SIGCONT, signal.SIGTERM):
            os.kill(children(process.pid)[1], number)
        output, _ = process.communicate(timeout=180)
        assert process.returncode == 0, output
    assert said(run, 1) == "stopped"
    (path,) = line_of(run)
    step, updates = position_of(path) or (0, 0)
    assert step == 0
    assert updates > 0


def test_before_there_is_anything_to_save(model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal that comes before torch is imported; nobody serves the run."""
    run = made(tmp_path, model_path, {})
    monkeypatch.setenv("HPCRL_FAULT", "import:signal=SIGTERM")
    with trainer(run, 1, ranks=1) as process:
        output, _ = process.communicate(timeout=180)
        assert process.returncode == 0, output
        assert "Traceback" not in output
    assert said(run, 1) == "stopped"
    assert not run.checkpoints.exists()


def test_names() -> None:
    run = Run(Path("/somewhere"))
    assert run.checkpoint(41, 2).name == "s000041u2"
    assert position_of(run.checkpoint(41, 2)) == (41, 2)
    assert position_of(run.checkpoint(41)) == (41, 0)
    assert step_of(run.checkpoint(41, 2)) is None
    for name in ("s000041u", "s000041u0", "s000041u2.json", ".tmp-s000041u2.1", "v000041"):
        assert position_of(Path(name)) is None


def test_a_rank_that_has_all_opens_no_further_file(tmp_path: Path) -> None:
    refs, tokens = [RowRef(group=2, index=1, length=3)], torch.arange(3)
    sample = Row(tokens, torch.ones(3), torch.zeros(3), torch.zeros(3), torch.zeros(3), "stop", {})
    saved, found, limit = pack([sample], refs), pack([sample], refs), MicroBatchLimit(1)
    saved.scores.advantages = torch.ones(3)
    columns = {f"0.{name}": value for name, value in mid_batch._columns(saved).items()}
    save_file(columns, tmp_path / "batch-1.safetensors")
    mini = MiniBatch(plan_mini_batch([refs], limit, limit), found, 0)
    mid_batch._fill_in([mini], [tmp_path / "batch-1.safetensors", tmp_path / "none"])
    assert found.scores.advantages is not None
    assert found.scores.advantages.tolist() == [1, 1, 1]
