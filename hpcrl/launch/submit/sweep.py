"""Expands a sweep: one configuration and the values to vary; each combination is one element of the job array."""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from hpcrl.config import Config
from hpcrl.config.root import source_of
from hpcrl.errors import ConfigError, DataError
from hpcrl.launch.layouts import all_layouts, unmeasured_layouts, usable_layouts
from hpcrl.launch.nodes import Node, make_plan
from hpcrl.launch.submit.models import rank_problems
from hpcrl.text import NotUtf8Error, utf8

_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9._-]+")
_LONGEST_WORD = 16
_LONGEST_NAME = 80
ONE_SCRIPT = (
    "the elements of a job array share one batch script, so a sweep cannot vary the slurm section or the number of nodes; "
    "submit such runs one by one"
)
"""Why an element cannot be in the job array of the first one."""


def _split(values: str) -> list[str]:
    parts, depth, quote, current = list[str](), 0, "", ""
    for letter in values:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "\"'":
            quote = letter
        depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(letter, 0) if not quote else 0
        if letter == "," and not depth and not quote:
            parts.append(current)
            current = ""
        else:
            current += letter
    return [*parts, current]


def _seeds(text: str) -> list[int]:
    try:
        if ":" in text:
            first, last = (int(part) for part in text.split(":"))
            seeds = list(range(first, last))
        else:
            seeds = [int(part) for part in text.split(",")]
    except ValueError:
        seeds = []
    if not seeds:
        raise ConfigError(
            f"--seeds {text!r}: expected a list such as 1,2,3 or a range such as 0:4 (the end is left out)"
        )
    return seeds


def _lines(file: Path) -> list[list[str]]:
    try:
        text = utf8(file.read_bytes())
    except (OSError, NotUtf8Error) as error:
        raise ConfigError(f"--sweep-file {file}: cannot be read: {error}") from None
    found, problems = [], []
    for number, line in enumerate(text.splitlines(), 1):
        try:
            words = shlex.split(line, comments=True)
        except ValueError as error:
            problems.append(f"{file}:{number}: {error}; words are quoted as in a shell")
            continue
        problems += [f"{file}:{number}: expected key=value, found {word!r}" for word in words if "=" not in word]
        if words:
            found.append(words)
    if not found and not problems:
        problems.append(f"--sweep-file {file}: expected a line such as trainer.seed=1 for each run, found none")
    if problems:
        raise ConfigError("\n".join(problems))
    return found


def elements(sweeps: Sequence[str], seeds: str | None, file: Path | None = None) -> list[list[str]]:
    """Return the overrides of each element: the product of the lines of `file`, all `key=v1,v2,...` and the seeds.

    Raises:
        ConfigError: a sweep without a value list, a file that cannot be used, seeds that are no numbers, a setting that two of
            them vary.
    """
    axes = [] if file is None else [_lines(file)]
    for sweep in sweeps:
        key, equals, values = sweep.partition("=")
        if not equals or not key or not values:
            raise ConfigError(f"--sweep {sweep!r}: expected key=value1,value2,...")
        axes.append([[f"{key}={value}"] for value in _split(values)])
    if seeds is not None:
        axes.append([[f"trainer.seed={seed}"] for seed in _seeds(seeds)])
    found = [list(itertools.chain(*combination)) for combination in itertools.product(*axes)]
    for element in found:
        keys = [_key(override) for override in element]
        if twice := [key for key in keys if keys.count(key) > 1]:
            raise ConfigError(f"{' '.join(element)}: {twice[0]} is varied twice; vary a setting in one place")
    return found


