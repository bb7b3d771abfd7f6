"""The parts of a bench that start and end processes: measurements by real ranks, and a kill."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hpcrl.cli.main import main
from hpcrl.errors import ConfigError, RunError
from hpcrl.launch.bench import kill
from hpcrl.launch.bench.experiment import make_experiment
from hpcrl.launch.bench.measure import measure_nodes
from hpcrl.rundir.layout import Run
from tests.launch.attach.test_profile import PROCESS


def test_a_process_is_killed_by_its_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, beats = Run(tmp_path / "run"), tmp_path / "beats"
    run.path.mkdir()
    beats.mkdir()
    (tmp_path / "train.py").write_text(PROCESS)
    environment = {**os.environ, "HPCRL_ATTEMPT": "1", "HPCRL_HEARTBEAT": str(beats)}
    command = [sys.executable, str(tmp_path / "train.py"), str(run.path), "rank-0"]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) as process:
        assert process.stdout
        process.stdout.readline()
        with pytest.raises(SystemExit, match="rank-1 of run does not run on"):
            kill.main(str(run.path), "1", "rank-1")
        before = time.time()
        kill.main(str(run.path), "1", "rank-0")
        assert process.wait(60) == -9
    assert before <= float(capsys.readouterr().out) <= time.time()


@pytest.mark.faults_slow
def test_ranks_measure_this_machine(tmp_path: Path) -> None:
    bench, config = make_experiment("b", [], [f"slurm.root={tmp_path}"], nodes=2, minutes=5, model=None)
    nodes = measure_nodes(bench, config, 2, local=True)
    assert (nodes.ranks, len(nodes.hosts), nodes.torn, nodes.wrong) == (2, 1, 0, [])
    assert nodes.reads > 0
    assert nodes.bus_bandwidth > 0
    assert len(nodes.tokens_per_second) == 3
    assert list(nodes.generated_per_second) == ["5_5", "5_75", "75_5"]
    assert all(speed > 0 for speed in nodes.generated_per_second.values())
    assert not list(bench.path.glob("probe-*"))


@pytest.mark.faults_slow
def test_what_the_ranks_print_is_in_the_error(tmp_path: Path) -> None:
    bench, config = make_experiment(
        "b", [], [f"slurm.root={tmp_path}"], nodes=2, minutes=5, model=str(tmp_path / "none")
    )
    with pytest.raises(RunError, match=f"(?s)the nodes could not be measured .*{tmp_path}/none"):
        measure_nodes(bench, config, 2, local=True)


def test_a_bench_that_gets_no_nodes_leaves_its_log_and_no_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("sbatch", "srun"):
        (tmp_path / name).write_text(
            f"#!/bin/sh\necho \"$@\" > {tmp_path}/{name}.words\necho 'no such partition' >&2\nexit 1\n"
        )
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    words = ["bench", f"slurm.root={tmp_path}", "slurm.gpus_per_node=8", "trainer.run_name=b", "--minutes", "15"]
    assert main(words) == 5
    assert "--time=15 " in (tmp_path / "srun.words").read_text()
    assert "no such partition" in capsys.readouterr().err
    assert sorted(path.name for path in (tmp_path / ".bench" / "bench" / "b").iterdir()) == [
        "bench.toml",
        "nodes.log",
        "prompts.jsonl",
    ]


def test_an_experiment_is_made_once_and_of_one_request(tmp_path: Path) -> None:
    words = [f"slurm.root={tmp_path}", "trainer.run_name=mine"]
    bench, _ = make_experiment("b", [], words, nodes=2, minutes=5, model=None)
    assert bench.path.name == "mine"
    with pytest.raises(RunError, match="exists from another bench"):
        make_experiment("b", [], words, nodes=2, minutes=5, model=None)
    with pytest.raises(ConfigError, match=r"slurm\.requests: a bench asks for nodes once"):
        make_experiment("c", [], [*words, "slurm.requests.spot.partition=p"], nodes=2, minutes=5, model=None)
