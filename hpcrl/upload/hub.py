"""Uploads the last export as a repository of the Hugging Face hub: all its files and its manifest in one commit.

Large files go first, and the hub keeps them: what a call that was killed has sent is not sent again. Afterwards sizes and digests that the hub
lists, SHA-256 of large files and Git's of small ones, are compared with those of the files.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpcrl.config.sections.upload import UploadConfig
from hpcrl.errors import CommitError, RunError
from hpcrl.faults import fault
from hpcrl.rundir.commit import checksums_of
from hpcrl.rundir.layout import Run
from hpcrl.upload.store import Away, Committed, Patience, UploadRefused

if TYPE_CHECKING:
    from huggingface_hub import CommitOperationAdd, HfApi
    from huggingface_hub.hf_api import RepoFile

_LONGEST_NAME, _DIGEST = 96, 8
_NEVER = {".git", ".cache"}  # folders that huggingface_hub refuses
_REMEDIES = {
    401: "no token, or one that the hub does not know",
    403: "the token may not write there: it needs write access to the repository and its owner",
    404: "there is no such repository or owner, or the token may not see it",
}
_WHERE = "where the token comes from: docs/uploads.md#secrets"


class HubStore:
    """The repository of one run.

    Raises:
        RunError: huggingface_hub is missing, or no repository is named.
        UploadRefused: there is no token, or it cannot be read.
    """

    def __init__(self, run: Run, upload: UploadConfig, patience: Patience) -> None:
        if upload.hf_repo_name is None:
            raise RunError(f"{run.name}: no repository is named; set trainer.upload.hf_repo_name, or give --repo")
        self._api = _api(upload)
        self._patience, self._private, self._run = patience, upload.hf_private, run.name
        self._name = repository_name(upload.hf_repo_name, run.name)

    @property
    def place(self) -> str:
        return f"{self._api.endpoint}/{self._name}"

    def send(self, directory: Committed, sent: Callable[[int], None]) -> int:
        """Send an export; see `Store`."""
        return self._patience.repeat(lambda: self._send(directory, sent))

    def _send(self, directory: Committed, sent: Callable[[int], None]) -> int:
        with self._errors_of(directory):
            if "/" not in self._name:
                self._name = f"{self._api.whoami()['name']}/{self._name}"
            self._api.create_repo(self._name, private=self._private, exist_ok=True)
            there, additions, total = self._listed(), self._additions(directory), sum(directory.files.values())
            if not _different(additions, there):
                sent(total)
                return 0
            self._api.preupload_lfs_files(self._name, additions, free_memory=False)
            fault("upload.large")
            directory.require_there()
            self._commit(directory, additions, there)
            if wrong := _different(additions, self._listed()):
                raise Away(f"{self.place}: {', '.join(wrong)} arrived damaged; it is sent again later")
        sent(total)
        return total

    def _listed(self) -> dict[str, RepoFile]:
        from huggingface_hub.hf_api import RepoFile

        found = self._api.list_repo_tree(self._name, recursive=True)
        return {one.path: one for one in found if isinstance(one, RepoFile)}

    def _additions(self, directory: Committed) -> list[CommitOperationAdd]:
        from huggingface_hub import CommitOperationAdd

        found = checksums_of(directory.path / name for name in directory.checksums)
        for (name, expected), digest in zip(directory.checksums.items(), found, strict=True):
            if digest != expected:
                raise CommitError(f"{directory.path / name}: checksum differs from the manifest; it is not uploaded")
        if refused := [name for name in directory.files if not _NEVER.isdisjoint(Path(name).parts)]:
            raise UploadRefused(
                f"{self.place}: the hub takes no file {refused[0]!r:.200}; {directory.name} is not uploaded"
            )
        return [CommitOperationAdd(name, directory.path / name) for name in directory.files]

    def _commit(self, directory: Committed, additions: list[CommitOperationAdd], there: dict[str, RepoFile]) -> None:
        from huggingface_hub import CommitOperationDelete

        mine = {one.path_in_repo for one in additions}
        stale = [name for name in there if name.endswith(".safetensors") and name not in mine]
        operations = [*additions, *(CommitOperationDelete(name) for name in stale)]
        self._api.create_commit(self._name, operations, commit_message=f"{self._run}: {directory.name}")

    @contextmanager
    def _errors_of(self, directory: Committed) -> Iterator[None]:
        """Convert the hub's errors into Away and UploadRefused, with the repository and the remedy, also where the run has deleted the directory."""
        import httpx
        from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError

        try:
            yield
        except LocalTokenNotFoundError as error:
            raise UploadRefused(f"{self.place}: no token; {_WHERE}") from error
        except HfHubHTTPError as error:
            status = error.response.status_code
            message = f"{self.place}: {status}: {_first_line(error.server_message or str(error))}"
            if status >= 500 or status in (408, 409, 412, 429):
                raise Away(message) from error
            raise UploadRefused(
                f"{message}; {_REMEDIES.get(status, 'look at trainer.upload.hf_*')}; {_WHERE}"
            ) from error
        except (
            httpx.HTTPError,
            RuntimeError,
            ValueError,
            OSError,
        ) as error:  # also of its threads, and of answers that are none
            directory.require_there()
            raise Away(f"{self.place}: {_first_line(str(error.__cause__ or error))}") from error


def repository_name(name: str, run: str) -> str:
    """Return the repository of a run below a name, with its owner where that has one; too long a one ends with a digest."""
    owner, slash, stem = name.rpartition("/")
    whole = re.sub(r"([.-])\1+", r"\1", f"{stem}-{run}").rstrip(".-")
    if len(whole) > _LONGEST_NAME:
        digest = hashlib.sha256(whole.encode()).hexdigest()[:_DIGEST]
        whole = f"{whole[: _LONGEST_NAME - _DIGEST - 1].rstrip('.-')}-{digest}"
    return f"{owner}{slash}{whole}"


def _first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "no answer")


def _git_digest(path: Path) -> str:
    content = path.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def _different(additions: list[CommitOperationAdd], there: dict[str, RepoFile]) -> list[str]:
    return [one.path_in_repo for one in additions if _differs(one, there.get(one.path_in_repo))]


def _differs(addition: CommitOperationAdd, found: RepoFile | None) -> bool:
    if found is None or found.size != addition.upload_info.size:
        return True
    if found.lfs:
        return found.lfs.sha256 != addition.upload_info.sha256.hex()
    return found.blob_id != _git_digest(Path(str(addition.path_or_fileobj)))


def _api(upload: UploadConfig) -> HfApi:
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):  # a site sets them, lest models are looked for on the hub
        os.environ.pop(name, None)
    try:
        from huggingface_hub import HfApi, get_token
    except ImportError as error:
        raise RunError(f"uploads to the hub need {error.name}: pip install 'huggingface_hub'") from error
    token: Any = None
    if upload.hf_token_file:
        path = Path(upload.hf_token_file).expanduser()
        try:
            token = path.read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is no ASCII text"
            raise UploadRefused(f"trainer.upload.hf_token_file: {path}: {reason}; {_WHERE}") from error
        if len(token.split()) != 1 or not token.isprintable():  # another file would travel in a header
            raise UploadRefused(f"trainer.upload.hf_token_file: expected one line with a token in {path}; {_WHERE}")
    if not (token or get_token()):
        raise UploadRefused(f"the hub: no token; {_WHERE}")
    return HfApi(endpoint=upload.hf_endpoint, token=token)
