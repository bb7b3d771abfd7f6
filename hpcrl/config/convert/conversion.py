"""The result of a conversion: hpcrl's TOML, and a report of what became of each setting of the source."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import tomli_w

from hpcrl.config.load import nested
from hpcrl.config.root import Config
from hpcrl.config.status import wait_of
from hpcrl.config.surface import settings
from hpcrl.errors import ConfigError

Kind = Literal["mapped", "translated", "dropped", "waits", "unknown", "conflict"]
_INCOMPLETE: tuple[Kind, ...] = ("waits", "unknown", "conflict")


@dataclass(frozen=True)
class Entry:
    """What became of one setting.

    Attributes:
        kind: mapped (the same value, perhaps under another name), translated (another value), dropped (has no place here), waits
            (for a feature that is still to be built), unknown (the source does not know it either), conflict (it contradicts another).
        source: dotted path in the source.
        target: dotted path here; empty where there is none.
        message: why, and what to do.
    """

    kind: Kind
    source: str
    target: str
    message: str = ""

    def __str__(self) -> str:
        names = self.source if self.target in ("", self.source) else f"{self.source} -> {self.target}"
        return f"{self.kind:10} {names}" + (f": {self.message}" if self.message else "")


@dataclass
class Conversion:
    """Filled by one of the converters.

    Attributes:
        origin: what was converted, for the first line of the TOML.
        values: dotted paths here to values, those that wait included.
        entries: the report, in the order of the source.
    """

    origin: str
    values: dict[str, Any] = field(default_factory=dict)
    entries: list[Entry] = field(default_factory=list)

    def note(self, kind: Kind, source: str, target: str = "", message: str = "") -> None:
        self.entries.append(Entry(kind, source, target, message))

    @property
    def incomplete(self) -> bool:
        """Whether the TOML does not say all that the source said."""
        return any(entry.kind in _INCOMPLETE for entry in self.entries)

    def finish(self) -> None:
        """Note what waits, and everything that is wrong with the result or missing in it."""
        for path, value, feature in self._waiting():
            self.note("waits", path, "", f"{path} = {value!r} is not available yet ({feature}); a comment in the TOML")
        try:
            Config.from_dict(nested(self._active()))
        except ConfigError as error:
            for line in str(error).splitlines():
                path, _, message = line.partition(": ")
                self.note("conflict", path, "", message)

    def to_toml(self) -> str:
        """Return TOML with the settings that differ from the defaults; those that wait are comments at its end."""
        lines = [f"# converted by `hpcrl config convert` from {self.origin}", ""]
        lines += [tomli_w.dumps(nested(self._active()))]
        lines += [
            f"# not available yet ({feature}): {_assignment(path, value)}" for path, value, feature in self._waiting()
        ]
        return "\n".join(lines).rstrip() + "\n"

    def _active(self) -> dict[str, Any]:
        waiting = {path for path, _, _ in self._waiting()}
        known = {setting.path: setting for setting in settings(Config)}
        return {
            path: value
            for path, value in self.values.items()
            if path not in waiting and value is not None and not (path in known and known[path].default == value)
        }

    def _waiting(self) -> Iterator[tuple[str, Any, str]]:
        known = {setting.path: setting for setting in settings(Config)}
        for path, value in self.values.items():
            wait = wait_of(path)
            if wait and value is not None and value != known[path].default and value not in wait.works:
                yield path, value, wait.feature


def _assignment(path: str, value: Any) -> str:
    text = tomli_w.dumps({"value": value}) if not isinstance(value, dict) else f"value = {value!r}"
    return path + text.removeprefix("value").replace("\n", " ").rstrip()
