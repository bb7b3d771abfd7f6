"""Prints a configuration as TOML or YAML: its settings, and as comments the values that follow where nothing is set."""

from __future__ import annotations

import json
from typing import Any

from hpcrl.config.difference import as_yaml, value_as_toml
from hpcrl.config.fields import values
from hpcrl.config.root import Config
from hpcrl.config.token_limits import max_seq_len


def show(config: Config, only_changed: bool = False, in_yaml: bool = False) -> str:
    """Return TOML that `Config.from_toml` reads as the same configuration, or YAML whose tables `Config.from_dict` does.

    Args:
        only_changed: leave out what has its default, and the comments.
    """
    if only_changed:
        return as_yaml(config.changed()) if in_yaml else config.to_toml(only_changed)
    text = as_yaml(config.to_dict()) if in_yaml else config.to_toml()
    unset = {setting.path for setting, value in values(config) if value is None}
    lines = [
        f"# {path}: {json.dumps(value)}" if in_yaml else f"# {path} = {value_as_toml(value)}"
        for path, value in _following(config).items()
        if path in unset and value is not None
    ]
    return "\n".join([text, "# what follows where it is not set:", *lines]) + "\n" if lines else text


def _following(config: Config) -> dict[str, Any]:
    sampling = {
        f"generator.eval_sampling_params.{name}": value for name, value in vars(config.generator.eval_sampling).items()
    }
    return {
        "trainer.ref.model.path": config.trainer.ref_model.path,
        "trainer.algorithm.temperature": config.temperature,
        "trainer.algorithm.max_seq_len": max_seq_len(config),
        "generator.max_input_length": config.max_input_length,
        **sampling,
        "generator.inference_engine.enforce_eager": config.generator.inference_engine.runs_eagerly(
            on_cpu=config.slurm.gpus == 0
        ),
        "slurm.replicas_per_node": config.replicas_per_node,
    }
