"""Losses and advantage estimators as their source declares them: names, own settings, formulas.

From the signatures and docstrings it makes `hpcrl/config/sections/functions.py` and the tables of docs/algorithms.md. The source is
parsed, not imported: it needs torch, and the configuration does not.
"""

from __future__ import annotations

import ast
import json
import re
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from hpcrl.config import setting as declarations
from hpcrl.errors import ConfigError

LOSSES, ESTIMATORS = ("hpcrl/algorithms/losses.py", "POLICY_LOSSES"), ("hpcrl/algorithms/advantages.py", "ESTIMATORS")
_PART = re.compile(r"^(Formula|Use|Args|Returns):\n", re.MULTILINE)
_PLACE = re.compile(r", (section|equation|algorithm)s? [^)]*")
_SOURCE = re.compile(r"arXiv:(\d{4}\.\d{5})|(\w[\w ]*), (https?://[^\s)]+)")


@dataclass(frozen=True)
class Parameter:
    """A setting of one function alone: a keyword with a default.

    Attributes:
        declaration: type, default and range, as the line of a section has them.
    """

    name: str
    declaration: str
    meaning: str


@dataclass(frozen=True)
class Function:
    """A loss or an estimator.

    Attributes:
        summary: its docstring's first sentence, without "Return".
        source: papers that the docstring names, as links.
        shared: keywords without a default: settings of trainer.algorithm that others may read too.
    """

    name: str
    summary: str
    formula: str
    source: str
    use: str
    shared: tuple[str, ...]
    own: tuple[Parameter, ...]


def functions(root: Path, where: tuple[str, str]) -> list[Function]:
    """Return the functions of a registry, a dictionary of names to functions of its module.

    Args:
        where: path of the module below `root`, and name of the registry.

    Raises:
        ConfigError: a docstring lacks a part; names the function and what is expected.
    """
    path, registry = where
    tree = ast.parse((root / path).read_text(encoding="utf-8"))
    defined = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    (entries,) = (
        node.value
        for node in tree.body
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == registry and isinstance(node.value, ast.Dict)
    )
    named = zip(entries.keys, entries.values, strict=True)
    return [_function(path, ast.literal_eval(key), defined[ast.unparse(value)]) for key, value in named if key]


def sections(root: Path) -> str:
    """Return the source of hpcrl/config/sections/functions.py."""
    losses, estimators = functions(root, LOSSES), functions(root, ESTIMATORS)
    owners = [("policy_loss_type", one) for one in losses if one.own]
    owners += [("advantage_estimator", one) for one in estimators if one.own]
    fields = [
        f'    {one.name}: {_class_name(one)} = section({_class_name(one)}, used_by=chosen("{setting}", "{one.name}"))'
        for setting, one in owners
    ]
    held = "@dataclass(frozen=True, kw_only=True)\nclass FunctionsConfig:\n" + "\n\n".join(fields)
    tables = [_names("POLICY_LOSSES", losses) + "\n\n" + _names("ADVANTAGE_ESTIMATORS", estimators)]
    body = "\n\n\n".join([*tables, *(_class(one) for _, one in owners), held])
    ranges = sorted(set(re.findall(r"range=([A-Z_]+)", body)))
    typing = "from typing import Literal\n" if "Literal[" in body else ""
    return _HEAD.format(typing=typing, names=", ".join([*ranges, "Named", "section", "setting"])) + body + "\n"


def table(found: list[Function], sections_of: dict[str, list[str]]) -> str:
    """Return the rows of docs/algorithms.md for some functions.

    Args:
        sections_of: names of functions that have a section in trainer.algorithm to the settings in it.
    """
    lines = ["| name | formula | source | settings | when to use it |", "|---|---|---|---|---|"]
    for one in found:
        own = sections_of.get(one.name, [])
        names = [
            f"{one.name}.{name}" if name in own else name for name in (*one.shared, *(each.name for each in one.own))
        ]
        cells = [f"`{one.name}`", one.formula, one.source, ", ".join(f"`{name}`" for name in names), one.use]
        lines.append("|" + "|".join(f" {cell} " if cell else " " for cell in cells) + "|")
    return "\n".join(lines)


