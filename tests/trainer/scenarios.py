"""What the ranks of tests run (launcher.py): scenarios.py NAME JSON. Each scenario joins the ranks once; rank 0 writes what it saw."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch.distributed import ProcessGroup

from hpcrl.algorithms.reductions import Reduction
from hpcrl.config import AlgorithmConfig, TrainerConfig
from hpcrl.config.sections.generator import ChatTemplateConfig
from hpcrl.config.sections.model import Pretrained
from hpcrl.config.validate import build
from hpcrl.errors import DataError
from hpcrl.rundir.checkpoints import Retention
from hpcrl.rundir.commit import committed, read_json
from hpcrl.rundir.layout import Run, step_of
from hpcrl.trainer.advantages import KlRewardPenalty, estimate_advantages
from hpcrl.trainer.backends.base import UpdateResult
from hpcrl.trainer.backends.colocation import DeviceLease
from hpcrl.trainer.backends.fsdp import sharding
from hpcrl.trainer.backends.fsdp.engine import FsdpEngine, FsdpPolicy
from hpcrl.trainer.backends.fsdp.optimizer import make_optimizer
from hpcrl.trainer.batching import MicroBatchLimit, mini_batches
from hpcrl.trainer.distributed import World, check_all_reduce, joined
from hpcrl.trainer.loss import build_objective, build_reduction
from hpcrl.trainer.metrics import PhaseTimer, describe_updates
from hpcrl.trainer.packing import MiniBatch
from hpcrl.trainer.read_batch import load_rows
from hpcrl.trainer.saving.checkpoint import Checkpoints
from hpcrl.trainer.saving.publish import Publisher
from hpcrl.types import Batch
from tests.trainer.material import load, score, train, views

ALGORITHM = AlgorithmConfig(use_kl_loss=True, kl_loss_coef=0.1, use_entropy_loss=True, entropy_loss_coef=0.02)


def make_engine(world: World, model: str, options: dict[str, Any]) -> FsdpPolicy:
    """Return an engine whose configuration is the section `trainer` with options["trainer"] laid over it."""
    fsdp = {"mixed_precision": {"param_dtype": "fp32"}}
    defaults = {
        "policy": {
            "model": {"path": model},
            "optimizer_config": {"lr": 2e-3, "scheduler": "linear", "num_warmup_steps": 1},
            "fsdp_config": fsdp,
        },
        "algorithm": {"use_kl_loss": True, "use_entropy_loss": True},
        "gradient_checkpointing": False,
    }
    engine = FsdpPolicy(build(TrainerConfig, laid_over(defaults, options.get("trainer", {}))), 0.9, world)
    engine.schedule(8)
    return engine


def laid_over(table: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    merged = dict(table)
    for name, value in changes.items():
        below = merged.get(name)
        merged[name] = laid_over(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return merged


class Watched(FsdpPolicy):
    """Keeps whole copies of the last gradients, which the verbs do not show."""

    seen: dict[str, torch.Tensor]

    def step(self):
        self.seen = {name: whole(p.grad) for name, p in self._model.model.named_parameters() if p.grad is not None}
        return super().step()


def whole(tensor: torch.Tensor | None) -> torch.Tensor:
    assert tensor is not None
    return sharding.whole(tensor.detach()).clone()


def parameters(engine: FsdpEngine[Any]) -> dict[str, torch.Tensor]:
    return {name: whole(parameter) for name, parameter in engine._model.model.named_parameters()}


def loaded(
    run: Run,
    batch: Batch,
    algorithm: AlgorithmConfig,
    groups: int,
    world: World,
    limit: MicroBatchLimit,
    reduction: Reduction | None = None,
) -> list[MiniBatch]:
    """Return the mini-batches of a batch, with advantages."""
    minis = load(run, batch, algorithm, groups, limit, world, reduction)
    estimate_advantages(batch, [mini.rows for mini in minis], algorithm, world.sum)
    return minis


def train_steps(engine: FsdpPolicy, run: Run, steps: range, options: dict[str, Any]) -> list[UpdateResult]:
    """Train batches with two mini-batches of two groups each, scoring old and reference log-probabilities first."""
    trained = []
    limit = MicroBatchLimit(options["micro"], options.get("tokens"), options.get("shared", False))
    for step in steps:
        if options.get("turns"):
            engine.to_host()
            engine.to_device()
        batch = Batch.from_json(read_json(run.batch(step)))
        minis = loaded(run, batch, ALGORITHM, 2, engine.data, limit)
        for mini in minis:
            score(engine, mini, MicroBatchLimit(options.get("forward", 4), limit.tokens), old=True, reference=True)
        trained += [train(engine, mini, build_objective(ALGORITHM)) for mini in minis]
    return trained


def show(path: str, trained: list[UpdateResult], world: World) -> None:
    if world.first:
        values = [
            {**update.sums, **update.report.experts, "grad_norm": update.report.grad_norm, "lr": update.report.lr}
            for update in trained
        ]
        Path(path).write_text(json.dumps(values))


def variants(world: World, options: dict[str, Any]) -> None:
    """Train the same batches in several ways."""
    for name, variant in options["variants"].items():
        engine = make_engine(world, options["model"], variant)
        engine.__class__ = Watched
        assert isinstance(engine, Watched)
        trained = train_steps(engine, Run.open(options["run"]), range(1, 3), variant)
        tensors = {f"gradient.{key}": value for key, value in engine.seen.items()}
        tensors |= {f"parameter.{key}": value for key, value in parameters(engine).items()}
        show(f"{options['out']}/{name}.json", trained, world)
        if world.first:
            save_file(tensors, f"{options['out']}/{name}.safetensors")
            norm = engine._model.model.base_model.norm.weight
            share = sharding.local(norm).numel() / norm.numel()
            Path(f"{options['out']}/{name}.share").write_text(json.dumps(share))


def poisoned(world: World, options: dict[str, Any]) -> None:
    """A gradient that is not finite changes nothing."""
    engine = make_engine(world, options["model"], {})
    run = Run.open(options["run"])
    batch = Batch.from_json(read_json(run.batch(1)))
    (mini,) = loaded(run, batch, ALGORITHM, len(batch.groups), world, MicroBatchLimit(4))
    score(engine, mini, MicroBatchLimit(8), old=True, reference=True)
    before = parameters(engine)
    advantages_P = mini.rows.scores.advantages
    assert advantages_P is not None
    if world.first:
        advantages_P[mini.rows.tokens_of(range(1))] = float("inf")
    skipped = train(engine, mini, build_objective(ALGORITHM)).report
    same = all(torch.equal(before[name], value) for name, value in parameters(engine).items())
    if world.first:
        advantages_P[mini.rows.tokens_of(range(1))] = 1.0
    after = train(engine, mini, build_objective(ALGORITHM)).report
    if world.first:
        facts = {"skipped": [skipped.skipped, after.skipped], "same": same, "updates": engine.updates}
        Path(options["out"]).write_text(json.dumps(facts))


def worth(world: World, options: dict[str, Any]) -> None:
    """What each token was worth under several settings, by its sample's token ids; each rank tells of its samples."""
    run, told = Run.open(options["run"]), {}
    batch = Batch.from_json(read_json(run.batch(1)))
    for name, settings in options["settings"].items():
        algorithm = build(AlgorithmConfig, settings)
        limit = MicroBatchLimit(1, options.get("tokens"))
        minis = load(run, batch, algorithm, 2, limit, world)
        packed = [mini.rows for mini in minis]
        for samples in packed:
            spread = samples.labels / 10
            samples.scores.old_logprobs, samples.scores.ref_logprobs = -spread, -spread.square()
            samples.scores.squared_norms = spread / 2
        penalty = KlRewardPenalty(algorithm, {})
        charged = penalty.apply_kl_penalty(packed, world.sum)
        advantages = estimate_advantages(batch, packed, algorithm, world.sum)
        found = [(str(sample.of(sample.packed.token_ids).tolist()), sample) for sample in views(packed)]
        told[name] = {
            "advantages": {key: sample.of(sample.packed.scores.advantages).tolist() for key, sample in found},
            "weights": {key: sample.weight for key, sample in found},
            "means": [advantages.mean, advantages.mean_abs, *charged.values(), penalty.coefficient],
            "tokens": [mini.tokens for mini in minis],
        }
    Path(f"{options['out']}/{world.rank}-of-{world.size}.json").write_text(json.dumps(told))


