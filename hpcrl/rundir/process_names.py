"""Names of a run's rollout workers and scorers, which begin names of files, statuses and timelines."""

WORKER, SCORER = "rollout-", "scorer-"


def worker_name(replica: int) -> str:
    return f"{WORKER}{replica}"


def scorer_name(number: int) -> str:
    return f"{SCORER}{number}"
