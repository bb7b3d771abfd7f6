"""Describes what a run trains, and summarises it in four cards, for the first screen of a report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from hpcrl.observe.report.verdict import Verdict
from hpcrl.observe.summary import EVAL_LOSS, EVAL_SCORE, REWARD, TOKENS_PER_SECOND, Summary
from hpcrl.rundir.ledger import Attempt
from hpcrl.units import duration

LOSS, TOTAL_STEPS = "policy/final_loss", "trainer/total_steps"
_METHODS = {"sft": "supervised fine-tuning", "dpo": "DPO", "reward_model": "reward model"}
_BAD_ENDS = "failed", "hang", "lost"
_POLICY, _NODES = "trainer.policy", "trainer.placement"


@dataclass(frozen=True)
class Card:
    """One of the numbers that decide about a run.

    Attributes:
        metric: of which a small curve is drawn; empty: none.
        status: of the verdict; empty: a number without one.
    """

    title: str
    value: str
    note: str
    metric: str = ""
    status: str = ""


def about(values: Mapping[str, Any], attempts: Sequence[Attempt], version: str) -> list[tuple[str, str]]:
    """Return name and text of what is trained: model, method, data, rewards, hardware and code.

    Args:
        values: settings of the run by dotted path.
        version: of the code.
    """
    hosts = list(dict.fromkeys(host for attempt in attempts[-1:] for host in attempt.hosts))
    rl = values.get("trainer.mode", "rl") == "rl"
    rewards = values.get("environment.env_class") or _named(values, "environment.reward_function")
    if compared := _named(values, "environment.group_reward_function"):
        rewards = f"{rewards}; of groups: {compared}" if rewards else f"of groups: {compared}"
    rows = [
        ("model", _model(values)),
        ("method", _method(values, rl=rl)),
        ("data", _data(values)),
        ("rewards", rewards if rl else ""),
        ("hardware", _hardware(values, hosts)),
        ("code", version),
    ]
    return [(name, text) for name, text in rows if text]


def _named(values: Mapping[str, Any], setting: str) -> str:
    """Return the names in a table of rewards."""
    return ", ".join(path.removeprefix(f"{setting}.").strip('"') for path in values if path.startswith(f"{setting}."))


def _model(values: Mapping[str, Any]) -> str:
    rank = values.get(f"{_POLICY}.model.lora.rank")
    megatron = values.get("trainer.strategy") == "megatron"
    dtype = "megatron_config.dtype" if megatron else "fsdp_config.mixed_precision.param_dtype"
    parts = [
        _short(str(values.get(f"{_POLICY}.model.path", ""))),
        f"LoRA of rank {rank}" if rank else "all weights",
        str(values.get(f"{_POLICY}.{dtype}", "")),
        str(values.get("trainer.strategy", "")),
    ]
    return " · ".join(filter(None, parts))


def _method(values: Mapping[str, Any], *, rl: bool) -> str:
    batch, samples = values.get("trainer.train_batch_size"), values.get("generator.n_samples_per_prompt")
    teacher = "distillation" if values.get("trainer.distillation.enable") else ""
    kl = values.get("trainer.algorithm.kl_loss_coef") if values.get("trainer.algorithm.use_kl_loss") else None
    mode = str(values.get("trainer.mode", "rl"))
    parts = [
        str(values.get("trainer.algorithm.advantage_estimator", "")) if rl else _METHODS.get(mode, mode),
        teacher,
        f"{batch} prompts × {samples} samples a step" if rl else f"{batch} rows a step",
        f"lr {values.get(f'{_POLICY}.optimizer_config.lr', 0):g}",
        f"KL {kl:g}" if rl and kl else "",
        "" if not rl else "synchronous" if not (late := values.get(_STALENESS)) else f"up to {late} steps stale",
    ]
    return " · ".join(filter(None, parts))


_STALENESS = "trainer.fully_async.max_staleness_steps"


def _data(values: Mapping[str, Any]) -> str:
    trained, evaluated = (
        ", ".join(map(_short, values.get(f"data.{name}") or [])) for name in ("train_data", "val_data")
    )
    return f"{trained} · evaluated on {evaluated}" if evaluated else trained


def _hardware(values: Mapping[str, Any], hosts: Sequence[str]) -> str:
    if not hosts:
        return ""
    gpus = str(values.get("slurm.gpus_per_node", 0))
    each = "CPUs" if gpus == "0" else f"GPUs {gpus} each"
    return f"{len(hosts)} node{'s' * (len(hosts) > 1)}, {each} · {', '.join(hosts[:4])}{', …' * (len(hosts) > 4)}"


def _short(place: str) -> str:
    """Return a path's last two parts; a hub's id is as short."""
    return "/".join(PurePath(place).parts[-2:])


def cards(summary: Summary, metrics: Mapping[str, Any], findings: Sequence[Verdict]) -> list[Card]:
    """Return the cards: score, reward or loss, time, and health.

    Args:
        metrics: by name, as of `curves_of`.
    """
    total = _known(metrics, TOTAL_STEPS)[-1:]
    rows = summary.reward_last is None and _known(metrics, LOSS)
    if summary.loss_last and not summary.eval_last:
        score = _learned("Validation loss", EVAL_LOSS, summary.loss_first, summary.loss_last, metrics, min)
    else:
        score = _learned("Evaluation score", EVAL_SCORE, summary.eval_first, summary.eval_last, metrics, max)
    if rows:
        ends = ((1, rows[0]), (summary.steps, rows[-1]))
        learned = _learned("Training loss", LOSS, *ends, metrics, min)
    else:
        learned = _learned("Reward", REWARD, summary.reward_first, summary.reward_last, metrics, max)
    speed = [
        f"step {summary.steps}{f' of {total[0]:g}' if total else ''}",
        f"{summary.seconds_per_step:.2f} s each" if summary.seconds_per_step is not None else "",
        f"{summary.tokens_per_second:,.0f} tokens/s" if summary.tokens_per_second is not None else "",
        f"{summary.samples:,} samples" if summary.samples else "",
    ]
    time = Card("Time", duration(summary.seconds), " · ".join(filter(None, speed)), TOKENS_PER_SECOND)
    return [score, learned, time, _health(summary, findings)]


def _known(metrics: Mapping[str, Any], name: str) -> list[float]:
    return [value for value in metrics.get(name, ()) if value is not None]


def _learned(
    title: str,
    metric: str,
    first: tuple[int, float] | None,
    last: tuple[int, float] | None,
    metrics: Mapping[str, Any],
    choose: Any,
) -> Card:
    if first is None or last is None:
        return Card(title, "–", "none yet")
    best = choose([*_known(metrics, metric), last[1]])
    note = f"{first[1]:.3f} at step {first[0]} · {best:.3f} at best" if first != last else f"step {last[0]}"
    return Card(title, f"{last[1]:.3f}", note, metric)


def _health(summary: Summary, findings: Sequence[Verdict]) -> Card:
    outcome = summary.outcome
    kind = outcome.kind if outcome else "running" if summary.attempts else "not begun"
    bad, look = (
        list(dict.fromkeys(one.name for one in findings if one.status == status)) for status in ("bad", "look")
    )
    status = "bad" if bad or kind in _BAD_ENDS else "look" if look else "good" if findings else ""
    notes = [
        outcome.message if outcome and outcome.message != "finished" else "",
        f"{len(bad)} wrong: {', '.join(bad)}" if bad else "",
        f"{len(look)} to look at: {', '.join(look)}" if look else "",
    ]
    quiet = "nothing to complain of" if findings else "nothing reported yet"
    return Card("Health", kind, " · ".join(filter(None, notes)) or quiet, status=status)
