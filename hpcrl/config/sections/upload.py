"""Section `trainer.upload`: copies of exports and checkpoints on a hub or in S3."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hpcrl.config.fields import Location
from hpcrl.config.setting import setting, when


@dataclass(frozen=True, kw_only=True)
class UploadConfig:
    """Copies of exports and checkpoints elsewhere; slurm.upload says who makes them. docs/uploads.md."""

    hf: bool = False
    """Push the last export to the Hugging Face hub, once the run is done."""

    hf_repo_name: str | None = setting(None, used_by=when(".hf"))
    """Repository on the hub, <owner>/<name>, or <name> alone for the owner of the token; the run's name is appended to it."""

    hf_private: bool = setting(True, used_by=when(".hf"))
    """Whether a repository that is made for it is private."""

    hf_token_file: Location | None = setting(None, used_by=when(".hf"))
    """File with a token that may write; unset: $HF_TOKEN, or the file $HF_TOKEN_PATH, or what `hf auth login` has left."""

    hf_endpoint: str | None = setting(None, used_by=when(".hf"))
    """Address of another hub; unset: $HF_ENDPOINT, else https://huggingface.co."""

    s3: Literal["final", "all"] | None = None
    """Copy to S3 the last export and checkpoint, once the run is done, or all of them, as soon as each is there."""

    s3_checkpoints: bool = setting(True, used_by=when(".s3"))
    """Copy checkpoints beside exports; false: exports alone, which are several times smaller."""

    s3_bucket: str | None = setting(None, used_by=when(".s3"))
    """Bucket of the copies."""

    s3_prefix: str = setting("outputs", used_by=when(".s3"))
    """Beginning of the keys in the bucket; <project>/<run> follows."""

    s3_endpoint: str | None = setting(None, used_by=when(".s3"))
    """Address of an S3-compatible store; unset: $AWS_ENDPOINT_URL_S3, else AWS."""

    s3_credentials_file: Location | None = setting(None, used_by=when(".s3"))
    """Credentials file as of the AWS command line; unset: AWS's own variables and files, $AWS_SHARED_CREDENTIALS_FILE among them."""
