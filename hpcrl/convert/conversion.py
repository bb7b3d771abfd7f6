"""The result of a conversion: hpcrl's TOML, and a report of what became of each setting of the source."""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal, get_args

import tomli_w

from hpcrl.config.difference import as_yaml, value_as_toml
from hpcrl.config.errors import Problem
from hpcrl.config.fields import Setting, leaves, settings
from hpcrl.config.load import nested
from hpcrl.config.rules.combinations import impossible
from hpcrl.config.rules.unused_settings import not_switched_on
from hpcrl.config.sections.tree import ConfigTree
from hpcrl.config.setting import Unimplemented
from hpcrl.config.validate import UNCONVERTED, build
from hpcrl.convert.mapping import Target, To
from hpcrl.errors import ConfigError

Kind = Literal["mapped", "dropped", "translated", "differs", "unimplemented", "unknown", "conflict"]
_INCOMPLETE: tuple[Kind, ...] = ("unimplemented", "unknown", "conflict")
_VARIABLE = re.compile(r"\$\{?[A-Za-z_]")
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9._-]+")
_HOME = re.compile(r"^(?:\$HOME|\$\{HOME\})(?=/|$)")
_ROOTS = ("slurm.checkpoint_root", "slurm.export_root")
_MOST_NAMED = 4
_WIDTH = 140


@dataclass(frozen=True)
class Entry:
    """What became of one setting.

    Attributes:
        kind: mapped (as it was, perhaps under another name), translated (written in another way), dropped (not supported, or without
            effect) or unimplemented (yet). Also differs (a number comes out otherwise than in the source's run), unknown (the source does
            not know it either) or conflict (something is wrong with it).
        source: dotted path in the source.
        target: dotted path here; empty where there is none.
        message: why, and what to do.
    """

    kind: Kind
    source: str
    target: str
    message: str = ""

    def __str__(self) -> str:
        return self.of([self.source], 1)

    def of(self, sources: list[str], most: int) -> str:
        """Return the line for several settings that have the same target and message; it names the first `most`."""
        more = len(sources) - most
        names = ", ".join(sources[:most]) + (f" and {more} more" if more > 0 else "")
        arrow = "" if self.target in ("", names) else f" -> {self.target}"
        return f"{self.kind:13} {names}{arrow}" + (f": {self.message}" if self.message else "")


