"""Whole runs whose environments ask the policy at its endpoint."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from hpcrl.data.group_file import read_group
from hpcrl.data.vision.reader import row_images
from hpcrl.rundir.layout import Run
from tests.jobs.agents.tool_game import TOOLS, make
from tests.jobs.small_run import curve, eval_score, groups_in, hpcrl, logs_of
from tests.paths import CONFIGS, QUICKSTART, ROOT

ONE_TURN_EACH = ("trainer.train_batch_size=2", "trainer.policy_mini_batch_size=2", "generator.n_samples_per_prompt=2")


@pytest.mark.faults_slow
def test_a_program_with_the_client_of_openai_is_trained(place: Path) -> None:
    """configs/guess_number_agent.toml, two steps of four samples: rows, rewards and metrics are those of the game, and no key is left anywhere."""
    pytest.importorskip("openai")
    settings = ["trainer.run_name=agent", "trainer.max_steps=2", "trainer.eval_interval=0", *ONE_TURN_EACH]
    config = CONFIGS / "guess_number_agent.toml"
    done = hpcrl("submit", str(config), "--local", "--follow", *settings, cwd=place, timeout=300)
    run = Run(place / "runs" / "guess_number_agent" / "agent")
    assert done.returncode == 0, done.stderr + logs_of(run)
    assert set(curve(run, "environment/guesses")) == {1, 2}
    assert set(curve(run, "generate/failed_samples").values()) <= {0.0}
    groups = groups_in(run)
    assert groups
    for path, meta in groups:
        rows = read_group(path, None, meta)
        assert meta.owners == [0, 1]
        for row, sample in zip(rows, meta.samples, strict=True):
            turns = int((row.loss_mask[1:] > row.loss_mask[:-1]).sum())
            assert turns == sample.env_metrics["guesses"], "each guess goes on from the one before"
            assert sample.reward == sample.env_metrics["found"]
    texts = [path.read_bytes() for path in run.path.rglob("*") if path.is_file() and "code" not in path.parts]
    assert not any(b"OPENAI_API_KEY" in text or b"Bearer " in text for text in texts)


@pytest.mark.slow
def test_an_environment_that_asks_the_policy_teaches_it(place: Path) -> None:
    """The game of configs/guess_number.toml over HTTP: it finds its number as often as when the environment is stepped."""
    rows = [json.loads(line) for line in (CONFIGS / "guess_number" / "data" / "agent.jsonl").read_text().splitlines()]
    (place / "rows.jsonl").write_text("".join(json.dumps({**row, "env_class": None}) + "\n" for row in rows))
    data = json.dumps([str(place / "rows.jsonl")])
    settings = [
        *("trainer.run_name=asks", "trainer.max_steps=120", "trainer.eval_interval=120", "trainer.epochs=120"),
        *("trainer.train_batch_size=14", "trainer.policy_mini_batch_size=14", f"data.train_data={data}"),
        *(f"data.val_data={data}", "environment.env_class=tests.jobs.agents.guessing:Guessing"),
        *(f"python_path={json.dumps([str(ROOT)])}", "generator.inference_engine.enable_http_endpoint=true"),
    ]
    config = CONFIGS / "guess_number.toml"
    done = hpcrl("submit", str(config), "--local", "--follow", *settings, cwd=place, timeout=1800)
    run = Run(place / "runs" / "guess_number" / "asks")
    assert done.returncode == 0, done.stderr + logs_of(run)
    before, after = eval_score(run, 0), eval_score(run, 120)
    print(f"guess_number by asking: {before:.3f} -> {after:.3f}")
    assert before <= 0.4
    assert after >= 0.8


@contextmanager
def running(program: Path, python: str | Path = sys.executable, *arguments: str) -> Iterator[str]:
    """Run a service; yield its address."""
    service = subprocess.Popen([python, program, *arguments], stdout=subprocess.PIPE, text=True)
    try:
        assert service.stdout is not None
        yield service.stdout.readline().strip()
        assert service.poll() is None
    finally:
        service.terminate()
        service.wait(20)


@pytest.mark.slow
def test_a_service_that_plays_teaches_the_policy(place: Path) -> None:
    """The quickstart's task, asked and scored by a service with OpenAI's client: as much is learned as from the environment."""
    pytest.importorskip("openai")
    paths = {}
    for name in ("train", "validation"):
        rows = pq.read_table(CONFIGS / "quickstart" / "data" / f"{name}.parquet").drop(["env_class"]).to_pylist()
        paths[name] = place / f"{name}.jsonl"
        paths[name].write_text("".join(json.dumps(row) + "\n" for row in rows))
    with running(CONFIGS / "quickstart" / "service.py") as url:
        settings = [
            *("trainer.run_name=service", "trainer.eval_interval=30", "environment.env_class=agent"),
            f"data.train_data={json.dumps([str(paths['train'])])}",
            f"data.val_data={json.dumps([str(paths['validation'])])}",
            f"environment.skyrl_gym.agent.service.url={url}",
            "generator.inference_engine.enable_http_endpoint=true",
        ]
        done = hpcrl("submit", str(QUICKSTART), "--local", "--follow", *settings, cwd=place, timeout=2400)
    run = Run(place / "runs" / "quickstart" / "service")
    assert done.returncode == 0, done.stderr + logs_of(run)
    before, after = eval_score(run, 0), eval_score(run, 30)
    print(f"quickstart by a service: {before:.3f} -> {after:.3f}")
    assert set(curve(run, "generate/failed_samples").values()) <= {0.0}
    assert before < 0.5
    assert after > 0.9


@pytest.mark.slow
def test_an_agent_that_shows_images_teaches_the_policy(place: Path) -> None:
    """configs/count_shapes_agent.toml as it is: whoever does not look says 0 twice, which is right for a fifth of the images."""
    pytest.importorskip("openai")
    config = CONFIGS / "count_shapes_agent.toml"
    done = hpcrl("submit", str(config), "--local", "--follow", "trainer.run_name=looks", cwd=place, timeout=3600)
    run = Run(place / "runs" / "count_shapes_agent" / "looks")
    assert done.returncode == 0, done.stderr + logs_of(run)
    before, after, looks = eval_score(run, 0), eval_score(run, 30), curve(run, "environment/looks")
    print(f"count_shapes by an agent: {before:.3f} -> {after:.3f}; {looks[1]:.2f} looks, then {looks[30]:.2f}")
    assert set(curve(run, "generate/failed_samples").values()) <= {0.0}
    for path, meta in groups_in(run):
        rows = read_group(path, None, meta)
        assert meta.owners == list(range(8)), "both looks of a sample are one row"
        shown = [len(row_images(row.tensors)) for row in rows]
        assert shown == [sample.env_metrics["looks"] for sample in meta.samples]
    assert before < 0.3
    assert after >= 0.85


@pytest.mark.slow
def test_tool_calls_in_two_branches_of_several_turns_are_learned(place: Path) -> None:
    """The game of guess_number by tool calls, for two numbers from one first call, whose tokens are trained once; scores are posted."""
    pytest.importorskip("openai")
    model, rows = make(place)
    (place / "tools.json").write_text(json.dumps(TOOLS))
    data = json.dumps([str(rows)])
    with running(Path(__file__).parent / "branching_service.py", sys.executable, str(place / "tools.json")) as url:
        settings = [
            *("trainer.run_name=tools", "trainer.max_steps=120", "trainer.eval_interval=120", "trainer.epochs=120"),
            *("trainer.train_batch_size=14", "trainer.policy_mini_batch_size=14", "generator.max_turns=5"),
            *(f"data.train_data={data}", f"data.val_data={data}", "environment.env_class=agent"),
            *(f"trainer.policy.model.path={model}", "generator.max_input_length=48"),
            "generator.sampling_params.max_generate_length=6",
            f"environment.skyrl_gym.agent.service.url={url}",
            "generator.inference_engine.enable_http_endpoint=true",
        ]
        config = CONFIGS / "guess_number.toml"
        done = hpcrl("submit", str(config), "--local", "--follow", *settings, cwd=place, timeout=2400)
    run = Run(place / "runs" / "guess_number" / "tools")
    assert done.returncode == 0, done.stderr + logs_of(run)
    before, after = eval_score(run, 0), eval_score(run, 120)
    calls = curve(run, "environment/calls")
    print(
        f"guess_number by tool calls, two branches: {before:.3f} -> {after:.3f}; {calls[1]:.3f} of answers are calls, then {calls[120]:.3f}"
    )
    rows = [count for _, meta in groups_in(run) for count in (len(sample.lengths) for sample in meta.samples)]
    assert {1, 2} <= set(rows), "more where both branches have said the same so far: they go on from one of the answers"
    assert before <= 0.4
    assert after >= 0.8
    assert calls[120] >= 0.99
