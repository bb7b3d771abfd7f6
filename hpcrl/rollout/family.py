"""Rollout worker's side of a policy's family: its generator, and the text of its rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, cast

from hpcrl.config import Config
from hpcrl.config.family import family_of
from hpcrl.rundir.layout import Run

if TYPE_CHECKING:
    from hpcrl.data.rollouts import Decode
    from hpcrl.rollout.generate import Maker


@dataclass(frozen=True)
class LoadedGenerator:
    """Generator and decoder of a policy's family, beside the engine.

    Attributes:
        maker: returns what makes groups; it takes the named arguments of `conversations`, which families that write nothing ignore.
        decode: of the tokens of its rows.
    """

    maker: Callable[..., Maker]
    decode: Decode


class RolloutFamily(Protocol):
    """The module `rollout` of a family, which has what EngineFamily (hpcrl/rollout/engines/launch.py) names too. Importing it is quick; torch is
    imported by its functions."""

    def load_generator(self, run: Run, config: Config, interval: int | None) -> LoadedGenerator:
        """Load the generator; arguments and errors as of the function of this name below."""
        ...


def rollout_family(config: Config) -> RolloutFamily:
    return cast(RolloutFamily, family_of(config).layer("rollout"))


def load_generator(run: Run, config: Config, interval: int | None) -> LoadedGenerator:
    """Load the generator of a policy's family, which needs no engine: it may still be starting.

    Args:
        run: whose pictures and videos are kept; an evaluation has a directory laid out as a run.
        interval: versions of which pictures are kept, as of trainer.multi_modal_log_interval; None: of none.

    Raises:
        DataError: the model lacks what its family needs, such as a tokenizer.
    """
    return rollout_family(config).load_generator(run, config, interval)
