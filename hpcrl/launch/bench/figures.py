"""Computes the figures of a bench from the files of its run and of its nodes."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from math import isfinite
from statistics import median
from typing import Any, Literal

from hpcrl.config import Config
from hpcrl.launch.bench.folder import Bench, Kill, Nodes, read_kills, read_nodes, read_plan
from hpcrl.launch.bench.survive import WARM_UP
from hpcrl.launch.bench.usual import usual_of
from hpcrl.launch.manage.verify import PARTS
from hpcrl.observe.first_step import first_steps
from hpcrl.observe.goodput import account_of
from hpcrl.observe.metrics import Record, last_records, merged
from hpcrl.observe.summary import STEP_SECONDS
from hpcrl.observe.timeline import read_spans, versions_of
from hpcrl.rundir.layout import Run

PARTS_OF_PAGE = ("correct", "fast", "survives", "plan")
Part = Literal["correct", "fast", "survives", "plan"]
Level = Literal["ok", "look", "first seen", "not measured"]
_GB, _GIB = 1e9, 2**30
_COMPARED = ("policy/final_loss", "policy/grad_norm", "loss/avg_final_rewards")
NODES = "jobs/bench.py on the nodes"
RUN = "metrics of the run"
_OF_STEPS = (
    ("step_seconds", "a step", STEP_SECONDS, "s"),
    ("tokens_per_second", "tokens of samples, whole step", "throughput/tokens_per_second", "tokens/s"),
    ("train_tokens_per_second", "tokens trained, each rank", "throughput/train_tokens_per_second_per_rank", "tokens/s"),
    ("mfu", "share of the device's peak in training", "throughput/mfu", ""),
    ("engine_tokens_per_second", "tokens generated, each replica", "generate/tokens_per_second", "tokens/s"),
    ("publish_seconds", "the trainer writes new weights", "timing/sync_weights", "s"),
    ("fetch_seconds", "a replica fetches them", "weights/fetch_seconds", "s"),
    ("load_seconds", "a replica loads them", "weights/load_seconds", "s"),
    ("pause_seconds", "a replica stands still for them", "weights/pause_seconds", "s"),
)
"""Key, title, metric and unit of figures that are medians over steps."""


@dataclass(frozen=True)
class Figure:
    """One figure of a bench.

    Attributes:
        key: its name in the JSON.
        value: None: not measured; `note` says why.
        better: which values are better, for `hpcrl bench compare`.
        source: what measured it.
        usual, usual_source: usual values on this device, and where they are from; empty: there are none yet.
        remedy: what to do where it is out of line; empty where it is not.
    """

    part: Part
    key: str
    title: str
    value: float | None
    unit: str
    better: Literal["higher", "lower", "zero", ""]
    source: str
    remedy: str = ""
    note: str = ""
    usual: str = ""
    usual_source: str = ""
    level: Level = "first seen"


def judged(figure: Figure, device: str) -> Figure:
    """Return a figure with its level, and what is usual for the device."""
    if figure.value is None:
        return replace(figure, level="not measured", remedy="")
    if not isfinite(figure.value):
        return replace(figure, value=None, level="look", note=f"{figure.value}: no number")
    usual = usual_of(figure.key, device)
    if usual is None:
        return replace(figure, remedy="")
    holds = usual.holds(figure.value)
    known = replace(figure, usual=str(usual), usual_source=usual.source, level="ok" if holds else "look")
    return known if not holds else replace(known, remedy="")


def bench_report(run: Run) -> dict[str, Any]:
    """Return the report of a bench as JSON values: about, and figures.

    Raises:
        RunError: it is no run of a bench, or a file is damaged.
    """
    bench = Bench.of(run)
    nodes, config = read_nodes(bench), Config.from_toml([run.config])
    device = nodes.device if nodes else "not known"
    steps = _undisturbed(merged(run), read_kills(bench))
    found = [
        *_correct(run, nodes),
        *_fast(run, nodes, steps),
        *_survives(run, read_kills(bench)),
        *_planned(run, bench, config),
    ]
    figures = [judged(figure, device) for figure in found]
    engine = config.generator.inference_engine
    return {
        "name": run.name,
        "run": str(run.path),
        "made": time.time(),
        "device": device,
        "hosts": nodes.hosts if nodes else [],
        "ranks": config.trainer.placement.policy_num_gpus_per_node,
        "model": config.trainer.policy.model.path,
        "engine": engine.backend,
        "longest": config.generator.sampling_params.max_generate_length,
        "versions": versions_of(run),
        "figures": [asdict(figure) for figure in sorted(figures, key=lambda one: PARTS_OF_PAGE.index(one.part))],
    }


def _undisturbed(steps: dict[int, dict[str, float]], kills: Sequence[Kill]) -> dict[int, dict[str, float]]:
    """Return the metrics of the steps after the first ones and before the first kill; where an attempt trained one again, of the last time."""
    last = kills[0].step if kills else max(steps, default=0)
    return {step: values for step, values in steps.items() if WARM_UP < step <= last}


def _values(steps: dict[int, dict[str, float]], name: str) -> list[float]:
    """Return the values of a metric in all steps, those of each replica."""
    return [
        value
        for metrics in steps.values()
        for full, value in metrics.items()
        if full == name or full.startswith(f"{name}/")
    ]


def _median(values: Sequence[float]) -> float | None:
    return median(values) if values else None


def _correct(run: Run, nodes: Nodes | None) -> Iterator[Figure]:
    everything = merged(run)
    damaged = sum(1 for part in PARTS for _ in part.damaged(run))
    yield Figure(
        "correct", "damaged", "files that are not as they were written", damaged, "", "zero", f"hpcrl verify {run.name}",
        "look at the filesystem of slurm.root, and at what hpcrl verify names",
    )  # fmt: skip
    proven = _values(everything, "weights/probe_difference")
    updates = len(_values(everything, "weights/pause_seconds"))
    yield Figure(
        "correct", "unproven", "updates of replicas without a probe of their log-probabilities", float(updates - len(proven)) if updates else None,
        "", "zero", RUN, "look at the logs of the replicas: a version is loaded, and was not compared with the trainer's",
        f"{len(proven)} updates were proven" if updates else "no replica took new weights",
    )  # fmt: skip
    yield Figure(
        "correct", "probe_difference", "largest difference of a probe after an update", max(proven, default=None), "nats", "lower", RUN,
        "types of numbers differ between trainer and engine, or the engine's kernels: docs/weights.md",
    )  # fmt: skip
    mismatch = _values(everything, "policy/logprob_mismatch")
    yield Figure(
        "correct", "logprob_mismatch", "largest mean difference of log-probabilities, engine and trainer", max(mismatch, default=None), "nats",
        "lower", RUN, "compare types, attention kernels and quantization of engine and trainer: docs/gpu.md",
    )  # fmt: skip
    differences, again = _resumed(run)
    yield Figure(
        "correct", "resumed_difference", "largest relative difference of steps that were trained again after a kill",
        max(differences, default=None), "", "zero", RUN, "set trainer.deterministic=true, and bench again",
        f"steps {', '.join(map(str, again))}: loss, gradient norm and reward" if again else "no step was trained again",
    )  # fmt: skip
    if nodes is None:
        return
    yield Figure(
        "correct", "matmul_wrong", "devices with wrong matrix products", float(len(nodes.wrong)), "", "zero", NODES,
        f"leave the node out with slurm.extra.exclude: {'; '.join(nodes.wrong)}",
    )  # fmt: skip
    yield Figure(
        "correct", "torn", "reads of a file while it is replaced with parts of two files", float(nodes.torn), "", "zero", NODES,
        "this filesystem breaks what every run relies on: choose another slurm.root", f"{nodes.reads} reads",
    )  # fmt: skip
    yield Figure(
        "correct", "seen_seconds", "until another process sees a new or replaced file", nodes.seen_seconds, "s", "lower", NODES,
        "ask for shorter attribute caching of slurm.root (actimeo)", _where(nodes),
    )  # fmt: skip


def _where(nodes: Nodes) -> str:
    return f"{len(nodes.hosts)} nodes" if len(nodes.hosts) > 1 else "one node, whose cache answers"


def _resumed(run: Run) -> tuple[list[float], list[int]]:
    """Return the largest relative differences of steps that several attempts trained, and these steps."""
    times: dict[int, list[Record]] = {}
    for record in last_records(run, "trainer", STEP_SECONDS, lambda _: True, most=1 << 20):
        times.setdefault(record.step, []).append(record)
    again = {step: records for step, records in times.items() if len({one.attempt for one in records}) > 1}
    differences = [
        max(_apart([one.metrics[name] for one in records if name in one.metrics]) for name in _COMPARED)
        for records in again.values()
    ]
    return differences, sorted(again)


def _apart(values: Sequence[float]) -> float:
    """Return the difference of the most different values, as a share of the largest; of one that is no number and another one 1."""
    if len({str(value) for value in values}) <= 1:
        return 0.0
    difference = (max(values) - min(values)) / max(map(abs, values))
    return difference if isfinite(difference) else 1.0


def _fast(run: Run, nodes: Nodes | None, steps: dict[int, dict[str, float]]) -> Iterator[Figure]:
    where = (
        f"steps {min(steps)} to {max(steps)}, medians" if steps else "no step between the first ones and the first kill"
    )
    slow = "hpcrl advise and hpcrl profile of the run show what waits; docs/performance.md has the settings"
    for key, title, name, unit in _OF_STEPS:
        value = _median(_values(steps, name))
        note = where if value is not None or not steps else f"the run has no {name}"
        yield Figure("fast", key, title, value, unit, "lower" if unit == "s" else "higher", RUN, slow, note)
    yield _checkpoints(run)
    first = next(iter(first_steps(run)), None)
    yield Figure(
        "fast", "first_step_seconds", "from the allocation to the end of the first step", sum(first.parts.values()) if first else None, "s",
        "lower", f"hpcrl goodput {run.name}", note=str(first) if first else "no step was trained",
    )  # fmt: skip
    if nodes is not None:
        yield from _of_nodes(nodes)


def _checkpoints(run: Run) -> Figure:
    everything = merged(run)
    rates = [
        metrics["throughput/checkpoint_gib"] * _GIB / _GB / seconds
        for metrics in everything.values()
        if (seconds := metrics.get("timing/save_checkpoints_behind") or metrics.get("timing/save_checkpoints"))
        and "throughput/checkpoint_gib" in metrics
    ]
    return Figure(
        "fast", "checkpoint_rate", "checkpoints", _median(rates), "GB/s", "higher", RUN,
        "compare with what the filesystem writes below; slurm.checkpoint_root names another one",
        f"{len(rates)} checkpoints, median" if rates else "no checkpoint was written",
    )  # fmt: skip


def _by_length(nodes: Nodes) -> Iterator[Figure]:
    remedy = "docs/performance.md has the settings"
    for key, title, unit, values in (
        ("train_tokens_per_second", "tokens trained, each rank", "tokens/s", nodes.tokens_per_second),
        ("mfu", "share of the device's peak in training", "", nodes.mfu),
    ):
        for length, value in values.items():
            whole, note = f"{title}, samples of {length} tokens", f"{nodes.ranks} ranks, random tokens"
            yield Figure("fast", f"{key}_{length}", whole, value, unit, "higher", NODES, remedy, note)
    for lengths, value in nodes.generated_per_second.items():
        prompt, _, completion = lengths.partition("_")
        title = f"tokens generated, one replica, prompts of {prompt} tokens, completions of {completion}"
        note = "random prompts, as many samples at once as in a step, 128 at most"
        key = f"engine_tokens_per_second_{lengths}"
        yield Figure("fast", key, title, value, "tokens/s", "higher", NODES, remedy, note)


def _of_nodes(nodes: Nodes) -> Iterator[Figure]:
    one = len(nodes.hosts) == 1
    yield from _by_length(nodes)
    yield Figure(
        "fast", "matmul_tflops", "matrix product in bf16, slowest device", nodes.tflops or None, "TFLOP/s", "higher", NODES,
        "a device that is throttled, or used by others: nvidia-smi -q -d PERFORMANCE", "" if nodes.tflops else "on GPUs only",
    )  # fmt: skip
    yield Figure(
        "fast", "bus_bandwidth_node" if one else "bus_bandwidth", f"all-reduce over {nodes.ranks} ranks of {len(nodes.hosts)} node(s), bus bandwidth",
        nodes.bus_bandwidth or None, "GB/s", "higher", NODES,
        "look at NCCL's choice of network with NCCL_DEBUG=INFO, and at slurm.network_interface",
        "as nccl-tests defines it; the sums were right" if nodes.ranks > 1 else "one rank sends nothing",
    )  # fmt: skip
    remedy = "compare with what the site promises; other users of the filesystem count"
    rates = (
        ("write_rate", "shared filesystem, written and on the disk", nodes.write_seconds),
        ("read_rate", "shared filesystem, read", nodes.read_seconds),
    )
    for key, title, seconds in rates:
        note = f"{nodes.written_bytes / _GB:.2f} GB in all, {_where(nodes)}"
        yield Figure("fast", key, title, nodes.written_bytes / _GB / seconds, "GB/s", "higher", NODES, remedy, note)
    yield Figure(
        "fast", "operations_rate", "shared filesystem: files made, looked at, renamed and removed", nodes.operations / nodes.operation_seconds,
        "1/s", "higher", NODES, remedy, _where(nodes),
    )  # fmt: skip
    yield Figure(
        "fast", "sync_seconds", "until a small file is on the disk under its name", nodes.sync_seconds, "s", "lower", NODES, remedy, _where(nodes)
    )  # fmt: skip


def _survives(run: Run, kills: Sequence[Kill]) -> Iterator[Figure]:
    account = account_of(run)
    yield Figure(
        "survives", "goodput", f"share of node seconds that trained, generated or evaluated, with {len(kills)} kills",
        account.goodput if account else None, "", "higher", f"hpcrl goodput {run.name}", note=str(account) if account else "no allocation is recorded",
    )  # fmt: skip
    records = sorted(last_records(run, "trainer", STEP_SECONDS, lambda _: True, most=1 << 20), key=lambda one: one.time)
    for kill in kills:
        # its samples may have been there; those of the step after it have been generated since
        under_way = 1 + max((one.step for one in records if one.time <= kill.time), default=0)
        awaited = under_way + (kill.role == "rollout")
        next_step = next((one.time for one in records if one.time > kill.time and one.step >= awaited), None)
        yield Figure(
            "survives", f"{kill.role}_next_step_seconds", f"from a kill of {kill.process} to the end of step {awaited}",
            None if next_step is None else next_step - kill.time, "s", "lower", RUN,
            note=f"killed in step {under_way}; the steps that were trained again are in it" if next_step else "no step followed",
        )  # fmt: skip
        if kill.role == "rollout":
            yield _generates_again(run, kill)


def _generates_again(run: Run, kill: Kill) -> Figure:
    spans = [one for one in read_spans(run, kill.attempt) if one.process == kill.process and one.kind == "generate"]
    began = min((one.start for one in spans if one.start > kill.time), default=None)
    return Figure(
        "survives", "rollout_again_seconds", f"from its kill until {kill.process} generates again", None if began is None else began - kill.time,
        "s", "lower", "timeline of the run", note="" if began else "it did not",
    )  # fmt: skip


def _planned(run: Run, bench: Bench, config: Config) -> Iterator[Figure]:
    planned, on_gpu = read_plan(bench), config.slurm.gpus > 0
    name = "memory/peak_device_gib" if on_gpu else "memory/peak_host_gib"
    measured = max(_values(merged(run), name), default=None)
    expected = planned.rank_bytes
    source = "hpcrl plan of the same configuration"
    yield Figure(
        "plan", "estimated_memory", "memory of a trainer rank, estimated", expected / _GIB or None, "GiB", "", source,
        note=planned.note,
    )  # fmt: skip
    rest = "" if on_gpu else "with Python and torch, half a GiB or more, which the estimate leaves out"
    yield Figure("plan", "measured_memory", "the same, highest", measured, "GiB", "lower", f"{RUN}: {name}", note=rest)
    share = measured * _GIB / expected if measured is not None and expected and on_gpu else None
    yield Figure(
        "plan", "memory_of_estimate", "measured share of the estimate", share, "", "", source,
        "report the configuration: hpcrl plan is wrong for it", "" if share is not None else "on GPUs only, with an estimate",
    )  # fmt: skip


def worst(figures: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the figures that are out of line."""
    return [figure for figure in figures if figure["level"] == "look"]
