"""Configurations of SkyRL and Cosmos-RL: what becomes of them, what follows from it, and what is refused."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

from hpcrl.config import Config
from hpcrl.config.fields import leaves
from hpcrl.config.load import nested
from hpcrl.config.token_limits import max_seq_len
from hpcrl.convert.cosmos.resolve import resolve
from tests.golden.adapters.converted import skyrl
from tests.golden.case import Case


def from_cli(case: Case) -> dict[str, Any]:
    """What a command line says; whether its settings fit together is another question, as in SkyRL."""
    arguments = [argument.partition("=") for argument in case.inputs["args"]]
    return _resolved(skyrl({name: value for name, _, value in arguments}, checked=False))


def validate_config(case: Case) -> dict[str, Any]:
    config = skyrl(case.params)
    correction = config.trainer.algorithm.off_policy_correction
    after = {name: getattr(correction, name) for name in ("tis_ratio_type", "token_tis_ratio_clip_high")}
    return {"result": "ok", "after": after}


def validate_batch_sizes(case: Case) -> dict[str, Any]:
    """Batch sizes alone: no GPUs are shared, so that nothing else can be wrong."""
    skyrl({"trainer.placement.colocate_all": False, "trainer.placement.colocate_policy_ref": False, **case.params})
    return {"result": "ok"}


def resume_mode(case: Case) -> dict[str, Any]:
    """The converter refuses from_path, because hpcrl cannot read SkyRL's checkpoints; here one of hpcrl's is named."""
    given = {f"trainer.{name}": value for name, value in {**case.params, **case.inputs}.items()}
    if given["trainer.resume_mode"] != "from_path":
        return {"mode": skyrl(given).trainer.resume_mode}
    required = {"data.train_data": ["t.parquet"], "data.val_data": ["v.parquet"], "trainer.policy.model.path": "model"}
    checkpoint = {"trainer.resume_path": "runs/other/checkpoints/s000001"}
    return {"mode": Config.from_dict(nested({**required, **checkpoint, **given})).trainer.resume_mode}


def cosmos_from_dict(case: Case) -> dict[str, Any]:
    return dict(resolve(case.inputs["toml"]).values)


def _resolved(config: Config) -> dict[str, Any]:
    """Return every value by its dotted name, those that follow from others included."""
    values = {setting.path: attrgetter(setting.path)(config) for setting in leaves(Config)}
    scaling, theta = config.engine_rope
    sampling = vars(config.generator.eval_sampling)
    return {
        **values,
        **{f"generator.eval_sampling_params.{name}": value for name, value in sampling.items()},
        "generator.max_input_length": config.max_input_length,
        "generator.rope_scaling": scaling or None,
        "generator.rope_theta": theta,
        "trainer.algorithm.temperature": config.temperature,
        "trainer.algorithm.max_seq_len": max_seq_len(config),
        "trainer.ref.model.path": config.trainer.ref_model.path,
    }


ADAPTERS = {
    "config.from_cli": from_cli,
    "validate.config": validate_config,
    "validate.batch_sizes": validate_batch_sizes,
    "checkpoint.resume_mode": resume_mode,
    "Config.from_dict*": cosmos_from_dict,
}
