"""What holds for all tests, before anything imports torch."""

from __future__ import annotations

import os

# two files are tested at a time: waiting threads of one would take the cores from the other
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
