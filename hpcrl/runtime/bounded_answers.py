"""Reads answers of unproven servers within bounds: another program may have the port of a dead server and answer anything."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import httpx

from hpcrl.errors import RunError

MOST_BYTES = 256 << 20
"""Of an answer: work of the controller has the prompts of many groups, with their images."""


class BoundedAnswer(NamedTuple):
    """An answer as it came: what is compressed stays so."""

    status: int
    content: bytes
    headers: Mapping[str, str]

    def json(self) -> Any:
        return json.loads(self.content)


def post(http: httpx.Client, url: str, content: bytes, headers: Mapping[str, str], seconds: float) -> BoundedAnswer:
    """Return the answer to a request.

    Args:
        seconds: for all of it.

    Raises:
        httpx.TransportError: there is no answer, or not all of it in time.
        RunError: it is larger than MOST_BYTES.
    """
    deadline, body = time.monotonic() + seconds, bytearray()
    plain = {**headers, "accept-encoding": "identity"}
    with http.stream("POST", url, content=content, headers=plain, timeout=seconds) as answer:
        for part in answer.iter_raw():
            body += part
            if len(body) > MOST_BYTES:
                raise RunError(f"what answers at {url} sends more than {MOST_BYTES >> 20} MiB, and is refused")
            if time.monotonic() > deadline:
                raise httpx.ReadTimeout(f"not all of the answer came within {seconds:g} s")
    return BoundedAnswer(answer.status_code, bytes(body), answer.headers)
