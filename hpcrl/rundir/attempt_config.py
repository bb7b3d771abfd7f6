"""Configuration of an attempt: the run's, with the sizes of the layout that the attempt has."""

from __future__ import annotations

from hpcrl.config import Config
from hpcrl.config.layouts import ranges_of
from hpcrl.rundir.layout import Run
from hpcrl.rundir.ledger import read_attempts


def attempt_config(run: Run, attempt: int) -> Config:
    """Return the configuration without ranges of an attempt; before the first one, that of the largest layout.

    Raises:
        ConfigError: its configuration is one of another version of hpcrl.
        RunError: attempts.jsonl is damaged.
    """
    config = Config.from_toml([run.config])
    if not ranges_of(config):
        return config
    sizes = next((one.sizes for one in read_attempts(run) if one.number == attempt), {})
    return config.at(sizes).largest()


def newest_config(run: Run) -> Config:
    """Return the configuration without ranges of the newest attempt; errors as of `attempt_config`."""
    return attempt_config(run, max((one.number for one in read_attempts(run)), default=0))
