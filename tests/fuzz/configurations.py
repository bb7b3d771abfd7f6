"""Configurations: the files of configs/, spoilt as text and as values, with overrides that are no better.

Whatever they say: there is a configuration, or a ConfigError that a terminal can print.
"""

from __future__ import annotations

import json
import random
import warnings
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import tomli

from hpcrl.config import Config
from hpcrl.config.fields import leaves
from hpcrl.errors import ConfigError
from tests.paths import ROOT

_VALUES = (
    '""', '"x"', '"\\u0000"', '"\\u001b[2J"', '"../../.."', '"~root/x"', '"hpcrl:x"', '"é🙂"', '"' + "a" * 5000 + '"', "''", '"""\n"""', "0", "-1", "1",
    "2", "3.5", "1e308", "-1e-308", "inf", "-inf", "nan", "9223372036854775808", "9" * 4000, "0x10", "true", "false", "[]", "{}", "[[]]",
    "[1, 'x']", "{a = 1}", "{a = {a = {}}}", "1979-05-27", "07:32:00", "1979-05-27T07:32:00Z", "[" * 50 + "]" * 50, "[" * 2000 + "]" * 2000,
    "{a=" * 2000 + "1" + "}" * 2000, "null", "",
)  # fmt: skip
_PIECES = (
    b"\0",
    b"\xff",
    b"\xed\xa0\x80",
    b"[",
    b"]]",
    b"=",
    b".",
    b'"',
    b"'''",
    b"\n",
    b"#",
    b"\r",
    b"\xef\xbb\xbf",
    b"a." * 500,
    b"\x1b[2J",
)


@cache
def _texts() -> tuple[str, ...]:
    return tuple(path.read_text(encoding="utf-8") for path in sorted((ROOT / "configs").rglob("*.toml")))


@cache
def _paths() -> tuple[str, ...]:
    return tuple(setting.path for setting in leaves(Config))


def spoilt(seed: str) -> tuple[bytes, list[str]]:
    """Return a spoilt file of configs/ and overrides; always the same for a seed."""
    chance = random.Random(seed)
    lines = chance.choice(_texts()).splitlines()
    for _ in range(chance.choice([1, 1, 1, 2, 3, 5])):
        _spoil(lines, chance)
    content = "\n".join(lines).encode("utf-8", "surrogatepass")
    if chance.random() < 0.15:
        at = chance.randrange(len(content) + 1)
        content = content[:at] + chance.choice(_PIECES) + content[at + chance.randrange(3) :]
    paths = chance.choices(_paths(), k=chance.choice([0, 0, 0, 1, 2]))
    return content, [f"{path}={chance.choice(_VALUES)}" for path in paths]


def _spoil(lines: list[str], chance: random.Random) -> None:
    at, what = chance.randrange(len(lines) or 1), chance.random()
    if not lines or what < 0.3:
        section, _, name = chance.choice(_paths()).rpartition(".")
        lines += [f"[{section}]", f"{name} = {chance.choice(_VALUES)}"]
    elif what < 0.7 and "=" in lines[at]:
        lines[at] = f"{lines[at].partition('=')[0]}= {chance.choice(_VALUES)}"
    elif what < 0.8:
        del lines[at]
    elif what < 0.9:
        lines.insert(at, chance.choice(lines))
    else:
        letter = chance.randrange(len(lines[at]) + 1)
        lines[at] = lines[at][:letter] + chance.choice("[]{}.=\"'#\\\0 ax0-") + lines[at][letter + 1 :]


class Unsound(AssertionError):
    """What was loaded is no configuration, or the error cannot be printed."""


def load(content: bytes, overrides: list[str]) -> str:
    """Load a configuration; return "loaded" or "refused".

    Raises:
        Unsound: see there; and whatever else loading raises, which is what is looked for.
    """
    with TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        path = Path(folder) / "config.toml"
        path.write_bytes(content)
        try:
            config = Config.from_toml([path], overrides)
        except ConfigError as error:
            told = str(error)
            if not told or not all(letter.isprintable() or letter == "\n" for letter in told):
                raise Unsound(f"this cannot be printed: {told!r:.300}") from error
            return "refused"
        if not tomli.loads(config.to_toml()):
            raise Unsound("it is empty")
        return "loaded"


def written(content: bytes, overrides: list[str], why: str) -> str:
    """Return what is kept of an input that was unsound."""
    return json.dumps({"why": why, "content": content.decode("latin-1"), "overrides": overrides}, indent=1) + "\n"


def read_written(text: str) -> tuple[bytes, list[str]]:
    value = json.loads(text)
    return value["content"].encode("latin-1"), value["overrides"]
