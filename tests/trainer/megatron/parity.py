"""What the parity test runs under torchrun: parity.py OPTIONS. Each way trains the same batches; rank 0 writes what it saw."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor

from hpcrl.config import TrainerConfig
from hpcrl.config.validate import build
from hpcrl.run.commit import read_json
from hpcrl.run.layout import Run
from hpcrl.trainer.build import build_policy
from hpcrl.trainer.megatron.engine import MegatronEngine
from hpcrl.trainer.megatron.weights import export
from hpcrl.trainer.objective import build_objective
from hpcrl.trainer.plan import Limit
from hpcrl.trainer.update import score, train
from hpcrl.trainer.world import World, joined
from hpcrl.types import Batch
from tests.trainer.scenarios import ALGORITHM, laid_over, loaded

Values = dict[str, torch.Tensor]


def watched(engine: Any, world: World) -> Values:
    """Return whole copies of the gradients under Hugging Face names, on rank 0."""
    if isinstance(engine, MegatronEngine):
        pieces = export(
            engine._chunks, engine._architecture, lambda parameter: parameter.main_grad, torch.float32, world
        )
        return {name: tensor.clone() for piece in pieces for name, tensor in piece.items()}
    found = {name: p.grad for name, p in engine._model.model.named_parameters() if p.grad is not None}
    return {name: g.full_tensor().clone() for name, g in found.items() if isinstance(g, DTensor)}


def policy(world: World, options: dict[str, Any]) -> None:
    defaults = {
        "policy": {
            "model": {"path": options["model"]},
            "optimizer_config": {"lr": 2e-3, "scheduler": "linear", "num_warmup_steps": 1},
            "fsdp_config": {"mixed_precision": {"param_dtype": "fp32"}},
            "megatron_config": {"dtype": "fp32"},
        },
        "ref": {"megatron_config": {"dtype": "fp32"}},
        "algorithm": {"use_kl_loss": True},
        "gradient_checkpointing": False,
    }
    trainer = build(TrainerConfig, laid_over(defaults, options.get("trainer", {})))
    engine = build_policy(trainer, 0.9, world)
    engine.schedule(8)
    run, limit = Run.open(options["run"]), Limit(options["micro"])
    told, tensors = [], {}
    if "restore" in options:
        engine.restore(Path(options["restore"]))
    for step in options.get("steps", (1, 2)):
        batch = Batch.from_json(read_json(run.batch(step)))
        for number, mini in enumerate(loaded(run, batch, ALGORITHM, 2, engine.data, limit)):
            score(engine, mini, Limit(4), old=True, reference=True)
            for row in mini.rows:
                assert row.old_logprobs is not None
                tensors[f"{step}.{number}.logprobs.{row.pick.group}.{row.pick.index}"] = row.old_logprobs
            step_, gradients = engine.step, {}

            def stepping(step_: Callable[[], Any] = step_, gradients: Values = gradients) -> Any:
                gradients |= watched(engine, world)
                return step_()

            engine.step = stepping
            update = train(engine, mini, limit, build_objective(ALGORITHM))
            engine.step = step_
            told.append(update.sums | {"grad_norm": update.report.grad_norm, "lr": update.report.lr})
            tensors |= {f"{step}.{number}.gradient.{name}": value for name, value in gradients.items()}
    if "save" in options:
        if world.first:
            Path(options["save"]).mkdir()
        world.barrier()
        engine.save(Path(options["save"]))
    weights = {name: value for piece in engine.export_weights(torch.float32) for name, value in piece.items()}
    tensors |= {f"weights.{name}": value for name, value in weights.items()}
    if engine.data.leads:
        logprobs = {name: value for name, value in tensors.items() if ".logprobs." in name}
        save_file(logprobs, f"{options['out']}.{engine.data.rank}.logprobs")
    if world.first:
        save_file(
            {name: value.contiguous() for name, value in tensors.items() if ".logprobs." not in name}, options["out"]
        )
        Path(options["out"]).with_suffix(".json").write_text(json.dumps(told))


if __name__ == "__main__":
    with joined() as world:
        for name, options in json.loads(sys.argv[1]):
            globals()[name](world, options)
            if parallel_state.model_parallel_is_initialized():
                parallel_state.destroy_model_parallel()
