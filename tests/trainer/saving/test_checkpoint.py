"""Save, die, resume, reshard: against a run that was never interrupted, under real torchrun."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemReader

from hpcrl.errors import CommitError, DataError, RunError
from hpcrl.rundir.checkpoints import Retention, set_aside_after
from hpcrl.rundir.commit import committed, unfenced, verify, write_text
from hpcrl.rundir.layout import Run, step_of, version_of
from hpcrl.rundir.ledger import report_outcome
from hpcrl.trainer.distributed import World
from hpcrl.trainer.saving.checkpoint import Checkpoints
from tests.trainer import scenarios
from tests.trainer.launcher import run_ranks
from tests.trainer.material import load_weights, make_batch, make_run, run_of_two
from tests.trainer.ranks import Ranks

CHANGED = {"name": "Adam", "implementation": "for-loop", "eps": 1e-3, "adam_betas": [0.5, 0.6], "weight_decay": 0.25}
ADAM = {
    "decoupled_weight_decay": False, "fused": False, "foreach": False, "eps": 1e-3, "betas": (0.5, 0.6), "weight_decay": 0.25
}  # fmt: skip


def life(model_path: Path, run: Path, out: Path, **options: Any) -> dict[str, Any]:
    return {
        "model": str(model_path),
        "run": str(run),
        "out": str(out),
        "micro": 2,
        "attempt": 1,
        "saves": [],
        **options,
    }


@pytest.fixture(scope="module")
def lives(tmp_path_factory: pytest.TempPathFactory, model_path: Path, two: Ranks) -> Path:
    """Two ranks train 4 steps, and then once more the last two, from the checkpoint of step 2."""
    path = tmp_path_factory.mktemp("lives")
    run = make_run(path / "whole")
    for step in range(1, 5):
        make_batch(run, step, groups=4, size=3)
    whole = life(model_path, run.path, path / "whole.json", until=4, saves=[2, 4])
    resumed = life(model_path, path / "resumed", path / "resumed.json", until=4, saves=[4], attempt=2, keep=1)
    rewind = {"run": str(run.path), "to": str(path / "resumed"), "steps": [2]}
    todo = [("lifetime", whole), ("rewind", rewind), ("lifetime", resumed)]
    two.play([(f"scenarios:{name}", options) for name, options in todo])
    return path


def steps(path: Path, out: str) -> list[dict[str, float]]:
    return json.loads((path / f"{out}.json").read_text())


def started(path: Path, out: str) -> dict[str, Any]:
    return json.loads((path / f"{out}.started").read_text())


def losses(updates: list[dict[str, float]]) -> list[float]:
    return [update["final_loss"] / update["tokens"] for update in updates]


def test_contents_of_a_checkpoint(lives: Path) -> None:
    run = Run.open(lives / "whole")
    assert committed(run.checkpoints, step_of) == [2, 4]
    manifest = verify(run.checkpoint(4))
    facts = {name: manifest[name] for name in ("step", "cursor", "world_size", "batch")}
    assert facts == {"step": 4, "cursor": 16, "world_size": 2, "batch": "batches/s000004.json"}
    assert {"rng-0.safetensors", "rng-1.safetensors", ".metadata"} <= set(manifest["files"])
    assert manifest["carried"] == {"trained": 4.0}
    saved = FileSystemReader(run.checkpoint(4)).read_metadata().state_dict_metadata
    assert "updates" in saved, "learning rates follow from it"
    parameters = [name.removeprefix("model.") for name in saved if name.startswith("model.")]
    for name in parameters:
        if not name.endswith("lm_head.weight"):  # tied to the embedding, whose moments it shares
            assert {f"optimizer.state.{name}.{moment}" for moment in ("exp_avg", "exp_avg_sq", "step")} <= set(saved)


def test_resumed_is_uninterrupted(lives: Path) -> None:
    assert started(lives, "resumed")["step"] == 2
    assert started(lives, "resumed")["carried"] == {"trained": 2.0}
    resumed, expected = steps(lives, "resumed"), steps(lives, "whole")[4:]
    assert losses(resumed) == pytest.approx(losses(expected), abs=1e-6)
    assert [update["lr"] for update in resumed] == [update["lr"] for update in expected]
    run = Run.open(lives / "resumed")
    assert committed(run.checkpoints, step_of) == [2, 4], "keep=1 still keeps two"
    assert committed(run.weights, version_of) == [3, 4]
    assert verify(run.weights_of(3))["attempt"] == 2, "weights of the discarded timeline are written anew"


def test_killed_while_saving_then_resharded(
    lives: Path, model_path: Path, tmp_path: Path, alone: World, two: Ranks
) -> None:
    """A rank dies while step 3 is saved; one rank goes on from 2 and saves 3; two ranks go on from that."""
    path = tmp_path / "run"
    scenarios.rewind(alone, {"run": str(lives / "whole"), "to": str(path), "steps": [2]})
    run, expected = Run.open(path), losses(steps(lives, "whole"))
    killed = life(model_path, path, tmp_path / "killed.json", until=3, saves=[3], dies_saving=[3], attempt=2)
    assert run_ranks(2, json.dumps([("lifetime", killed)])).returncode != 0
    assert committed(run.checkpoints, step_of) == [2]
    assert len(list(run.checkpoints.glob(".tmp-*"))) == 1

    scenarios.lifetime(alone, life(model_path, path, tmp_path / "one.json", until=3, saves=[3], attempt=3))
    assert started(tmp_path, "one")["step"] == 2
    assert losses(steps(tmp_path, "one")) == pytest.approx(expected[4:6], abs=1e-6)
    assert not list(run.checkpoints.glob(".tmp-*"))

    on = life(model_path, path, tmp_path / "two.json", until=4, saves=[4], attempt=4)
    said = two.play([("scenarios:lifetime", on)])
    assert started(tmp_path, "two")["step"] == 3
    assert losses(steps(tmp_path, "two")) == pytest.approx(expected[6:8], abs=1e-6)
    assert "random state derived from seed" in said


def test_ranks_share_what_is_to_be_hashed(lives: Path, alone: World, tmp_path: Path, two: Ranks) -> None:
    """A checkpoint is found whole; then a file of the one is damaged that the second rank hashed, and one of the other by the first."""
    scenarios.rewind(alone, {"run": str(lives / "whole"), "to": str(tmp_path / "run"), "steps": [2, 4]})
    run = Run.open(tmp_path / "run")

    def find() -> tuple[list[Any], list[Any], str]:
        said = two.play([("saving.life:finding", {"run": str(run.path), "out": str(tmp_path / "found")})])
        first, second = (json.loads((tmp_path / f"found.{rank}").read_text()) for rank in range(2))
        assert first[0] == second[0], "ranks agree"
        return first[1], second[1], f"{first[0]}\n{said}"

    def damage(path: Path) -> None:
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)

    mine, others, said = find()
    assert str(run.checkpoint(4)) in said
    assert "s000004 verified by 2 ranks" in said
    files = verify(run.checkpoint(4))["files"]
    assert sorted(mine + others) == sorted(f"checkpoints/s000004/{name}" for name in files), "each file once"
    shares = [sum(files[Path(name).name]["size"] for name in share) for share in (mine, others)]
    assert min(shares) > 0.4 * sum(shares)

    damaged = run.path / others[0]
    damage(damaged)
    mine, _, said = find()
    assert str(run.checkpoint(2)) in said
    assert f"checkpoint skipped: {damaged}: checksum differs" in said

    damage(run.path / next(name for name in mine if "s000002" in name))
    *_, said = find()
    assert "none is whole any more" in said


def test_copies_and_frozen_parameters_are_saved_and_other_optimizer_settings_hold(
    model_path: Path, tmp_path: Path, alone: World
) -> None:
    """Four ranks with two copies save step 1; one rank goes on with the optimizer as it is then configured."""
    run = run_of_two(tmp_path / "run", groups=4, size=3)
    frozen = {"freeze_pattern": ["embed_tokens", "layers.0"]}
    copies = {"policy": {"fsdp_config": {"fsdp_size": 2}, **frozen}}
    saved = life(model_path, run.path, tmp_path / "saved.json", until=1, saves=[1], trainer=copies, micro=1)
    whole = life(model_path, run.path, tmp_path / "on.json", until=2, attempt=2, trainer=copies, micro=1)
    done = run_ranks(4, json.dumps([("lifetime", saved), ("lifetime", whole)]))
    assert done.returncode == 0, done.stderr
    assert set(load_weights(run.weights_of(1))) == set(load_file(model_path / "model.safetensors"))

    alike = {"policy": {"optimizer_config": {"implementation": "foreach"}, **frozen}}
    scenarios.lifetime(alone, life(model_path, run.path, tmp_path / "alike.json", until=2, attempt=3, trainer=alike))
    assert losses(steps(tmp_path, "alike")) == pytest.approx(losses(steps(tmp_path, "on")), abs=1e-6)

    engine = scenarios.make_engine(
        alone, str(model_path), {"trainer": {"policy": {"optimizer_config": CHANGED, **frozen}}}
    )
    engine.restore(run.checkpoint(1))
    (group,) = engine._optimizer.param_groups
    assert {name: group[name] for name in ADAM} == ADAM
    moments = [engine._optimizer.state[parameter]["exp_avg"] for parameter in group["params"]]
    assert len(moments) < len(list(engine._model.parameters())), "what is frozen has no state"
    assert all(moment.abs().max() > 0 for moment in moments)

    bf16 = {"policy": {"fsdp_config": {"mixed_precision": {"master_dtype": "bf16"}}, **frozen}}
    other = scenarios.make_engine(alone, str(model_path), {"trainer": bf16})
    other.restore(run.checkpoint(1))
    for name, parameter in scenarios.parameters(engine).items():
        assert torch.equal(scenarios.parameters(other)[name], parameter.bfloat16()), name


def test_other_settings_and_another_number_of_ranks(
    lives: Path, model_path: Path, tmp_path: Path, alone: World
) -> None:
    """Two ranks saved; one goes on, each time with another setting of its strategy, in the background too."""
    expected = losses(steps(lives, "whole"))[4:6]
    settings = {
        "offloaded": {"policy": {"fsdp_config": {"cpu_offload": True}}},
        "recomputed": {"gradient_checkpointing": True},
        "unsharded": {"policy": {"fsdp_config": {"reshard_after_forward": False}}, "use_sample_packing": False},
    }
    for attempt, (name, trainer) in enumerate(settings.items(), start=2):
        path = tmp_path / name
        scenarios.rewind(alone, {"run": str(lives / "whole"), "to": str(path), "steps": [2]})
        how = {"trainer": trainer, "attempt": attempt, "save_mode": "async"}
        scenarios.lifetime(alone, life(model_path, path, tmp_path / "a.json", until=3, saves=[3], **how))
        assert started(tmp_path, "a")["step"] == 2
        assert losses(steps(tmp_path, "a")) == pytest.approx(expected, abs=1e-6), name
        assert committed(Run.open(path).checkpoints, step_of) == [2, 3]


def test_random_state_is_restored_or_derived(lives: Path, model_path: Path, tmp_path: Path, alone: World) -> None:
    path = tmp_path / "run"
    scenarios.rewind(alone, {"run": str(lives / "whole"), "to": str(path), "steps": [4]})
    options = life(model_path, path, tmp_path / "a.json", until=4)
    drawn = []
    for _ in range(2):  # two ranks saved it, one loads it: the same derived state each time
        torch.manual_seed(len(drawn))
        scenarios.lifetime(alone, options)
        drawn.append(started(tmp_path, "a")["random"])
    assert drawn[0] == drawn[1]

    shutil.rmtree(path / "checkpoints")
    Run(path).committed.unlink()
    torch.manual_seed(11)
    scenarios.lifetime(alone, {**options, "until": 1, "saves": [1]})
    expected = torch.rand(3).tolist()
    scenarios.lifetime(alone, {**options, "until": 1})
    assert started(tmp_path, "a")["random"] == expected


def test_where_training_starts(lives: Path, tmp_path: Path, alone: World, caplog: pytest.LogCaptureFixture) -> None:
    fresh, whole = make_run(tmp_path / "fresh"), Run.open(lives / "whole")
    checkpoints = Checkpoints(fresh, 1, alone, keep=Retention(), seed=0)
    assert checkpoints.find("latest", None) is None
    assert checkpoints.find("from_path", str(whole.checkpoint(2))) == whole.checkpoint(2)
    with pytest.raises(RunError, match=r"set trainer\.resume_path"):
        checkpoints.find("from_path", None)
    with pytest.raises(RunError, match="nowhere is not a checkpoint; expected an existing directory named sNNNNNN"):
        checkpoints.find("from_path", str(tmp_path / "nowhere"))
    (tmp_path / "s000007").mkdir()
    with pytest.raises(CommitError, match="never committed"):
        checkpoints.find("from_path", str(tmp_path / "s000007"))

    shutil.copytree(whole.checkpoints, fresh.checkpoints)
    assert checkpoints.find("from_path", str(tmp_path / "nowhere")) == fresh.checkpoint(4), "a run's own come first"
    assert checkpoints.find("none", None) is None, "its own checkpoints do not count"
    write_text(fresh.checkpoint(4) / "rng-0.safetensors", "damaged")
    assert checkpoints.find("latest", None) == fresh.checkpoint(2)
    assert "rng-0.safetensors" in caplog.text
    write_text(fresh.checkpoint(2) / "rng-0.safetensors", "damaged")
    with pytest.raises(RunError, match=r"steps \[2, 4\], but none is whole"):
        checkpoints.find("latest", None)

    report_outcome(fresh, 1, "failed", "why", "agent-0")
    shutil.rmtree(fresh.checkpoints)
    for mode in ("latest", "from_path"):
        with pytest.raises(DataError, match=r"had a checkpoint of step 4, and .* holds none any more"):
            checkpoints.find(mode, str(whole.checkpoint(2)))


def test_attempt_that_never_continues_trains_from_step_0_again(
    lives: Path, model_path: Path, tmp_path: Path, alone: World
) -> None:
    path = tmp_path / "run"
    scenarios.rewind(alone, {"run": str(lives / "whole"), "to": str(path), "steps": [2, 4]})
    options = life(model_path, path, tmp_path / "a.json", until=1, saves=[1], attempt=2, mode="none")
    scenarios.lifetime(alone, options)
    assert started(tmp_path, "a")["step"] == 0
    assert losses(steps(tmp_path, "a")) == pytest.approx(losses(steps(lives, "whole")[:2]), abs=1e-6)
    run = Run.open(path)
    assert committed(run.checkpoints, step_of) == [1], "the next attempt must not find those of the one before"
    assert sorted(path.name for path in run.checkpoints.glob(".*")) == [".given-up-s000002.2", ".given-up-s000004.2"]


def test_what_a_start_gave_up_is_set_aside(lives: Path, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    shutil.copytree(lives / "whole" / "checkpoints", run.checkpoints)
    set_aside_after(run, 5, run.checkpoint(2), unfenced, print)
    assert sorted(path.name for path in run.checkpoints.glob("*s0*")) == [".given-up-s000004.5", "s000002"]


def test_too_few_to_keep_is_said(tmp_path: Path, alone: World, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        Checkpoints(make_run(tmp_path / "run"), 1, alone, keep=Retention(1), seed=0)
    assert "the newest 2 are kept" in caplog.text
