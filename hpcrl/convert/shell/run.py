"""Goes through a shell script without running anything: which commands it would start, with which words.

Conditions are decided where their values are known. Where they are not, all ways are followed: a way that ends in `exit` starts
nothing, and what the others leave different is not known afterwards.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from types import MappingProxyType

from hpcrl.convert.shell import conditions
from hpcrl.convert.shell.grammar import (
    AndOr,
    Array,
    Case,
    Commands,
    For,
    If,
    Node,
    ShellFunction,
    ShellGroup,
    ShellPipeline,
    Simple,
    Test,
    While,
    assignment,
    parse,
    plain,
)
from hpcrl.convert.shell.lexer import Word
from hpcrl.convert.shell.state import State, is_known, shown

_DECLARING = {"export", "declare", "local", "readonly", "typeset"}
_ASSIGNING = {"read", "let", "mapfile", "getopts"}
_SILENT = {"echo", "printf", "cat", "mkdir"}
_READS_OTHERS = {"source", ".", "eval"}
_DEEPEST = 20
_MOST_ROUNDS = 100
_CHANGED = re.compile(r"([A-Za-z_]\w*)\s*(?:\+\+|--|[-+*/%]?=(?!=))")


@dataclass(frozen=True)
class Started:
    """A command that a script starts.

    Attributes:
        words: expanded, with marks where a part is known only when the script runs.
        condition: what decides whether it is started; empty where it always is.
        environment: variables that the script exports to it.
    """

    words: list[str]
    condition: str
    environment: Mapping[str, str]


@dataclass
class Script:
    """What a script does, as far as that is known without running it.

    Attributes:
        started: the commands in their order.
        assumed: variables of the environment that count as not set, because the script has a value for that case.
        unread: commands that may set variables and are not followed.
    """

    started: list[Started] = field(default_factory=list)
    assumed: set[str] = field(default_factory=set)
    unread: list[str] = field(default_factory=list)


def follow(text: str, environment: Mapping[str, str] = MappingProxyType({}), arguments: Sequence[str] = ()) -> Script:
    """Return what a script starts.

    Args:
        environment: variables that are set when it begins; others count as not set.
        arguments: of the script.

    Raises:
        NotUnderstood: it is no shell script, or has what is not understood.
        ValueError: what stands inside ${...} is not understood.
    """
    runner = _Runner(Script())
    state = State(dict(environment), arguments=list(arguments), assumed=runner.script.assumed)
    state.exported |= set(environment)
    runner.sequence(parse(text.replace("\ue000", "").replace("\ue001", "")), state)
    return runner.script


class _Runner:
    def __init__(self, script: Script) -> None:
        self.script, self.conditions = script, list[str]()
        self.functions: dict[str, Node] = {}
        self.depth = 0

    def sequence(self, commands: Commands, state: State) -> bool | None:
        """Run commands until one ends; return whether the last succeeded, None where that is not known."""
        status: bool | None = True
        for command in commands:
            if not state.ended:
                status = self.run(command, state)
        return status

    def run(self, node: Node, state: State) -> bool | None:
        return {
            Simple: self._simple, Array: self._array, Test: self._test, ShellPipeline: self._pipeline, AndOr: self._and_or, If: self._if,
            For: self._for, While: self._while, Case: self._case, ShellGroup: self._group, ShellFunction: self._define,
        }[type(node)](node, state)  # fmt: skip

    def _fork(self, condition: str, ways: list[Callable[[State], bool | None]], state: State) -> None:
        """Follow several ways, of which it is not known which the script takes."""
        states = [state.branch() for _ in ways]
        self.conditions.append(condition)
        for way, other in zip(ways, states, strict=True):
            way(other)
        self.conditions.pop()
        state.become(states)

    def _define(self, node: ShellFunction, state: State) -> bool | None:  # noqa: ARG002 - as every kind of command
        self.functions[node.name] = node.body
        return True

    def _group(self, node: ShellGroup, state: State) -> bool | None:
        return self.sequence(node.body, state.branch() if node.subshell else state)

    def _pipeline(self, node: ShellPipeline, state: State) -> bool | None:
        alone = len(node.commands) == 1
        status = [self.run(command, state if alone else state.branch()) for command in node.commands][-1]
        return None if status is None else status != node.negated

    def _and_or(self, node: AndOr, state: State) -> bool | None:
        status = self.run(node.first, state)
        label = node.first.source if isinstance(node.first, Simple | Test) else "what stands before it"
        for operator, command in node.rest:
            if state.ended:
                break
            if status is None:
                # a command after && that is not reached leaves nothing to convert; one after || is an alternative
                self._fork(
                    "" if operator == "&&" else f"not {label}",
                    [lambda way, it=command: self.run(it, way), lambda _: None],
                    state,
                )
            elif status == (operator == "&&"):
                status = self.run(command, state)
        return status

    def _if(self, node: If, state: State, first: int = 0) -> bool | None:
        for place in range(first, len(node.branches)):
            condition, body = node.branches[place]
            status = self.sequence(condition, state) if condition else True
            if state.ended or status:
                return self.sequence(body, state)
            if status is None:
                ways = [lambda way: self.sequence(body, way), lambda way: self._if(node, way, place + 1)]  # noqa: B023 - run at once
                self._fork(node.source, ways, state)
                return None
        return True

    def _for(self, node: For, state: State) -> bool | None:
        values = None if node.words is None else state.fields(node.words)
        if values is None or len(values) > _MOST_ROUNDS or not all(map(is_known, values)):
            return self._some_rounds(f"a loop over {node.name}", [node.name], node.body, state)
        for value in values:
            if not state.ended:
                state.assign(node.name, value)
                self.sequence(node.body, state)
        return True

    def _while(self, node: While, state: State) -> bool | None:
        if self.sequence(node.condition, state) is node.until:
            return True
        return self._some_rounds("a loop", [], node.body, state)

    def _some_rounds(self, label: str, names: list[str], body: Commands, state: State) -> None:
        """Follow one round of a loop whose number of rounds is not known."""

        def once(way: State) -> bool | None:
            for name in names:
                way.forget(name)
            return self.sequence(body, way)

        self._fork(label, [once, lambda _: None], state)

    def _case(self, node: Case, state: State) -> bool | None:
        text = state.text(node.word, assume=True)
        patterns = [[state.pattern(word) for word in words] for words, _ in node.branches]
        if not is_known(text + "".join(pattern for some in patterns for pattern in some)):
            ways = [lambda way, it=body: self.sequence(it, way) for _, body in node.branches]
            self._fork(node.source, [*ways, lambda _: None], state)
            return None
        for some, (_, body) in zip(patterns, node.branches, strict=True):
            if any(fnmatchcase(text, pattern) for pattern in some):
                return self.sequence(body, state)
        return True

    def _test(self, node: Test, state: State) -> bool | None:
        if len(node.tokens) == 1 and node.tokens[0].operator == "((":
            expression = node.tokens[0].word[0].text
            for name in _CHANGED.findall(expression):
                state.forget(name)
            return conditions.arithmetic(expression, state)
        return conditions.double_bracket(node.tokens, state)

    def _array(self, node: Array, state: State) -> bool | None:
        items = state.fields(node.words)
        before = state.arrays.get(node.name, [] if node.name not in state.variables else [state.variables[node.name]])
        state.variables.pop(node.name, None)
        state.arrays[node.name] = [*(before if node.append else []), *items]
        return True

    def _simple(self, node: Simple, state: State) -> bool | None:
        first = next((place for place, word in enumerate(node.words) if not assignment(word)[0]), len(node.words))
        own, words = node.words[:first], node.words[first:]
        if not words:
            for word in own:
                name, value, append = assignment(word)
                state.assign(name, state.text(value), append)
            return True
        name = plain(words[0]) or ""
        if name in _DECLARING:
            if any(not assignment(word)[0] and plain(word) is None for word in words[1:]):
                self.script.unread.append(node.source)  # export $(cat .env)
            self._declare(words[1:], state, name == "export")
            return True
        if name in ("[", "test"):
            texts = state.fields(words[1:], assume=True)
            return conditions.bracket(texts[:-1] if name == "[" else texts)
        if name in _READS_OTHERS:
            self.script.unread.append(node.source)
            return None
        return self._command(own, state.fields(words), state)

    def _command(self, own: tuple[Word, ...], texts: list[str], state: State) -> bool | None:
        name, *arguments = texts or [""]
        if name == "set" and "--" in arguments:
            state.arguments = arguments[arguments.index("--") + 1 :]
        if name in ("true", ":", "set", "false", ""):
            return name != "false"
        if name in ("exit", "return"):
            state.ended = name
        elif name == "unset":
            for variable in arguments:
                state.variables.pop(variable, None)
                state.arrays.pop(variable, None)
        elif name in ("cd", "pushd"):
            state.change_directory()
        elif name == "shift":
            state.arguments = state.arguments[1:]
        elif name in _ASSIGNING or (name == "printf" and "-v" in arguments):
            for variable in (shown(argument).partition("=")[0] for argument in arguments):
                if variable.isidentifier():
                    state.forget(variable)
        elif name in self.functions and self.depth < _DEEPEST:
            return self._call(self.functions[name], arguments, state)
        elif name not in _SILENT:
            set_for_it = [f"{assignment(word)[0]}={state.text(assignment(word)[1])}" for word in own]
            condition = next((one for one in reversed(self.conditions) if one), "")
            exported = {name: text for name, text in state.variables.items() if name in state.exported}
            self.script.started.append(Started([*set_for_it, *texts], condition, exported))
        return None

    def _declare(self, words: tuple[Word, ...], state: State, exported: bool) -> None:
        for word in words:
            name, value, append = assignment(word)
            if exported and (variable := name or plain(word)):
                state.exported.add(variable)
            if name and "-i" in map(plain, words):
                state.forget(name)  # a sum
            elif name:
                state.assign(name, state.text(value), append)

    def _call(self, body: Node, arguments: list[str], state: State) -> bool | None:
        before, state.arguments = state.arguments, arguments
        self.depth += 1
        status = self.run(body, state)
        self.depth -= 1
        state.arguments = before
        state.ended = "" if state.ended == "return" else state.ended
        return status
