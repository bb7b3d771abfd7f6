"""Serves a reward model of a run: python jobs/reward.py RUN

consumes   the reward model, and what rollout workers ask
waits for  nothing
produces   scores, as answers; its address is in its process status
ends       with 0 on SIGTERM, when what waits is scored; with the exit code of hpcrl/errors.py otherwise. ConfigError and DataError would end
           every one of them
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from contextlib import closing

from hpcrl.config import Config
from hpcrl.errors import HpcrlError
from hpcrl.observe.timeline import Timeline, process_start
from hpcrl.rundir.attempt_config import attempt_config
from hpcrl.rundir.layout import Run
from hpcrl.runtime.heartbeat import Heartbeat
from hpcrl.runtime.http_server import Signed, bind
from hpcrl.runtime.process_status import SERVING, StatusWriter, ending_told
from hpcrl.runtime.token import of_process, read_token


def main(path: str) -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    run, attempt, number = Run.open(path), int(os.environ["HPCRL_ATTEMPT"]), int(os.environ["HPCRL_SERVICE"])
    name = f"reward-{number}"
    heartbeat, status = Heartbeat(run, attempt, name), StatusWriter(run, name, attempt)
    status.write("loading model")
    with ending_told(status), closing(Timeline(run, name, attempt, began=process_start())) as timeline:
        serve(run, attempt_config(run, attempt), attempt, name, status, heartbeat, timeline)


def serve(
    run: Run, config: Config, attempt: int, name: str, status: StatusWriter, heartbeat: Heartbeat, timeline: Timeline
) -> None:
    """Load the model, and serve it until the run ends."""
    from hpcrl.reward_service.model import RewardModel
    from hpcrl.reward_service.scoring import Scoring
    from hpcrl.reward_service.serve import asked_to_stop, serve_rewards

    settings = config.environment.remote_reward.service
    assert settings.model is not None, "a run without a reward model starts no service"
    model = RewardModel.load(settings.model, settings, "environment.remote_reward.service.model")
    heartbeat.beat("serve")
    listener = bind(os.environ["HPCRL_ADDRESS"])
    host, port = listener.getsockname()[:2]
    url = f"http://{host}:{port}"
    proof = Signed(read_token(run), of_process(run.name, name), attempt)
    # only the thread that computes beats: one that stands still is noticed
    scoring = Scoring(model, heartbeat.beat, timeline=timeline)

    def tell(counts: dict[str, int]) -> None:
        status.write(SERVING, url=url, **counts)

    asyncio.run(serve_rewards(model, settings.model, listener, proof, scoring, asked_to_stop(), tell))


if __name__ == "__main__":
    try:
        main(sys.argv[1])
    except HpcrlError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
