"""Everything a user can cause, as one small tree of exceptions.

    HpcrlError            exit code 1
    ├── ConfigError       2   a key, a type, a combination
    ├── SubmitError       3   Slurm, or the machine, refused
    ├── DataError         4   a dataset or a model path
    ├── RunError          5   a run directory is missing, taken or foreign
    ├── CommitError       6   a checkpoint or weight directory is not complete
    ├── EngineError       7   the inference engine failed
    ├── UserCodeError     8   an environment or a reward function raised
    └── ServiceError      9   a service that an environment or a reward asks is away, or gives no usable answer

A message names the thing, what was expected and the remedy. What is wrong inside hpcrl itself is an `assert`.
"""


class HpcrlError(Exception):
    """Base of all errors that are shown to the user without a traceback."""

    exit_code = 1


class ConfigError(HpcrlError):
    exit_code = 2


class SubmitError(HpcrlError):
    exit_code = 3


class DataError(HpcrlError):
    exit_code = 4


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
