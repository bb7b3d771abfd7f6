"""Errors of what a user may have written say where they come from."""

from __future__ import annotations

from types import TracebackType

from hpcrl.errors import HpcrlError, UserCodeError


class Blame:
    """Says which environment or reward, or which group, an exception comes from.

    Args:
        where: what the message begins with.

    Raises:
        UserCodeError: in the place of any exception within, but an HpcrlError keeps its class.
    """

    def __init__(self, where: str) -> None:
        self._where = where

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, HpcrlError):
            raise type(error)(f"{self._where}: {error}") from error
        if isinstance(error, Exception):
            raise UserCodeError(f"{self._where} raised {type(error).__name__}: {error}") from error
