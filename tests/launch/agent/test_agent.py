"""The agent of a node over stand-ins for the jobs, with real torchrun where it is a trainer's."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hpcrl.config import Config
from hpcrl.launch.agent.agent import NodeAgent
from hpcrl.launch.agent.processes import NodeProcesses
from hpcrl.launch.agent.start import NodeContext
from hpcrl.launch.nodes import Node
from hpcrl.launch.requeue.requeue import ATTEMPTS_HERE
from hpcrl.rundir.checksums import note_checksums
from hpcrl.rundir.commit import write_json, write_text
from hpcrl.rundir.layout import Run
from hpcrl.rundir.ledger import Outcome, open_attempt, read_attempts, read_outcome, report_outcome
from hpcrl.rundir.process_names import JOBS
from hpcrl.runtime.process_status import StatusWriter, read_process_status, read_process_statuses
from hpcrl.runtime.signals import ask_to_stop
from tests.launch.agent.test_pool import end_agent
from tests.paths import QUICKSTART, ROOT

AGENT = """
import sys
from pathlib import Path
from hpcrl.config import Config
from hpcrl.launch.agent import agent
from hpcrl.launch.agent.agent import NodeAgent
from hpcrl.launch.agent.start import NodeContext, listen
from hpcrl.rundir.layout import Run
from hpcrl.rundir.ledger import read_attempts
agent._POLL_S, agent._CONTROL_S = 0.05, 0.1
run = Run(Path(sys.argv[1]))
context = NodeContext(int(sys.argv[2]), ["here", "there", "there"], "local-1", 0, True)
NodeAgent(run, Config.from_toml([run.config]), context, read_attempts(run)[-1], listen()).supervise()
"""
HEAD = """
import os, sys, time
from pathlib import Path
from hpcrl.rundir.layout import Run
from hpcrl.runtime.process_status import StatusWriter, trainer_left
from hpcrl.runtime.heartbeat import Heartbeat
run = Run(Path(sys.argv[1]))
"""


def make_run(tmp_path: Path, *settings: str, **jobs: str) -> Run:
    run = Run(tmp_path / "run")
    write_text(run.config, Config.from_toml([QUICKSTART], settings).to_toml())
    write_text(run.token, "secret\n", mode=0o600)
    open_attempt(run, "local-1", ["here", "there", "there"])
    for name, program in jobs.items():
        write_text(run.code / "jobs" / f"{name}.py", HEAD + program)
    return run


def start(run: Run, node: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", AGENT, str(run.path), str(node)], stdout=subprocess.PIPE)


def supervise(run: Run, node: int = 0) -> Outcome:
    with start(run, node) as agent:
        try:
            said, _ = agent.communicate(timeout=120)
        finally:
            end_agent(agent)
    outcome = read_outcome(run)
    assert outcome is not None, said
    return outcome


def test_a_trainer_that_saved_and_left_does_not_hide_the_controllers_failure(tmp_path: Path) -> None:
    run = make_run(
        tmp_path,
        train="""
process_status = StatusWriter(run, "trainer", 1)
process_status.write("saving")
time.sleep(0.3)
(run.path / "saved").touch()
process_status.write("stopped")
""",
        controller="""
while not trainer_left(run, 1):
    time.sleep(0.1)
time.sleep(1)  # the agent sees the trainer end first
sys.exit("RunError: step 3: no good groups")
""",
    )
    outcome = supervise(run)
    assert (run.path / "saved").exists()
    assert (outcome.kind, outcome.host) == ("failed", "here")
    assert "controller: RunError: step 3: no good groups" in outcome.message


def test_a_trainer_that_dies_after_a_stop_request_is_interrupted(tmp_path: Path) -> None:
    run = make_run(
        tmp_path,
        train="""
from hpcrl.rundir.commit import write_json
write_json(run.stop, {"attempt": 1, "reason": "interrupted"})
time.sleep(1)
os.kill(os.getpid(), 9)
""",
        controller="time.sleep(60)",
    )
    outcome = supervise(run)
    assert (outcome.kind, outcome.message) == ("interrupted", "the trainer ended before it could save")


@pytest.mark.faults_slow
def test_a_torchrun_that_lingers_after_its_ranks_have_saved_is_not_waited_for(tmp_path: Path) -> None:
    run = make_run(
        tmp_path,
        train="""
