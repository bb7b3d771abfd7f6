"""The `#SBATCH` lines of a batch script, to section `slurm`: options with a setting of their own, and others by their names."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from functools import partial
from typing import Any

from hpcrl.convert.conversion import Conversion, directory_name

_SHORT = {
    "N": "nodes", "n": "ntasks", "t": "time", "p": "partition", "A": "account", "q": "qos", "C": "constraint", "J": "job-name",
    "o": "output", "e": "error", "c": "cpus-per-task", "a": "array", "G": "gpus", "w": "nodelist", "x": "exclude", "d": "dependency",
    "L": "licenses", "D": "chdir", "i": "input", "b": "begin",
}  # fmt: skip
_SETTINGS = ("partition", "account", "qos", "constraint")
_DROPPED = {
    "nodes": "a run asks for as many nodes as trainer, engines and scorers need, which `hpcrl plan` prints",
    "ntasks": "one task runs on each node, and starts the others",
    "ntasks-per-node": "one task runs on each node, and starts the others",
    "output": "logs are files of the run directory",
    "error": "logs are files of the run directory",
    "input": "nothing is read from there",
    "open-mode": "logs are files of the run directory",
    "chdir": "paths are resolved when a run is submitted",
    "gpus": "GPUs are asked for by node (slurm.gpus_per_node)",
    "gpus-per-task": "one task runs on each node; GPUs are asked for by node (slurm.gpus_per_node)",
    "ntasks-per-gpu": "one task runs on each node, and starts the others",
    "signal": "slurm.signal_seconds says when a run saves before its time limit",
    "requeue": "a run requeues itself",
    "no-requeue": "a run requeues itself; trainer.resume_mode=none keeps it from that",
}
_VARIABLES = {
    "SLURM_NNODES": "nodes",
    "SLURM_JOB_NUM_NODES": "nodes",
    "SLURM_GPUS_PER_NODE": "gpus-per-node",
    "SLURM_GPUS_ON_NODE": "gpus-per-node",
    "SLURM_CPUS_PER_TASK": "cpus-per-task",
}
_UNITS = {"": 1 / 1024, "k": 1 / 1024**2, "m": 1 / 1024, "g": 1, "t": 1024}
_GRES = re.compile(r"(?:gres/)?gpu(?::(?P<type>[A-Za-z][\w.-]*))?(?:[:=](?P<count>\d+))?")


def convert_sbatch(text: str, conversion: Conversion) -> None:
    """Write the options of a script's `#SBATCH` lines into `conversion`, whose settings of the run are there already."""
    for option, value in _options(text):
        convert_option(f"#SBATCH --{option}" + ("" if value is None else f"={value}"), option, value, conversion)


def job_variables(text: str) -> dict[str, str]:
    """Return the variables that Slurm sets in a job for a script's `#SBATCH` lines, of those whose values are numbers."""
    given = {option: value for option, value in _options(text) if value is not None and value.isdecimal()}
    return {name: given[option] for name, option in _VARIABLES.items() if option in given}


def convert_option(source: str, option: str, value: str | None, conversion: Conversion) -> None:
    """Write an option of sbatch, by its long name, that `source` sets."""
    if option in _DROPPED:
        conversion.note("dropped", source, "", _DROPPED[option])
    elif option in _SETTINGS:
        _write(conversion, source, f"slurm.{option}", value)
    elif option in _READERS:
        _READERS[option](conversion, source, value)
    else:
        extra = conversion.values.setdefault("slurm.extra", {})
        extra[option] = True if value is None else value
        conversion.note("translated", source, "slurm.extra", "handed to sbatch as it is")


def _options(text: str) -> Iterator[tuple[str, str | None]]:
    """Yield the options of the lines before the first command, by their long names; sbatch reads no others."""
    for line in text.splitlines():
        if line.strip() and not line.startswith("#"):
            return
        if not line.startswith("#SBATCH"):
            continue
        try:
            words = shlex.split(line.removeprefix("#SBATCH"), comments=True)
        except ValueError:
            words = line.split()[1:]
        while words:
            word, value = words.pop(0), None
            if word.startswith("--"):
                name, equals, rest = word[2:].partition("=")
                value = rest if equals else None
            elif word.startswith("-") and len(word) > 1:
                name, value = _SHORT.get(word[1], word[1]), word[2:].removeprefix("=") or None
            else:
                continue
            if value is None and words and not words[0].startswith("-"):
                value = words.pop(0)
            yield name, value


