"""A run's files as a report reads them, made without a run."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from hpcrl.config import Config
from hpcrl.data.batch_file import FIRST, write_batch
from hpcrl.rundir.allocations import Allocation
from hpcrl.rundir.commit import begin, finish, staging, write_json, write_text
from hpcrl.rundir.layout import Run
from hpcrl.rundir.ledger import open_attempt, report_outcome
from hpcrl.rundir.records import append_text
from hpcrl.rundir.starts import note
from hpcrl.types import Batch, GroupMeta, Row
from tests.paths import QUICKSTART
from tests.rows import group_meta, write_group

HOSTILE = "</script><img src=x onerror='document.title=1'>&lt;\u2028"
"""What a policy may say."""


def made(root: Path, name: str, steps: int, *, metrics: int = 20, ranks: int = 1, replicas: int = 2) -> Run:
    """Return a run of so many steps, two seconds each, whose second attempt goes on after half of them and finished."""
    run, middle = Run(root / "quickstart" / name), steps // 2
    text = QUICKSTART.read_text().replace('"./', f'"{QUICKSTART.parent}/')
    write_text(run.config, text.replace("max_steps = 30", f"max_steps = {steps}"))
    write_text(run.config, Config.from_toml([run.config]).to_toml())
    write_json(
        run.submission,
        {"executor": "local", "host": "n1", "job_id": "1", "overrides": ["trainer.seed=1"], "submitted": 1.0},
    )
    started = [open_attempt(run, "1.0", ["n1"]).started]
    note(run, {"attempt": 1, "from": None})
    report_outcome(run, 1, "interrupted", "preempted", "agent-0")
    open_attempt(run, "1.1", ["n2"])
    note(run, {"attempt": 2, "from": f"s{middle:06d}"})
    report_outcome(run, 2, "done", "finished", "agent-0")
    parts = [(1, 0, range(1, middle + 1)), (2, middle, range(middle + 1, steps + 1))]
    write_metrics(run, parts, started[0], metrics, replicas)
    write_timelines(run, parts, started[0], ranks, replicas)
    write_allocations(run, parts, started[0], replicas)
    return run


def write_allocations(run: Run, parts: list[tuple[int, int, range]], started: float, replicas: int) -> None:
    """Write a trainer node and a rollout node for each attempt, from two seconds before its first step to its last."""
    devices = {"trainer": [["rank-0"]], "rollout": [[f"rollout-{number}"] for number in range(replicas)]}
    nodes = [{"host": "n1", "role": role, "devices": own} for role, own in devices.items()]
    queued = started - 20
    for attempt, resume, steps in parts:
        start, job = started + 10 + 2 * resume, f"1.{attempt - 1}"
        until = start + 2 + 2 * len(steps)
        own = Allocation(job, start, until, over=True, queued=queued, nodes=nodes)
        queued = until
        write_json(run.allocation(job), asdict(own))


def write_metrics(run: Run, parts: list[tuple[int, int, range]], started: float, count: int, replicas: int) -> None:
    run.metrics.mkdir()
    files: dict[str, list[str]] = {
        process: [] for process in ("trainer", "controller", *(f"rollout-{n}" for n in range(replicas)))
    }
    for attempt, resume, steps in parts:
        for lines in files.values():
            lines.append(json.dumps({"attempt": attempt, "resume": resume}))
        for step in steps:
            share = step / parts[-1][2][-1]
            values: dict[str, dict[str, float]] = {
                "controller": {
                    "reward/avg_raw_reward": share + 0.05 * math.sin(step),
                    "generate/avg_num_tokens": 100 + 10 * math.sin(step),
                    "generate/stop_ratio": 1.0,
                    "generate/samples": 8,
                    "generate/failed_samples": 0,
                    "async/staleness_max": 0,
                },
                "trainer": {
                    "timing/step": 2.0,
                    "policy/policy_entropy": 1 - share / 2,
                    "policy/grad_norm": 1 + math.cos(step) / 2,
                    **{f"other/metric_{number}": math.sin(step * number) for number in range(count)},
                },
            }
            for number in range(replicas):
                values[f"rollout-{number}"] = {"generate/idle_ratio": number / 10 + share / 10}
            for process, lines in files.items():
                own = values[process]
                lines.append(
                    json.dumps({"attempt": attempt, "step": step, "time": started + 10 + 2 * step, "metrics": own})
                )
    for process, lines in files.items():
        run.metrics_of(process).write_text("\n".join(lines) + "\n")


def write_timelines(run: Run, parts: list[tuple[int, int, range]], started: float, ranks: int, replicas: int) -> None:
    phases = {
        "wait_for_generation_buffer": 0.5,
        "load_rows": 0.05,
        "other": 0.001,
        "policy_train": 1.349,
        "sync_weights": 0.1,
    }
    for attempt, resume, steps in parts:
        begin_s = started + 10 + 2 * (resume + 1)
        for rank in range(ranks):
            header = {"process": f"rank-{rank}", "host": "n1", "versions": {"python": "3.11.2", "torch": "2.13.0"}}
            lines, at = [header], begin_s
            for step in steps:
                for phase, seconds in phases.items():
                    lines.append({"start": round(at, 6), "seconds": seconds, "phase": phase, "step": step})
                    at += seconds
            append_text(run.timeline_of(attempt, f"rank-{rank}"), "".join(json.dumps(line) + "\n" for line in lines))
        for replica in range(replicas):
            lines, at = [], begin_s
            for _ in steps:
                for phase, seconds in (("generate", 1.2), ("idle", 0.7), ("update_weights", 0.1)):
                    lines.append({"start": round(at, 6), "seconds": seconds, "phase": phase})
                    at += seconds
            append_text(
                run.timeline_of(attempt, f"rollout-{replica}"), "".join(json.dumps(line) + "\n" for line in lines)
            )


def write_step(
    run: Run,
    step: int,
    rewards: list[float],
    *,
    response: int = 6,
    dropped: dict[str, float | None] | None = None,
    stop_reasons: list[str] | None = None,
    prompts: list[list[int]] | None = None,
) -> GroupMeta:
    """Write the batch of a step: one group, whose samples are the prompt 1 to 4, or one of its own, and so many tokens of the policy."""
    length = 4 + response
    tokens = [
        [*prompt, *(at % 20 for at in range(5, length + 1))] for prompt in prompts or [[1, 2, 3, 4]] * len(rewards)
    ]
    path = run.samples_of(0) / f"g{step:08d}.safetensors"
    rows = [
        Row(
            token_ids=np.array(own),
            loss_mask=np.array([0] * 4 + [1] * response, np.float32),
            rollout_logprobs=np.array([0] * 4 + [-0.5] * response, np.float32),
            versions=np.array([-1] * 4 + [step - 1] * response, np.int32),
            rewards=np.array([0.0] * (length - 1) + [reward], np.float32),
            stop_reason="stop",
            env_metrics={"letters_in_place": 0.5},
        )
        for reward, own in zip(rewards, tokens, strict=True)
    ]
    meta = group_meta(
        group_id=f"g{step:08d}", kind="train", replica=0, path=str(path.relative_to(run.path)), rewards=rewards,
        lengths=[length] * len(rewards), response_lengths=[response] * len(rewards), stop_reasons=stop_reasons or ["stop"] * len(rewards),
        oldest_version=step - 1, newest_version=step - 1, data_source="sort_letters", seconds=1.0,
    )  # fmt: skip
    meta = write_group(path, rows, meta, HOSTILE)
    write_batch(run, Batch(step, [meta], step, dropped=dropped or {}), FIRST)
    return meta


def write_dump(run: Run, step: int, meta: GroupMeta) -> None:
    """Write what the trainer dumps of a group: advantages 0.25 for the first sample, 1.25 for the second; entropies 0.7, old log-probabilities -0.75."""
    begin(run.dump(step), 2)
    advantages = [np.full(length, at + 0.25, np.float32) for at, length in enumerate(meta.lengths)]
    tensors = {
        "advantages": np.concatenate(advantages),
        "entropies": np.full(sum(meta.lengths), 0.7, np.float32),
        "old_logprobs": np.full(sum(meta.lengths), -0.75, np.float32),
        "lengths": np.array(meta.lengths),
        "groups": np.zeros(len(meta.lengths), np.int64),
        "samples": np.arange(len(meta.lengths)),
    }
    save_file(tensors, staging(run.dump(step), 2) / "mini-0-rank-0.safetensors")
    finish(run.dump(step), 2, step=step)


def write_evaluation(run: Run, version: int, texts: list[str]) -> None:
    lines = [
        {
            "group_id": f"e{version}-{at}", "sample": 0, "data_source": "sort_letters", "score": float(at), "stop_reason": "stop",
            "env_metrics": {}, "ground_truth": HOSTILE, "prompt": [{"role": "user", "content": "sort:"}], "parts": [{"by": "prompt", "text": "sort:"}, {"by": "policy", "text": text}],
        }
        for at, text in enumerate(texts)
    ]  # fmt: skip
    append_text(run.eval_dump(version, 0), "".join(json.dumps(line) + "\n" for line in lines))
    write_json(run.eval_summary(version), {"eval/all/avg_score": 0.5})