def weighed(world: World, options: dict[str, Any]) -> None:
    """Train one batch with each algorithm, from the same start; two mini-batches, `micro` samples or `tokens` tokens at a time."""
    run, found = Run.open(options["run"]), {}
    batch, limit = Batch.from_json(read_json(run.batch(1))), MicroBatchLimit(options["micro"], options.get("tokens"))
    engine = make_engine(world, options["model"], {})  # loaded once: no algorithm here is a part of it
    start = [parameter.detach().clone() for parameter in engine._model.parameters()]
    for name, table in options["algorithms"].items():
        begin_again(engine, start)
        policy = {"model": {"path": options["model"]}}
        sizes = {"micro_train_batch_size_per_gpu": options["micro"]}
        section = build(TrainerConfig, {"policy": policy, "algorithm": table, **sizes})
        algorithm = section.algorithm
        minis = loaded(run, batch, algorithm, 2, world, limit, build_reduction(algorithm, max_seq_len=40))
        for mini in minis:
            score(
                engine,
                mini,
                MicroBatchLimit(4, limit.tokens),
                old=not algorithm.use_rollout_logprobs_for_loss,
                reference=algorithm.use_kl_loss,
            )
        objective = build_objective(algorithm)
        trained = [train(engine, mini, objective) for mini in minis]
        found[name] = [describe_updates([update]) for update in trained]
    if world.first:
        Path(options["out"]).write_text(json.dumps(found))


