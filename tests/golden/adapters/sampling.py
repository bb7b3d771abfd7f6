"""Which groups are generated and trained, and what is told of them: SkyRL's and Cosmos-RL's numbers of samples become groups."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from hpcrl.controller.admission import Admission
from hpcrl.controller.dynamic_sampling import DynamicSampling
from hpcrl.controller.metrics import batch_metrics
from hpcrl.observe.scores import scores
from hpcrl.trainer.metrics import combined
from hpcrl.types import Batch, GroupMeta
from tests.golden.adapters.advantages import ABOVE_0, Rewards, members, total
from tests.golden.adapters.converted import cosmos, skyrl
from tests.golden.case import Case
from tests.rows import group_meta

_APART = {"trainer.placement.colocate_all": False}
_MANY = 1000  # steps of a run that no case comes to the end of
_POLICY = "train.train_policy"


def group(name: str, rewards: Sequence[Rewards], lengths: Sequence[int] = (), source: str = "unknown") -> GroupMeta:
    found = list(lengths) or [1] * len(rewards)
    return group_meta(
        group_id=name,
        kind="train",
        replica=0,
        path="",
        rewards=[total(reward) for reward in rewards],
        lengths=found,
        response_lengths=found,
        stop_reasons=["stop"] * len(rewards),
        oldest_version=0,
        newest_version=0,
        data_source=source,
        seconds=0.0,
    )


def sampling_of(case: Case) -> DynamicSampling:
    names = ("type", "max_sample_batches", "min_replace_ratio")
    given = {f"trainer.algorithm.dynamic_sampling.{name}": case.params[name] for name in names if name in case.params}
    return DynamicSampling(skyrl(given).trainer.algorithm.dynamic_sampling)


def dynamic(case: Case) -> dict[str, Any]:
    """Groups of batch after batch, as they are finished; what a batch drops or keeps is what SkyRL returns after it."""
    sampling, kept, trace = sampling_of(case), list[GroupMeta](), list[dict[str, Any]]()
    rows: dict[str, list[dict[str, Any]]] = {}
    for batch in case.inputs["batches"]:
        found = members(batch["uids"])
        columns = {name: column for name, column in batch.items() if column is not None}
        rows |= {uid: [{name: columns[name][at] for name in columns} for at in places] for uid, places in found.items()}
        metas = [group(uid, [batch["rewards"][at] for at in places]) for uid, places in found.items()]
        kept += [meta for meta in metas if sampling.keeps(meta)]
        complete = len(kept) >= case.params.get("train_batch_size", len(metas))
        chosen = sampling.chosen(1, kept) if complete else None
        if sampling.config.type == "replace" and chosen is None:
            kept = []
        samples = None if chosen is None else [row for meta in chosen for row in rows[meta.group_id]]
        trace.append({name: samples and [row[name] for row in samples] for name in columns})
        trace[-1] |= {**dict.fromkeys(batch.keys() - columns.keys()), "keep_sampling": chosen is None}
    return {"trace": trace}


def max_sample_batches(case: Case) -> dict[str, Any]:
    """A batch is one group of equal rewards."""
    sampling = sampling_of(case)
    count = case.inputs["num_all_bad_batches"]
    return {"trace": ["RuntimeError" if sampling.exhausted(1, 0, n) else "keep" for n in range(1, count + 1)]}


def reward_metrics(case: Case) -> dict[str, Any]:
    found = members(case.inputs["uids"])
    groups = [group(uid, [case.inputs["rewards"][at] for at in places]) for uid, places in found.items()]
    metrics = batch_metrics(Batch(1, groups, 0), ABOVE_0)
    return {
        "avg_score": metrics["reward/avg_raw_reward"],
        "pass_at_n": metrics[f"reward/avg_pass_at_{len(groups[0].rewards)}"],
        "mean_positive_reward": metrics["reward/mean_positive_reward"],
    }


def rollout_metrics(case: Case) -> dict[str, Any]:
    lengths = [len(response) for response in case.inputs["responses"]]
    return batch_metrics(Batch(1, [group("a", case.inputs["rewards"], lengths)], 0), ABOVE_0)


def eval_metrics(case: Case) -> dict[str, Any]:
    rewards, sources = case.inputs["rewards"], case.inputs["data_sources"]
    found = members(case.inputs["uids"])
    return scores(
        [
            group(uid, [rewards[at] for at in places], source=sources[places[0]] or "unknown")
            for uid, places in found.items()
        ],
        ABOVE_0,
    )


def reduce(case: Case) -> dict[str, Any]:
    return {name: combined(name, values) for name, values in case.inputs["metrics"].items()}


class Generation:
    """Admission with one worker whose engine always has the newest weights."""

    def __init__(self, groups_per_step: int, staleness: int, at_once: int | None = None, done: int = 0) -> None:
        """Begin after `done` steps."""
        self.size, self.version = groups_per_step, done
        self.admission = Admission(groups_per_step, staleness, _MANY, at_once)
        self.admission.restore(done, range(done * groups_per_step), {})
        self._running: dict[int, int] = {}  # groups to the version that began them

    @property
    def accepted(self) -> int:
        return self.admission.composed * self.size + self.admission.finished

    def begin(self, count: int) -> int:
        claimed = self.admission.claim("worker", self.version, count)
        self._running |= dict.fromkeys(claimed, self.version)
        return len(claimed)

    def finish(self, count: int) -> list[int]:
        done = list(self._running)[:count]
        for index in done:
            began = self._running.pop(index)
            meta = replace(group(str(index), [0.0]), oldest_version=began, newest_version=began)
            self.admission.complete(index, meta)
        return done

    def train(self) -> None:
        ready = self.admission.ready()
        assert ready is not None
        self.admission.take([index for index, _ in ready])
        self.version += 1


def staleness(case: Case) -> dict[str, Any]:
    """A run is resumed before its step resume_global_step."""
    size, next_step = case.params["mini_batch_size"], case.params.get("resume_global_step") or 1
    names = ("max_staleness_steps", "num_parallel_generation_workers")
    settings = {f"trainer.fully_async.{name}": case.params[name] for name in names}
    batches = dict.fromkeys(("trainer.train_batch_size", "trainer.policy_mini_batch_size"), size)
    limits = skyrl({**_APART, **batches, **settings}).trainer.fully_async
    generation = Generation(size, limits.max_staleness_steps, limits.num_parallel_generation_workers, next_step - 1)
    return {"trace": list(_trace(generation, case.inputs["ops"]))}


def _trace(generation: Generation, operations: Sequence[Sequence[Any]]) -> Iterator[dict[str, Any]]:
    admission = generation.admission
    for name, count in operations:
        if name == "acquire":
            generation.begin(count)
        elif name == "step":
            while generation.version < count - 1:
                generation.train()
        else:
            done = generation.finish(count)
            if name == "reject":
                admission.drop(done)
        yield {
            "op": [name, count],
            "capacity": admission.room(generation.version),
            "submitted": admission.cursor,
            "accepted": generation.accepted,
            "running": admission.running,
        }


def throttle(case: Case) -> dict[str, Any]:
    """What is handed out and not settled is running, but for what waits at the controller; a step is one of all replicas together."""
    given, samples = case.params, case.params["n_generation"]
    names = (
        "variant",
        "on_policy",
        "allowed_outdated_steps",
        "outdated_rollout_fetch_batch_size",
        "max_inflight_steps",
    )
    settings = {f"{_POLICY}.{name}": given[name] for name in names if name in given}
    trainer = cosmos(
        {**settings, **_batches(case.params, given["n_policy_replicas"]), "rollout.n_generation": samples}
    ).trainer
    generation = Generation(trainer.train_batch_size, trainer.fully_async.max_staleness_steps)
    for _ in range(case.inputs["current_step"]):
        generation.begin(trainer.train_batch_size)
        generation.finish(trainer.train_batch_size)
        generation.train()
    generation.begin(case.inputs["samples_on_the_fly"] // samples)
    generation.finish(case.inputs["total_pending_rollouts"] // samples)
    begun = generation.begin(case.inputs["n"])
    admission = generation.admission
    return {
        "n_prompts": begun,
        "is_end": False,
        "samples_on_the_fly_after": (admission.running + admission.finished) * samples,
    }


def _batches(params: Mapping[str, Any], replicas: int) -> dict[str, Any]:
    return {
        "train.train_batch_per_replica": params["train_batch_per_replica"],
        "policy.parallelism.n_init_replicas": replicas,
    }


def recompute_total_steps(case: Case) -> dict[str, Any]:
    """Samples are prompts of one sample; the steps so far had full batches."""
    replicas = case.inputs["n_policy_replicas"]
    given = {**_batches(case.params, replicas), "train.max_num_steps": case.params["max_num_steps"]}
    trainer = cosmos({**given, "rollout.n_generation": 1}).trainer
    prompts = case.inputs["current_step"] * trainer.train_batch_size + case.inputs["remain_samples_num"]
    return {"total_steps": trainer.total_steps(prompts)}


def need_weight_sync(case: Case) -> dict[str, Any]:
    given = case.params
    settings = {
        "validation.enable": given["validation_enabled"],
        "validation.freq": given["validation_freq"],
        "train.sync_weight_interval": given["sync_weight_interval"],
    }
    return {"out": cosmos(settings).trainer.publishes(given["step"], given["total_steps"])}


ADAPTERS = {
    "sampling.dynamic": dynamic,
    "sampling.max_sample_batches": max_sample_batches,
    "metrics.reward": reward_metrics,
    "metrics.rollout": rollout_metrics,
    "metrics.eval_per_dataset": eval_metrics,
    "metrics.reduce": reduce,
    "async.staleness": staleness,
    "need_weight_sync": need_weight_sync,
    "prompt_throttle": throttle,
    "recompute_total_steps": recompute_total_steps,
}
