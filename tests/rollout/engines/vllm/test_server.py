"""How a server starts, fails and ends."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from hpcrl.engines.vllm.client import EngineClient
from hpcrl.engines.vllm.server import Server, _environment, compile_cache
from hpcrl.errors import ConfigError, EngineError
from hpcrl.runtime.scratch import Scratch
from hpcrl.runtime.token import bearer
from tests.rollout.material import RUN_NAME, START_S, TOKEN, children_of, group_of, options, publish, wait_for

_CACHES = {"VLLM_CACHE_ROOT": "vllm", "TRITON_CACHE_DIR": "triton", "FLASHINFER_WORKSPACE_BASE": "flashinfer"}


@pytest.fixture
def scratch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Scratch:
    # only to see that it works where paths are long: the directory goes to /tmp then
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / ("x" * 60)))
    return Scratch("engine")


@pytest.mark.faults_slow
def test_a_model_that_is_missing_is_said(token_file: Path, tmp_path: Path) -> None:
    scratch = Scratch("engine")
    server = Server(options(str(tmp_path / "no-model"), token_file), scratch.path, tmp_path / "engine.log")
    try:
        with pytest.raises(EngineError) as caught:
            server.wait_ready(120)
        first, *rest = str(caught.value).splitlines()
        assert "did not start (exit status 1)" in first
        assert str(tmp_path / "no-model") in first
        assert str(tmp_path / "engine.log") in rest[-1]
        assert all(line.startswith("  ") for line in rest)
    finally:
        server.stop()
        scratch.remove()
    assert not group_of(server.pid)
    assert not scratch.path.exists()


@pytest.mark.faults_slow
@pytest.mark.parametrize(
    ("architecture", "extra", "words"),
    [
        ("NoSuchForCausalLM", {}, "NoSuchForCausalLM"),
        ("Qwen2ForCausalLM", {"no_such_option": 1}, "no-such-option"),
        ("Qwen2ForCausalLM", {"block_size": "many"}, "block-size"),
    ],
)
def test_what_no_further_start_changes_is_an_error_of_the_configuration(
    models: list[Path], token_file: Path, tmp_path: Path, architecture: str, extra: dict[str, Any], words: str
) -> None:
    """Which ends the attempt, where an error of the engine starts the replica again."""
    model, scratch = shutil.copytree(models[0], tmp_path / "model"), Scratch("engine")
    entries = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(entries | {"architectures": [architecture]}))
    asked = options(str(model), token_file)
    engine = replace(asked.engine, engine_init_kwargs={**asked.engine.engine_init_kwargs, **extra})
    server = Server(replace(asked, engine=engine), scratch.path, tmp_path / "engine.log")
    try:
        with pytest.raises(ConfigError, match=f"did not start.*{words}"):
            server.wait_ready(START_S)
    finally:
        server.stop()
        scratch.remove()


@pytest.mark.faults_slow
def test_bad_weights_and_a_core_that_hangs(
    models: list[Path], token_file: Path, tmp_path: Path, scratch: Scratch
) -> None:
    server = Server(options(str(models[0]), token_file), scratch.path, tmp_path / "engine.log")
    try:
        server.wait_ready(START_S)
        tensors = load_file(models[1] / "model.safetensors")
        del tensors["model.norm.weight"]
        (tmp_path / "less").mkdir()
        save_file(tensors, tmp_path / "less" / "model.safetensors")
        less = publish(tmp_path / "less", tmp_path / "v000001", 1)

        async def update() -> None:
            engine = EngineClient(server.socket, bearer(TOKEN, RUN_NAME))
            try:
                await engine.update_weights(less)
            finally:
                assert engine.version == 0
                await engine.close()

        with pytest.raises(EngineError, match="/update_weights"):
            asyncio.run(update())
        assert "lacks model.norm.weight" in str(server.failure("refused new weights"))
        (core,) = [pid for pid in children_of(server.pid) if b"EngineCore" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        os.kill(core, signal.SIGSTOP)
    finally:
        server.stop()
        scratch.remove()
    wait_for(lambda: not group_of(server.pid), 2, "processes are left")


def test_kernels_are_kept_on_the_node(tmp_path: Path, token_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's own place is below a home that containers lack, and that nodes of other GPUs share."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    for name in ("VLLM_LOGGING_LEVEL", *_CACHES):
        monkeypatch.delenv(name, raising=False)
    given = replace(options(str(tmp_path), token_file), on_cpu=False)
    kept = compile_cache()
    assert kept is not None
    made = _environment(given, tmp_path / "scratch")
    assert "OMP_NUM_THREADS" not in made, "vLLM leaves its hot loop multi-threaded where it is set"
    assert {name: made[name] for name in _CACHES} == {name: str(kept / tool) for name, tool in _CACHES.items()}
    assert made["VLLM_LOGGING_LEVEL"] == "INFO", "its log names backend, runner and cache"
    assert "VLLM_BATCH_INVARIANT" not in made
    assert _environment(replace(given, deterministic=True), tmp_path / "scratch")["VLLM_BATCH_INVARIANT"] == "1"
    monkeypatch.setenv("VLLM_CACHE_ROOT", "/fast/own")
    assert _environment(given, tmp_path / "scratch")["VLLM_CACHE_ROOT"] == "/fast/own"
    kept.chmod(0o777)
    made = _environment(given, tmp_path / "scratch")
    assert made["TRITON_CACHE_DIR"] == str(tmp_path / "scratch" / "triton"), "anybody may write to the other"


def test_compiled_code_is_taken_from_no_other_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    place = compile_cache()
    assert place is not None
    assert place.parent == tmp_path
    assert place.stat().st_mode & 0o777 == 0o700
    assert compile_cache() == place
    place.chmod(0o777)
    assert compile_cache() is None, "anybody may write there"
    place.rename(tmp_path / "elsewhere")
    place.symlink_to(tmp_path / "elsewhere")
    assert compile_cache() is None
    place.unlink()
    place.touch()
    assert compile_cache() is None
    if os.getuid() == 0:
        place.unlink()
        place.mkdir(0o700)
        os.chown(place, 1, 1)
        assert compile_cache() is None
