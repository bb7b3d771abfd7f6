"""What hpcrl makes of a conversation: the one place where these tests call it.

An engine that answers what a test wrote stands in for a model: the models of most of these tokenizers are far too large.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from transformers import PreTrainedTokenizerBase

from hpcrl.config import EnvironmentConfig, GeneratorConfig, InferenceEngineConfig, SamplingParams
from hpcrl.config.sections.generator import ChatTemplateConfig
from hpcrl.config.sections.model import Pretrained
from hpcrl.data.conversations import Columns, Renderer, TrainOnWhat
from hpcrl.data.prompts import load_prompts
from hpcrl.data.sources import Source
from hpcrl.data.tokenizer import load_tokenizer
from hpcrl.envs.base import AgentEnvironment, Endpoint, Turn
from hpcrl.errors import DataError
from hpcrl.rollout.endpoint.server import PolicyServer, serving
from hpcrl.rollout.engines.base import Generation
from hpcrl.rollout.generate import GroupGenerator
from hpcrl.types import Work
from tests.released.material import Messages

Refusal = DataError
"""What hpcrl raises of a conversation that it cannot train."""

Trained = tuple[list[int], list[bool]]
"""Token ids, and which of them are trained."""


def tokenizer_of(folder: Path, template: Path | None) -> PreTrainedTokenizerBase:
    own = ChatTemplateConfig(source="file", name_or_path=str(template)) if template else ChatTemplateConfig()
    return load_tokenizer(Pretrained(str(folder)), own)


def supervised(
    tokenizer: PreTrainedTokenizerBase, messages: Messages, tools: Messages, train_on: TrainOnWhat
) -> Trained:
    """Return a row of supervised fine-tuning."""
    row = {"conversations": messages, "tools": tools}
    (found,) = Renderer(tokenizer, Columns(), {}, train_on=train_on).sequences(row)
    return list(found.token_ids), list(found.mask)


def preference(
    tokenizer: PreTrainedTokenizerBase, prompt: Messages, answers: Sequence[str], tools: Messages
) -> list[Trained]:
    """Return a pair of DPO: the chosen and the rejected answer, each behind the prompt."""
    chosen, rejected = ([{"role": "assistant", "content": text}] for text in answers)
    row = {"prompt": prompt, "chosen": chosen, "rejected": rejected, "tools": tools}
    pair = Renderer(tokenizer, Columns(format="preference"), {}).sequences(row)
    return [(list(one.token_ids), list(one.mask)) for one in pair]


@dataclass
class Played:
    """A sample of reinforcement learning.

    Attributes:
        prompts: token ids that the engine was given, turn by turn.
        texts: what the environment, or the client of the endpoint, was told that the policy said.
        trained: the sample's one row.
    """

    prompts: list[list[int]] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    trained: Trained = field(default_factory=lambda: ([], []))


class Scripted:
    """An engine that answers with given token ids, turn by turn."""

    version = 0

    def __init__(self, turns: Sequence[list[int]], played: Played) -> None:
        self._turns, self._played = iter(turns), played

    async def generate(self, prompt_ids: Sequence[int], n_samples: int, *_: Any) -> list[Generation]:
        assert n_samples == 1
        self._played.prompts.append(list(prompt_ids))
        token_ids = next(self._turns)
        return [Generation(token_ids, [-1.0] * len(token_ids), "stop", [0] * len(token_ids))]


PLAYED = list[tuple[Played, list[Messages]]]()
"""The sample that is being played, and what follows each of the policy's answers; the last one counts."""


class Observing:
    """An environment that answers with given messages."""

    def __init__(self, _extras: Mapping[str, Any]) -> None:
        self._played, observations = PLAYED[-1]
        self._observations = iter(observations)

    def init(self, messages: Messages) -> Messages:
        return messages

    def step(self, action: str) -> Turn:
        self._played.texts.append(action)
        following = next(self._observations, [])
        return Turn(following, 0.0, done=not following)

    def close(self) -> None:
        return


class Asking(AgentEnvironment):
    """A program that has the conversation with the policy at its endpoint."""

    def __init__(self, extras: Mapping[str, Any]) -> None:
        self._tools = extras.get("tools")

    def play(self, messages: Messages, endpoint: Endpoint) -> Turn:
        played, observations = PLAYED[-1]
        for following in [*observations, []]:
            body = {"model": endpoint.model, "messages": messages, **({"tools": self._tools} if self._tools else {})}
            headers = {"authorization": f"Bearer {endpoint.key}"}
            reply = httpx.post(f"{endpoint.base_url}/chat/completions", json=body, headers=headers, timeout=60)
            if reply.status_code == 400:
                raise DataError(reply.text)
            answer = reply.raise_for_status().json()["choices"][0]["message"]
            played.texts.append(answer["content"] or "")
            messages = [*messages, answer, *following]
        return Turn([], 0.0, done=True)


def play(
    tokenizer: PreTrainedTokenizerBase,
    row: dict[str, Any],
    turns: Sequence[list[int]],
    observations: Sequence[Messages],
    place: Path,
    *,
    at_endpoint: bool = False,
) -> Played:
    """Return a sample of a prompt's row.

    Args:
        turns: token ids that the policy says.
        observations: the messages between these turns.
        place: a folder in which the dataset is written.
        at_endpoint: whether a program has the conversation, or else an environment.
    """
    played = Played()
    PLAYED.append((played, list(observations)))
    environment = f"{__name__}:{'Asking' if at_endpoint else 'Observing'}"
    (place / "rows.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
    (prompt,) = load_prompts([Source(str(place / "rows.jsonl"))], environment)
    config = GeneratorConfig(
        max_turns=len(turns),
        max_input_length=1 << 16,
        sampling_params=SamplingParams(max_generate_length=1 << 12),
        inference_engine=InferenceEngineConfig(
            backend="transformers", enable_http_endpoint=at_endpoint, served_model_name="policy"
        ),
    )

    async def generate() -> Any:
        opened: AbstractAsyncContextManager[PolicyServer | None] = (
            serving(config, tokenizer, 0) if at_endpoint else nullcontext()
        )
        async with opened as server:
            engine: Any = Scripted(turns, played)
            generator = GroupGenerator(engine, tokenizer, config, EnvironmentConfig(), server=server)
            return await generator.generate(Work("g0", "train", prompt, 1, 7))

    group = asyncio.run(generate())
    if group.failures:
        raise DataError(group.failures[0])
    ((sample,),) = group.rows
    played.trained = sample.token_ids.tolist(), [mask > 0 for mask in sample.loss_mask.tolist()]
    return played
