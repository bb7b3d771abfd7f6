"""Reads the configuration of a model from disk, with the changes of a run for the trainer and for the embedded engine."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hpcrl.config.sections.environment import CLASSIFIER
from hpcrl.config.sections.model import Pretrained, rope_parameters
from hpcrl.data.entries import CONFIG, check_files, read_entries
from hpcrl.data.models.files import model_folder
from hpcrl.errors import DataError, did_you_mean

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def download(model: Pretrained) -> str:
    """Return the command that puts a model of the hub into the cache of its library."""
    return shlex.join(["hf", "download", model.path, *(["--revision", model.revision] if model.revision else [])])


def require_classifier(config: PreTrainedConfig, path: str, setting: str) -> None:
    """Raise DataError where the configuration of a model, as it lies on disk, is not one of a sequence classifier of one label.

    Args:
        setting: what names the model, for errors.
    """
    labels, found = config.num_labels, config.architectures or ["no architecture"]
    if labels != 1 or not any(name.endswith(CLASSIFIER) for name in found):
        raise DataError(
            f"{setting}: {path} is no reward model: expected a sequence classifier of one label (…{CLASSIFIER}), found {', '.join(found)} "
            f"of {labels} labels"
        )


def longest_input(config: PreTrainedConfig) -> int | None:
    """Return how many tokens a model takes; None: its configuration does not say."""
    return getattr(config.get_text_config(), "max_position_embeddings", None)


def with_older_names(entries: dict[str, Any]) -> dict[str, Any]:
    """Return a config.json that transformers 5 wrote with the names that transformers 4 reads beside its own.

    Without them transformers 4 takes its default base of rotary positions. One that transformers 4 wrote stays as it is.
    """
    entries = {name: with_older_names(value) if isinstance(value, dict) else value for name, value in entries.items()}
    parameters = entries.get("rope_parameters")
    if not isinstance(parameters, dict) or "rope_theta" in entries:
        return entries
    of_all = parameters.get("full_attention", parameters)
    older: dict[str, Any] = {"rope_theta": of_all.get("rope_theta"), "rope_scaling": _older_scaling(entries, of_all)}
    if "partial_rotary_factor" in of_all:
        older["partial_rotary_factor"] = of_all["partial_rotary_factor"]
    if "sliding_attention" in parameters:
        older["rope_local_base_freq"] = parameters["sliding_attention"].get("rope_theta")
    if "num_local_experts" in entries:
        older["num_experts"] = entries["num_local_experts"]
    return entries | {name: value for name, value in older.items() if name not in entries}


def _older_scaling(entries: dict[str, Any], parameters: dict[str, Any]) -> dict[str, Any] | None:
    if entries.get("model_type") == "phi3" and parameters.get("rope_type") == "longrope":
        # transformers 4 refuses any further entry there
        return {"type": "longrope", **{name: parameters[name] for name in ("short_factor", "long_factor")}}
    scaling = {name: value for name, value in parameters.items() if name != "rope_theta"}
    plain = {name: value for name, value in scaling.items() if name != "partial_rotary_factor"}
    return None if plain in ({}, {"rope_type": "default"}) else scaling


@dataclass(frozen=True, kw_only=True)
class ConfiguredModel(Pretrained):
    """A model and what a run changes of its configuration.

    Attributes:
        role, rope: sections of the configuration that name it, such as "trainer.policy", and its rotary positions; for errors.
        config_kwargs: entries of config.json that are replaced.
        rope_scaling, rope_theta: replace the model's rotary positions; empty and None: the model's own.
    """

    role: str
    rope: str = "trainer"
    config_kwargs: dict[str, Any] = field(default_factory=dict)
    rope_scaling: dict[str, Any] = field(default_factory=dict)
    rope_theta: float | None = None

    def config(self) -> PreTrainedConfig:
        """Return the transformers configuration.

        Raises:
            DataError: there is none, or it does not have what is to be changed.
        """
        from transformers import AutoConfig, PreTrainedConfig

        import hpcrl.data.models.openvla  # noqa: F401  registers it with transformers

        try:
            check_files(self.path, **self.at_revision)
            # None would have transformers ask on a terminal whether to run the model's code
            config = AutoConfig.from_pretrained(self.path, trust_remote_code=False, **self.at_revision)
            if not (self.config_kwargs or self.rope_scaling or self.rope_theta is not None):
                return config
            entries, _ = PreTrainedConfig.get_config_dict(self.path, **self.at_revision)
        except (OSError, ValueError) as error:
            raise self.not_a_model(error) from error
        changed = self._with_changes(config, entries)
        return config if changed == entries else self._changed(config, changed)

    def entries(self) -> dict[str, Any]:
        """Return config.json as an export has it: that of the model, with the changes, which transformers 4 can read too."""
        config = self.config()
        try:
            entries = read_entries(model_folder(self, [CONFIG]) / CONFIG)
        except (OSError, ValueError) as error:
            raise self.not_a_model(error) from error
        return with_older_names(self._with_changes(config, entries))

    def _with_changes(self, config: PreTrainedConfig, entries: dict[str, Any]) -> dict[str, Any]:
        changes = self.config_kwargs
        for name in changes:
            if name not in entries and not hasattr(config, name):
                raise DataError(
                    f"{self.role}.model_config_kwargs.{name}: {type(config).__name__} has no such entry"
                    + did_you_mean(name, [*entries, *config.to_dict()])
                )
        if self.rope_scaling or self.rope_theta is not None:
            # where both are there, config.json's older form would only be ignored
            entries = {name: value for name, value in entries.items() if name not in ("rope_scaling", "rope_theta")}
            changes = changes | {"rope_parameters": self._rope(config)}
        return entries | changes

    def _changed(self, config: PreTrainedConfig, entries: dict[str, Any]) -> PreTrainedConfig:
        from huggingface_hub.errors import StrictDataclassError

        try:
            return type(config).from_dict(entries)
        except (StrictDataclassError, ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"the model at {self.path} cannot have the changes of {self.role}.model_config_kwargs, {self.rope}.rope_scaling "
                f"and {self.rope}.rope_theta: {error}"
            ) from error

    def _rope(self, config: PreTrainedConfig) -> dict[str, Any]:
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        own = getattr(config, "rope_parameters", None)
        if not own or "rope_theta" not in own:
            raise DataError(
                f"{self.rope}.rope_scaling and {self.rope}.rope_theta: the model at {self.path} has no rotary positions, or other "
                "ones in each kind of layer; leave them out"
            )
        kind = self.rope_scaling.get("rope_type", self.rope_scaling.get("type", "default"))
        if kind not in ("default", *ROPE_INIT_FUNCTIONS):
            raise DataError(f'{self.rope}.rope_scaling: "{kind}" is none of default, {", ".join(ROPE_INIT_FUNCTIONS)}')
        return rope_parameters(own, self.rope_scaling, self.rope_theta)

    def not_a_model(self, error: Exception | str) -> DataError:
        """Return the error of a model that cannot be loaded because of `error`."""
        return DataError(
            f"model {str(self)!r} cannot be loaded: expected a directory or hub id of a causal language model in Hugging Face "
            f"format (config.json, *.safetensors, tokenizer). Check {self.role}.model.path{', its revision' if self.revision else ''} and {self.role}.model_config_kwargs. "
            f"({error})"
        )
