"""Calls of services that environments and rewards ask: POST, JSON back, tried again where that may help."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import httpx

from hpcrl.envs.tools.requests import Compressed, ServiceAnswer, build_request, in_background, send
from hpcrl.errors import ConfigError, ServiceError

_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.5, 8.0
_MOST_BYTES = 32 * 2**20
_BUSY = (408, 425, 429)  # beside 5xx: what the same request may get another answer to
_GONE = 410


class GivenUp(ServiceError):
    """A service will not come back."""


class Peer(Protocol):
    """Who is asked: where that is, how it knows the client, and how the client knows it."""

    def address(self) -> str | None:
        """Return where it is now; None: it is away, and may come back. Those of sandboxes raise GivenUp where they will not."""
        ...

    def headers(self, path: str, body: bytes) -> dict[str, str]:
        """Return what a request shows."""
        ...

    def is_answer(self, sent: Mapping[str, str], status: int, body: bytes, given: Mapping[str, str]) -> bool:
        """Return whether an answer, to the request with the headers `sent`, is its own."""
        ...


class Fixed:
    """One that is at one address.

    Args:
        token: sent as `Authorization: Bearer`.
    """

    def __init__(self, url: str, token: str | None) -> None:
        self._url, self._headers = url, {"authorization": f"Bearer {token}"} if token else {}

    def address(self) -> str:
        return self._url

    def headers(self, path: str, body: bytes) -> dict[str, str]:  # noqa: ARG002
        return self._headers

    def is_answer(self, sent: Mapping[str, str], status: int, body: bytes, given: Mapping[str, str]) -> bool:  # noqa: ARG002
        return True


class ToolService:
    """A service.

    Args:
        name: what errors call it: the service, and the setting or variable of its address.
        url: http:// or https://; what stands in it before an @ or after a ? is not repeated in errors. Or who is asked instead.
        timeout_s: seconds that one try may take, its whole answer included.
        patience_s: seconds in which further tries begin, the waits between them growing to 8 s; 0: one try.
        token: sent as `Authorization: Bearer` to a `url`; no error repeats it.
        unwanted: returns whether nobody waits for answers any more; then no try begins.

    Raises:
        ConfigError: the address is none.
    """

    def __init__(
        self,
        name: str,
        url: str | Peer,
        timeout_s: float,
        patience_s: float,
        token: str | None = None,
        unwanted: Callable[[], bool] = lambda: False,
    ) -> None:
        self._peer = Fixed(url, token) if isinstance(url, str) else url
        self._name, self._timeout_s, self._patience_s, self._token = name, timeout_s, patience_s, token
        self._unwanted = unwanted
        self._who = name if (address := self._peer.address()) is None else self._named(self._parsed(address))

    def _parsed(self, url: str) -> httpx.URL:
        try:
            address = httpx.URL(url)
        except httpx.InvalidURL as error:
            raise ConfigError(f"{self._name}: {url!r:.200} is no address: {error}") from error
        if address.scheme not in ("http", "https") or not address.host:
            raise ConfigError(f"{self._name}: expected an address such as http://host:8000/path, found {url!r:.200}")
        return address

    def _named(self, address: httpx.URL) -> str:
        return f"{self._name} at {address.scheme}://{address.netloc.decode()}{address.path}"

    def post(self, again: Callable[[int], bool] | None = None, **body: Any) -> Any:
        """Return the answer's JSON.

        Args:
            again: which statuses deserve another try; unset: 408, 425, 429 and 5xx. Connections that fail always do.
            body: `json`, `data` or `content` of httpx.

        Raises:
            Gone: the answer is 410: what is asked for was there, and is not any more.
            ServiceError: there was no answer within the patience, or one that cannot be used, or nobody waits for it any more.
        """
        started, wait, tries = time.monotonic(), _FIRST_WAIT_S, 0
        while True:
            tries += 1
            if self._unwanted():
                raise ServiceError(f"{self._who}: not asked, nobody waits for its answer any more")
            try:
                return self._read(self._try(body), again or _may_pass)
            except _NotYet as problem:
                left = started + self._patience_s - time.monotonic()
                if left <= 0:
                    raise ServiceError(
                        f"{self._who}: {problem}, after {tries} {'try' if tries == 1 else 'tries'} in "
                        f"{time.monotonic() - started:.0f} s"
                    ) from problem
                time.sleep(min(left, wait * random.uniform(0.5, 1.0)))  # replicas that failed together do not return so
                wait = min(_LONGEST_WAIT_S, 2 * wait)

    def _try(self, body: dict[str, Any]) -> ServiceAnswer:
        where = self._peer.address()
        if where is None:
            raise _NotYet("it is away")
        address = self._parsed(where)
        self._who = self._named(address)
        request = build_request("POST", address, **body)
        proof = self._peer.headers(address.path, request.read())
        request.headers.update(proof)
        try:
            answer = in_background(send(request, _MOST_BYTES, self._timeout_s)).result()
        except httpx.TransportError as error:
            raise _NotYet(self._hidden(str(error) or type(error).__name__)) from error
        except Compressed as error:
            raise ServiceError(f"{self._who}: {error}") from error
        if len(answer.content) > _MOST_BYTES:
            raise ServiceError(f"{self._who}: expected an answer of at most {_MOST_BYTES >> 20} MiB")
        if not self._peer.is_answer(proof, answer.status, answer.content, answer.headers):
            raise _NotYet("what answers there is another: its answer is not signed with the token of the run")
        return answer

    def _read(self, answer: ServiceAnswer, again: Callable[[int], bool]) -> Any:
        status, content, _ = answer
        said = self._hidden(content.decode(errors="replace")).strip()
        if not 200 <= status < 300:
            problem = f"it answered {status} {said[:300]!r}"
            if status == _GONE:
                raise Gone(f"{self._who}: {problem}")
            if again(status):
                raise _NotYet(problem)
            raise ServiceError(f"{self._who}: {problem}")
        try:
            return json.loads(content)
        except (ValueError, RecursionError) as error:
            raise ServiceError(f"{self._who}: expected JSON, found {said[:300]!r}") from error

    def unusable(self, expected: str, answer: Any) -> ServiceError:
        """Return the error for an answer of another form."""
        return ServiceError(f"{self._who}: expected {expected}, found {self._hidden(repr(answer))[:300]}")

    def _hidden(self, text: str) -> str:
        return text.replace(self._token, "…") if self._token else text


class Gone(ServiceError):
    """What is asked for was there, and is not any more."""


class _NotYet(Exception):
    """A try failed that may succeed later."""


def _may_pass(status: int) -> bool:
    return status >= 500 or status in _BUSY
