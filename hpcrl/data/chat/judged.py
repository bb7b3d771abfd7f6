"""Converts conversations into the form that reward models read."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from hpcrl.config.sections.generator import ChatTemplateConfig
from hpcrl.config.sections.model import Pretrained
from hpcrl.data.chat.encode import encoded
from hpcrl.data.chat.prompt_tokens import protected
from hpcrl.data.chat.template import ChatTemplate, Messages
from hpcrl.data.tokenizer import load_tokenizer
from hpcrl.errors import ConfigError, DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class JudgedConversations:
    """Whole conversations, as a reward model reads them.

    Attributes:
        longest: tokens that one may have; None: the model names no limit.
    """

    tokenizer: PreTrainedTokenizerBase
    longest: int | None = None

    @classmethod
    def of(cls, model: Pretrained, file: str | None, setting: str, remedy: str) -> JudgedConversations:
        """Return the renderer of a reward model, for conversations of any length.

        Args:
            file: Jinja file of its chat template; None: its tokenizer has one.
            setting: what names the model, for errors.
            remedy: what names a chat template, for errors.

        Raises:
            DataError: there is no such model.
            ConfigError: its tokenizer has no chat template, and none is given; or that cannot be read.
        """
        template = ChatTemplateConfig(source="file", name_or_path=file) if file else ChatTemplateConfig()
        tokenizer = load_tokenizer(model, template, setting)
        if tokenizer.chat_template is None:
            raise ConfigError(
                f"{setting}: the tokenizer of {model} has no chat template; expected one that writes a conversation as the reward model was "
                f"trained with, as a Jinja file ({remedy})"
            )
        return cls(tokenizer)

    @cached_property
    def _template(self) -> ChatTemplate:
        return ChatTemplate(self.tokenizer, {})

    def tokens(self, messages: Messages) -> list[int]:
        """Return the tokens of a conversation, as the chat template writes it; special tokens in texts are text.

        Raises:
            DataError: the template refuses it, or it is longer than the model takes.
        """
        text = self._template.whole(protected(self._template, messages))
        found = encoded(self.tokenizer, text)
        if self.longest is not None and len(found) > self.longest:
            raise DataError(
                f"a conversation has {len(found)} tokens, and the reward model takes at most {self.longest}; lower "
                "generator.sampling_params.max_generate_length, or take a reward model for longer ones"
            )
        if not found:
            raise DataError("the chat template of the reward model writes nothing for a conversation")
        return found
