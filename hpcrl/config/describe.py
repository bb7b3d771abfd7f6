"""The table of all settings in docs/configuration.md, made from the dataclasses.

`python -m hpcrl.config.describe docs/configuration.md` writes it anew between its two marks.
"""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

import tomli_w

from hpcrl.config.root import Config
from hpcrl.config.surface import Setting, settings

BEGIN = "<!-- settings: made by `python -m hpcrl.config.describe docs/configuration.md` -->"
END = "<!-- end of settings -->"


def meanings(section: type) -> dict[str, str]:
    """Return the text below each field of a section's source, where there is one."""
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(section))).body
    assert isinstance(definition, ast.ClassDef)
    found: dict[str, str] = {}
    for field, below in zip(definition.body, definition.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(below, ast.Expr):
            found[field.target.id] = ast.literal_eval(below.value)
    return found


def table() -> str:
    """Return one Markdown table per top-level section, with a row for each setting."""
    parts: list[str] = []
    for setting in settings(Config):
        if "." not in setting.path:
            parts.append(f"\n### {setting.path}\n\n| setting | value | default | meaning |\n|---|---|---|---|")
        elif not setting.is_section or setting.optional:
            meaning = meanings(setting.section)[setting.name]
            parts.append(f"| `{setting.path}` | {_values(setting)} | {_default(setting)} | {meaning} |")
    return "\n".join(parts).strip()


def _values(setting: Setting) -> str:
    return setting.expects().removeprefix("one of ") + (" (location)" if setting.location else "")


def _default(setting: Setting) -> str:
    if setting.required:
        return "required"
    if setting.default is None or is_dataclass(setting.default):
        return "unset"
    return f"`{_toml(setting.default)}`"


def _toml(value: Any) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    return "{}" if value == {} else tomli_w.dumps({"value": value}).removeprefix("value = ").strip()


def replace_table(page: str) -> str:
    """Return the page with the table between its marks made anew."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{table()}\n\n{END}{after}"


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(replace_table(path.read_text()))
