"""Sends a rank's files of the newest version to nodes that ask for them, beside training.

Each request is answered with the sizes of the files and where to meet; a thread of its own then meets and sends. The pair that has met is
kept for
the next version, with NCCL a communicator whose making takes about a second. Training does not wait for these threads: they send from host
memory, which they hold until they end.
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections import OrderedDict
from typing import Any, NamedTuple

import torch

from hpcrl.data.weights.stream import SENDER, Files, Pair, send_files, sender, sizes_of
from hpcrl.rundir.layout import Run
from hpcrl.runtime.http_server import BadRequest, Guard, Refused, Route, Signed, bind, serve
from hpcrl.runtime.token import of_process, read_token

log = logging.getLogger(__name__)

_AT_ONCE = 64  # nodes; others read files meanwhile
_KEPT = 64  # pairs between two versions: nodes, and processes that have ended; the least recently used go first


class _Wanted(NamedTuple):
    """A request: the version's number, the pair to send over, and the asking node's address; None: it has the pair of an earlier
    version."""

    version: int
    pair: str
    rendezvous: dict[str, str] | None


class _Body:
    def parse(self, content: bytes) -> _Wanted:
        try:
            value = json.loads(content)
        except ValueError as error:
            raise BadRequest(f"expected JSON: {error}") from error
        value = value if isinstance(value, dict) else {}
        version, pair, rendezvous = (value.get(key) for key in _Wanted._fields)
        texts = isinstance(rendezvous, dict) and all(isinstance(one, str) for one in rendezvous.values())
        if type(version) is not int or not isinstance(pair, str) or not (rendezvous is None or texts):
            raise BadRequest('expected {"version": a whole number, "pair": text, "rendezvous": {key: text} or null}')
        return _Wanted(version, pair, rendezvous)


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
        self._kept: OrderedDict[str, Pair] = OrderedDict()
        self._keeping = threading.Lock()
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
        with self._keeping:
            pair = self._kept.pop(wanted.pair, None)
        if wanted.rendezvous is not None:
            pair = Pair(self._device, SENDER, self._host, self._stage_s)
        if pair is None:
            self._slots.release()
            raise Refused(410, f"this rank has no pair {wanted.pair}")
        threading.Thread(target=self._send, args=(wanted, files, pair), name="weights", daemon=True).start()
        try:
            rendezvous = {} if wanted.rendezvous is None else await asyncio.to_thread(pair.own_rendezvous)
            return {"files": sizes_of(files), "rendezvous": rendezvous}
        except RuntimeError as error:
            raise Refused(503, str(error)) from error

    def _send(self, wanted: _Wanted, files: Files, pair: Pair) -> None:
        useless: Pair | None = pair
        try:
            pair.add_rendezvous(wanted.rendezvous or {})
            send_files(pair, files)
            useless = self._keep(wanted.pair, pair)
        except (RuntimeError, ValueError) as error:
            log.warning("version %d was not sent to a node that had asked for it: %s", wanted.version, error)
        finally:
            if useless:
                useless.close()
            self._slots.release()

    def _keep(self, name: str, pair: Pair) -> Pair | None:
        """Keep a pair for later versions; return another one that has no room any more, None: all have."""
        pair.rest()
        with self._keeping:
            self._kept[name] = pair
            return self._kept.popitem(last=False)[1] if len(self._kept) > _KEPT else None
