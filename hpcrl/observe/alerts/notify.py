"""Sends alerts to a command and a webhook; their failures are only printed."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx

_COMMAND_S = 30.0
_WEBHOOK_S = 10.0
_TRIES = 3
_AGAIN_S = 2.0


def run_command(command: Sequence[str], facts: dict[str, str], folder: Path) -> None:
    """Run a program to its end, at most 30 s, with the output of this process.

    Args:
        facts: environment variables beside those of this process.
    """
    try:
        process = subprocess.Popen(
            command, cwd=folder, env={**os.environ, **facts}, stdin=subprocess.DEVNULL, start_new_session=True
        )
    except (OSError, ValueError) as error:
        print(f"{command[0]} cannot be run: {error}", flush=True)
        return
    try:
        status = process.wait(_COMMAND_S)
        print(f"{command[0]} ended with {status}", flush=True)
    except subprocess.TimeoutExpired:
        print(f"{command[0]} did not end within {_COMMAND_S:.0f} s and is killed", flush=True)
    finally:
        with suppress(ProcessLookupError):  # with what it has left running
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def call_webhook(address: str, payload: dict[str, Any]) -> None:
    """POST JSON, up to three times; a status below 500 is final. The address is not printed."""
    for tried in range(1, _TRIES + 1):
        try:
            status = httpx.post(address, json=payload, timeout=_WEBHOOK_S).status_code
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:  # texts of errors may contain the address
            outcome, final = type(error).__name__, not isinstance(error, httpx.TransportError)
        else:
            outcome, final = f"status {status}", status < 500
        print(f"webhook: {outcome} (try {tried} of {_TRIES})", flush=True)
        if final:
            return
        time.sleep(_AGAIN_S)


def webhook_of(address: str | None, file: str | None) -> str | None:
    """Return the webhook's address from the configuration, or from the file that it names; None without one."""
    if file is None:
        return address
    try:
        return Path(file).read_text(encoding="utf-8").strip() or None
    except (OSError, UnicodeDecodeError) as error:
        print(f"webhook: {file} cannot be read: {error}", flush=True)
        return None
