"""What each rank does: it trains models of several families on the same batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from hpcrl.rundir.layout import Run
from hpcrl.trainer.distributed import World
from tests.trainer.scenarios import make_engine, parameters, show, train_steps


def trained(world: World, options: dict[str, Any]) -> None:
    """Train each model of options["models"], name -> directory; write metrics and parameters, and what share of these a rank has."""
    for name, path in options["models"].items():
        engine = make_engine(world, path, {})
        updates = train_steps(engine, Run.open(options["run"]), range(1, 3), {"micro": 1, "tokens": 40})
        values = {key: value.contiguous() for key, value in parameters(engine).items()}
        show(f"{options['out']}/{name}-{world.size}.json", updates, world)
        if world.first:
            save_file(values, Path(options["out"]) / f"{name}-{world.size}.safetensors")
