"""Builds the srun command of a program on nodes of the cluster, for commands that measure without a run."""

from __future__ import annotations

from collections.abc import Sequence

from hpcrl.config.sections.slurm import SlurmConfig
from hpcrl.launch.container import Starter
from hpcrl.launch.setup_lines import recorded_setup

_PASSED_ON = ("partition", "account", "qos", "constraint")


def srun(slurm: SlurmConfig, seen: Sequence[str], gpus: int | str, job: Sequence[str], arguments: str) -> list[str]:
    """Return the command that asks Slurm for nodes and starts the interpreter of the jobs there.

    Args:
        seen: directories that a container has to show.
        gpus: of each node, as slurm.gpus_per_node names them; 0: none.
        job: options of srun.
        arguments: of the interpreter, for a shell.
    """
    options = [f"--{name}={value}" for name in _PASSED_ON if (value := getattr(slurm, name))]
    if gpus:
        wanted = {"gpus-per-node": f"--gpus-per-node={gpus}", "gres": f"--gres=gpu:{gpus}", "none": "--exclusive"}
        options.append(wanted[slurm.gpu_option])
    starter = Starter.of(slurm, seen, bool(gpus))
    # what srun starts in a container has no place outside to run it
    setup = [] if starter.srun else recorded_setup(slurm.setup)
    shell = [*starter.srun, "bash", "-c", "\n".join([*setup, f"exec {starter.python} {arguments}"])]
    return ["srun", *job, *options, *shell]
