"""Trains with TRL what `hpcrl submit CONFIG KEY=VALUE ...` trains; run.py starts it with the Python that has TRL.

    python benchmarks/peers/train_with_trl.py --engine transformers --output DIR CONFIG [KEY=VALUE ...]

Writes DIR/model, the last policy, and DIR/steps.json: seconds and tokens of each of hpcrl's steps, and the greedy scores on the way. A step ends with its last
optimizer step; evaluating and saving after it belong to the next one.
"""

from __future__ import annotations

import argparse
import json
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.peers.settings import ENGINES, grpo_settings
from benchmarks.peers.work import Work
from hpcrl.config import Config


def train(work: Work, engine: str, output: Path) -> None:
    if engine != "vllm":
        sys.modules["vllm"] = None  # pyright: ignore[reportArgumentType]  as where it is not installed: TRL would import it
    from datasets import Dataset  # pyright: ignore[reportMissingImports]
    from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports]

    from benchmarks.peers.step_times import StepTimes

    arguments = GRPOConfig(**grpo_settings(work.config, engine, work.steps, output))
    scores = []

    def evaluate(step: int, model: Any) -> None:
        config = work.config.trainer
        if not work.validation:
            return
        if step == work.steps or (step % config.eval_interval == 0 if step else config.eval_before_train):
            scores.append((step, work.greedy_score(model)))

    def reward(completions: list[Any], row: list[int], **_: Any) -> list[float]:
        return [work.reward(work.train[at], said[0]["content"]) for said, at in zip(completions, row, strict=True)]

    times = StepTimes(int(arguments.logging_steps), evaluate)
    trainer = GRPOTrainer(
        model=work.config.trainer.policy.model.path,
        args=arguments,
        reward_funcs=reward,
        train_dataset=Dataset.from_list([{"prompt": one.messages, "row": at} for at, one in enumerate(work.train)]),
        callbacks=[times],
    )
    if arguments.use_vllm and arguments.use_cpu:
        reload_by_layers(trainer.vllm_generation)
    trainer.train()
    trainer.save_model(str(output / "model"))
    seen = [0.0] + [entry["num_tokens"] for entry in trainer.state.log_history if "num_tokens" in entry]
    tokens = [after - before for before, after in pairwise(seen)]
    (output / "steps.json").write_text(json.dumps({"seconds": times.seconds, "tokens": tokens, "scores": scores}))


def reload_by_layers(generation: Any) -> None:
    """Make TRL's weight updates work with vLLM on CPUs.

    vLLM packs the weights of linear layers there when it has loaded them, and takes new ones only between these two calls; TRL 1.16 makes neither
    of them, and its first update ends with "'Parameter' object has no attribute 'weight_loader'".
    """
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    engine, sync = generation.llm.llm_engine, generation.sync_weights
    model = engine.model_executor.driver_worker.model_runner.model

    def sync_by_layers() -> None:
        initialize_layerwise_reload(model)
        sync()
        finalize_layerwise_reload(model, engine.model_config)

    generation.sync_weights = sync_by_layers


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--engine", choices=ENGINES, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("config", type=Path)
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE")
    arguments = parser.parse_args()
    train(Work.of(Config.from_toml(arguments.config, arguments.settings)), arguments.engine, arguments.output)


if __name__ == "__main__":
    main()
