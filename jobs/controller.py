"""The controller of a run: python jobs/controller.py RUN

consumes   the datasets (where their rows are trained: once, into dataset/), batches/, samples/ and evals/ of earlier attempts, control/stop.json
waits for  requests of the trainer and of the rollout workers (hpcrl/runtime/controller_client.py)
produces   batches/s<step>.json, metrics/controller.jsonl, timeline/, evals/*/summary.json, tensorboard/, alerts.jsonl, what trackers get;
           removes snapshots/ that nothing names any more
ends       when the last step is trained and evaluated and every worker knows; under a stop request its agent ends it
"""

import asyncio
import gc
import os
import signal
import sys
from contextlib import closing
from functools import partial

from hpcrl.controller.api import Api
from hpcrl.controller.build import build_service
from hpcrl.data.cache_files import named_digests
from hpcrl.errors import HpcrlError
from hpcrl.observe.alerts.monitor import monitor_process
from hpcrl.observe.goodput import GoodputMeter
from hpcrl.observe.tensorboard.follower import Follower
from hpcrl.observe.timeline import Timeline
from hpcrl.observe.trackers.base import senders, trackers_of
from hpcrl.observe.trial.watch import trial_process
from hpcrl.rundir.attempt_config import attempt_config
from hpcrl.rundir.layout import Run
from hpcrl.runtime.followers import Followers
from hpcrl.runtime.heartbeat import Heartbeat
from hpcrl.runtime.http_server import Guard, Signed, bind, serve
from hpcrl.runtime.process_status import RENEW_S, SERVING, StatusWriter
from hpcrl.runtime.token import read_token
from hpcrl.sandboxes.snapshots import SnapshotStore

COLLECT_S = 600.0


def main(path: str) -> None:
    run, attempt = Run.open(path), int(os.environ["HPCRL_ATTEMPT"])
    # the agent writes the stop file, so that workers learn of it before the end
    for number in (signal.SIGTERM, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    heartbeat = Heartbeat(run, attempt, "controller")
    status = StatusWriter(run, "controller", attempt, heartbeat)
    status.write("loading data")
    config = attempt_config(run, attempt)
    service = build_service(run, attempt, config, status)
    heartbeat.beat("serve")
    followers = senders(run, trackers_of(config.trainer.logger)) | monitor_process(run, attempt, config.trainer)
    followers |= trial_process(run, attempt)
    gc.freeze()  # the prompts stay, and to look through them for garbage takes long
    with Followers(run, attempt, followers), closing(Timeline(run, "controller", attempt)) as timeline:
        save_s = config.slurm.patience.save_seconds
        asyncio.run(answer(run, attempt, status, Api(service, save_s, timeline, GoodputMeter(run, attempt))))


async def answer(run: Run, attempt: int, status: StatusWriter, api: Api) -> None:
    """Answer requests until the run has ended. Renew the process status meanwhile, and remove snapshots that no episode needs any more."""
    listener = bind(os.environ["HPCRL_ADDRESS"])
    host, port = listener.getsockname()[:2]
    url = f"http://{host}:{port}"

    async def renew() -> None:
        while True:
            status.write(SERVING, url=url, **await api.status({}))
            await asyncio.sleep(RENEW_S)

    async def collect() -> None:
        snapshots = SnapshotStore(run.snapshots)
        while True:
            try:
                await asyncio.to_thread(snapshots.collect, partial(named_digests, run))
            except OSError as error:
                print(f"snapshots that nothing names any more stay for now: {error}", flush=True)
            await asyncio.sleep(COLLECT_S)

    tasks = [asyncio.create_task(renew()), asyncio.create_task(collect())]
    with Follower(run):
        app = Guard(api.routes(), Signed(read_token(run), run.name, attempt))
        await serve(app, listener, api.watch(run, attempt, lambda text: print(text, flush=True)))
    for task in tasks:
        task.cancel()
    status.write("finished", url=url)


if __name__ == "__main__":
    try:
        main(sys.argv[1])
    except HpcrlError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
