"""Layouts of runs with ranges: what is asked of Slurm, and what an attempt takes of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from hpcrl.config import Config
from hpcrl.errors import ConfigError, RunError
from hpcrl.launch.agent.held_nodes import HeldNodes
from hpcrl.launch.agent.idle import await_end
from hpcrl.launch.agent.start import NodeContext, await_attempt
from hpcrl.launch.layouts import (
    AttemptLayout,
    all_layouts,
    describe_layouts,
    layouts_for,
    unmeasured_layouts,
    usable_layouts,
)
from hpcrl.launch.nodes import make_plan
from hpcrl.launch.requeue.requeue import HERE
from hpcrl.launch.submit.executors import Element, Submission, batch_scripts, local_executor
from hpcrl.launch.submit.models import rank_problems
from hpcrl.launch.submit.submit import submit
from hpcrl.planning.layouts import memory_problems_apart
from hpcrl.rundir.allocations import read_allocations
from hpcrl.rundir.attempt_config import attempt_config
from hpcrl.rundir.commit import write_text
from hpcrl.rundir.layout import Run
from hpcrl.rundir.ledger import Attempt, open_attempt, outcome_of, read_attempts, report_outcome
from hpcrl.runtime.process_status import read_process_statuses
from tests.paths import QUICKSTART
from tests.processes import errors_without_reader

NODES, ENGINES = "trainer.placement.policy_num_nodes", "generator.inference_engine.num_engines"
MEGATRON = QUICKSTART.with_name("quickstart_megatron.toml")


def load(*settings: str, file: Path = QUICKSTART) -> Config:
    return Config.from_toml([file], settings)


def used(config: Config) -> list[tuple[int, ...]]:
    """Return nodes and sizes of the layouts that attempts take without measures."""
    layouts = unmeasured_layouts(usable_layouts(all_layouts(config, rank_problems)))
    return [(each.nodes, *each.sizes.values()) for each in layouts]


@pytest.mark.parametrize(
    ("settings", "layouts"),
    [
        ([], [(2,)]),
        ([f"{NODES}=1-4"], [(2, 1), (3, 2), (5, 4)]),
        ([f"{ENGINES}=1-3"], [(2, 1), (3, 2), (4, 3)]),
        ([f"{NODES}=1-4", f"{ENGINES}=1-4"], [(2, 1, 1), (3, 2, 1), (4, 2, 2), (5, 2, 3), (6, 4, 2), (7, 4, 3), (8, 4, 4)]),
        ([f"{NODES}=1-2", f"{ENGINES}=2-8", "trainer.placement.colocate_all=true",
          "trainer.placement.policy_num_gpus_per_node=4"], [(1, 1, 4), (2, 2, 8)]),
        ([f"{NODES}=2-4", "trainer.policy.sequence_parallel_size=2"], [(3, 2), (5, 4)]),
        ([f"{NODES}=1-4", f"{ENGINES}=4-8", "slurm.replicas_per_node=4"],
         [(2, 1, 4), (3, 2, 4), (4, 2, 8), (5, 4, 4), (6, 4, 8)]),
    ],
)  # fmt: skip
def test_each_number_of_nodes_has_the_layout_that_shares_them_most_evenly(
    settings: list[str], layouts: list[tuple[int, ...]]
) -> None:
    assert used(load(*settings)) == layouts


@pytest.mark.parametrize(
    ("settings", "layouts"),
    [
        (["slurm.nodes=2-6"], [(2, 1, 1), (3, 2, 1), (4, 2, 2), (5, 2, 3), (6, 4, 2)]),  # 3 ranks cannot share the batches
        (["slurm.nodes=2-8", f"{ENGINES}=3"], [(2, 1, 1), (3, 1, 2), (4, 1, 3), (5, 1, 4), (6, 2, 4), (7, 2, 5), (8, 2, 6)]),
        (["slurm.nodes=4", "slurm.replicas_per_node=2", f"{ENGINES}=4"], [(4, 1, 6)]),
        (["slurm.nodes=1-2", f"{ENGINES}=4", "trainer.placement.colocate_all=true",
          "trainer.placement.policy_num_gpus_per_node=4"], [(1, 1, 4), (2, 2, 8)]),
    ],
)  # fmt: skip
def test_nodes_are_divided_in_the_ratio_of_the_sizes(settings: list[str], layouts: list[tuple[int, ...]]) -> None:
    config = load(*settings)
    assert used(config) == layouts
    largest: dict[str, int] = dict(zip((NODES, ENGINES), layouts[-1][1:], strict=True))
    assert config.largest() == config.at(largest)
    assert config.at(largest).slurm.nodes is None


@pytest.mark.parametrize(
    ("settings", "nodes", "sizes"),
    [
        ([f"{NODES}=1-4", f"{ENGINES}=1-4"], 5, [(1, 4), (4, 1), (2, 3)]),
        (["slurm.nodes=2-6"], 6, [(2, 4), (4, 2)]),
        (["slurm.nodes=2-6"], 5, [(1, 4), (4, 1), (2, 3)]),
        ([f"{NODES}=1-2", f"{ENGINES}=1-4", "slurm.replicas_per_node=4"], 2, [(1, 4)]),  # the others leave engines out
        ([f"{NODES}=1-4"], 3, [(2,)]),
    ],
)
def test_the_layouts_among_which_measures_choose(settings: list[str], nodes: int, sizes: list[tuple[int, ...]]) -> None:
    layouts = layouts_for(usable_layouts(all_layouts(load(*settings), rank_problems)), nodes)
    assert [tuple(layout.sizes.values()) for layout in layouts] == sizes


def test_parallel_sizes_of_megatron_leave_sizes_out() -> None:
    tensor = [f"trainer.{role}.megatron_config.tensor_model_parallel_size=2" for role in ("policy", "ref")]
    layouts = all_layouts(load(f"{NODES}=1-4", "trainer.placement.policy_num_gpus_per_node=1", *tensor, file=MEGATRON))
    assert [layout.sizes[NODES] for layout in usable_layouts(layouts)] == [2, 4]
    assert "share each sample, which does not divide the 3 ranks" in layouts[2].problem


def test_the_table_names_what_is_left_out_and_why() -> None:
    title, names, *rows = describe_layouts(all_layouts(load(f"{NODES}=2-4")))
    assert "sbatch --nodes=3-5" in title
    assert names.split() == ["nodes", "policy_num_nodes"]
    assert [row.split()[:2] for row in rows] == [["3", "2"], ["4", "3"], ["5", "4"]]
    assert ["cannot be shared equally by 3 trainer ranks" in row for row in rows] == [False, True, False]
    assert describe_layouts(all_layouts(load())) == []
    both = describe_layouts(all_layouts(load(f"{NODES}=2-4", f"{ENGINES}=1-2")))
    assert [row.split() for row in both[2:]] == [["3", "2", "1"], ["4", "2", "2"], ["5", "4", "1"], ["6", "4", "2"]]
    *rows, last = describe_layouts(all_layouts(load("slurm.nodes=5-6")))[2:]
    assert [row.strip() for row in rows] == [
        "5                 2            3  or 1 4, 4 1",
        "6                 4            2  or 2 4",
    ]
    assert last.strip().startswith("or: ")


PRINTS = """
from dataclasses import dataclass
from hpcrl.config import Config

