"""Lines of `slurm.setup` in a batch script, with a record of those that failed: bash goes on after them."""

from __future__ import annotations

import os
from collections.abc import Sequence

FAILED = "HPCRL_SETUP_FAILED"
# their numbers, not their texts, which may hold a secret
_TRAP = f"""trap 'export {FAILED}="${{{FAILED}-}}line $((LINENO - HPCRL_SETUP_LINE)) ($?), "' ERR; HPCRL_SETUP_LINE=$LINENO"""


def recorded_setup(setup: Sequence[str]) -> list[str]:
    """Return lines for bash that run `setup` and leave the numbers and exit codes of lines that failed in the environment."""
    return [f"unset {FAILED}", _TRAP, *setup, "trap - ERR"] if setup else []


def failed_setup() -> str:
    """Return the lines of the setup of this process's job that failed, with their exit codes; empty: none."""
    return os.environ.get(FAILED, "").rstrip(", ")
