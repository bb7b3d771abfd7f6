"""What an environment is: it sees the prompt, then each response of the policy, answers it and gives a reward."""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from hpcrl.errors import ConfigError, HpcrlError, UserCodeError
from hpcrl.types import LARGEST, LONGEST_FAILURE

if TYPE_CHECKING:
    import numpy as np

Messages = list[dict[str, Any]]
"""Chat messages: `role`, and `content`, a text or, with images, a list of parts, {"type": "text", "text": …}, {"type": "image", "image": …} and
{"type": "video", "video": [image, …], "fps": …}.

An image is the bytes of a file, an image of Pillow, a data URL or an absolute path; docs/vision.md.
"""


LONGEST_STATE = 1 << 16
"""Characters of an environment's state."""
WAITING: ContextVar[Callable[[], AbstractContextManager[None]]] = ContextVar("WAITING", default=nullcontext)
"""Returns what a call of an environment enters while it waits for a place that another sample may have: it holds no thread meanwhile."""
GIVEN_UP: ContextVar[Callable[[], bool]] = ContextVar("GIVEN_UP", default=lambda: False)
"""Returns whether a call of an environment or a reward has been given up: nobody waits for its result any more."""


@dataclass(frozen=True)
class Turn:
    """An environment's answer to one action.

    Attributes:
        observations: chat messages that the policy sees next; ignored when `done`.
        reward: of this action; it stands at the last token of it.
        done: whether the sample ends here.
        metrics: numbers to report; their means over a batch appear as `environment/<name>`. A later turn's value takes the place of
            an earlier one's of the same name.
        action: what the policy's text is replaced by, in the conversation and in what is trained; None: nothing. The new tokens
            are not those that were sampled, so they are not trained.
        role: name of the role in which the policy took the action; advantages compare within a role. Empty: it has one role.
        rewards: further rewards by role, each at the last action of the role so far; one that has not acted gets none.
        trained: whether the action is trained.
        fresh: the observations are all that the policy is shown next, as of a role that may not see what another one has seen; needs
            generator.step_wise_trajectories.
        anchor: names the state that the policy acts in next, for estimators that compare actions in the same state; None: the observations.
    """

    observations: Messages
    reward: float
    done: bool
    metrics: dict[str, float] = field(default_factory=dict)
    action: str | None = None
    role: str = ""
    rewards: dict[str, float] = field(default_factory=dict)
    trained: bool = True
    fresh: bool = False
    anchor: str | None = None


class Environment(Protocol):
    """One per sample, made by calling its class with the extras of the prompt: the columns that are not hpcrl's own, and beside them

        environment   the section `environment`: an EnvironmentConfig, or the class that `make_config(environment_cls=…)` was given
        custom        environment.custom, settings without a class of their own
        skyrl_gym     environment.skyrl_gym, settings of hpcrl's environments
        max_turns     generator.max_turns
        sandboxes     of the run, as of hpcrl.envs.tools.sandboxes; None: it has none

    A column of one of these names takes its place.

    Methods are called in the order init or resume, step until done, close; never from two threads at once. A class that derives from this
    one has only `step` to write, and an __init__ that takes the extras. It raises DataError if the row lacks what the environment needs,
    is quick, and takes hold of nothing: a dataset's rows are checked by it.
    """

    def init(self, messages: Messages) -> Messages:
        """Return the messages that start the sample, usually `messages` themselves."""
        return messages

    @abstractmethod
    def step(self, action: str) -> Turn:
        """Score the policy's text, special tokens such as the end marker removed."""
        ...

    def solution(self) -> str | None:
        """Return a text that is worth 1 as the first action, made of the row's ground truth; None: the environment knows none.

        `hpcrl submit` tries it on a sample of rows, so that a ground truth which no answer can match is found before the queue.
        """
        return None

    def act(self, actions_KA: np.ndarray) -> Turn:  # noqa: ARG002
        """Do K actions of A numbers each, one after the other: the place of `step` where the policy moves a robot (vla.enable).

        The observations of the answer are the whole prompt of the next turn.
        """
        raise ConfigError(
            f"{type(self).__name__} takes texts, and with vla.enable a policy makes actions; expected robot"
        )

    def state(self) -> str | None:
        """Return a text from which another process can go on, such as JSON; None: there is none.

        It is asked after `init` and after each step that is not the last, within their time limit. After None nothing more of the sample is
        kept. It is not asked of a class without a `resume` of its own.
        """
        return None

    def resume(self, state: str) -> None:  # noqa: ARG002
        """Become what the environment was when `state` returned this text; called in the place of `init` and of the steps before."""
        return

    def close(self) -> None:
        """Give back what the environment holds; also called when a sample is abandoned half-way."""
        return


