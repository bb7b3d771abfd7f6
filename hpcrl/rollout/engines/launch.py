"""Launches the engine that a configuration names."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Protocol, cast

from hpcrl.config import Config
from hpcrl.config.family import family_of
from hpcrl.rollout.engines.base import Launched
from hpcrl.rundir.layout import Run
from hpcrl.runtime.scratch import Scratch


class EngineFamily(Protocol):
    """The module `rollout` of a family of policies, beside RolloutFamily (hpcrl/rollout/family.py)."""

    def own_engine(self, config: Config) -> Launched | None:
        """Start the family's engine in this process; None: the family is served by the engine that the configuration names."""
        ...


@contextmanager
def launched(
    run: Run,
    config: Config,
    log: Path,
    replica: int = 0,
    *,
    trains: bool = True,
    first_part: Callable[[Path, Path], Launched] | None = None,
) -> Iterator[Launched]:
    """Have the engine of one replica, which is being started, within the `with` statement. Temporary files of this process go when it ends.

    Args:
        log: file of what the engine's own processes say.
        trains: whether versions are loaded; else its weights are the model's, and stay as they are.
        first_part: starts the part of this node in a directory, with a log, where the engine is on several; None: it is on this one.
    """
    with ExitStack() as stack:
        scratch = Scratch("engine")
        stack.callback(scratch.remove)
        if own := cast(EngineFamily, family_of(config).layer("rollout")).own_engine(config):
            engine = own
        elif config.generator.inference_engine.backend == "transformers":
            from hpcrl.rollout.engines.embedded.launch import Embedded, embedded_options

            engine = Embedded(embedded_options(config))
        elif config.generator.inference_engine.remote_urls:
            from hpcrl.rollout.engines.vllm.remote import Remote, remote_options

            engine = Remote(remote_options(config, f"{log.stem} of {run.path}", replica, trains=trains))
        elif first_part:
            engine = first_part(scratch.path, log)
        else:
            from hpcrl.rollout.engines.vllm.server import Server, server_options

            engine = Server(server_options(run, config), scratch.path, log)
        stack.callback(engine.stop)
        scratch.take_temporary_files()
        yield engine
