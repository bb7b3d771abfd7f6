"""Saving where the disk fails one rank, in the foreground and while training goes on."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, Qwen2ForCausalLM

from hpcrl import faults as fault
from hpcrl.config import Config
from hpcrl.data.weight_files import PublishedWeights, WeightReader
from hpcrl.errors import CommitError, RunError
from hpcrl.launch.doctor import disk_space
from hpcrl.rundir.checkpoints import Retention
from hpcrl.rundir.commit import committed_by, verify, write_text
from hpcrl.rundir.layout import Run
from hpcrl.rundir.ledger import open_attempt
from hpcrl.rundir.starts import note, read_starts
from hpcrl.trainer.distributed import World
from hpcrl.trainer.saving.checkpoint import Checkpoints
from hpcrl.trainer.saving.publish import Publisher
from tests.filesystem.small import small_filesystem
from tests.trainer import scenarios
from tests.trainer.launcher import environment
from tests.trainer.material import make_batch, make_run
from tests.trainer.ranks import Ranks
from tests.trainer.saving.life import Life

_TOO_SMALL = "900k"  # for two checkpoints of the tiny model


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = make_run(tmp_path_factory.mktemp("source") / "run")
    for step in range(1, 4):
        make_batch(run, step, groups=4, size=3)
    return run


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory, model_path: Path, source: Run, two: Ranks) -> dict[str, Any]:
    """What two ranks saw; each the same."""
    path = tmp_path_factory.mktemp("together")
    with ExitStack() as stack:
        places = [path / f"full-{mode}" / "checkpoints" for mode in ("sync", "async")]
        full = False not in [stack.enter_context(small_filesystem(place, _TOO_SMALL)) for place in places]
        options = {"model": str(model_path), "run": str(source.path), "out": str(path / "told"), "full": full}
        two.play([("saving.life:together", options)])
    first, second = (json.loads(path.joinpath(f"told.{rank}").read_text()) for rank in (0, 1))
    assert first["one rank fails"] == second["one rank fails"], "ranks agree"
    return {**first, "path": path}


def test_what_one_rank_cannot_write_fails_on_all(told: dict[str, Any]) -> None:
    found = told["one rank fails"]
    assert found["commit.manifest:raise=EIO"] == ["ok", [], [], 0], "it goes on, and nothing is left"
    assert found["commit.shard:raise=ENOSPC"] == ["ok", [], [], 0]
    assert found["next"] == ["ok", [2], [2], 0]
    message, *there = found["stop"]
    assert "s000001 could not be written: No space left on device" in message
    assert there == [[], [], 0]


def test_what_another_rank_still_writes_is_not_listed(told: dict[str, Any]) -> None:
    assert told["passing names"] == ["rng-0.safetensors", "rng-1.safetensors"]


def test_each_rank_writes_its_part_of_the_weights(told: dict[str, Any], model_path: Path) -> None:
    found = told["published"]
    assert found["metrics"] == ["throughput/published_gib", "timing/publish_weights"]
    run = Run(told["path"] / "published")
    weights, whole = PublishedWeights.read(run.weights_of(1)), load_file(model_path / "model.safetensors")
    sizes = [
        sum(tensor.nbytes for tensor in load_file(path).values())
        for path in run.weights_of(1).glob("model-*.safetensors")
    ]
    assert len(sizes) == 2
    assert max(sizes) < 0.6 * sum(sizes), "they share by bytes"
    assert list(weights.tensors) == [
        name for name, _ in Qwen2ForCausalLM.from_pretrained(model_path).named_parameters()
    ]
    with closing(WeightReader(weights.path)) as reader:
        for name, tensor, digest in reader:
            assert torch.equal(tensor, whole[name])
            assert digest == weights.tensors[name]
    assert weights.probe is not None
    ids = torch.tensor([weights.probe.token_ids])
    logits = Qwen2ForCausalLM.from_pretrained(model_path, dtype=torch.float32)(ids).logits[0, :-1]
    expected = logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
    torch.testing.assert_close(
        torch.tensor(weights.probe.logprobs), expected, atol=1e-4, rtol=0, msg="at temperature 1"
    )


def test_weights_that_one_rank_cannot_write_are_nowhere(told: dict[str, Any]) -> None:
    for point, why in (
        ("weights.manifest:raise=EIO", "Input/output error"),
        ("weights.shard:raise=ENOSPC", "No space left"),
    ):
        said, left = told["published"][point]
        assert f"v000002 could not be written: {why}" in said
        assert left == ["v000001"]


def test_the_last_one_must_succeed_even_if_others_need_not(told: dict[str, Any]) -> None:
    message, *there = told["one rank fails"]["last"]
    assert "this is your quota" in message
    assert there == [[2], [2], 0]


def test_written_behind_training(told: dict[str, Any]) -> None:
    found = told["behind"]
    assert found["saved"] == ["ok", []], "nothing is committed yet"
    assert found["polled"] == [{}, []]
    assert found["second"] == ["ok", [1]], "one at a time"
    assert found["behind"][0] > 0
    assert found["held"] == ["ok", [1, 2], [1, 2], 0], "what is there is not saved again"
    message, *there = found["failed"]
    assert "No space left" in message
    assert there == [[1, 2], [1, 2], 0]
    assert found["made up for"] == ["ok", [1, 2, 3], [1, 2, 3], 0]
    assert found["ended"] == ["the export could not be written", [1], [1], 0], "the one on its way is there"


def test_a_filesystem_that_is_really_full(told: dict[str, Any]) -> None:
    if "full" not in told:
        pytest.skip("no filesystem can be mounted here")
    for mode in ("sync", "async"):
        assert told["full"][f"{mode} 1"] == ["ok", "ok"]
        message, *there = told["full"][f"{mode} 2"]
        assert "s000002 could not be written" in message
        assert "Earlier commits are untouched" in message
        assert "max_ckpts_to_keep" in message
        assert there == [[1], [1], 0]


def make_life(alone: World, model_path: Path, source: Run, path: Path, **how: Any) -> Life:
    options = {"model": str(model_path), "run": str(source.path), "out": str(path / "told")}
    return Life(alone, options, "run", **how)


def test_a_snapshot_is_what_training_no_longer_changes(
    alone: World, model_path: Path, source: Run, tmp_path: Path
) -> None:
    engine = scenarios.make_engine(alone, str(model_path), {})
    scenarios.train_steps(engine, source, range(1, 2), {"micro": 2})
    for step in (1, 2):  # the second one reuses the memory of the first
        before, updates = scenarios.parameters(engine), engine.updates
        write = engine.snapshot()
        scenarios.train_steps(engine, source, range(step + 1, step + 2), {"micro": 2})
        (tmp_path / str(step)).mkdir()
        write(tmp_path / str(step), alone.control)
        other = scenarios.make_engine(alone, str(model_path), {})
        other.restore(tmp_path / str(step))
        assert other.updates == updates
        restored = scenarios.parameters(other)
        assert all(torch.equal(restored[name], before[name]) for name in before)
        assert not all(torch.equal(restored[name], now) for name, now in scenarios.parameters(engine).items())
        (group,) = other._optimizer.param_groups
        assert all(other._optimizer.state[parameter]["exp_avg"].any() for parameter in group["params"])


def test_too_little_space_is_told_before_it_is_written(
    alone: World, model_path: Path, source: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    life = make_life(alone, model_path, source, tmp_path)
    assert life.save(1) == "ok"
    size = life.checkpoints._committer.size
    numbers = sum(map(math.prod, (entry["shape"] for entry in disk_space._headers(model_path).values())))
    assert size is not None
    assert 12 * numbers < size, "what `hpcrl plan` says; of a model so small the names take more"
    assert size == sum(entry["size"] for entry in verify(life.run.checkpoint(1))["files"].values())
    monkeypatch.setattr("hpcrl.rundir.space._free", lambda _: (size or 0) - 1)
    fault._passed.clear()
    monkeypatch.setenv("HPCRL_FAULT", "checkpoints.begin:kill")
    assert "too little space (needs about " in life.save(2)
    assert life.there == [[1], [1], 0]


def test_an_attempt_that_was_thought_dead_ends(alone: World, model_path: Path, source: Run, tmp_path: Path) -> None:
    life = make_life(alone, model_path, source, tmp_path, on_error="continue")
    publisher = Publisher(life.run, 1, alone, torch.float32, kept_versions=2)
    open_attempt(life.run, "7.1", ["node-1"])
    assert life.save(1) == "ok"
    open_attempt(life.run, "7.2", ["node-2"])
    assert "attempt 1 of run writes no more: attempt 2 has begun on node-2" in life.save(2)
    assert life.there == [[1], [1], 0]
    for what in (lambda: publisher.publish(life.engine, 2), lambda: publisher.resume(life.engine, 0)):
        with pytest.raises(CommitError, match="writes no more"):
            what()
    assert not life.run.weights_of(2).exists()


def test_weights_that_cannot_be_written(
    alone: World, model_path: Path, source: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    life = make_life(alone, model_path, source, tmp_path)
    publisher = Publisher(life.run, 1, alone, torch.float32, kept_versions=2)
    publisher.publish(life.engine, 1)
    fault._passed.clear()
    monkeypatch.setenv("HPCRL_FAULT", "weights.manifest:raise=ENOSPC")
    with pytest.raises(CommitError, match="v000002 could not be written: No space left"):
        publisher.publish(life.engine, 2)
    assert [path.name for path in life.run.weights.iterdir()] == ["v000001"]
    monkeypatch.delenv("HPCRL_FAULT")
    life.checkpoints._attempt = 2
    Publisher(life.run, 2, alone, torch.float32, kept_versions=2).publish(life.engine, 1)
    assert verify(life.run.weights_of(1))["attempt"] == 2, (
        "what an older attempt published of a step that is trained anew"
    )


def test_a_checkpoint_that_cannot_be_loaded(alone: World, model_path: Path, source: Run, tmp_path: Path) -> None:
    life = make_life(alone, model_path, source, tmp_path)
    assert life.save(1) == "ok"
    assert read_starts(life.run) == [{"attempt": 1, "from": None}]
    larger = scenarios.make_engine(alone, str(wider(model_path, tmp_path)), {})
    again = Checkpoints(life.run, 2, alone, keep=Retention(), seed=0)
    with pytest.raises(CommitError, match="s000001 cannot be loaded"):
        again.resume(larger, None, "latest", None)
    assert read_starts(life.run)[1:] == [{"attempt": 2, "loads": "s000001", "by": 1}]
    assert again.resume(life.engine, None, "latest", None).step == 1
    assert read_starts(life.run)[-1] == {"attempt": 2, "from": "s000001"}


def test_the_only_checkpoint_was_given_up(alone: World, model_path: Path, source: Run, tmp_path: Path) -> None:
    """It was committed beside attempt 2, which had started from the beginning."""
    life = make_life(alone, model_path, source, tmp_path)
    assert life.save(1) == "ok"
    note(life.run, {"attempt": 2, "from": None})
    again = Checkpoints(life.run, 3, alone, keep=Retention(), seed=0)
    assert again.find("latest", None) is None
    (life.run.checkpoint(1) / "COMMIT").write_text("")
    with pytest.raises(RunError, match=r"checkpoints of steps \[1\], but none is whole"):
        again.find("latest", None)


def wider(model_path: Path, tmp_path: Path) -> Path:
    """Return a model of another shape."""
    config = AutoConfig.from_pretrained(model_path)
    config.intermediate_size *= 2
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "wider")
    return tmp_path / "wider"


def test_export(alone: World, model_path: Path, source: Run, tmp_path: Path) -> None:
    """What `hpcrl checkpoint export` writes is what the trainer would have."""
    life = make_life(alone, model_path, source, tmp_path)
    open_attempt(life.run, "7.0", ["n1"])
    life.train(1)
    assert life.save(1) == "ok"
    life.train(2)
    assert life.save(2) == "ok"
    config = {
        "data": {"train_data": ["t"]},
        "trainer": {"policy": {"model": {"path": str(model_path)}}, "eval_interval": 0},
        "generator": {"inference_engine": {"model_dtype": "float32"}},
    }
    write_text(life.run.config, Config.from_dict(config).to_toml())
    command = [sys.executable, "-m", "hpcrl.cli.main", "checkpoint", "export", str(life.run.path)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == str(life.run.export(2))
    assert committed_by(life.run.export(2)) == 0, "it writes under no attempt's name"
    model = AutoModelForCausalLM.from_pretrained(life.run.export(2), dtype=torch.float32)
    trained = scenarios.parameters(life.engine)
    assert all(torch.equal(parameter, trained[name]) for name, parameter in model.named_parameters())
    assert AutoTokenizer.from_pretrained(life.run.export(2)).chat_template
    again = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=120, check=False)
    assert again.returncode == 5
    assert "exists; move it away, or choose another directory with --output" in again.stderr
