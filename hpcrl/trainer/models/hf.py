"""Hugging Face models of a run: their configuration with the run's changes, and their weights."""

from __future__ import annotations

import json
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from functools import partial, reduce
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, ClassVar, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import (
    AutoModel,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.utils.logging import disable_progress_bar

from hpcrl.config.sections.generator import ChatTemplateConfig
from hpcrl.config.sections.model import Pretrained
from hpcrl.data.entries import CONFIG
from hpcrl.data.model_config import ConfiguredModel, require_classifier
from hpcrl.data.models.files import model_folder
from hpcrl.data.tokenizer import load_tokenizer
from hpcrl.data.vision.classes import auto_class
from hpcrl.data.vision.families import family_of
from hpcrl.errors import DataError
from hpcrl.rundir.commit import write_text
from hpcrl.trainer.models.forward import DTYPES
from hpcrl.trainer.models.logits import LogitChange

_PICKLE = "its weights are a pickle that names more than tensors, and reading it could run code"


@dataclass(frozen=True, kw_only=True)
class ModelSource(ConfiguredModel):
    """A model as a run loads it.

    Attributes:
        gives_scores: it is a reward model.
    """

    gives_scores: ClassVar[bool] = False

    def empty(self, dtype: torch.dtype, attention: str) -> PreTrainedModel:
        """Return the model without weights, on the meta device. Raises DataError where there is none, or its log-probabilities would come out wrong."""
        config = self.config()
        try:
            model = _empty(self._model_class(config), config, dtype, attention)
        except ValueError as error:
            raise self.not_a_model(error) from error
        LogitChange.of(model.config)
        if getattr(model.get_output_embeddings(), "bias", None) is not None:
            raise DataError(
                f"the model at {self.path} has a bias in its output head, which this version of hpcrl cannot train"
            )
        return model

    def whole(self, dtype: torch.dtype, attention: str) -> PreTrainedModel:
        """Return the model with its weights, on the CPU. Raises DataError where it cannot be loaded or weights are missing."""
        model, missing = self._read(dtype, attention)
        self.expect_all(missing)
        return model

    def _model_class(self, config: PreTrainedConfig) -> Any:
        return auto_class(config)

    def export_dtype(self) -> torch.dtype:
        """Return the number type of exported weights: that of config.json, else of the safetensors files, else float32."""
        known = set(DTYPES.values())
        named = self._named_dtype()
        return named if named in known else stored if (stored := self.stored_dtype()) in known else torch.float32

    def _named_dtype(self) -> torch.dtype | None:
        config = self.config()
        named = config.dtype or config.get_text_config().dtype
        return named if isinstance(named, torch.dtype) else None

    def stored_dtype(self) -> torch.dtype | None:
        """Return a number type that holds all that the model's safetensors files have, without loss; None: it has no such files.

        Raises:
            DataError: they cannot be read.
        """
        try:
            folder = model_folder(self, ["*.safetensors", "*.json"])
            found = {tensor.dtype for file in folder.glob("model*.safetensors") for tensor in _contents(file)}
        except (OSError, ValueError, SafetensorError) as error:
            raise self.not_a_model(error) from error
        return reduce(torch.promote_types, found) if found else None

    def _read(self, dtype: torch.dtype, attention: str) -> tuple[PreTrainedModel, list[str]]:
        """Return the model, and the parameters for which it has no weights on disk."""
        disable_progress_bar()  # of no use in a log file
        config = self.config()
        model_class = self._model_class(config)
        try:
            answer = model_class.from_pretrained(
                self.path,
                config=config,
                dtype=dtype,
                attn_implementation=_of_parts(config, attention),
                output_loading_info=True,
                trust_remote_code=False,
                **self.at_revision,
            )
        except UnpicklingError as error:
            raise self.not_a_model(_PICKLE) from error
        # RuntimeError: weights of other shapes than the configuration's
        except (OSError, ValueError, RuntimeError) as error:
            raise self.not_a_model(error) from error
        model, loaded = cast("tuple[PreTrainedModel, dict[str, Any]]", answer)
        return model, sorted(loaded["missing_keys"])

    def expect_all(self, missing: list[str]) -> None:
        """Raise DataError if there are names of parameters for which there are no weights."""
        if missing:
            raise self.not_a_model(f"no weights for {', '.join(missing[:5])}{' …' if len(missing) > 5 else ''}")


@dataclass(frozen=True, kw_only=True)
class CriticSource(ModelSource):
    """A transformer whose output head gives one number, from any causal language model or from a critic that was saved.

    Attributes:
        head: name of the head, a linear layer without bias; its parameter is `<head>.weight`.
        seed: of a head that is not on disk. Its weights are drawn from N(0, s^2), s = 1 / (hidden size + 1): values begin near 0.
    """

    head: str
    seed: int

    def empty(self, dtype: torch.dtype, attention: str) -> PreTrainedModel:
        """Return the model without weights, on the meta device."""
        config = self.config()
        return _empty(self._model_class(config), config, dtype, attention)

    def whole(self, dtype: torch.dtype, attention: str) -> PreTrainedModel:
        """Return the model with its weights, on the CPU."""
        model, missing = self._read(dtype, attention)
        name = f"{self.head}.weight"
        self.expect_all([other for other in missing if other != name])
        if name in missing:
            head = model.get_output_embeddings()
            assert isinstance(head, nn.Linear)
            head.weight = nn.Parameter(self.drawn_head(head.in_features))  # whatever type the files have
        return model

    def drawn_head(self, width: int) -> torch.Tensor:
        """Return the weights of a head that is not on disk, [1, width] float32."""
        return torch.randn((1, width), generator=torch.Generator().manual_seed(self.seed)) / (width + 1)

    def _model_class(self, config: PreTrainedConfig) -> type[PreTrainedModel]:
        empty, name = _empty(AutoModel, config, torch.float32, "eager"), self.head
        body = type(empty)
        if hasattr(empty, name):
            raise DataError(
                f"trainer.algorithm.value_head_prefix: {body.__name__} has a part {name}; choose another name"
            )

        class ValueModel(body):
            def __init__(self, config: PreTrainedConfig) -> None:
                super().__init__(config)
                self.add_module(name, nn.Linear(config.get_text_config().hidden_size, 1, bias=False))

            def get_output_embeddings(self) -> nn.Module:
                return self.get_submodule(name)

        return _as_its_own(ValueModel, body)


@dataclass(frozen=True, kw_only=True)
class RewardModelSource(CriticSource):
    """A sequence classifier of one label, from any causal language model or from a reward model that was saved.

    Its score is that of transformers: of the last token that is not the padding token.
    """

    gives_scores: ClassVar[bool] = True

    @property
    def setting(self) -> str:
        """What names the model, for errors."""
        return f"{self.role}.model.path"

    def config(self) -> PreTrainedConfig:
        """Return the transformers configuration, with one label and a padding token: the tokenizer's, or its own, or the end of a text.

        Raises:
            DataError: there is none, or the model has no tokenizer.
        """
        config = super().config()
        config.num_labels, text = 1, cast(Any, config.get_text_config())
        tokenizer = load_tokenizer(self, ChatTemplateConfig(), self.setting)
        tokens = tokenizer.pad_token_id, text.pad_token_id, tokenizer.eos_token_id
        known = [token for token in tokens if isinstance(token, int) and token < text.vocab_size]
        text.pad_token_id = next(iter(known), None)
        return config

    def entries(self) -> dict[str, Any]:
        """Return config.json as an export has it; errors as of `config`."""
        entries, config = super().entries(), self.config()
        text = entries.get("text_config", entries)
        text["pad_token_id"] = config.get_text_config().pad_token_id
        labels = {name: value for name, value in config.to_dict().items() if name in ("id2label", "label2id")}
        return {name: value for name, value in entries.items() if name != "num_labels"} | labels

    def _model_class(self, config: PreTrainedConfig) -> type[PreTrainedModel]:
        name = self.head
        try:
            empty = _empty(AutoModelForSequenceClassification, config, torch.float32, "eager")
        except ValueError as error:  # of this kind of model transformers has no classifier
            raise self.not_a_model(error) from error
        body, head = type(empty), getattr(empty, name, None)
        if not isinstance(head, nn.Linear) or head.bias is not None:
            raise DataError(
                f"{self.setting}: {body.__name__} has no linear layer `{name}` without a bias, by which hpcrl knows reward models"
            )
        named = {"get_output_embeddings": lambda model: model.get_submodule(name)}
        return _as_its_own(type(body.__name__, (body,), named), body)


@dataclass(frozen=True, kw_only=True)
class JudgeSource(RewardModelSource):
    """A reward model that is not trained, loaded whole from disk."""

    @property
    def setting(self) -> str:
        return f"{self.role}.model"

    def config(self) -> PreTrainedConfig:
        """Return the transformers configuration, with a padding token.

        Raises:
            DataError: there is none, or it is not one of a classifier of one label.
        """
        require_classifier(ModelSource.config(self), self.path, self.setting)
        return super().config()

    def whole(self, dtype: torch.dtype, attention: str) -> PreTrainedModel:
        """Return the model with its weights, on the CPU."""
        return ModelSource.whole(self, dtype, attention)

    def not_a_model(self, error: Exception | str) -> DataError:
        said = " ".join(str(error).split())
        return DataError(f"{self.setting}: the reward model {Pretrained.__str__(self)} cannot be loaded: {said}")


def _as_its_own(extended: type[PreTrainedModel], body: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """Let transformers take an extended class for one of its own: of others' it does not put files of single experts together."""
    extended.__module__ = body.__module__
    return extended


def _contents(path: Path) -> Iterator[torch.Tensor]:
    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118
            part = file.get_slice(name)
            first = part[:0] if part.get_shape() else file.get_tensor(name)
            if first.is_floating_point():
                yield first


def _empty(model_class: Any, config: PreTrainedConfig, dtype: torch.dtype, attention: str) -> PreTrainedModel:
    automatic = getattr(model_class, "from_config", None)
    build = partial(automatic, trust_remote_code=False) if automatic else model_class._from_config
    with torch.device("meta"):  # transformers writes the number type and the attention into the configuration
        return build(deepcopy(config), dtype=dtype, attn_implementation=_of_parts(config, attention))


def _of_parts(config: PreTrainedConfig, attention: str) -> str | dict[str, str]:
    """Return which attention each part of a model computes: images are not causal, and are not packed samples."""
    if family_of(config) is None:
        return attention
    return {"": attention, "text_config": attention, "vision_config": "sdpa"}


def export_config(source: ModelSource, directory: Path, dtype: torch.dtype, architecture: str | None = None) -> None:
    """Write config.json of exported weights.

    Args:
        dtype: of the weights.
        architecture: name of the class of the model, where it is not that of config.json.
    """
    entries = source.entries()
    if architecture is not None:
        entries["architectures"] = [architecture]
    for part in (entries, *(value for value in entries.values() if isinstance(value, dict) and "model_type" in value)):
        part |= {name: str(dtype).removeprefix("torch.") for name in ("dtype", "torch_dtype") if part.get(name)}
    write_text(directory / CONFIG, json.dumps(entries, indent=2, ensure_ascii=False) + "\n")