@dataclass
class Conversion:
    """Filled by one of the converters.

    Attributes:
        origin: what was converted, for the first line of the TOML.
        values: dotted paths here to values, unimplemented ones included.
        entries: the report, in the order of the source.
        unconverted: settings of the source, or what else it has, to why the file cannot say it; where there is one, it is refused.
        ignores_unknown: whether the source's program ignores what it does not know, so that nothing is lost with it.
    """

    origin: str
    values: dict[str, Any] = field(default_factory=dict)
    entries: list[Entry] = field(default_factory=list)
    unconverted: dict[str, str] = field(default_factory=dict)
    ignores_unknown: bool = False

    def note(self, kind: Kind, source: str, target: str = "", message: str = "") -> None:
        self.entries.append(Entry(kind, source, target, message))

    def note_unread(self, source: str, target: Target, reason: str) -> None:
        """Note a setting whose value cannot be read. A root of checkpoints or exports is left out: they lie in the run directory then."""
        left_out = isinstance(target, To) and target.path in _ROOTS
        self.note("dropped" if left_out else "conflict", source, "", reason)

    @property
    def incomplete(self) -> bool:
        """Whether the TOML lacks something that the source has."""
        return any(entry.kind in _INCOMPLETE for entry in self.entries)

    def finish(self) -> None:
        """Note what is not implemented yet, and everything that is wrong with the result or missing in it."""
        self._settle_roots()
        self._drop_idle()
        changed = self._changed()
        for setting, value in changed:
            if missing := self._unimplemented(setting, value):
                self.note("unimplemented", setting.path, "", f"not implemented yet ({missing.feature})")
            if setting.location:
                self._check_location(setting.path, value)
        problems = _problems({setting.path: value for setting, value in changed})
        refused, reported = {problem.path for problem in problems}, set[str]()
        for entry in self.entries:
            if entry.kind == "conflict":
                reported.add(entry.target)
            lost = entry.kind == "conflict" or (entry.kind == "unknown" and not self.ignores_unknown)
            if lost and entry.target not in refused:
                before = self.unconverted.get(entry.source)
                self.unconverted[entry.source] = f"{before}; {entry.message}" if before else entry.message
        for problem in problems:
            if problem.path not in reported:
                self.note("conflict", problem.path, "", problem.message)

    def _settle_roots(self) -> None:
        """Begin relative roots of checkpoints and exports with ./, and leave out what is no directory: these then lie in the run directory."""
        for path in _ROOTS:
            value = self.values.get(path)
            if not isinstance(value, str):
                continue
            if "://" in value or _VARIABLE.search(value):
                del self.values[path]
                what = "a store; trainer.upload copies to one" if "://" in value else "a variable of the shell"
                self.note(
                    "dropped", path, "", f"{value} names {what}; name a directory, else the run directory has all"
                )
            elif not value.startswith(("/", "~/", "./", "../")):
                self.values[path] = f"./{value}"

    def _drop_idle(self) -> None:
        """Leave out what another setting would have to switch on; the source did nothing with it either."""
        for problem in _idle(self.values):
            self.values.pop(problem.path, None)
            found = [entry for entry in self.entries if entry.target == problem.path]
            for entry in found:
                message = problem.message.partition(";")[0]
                self.entries[self.entries.index(entry)] = Entry("dropped", entry.source, "", message)

    def _check_location(self, path: str, value: Any) -> None:
        for item in value if isinstance(value, list) else [value]:
            shown = value_as_toml(item)
            if not isinstance(item, str):
                continue  # a wrong type, which the check of the whole finds
            if _VARIABLE.search(item):
                message = f"{shown} names a variable of the shell, which hpcrl does not resolve; write it out"
                self.note("conflict", path, "", message)

    def report(self, every: bool = False) -> str:
        """Return what became of the settings, a line each, and how many there are of each kind.

        Args:
            every: a line for each setting, in the order of the source. Otherwise unchanged settings are left out, settings with the
                same message share a line, and what needs attention comes last.
        """
        lines = [str(entry) for entry in self.entries] if every else self._remarks(_MOST_NAMED)
        return "\n".join([*lines, self._counts()]) + "\n"

    def _remarks(self, most: int) -> list[str]:
        """Return a line for all settings that have become of the same kind with the same message; it names the first `most`."""
        kinds: tuple[Kind, ...] = get_args(Kind)
        alike: dict[tuple[Kind, str, str], list[Entry]] = {}
        for entry in self.entries:
            if entry.kind != "mapped" or entry.message:
                alike.setdefault((entry.kind, entry.target, entry.message), []).append(entry)
        ordered = sorted(alike.values(), key=lambda entries: kinds.index(entries[0].kind))
        return [entries[0].of([entry.source for entry in entries], most) for entries in ordered]

    def _counts(self) -> str:
        kinds: tuple[Kind, ...] = get_args(Kind)
        count = Counter(entry.kind for entry in self.entries)
        return ", ".join(f"{count[kind]} {kind}" for kind in kinds if count[kind])

    def to_toml(self) -> str:
        """Return TOML with the settings that differ from the defaults.

        A comment at its top says what became of everything that is not as it was. What is not implemented yet is written as it is, so
        that the file is refused, and what no setting can say stands in a table that is refused.
        """
        tables: dict[str, list[str]] = {}
        for setting, value in self._changed():
            line = f"{setting.name} = {value_as_toml(value)}"
            tables.setdefault(setting.path.rpartition(".")[0], []).append(line)
        parts = [self._header(), *(["\n".join(tables.pop(""))] if "" in tables else [])]
        if self.unconverted:
            parts.append(tomli_w.dumps({UNCONVERTED: self.unconverted}).rstrip("\n"))
        for table in (setting.path for setting in settings(ConfigTree) if setting.subsection):
            if table in tables:
                parts.append("\n".join([f"[{table}]", *tables[table]]))
        return "\n\n".join(parts) + "\n"

    def to_yaml(self) -> str:
        """Return what `to_toml` has, as YAML."""
        kept = {setting.path: value for setting, value in self._changed()}
        refused = {UNCONVERTED: self.unconverted} if self.unconverted else {}
        return f"{self._header()}\n{as_yaml(refused | nested(kept))}"

    def _header(self) -> str:
        lines = [f"converted by `hpcrl config convert` from {self.origin}"]
        if remarks := self._remarks(len(self.entries)):
            lines += [f"{self._counts()}; what is mapped without a remark is not listed", *remarks]
        printable = ("".join(letter if letter.isprintable() else " " for letter in line) for line in lines)
        comment = {"initial_indent": "# ", "subsequent_indent": "#" + " " * 15, "break_on_hyphens": False}
        return "\n".join(
            wrapped
            for line in printable
            for wrapped in textwrap.wrap(line, _WIDTH, break_long_words=False, **comment)  # type: ignore[arg-type]
        )

    def _changed(self) -> list[tuple[Setting, Any]]:
        """Return the settings that are not at their defaults, in the order of the tree."""
        tree = nested(self.values)
        found = ((setting, _at(tree, setting.path)) for setting in leaves(ConfigTree))
        return [(setting, value) for setting, value in found if value is not None and not setting.is_default(value)]

    @staticmethod
    def _unimplemented(setting: Setting, value: Any) -> Unimplemented | None:
        missing = setting.facts.unimplemented
        return None if missing is None or value in missing.works else missing


@cache
def known() -> dict[str, Setting]:
    """Return the settings and sections here, by dotted path."""
    return {setting.path: setting for setting in settings(ConfigTree)}


def directory_name(text: str) -> str | None:
    """Return a name of a project or a run that resembles a text, or None where nothing of it can be in one."""
    return _NOT_IN_NAMES.sub("-", text).strip("-._") or None


def location(value: Any) -> Any:
    """Return a path or paths in which a leading $HOME has become ~, which hpcrl resolves on the machine that reads it."""
    if isinstance(value, list):
        return [location(item) for item in value]
    return _HOME.sub("~", value, count=1) if isinstance(value, str) else value


def _idle(values: dict[str, Any]) -> list[Problem]:
    """Return what has no effect among settings; nothing where they are no configuration, which is reported elsewhere."""
    required = {"data.train_data": ["t"], "trainer.policy.model.path": "m"}
    try:
        return list(not_switched_on(build(ConfigTree, nested(values | required))))
    except ConfigError:
        return []


def _problems(values: dict[str, Any]) -> list[Problem]:
    """Return what is wrong with settings, unimplemented ones included."""
    try:
        return impossible(build(ConfigTree, nested(values)))
    except ConfigError as error:
        found = (line.partition(": ") for line in str(error).splitlines())
        return [Problem(path, message) for path, _, message in found]


def _at(tree: Any, path: str) -> Any:
    for name in path.split("."):
        tree = tree.get(name) if isinstance(tree, dict) else None
    return tree
