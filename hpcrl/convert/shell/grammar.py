"""The tokens of a shell script as a tree of commands."""

from __future__ import annotations

from dataclasses import dataclass

from hpcrl.convert.shell.lexer import NotUnderstood, Piece, Token, Word, tokens

_ENDS = {"then", "elif", "else", "fi", "do", "done", "esac", "}", ")", ";;"}
_DECLARING = {"declare", "local", "export", "readonly", "typeset"}


@dataclass(frozen=True)
class Simple:
    """Words of one command, or assignments alone."""

    words: tuple[Word, ...]
    source: str


@dataclass(frozen=True)
class Array:
    """NAME=(words) or NAME+=(words)."""

    name: str
    append: bool
    words: tuple[Word, ...]


@dataclass(frozen=True)
class Test:
    """[[ ... ]], or ((...)) where the only token is that."""

    tokens: tuple[Token, ...]
    source: str


@dataclass(frozen=True)
class ShellPipeline:
    """Commands, each in a shell of its own where there are several."""

    commands: tuple[Node, ...]
    negated: bool


@dataclass(frozen=True)
class AndOr:
    """The first command, and others, each after && or ||."""

    first: Node
    rest: tuple[tuple[str, Node], ...]


@dataclass(frozen=True)
class If:
    """Conditions with what follows each; the last condition of else is empty."""

    branches: tuple[tuple[Commands, Commands], ...]
    source: str


@dataclass(frozen=True)
class For:
    """A loop over words; None: over the arguments, counted as in C, or left early."""

    name: str
    words: tuple[Word, ...] | None
    body: Commands


@dataclass(frozen=True)
class While:
    """A loop with a condition; `until` turns it around."""

    condition: Commands
    body: Commands
    until: bool


@dataclass(frozen=True)
class Case:
    """Patterns of a word, and what follows each."""

    word: Word
    branches: tuple[tuple[tuple[Word, ...], Commands], ...]
    source: str


@dataclass(frozen=True)
class ShellGroup:
    """{ ... }, or ( ... ) with variables of its own."""

    body: Commands
    subshell: bool


@dataclass(frozen=True)
class ShellFunction:
    """The definition of a function."""

    name: str
    body: Node


Node = Simple | Array | Test | ShellPipeline | AndOr | If | For | While | Case | ShellGroup | ShellFunction
Commands = tuple[Node, ...]


def parse(text: str) -> Commands:
    """Return the commands of a script, in their order.

    Raises:
        NotUnderstood: it is no shell script, or uses what is not understood here.
    """
    parser = _Parser(tokens(text))
    found = parser.sequence()
    if parser.place < len(parser.tokens):
        raise parser.unexpected(f"{parser.tokens[parser.place].source!r} was not expected there")
    return found


def plain(word: Word) -> str | None:
    """Return a word that is one unquoted text, such as one of the shell's own words; None for others."""
    return word[0].text if len(word) == 1 and word[0].kind == "text" and not word[0].quoted else None


