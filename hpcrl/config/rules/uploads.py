"""Rules about uploads: names that a store would refuse, and stores to which nothing would ever go."""

from __future__ import annotations

import re
from collections.abc import Iterator
from urllib.parse import urlsplit

from hpcrl.config.errors import Problem
from hpcrl.config.sections.tree import ConfigTree
from hpcrl.config.sections.upload import UploadConfig

_PATH = "trainer.upload"
_REPOSITORY = re.compile(r"(?:[A-Za-z0-9][\w.-]*/)?[A-Za-z0-9][\w.-]*", re.ASCII)
_BUCKET = re.compile(r"[A-Za-z0-9][\w.-]{1,61}[A-Za-z0-9]", re.ASCII)  # older stores allow more than AWS
_PREFIX = re.compile(r"[\w.!'()* -]+(?:/[\w.!'()* -]+)*|", re.ASCII)


def uploads(config: ConfigTree) -> Iterator[Problem]:
    yield from upload_names(config.trainer.upload)
    trainer, upload = config.trainer, config.trainer.upload
    exports = trainer.hf_save_interval > 0
    checkpoints = trainer.ckpt_interval > 0 or trainer.ckpt_interval_epochs is not None
    remedy = "set trainer.hf_save_interval, for instance as trainer.ckpt_interval"
    if upload.hf and not exports:
        yield Problem(f"{_PATH}.hf", f"nothing would be uploaded: the run makes no exports; {remedy}")
    if upload.s3 and not exports and not upload.s3_checkpoints:
        yield Problem(f"{_PATH}.s3", f"nothing would be uploaded: the run makes no exports; {remedy}")
    elif upload.s3 and not exports and not checkpoints:
        yield Problem(
            f"{_PATH}.s3", f"nothing would be uploaded: the run makes neither exports nor checkpoints; {remedy}"
        )
    if upload.s3 and upload.s3_bucket is None:
        yield Problem(f"{_PATH}.s3_bucket", f"required with {_PATH}.s3: the bucket to copy to")
    if upload.hf and upload.hf_repo_name is None:
        yield Problem(f"{_PATH}.hf_repo_name", f"required with {_PATH}.hf: the repository to push to")


def upload_names(upload: UploadConfig) -> Iterator[Problem]:
    """Yield a problem for each name and address in trainer.upload that cannot be one."""
    name = upload.hf_repo_name
    if name is not None and (not _REPOSITORY.fullmatch(name) or "--" in name or ".." in name):
        expected = "expected <name> or <owner>/<name> of letters, digits, '.', '_' and '-', without '--' and '..'"
        yield Problem(f"{_PATH}.hf_repo_name", f"{expected}, found {name!r}")
    if upload.s3_bucket is not None and not _BUCKET.fullmatch(upload.s3_bucket):
        expected = "expected the name of a bucket, 3 to 63 letters, digits, '.' and '-', without s3://"
        yield Problem(f"{_PATH}.s3_bucket", f"{expected}, found {upload.s3_bucket!r}")
    if not _PREFIX.fullmatch(upload.s3_prefix) or {".", ".."} & {*upload.s3_prefix.split("/")}:
        expected = "expected names separated by '/', none before the first and after the last"
        yield Problem(f"{_PATH}.s3_prefix", f"{expected}, found {upload.s3_prefix!r}")
    for setting in ("hf_endpoint", "s3_endpoint"):
        address = getattr(upload, setting)
        if address is not None and not _is_address(address):
            yield Problem(
                f"{_PATH}.{setting}", f"expected an address such as https://store.example.org, found {address!r}"
            )


def _is_address(text: str) -> bool:
    try:
        parts = urlsplit(text)
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and bool(parts.hostname) and "@" not in parts.netloc and not parts.query
