"""A reward model: a sequence classifier of one label that scores the response to a conversation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pickle import UnpicklingError
from typing import Any, cast

import torch
from transformers import AutoConfig, AutoModelForSequenceClassification
from transformers.utils.logging import disable_progress_bar

from hpcrl.config.sections.environment import RewardServiceConfig
from hpcrl.config.sections.model import Pretrained
from hpcrl.data.chat.judged import JudgedConversations
from hpcrl.data.model_config import longest_input, require_classifier
from hpcrl.errors import DataError

Messages = list[dict[str, str]]


@dataclass(frozen=True)
class RewardModel:
    """Scores responses; for one thread at a time.

    Attributes:
        conversations: as it reads them.
        batch_tokens: of a forward pass at most, padding included; a longer conversation has one of its own.
        padding: token that fills rows up; None: each row has a pass of its own, because the model would not know where it ends.
    """

    model: Any
    conversations: JudgedConversations
    batch_tokens: int
    padding: int | None

    @classmethod
    def load(cls, path: str, settings: RewardServiceConfig, setting: str) -> RewardModel:
        """Return the model of a directory or of the hub, on the GPU where there is one.

        Args:
            settings: of which `model` is not read.
            setting: what names the model, for errors.

        Raises:
            DataError: there is no such model, it is no classifier of one label, or it cannot be loaded.
        """
        remedy = "environment.remote_reward.service.chat_template, --chat-template"
        conversations = JudgedConversations.of(Pretrained(path), settings.chat_template, setting, remedy)
        disable_progress_bar()  # of no use in a log file
        try:
            config = AutoConfig.from_pretrained(path, trust_remote_code=False)
            require_classifier(config, path, setting)
            model = AutoModelForSequenceClassification.from_pretrained(
                path, dtype=getattr(torch, settings.model_dtype), trust_remote_code=False
            )
        except (
            OSError,
            ValueError,
            RuntimeError,
            UnpicklingError,
        ) as error:  # RuntimeError: weights of other shapes than config.json says
            message = " ".join(str(error).split())
            raise DataError(f"{setting}: the reward model {path} cannot be loaded: {message}") from error
        text, own = cast(Any, model.config.get_text_config()), cast("int | None", conversations.tokenizer.pad_token_id)
        if text.pad_token_id is None and own is not None and own < text.vocab_size:
            text.pad_token_id = own
        model.eval().to("cuda" if torch.cuda.is_available() else "cpu")
        conversations = replace(conversations, longest=longest_input(config))
        return cls(model, conversations, settings.max_batch_tokens, text.pad_token_id)

    def tokens(self, messages: Messages, completion: str) -> list[int]:
        """Return the tokens of a conversation that ends with a response; errors as of `JudgedConversations.tokens`."""
        return self.conversations.tokens([*messages, {"role": "assistant", "content": completion}])

    @torch.inference_mode()
    def scores(self, rows: Sequence[Sequence[int]], before: Callable[[], None] = lambda: None) -> list[float]:
        """Return the score of each row of tokens.

        Args:
            before: called before each forward pass.
        """
        found = [0.0] * len(rows)
        for places in self._passes([len(row) for row in rows]):
            before()
            batch, width = [rows[place] for place in places], len(rows[places[0]])
            filled = [[*row, *[self.padding or 0] * (width - len(row))] for row in batch]
            seen = [[1] * len(row) + [0] * (width - len(row)) for row in batch]
            device = self.model.device
            ids, mask = torch.tensor(filled, device=device), torch.tensor(seen, device=device)
            logits_B1 = self.model(input_ids=ids, attention_mask=mask).logits
            for place, score in zip(places, logits_B1[:, 0].float().tolist(), strict=True):
                found[place] = score
        return found

    def _passes(self, lengths: Sequence[int]) -> Iterator[list[int]]:
        batch = list[int]()
        for place in sorted(range(len(lengths)), key=lambda place: -lengths[place]):
            if batch and (self.padding is None or (len(batch) + 1) * lengths[batch[0]] > self.batch_tokens):
                yield batch
                batch = []
            batch.append(place)
        if batch:
            yield batch
