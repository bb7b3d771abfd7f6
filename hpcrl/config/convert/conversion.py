"""The result of a conversion: hpcrl's TOML, and a report of what became of each setting of the source."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from hpcrl.config.difference import value_as_toml
from hpcrl.config.load import nested
from hpcrl.config.root import Config
from hpcrl.config.status import Wait, wait_of
from hpcrl.config.surface import Setting, leaves, settings
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
        for setting, value in self._changed():
            if wait := self._waits_for(setting, value):
                self.note("waits", setting.path, "", f"{value_as_toml(value)} is not available yet ({wait.feature})")
        active = {s.path: value for s, value in self._changed() if not self._waits_for(s, value)}
        try:
            Config.from_dict(nested(active))
        except ConfigError as error:
            for line in str(error).splitlines():
                path, _, message = line.partition(": ")
                self.note("conflict", path, "", message)

    def to_toml(self) -> str:
        """Return TOML with the settings that differ from the defaults; those that wait are comments, each in its table."""
        tables: dict[str, list[str]] = {}
        for setting, value in self._changed():
            line = f"{setting.name} = {value_as_toml(value)}"
            if wait := self._waits_for(setting, value):
                line = f"# {line}  # not available yet: {wait.feature}"
            tables.setdefault(setting.path.rpartition(".")[0], []).append(line)
        parts = [f"# converted by `hpcrl config convert` from {self.origin}"]
        for table in ["", *(setting.path for setting in settings(Config) if setting.subsection)]:
            if table in tables:
                parts.append("\n".join([f"[{table}]", *tables[table]] if table else tables[table]))
        return "\n\n".join(parts) + "\n"

    def _changed(self) -> list[tuple[Setting, Any]]:
        """Return the settings that are not at their defaults, in the order of the tree."""
        tree = nested(self.values)
        found = ((setting, _at(tree, setting.path)) for setting in leaves(Config))
        return [(setting, value) for setting, value in found if value is not None and not setting.is_default(value)]

    @staticmethod
    def _waits_for(setting: Setting, value: Any) -> Wait | None:
        wait = wait_of(setting.path)
        return None if wait is None or value in wait.works else wait


def _at(tree: Any, path: str) -> Any:
    for name in path.split("."):
        tree = tree.get(name) if isinstance(tree, dict) else None
    return tree