from hpcrl.rundir.commit import write_json
write_json(run.stop, {"attempt": 1, "reason": "interrupted"})
StatusWriter(run, "trainer", 1).write("stopped")
time.sleep(300)
""",
        controller="time.sleep(60)",
    )
    began = time.monotonic()
    outcome = supervise(run)
    assert (outcome.kind, outcome.message) == ("interrupted", "saved and stopped")
    assert time.monotonic() - began < 60


def test_a_stop_request_before_anything_began(tmp_path: Path) -> None:
    run = make_run(tmp_path, train="time.sleep(60)", controller="time.sleep(60)")
    write_json(run.stop, {"attempt": 1, "reason": "cancelled"})
    assert (supervise(run).kind, supervise(run).message) == ("cancelled", "stopped before it began")


def test_the_meeting_places_of_earlier_attempts_go(tmp_path: Path) -> None:
    """Each attempt left one, and `hpcrl status` read them all."""
    run = make_run(tmp_path, train="time.sleep(60)", controller="time.sleep(60)")
    for attempt in (1, 2):
        write_json(run.rendezvous(attempt), {"number": 1, "address": "127.0.0.1", "port": 1})
        report_outcome(run, attempt, "interrupted", "preempted", "agent-0")
        open_attempt(run, f"local-{attempt + 1}", ["here", "there"])
    write_json(run.stop, {"attempt": 3, "reason": "cancelled"})
    assert supervise(run).kind == "cancelled"
    assert [path.name for path in run.endpoints.glob("rendezvous-*")] == ["rendezvous-3.json"]


def test_a_rank_that_stands_still_ends_the_attempt_with_all_stacks(tmp_path: Path) -> None:
    run = make_run(
        tmp_path,
        "slurm.patience.step_seconds=2",
        train="""
def stand_still():
    time.sleep(60)
Heartbeat(run, 1, "rank-0").beat("step")
stand_still()
""",
        controller="""
heartbeat = Heartbeat(run, 1, "controller")
while True:
    heartbeat.beat("serve")
    time.sleep(0.2)
""",
    )
    outcome = supervise(run)
    assert outcome.kind == "hang"
    assert outcome.message.startswith("rank-0 has made no progress in phase step for")
    assert "in stand_still" in run.stacks(1, "rank-0").read_text()
    assert "in <module>" in run.stacks(1, "controller").read_text()


def test_a_replica_that_fails_is_started_again_and_given_up_in_the_end(tmp_path: Path) -> None:
    run = make_run(
        tmp_path,
        "slurm.replica_restarts=1",
        rollout="""
with (run.path / "starts").open("a") as file:
    file.write("x")
print("hpcrl.errors.SandboxError: the sandbox has ended", file=sys.stderr)
sys.exit(13)  # which of a server of sandboxes means that its node has none
""",
    )
    with start(run, 1) as agent:
        deadline = time.monotonic() + 120
        state = ""
        while not state.startswith("given up"):
            assert time.monotonic() < deadline, state
            time.sleep(0.1)
            state = next(
                (
                    process_status.state
                    for process_status in read_process_statuses(run, 1)
                    if process_status.process == "rollout-0"
                ),
                "",
            )
        assert "SandboxError: the sandbox has ended" in state
        assert (run.path / "starts").read_text() == "xx"
        assert read_outcome(run) is None, "training goes on with the others"
        report_outcome(run, 1, "done", "finished", "agent-0")
        agent.wait(20)


def test_a_replica_that_leaves_though_the_run_goes_on_is_started_again(tmp_path: Path) -> None:
    """Whoever frees memory on a node ends processes politely. One that the controller has told of the end may leave before it is published."""
    run = make_run(tmp_path, rollout='(run.path / "starts").open("a").write("x")')
    starts, status, looks = run.path / "starts", StatusWriter(run, "controller", 1), 0

    def publish() -> None:
        nonlocal looks
        looks += 1
        status.write("serving", url="http://127.0.0.1:9", stop=None, looks=looks)

    publish()
    with start(run, 1) as agent:
        deadline = time.monotonic() + 120
        while not starts.exists():
            assert time.monotonic() < deadline
            time.sleep(0.1)
        publish()
        time.sleep(1.5)
        assert starts.read_text() == "x"
        while starts.read_text() != "xx":
            assert time.monotonic() < deadline
            publish()
            time.sleep(0.2)
        report_outcome(run, 1, "done", "finished", "agent-0")
        agent.wait(60)


@pytest.mark.faults_slow
def test_a_replica_that_knows_of_the_end_before_its_agent_is_not_started_again(tmp_path: Path) -> None:
    """On busy nodes the controller's next process status comes long after its answers."""
    run = make_run(tmp_path, rollout='(run.path / "starts").open("a").write("x")')
    starts = run.path / "starts"
    StatusWriter(run, "controller", 1).write("serving", url="http://127.0.0.1:9", stop=None)
    with start(run, 1) as agent:
        deadline = time.monotonic() + 120
        while not starts.exists():
            assert time.monotonic() < deadline
            time.sleep(0.1)
        time.sleep(15)
        assert starts.read_text() == "x"
        report_outcome(run, 1, "done", "finished", "agent-0")
        agent.wait(60)


