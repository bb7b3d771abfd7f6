"""Cache of datasets' tokens that runs share, `data.cache`: the first run writes them, each other run links them into its directory.

<root>/.tokens/<key>/     root: slurm.root
  tokens.i32 …            as in a run (hpcrl/data/token_file.py), as a rule the same files under further names
  record.json             sources, `facts` such as `counts`, and sizes and checksums of the files; written last

A key is the checksum of everything that decides the tokens, so an entry never becomes wrong. Two runs that write the same entry at the same time
write the same files, each under its own name first, so none waits and none locks. An entry without a record, with a damaged one, or with other
files than in its record is ignored and written again. All entries may be deleted at any time: a run with its tokens does not need them.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from hpcrl.errors import CommitError, DamagedError
from hpcrl.rundir.commit import (
    NO_LINKS,
    Fence,
    checksum,
    committed_directory,
    digest_of,
    link,
    listing,
    make_directory,
    naming,
    read_bytes,
    verify,
    write_text,
)
from hpcrl.rundir.records import parse_record, with_checksum

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

RECORD = "record.json"
_OF_A_RUN = ("name", "made_of", "attempt", "files")  # of a manifest
_CHUNK = 1 << 22
_CODE = (
    "conversations.py",
    "hub/splits.py",
    "render.py",
    "render_process.py",
    "sources.py",
    "token_cache.py",
    "token_file.py",
    "tokenize.py",
    "tokenizer.py",
)
_CODE_OF_CHATS = "chat"  # all modules of it
_LIBRARIES = ("transformers", "tokenizers", "jinja2")
_OF_NO_TOKEN = ("is_local", "local_files_only", "name_or_path", "model_max_length")  # entries of tokenizer_config.json
_TODAY = "strftime_now"  # transformers' function that writes the day into what a chat template makes


@dataclass(frozen=True)
class TokenCache:
    """The shared tokens of a root.

    Attributes:
        folder: `<root>/.tokens`.
    """

    folder: Path

    def record(self, key: str) -> dict[str, Any] | None:
        """Return the record of an entry; None: there is none, or it is damaged as far as sizes show."""
        try:
            content = read_bytes(self.folder / key / RECORD)
            if content is None:
                return None
            found, _ = parse_record(content, required=True)
            sizes = {name: (self.folder / key / name).stat().st_size for name in found["files"]}
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return found if all(found["files"][name]["size"] == size for name, size in sizes.items()) else None

    def take(self, key: str, target: Path, attempt: int, fence: Fence, **facts: Any) -> dict[str, Any] | None:
        """Commit the tokens of an entry as a dataset of a run.

        Args:
            facts: of the manifest, which a run has of its own.

        Returns:
            The facts of its manifest; None: it cannot be used, and there is no such dataset yet.
        """
        if (found := self.record(key)) is None:
            return None
        files, facts = found["files"], found["facts"] | facts
        try:
            with committed_directory(target, attempt, fence=fence, files=files, **facts) as directory:
                self._fill(directory, key, files)
        except DamagedError as error:
            print(f"{error}; tokenized again", flush=True)
            self._forget(key)
            return None
        return facts

    def put(self, key: str, dataset: Path, made_of: Mapping[str, Any]) -> None:
        """Share the tokens of a run. Where that fails, what it says is all that happens: a run has its own.

        Args:
            dataset: committed in the run's directory.
            made_of: what the key stands for, for people.
        """
        folder = self.folder / key
        try:
            make_directory(folder)
            self.folder.chmod(0o700)
            manifest = verify(dataset, checksums=False)
            for name in manifest["files"]:
                beside = folder / f".{name}.{uuid4().hex}"
                _share(dataset / name, beside)
                os.replace(beside, folder / name)
                beside.unlink(missing_ok=True)  # rename leaves two names of one file as they are
            facts = {name: one for name, one in manifest.items() if name not in _OF_A_RUN}
            record = {"made_of": made_of, "facts": facts, "files": manifest["files"]}
            write_text(folder / RECORD, with_checksum(record)[0])
        except (OSError, CommitError) as error:
            print(f"{folder}: the tokens could not be kept for other runs: {error}", flush=True)

    def _fill(self, directory: Path, key: str, files: Mapping[str, Any]) -> None:
        folder = self.folder / key
        try:
            for name in files:
                _share(folder / name, directory / name)
            found = listing(directory)
        except OSError as error:  # it is being deleted, or its disk fails
            raise DamagedError(f"{folder}: {error}") from error
        if found != files:
            raise DamagedError(f"{folder}: the tokens are not those that were kept; their checksums differ")

    def _forget(self, key: str) -> None:
        with suppress(OSError):
            (self.folder / key / RECORD).unlink(missing_ok=True)
        shutil.rmtree(self.folder / key, ignore_errors=True)


def key_of(made_of: Mapping[str, Any]) -> str:
    """Return the name of the entry of tokens that are made of these."""
    return digest_of(json.dumps(made_of, sort_keys=True, default=str).encode())


def made_by() -> dict[str, str]:
    """Return the checksums and versions of the code that makes tokens: hpcrl's own modules, libraries."""
    here = Path(__file__).parent
    paths = [*(here / name for name in _CODE), *sorted((here / _CODE_OF_CHATS).glob("*.py"))]
    own = {str(path.relative_to(here)): checksum(path) for path in paths}
    return own | {name: version(name) for name in _LIBRARIES}


def contents_of(files: Sequence[Path], progress: Callable[[], None]) -> list[str]:
    """Return checksum and kind of each file of a dataset; where it lies and what it is called does not matter to its rows."""
    found = list[str]()
    for path in files:
        digest = hashlib.blake2b(digest_size=16)
        with naming(path), path.open("rb") as file:
            while chunk := file.read(_CHUNK):
                digest.update(chunk)
                progress()
        found.append(digest.hexdigest() + path.suffix)
    return found


def tokenizer_facts(tokenizer: PreTrainedTokenizerBase, *, template: bool) -> dict[str, Any]:
    """Return all of a tokenizer that decides which tokens it makes: vocabulary, special tokens and options, as it would be saved.

    Args:
        template: whether the chat template is one of them, and the day where that writes it.
    """
    with TemporaryDirectory() as place:
        tokenizer.save_pretrained(place)
        files = {path.name: path.read_bytes() for path in Path(place).rglob("*") if path.is_file()}
    options = {
        name: one for name, one in json.loads(files.pop("tokenizer_config.json")).items() if name not in _OF_NO_TOKEN
    }
    written = options.pop("chat_template", None)
    facts = {name: digest_of(content) for name, content in files.items() if "chat_template" not in name}
    facts |= {"options": options}
    if not template:
        return facts
    templates = [name for name in files if "chat_template" in name]
    facts |= {name: digest_of(files[name]) for name in templates} | {"template": written}
    if any(_TODAY.encode() in files[name] for name in templates) or _TODAY in str(written):
        facts["day"] = datetime.now().astimezone().date().isoformat()
    return facts


def _share(source: Path, target: Path) -> None:
    """Give a file a further name, or copy it where the filesystem gives none."""
    try:
        link(source, target)
    except OSError as error:
        if error.errno not in (*NO_LINKS, errno.EXDEV, errno.EMLINK):
            raise
        shutil.copyfile(source, target)
