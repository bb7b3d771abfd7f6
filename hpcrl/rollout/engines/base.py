"""Interface of rollout engines: responses with log-probabilities and versions of their tokens, and weight updates while they run.

An engine is launched, becomes ready, and is then called from one event loop. Engines are packages
such as hpcrl.engines.vllm; `launch.py` starts the one that the configuration names. The same tests run on all of hpcrl's.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hpcrl.config import SamplingParams
from hpcrl.errors import EngineError
from hpcrl.observe.summary import TOKENS_PER_PASS
from hpcrl.rollout.limiter import Load

if TYPE_CHECKING:  # the last two import torch, for which no engine waits to be launched
    import numpy as np
    from numpy.typing import NDArray

    from hpcrl.data.vision.reader import SeenImage
    from hpcrl.data.weight_files import PublishedWeights
    from hpcrl.types import Kind, StopReason


@dataclass(frozen=True)
class Generation:
    """One response.

    Attributes:
        token_ids: generated tokens, the end-of-sequence token included where it was sampled.
        logprobs: of each token under the distribution it was sampled from.
        versions: policy version that chose each token.
        sampling_mask: for each token, the tokens that it was sampled among, itself one of them; None where sampling left none out.
        top_ids: for each token, those that the policy finds most probable in its place, the most probable one first; None where nobody asks.
        experts: [T - 1, L, k] int16, the experts that each token of prompt and response but the last went to in each of L layers; None where
            nobody asks (trainer.policy.experts.router_replay).
        tensors: what a row has of it beside numbers for its tokens, as of Row.
    """

    token_ids: list[int]
    logprobs: list[float]
    stop_reason: StopReason
    versions: list[int]
    sampling_mask: list[list[int]] | None = None
    top_ids: list[list[int]] | None = None
    experts: NDArray[np.int16] | None = None
    tensors: dict[str, np.ndarray] = field(default_factory=dict)


Heard = Callable[[Sequence[int], Sequence[float]], None]
"""Callback for the next tokens of a response, and their log-probabilities, as soon as they are generated."""


NEVER = -100.0
"""Bias of the logits of excluded tokens: vLLM's minimum, at which the probability is 0 in float32."""


def engine_sampling(
    params: SamplingParams,
    kind: Kind,
    vocabulary: int,
    top_ids: int = 0,
    never_said: Sequence[int] = (),
    ends: Collection[int] = (),
) -> dict[str, Any]:
    """Return the configured sampling under vLLM's names, which all engines take.

    Where training samples with top_k, it requests the log-probabilities of as many tokens as it may keep. Excluded tokens have none, so
    that the others are the sampling mask.

    Args:
        vocabulary: its size, which bounds vLLM's `logprobs`.
        top_ids: of what is trained: tokens that are the most probable ones in the place of each, where sampling leaves none out.
        never_said: tokens that stand for images.
        ends: ids that end a turn.
    """
    given = params.additional_kwargs
    biases = {**given.get("logit_bias", {}), **{str(token_id): NEVER for token_id in never_said}}
    told = params.mask_size or top_ids
    stops = {*given.get("stop_token_ids", ()), *(() if given.get("ignore_eos") else ends)}
    return {
        **given,
        **({"logit_bias": biases} if biases else {}),
        "max_tokens": params.max_generate_length,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "min_p": params.min_p,
        "repetition_penalty": params.repetition_penalty,
        "stop": params.stop or [],
        **({"stop_token_ids": sorted(stops)} if stops else {}),
        "logprobs": min(told, vocabulary) if kind == "train" else 0,
    }


def leaves_out(sampling: Mapping[str, Any]) -> bool:
    """Return whether sampling, under vLLM's names, leaves tokens out, so that what it asks for with `logprobs` is the sampling mask."""
    return sampling.get("top_k", 0) > 0


@dataclass(frozen=True)
class Drafts:
    """What speculative decoding has done since the engine's start.

    Attributes:
        passes: of the policy over a request's draft tokens.
        tokens, accepted: draft tokens, and those that the policy accepted.
    """

    passes: float = 0.0
    tokens: float = 0.0
    accepted: float = 0.0

    def metrics(self, since: Drafts) -> dict[str, float]:
        """Return the share of accepted tokens and the tokens that such a pass generates, since an earlier count."""
        passes, tokens, accepted = (
            getattr(self, name) - getattr(since, name) for name in ("passes", "tokens", "accepted")
        )
        if passes <= 0 or tokens <= 0:
            return {}
        return {"generate/draft_accepted_share": accepted / tokens, TOKENS_PER_PASS: 1 + accepted / passes}


