"""How a process of a run calls its controller: JSON over HTTP, with the run's token on every request.

Controller routes, all POST, all JSON (`worker` is a lease name such as "rollout-0"):

    /lease      {worker, version, state}           -> {stop, version}
    /claim      {worker, version, capacity, holding: [group_id]}
                                                   -> {stop, version, work: [Work]}      waits up to 10 s for work or a newer version
    /complete   {worker, groups: [GroupMeta]}      -> {accepted: [group_id], rejected: {group_id: reason}}
    /start      {step}                             -> {total_steps, steps_per_epoch}     trainer: training continues after `step`
    /published  {version}                          -> {}                                 trainer: weights/v<version> is committed
    /next       {step, wait?}                      -> {stop, path}                       waits up to `wait` (10) s; path is null until the batch exists
    /committed  {step}                             -> {}                                 trainer: checkpoint of `step` is committed
    /status     {}                                 -> counts for people

`holding` names the groups that the worker generates or has yet to hand over; what else it was given got lost with an answer.
`version` in an answer is what a worker should load before it claims again, null while the trainer has not started.
`stop` is null, or why the run ends.
"""

from __future__ import annotations

import hmac
import time
from pathlib import Path
from typing import Any

import httpx

from hpcrl.errors import RunError
from hpcrl.run.commit import read_json
from hpcrl.run.layout import Run
from hpcrl.run.lease import CONTROLLER

_RETRY_S = 0.5


def read_token(run: Run) -> str:
    """Return the run's token.

    Raises:
        RunError: the token is missing or readable by others.
    """
    return read_token_file(run.token)


def read_token_file(path: Path) -> str:
    if not path.is_file():
        raise RunError(f"{path} is missing: the run directory was not made by `hpcrl submit`")
    if path.stat().st_mode & 0o077:
        raise RunError(f"{path} can be read by others; run `chmod 600` on it and make a new run")
    return path.read_text().strip()


def headers(token: str, run_name: str, attempt: int) -> dict[str, str]:
    return {"authorization": f"Bearer {token}", "x-hpcrl-run": run_name, "x-hpcrl-attempt": str(attempt)}


def authorized(given: str | None, token: str) -> bool:
    """Tell in constant time whether an Authorization header carries the token."""
    return hmac.compare_digest((given or "").encode(), f"Bearer {token}".encode())


class Controller:
    """Client of the controller of one attempt.

    Args:
        patience_s: how long a call retries while the controller is not up yet or does not answer.
    """

    def __init__(self, run: Run, attempt: int, patience_s: float = 120.0) -> None:
        self._run, self._attempt, self._patience_s = run, attempt, patience_s
        self._http = httpx.Client(headers=headers(read_token(run), run.name, attempt), timeout=60.0, trust_env=False)

    def _lease(self) -> dict[str, Any] | None:
        lease = read_json(self._run.lease(CONTROLLER))
        return lease if lease and lease["attempt"] == self._attempt else None

    def call(self, route: str, **payload: Any) -> dict[str, Any]:
        """Return the controller's answer.

        Raises:
            RunError: the controller refused the request, or gave no answer within the patience.
        """
        deadline, problem = time.monotonic() + self._patience_s, "it has not published its address"
        renewed = 0.0
        while time.monotonic() < deadline:
            lease = self._lease()
            url = lease["facts"].get("url") if lease else None
            if lease and not url and lease["renewed"] != renewed:  # it is at work, on a large dataset maybe
                renewed, deadline = lease["renewed"], time.monotonic() + self._patience_s
            if url:
                try:
                    answer = self._http.post(f"{url}/{route}", json=payload)
                except httpx.TransportError as error:
                    problem = f"{url}: {error!r}"
                else:
                    if answer.status_code == 200:
                        return answer.json()
                    raise RunError(f"controller refused /{route}: {answer.status_code} {answer.text}")
            time.sleep(_RETRY_S)
        raise RunError(
            f"no answer from the controller of attempt {self._attempt} in {self._patience_s:.0f} s: {problem}"
        )

    def close(self) -> None:
        self._http.close()