@torch.no_grad()
def begin_again(engine: FsdpPolicy, start: list[torch.Tensor]) -> None:
    """Give an engine its first parameters again, an optimizer without moments, and no updates."""
    for parameter, value in zip(engine._model.parameters(), start, strict=True):
        parameter.copy_(value)
    engine._optimizer = make_optimizer(engine._model, engine._optimizer_config)
    engine.updates = 0


def unreadable(world: World, options: dict[str, Any]) -> None:
    """Tell what each rank hears of a model that rank 0 cannot read."""
    said = ""
    try:
        make_engine(world, options["model"], {})
    except DataError as error:
        said = str(error)
    Path(options["out"]).with_suffix(f".{world.rank}").write_text(json.dumps(said))


def lifetime(world: World, options: dict[str, Any]) -> None:
    """Resume, train up to a step, save where asked, maybe die while saving; publish and export at the end."""
    engine = make_engine(world, options["model"], options)
    run, attempt = Run.open(options["run"]), options["attempt"]
    mode = options.get("save_mode", "sync")
    checkpoints = Checkpoints(run, attempt, world, keep=Retention(options.get("keep", -1)), seed=3, mode=mode)
    publisher = Publisher(run, attempt, world, torch.float32, kept_versions=2, adapters=True)
    start = checkpoints.resume(engine, None, options.get("mode", "latest"), options.get("path"))
    step, carried = start.step, start.extra_state
    publisher.resume(engine, step)
    trained, random = [], torch.rand(3).tolist()
    for at in range(step + 1, options["until"] + 1):
        trained += train_steps(engine, run, range(at, at + 1), options)
        publisher.publish(engine, at)
        publisher.retire()
        if at in options.get("dies_saving", []) and world.rank == world.size - 1:
            engine.__class__ = Dying
        if at in options["saves"]:
            checkpoints.save(engine, None, Batch.from_json(read_json(run.batch(at))), {"trained": float(at)})
    checkpoints.settle(wait=True)
    show(options["out"], trained, world)
    if world.first:
        Path(options["out"]).with_suffix(".started").write_text(
            json.dumps({"step": step, "random": random, "carried": carried})
        )
    if options.get("export"):
        publisher.export(engine, options["until"], Pretrained(options["model"]), ChatTemplateConfig())
        batch = Batch.from_json(read_json(run.batch(1)))
        (mini,) = loaded(run, batch, ALGORITHM, len(batch.groups), world, MicroBatchLimit(4))
        score(engine, mini, MicroBatchLimit(16), old=True, reference=False)
        found = {
            f"{n}.{name}": sample.of(column).clone()
            for n, sample in enumerate(views([mini.rows]))
            for name, column in (("logprobs", mini.rows.scores.old_logprobs), ("ids", mini.rows.token_ids))
        }
        if world.first:
            save_file(found, options["export"])


def moving(world: World, options: dict[str, Any]) -> None:
    """Show the reference before and after the policy becomes it; maybe restore first, maybe save then."""
    engine = make_engine(world, options["model"], options)
    if "restore" in options:
        engine.restore(Path(options["restore"]))
    run = Run.open(options["run"])
    batch = Batch.from_json(read_json(run.batch(1)))
    (refs,) = mini_batches(batch, len(batch.groups))
    packed = load_rows(run, batch, refs).whole()
    found = {"before": next(engine.logprobs([packed], reference=True))}
    train_steps(engine, run, range(1, 2), options)
    engine.reset_reference(fresh_optimizer=True)
    found["moved"] = next(engine.logprobs([packed], reference=True))
    found["policy"] = next(engine.logprobs([packed]))
    if "save" in options:
        Path(options["save"]).mkdir(exist_ok=True)
        engine.save(Path(options["save"]), world.control)
    if world.first:
        save_file(found, options["out"])


