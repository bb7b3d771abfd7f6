"""The environment of one sample; or, in its place, rewards by name or of a service, which end the sample after one turn.

Code of users is called here only: in threads, within a time limit, and with errors that name their origin.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from hpcrl.config import EnvironmentConfig
from hpcrl.data.vision.messages import as_sent, with_images
from hpcrl.envs.base import AgentEnvironment, Endpoint, Environment, Messages, Turn, finite, state_of, user_code
from hpcrl.envs.registry import is_agent, make_environment
from hpcrl.envs.rewards.judged import rewarded_later
from hpcrl.envs.rewards.remote import Endpoints, RemoteRewards, exported
from hpcrl.envs.rewards.response import Scorer, response_to
from hpcrl.envs.rewards.weighted import WeightedRewards
from hpcrl.envs.tools.sandboxes import SandboxLost
from hpcrl.errors import DataError, HpcrlError, UserCodeError
from hpcrl.rollout.kept_answers import SampleAnswers
from hpcrl.rollout.threads import Call, CallThreads, TooLong
from hpcrl.types import LONGEST_FAILURE, LONGEST_NAME, Kind, Work, is_name, plain_text

if TYPE_CHECKING:
    import numpy as np

R = TypeVar("R")

_TRIES = 3
_NOTHING = Environment.close, AgentEnvironment.close


def scorer_of(
    environment: EnvironmentConfig, kind: Kind, services: Callable[[], Endpoints] | None = None
) -> Scorer | None:
    """Return what rewards a response; None: the environment that its prompt names.

    Args:
        services: as of GroupGenerator.
    """
    if environment.is_rewarded_later(kind):
        return rewarded_later
    if environment.uses_reward_service(kind):
        if services is None:
            named = exported(environment)
            services = lambda: named  # noqa: E731
        return RemoteRewards(environment.remote_reward, services)
    weights = environment.reward_weights(kind)
    own = kind == "eval" and environment.eval_reward_function
    setting = "environment.eval_reward_function" if own else "environment.reward_function"
    return WeightedRewards(setting, weights, environment) if weights else None


@dataclass(frozen=True)
class Answer(Generic[R]):
    """A call of an environment.

    Attributes:
        call: None: it is asked when the result is wanted, without a thread.
        where: which environment, in errors.
    """

    function: Callable[[], R]
    call: Call[R] | None
    where: str

    async def result(self) -> R:
        """Return the environment's answer.

        Raises:
            HpcrlError: of environments and rewards, with where it happened; UserCodeError also for a call that takes too long.
        """
        with user_code(self.where):
            if self.call is None:
                return self.function()
            try:
                return await self.call.result()
            except TooLong as limit:
                raise UserCodeError(f"took longer than environment.timeout_seconds ({limit})") from None


def ask(function: Callable[[], R], threads: CallThreads | None, where: str, *, opens: bool = False) -> Answer[R]:
    """Begin a call of an environment or a reward.

    Args:
        threads: as of `EnvSession`.
        opens: as of Call.
    """
    return Answer(function, threads.call(function, opens=opens) if threads else None, where)


def place_of(work: Work) -> str:
    """Return which group and row errors are about."""
    return f"group {work.group_id} (row {work.prompt.uid})"


class EnvSession:
    """The environment or the rewards of one sample. Calls start at once.

    Args:
        rewards: used instead of an environment; None: the environment that the prompt names.
        extras: what the environment is made with.
        max_tokens: of each turn.
        threads: None: environments are called one after the other and without threads, so that no time limit can be kept.
        answers: what earlier workers have kept, and this one adds to; None: nothing is kept.
    """

    def __init__(
        self,
        work: Work,
        rewards: Scorer | None,
        extras: Mapping[str, Any],
        max_tokens: int,
        threads: CallThreads | None,
        answers: SampleAnswers | None = None,
    ) -> None:
        self._work, self._rewards, self._extras, self._max_tokens = work, rewards, extras, max_tokens
        self._threads, self._answers = threads, answers
        self._environment: Environment | AgentEnvironment | None = None
        self._resumed: str | None = None  # from which the environment has yet to go on
        self._last: Call[Any] | None = None
        who = place_of(work)
        self.where = who if rewards else f"environment {work.prompt.env_class!r}, {who}"

    def open(self) -> Answer[Messages]:
        """Ask for the messages that start the sample."""
        messages = list(self._work.prompt.messages)
        if self._rewards is not None:
            return Answer(lambda: messages, None, self.where)
        return self._ask(lambda: self._opening(messages), opens=True)

    def begin(self, first: Callable[[Any], R]) -> Answer[R]:
        """Make the environment, and ask it what it is asked first."""
        return self._ask(lambda: first(self._make()), opens=True)

    def step(
        self, text: str, n_tokens: int, image: np.ndarray | None = None, latents: np.ndarray | None = None
    ) -> Answer[Turn]:
        """Ask for the answer to the policy's text, which has `n_tokens` tokens, or to its picture or video; the latter only rewards answer.

        Args:
            image, latents: as of Response.
        """
        if self._answers and (kept := self._answers.find(text, n_tokens)):
            return Answer(lambda: kept, None, self.where)

        def answered() -> Turn:
            return self._kept(_checked(self._answer(text, n_tokens, image, latents)), text, n_tokens)

        return self._ask(lambda: self._lasting(answered, begins=False))

    def act(self, actions_KA: np.ndarray) -> Answer[Turn]:
        """Ask for the answer to the policy's actions."""
        return self._ask(lambda: _checked(self._current().act(actions_KA)))

    def move(self, action: Callable[[Any], tuple[R, Turn]]) -> Answer[tuple[R, Turn]]:
        """Ask for the answer to an action of a policy that reads no messages, with what is seen then."""

        def answered() -> tuple[R, Turn]:
            seen, turn = action(self._environment)
            return seen, _checked(turn)

        return self._ask(answered)

    @property
    def plays(self) -> bool:
        """Whether its environment, which is made, asks the policy itself."""
        return is_agent(self._environment)

    def play(self, messages: Messages, endpoint: Endpoint) -> Answer[Turn]:
        """Call the environment's `play`, which asks the policy itself, and return its end. It gets images as its requests can show them."""
        environment = cast(AgentEnvironment, self._environment)
        return self._ask(lambda: _checked(environment.play(as_sent(messages), endpoint)))

    def close(self) -> Answer[None] | None:
        """Release what the environment holds; None if there is nothing to wait for. One that is still asked something does so when it is
        done, if ever."""
        if self._threads and self._last and self._threads.give_up(self._last, self._close):
            return None
        closes = self._environment is not None and getattr(self._environment.close, "__func__", None) not in _NOTHING
        return self._ask(self._close) if closes else None

    def _close(self) -> None:
        environment, self._environment = self._environment, None
        if environment is not None:
            environment.close()

    def _answer(self, text: str, n_tokens: int, image: np.ndarray | None, latents: np.ndarray | None) -> Turn:
        prompt = self._work.prompt
        if self._rewards is None:
            return self._current().step(text)
        return self._rewards(response_to(prompt, text, n_tokens, self._max_tokens, image, latents))

    def _opening(self, messages: Messages) -> Messages:
        """Return the messages that start the sample: the kept ones, with the environment as it was last, or those of a new environment."""
        answers = self._answers
        if answers and (last := answers.last) is not None:
            try:
                if last.state is not None:
                    self._resume(last.state)
            except UserCodeError as error:
                reason = plain_text(str(error), LONGEST_FAILURE)
                print(f"{self.where} begins again, as it cannot go on from its last turn: {reason}", flush=True)
                self._close()
                answers.forget()
        if answers and (kept := answers.find()):
            return kept.observations

        def begun() -> Turn:
            return self._kept(Turn(with_images(self._make().init(messages)), 0.0, done=False))

        return self._lasting(begun, begins=True).observations

    def _lasting(self, ask: Callable[[], Turn], *, begins: bool) -> Turn:
        """Return an answer. Where the environment's sandbox is lost meanwhile, the environment goes on from its state before, and is asked once
        more: the policy has not been shown the answer.

        Args:
            begins: whether there was nothing before.
        """
        for left in reversed(range(_TRIES)):
            try:
                return ask()
            except SandboxLost:
                state = self._answers.state if self._answers else None
                if not left or (state is None and not begins):
                    raise
                self._close()
                if state is not None and not begins:
                    self._resume(state)
        raise AssertionError("there is at least one try")

    def _make(self) -> Any:
        self._environment = made = make_environment(self._work.prompt.env_class, self._extras)
        return made

    def _resume(self, state: str) -> None:
        try:
            with user_code("resume"):
                self._make().resume(state)
        except HpcrlError as error:
            raise UserCodeError(str(error)) from error
        self._resumed = state

    def _current(self) -> Environment:
        """Return the environment as it was after the newest answer; it is behind the last kept one where the policy's responses now differ."""
        state = self._answers.state if self._answers else None
        if state is not None and (self._environment is None or self._resumed not in (None, state)):
            self._close()
            self._resume(state)
        self._resumed = None
        return cast(Environment, self._environment)

    def _kept(self, turn: Turn, *said: str | int) -> Turn:
        """Return an answer, which is kept with the state after it."""
        if self._answers and not self._answers.ended:
            lasting = turn.done or self._rewards or self.plays
            state = None if lasting else state_of(cast(Environment, self._environment))
            self._answers.add(turn, state, *said)
        return turn

    def _ask(self, function: Callable[[], R], *, opens: bool = False) -> Answer[R]:
        answer = ask(function, self._threads, self.where, opens=opens)
        self._last = answer.call
        return answer


