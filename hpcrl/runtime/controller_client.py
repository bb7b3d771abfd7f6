"""Calls the controller of a run: JSON over HTTP, requests and answers signed (hpcrl/runtime/token.py).

Controller routes, all POST, all JSON (`worker` is a process status name such as "rollout-0"):

    /report     {worker, version, state, holding?} -> {stop, version, newest, unwanted}
    /claim      {worker, version, capacity, holding: [group_id]}
                                                   -> {stop, version, newest, unwanted, work: [Work]}    waits up to 10 s for work or another version
    /lease      {worker, awake}                    -> {stop, version, lease}             waits up to 10 s until the engine may wake, or is to sleep
    /complete   {worker, groups: [GroupMeta]}      -> {accepted: [group_id], rejected: {group_id: reason}}
    /leave      {worker}                           -> {}                                 it, or a scorer, ends, or was seen to end: its groups go to others
    /start      {step}                             -> {total_steps, steps_per_epoch}     trainer: training continues after `step`; null, null: ask again
    /published  {version}                          -> {}                                 trainer: weights/v<version> is committed
    /next       {step, wait?, away?, onload?}      -> {stop, path, lend}                 waits up to `wait` (10) s; path is null until the batch exists
    /committed  {step}                             -> {}                                 trainer: checkpoint of `step` is committed
    /claim_scores {scorer, samples, holding: [group_id], wait?} -> {stop, groups: [GroupMeta]}
                                                                                         waits up to `wait` (10) s for finished groups
    /scored     {scorer, digests: {group_id: digest}, rewards?: {group_id: [number or null]}}
                                                   -> {unwanted: [group_id]}             scores/<model>/<group>-<digest>.safetensors is there
    /status     {}                                 -> counts for people

What each field may hold, hpcrl/controller/schema.py says; a message that is refused (400) changes nothing.
`holding` names the groups that the worker generates or has yet to hand over; what else it was given got lost with an answer. Those that
`unwanted` names need not be finished any more.
`version` in an answer is what a worker should load before it claims again: the newest one, or an older one that is evaluated. `newest` is the
newest one. Both are null while the trainer has not started.
`stop` is null, or why the run ends.
/lease is asked where trainer and engines share GPUs: with `awake` whether the worker keeps its lease, without it whether it gets the lease. Where
`lease` is false, the holder puts its engine to sleep, whatever runs, and asks without `awake`. It also asks so before it starts its engine. The
trainer gets its batch when no engine is awake.
`lend` is true where engines are to use the trainer's GPUs while it waits. It then moves its state to host memory and asks again with `away`, and
with the seconds of its last way back in `onload`.
"""

from __future__ import annotations

import json
import time
from contextlib import suppress
from typing import Any

from hpcrl.errors import RunError
from hpcrl.rundir.layout import Run
from hpcrl.runtime.bounded_answers import BoundedAnswer, BoundedClient, NoAnswer
from hpcrl.runtime.heartbeat import SuspendAwareClock
from hpcrl.runtime.process_status import CONTROLLER, read_process_status
from hpcrl.runtime.token import NONCE, AttemptKey, Sender, read_token

FINISHED = "finished"
"""Why a run ends that has trained all its steps."""
_RETRY_S = 0.5
_ANSWER_S = 60.0
_FAREWELL_S = 2.0


class ControllerClient:
    """Client of the controller of one attempt.

    Args:
        patience_s: how long a call retries while the controller is not up yet or does not answer.
    """

    def __init__(self, run: Run, attempt: int, patience_s: float = 120.0) -> None:
        self._run, self._attempt, self._patience_s = run, attempt, patience_s
        self._sender = Sender(AttemptKey.of(read_token(run), run.name, attempt))
        self._http = BoundedClient()

    def call(self, route: str, **payload: Any) -> dict[str, Any]:
        """Return the controller's answer.

        Raises:
            RunError: the controller refused the request, failed at it, or gave no answer within the patience.
        """
        clock, problem = SuspendAwareClock(_ANSWER_S + 2 * _RETRY_S), "it has not published its address"
        deadline, renewed = self._patience_s, 0.0
        while clock.now() < deadline:
            process_status = read_process_status(self._run, CONTROLLER, self._attempt)
            url = process_status.facts.get("url") if process_status else None
            if (
                process_status and not url and process_status.renewed != renewed
            ):  # it is at work, on a large dataset maybe
                renewed, deadline = process_status.renewed, clock.now() + self._patience_s
            if url:
                try:
                    answer = self._post(url, route, payload)
                except NoAnswer as error:
                    problem = f"{url}: {error}"
                else:
                    if answer.status == 200:
                        return answer.json()
                    if answer.status >= 500:
                        raise RunError(
                            f"the controller failed at /{route}, which is an error of hpcrl itself: the traceback is in "
                            f"{self._run.log(self._attempt, CONTROLLER)}"
                        )
                    raise RunError(f"controller refused /{route}: {answer.status} {answer.content.decode()}")
            time.sleep(_RETRY_S)
        raise RunError(
            f"no answer from the controller of attempt {self._attempt} in {self._patience_s:.0f} s: {problem}"
        )

    def leave(self, worker: str) -> None:
        """Notify the controller, if it is there, that a worker ends; else the controller finds out by its silence."""
        process_status = read_process_status(self._run, CONTROLLER, self._attempt)
        if process_status and (url := process_status.facts.get("url")):
            with suppress(NoAnswer, RunError):
                self._post(url, "leave", {"worker": worker}, _FAREWELL_S)

    def _post(self, url: str, route: str, payload: dict[str, Any], timeout_s: float = _ANSWER_S) -> BoundedAnswer:
        """Return the controller's answer; RunError for what anybody else answers, which has its address because it is dead."""
        body = json.dumps(payload).encode()
        headers = self._sender.headers(f"/{route}", body)
        answer = self._http.post(f"{url}/{route}", body, headers, timeout_s)
        if not self._sender.is_answer(headers[NONCE], answer.status, answer.content, answer.headers):
            raise RunError(
                f"what answers at {url} is not the controller of attempt {self._attempt}: its answer ({answer.status}) is refused, because "
                f"it is not signed with the token of {self._run.name}. Another program, or another run's controller, has that address"
            )
        return answer

    def close(self) -> None:
        self._http.close()
