"""Submitting to a slurmctld that is away, or did not say that it took the job (programs stand in for Slurm's); devices of local runs."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from submitit.core.utils import FailedJobError

from hpcrl.config import Config
from hpcrl.errors import DataError, SubmitError
from hpcrl.launch.agent.start import NodeContext, await_attempt
from hpcrl.launch.layouts import all_layouts
from hpcrl.launch.nodes import make_plan
from hpcrl.launch.requeue.requeue import HERE
from hpcrl.launch.submit import executors
from hpcrl.launch.submit.executors import (
    ArrayExecutor,
    Element,
    Submission,
    batch_scripts,
    local_executor,
    slurm_executors,
    submit_with_retry,
)
from hpcrl.launch.submit.requests import describe_requests
from hpcrl.rundir.attempt_config import attempt_config
from hpcrl.rundir.commit import write_text
from tests.paths import QUICKSTART


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory in which `answer` says how often sbatch fails, and how."""
    programs = tmp_path / "bin"
    programs.mkdir()
    taken = tmp_path / "taken"
    scripts = {
        "sbatch": f"echo x >> {tmp_path}/tries\n[ $(wc -l < {tmp_path}/tries) -gt 1 ] && echo Submitted batch job 8 && exit\n"
        f". {tmp_path}/answer",
        "squeue": f"cat {taken} 2> /dev/null; true",
        "scancel": f'echo "$1" >> {tmp_path}/cancelled; rm {taken}',
    }
    for name, text in scripts.items():
        (programs / name).write_text(f"#!/bin/sh\n{text}\n")
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    monkeypatch.setattr(executors, "_RETRY_S", 0.0)
    return tmp_path


def submit(directory: Path) -> str:
    folder = directory / "slurm"
    executor = ArrayExecutor(folder=folder / "%j")
    executor.update_parameters(time=10)
    return submit_with_retry(lambda: executor.map_array(len, ["a"]), folder)[0].job_id


def test_slurmctld_that_is_away(cluster: Path, capsys: pytest.CaptureFixture[str]) -> None:
    away = "sbatch: error: Batch job submission failed: Unable to contact slurm controller (connect failure)"
    (cluster / "answer").write_text(f"echo '{away}' >&2; exit 1")
    assert submit(cluster) == "8_0"
    assert f"hpcrl: {away}; trying again" in capsys.readouterr().err
    assert not (cluster / "cancelled").exists()


def test_job_that_was_taken_without_an_answer_is_not_there_twice(cluster: Path) -> None:
    said = "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation"
    (cluster / "answer").write_text(
        f'for script; do :; done\necho "5_0|PENDING|N/A|None|/elsewhere/.slurm/x/.submission_file_1.sh" > {cluster}/taken\n'
        f'echo "7_[0]|PENDING|N/A|None|$script" >> {cluster}/taken\necho "{said}" >&2; exit 1'
    )
    assert submit(cluster) == "8_0"
    assert (cluster / "cancelled").read_text() == "7\n"


def test_refusal_is_final(cluster: Path) -> None:
    (cluster / "answer").write_text("echo 'sbatch: error: invalid partition specified: nope' >&2; exit 1")
    with pytest.raises(FailedJobError, match="invalid partition"):
        submit(cluster)
    assert (cluster / "tries").read_text() == "x\n"


def local_run(tmp_path: Path, gpus: int) -> Submission:
    """A trainer of one GPU and an engine of one, or none at all."""
    config = Config.from_toml([QUICKSTART], [f"slurm.gpus_per_node={gpus}"])
    return Submission(tmp_path / "project" / ".slurm" / "mine", [Element("mine", config, [])])


