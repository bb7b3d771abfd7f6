"""Combinations of the settings of uploads."""

from __future__ import annotations

from tests.config.rules.skyrl_cases import Case

EXPORTS = {"trainer.hf_save_interval": 10}
HF = {"trainer.upload.hf": True, "trainer.upload.hf_repo_name": "me/model"}
S3 = {"trainer.upload.s3": "all", "trainer.upload.s3_bucket": "mine"}

OF_UPLOADS = [
    Case(
        "S3 needs a bucket",
        {"trainer.upload.s3": "all"}, "trainer.upload.s3_bucket", "required with trainer.upload.s3",
        {"trainer.upload.s3": "all", "trainer.upload.s3_bucket": "mine"},
    ),
    Case(
        "the hub needs a repository",
        {"trainer.upload.hf": True, **EXPORTS}, "trainer.upload.hf_repo_name", "required with trainer.upload.hf",
        {**HF, **EXPORTS},
    ),
    Case(
        "the hub gets exports",
        HF, "trainer.upload.hf", "the run makes no exports; set trainer.hf_save_interval",
        {**HF, **EXPORTS},
    ),
    Case(
        "without checkpoints S3 gets exports alone",
        {**S3, "trainer.upload.s3_checkpoints": False}, "trainer.upload.s3", "the run makes no exports; set trainer.hf_save_interval",
        {**S3, **EXPORTS, "trainer.upload.s3_checkpoints": False},
    ),
    Case(
        "S3 gets exports or checkpoints",
        {**S3, "trainer.ckpt_interval": 0}, "trainer.upload.s3", "the run makes neither exports nor checkpoints",
        {**S3, "trainer.ckpt_interval": 0, "trainer.ckpt_interval_epochs": 1},
    ),
    Case(
        "a repository has a name that the hub takes",
        {**EXPORTS, "trainer.upload.hf": True, "trainer.upload.hf_repo_name": "https://huggingface.co/me/model"},
        "trainer.upload.hf_repo_name", "expected <name> or <owner>/<name>",
        {**EXPORTS, "trainer.upload.hf": True, "trainer.upload.hf_repo_name": "model"},
    ),
    Case(
        "a bucket has a name and no address",
        {"trainer.upload.s3": "all", "trainer.upload.s3_bucket": "s3://mine"}, "trainer.upload.s3_bucket", "without s3://",
        S3,
    ),
    Case(
        "keys begin with names",
        {**S3, "trainer.upload.s3_prefix": "/models/"}, "trainer.upload.s3_prefix", "expected names separated by '/'",
        {**S3, "trainer.upload.s3_prefix": "models/mine"},
    ),
    Case(
        "a store has an address without a password",
        {**S3, "trainer.upload.s3_endpoint": "https://me:secret@store"}, "trainer.upload.s3_endpoint", "expected an address such as https://",
        {**S3, "trainer.upload.s3_endpoint": "https://store:9000"},
    ),
    Case(
        "settings of a store that is not used",
        {"trainer.upload.s3_prefix": "models"}, "trainer.upload.s3_prefix", "has no effect without trainer.upload.s3",
        {**S3, "trainer.upload.s3_prefix": "models"},
    ),
    Case(
        "settings of the hub where nothing goes there",
        {"trainer.upload.hf_private": False}, "trainer.upload.hf_private", "has no effect without trainer.upload.hf",
        {**HF, **EXPORTS, "trainer.upload.hf_private": False},
    ),
    Case(
        "the job of uploads has settings of its own",
        {"slurm.upload.extra": {"partition": "data"}}, "slurm.upload.extra.partition", "set slurm.upload.partition instead",
        {"slurm.upload.extra": {"nice": 5}},
    ),
]  # fmt: skip
