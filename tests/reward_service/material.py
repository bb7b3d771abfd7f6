"""A tiny reward model, and a service of it in a thread."""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForSequenceClassification

from hpcrl.config.sections.environment import RewardServiceConfig
from hpcrl.reward_service.model import RewardModel
from hpcrl.reward_service.scoring import Scoring
from hpcrl.reward_service.serve import serve_rewards
from hpcrl.runtime.http_server import Proof, bind
from tests.paths import QUICKSTART

POLICY = QUICKSTART.parent / "quickstart" / "model"
FILES = ("chat_template.jinja", "tokenizer.json", "tokenizer_config.json")


def write_reward_model(folder: Path, labels: int = 1) -> Path:
    """Write a classifier with the sizes and the tokenizer of the quickstart's model, and weights of its own."""
    torch.manual_seed(3)
    model = AutoModelForSequenceClassification.from_config(
        AutoConfig.from_pretrained(POLICY, num_labels=labels, max_position_embeddings=256)
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)  # so that scores differ
    model.save_pretrained(folder)
    for name in FILES:
        shutil.copy(POLICY / name, folder)
    return folder


@dataclass
class Running:
    """A service in a thread of this process."""

    url: str
    told: list[dict[str, int]] = field(default_factory=list)
    asked: threading.Event = field(default_factory=threading.Event)
    errors: list[BaseException] = field(default_factory=list)
    thread: threading.Thread | None = None

    def stop(self) -> None:
        self.asked.set()
        assert self.thread
        self.thread.join(30)


@contextmanager
def running(model: Any, proof: Proof, scoring: Callable[[Any], Scoring] = Scoring) -> Iterator[Running]:
    listener = bind("127.0.0.1")
    found = Running("http://{}:{}".format(*listener.getsockname()[:2]))

    def run() -> None:
        try:
            asyncio.run(serve_rewards(model, "tiny", listener, proof, scoring(model), found.asked, found.told.append))
        except BaseException as error:  # noqa: BLE001  the test looks at it
            found.errors.append(error)

    found.thread = threading.Thread(target=run)
    found.thread.start()
    try:
        yield found
    finally:
        found.stop()


def load(path: Path, batch_tokens: int = 1000, **settings: Any) -> RewardModel:
    config = RewardServiceConfig(model_dtype="float32", max_batch_tokens=batch_tokens, **settings)
    return RewardModel.load(str(path), config, "setting")


class Slow:
    """A reward model whose passes wait until they may go on; the score is the number of tokens."""

    batch_tokens = 8

    def __init__(self) -> None:
        self.may, self.passes = threading.Semaphore(0), list[list[int]]()
        self.begun = False

    def tokens(self, messages: list[dict[str, str]], completion: str) -> list[int]:
        return [len(message["content"]) for message in messages] + [0] * len(completion)

    def scores(self, rows: Sequence[Sequence[int]], before: Callable[[], None]) -> list[float]:
        before()
        self.begun = True
        self.may.acquire()
        self.passes.append([len(row) for row in rows])
        if any(len(row) > 50 for row in rows):
            raise MemoryError("a row is too long for this device")
        return [float(len(row)) for row in rows]
