"""The replicas of a node make one copy of a version, whoever of them is killed, and leave nothing behind."""

from __future__ import annotations

import errno
import multiprocessing
import os
import signal
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from hpcrl.data.weight_files import PublishedWeights
from hpcrl.errors import CommitError, RunError
from hpcrl.rollout.weights.copies import NodeCopies
from hpcrl.rollout.weights.fetch import fetch
from hpcrl.rundir.commit import write_text
from hpcrl.rundir.layout import Run
from hpcrl.runtime.scratch import remove_abandoned
from tests.rollout.material import make_model, publish, wait_for

FORK = multiprocessing.get_context("fork")
REPLICAS = 8


@pytest.fixture
def run(tmp_path: Path) -> Run:
    run = Run(tmp_path / "run")
    write_text(run.token, "secret\n", mode=0o600)
    return run


@pytest.fixture
def local(tmp_path: Path) -> Path:
    """The node's own disk."""
    return tmp_path / "local" / "disk"


@pytest.fixture
def versions(run: Run) -> list[PublishedWeights]:
    models = [make_model(run.path.parent / str(seed), seed) for seed in (0, 2, 4)]
    return [publish(model, run.weights_of(number), number) for number, model in enumerate(models, 1)]


@pytest.fixture
def copies(local: Path, run: Run) -> Iterator[NodeCopies]:
    copies = NodeCopies(local, run, 1)
    yield copies
    copies.close()


def copied(local: Path) -> list[str]:
    """Return the versions that are copied, whole."""
    return sorted(path.parts[-3].partition("-")[0] for path in local.glob("hpcrl-weights-*/v*/files/COMMIT"))


class Replica:
    """A process that holds a version until it is told to end, or killed."""

    def __init__(self, local: Path, run: Run, weights: PublishedWeights, fault: str = "", attempt: int = 1) -> None:
        self._mine, its = FORK.Pipe()
        self.process: BaseProcess = FORK.Process(target=_replica, args=(its, local, run, weights, fault, attempt))
        self.process.start()

    def holds(self) -> Path | None:
        """Return the copy, or None where it has none after half a second."""
        return self._mine.recv() if self._mine.poll(0.5) else None

    def awaited(self) -> Path:
        assert self._mine.poll(60)
        return self._mine.recv()

    def end(self) -> None:
        if self.process.is_alive():
            self._mine.send("end")
        self.process.join(60)
        assert self.process.exitcode is not None


def _replica(its: Connection, local: Path, run: Run, weights: PublishedWeights, fault: str, attempt: int) -> None:
    os.environ["HPCRL_FAULT"] = fault
    copies = NodeCopies(local, run, attempt)
    its.send(copies.hold(weights).path)
    its.recv()
    copies.close()


def test_one_copy_for_all_replicas_of_a_node(
    run: Run, local: Path, versions: list[PublishedWeights], capfd: pytest.CaptureFixture[str]
) -> None:
    replicas = [Replica(local, run, versions[0], "weights.copied:sleep=1") for _ in range(REPLICAS)]
    places = {replica.awaited() for replica in replicas}
    (place,) = places
    assert capfd.readouterr().out.count("fault point weights.copied") == 1, "the others found it copied"
    assert place.is_relative_to(local)
    found = PublishedWeights.read(place)
    assert (found.version, found.digest) == (1, versions[0].digest)
    name = "model-00001.safetensors"
    assert (place / name).read_bytes() == (versions[0].path / name).read_bytes()
    for replica in replicas:
        assert local.exists()
        replica.end()
    assert not list(local.iterdir()), "the last one removed it"


def test_a_replica_that_is_killed_while_it_copies(run: Run, local: Path, versions: list[PublishedWeights]) -> None:
    first = Replica(local, run, versions[0], "weights.copied:stop")
    (staging,) = wait_for(lambda: list(local.glob("hpcrl-weights-*/v*/.tmp-*")), 60, "it does not copy")
    second = Replica(local, run, versions[0], attempt=2)
    assert second.holds() is None, "it waits for the first"
    assert first.process.pid
    os.kill(first.process.pid, signal.SIGKILL)
    place = second.awaited()
    assert PublishedWeights.read(place).digest == versions[0].digest
    assert not staging.exists(), "of an earlier attempt"
    first.process.join(60)
    second.end()
    assert not list(local.iterdir())


