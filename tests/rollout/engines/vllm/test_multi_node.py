"""An engine on several nodes, here two groups of processes on one machine: it says what the whole model does, and ends when a part ends."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from hpcrl.engines.vllm.client import EngineClient
from hpcrl.engines.vllm.multi_node import FirstNode, arrange, last_ended, missing_node, note_ended, read_rendezvous
from hpcrl.engines.vllm.server import Server
from hpcrl.launch.agent.network import choose_port
from hpcrl.rollout.engines.base import Engine
from hpcrl.rundir.layout import Run
from hpcrl.runtime.process_status import GIVEN_UP, StatusWriter
from hpcrl.runtime.scratch import Scratch
from tests.paths import ROOT
from tests.rollout.conftest import runner
from tests.rollout.engines.test_contract import assert_close, updated_while_running
from tests.rollout.material import LONG_PROMPT, START_S, group_of, make_model, options, wait_for

WHOLE = {"temperature": 1.0, "max_tokens": 24}
LOCAL = "127.0.0.1"


def test_each_start_has_a_meeting_of_its_own(tmp_path: Path) -> None:
    run = Run(tmp_path)
    assert read_rendezvous(run, 1, 0) is None
    first = arrange(run, 1, 0, LOCAL, choose_port)
    assert read_rendezvous(run, 1, 0) == first
    second = arrange(run, 1, 0, LOCAL, choose_port)
    assert (first.number, second.number) == (1, 2)
    assert arrange(run, 1, 1, LOCAL, choose_port).number == arrange(run, 2, 0, LOCAL, choose_port).number == 1
    assert read_rendezvous(run, 1, 0) is None, "of an earlier attempt"
    assert last_ended(run, 1, 0) == 0
    note_ended(run, 1, 0, 2)
    assert last_ended(run, 1, 0) == 2
    assert last_ended(run, 2, 0) == 0


def test_a_part_that_has_ended_or_is_given_up_is_missing(tmp_path: Path) -> None:
    run = Run(tmp_path)
    assert missing_node(run, 1, 3, range(2)) is None
    note_ended(run, 1, 1, 2)
    assert missing_node(run, 1, 3, range(2)) is None, "in a start before"
    note_ended(run, 1, 1, 3)
    assert missing_node(run, 1, 3, range(2)) == 1
    run.endpoints.mkdir(exist_ok=True)
    StatusWriter(run, "part-0", 1).write(f"{GIVEN_UP}: EngineError: no such device")
    assert missing_node(run, 1, 4, range(2)) == 0
    assert missing_node(run, 1, 4, range(1, 2)) is None


@contextmanager
def on_two_nodes(models: list[Path], token_file: Path, folder: Path) -> Iterator[tuple[FirstNode, Server, Run]]:
    run, scratches = Run(folder / "run"), [Scratch("engine") for _ in range(2)]
    rendezvous = arrange(run, 1, 0, LOCAL, choose_port)
    given = options(str(models[0]), token_file)
    given = replace(given, engine=replace(given.engine, tensor_parallel_size=2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        patch.setenv("HPCRL_ADDRESS", LOCAL)
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            patch.setenv(name, "lo")
        log = folder / "first.log"
        first = FirstNode(
            replace(given, node=rendezvous.node(2, 0)), scratches[0].path, log, run, 1, rendezvous, range(1)
        )
        other = Server(replace(given, node=rendezvous.node(2, 1)), scratches[1].path, folder / "other.log")
    try:
        first.wait_ready(START_S)
        yield first, other, run
    finally:
        for server, scratch in zip((first, other), scratches, strict=True):
            server.stop()
            scratch.remove()


@pytest.mark.slow
def test_an_engine_on_two_nodes(token_file: Path, tmp_path: Path) -> None:
    models = [make_model(tmp_path / str(seed), seed, kv_heads=2) for seed in (0, 2)]
    with on_two_nodes(models, token_file, tmp_path) as (first, other, run):

        async def play(engine: Engine) -> None:
            for one in await engine.generate(LONG_PROMPT, 4, 3, WHOLE):
                assert_close(one, models[0], LONG_PROMPT)
            await updated_while_running(engine, models[1])
            for one in await engine.generate(LONG_PROMPT, 4, 3, WHOLE):
                assert_close(one, models[1], LONG_PROMPT)
            assert isinstance(engine, EngineClient)
            proofs = await engine._proofs("weight_proof")
            assert [(proof["rank"], proof["of"]) for proof in proofs] == [(0, 2), (1, 2)]

        runner(first, models[0])(play)
        assert len(group_of(other.pid)) > 1, "a worker of its own"
        assert first.alive()
        for pid in group_of(other.pid)[1:]:
            os.kill(pid, signal.SIGKILL)
        wait_for(lambda: not other.alive(), 60, "a part without its worker goes on")
        note_ended(run, 1, 0, 1)
        wait_for(lambda: not first.alive(), 10, "the first part goes on alone")
        assert "part-0 of it is not there" in str(first.failure("ended"))