print("imported")

@dataclass(frozen=True, kw_only=True)
class Mine(Config):
    pass
"""


def with_module(tmp_path: Path, name: str, text: str, *settings: str) -> Config:
    """Return the quickstart with a class of the user's."""
    (tmp_path / f"{name}.py").write_text(text)
    return load(f"config_class={name}:Mine", f'python_path=["{tmp_path}"]', *settings)


def test_sizes_whose_ranks_have_too_little_memory_are_left_out(tmp_path: Path) -> None:
    """Of a model as small as this one, what FSDP gathers is more than what sharding saves. What a module of the user's prints is not read."""
    memory = [f"{NODES}=1-4", "slurm.gpus_per_node=1", "slurm.gpu_memory_gb=0.0286"]
    config = with_module(tmp_path, "printing_config", PRINTS, *memory)
    found = {layout.sizes[NODES]: layout.problem for layout in all_layouts(config, memory_problems_apart)}
    assert [nodes for nodes, problem in found.items() if not problem] == [1], found
    assert found[4] == "a rank needs 29.6 MiB of 29.3 MiB (slurm.gpu_memory_gb)"


def test_memory_that_could_not_be_compared_leaves_no_size_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A module of the user's writes past sys.stdout; the model is none of this machine, so torch is not imported."""
    text, model = f"{PRINTS}\nimport os\nos.write(1, b'more')\n", "trainer.policy.model.path=nobody/nothing"
    config = with_module(tmp_path, "parting_config", text, model)
    other = config.with_overrides(["trainer.seed=7"])
    assert [memory_problems_apart([each, each]) for each in (config, other)] == [["", ""]] * 2
    told = capsys.readouterr().err.count("whether ranks have enough memory was not checked: exit status 0, output")
    assert told == 1, "of a sweep over seeds once"


