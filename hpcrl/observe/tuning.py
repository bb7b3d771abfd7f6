"""The settings to tune for speed, with what they gain: the table of docs/performance.md, and when each is advised to a run.

A row that names waits is advised where a run has such a wait and the row's judge returns values. Advice leaves out values that the run has
already, and those that its configuration refuses.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hpcrl.config import Config
from hpcrl.observe.waiting import (
    CHECKPOINTS,
    DUMPS,
    ENGINES,
    ENVIRONMENTS,
    EVALUATION,
    EXPORTS,
    GPUS,
    LOADING,
    SAMPLES,
    SLOWEST,
    TRAINER,
    TRAINING,
    TURNS,
    WEIGHTS,
    Waiting,
)

LEAST_SHARE = 0.1
"""Waits of a smaller share of a role's time are not worth another setting."""
CALL, QUEUE, COMPUTING = "generate/call_seconds", "generate/call_queue_seconds", "generate/call_cpu_share"
PLACE = "generate/call_place_seconds"
CALLS = (CALL, QUEUE, PLACE, COMPUTING)
"""Metrics of the calls of environments and rewards."""
GROUPS_AT_ONCE = "generate/groups_at_once"
_SAVES, _SLOW_CALL_S = 0.05, 0.005
_MOST_STALE, _MOST_TIMES, _ROUNDING = 4, 4, 1e-6


@dataclass(frozen=True)
class Measured:
    """What an advice is based on.

    Attributes:
        newest: the means over replicas of CALLS in the newest steps; empty: they have called no environment.
        groups_at_once: the mean over replicas of the groups that each has room for; None: not known.
        on_one_machine: all processes share its processors, so that further ones take theirs from the others.
    """

    config: Config
    waiting: Waiting
    newest: Mapping[str, float]
    groups_at_once: float | None
    on_one_machine: bool


@dataclass(frozen=True)
class Proposal:
    """Other values of settings.

    Attributes:
        overrides: path to value.
        at_best: how many times as fast a step becomes where everything else stays as it is.
        fewer_gpus: it saves GPUs, not time.
    """

    overrides: dict[str, Any]
    at_best: float
    fewer_gpus: bool = False


Judge = Callable[[Measured], Proposal | None]


@dataclass(frozen=True)
class Tuning:
    """A row of the table in docs/performance.md.

    Attributes:
        name, where, gain: its columns.
        waits: role and what it waits for, against which it helps; none: no wait shows whether it does.
        judge: returns the values for a run; None: it would not help.
    """

    name: str
    where: str
    gain: str
    waits: tuple[tuple[str, str], ...] = ()
    judge: Judge = lambda _: None


_COMPILED = 1.9
_FOR_ENGINES = (SAMPLES, ENVIRONMENTS, LOADING, WEIGHTS)
_FOR_TRAINER = (TRAINING, CHECKPOINTS, EXPORTS, DUMPS, EVALUATION, WEIGHTS)


def _times(measured: Measured, role: str, saved: float) -> float:
    """Return how many times as fast a step becomes where a role has to do less, by a share of its time.

    Trainer and engines work side by side: a step becomes shorter only by as much as the other one waits for this one.
    """
    if role == ENGINES:
        saved = min(saved, measured.waiting.share(TRAINER, *_FOR_ENGINES))
    elif role == TRAINER and not measured.config.trainer.offline:
        saved = min(saved, measured.waiting.share(ENGINES, *_FOR_TRAINER))
    return 1 / (1 - saved)


_STALE = "trainer.fully_async.max_staleness_steps"


def _staleness(measured: Measured) -> Proposal | None:
    """Generation ahead of training helps where each of both has time in which it waits for the other."""
    waiting, stale = measured.waiting, measured.config.trainer.fully_async.max_staleness_steps
    trainer = waiting.share(TRAINER, SAMPLES, ENVIRONMENTS)
    engines = waiting.share(ENGINES, TRAINING, SLOWEST)
    if min(trainer, engines) < LEAST_SHARE or stale >= _MOST_STALE:
        return None
    return Proposal({_STALE: stale + 1}, 1 / (1 - min(trainer, engines)))


