"""A program that is started for a sample, as it is or in a container."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from hpcrl.config.sections.environment import AgentContainerConfig
from hpcrl.envs.base import Endpoint
from hpcrl.errors import ConfigError

_KEPT_BACK = ("HPCRL_", "REMOTE_REWARD_", "ANTHROPIC_AUTH_TOKEN")  # the last one Anthropic's client prefers to a key
_QUOTES = "\"'"
_HANDED_ON = ("APPTAINERENV_", "SINGULARITYENV_")  # what Apptainer hands on under the name without them
# It hands these on whatever the options are. It may need them itself, for an image from a registry.
_PROXIES = ("http_proxy", "https_proxy", "ftp_proxy", "all_proxy")
_BEGIN = ("sh", "-c", 'echo > "$0" && cd "$1" && shift && exec "$@"')


def variables(endpoint: Endpoint, programs: str) -> dict[str, str]:
    """Return the environment of a program that asks at an endpoint: this process's own, without what concerns the run.

    `python` is the Python of the run, and no proxy stands between the program and the policy.

    Args:
        programs: directory of further programs that it finds.
    """
    own = {name: value for name, value in os.environ.items() if not name.startswith(_KEPT_BACK)}
    path = os.pathsep.join([programs, os.path.dirname(sys.executable), own.get("PATH") or os.defpath])
    return {**own, "PATH": path, **_direct(own, endpoint), **_asked(endpoint)}


def contained(
    container: AgentContainerConfig,
    command: Sequence[str],
    directory: Path,
    endpoint: Endpoint,
    files: Mapping[str, str],
    own: Mapping[str, str] = os.environ,
) -> tuple[list[str], dict[str, str]]:
    """Return the command that runs a program in a container, and the environment to run it in.

    The program sees the image, the directory of its sample at the same place, and what is mounted. It has the environment variables listed
    here and those that `container.env` names. None is an argument, which others on the node could read. A line is written into the file that
    `started` names, inside, before the program begins.

    Args:
        directory: of the sample; the program begins in `work` in it.
        files: variables that name files of the sample.
        own: this process's environment.

    Raises:
        ConfigError: Enroot would change the value of a variable.
    """
    kept = {name: own[name] for name in container.env if name in own}
    told = {**kept, **_direct(kept, endpoint), **_asked(endpoint), **files}
    work = str(directory / "work")
    begin = [*_BEGIN, str(started(directory)), work, *command]
    seen = [_parts(mount) for mount in (str(directory), *container.mounts)]
    outside = {name: value for name, value in own.items() if not name.startswith((*_KEPT_BACK, *_HANDED_ON))}
    if container.kind == "apptainer":
        binds = [f"--bind={source}:{target}:{mode}" for source, target, mode in seen]
        start = ["apptainer", "exec", "--containall", "--cleanenv", f"--pwd={work}", *binds, *container.arguments]
        none = {name: "" for name in own if name.lower() in _PROXIES}
        handed = {f"{_HANDED_ON[0]}{name}": value for name, value in {**none, **told}.items()}
        return [*start, container.image or "", *begin], {**outside, **handed}
    for name, value in told.items():
        _check_for_enroot(name, value)
    mounts = [f"{source}:{target}:none:x-create=auto,rbind,{mode}" for source, target, mode in seen]
    options = [word for mount in mounts for word in ("--mount", mount)]
    options += [word for name in told for word in ("--env", name)]  # whose values enroot has from its own environment
    start = ["enroot", "start", *options, *container.arguments, container.image or ""]
    return [*start, *begin], {**outside, **told}


def started(directory: Path) -> Path:
    """Return the file in the directory of a sample that is empty until its container has started."""
    return directory / "started"


def _check_for_enroot(name: str, value: str) -> None:
    """Raise ConfigError for a value that Enroot would change: it writes one to a line of a file, and takes quotes around it away."""
    quoted = len(value) > 1 and value[0] in _QUOTES and value.rstrip()[-1] in _QUOTES
    if quoted or "\n" in value:
        found = "quotes around it" if quoted else "a line break"
        raise ConfigError(
            f"environment.skyrl_gym.agent.container.env: the value of {name} has {found}, which Enroot does not pass on; "
            "leave it out and write it to a file that container.mounts shows"
        )


def _parts(mount: str) -> tuple[str, str, str]:
    """Return source, target and mode of SOURCE, SOURCE:TARGET or SOURCE:TARGET:ro."""
    source, _, rest = mount.partition(":")
    target, _, mode = rest.partition(":")
    return source, target or source, mode or "rw"


def _asked(endpoint: Endpoint) -> dict[str, str]:
    openai = {"OPENAI_BASE_URL": endpoint.base_url, "OPENAI_API_KEY": endpoint.key}
    anthropic = {"ANTHROPIC_BASE_URL": endpoint.base_url.removesuffix("/v1"), "ANTHROPIC_API_KEY": endpoint.key}
    return {**openai, **anthropic, "HPCRL_MODEL": endpoint.model}


def _direct(own: Mapping[str, str], endpoint: Endpoint) -> dict[str, str]:
    """Return the variables that keep proxies from standing between a program and an endpoint."""
    direct = ",".join(filter(None, [own.get("no_proxy") or own.get("NO_PROXY"), urlsplit(endpoint.base_url).hostname]))
    return {"no_proxy": direct, "NO_PROXY": direct}
