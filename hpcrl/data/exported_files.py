"""Copies a model's files beside its weights into an export, except those that training changed or other programs misread."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hpcrl.config.sections.model import Pretrained
from hpcrl.data.entries import CONFIG, entries_of_json, read_entries
from hpcrl.data.models.files import model_folder
from hpcrl.data.tokenizer import names_other_class
from hpcrl.errors import DataError
from hpcrl.rundir.commit import MANIFEST

log = logging.getLogger(__name__)

_GENERATION, _TOKENIZER, _TEMPLATE = "generation_config.json", "tokenizer_config.json", "chat_template.jinja"
_OLDER_TEMPLATE = "chat_template.json"
_TEMPLATES = "additional_chat_templates"
_COPIED = ["*.json", "*.jinja", "*.txt", "*.model", "*.py", "*.tiktoken", f"{_TEMPLATES}/*.jinja"]
_OTHERS = {CONFIG, MANIFEST, "adapter_config.json", "trainer_state.json"}  # of weights that an export does not have
_OF_TOKENIZER = {"tokenizer.json", "special_tokens_map.json", "added_tokens.json"}
_PLAIN_CLASS = (
    "PreTrainedTokenizerFast"  # what transformers 4 and 5, and vLLM with them, load from tokenizer.json alone
)
_CLASS_OF_5, _EXTRA = "TokenizersBackend", "extra_special_tokens"
_INDEX = ".index.json"
_ENDS, _DERIVED = "eos_token_id", "_from_model_config"


def exported_files(model: Pretrained, template: str | None, end: int | None) -> dict[str, bytes]:
    """Return the contents of tokenizer, template, generation, processor and code files of an export, by name.

    Args:
        template: the chat template in place of the model's own; None: the model's own stays.
        end: the token that was trained as the end of an answer, which generation_config.json has to name; None: there is none.

    Raises:
        DataError: the files of the model cannot be read.
    """
    try:
        folder = model_folder(model, [*_COPIED, CONFIG])
        files = {str(path.relative_to(folder)): path.read_bytes() for path in _copied(folder)}
        files = _for_each_version(files, names_other_class(model))
        if template is not None:
            files = _with_template(files, template)
        return files if end is None else files | _generation_with(end, files.get(_GENERATION), folder / CONFIG)
    except (OSError, ValueError) as error:
        raise DataError(f"{model}: its tokenizer, template and configuration cannot be copied: {error}") from error


def write_tokenizer(model: Pretrained, folder: Path) -> Path | None:
    """Write a model's tokenizer so that each version of transformers gives the ids of tokenizer.json; None: its own files do that.

    Args:
        folder: is made.

    Raises:
        OSError, ValueError, DataError: the tokenizer cannot be read.
    """
    if not names_other_class(model):
        return None
    source = model_folder(model, [*_OF_TOKENIZER, _TOKENIZER, _TEMPLATE, CONFIG])
    names = sorted({*_OF_TOKENIZER, _TOKENIZER, _TEMPLATE})
    files = {name: (source / name).read_bytes() for name in names if (source / name).is_file()}
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in _for_each_version(files, other_class=True).items():
        (folder / name).write_bytes(content)
    return folder


def _for_each_version(files: dict[str, bytes], other_class: bool) -> dict[str, bytes]:
    """Return files with a tokenizer_config.json that transformers 4 and 5 load with the ids of tokenizer.json.

    Args:
        other_class: whether it names a class that gives other ids. What transformers 5 saved may name one that version 4 lacks.
    """
    if "tokenizer.json" not in files or _TOKENIZER not in files:
        return files
    own = entries_of_json(files[_TOKENIZER], _TOKENIZER)
    entries = dict(own)
    if isinstance(named := own.get(_EXTRA), list):  # version 4 expects an object of names there
        del entries[_EXTRA]
        entries |= {"additional_special_tokens": named} if named else {}
    if named := own.get("model_specific_special_tokens"):
        entries[_EXTRA] = named
    if other_class or own.get("tokenizer_class") == _CLASS_OF_5:
        entries["tokenizer_class"] = _PLAIN_CLASS
        written = json.loads(files["tokenizer.json"])["pre_tokenizer"] or {}
        if "add_prefix_space" in written:  # both versions change it to what this entry says, or to false
            entries["add_prefix_space"] = written["add_prefix_space"]
    return files if entries == own else {**files, _TOKENIZER: _json(entries)}


def _copied(folder: Path) -> Iterator[Path]:
    for pattern in _COPIED:
        for path in sorted(folder.glob(pattern)):
            if path.name not in _OTHERS and not path.name.endswith(_INDEX) and path.is_file():
                yield path


def _with_template(files: dict[str, bytes], template: str) -> dict[str, bytes]:
    files = {name: content for name, content in files.items() if not name.startswith(f"{_TEMPLATES}/")}
    for name in (_TOKENIZER, _OLDER_TEMPLATE):
        if name in files and "chat_template" in (entries := entries_of_json(files[name], name)):
            files[name] = _json({**entries, "chat_template": template})
    return {**files, _TEMPLATE: template.encode()}


def _generation_with(end: int, own: bytes | None, config: Path) -> dict[str, bytes]:
    """Return generation_config.json where it has to change so that generation stops at `end`.

    Without the file transformers reads the tokens of config.json, which then become entries of a new one.
    """
    if own is not None:
        try:
            entries = entries_of_json(own, _GENERATION)
        except DataError as error:
            log.warning("it stays as it is, without the token %d: %s", end, error)
            return {}
    else:
        of_model = read_entries(config)
        of_model = (of_model.get("text_config") or {}) | of_model
        names = "bos_token_id", _ENDS, "pad_token_id"
        entries = {name: of_model[name] for name in names if of_model.get(name) is not None}
    ends = entries.get(_ENDS)
    ends = ends if isinstance(ends, list) else [ends] if ends is not None else []
    if end in ends:
        return {}
    # transformers 4 takes the ends of config.json instead where this is true
    derived = {_DERIVED: False} if _DERIVED in entries else {}
    return {_GENERATION: _json({**entries, **derived, _ENDS: [*ends, end]})}


def _json(entries: dict[str, Any]) -> bytes:
    return (json.dumps(entries, indent=2, ensure_ascii=False) + "\n").encode()
