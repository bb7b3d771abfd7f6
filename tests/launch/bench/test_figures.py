"""Figures of a bench from files of a run: which steps count, what a kill cost, what is out of line; the page; the comparison."""

from __future__ import annotations

import json
import os
import socket
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from hpcrl.cli.main import main
from hpcrl.errors import RunError
from hpcrl.launch.bench.experiment import make_experiment
from hpcrl.launch.bench.figures import Figure, bench_report, judged
from hpcrl.launch.bench.folder import Bench, Kill, Nodes, Planned
from hpcrl.launch.bench.models import SHAPES, fitting
from hpcrl.launch.bench.page import bench_page
from hpcrl.launch.bench.survive import answer_of, process_of, roles_of, survive
from hpcrl.launch.bench.usual import usual_of
from hpcrl.launch.manage.registry import all_runs
from hpcrl.launch.nodes import Node, make_plan
from hpcrl.observe.metrics import MetricsWriter
from hpcrl.rundir.commit import write_json, write_text
from hpcrl.rundir.layout import Run
from hpcrl.rundir.ledger import open_attempt, read_attempts, report_outcome
from hpcrl.rundir.starts import note

NODES = Nodes(
    hosts=["n1", "n2"], ranks=16, device="NVIDIA H100 80GB HBM3", bus_bandwidth=80.0, tflops=500.0, wrong=[], written_bytes=2 * 10**9,
    write_seconds=4.0, read_seconds=2.0, operations=1600, operation_seconds=0.5, sync_seconds=0.01, seen_seconds=1.5, reads=9000, torn=0,
    tokens_per_second={"1024": 20000.0}, mfu={"1024": 0.05}, generated_per_second={"64_960": 5000.0},
)  # fmt: skip


def of_step(seconds: float, loss: float = 1.0) -> dict[str, float]:
    return {
        "timing/step": seconds, "policy/final_loss": loss, "policy/grad_norm": 2.0, "throughput/train_tokens_per_second_per_rank": 100 / seconds,
        "throughput/checkpoint_gib": 1.0, "timing/save_checkpoints_behind": 2.0, "policy/logprob_mismatch": 0.001 * seconds,
        "memory/peak_host_gib": 3.0,
    }  # fmt: skip


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """A bench whose trainer was killed after step 8, and trained steps 7 and 8 again, step 8 with another loss."""
    bench, config = make_experiment("b", [], [f"slurm.root={tmp_path}"], nodes=2, minutes=30, model=None)
    run = Run(tmp_path / "bench" / "b")
    write_text(run.config, config.to_toml())
    write_json(
        run.submission,
        {"executor": "local", "host": socket.gethostname(), "job_id": "1", "overrides": [], "submitted": 1.0},
    )
    for number, steps, losses in ((1, range(1, 9), [1.0] * 8), (2, range(7, 11), [1.0, 1.25, 1.0, 1.0])):
        open_attempt(run, f"local-{number}", ["n1"])
        note(run, {"attempt": number, "from": None})
        with MetricsWriter(run, "trainer", number, steps[0] - 1) as writer:
            for step, loss in zip(steps, losses, strict=True):
                writer.write(step, of_step(9.0 if step < 3 or number == 2 else 0.1 * step, loss))
        with MetricsWriter(run, "rollout-0", number, None) as writer:
            writer.write(
                steps[-1], {"weights/pause_seconds": 0.5, **({"weights/probe_difference": 0.5} if number == 1 else {})}
            )
        if number == 1:
            killed = time.time()
            report_outcome(run, 1, "failed", "killed", "agent-0")
    write_json(bench.nodes, asdict(NODES))
    write_json(bench.plan, asdict(Planned(2**30, "all of it")))
    write_json(bench.kills, {"kills": [asdict(Kill("trainer", "rank-0", 1, killed, 8))]})
    return run


def figures(run: Run) -> dict[str, dict[str, Any]]:
    return {figure["key"]: figure for figure in bench_report(run)["figures"]}