def test_a_users_error_on_a_replica_ends_the_attempt(tmp_path: Path) -> None:
    program = 'print("hpcrl.errors.DataError: environment x: no answer", file=sys.stderr)\nsys.exit(4)'
    outcome = supervise(make_run(tmp_path, rollout=program), node=1)
    assert outcome.kind == "failed"
    assert "rollout-0: hpcrl.errors.DataError: environment x: no answer" in outcome.message


REWARD = [
    "environment.env_class=",
    "environment.remote_reward.enable=true",
    "environment.remote_reward.service.model=r",
]
SERVICE = """
(run.path / "starts").open("a").write(os.environ["HPCRL_SERVICE"])
if len((run.path / "starts").read_text()) < 2:
    sys.exit("RuntimeError: out of memory")
StatusWriter(run, "reward-0", 1).write("serving", url="http://127.0.0.1:9")
"""


def test_a_reward_model_that_fails_is_started_again(tmp_path: Path) -> None:
    run = make_run(tmp_path, *REWARD, reward=SERVICE + "time.sleep(60)")
    with start(run, 2) as agent:
        deadline = time.monotonic() + 120
        while not (status := read_process_status(run, "reward-0", 1)) or status.state != "serving":
            assert time.monotonic() < deadline, status
            time.sleep(0.1)
        assert (run.path / "starts").read_text() == "00"
        report_outcome(run, 1, "done", "finished", "agent-0")
        agent.wait(60)


def test_a_run_whose_reward_model_fails_again_and_again_ends(tmp_path: Path) -> None:
    """Every response would fail; the next attempt avoids the node."""
    run = make_run(
        tmp_path, *REWARD, "slurm.replica_restarts=1", reward=SERVICE + 'sys.exit("RuntimeError: no such device")'
    )
    outcome = supervise(run, node=2)
    assert (outcome.kind, outcome.host) == ("failed", "there")
    assert "reward-0: RuntimeError: no such device" in outcome.message
    assert (run.path / "starts").read_text() == "00"


def test_a_part_of_an_engine_on_several_nodes_knows_which_it_is(tmp_path: Path) -> None:
    run = make_run(tmp_path, engine_node='(run.path / os.environ["HPCRL_PART"]).touch()')
    node, context = (
        Node(1, "rollout", 0, (), 0, 0, engine_parts=(3,)),
        NodeContext(1, ["here", "there"], "local-1", 0, True),
    )
    assert node.workers == ["part-3"]
    processes = NodeProcesses(run, Config.from_toml([run.config]), context, 1, node, 0.0)
    try:
        processes.start_worker("part-3")
        deadline = time.monotonic() + 120
        while not (run.path / "3").exists():
            assert time.monotonic() < deadline
            time.sleep(0.1)
    finally:
        processes.end(0.0)


def test_a_hang_has_ranks_write_what_their_collectives_did(tmp_path: Path) -> None:
    """The variables reach the ranks through torchrun; the job stands in for NCCL, which reads a named pipe and then writes a file."""
    run = make_run(
        tmp_path,
        "slurm.patience.step_seconds=2",
        train="""
assert int(os.environ["TORCH_FR_BUFFER_SIZE"]) > 0
assert os.environ["TORCH_NCCL_TRACE_BUFFER_SIZE"] == os.environ["TORCH_FR_BUFFER_SIZE"]
assert os.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "1"
rank = os.environ["RANK"]
pipe = os.environ["TORCH_NCCL_DEBUG_INFO_PIPE_FILE"] + rank + ".pipe"
os.mkfifo(pipe)
reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
Heartbeat(run, 1, "rank-0").beat("step")
while not os.read(reader, 128):
    time.sleep(0.1)
Path(os.environ["TORCH_FR_DUMP_TEMP_FILE"] + rank).write_text("all_reduce")
time.sleep(60)
""",
        controller="""
heartbeat = Heartbeat(run, 1, "controller")
while True:
    heartbeat.beat("serve")
    time.sleep(0.2)
""",
    )
    outcome = supervise(run)
    assert outcome.kind == "hang"
    assert outcome.message.endswith(
        f"; the last collectives of the ranks: {run.collectives(1)} (torchfrtrace {run.collectives(1)})"
    )
    assert (run.collectives(1) / "rank0").read_text() == "all_reduce"