_HEAD = """\"\"\"Names and settings of policy losses and advantage estimators, and the sections of those that have settings of their own.

Made from hpcrl/algorithms by `python -m hpcrl.config.docs.describe`; do not edit.
\"\"\"

from __future__ import annotations

from dataclasses import dataclass
{typing}
from hpcrl.config.conditions import chosen
from hpcrl.config.setting import {names}

# fmt: off

"""


def _function(path: str, name: str, node: ast.FunctionDef) -> Function:
    where = f"{path}: {node.name}"
    head, *rest = _PART.split(ast.get_docstring(node) or "")
    parts = {part: " ".join(text.split()) for part, text in zip(rest[::2], rest[1::2], strict=True)}
    if not head.startswith("Return ") or not {"Formula", "Use"} <= parts.keys():
        raise ConfigError(f'{where}: its docstring must begin with "Return" and have the parts "Formula:" and "Use:"')
    meanings = _arguments(rest[rest.index("Args") + 1] if "Args" in rest else "")
    keywords = list(zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True))
    own = [
        Parameter(argument.arg, _declaration(where, argument, default), meanings.get(argument.arg, ""))
        for argument, default in keywords
        if default is not None
    ]
    for one in own:
        if not one.meaning:
            raise ConfigError(f"{where}: its setting {one.name} has no meaning; add a line to Args in the docstring")
    summary = _PLACE.sub("", " ".join(head.partition("\n\n")[0].split()).removeprefix("Return ").removesuffix("."))
    shared = tuple(argument.arg for argument, default in keywords if default is None)
    return Function(name, summary, parts["Formula"], _sources(head), parts["Use"], shared, tuple(own))


def _arguments(text: str) -> dict[str, str]:
    """Return the meanings of an Args part, each on one line."""
    found = re.split(r"^    (\w+): ", textwrap.indent(textwrap.dedent(text), "    "), flags=re.MULTILINE)
    return {name: " ".join(meaning.split()) for name, meaning in zip(found[1::2], found[2::2], strict=True)}


def _declaration(where: str, argument: ast.arg, default: ast.expr) -> str:
    """Return `type = default` of a keyword, or `type = setting(default, range=...)` where its type is one of setting.py's."""
    if argument.annotation is None:
        raise ConfigError(f"{where}: its setting {argument.arg} has no type")
    kind, value = (ast.unparse(node).replace("'", '"') for node in (argument.annotation, default))
    alias = getattr(declarations, kind, None)
    if alias is None:
        return f"{kind} = {value}"
    base, _ = get_args(alias)
    constant = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", kind).upper()
    return f"{base.__name__} = setting({value}, range={constant})"


def _sources(text: str) -> str:
    links = [
        f"[{paper}](https://arxiv.org/abs/{paper})" if paper else f"[{name}]({address})"
        for paper, name, address in _SOURCE.findall(text)
    ]
    return ", ".join(dict.fromkeys(links))


def _names(constant: str, found: list[Function]) -> str:
    lines = [f"{constant}: dict[str, Named] = {{"]
    for one in found:
        settings = " ".join(f"{_text(name)}," for name in (*one.shared, *(each.name for each in one.own)))
        lines.append(f"    {_text(one.name)}: Named({_text(one.summary)}, ({settings})),")
    return "\n".join([*lines, "}"])


def _text(value: str) -> str:
    return json.dumps(value, ensure_ascii=False)


def _class_name(one: Function) -> str:
    return "".join(part.capitalize() for part in re.split(r"\W|_", one.name)) + "Config"


def _class(one: Function) -> str:
    fields = (f'    {each.name}: {each.declaration}\n    """{one.name}: {each.meaning}"""' for each in one.own)
    return f"@dataclass(frozen=True, kw_only=True)\nclass {_class_name(one)}:\n" + "\n\n".join(fields)
