"""What a worker imports."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import sys
import hpcrl.rollout.family, hpcrl.rollout.worker, hpcrl.engines.vllm.client
print([name for name in ("torch", "transformers") if name in sys.modules])
"""


def test_a_worker_whose_engine_is_another_process_needs_no_torch() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