class _Parser:
    def __init__(self, found: list[Token]) -> None:
        self.tokens, self.place = found, 0

    def operator(self) -> str:
        return self.tokens[self.place].operator if self.place < len(self.tokens) else ""

    def keyword(self) -> str | None:
        """Return the operator or the unquoted word that is next."""
        if self.place >= len(self.tokens):
            return None
        token = self.tokens[self.place]
        return token.operator or plain(token.word)

    def unexpected(self, message: str) -> NotUnderstood:
        """Return the error at the token that is next, or at the last one."""
        at = self.tokens[min(self.place, len(self.tokens) - 1)]
        return NotUnderstood(message, at.line)

    def take(self) -> Token:
        if self.place >= len(self.tokens):
            raise self.unexpected("it ends inside a command")
        self.place += 1
        return self.tokens[self.place - 1]

    def expect(self, *words: str) -> str:
        found = self.keyword()
        if found not in words:
            at = self.tokens[self.place].source if self.place < len(self.tokens) else "the end"
            raise self.unexpected(f"expected {' or '.join(words)}, found {at!r}")
        self.place += 1
        return found

    def skip(self, *operators: str) -> None:
        while self.operator() in operators:
            self.place += 1

    def source(self, start: int) -> str:
        return " ".join(token.source for token in self.tokens[start : self.place] if token.operator != "\n")

    def sequence(self) -> Commands:
        found: list[Node] = []
        while True:
            self.skip("\n", ";", "&")
            if self.place >= len(self.tokens) or self.keyword() in _ENDS:
                return tuple(found)
            found.append(self._and_or())

    def _and_or(self) -> Node:
        first, rest = self._pipeline(), []
        while self.operator() in ("&&", "||"):
            operator = self.take().operator
            self.skip("\n")
            rest.append((operator, self._pipeline()))
        return AndOr(first, tuple(rest)) if rest else first

    def _pipeline(self) -> Node:
        negated = self.keyword() == "!"
        self.place += negated
        commands = [self._command()]
        while self.operator() in ("|", "|&"):
            self.take()
            self.skip("\n")
            commands.append(self._command())
        return commands[0] if len(commands) == 1 and not negated else ShellPipeline(tuple(commands), negated)

    def _command(self) -> Node:
        compound = {
            "if": self._if, "for": self._for, "while": self._while, "until": self._while, "case": self._case,
            "{": self._group, "(": self._group, "((": self._test, "[[": self._test, "function": self._function,
        }.get(self.keyword() or "")  # fmt: skip
        if compound is None:
            return self._simple()
        node = compound()
        while self.operator().lstrip("0123456789")[:1] in ("<", ">"):
            self.take()
            self.take()
        return node

    def _if(self) -> Node:
        start, branches = self.place, []
        self.expect("if")
        while True:
            condition = self.sequence()
            self.expect("then")
            branches.append((condition, self.sequence()))
            label = self.source(start).partition(" then ")[0]
            found = self.expect("elif", "else", "fi")
            if found == "else":
                branches.append(((), self.sequence()))
                self.expect("fi")
            if found != "elif":
                return If(tuple(branches), label)

    def _body(self) -> Commands:
        self.skip(";", "\n")
        self.expect("do")
        body = self.sequence()
        self.expect("done")
        return body

    def _for(self) -> Node:
        self.expect("for")
        name = self.take().source
        words: list[Word] | None = None
        self.skip("\n")
        if self.keyword() == "in":
            self.take()
            words = []
            while self.operator() == "" and self.place < len(self.tokens):
                words.append(self.take().word)
        start, body = self.place, self._body()
        if any(plain(token.word) in ("break", "continue") for token in self.tokens[start : self.place]):
            words = None
        return For(name, None if words is None else tuple(words), body)

    def _while(self) -> Node:
        until = self.expect("while", "until") == "until"
        condition = self.sequence()
        return While(condition, self._body(), until)

    def _case(self) -> Node:
        start = self.place
        self.expect("case")
        word, branches = self.take().word, []
        label = self.source(start)
        self.skip("\n")
        self.expect("in")
        while True:
            self.skip("\n")
            if self.keyword() == "esac":
                self.take()
                return Case(word, tuple(branches), label)
            self.place += self.operator() == "("
            patterns = [self.take().word]
            while self.expect("|", ")") == "|":
                patterns.append(self.take().word)
            branches.append((tuple(patterns), self.sequence()))
            self.place += self.operator() == ";;"

    def _group(self) -> Node:
        subshell = self.expect("{", "(") == "("
        body = self.sequence()
        self.expect(")" if subshell else "}")
        return ShellGroup(body, subshell)

    def _test(self) -> Node:
        start = self.place
        if self.take().operator == "((":
            return Test((self.tokens[start],), self.tokens[start].source)
        inner: list[Token] = []
        while self.keyword() != "]]":
            inner.append(self.take())
        self.take()
        return Test(tuple(inner), self.source(start))

    def _function(self) -> Node:
        self.expect("function")
        return self._defined(self.take().source)

    def _defined(self, name: str) -> Node:
        if self.operator() == "(":
            self.take()
            self.expect(")")
        self.skip("\n")
        return ShellFunction(name, self._command())

    def _simple(self) -> Node:
        start, words = self.place, list[Word]()
        while self.place < len(self.tokens):
            operator = self.operator()
            if operator.lstrip("0123456789")[:1] in ("<", ">") or operator.startswith("&>"):
                self.take()
                self.take()
            elif operator == "(" and words:
                name, assigns, append = _assigned(words[-1])
                if (
                    assigns
                    and self.tokens[self.place].glued
                    and set(map(plain, words[:-1])) <= _DECLARING | {"-a", "-r"}
                ):
                    return self._array(name, append)
                if len(words) > 1 or plain(words[0]) is None:
                    raise self.unexpected(f"a bracket in {self.source(start)!r} was not expected there")
                return self._defined(plain(words[0]) or "")
            elif operator:
                break
            else:
                words.append(self.take().word)
        if not words:
            token = self.take()
            raise NotUnderstood(f"{token.source!r} was not expected there", token.line)
        return Simple(tuple(words), self.source(start))

    def _array(self, name: str, append: bool) -> Node:
        self.expect("(")
        words: list[Word] = []
        while self.operator() != ")":
            token = self.take()
            if token.operator not in ("", "\n"):
                raise NotUnderstood(f"{token.source!r} was not expected in an array", token.line)
            words += [] if token.operator else [token.word]
        self.take()
        return Array(name, append, tuple(words))


def _assigned(word: Word) -> tuple[str, bool, bool]:
    name, value, append = assignment(word)
    return name, bool(name) and not value, append


def assignment(word: Word) -> tuple[str, Word, bool]:
    """Return name, value and whether the value is appended, of a word NAME=value or NAME+=value; no name where it is none."""
    first = word[0] if word else Piece("text", "", True, "")
    name, equals, value = first.text.partition("=")
    append = name.endswith("+")
    name = name.removesuffix("+")
    if first.kind != "text" or first.quoted or not equals or not name.isidentifier() or not name.isascii():
        return "", (), False
    rest = (Piece("text", value, False, value),) if value else ()
    return name, (*rest, *word[1:]), append