def test_a_cancelled_attempt_is_not_interrupted_after_all(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    config, context = Config.from_toml([run.config]), NodeContext(0, ["here", "there", "there"], "local-1", 0, True)
    agent = NodeAgent(run, config, context, read_attempts(run)[-1], [])
    try:
        for reason in ("interrupted", "cancelled", "interrupted"):
            write_json(run.stop, {"attempt": 1, "reason": reason})
            agent._look_for_stop()
        agent._report_stop("saved and stopped")
    finally:
        agent._end()
    assert not agent._processes.heartbeats.parent.exists(), "its directory"
    assert (outcome := read_outcome(run))
    assert outcome.kind == "cancelled"


@pytest.mark.parametrize(("job", "restarts", "again"), [("7_0.0+1", "0", "1"), ("7_0.1", "1", "0")])
def test_the_next_attempt_of_a_cancelled_run_has_nothing_to_do(
    tmp_path: Path, job: str, restarts: str, again: str
) -> None:
    """Also one in the same allocation, where the request came after the end of the batch script had looked."""
    run = Run(tmp_path / "project" / "run")
    open_attempt(run, "7_0.0", ["n1", "n2"])
    report_outcome(run, 1, "failed", "nothing was heard of n2", "agent-0")
    ask_to_stop(run, 1, "cancelled")
    own = {"ARRAY_JOB_ID": "7", "ARRAY_TASK_ID": "0", "JOB_ID": "7", "JOB_NODELIST": "n1", "JOB_NUM_NODES": "1"}
    own |= {"NTASKS": "1", "PROCID": "0", "LOCALID": "0", "NODEID": "0", "RESTART_COUNT": restarts}
    environment = {f"SLURM_{name}": value for name, value in own.items()}
    environment |= {"SUBMITIT_EXECUTOR": "slurm", ATTEMPTS_HERE: again}
    command = [sys.executable, "-c", f"from hpcrl.launch.agent.agent import main; main({str(run.path)!r})"]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=False)
    assert done.stdout == "attempt 1 ended as cancelled; nothing to do\n", (job, done.stderr)
    assert done.returncode == 0
    assert len(read_attempts(run)) == 1


def test_code_that_somebody_edited_is_not_run(tmp_path: Path) -> None:
    run = make_run(tmp_path, trainer="print('as submitted')")
    study = tmp_path / "study"
    write_text(study / "task.py", "")
    note_checksums(run, {str(study): ["task.py"]})
    write_text(study / "task.py", "print('edited')")
    write_text(run.code / "jobs" / "trainer.py", "print('edited')")
    write_text(run.code / "torch.py", "print('not torch')")
    for left in ("jobs/.trainer.py.swp", "jobs/trainer.py~", "jobs/.nfs0000012", "jobs/__pycache__/trainer.pyc"):
        write_text(run.code / left, "")
    started = {"EXECUTOR": "local", "LOCAL_JOB_ID": "9", "LOCAL_NTASKS": "1", "LOCAL_GLOBALRANK": "0"}
    environment = {**os.environ, **{f"SUBMITIT_{name}": value for name, value in started.items()}}
    command = [sys.executable, "-c", f"from hpcrl.launch.agent.agent import main; main({str(run.path)!r})"]
    assert subprocess.run(command, env=environment, timeout=120, check=False).returncode == 1
    outcome = read_outcome(run)
    assert outcome
    assert outcome.kind == "failed"
    changed = [f"{study}/task.py was changed", "code/jobs/trainer.py was changed", "code/torch.py is new"]
    assert f"{'; '.join(changed)}, since run was submitted or resumed" in outcome.message
    assert "hpcrl resume run" in outcome.message


def test_each_process_of_a_node_has_a_program() -> None:
    node = Node(0, "rollout", 1, (0,), 0, 0, services=(0,), scorers=(0,), engine_parts=(0,), sandboxes=(0,))
    assert JOBS.keys() == {"trainer", *(name.partition("-")[0] for name in node.workers)}
    assert {path.stem for path in (ROOT / "jobs").glob("*.py")}.issuperset(JOBS.values())