class Engine(ABC):
    """One replica's engine.

    Attributes:
        version: policy version of the weights that it holds.
        answered: calls that have ended, well or not.
        drafts: as of the last `load`; None: there are none.
        changed: called when a call begins or ends; the worker sets it.
        _awake: cleared by `sleep`, set by `update_weights`.
        serves_versions: whether it serves older versions beside the newest, see `add_version`.
        evaluated: returns versions that stay loaded beside the newest; the worker sets it.
    """

    serves_versions = False
    evaluated: Callable[[], Collection[int]] = staticmethod(lambda: ())
    version: int
    answered: int
    drafts: Drafts | None = None
    changed: Callable[[], None] = staticmethod(lambda: None)

    def __init__(self) -> None:
        self._awake = asyncio.Event()
        self._awake.set()

    @property
    def asleep(self) -> bool:
        """Whether it has slept since the last `update_weights`: open calls make no progress."""
        return not self._awake.is_set()

    async def _until_awake(self) -> None:
        while self.asleep:
            await self._awake.wait()

    @property
    @abstractmethod
    def waiting(self) -> list[str]:
        """Open calls, for messages."""

    @property
    @abstractmethod
    def loading(self) -> bool:
        """Whether it updates weights, which may take as long as a start."""

    @abstractmethod
    async def generate(
        self,
        prompt_ids: Sequence[int],
        n_samples: int,
        seed: int | None,
        sampling: Mapping[str, Any],
        name: str | None = None,
        heard: Heard | None = None,
        images: Sequence[SeenImage] = (),
    ) -> list[Generation]:
        """Return `n_samples` responses to one prompt; sample i depends on the weights, the prompt with its images, `sampling` and seed + i.

        Args:
            sampling: as `engine_sampling` names it.
            name: of the call in `ended`; no other call has it.
            heard: called in the event loop with all tokens of a call with one sample, piece by piece, before it returns.
            images: that the placeholders in the prompt stand for, in their order.

        Raises:
            RefusedRequestError: the engine refuses this request, and would answer others.
            EngineError: the engine failed.
        """

    def of_version(self, version: int) -> Callable[..., Awaitable[list[Generation]]]:  # noqa: ARG002
        """Return `generate` for requests that are all computed with one version, which the engine holds."""
        return self.generate

    def holds(self, version: int) -> bool:
        """Return whether the engine can compute with a version."""
        return version == self.version

    async def add_version(self, weights: PublishedWeights) -> None:
        """Load an older version beside the newest, where it `serves_versions`; errors as of `update_weights`."""
        raise NotImplementedError

    @abstractmethod
    async def top_tokens(self, token_ids: Sequence[int], count: int) -> list[list[int]]:
        """Return the `count` tokens that the policy finds most probable in the place of each token but the first, given those before it.

        Args:
            token_ids: two at least.
            count: no more than there are.

        Raises:
            RefusedRequestError, EngineError: as of `generate`.
        """

    @abstractmethod
    async def ended(self) -> dict[str, dict[int, Generation]]:
        """Return the responses that have ended, since the last call, of unfinished calls of `generate`.

        Keys are the call's name and the response's index; calls without a name are left out.

        Raises:
            EngineError: it does not answer within seconds.
        """

    @abstractmethod
    async def update_weights(self, weights: PublishedWeights) -> dict[str, float]:
        """Load a published version; return metrics: seconds of the pause, and of loading in it.

        Running requests go on with the new weights. Their key-value caches are dropped and computed again, so that each token's logprob
        belongs to exactly one version; unless they are to keep them. Where a version is an adapter, an engine may let them go on with the
        adapter that they began with instead, and then does not pause. An engine that sleeps wakes: its weights before it loads, its caches
        afterwards, and there are seconds of that too.

        Raises:
            EngineError: the engine could not load them, or a rank of it holds others. It is unusable then.
        """

    @abstractmethod
    async def sleep(self) -> None:
        """Release the memory of its devices until `update_weights`, whichever version that loads.

        Running requests are interrupted between two tokens, or where all tokens of one are made together, before it begins. They keep what
        they have, and go on with the weights that are loaded then. Calls that begin meanwhile wait.

        Raises:
            EngineError: it could not.
        """

    @abstractmethod
    async def probe(self, weights: PublishedWeights, dtype: str, allowed: float | None) -> float | None:
        """Return the difference of log-probabilities between the engine and the trainer's probe of the loaded version. None: there is no
        probe.

        Args:
            dtype: of the engine's computation.
            allowed: None: as `proof.tolerance` has it.

        Raises:
            EngineError: it is too far, or the engine failed.
        """

    @abstractmethod
    async def tokens(self) -> float | None:
        """Return the number of tokens generated so far; None where it does not count them.

        Raises:
            EngineError: it does not answer within seconds.
        """

    @abstractmethod
    async def load(self) -> Load | None:
        """Return the load of the engine; None where it does not report any.

        Raises:
            EngineError: it does not answer within seconds.
        """

    @abstractmethod
    async def healthy(self) -> bool:
        """Return whether it answers."""

    @abstractmethod
    async def close(self) -> None:
        """Close the client."""


class Launched(ABC):
    """An engine that is being started. Its launcher calls `stop` in the end, also where it never got ready."""

    @abstractmethod
    def wait_ready(self, timeout_s: float, still_waiting: Callable[[], object] = lambda: None) -> None:
        """Return when it answers.

        Args:
            still_waiting: called several times per second.

        Raises:
            EngineError: it ended, or did not answer in time; with its first error.
        """

    @abstractmethod
    def connect(self, *, version: int = 0, replica: str = "") -> Engine:
        """Return the engine, which is ready; called in the event loop that asks it.

        Args:
            version: of the weights that it was started with.
            replica: name in errors.
        """

    @abstractmethod
    def alive(self) -> bool:
        """Return whether the engine's process is alive."""

    @abstractmethod
    def failure(self, what: str) -> EngineError:
        """Return the error with the reason of the engine's end."""

    @abstractmethod
    def stop(self) -> None:
        """Stop the engine and all its processes, also hanging ones."""
