"""What a test tells the engines of its run, also while they run: a JSON file that STAND_IN names.

{"latency_s": 0.05, "rollout-1": {"start_s": 20}}

latency_s        seconds from a request to its answer
start_s          seconds before the server answers at all
out_of_memory    the engine cannot load its model
short_of_memory  it sleeps, and cannot wake
flood_mb         megabytes that it writes to its log at each request
stale            the engine goes on to say the version that it had before an update
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def knob(name: str, default: Any) -> Any:
    told = json.loads(Path(os.environ["STAND_IN"]).read_text())
    own = told.get(f"rollout-{os.environ.get('HPCRL_REPLICA')}", {})
    return own.get(name, told.get(name, default))