def test_an_attempt_takes_the_largest_layout_that_has_room() -> None:
    layouts = [AttemptLayout(2, {NODES: 1}), AttemptLayout(3, {NODES: 2}), AttemptLayout(5, {NODES: 4})]
    found = [layouts_for(layouts, nodes) for nodes in (1, 2, 3, 4, 5, 6)]
    assert [[layout.nodes for layout in own] for own in found] == [[2], [2], [3], [3], [5], [5]]


def test_sbatch_is_asked_for_the_range(tmp_path: Path) -> None:
    def script(*settings: str) -> list[str]:
        submission = Submission(tmp_path / "project" / ".slurm" / "mine", [Element("mine", load(*settings), [])])
        return batch_scripts(submission)["batch script"].splitlines()

    lines = script(f"{NODES}=1-4", "slurm.time_minutes=90", "slurm.time_min_minutes=20")
    assert {"#SBATCH --nodes=2-5", "#SBATCH --time=90", "#SBATCH --time-min=20"} <= set(lines)
    assert not any(line.startswith("#SBATCH --ntasks") for line in lines), "it would limit the nodes to the least"
    assert any(line.startswith("srun") and " --ntasks-per-node=1 " in line for line in lines)
    fixed = script()
    assert "#SBATCH --ntasks-per-node=1" in fixed
    assert "#SBATCH --nodes=2" in fixed
    assert not any("time-min" in line for line in fixed)


