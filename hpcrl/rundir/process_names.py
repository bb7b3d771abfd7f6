"""Names of a run's rollout workers, scorers, sandbox servers and elements of the evaluation job, which begin names of files, statuses and
timelines."""

WORKER, SCORER, EVALUATION, SANDBOX = "rollout-", "scorer-", "evaluation-", "sandbox-"


def worker_name(replica: int) -> str:
    return f"{WORKER}{replica}"


def scorer_name(number: int) -> str:
    return f"{SCORER}{number}"


def evaluation_name(element: int) -> str:
    return f"{EVALUATION}{element}"


def sandbox_name(server: int) -> str:
    return f"{SANDBOX}{server}"