def _more_engines(measured: Measured) -> Proposal | None:
    config, waiting = measured.config, measured.waiting
    share, busy = waiting.share(TRAINER, SAMPLES), 1 - waiting.share(ENGINES)
    engine, elastic = config.generator.inference_engine, config.slurm.elastic.replicas
    if share < LEAST_SHARE or measured.on_one_machine or engine.remote_urls or not config.has_engines:
        return None
    ahead = config.trainer.fully_async.max_staleness_steps > 0
    if ahead and busy < 1 - LEAST_SHARE:  # more of them would wait as well
        return None
    replicas = config.max_replicas - config.slurm.eval_replicas
    # on-policy, as many as generate no longer than the trainer trains; else as many as keep it busy
    wanted = replicas / (1 - share) if ahead else replicas * share / (1 - share)
    wanted = min(max(replicas + 1, math.ceil(wanted - _ROUNDING)), _MOST_TIMES * replicas)
    path = "slurm.elastic.replicas" if elastic else "generator.inference_engine.num_engines"
    own = elastic if elastic else engine.engines
    return Proposal({path: own + wanted - replicas}, 1 / (1 - share + share * replicas / wanted))


def _lend(measured: Measured) -> Proposal | None:
    """Engines that wake get groups only where the others have no room for all that may be under way."""
    config, share, room = measured.config, measured.waiting.share(TRAINER, SAMPLES), measured.groups_at_once
    own = config.max_replicas - config.slurm.eval_replicas
    lent = config.replicas_per_trainer_node * config.trainer.placement.policy_nodes
    wanted = config.trainer.train_batch_size * (config.trainer.fully_async.max_staleness_steps + 1)
    if share < LEAST_SHARE or measured.on_one_machine or lent == 0 or room is None or room * own >= wanted:
        return None
    return Proposal({"trainer.placement.lend": True}, 1 / (1 - share + share * own / (own + lent)))


def _no_evaluators(measured: Measured) -> Proposal | None:
    """Replicas that only evaluate do not pay where they idle while the trainer waits for samples."""
    config, waiting = measured.config, measured.waiting
    share, idle, own = waiting.share(TRAINER, SAMPLES), waiting.share(ENGINES, SLOWEST), config.slurm.eval_replicas
    if not own or min(share, idle) < LEAST_SHARE:
        return None
    generating = config.max_replicas - own
    more = min(own, config.max_replicas * idle / share)  # as many as idle all that time
    return Proposal({"slurm.eval_replicas": 0}, 1 / (1 - share + share * generating / (generating + more)))


def _fewer_gpus(measured: Measured) -> Proposal | None:
    config, waiting = measured.config, measured.waiting
    idle, engines = waiting.share(ENGINES, TRAINING), config.generator.inference_engine.engines
    if idle < 0.5 or waiting.share(TRAINER, SAMPLES, ENVIRONMENTS) >= LEAST_SHARE or config.slurm.gpus == 0:
        return None
    wanted = max(1, math.ceil(1.25 * engines * (1 - idle) - _ROUNDING))
    if wanted < engines:
        return Proposal({"generator.inference_engine.num_engines": wanted}, 1.0, fewer_gpus=True)
    return Proposal({"trainer.placement.colocate_all": True}, 1.0, fewer_gpus=True)


def _no_turns(measured: Measured) -> Proposal | None:
    share = measured.waiting.share(GPUS, TURNS)
    stale = measured.config.trainer.fully_async.max_staleness_steps
    apart = {"trainer.placement.colocate_all": False, _STALE: max(1, stale)}
    return Proposal(apart, 1 / (1 - share)) if share >= LEAST_SHARE else None