@pytest.mark.parametrize(
    ("gpus", "users", "seen"),
    [
        (1, None, "0,1"),
        (1, "0,1", "0,1"),
        (1, "3, 5,6", "3,5"),
        (1, "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6,GPU-1", "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6,GPU-1"),
        (1, "MIG-GPU-8932f937/1/2,MIG-b", "MIG-GPU-8932f937/1/2,MIG-b"),
        (0, "0,1", ""),
    ],
)
def test_devices_of_a_local_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpus: int, users: str | None, seen: str
) -> None:
    """As the processes see them that submitit starts on this machine: a run has what its user has left it, and no more than it asks for."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if users is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", users)
    job = local_executor(local_run(tmp_path, gpus)).submit(os.getenv, "CUDA_VISIBLE_DEVICES")
    assert set(job.results()) == {seen}


def test_local_job_is_there_until_its_agents_have_ended(tmp_path: Path) -> None:
    """SIGTERM to every process of it, as `timeout` and an allocation's time limit send, lets the agents save: it is not lost meanwhile."""
    job = local_executor(local_run(tmp_path, 0)).submit(time.sleep, 1)
    time.sleep(0.2)
    os.kill(int(job.job_id), signal.SIGTERM)
    time.sleep(0.2)
    assert not job.done()
    assert job.results() == [None, None]


@pytest.mark.parametrize("users", ["", "0", "GPU-1"])
def test_too_few_devices_for_a_local_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, users: str) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", users)
    with pytest.raises(SubmitError, match=r"needs 2 GPU\(s\) on this machine"):
        local_executor(local_run(tmp_path, 1))


@pytest.mark.parametrize(
    ("settings", "asked"),
    [
        ([], {}),
        (["slurm.mem_gb=0"], {"mem": "0"}),
        (["slurm.gpus_per_node=8"], {"exclusive": None, "mem": "0", "gpus-per-node": "8"}),
        (["slurm.gpus_per_node=h100:8"], {"exclusive": None, "mem": "0", "gpus-per-node": "h100:8"}),
        (["slurm.gpus_per_node=8", "slurm.mem_gb=900"], {"mem": "900GB", "gpus-per-node": "8"}),
        (["slurm.gpus_per_node=8", "slurm.cpus_per_task=64"], {"cpus-per-task": "64", "gpus-per-node": "8"}),
        (["slurm.gpus_per_node=8", "slurm.exclusive=false"], {"gpus-per-node": "8"}),
        (["slurm.exclusive=true", "slurm.mem_gb=900"], {"exclusive": None, "mem": "900GB"}),
    ],
)
def test_cores_and_memory_of_a_run_on_gpus_are_those_of_its_nodes(
    tmp_path: Path, settings: list[str], asked: dict[str, str | None]
) -> None:
    """Where nothing else is said, sbatch would ask for one core and its share of the memory, whatever the GPUs."""
    submission = Submission(
        tmp_path / ".slurm" / "mine", [Element("mine", Config.from_toml([QUICKSTART], settings), [])]
    )
    (text,) = batch_scripts(submission).values()
    options = dict(re.findall(r"^#SBATCH --([a-z-]+)(?:=(.*))?$", text, re.MULTILINE))
    found = {
        name: options[name] or None
        for name in ("exclusive", "mem", "cpus-per-task", "gpus-per-node")
        if name in options
    }
    assert found == asked
    assert (" --cpu-bind=none " in text) == ("exclusive" in asked), "a site may bind the one task of a node to one core"


