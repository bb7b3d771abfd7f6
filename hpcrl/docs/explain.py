"""Describes a setting, for `hpcrl config explain` and for the generated pages of docs/config."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Iterator, Sequence

from hpcrl.config.difference import value_as_toml
from hpcrl.config.errors import nearest, unknown
from hpcrl.config.fields import Setting, leaves, section_settings, settings
from hpcrl.config.root import Config
from hpcrl.convert.correspondence import SOURCES, TRL, fields_of, paths_of
from hpcrl.convert.mapping import Dropped, Target, To, Translated
from hpcrl.errors import ConfigError, similar

_WIDTH = 100


def explain(name: str, cls: type[Config] = Config) -> str:
    """Describe a setting, a section, or a field of SkyRL, Cosmos-RL, verl or prime-rl.

    Args:
        name: dotted path; empty: the whole configuration.

    Raises:
        ConfigError: there is nothing of this name; names the nearest.
    """
    known = {setting.path: setting for setting in settings(cls)}
    if not name:
        return _section(cls, "")
    own = _own(name, known)
    if own and own.subsection:
        return _section(own.subsection, own.path)
    if own:
        return _setting(own)
    sources = {**SOURCES, "TRL": {word: To(path) for word, path in TRL.items()}}
    found = [_field(source, name, targets[name], known) for source, targets in sources.items() if name in targets]
    found = found or [_their_section(source, name) for source in SOURCES if _below(source, name)]
    if not found:
        raise ConfigError(f"{name}: {_nearest(name, known)}")
    return "\n".join(found)


def search(words: Sequence[str]) -> list[Setting]:
    """Return the settings with all these words in their path, in a name that another framework has for them, or in their meaning.

    Those whose path has them come first, then those of another name.
    """
    ranked = list[tuple[int, Setting]]()
    for setting in leaves(Config):
        names = " ".join([*theirs(setting), *(name for fields in fields_of(setting.path).values() for name in fields)])
        texts = (setting.path, f"{setting.path} {names}", f"{setting.path} {names} {setting.meaning}")
        rank = next((at for at, text in enumerate(texts) if all(word.lower() in text.lower() for word in words)), None)
        if rank is not None:
            ranked.append((rank, setting))
    return [setting for _, setting in sorted(ranked, key=lambda one: one[0])]


def theirs(setting: Setting) -> list[str]:
    """Return the arguments of TRL that are this setting."""
    return [name for name, path in TRL.items() if path == setting.path]


def values_of(setting: Setting) -> str:
    """Return which values a setting takes, and in which range."""
    allowed = setting.facts.range
    return setting.expects() + (f", {allowed}" if allowed else "") + (" (location)" if setting.location else "")


def default_of(setting: Setting) -> str:
    return "required" if setting.required else value_as_toml(setting.default)


def state_of(setting: Setting) -> str:
    """Return whether a setting works, or what is not implemented yet and which values work already."""
    missing = setting.facts.unimplemented
    if missing is None:
        return "works"
    working = [default_of(setting), *map(value_as_toml, missing.works)]
    return f"not implemented yet ({missing.feature}); supported: {' or '.join(working)}"


def why_not_skyrls(setting: Setting) -> str:
    """Return why the default is another one than SkyRL's; empty where it is the same, or SkyRL has no such setting."""
    return setting.facts.why if "SkyRL" in fields_of(setting.path) else ""


def about(section: type) -> str:
    """Return the description of a top-level section, from its module."""
    first = (inspect.getdoc(inspect.getmodule(section)) or "").partition("\n")[0]
    return first.partition(": ")[2] if first.startswith("Section") else ""


def _own(name: str, known: dict[str, Setting]) -> Setting | None:
    path = name
    while path and path not in known:
        path = path.rpartition(".")[0]
    return known[path] if path == name or (path and known[path].is_free) else None


def _setting(setting: Setting) -> str:
    facts = {"value": values_of(setting), "default": default_of(setting), "state": state_of(setting)}
    if reason := why_not_skyrls(setting):
        facts["why"] = f"this default is not SkyRL's: {reason}"
    facts |= {source: ", ".join(fields) for source, fields in fields_of(setting.path).items()}
    lines = [setting.path, *_filled(setting.meaning, "  "), ""]
    for name, fact in facts.items():
        lines += _filled(fact, f"  {name:10} ")
    if setting.entry:
        lines += ["", *_held(setting.entry, "")]
    return "\n".join(lines) + "\n"


def _section(section: type, path: str) -> str:
    text = about(section) if path and "." not in path else ""
    title = (path or "the whole configuration") + (f": {text}" if text else "")
    return "\n".join([title, "", *_held(section, path)]) + "\n"


def _held(section: type, path: str) -> Iterator[str]:
    for setting in section_settings(section, path + "." if path else ""):
        if setting.subsection:
            yield f"  {setting.name}.*: {len(section_settings(setting.subsection))} settings and sections"
        else:
            mark = "" if setting.facts.unimplemented is None else "  (not implemented yet)"
            yield from (f"  {setting.name} = {default_of(setting)}{mark}", *_filled(setting.meaning, "      "))


def _field(source: str, name: str, target: Target, known: dict[str, Setting]) -> str:
    if isinstance(target, Dropped):
        return "\n".join([f"{name} is a field of {source} that is not supported", *_filled(target.reason, "  "), ""])
    how = target.how if isinstance(target, Translated) else ""
    lines = [f"{name} is a field of {source}; here: {', '.join(paths_of(target))}", *_filled(how, "  "), ""]
    return "\n".join(
        lines + [_setting(own) for path in paths_of(target) if (own := _own(path, known)) and not own.subsection]
    )


def _below(source: str, section: str) -> list[str]:
    return [field for field in SOURCES[source] if field.startswith(section + ".")]


def _their_section(source: str, name: str) -> str:
    lines = [f"{name} is a section of {source}; its fields, and what they are here:"]
    for field in _below(source, name):
        lines.append(f"  {field}: {', '.join(paths_of(SOURCES[source][field])) or 'not supported'}")
    return "\n".join(lines) + "\n"


def _nearest(name: str, known: dict[str, Setting]) -> str:
    theirs = {field: source for source, targets in SOURCES.items() for field in targets}
    close = similar(name, theirs, 2, 0.85)
    own = nearest(name, list(known))
    near = [*own, *(f"{field} ({theirs[field]})" for field in close if field not in known)]
    found = (
        f"no such setting; did you mean {' or '.join(near)}?" if near else unknown(name, list(known.values())).message
    )
    if "." in name or not (count := len(search([name]))):
        return found
    return f"{found if near else 'no such setting;'} hpcrl config search {name} lists {count} with that word"


def _filled(text: str, lead: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, initial_indent=lead, subsequent_indent=" " * len(lead), break_on_hyphens=False)
