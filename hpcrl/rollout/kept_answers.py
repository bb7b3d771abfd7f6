"""Answers of environments that are kept beside the policy's turns, so that the next worker of a group asks for none of them again.

Each names the answer before it by a digest, and the policy's response between them. So what is found is exactly what the sample has been shown.
The first one is what the environment begins with. Each has a state from which the environment can go on, unless the sample is done. Where an
environment offers none, nothing more of its sample is kept: it starts again, and steps again.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from hpcrl.envs.base import Turn
from hpcrl.rundir.commit import digest_of

LONGEST_ANSWER = 1 << 20
"""Characters of a kept answer as JSON, its state included."""
_FIRST = "observations", "reward", "done", "metrics", "action"
_PLAIN = Turn([], 0.0, done=False)


@dataclass(frozen=True)
class KeptAnswer:
    """An answer of an environment.

    Attributes:
        past: name of the answer before it, of the sample for the first.
        said: digest of what it answers.
        state: of the environment after it; None where the sample is done.
    """

    past: str
    said: str
    turn: Turn
    state: str | None

    @classmethod
    def of(cls, line: Mapping[str, Any]) -> KeptAnswer | None:
        """Return the answer of a line; None where another version of hpcrl has written it."""
        try:
            return cls(line["past"], line["said"], Turn(**line["answer"]), line["state"])
        except (TypeError, KeyError):
            return None

    @property
    def line(self) -> dict[str, Any]:
        # later fields only where they are set: names are digests of lines, and stay what earlier versions have made them
        own = vars(self.turn).items()
        answer = {name: value for name, value in own if name in _FIRST or value != getattr(_PLAIN, name)}
        return {"past": self.past, "said": self.said, "answer": answer, "state": self.state}

    @cached_property
    def name(self) -> str:
        return digest_of(json.dumps(self.line).encode())


class SampleAnswers:
    """Answers of the environment of one sample, in their order.

    Args:
        sample: name of the sample and of all that its environment depends on.
        earlier: answers that earlier workers have kept, of this sample and others.

    Attributes:
        new: those that the environment has given now.
        state: of the environment after the newest answer.
        ended: whether nothing more is kept.
    """

    def __init__(self, sample: str, earlier: Mapping[str, KeptAnswer]) -> None:
        self._sample = self._past = sample
        self._earlier = earlier
        self.new = list[KeptAnswer]()
        self.state: str | None = None
        self.ended = False

    @property
    def last(self) -> KeptAnswer | None:
        """The last of the kept answers; None where there is none."""
        last = self._earlier.get(self._sample)
        while last and (following := self._earlier.get(last.name)):
            last = following
        return last

    def find(self, *said: str | int) -> Turn | None:
        """Return the kept answer to the policy's response, without one that to `init`; None where there is none."""
        found = self._earlier.get(self._past)
        if found is None or found.said != _digest(said):
            return None
        self._past, self.state = found.name, found.state
        return found.turn

    def add(self, turn: Turn, state: str | None, *said: str | int) -> None:
        """Keep an answer as of `find`, if it can be kept. Answers that earlier workers have kept are not found any more."""
        self.forget()
        answer = _copied(KeptAnswer(self._past, _digest(said), turn, state)) if turn.done or state is not None else None
        if answer is None:
            self.ended, self.state = True, None  # an older state is not that after the newest answer
        else:
            self._past, self.state = answer.name, state
            self.new.append(answer)

    def forget(self) -> None:
        """Forget the answers of earlier workers."""
        self._earlier = {}


def by_past(answers: Iterable[KeptAnswer]) -> dict[str, KeptAnswer]:
    """Return answers by those before them; of two to the same one the first."""
    found = dict[str, KeptAnswer]()
    for answer in answers:
        found.setdefault(answer.past, answer)
    return found


def _copied(answer: KeptAnswer) -> KeptAnswer | None:
    """Return an answer as a file gives it back; None where that is another one, or too long."""
    try:
        text = json.dumps(answer.line)
    except (TypeError, ValueError, RecursionError):
        return None
    copy = KeptAnswer.of(json.loads(text)) if len(text) <= LONGEST_ANSWER else None
    return copy if copy == answer else None


def _digest(said: tuple[str | int, ...]) -> str:
    return digest_of(json.dumps(said).encode())
