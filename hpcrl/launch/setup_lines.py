"""Lines of `slurm.setup` in a batch script, with a record of those that failed: bash goes on after them."""

from __future__ import annotations

import os
from collections.abc import Sequence

FAILED = "HPCRL_SETUP_FAILED"
# Numbers of lines, not their texts, which may hold a secret; none inside files and functions that a line calls, whose own status counts.
# The record ends at some 200 characters: a command that fails in a loop would make an environment with which no process starts.
_RECORD = f'export {FAILED}="${{{FAILED}}}line $((LINENO - HPCRL_SETUP_LINE)) ($?), "'
_TRAP = f'case "${{#BASH_SOURCE[@]}}${{{FAILED}:200}}" in "$HPCRL_SETUP_DEPTH") {_RECORD};; esac'
_BEGIN = f"trap '{_TRAP}' ERR; {FAILED}= HPCRL_SETUP_DEPTH=${{#BASH_SOURCE[@]}} HPCRL_SETUP_LINE=$LINENO"
_END = f"[[ $(trap -p ERR) != *{FAILED}* ]] || trap - ERR"  # the setup may have set a trap of its own


def recorded_setup(setup: Sequence[str]) -> list[str]:
    """Return lines for bash that run `setup` and leave the numbers and exit codes of lines that failed in the environment."""
    return [_BEGIN, *setup, _END] if setup else []


def failed_setup() -> str:
    """Return the lines of the setup of this process's job that failed, with their exit codes; empty: none."""
    return os.environ.get(FAILED, "").rstrip(", ")
