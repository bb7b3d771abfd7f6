"""Derives the state of a run from its files and the state of its job: kind, reason, and remedy."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, TypeAlias

from hpcrl.errors import RunError
from hpcrl.launch.manage.progress import SILENT_S, Progress, progress_of
from hpcrl.launch.requeue.policy import RequeueDecision, repeats, requeue_decision
from hpcrl.launch.requeue.requests import requests_of
from hpcrl.launch.scheduler import GONE, JobState
from hpcrl.rundir.layout import Run
from hpcrl.rundir.ledger import Attempt, Outcome, listed_attempts, outcome_of, require_attempts
from hpcrl.rundir.space import exhausted
from hpcrl.runtime.process_status import ProcessStatus, read_process_statuses
from hpcrl.runtime.signals import stop_asked, stop_cause
from hpcrl.units import duration

Requests: TypeAlias = dict[str, tuple[str, JobState]]
"""Job and its state of each request of a run, by the request's name."""

_STANDING = ("SUSPENDED", "STOPPED")
_LEAVING = ("COMPLETING", "STAGE_OUT", "SIGNALING")
_FORESEEN_S = 7 * 86400.0  # beyond it Slurm only adds up time limits, of a year where a job has none
_SKEW_S = 60.0  # between the clocks of slurmctld and of a node


@dataclass(frozen=True)
class RunState:
    """State of a run, as `hpcrl status` shows it.

    Attributes:
        kind: pending, starting, running, saving, suspended, preempted (interrupted, and queued again), held (waits for a person), or
            ending (its outcome is known, its processes leave). After its end done, failed, hang, cancelled, interrupted (and not queued
            again), or lost (without an outcome). Unknown: the scheduler does not answer, and no process status is renewed.
        detail: why it waits, the first error, or how far it is.
        advice: what to do, or empty.
        found: the job was not recorded, and found in the queue.
        damaged: a file that says more cannot be read; detail names it.
        layout: nodes and sizes of the attempt where the configuration has ranges, for people.
        requests: jobs of the run's requests, of which `job` is one.
        statuses, progress: without content for a run in a list whose newest attempt has ended and waits for nothing.
    """

    run: Run
    submission: dict[str, Any]
    job: JobState
    attempt: int
    outcome: Outcome | None
    statuses: list[ProcessStatus]
    progress: Progress
    kind: str
    detail: str
    advice: str = ""
    found: bool = False
    damaged: bool = False
    layout: str = ""
    requests: Requests = field(default_factory=dict)

    @property
    def over(self) -> bool:
        if not self.job.known:
            return self.outcome is not None and self.outcome.final
        return not self.job.active

    @property
    def complaint(self) -> str:
        """Error of a run with a damaged file, and the remedy."""
        return "; ".join(filter(None, [self.detail, self.advice]))

    @property
    def at_work(self) -> bool:
        """Return whether there are processes that can answer a request."""
        return self.kind in ("running", "saving")


def state_of(
    run: Run,
    submission: dict[str, Any],
    job: JobState,
    found: bool = False,
    requests: Requests | None = None,
    *,
    listed: bool = False,
) -> RunState:
    """Return the state of a run; with a damaged file it is unknown, so that other runs are still shown.

    Args:
        submission: the record of its last job.
        job: state of that job.
        requests: as of RunState.
        listed: it is one of many, and what a line does not show is not read.
    """
    try:
        return replace(_state_of(run, submission, job, found, listed), requests=requests or {})
    except RunError as error:
        detail, advice = str(error), ""
    except OSError as error:
        detail, advice = f"{error.filename} cannot be read: {error.strerror}", "make it readable, or remove it"
    except (ValueError, KeyError, TypeError, AttributeError) as error:  # numbers that are texts, and the like
        detail = f"a file in {run.path} is damaged ({type(error).__name__}: {error})"
        advice = "restore it, or remove the run"
    return RunState(run, submission, job, 0, None, [], _NOTHING, "unknown", detail, advice, damaged=True)


_NOTHING = Progress("", None, None, None, 0, None, None, None, None)


def _state_of(run: Run, submission: dict[str, Any], job: JobState, found: bool, listed: bool) -> RunState:
    attempts = listed_attempts(run) if listed else require_attempts(run)
    attempt = attempts[-1] if attempts else None
    number = attempt.number if attempt else 0
    outcome = outcome_of(run, number)
    statuses, progress = list[ProcessStatus](), _NOTHING
    if not listed or outcome is None or job.active:
        statuses = read_process_statuses(run, number)
        progress = progress_of(run, statuses, ended=outcome is not None)
    kind, detail, advice = _View(run, submission, job, attempt, outcome, progress).describe()
    layout = attempt.layout if attempt else ""
    return RunState(
        run, submission, job, number, outcome, statuses, progress, kind, detail, advice, found, layout=layout
    )


