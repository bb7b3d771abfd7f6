"""What the ranks of the tests of moments do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hpcrl.rundir.layout import Run
from hpcrl.trainer.distributed import World
from tests.planning.memory_scenarios import held_by
from tests.trainer.scenarios import make_engine, show, train_steps


def stopped(world: World, options: dict[str, Any]) -> None:
    """Train a step and save; then, unless another one is to go on, train the next one. Restore first where asked."""
    engine = make_engine(world, options["model"], options)
    run, saved = Run.open(options["run"]), Path(options["saved"])
    if options.get("restores"):
        engine.restore(saved)
    else:
        train_steps(engine, run, range(1, 2), options)
        engine.save(saved, world.control)
    show(options["out"], train_steps(engine, run, range(2, 3), options), world)


def bytes_held(world: World, options: dict[str, Any]) -> dict[str, int]:
    return held_by(make_engine(world, options["model"], options))
