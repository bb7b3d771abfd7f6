"""Checks configurations and names their runs: what `hpcrl submit` and `hpcrl.submit` do before anything is written."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from hpcrl.config import Config
from hpcrl.launch.submit.executors import Submission
from hpcrl.launch.submit.preflight import check_checkpoint, check_files
from hpcrl.launch.submit.submit import prepare
from hpcrl.launch.submit.sweep import load_elements, name_after


def checked_submission(
    given: Sequence[Path] | Config, overrides: Sequence[str], varied: Sequence[list[str]]
) -> tuple[Submission, list[str]]:
    """Return the submission of a run, or of a sweep, whose files are checked, and the warnings of these checks.

    Args:
        given, varied: as of `load_elements`.

    Raises:
        ConfigError, DataError: what is wrong with the settings, or with the files and models that they name.
        RunError: a run of that name exists.
        SubmitError: slurm.root cannot be written.
    """
    warnings = dict[str, None]()

    def check(config: Config, source_of: Callable[[str], str | None]) -> None:
        warnings.update(dict.fromkeys([*check_files(config, source_of), *check_checkpoint(config)]))

    configs = load_elements(given, overrides, varied, check)
    first = Path("run") if isinstance(given, Config) or not given else given[0]
    name = configs[0].trainer.run_name or name_after(first, time.strftime("%m%d-%H%M%S"))
    return prepare(name, list(zip(configs, varied, strict=True))), list(warnings)