@dataclass(frozen=True)
class _View:
    """Facts of a run; `describe` returns kind, detail and advice."""

    run: Run
    submission: dict[str, Any]
    job: JobState
    attempt: Attempt | None
    outcome: Outcome | None
    progress: Progress

    def describe(self) -> tuple[str, str, str]:
        if not self.job.known:
            return self._by_its_files()
        if not self.job.active:
            return self._gone()
        if self.job.waiting:
            return self._waiting()
        if self.job.name in _STANDING:
            return (
                "suspended",
                f"Slurm has suspended it; {self.progress}",
                "it goes on when Slurm, or `scontrol resume`, lets it",
            )
        if self.attempt is None or self._resumed or self._restarted:
            return "starting", "its job runs, its agents have not begun", ""
        if self.outcome is not None or self.job.name in _LEAVING:
            return "ending", f"{self.outcome.kind}: {self.outcome.message}" if self.outcome else "its job ends", ""
        if reason := stop_asked(self.run, self.attempt.number):
            cause = stop_cause(self.run, self.attempt.number) or reason
            return "saving", f"asked to stop ({cause}); {self.progress}", ""
        if self.progress.activity == "finished":
            return (
                "running",
                "all steps are trained; the last evaluation and the end of its processes may still go on",
                "",
            )
        return "saving" if self.progress.activity.startswith("saving") else "running", str(self.progress), ""

    @property
    def _resumed(self) -> bool:
        """Return whether the newest attempt is of an earlier job than the recorded one, of which no attempt has begun."""
        if self.attempt is None:
            return False
        jobs = requests_of(self.submission).values()
        return self.attempt.job_id not in {*jobs, *(f"local-{job}" for job in jobs)}

    @property
    def _restarted(self) -> bool:
        """Return whether Slurm started the job again after the newest attempt, whose end need not be recorded.

        squeue gives restarts by its long format alone, which cuts names off, so this compares clocks. An attempt with a process whose
        status was renewed just now never counts as gone.
        """
        began, silence = started(self.job), self.progress.silence
        if self.attempt is None or began is None:
            return False
        if self.outcome is not None:
            return began > self.outcome.ended
        return began > self.attempt.started + _SKEW_S and (silence is None or silence > SILENT_S)

    def _waiting(self) -> tuple[str, str, str]:
        why = explain(self.job, self.submission.get("job_id", ""))
        if is_held(self.job):
            return "held", why, f"hpcrl cancel {self.run.name} takes it away"
        if self.attempt is None or self._resumed:
            return "pending", why, ""
        if self.outcome is None or self.outcome.kind in ("interrupted", "lost"):
            saved = self.progress.checkpoint
            kept = f"goes on from {saved}" if saved is not None else "nothing was committed yet"
            return "preempted", f"queued again, {kept}; {why}", ""
        decision = self._decision
        return "pending", f"queued again after {decision.why if decision else self.outcome.message}; {why}", ""

    @property
    def _decision(self) -> RequeueDecision | None:
        try:
            return requeue_decision(self.run)
        except (KeyError, ValueError, TypeError):  # the configuration of an older hpcrl, or none
            return None

    def _gone(self) -> tuple[str, str, str]:
        resume = f"hpcrl resume {self.run.name} continues it"
        if not self.submission:
            return "lost", "its submission was cut short; submit it again under another name", ""
        cancelled_in_queue = self.outcome and self.outcome.ended > self.submission.get("submitted", 0.0)
        outcome = self.outcome if not self._resumed or cancelled_in_queue else None
        if outcome is None:
            if self.job.name == "CANCELLED":
                return "cancelled", "its job was cancelled in Slurm before it left an outcome", resume
            return "lost", self._without_outcome(), resume
        if outcome.final:
            return outcome.kind, outcome.message, ""
        if outcome.kind in ("interrupted", "lost"):
            kind, decision = "cancelled" if self.job.name == "CANCELLED" else outcome.kind, self._decision
            return kind, decision.why if decision else outcome.message, resume
        if repeats(outcome):
            advice = f"another attempt would end the same way: put that right, then hpcrl resume {self.run.name}"
            return outcome.kind, outcome.message, advice
        # the first crash holds no run, and a list of many runs need not read their configurations
        crashes = self.submission.get("executor") == "slurm" and outcome.attempt > 1
        if crashes and (decision := self._decision) and decision.held:
            return "held", decision.why, f"hpcrl logs {self.run.name} shows it; {resume}"
        return outcome.kind, outcome.message, resume

    def _without_outcome(self) -> str:
        """Return how the job of a run ended that wrote no outcome; on a full filesystem none can be written."""
        if self.submission.get("executor") == "local":
            how = "its processes have ended"
        else:
            how = "Slurm no longer knows its job" if self.job == GONE else f"its job ended as {self.job.name} in Slurm"
        full = exhausted(self.run.path)
        return f"{how}, and it left no outcome{f'; {full}' if full else ''}"

    def _by_its_files(self) -> tuple[str, str, str]:
        again = "ask again later; this is from the run directory alone"
        if self.outcome is not None and not self._resumed:
            advice = "" if self.outcome.final else again
            return self.outcome.kind, f"{self.outcome.message} ({self.job.reason})", advice
        if self.attempt is None or self._resumed:
            return "unknown", f"submitted; no attempt has begun; {self.job.reason}", again
        silence = self.progress.silence
        if silence is None or silence > SILENT_S:
            heard = f"nothing was heard for {duration(silence)}" if silence is not None else "nothing was heard of it"
            return "unknown", f"{heard}; {self.job.reason}", again
        return "running", f"{self.progress}; {self.job.reason}", again


