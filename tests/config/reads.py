"""Which settings hpcrl/ and jobs/ read.

An attribute counts as read where what stands before the dot is a section: a name, a field or a result that is annotated with its
class, a section in such a one, or a name that was given one. `vars(section)`, `fields(Section)` and `getattr(section, name)`, with the
texts of the function, read several. Sections of one class, such as those of policy and reference, are not told apart.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from hpcrl.algorithms.advantages import ESTIMATORS
from hpcrl.algorithms.losses import POLICY_LOSSES
from hpcrl.config.fields import Setting, section_settings, settings
from hpcrl.config.root import Config
from hpcrl.config.sections.algorithm import AlgorithmConfig

Names = frozenset[str]
Read = tuple[str, str]

_SECTIONS: dict[str, type] = {
    base.__name__: base
    for kind in (Config, *(setting.subsection for setting in settings(Config)))
    for base in (kind.__mro__[:-1] if kind else ())
}
_HELD = {(name, held.name): held for name, kind in _SECTIONS.items() for held in section_settings(kind)}
_NONE: Names = frozenset()
_ROUNDS = 3  # a name may be given what a later line, or another module, declares


def is_read(setting: Setting, found: set[Read]) -> bool:
    """Return whether a setting is among those that were found, by the name of its section's class or of one above it."""
    return any((kind.__name__, setting.name) in found for kind in setting.section.__mro__)


def read_in(sources: Iterable[str]) -> set[Read]:
    """Return the settings that modules read: the name of the section's class, and their own."""
    trees, modules = [ast.parse(source) for source in sources], _Modules()
    for tree in trees:
        modules.declare(tree)
    for _ in range(_ROUNDS):
        for tree in trees:
            modules.function(tree, {})
    return modules.found


def read_by_name() -> set[Read]:
    """Return the settings that losses and estimators get by the names of their parameters (hpcrl/algorithms/settings.py)."""
    found: set[Read] = set()
    parts = {held.name: held.subsection.__name__ for held in section_settings(AlgorithmConfig) if held.subsection}
    for name, function in {**POLICY_LOSSES, **ESTIMATORS}.items():
        for parameter in inspect.signature(function).parameters:
            found |= {("AlgorithmConfig", parameter), (parts.get(name, ""), parameter)}
    return found


@dataclass(frozen=True)
class _Body:
    """A function, a lambda or a module, without the functions in it.

    Attributes:
        assigned: targets with their values.
        reading: attributes and calls.
        texts: its constants.
        inner: the functions in it, each with the section that it is a method of.
    """

    assigned: list[tuple[ast.AST, ast.AST]]
    reading: list[ast.AST]
    texts: set[Any]
    inner: list[tuple[ast.AST, Names]]

    @classmethod
    def of(cls, body: ast.AST) -> _Body:
        nodes, inner = list[ast.AST](), list[tuple[ast.AST, Names]]()
        _own_nodes(body, nodes, inner)
        return cls(
            [pair for node in nodes for pair in _assigned(node)],
            [node for node in nodes if isinstance(node, ast.Attribute | ast.Call)],
            {node.value for node in nodes if isinstance(node, ast.Constant)},
            inner,
        )


