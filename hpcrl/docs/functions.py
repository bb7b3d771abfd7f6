"""Reads losses, estimators and rewards from their source: names, own settings, formulas.

From the signatures and docstrings it makes `hpcrl/config/sections/functions.py` and the tables of docs/algorithms.md. The source is
parsed, not imported: it needs torch, and the configuration does not.
"""

from __future__ import annotations

import ast
import json
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from hpcrl.config import setting as declarations
from hpcrl.errors import ConfigError

_PART = re.compile(r"^(Formula|Use|Args|Returns|Raises):\n", re.MULTILINE)
_PLACE = re.compile(r", (section|equation|algorithm)s? [^)]*")
_SOURCE = re.compile(r"arXiv:(\d{4}\.\d{5})|\(([\w -]+), (https?://[^\s)]+)\)")


@dataclass(frozen=True)
class Registry:
    """A dictionary of names to functions.

    Attributes:
        table: comment around its table in docs/algorithms.md; empty where another page describes them.
        module: path of the module below the checkout.
        constant: name of the dictionary there.
        named: name of its copy in hpcrl/config/sections/functions.py.
        setting: field of trainer.algorithm that chooses one of them; empty where none has settings of its own.
    """

    table: str
    module: str
    constant: str
    named: str
    setting: str = ""


REGISTRIES = (
    Registry("losses", "hpcrl/algorithms/losses.py", "POLICY_LOSSES", "POLICY_LOSSES", "policy_loss_type"),
    Registry(
        "estimators", "hpcrl/algorithms/advantages.py", "ESTIMATORS", "ADVANTAGE_ESTIMATORS", "advantage_estimator"
    ),
    Registry("kl estimators", "hpcrl/algorithms/kl.py", "KL_ESTIMATORS", "KL_ESTIMATORS"),
    Registry("", "hpcrl/envs/rewards/weighted.py", "REWARDS", "REWARDS"),
    Registry("group rewards", "hpcrl/envs/rewards/grouped.py", "GROUP_REWARDS", "GROUP_REWARDS"),
)
_COMPARING = ("hpcrl/envs/rewards/weighted.py", "GROUND_TRUTHS")
_OF_IMAGES = "hpcrl/envs/rewards/images.py"


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
    """A loss, an estimator or a reward.

    Attributes:
        module: path of the module that defines it.
        summary: its docstring's first sentence, without "Return".
        source: papers that the docstring names, as links.
        shared: keywords without a default: settings of trainer.algorithm that others may read too.
    """

    name: str
    module: str
    summary: str
    formula: str
    source: str
    use: str
    shared: tuple[str, ...]
    own: tuple[Parameter, ...]

    @property
    def section(self) -> str:
        """The name of the class of its own settings."""
        return "".join(part.capitalize() for part in re.split(r"\W|_", self.name)) + "Config"

    @property
    def settings(self) -> list[str]:
        return [*self.shared, *(each.name for each in self.own)]


def functions(root: Path, registry: Registry) -> list[Function]:
    """Return the functions of a registry."""
    found = []
    for name, value in _entries(root, registry.module, registry.constant).items():
        module, node = _definition(root, registry.module, value)
        found.append(_function(module, name, node))
    return found


def sections(root: Path) -> str:
    """Return the source of hpcrl/config/sections/functions.py."""
    found = {registry: functions(root, registry) for registry in REGISTRIES}
    owners = [(registry.setting, one) for registry, several in found.items() for one in several if one.own]
    named = [_names(registry.named, several) for registry, several in found.items()]
    kinds = [f"KlEstimator = Literal[{_texts(one.name for one in found[REGISTRIES[2]])}]"]
    images = [one.name for one in found[REGISTRIES[3]] if one.module == _OF_IMAGES]
    kinds += [f"COMPARING_REWARDS = ({_texts(_entries(root, *_COMPARING))})", f"IMAGE_REWARDS = ({_texts(images)})"]
    fields = [
        f'    {one.name}: {one.section} = section({one.section}, used_by=chosen("{setting}", "{one.name}"))'
        for setting, one in owners
    ]
    held = "@dataclass(frozen=True, kw_only=True)\nclass FunctionsConfig:\n" + "\n\n".join(fields)
    body = "\n\n\n".join(["\n\n".join([*named, *kinds]), *(_class(one) for _, one in owners), held])
    ranges = sorted(set(re.findall(r"range=([A-Z_]+)", body)))
    return _HEAD.format(names=", ".join([*ranges, "Named", "section", "setting"])) + body + "\n"


def table(found: Sequence[Function], sections_of: Mapping[str, Sequence[str]]) -> str:
    """Return the rows of docs/algorithms.md for some functions.

    Args:
        sections_of: names of functions that have a section in trainer.algorithm to the settings in it.
    """
    lines = ["| name | formula | source | settings | when to use it |", "|---|---|---|---|---|"]
    for one in found:
        own = sections_of.get(one.name, ())
        names = [f"`{one.name}.{name}`" if name in own else f"`{name}`" for name in one.settings]
        cells = [f"`{one.name}`", one.formula, one.source, ", ".join(names), one.use]
        lines.append("|" + "|".join(f" {cell} " if cell else " " for cell in cells) + "|")
    return "\n".join(lines)


_HEAD = """\"\"\"Names of losses, estimators and rewards, and the sections of those that have settings of their own.

Made from hpcrl/algorithms and hpcrl/envs/rewards by `python -m hpcrl.docs.describe`; do not edit.
\"\"\"

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hpcrl.config.conditions import chosen
from hpcrl.config.setting import {names}

# fmt: off

"""


def _entries(root: Path, module: str, constant: str) -> dict[str, str]:
    (entries,) = (
        node.value
        for node in _parsed(root, module)
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == constant and isinstance(node.value, ast.Dict)
    )
    named = zip(entries.keys, entries.values, strict=True)
    return {ast.literal_eval(key): ast.unparse(value) for key, value in named if key}


def _definition(root: Path, module: str, name: str) -> tuple[str, ast.FunctionDef]:
    """Return the definition of a function that a module has or imports, and the path of the module that has it."""
    for node in _parsed(root, module):
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return module, node
        if isinstance(node, ast.ImportFrom) and any(alias.name == name for alias in node.names):
            return _definition(root, f"{(node.module or '').replace('.', '/')}.py", name)
    raise ConfigError(f"{module}: there is no function {name}")


def _parsed(root: Path, module: str) -> list[ast.stmt]:
    return ast.parse((root / module).read_text(encoding="utf-8")).body


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
    return Function(name, path, summary, parts["Formula"], _sources(head), parts["Use"], shared, tuple(own))


def _arguments(text: str) -> dict[str, str]:
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


def _names(constant: str, found: Sequence[Function]) -> str:
    lines = [f"{constant}: dict[str, Named] = {{"]
    lines += [f"    {_text(one.name)}: Named({_text(one.summary)}, ({_texts(one.settings)}))," for one in found]
    return "\n".join([*lines, "}"])


def _class(one: Function) -> str:
    fields = (f'    {each.name}: {each.declaration}\n    """{one.name}: {each.meaning}"""' for each in one.own)
    return f"@dataclass(frozen=True, kw_only=True)\nclass {one.section}:\n" + "\n\n".join(fields)


def _texts(values: Iterable[str]) -> str:
    return " ".join(f"{_text(value)}," for value in values)


def _text(value: str) -> str:
    return json.dumps(value, ensure_ascii=False)