def test_each_request_is_a_batch_script_and_the_other_jobs_wait_for_all_of_them(tmp_path: Path) -> None:
    settings = [
        "slurm.partition=main", "slurm.qos=normal", "slurm.time_minutes=60", "slurm.gpus_per_node=h100:8", 'slurm.extra={nice="1"}',
        "slurm.requests.large={}",
        'slurm.requests.spot={partition="spot", qos="low", time_minutes=30, gpus_per_node="a100:8", extra={reservation="x"}}',
        "slurm.elastic.replicas=2", "slurm.upload.by=job", "trainer.upload.s3=all", "trainer.upload.s3_bucket=bucket", "generator.inference_engine.backend=vllm",
    ]  # fmt: skip
    config = Config.from_toml([QUICKSTART], settings)
    scripts = batch_scripts(Submission(tmp_path / ".slurm" / "mine", [Element("mine", config, [])]))
    options = {
        title: dict(re.findall(r"^#SBATCH --([a-z-]+)=(.*)$", text, re.MULTILINE)) for title, text in scripts.items()
    }
    names = ("job-name", "partition", "qos", "time", "gpus-per-node", "nice", "reservation")
    large, spot, pool, upload = options.values()
    assert [*options] == [
        "batch script of request large", "batch script of request spot", "batch script of the elastic pool", "batch script of the upload",
    ]  # fmt: skip
    assert [large.get(name) for name in names] == ["hpcrl-mine-large", "main", "normal", "60", "h100:8", "1", None]
    assert [spot.get(name) for name in names] == ["hpcrl-mine-spot", "spot", "low", "30", "a100:8", "1", "x"]
    assert pool["dependency"].strip("'") == "after:JOB-large_0?after:JOB-spot_0"
    assert upload["dependency"] == "afterany:JOB-large_0:JOB-spot_0"
    assert ["requeue.prologue " in text for text in scripts.values()] == [True, True, False, False]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ([], ["", "", ""]),
        (["slurm.grow_minutes=60"], [" large=3,5 small=2 old=5"] * 3),
        (["slurm.grow_minutes=60", "slurm.requests.old.gpu_memory_gb=40"], [" large=3,5 small=2"] * 2 + [" old=5"]),
        (
            ["slurm.grow_minutes=60", "slurm.gpus_per_node=h100:1", "slurm.requests.old.gpus_per_node=a100:1"],
            [" large=3,5 small=2"] * 2 + [" old=5"],
        ),
    ],
)
def test_requests_give_way_to_larger_ones_on_such_gpus(tmp_path: Path, settings: list[str], words: list[str]) -> None:
    requests = ["slurm.requests.large.nodes=3-5", "slurm.requests.small.nodes=2", "slurm.requests.old.nodes=5"]
    config = Config.from_toml([QUICKSTART], ["trainer.placement.policy_num_nodes=1-4", *requests, *settings])
    scripts = batch_scripts(Submission(tmp_path / ".slurm" / "mine", [Element("mine", config, [])]))
    assert [re.findall(r"requeue\.prologue \S+\.json(.*?) \|\|", text) for text in scripts.values()] == [
        [one] for one in words
    ]
    script = scripts["batch script of request large"]
    assert script.index("while true; do") < script.index("requeue.prologue"), "before each attempt of an allocation"


@pytest.mark.parametrize(("when", "dependency"), [("during", "after:JOB_0"), ("after", "afterany:JOB_0")])
def test_the_evaluation_job_has_a_request_of_its_own(tmp_path: Path, when: str, dependency: str) -> None:
    settings = [
        "slurm.partition=main", "slurm.gpus_per_node=h100:8", "generator.inference_engine.backend=vllm", "generator.inference_engine.tensor_parallel_size=2",
        f'slurm.evaluation={{when="{when}", engines=3, partition="spot", gpu_type="a100", time_minutes=120, time_min_minutes=20, again_minutes=7, cpus_per_task=4}}',
    ]  # fmt: skip
    config = Config.from_toml([QUICKSTART], settings)
    text = batch_scripts(Submission(tmp_path / ".slurm" / "mine", [Element("mine", config, [])]))[
        "batch script of the evaluation"
    ]
    options = dict(re.findall(r"^#SBATCH --([a-z-]+)=(.*)$", text, re.MULTILINE))
    names = ("job-name", "partition", "time", "time-min", "gpus-per-node", "cpus-per-task", "dependency", "nodes")
    expected = ["hpcrl-mine-evaluation", "spot", "120", "20", "a100:2", "4", dependency, "1"]
    assert [options[name].strip("'") for name in names] == expected
    assert options["array"].startswith("0-2")
    assert f"hpcrl.launch.requeue.evaluation {tmp_path}/mine 7 $status" in text


