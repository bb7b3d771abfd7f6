"""Combinations of the settings of what a run tells and sends others: alerts, uploads, its evaluation job."""

from __future__ import annotations

from typing import Any

from tests.config.rules.skyrl_cases import NO_KL, SFT, Case

ALERTS = "trainer.alerts"
_RULE = f"{ALERTS}.rules.one"


def rule(**settings: Any) -> dict[str, Any]:
    return {f"{_RULE}.{name}": value for name, value in settings.items()}


ENTROPY = rule(kind="entropy_below", value=0.1)

OF_ALERTS = [
    Case(
        "an alert has a name that a file can have",
        {f"{ALERTS}.rules.one two.kind": "no_progress", f"{ALERTS}.rules.one two.minutes": 3.0},
        f"{ALERTS}.rules.one two", "expected a name of letters",
        rule(kind="no_progress", minutes=3.0),
    ),
    Case(
        "trainer and engines that share GPUs wait for no batch",
        {**rule(kind="wait_above", value=0.5), "trainer.placement.colocate_all": True}, f"{_RULE}.kind",
        "the engines have the GPUs while the trainer waits", rule(kind="wait_above", value=0.5),
    ),
    Case("no progress for how long", rule(kind="no_progress"), f"{_RULE}.minutes", "required", rule(kind="no_progress", minutes=30)),
    Case("a limit is a number of a metric, not of minutes", {**ENTROPY, **rule(minutes=3)}, f"{_RULE}.minutes", "found 3", ENTROPY),
    Case("a limit is there", rule(kind="kl_above"), f"{_RULE}.value", "required", rule(kind="kl_above", value=0.5)),
    Case(
        "a fall is not negative",
        rule(kind="reward_fell", value=-0.1), f"{_RULE}.value", "at least 0 where something fell",
        rule(kind="reward_fell", value=0.1, window=5, since="before", steps=2),
    ),
    Case("steps in a row", {**ENTROPY, **rule(steps=0)}, f"{_RULE}.steps", "found 0", {**ENTROPY, **rule(steps=3)}),
    Case("only a fall has a window", {**ENTROPY, **rule(window=4)}, f"{_RULE}.window", 'not for kind="entropy_below"', ENTROPY),
    Case("a metric is named", rule(kind="below", value=1), f"{_RULE}.metric", "required", rule(kind="below", value=1, metric="policy/lr")),
    Case("a kind has its metric", {**ENTROPY, **rule(metric="x")}, f"{_RULE}.metric", "has its own", ENTROPY),
    Case(
        "scores that are never measured do not fall",
        {**rule(kind="score_fell", value=0.1), "trainer.eval_interval": 0}, _RULE, "nothing is evaluated",
        {**rule(kind="reward_fell", value=0.1), "trainer.eval_interval": 0},
    ),
    Case(
        "what is only given has no rewards",
        {**SFT, **rule(kind="reward_fell", value=0.1)}, f"{_RULE}.kind", 'there is no reward/avg_raw_reward with trainer.mode="sft"',
        {**SFT, **rule(kind="above", value=5, metric="policy/grad_norm", steps=3)},
    ),
    Case("no divergence without a reference", {**NO_KL, **rule(kind="kl_above", value=1)}, f"{_RULE}.kind", "use_kl_loss", {**NO_KL, **ENTROPY}),
    Case(
        "a webhook is an address",
        {**ENTROPY, f"{ALERTS}.webhook": "hooks.example/x"}, f"{ALERTS}.webhook", "begins with https://",
        {**ENTROPY, f"{ALERTS}.webhook": "https://hooks.example/x"},
    ),
    Case(
        "one webhook",
        {**ENTROPY, f"{ALERTS}.webhook": "https://a", f"{ALERTS}.webhook_file": "f"}, f"{ALERTS}.webhook_file", "leave one of them out",
        {**ENTROPY, f"{ALERTS}.webhook_file": "f"},
    ),
    Case("alerts have rules", {f"{ALERTS}.steps_without_signal": 0, f"{ALERTS}.command": ["true"]}, f"{ALERTS}.command", "no effect without trainer.alerts.rules", {**ENTROPY, f"{ALERTS}.command": ["true"]}),
]  # fmt: skip

JOB = {"slurm.evaluation.when": "during", "trainer.eval_interval": 5}
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
    Case(
        "an evaluation job of a run that evaluates nothing",
        {**JOB, "trainer.eval_interval": -1}, "slurm.evaluation.when", "has no effect where no policy is evaluated",
        JOB,
    ),
    Case(
        "an evaluation job beside replicas that only evaluate",
        {**JOB, "slurm.eval_replicas": 1, "generator.inference_engine.num_engines": 2},
        "slurm.evaluation.when", "does not go together with slurm.eval_replicas",
        {**JOB, "generator.inference_engine.num_engines": 2},
    ),
    Case(
        "the least time of an evaluation job",
        {**JOB, "slurm.evaluation.time_min_minutes": 90},
        "slurm.evaluation.time_min_minutes", "expected at most slurm.evaluation.time_minutes (60), found 90",
        {**JOB, "slurm.evaluation.time_min_minutes": 20},
    ),
    Case(
        "an evaluation job that is stopped before it has done anything",
        {**JOB, "slurm.signal_seconds": 400, "slurm.evaluation.time_min_minutes": 10},
        "slurm.evaluation.time_minutes", "expected at least twice slurm.signal_seconds (400), found 10 minutes",
        {**JOB, "slurm.signal_seconds": 400},
    ),
    Case(
        "sandboxes of a run that generates nothing",
        {**SFT, "slurm.sandboxes.nodes": 1}, "slurm.sandboxes.nodes", "has no effect where nothing is generated", SFT,
    ),
    Case(
        "sandboxes on rollout nodes where engines are elsewhere",
        {"generator.inference_engine.remote_urls": ["http://a:8000"], "slurm.sandboxes.per_rollout_node": 4},
        "slurm.sandboxes.per_rollout_node", "has no rollout nodes",
        {"generator.inference_engine.remote_urls": ["http://a:8000"], "slurm.sandboxes.nodes": 1},
    ),
    Case(
        "an environment in sandboxes without any",
        {"environment.env_class": "sandbox"}, "slurm.sandboxes.nodes", "expected at least 1, or slurm.sandboxes.per_rollout_node",
        {**JOB, "environment.env_class": "sandbox", "slurm.sandboxes.per_rollout_node": 4},
    ),
    Case(
        "sbatch options of the sandboxes' job",
        {"slurm.sandboxes.extra": {"time": "1"}}, "slurm.sandboxes.extra.time", "set slurm.sandboxes.time_minutes instead",
        {"slurm.sandboxes.extra": {"nice": 5}},
    ),
]  # fmt: skip
