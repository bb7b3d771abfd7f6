"""A service that keeps agents running and is asked to play samples; docs/agents.md has the protocol.

POST <url>             {session, base_url, api_key, model, timeout_seconds, row} -> 200 with the score; or 202, and the score comes
                       to POST <base_url>/score
DELETE <url>/<session> the sample is over without a score
"""

from __future__ import annotations

import asyncio
import json
import random
import secrets
import shlex
import time
from collections.abc import Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx

from hpcrl.config.sections.environment import AgentServiceConfig
from hpcrl.envs.agents.score import EXPECTED, LONGEST_SCORE, read_score
from hpcrl.envs.base import Endpoint, Turn
from hpcrl.envs.tools.requests import Compressed, build_request, in_background, send
from hpcrl.errors import ConfigError, ServiceError, UserCodeError

SETTING = "environment.skyrl_gym.agent.service"
_ACCEPTED, _NOT_NOW = 202, (429, 503)
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.5, 8.0
_PATIENCE = 0.2  # of the time that a sample has, with a service that cannot begin
_LONG_S = 600.0  # where it has any time
_LOOK_S = 0.1
_FORGET_S = 5.0


class AgentService:
    """The service that a configuration names.

    Args:
        seconds: that a sample may take; 0: any time.
    """

    def __init__(self, config: AgentServiceConfig, seconds: float) -> None:
        self._url, self._seconds = httpx.URL(config.url or ""), seconds
        self._who = f"the agent service at {self._url.scheme}://{self._url.netloc.decode()}{self._url.path} ({SETTING})"
        self._token = service_token(config.token_file) if config.token_file else None
        self._headers = {"authorization": f"Bearer {self._token}"} if self._token else {}

    def play(self, row: Mapping[str, Any], endpoint: Endpoint) -> Turn:
        """Have a sample played, and return its score.

        Args:
            row: the service's message about the sample.

        Raises:
            ServiceError: the service does not play it.
            UserCodeError: the sample was over before it had a score.
        """
        session, scored = secrets.token_hex(16), endpoint.expect_score()
        asked = {"session": session, "base_url": endpoint.base_url, "api_key": endpoint.key, "model": endpoint.model}
        body = {**asked, "timeout_seconds": self._seconds or None, "row": dict(row)}
        asking = in_background(self._ask(json.dumps(body, ensure_ascii=False).encode(), endpoint.key))
        try:
            waiting: set[Future[Any]] = {asking, scored}
            while not endpoint.ended.is_set():
                wait(waiting, _LOOK_S, FIRST_COMPLETED)
                if scored.done():
                    return scored.result()
                if asking in waiting and asking.done():
                    if turn := asking.result():
                        return turn
                    waiting.remove(asking)
            in_background(self._forget(session))
            raise UserCodeError(f"{self._who} had not scored the sample when it was over")
        finally:
            asking.cancel()

    async def _ask(self, body: bytes, key: str) -> Turn | None:
        """Have the service begin, and return the score that it answers with; None: it will post one.

        What it may have begun is not asked again: there would be two agents for one sample.
        """
        started, pause, tries = time.monotonic(), _FIRST_WAIT_S, 0
        headers = {**self._headers, "content-type": "application/json"}
        while True:
            tries += 1
            try:
                asked = build_request("POST", self._url, headers, content=body)
                status, content, _ = await send(asked, LONGEST_SCORE, fresh=True)
                problem = f"it answered {status} {self._shown(content, key)}"
            except (httpx.ConnectError, httpx.ConnectTimeout) as error:
                status, content, problem = 503, b"", f"it cannot be reached ({error})"
            except httpx.TransportError as error:
                raise ServiceError(f"{self._who} ended the connection without an answer ({error!r})") from error
            except Compressed as error:
                raise ServiceError(f"{self._who}: {error}") from error
            if status not in _NOT_NOW:
                return self._read(status, content, problem)
            seconds = time.monotonic() - started
            if seconds + pause > _PATIENCE * (self._seconds or _LONG_S):
                raise ServiceError(f"{self._who}: {problem}, after {tries} tries in {seconds:.0f} s")
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))  # samples that began together do not return so
            pause = min(_LONGEST_WAIT_S, 2 * pause)

    def _read(self, status: int, content: bytes, problem: str) -> Turn | None:
        if status == _ACCEPTED:
            return None
        turn = read_score(content) if status == 200 else None
        if turn is None:
            raise ServiceError(f"{self._who}: expected 200 and {EXPECTED}, or 202; {problem}")
        return turn

    def _shown(self, content: bytes, key: str) -> str:
        """Return the beginning of an answer, without secrets, which it may repeat."""
        text = content.decode(errors="replace").strip()
        for secret in (key, self._token):
            text = text.replace(secret, "…") if secret else text
        return repr(text[:300])

    async def _forget(self, session: str) -> None:
        with suppress(httpx.TransportError, Compressed):
            where = self._url.copy_with(path=f"{self._url.path.rstrip('/')}/{session}")
            await send(build_request("DELETE", where, self._headers), LONGEST_SCORE, _FORGET_S, fresh=True)


def service_token(name: str) -> str:
    """Return the token in a file. Raises ConfigError where it cannot be read, is empty, or others can read it."""
    path = Path(name).expanduser()
    try:
        others, token = path.stat().st_mode & 0o077, path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{SETTING}.token_file: {path} cannot be read ({error})") from error
    if others:
        raise ConfigError(f"{SETTING}.token_file: others can read {path}; run `chmod 600 {shlex.quote(str(path))}`")
    if not token.isascii() or not token.isprintable() or not token:
        raise ConfigError(f"{SETTING}.token_file: {path} holds no token; expected one line of printable ASCII")
    return token
