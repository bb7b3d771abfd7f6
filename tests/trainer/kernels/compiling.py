"""Ranks of test_compilation.py: compiling.py MODEL RUN OUT WITHOUT WAY..., where WITHOUT names the ranks without a compiler: 0,1."""

from __future__ import annotations

import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch._inductor import config

from hpcrl.rundir.layout import Run
from hpcrl.trainer.distributed import World, joined
from hpcrl.trainer.models.layers.compilation import compiler_works, fall_back_to_eager
from tests.trainer.scenarios import make_engine, train_steps

COMPILED = {"policy": {"compile_model": True, "use_torch_compile": True}, "gradient_checkpointing": True}


def main(model: str, run: str, out: str, without: str, *ways: str) -> None:
    logging.basicConfig(level=logging.INFO)
    # what CXX and TORCHINDUCTOR_FORCE_DISABLE_CACHES say where torch is imported, which it is already
    torch.compiler.config.force_disable_caches = True
    if os.environ["RANK"] in without.split(","):
        config.cpp.cxx = (None, "/bin/false")
    with joined() as world:
        found = {way: trained(world, way, model, run) for way in ways}
        Path(f"{out}.{world.rank}").write_text(json.dumps(found))


def trained(world: World, way: str, model: str, run: str) -> dict[str, Any]:
    """Return whether the compiler works, where the way asks for it, and the loss of each update."""
    works = compiler_works(world) if way == "asked" else None
    if way == "falls back":
        fall_back_to_eager()
    engine = make_engine(world, model, {"trainer": COMPILED if way != "eager" and works is not False else {}})
    updates = train_steps(engine, Run.open(Path(run)), range(1, 2), {"micro": 2})
    return {"works": works, "losses": [update.sums["final_loss"] for update in updates]}


if __name__ == "__main__":
    main(*sys.argv[1:])
