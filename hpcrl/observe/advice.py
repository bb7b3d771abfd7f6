"""Advises settings by which the roles of a run would wait less, from its measured waits (waiting.py) and the table of tuning.py."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from hpcrl.config import Config
from hpcrl.config.difference import flat
from hpcrl.config.resume_changes import changes
from hpcrl.config.setting import Kind
from hpcrl.errors import ConfigError
from hpcrl.observe.metrics import last_records
from hpcrl.observe.tuning import CALLS, GROUPS_AT_ONCE, LEAST_SHARE, TUNINGS, Measured
from hpcrl.observe.waiting import TRAINER, Wait, Waiting, waiting_of
from hpcrl.rundir.attempt_config import attempt_config
from hpcrl.rundir.layout import Run
from hpcrl.rundir.process_names import WORKER, worker_name
from hpcrl.rundir.records import read_object

_LEAST_GAIN = 1.02


@dataclass(frozen=True)
class Advice:
    """One advice.

    Attributes:
        waits: against which it helps, the longest first.
        now: the present values of the settings.
        at_best, fewer_gpus: as of a Proposal.
        change: whether a later attempt of the run may have it; refused: only another run.
    """

    waits: list[Wait]
    overrides: dict[str, Any]
    now: dict[str, Any]
    at_best: float
    fewer_gpus: bool
    change: Kind

    def __str__(self) -> str:
        values = " ".join(
            f"{path}={_shown(value)} (now {_shown(self.now[path])})" for path, value in self.overrides.items()
        )
        times = f"{self.at_best:.1f}" if self.at_best >= 1.1 else f"{self.at_best:.2f}"
        gain = ", as fast on fewer GPUs" if self.fewer_gpus else f", at best {times} times as fast"
        return values + gain + (", in another run" if self.change == "refused" else "")


@dataclass(frozen=True)
class Advised:
    """The waits of a run, and what is advised against them."""

    waiting: Waiting
    advice: list[Advice]

    @property
    def based_on(self) -> str:
        """The steps that were looked at."""
        return f"steps {self.waiting.first} to {self.waiting.last}"

    def lines(self) -> Iterator[str]:
        """Yield a sentence for each wait of at least LEAST_SHARE, and for each advice against a shorter one."""
        told = set[int]()
        for wait in self.waiting.waits:
            against = [index for index, one in enumerate(self.advice) if wait in one.waits]
            new = [str(self.advice[index]) for index in against if index not in told]
            if wait.share < LEAST_SHARE and not new:
                continue
            told.update(against)
            remedy = "; or ".join(new) or (
                "the same" if against else "no setting that this run lacks makes its steps shorter"
            )
            yield f"{wait.role} {_verb(wait.role)} {wait} ({self.based_on}): {remedy}"

    def to_json(self) -> dict[str, Any]:
        """Return all of it as JSON values."""
        return {**asdict(self.waiting), "advice": [asdict(one) for one in self.advice]}


def advise(run: Run) -> Advised | None:
    """Return the waits of a run with advice; None before enough of its steps are trained.

    Raises:
        ConfigError: its configuration is one of another version of hpcrl.
    """
    config = attempt_config(run)
    lent = [worker_name(replica) for replica in config.lent_replicas]
    waiting = waiting_of(run, colocated=config.trainer.placement.colocate_all, lent=lent)
    if waiting is None:
        return None
    submission = read_object(run.submission, "remove it: the job of the run is then not known") or {}
    measured = Measured(
        config,
        waiting,
        _means(run, waiting, CALLS),
        _means(run, waiting, [GROUPS_AT_ONCE]).get(GROUPS_AT_ONCE),
        on_one_machine=submission.get("executor") == "local",
    )
    return Advised(waiting, list(_advice(measured)))


def _means(run: Run, waiting: Waiting, names: Sequence[str]) -> dict[str, float]:
    """Return the means of metrics that are recorded together over replicas and the steps that were looked at."""
    found = defaultdict[str, list[float]](list)
    for path in run.metrics.glob(f"{WORKER}*.jsonl"):
        for record in last_records(run, path.stem, names[0], lambda _: True, waiting.last - waiting.first + 1):
            for name in names:
                found[name].append(record.metrics.get(name, 0.0))  # an earlier version recorded fewer
    return {name: fmean(values) for name, values in found.items()}


def _advice(measured: Measured) -> Iterator[Advice]:
    now = dict(flat(measured.config.to_dict()))
    for tuning in TUNINGS:
        waits = [wait for wait in measured.waiting.waits if (wait.role, wait.what) in tuning.waits]
        proposal = tuning.judge(measured) if waits else None
        if proposal is None or not (proposal.fewer_gpus or proposal.at_best >= _LEAST_GAIN):
            continue
        changed = {path: value for path, value in proposal.overrides.items() if now[path] != value}
        kind = _change(measured.config, changed) if changed else None
        if kind:
            present = {path: now[path] for path in changed}
            yield Advice(waits, changed, present, proposal.at_best, proposal.fewer_gpus, kind)


def _change(config: Config, overrides: dict[str, Any]) -> Kind | None:
    """Return what the change means for a later attempt; None where the configuration refuses it."""
    try:
        other = config.with_overrides([f"{path}={_shown(value)}" for path, value in overrides.items()])
    except ConfigError:
        return None
    kinds = [change.kind for change in changes(config, other)]
    return "refused" if "refused" in kinds else "warning" if "warning" in kinds else "harmless"


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else "unset" if value is None else str(value)


def _verb(role: str) -> str:
    return "waits" if role == TRAINER else "wait"
