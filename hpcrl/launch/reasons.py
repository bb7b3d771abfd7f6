"""Slurm's reasons for not starting a job, in words."""

from __future__ import annotations

from datetime import datetime

from hpcrl.launch.scheduler import JobState

_WORDS = {
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
_BEGINNINGS = (
    ("ReqNodeNotAvail", "nodes that it needs are down or reserved"),
    ("QOS", "a limit of its QOS is reached"),
    ("Assoc", "a limit of its account is reached"),
    ("MaxJobs", "a limit of its account is reached"),
)
_HOLDING = ("REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD")


def is_held(job: JobState) -> bool:
    """Return whether a waiting job starts only when somebody releases it."""
    return job.name in _HOLDING or job.reason == "JobHoldMaxRequeue" or "held" in job.reason.lower()


def explain(job: JobState, number: str) -> str:
    """Return why a job waits, and when Slurm expects to start it.

    Args:
        number: the job's id, for commands that release it.
    """
    words = _WORDS.get(job.reason) or next((text for start, text in _BEGINNINGS if job.reason.startswith(start)), None)
    if words is None and is_held(job):
        words = "somebody held it: `scontrol release {job}` lets it go"
    parts = [f"{job.reason or job.name}" + (f": {words.format(job=number)}" if words else "")]
    if start := started(job):
        eligible = "may start" if job.reason == "BeginTime" else "Slurm expects it to start"
        if start > datetime.now().timestamp():
            parts.append(f"{eligible} at {_clock(start)}")
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
