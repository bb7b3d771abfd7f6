"""A run whose engine somebody else started with `hpcrl engine`: it trains on the same samples as with its own, and leaves the engine to others."""

from __future__ import annotations

import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hpcrl.observe.metrics import merged
from hpcrl.rundir.layout import Run
from tests.jobs.small_run import HPCRL, SMALL, curve, finish, hpcrl, logs_of, trained_groups, wait_for
from tests.paths import CONFIGS, QUICKSTART

VLLM = "generator.inference_engine.backend=vllm"
PROMPTS = str(CONFIGS / "quickstart" / "data" / "validation.parquet")


@contextmanager
def served(place: Path) -> Iterator[str]:
    """Start an engine as a person would, and return its address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = ["engine", str(QUICKSTART), VLLM, "--key-file", "engine.key", "--port", str(port), "--log", "engine.log"]
    with (place / "said.log").open("w") as said:
        process = subprocess.Popen([HPCRL, *words], cwd=place, stdout=said, stderr=subprocess.STDOUT)
    try:
        wait_for(
            lambda: "serving" in (place / "said.log").read_text() or process.poll() is not None,
            lambda: (place / "said.log").read_text(),
            420,
        )
        assert process.poll() is None, (place / "said.log").read_text()
        yield f"http://127.0.0.1:{port}"
    finally:
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0


def trained(place: Path, name: str, *settings: str) -> Run:
    words = ["submit", str(QUICKSTART), "--local", f"trainer.run_name={name}", *SMALL, VLLM, *settings]
    done = hpcrl(*words, cwd=place)
    assert done.returncode == 0, done.stderr
    run = Run.open(place / "runs" / "quickstart" / name)
    assert finish(run, 1, 600) == "done", logs_of(run)
    return run


@pytest.mark.slow
def test_a_run_with_an_engine_of_somebody_else(place: Path) -> None:
    own = trained(place, "own")
    with served(place) as url:
        said = (place / "said.log").read_text()
        assert f'generator.inference_engine.remote_urls = ["{url}"]' in said
        key = (place / "engine.key").read_text().strip()
        assert key not in said
        settings = [
            f'generator.inference_engine.remote_urls=["{url}"]',
            f"generator.inference_engine.remote_key_file={place / 'engine.key'}",
        ]
        run = trained(place, "elsewhere", *settings)
        assert trained_groups(run) == trained_groups(own)
        name = next(name for name in merged(own)[1] if name.startswith("reward/"))
        assert curve(run, name) == curve(own, name)
        assert (run.weights_of(4)).is_dir()
        for path in run.path.rglob("*"):
            assert not path.is_file() or key.encode() not in path.read_bytes(), path
        refused = hpcrl("eval", "elsewhere", "--checkpoint", "0", "--data", PROMPTS, *settings, cwd=place)
        assert refused.returncode == 7
        assert "it holds version 4 of a run, not the model" in refused.stderr
    with served(place) as url:
        settings[0] = f'generator.inference_engine.remote_urls=["{url}"]'
        done = hpcrl("eval", "elsewhere", "--checkpoint", "0", "--data", PROMPTS, *settings, cwd=place)
        assert done.returncode == 0, done.stderr
