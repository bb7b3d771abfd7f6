"""Tokenizes prompts and the text between turns, and decodes the policy's responses.

A prompt is tokenized as a whole. It then grows by the policy's own tokens, which are never tokenized again, and by the template's text
between two turns, with its token ids in the whole text.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import TYPE_CHECKING, Any

from hpcrl.config.sections.model import Pretrained
from hpcrl.data.chat.encode import cut_messages, encoded, uncut_messages
from hpcrl.data.chat.ending import end_ids
from hpcrl.data.chat.template import ASSISTANT, ChatTemplate, Messages, Tools
from hpcrl.data.vision.frames import Shown
from hpcrl.data.vision.messages import without_images
from hpcrl.data.vision.reader import Context, ImageReader
from hpcrl.errors import ConfigError, DataError
from hpcrl.text import said_in

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_BEFORE = "x"  # in the place of a response, where a tokenizer depends on the text before


def protected(template: ChatTemplate, messages: Messages) -> Messages:
    """Return messages in which special tokens are text, as `cut_messages` marks them, but for those that an assistant itself may write."""
    tokenizer = template.tokenizer
    if not any(message["role"] == ASSISTANT for message in messages):
        return cut_messages(tokenizer, messages)
    own = {*tokenizer.all_special_tokens, *map(str, tokenizer.added_tokens_decoder.values())} - template.structure
    return [cut_messages(tokenizer, one, own if one["role"] == ASSISTANT else ()) for one in messages]


class ChatTurns:
    """Tokens of a chat template around the policy's responses.

    Args:
        options: arguments of the template, `generator.chat_template_kwargs`.
        special_tokens: those that are written in messages are not text; `generator.chat_template.allow_special_tokens`.
        reader: of images in messages; None: the policy sees none.
        model: whose files name tokens that end a turn; None: only the tokenizer and the template do.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        options: Mapping[str, Any],
        special_tokens: bool = False,
        reader: ImageReader | None = None,
        model: Pretrained | None = None,
    ) -> None:
        self._tokenizer, self._special_tokens = tokenizer, special_tokens
        self._template, self._reader, self._model = ChatTemplate(tokenizer, options), reader, model

    @property
    def never_said(self) -> Sequence[int]:
        """Tokens that the policy may not say, since they stand for images."""
        return self._reader.never_said if self._reader else ()

    @cached_property
    def ends(self) -> frozenset[int]:
        """Ids that end a turn; errors as of `end_ids`."""
        endings: Sequence[str] = ()
        with suppress(ConfigError, DataError):  # no template, or one for other conversations: those that need it say so
            endings = self._template.ends
        return end_ids(self._tokenizer, self._model, endings)

    @cached_property
    def ending(self) -> list[int]:
        """Token ids that end the policy's message, as the template writes it; empty where it writes no token for it."""
        return encoded(self._tokenizer, self._ending, behind=_BEFORE)

    @cached_property
    def _ending(self) -> str:
        try:
            return self._template.ending if self._template.ends_with_token else ""
        except (ConfigError, DataError):  # no template, or one for other conversations: those that need it say so
            return ""

    def opening(self, messages: Messages, tools: Tools = ()) -> Context:
        """Return the prompt of the first turn.

        Raises:
            DataError: the template refuses the messages, or an image cannot be shown to the policy.
        """
        bare, images = self._bare(messages)
        return self._with_images(self.prompt_ids(bare, tools), images)

    def prompt_ids(self, bare: Messages, tools: Tools = ()) -> list[int]:
        """Return the token ids of a prompt in which each image is one placeholder, as of `without_images`; errors as of `opening`."""
        self._template.check_calls(bare)
        return encoded(self._tokenizer, self._template.text(self._cut(bare), tools, prompt=True))

    def following(self, observations: Messages, tools: Tools = ()) -> Context:
        """Return the template's text between the `ending` of a turn and the next response."""
        bare, images = self._bare(observations)
        rest = self._template.after(self._cut(bare), tools, prompt=True)
        return self._with_images(encoded(self._tokenizer, rest, behind=self._ending or _BEFORE), images)

    def between(self, token_ids: Sequence[int], observations: Messages, tools: Tools = (), *, end: bool) -> Context:
        """Return the token ids between the policy's turn, the last of `token_ids`, and its next response.

        Args:
            end: whether a turn that the policy did not end itself is ended as the template does it.
        """
        following, last = self.following(observations, tools), token_ids[-1]
        if last in self.ends:  # some templates end a turn by the role of the next one
            repeated = following.token_ids[:1] == [last]
            return Context(following.token_ids[repeated:], following.images)
        return Context(self.ending if end else []).followed_by(following)

    def plain(self, observations: Messages) -> Context:
        """Return an environment's messages without the template, one text after the other.

        Raises:
            DataError: it shows an image, which has no place in a text.
        """
        if any(not isinstance(message["content"], str) for message in observations):
            raise DataError("an observation shows an image; set generator.use_conversation_multi_turn to true")
        return Context(self.encoded("".join(said_in(message["content"]) for message in observations), behind=_BEFORE))

    def encoded(self, text: str, behind: str = "") -> list[int]:
        """Return the token ids of an environment's text; `behind` is as of `encode.encoded`."""
        cut = uncut_messages(text) if self._special_tokens else cut_messages(self._tokenizer, text)
        return encoded(self._tokenizer, cut, behind)

    def continued(self, token_ids: Sequence[int], text: str) -> list[int]:
        """Return the token ids of a text that goes on behind others, of which there is at least one."""
        return self.encoded(text, str(self._tokenizer.decode([token_ids[-1]])))

    def count_of(self, text: str, token_ids: Sequence[int]) -> int | None:
        """Return the number of first tokens that decode to exactly that text; None: it ends within one, or differs."""
        count = bisect_left(range(len(token_ids)), len(text), key=lambda end: len(self.decoded(token_ids[:end])))
        return count if self.decoded(token_ids[:count]) == text else None

    def decoded(self, token_ids: Sequence[int]) -> str:
        """Return the text of a response, without its stop token and other tokens around messages.

        Special tokens that an assistant itself writes, such as marks of thoughts, stay.
        """
        return str(self._tokenizer.decode([one for one in token_ids if one not in self._around]))

    @cached_property
    def _around(self) -> frozenset[int]:
        known = {str(token): token_id for token_id, token in self._tokenizer.added_tokens_decoder.items()}
        named = {known[token] for token in self._template.structure if token in known}
        return self.ends | named | set(self.never_said)

    def text(self, token_ids: Sequence[int], stop: Sequence[str], *, keep: bool) -> str:
        """Return a response as `decoded`, up to the stop text that ended it; arguments as in `cut_at_stop`."""
        text = self.decoded(token_ids)
        if not stop:
            return text
        before = self.decoded(token_ids[:-1]).rstrip(HALF_A_CHARACTER)
        return cut_at_stop(text, len(before), stop, keep=keep)

    def _cut(self, messages: Messages) -> Messages:
        return uncut_messages(messages) if self._special_tokens else protected(self._template, messages)

    def count_images(self, messages: Messages) -> Iterator[int]:
        """Return the tokens of each image and video of messages, of which only headers are read when it is asked for; errors as of `opening`."""
        _, images = self._bare(messages)
        if (reader := self._reader) is None:
            return iter(())
        return (len(reader.ids(image) if (known := reader.known(image)) is None else known.ids) for image in images)

    def _bare(self, messages: Messages) -> tuple[Messages, list[Shown]]:
        bare, images = without_images(messages)
        if images and self._reader is None:  # many templates of text models fail at parts, which says less
            raise DataError(
                "a message shows an image or a video, and the policy is a model that takes none; use a vision-language model"
            )
        return bare, images

    def _with_images(self, token_ids: list[int], images: Sequence[Shown]) -> Context:
        return Context(token_ids) if self._reader is None else self._reader.context(token_ids, images)


HALF_A_CHARACTER = "\ufffd"  # what tokens decode to that end within a character


def cut_at_stop(text: str, before: int, stop: Sequence[str], *, keep: bool) -> str:
    """Return `text` up to the first stop text that its last token completed, the whole text if there is none.

    Args:
        before: characters of the text without its last token.
        keep: whether the stop text stays at the end.
    """
    starts = {one: text.find(one, max(0, before - len(one) + 1)) for one in stop}
    found = [one for one in stop if starts[one] >= 0]
    if not found:
        return text
    first = min(found, key=lambda one: starts[one] + len(one))
    return text[: starts[first] + len(first) * keep]
