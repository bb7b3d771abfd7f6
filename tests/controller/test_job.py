"""The controller's job as a process: which prompts it hands out is what section `data` says; and the controller under the load of many workers."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hpcrl.config import Config
from hpcrl.data.cache_files import turn_file
from hpcrl.rundir.checked_lines import append_lines
from hpcrl.rundir.commit import write_bytes, write_json, write_text
from hpcrl.rundir.layout import Run
from hpcrl.runtime.controller_client import ControllerClient
from hpcrl.sandboxes.snapshots import KEPT_S
from hpcrl.types import Work
from tests.controller.http_load import Load, measure
from tests.controller.test_api import finish
from tests.jobs.small_run import wait_for
from tests.paths import CONFIGS, ROOT

MODEL = CONFIGS / "quickstart" / "model"


def make_run(path: Path, **sections: dict[str, Any]) -> Run:
    rows = [{"question": f"sort: {'ab' * i}", "answer": f"{i}"} for i in range(12)]
    data = path / "rows.jsonl"
    write_text(data, "".join(json.dumps(row) + "\n" for row in rows))
    columns = {"prompt_column": "question", "response_column": "answer"}
    config = {
        "data": {"train_data": [str(data)], **columns, **sections.pop("data", {})},
        "trainer": {
            "policy": {"model": {"path": str(MODEL)}},
            "train_batch_size": 2,
            "policy_mini_batch_size": 2,
            "max_prompt_length": 24,
            **sections.pop("trainer", {}),
        },
        "environment": {"env_class": "sort_letters"},
        **sections,
    }
    run = Run(path / "project" / "run")
    write_text(run.config, Config.from_dict(config).to_toml())
    write_text(run.token, "secret\n", mode=0o600)
    return run


@contextmanager
def controller(run: Run) -> Iterator[ControllerClient]:
    environment = {**os.environ, "HPCRL_ATTEMPT": "1", "HPCRL_ADDRESS": "127.0.0.1"}
    process = subprocess.Popen([sys.executable, ROOT / "jobs" / "controller.py", run.path], env=environment)
    calls = ControllerClient(run, 1, patience_s=60)
    try:
        yield calls
        write_json(run.stop, {"attempt": 1, "reason": "cancelled"})
    finally:
        calls.close()
        process.kill()
        process.wait()


def claimed(calls: ControllerClient, version: int = 0) -> list[Work]:
    answer = calls.call("claim", worker="rollout-0", version=version, capacity=99, holding=[])
    return [Work.from_json(item) for item in answer["work"]]


def evaluated(calls: ControllerClient, run: Run, work: list[Work]) -> list[Work]:
    """Finish training groups, and those that begin then; return the rows of the evaluation that begin after them."""
    while work[0].kind == "train":
        groups = [replace(finish(run, item, 0), data_source="rows").to_json() for item in work]
        calls.call("complete", worker="rollout-0", groups=groups)
        work = claimed(calls)
    return work


def test_prompts_set_aside_in_the_order_of_the_file_by_columns_of_other_names(tmp_path: Path) -> None:
    data = {"test_size": 0.25, "val_data": [], "shuffle": False}
    run = make_run(tmp_path, data=data, trainer={"fully_async": {"max_staleness_steps": 1}})
    with controller(run) as calls:
        assert calls.call("start", step=0)["total_steps"] == 4  # 12, but 3 set aside and one of 26 tokens
        work = claimed(calls)
        work += evaluated(calls, run, work)
    assert [(item.kind, item.prompt.uid) for item in work] == [
        *[("train", f"{i}") for i in range(3, 7)],
        *[("eval", f"{i}") for i in range(3)],
    ]
    for item in work:
        index = int(item.prompt.uid)
        assert item.prompt.messages == [{"role": "user", "content": f"sort: {'ab' * index}"}]
        assert item.prompt.extras == {"answer": f"{index}", "reward_spec": {"ground_truth": f"{index}"}}


def test_chat_template_counts_and_bounds_hold(tmp_path: Path) -> None:
    template = tmp_path / "long.jinja"
    template.write_text("{{ messages[0].content }}{{ messages[0].content }}")
    run = make_run(
        tmp_path,
        data={"test_size": 3},
        trainer={
            "epochs": 4,
            "eval_batch_size": 2,
            "fully_async": {"max_staleness_steps": 3, "num_parallel_generation_workers": 3},
        },
        generator={"chat_template": {"source": "file", "name_or_path": str(template)}},
    )
    with controller(run) as calls:
        assert calls.call("start", step=0)["total_steps"] == 4  # of the rows 3 to 5, the longest that fit twice
        work = claimed(calls)
        work += evaluated(calls, run, work)
    assert [item.kind for item in work] == ["train"] * 3 + ["eval"] * 2
    assert {int(item.prompt.uid) for item in work if item.kind == "train"} <= {3, 4, 5}


def test_snapshots_that_no_turn_names_are_removed(tmp_path: Path) -> None:
    run, old = make_run(tmp_path, trainer={"eval_interval": 0}), time.time() - 2 * KEPT_S
    named, unnamed, young = (f"{digit}" * 64 for digit in "abc")
    files = {digest: run.snapshots / f"{digest}.blocks" for digest in (named, unnamed, young)}
    for digest, path in files.items():
        write_bytes(path, b"snapshot")
        if digest != young:
            os.utime(path, (old, old))
    state = {"past": "", "said": "", "answer": {}, "state": json.dumps({"snapshot": named})}
    append_lines(turn_file(run, "rollout-0", "g00000001", 0), [state])
    with controller(run):
        wait_for(lambda: not files[unnamed].exists(), lambda: "it stays", 60)
    assert set(run.snapshots.iterdir()) == {files[named], files[young], run.snapshots / "blocks"}


@pytest.mark.parametrize("groups", [1, pytest.param(8, marks=pytest.mark.faults_slow)])
def test_what_a_finished_group_costs(tmp_path: Path, groups: int) -> None:
    """Beside other work on the machine waiting tells little; the processor's time says how many groups per second there could be."""
    load = Load(rate=200.0, seconds=3.0, groups=groups, workers=20, batch_size=64)
    result = asyncio.run(measure(tmp_path / "project" / "run", load))
    assert result.refused == 0
    assert result.taken >= 0.5 * load.rate * load.seconds
    assert result.steps >= result.taken // load.batch_size - load.staleness - 1
    assert result.cpu / result.taken < 0.002, (
        "five hundred per second on a machine that others want too, more than two thousand on an idle one"
    )
