"""Launches the engine that a configuration names."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, cast

from hpcrl.config import Config
from hpcrl.config.backend import backend_of
from hpcrl.config.family import family_of
from hpcrl.rollout.engines.base import Launched
from hpcrl.rundir.layout import Run
from hpcrl.runtime.process_status import StatusWriter
from hpcrl.runtime.scratch import Scratch


@dataclass(frozen=True)
class EnginePlace:
    """Directory, log and numbers of a replica's engine.

    Attributes:
        attempt: of the run.
        replica: its number.
        directory: for temporary files; it is removed when the worker ends.
        log: file to which the output of the engine's own processes is appended.
        trains: whether versions are loaded; else its weights are the model's, and stay as they are, and it is on this node alone.
    """

    run: Run
    attempt: int
    replica: int
    directory: Path
    log: Path
    trains: bool


class EngineFamily(Protocol):
    """The module `rollout` of a family of policies, beside RolloutFamily (hpcrl/rollout/family.py)."""

    def own_engine(self, config: Config) -> Launched | None:
        """Start the family's engine in this process; None: the family is served by the engine that the configuration names."""
        ...


class RolloutBackend(Protocol):
    """The module `rollout` of an engine."""

    def launch(self, config: Config, place: EnginePlace) -> Launched:
        """Start a replica's engine, and return while it starts.

        Raises:
            ConfigError: a setting cannot be used on this node.
        """
        ...


class NodesBackend(Protocol):
    """The module `multi_node` of an engine whose replicas may be on several nodes."""

    def serve_node(self, run: Run, config: Config, attempt: int, number: int, status: StatusWriter) -> None:
        """Run one further node of an engine, again at each start of the engine, until SIGTERM.

        Args:
            number: of the part among all parts of the run; each replica has one for each node but its first.

        Raises:
            EngineError: the part has ended, which ends the engine.
        """
        ...


@contextmanager
def launched(
    run: Run,
    config: Config,
    log: Path,
    replica: int = 0,
    *,
    attempt: int = 0,
    trains: bool = True,
) -> Iterator[Launched]:
    """Launch the engine of one replica for the `with` statement. Temporary files of this process are removed when it ends.

    Args:
        log, replica, attempt, trains: as of EnginePlace.
    """
    with ExitStack() as stack:
        scratch = Scratch("engine")
        stack.callback(scratch.remove)
        if own := cast(EngineFamily, family_of(config).layer("rollout")).own_engine(config):
            engine = own
        else:
            backend = cast(RolloutBackend, backend_of(config.generator.inference_engine).layer("rollout"))
            engine = backend.launch(config, EnginePlace(run, attempt, replica, scratch.path, log, trains))
        stack.callback(engine.stop)
        scratch.take_temporary_files()
        yield engine


def nodes_backend(config: Config) -> NodesBackend:
    """Return the backend of engines on several nodes."""
    return cast(NodesBackend, backend_of(config.generator.inference_engine).layer("multi_node"))
