"""One rollout worker of a run: python jobs/rollout.py RUN

consumes   work of the controller, weights/v<k>, the initial model
waits for  its turn, where its engine shares the trainer's devices; its engine, then the reward services of the run, then the controller
produces   samples/<replica>/, evals/v<k>/<replica>.jsonl and .rows, metrics/rollout-<replica>.jsonl, timeline/
ends       with 0 when the controller says stop or on SIGTERM; with the exit code of hpcrl/errors.py otherwise: ConfigError,
           DataError and UserCodeError would end every replica, all else concerns this one. The engine never outlives it
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from contextlib import ExitStack, closing, nullcontext
from dataclasses import replace
from functools import partial
from threading import Event
from typing import NoReturn

from hpcrl.config import Config
from hpcrl.errors import HpcrlError
from hpcrl.observe.timeline import ASLEEP, Timeline, process_start
from hpcrl.rollout.engines.launch import launched
from hpcrl.rundir.attempt_config import attempt_config
from hpcrl.rundir.layout import Run
from hpcrl.rundir.process_names import worker_name
from hpcrl.runtime.controller_client import ControllerClient
from hpcrl.runtime.heartbeat import Heartbeat
from hpcrl.runtime.process_status import StatusWriter, ending_told
from hpcrl.runtime.scratch import weight_copy_dir
from hpcrl.runtime.signals import die_with_parent, end_process

ASKED_TO_END = Event()


def main(path: str) -> None:
    signal.signal(signal.SIGTERM, end)
    run, attempt, replica = Run.open(path), int(os.environ["HPCRL_ATTEMPT"]), int(os.environ["HPCRL_REPLICA"])
    name = worker_name(replica)
    heartbeat = Heartbeat(run, attempt, name)
    status = StatusWriter(run, name, attempt, heartbeat)
    status.write("starting engine")
    with ending_told(status), closing(Timeline(run, name, attempt, began=process_start())) as timeline:
        serve(run, attempt_config(run, attempt), attempt, replica, status, heartbeat, timeline)


def serve(
    run: Run,
    config: Config,
    attempt: int,
    replica: int,
    status: StatusWriter,
    heartbeat: Heartbeat,
    timeline: Timeline,
) -> None:
    """Start the engine, work with it until the run ends, and end it."""
    start_s = config.generator.inference_engine.start_timeout_seconds
    copies = weight_copy_dir(config.generator.inference_engine)  # with the TMPDIR of the node, not this process's own
    shared = config.shares_gpus(replica)
    if shared:
        with timeline.during(ASLEEP) if config.trainer.placement.lend else nullcontext():
            if not has_lease(run, attempt, worker_name(replica), status):
                return
    with ExitStack() as stack:
        log = run.log(attempt, f"engine-{replica}")
        engine = stack.enter_context(launched(run, config, log, replica, attempt=attempt))
        # what follows takes seconds to import, while the engine starts
        from hpcrl.rollout.build import build_receiver, worker_options
        from hpcrl.rollout.family import load_generator
        from hpcrl.rollout.weights.copies import NodeCopies
        from hpcrl.rollout.worker import run_worker

        options = replace(worker_options(run, config, attempt, replica), timeline=timeline)
        if copies:
            receiver = build_receiver(run, attempt, config.generator.inference_engine)
            options = replace(options, copies=stack.enter_context(closing(NodeCopies(copies, run, attempt, receiver))))
        generator = load_generator(run, config, config.trainer.multi_modal_log_interval)
        engine.wait_ready(start_s, partial(starting, status))
        if services := config.reward_services:
            from hpcrl.rollout.reward_services import RewardServices

            rewards = RewardServices(run, attempt, services, config.environment.timeout_seconds)
            rewards.wait(lambda: status.write("waiting for the reward model"))
            options = replace(options, rewards=rewards.choose)
        sandboxes = None
        if servers := config.sandbox_servers:
            from hpcrl.rollout.own_services import sandboxes_of

            sandboxes = sandboxes_of(run, attempt, servers, options.name)
        heartbeat.beat("serve")
        controller = stack.enter_context(closing(ControllerClient(run, attempt)))
        if not shared:  # else its agent tells, once this process has ended and its memory is free
            stack.callback(controller.leave, options.name)
        given = {
            "replica": replica,
            "baselines": options.baselines,
            "rewards": options.rewards,
            "teacher_inputs": options.teacher_inputs,
            "sandboxes": sandboxes,
        }
        asyncio.run(run_worker(options, engine, generator.maker(**given), generator.decode, status))


def end(*_: object) -> NoReturn:
    ASKED_TO_END.set()
    sys.exit(0)


def starting(status: StatusWriter) -> None:
    """Tell that the engine starts, and end where that was asked for: what is imported, or freed, when a signal comes may swallow the exit."""
    if ASKED_TO_END.is_set():
        sys.exit(0)
    status.write("starting engine")


def has_lease(run: Run, attempt: int, name: str, status: StatusWriter) -> bool:
    """Wait until an engine may be started on the devices that it shares with the trainer; return whether it may, and not the run has ended."""
    with closing(ControllerClient(run, attempt)) as controller:
        while True:
            status.write("waiting for the GPU lease")
            answer = controller.call("lease", worker=name, awake=False)
            if answer["stop"] or answer["lease"]:
                return answer["lease"]


if __name__ == "__main__":
    die_with_parent()  # under nsys, that is not the agent
    try:
        main(sys.argv[1])
    except SystemExit as leaving:  # of SIGTERM
        end_process(int(bool(leaving.code)))
    except HpcrlError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        end_process(error.exit_code)
    end_process()  # weights may be on their way here
