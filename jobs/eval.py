"""Evaluates a model: python jobs/eval.py DIRECTORY, which `hpcrl eval` has made (hpcrl/launch/local/evaluate.py)

consumes   config.toml and evaluation.json of the directory, the model and the datasets that config.toml names
waits for  its own engine; serves sandboxes, where config.toml asks for some
produces   results.json and report.md; samples and scores in evals/v<version>/0.jsonl
ends       with 0 when all prompts are evaluated; with the exit code of hpcrl/errors.py otherwise. The engine never outlives it
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from contextlib import ExitStack
from typing import Any

from hpcrl.config import Config
from hpcrl.config.family import family_of
from hpcrl.config.sections.generator import NODE
from hpcrl.controller.evaluation import evaluation_work
from hpcrl.envs.tools.sandboxes import Sandboxes
from hpcrl.errors import HpcrlError
from hpcrl.launch.agent.environment import raise_open_files
from hpcrl.launch.agent.network import node_address
from hpcrl.observe.eval_report import write_results
from hpcrl.observe.scores import results_of
from hpcrl.rollout.engines.base import Launched
from hpcrl.rollout.engines.launch import launched
from hpcrl.rundir.commit import read_json
from hpcrl.rundir.layout import Run
from hpcrl.runtime.process_status import StatusWriter
from hpcrl.sandboxes.local import configured_sandboxes
from hpcrl.types import GroupMeta


def main(path: str) -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    raise_open_files()
    directory = Run.open(path)
    config, request = Config.from_toml([directory.config]), read_json(directory.path / "evaluation.json")
    assert request is not None, directory.path
    status = StatusWriter(directory, "eval", 0)
    status.write("starting engine")
    with ExitStack() as stack:
        sandboxes = stack.enter_context(configured_sandboxes(config.slurm.sandboxes, request.get("root")))
        engine = stack.enter_context(launched(directory, config, directory.log(0, "engine"), trains=False))
        groups, facts = evaluate(directory, config, request["version"], engine, status, sandboxes)
    failures = [failure for group in groups for failure in group.failures]
    write_results(
        directory, {**request, **facts, "failures": failures, **results_of(groups, config.generator.success_reward)}
    )
    status.write("finished")


def evaluate(
    directory: Run, config: Config, version: int, engine: Launched, status: StatusWriter, sandboxes: Sandboxes | None
) -> tuple[list[GroupMeta], dict[str, Any]]:
    """Return the finished groups, and the results beside the scores: prompts that were too long, seconds."""
    # torch and transformers take seconds to import, while the engine starts
    from hpcrl.data.datasets import counted_prompts, load_dataset
    from hpcrl.data.prompts import drop_long
    from hpcrl.data.sources import validation_sources
    from hpcrl.rollout.evaluate import evaluate
    from hpcrl.rollout.family import load_generator

    data, generator = config.data, config.generator
    prompts = load_dataset(
        validation_sources(data, data.val_data), ("eval",), data, config.environment, generator.max_turns
    )
    kept = drop_long(prompts, *counted_prompts(config))
    interval = 1 if family_of(config).keeps_evaluation_pictures else config.trainer.multi_modal_log_interval
    loaded = load_generator(directory, config, interval)
    seed = config.sampling_seed
    work = evaluation_work(kept, version, generator.eval_n_samples_per_prompt, seed)
    if generator.inference_engine.http_endpoint_host == NODE:
        os.environ["HPCRL_ADDRESS"] = node_address(config.slurm.network_interface)
    engine.wait_ready(generator.inference_engine.start_timeout_seconds, lambda: status.write("starting engine"))
    began = time.monotonic()

    def on_finished(finished: int) -> None:
        if finished * 10 // len(work) != (finished - 1) * 10 // len(work):
            status.write(f"{finished} of {len(work)} prompts")

    maker = loaded.maker(sandboxes=sandboxes)
    groups = asyncio.run(evaluate(directory, engine, maker, loaded.decode, work, version, generator, on_finished))
    return groups, {"too_long": len(prompts) - len(kept), "seconds": time.monotonic() - began}


if __name__ == "__main__":
    try:
        main(sys.argv[1])
    except HpcrlError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
