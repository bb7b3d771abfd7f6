"""How JSON is spoilt: values of other types and sizes in its places, fields that are missing or too much, bytes that are no JSON."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

_DEEP = "@deep"
_VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2, 3, 4, 2**31, 2**63, -(2**63), 10**30, 10**31, 10**400, 0.5, -0.0, 1e30, -1e30, 1e31, 1e308,
    float("inf"), float("-inf"), float("nan"), "", "x", " ", "\0", "\n", "\x1b[2J", "\x07", "\x7f", "\ud800", "\udfff\ud800", "\u2028",
    "\u202e", "é", "🙂", "train", "eval", "rollout-0", "rollout-2", "rollout-3", "rollout-00", "rollout-٣", "rollout--1",
    "g00000000", "g00000001", "g00000099", "g0", "g٣٣٣٣٣٣٣٣", "g" + "9" * 15, "g" + "9" * 5000, "e000000-00000000", "e000002-00000001",
    "../../x", "/etc/passwd", "samples/0/../../x", "a" * 200, "a" * 201, "a" * 100_000, [], {}, [[]], [{}], {"": {}}, [None],
    {"correct": "x"}, [1] * 1000, ["x"] * 1000, _DEEP,
)  # fmt: skip
_NAMES = ("worker", "version", "step", "groups", "holding", "capacity", "x", "", "\ud800", "__class__", "a" * 3000)


def spoilt(value: Any, chance: random.Random) -> Any:
    """Return a JSON value with one thing changed somewhere in it."""
    value = copy.deepcopy(value)
    places = list(_places(value))
    if not places or chance.random() < 0.03:
        return chance.choice(_VALUES) if chance.random() < 0.3 else _more(value, chance)
    holder, key = chance.choice(places)
    what = chance.random()
    if what < 0.5:
        holder[key] = chance.choice(_VALUES)
    elif what < 0.65:
        holder[key] = _close(holder[key], chance)
    elif what < 0.75:
        del holder[key]
    elif what < 0.82:
        holder[key] = chance.choice([[holder[key]], {"x": holder[key]}, str(holder[key]), [holder[key]] * 3])
    elif what < 0.9:
        other, place = chance.choice(places)
        if not isinstance(other[place], list | dict) and not isinstance(
            holder[key], list | dict
        ):  # else it could hold itself
            holder[key], other[place] = other[place], holder[key]
    else:
        _more(holder, chance)
    return value


def _places(value: Any) -> Any:
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in pairs:
        yield value, key
        yield from _places(one)


def _close(value: Any, chance: random.Random) -> Any:
    if isinstance(value, bool) or value is None:
        return not value
    if isinstance(value, int | float):
        return chance.choice(
            [value + 1, value - 1, -value, value * 10**9, value / 2 if abs(value) < 1e9 else 0.5, str(value)]
        )
    if isinstance(value, str):
        at = chance.randint(0, len(value))
        return value[:at] + chance.choice(["\0", "\ud800", "\x1b", "0", "/", " ", "é", "A" * 300]) + value[at:]
    return value


def _more(value: Any, chance: random.Random) -> Any:
    if isinstance(value, dict):
        value[chance.choice(_NAMES)] = chance.choice(_VALUES)
    elif isinstance(value, list):
        value.append(chance.choice([*value, *_VALUES]))
    return value


def spoilt_bytes(value: Any, chance: random.Random) -> bytes:
    """Return a JSON value as bytes; a few of them are no JSON, or JSON in other words."""
    body = json.dumps(value)
    depth = chance.choice([2, 100, 900, 990, 1010, 20_000])
    body = body.replace(f'"{_DEEP}"', "[" * depth + "]" * depth)
    if chance.random() > 0.04:
        return body.encode()
    data, at = body.encode(), chance.randrange(len(body))
    return chance.choice(
        [
            b"",
            data[:at],
            data[:at] + bytes([chance.randrange(256)]) + data[at + 1 :],
            data[:at]
            + chance.choice([b"9" * 5000, b"[", b'"', b"\xff", b"\xed\xa0\x80", b"NaN", b"1e999"])
            + data[at:],
            data + data,
            body.encode("utf-16"),
            b"\xef\xbb\xbf" + data,
            b'{"a":' * 3000,
            data[:-1] + b"," + data[1:],
        ]
    )
