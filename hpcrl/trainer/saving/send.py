"""Sends a rank's files of the newest version to nodes that ask for them, beside training.

Each request is answered with the sizes of the files and where to meet; a thread of its own then meets and sends. Training waits for none
of them: what they send is in host memory, and they hold it until they have ended.
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from typing import Any, NamedTuple

import torch

from hpcrl.data.weights.stream import SENDER, Files, Pair, send_files, sender, sizes_of
from hpcrl.rundir.layout import Run
from hpcrl.runtime.http_server import BadRequest, Guard, Refused, Route, Signed, bind, serve
from hpcrl.runtime.token import of_process, read_token

log = logging.getLogger(__name__)

_AT_ONCE = 64  # nodes; others read files meanwhile


class _Wanted(NamedTuple):
    """What is asked: the number of a version, and where who asks is to be found."""

    version: int
    told: dict[str, str]


class _Body:
    def parse(self, content: bytes) -> _Wanted:
        try:
            value = json.loads(content)
        except ValueError as error:
            raise BadRequest(f"expected JSON: {error}") from error
        version, told = (value.get("version"), value.get("told")) if isinstance(value, dict) else (None, None)
        if (
            type(version) is not int
            or not isinstance(told, dict)
            or not all(isinstance(one, str) for one in told.values())
        ):
            raise BadRequest('expected {"version": a whole number, "told": {key: text}}')
        return _Wanted(version, told)


class WeightSender:
    """Listens from the start until the process ends.

    Args:
        rank: of this process among the trainer's; who asks signs for it.
        device: as of `Pair`.
        host: address of this node.
        stage_s: generator.inference_engine.weight_sync_timeout_seconds.
    """

    def __init__(self, run: Run, attempt: int, rank: int, device: torch.device, host: str, stage_s: float) -> None:
        self._device, self._host, self._stage_s = device, host, stage_s
        self._newest: tuple[int, Files] | None = None
        self._slots = threading.BoundedSemaphore(_AT_ONCE)
        listener = bind(host)
        self._url = f"http://{host}:{listener.getsockname()[1]}"
        guard = Guard(
            {"/weights": Route(self._begin, _Body())},
            Signed(read_token(run), of_process(run.name, sender(rank)), attempt),
        )

        async def always() -> None:
            await serve(guard, listener, asyncio.Event().wait())

        threading.Thread(target=lambda: asyncio.run(always()), name="weights", daemon=True).start()

    def address(self) -> str:
        return self._url

    def offer(self, version: int, files: Files) -> None:
        """Send these files from now on, which nobody changes any more, and no older ones to who has not asked yet."""
        self._newest = version, files

    async def _begin(self, wanted: _Wanted) -> dict[str, Any]:
        newest, files = self._newest or (None, {})
        if newest != wanted.version:
            raise Refused(409, f"this rank has version {newest}, and not {wanted.version}")
        if not self._slots.acquire(blocking=False):
            raise Refused(503, f"{_AT_ONCE} nodes get weights from this rank already")
        pair = Pair(self._device, SENDER, self._host, self._stage_s)
        threading.Thread(target=self._send, args=(wanted, files, pair), name="weights", daemon=True).start()
        try:
            return {"files": sizes_of(files), "told": await asyncio.to_thread(pair.tells)}
        except RuntimeError as error:
            raise Refused(503, str(error)) from error

    def _send(self, wanted: _Wanted, files: Files, pair: Pair) -> None:
        try:
            pair.hear(wanted.told)
            send_files(pair, files)
        except (RuntimeError, ValueError) as error:
            log.warning(
                "version %d was not sent to a node that had asked for it, and reads the files: %s",
                wanted.version,
                error,
            )
        finally:
            pair.close()
            self._slots.release()