def test_the_batch_script_starts_another_attempt_on_the_nodes_that_are_left(tmp_path: Path) -> None:
    """Its own lines, with stand-ins for the programs that they call: the end of the first attempt asks for another one, the second's does not."""
    element = Element("mine", load(f"{NODES}=1-4"), [])
    script = batch_scripts(Submission(tmp_path / "project" / ".slurm" / "mine", [element]))["batch script"]
    programs = {
        "srun": 'echo "srun $SLURM_JOB_NUM_NODES $SLURM_NNODES $SLURM_JOB_NODELIST $SLURM_OVERLAP $HPCRL_ATTEMPTS_HERE $HPCRL_LEAST_NODES"',
        "squeue": 'echo "3 n[1,3-4]"',
        "python": f'echo "$2 $4"; [ "$HPCRL_ATTEMPTS_HERE" ] && exit 5; exit {HERE}',
    }
    for name, line in programs.items():
        write_text(tmp_path / name, f"#!/bin/bash\n{line}\n")
        (tmp_path / name).chmod(0o755)
    given = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "0"}
    given |= {"SLURM_JOB_NUM_NODES": "4", "SLURM_NNODES": "4", "SLURM_JOB_NODELIST": "n[1-4]"}
    text = script.replace(sys.executable, str(tmp_path / "python"))
    done = subprocess.run(["bash", "-c", text], env=given, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 5, done.stderr
    assert [line.split() for line in done.stdout.splitlines()] == [
        ["srun", "4", "4", "n[1-4]", "2"],
        ["hpcrl.launch.requeue.epilogue", "0"],
        ["srun", "3", "3", "n[1,3-4]", "1", "1", "2"],
        ["hpcrl.launch.requeue.epilogue", "0"],
    ]


def test_elements_of_a_job_array_have_the_same_nodes(tmp_path: Path) -> None:
    """The one batch script asks for them, and a check beside the rules may leave out layouts of one element alone."""

    def check(configs: Sequence[Config]) -> list[str]:
        return [
            "too large" if each.trainer.seed == 2 and each.trainer.placement.policy_num_nodes == 4 else ""
            for each in configs
        ]

    def submission(*seeds: int) -> Submission:
        given = [(f"mine.{seed}", f"trainer.seed={seed}") for seed in seeds]
        elements = [Element(name, load(f"{NODES}=1-4", own), [own], (check,)) for name, own in given]
        return Submission(tmp_path / "runs" / "project" / ".slurm" / "mine", elements)

    assert "#SBATCH --nodes=2-5" in batch_scripts(submission(1, 3))["batch script"].splitlines()
    for make in (batch_scripts, local_executor, lambda given: submit(given, local=True)):
        with pytest.raises(
            ConfigError, match=r"element 1 \(trainer.seed=2\): works on 2, 3 nodes, element 0 on 2, 3, 5; "
        ):
            make(submission(1, 2))
    assert not (tmp_path / "runs").exists(), "nothing is left behind"


def test_the_sizes_of_an_attempt_are_written_down_for_its_processes(tmp_path: Path) -> None:
    run, config = Run(tmp_path / "run"), load(f"{NODES}=1-4")
    run.path.mkdir()
    run.config.write_text(config.to_toml())
    assert attempt_config(run) == config.at({NODES: 4})
    hosts = ["n1", "n2", "n3", "n4"]
    attempt = await_attempt(run, NodeContext(0, hosts, "7_0.0", 0, False), usable_layouts(all_layouts(config)))
    assert (attempt.hosts, attempt.idle, attempt.sizes) == (hosts[:3], ["n4"], {NODES: 2})
    assert attempt.layout == "3 node(s): policy_num_nodes 2; idle: n4"
    assert await_attempt(run, NodeContext(3, hosts, "7_0.0", 0, False)) == attempt
    open_attempt(run, "7_0.1", ["n1", "n2"], {NODES: 1})
    assert [attempt_config(run, number) for number in (1, 2)] == [config.at({NODES: 2}), config.at({NODES: 1})]
    assert attempt_config(run).trainer.placement.policy_ranks == 1


def test_nodes_that_the_layout_does_not_use_go_back_to_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """scontrol leaves scripts where it is called, and the account has them until then."""
    (tmp_path / "scontrol").write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/asked\npwd >> {tmp_path}/asked\n')
    (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    run, hosts = Run(tmp_path / "run"), ["n1", "n2", "n3", "n4"]
    run.path.mkdir()
    layouts = usable_layouts(all_layouts(load(f"{NODES}=1-4")))
    context = NodeContext(0, hosts, "7_0.0", 0, False)
    attempt = await_attempt(run, context, layouts)
    assert (attempt.hosts, attempt.idle, attempt.returned) == (hosts[:3], [], ["n4"])
    assert attempt.layout == "3 node(s): policy_num_nodes 2; given back: n4"
    command, folder = (tmp_path / "asked").read_text().splitlines()
    assert (command, Path(folder).exists()) == ("update JobId=7_0 NodeList=n1,n2,n3", False)
    HeldNodes(run, context, attempt).assign(make_plan(load(f"{NODES}=2")), lends=False)
    (allocation,) = read_allocations(run)
    assert [node.host for node in allocation.hosts] == hosts
    assert [node.until > 0 for node in allocation.hosts] == [False, False, False, True]


def test_an_attempt_of_a_run_without_ranges_has_all_nodes(tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    run.path.mkdir()
    attempt = await_attempt(run, NodeContext(0, ["n1", "n2"], "7_0.0", 0, False), [AttemptLayout(2)])
    assert (attempt.hosts, attempt.idle, attempt.sizes, attempt.layout) == (["n1", "n2"], [], {}, "")


@pytest.fixture
def left_over(tmp_path: Path) -> tuple[Run, NodeContext, Attempt]:
    """An attempt on the first of two nodes, and the agent of the second one."""
    run, hosts = Run(tmp_path / "run"), ["n1", "n2"]
    run.path.mkdir()
    return run, NodeContext(1, hosts, "7_0.0", 0, False), open_attempt(run, "7_0.0", hosts[:1], {NODES: 1}, hosts[1:])


def test_a_node_that_is_left_over_waits_for_the_end_of_the_attempt(
    left_over: tuple[Run, NodeContext, Attempt], capsys: pytest.CaptureFixture[str]
) -> None:
    """Also while the filesystem fails; the first element of an elastic pool has the process status agent-1."""
    run = left_over[0]
    run.outcomes.symlink_to("outcomes")
    good = threading.Timer(0.5, run.outcomes.unlink)
    end = threading.Timer(1.5, lambda: report_outcome(run, 1, "done", "finished", "agent-0"))
    good.start()
    end.start()
    assert not await_end(*left_over)
    assert not end.is_alive()
    printed = capsys.readouterr().out
    assert "the layout of attempt 1 has 1 of 2 nodes" in printed
    assert "waiting for the filesystem: " in printed
    assert [status.process for status in read_process_statuses(run)] == ["agent-idle-1"]


def test_errors_of_a_node_that_is_left_over_are_none_of_the_attempt(
    left_over: tuple[Run, NodeContext, Attempt],
) -> None:
    run = left_over[0]
    write_text(run.status_file("controller"), "damaged")
    slurm = {"SLURM_JOB_ID": "8", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "0", "SLURM_JOB_NODELIST": "n[1-2]"}
    slurm |= {"SLURM_NTASKS": "2", "SLURM_PROCID": "1", "SUBMITIT_EXECUTOR": "slurm"}
    command = [sys.executable, "-c", f"from hpcrl.launch.agent.agent import main; main({str(run.path)!r})"]
    assert subprocess.run(command, env={**os.environ, **slurm}, check=False, timeout=120).returncode == 1
    assert f"{run.status_file('controller')} is damaged" in run.log(1, "agent-1").read_text()
    assert outcome_of(run, 1) is None


def test_sizes_that_are_no_numbers_are_a_damaged_line(tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    run.path.mkdir()
    line = {"number": 1, "job": "7_0.0", "hosts": ["n1"], "started": 0.0}
    run.attempts.write_text(json.dumps(line) + "\n")
    assert read_attempts(run)[0].sizes == {}, "as a run of an earlier version has it"
    run.attempts.write_text(json.dumps({**line, "sizes": {NODES: "2"}}) + "\n")
    with pytest.raises(RunError, match="'sizes' is"):
        read_attempts(run)


@pytest.mark.parametrize("asked", [b"[]", b"["], ids=["whole", "half a question"])
def test_a_process_whose_asker_was_killed_ends_quietly(asked: bytes) -> None:
    """The answer has no reader any more."""
    command = [sys.executable, "-m", "hpcrl.planning.layouts"]
    assert errors_without_reader(command, asked) == b""


def catches_sigint(process: str) -> bool:
    """Return whether Python has started in the process that compares memory."""
    try:
        command = Path(f"/proc/{process}/cmdline").read_bytes()
        caught = Path(f"/proc/{process}/status").read_text().partition("SigCgt:")[2].split()[0]
    except (OSError, IndexError):  # it has ended
        return False
    return b"-m\0hpcrl.planning.layouts" in command and bool(int(caught, 16) >> (signal.SIGINT - 1) & 1)


def test_ctrl_c_ends_the_process_that_compares_memory_quietly() -> None:
    """The terminal sends SIGINT to all processes of its foreground group."""
    asks = "from hpcrl.planning.layouts import memory_problems_apart as ask\ntry:\n    ask([])\nexcept KeyboardInterrupt:\n    exit(130)"
    with subprocess.Popen(
        [sys.executable, "-c", asks], stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        children, comparing = Path(f"/proc/{process.pid}/task/{process.pid}/children"), list[str]()
        deadline = time.monotonic() + 60
        while not comparing:
            assert time.monotonic() < deadline
            comparing = list(filter(catches_sigint, children.read_text().split()))
        os.killpg(process.pid, signal.SIGINT)
        assert process.stderr
        assert process.stderr.read() == "", "until both have ended"
        assert process.wait() == 130
