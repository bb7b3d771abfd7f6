"""Evaluates a model: python jobs/eval.py DIRECTORY, which `hpcrl eval` has made (hpcrl/launch/evaluate.py)

consumes   config.toml and evaluation.json of the directory, the model and the datasets that config.toml names
waits for  its own engine
produces   results.json; what was said and scored in evals/v<version>/0.jsonl
ends       with 0 when all prompts are evaluated; with the exit code of hpcrl/errors.py otherwise. The engine never outlives it
"""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from dataclasses import replace
from typing import Any

from hpcrl.config import Config
from hpcrl.config.derive import max_input_length
from hpcrl.errors import HpcrlError
from hpcrl.rollout.options import server_options
from hpcrl.rollout.scratch import Scratch
from hpcrl.rollout.server import Server
from hpcrl.run.commit import read_json, write_json
from hpcrl.run.layout import Run
from hpcrl.run.lease import LeaseWriter
from hpcrl.types import GroupMeta


def main(path: str) -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    place = Run.open(path)
    config, asked = Config.from_toml([place.config]), read_json(place.path / "evaluation.json")
    assert asked is not None, place.path
    lease, scratch = LeaseWriter(place, "eval", 0), Scratch()
    try:
        lease.say("starting engine")
        server = Server(server_options(place, config), scratch.path, place.log(0, "engine"))
        try:
            groups, facts = play(place, config, asked["version"], server, lease)
        finally:
            server.stop()
    finally:
        scratch.remove()
    write_json(place.path / "results.json", {**asked, **facts, **summary(groups)})
    lease.say("finished")


def play(
    place: Run, config: Config, version: int, server: Server, lease: LeaseWriter
) -> tuple[list[GroupMeta], dict[str, Any]]:
    """Return the finished groups, and what the results tell beside the scores."""
    # torch and transformers take seconds to import, while the engine starts
    from hpcrl.data.chat import load_tokenizer, prompt_ids
    from hpcrl.data.prompts import drop_long, load_prompts
    from hpcrl.envs.rewards.rows import needs
    from hpcrl.rollout.evaluate import evaluate, evaluation_work

    data, trainer, model = config.data, config.trainer, config.trainer.policy.model.path
    generator = replace(config.generator, max_input_length=max_input_length(config.generator, trainer))
    tokenizer = load_tokenizer(model, generator.chat_template)
    columns = config.environment.env_class, data.prompt_column, data.response_column
    prompts = load_prompts(data.val_data, *columns, **needs(config.environment, ("eval",), config.generator.max_turns))
    kept = drop_long(
        prompts,
        lambda prompt: len(prompt_ids(tokenizer, prompt.messages, generator.chat_template_kwargs)),
        trainer.max_prompt_length,
    )
    work = evaluation_work(kept, version, generator.eval_n_samples_per_prompt, trainer.seed)
    server.wait_ready(generator.inference_engine.start_timeout_seconds, lambda: lease.say("starting engine"))
    began = time.monotonic()

    def told(finished: int) -> None:
        if finished * 10 // len(work) != (finished - 1) * 10 // len(work):
            lease.say(f"{finished} of {len(work)} prompts")

    environment = config.environment
    groups = asyncio.run(evaluate(place, server, model, work, version, generator, environment, told))
    return groups, {"too_long": len(prompts) - len(kept), "seconds": time.monotonic() - began}


def summary(groups: list[GroupMeta]) -> dict[str, Any]:
    from hpcrl.controller.evaluation import by_source, scores

    prompts = {name: len(own) for name, own in by_source(groups).items()}
    failures = [failure for group in groups for failure in group.failures]
    return {"prompts": prompts, "failures": failures, "metrics": scores(groups)}


if __name__ == "__main__":
    try:
        main(sys.argv[1])
    except HpcrlError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
