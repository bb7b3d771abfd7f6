"""Schemas of messages to the controller, each checked as a whole before any change.

A message has the fields that its schema names and no others, each of one kind. What depends on how far the run is, such as the newest
version, service.py checks, before it changes anything.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from math import isnan
from operator import le
from reprlib import Repr
from typing import Any

from hpcrl.controller.evaluation import EVAL_GROUP
from hpcrl.controller.prompt_stream import TRAIN_GROUP
from hpcrl.rundir.process_names import worker_name
from hpcrl.runtime.http_server import BadRequest
from hpcrl.types import LARGEST, LONGEST_FAILURE, LONGEST_NAME, GroupMeta, TurnMeta, is_name, is_plain_text

_MOST_ENTRIES = 1_000_000  # no list of a message that fits into a request is longer
_MOST_TOKENS = 1_000_000_000
_MOST_BYTES = 1 << 50
_LONGEST_WAIT_S = 60.0
_GROUP_IDS = {"train": re.compile(TRAIN_GROUP, re.ASCII), "eval": re.compile(EVAL_GROUP, re.ASCII)}
_GROUP_ID = re.compile(f"{TRAIN_GROUP}|{EVAL_GROUP}", re.ASCII)
_DIGEST = re.compile("([0-9a-f]{32})?")
_SAMPLES = re.compile(rf"{TRAIN_GROUP}(-[0-9a-f]{{8}})?\.safetensors", re.ASCII)
_NUMBERS, _WHOLE, _TEXT, _OBJECT = frozenset({int, float}), frozenset({int}), frozenset({str}), frozenset({dict})
_SHORT = Repr()
_SHORT.maxstring = _SHORT.maxother = 60


@dataclass(frozen=True)
class Value:
    """Type of a field.

    Attributes:
        expected: in words, for errors.
        fits: whether a value, of whatever JSON has, is such.
    """

    expected: str
    fits: Callable[[Any], bool]


def whole(most: int) -> Value:
    return Value(f"a whole number from 0 to {most}", lambda value: type(value) is int and 0 <= value <= most)


def number(least: float, most: float) -> Value:
    # NaN is in no range
    return Value(
        f"a number from {least:g} to {most:g}",
        lambda value: (type(value) is float or type(value) is int) and least <= value <= most,
    )


def numbers(least: float, most: float) -> Value:
    return Value(
        f"a list of numbers from {least:g} to {most:g}",
        lambda value: type(value) is list and _all_within(value, least, most),
    )


def _all_within(values: Collection[Any], least: float, most: float) -> bool:
    """Return whether all values are numbers of a range. It looks at each number of each group: loops in Python would take longer than all else."""
    if not values:
        return True
    if not _NUMBERS.issuperset(map(type, values)):
        return False
    # min and max hide a NaN that is not the first number; a sum does not
    return least <= min(values) and max(values) <= most and not isnan(sum(values))


def wholes(least: int, most: int) -> Value:
    def fits(value: Any) -> bool:
        if type(value) is not list or not _WHOLE.issuperset(map(type, value)):
            return False
        return not value or (least <= min(value) and max(value) <= most)

    return Value(f"a list of whole numbers from {least} to {most}", fits)


def _is_list_of_names(value: Any) -> bool:
    return type(value) is list and _TEXT.issuperset(map(type, value)) and all(map(is_name, set(value)))


def _is_list_of_roles(value: Any) -> bool:
    return type(value) is list and _TEXT.issuperset(map(type, value)) and all(map(is_name, {*value} - {""}))


def listed(kind: Value, what: str) -> Value:
    fits = kind.fits
    return Value(
        f"a list of {what}", lambda value: type(value) is list and len(value) <= _MOST_ENTRIES and all(map(fits, value))
    )


def _is_digests(value: Any) -> bool:
    if type(value) is not dict or not all(map(GROUP_ID.fits, value)):
        return False
    return all(type(each) is str and each and _DIGEST.fullmatch(each) is not None for each in value.values())


def _is_rewards(samples: int, value: Any) -> bool:
    if type(value) is not dict or not all(map(GROUP_ID.fits, value)):
        return False
    return all(
        type(each) is list and len(each) == samples and all(one is None or REWARD.fits(one) for one in each)
        for each in value.values()
    )


def _is_list_of_metrics(value: Any) -> bool:
    if type(value) is not list or not _OBJECT.issuperset(map(type, value)):
        return False
    numbers = [*chain.from_iterable(map(dict.values, value))]
    return _all_within(numbers, -LARGEST, LARGEST) and all(map(is_name, set(chain.from_iterable(value))))


NAME = Value(f"a name: 1 to {LONGEST_NAME} characters that can be printed", is_name)
_FAILURE = Value(
    f"a text of at most {LONGEST_FAILURE} characters that can be printed, or are tabs and ends of lines",
    lambda value: is_plain_text(value, LONGEST_FAILURE),
)
GROUP_ID = Value(
    "the id of a group, such as g00000007",
    lambda value: type(value) is str and _GROUP_ID.fullmatch(value) is not None,
)
GROUP_IDS = listed(GROUP_ID, "ids of groups")
OBJECTS = Value("a list of objects", lambda value: type(value) is list and _OBJECT.issuperset(map(type, value)))
REWARD, REWARDS = number(-LARGEST, LARGEST), numbers(-LARGEST, LARGEST)
_TRUTH = Value("true or false", lambda value: type(value) is bool)
WAIT = number(0.0, _LONGEST_WAIT_S)


@dataclass(frozen=True)
class Schema:
    """The fields of a message, or of an object in one.

    Attributes:
        required, optional: name of a field -> what it holds.
    """

    required: Mapping[str, Value] = field(default_factory=dict)
    optional: Mapping[str, Value] = field(default_factory=dict)

    def parse(self, content: bytes) -> dict[str, Any]:
        """Return the fields of a message."""
        try:
            body = json.loads(content)
        except (ValueError, RecursionError) as error:
            raise BadRequest(f"the body is no JSON: {error}") from error
        if not isinstance(body, dict):
            raise BadRequest(f"expected a JSON object, found {shown(body)}")
        self.check(body)
        return body

    def check(self, body: Mapping[str, Any], within: str = "") -> None:
        """Check that an object has all required fields, no unknown ones, and each of its type. Raises BadRequest where it has not.

        Args:
            within: what stands before the names of fields in errors.
        """
        known = 0
        for name, kind in self.required.items():
            if name not in body:
                raise BadRequest(f"field {within + name!r}: expected {kind.expected}, found none")
            if not kind.fits(body[name]):
                raise _wrong(within + name, kind.expected, body[name])
            known += 1
        for name, kind in self.optional.items():
            if name in body:
                if not kind.fits(body[name]):
                    raise _wrong(within + name, kind.expected, body[name])
                known += 1
        if known < len(body):
            unknown = next(name for name in body if name not in self.required and name not in self.optional)
            names = ", ".join([*self.required, *self.optional]) or "no fields"
            raise BadRequest(f"field {shown(unknown)} is unknown: expected {names}")


def _wrong(name: str, expected: str, found: Any) -> BadRequest:
    return BadRequest(f"field {name!r}: expected {expected}, found {shown(found)}")


def shown(value: Any) -> str:
    """Return a value in short, however long or deep it is, so that it can be printed."""
    return _SHORT.repr(value)


class Schemas:
    """The schemas of all messages of one run.

    Args:
        replicas: that the run has at most: workers are named rollout-0 to the last of them.
        total_steps: of the run.
        n_samples, eval_n_samples: samples per group.
        scorers: names of the run's scorers.
    """

    def __init__(
        self, replicas: int, total_steps: int, n_samples: int, eval_n_samples: int, scorers: Collection[str] = ()
    ) -> None:
        self._samples = {"train": n_samples, "eval": eval_n_samples}
        step, worker, leaver = whole(total_steps), {"worker": _worker(replicas)}, {"worker": _worker(replicas, scorers)}
        calls = {**worker, "version": step}
        serves = {"any_version": _TRUTH}
        self.report = Schema({**calls, "state": NAME}, {"holding": GROUP_IDS, **serves})
        self.claim = Schema({**calls, "capacity": whole(_MOST_ENTRIES), "holding": GROUP_IDS}, serves)
        self.complete = Schema({**worker, "groups": OBJECTS})
        self.leave, self.lease = Schema(leaver), Schema({**worker, "awake": _TRUTH})
        self.start = Schema({"step": whole(_MOST_ENTRIES)})  # a step beyond the end is an error of the configuration
        self.published = Schema({"version": step}, {"weights": _TRUTH})
        self.committed = Schema({"step": step})
        self.next = Schema(
            {"step": whole(total_steps + 1)}, {"wait": WAIT, "away": _TRUTH, "onload": number(0.0, LARGEST)}
        )
        scorer = {
            "scorer": Value(
                f"a scorer of this run: {', '.join(scorers) or 'it has none'}",
                lambda v: type(v) is str and v in scorers,
            )
        }
        self.claim_scores = Schema({**scorer, "samples": whole(_MOST_ENTRIES), "holding": GROUP_IDS}, {"wait": WAIT})
        rewards = Value(
            f"by ids of groups {n_samples} entries, each null or {REWARD.expected}", partial(_is_rewards, n_samples)
        )
        digests = Value("checksums of scores by ids of groups", _is_digests)
        self.scored = Schema({**scorer, "digests": digests}, {"rewards": rewards})
        self.status = Schema()
        self._group = _group_schema(replicas, total_steps)

    def groups(self, values: list[dict[str, Any]]) -> list[GroupMeta]:
        """Return the finished groups of a message."""
        for index, value in enumerate(values):
            self._group.check(value, f"groups[{index}].")
            self._check_fit(value, f"groups[{index}].")
        return [GroupMeta.from_json(value) for value in values]

    def _check_fit(self, group: dict[str, Any], within: str) -> None:
        kind, name, rows = group["kind"], group["group_id"], group.get("rows")
        samples = self._samples[kind]
        if _GROUP_IDS[kind].fullmatch(name) is None:
            raise _wrong(f"{within}kind", "the epoch in the group's id", kind)
        for one in ("rewards", "response_lengths", "stop_reasons"):
            if len(group[one]) != samples:
                raise _wrong(within + one, f"{samples} entries, one per sample", group[one])
        for one in ("env_metrics", "raw_rewards", "rows"):
            if group.get(one) and len(group[one]) != samples:
                raise _wrong(within + one, f"{samples} entries, one per sample, or none", group[one])
        if len(group["lengths"]) != (sum(rows) if rows else samples):
            raise _wrong(f"{within}lengths", "one entry per row", group["lengths"])
        if group.get("shared") and len(group["shared"]) != len(group["lengths"]):
            raise _wrong(f"{within}shared", "one entry per row, or none", group["shared"])
        self._check_turns(group, within)
        if len(group.get("failures", ())) > samples + 1:
            raise _wrong(f"{within}failures", f"at most one per sample, {samples}, and one more", group["failures"])
        if group["oldest_version"] > group["newest_version"]:
            raise _wrong(f"{within}oldest_version", f"at most {group['newest_version']}", group["oldest_version"])
        folder, _, file = group["path"].rpartition("/")
        if kind == "train" and (folder != f"samples/{group['replica']}" or _SAMPLES.fullmatch(file) is None):
            raise _wrong(f"{within}path", f"a file of samples in samples/{group['replica']}", group["path"])

    def _check_turns(self, group: dict[str, Any], within: str) -> None:
        turns, lengths, ends = group.get("turns") or [], group["lengths"], group.get("turn_ends") or []
        if turns and len(turns) != len(lengths):
            raise _wrong(f"{within}turns", "one entry per row, or none", turns)
        for one in (f"turn_{name}s" for name in TurnMeta._fields):
            if len(group.get(one) or []) != sum(turns):
                raise _wrong(within + one, f"{sum(turns)} entries, one per turn", group.get(one) or [])
        at = 0
        for count, length in zip(turns, lengths, strict=False):
            own, at = ends[at : at + count], at + count
            if own and not (own[0] > 0 and own[-1] <= length and all(map(le, own, own[1:]))):
                raise _wrong(
                    f"{within}turn_ends",
                    f"numbers from 1 to {length}, the tokens of the row, none below the one before",
                    own,
                )


def _worker(replicas: int, scorers: Collection[str] = ()) -> Value:
    names = frozenset([*map(worker_name, range(replicas)), *scorers])
    last = f" to rollout-{replicas - 1}" if replicas > 1 else ""
    also = f", or a scorer: {', '.join(scorers)}" if scorers else ""
    return Value(f"a worker of this run, rollout-0{last}{also}", lambda value: type(value) is str and value in names)


def _group_schema(replicas: int, total_steps: int) -> Schema:
    lengths = wholes(0, _MOST_TOKENS)
    required = {
        "group_id": GROUP_ID,
        "kind": Value("train or eval", lambda value: type(value) is str and value in _GROUP_IDS),
        "replica": whole(replicas - 1),
        "path": NAME,
        "rewards": REWARDS,
        "lengths": lengths,
        "response_lengths": lengths,
        "stop_reasons": Value("a list of names", _is_list_of_names),
        "oldest_version": whole(total_steps),
        "newest_version": whole(total_steps),
        "data_source": NAME,
        "seconds": number(0.0, LARGEST),
    }
    optional = {
        "env_metrics": Value("a list of objects that hold numbers under names", _is_list_of_metrics),
        "raw_rewards": REWARDS,
        "baseline": Value(f"null, or {REWARD.expected}", lambda value: value is None or REWARD.fits(value)),
        "failures": listed(_FAILURE, f"texts, each {_FAILURE.expected}"),
        "rows": wholes(1, _MOST_ENTRIES),
        "digest": Value(
            "a checksum, or nothing", lambda value: type(value) is str and _DIGEST.fullmatch(value) is not None
        ),
        "offset": whole(_MOST_BYTES),
        "row": Value("null", lambda value: value is None),  # workers generate what they report
        "scores": Value("an empty object", lambda value: value == {}),  # scorers send their role
        "model_rewards": Value("an empty list", lambda value: value == []),
        "shared": lengths,
        "turns": lengths,
        "turn_ends": lengths,
        "turn_rewards": REWARDS,
        "turn_roles": Value("a list of names, or of empty texts", _is_list_of_roles),
        "turn_anchors": lengths,
    }
    return Schema(required, optional)
