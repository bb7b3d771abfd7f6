"""Counts the tokens of a dataset's prompts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from hpcrl.config.sections.generator import ChatTemplateConfig
from hpcrl.config.sections.model import Pretrained
from hpcrl.data.chat.messages import read_tools
from hpcrl.data.chat.prompt_tokens import ChatTurns
from hpcrl.data.tokenizer import load_tokenizer
from hpcrl.data.vision.messages import without_images
from hpcrl.errors import DataError
from hpcrl.types import Prompt

if TYPE_CHECKING:
    from hpcrl.data.vision.reader import Preparation


def token_counter(
    model: Pretrained, template: ChatTemplateConfig, options: Mapping[str, Any], images: Preparation | None = None
) -> Callable[[Prompt], int]:
    """Return a function that counts the tokens of a prompt; arguments and errors as of `load_tokenizer` and `ChatTurns.opening`, with the row.

    Args:
        images: how they are prepared.
    """
    from hpcrl.data.vision.reader import ImageReader

    tokenizer, reader = load_tokenizer(model, template), ImageReader.of(model, images)
    turns = ChatTurns(tokenizer, options, template.allow_special_tokens)

    def count(prompt: Prompt) -> int:
        try:
            messages, shown = without_images(prompt.messages)
            if shown and reader is None:
                raise DataError(f"it shows images, and {model} sees none; use a vision-language model (docs/vision.md)")
            more = sum(len(reader.ids(one)) - 1 for one in shown) if reader else 0
            return len(turns.prompt_ids(messages, read_tools(prompt.extras.get("tools")))) + more
        except DataError as error:
            raise DataError(f"row uid {prompt.uid}, of {prompt.data_source}: {error}") from error

    return count
