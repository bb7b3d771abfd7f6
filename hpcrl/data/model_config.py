"""The configuration of a model as it lies on disk, with the changes that a run makes: the trainer's, and that of the engine in the worker."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hpcrl.config.sections.environment import CLASSIFIER
from hpcrl.config.sections.model import Pretrained, rope_parameters
from hpcrl.errors import DataError, did_you_mean

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def download(model: Pretrained) -> str:
    """Return the command that puts a model of the hub into the cache of its library."""
    return f"hf download {model.path}" + (f" --revision {model.revision}" if model.revision else "")


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

        import hpcrl.data.models.openvla  # noqa: F401  tells transformers of it

        try:
            config = AutoConfig.from_pretrained(self.path, **self.at_revision)
            entries, _ = PreTrainedConfig.get_config_dict(self.path, **self.at_revision)
        except (OSError, ValueError) as error:
            raise self.not_a_model(error) from error
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
        return self._changed(config, entries | changes) if changes else config

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
        """Return what is raised if the model cannot be loaded because of `error`."""
        return DataError(
            f"model {str(self)!r} cannot be loaded: expected a directory or hub id of a causal language model in Hugging Face "
            f"format (config.json, *.safetensors, tokenizer). Check {self.role}.model.path{', its revision' if self.revision else ''} and {self.role}.model_config_kwargs. "
            f"({error})"
        )
