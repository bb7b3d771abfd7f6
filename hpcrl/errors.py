"""Exceptions that a user can cause, as one small tree.

    HpcrlError            exit code 1
    ├── ConfigError       2   a key, a type, a combination
    ├── SubmitError       3   Slurm, or the machine, refused
    ├── DataError         4   a dataset or a model path
    │   └── DamagedError 11   a file that the run wrote itself is not what it was; the next attempt writes it again
    ├── RunError          5   a run directory is missing, taken or foreign
    ├── CommitError       6   a checkpoint or weight directory is not complete
    ├── EngineError       7   the inference engine failed
    ├── UserCodeError     8   an environment or a reward function raised
    ├── ServiceError      9   a service that an environment or a reward asks, or a store for uploads, is away or gives no usable answer
    ├── DeviceError      10   a node lacks what the run is to use
    ├── RefusedRequestError 12 the inference engine refuses one request, and answers others
    └── SandboxError     13   a sandbox cannot be started, has ended, or refuses what is asked

A message names the thing, what was expected and the remedy. What is wrong inside hpcrl itself is an `assert`.
"""

from __future__ import annotations

import typing
from collections import abc


class HpcrlError(Exception):
    """Base of all errors that are shown to the user without a traceback."""

    exit_code = 1


class ConfigError(HpcrlError):
    """A configuration is wrong.

    Attributes:
        unknown: by the path of a setting that does not exist, what the message says of it.
        problems: those of the message, one by one (`hpcrl.config.errors.Problem`); empty where it is one sentence.
    """

    exit_code = 2

    def __init__(
        self, message: str = "", unknown: abc.Mapping[str, str] | None = None, problems: abc.Sequence[typing.Any] = ()
    ) -> None:
        super().__init__(message)
        self.unknown = dict(unknown or {})
        self.problems = tuple(problems)


class SubmitError(HpcrlError):
    exit_code = 3


class DataError(HpcrlError):
    exit_code = 4


class DamagedError(DataError):
    exit_code = 11


class RunError(HpcrlError):
    exit_code = 5


class CommitError(HpcrlError):
    exit_code = 6


class EngineError(HpcrlError):
    exit_code = 7


class UserCodeError(HpcrlError):
    exit_code = 8


class ServiceError(HpcrlError):
    exit_code = 9


class DeviceError(HpcrlError):
    exit_code = 10


class RefusedRequestError(HpcrlError):
    exit_code = 12


class SandboxError(HpcrlError):
    exit_code = 13


def did_you_mean(name: str, known: abc.Iterable[str], most: int = 1, alike: float = 0.6) -> str:
    """Return "; did you mean a or b?" for at most `most` of the names that resemble `name`, the nearest first; "" for none.

    Args:
        alike: how alike they have to be, from 0 to 1 (difflib's ratio).
    """
    near = similar(name, known, most, alike)
    return f"; did you mean {' or '.join(near)}?" if near else ""


def similar(name: str, known: abc.Iterable[str], most: int = 1, alike: float = 0.6) -> list[str]:
    """Return at most `most` of the names that resemble `name`, the nearest first."""
    from difflib import get_close_matches  # not on the way of a command that goes well

    return get_close_matches(name, list(known), most, alike)
