"""In what state a run is: its files and what the scheduler says, put into a word and a sentence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hpcrl.launch.budget import Verdict, judge
from hpcrl.launch.progress import SILENT_S, Progress, duration, progress_of
from hpcrl.launch.reasons import explain, is_held, started
from hpcrl.launch.scheduler import GONE, JobState
from hpcrl.run.layout import Run
from hpcrl.run.lease import Lease, read_leases
from hpcrl.run.ledger import Attempt, Outcome, outcome_of, read_attempts
from hpcrl.run.stop_request import stop_asked

_STANDING = ("SUSPENDED", "STOPPED")
_LEAVING = ("COMPLETING", "STAGE_OUT", "SIGNALING")
_SKEW_S = 60.0  # between the clocks of slurmctld and of a node


@dataclass(frozen=True)
class RunState:
    """A run as a person wants to see it.

    Attributes:
        word: pending, starting, running, saving, suspended, preempted (was interrupted, and is queued again), held (waits for a
            person), ending (its outcome is known, its processes leave), done, failed, hang, cancelled, interrupted (and not queued
            again), lost (it ended without an outcome), or unknown (the scheduler does not answer, and nothing is heard of it).
        detail: why it waits, the first error, or how far it is.
        advice: what to do, or empty.
        found: the job was not recorded, and found in the queue.
    """

    run: Run
    submission: dict[str, Any]
    job: JobState
    attempt: int
    outcome: Outcome | None
    leases: list[Lease]
    progress: Progress
    word: str
    detail: str
    advice: str = ""
    found: bool = False

    @property
    def over(self) -> bool:
        if not self.job.known:
            return self.outcome is not None and self.outcome.final
        return not self.job.active

    @property
    def at_work(self) -> bool:
        """Whether there are processes that can be asked for something."""
        return self.word in ("running", "saving")


def state_of(run: Run, submission: dict[str, Any], job: JobState, found: bool = False) -> RunState:
    """Return the state of a run.

    Args:
        submission: the record of its last job.
        job: what the scheduler says of that.
    """
    attempts = read_attempts(run)
    attempt = attempts[-1] if attempts else None
    number = attempt.number if attempt else 0
    outcome = outcome_of(run, number)
    leases = read_leases(run, number)
    progress = progress_of(run, leases, ended=outcome is not None)
    word, detail, advice = _View(run, submission, job, attempt, outcome, progress).say()
    return RunState(run, submission, job, number, outcome, leases, progress, word, detail, advice, found)


@dataclass(frozen=True)
class _View:
    """What is known of a run, and the words for it: state, detail, advice."""

    run: Run
    submission: dict[str, Any]
    job: JobState
    attempt: Attempt | None
    outcome: Outcome | None
    progress: Progress

    def say(self) -> tuple[str, str, str]:
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
            return "saving", f"asked to stop ({reason}); {self.progress}", ""
        return "saving" if self.progress.activity.startswith("saving") else "running", str(self.progress), ""

    @property
    def _resumed(self) -> bool:
        """Whether the newest attempt is of an earlier job than the recorded one, of which no attempt has begun."""
        if self.attempt is None:
            return False
        identity = self.submission.get("job_id", "")
        # for Slurm a start goes by the job's id and the number of its restarts
        starts = {f"local-{identity}", f"{identity}.{self.attempt.job.rpartition('.')[2]}"}
        return self.attempt.job not in starts

    @property
    def _restarted(self) -> bool:
        """Whether Slurm started the job again after the newest attempt, of which nobody has to have told the end.

        squeue gives restarts by its long format alone, which cuts names off; so this goes by the clocks, unless a process of the
        attempt was heard of just now: what is at work must never be taken for gone.
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
        verdict = self._verdict
        return "pending", f"queued again after {verdict.why if verdict else self.outcome.message}; {why}", ""

    @property
    def _verdict(self) -> Verdict | None:
        try:
            return judge(self.run)
        except (KeyError, ValueError):  # the configuration of an older hpcrl
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
            how = "Slurm no longer knows its job" if self.job == GONE else f"its job ended as {self.job.name} in Slurm"
            return "lost", f"{how}, and it left no outcome", resume
        if outcome.final:
            return outcome.kind, outcome.message, ""
        verdict = self._verdict
        if outcome.kind in ("interrupted", "lost"):
            word = "cancelled" if self.job.name == "CANCELLED" else outcome.kind
            return word, verdict.why if verdict else outcome.message, resume
        verdict = verdict if self.submission.get("executor") == "slurm" else None
        if verdict and verdict.held:
            return "held", verdict.why, f"hpcrl logs {self.run.name} shows it; {resume}"
        return outcome.kind, outcome.message, resume

    def _by_its_files(self) -> tuple[str, str, str]:
        again = "ask again later; what stands here is from the run directory alone"
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