def test_layouts_of_a_request_fit_into_its_gpus(tmp_path: Path) -> None:
    def memory(configs: Sequence[Config]) -> list[str]:
        room = [(config.slurm.gpu_memory_gb or 0) * config.trainer.placement.policy_nodes for config in configs]
        return ["" if each >= 80 else "too little memory" for each in room]

    older = 'slurm.requests.older={gpus_per_node="a100:1", gpu_memory_gb=40, constraint="sxm"}'
    settings = ["trainer.placement.policy_num_nodes=1-4", "slurm.gpus_per_node=h100:1", "slurm.gpu_memory_gb=80"]
    config = Config.from_toml([QUICKSTART], [*settings, "slurm.requests.newer={}", older])
    submission = Submission(tmp_path / "runs" / "p" / ".slurm" / "run", [Element("run", config, [], (memory,))])
    asked = {name: executor.parameters for name, executor in slurm_executors(submission).items()}
    assert [each["nodes"] for each in asked.values()] == ["2-5", "3-5"]
    assert [each["gpus_per_node"] for each in asked.values()] == ["h100:1", "a100:1"]
    assert asked["older"]["constraint"] == "sxm"
    layouts = {name: submission.asked_by(name).elements[0].layouts for name in asked}  # which its agents get
    assert [[layout.nodes for layout in own] for own in layouts.values()] == [[2, 3, 5], [3, 5]]


EIGHT = [
    "slurm.gpus_per_node=h100:8", "trainer.placement.policy_num_gpus_per_node=8", "generator.inference_engine.num_engines=8",
    "slurm.requests.new={}", 'slurm.requests.old={gpus_per_node="a100:4"}',
]  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "nodes", "sizes", "hosts"),
    [
        ([], ["2", "3"], {"slurm.gpus_per_node": 4}, 3),
        (
            ["trainer.placement.policy_num_nodes=1-4", "slurm.grow_minutes=60"],
            ["2-5", "3-6"],
            {"slurm.gpus_per_node": 4, "trainer.placement.policy_num_nodes": 2},
            4,
        ),
    ],
    ids=["a fixed size", "a range"],
)
def test_a_request_with_fewer_gpus_on_each_node_has_layouts_of_its_own(
    tmp_path: Path, settings: list[str], nodes: list[str], sizes: dict[str, int], hosts: int
) -> None:
    """Eight engines have two of its nodes, and the trainer all of the others' GPUs."""
    config = Config.from_toml([QUICKSTART], [*EIGHT, *settings])
    submission = Submission(tmp_path / "p" / ".slurm" / "run", [Element("run", config, [])])
    scripts = batch_scripts(submission).values()
    assert [re.findall(r"^#SBATCH --nodes=(.*)$", text, re.MULTILINE)[0] for text in scripts] == nodes
    asked = [re.findall(r"^#SBATCH --gpus-per-node=(.*)$", text, re.MULTILINE)[0] for text in scripts]
    assert asked == ["h100:8", "a100:4"]
    assert not any(
        "prologue" in line and " new=" in line and " old=" in line for text in scripts for line in text.splitlines()
    )
    run = submission.runs[0]
    write_text(run.config, config.to_toml())
    layouts = submission.asked_by("old").layouts
    attempt = await_attempt(run, NodeContext(0, ["n"] * hosts, "7_0.0", 0, False), layouts)
    assert (attempt.sizes, attempt.idle) == (sizes, [])
    own = attempt_config(run)
    assert [node.gpus for node in make_plan(own)] == [4] * hosts
    assert own.trainer.placement.policy_ranks == 4 * sizes.get("trainer.placement.policy_num_nodes", 1)
    assert own.replicas_per_node == 4
    assert attempt_config(run, 7) == config.at({}).largest()


def test_a_request_on_whose_nodes_no_layout_works_is_refused_with_the_reason(tmp_path: Path) -> None:
    config = Config.from_toml([QUICKSTART], [*EIGHT, "slurm.replicas_per_node=8"])
    submission = Submission(tmp_path / "p" / ".slurm" / "run", [Element("run", config, [])])
    expected = r"(?s)slurm\.requests\.old: no layout of the run works on its nodes.*left out: slurm\.replicas_per_node: 8 replicas need 8 GPUs"
    with pytest.raises(DataError, match=expected):
        batch_scripts(submission)


