"""Saves that are cut short, refused, damaged or made by the dead, and filesystems that are not this one (scenarios 26 to 31)."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from signal import SIGKILL, SIGTERM
from tempfile import TemporaryDirectory

import pytest

from hpcrl.rundir.ledger import read_attempts, read_outcomes
from tests.faults.history import assert_ended, assert_nothing_lost, last_saved
from tests.faults.scenario import START_S, Scenario, fault, in_first_attempt
from tests.filesystem.cluster import views
from tests.filesystem.view import FORBIDDEN, Behaviour
from tests.processes import processes_of, send


def largest(checkpoint: Path) -> Path:
    return max(checkpoint.glob("*.distcp"), key=lambda path: path.stat().st_size)


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(content)


POISONS: dict[str, Callable[[Path], object]] = {
    "truncated": lambda checkpoint: largest(checkpoint).write_bytes(largest(checkpoint).read_bytes()[:-100]),
    "changed_byte": lambda checkpoint: _flip(largest(checkpoint)),
    "empty_file": lambda checkpoint: largest(checkpoint).write_bytes(b""),
    "no_mark": lambda checkpoint: (checkpoint / "COMMIT").unlink(),
    "no_manifest": lambda checkpoint: (checkpoint / "manifest.json").unlink(),
}


@pytest.mark.faults_slow
@pytest.mark.parametrize("poison", POISONS)
def test_26_poisoned_newest_checkpoint(scenario: Scenario, poison: str) -> None:
    """What cannot be trusted is passed over with a message, and the one before it is used."""
    run = scenario.submit()
    scenario.reach(run, 7)
    scenario.knobs(latency_s=600)
    scenario.wait(lambda: last_saved(run) == (6, 0), "the second checkpoint", 30, run)
    POISONS[poison](run.checkpoint(6))
    send([scenario.rank(run)], SIGKILL)
    scenario.wait(lambda: len(read_attempts(run)) == 2, "the second attempt", START_S, run)
    scenario.knobs()
    assert_nothing_lost(scenario, run)
    said = run.log(2, "trainer-0").read_text()
    assert "continuing after step 3, " in said
    assert "s000006" in said, "it says what it passed over"


def _points_by_attempt(points: list[str]) -> str:
    """Return the shell line that arms one fault point per attempt."""
    cases = " ".join(f"{restart}) {fault(point)};;" for restart, point in enumerate(points))
    return f'case "${{SLURM_RESTART_COUNT:-0}}" in {cases} esac'


@pytest.mark.parametrize(
    "points",
    [
        pytest.param(["written", "renamed"], id="two", marks=pytest.mark.faults_slow),
        pytest.param(["begin", "manifest", "synced", "committed", "trash"], id="others", marks=pytest.mark.faults_slow),
    ],
)
def test_27_killed_at_lines_of_the_commit(scenario: Scenario, points: list[str]) -> None:
    """The trainer kills itself in its saves, at one line after the other: there always is a commit to go on from.

    Its checkpoints lie below another root than the run.
    """
    armed = [f"checkpoints.{point}@{2 if attempt == 0 else 1}:kill" for attempt, point in enumerate(points)]
    keep = {"trainer.max_ckpts_to_keep": 2, "trainer.ckpt_interval": 2, "slurm.crash_budget": 4}
    root = scenario.path / "scratch"
    run = scenario.submit(keep | {"slurm.checkpoint_root": str(root)}, setup=[_points_by_attempt(armed)])
    assert_nothing_lost(scenario, run)
    kinds = [outcome.kind for outcome in read_outcomes(run)]
    assert kinds == ["failed"] * len(points) + ["done"]
    assert run.checkpoints.resolve() == (root / run.project / run.name / "checkpoints").resolve()
    assert not [path for path in run.checkpoints.iterdir() if path.name.startswith((".tmp", ".trash"))]


@pytest.mark.faults_slow
def test_28_the_filesystem_of_checkpoints_is_not_mounted_on_a_node(scenario: Scenario) -> None:
    """The attempt ends before training, and is not requeued: /dev/shm of a node is its own."""
    with TemporaryDirectory(dir="/dev/shm") as root:
        run = scenario.submit({"slurm.checkpoint_root": root})
        outcome = scenario.outcome(run, 1)
    assert outcome.message.startswith(
        f"DataError: {run.checkpoints} leads to {root}/faults/run/checkpoints, which is not there on n"
    )
    assert_ended(scenario, run, "failed")
    assert len(read_attempts(run)) == 1


@pytest.mark.faults_slow
@pytest.mark.parametrize("error", ["ENOSPC", "EDQUOT", "EIO", "EROFS"])
def test_28_filesystem_refuses_a_save(scenario: Scenario, error: str) -> None:
    """The commit before stays; the attempt ends with a message that says what to do, and the next one goes on."""
    run = scenario.submit(setup=[in_first_attempt(fault(f"checkpoints.written@2:raise={error}"))])
    outcome = scenario.outcome(run, 1)
    assert outcome.kind == "failed"
    assert "Earlier commits are untouched" in outcome.message
    assert outcome.step == 3
    assert_nothing_lost(scenario, run)


@pytest.mark.faults_slow
def test_28_filesystem_refuses_a_save_and_training_goes_on(scenario: Scenario) -> None:
    run = scenario.submit({"trainer.ckpt_on_error": "continue"}, setup=[fault("checkpoints.written@2:raise=ENOSPC")])
    assert_nothing_lost(scenario, run)
    assert len(read_attempts(run)) == 1
    assert "training goes on without this checkpoint" in run.log(1, "trainer-0").read_text()


@contextmanager
def seen_through(scenario: Scenario, behaviour: Behaviour, login: Behaviour | None = None) -> Iterator[Counter[str]]:
    """Let each node of a scenario, and the login node, see the runs through a view of its own; count what happened on all of them."""
    runs, total = scenario.path / "runs", Counter[str]()
    runs.mkdir()
    outer = json.loads((scenario.cluster.directory / "cluster.json").read_text())["pid"]
    (first,) = Path(f"/proc/{outer}/task/{outer}/children").read_text().split()
    nodes = {node: scenario.daemons(node)[0] for node in scenario.nodes}
    with views(runs, {"ctl": int(first)}, login or behaviour) as here, views(runs, nodes, behaviour) as there:
        yield total
    for count in (*here, *there):
        total += count


NFS = Behaviour(names_s=5, absent_s=5, attributes_s=5)


@pytest.mark.nodes(3)
@pytest.mark.faults_slow
def test_29_files_are_seen_late_on_other_nodes(scenario: Scenario) -> None:
    """As with NFS, with a trainer of two nodes: only the second one is told to stop, later a rank is killed."""
    with seen_through(scenario, NFS) as counts:
        run = scenario.submit({"trainer.placement.policy_num_nodes": 2})
        scenario.reach(run, 4)
        send([scenario.agent(run, 1)], SIGTERM)
        assert scenario.outcome(run, 1).kind == "interrupted"
        scenario.reach(run, 8)
        send([scenario.rank(run, 1)], SIGKILL)
        assert_nothing_lost(scenario, run, same_values=False)
        assert [outcome.kind for outcome in read_outcomes(run)] == ["interrupted", "failed", "done"]
    assert counts["stale"] > 10


@pytest.mark.faults_slow
def test_29_listings_and_replaced_files_are_seen_late_too(scenario: Scenario) -> None:
    """Worse than NFS: what a listing, or opening a file or a directory shows may be ten seconds old."""
    late = Behaviour(names_s=10, absent_s=10, attributes_s=10, close_to_open=False, late_listings=True, stale=False)
    with seen_through(scenario, late) as counts:
        run = scenario.submit()
        scenario.reach(run, 4)
        scenario.preempt()
        assert scenario.outcome(run, 1).kind == "interrupted"
        assert_nothing_lost(scenario, run)
    assert counts["late"] > 10


@pytest.mark.faults_slow
def test_29_a_slow_filesystem(scenario: Scenario) -> None:
    """Each call takes 20 ms, unless the node remembers the answer."""
    with seen_through(scenario, replace(NFS, metadata_delay_s=0.02, data_delay_s=0.02)) as counts:
        run = scenario.submit()
        scenario.wait(run.batch(4).exists, "three steps", 400, run)
        scenario.preempt()
        assert scenario.outcome(run, 1).kind == "interrupted"
        scenario.wait(run.batch(8).exists, "seven steps", 400, run)
        assert_nothing_lost(scenario, run)
    assert counts["operations"] > 10_000


@pytest.mark.faults_slow
def test_29_a_filesystem_that_forbids(scenario: Scenario) -> None:
    """No hard links, no locks, no syncs of directories, no changes of modes and owners; listings without types; short writes."""
    with seen_through(scenario, replace(NFS, errors=FORBIDDEN, types=False, short=0.2)) as counts:
        run = scenario.submit()
        scenario.reach(run, 4)
        assert scenario.hpcrl("requeue", "run").returncode == 0
        scenario.outcome(run, 1)
        assert_nothing_lost(scenario, run)
    assert min(counts[what] for what in ("LINK", "FSYNCDIR", "short")) > 0


RARE = {
    "OPEN": ("ESTALE", 1e-3), "READ": ("EIO", 5e-4), "LOOKUP": ("EIO", 1e-4), "WRITE": ("EIO", 1.5e-3), "FSYNC": ("EIO", 1.5e-3),
    "WRITEBACK": ("EDQUOT", 1.5e-3), "RENAME": ("EIO", 1.5e-3),
}  # fmt: skip
TRIED_S = 900.0


@pytest.mark.faults_slow
def test_29_a_filesystem_that_fails_now_and_then(scenario: Scenario) -> None:
    """Each attempt that an error ends says which file it was, and the next one goes on."""
    with seen_through(scenario, replace(NFS, errors=RARE), login=NFS) as counts:
        run = scenario.submit({"slurm.crash_budget": 100})
        scenario.wait(lambda: not scenario.queued(run), "the run leaves the queue", TRIED_S, run)
        assert_nothing_lost(scenario, run)
    assert sum(counts[what] for what in RARE) > 0
    refused = [outcome for outcome in read_outcomes(run) if "CommitError" in outcome.message]
    assert all(str(run.path) in outcome.message.partition("(log: ")[0] for outcome in refused)


@pytest.mark.nodes(3)
@pytest.mark.faults_slow
def test_30_an_attempt_that_was_thought_dead(scenario: Scenario) -> None:
    """The network loses the trainer's node in the middle of a save: the next attempt runs elsewhere, and the old one, which is alive
    and wakes up later, can commit nothing."""
    zombie = in_first_attempt(fault("checkpoints.written@2:sleep=140"))  # the next attempt begins 80 s after the save
    run = scenario.submit(setup=[zombie], pinned=False)
    scenario.wait(lambda: list(run.checkpoints.glob(".tmp-s000006*")), "the second save", START_S, run)
    (lost, *_) = read_attempts(run)[0].hosts
    scenario.knobs(latency_s=1.0)
    scenario.slurm("ip", "link", "set", lost, "down")
    try:
        scenario.wait(lambda: len(read_attempts(run)) == 2, "the second attempt", 150, run)
        assert lost not in read_attempts(run)[1].hosts
        scenario.outcome(run, 2)
    finally:
        scenario.slurm("ip", "link", "set", lost, "up")
    # its batch script and srun are ended by Slurm, which looks only every few minutes whether a node is back
    scenario.wait(lambda: not processes_of(run), "the old attempt is gone", 300, run)
    assert_nothing_lost(scenario, run)
    for path in run.checkpoints.glob("s*/manifest.json"):
        manifest = json.loads(path.read_text())
        assert manifest["attempt"] == (1 if manifest["step"] <= 3 else 2), path


@pytest.mark.faults_slow
def test_31_a_clock_that_is_behind(scenario: Scenario) -> None:
    """The second attempt's first node lives ten minutes in the past: TensorBoard and process statuses do not mind."""
    skew = Path(__file__).parent / "skew"
    run = scenario.submit(
        setup=[
            f"export PYTHONPATH='{skew}':$PYTHONPATH",
            'if [ -n "$SLURM_RESTART_COUNT" ]; then export SKEW_S=-600; fi',
        ]
    )
    scenario.reach(run, 4)
    scenario.slurm("scontrol", "requeue", scenario.job_of(run))
    scenario.outcome(run, 2)
    assert_nothing_lost(scenario, run)
    first, second = read_attempts(run)
    assert second.started < first.started - 300, "the clock was behind"
