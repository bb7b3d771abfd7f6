"""`hpcrl plan`: print the nodes and ranks of a run, and the memory that they need. It starts nothing."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from hpcrl.cli._common import split
from hpcrl.rundir.process_names import worker_name
from hpcrl.text import printable

if TYPE_CHECKING:
    from hpcrl.config import Config
    from hpcrl.planning.estimate import Estimate
    from hpcrl.planning.memory import Need, Shapes
    from hpcrl.planning.plan import RunPlan, ServedMemory

_ROWS = {
    "weights": "weights",
    "gradients": "gradients",
    "optimizer": "optimizer",
    "gathered": "gathered by FSDP",
    "activations": "activations",
    "logprobs": "log-probabilities",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = "example: hpcrl plan experiment.toml site.toml slurm.gpu_memory_gb=80"
    parser.add_argument("settings", nargs="+", metavar="FILE|KEY=VALUE", help="configuration files, then overrides")
    parser.add_argument("--json", action="store_true", help="a JSON object")
    parser.set_defaults(action=_plan)


def _plan(arguments: argparse.Namespace) -> int:
    from json import dumps

    from hpcrl.config import Config
    from hpcrl.errors import ConfigError
    from hpcrl.launch.submit.preflight import look

    files, overrides = split(arguments.settings)
    if not files:
        raise ConfigError("no configuration file given; expected hpcrl plan FILE.toml [FILE.toml ...] [KEY=VALUE ...]")
    config = Config.from_toml([Path(file) for file in files], overrides)
    plan = checked_plan(config)
    problems, warnings = look(config)
    if arguments.json:
        of_submit = [{"path": problem.path, "message": problem.message} for problem in problems]
        print(dumps(plan.to_json() | {"problems": of_submit, "warnings": warnings}, indent=2))
        return 0
    refused = [f"hpcrl submit would refuse this: {problem.path}: {problem.message}" for problem in problems]
    notes = [*refused, *(f"note: {note}" for note in [*_growth(config), *warnings])]
    print(printable("\n".join([*plan_lines(plan), *([""] if notes else []), *notes])))
    return 0


def _growth(config: Config) -> Iterator[str]:
    if (minutes := config.slurm.grow_minutes) is not None:
        yield (
            "an attempt starts again where that pays, on more nodes that Slurm has idle or with other roles of its own, "
            f"at most once in {minutes} minutes (slurm.grow_minutes)"
        )


def checked_plan(config: Config) -> RunPlan:
    """Return the plan of a configuration; with ranges, of its largest layout. Raises DataError where the ranks cannot share the model."""
    from hpcrl.config.errors import raise_together
    from hpcrl.errors import DataError
    from hpcrl.launch.layouts import all_layouts, usable_layouts
    from hpcrl.launch.submit.models import check_layouts, rank_problems
    from hpcrl.planning.layouts import memory_problems
    from hpcrl.planning.plan import RunPlan

    checks = rank_problems, memory_problems
    layouts, slurm = all_layouts(config, *checks), config.slurm
    requests = {
        name: all_layouts(config, *checks, request=name) if slurm.has_own_layouts(name) else layouts
        for name in slurm.requests
    }
    if layouts[0].sizes:
        config = config.at((usable_layouts(layouts) or layouts)[-1].sizes)
    raise_together(list(check_layouts(config)), lambda _: None, DataError)
    return RunPlan.of(config, layouts, requests)


def plan_lines(plan: RunPlan) -> Iterator[str]:
    """Yield what the command prints."""
    from hpcrl.launch.layouts import describe_layouts, usable_layouts
    from hpcrl.launch.nodes import describe_plan
    from hpcrl.launch.pools import describe_evaluation, describe_pools
    from hpcrl.launch.submit.requests import describe_requests
    from hpcrl.planning.disk import describe_disk
    from hpcrl.planning.prefixes import describe_prefixes
    from hpcrl.planning.rank_groups import describe_ranks

    config = plan.config
    if table := describe_layouts(plan.layouts, requests=bool(plan.requests)):
        yield from table
        yield ""
        yield f"the largest one{'' if usable_layouts(plan.layouts) else ', which cannot work'}:"
    yield from describe_plan(plan.nodes)
    yield from _evaluators(config)
    yield from describe_pools(plan.pools, config)
    yield from describe_evaluation(config)
    yield from describe_requests(config.slurm, plan.requests)
    yield from _lending(config)
    yield ""
    yield from describe_ranks(config.trainer)
    if config.trainer.strategy == "megatron":
        yield from _layers(config)
    yield ""
    yield from describe_prefixes(config)
    yield from _models(plan)
    for each in plan.served:
        yield ""
        yield from _served(each)
    yield ""
    yield from describe_disk(config, plan.disk)


def _lending(config: Config) -> Iterator[str]:
    from hpcrl.errors import ConfigError

    if config.slurm.gpus == 0 or config.trainer.placement.lend:
        return
    try:
        lent = config.with_overrides(["trainer.placement.lend=true"]).lent_replicas
    except ConfigError:
        return
    yield (
        f"hint: with trainer.placement.lend=true {len(lent)} more replica(s) generate on the trainer's GPUs while it waits; hpcrl advise says of "
        "a run whether it waits long enough"
    )


def _evaluators(config: Config) -> Iterator[str]:
    if own := config.slurm.eval_replicas:
        names = ", ".join(worker_name(number) for number in config.evaluators)
        gpus = own * config.generator.inference_engine.gpus
        devices = f", {gpus} GPU(s)," if config.slurm.gpus else ""
        yield f"{names} only evaluate (slurm.eval_replicas):{devices} idle whenever no evaluation is open"


def _layers(config: Config) -> Iterator[str]:
    from importlib.util import find_spec

    gpus, found = config.slurm.gpus > 0, find_spec("transformer_engine") is not None
    if gpus and found:
        yield "layers: TransformerEngine's"
        return
    reason = "transformer_engine is not installed here" if gpus else "TransformerEngine's need a GPU"
    yield f"layers: Megatron-core's, with torch's attention ({reason})"
    megatron, remedy = config.trainer.policy.megatron_config, "; it is the extra transformer-engine" if gpus else ""
    if (size := megatron.context_parallel_size) > 1:
        yield (
            f"  hint: without TransformerEngine each of the {size} context-parallel ranks gathers the keys and values of a sample and "
            f"computes attention over all of its tokens. They share only the rest of the layers{remedy}"
        )
    if gpus and megatron.expert_model_parallel_size > 1 and megatron.moe_grouped_gemm:
        yield f"  hint: without TransformerEngine a rank computes its experts one after the other{remedy}"


def _models(plan: RunPlan) -> Iterator[str]:
    from hpcrl.planning.devices import memory_of_rank

    if plan.family:
        lines, parts = plan.family
        yield from lines
        size = sum(parts.values())
        yield _of_device(size, memory_of_rank(plan.config), _unit(size)[0])
    yield from plan.unknown
    if plan.models:
        yield from _parameters(plan)
    for found in plan.trainers:
        yield ""
        yield from _memory(plan.config, found)
    if plan.engines:
        yield ""
        yield from plan.engines[0]


def _parameters(plan: RunPlan) -> Iterator[str]:
    from hpcrl.planning.plan import ROLES

    config, named, counts = plan.config, plan.config.trainer.models, plan.counts
    megatron = config.trainer.strategy == "megatron"
    for role, shapes in plan.models.items():
        frozen = sum(weight.count for weight in shapes.weights if not weight.trained)
        of_them = f", {frozen:,} of them frozen" if frozen and role != "ref" else ""
        yield f"{ROLES[role]}: {shapes.kind} of {named[role]}, {shapes.count:,} parameters{of_them}"
        if megatron and role != "critic":
            yield f"  {_paddings(config, shapes.width.vocabulary)}"
        yield from _parts(config, shapes, counts[role])


def _paddings(config: Config, rows: int) -> str:
    from hpcrl.config.rules.megatron_groups import ParallelLayout, padded

    layout = ParallelLayout.of(config.trainer.policy.megatron_config, config.trainer.placement.policy_ranks)
    samples = layout.sample_multiple()
    multiple = f"; samples are padded to a multiple of {samples} tokens" if samples > 1 else ""
    return f"vocabulary {rows:,} + {padded(rows, layout.tensor) - rows} padding{multiple}"


def _parts(config: Config, shapes: Shapes, counts: list[int]) -> Iterator[str]:
    from hpcrl.config.rules.megatron_groups import ParallelLayout, layers_of_stages

    if config.trainer.strategy != "megatron":
        yield f"  on a rank at most {counts[0]:,}"
        return
    sizes = config.trainer.policy.megatron_config
    layout, layers = (
        ParallelLayout.of(sizes, config.trainer.placement.policy_ranks),
        layers_of_stages(shapes.width.layers, sizes),
    )
    assert layers is not None
    for stage, (count, own) in enumerate(zip(counts, layers, strict=True)):
        ranks = layout.ranks_of_stage(stage)
        yield f"  on a rank of stage {stage} ({_span(ranks)}, {own} layers): {count:,}"


def _memory(config: Config, found: Estimate) -> Iterator[str]:
    from hpcrl.config.token_limits import largest_micro_batch, longest_sample
    from hpcrl.planning.devices import memory_of_rank

    trainer = config.trainer
    unit, name = _unit(found.total)
    recompute = "with recomputation" if trainer.gradient_checkpointing else "without recomputation"
    apart = "policy" not in found.needs
    which = (
        "each rank"
        if len(found.ranks) == trainer.placement.policy_ranks
        else f"a rank ({_span(found.ranks)} need most)"
    )
    which = f"each rank of the critic ({_span(found.ranks)})" if apart else which
    yield (
        f"memory of {which}, in {name}, for micro-batches of {largest_micro_batch(config):,} tokens (a sample has at most "
        f"{longest_sample(config):,}), {recompute}"
    )
    yield from _table(found.needs, unit)
    resident = sum(need.resident for need in found.needs.values())
    yield f"  in all {found.total / unit:,.2f}: {resident / unit:,.2f} stay all the time, {(found.total - resident) / unit:,.2f} more while the model that needs most is computed"
    memory = memory_of_rank(config, trainer.placement.critic_nodes[1] if apart else None)
    if config.shared_gpus and not apart:
        yield from _colocation(config, found, memory, unit)
    else:
        yield _of_device(found.total, memory, unit)
    exact = "weights" if trainer.strategy == "megatron" else "weights, gradients and optimizer"
    yield (
        f"  {exact} are exact, the other rows estimates; temporary memory of kernels, communication and allocator is in none of them: "
        "leave a tenth free"
    )


def _colocation(config: Config, found: Estimate, memory: tuple[float | None, str], unit: int) -> Iterator[str]:
    from hpcrl.planning.colocation import leased_memory, on_host

    device, source = memory
    if device is None:
        yield f"  in turns with an engine, on a device whose memory is unknown ({source})"
    else:
        for turn in leased_memory(config, found, device):
            both = f"{turn.trainer / unit:,.2f} of the trainer and {turn.engine / unit:,.2f} of the engine"
            yield f"  in the {turn.holder}'s turn {both}"
            yield _of_device(turn.trainer + turn.engine, memory, unit)
    held = on_host(config, found) / unit
    yield f"  host memory for what leaves the device in the engine's turn, kept in both: {held:,.2f} for each rank"


def _of_device(total: int, memory: tuple[float | None, str], unit: int) -> str:
    device, source = memory
    if device is None:
        return f"  memory of the device: unknown ({source})"
    room = (device - total) / unit
    left = f"{room:,.2f} left" if room >= 0 else f"warning: {-room:,.2f} too few"
    return f"  memory of the device: {device / unit:,.2f} ({source}), {left}"


def _served(each: ServedMemory) -> Iterator[str]:
    if each.shapes is None or each.need is None:
        yield each.unknown
        return
    model, shapes, need = each.model, each.shapes, each.need
    total = need.resident + need.working
    unit, name = _unit(total)
    yield f"{model.what}: {shapes.kind} of {model.model}, {shapes.count:,} parameters, on {model.processes} process(es), {model.ranks} per copy"
    yield f"memory of each, in {name}, for passes of {model.tokens:,} tokens without gradients"
    rows = [(_ROWS[row], getattr(need, row)) for row in _ROWS if getattr(need, row)]
    yield from (f"  {row:18}{_amount(amount, unit):>12}" for row, amount in rows)
    yield f"  in all {total / unit:,.2f}"
    yield _of_device(total, each.device, unit)


def _unit(total: int) -> tuple[int, str]:
    return (2**30, "GiB") if total >= 2**30 else (2**20, "MiB")


def _table(needs: Mapping[str, Need], unit: int) -> Iterator[str]:
    from hpcrl.planning.plan import ROLES

    rows = [name for name in _ROWS if any(getattr(need, name) for need in needs.values())]
    yield "".join([f"  {'':18}", *(f"{ROLES[role]:>12}" for role in needs)])
    for name in rows:
        yield "".join(
            [f"  {_ROWS[name]:18}", *(f"{_amount(getattr(need, name), unit):>12}" for need in needs.values())]
        )


def _amount(count: int, unit: int) -> str:
    amount = f"{count / unit:,.2f}"
    return "-" if not count else "< 0.01" if amount == "0.00" else amount


def _span(ranks: range) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]}"
