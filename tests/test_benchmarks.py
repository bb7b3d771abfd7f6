"""Programs of benchmarks/ are run by hand and seldom: what they import of this project has to be there still."""

from __future__ import annotations

import ast
import math
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from itertools import chain, islice, repeat, takewhile
from pathlib import Path

import pytest
import torch

from benchmarks.engine_tokens import repeating
from benchmarks.layouts import rows
from benchmarks.losses import Formula, Numbers, Ours, cases, gradients
from benchmarks.replay_cluster import (
    DAY,
    Cluster,
    Job,
    Request,
    Times,
    drawn_jobs,
    kinds_of_runs,
    play,
    read_swf,
    repeated_jobs,
)
from hpcrl.algorithms.kl import KL_ESTIMATORS
from hpcrl.algorithms.likelihood import LIKELIHOOD_LOSSES
from hpcrl.algorithms.losses import POLICY_LOSSES
from hpcrl.algorithms.preferences import PAIR_LOSSES
from hpcrl.config.sections.dpo import UNPAIRED_LOSSES
from tests.paths import ROOT

PROGRAMS = sorted((ROOT / "benchmarks").rglob("*.py"))
PROGRAMS = [path for path in PROGRAMS if ".venv" not in path.parts]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: str(path.relative_to(ROOT / "benchmarks")))
def test_what_a_benchmark_imports_is_there(program: Path) -> None:
    for node in ast.walk(ast.parse(program.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in ("hpcrl", "benchmarks"):
            module = import_module(node.module)
            for name in node.names:
                assert hasattr(module, name.name) or find_spec(f"{node.module}.{name.name}"), (
                    f"{node.module}: {name.name}"
                )


def test_the_page_has_the_layouts_that_the_program_finds() -> None:
    page = (ROOT / "docs" / "performance.md").read_text()
    for row in rows(["Qwen3-0.6B", "Qwen3-30B-A3B"]):
        assert row in page.splitlines()


def test_prompts_of_a_benchmark_have_a_text_each() -> None:
    prompts = repeating(ROOT / "configs" / "quickstart" / "model", 200)
    assert len({tuple(prompt) for prompt in prompts}) == 200
    assert min(map(len, prompts)) > 50


LOSSES = {name: case for name, *case in cases()}


def test_no_loss_is_without_a_formula_of_its_source() -> None:
    named = {*POLICY_LOSSES, *KL_ESTIMATORS, *LIKELIHOOD_LOSSES, *PAIR_LOSSES, *UNPAIRED_LOSSES}
    assert named | {
        "contrastive",
        "online_dpo",
        "optimal_token_baseline",
        "value",
        "jsd, beta 0",
        "jsd, beta 0.3",
        "jsd, beta 1",
    } == set(LOSSES)


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_and_its_gradient_are_those_of_the_formula(name: str) -> None:
    start: Numbers
    ours: Ours
    formula: Formula
    _, start, ours, formula = LOSSES[name]
    found, expected = gradients(start, ours, formula)
    assert found == pytest.approx(expected, rel=1e-6, abs=1e-6)
    assert ours(torch.tensor(start, dtype=torch.float64)).item() == pytest.approx(formula(start, start), rel=1e-6)


def quiet() -> Iterator[Job]:
    """Yield jobs that come too late to matter."""
    return repeat(Job(1e9, 1, 1.0, 1.0))


def test_backfill_does_not_delay_the_first_job_that_waits() -> None:
    cluster, started = Cluster(6, quiet()), dict[str, tuple[float, int, float]]()

    def submit(name: str, least: int, most: int, limit_s: float, least_limit_s: float = math.inf) -> Request:
        def begin(one: Request) -> None:
            started[name] = (cluster.now, one.nodes, one.until)

        request = Request(least, most, limit_s, begin, least_limit_s)
        cluster.submit(request)
        return request

    running = submit("runs", 3, 3, 100.0)
    cluster.at(1.0, submit, "first", 5, 5, 50.0)
    cluster.at(2.0, submit, "long", 2, 2, 200.0)
    cluster.at(3.0, submit, "short", 1, 1, 97.0)
    cluster.at(4.0, submit, "range", 1, 4, 200.0, 60.0)
    cluster.at(80.0, cluster.end, running)
    cluster.play(lambda: cluster.now >= 80.0)
    assert started == {"runs": (0.0, 3, 100.0), "short": (3.0, 1, 100.0), "range": (4.0, 2, 100.0)}


def test_a_trace_in_the_standard_workload_format(tmp_path: Path) -> None:
    """Nodes have eight processors; a job that was cancelled before it started is none."""
    path = tmp_path / "trace.swf"
    path.write_text(
        "; Version: 2.2\n; MaxNodes: 4\n; MaxProcs: 32\n;\n"
        "2 110 0 200 17 -1 -1 -1 -1 -1 1 1 1 -1 1 -1 -1 -1\n"
        "1 100 5 90.5 8 -1 -1 8 600 -1 1 1 1 -1 1 -1 -1 -1\n"
        "3 120 0 0 8 -1 -1 8 600 -1 5 1 1 -1 1 -1 -1 -1\n"
    )
    nodes, jobs = read_swf(path)
    assert (nodes, jobs) == (4, [Job(100, 1, 90.5, 600), Job(110, 3, 200, 200)])
    again = list(islice(repeated_jobs(nodes, jobs, 0.5, 0), 200))
    offered = sum(job.nodes * job.seconds for job in again) / (nodes * again[-1].submitted)
    assert offered == pytest.approx(0.5, rel=0.02)


def test_drawn_jobs_offer_the_load() -> None:
    jobs = list(takewhile(lambda job: job.submitted < 400 * DAY, drawn_jobs(64, 0.8, 1)))
    assert sum(job.nodes * job.seconds for job in jobs) / (64 * 400 * DAY) == pytest.approx(0.8, rel=0.05)
    assert all(1 <= job.nodes <= 64 and job.seconds <= job.limit_s for job in jobs)


def test_a_run_has_its_steps_whatever_happens_to_it() -> None:
    """On a quiet cluster: as long as its steps, and with preemptions as much longer as these take."""
    times, kinds = Times(steps=100), kinds_of_runs(16)
    alone, preempted = (play(64, quiet(), kinds["fixed"][0], each, 0) for each in (times, replace(times, preempt_s=1800.0)))  # fmt: skip
    ((start, end, nodes),) = alone.held
    assert (end - start, nodes) == (pytest.approx(100 * 60 + 80 + 20), 16)
    assert preempted.uses["training"] == pytest.approx(alone.uses["training"])
    assert len(preempted.held) == 4
    for run in (alone, preempted):
        assert run.uses.total() == pytest.approx(sum((end - start) * nodes for start, end, nodes in run.held))


def test_a_range_starts_on_the_nodes_that_are_free_and_grows() -> None:
    kinds, hours = kinds_of_runs(16), dict[str, float]()
    for name in ("fixed", "range", "growth"):
        settings, growth = kinds[name]
        jobs = chain([Job(0.0, 12, 7 * DAY, 8 * DAY)], quiet())
        run = play(20, jobs, settings, Times(steps=3000, **growth), 0)
        assert run.held[0][2] == (16 if name == "fixed" else 8)
        hours[name] = run.ended - run.submitted
    assert hours["growth"] < hours["range"] < hours["fixed"]