def load_elements(
    given: Sequence[Path] | Config,
    overrides: Sequence[str],
    varied: Sequence[list[str]],
    check: Callable[[Config, Callable[[str], str | None]], object],
) -> list[Config]:
    """Return the configuration of each element.

    Args:
        given: TOML files, or a configuration.
        varied: the overrides of each element, as `elements` returns them.
        check: looks at what a configuration names, and raises ConfigError or DataError; its second argument says which file and line, or
            override, sets a path.
    """
    configs, found, unknown, kind = dict[int, Config](), dict[str, list[int]](), dict[str, str](), DataError
    problems, files = [], [] if isinstance(given, Config) else given
    for index, element in enumerate(varied):
        own = [*overrides, *element]
        try:
            configs[index] = given.with_overrides(own) if isinstance(given, Config) else Config.from_toml(given, own)
            check(configs[index], partial(source_of, files, own))
        except (ConfigError, DataError) as error:
            if isinstance(error, ConfigError):
                kind = ConfigError
                unknown |= error.unknown
                problems += error.problems
            for line in str(error).splitlines():
                found.setdefault(line, []).append(index)
    misfits = list(_misfits(configs))
    for index, line in misfits:
        found.setdefault(line, []).append(index)
    if found:
        lines = []
        for line, indices in found.items():
            everywhere = len(indices) == len(varied)
            lines += [line] if everywhere else [f"element {i} ({' '.join(varied[i])}): {line}" for i in indices]
        text = "\n".join(lines)
        raise ConfigError(text, unknown, problems) if misfits or kind is ConfigError else DataError(text)
    return list(configs.values())


def require_one_array(configs: Sequence[Config], names: Sequence[str]) -> None:
    """Raise ConfigError where runs cannot be in one job array, or one of them is there twice.

    Args:
        names: of the runs.
    """
    if misfits := [f"{names[index]}: {line}" for index, line in _misfits(dict(enumerate(configs)))]:
        raise ConfigError("\n".join(misfits))


def _misfits(configs: dict[int, Config]) -> Iterator[tuple[int, str]]:
    """Yield the elements that cannot be in one job array with the first one, or that are there already."""
    seen = dict[str, int]()
    first = next(iter(configs.values()), None)
    for index, config in configs.items():
        assert first is not None
        if config.trainer.run_name != first.trainer.run_name:
            yield index, "a sweep cannot vary trainer.run_name: its runs are named by index and values"
        if config.trainer.project_name != first.trainer.project_name:
            yield index, "a sweep cannot vary trainer.project_name: its runs lie side by side"
        if config.slurm != first.slurm or _plans(config) != _plans(first):
            yield index, ONE_SCRIPT
        if (config.trainer.resume_mode == "none") != (first.trainer.resume_mode == "none"):
            yield index, "a sweep cannot vary whether its runs are requeued (trainer.resume_mode=none)"
        other = seen.setdefault(config.to_toml(), index)
        if other != index:
            yield index, f"the same run as element {other}; leave one of them out"


def _plans(config: Config) -> list[list[Node]]:
    """Return the nodes of each layout of a run."""
    layouts = unmeasured_layouts(usable_layouts(all_layouts(config, rank_problems)))
    return [make_plan(config.at(layout.sizes)) for layout in layouts]


def name_after(file: Path, moment: str) -> str:
    """Return the name of a run that has none: of its first file, in the letters of directory names, and of the moment."""
    return f"{_NOT_IN_NAMES.sub('-', file.stem).lstrip('-._')[:_LONGEST_NAME] or 'run'}-{moment}"


def run_names(name: str, varied: Sequence[list[str]]) -> list[str]:
    """Return the name of each run: `name` alone, or with the element's index and its values.

    quickstart.0-lr-1e-6-seed-1: the last part of each setting's name and its value, in the letters of directory names.
    """
    if len(varied) == 1 and not varied[0]:
        return [name]
    shared = set[str]() if len(varied) == 1 else set.intersection(*map(set, varied))
    names = []
    for index, element in enumerate(varied):
        parts = [_part(override) for override in element if override not in shared]
        end = "-".join(["", *parts])[: max(0, _LONGEST_NAME - len(f"{name}.{index}"))]
        names.append(f"{name}.{index}{end.rstrip('.-_')}")
    return names


def _part(override: str) -> str:
    key, value = _key(override).rpartition(".")[2], override.partition("=")[2].rpartition("/")[2]
    words = (_NOT_IN_NAMES.sub("-", word).strip("-.")[:_LONGEST_WORD].rstrip("-.") for word in (key, value))
    return "-".join(word for word in words if word)


def _key(override: str) -> str:
    return override.partition("=")[0].strip()
