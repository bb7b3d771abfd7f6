"""The tokenizer of a vLLM server whose model's files name another tokenizer class than tokenizer.json is for."""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from hpcrl.config.sections.model import Pretrained
from hpcrl.data.exported_files import write_tokenizer
from hpcrl.errors import DataError


def tokenizer_option(arguments: Sequence[str], folder: Path) -> list[str]:
    """Return the option with which vLLM's tokenizer gives the ids of tokenizer.json; nothing where the model's own files do that.

    The server's process calls it, which imports transformers and torch in any case.

    Args:
        arguments: of vLLM's API server; one that names a tokenizer stays as it is.
        folder: is made, for the files of the tokenizer.
    """
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    for name in ("--model", "--revision", "--tokenizer"):
        parser.add_argument(name)
    given, _ = parser.parse_known_args(arguments)
    if given.tokenizer is None:
        with suppress(OSError, ValueError, DataError):  # vLLM reports it
            if written := write_tokenizer(Pretrained(given.model, given.revision), folder):
                return ["--tokenizer", str(written)]
    return []
