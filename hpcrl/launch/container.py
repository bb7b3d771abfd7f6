"""Starts commands of a run with the interpreter of its jobs, in its container with the node's directories that it needs."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

from hpcrl.config import Config
from hpcrl.config.fields import settings
from hpcrl.config.sections.slurm import PYXIS_LISTS, ContainerConfig, SlurmConfig
from hpcrl.data.hub.directories import hub_cache, hub_home
from hpcrl.errors import ConfigError

_ENVIRONMENT = ("PYTHONPATH", "PYTHONSAFEPATH", "PYTHONUNBUFFERED", "PYTHONNOUSERSITE")
_TEMPORARY = "/tmp"
_SEPARATORS = {"apptainer": ",:", "pyxis": ',: \t"$`\\'}  # Enroot reads words of a line, which a shell has written
_BOUNDED = ("timeout", "--kill-after=30", "600")  # a node whose disk hangs would keep the job from its start
# Variables of the user may name other directories than those of Pyxis, which does not pass them on to Enroot (enroot_want_env in its source).
_REMOVE_LEFT = (
    "unset ${!ENROOT_@} ${!XDG_@}; "
    'enroot list | grep "^pyxis_${SLURM_JOB_ID}[._]" | xargs --no-run-if-empty enroot remove --force --'
)


@dataclass(frozen=True)
class Starter:
    """Starts Python on the nodes: in a container, or the interpreter of the jobs.

    Attributes:
        python: the interpreter, and what starts it, for a shell on a node.
        srun: options of srun that belong to it.
    """

    python: str
    srun: list[str]

    @classmethod
    def of(cls, slurm: SlurmConfig, seen: Sequence[str], gpus: bool) -> Starter:
        """Return how it is started.

        Args:
            seen: directories and files of the nodes that are to be seen inside, at the same place.
            gpus: whether it needs the node's GPUs.

        Raises:
            ConfigError: the container cannot be given one of them.
        """
        container = slurm.container
        if container.kind == "none":
            return cls(shlex.quote(slurm.python or sys.executable), [])
        for path in seen:
            if found := next((one for one in path if one in _SEPARATORS[container.kind]), None):
                raise ConfigError(
                    f"{path}: a directory or file of the run that {container.kind} cannot mount, because of {found!r} in its path; "
                    "rename it, or use another"
                )
        image, mounts = container.image or "", [*seen, *container.mounts]
        if container.kind == "pyxis":
            pairs = [mount if ":" in mount else f"{mount}:{mount}" for mount in [_TEMPORARY, *mounts]]
            # a variable that the image sets as well would be the image's
            lists = [f"--container-mounts={','.join(pairs)}", f"--container-env={','.join(_ENVIRONMENT)}"]
            options = [f"--container-image={image}", *_joined([*lists, *container.arguments])]
            return cls(shlex.quote(container.python), options)
        binds = [f"--bind={shlex.quote(mount)}" for mount in mounts]
        binds.append(f'--bind="${{TMPDIR:-{_TEMPORARY}}}"')  # of the node, which its shell knows
        more = [*(["--nv"] if gpus else []), *map(shlex.quote, container.arguments)]
        return cls(
            " ".join(["apptainer", "exec", *more, *binds, shlex.quote(image), shlex.quote(container.python)]), []
        )

    def outside_step(self, container: ContainerConfig) -> str:
        """Return the interpreter for the batch script itself, which runs on the first node, outside the steps of srun."""
        if container.kind != "none" and container.host_python:
            return shlex.quote(container.host_python)
        if not self.srun:
            return self.python
        step = ["--overlap", "--nodes=1", "--ntasks=1", "--unbuffered", *self.srun]
        return f'srun --nodelist="$SLURMD_NODENAME" {shlex.join(step)} {self.python}'


def _joined(options: Sequence[str]) -> list[str]:
    """Return options of srun with one of each list of Pyxis: of several, srun passes only the last one on to the nodes."""
    lists = {name: [text.partition("=")[2] for text in options if text.startswith(f"{name}=")] for name in PYXIS_LISTS}
    others = [text for text in options if text.partition("=")[0] not in PYXIS_LISTS]
    return [*(f"{name}={','.join(values)}" for name, values in lists.items()), *others]


def lines_of_a_restart(container: ContainerConfig) -> list[str]:
    """Return the lines of a batch script that remove, on all nodes, the containers which an earlier start of the job has left.

    Pyxis names one by job and step, both of which a requeued job has again. It starts none beside one that a node kept when it lost power.
    """
    if container.kind != "pyxis":
        return []
    step = [*_BOUNDED, "srun", "--ntasks-per-node=1", "--kill-on-bad-exit=0", "--output=/dev/null", "--error=/dev/null"]
    return [f'[ "${{SLURM_RESTART_COUNT:-0}}" = 0 ] || {shlex.join([*step, "bash", "-c", _REMOVE_LEFT])}']


def seen_by(root: Path, configs: Sequence[Config]) -> list[str]:
    """Return the directories and files that the runs of a root need and that are here: the root, and all that the configurations name.

    Of a path with symbolic links also what it leads to.
    """
    named = [path for config in configs for path in _named(config)]
    paths = [str(root.absolute()), *named, *_hub()]
    there = {form for path in paths for form in (path, os.path.realpath(path)) if os.path.exists(form)}
    there.add(paths[0])  # is made before the job is submitted
    return [
        path for path in sorted(there) if not any(path != other and Path(path).is_relative_to(other) for other in there)
    ]


def _named(config: Config) -> list[str]:
    found = list[str]()
    for setting in settings(type(config)):
        if setting.location and setting.path != "slurm.container.image":
            value: Any = reduce(getattr, setting.path.split("."), config)
            found += value if isinstance(value, list) else [value or ""]
    return [path for path in (os.path.expanduser(text) for text in found) if path.startswith("/")]


def _hub() -> list[str]:
    return [hub_home(), hub_cache()]
