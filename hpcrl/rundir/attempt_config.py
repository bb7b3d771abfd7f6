"""Configuration of an attempt: the run's, with the sizes of the layout that the attempt has."""

from __future__ import annotations

from hpcrl.config import Config
from hpcrl.config.layouts import ranges_of
from hpcrl.rundir.layout import Run
from hpcrl.rundir.ledger import read_attempts


def attempt_config(run: Run, attempt: int | None = None) -> Config:
    """Return the configuration without ranges of an attempt; before the first one, that of the largest layout.

    Args:
        attempt: its number; None: the newest.

    Raises:
        ConfigError: its configuration is one of another version of hpcrl.
        RunError: attempts.jsonl is damaged.
    """
    config = Config.from_toml([run.config])
    if not ranges_of(config) and not config.slurm.requests:
        return config
    sizes = [one.sizes for one in read_attempts(run) if attempt in (None, one.number)]
    return config.at(sizes[-1] if sizes else {}).largest()
