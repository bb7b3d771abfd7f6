"""Writes what is generated: hpcrl/config/sections/functions.py, docs/config/reference.md, status.md, names.md and hpcrl.schema.json, the tables of
losses, estimators and rewards in docs/algorithms.md, and the counts in README.md.

`python -m hpcrl.docs.describe`, in the checkout.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from hpcrl.config.fields import Setting, leaves, section_settings
from hpcrl.config.root import Config
from hpcrl.config.sections.algorithm import AlgorithmConfig
from hpcrl.config.setting import Unimplemented
from hpcrl.convert import correspondence
from hpcrl.convert.correspondence import SOURCES, fields_of
from hpcrl.convert.mapping import Dropped, Target, To, Translated
from hpcrl.convert.skyrl.fields import SKYRL_DEFAULTS
from hpcrl.docs.explain import about, default_of, theirs, values_of, why_not_skyrls
from hpcrl.docs.functions import REGISTRIES, functions, sections, table
from hpcrl.docs.schema import json_schema
from hpcrl.errors import ConfigError

FUNCTIONS = "hpcrl/config/sections/functions.py"
_MADE = "<!-- made by `python -m hpcrl.docs.describe`; do not edit -->"


def pages(root: Path) -> dict[Path, str]:
    """Return the text of every generated file of the checkout at `root`."""
    readme, algorithms = root / "README.md", root / "docs" / "algorithms.md"
    parts = {
        one.name: [each.name for each in section_settings(one.subsection)]
        for one in section_settings(AlgorithmConfig)
        if one.subsection
    }
    page = algorithms.read_text()
    for registry in filter(lambda one: one.table, REGISTRIES):
        page = _between(page, registry.table, table(functions(root, registry), parts))
    return {
        root / FUNCTIONS: sections(root),
        root / "docs" / "config" / "reference.md": _reference(),
        root / "docs" / "config" / "status.md": _status(),
        root / "docs" / "config" / "names.md": _names_elsewhere(),
        root / "docs" / "config" / "hpcrl.schema.json": json.dumps(json_schema(), indent=1) + "\n",
        algorithms: page,
        readme: _between(readme.read_text(), "counts", _counts()),
    }


def _between(page: str, name: str, text: str) -> str:
    """Return a page with another text between the comments that begin and end a generated part."""
    begin, end = f"<!-- {name} -->\n", f"\n<!-- end of {name} -->"
    before, _, rest = page.partition(begin)
    assert end in rest, f"a page lacks the comments of its generated part, {begin.strip()} and {end.strip()}"
    return f"{before}{begin}{text}{end}{rest.partition(end)[2]}"


def _reference() -> str:
    lines = [
        "# All settings",
        "",
        _MADE,
        "",
        "What files look like, and how they are merged, is in [configuration.md](../configuration.md); what is not implemented yet, and what",
        "became of each field of SkyRL, Cosmos-RL, verl and prime-rl, in [status.md](status.md). A setting marked *not implemented yet* is accepted at its default only",
        "(or at the values named there). `hpcrl config explain PATH` prints the same.",
    ]
    return "\n".join([*lines, *_tables(Config, "")]) + "\n"


def _names_elsewhere() -> str:
    sources = ("SkyRL", "verl", "prime-rl")
    lines = [
        "# Names of settings in other frameworks", "", _MADE, "",
        "Settings that TRL, or transformers' trainer, has too. Values and units may differ: `hpcrl config explain PATH` has the meaning,",
        "`hpcrl config search WORD` finds more. Words that differ are in [words.md](../words.md).", "",
        f"| hpcrl | TRL | {' | '.join(sources)} |", "|---|---|" + "---|" * len(sources),
    ]  # fmt: skip
    for setting in leaves(Config):
        if own := theirs(setting):
            fields = fields_of(setting.path)
            names = [own, *(fields.get(source, []) for source in sources)]
            lines.append(f"| `{setting.path}` | " + " | ".join(", ".join(map(_code, found)) for found in names) + " |")
    return "\n".join(lines) + "\n"


def _tables(section: type, path: str) -> Iterator[str]:
    held = section_settings(section, path + "." if path else "")
    rows = [_row(setting) for setting in held if not setting.subsection]
    if path:
        yield from ("", f"{'##' if '.' not in path else '###'} {path}")
        if "." not in path:
            yield from ("", about(section)[:1].upper() + about(section)[1:])
    if rows:
        yield from ("", "| setting | value | default | meaning | elsewhere |", "|---|---|---|---|---|", *rows)
    for setting in held:
        if inner := setting.subsection or setting.entry:
            yield from _tables(inner, setting.path + ("" if setting.subsection else ".NAME"))


def _row(setting: Setting) -> str:
    missing = setting.facts.unimplemented
    meaning = setting.meaning + (f" *Not implemented yet ({missing.feature}).*" if missing else "")
    theirs = "; ".join(f"{source} {_names(found, setting.path)}" for source, found in fields_of(setting.path).items())
    cells = [_code(setting.name), values_of(setting), _default(setting), meaning, theirs]
    return "| " + " | ".join(map(_cell, cells)) + " |"


def _names(found: Sequence[str], own: str) -> str:
    return ", ".join("the same" if name == own else _code(name) for name in found)


def _status() -> str:
    lines = ["# What works, what is not implemented yet, what is not supported", "", _MADE, "", *_count_table(), ""]
    lines += [
        "## Settings that are not implemented yet",
        "",
        "They are accepted at their defaults, and at the values in parentheses, only.",
        "",
    ]
    lines += ["| feature | settings |", "|---|---|", *_unimplemented_rows(), ""]
    lines += ["## Defaults that differ from SkyRL's", "", "| setting | here | SkyRL | why |", "|---|---|---|---|"]
    lines += [_differing(setting) for setting in leaves(Config) if why_not_skyrls(setting)]
    for source, targets in SOURCES.items():
        lines += ["", f"## Fields of {source}", "", f"| {source} | state | here |", "|---|---|---|"]
        lines += [_field(name, target) for name, target in targets.items()]
    return "\n".join(lines) + "\n"


def _differing(setting: Setting) -> str:
    theirs = [name for name in fields_of(setting.path).get("SkyRL", []) if name in SKYRL_DEFAULTS]
    default = _code(json.dumps(SKYRL_DEFAULTS[theirs[0]])) if theirs else ""
    return f"| `{setting.path}` | {_default(setting)} | {_cell(default)} | {_cell(why_not_skyrls(setting))} |"


def _unimplemented_rows() -> Iterator[str]:
    features: dict[str, list[str]] = {}
    for setting in leaves(Config):
        if missing := setting.facts.unimplemented:
            features.setdefault(missing.feature, []).append(_with_supported(setting, missing))
    for feature in sorted(features, key=str.lower):
        yield f"| {feature} | {', '.join(features[feature])} |"


def _with_supported(setting: Setting, missing: Unimplemented) -> str:
    return _code(setting.path) + (f" ({', '.join(map(_code, map(str, missing.works)))})" if missing.works else "")


def _field(name: str, target: Target) -> str:
    state = correspondence.state_of(target)
    if isinstance(target, Dropped):
        here = target.reason
    elif isinstance(target, Translated):
        here = f"{', '.join(map(_code, target.paths))}: {target.how}"
    else:
        values = ", ".join(f"`{json.dumps(theirs)}` is `{json.dumps(ours)}`" for theirs, ours in target.values.items())
        here = _code(target.path) + (f" ({values})" if values else "")
        here = "the same" if target == To(name) else here
    return f"| `{name}` | {state} | {_cell(here)} |"


def _count_table() -> Iterator[str]:
    yield from ("| | fields | work | not implemented yet | not supported |", "|---|---|---|---|---|")
    for name, count in _tallies().items():
        own = "" if name == "hpcrl" else count["not supported"]
        yield f"| {name} | {count.total()} | {count['works']} | {count['not implemented yet']} | {own} |"


def _tallies() -> dict[str, Counter[str]]:
    """Return how many fields of each source, and how many settings here, are in each state."""
    tallies = {
        source: Counter(correspondence.state_of(target) for target in targets.values())
        for source, targets in SOURCES.items()
    }
    return tallies | {
        "hpcrl": Counter(
            "not implemented yet" if setting.facts.unimplemented else "works" for setting in leaves(Config)
        )
    }


def _counts() -> str:
    tallies = _tallies()
    others = ", ".join(
        f"{count['works']} of {source}'s {count.total()}" for source, count in tallies.items() if source != "hpcrl"
    )
    own = tallies["hpcrl"]
    return (
        f"Of hpcrl's {own.total()} settings, {own['works']} work and {own['not implemented yet']} are not implemented yet. Fields of others "
        f"that work: {others}; [each of them](docs/config/status.md)."
    )


def _default(setting: Setting) -> str:
    unset = setting.required or setting.default is None
    return default_of(setting) if unset else _code(default_of(setting))


def _code(text: str) -> str:
    return f"`{text}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def main(root: Path) -> None:
    """Write what has changed, then begin again where settings are among it, which this process has read already."""
    stale = {path: text for path, text in pages(root).items() if not path.is_file() or path.read_text() != text}
    for path, text in stale.items():
        path.write_text(text)
        print(path.relative_to(root))
    if root / FUNCTIONS in stale:
        os.execv(sys.executable, [sys.executable, "-m", "hpcrl.docs.describe"])
    print(_counts())


if __name__ == "__main__":
    try:
        main(Path.cwd())
    except ConfigError as error:  # of a loss's docstring
        sys.exit(str(error))