def rewind(world: World, options: dict[str, Any]) -> None:
    """Copy a run as it was when `steps` were its checkpoints."""
    if world.first:
        shutil.copytree(options["run"], options["to"])
        run = Run.open(options["to"])
        for step in set(committed(run.checkpoints, step_of)) - set(options["steps"]):
            shutil.rmtree(run.checkpoint(step))
    world.barrier()


def disagreement(world: World, options: dict[str, Any]) -> None:
    """Only rank 0 looks; what it finds, and what it cannot find, is the same everywhere. A flag of one rank is a flag of all."""
    alike = world.rank0_broadcast(lambda: {"rank": world.rank}) == {"rank": 0}

    def fail() -> None:
        raise DataError(f"seen by {world.rank}")

    try:
        world.rank0_broadcast(fail)
    except DataError as error:
        alike &= str(error) == "seen by 0"
    else:
        alike = False
    alike &= world.any_rank(world.rank == world.size - 1) and not world.any_rank(False)
    alike &= world.all_gather(lambda: ["x" * world.rank]) == [["x" * rank] for rank in range(world.size)]

    def fail_on_the_last() -> None:
        if world.rank == world.size - 1:
            fail()

    try:
        world.all_gather(fail_on_the_last)
    except DataError as error:
        alike &= str(error) == f"seen by {world.size - 1}"
    else:
        alike = False
    ranks_alike = world.sum([float(alike)])[0]
    if world.first:
        Path(options["out"]).write_text(json.dumps(ranks_alike))


def deterministic(world: World, options: dict[str, Any]) -> None:
    """What has no deterministic kernel is refused; training has only such as have."""
    refused = False
    try:
        torch.zeros(3).put_(torch.tensor([0, 0]), torch.ones(2))
    except RuntimeError as error:
        refused = "deterministic" in str(error)
    trained = train_steps(make_engine(world, options["model"], options), Run.open(options["run"]), range(1, 2), options)
    show(options["out"], trained, world)
    if world.first:
        facts = {"refused": refused, "cublas": os.environ["CUBLAS_WORKSPACE_CONFIG"]}
        Path(options["out"]).with_suffix(".facts").write_text(json.dumps(facts))


class Dying(FsdpPolicy):
    """Is killed after it has written its part, before anything is committed."""

    def save(self, directory: Path, group: ProcessGroup) -> None:
        super().save(directory, group)
        os.kill(os.getpid(), signal.SIGKILL)


def summing(world: World, options: dict[str, Any]) -> None:
    """The rank that is wrong about its number adds something else."""
    check_all_reduce(replace(world, rank=7) if world.rank == options.get("wrong") else world)


class Leaving:
    """What takes a second to leave its device, and says so by a file then; without a file it leaves at once."""

    def __init__(self, left: Path | None) -> None:
        self._left, self.calls = left, list[str]()

    def to_host(self) -> None:
        self.calls.append("to_host")
        if self._left:
            time.sleep(1.0)
            self._left.touch()

    def to_device(self) -> None:
        self.calls.append("to_device")


def turning(world: World, options: dict[str, Any]) -> None:
    """The last rank leaves its device late."""
    late = Path(f"{options['out']}.left")
    model = Leaving(None if world.first else late)
    devices, timer = DeviceLease([model, None], world, colocated=True), PhaseTimer()
    devices.release(timer)
    left = late.exists()
    devices.release(timer)
    devices.acquire(timer)
    devices.acquire(timer)
    lent = Leaving(None)
    lends = DeviceLease([lent], world, colocated=False, lends=True)
    lends.release(timer)  # not at each wait
    before = list(lent.calls)
    lends.lend(timer)
    away = lends.away
    lends.acquire(timer)
    if world.first:
        apart = DeviceLease([object()], world, colocated=False).release(timer) or None
        facts = {"left": left, "calls": model.calls, "apart": apart, "phases": sorted(timer.between())}
        facts |= {"lent": [before, lent.calls, away, lends.away, lends.onload_seconds > 0]}
        Path(options["out"]).write_text(json.dumps(facts))


SCENARIOS = {
    "summing": summing,
    "turning": turning,
    "variants": variants,
    "poisoned": poisoned,
    "worth": worth,
    "weighed": weighed,
    "lifetime": lifetime,
    "moving": moving,
    "rewind": rewind,
    "disagreement": disagreement,
    "deterministic": deterministic,
}


def main(scenarios: Mapping[str, Callable[[World, dict[str, Any]], None]] = SCENARIOS) -> None:
    logging.basicConfig(level=logging.INFO)
    todo = json.loads(sys.argv[1])
    with joined(deterministic=todo[0][0] == "deterministic") as world:
        for name, options in todo:
            scenarios[name](world, options)


if __name__ == "__main__":
    main()
