"""Finds the SkyRL command in a shell script, with its words as the shell would expand them.

The script is followed, never run: variables, arrays, `${NAME:-value}`, `$((...))`, conditions, loops and functions are evaluated as far
as they depend on nothing but the script. What only a run could tell, such as `$(date)` or a file that may exist, stays marked in the
words; a variable that the script never sets counts as not set where the script has a value for that case.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from hpcrl.convert.skyrl.shell.lexer import NotUnderstood
from hpcrl.convert.skyrl.shell.run import follow
from hpcrl.convert.skyrl.shell.state import shown, unknown_parts
from hpcrl.errors import ConfigError

_OVERRIDE = re.compile(r"[+~]*[a-z_]\w*(\.[\w.]+)+=.*", re.DOTALL)
_NAMED = re.compile(r"[+~]*([A-Za-z_][\w.]*)=")
_HOME = ("$HOME", "${HOME}")


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
    """

    words: list[str]
    unknown: dict[str, list[str]]
    condition: str
    others: list[str]
    assumed: list[str]
    unread: list[str]


def command_of(text: str, origin: str) -> Command:
    """Return the first command in a script that has overrides, and what else the script does with them.

    Raises:
        ConfigError: there is none, or the script is not understood; names why.
    """
    try:
        script = follow(text)
    except NotUnderstood as error:
        line = text.split("\n")[error.line - 1].strip()
        raise ConfigError(f"{origin}:{error.line}: not a shell script that can be read: {error}: {line:.100}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{origin}: not a shell script that can be read: {error}") from None
    found = [one for one in script.started if any(_OVERRIDE.fullmatch(word) for word in one.words)]
    if not found:
        raise ConfigError(f"{origin}: no SkyRL command; expected words such as trainer.epochs=2")
    words, unknown = _known(found[0].words)
    others = [shown(word) for one in found[1:] for word in one.words if _OVERRIDE.fullmatch(word)]
    return Command(words, unknown, found[0].condition, others, sorted(script.assumed), script.unread)


def _known(words: list[str]) -> tuple[list[str], dict[str, list[str]]]:
    """Return the words that are known, and by name or as a whole those that are not; the last word of a name counts."""
    known: dict[str, str] = {}
    unknown: dict[str, list[str]] = {}
    for place, word in enumerate(words):
        named = _NAMED.match(word)
        waits_for = [part for part in unknown_parts(word) if part not in _HOME]
        key = named[1] if named and "." in named[1] else f" {place}"
        known.pop(key, None)
        unknown.pop(key, None)
        if waits_for:
            unknown[key if named else shown(word)] = waits_for
        else:
            known[key] = shown(word)
    return list(known.values()), unknown