def _write(conversion: Conversion, source: str, path: str, value: Any, message: str = "") -> None:
    if value is None:
        conversion.note("conflict", source, path, "expected a value")
        return
    conversion.values[path] = value
    conversion.note("translated" if message else "mapped", source, path, message)


def _time(conversion: Conversion, source: str, value: str | None, least: bool = False) -> None:
    """Read minutes, minutes:seconds, hours:minutes:seconds, and days- before hours, as sbatch does.

    Args:
        least: of the shortest limit with which a job may start.
    """
    path = "slurm.time_min_minutes" if least else "slurm.time_minutes"
    found = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", value or "")
    if found is None:
        conversion.note("conflict", source, path, "expected a time such as 04:00:00 or 1-12; write its minutes")
        return
    days, first, second, third = (None if part is None else int(part) for part in found.groups())
    if days is not None:
        minutes = (days * 24 + (first or 0)) * 60 + (second or 0) + (third or 0) / 60
    elif third is not None:
        minutes = (first or 0) * 60 + (second or 0) + third / 60
    else:
        minutes = (first or 0) + (second or 0) / 60
    message = "of each attempt, after which a run continues in the next"
    _write(conversion, source, path, max(1, round(minutes)), message)


def _memory(conversion: Conversion, source: str, value: str | None) -> None:
    found = re.fullmatch(r"(\d+)([kmgt]?)b?", (value or "").lower())
    if found is None:
        conversion.note("conflict", source, "slurm.mem_gb", "expected an amount of memory such as 512G; write its GB")
        return
    _write(conversion, source, "slurm.mem_gb", round(int(found[1]) * _UNITS[found[2]]))


def _gpus(conversion: Conversion, source: str, value: str | None) -> None:
    by_gres = source.startswith("#SBATCH --gres")
    found = (
        _GRES.fullmatch(value or "")
        if by_gres
        else re.fullmatch(r"(?:(?P<type>[A-Za-z][\w.-]*):)?(?P<count>\d+)", value or "")
    )
    if found is None:
        conversion.note("conflict", source, "slurm.gpus_per_node", "expected a number of GPUs, or type:number")
        return
    path, count, kind = "slurm.gpus_per_node", int(found["count"] or 1), found["type"]
    needed = conversion.values.get(path)
    if isinstance(needed, int) and needed > count:
        message = f"{count}, but trainer or engines of the run have {needed} GPUs on a node; name what your nodes have"
        conversion.note("conflict", source, path, message)
        return
    _write(conversion, source, path, f"{kind}:{count}" if kind else count)
    if by_gres:
        conversion.values["slurm.gpu_option"] = "gres"


def _cpus(conversion: Conversion, source: str, value: str | None) -> None:
    if value is not None and value.isdecimal():
        message = "of each node, on which one task runs"
        _write(conversion, source, "slurm.cpus_per_task", int(value), message)
    else:
        conversion.note("conflict", source, "slurm.cpus_per_task", "expected a number")


def _exclusive(conversion: Conversion, source: str, value: str | None) -> None:  # noqa: ARG001 - as every option
    _write(conversion, source, "slurm.exclusive", True)


def _name(conversion: Conversion, source: str, value: str | None) -> None:
    name = directory_name(value or "")
    if conversion.values.get("trainer.run_name") is None and name:
        _write(conversion, source, "trainer.run_name", name, "a job has the name of its run")
    else:
        conversion.note("dropped", source, "", "a job has the name of its run")


def _array(conversion: Conversion, source: str, value: str | None) -> None:
    together = re.search(r"%(\d+)$", value or "")
    message = "what differs between the elements is given to `hpcrl submit` by --sweep, --seeds or --sweep-file, which makes an array of them"
    if together:
        _write(conversion, source, "slurm.array_parallelism", int(together[1]), message)
    else:
        conversion.note("dropped", source, "", message)


_READERS = {
    "time": _time,
    "time-min": partial(_time, least=True),
    "mem": _memory,
    "gres": _gpus,
    "gpus-per-node": _gpus,
    "cpus-per-task": _cpus,
    "exclusive": _exclusive,
    "job-name": _name,
    "array": _array,
}
