"""What hpcrl adds inside vLLM's own processes, through vLLM's plugin entry point.

Weights: the engine `shared_fs` for vLLM's weight-update API (`shared_fs.py`).
Orphans: a vLLM process whose parent is killed would otherwise go on holding its memory and its GPU.

Importing this module is cheap: it needs neither vLLM nor torch.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import signal

from hpcrl.run.parent import die_with_parent

BACKEND = "shared_fs"
OWNED = "HPCRL_OWNS_ENGINE"


@functools.cache  # vLLM may load plugins twice in one process
def register() -> None:
    """Entry point of vLLM's general plugins. It runs in every vLLM process of this environment, also in those of other programs."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    WeightTransferEngineFactory.register_engine(BACKEND, "hpcrl.rollout.shared_fs", "SharedFilesystemEngine")
    parent = multiprocessing.parent_process()
    if os.environ.get(OWNED) == "1" and parent is not None:
        die_with_parent()
        if os.getppid() != parent.pid:  # it ended before the line above
            os.kill(os.getpid(), signal.SIGKILL)
