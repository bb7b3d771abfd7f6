"""Checks uploads before submission: packages and files that they need."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from hpcrl.config import Config
from hpcrl.config.errors import Problem
from hpcrl.config.sections.upload import UploadConfig
from hpcrl.data.hub.directories import hub_home
from hpcrl.upload.send import stores_of

_PACKAGES = {"hf": ("huggingface_hub", "huggingface_hub"), "s3": ("boto3", "'hpcrl[s3]'")}
_WHERE = "see docs/uploads.md#secrets"


def check_uploads(config: Config) -> Iterator[Problem]:
    """Yield what is missing here of what the uploads of a run need, unless they are made from elsewhere."""
    upload, slurm = config.trainer.upload, config.slurm
    if slurm.upload.by == "command":
        return
    for store in stores_of(upload):
        package, install = _PACKAGES[store]
        if not slurm.other_environment and find_spec(package) is None:
            yield Problem(
                f"trainer.upload.{store}", f'needs {package}: pip install {install}, or set slurm.upload.by="command"'
            )
    for setting, path in _files(upload):
        if not os.access(Path(path).expanduser(), os.R_OK):
            yield Problem(setting, f"no file {path} that you can read; {_WHERE}")


def missing_secrets(config: Config) -> list[str]:
    """Return warnings about stores for which no credentials are to be seen here; slurm.setup may still provide some."""
    upload = config.trainer.upload
    if config.slurm.upload.by == "command":
        return []
    found = {"hf": upload.hf_token_file or _hub_token(), "s3": upload.s3_credentials_file or _s3_credentials()}
    return [
        f"trainer.upload.{store}: no credentials are to be seen here; {_WHERE}"
        for store in stores_of(upload)
        if not found[store]
    ]


def _files(upload: UploadConfig) -> Iterator[tuple[str, str]]:
    if upload.hf and upload.hf_token_file:
        yield "trainer.upload.hf_token_file", upload.hf_token_file
    if upload.s3 and upload.s3_credentials_file:
        yield "trainer.upload.s3_credentials_file", upload.s3_credentials_file
    elif upload.s3 and (path := os.environ.get("AWS_SHARED_CREDENTIALS_FILE")):
        yield "trainer.upload.s3: $AWS_SHARED_CREDENTIALS_FILE", path


def _hub_token() -> bool:
    path = os.environ.get("HF_TOKEN_PATH") or os.path.join(hub_home(), "token")
    return bool(os.environ.get("HF_TOKEN")) or Path(path).expanduser().is_file()


def _s3_credentials() -> bool:
    """Return whether AWS's variables or files are there; a service of the machine's that gives credentials is not seen by them."""
    given = any(name.startswith("AWS_") and value for name, value in os.environ.items())
    return given or any(Path("~/.aws", name).expanduser().is_file() for name in ("credentials", "config"))