_SLURM_REASONS = {
    "Priority": "jobs with a higher priority come first",
    "Resources": "it is the next for which nodes are not free yet",
    "BeginTime": "Slurm lets it wait a while",
    "Dependency": "it waits for other jobs to end",
    "DependencyNeverSatisfied": "it waits for a job that cannot end as it should: cancel it and submit it again",
    "JobArrayTaskLimit": "as many elements of its sweep as slurm.array_parallelism allows are running",
    "JobHeldUser": "somebody held it: `scontrol release {job}` lets it go",
    "JobHeldAdmin": "an administrator holds it: ask them, or try `scontrol release {job}`",
    "launch failed requeued held": "Slurm could not start it and holds it: `scontrol release {job}` tries again",
    "JobHoldMaxRequeue": "Slurm requeued it too often: `scontrol release {job}` lets it go",
    "PartitionConfig": "its partition never has the nodes or the time that it asks for: cancel it, change slurm.* and submit it again",
    "PartitionNodeLimit": "its partition has fewer nodes than it asks for: cancel it and submit it with fewer, or elsewhere",
    "PartitionTimeLimit": "slurm.time_minutes is more than its partition grants: cancel it and submit it with less",
    "PartitionDown": "its partition is closed",
    "PartitionInactive": "its partition is closed",
    "BadConstraints": "no node has what it asks for: cancel it, change slurm.* and submit it again",
    "NodeDown": "a node that it needs is down",
    "Licenses": "a licence that it asks for is in use",
    "Reservation": "its reservation has not begun",
    "Cleaning": "its last start is being cleaned up",
}
_REASONS_BY_PREFIX = (
    ("ReqNodeNotAvail", "nodes that it needs are down or reserved"),
    ("QOS", "a limit of its QOS is reached"),
    ("Assoc", "a limit of its account is reached"),
    ("MaxJobs", "a limit of its account is reached"),
)
_HOLDING = ("REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD")


def is_held(job: JobState) -> bool:
    """Return whether a waiting job starts only after its release."""
    return job.name in _HOLDING or job.reason == "JobHoldMaxRequeue" or "held" in job.reason.lower()


def explain(job: JobState, number: str) -> str:
    """Return why a job waits, and when Slurm expects to start it.

    Args:
        number: the job's id, for commands that release it.
    """
    meaning = _SLURM_REASONS.get(job.reason) or next(
        (text for start, text in _REASONS_BY_PREFIX if job.reason.startswith(start)), None
    )
    if meaning is None and is_held(job):
        meaning = "somebody held it: `scontrol release {job}` lets it go"
    unnamed = "Slurm has given no reason yet" if job.name == "PENDING" else job.name
    parts = [f"{job.reason or unnamed}" + (f": {meaning.format(job=number)}" if meaning else "")]
    begins, ahead = job.reason == "BeginTime", (started(job) or 0.0) - time.time()
    if ahead > 0 and (begins or ahead < _FORESEEN_S):
        parts.append(f"{'may start' if begins else 'Slurm expects it to start'} at {_clock(time.time() + ahead)}")
    return "; ".join(parts)


def started(job: JobState) -> float | None:
    """Return when a job started, or may start, as Unix time."""
    try:
        return datetime.fromisoformat(job.start).timestamp()
    except ValueError:
        return None


def _clock(moment: float) -> str:
    then = datetime.fromtimestamp(moment)
    return then.strftime("%H:%M:%S" if then.date() == datetime.now().date() else "%Y-%m-%d %H:%M")