def _compiled(measured: Measured) -> Proposal | None:
    config, waiting = measured.config, measured.waiting
    off = {name: getattr(config.trainer.policy, name) is False for name in ("compile_model", "use_torch_compile")}
    bound = waiting.share(ENGINES, TRAINING) >= LEAST_SHARE > waiting.share(TRAINER, SAMPLES, ENVIRONMENTS)
    if not (bound and any(off.values()) and config.slurm.gpus > 0):
        return None
    saved = (1 - waiting.share(TRAINER)) * (1 - 1 / _COMPILED)
    return Proposal({f"trainer.policy.{name}": True for name in off if off[name]}, _times(measured, TRAINER, saved))


def _whole_versions(measured: Measured) -> Proposal | None:
    engine, share = measured.config.generator.inference_engine, measured.waiting.share(ENGINES, WEIGHTS)
    if share < LEAST_SHARE or engine.full_weights_interval > 1 or engine.weight_copy_dir is None:
        return None
    return Proposal({"generator.inference_engine.full_weights_interval": 10}, _times(measured, ENGINES, share))


def _updates(measured: Measured) -> Proposal | None:
    own, share = measured.config.trainer.fully_async, measured.waiting.share(ENGINES, LOADING)
    if share < LEAST_SHARE or own.sync_weight_interval > own.max_staleness_steps:
        return None
    interval = own.sync_weight_interval + 1
    return Proposal({"trainer.fully_async.sync_weight_interval": interval}, _times(measured, ENGINES, share / interval))


def _saving(measured: Measured) -> Proposal | None:
    trainer, role = measured.config.trainer, _trainer(measured)
    share = measured.waiting.share(role, CHECKPOINTS)
    if share < _SAVES or trainer.ckpt_interval_epochs is not None:
        return None
    if trainer.ckpt_mode == "sync":
        return Proposal({"trainer.ckpt_mode": "async"}, _times(measured, role, share))
    interval = _spread(trainer.ckpt_interval, share)
    return Proposal({"trainer.ckpt_interval": interval}, _times(measured, role, share - _SAVES))


def _exports(measured: Measured) -> Proposal | None:
    interval, role = measured.config.trainer.hf_save_interval, _trainer(measured)
    share = measured.waiting.share(role, EXPORTS)
    if share < _SAVES or interval < 1:
        return None
    return Proposal({"trainer.hf_save_interval": _spread(interval, share)}, _times(measured, role, share - _SAVES))


def _evaluation(measured: Measured) -> Proposal | None:
    interval, share = measured.config.trainer.eval_interval, measured.waiting.share(_trainer(measured), EVALUATION)
    if share < LEAST_SHARE or interval < 1:
        return None
    return Proposal({"trainer.eval_interval": _spread(interval, share)}, 1 / (1 - share + _SAVES))


def _spread(interval: int, share: float) -> int:
    """Return the interval at which what takes `share` of the time now takes a twentieth of it."""
    return math.ceil(interval * share / (1 - share) * (1 - _SAVES) / _SAVES - _ROUNDING)


def _trainer(measured: Measured) -> str:
    return GPUS if measured.config.trainer.placement.colocate_all else TRAINER


def _workers(measured: Measured) -> Proposal | None:
    config, own = measured.config, measured.config.environment.skyrl_gym.max_env_workers
    role = GPUS if config.trainer.placement.colocate_all else ENGINES
    share = measured.waiting.share(role, ENVIRONMENTS)
    calls = measured.newest
    quick = calls.get(CALL, 0.0) < _SLOW_CALL_S or calls.get(COMPUTING, 1.0) > 0.5
    if quick or calls.get(QUEUE, 0.0) < calls[CALL]:  # threads would compute no faster, or none is lacking
        return None
    at_once = math.ceil(config.trainer.train_batch_size * config.samples_per_prompt / max(1, config.max_replicas))
    if share < LEAST_SHARE or own >= at_once:
        return None
    wanted = min(at_once, 8 * own or 32)
    return Proposal(
        {"environment.skyrl_gym.max_env_workers": wanted}, _times(measured, role, share - share * own / wanted)
    )


