"""Serves the sandboxes of a node: python jobs/sandbox.py RUN

consumes   images of the root of runs, and what rollout workers ask
waits for  nothing
produces   sandboxes, and snapshots in the run directory; its address is in its process status
ends       with 0 on SIGTERM; with the exit code of hpcrl/errors.py otherwise: after SandboxError, of a node that has no sandboxes, it is
           not started again
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from contextlib import suppress

from hpcrl.config import Config
from hpcrl.errors import HpcrlError, SandboxError, ServiceError
from hpcrl.rundir.attempt_config import attempt_config
from hpcrl.rundir.layout import Run
from hpcrl.rundir.process_names import sandbox_name
from hpcrl.runtime.heartbeat import Heartbeat
from hpcrl.runtime.http_server import Signed, bind
from hpcrl.runtime.process_status import RENEW_S, SERVING, StatusWriter, ending_told
from hpcrl.runtime.token import of_process, read_token
from hpcrl.sandboxes.images import ImageStore
from hpcrl.sandboxes.node import NodeSandboxes
from hpcrl.sandboxes.probe import expect_sandboxes
from hpcrl.sandboxes.sandbox import NoSandboxes, limits_of
from hpcrl.sandboxes.server import serve_sandboxes
from hpcrl.sandboxes.snapshots import SnapshotStore


def main(path: str) -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    run, attempt, number = Run.open(path), int(os.environ["HPCRL_ATTEMPT"]), int(os.environ["HPCRL_SANDBOXES"])
    name = sandbox_name(number)
    heartbeat = Heartbeat(run, attempt, name)
    status = StatusWriter(run, name, attempt, heartbeat)
    with ending_told(status):
        heartbeat.beat("serve")
        try:
            fuse_overlayfs = expect_sandboxes()
        except NoSandboxes:
            raise
        except SandboxError as error:
            raise ServiceError(f"no sandbox starts here now: {error}") from error
        serve(run, attempt_config(run, attempt), attempt, number, status, fuse_overlayfs)


def serve(run: Run, config: Config, attempt: int, number: int, status: StatusWriter, fuse_overlayfs: str) -> None:
    """Serve sandboxes until SIGTERM."""
    node, name = make_node(run, config, number, fuse_overlayfs), sandbox_name(number)
    listener = bind(os.environ["HPCRL_ADDRESS"])
    host, port = listener.getsockname()[:2]
    proof = Signed(read_token(run), of_process(run.name, name), attempt)

    async def renew() -> None:
        while True:
            facts = {"url": f"http://{host}:{port}", "sandboxes": node.running, "most": node.most}
            # beside requests: a filesystem that stands still would keep them waiting until leases are over
            await asyncio.to_thread(status.write, SERVING, **facts)
            await asyncio.sleep(RENEW_S)

    async def until_stopped() -> None:
        renewing = asyncio.create_task(renew())
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, renewing.cancel)
        # an error of it ends the server, which would go on without heartbeats until it counts as hung
        with suppress(asyncio.CancelledError):
            await renewing

    asyncio.run(serve_sandboxes(node, proof, listener, until_stopped()))


def make_node(run: Run, config: Config, number: int, fuse_overlayfs: str) -> NodeSandboxes:
    """Return the sandboxes of this node, as slurm.sandboxes asks for them."""
    asked = config.slurm.sandboxes
    return NodeSandboxes(
        ImageStore(run.root),
        SnapshotStore(run.snapshots),
        asked.per_node if number < asked.nodes else asked.per_rollout_node,
        float(asked.lease_seconds),
        limits_of(asked),
        frozenset(asked.network),
        fuse_overlayfs,
    )


if __name__ == "__main__":
    try:
        main(sys.argv[1])
    except HpcrlError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
