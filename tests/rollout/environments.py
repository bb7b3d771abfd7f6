"""Environments of the tests, named as a user names their own."""

from __future__ import annotations

import random
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from hpcrl.config import EnvironmentConfig
from hpcrl.envs.base import LONGEST_STATE, Messages, Turn
from hpcrl.envs.rewards.response import Response
from hpcrl.envs.tools.sandboxes import SandboxLost

CLOSED: list[str] = []
STEPS: list[tuple[str, float, float]] = []


class CountLetters:
    """Pays the number of letters; records what it saw."""

    def __init__(self, extras: Mapping[str, Any]) -> None:
        self._extras = extras

    def init(self, messages: Messages) -> Messages:
        return messages

    def step(self, action: str) -> Turn:
        return Turn([], float(len(action)), done=True, metrics={"seen": 1.0})

    def close(self) -> None:
        CLOSED.append(self._extras.get("name", ""))


class OwnPrompt(CountLetters):
    """Each sample starts with another letter."""

    made = 0

    def init(self, messages: Messages) -> Messages:
        OwnPrompt.made += 1
        return [{**messages[0], "content": messages[0]["content"] + "abcdef"[OwnPrompt.made % 6]}]


class LeavesFiles(CountLetters):
    """As an environment's tools do that are killed."""

    def init(self, messages: Messages) -> Messages:
        Path(tempfile.mkdtemp(), "left").touch()
        return messages


class Raises(CountLetters):
    def step(self, action: str) -> Turn:
        raise ZeroDivisionError(f"cannot score {len(action) >= 0}")


class Unmade(CountLetters):
    def __init__(self, extras: Mapping[str, Any]) -> None:
        self._truth = extras["ground_truth"]


class Talks(CountLetters):
    """Answers twice."""

    answered = 0

    def step(self, action: str) -> Turn:
        self.answered += 1
        return Turn([{"role": "user", "content": "abc"}], float(len(action)), done=self.answered == 3)


class Loses(Talks):
    """Goes on from a state; the calls that `lost` names fail in that order, as those of a sandbox whose node is gone. With "none" it has
    no state after its next step."""

    lost: ClassVar[list[str]] = []

    def init(self, messages: Messages) -> Messages:
        self._lose("init")
        return messages

    def step(self, action: str) -> Turn:
        turn = super().step(action)
        self._lose("step")
        return replace(turn, metrics={"answered": self.answered})

    def state(self) -> str | None:
        self._lose("state")
        if self.answered and self.lost[:1] == ["none"]:
            self.lost.pop(0)
            return None
        return str(self.answered)

    def resume(self, state: str) -> None:
        self.answered = int(state)

    def _lose(self, call: str) -> None:
        if self.lost[:1] == [call]:
            self.lost.pop(0)
            raise SandboxLost("its node is gone")


class TalksOtherwise(Talks):
    def step(self, action: str) -> Turn:
        return replace(super().step(action), observations=[{"role": "user", "content": "cba"}])


class Dice(CountLetters):
    """Answers twice with random letters, and knows how often it has answered; records what it is asked."""

    asked: ClassVar[list[str]] = []
    fails: ClassVar[bool] = False

    def init(self, messages: Messages) -> Messages:
        self.asked.append("init")
        self._answered = 0
        return [{**messages[0], "content": f"sort: {self._letters()}"}]

    def step(self, action: str) -> Turn:
        self.asked.append("step")
        self._answered += 1
        answer = [{"role": "user", "content": self._letters()}]
        return Turn(answer, float(len(action)), done=self._answered == 3, metrics={"answered": self._answered})

    def state(self) -> str | None:
        return str(self._answered)

    def resume(self, state: str) -> None:
        self.asked.append(f"resume {state}")
        if self.fails:
            raise OSError("no such snapshot")
        self._answered = int(state)

    @staticmethod
    def _letters() -> str:
        return "".join(random.choices("abcdef", k=8))


class Remembers(Talks):
    """Calls something else its state."""

    def __init__(self, extras: Mapping[str, Any]) -> None:
        super().__init__(extras)
        self.state = {"turn": 0}


class TooMuch(Dice):
    def state(self) -> str | None:
        return "x" * (LONGEST_STATE + 1)


class Tuples(Dice):
    """Answers with what JSON would change."""

    def step(self, action: str) -> Turn:
        turn = super().step(action)
        return replace(turn, observations=[{**turn.observations[0], "parts": (1, 2)}])


def paid(response: Response, environment: EnvironmentConfig) -> float:  # noqa: ARG001
    Dice.asked.append("paid")
    return float(len(response.text))


class Flaky(CountLetters):
    """Every second one fails."""

    made = 0

    def __init__(self, extras: Mapping[str, Any]) -> None:
        super().__init__(extras)
        Flaky.made += 1
        self._fails = Flaky.made % 2

    def step(self, action: str) -> Turn:
        if self._fails:
            raise ConnectionError("the service is gone")
        return super().step(action)


class Stuck(CountLetters):
    """Steps until it is let go."""

    go = threading.Event()

    def step(self, action: str) -> Turn:
        Stuck.go.wait(20)
        CLOSED.append("stepped")
        return super().step(action)


class StuckAtFirst(CountLetters):
    """Begins when `Stuck` is let go."""

    def init(self, messages: Messages) -> Messages:
        Stuck.go.wait(20)
        return messages


class OnePlace(Talks):
    """One at a time; others wait for its end before they begin."""

    free = threading.Semaphore()

    def init(self, messages: Messages) -> Messages:
        assert self.free.acquire(timeout=60), "the one that has the place does not go on"
        return messages

    def close(self) -> None:
        self.free.release()


class Slow(CountLetters):
    """Records in which thread and when it stepped."""

    def step(self, action: str) -> Turn:
        begun = time.monotonic()
        time.sleep(0.1)
        STEPS.append((threading.current_thread().name, begun, time.monotonic()))
        return super().step(action)


class Configured(CountLetters):
    def step(self, action: str) -> Turn:  # noqa: ARG002
        return Turn([], self._extras["custom"]["bonus"], done=True)