def test_steps_after_the_first_ones_and_before_the_first_kill_count(run: Run) -> None:
    found = figures(run)
    # 3 to 8, of which the last two were trained once more by the second attempt, whose values count
    assert found["step_seconds"]["value"] == pytest.approx(0.55)
    assert found["checkpoint_rate"]["value"] == pytest.approx(2**30 / 1e9 / 2)
    assert found["mfu"]["level"] == "not measured"
    assert found["write_rate"]["value"] == pytest.approx(0.5)
    assert found["mfu_1024"] == found["mfu_1024"] | {"value": 0.05, "level": "look"}
    assert found["operations_rate"]["value"] == pytest.approx(3200)
    generated = found["engine_tokens_per_second_64_960"]
    assert (generated["value"], generated["level"], generated["better"]) == (5000.0, "first seen", "higher")
    assert generated["title"].endswith("prompts of 64 tokens, completions of 960")


def test_usual_values_of_a_length_are_those_of_the_figure() -> None:
    for key in ("mfu", "mfu_1024", "mfu_64_960"):
        usual = usual_of(key, "NVIDIA H100 80GB HBM3")
        assert usual is not None
        assert usual.figure == "mfu"


def test_the_folder_of_a_bench_is_no_run(run: Run) -> None:
    assert [one.path for one in all_runs(run.root)] == [run.path]


def test_a_loss_that_is_no_number_differs(run: Run) -> None:
    with MetricsWriter(run, "trainer", 3, 8) as writer:
        writer.write(9, of_step(1.0, float("nan")))
    assert figures(run)["resumed_difference"]["value"] == 1.0


def test_a_kill_costs_time_and_must_not_change_what_is_trained(run: Run) -> None:
    found = figures(run)
    assert found["resumed_difference"]["value"] == pytest.approx(0.2)
    assert found["resumed_difference"]["note"].startswith("steps 7, 8:")
    assert 0 <= found["trainer_next_step_seconds"]["value"] < 60
    assert found["unproven"] == found["unproven"] | {"value": 1.0, "level": "look"}


def test_what_is_out_of_line_has_a_remedy_and_its_source(run: Run) -> None:
    found = figures(run)
    slow = found["matmul_tflops"]
    assert (slow["level"], slow["usual"]) == ("look", "692 to 989.4")
    assert "throttled" in slow["remedy"]
    assert slow["usual_source"]
    assert found["bus_bandwidth"] == found["bus_bandwidth"] | {"level": "first seen", "usual": "", "remedy": ""}
    assert found["seen_seconds"]["level"] == "ok"
    figure = Figure("fast", "bus_bandwidth_node", "", 300.0, "GB/s", "higher", "", "look")
    assert judged(figure, NODES.device) == replace(judged(figure, NODES.device), level="ok", remedy="")
    assert judged(figure, "NVIDIA of tomorrow").level == "first seen"


def test_the_page_shows_names_as_text(run: Run) -> None:
    report = bench_report(run) | {"device": "<script>alert(1)</script>"}
    page = bench_page(report)
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    assert "matrix product in bf16" in page
    assert '<th scope="row"><span class="good">ok</span></th>' in page, "its letters would stand one below the other"


