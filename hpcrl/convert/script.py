"""Finds the training command in a shell script, with its words as the shell would expand them.

The script is followed, never run: variables, arrays, `${NAME:-value}`, `$((...))`, conditions, loops and functions are evaluated as far
as they depend on nothing but the script. What only a run could tell, such as `$(date)` or a file that may exist, stays marked in the
words. A variable that the script never sets counts as not set where the script has a value for that case.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

from hpcrl.convert.conversion import Conversion
from hpcrl.convert.program import program_of
from hpcrl.convert.sbatch import job_variables
from hpcrl.convert.shell.lexer import NotUnderstood
from hpcrl.convert.shell.run import Script, follow
from hpcrl.convert.shell.state import in_directory, is_known, replaced_unknown, shown, unknown_parts
from hpcrl.convert.source import SourceConfig
from hpcrl.errors import ConfigError

_OVERRIDE = re.compile(r"[+~]*[a-z_]\w*(\.[\w.]+)+=.*", re.DOTALL)
_NAMED = re.compile(r"[+~]*([A-Za-z_][\w.]*)=")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_HOME = ("$HOME", "${HOME}")
_DEEPEST = 8
_NOT_FOLLOWED = {
    r"\s*(declare|local|typeset|readonly)\s+-\w*A": "associative arrays are not followed",
}


FieldOf = Callable[[str], str | None]
Wanted = Callable[[Sequence[str]], bool]


@dataclass(frozen=True)
class Command:
    """The command of a script that has overrides such as trainer.epochs=2.

    Attributes:
        words: its words, expanded; those that are known only when the script runs are left out.
        unknown: names of overrides whose value is known only then, each with the expansions that it waits for; and whole words.
        condition: what decides whether it is started; empty where it always is.
        others: overrides of further commands of the script.
        assumed: variables of the environment that count as not set, because the script has a value for that case.
        unread: commands that may set variables and are not followed.
        followed: the scripts that were followed from one to the next, the first one left out.
        batch: the text whose `#SBATCH` lines count.
        directory: the current one, where it takes the place of $PWD in words; else empty.
    """

    words: list[str]
    unknown: dict[str, list[str]]
    condition: str
    others: list[str]
    assumed: list[str]
    unread: list[str]
    followed: tuple[str, ...] = ()
    batch: str = ""
    directory: str = ""


def has_overrides(words: Sequence[str]) -> bool:
    """Return whether a command has overrides such as trainer.epochs=2."""
    return any(map(_OVERRIDE.fullmatch, words))


def command_of(
    text: str, origin: str, wanted: Wanted = has_overrides, environment: Mapping[str, str] = MappingProxyType({})
) -> Command:
    """Return the first command in a script that has overrides, and what else the script does with them.

    A script that the script starts, and that lies beside it or where it is named, is followed where no other command has overrides.

    Args:
        wanted: whether the words of a command are those of a training program, where it has no such overrides.
        environment: variables that are set when the script begins, beside those that Slurm sets for its `#SBATCH` lines.

    Raises:
        ConfigError: there is none, or the script is not understood; names why.
    """
    return _command_of(text, origin, wanted, {**job_variables(text), **environment}, (), 0)


def _command_of(
    text: str, origin: str, wanted: Wanted, environment: Mapping[str, str], arguments: Sequence[str], depth: int
) -> Command:
    script = _followed(text, origin, environment, arguments)
    calls = [(one, at) for one in script.started if (at := _script_among(one.words)) is not None]
    scripts = [one for one, _ in calls]
    found = [one for one in script.started if one not in scripts and wanted(one.words)]
    if found:
        words, directory = _in_this_directory(found[0].words)
        words, unknown = _known(words)
        others = [shown(word) for one in found[1:] for word in one.words if _OVERRIDE.fullmatch(word)]
        assumed = sorted(script.assumed)
        return Command(
            words, unknown, found[0].condition, others, assumed, script.unread, batch=text, directory=directory
        )
    missing, refused = [], list[ConfigError]()
    for one, at in calls:
        path = _beside(one.words[at], origin)
        if path is None or depth == _DEEPEST:
            missing.append((one, shown(one.words[at])))
            continue
        own = [match for word in one.words[:at] if (match := _ASSIGNMENT.fullmatch(word))]
        given = {**one.environment, **{match[1]: match[2] for match in own}}
        other = path.read_text(encoding="utf-8", errors="replace")
        try:
            inner = _command_of(other, str(path), wanted, given, one.words[at + 1 :], depth + 1)
        except ConfigError as error:  # of a script that prepares data, and trains nothing
            refused.append(error)
            continue
        return replace(
            inner,
            condition=inner.condition or one.condition,
            assumed=sorted({*script.assumed, *inner.assumed}),
            unread=[*script.unread, *inner.unread],
            followed=(str(path), *inner.followed),
            batch=text if "\n#SBATCH" in text else inner.batch,
        )
    for one, _ in missing:
        if wanted(one.words):
            words, unknown = _known(one.words)
            return Command(words, unknown, one.condition, [], sorted(script.assumed), script.unread, batch=text)
    if refused:
        raise refused[0]
    if missing:
        raise ConfigError(
            f"{origin}: starts {missing[0][1]}, which is not there to be followed; convert that script, or put it beside this one"
        )
    raise ConfigError(f"{origin}: no command with settings; expected words such as trainer.epochs=2")


def note_command(
    command: Command, source: SourceConfig, conversion: Conversion, field_of: FieldOf, names: Container[str]
) -> None:
    """Note what of a script is not in its command's words, and in `source` the settings whose value only the script's run knows.

    Args:
        field_of: the setting of a name that the command uses; None: there is none.
        names: settings that name projects and runs, which hpcrl names itself where they are left out.
    """
    for path in command.followed:
        conversion.note("translated", path, "", "the script that is started there is followed")
    if command.condition:
        message = "decides whether the command is started at all; convert what you want to run"
        conversion.note("conflict", command.condition, "", message)
    for word in command.others:
        conversion.note("conflict", word, "", "belongs to another command of the script, which is not converted")
    for name in command.assumed:
        message = "as where the environment does not set it: what the script has for that case counts"
        conversion.note("translated", f"${name}", "", message)
    if command.directory:
        message = f"the current directory, {command.directory}: where the script is started elsewhere, convert it there"
        conversion.note("translated", "$PWD", "", message)
    for line in command.unread:
        conversion.note("dropped", line, "", "is not run here; what it sets counts as not set")
    for name, waits_for in command.unknown.items():
        reason = f"{', '.join(dict.fromkeys(waits_for))} is known only where the script runs; write the value out"
        found = field_of(name)
        if found is not None and found in names:
            message = f"{reason}, or leave it to hpcrl, which names projects and runs itself"
            conversion.note("translated", name, "", message)
        elif found is not None:
            source.lack(found, name, reason)
        elif name.startswith("--config-"):
            conversion.note("conflict", name, "", f"{reason}; the settings of that file count too")
        elif not name.startswith("-"):
            conversion.note("unknown", name, "", reason)


def _followed(text: str, origin: str, environment: Mapping[str, str], arguments: Sequence[str]) -> Script:
    try:
        return follow(text, environment, arguments)
    except NotUnderstood as error:
        line = text.split("\n")[error.line - 1].strip()
        why = next((why for pattern, why in _NOT_FOLLOWED.items() if re.match(pattern, line)), str(error))
        kind = "cannot be followed" if why != str(error) else "not a shell script that can be read"
        raise ConfigError(f"{origin}:{error.line}: {kind}: {why}: {line:.100}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{origin}: not a shell script that can be read: {error}") from None


def _script_among(words: Sequence[str]) -> int | None:
    """Return the place of the script that a command starts among its words; None: it starts something else."""
    known = [replaced_unknown(word, "...") for word in words]
    name = program_of(known).name
    return known.index(name) if name.endswith(".sh") else None


def _beside(name: str, origin: str) -> Path | None:
    """Return the script of a name, of which the folder may be known only when the other script runs; None: it is not there."""
    folder = Path(origin).parent
    candidates = [folder / shown(name).rpartition("/")[2]]
    if is_known(name):
        candidates = [folder / name, Path(name).expanduser(), *candidates]
    return next((path for path in candidates if path.is_file() and path != Path(origin)), None)


def _in_this_directory(words: Sequence[str]) -> tuple[list[str], str]:
    """Return words with the current directory in place of $PWD, and that directory, or an empty text where none has it.

    Variables of the command's environment, such as PYTHONPATH, stay as they are.
    """
    directory = str(Path.cwd())
    variables = [word for word in words if (named := _NAMED.match(word)) and named[1].isupper()]
    found = [word if word in variables else in_directory(word, directory) for word in words]
    return found, directory if found != list(words) else ""


def _known(words: list[str]) -> tuple[list[str], dict[str, list[str]]]:
    """Return the words that are known, and by name or as a whole those that are not; the last word of a name counts.

    What stands before the program, such as the node that srun is given, is no setting of it.
    """
    known: dict[str, str] = {}
    unknown: dict[str, list[str]] = {}
    program = program_of(words).name
    start = words.index(program) if program else 0
    for place, word in enumerate(words):
        named = _NAMED.match(word)
        waits_for = [part for part in unknown_parts(word) if part not in _HOME]
        key = named[1] if named and not named[1].isupper() else f" {place}"
        known.pop(key, None)
        unknown.pop(key, None)
        if waits_for and place < start and not named:
            continue
        if waits_for:
            unknown[key if named else shown(word)] = waits_for
        else:
            known[key] = shown(word)
    return list(known.values()), unknown