@dataclass(frozen=True)
class Endpoint:
    """Where the policy answers for one sample, in the protocols of OpenAI and Anthropic.

    Attributes:
        base_url: with /v1.
        key: of this sample alone.
        model: its name in requests.
        ended: set when nothing more is answered: the sample took too long, or the run wants it no more. What plays it is to end then.
        last_text: returns the policy's last response.
        expect_score: lets a client with the sample's key score it, at POST <base_url>/score; returns what then has the score.
    """

    base_url: str
    key: str = field(repr=False)
    model: str
    ended: threading.Event
    last_text: Callable[[], str]
    expect_score: Callable[[], Future[Turn]]


class AgentEnvironment(Protocol):
    """An environment whose own code asks the policy, as often as it likes and with what messages it likes; made as `Environment`.

    Methods are called in the order init, play, close; never from two threads at once. It needs
    generator.inference_engine.enable_http_endpoint.
    """

    def init(self, messages: Messages) -> Messages:
        """Return the messages that `play` gets, usually `messages` themselves."""
        return messages

    @abstractmethod
    def play(self, messages: Messages, endpoint: Endpoint) -> Turn:
        """Ask the policy at the endpoint; return the reward and the metrics of the sample, as a turn that is done.

        Args:
            messages: images are parts {"type": "image_url", …} with data URLs, as requests show them.
        """
        ...

    def close(self) -> None:
        """Give back what the environment holds; also called when a sample is abandoned half-way, after `play` has ended."""
        return


def state_of(environment: Environment) -> str | None:
    """Return the state of an environment; None where it offers none.

    Raises:
        UserCodeError: it is no text, or longer than LONGEST_STATE.
    """
    for name in ("state", "resume"):
        own = getattr(type(environment), name, None)
        if not callable(getattr(environment, name, None)) or own is getattr(Environment, name):
            return None
    found = environment.state()
    if found is not None and not (isinstance(found, str) and len(found) <= LONGEST_STATE):
        size = f"{len(found)} characters" if isinstance(found, str) else f"{found!r:.80}"
        raise UserCodeError(f"state returned {size}; expected a text of at most {LONGEST_STATE} characters, or None")
    return found


def finite(value: Any) -> float:
    """Return a number that code of a user has returned, numpy's, torch's and booleans too, as Python's own.

    Raises:
        UserCodeError: it is no number, not finite, or beyond ±`LARGEST`; a text is none, whatever it says.
    """
    if not hasattr(value, "__float__") or not -LARGEST <= (number := float(value)) <= LARGEST:  # neither is NaN
        raise UserCodeError(f"{value!r:.80}; expected a finite number of at most {LARGEST:g}")
    return number


@contextmanager
def user_code(where: str) -> Iterator[None]:
    """Call code that a user may have written: exceptions name their origin.

    Args:
        where: what the message begins with: which environment, reward or group.

    Raises:
        UserCodeError: in the place of any exception within; an HpcrlError keeps its class.
    """
    try:
        yield
    except HpcrlError as error:
        raise type(error)(f"{where}: {error}") from error
    except Exception as error:
        raise UserCodeError(f"{where} raised {type(error).__name__}: {str(error)[:LONGEST_FAILURE]}") from error
