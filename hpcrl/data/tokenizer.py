"""Loads tokenizers of models, with the ids of tokenizer.json and with the configured chat template."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpcrl.config.sections.generator import ChatTemplateConfig
from hpcrl.config.sections.model import Pretrained
from hpcrl.data.entries import CONFIG, check_files
from hpcrl.data.model_config import download
from hpcrl.data.render import render
from hpcrl.errors import ConfigError, DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_OWN = Path(__file__).with_name("templates")
_MAX_BYTES = 1 << 20
_FILES = (CONFIG, "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.json")
_SETTING = "generator.chat_template.name_or_path"

PROBE = (
    "Hello World 2025, it's 4 o'clock; isn't it?",
    "x = {'a': [1.5, -2], \"b\": None}  # a comment",
    "def f(x):\n\treturn x + 1\n\n\n    indented",
    " white space  at both ends\n ",
    "Gr\u00f6\u00dfe, na\u00efve caf\u00e9, \u65e5\u672c\u8a9e, \u0440\u0443\u0441\u0441\u043a\u0438\u0439, \U0001f642",
)
"""Texts of which `tokenizers` and transformers have to make the same ids: words, numbers, white space, code and scripts."""


def chat_template(config: ChatTemplateConfig) -> str | None:
    """Return the Jinja text, or None for the tokenizer's own template.

    Raises:
        ConfigError: there is no such template, or its file is missing, no regular file, too large or not UTF-8.
    """
    if not config.name_or_path:
        return None
    if config.source == "name":
        known = {path.stem: path for path in sorted(_OWN.glob("*.jinja"))}
        if config.name_or_path not in known:
            raise ConfigError(f'{_SETTING}: no template "{config.name_or_path}"; expected one of {", ".join(known)}')
        return known[config.name_or_path].read_text(encoding="utf-8")
    return _read(config.name_or_path)


def _read(name: str) -> str:
    try:
        path = Path(name).expanduser()
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise ConfigError(f"{_SETTING}: {name} is no regular file; expected a file with a Jinja template")
        if status.st_size > _MAX_BYTES:
            raise ConfigError(f"{_SETTING}: {name} has {status.st_size} bytes; expected at most {_MAX_BYTES} (1 MiB)")
        return path.read_text(encoding="utf-8-sig")  # else each prompt would begin with a byte order mark
    except (OSError, ValueError) as error:
        raise ConfigError(f"{_SETTING}: {name!r} cannot be read ({error}); expected a Jinja file in UTF-8") from error


@contextmanager
def without_torch() -> Iterator[None]:
    """Keep transformers, where it is first imported in this block, from importing torch: a tokenizer needs nothing of it.

    It saves seconds and a quarter of a GB, and is for a process that uses no models of transformers: those stay unknown in it.
    """
    if "torch" in sys.modules:  # a user's configuration class may need it
        yield
        return
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # that there is no torch
    sys.modules["torch"] = None  # pyright: ignore[reportArgumentType]  what importlib takes for "there is none"
    try:
        yield
    finally:
        del sys.modules["torch"]


def decoder(tokenizer: PreTrainedTokenizerBase) -> Callable[[list[int]], str]:
    """Return a function that decodes token ids to text, special tokens included."""
    return lambda token_ids: str(tokenizer.decode(token_ids))


def read_tokenizer(path: str, **options: Any) -> PreTrainedTokenizerBase:
    """Return a tokenizer that gives the ids of its tokenizer.json, which other programs read too.

    Args:
        path: directory, or id on the hub.
        options: of `from_pretrained`, such as revision and subfolder.

    Raises:
        OSError, ValueError: there is none that can be loaded.
    """
    return _read_tokenizer(path, **options)[0]


def names_other_class(model: Pretrained) -> bool:
    """Return whether a model's files name a tokenizer class that gives other ids than tokenizer.json; errors as of `read_tokenizer`."""
    return _read_tokenizer(model.path, **model.at_revision)[1]


def _read_tokenizer(path: str, **options: Any) -> tuple[PreTrainedTokenizerBase, bool]:
    """Return a tokenizer as `read_tokenizer` does, and whether transformers by itself loads one with other ids."""
    from tokenizers import Tokenizer
    from transformers import AutoTokenizer, PreTrainedTokenizerFast
    from transformers.utils.hub import cached_file

    # texts are to come back as they were; where a file has true, transformers ignores it with a warning
    plainly = {**options, "clean_up_tokenization_spaces": False}
    check_files(path, _FILES, **options)
    found = AutoTokenizer.from_pretrained(path, trust_remote_code=False, **plainly)
    missing: dict[str, Any] = {
        "_raise_exceptions_for_missing_entries": False,
        "_raise_exceptions_for_connection_errors": False,
    }
    file = cached_file(path, "tokenizer.json", **options, **missing)
    if file is None:
        return found, False
    reference = Tokenizer.from_file(file)
    reference.no_padding()
    reference.no_truncation()
    added = [token.content for token in reference.get_added_tokens_decoder().values() if token.special]
    named = [token for token in (found.eos_token, found.bos_token) if token in added]
    texts = [*PROBE, *(f"a{token}b {token} c{token}\nd" for token in named)]
    expected = [reference.encode(text, add_special_tokens=False).ids for text in texts]

    def agrees(tokenizer: Any) -> bool:
        return [tokenizer.encode(text, add_special_tokens=False) for text in texts] == expected

    if agrees(found):
        return found, False
    # what config.json and tokenizer_config.json name may be a class with another pre-tokenizer, as for DeepSeek's models on Llama
    found = PreTrainedTokenizerFast.from_pretrained(path, **plainly)
    if not agrees(found):
        raise DataError(
            f"the tokenizer of {path}: transformers gives other ids than its tokenizer.json ({type(found).__name__}); expected a "
            "tokenizer_config.json with tokenizer_class = PreTrainedTokenizerFast"
        )
    return found, True


def load_tokenizer(
    model: Pretrained, template: ChatTemplateConfig, setting: str = "trainer.policy.model.path"
) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a model, which applies the configured chat template.

    Args:
        setting: what names the model, for errors.

    Raises:
        ConfigError: as `chat_template`, or the template is not valid Jinja.
        DataError: there is no such model, here or on the hub.
    """
    import hpcrl.data.models.openvla  # noqa: F401  else transformers warns of a model that it does not know

    try:
        tokenizer, text = read_tokenizer(model.path, **model.at_revision), chat_template(template)
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(
            f"{setting}: the tokenizer of {model} cannot be loaded: {' '.join(str(error).split())} If nodes have no network, "
            f"put the model where they find it: `{download(model)}`, with HF_HOME on a filesystem that they share"
        ) from error
    if text is None:
        return tokenizer
    try:
        render(text, {"conversations": []})
    except DataError as error:
        raise ConfigError(f"{_SETTING}: {template.name_or_path}, {error}") from error
    tokenizer.chat_template = text
    return tokenizer
