"""The controller over real HTTP, with the client that the other processes use."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np
import pytest

from hpcrl.config.sections.algorithm import DynamicSamplingConfig
from hpcrl.controller import replicas
from hpcrl.controller.api import Api
from hpcrl.controller.dynamic_sampling import DynamicSampling
from hpcrl.controller.replicas import MinReplicas
from hpcrl.controller.schedule import Schedule
from hpcrl.controller.schema import NAME, Schema
from hpcrl.controller.score_queue import ScoreQueue
from hpcrl.controller.service import Service
from hpcrl.data.batch_file import read_batch
from hpcrl.data.group_file import group_bytes
from hpcrl.errors import HpcrlError, RunError
from hpcrl.rundir.commit import read_json, write_bytes, write_json, write_text
from hpcrl.rundir.layout import Run
from hpcrl.runtime.controller_client import ControllerClient
from hpcrl.runtime.http_server import Guard, Route, Signed, bind, serve
from hpcrl.runtime.process_status import GIVEN_UP, StatusWriter
from hpcrl.runtime.token import AttemptKey, Sender, read_token
from hpcrl.types import Batch, GroupMeta, Prompt, Row, Work
from tests.rows import group_meta

SCHEDULE = Schedule(
    batch_size=2,
    n_samples=2,
    staleness=0,
    total_steps=2,
    seed=1,
    eval_interval=2,
    eval_before_train=True,
    eval_n_samples=1,
    order_seed=1,
    groups_at_once=None,
    eval_prompts_at_once=1024,
    min_replicas=MinReplicas(replicas=5),
)


def prompts(count: int) -> list[Prompt]:
    return [Prompt(f"p{i}", [{"role": "user", "content": str(i)}], "sort_letters", {}, "letters") for i in range(count)]


def make_run(path: Path) -> Run:
    run = Run(path)
    write_text(run.config, "")
    write_text(run.token, "secret\n", mode=0o600)
    return run


class Served(NamedTuple):
    thread: threading.Thread
    url: str


def serve_attempt(
    run: Run,
    attempt: int,
    schedule: Schedule = SCHEDULE,
    failed: list[HpcrlError] | None = None,
    scores: ScoreQueue | None = None,
    train: Sequence[Prompt] | None = None,
) -> Served:
    """Start a controller in a thread; it ends as in a run, when the run has finished or failed; `failed` receives the error."""
    listener = bind("127.0.0.1")
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    StatusWriter(run, "controller", attempt).write("serving", url=url)

    async def main() -> None:
        service = Service(run, attempt, schedule, train or prompts(5), prompts(3), scores=scores)
        api = Api(service, save_seconds=60)
        app = Guard(api.routes(), Signed(read_token(run), run.name, attempt))
        try:
            await serve(app, listener, api.watch(run, attempt, print))
        except HpcrlError as error:
            if failed is None:
                raise
            failed.append(error)

    thread = threading.Thread(target=lambda: asyncio.run(main()), daemon=True)
    thread.start()
    return Served(thread, url)


def end(run: Run, attempt: int, served: Served, steps: int = 2) -> None:
    """The trainer hears that the run has finished, whatever state it is in, and the controller leaves."""
    sender = Sender(AttemptKey.of("secret", run.name, attempt))

    def ask(route: str, **payload: Any) -> dict[str, Any]:
        body = json.dumps(payload).encode()
        return http.post(f"/{route}", content=body, headers=sender.headers(f"/{route}", body)).json()

    # everybody may know, and the controller have left
    with contextlib.suppress(httpx.TransportError), httpx.Client(base_url=served.url, verify=False, timeout=20) as http:
        write_json(run.stop, {"attempt": attempt, "reason": "finished"})
        while ask("status")["stop"] is None:
            time.sleep(0.05)
        assert ask("next", step=steps + 1)["stop"] == "finished"
        for worker in ask("status")["workers"]:
            ask("claim", worker=worker, version=0, capacity=0, holding=[])
    served.thread.join(30)
    assert not served.thread.is_alive()


@pytest.fixture
def run(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Run]:
    """A run with a controller; its parameter is a schedule."""
    run = make_run(tmp_path / "project" / "run")
    served = serve_attempt(run, 1, getattr(request, "param", SCHEDULE))
    yield run
    end(run, 1, served)


TOGETHER = pytest.mark.parametrize("run", [replace(SCHEDULE, colocated=True)], indirect=True, ids=["together"])
"""Rows of an evaluation and training groups are handed out together."""


def finish(run: Run, work: Work, version: int, reward: float = 1.0) -> GroupMeta:
    path = run.samples_of(0) / f"{work.group_id}.safetensors"
    n = work.n_samples
    meta = group_meta(
        group_id=work.group_id,
        kind=work.kind,
        replica=0,
        path=str(path.relative_to(run.path)),
        rewards=[reward] * n,
        lengths=[5] * n,
        response_lengths=[2] * n,
        stop_reasons=["stop"] * n,
        oldest_version=version,
        newest_version=version,
        data_source="letters",
        seconds=0.1,
    )
    return write(run, meta)


def write(run: Run, meta: GroupMeta) -> GroupMeta:
    """Write the file of a group, with tokens that nobody looks at."""
    return write_together(run, [meta])[0]


def write_together(run: Run, groups: Sequence[GroupMeta]) -> list[GroupMeta]:
    """Write groups into the file of the first one."""
    columns = {"token_ids": "i8", "loss_mask": "f4", "rollout_logprobs": "f4", "versions": "i4", "rewards": "f4"}
    content, written = b"", list[GroupMeta]()
    for meta in groups:
        rows = [
            Row(**{name: np.zeros(length, kind) for name, kind in columns.items()}, stop_reason="stop")
            for length in meta.lengths
        ]
        (run.path / meta.path).unlink(missing_ok=True)
        one, meta = group_bytes(rows, replace(meta, path=groups[0].path, offset=len(content)))
        content += one
        written.append(meta)
    write_bytes(run.path / groups[0].path, content)
    return written


def batch_of(run: Run, step: int) -> Batch:
    found = read_batch(run.batch(step))
    assert found
    return found.batch


def work_of(answer: dict) -> list[Work]:
    return [Work.from_json(value) for value in answer["work"]]


def evaluate(run: Run, controller: ControllerClient, version: int) -> None:
    """Finish the three rows of an evaluation."""
    work = work_of(controller.call("claim", worker="rollout-0", version=version, capacity=4, holding=[]))
    assert [item.kind for item in work] == ["eval"] * 3
    controller.call("complete", worker="rollout-0", groups=[finish(run, item, version).to_json() for item in work])


def test_a_whole_run_over_http(run: Run) -> None:
    controller = ControllerClient(run, 1, patience_s=10)
    assert controller.call("start", step=0)["total_steps"] == 2
    for version in (0, 1):
        kinds = []
        while not (run.batch(version + 1)).exists():
            answer = controller.call("claim", worker="rollout-0", version=version, capacity=4, holding=[])
            work = work_of(answer)
            kinds += [item.kind for item in work]
            groups = [finish(run, item, version).to_json() for item in work]
            assert controller.call("complete", worker="rollout-0", groups=groups)["rejected"] == {}
        assert kinds == ["train"] * 2
        answer = controller.call("next", step=version + 1)
        assert answer["stop"] is None
        batch = batch_of(run, version + 1)
        assert [group.group_id for group in batch.groups] == [f"g{2 * version + i:08d}" for i in range(2)]
        if version == 0:
            evaluate(run, controller, version)  # beside the first step
        controller.call("published", version=version + 1)
    assert controller.call("next", step=3) == {"stop": "finished", "path": None, "lend": False}
    evaluate(run, controller, 2)
    controller.call("committed", step=2)  # the trainer may still be saving
    assert controller.call("claim", worker="rollout-0", version=2, capacity=4, holding=[])["stop"] == "finished"
    assert read_json(run.evals_of(0) / "summary.json")["eval/letters/avg_score"] == 1.0
    assert read_json(run.evals_of(2) / "summary.json")["eval/all/pass_at_1"] == 1.0
    controller.close()


def test_next_attempt_uses_what_is_finished(run: Run) -> None:
    controller = ControllerClient(run, 1, patience_s=10)
    controller.call("start", step=0)
    work = work_of(controller.call("claim", worker="rollout-0", version=0, capacity=5, holding=[]))
    controller.call(
        "complete", worker="rollout-0", groups=[finish(run, item, 0, i).to_json() for i, item in enumerate(work)]
    )
    evaluate(run, controller, 0)
    controller.close()

    served = serve_attempt(run, 2)
    second = ControllerClient(run, 2, patience_s=10)
    second.call("start", step=0)
    assert second.call("next", step=1)["path"] == "batches/s000001.json"
    status = second.call("status")
    assert (status["composed"], status["eval_open"], status["running"]) == (1, 0, 0), "evaluated and generated before"
    second.close()
    end(run, 2, served)


def test_the_trainer_saves_before_a_failure_ends_the_controller(tmp_path: Path) -> None:
    run, failed = make_run(tmp_path / "project" / "run"), list[HpcrlError]()
    sampling = DynamicSampling(DynamicSamplingConfig(type="filter", max_sample_batches=1))
    served = serve_attempt(run, 1, replace(SCHEDULE, eval_interval=0, sampling=sampling), failed)
    controller, trainer = ControllerClient(run, 1, patience_s=10), StatusWriter(run, "trainer", 1)
    controller.call("start", step=0)
    trainer.write("waiting for batch")
    work = work_of(controller.call("claim", worker="rollout-0", version=0, capacity=4, holding=[]))
    groups = [finish(run, item, 0).to_json() for item in work]  # all samples are equally good
    controller.call("complete", worker="rollout-0", groups=groups)
    assert controller.call("next", step=1) == {"stop": "failed", "path": None, "lend": False}
    trainer.write("saving")
    served.thread.join(0.3)
    assert served.thread.is_alive(), "it does not wait for the trainer"
    controller.call("committed", step=0)
    assert controller.call("report", worker="rollout-0", version=0, state="ready")["stop"] == "failed"
    assert not failed
    trainer.write("stopped")
    served.thread.join(10)
    assert not served.thread.is_alive()
    assert "max_sample_batches = 1" in str(failed[0])
    controller.close()


@TOGETHER
def test_groups_of_a_worker_that_leaves_go_to_one_that_waits(run: Run) -> None:
    leaving, waiting = ControllerClient(run, 1, patience_s=10), ControllerClient(run, 1, patience_s=10)
    leaving.call("start", step=0)
    given = work_of(leaving.call("claim", worker="rollout-0", version=0, capacity=9, holding=[]))
    got: list[Work] = []
    thread = threading.Thread(
        target=lambda: got.extend(work_of(waiting.call("claim", worker="rollout-1", version=0, capacity=9, holding=[])))
    )
    thread.start()
    time.sleep(0.5)
    assert not got
    began = time.monotonic()
    leaving.leave("rollout-0")
    thread.join(9)
    assert time.monotonic() - began < 5
    assert sorted(item.group_id for item in got) == sorted(item.group_id for item in given)
    leaving.close()
    waiting.close()


@TOGETHER
def test_what_waits_for_a_worker_that_has_left_is_not_given_to_it(run: Run) -> None:
    calls, other = ControllerClient(run, 1, patience_s=10), ControllerClient(run, 1, patience_s=10)
    calls.call("start", step=0)
    given = work_of(calls.call("claim", worker="rollout-0", version=0, capacity=9, holding=[]))
    answers: list[dict] = []
    thread = threading.Thread(
        target=lambda: answers.append(other.call("claim", worker="rollout-1", version=0, capacity=9, holding=[]))
    )
    thread.start()
    time.sleep(0.5)
    calls.leave("rollout-1")
    calls.leave("rollout-0")
    thread.join(9)
    assert answers[0]["work"] == []
    again = work_of(calls.call("claim", worker="rollout-2", version=0, capacity=9, holding=[]))
    assert sorted(item.group_id for item in again) == sorted(item.group_id for item in given)
    calls.close()
    other.close()


def test_without_a_controller_a_worker_just_leaves(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    calls = ControllerClient(run, 1)
    calls.leave("rollout-0")
    StatusWriter(run, "controller", 1).write("serving", url="http://127.0.0.1:9")
    calls.leave("rollout-0")
    calls.close()


@pytest.mark.parametrize("given_up", [False, True])
def test_the_trainer_saves_when_all_replicas_are_gone(
    tmp_path: Path, given_up: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replicas, "RENEW_S", 0.1)
    run, failed = make_run(tmp_path / "project" / "run"), list[HpcrlError]()
    min_replicas = MinReplicas(patience_s=900.0 if given_up else 2.0)
    served = serve_attempt(run, 1, replace(SCHEDULE, eval_interval=0, min_replicas=min_replicas), failed)
    controller, trainer = ControllerClient(run, 1, patience_s=10), StatusWriter(run, "trainer", 1)
    controller.call("start", step=0)
    trainer.write("waiting for batch")
    assert work_of(controller.call("claim", worker="rollout-0", version=0, capacity=4, holding=[]))
    if given_up:
        StatusWriter(run, "rollout-0", 1).write(f"{GIVEN_UP}: the inference engine died")
    controller.leave("rollout-0")
    answer = controller.call("next", step=1)
    assert answer == {"stop": "failed", "path": None, "lend": False}
    trainer.write("stopped")
    served.thread.join(10)
    expected = (
        "no rollout worker has called, and 1 of 1 are given up; last heard: rollout-0: given up: the inference engine died"
        if given_up
        else "no rollout worker has called for 2 s (slurm.replica_patience_minutes)"
    )
    assert str(failed[0]) == expected
    controller.close()


@TOGETHER
def test_groups_of_an_answer_that_got_lost_are_given_again(run: Run) -> None:
    controller = ControllerClient(run, 1, patience_s=10)
    controller.call("start", step=0)
    first = work_of(controller.call("claim", worker="rollout-0", version=0, capacity=2, holding=[]))
    again = work_of(controller.call("claim", worker="rollout-0", version=0, capacity=2, holding=[]))
    assert sorted(item.group_id for item in first) == sorted(item.group_id for item in again)
    holding = [item.group_id for item in again]
    rest = work_of(controller.call("claim", worker="rollout-0", version=0, capacity=4, holding=holding))
    assert not {item.group_id for item in rest} & set(holding)
    assert [item.kind for item in rest] == ["train"] * 2
    controller.close()


def test_a_worker_hears_which_groups_nobody_waits_for(tmp_path: Path) -> None:
    run = make_run(tmp_path / "project" / "run")
    served = serve_attempt(run, 1, replace(SCHEDULE, eval_interval=0, surplus=1))
    controller = ControllerClient(run, 1, patience_s=10)
    controller.call("start", step=0)
    work = work_of(controller.call("claim", worker="rollout-0", version=0, capacity=9, holding=[]))
    controller.call("complete", worker="rollout-0", groups=[finish(run, item, 0).to_json() for item in work[:2]])
    holding = [work[2].group_id]
    told = controller.call("report", worker="rollout-0", version=0, state="generating", holding=holding)
    assert told["unwanted"] == holding
    controller.call("published", version=1)
    answer = controller.call("claim", worker="rollout-0", version=1, capacity=9, holding=holding)
    assert answer["unwanted"] == holding
    assert len(answer["work"]) == 3
    controller.leave("rollout-0")
    controller.close()
    end(run, 1, served)


def test_those_that_wait_are_served_without_asking_again(run: Run) -> None:
    """Five workers ask before the trainer starts; the evaluation's three rows and the step's two groups reach all of them at once."""
    answers: dict[str, list[Work]] = {}

    def ask(name: str) -> None:
        calls = ControllerClient(run, 1, patience_s=10)
        while not answers.get(name):
            answers[name] = work_of(calls.call("claim", worker=name, version=0, capacity=1, holding=[]))
        calls.close()

    threads = [threading.Thread(target=ask, args=(f"rollout-{n}",)) for n in range(5)]
    for thread in threads:
        thread.start()
    time.sleep(0.5)
    began, controller = time.monotonic(), ControllerClient(run, 1, patience_s=10)
    controller.call("start", step=0)
    for thread in threads:
        thread.join(9)
    assert time.monotonic() - began < 5
    given = [item.group_id for work in answers.values() for item in work]
    assert sorted(given) == ["e000000-00000000", "e000000-00000001", "e000000-00000002", "g00000000", "g00000001"]
    controller.close()


def test_bad_requests_are_refused_with_a_reason(run: Run) -> None:
    controller = ControllerClient(run, 1, patience_s=10)
    with pytest.raises(RunError, match=r"400 .*field 'worker': expected a worker of this run, .*, found none"):
        controller.call("claim")
    with pytest.raises(RunError, match=r"400 .*field 'version': expected a whole number from 0 to 2, found True"):
        controller.call("claim", worker="rollout-0", version=True, capacity=5, holding=[])
    with pytest.raises(
        RunError, match=r"400 .*field 'groups\[0\]\.group_id': expected the id of a group, .*, found none"
    ):
        controller.call("complete", worker="rollout-0", groups=[{}])
    controller.call("start", step=0)
    work = next(
        w
        for w in work_of(controller.call("claim", worker="rollout-0", version=0, capacity=5, holding=[]))
        if w.kind == "train"
    )
    outside = {**finish(run, work, 0).to_json(), "path": "../../elsewhere"}
    with pytest.raises(RunError, match=r"path': expected a file of samples in samples/0, found '\.\./"):
        controller.call("complete", worker="rollout-0", groups=[outside])
    controller.close()


def test_errors_of_the_controller_itself_leave_a_traceback(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They are no fault of the request: 500 instead of 400, and the log has what went wrong."""

    async def broken(body: dict) -> dict:
        return {}[body["worker"]]

    run = make_run(tmp_path / "run")
    listener, over = bind("127.0.0.1"), threading.Event()
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    StatusWriter(run, "controller", 1).write("serving", url=url)
    app = Guard({"/leave": Route(broken, Schema({"worker": NAME}))}, Signed(read_token(run), run.name, 1))
    server = threading.Thread(
        target=lambda: asyncio.run(serve(app, listener, asyncio.to_thread(over.wait))), daemon=True
    )
    server.start()
    controller = ControllerClient(run, 1, patience_s=10)
    with pytest.raises(RunError, match=r"failed at /leave, .*logs/1/controller\.log"):
        controller.call("leave", worker="rollout-7")
    with pytest.raises(RunError, match=r"400 .*field 'worker': expected a name: .*, found 7"):
        controller.call("leave", worker=7)
    controller.close()
    over.set()
    server.join(10)
    log = capsys.readouterr().err
    assert 'return {}[body["worker"]]' in log
    assert "KeyError: 'rollout-7'" in log


def test_a_token_that_others_can_read_is_refused(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    run.token.chmod(0o644)
    with pytest.raises(RunError, match="can be read by others"):
        read_token(run)