def _sandboxes(measured: Measured) -> Proposal | None:
    """More sandboxes help where calls wait longer for one than they take, and samples are generated for which there is none."""
    config, asked, calls = measured.config, measured.config.slurm.sandboxes, measured.newest
    role = GPUS if config.trainer.placement.colocate_all else ENGINES
    share, own = measured.waiting.share(role, ENVIRONMENTS), asked.nodes * asked.per_node
    lacking = calls.get(PLACE, 0.0) > calls.get(CALL, 0.0)
    at_once = config.trainer.train_batch_size * config.samples_per_prompt
    if share < LEAST_SHARE or not lacking or measured.on_one_machine or not 0 < own < at_once:
        return None
    nodes = min(math.ceil(at_once / asked.per_node), _MOST_TIMES * asked.nodes)
    return Proposal({"slurm.sandboxes.nodes": nodes}, _times(measured, role, share - share * asked.nodes / nodes))


_FIGURES = "../benchmarks/RESULTS.md"

TUNINGS: Sequence[Tuning] = (
    Tuning(
        "more `generator.inference_engine.num_engines`, or `slurm.elastic.replicas`",
        "the trainer waits for samples",
        f"the quickstart's trainer waits for 77 % of a step with one vLLM ([figures]({_FIGURES}#the-quickstart-on-two-cpu-cores))",
        ((TRAINER, SAMPLES),),
        _more_engines,
    ),
    Tuning(
        "[`trainer.placement.lend = true`](placement.md#gpus-that-the-trainer-lends)",
        "the trainer waits for samples for longer than engines take to wake and to sleep, and engines have no room for all groups",
        f"1.6 times the samples per second where one lent engine joins one other, and environments are slow ([figures]({_FIGURES}#gpus-that-the-trainer-lends))",
        ((TRAINER, SAMPLES),),
        _lend,
    ),
    Tuning(
        "[`trainer.policy.compile_model`, `trainer.policy.use_torch_compile`](large_models.md#kernels) to true",
        "GPUs, FSDP2, where they are not on by default",
        f"1.9 times the tokens/s, 0.9 of the memory; 0.6 billion parameters, H200 ([figures]({_FIGURES}#one-gpu))",
        ((ENGINES, TRAINING),),
        _compiled,
    ),
    Tuning(
        "[`trainer.fully_async.max_staleness_steps = 1`](placement.md#asynchronous-training) to 4",
        "trainer and engines have nodes of their own, and wait for each other, or lengths differ",
        f"10 to 13 % less time where the trainer has 8 % of the work ([figures]({_FIGURES}#asynchronous-training-where-lengths-differ-tenfold))",
        ((TRAINER, SAMPLES), (TRAINER, ENVIRONMENTS), (ENGINES, TRAINING), (ENGINES, SLOWEST)),
        _staleness,
    ),
    Tuning(
        "[`trainer.shared_prefixes = true`](large_models.md#shared-prefixes)",
        "prompts, or turns, are longer than answers",
        f"2.9 times the tokens/s, 0.32 of the peak; prompts of 512 and answers of 128 tokens ([figures]({_FIGURES}#shared-prefixes))",
    ),
    Tuning(
        "[`trainer.gradient_checkpointing = false`](large_models.md#memory-of-a-pass), or `gradient_checkpointing_every = 2`",
        "it fits",
        "0.83 and 0.91 of the time of a pass; on the H200 0.78 of a step",
    ),
    Tuning(
        "[`trainer.policy.sequence_parallel_size`](large_models.md#sequence-parallelism)",
        "one sample does not fit otherwise",
        "0.52 of the activations with two ranks; exchanges in each layer",
    ),
    Tuning(
        "[`trainer.flash_attn = false`](large_models.md#kernels)",
        "Hopper, most samples have 16,384 tokens or more",
        f"1.3 times the tokens/s at 16,384, 1.5 at 65,536; 0.84 where lengths are uneven ([figures]({_FIGURES}#one-gpu))",
    ),
    Tuning(
        '[`generator.inference_engine.speculative.method = "ngram"`](engines.md#drafts)',
        "vLLM, answers repeat parts of their prompts, and few are generated at a time",
        f"1.5 times the tokens/s where answers repeat the prompt, on a CPU ([figures]({_FIGURES}#drafts))",
    ),
    Tuning(
        "[`generator.inference_engine.full_weights_interval`](weights.md)",
        "engines wait for weights: the filesystem is slow, learning rates are small",
        f"3 % of a version's bytes where 1.5 % of the elements change ([figures]({_FIGURES}#weight-updates))",
        ((ENGINES, WEIGHTS),),
        _whole_versions,
    ),
    Tuning(
        "`trainer.fully_async.sync_weight_interval` up to `max_staleness_steps + 1`",
        "engines wait for weights to load",
        "an update less for each step without one",
        ((ENGINES, LOADING),),
        _updates,
    ),
    Tuning(
        'larger `trainer.ckpt_interval`; `trainer.ckpt_mode = "async"`',
        "the trainer waits for checkpoints",
        "checkpoints take 5 % of the time; a kill costs more steps",
        ((TRAINER, CHECKPOINTS), (GPUS, CHECKPOINTS)),
        _saving,
    ),
    Tuning(
        "larger `trainer.hf_save_interval`",
        "the trainer waits for exports",
        "exports take 5 % of the time",
        ((TRAINER, EXPORTS), (GPUS, EXPORTS)),
        _exports,
    ),
    Tuning(
        "larger `trainer.eval_interval`",
        "the trainer waits for evaluation",
        "evaluation takes 5 % of the time",
        ((TRAINER, EVALUATION), (GPUS, EVALUATION)),
        _evaluation,
    ),
    Tuning(
        "[`slurm.eval_replicas = 0`](evaluation.md)",
        "some replicas only evaluate, and idle while the trainer waits for samples",
        "all replicas generate",
        ((TRAINER, SAMPLES), (ENGINES, SLOWEST)),
        _no_evaluators,
    ),
    Tuning(
        "more `environment.skyrl_gym.max_env_workers`",
        "engines wait for environments that wait themselves, as for a service",
        "as many environments step at once as samples are generated",
        ((ENGINES, ENVIRONMENTS), (TRAINER, ENVIRONMENTS), (GPUS, ENVIRONMENTS)),
        _workers,
    ),
    Tuning(
        "more [`slurm.sandboxes.nodes`](sandboxes.md#in-a-run)",
        "engines wait for environments whose samples wait for a sandbox",
        "as many sandboxes as samples are generated at a time",
        ((ENGINES, ENVIRONMENTS), (TRAINER, ENVIRONMENTS), (GPUS, ENVIRONMENTS)),
        _sandboxes,
    ),
    Tuning(
        "fewer `generator.inference_engine.num_engines`, or [`trainer.placement.colocate_all = true`](placement.md#the-same-gpus-in-turns)",
        "engines wait for training most of the time, and the trainer waits for nothing",
        "as many steps on fewer GPUs",
        ((ENGINES, TRAINING),),
        _fewer_gpus,
    ),
    Tuning(
        "with `colocate_all`, [`trainer.fully_async.max_staleness_steps = 1`](placement.md#the-same-gpus-in-turns)",
        "the longest samples of a step hold up its turn",
        "1.9 times the samples per second where lengths differ tenfold "
        "([figures](../benchmarks/RESULTS.md#turns-that-end-with-the-batch))",
    ),
    Tuning(
        "`trainer.placement.colocate_all = false`, with `max_staleness_steps = 1`",
        "trainer and engines wait for changes of turns",
        "no turns, on as many GPUs again",
        ((GPUS, TURNS),),
        _no_turns,
    ),
)
