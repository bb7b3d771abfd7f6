"""Which groups are generated and trained, and what is told of them: SkyRL's and Cosmos-RL's numbers of samples become groups."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from hpcrl.config import Config, total_steps
from hpcrl.config.algorithm import DynamicSamplingConfig
from hpcrl.config.derive import publishes
from hpcrl.config.load import nested
from hpcrl.config.validate import build
from hpcrl.controller.admission import Admission
from hpcrl.controller.describe import describe
from hpcrl.controller.dynamic_sampling import DynamicSampling
from hpcrl.controller.evaluation import scores
from hpcrl.trainer.describe import combined
from hpcrl.types import Batch, GroupMeta
from tests.golden.cases import Case

_MANY = 1000  # steps of a run that no case comes to the end of
_FIELDS = ("response_ids", "rewards", "loss_masks", "uids")


def group(name: str, rewards: Sequence[float], lengths: Sequence[int] = (), source: str = "unknown") -> GroupMeta:
    found = list(lengths) or [1] * len(rewards)
    return GroupMeta(
        group_id=name,
        kind="train",
        replica=0,
        path="",
        rewards=list(rewards),
        lengths=found,
        response_lengths=found,
        stop_reasons=["stop"] * len(rewards),
        oldest_version=0,
        newest_version=0,
        data_source=source,
        seconds=0.0,
    )


def members(uids: Sequence[str]) -> dict[str, list[int]]:
    return {uid: [at for at, other in enumerate(uids) if other == uid] for uid in uids}


def sampling_of(case: Case) -> DynamicSampling:
    names = ("type", "max_sample_batches", "min_replace_ratio")
    return DynamicSampling(DynamicSamplingConfig(**{name: case.params[name] for name in names if name in case.params}))


def dynamic(case: Case) -> dict[str, Any]:
    """Groups of batch after batch, as they are finished; what a batch drops or keeps is what SkyRL returns after it."""
    sampling, kept, trace = sampling_of(case), list[GroupMeta](), list[dict[str, Any]]()
    rows: dict[str, list[dict[str, Any]]] = {}
    for batch in case.inputs["batches"]:
        found = members(batch["uids"])
        rows |= {uid: [{name: batch[name][at] for name in _FIELDS} for at in places] for uid, places in found.items()}
        metas = [group(uid, [batch["rewards"][at] for at in places]) for uid, places in found.items()]
        kept += [meta for meta in metas if sampling.keeps(meta)]
        complete = len(kept) >= case.params.get("train_batch_size", len(metas))
        chosen = sampling.chosen(1, kept) if complete else None
        if sampling.config.type == "replace" and chosen is None:
            kept = []
        samples = None if chosen is None else [row for meta in chosen for row in rows[meta.group_id]]
        trace.append({name: samples and [row[name] for row in samples] for name in _FIELDS})
        trace[-1]["keep_sampling"] = chosen is None
    return {"trace": trace}


def max_sample_batches(case: Case) -> dict[str, Any]:
    """A batch is one group of equal rewards."""
    sampling = sampling_of(case)
    count = case.inputs["num_all_bad_batches"]
    return {"trace": ["RuntimeError" if sampling.exhausted(1, 0, n) else "keep" for n in range(1, count + 1)]}


def reward_metrics(case: Case) -> dict[str, Any]:
    found = members(case.inputs["uids"])
    groups = [group(uid, [case.inputs["rewards"][at] for at in places]) for uid, places in found.items()]
    told = describe(Batch(1, groups, 0))
    return {
        "avg_score": told["reward/avg_raw_reward"],
        "pass_at_n": told[f"reward/avg_pass_at_{len(groups[0].rewards)}"],
        "mean_positive_reward": told["reward/mean_positive_reward"],
    }


def rollout_metrics(case: Case) -> dict[str, Any]:
    lengths = [len(response) for response in case.inputs["responses"]]
    return describe(Batch(1, [group("a", case.inputs["rewards"], lengths)], 0))


def eval_metrics(case: Case) -> dict[str, Any]:
    rewards, sources = case.inputs["rewards"], case.inputs["data_sources"]
    found = members(case.inputs["uids"])
    return scores(
        [
            group(uid, [rewards[at] for at in places], source=sources[places[0]] or "unknown")
            for uid, places in found.items()
        ]
    )


def reduce(case: Case) -> dict[str, Any]:
    return {name: combined(name, values) for name, values in case.inputs["metrics"].items()}


class Generation:
    """Admission with one worker whose engine always has the newest weights."""

    def __init__(self, groups_per_step: int, staleness: int, at_once: int | None = None) -> None:
        self.size, self.version = groups_per_step, 0
        self.admission = Admission(groups_per_step, staleness, _MANY, at_once)
        self._running: list[int] = []

    @property
    def accepted(self) -> int:
        return self.admission.composed * self.size + self.admission.finished

    def begin(self, count: int) -> int:
        claimed = self.admission.claim("worker", self.version, count)
        self._running += claimed
        return len(claimed)

    def finish(self, count: int) -> list[int]:
        done, self._running = self._running[:count], self._running[count:]
        for index in done:
            self.admission.complete(index, group(str(index), [0.0]))
        return done

    def train(self) -> None:
        ready = self.admission.ready()
        assert ready is not None
        self.admission.take([index for index, _ in ready])
        self.version += 1


def staleness(case: Case) -> dict[str, Any]:
    generation = Generation(
        case.params["mini_batch_size"],
        case.params["max_staleness_steps"],
        case.params["num_parallel_generation_workers"],
    )
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
    size = given["train_batch_per_replica"] * given["n_policy_replicas"] // samples
    generation = Generation(size, given["allowed_outdated_steps"])
    for _ in range(case.inputs["current_step"]):
        generation.begin(size)
        generation.finish(size)
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


def recompute_total_steps(case: Case) -> dict[str, Any]:
    """Samples are prompts of one sample; the steps so far had full batches."""
    size = case.params["train_batch_per_replica"] * case.inputs["n_policy_replicas"]
    settings = {"train_batch_size": size, "policy_mini_batch_size": size, "max_steps": case.params["max_num_steps"]}
    base = {"data.train_data": ["t"], "trainer.policy.model.path": "m", "trainer.eval_interval": 0}
    given = {f"trainer.{name}": value for name, value in settings.items() if value is not None}
    trainer = build(Config, nested(base | given)).trainer
    return {"total_steps": total_steps(case.inputs["current_step"] * size + case.inputs["remain_samples_num"], trainer)}


def need_weight_sync(case: Case) -> dict[str, Any]:
    given = case.params
    settings = {
        "trainer.eval_interval": given["validation_freq"] if given["validation_enabled"] else 0,
        "trainer.fully_async.sync_weight_interval": given["sync_weight_interval"],
        "trainer.fully_async.max_staleness_steps": given["sync_weight_interval"] - 1,
    }
    base = {"data.train_data": ["t"], "data.val_data": ["v"], "trainer.policy.model.path": "m"}
    trainer = build(Config, nested(base | settings)).trainer
    return {"out": publishes(trainer, given["step"], given["total_steps"])}


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
