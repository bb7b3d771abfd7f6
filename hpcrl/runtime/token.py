"""Signs messages with the run's token, and verifies them, without sending the token.

Requests to the controller and its answers are signed with a key of the attempt (HMAC-SHA256, RFC 2104). A stranger at the address of a dead
controller receives nothing that it could send elsewhere, and its answers are refused. They are not encrypted.

    x-hpcrl-run, x-hpcrl-attempt   whose controller is asked
    x-hpcrl-nonce                  of a request: <sender>-<number>; each number of a sender is taken once
    x-hpcrl-signature              of a request over nonce, path and body; of an answer over the request's nonce, status and body
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import shlex
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from hpcrl.errors import ConfigError, RunError
from hpcrl.rundir.layout import Run

RUN, ATTEMPT, NONCE, SIGNATURE = "x-hpcrl-run", "x-hpcrl-attempt", "x-hpcrl-nonce", "x-hpcrl-signature"
_WINDOW = 256  # requests of one sender that may overtake each other


def read_token(run: Run) -> str:
    """Return the run's token. Raises RunError where it is missing or readable by others."""
    return read_token_file(run.token)


def read_token_file(path: Path) -> str:
    if not path.is_file():
        raise RunError(f"{path} is missing: the run directory was not made by `hpcrl submit`")
    if path.stat().st_mode & 0o077:
        raise RunError(f"{path} can be read by others; run `chmod 600` on it and make a new run")
    return path.read_text().strip()


def read_secret(path: Path, setting: str) -> str:
    """Return the key in a file that a user named. Raises ConfigError where it is missing, empty, has several lines or can be read by others.

    Args:
        setting: that names it, for errors.
    """
    try:
        found, open_to_others = path.read_text().strip(), path.stat().st_mode & 0o077
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{setting}: {path} cannot be read: {error}") from error
    if open_to_others:
        raise ConfigError(f"{setting}: {path} can be read by others; run `chmod 600 {shlex.quote(str(path))}`")
    if not found or not found.isascii() or len(found.split()) > 1:
        raise ConfigError(f"{setting}: expected one line with the key in {path}, without spaces")
    return found


def make_secret(path: Path) -> None:
    """Write a new key that this user alone can read, unless there is a file already."""
    with suppress(FileExistsError):
        number = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(number, "w") as file:
            file.write(secrets.token_hex(32) + "\n")


def bearer(token: str, run_name: str) -> dict[str, str]:
    """Return the headers with the token itself, for sockets in directories that no other user can enter."""
    return {"authorization": f"Bearer {token}", RUN: run_name}


def authorized(given: str | None, token: str) -> bool:
    """Compare an Authorization header with the token in constant time."""
    return same(given, f"Bearer {token}")


def same(given: str | None, expected: str) -> bool:
    """Compare two texts in constant time."""
    return hmac.compare_digest((given or "").encode(), expected.encode())


def of_process(run: str, process: str) -> str:
    """Return the name under which a server other than the controller signs; a message to one server is invalid for another."""
    return f"{run}/{process}"


@dataclass(frozen=True)
class AttemptKey:
    """Key with which the processes of one attempt sign."""

    run: str
    attempt: int
    key: bytes = field(repr=False)

    @classmethod
    def of(cls, token: str, run: str, attempt: int) -> AttemptKey:
        return cls(run, attempt, hmac.digest(token.encode(), f"{run}\n{attempt}".encode(), "sha256"))

    @property
    def whose(self) -> dict[str, str]:
        return {RUN: self.run, ATTEMPT: str(self.attempt)}

    def of_request(self, nonce: str, path: str, body: bytes) -> str:
        return self._sign("request", nonce, path, body)

    def of_answer(self, nonce: str, status: int, body: bytes) -> str:
        return self._sign("answer", nonce, str(status), body)

    def _sign(self, kind: str, nonce: str, what: str, body: bytes) -> str:
        text = "\n".join([kind, nonce, what, hashlib.sha256(body).hexdigest()])
        return hmac.digest(self.key, text.encode(), "sha256").hex()


class Sender:
    """Signs the requests of one client, each of them with a nonce of its own; for several threads."""

    def __init__(self, key: AttemptKey) -> None:
        self._key, self._name, self._numbers = key, secrets.token_hex(8), count(1)

    def headers(self, path: str, body: bytes) -> dict[str, str]:
        nonce = f"{self._name}-{next(self._numbers)}"
        return {**self._key.whose, NONCE: nonce, SIGNATURE: self._key.of_request(nonce, path, body)}

    def is_answer(self, nonce: str, status: int, body: bytes, headers: Mapping[str, str]) -> bool:
        """Return whether an answer to the request with this nonce is the controller's."""
        return same(headers.get(SIGNATURE), self._key.of_answer(nonce, status, body))


class Seen:
    """Nonces that were taken; only such that are signed are to be asked about."""

    def __init__(self) -> None:
        self._recent: dict[str, set[int]] = defaultdict(set)

    def is_new(self, nonce: str) -> bool:
        """Record a nonce; return whether it is the first time, as far as known."""
        sender, _, text = nonce.rpartition("-")
        if not (text.isascii() and text.isdecimal() and len(text) < 19):
            return False
        number, recent = int(text), self._recent[sender]
        if number in recent or number <= max(recent, default=0) - _WINDOW:
            return False
        recent.add(number)
        recent.difference_update([old for old in recent if old <= number - _WINDOW])
        return True
