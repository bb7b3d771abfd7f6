"""SkyRL's configuration: overrides to a tree, what follows from it, which combinations are refused."""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter
from typing import Any

import yaml

from hpcrl.config import Config, eval_sampling, temperature
from hpcrl.config.convert.skyrl import convert_overrides
from hpcrl.config.convert.skyrl_fields import RENAMED
from hpcrl.config.derive import engine_rope, max_input_length, max_seq_len, ref_model_path
from hpcrl.config.load import nested
from hpcrl.config.problem import Problem, raise_together
from hpcrl.config.rules import impossible
from hpcrl.config.surface import leaves, settings
from hpcrl.config.validate import build
from tests.golden.cases import Case

# What SkyRL documents as its default, where hpcrl requires a value or has another one that decides about combinations.
_DEFAULTS: dict[str, Any] = {
    "data.train_data": ["~/data/gsm8k/train.parquet"],
    "data.val_data": ["~/data/gsm8k/validation.parquet"],
    "trainer.policy.model.path": "Qwen/Qwen2.5-1.5B-Instruct",
    "trainer.placement.colocate_all": True,
}
_NULLS = {"trainer.resume_mode": "none"}  # SkyRL's other word for the same
_KNOWN = settings(Config)
_OLD = {*RENAMED, *(f"trainer.algorithm.{name}" for name in ("use_tis", "tis_imp_ratio_cap"))}


def from_cli(case: Case) -> dict[str, Any]:
    arguments = [argument.partition("=") for argument in case.inputs["args"]]
    return _resolved(_tree({name: value for name, _, value in arguments}))


def validate_config(case: Case) -> dict[str, Any]:
    config = _checked(case.params)
    correction = config.trainer.algorithm.off_policy_correction
    after = {name: getattr(correction, name) for name in ("tis_ratio_type", "token_tis_ratio_clip_high")}
    return {"result": "ok", "after": {**after, "logprobs": config.generator.sampling_params.logprobs}}


def validate_batch_sizes(case: Case) -> dict[str, Any]:
    """Batch sizes alone: no GPUs are shared, so that nothing else can be wrong."""
    _checked({"trainer.placement.colocate_all": False, "trainer.placement.colocate_policy_ref": False, **case.params})
    return {"result": "ok"}


def resume_mode(case: Case) -> dict[str, Any]:
    config = _tree({f"trainer.{name}": value for name, value in case.inputs.items()})
    return {"mode": config.trainer.resume_mode}


def _checked(overrides: Mapping[str, Any]) -> Config:
    """Return the tree of overrides that all have a place here, if nothing in it is impossible."""
    for name in overrides:
        if name not in _OLD and all(setting.path != name for setting in _KNOWN):
            raise LookupError(f"{name}: hpcrl has no such setting, so that its refusal would say nothing about a rule")
    config = _tree(overrides)
    raise_together(impossible(config), lambda _: None)
    return config


def _tree(overrides: Mapping[str, Any]) -> Config:
    """Return the tree of SkyRL's overrides, whose values are YAML where they are text; what waits is not counted.

    Names that SkyRL itself calls old or deprecated exist in the converter only.
    """
    if _OLD.intersection(overrides):
        return _converted(overrides)
    values = {name: yaml.safe_load(value) if isinstance(value, str) else value for name, value in overrides.items()}
    given = {name: _NULLS.get(name) if value is None else value for name, value in values.items()}
    return build(Config, nested({**_DEFAULTS, **given}))


def _converted(overrides: Mapping[str, Any]) -> Config:
    conversion = convert_overrides([f"{name}={value}" for name, value in overrides.items()], "a golden case")
    raise_together([Problem(e.source, e.message) for e in conversion.entries if e.kind == "unknown"], lambda _: None)
    return build(Config, nested({**_DEFAULTS, **conversion.values}))


def _resolved(config: Config) -> dict[str, Any]:
    """Return every value by its dotted name, those that follow from others included."""
    values = {setting.path: attrgetter(setting.path)(config) for setting in leaves(Config)}
    scaling, theta = engine_rope(config)
    sampling = vars(eval_sampling(config.generator))
    return {
        **values,
        **{f"generator.eval_sampling_params.{name}": value for name, value in sampling.items()},
        "generator.max_input_length": max_input_length(config.generator, config.trainer),
        "generator.rope_scaling": scaling or None,
        "generator.rope_theta": theta,
        "trainer.algorithm.temperature": temperature(config),
        "trainer.algorithm.max_seq_len": max_seq_len(config),
        "trainer.ref.model.path": ref_model_path(config.trainer),
    }


ADAPTERS = {
    "config.from_cli": from_cli,
    "validate.config": validate_config,
    "validate.batch_sizes": validate_batch_sizes,
    "checkpoint.resume_mode": resume_mode,
}