def test_requests_are_described_with_the_nodes_that_they_ask_for() -> None:
    """The table of the run names no range, since no job asks for it."""
    settings = ["trainer.placement.policy_num_nodes=1-4", "slurm.requests.small={nodes=2}"]
    config = Config.from_toml([QUICKSTART], [*EIGHT, *settings])
    names = config.slurm.requests
    layouts = {name: all_layouts(config, request=name) for name in names}
    new, old, table, columns, *rows, small = describe_requests(config.slurm, layouts)
    assert "request new: partition of the cluster, 2-5 nodes, 60 minutes, h100:8 GPUs" in new
    assert "request old: partition of the cluster, 3-6 nodes, 60 minutes, a100:4 GPUs" in old
    assert "request small: partition of the cluster, 2 nodes, " in small
    assert "sbatch" not in table
    assert columns.split() == ["nodes", "gpus_per_node", "policy_num_nodes"]
    assert [row.split()[:3] for row in rows] == [["3", "4", "1"], ["4", "4", "2"], ["5", "4", "3"], ["6", "4", "4"]]
    config = config.with_overrides(["slurm.requests.large={nodes=9}"])
    with pytest.raises(
        DataError, match=r"slurm\.requests\.large\.nodes: expected nodes for which the run has a layout"
    ):
        describe_requests(config.slurm, layouts | {"large": layouts["new"]})


def test_requests_ask_for_the_nodes_of_different_layouts(tmp_path: Path) -> None:
    def nodes(*requests: str) -> list[str]:
        config = Config.from_toml([QUICKSTART], ["trainer.placement.policy_num_nodes=1-4", *requests])
        scripts = batch_scripts(Submission(tmp_path / ".slurm" / "mine", [Element("mine", config, [])])).values()
        return [found for text in scripts for found in re.findall(r"^#SBATCH --nodes=(.*)$", text, re.MULTILINE)]

    requests = ["slurm.requests.any={}", 'slurm.requests.large={nodes="4-9"}', "slurm.requests.small={nodes=2}"]
    assert nodes(*requests) == ["2-5", "5", "2"]
    with pytest.raises(
        DataError, match=r"slurm\.requests\.a\.nodes: expected nodes for which the run has a layout \(2, 3, 5\)"
    ):
        nodes("slurm.requests.a={nodes=4}")


def test_a_pool_of_typed_gpus_asks_for_as_many_as_a_replica_needs(tmp_path: Path) -> None:
    settings = ["slurm.gpus_per_node=h100:8", "slurm.elastic.replicas=2"]
    config = Config.from_toml(
        [QUICKSTART],
        [*settings, "generator.inference_engine.backend=vllm", "generator.inference_engine.tensor_parallel_size=2"],
    )
    assert (
        "#SBATCH --gpus-per-node=h100:2\n"
        in batch_scripts(Submission(tmp_path / ".slurm" / "mine", [Element("mine", config, [])]))[
            "batch script of the elastic pool"
        ]
    )


@pytest.mark.parametrize(("failures", "status", "calls"), [(2, 0, ["1 2", "1 2 2 n[1-2]"]), (99, 5, ["1 2", "1"])])
def test_a_batch_script_asks_for_the_nodes_that_are_left_until_slurm_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failures: int, status: int, calls: list[str]
) -> None:
    """Without an answer it leaves the next attempt to the queue: the end of the script is asked again, without HPCRL_LEAST_NODES."""
    note = f"echo $1 $HPCRL_LEAST_NODES $SLURM_JOB_NUM_NODES $SLURM_NODELIST >> {tmp_path}/calls"
    programs = {
        "squeue": f"echo x >> {tmp_path}/asked; [ $(wc -l < {tmp_path}/asked) -gt {failures} ] && echo '2 n[1-2]'",
        "sleep": "true",
        "finish": f"{note}; [ $HPCRL_LEAST_NODES ] || exit 5; [ $SLURM_NODELIST ] || exit {HERE}",
    }
    for name, line in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    for name in ("SLURM_JOB_NUM_NODES", "SLURM_NODELIST", "SLURM_JOB_NODELIST"):
        monkeypatch.delenv(name, raising=False)
    lines = ["export HPCRL_LEAST_NODES=2", "while true; do", "(exit 1)", *executors._until_decided("finish")[:-1]]
    script = "\n".join([*lines, *executors._next_attempt_here("finish")])
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == status, done.stderr
    assert (tmp_path / "calls").read_text().splitlines() == calls