def test_what_killed_replicas_left_is_removed_by_the_next_agent(
    run: Run, local: Path, versions: list[PublishedWeights]
) -> None:
    living, other = Replica(local, run, versions[0]), Replica(local, run, versions[0])
    assert living.awaited() == other.awaited()
    other.process.kill()
    other.process.join(60)
    assert remove_abandoned(local) == [], "one of them lives"
    living.process.kill()
    living.process.join(60)
    assert copied(local) == ["v000001"]
    (left,) = local.iterdir()
    assert remove_abandoned(local) == [left]
    assert not list(local.iterdir())


def test_versions_that_none_holds_make_way(
    run: Run, local: Path, versions: list[PublishedWeights], copies: NodeCopies
) -> None:
    slow = Replica(local, run, versions[0])
    slow.awaited()
    copies.hold(versions[1])
    assert copied(local) == ["v000001", "v000002"]
    copies.hold(versions[2])
    assert copied(local) == ["v000001", "v000003"], "the slow one still loads its own"
    slow.end()
    copies.release()
    assert copied(local) == ["v000001", "v000003"], "a replica that starts again finds the newest"
    copies.hold(versions[1])
    assert copied(local) == ["v000002"]


def test_another_policy_of_the_same_number_is_another_copy(
    run: Run, versions: list[PublishedWeights], copies: NodeCopies
) -> None:
    first = copies.hold(versions[0])
    again = publish(run.path.parent / "4", run.path / "elsewhere" / "v000001", 1, attempt=2)
    assert copies.hold(again).path != first.path


def test_a_copy_that_is_not_whole_any_more_is_made_anew(versions: list[PublishedWeights], copies: NodeCopies) -> None:
    place = copies.hold(versions[0]).path
    (file,) = place.glob("*.safetensors")
    file.unlink()
    assert copies.hold(versions[0]).path == place
    assert file.read_bytes() == (versions[0].path / file.name).read_bytes()


def test_what_is_read_wrongly_is_refused(local: Path, versions: list[PublishedWeights], copies: NodeCopies) -> None:
    (file,) = versions[0].path.glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(CommitError, match=r"v000001 holds other tensors than were published: \S+$"):
        fetch(versions[0].path, copies)
    assert copied(local) == []
    assert fetch(versions[1].path, copies).version == 2


def test_a_full_disk_costs_the_copy_only(
    local: Path,
    versions: list[PublishedWeights],
    copies: NodeCopies,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("hpcrl.faults._passed", Counter())
    monkeypatch.setenv("HPCRL_FAULT", "weights.copied:raise=ENOSPC")
    assert fetch(versions[0].path, copies).path == versions[0].path
    warning = capsys.readouterr().out.splitlines()[-1]
    assert warning.startswith(f"warning: no copy of {versions[0].path} (")
    assert "No space left" in warning
    assert "generator.inference_engine.weight_copy_dir" in warning
    assert not list(local.rglob("*.safetensors")), "what was written makes room"
    monkeypatch.delenv("HPCRL_FAULT")
    assert fetch(versions[0].path, copies).path != versions[0].path


def test_no_room_is_known_before_anything_is_written(versions: list[PublishedWeights], copies: NodeCopies) -> None:
    with pytest.raises(OSError, match=r"are left") as caught:
        copies.hold(replace(versions[0], size=2**60))
    assert caught.value.errno == errno.ENOSPC


def test_a_directory_that_is_another_users(run: Run, local: Path) -> None:
    left = NodeCopies(local, run, 1)
    (mine,) = local.iterdir()
    if os.geteuid() != 0:
        pytest.skip("only root can give a directory away")
    os.chown(mine, 12345, 12345)
    with pytest.raises(RunError, match="another user has made it"):
        NodeCopies(local, run, 1)
    left.close()
