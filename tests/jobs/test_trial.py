"""A trial of real runs: a learning rate that teaches nothing is found, and its runs stop themselves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpcrl.cli.main import main
from hpcrl.observe.trial.plan import find_trial
from hpcrl.rundir.ledger import read_outcome
from tests.paths import QUICKSTART


@pytest.mark.slow
def test_a_worse_learning_rate_is_stopped_by_its_own_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "good.toml").write_text("")
    (tmp_path / "slow.toml").write_text("[trainer.policy.optimizer_config]\nlr = 1e-6\n")
    root, settings = tmp_path / "runs", ["trainer.max_steps=30", "trainer.eval_interval=4", "trainer.ckpt_interval=30"]
    recipes = [str(tmp_path / "good.toml"), str(tmp_path / "slow.toml")]
    main(
        [
            "trial",
            *recipes,
            "--base",
            str(QUICKSTART),
            "--seeds",
            "3",
            "--name",
            "lr",
            "--local",
            "--follow",
            f"slurm.root={root}",
            *settings,
        ]
    )
    capsys.readouterr()
    assert main(["trial", "status", "lr", "--root", str(root), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["state"] == "decided"
    assert [(one["other"], one["verdict"]) for one in found["pairs"]] == [("slow", "worse")]
    folder = find_trial("lr", root)
    for recipe, kind in (("good", "done"), ("slow", "cancelled")):
        for name in folder.read().recipes[recipe]:
            outcome = read_outcome(folder.run(name))
            assert outcome is not None
            assert outcome.kind == kind, outcome
    assert len(folder.read_looks()) < 5
