"""Run on the login node with a folder: submit an array of two jobs on two nodes each. Prints ids and results as JSON."""

import json
import sys

import submitit


def where(element: int) -> dict[str, object]:
    import os
    import socket

    job = submitit.JobEnvironment()
    return {
        "element": element,
        "id": job.job_id,
        "node": job.node,
        "of": job.num_nodes,
        "host": socket.gethostname(),
        "python": sys.executable,
        "mark": os.environ.get("DEVCLUSTER_TEST"),
    }


executor = submitit.SlurmExecutor(folder=f"{sys.argv[1]}/%j")
executor.update_parameters(partition="main", time=5, nodes=2, ntasks_per_node=1, cpus_per_task=4)
jobs = executor.map_array(where, [0, 1])
sys.stdout.write(json.dumps({"ids": [job.job_id for job in jobs], "results": [job.results() for job in jobs]}))