class _Modules:
    """What modules declare, and the settings that they read.

    Attributes:
        fields: names of attributes to the sections that they may hold, whosever they are.
        results: names of functions to the sections that they may return.
        properties: the same of properties.
    """

    def __init__(self) -> None:
        self.fields: dict[str, Names] = {}
        self.results: dict[str, Names] = {}
        self.properties: dict[str, Names] = {}
        self.found: set[Read] = set()
        self._bodies: dict[ast.AST, _Body] = {}

    def declare(self, tree: ast.AST) -> None:
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                _add(self.results, node.name, _named(node.returns))
                if any(isinstance(one, ast.Name) and one.id == "property" for one in node.decorator_list):
                    _add(self.properties, node.name, _named(node.returns))
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name | ast.Attribute):
                target = node.target.id if isinstance(node.target, ast.Name) else node.target.attr
                _add(self.fields, target, _named(node.annotation))

    def function(self, body: ast.AST, around: dict[str, Names], owner: Names = _NONE) -> None:
        """Look at a function, a lambda or a module, and at what is defined in it; `owner`: the section that it is a method of."""
        names = dict(around)
        if isinstance(body, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            for parameter in (*body.args.posonlyargs, *body.args.args, *body.args.kwonlyargs):
                names[parameter.arg] = owner if parameter.arg == "self" else _named(parameter.annotation)
        if (own := self._bodies.get(body)) is None:  # each is looked at in every round
            own = self._bodies[body] = _Body.of(body)
        for _ in range(_ROUNDS):
            for target, value in own.assigned:
                held = self._sections(value, names)
                if isinstance(target, ast.Name):
                    _add(names, target.id, held)
                elif isinstance(target, ast.Attribute):
                    _add(self.fields, target.attr, held)
        for node in own.reading:
            self._read(node, names, own.texts)
        for function, of in own.inner:
            self.function(function, names, of)

    def _read(self, node: ast.AST, names: dict[str, Names], texts: set[Any]) -> None:
        match node:
            case ast.Attribute(ctx=ast.Load()):
                self.found |= {(section, node.attr) for section in self._sections(node.value, names)}
            case ast.Call(func=ast.Name(id="getattr"), args=[of, *_]):
                self.found |= {(section, text) for section in self._sections(of, names) for text in texts}
            case ast.Call(func=ast.Name(id="vars"), args=[of]):
                self._all(self._sections(of, names))
            case ast.Call(func=ast.Name(id="fields"), args=[ast.Name(id=section)]):
                self._all({section})

    def _all(self, sections: Iterable[str]) -> None:
        self.found |= {held for held in _HELD if held[0] in sections}

    def _sections(self, node: ast.AST, names: dict[str, Names]) -> Names:
        """Return the names of the sections that an expression may be."""
        match node:
            case ast.Name():
                return names.get(node.id, _NONE)
            case ast.Attribute():
                before = self._sections(node.value, names)
                held = [_HELD.get((section, node.attr)) for section in before]
                return frozenset(one.subsection.__name__ for one in held if one and one.subsection) or (
                    (self.properties if before else self.fields).get(node.attr, _NONE)
                )
            case ast.Call(func=ast.Name(id="replace"), args=[of]):
                return self._sections(of, names)
            case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)):
                return frozenset({"Config"}) if name == "from_toml" else self.results.get(name, _NONE)
            case ast.Subscript() | ast.NamedExpr():
                return self._sections(node.value, names)
            case ast.IfExp():
                return self._sections(node.body, names) | self._sections(node.orelse, names)
            case ast.BoolOp():
                return _NONE.union(*(self._sections(value, names) for value in node.values))
        return _NONE


def _add(table: dict[str, Names], name: str, sections: Names) -> None:
    table[name] = table.get(name, _NONE) | sections


def _named(annotation: ast.AST | None) -> Names:
    nodes = ast.walk(annotation) if annotation else ()
    return frozenset(node.id for node in nodes if isinstance(node, ast.Name) and node.id in _SECTIONS)


def _own_nodes(body: ast.AST, nodes: list[ast.AST], inner: list[tuple[ast.AST, Names]]) -> None:
    owner = frozenset({body.name} & _SECTIONS.keys()) if isinstance(body, ast.ClassDef) else _NONE
    for node in ast.iter_child_nodes(body):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            inner.append((node, owner))
        else:
            nodes.append(node)
            _own_nodes(node, nodes, inner)


def _assigned(node: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
    """Yield what is given a value, with the value, or with what holds it."""
    match node:
        case ast.Assign(targets=[ast.Tuple(elts=targets)], value=ast.Tuple(elts=values)):
            yield from zip(targets, values, strict=False)
        case ast.Assign(targets=[target], value=value) | ast.NamedExpr(target=target, value=value):
            yield target, value
        case ast.For(target=target, iter=values) | ast.comprehension(target=target, iter=values):
            yield from ((target, value) for value in getattr(values, "elts", [values]))