def _checked(turn: Turn) -> Turn:
    """Return the turn with plain Python numbers, and images as texts, which is what files and messages can hold."""
    for name in turn.metrics:
        if not is_name(name):
            raise UserCodeError(
                f"a metric is called {name!r:.80}; expected a text of 1 to {LONGEST_NAME} characters that can be printed"
            )
    if not isinstance(turn.action, str | None):
        raise UserCodeError(f"action: expected a text or None, found {turn.action!r:.80}")
    _check_roles(turn)
    try:
        observations = with_images(turn.observations)
    except DataError as error:
        raise UserCodeError(str(error)) from error
    metrics = {name: _named(f"metric {name!r}", value) for name, value in turn.metrics.items()}
    rewards = {role: _named(f"reward of {role!r}", value) for role, value in turn.rewards.items()}
    reward = _named("reward", turn.reward)
    return replace(turn, reward=reward, metrics=metrics, observations=observations, rewards=rewards)


def _check_roles(turn: Turn) -> None:
    for role in {turn.role, *turn.rewards} - {""}:
        if not is_name(role):
            raise UserCodeError(
                f"a role is called {role!r:.80}; expected a text of 1 to {LONGEST_NAME} characters that can be printed"
            )
    if not isinstance(turn.anchor, str | None):
        raise UserCodeError(f"anchor: expected a text or None, found {turn.anchor!r:.80}")
    for name in ("trained", "fresh"):
        if not isinstance(getattr(turn, name), bool):
            raise UserCodeError(f"{name}: expected true or false, found {getattr(turn, name)!r:.80}")


def _named(name: str, value: Any) -> float:
    with user_code(name):
        return finite(value)