def test_compare_ends_with_1_where_a_figure_is_worse(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = bench_report(run)
    paths = [tmp_path / "before.json", tmp_path / "after.json"]
    for path, rate in zip(paths, (4.0, 3.0), strict=True):
        for figure in report["figures"]:
            if figure["key"] == "write_rate":
                figure["value"] = rate
        path.write_text(json.dumps(report))
    before, after = map(str, paths)
    assert main(["bench", "compare", before, before]) == 0
    assert main(["bench", "compare", after, before]) == 0
    assert "better by 33.3%" in capsys.readouterr().out
    assert main(["bench", "compare", before, after]) == 1
    assert "worse by 25.0%" in capsys.readouterr().out
    nightly = [before, before, after]
    assert main(["bench", "compare", *nightly, before]) == 0
    assert "median of 3" in capsys.readouterr().out
    assert main(["bench", "compare", *nightly, after]) == 1, "one slow night does not move the medians"
    strange = [json.dumps({"figures": [report["figures"][0] | own]}) for own in ({"key": []}, {"value": 10**400})]
    for content in ("[1]", '{"figures": [{}]}', '{"figures": [[1]]}', "{", "[" * 100_000, *strange):
        paths[0].write_text(content)
        assert main(["bench", "compare", before, after]) == 4
        assert "is no report of hpcrl bench" in capsys.readouterr().err


def test_a_run_that_a_person_cancels_stays_cancelled(run: Run) -> None:
    report_outcome(run, 2, "cancelled", "by hand", "hpcrl cancel")
    lines = list[str]()
    survive(run, Bench.of(run), 60.0, lines.append)
    assert lines == ["b is cancelled after 0 kills"]
    assert len(read_attempts(run)) == 2


def test_a_process_of_each_role_of_the_run_is_killed(tmp_path: Path) -> None:
    def plan(*changes: str) -> list[Node]:
        words = [f"slurm.root={tmp_path}", *changes]
        name = f"b{len(changes)}"
        return make_plan(make_experiment(name, [], words, nodes=2, minutes=30, model=None)[1])

    assert roles_of(plan()) == ["rollout", "trainer", "controller"]
    scored = plan(
        "trainer.algorithm.use_kl_loss=true",
        "trainer.placement.colocate_policy_ref=false",
        "trainer.placement.policy_num_nodes=1",
    )
    assert roles_of(scored) == ["rollout", "trainer", "scorer", "controller"]
    assert [process_of(scored, role) for role in roles_of(scored)] == [
        ("rollout-0", scored[1]), ("rank-0", scored[0]), ("scorer-0", scored[2]), ("controller", scored[0]),
    ]  # fmt: skip


def test_a_node_that_does_not_answer_does_not_hold_a_bench_up() -> None:
    with pytest.raises(RunError, match=r"rank-0 was not killed: its node gave no answer in 0\.1 s"):
        answer_of(["sleep", "60"], os.environ, "rank-0", 0.1)
    with pytest.raises(RunError, match="rank-0 is not there"):
        answer_of(["sh", "-c", "echo hpcrl: rank-0 is not there >&2; exit 1"], os.environ, "rank-0", 60.0)
    assert answer_of(["echo", "12.5"], os.environ, "rank-0", 60.0) == 12.5


def test_report_writes_both_files_and_names_damage(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["bench", "report", str(run.path), "-o", str(tmp_path / "out")]
    assert main(words) == 1
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["b.html", "b.json"]
    for file in (Bench.of(run).kills, Bench.of(run).nodes, Bench.of(run).plan):
        whole = file.read_bytes()
        for content in ("[1]", "{", '{"kills": 1, "ranks": "x", "rank_bytes": "x"}'):
            file.write_text(content)
            assert main(words) == 5
            assert str(file) in capsys.readouterr().err
        file.write_bytes(whole)
    Bench.of(run).config.unlink()
    assert main(words) == 5
    assert "is no run of hpcrl bench" in capsys.readouterr().err


def test_the_experiment_of_a_site(tmp_path: Path) -> None:
    root = f"slurm.root={tmp_path}"
    _, config = make_experiment("one", [], [root], nodes=1, minutes=3, model=None)
    assert config.trainer.placement.colocate_all
    assert (config.slurm.time_minutes, config.generator.inference_engine.backend) == (5, "transformers")
    bench, config = make_experiment(
        "two", [], [root, "slurm.gpus_per_node=h100:4", "trainer.ckpt_interval=7"], nodes=2, minutes=30, model=None
    )
    assert config.trainer.policy.model.path == str(bench.model)
    assert (bench.model / "tokenizer.json").is_file()
    placement = config.trainer.placement
    assert (placement.policy_num_gpus_per_node, config.generator.inference_engine.num_engines, config.slurm.nodes) == (
        4,
        4,
        2,
    )
    assert config.trainer.ckpt_interval == 7


def test_the_largest_model_that_fits() -> None:
    gib = 2**30
    assert [fitting(memory * gib) for memory in (0, 40, 80, 8 * 80)] == ["0.6B", "0.6B", "1.7B", "8B"]
    assert list(SHAPES) == ["0.6B", "1.7B", "4B", "8B"]
