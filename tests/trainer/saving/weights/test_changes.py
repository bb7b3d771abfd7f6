"""Versions that are published as changes: nodes have the whole of each, whatever they held before; what is still needed stays."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch

from hpcrl.data.weight_files import PublishedWeights, WeightReader, check_weights
from hpcrl.errors import CommitError
from hpcrl.rollout.weights.copies import NodeCopies
from hpcrl.rollout.weights.fetch import fetch
from hpcrl.rundir.commit import committed, discard
from hpcrl.rundir.layout import Run, version_of
from hpcrl.trainer.backends.fsdp.engine import FsdpPolicy
from hpcrl.trainer.distributed import World
from hpcrl.trainer.saving.publish import Publisher
from tests.rollout.weights.test_copies import Replica
from tests.trainer.material import make_run
from tests.trainer.saving.test_publish import make_engine

Tensors = dict[str, torch.Tensor]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    run = make_run(tmp_path / "run")
    run.token.parent.mkdir(exist_ok=True)
    run.token.write_text("secret")
    run.token.chmod(0o600)
    return run


@pytest.fixture
def engine(model_path: Path, alone: World) -> FsdpPolicy:
    return make_engine(model_path, alone)


@pytest.fixture
def node(run: Run, tmp_path: Path) -> Iterator[NodeCopies]:
    with closing(NodeCopies(tmp_path / "node", run, 1)) as copies:
        yield copies


def publisher_of(run: Run, alone: World, attempt: int = 1, interval: int = 3, kept: int = 2) -> Publisher:
    return Publisher(run, attempt, alone, torch.bfloat16, kept_versions=kept, full_interval=interval)


def step(engine: FsdpPolicy, number: int) -> None:
    """Change some elements of most parameters, as a step with a small learning rate does."""
    generator = torch.Generator().manual_seed(number)
    with torch.no_grad():
        for place, parameter in enumerate(engine._model.parameters()):
            if place % 4 != number % 4:
                parameter.mul_(1 + 0.02 * (torch.rand(parameter.shape, generator=generator) < 0.03))


def tensors_of(engine: FsdpPolicy) -> Tensors:
    owners = [0] * len(engine.export_pieces(torch.bfloat16))
    return {
        name: tensor.clone()
        for piece in engine.export_weights(torch.bfloat16, owners)
        for name, tensor in piece.items()
    }


def read(weights: PublishedWeights) -> Tensors:
    with closing(WeightReader(weights.path)) as reader:
        return {name: tensor for name, tensor, _ in reader}


def expect(found: PublishedWeights, policy: Tensors) -> None:
    tensors = read(found)
    assert tensors.keys() == policy.keys()
    for name, tensor in policy.items():
        assert torch.equal(tensors[name].view(torch.int16), tensor.view(torch.int16)), name


def publish(publisher: Publisher, engine: FsdpPolicy, versions: range) -> dict[int, Tensors]:
    policies = {}
    for version in versions:
        step(engine, version)
        publisher.publish(engine, version)
        policies[version] = tensors_of(engine)
    return policies


def test_a_node_has_each_version_whole(
    run: Run, alone: World, engine: FsdpPolicy, node: NodeCopies, tmp_path: Path
) -> None:
    publisher, sizes = publisher_of(run, alone), dict[int, int]()
    for version in range(1, 8):
        policy = publish(publisher, engine, range(version, version + 1))[version]
        published = PublishedWeights.read(run.weights_of(version))
        assert (
            published.base is None if version in (1, 4, 7) else published.base and published.base.version == version - 1
        )
        found = fetch(run.weights_of(version), node)
        assert (found.version, found.base) == (version, None)
        assert PublishedWeights.read(found.path).digest == published.digest
        expect(found, policy)
        sizes[version] = published.size
        assert node.fetched == {"weights/fetch_gib": published.size / 2**30}
        node.release()
        check_weights(run.weights_of(version))
    assert max(sizes[version] for version in (2, 3, 5, 6)) < 0.5 * sizes[1], sizes
    assert len(list((tmp_path / "node").glob("hpcrl-weights-*/v*"))) == 1, "what the last changes were of has made way"


def test_whatever_a_node_held_before(run: Run, alone: World, engine: FsdpPolicy, tmp_path: Path) -> None:
    policies = publish(publisher_of(run, alone, interval=10, kept=10), engine, range(1, 6))
    weights = {version: PublishedWeights.read(run.weights_of(version)) for version in policies}
    for held in ((), (1,), (3,), (1, 2, 4), (5,), (2, 1)):
        with closing(NodeCopies(tmp_path / "node", run, 1)) as node:
            for version in held:
                expect(node.hold(weights[version]), policies[version])
            expect(node.hold(weights[5]), policies[5])
            since = held[-1] if held else 0
            read_there = [weights[version].size for version in policies if since < version]
            assert node.fetched.get("weights/fetch_gib", 0.0) == pytest.approx(sum(read_there) / 2**30), held


def test_what_changes_are_of_stays_as_long_as_they_do(run: Run, alone: World, engine: FsdpPolicy) -> None:
    publisher, there = publisher_of(run, alone), []
    for version in range(1, 9):
        publish(publisher, engine, range(version, version + 1))
        publisher.retire()
        there.append(committed(run.weights, version_of))
    assert there == [[1], [1, 2], [1, 2, 3], [1, 2, 3, 4], [4, 5], [4, 5, 6], [4, 5, 6, 7], [7, 8]]


def test_an_attempt_begins_with_a_whole_version(run: Run, alone: World, engine: FsdpPolicy, node: NodeCopies) -> None:
    publish(publisher_of(run, alone, interval=10), engine, range(1, 4))
    fetch(run.weights_of(3), node)
    second = publisher_of(run, alone, attempt=2, interval=10)
    second.resume(engine, 2)  # from a checkpoint of a policy that became another
    assert PublishedWeights.read(run.weights_of(2)).base is None
    policies = publish(second, engine, range(3, 5))
    assert PublishedWeights.read(run.weights_of(4)).base is not None
    expect(fetch(run.weights_of(4), node), policies[4])


def test_a_version_that_could_not_be_written_has_no_changes(
    run: Run, alone: World, engine: FsdpPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher = publisher_of(run, alone, interval=10)
    publish(publisher, engine, range(1, 2))
    monkeypatch.setattr("hpcrl.faults._passed", Counter())
    monkeypatch.setenv("HPCRL_FAULT", "weights.manifest:raise=ENOSPC")
    with pytest.raises(CommitError, match="No space left"):
        publish(publisher, engine, range(2, 3))
    monkeypatch.delenv("HPCRL_FAULT")
    publish(publisher, engine, range(3, 4))
    assert PublishedWeights.read(run.weights_of(3)).base is None


def test_a_policy_that_did_not_change(run: Run, alone: World, engine: FsdpPolicy, node: NodeCopies) -> None:
    publisher = publisher_of(run, alone)
    publisher.publish(engine, 1)
    publisher.publish(engine, 2)
    assert PublishedWeights.read(run.weights_of(2)).size < 200
    expect(fetch(run.weights_of(2), node), tensors_of(engine))


def test_damaged_changes_are_refused(run: Run, alone: World, engine: FsdpPolicy, node: NodeCopies) -> None:
    publish(publisher_of(run, alone), engine, range(1, 3))
    (file,) = run.weights_of(2).glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(CommitError, match="give other tensors than were published: "):
        fetch(run.weights_of(2), node)
    with pytest.raises(CommitError, match="checksum differs"):
        check_weights(run.weights_of(2))


def test_a_damaged_copy_costs_the_copy(run: Run, alone: World, engine: FsdpPolicy, node: NodeCopies) -> None:
    policies = publish(publisher_of(run, alone), engine, range(1, 3))
    (file,) = fetch(run.weights_of(1), node).path.glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    expect(fetch(run.weights_of(2), node), policies[2])
    sizes = [PublishedWeights.read(run.weights_of(version)).size for version in (1, 2)]
    assert node.fetched["weights/fetch_gib"] == sum(sizes) / 2**30


def test_a_copy_needs_nothing_that_it_was_made_of(run: Run, alone: World, engine: FsdpPolicy, tmp_path: Path) -> None:
    policies = publish(publisher_of(run, alone), engine, range(1, 3))
    weights = PublishedWeights.read(run.weights_of(2))
    with (
        closing(NodeCopies(tmp_path / "node", run, 1)) as first,
        closing(NodeCopies(tmp_path / "node", run, 1)) as second,
    ):
        first.hold(weights)
        discard(run.weights_of(1))
        expect(second.hold(weights), policies[2])
        assert second.fetched == {}, "another replica of the node brought it there"


def test_changes_of_a_version_that_is_gone_are_refused(
    run: Run, alone: World, engine: FsdpPolicy, node: NodeCopies
) -> None:
    publish(publisher_of(run, alone), engine, range(1, 4))
    discard(run.weights_of(2))
    for what in (lambda: fetch(run.weights_of(3), node), lambda: check_weights(run.weights_of(3))):
        with pytest.raises(CommitError, match=r"v000002 was never committed"):
            what()
    with pytest.raises(CommitError, match=r"set generator\.inference_engine\.weight_copy_dir"):
        fetch(run.weights_of(3))


def test_a_node_without_room_is_told_so(
    run: Run, alone: World, engine: FsdpPolicy, node: NodeCopies, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(publisher_of(run, alone), engine, range(1, 3))
    fetch(run.weights_of(1), node)

    class Full:
        free = 10

    monkeypatch.setattr("hpcrl.rollout.weights.copies.shutil.disk_usage", lambda _: Full)
    with pytest.raises(CommitError, match=r"cannot be applied to it on this node: .*10 B are left; make room in"):
        fetch(run.weights_of(2), node)


def test_a_replica_that_is_killed_while_it_applies_changes(
    run: Run, alone: World, engine: FsdpPolicy, tmp_path: Path
) -> None:
    """What it leaves is no version; the next one makes it anew, from what the first had."""
    policies = publish(publisher_of(run, alone), engine, range(1, 3))
    weights = {version: PublishedWeights.read(run.weights_of(version)) for version in policies}
    with closing(NodeCopies(tmp_path / "node", run, 1)) as node:
        node.hold(weights[1])
        node.release()
        killed = Replica(tmp_path / "node", run, weights[2], "weights.changed:kill")
        killed.process.join(60)
        assert killed.process.exitcode == -signal.SIGKILL
        assert list((tmp_path / "node").glob("hpcrl-weights-*/v000002-*/.tmp-*"))
        expect(node.hold(weights[2]), policies[2])
        assert node.fetched["weights/fetch_gib"] == weights[2].size / 2**30
        assert not list((tmp_path / "node").glob("hpcrl-weights-*/v000002-*/.tmp-*"))
