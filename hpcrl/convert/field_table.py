"""The settings of verl and of prime-rl: names, defaults and what becomes of each, and what a file of theirs sets.

Their tables `fields.tsv` have one more column than the tables of other sources: `lost`. It marks a setting without a place here that
makes another run if it is not at its default. A setting whose default is a table stands for all names below it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from hpcrl.config.errors import nearest
from hpcrl.config.load import nested
from hpcrl.convert.conversion import Conversion
from hpcrl.convert.mapping import Target, rows, target_of
from hpcrl.convert.source import SourceConfig


@dataclass(frozen=True)
class FieldTable:
    """The settings of a framework.

    Attributes:
        framework: its name, for messages.
        defaults: path of each setting to its default; one that follows another setting has null.
        targets: path of each setting to what becomes of it.
        lost: settings without a place here that make another run if they are not at their defaults.
        renamed: other names, or beginnings of names (ending with a dot), to the present ones; the first that fits counts.
    """

    framework: str
    defaults: Mapping[str, Any]
    targets: Mapping[str, Target]
    lost: frozenset[str]
    renamed: Mapping[str, str]

    @classmethod
    def of(cls, framework: str, name: str, renamed: Mapping[str, str]) -> FieldTable:
        """Return the settings of one of those tables."""
        found = rows(name)
        defaults = {row["path"]: json.loads(row["default"]) for row in found}
        targets = {row["path"]: target_of(row) for row in found}
        return cls(framework, defaults, targets, frozenset(row["path"] for row in found if row["lost"]), renamed)

    @cached_property
    def sections(self) -> set[str]:
        """Paths above those of settings."""
        return {path[:end] for path in self.targets for end, letter in enumerate(path) if letter == "."}

    def present(self, path: str) -> str:
        """Return the present name of a setting that has, or had, another one."""
        if path in self.targets:
            return path
        for old, new in self.renamed.items():
            if path == old or path.startswith(old if old.endswith(".") else old + "."):
                return new + path[len(old) :]
        return path

    def field_of(self, path: str) -> str | None:
        """Return the setting that a path names or lies in; None: there is none."""
        path = self.present(path)
        while path and path not in self.targets:
            path = path.rpartition(".")[0]
            if path in self.targets and self.defaults[path] != {}:
                return None
        return path or None


@dataclass
class TableSource(SourceConfig):
    """A configuration whose settings are those of a table; where one lies in a setting that is a table, it stands in that table.

    Attributes:
        program: the module or file that its command starts; empty where there is none.
    """

    table: ClassVar[FieldTable]

    program: str = ""

    def __getitem__(self, path: str) -> Any:
        return self.given[path] if path in self.given else self.default(path)

    def default(self, path: str) -> Any:
        """Return what counts where a setting is left out."""
        return self.table.defaults[path]

    def field(self, path: str, conversion: Conversion) -> str | None:
        """Return the setting of a name; None: there is none, which is noted."""
        if (name := self.table.field_of(path)) is None:
            near = nearest(self.table.present(path), [*self.table.targets, *sorted(self.table.sections)])
            hint = f"; did you mean {' or '.join(near)}?" if near else ""
            conversion.note("unknown", path, "", f"no setting of {self.table.framework} that is known here{hint}")
        return name

    def take(self, name: str, path: str, value: Any, conversion: Conversion) -> None:
        """Keep the value that `path`, a name of the setting `name` or one below it, has."""
        below = self.table.present(path).removeprefix(name).strip(".")
        if below:
            value = self.given.get(name, {}) | nested({below: value})
        if name in self.given and self.given[name] != value and not below:
            message = f"differs from {self.names[name]}, another name of it; this one counts"
            conversion.note("conflict", path, "", message)
        self.given[name] = value
        self.names.setdefault(name, path)
