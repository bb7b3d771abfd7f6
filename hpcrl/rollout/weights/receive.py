"""Receives a version from the trainer's ranks, each rank's files over a connection that is kept for later versions."""

from __future__ import annotations

import json
from contextlib import closing, suppress
from pathlib import Path
from secrets import token_hex
from typing import TYPE_CHECKING, Any, NamedTuple

from hpcrl.data.weight_files import SUFFIX, PublishedWeights
from hpcrl.errors import RunError
from hpcrl.faults import fault
from hpcrl.rundir.layout import Run
from hpcrl.runtime.bounded_answers import BoundedClient, NoAnswer
from hpcrl.runtime.token import NONCE, AttemptKey, Sender, of_process, read_token

if TYPE_CHECKING:
    from hpcrl.data.weights.stream import Pair

_GONE = 410  # of the sender: it has no such pair


class NotReceived(Exception):
    """A version was not sent whole; it can be read from its files."""


class _Link(NamedTuple):
    """A pair with a rank, and its name there."""

    name: str
    pair: Pair


class Receiver:
    """Client of the weight senders of an attempt's trainer.

    Args:
        on_gpu: whether it comes over NCCL, through the memory of the first GPU of this process; else over gloo.
        host: address of this node.
        stage_s: generator.inference_engine.weight_sync_timeout_seconds.
    """

    def __init__(self, run: Run, attempt: int, on_gpu: bool, host: str, stage_s: float) -> None:
        self._run, self._attempt, self._token = run, attempt, read_token(run)
        self._on_gpu, self._host, self._stage_s = on_gpu, host, stage_s
        self._links: dict[str, _Link] = {}  # by the address of the rank

    def receive(self, weights: PublishedWeights, directory: Path) -> None:
        """Write the files of a version into a directory; what they hold is for the caller to compare.

        Raises:
            NotReceived: a rank was not there, refused, or took longer than a stage may; the directory has what it had.
            OSError: they cannot be written.
        """
        if weights.attempt != self._attempt:
            raise NotReceived(f"attempt {weights.attempt} published it, whose trainer has ended")
        if not weights.senders:
            raise NotReceived("the trainer sends nothing")
        try:
            for rank, url in enumerate(weights.senders):
                self._receive_from(rank, url, weights.version, directory)
        except (NoAnswer, RunError, RuntimeError) as error:
            for file in directory.glob(f"*{SUFFIX}"):
                with suppress(FileNotFoundError):
                    file.unlink()
            raise NotReceived(str(error)) from error

    def _receive_from(self, rank: int, url: str, version: int, directory: Path) -> None:
        import torch

        from hpcrl.data.weights.stream import RECEIVER, Pair, sender  # torch, which takes seconds

        fault("weights.ask")
        name = of_process(self._run.name, sender(rank))
        if kept := self._links.pop(url, None):
            with suppress(RuntimeError):  # it is broken, and another one may not be
                if self._received(
                    kept, name, url, {"version": version, "pair": kept.name, "rendezvous": None}, directory
                ):
                    return
        device = torch.device("cuda", 0) if self._on_gpu else torch.device("cpu")
        link = _Link(token_hex(8), Pair(device, RECEIVER, self._host, self._stage_s))
        wanted = {"version": version, "pair": link.name, "rendezvous": link.pair.own_rendezvous()}
        if not self._received(link, name, url, wanted, directory):
            raise RunError(f"{url} has no pair {link.name}")

    def _received(self, link: _Link, name: str, url: str, wanted: dict[str, Any], directory: Path) -> bool:
        """Write the files of a rank over a pair, and keep the pair; return False, and close it, where the rank does not have it."""
        from hpcrl.data.weights.stream import receive_files

        try:
            if answer := self._ask(name, url, wanted):
                if strange := [file for file in answer["files"] if Path(file).name != file]:
                    raise RunError(f"{url} would send {strange[0]}, which is no name of a file of weights")
                link.pair.add_rendezvous(answer["rendezvous"])
                receive_files(link.pair, answer["files"], directory)
                link.pair.rest()
                self._links[url] = link
            return bool(answer)
        finally:
            if self._links.get(url) is not link:
                link.pair.close()

    def _ask(self, name: str, url: str, wanted: dict[str, Any]) -> dict[str, Any] | None:
        """Return the answer of a rank; None where it does not have the pair."""
        sender, body = Sender(AttemptKey.of(self._token, name, self._attempt)), json.dumps(wanted).encode()
        headers = sender.headers("/weights", body)
        with closing(BoundedClient()) as http:
            answer = http.post(f"{url}/weights", body, headers, self._stage_s)
        if not sender.is_answer(headers[NONCE], answer.status, answer.content, answer.headers):
            raise RunError(f"what answers at {url} is no rank of the trainer of attempt {self._attempt}")
        if answer.status == _GONE:
            return None
        if answer.status != 200:
            raise RunError(f"{url} answers {answer.status}: {answer.json().get('error')}")
        return answer.json()
