"""Files that a model has beside its weights. An export gets them byte for byte, but for what training changed."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hpcrl.config.sections.model import Pretrained
from hpcrl.errors import DataError
from hpcrl.rundir.commit import MANIFEST

log = logging.getLogger(__name__)

CONFIG = "config.json"
_GENERATION, _TOKENIZER, _TEMPLATE = "generation_config.json", "tokenizer_config.json", "chat_template.jinja"
_OLDER_TEMPLATE = "chat_template.json"
_TEMPLATES = "additional_chat_templates"
_COPIED = ["*.json", "*.jinja", "*.txt", "*.model", "*.py", "*.tiktoken", f"{_TEMPLATES}/*.jinja"]
_OTHERS = {CONFIG, MANIFEST, "adapter_config.json", "trainer_state.json"}  # of weights that an export does not have
_INDEX = ".index.json"
_ENDS, _DERIVED = "eos_token_id", "_from_model_config"


def model_folder(model: Pretrained, patterns: list[str]) -> Path:
    """Return the directory of a model; files of the hub are downloaded where they are missing.

    Args:
        patterns: names of the wanted files.

    Raises:
        OSError, ValueError: there is no such model, here or on the hub.
    """
    if Path(model.path).is_dir():
        return Path(model.path)
    import httpx
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import OfflineModeIsEnabled

    options: dict[str, Any] = {"allow_patterns": patterns, **model.at_revision}
    try:
        return Path(snapshot_download(model.path, **options))
    except (httpx.ConnectError, httpx.TimeoutException, OfflineModeIsEnabled):
        # of a commit it asks for the list of files, even where they are in the cache
        return Path(snapshot_download(model.path, local_files_only=True, **options))


def exported_files(model: Pretrained, template: str | None, end: int | None) -> dict[str, bytes]:
    """Return the contents of tokenizer, template, generation, processor and code files of an export, by name. Raises DataError where the files of the model cannot be read.

    Args:
        template: the chat template in place of the model's own; None: the model's own stays.
        end: the token that was trained as the end of an answer, which generation_config.json has to name; None: there is none.
    """
    try:
        folder = model_folder(model, [*_COPIED, CONFIG])
        files = {str(path.relative_to(folder)): path.read_bytes() for path in _copied(folder)}
        if template is not None:
            files = _with_template(files, template)
        return files if end is None else files | _generation_with(end, files.get(_GENERATION), folder / CONFIG)
    except (OSError, ValueError) as error:
        raise DataError(f"{model}: its tokenizer, template and configuration cannot be copied: {error}") from error


def _copied(folder: Path) -> Iterator[Path]:
    for pattern in _COPIED:
        for path in sorted(folder.glob(pattern)):
            if path.name not in _OTHERS and not path.name.endswith(_INDEX) and path.is_file():
                yield path


def _with_template(files: dict[str, bytes], template: str) -> dict[str, bytes]:
    """Return the files with another chat template in each place where transformers looks for one."""
    files = {name: content for name, content in files.items() if not name.startswith(f"{_TEMPLATES}/")}
    for name in (_TOKENIZER, _OLDER_TEMPLATE):
        if name in files and "chat_template" in (entries := json.loads(files[name])):
            files[name] = _json({**entries, "chat_template": template})
    return {**files, _TEMPLATE: template.encode()}


def _generation_with(end: int, own: bytes | None, config: Path) -> dict[str, bytes]:
    """Return generation_config.json where it has to change so that generation stops at `end`.

    Without the file transformers reads the tokens of config.json, which then become entries of a new one.
    """
    if own is not None:
        try:
            entries = dict(json.loads(own))
        except (ValueError, TypeError) as error:
            log.warning("%s is no JSON object and stays as it is, without the token %d: %s", _GENERATION, end, error)
            return {}
    else:
        of_model = json.loads(config.read_bytes())
        of_model = of_model.get("text_config", {}) | of_model
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
