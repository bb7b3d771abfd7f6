"""Tokenizes rows of datasets, with a mask of trained tokens: conversations, texts, and pairs of answers.

The text of a conversation is written message by message: what the chat template adds for a message, where it is the last one. So a template
that drops what the assistant thought in earlier turns (Qwen3's, for one) still gives each turn with its thoughts, as the policy has to say
it. An assistant's message is trained from behind what the template writes before it (its generation prompt) to the token that ends it. Where
a template drops nothing, the text is the one that it makes of the whole conversation. The text is tokenized as a whole, and its tokens are
divided by the characters that they stand for (hpcrl/data/chat/encode.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from hpcrl.config.sections.model import Pretrained
from hpcrl.data.chat.encode import Piece, cut_messages, encoded, encoded_pieces, special_tokens, uncut_messages
from hpcrl.data.chat.ending import text_end
from hpcrl.data.chat.lost import lost_of
from hpcrl.data.chat.messages import read_messages, read_tools, with_system
from hpcrl.data.chat.prompt_tokens import protected
from hpcrl.data.chat.template import ASSISTANT, ChatTemplate, Messages, Tools, alike
from hpcrl.data.vision.frames import Shown
from hpcrl.data.vision.messages import with_images, without_images
from hpcrl.data.vision.reader import ImageReader
from hpcrl.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Format = Literal["conversations", "prompt_response", "text", "tokens", "preference", "labelled"]
TrainOnWhat = Literal["assistant", "last_turn", "all"]

RESPONSE = "response"
"""The column with the response where none is named."""
COMPLETION = "completion"
"""The column with the response that has a label where none is named."""
_INSTRUCTION, _INPUT = "instruction", "input"
_MOST = 2**31
_LARGEST = 1e30
_UNTRAINED = -100  # transformers' label of a token that is not trained


@dataclass(frozen=True)
class Columns:
    """Names of the columns of a row.

    Attributes:
        format: what kind of rows these are; the others name the columns of one kind each.
    """

    format: Format = "conversations"
    conversation: str = "conversations"
    prompt: str = "prompt"
    response: str | None = None
    text: str = "text"
    chosen: str = "chosen"
    rejected: str = "rejected"
    margin: str | None = None
    images: str = "images"
    videos: str = "videos"
    label: str | None = None

    @property
    def sequences(self) -> int:
        """Number of token sequences per row."""
        return 2 if self.format == "preference" else 1


@dataclass(frozen=True)
class Tokens:
    """A row as it is trained, or one answer of a pair with its prompt.

    Attributes:
        token_ids: T of them.
        mask: of each, whether it is trained.
        margin: of the chosen answer of a pair, over the rejected one; of an answer with a label 1 where it is desirable, 0 elsewhere.
        images: that it shows, and videos, in their order: where what stands for each begins, how many tokens that is, and itself.
        prompt: what images are to be made of; None: they are shown, and texts are made.
        lost: what the chat template leaves out of messages that are trained.
        special: special tokens within what is trained of messages, such as marks of thoughts.
    """

    token_ids: list[int]
    mask: list[bool]
    margin: float = 0.0
    images: Sequence[tuple[int, int, Shown]] = ()
    prompt: str | None = None
    lost: Sequence[str] = ()
    special: int = 0

    @property
    def trained(self) -> int:
        return sum(self.mask)

    def cut(self, length: int) -> Tokens:
        """Return its first tokens, so many or as many as end before an image that would be divided."""
        length = min([length, *(begin for begin, count, _ in self.images if begin < length < begin + count)])
        images = [image for image in self.images if image[0] < length]
        return replace(self, token_ids=self.token_ids[:length], mask=self.mask[:length], images=images)


@dataclass(frozen=True)
class Renderer:
    """Makes tokens of rows.

    Attributes:
        options: arguments of the chat template, `generator.chat_template_kwargs`.
        special_tokens: those that are written in texts are not text; `generator.chat_template.allow_special_tokens`.
        train_on: which tokens of a conversation are trained: those of the assistant's messages, of its last one, or all, but those of images.
        reader: of images; None: the model sees none.
        refuse_lost: whether a conversation is refused of which the template leaves out something that is to be trained.
        model: whose files name the token that ends a text; None: only the tokenizer does.
    """

    tokenizer: PreTrainedTokenizerBase
    columns: Columns
    options: Mapping[str, Any]
    special_tokens: bool = False
    train_on: TrainOnWhat = "assistant"
    reader: ImageReader | None = None
    refuse_lost: bool = True
    model: Pretrained | None = None

    def decode(self, token_ids: list[int]) -> str:
        """Return tokens as a text."""
        return str(self.tokenizer.decode(token_ids))

    def sequences(self, row: Any, folder: Path | None = None) -> list[Tokens]:
        """Return a row as it is trained: one sequence, or of a pair the chosen answer and the rejected one, each behind the prompt.

        Args:
            folder: of relative paths of images; None: there are none.

        Raises:
            DataError: it is not what `columns` says, or the chat template refuses it.
        """
        if not isinstance(row, Mapping):
            raise DataError(f"expected an object with columns, found {type(row).__name__}")
        match self.columns.format:
            case "conversations":
                messages = read_messages(_column(row, self.columns.conversation, "conversation_column"))
                return [self._conversation(self._shown(with_system(messages, row), row, folder), row)]
            case "prompt_response":
                return [self._conversation(self._shown(self._answered(row, RESPONSE), row, folder), row)]
            case "labelled":
                answer = self._conversation(self._shown(self._answered(row, COMPLETION), row, folder), row)
                return [replace(answer, margin=_label(row, self.columns.label))]
            case "text":
                return [self._text(_column(row, self.columns.text, "text_column"))]
            case "tokens":
                return [_given(row)]
            case "preference":
                chosen, rejected = self._pair(row, folder)
                return [replace(chosen, margin=_margin(row, self.columns.margin)), rejected]

    @cached_property
    def end_of_text(self) -> int | None:
        """The token that ends a plain text."""
        return text_end(self.tokenizer, self.model)

    @cached_property
    def _template(self) -> ChatTemplate:
        return ChatTemplate(self.tokenizer, self.options)

    def pieces(self, messages: Messages, tools: Tools = ()) -> list[Piece]:
        """Return a conversation as texts that are trained and texts that are not, in turns."""
        return self._pieces(messages, tools)[0]

    def _pieces(self, messages: Messages, tools: Tools) -> tuple[list[Piece], list[str]]:
        template = self._template
        lost = template.lost_calls(messages)
        counts = [bool(message.get("weight", 1)) for message in messages]
        plain = [{name: value for name, value in message.items() if name != "weight"} for message in messages]
        plain = uncut_messages(plain) if self.special_tokens else protected(template, plain)
        turns = [at for at, message in enumerate(plain) if message["role"] == ASSISTANT]
        found, written = list[Piece](), 0
        if self.train_on == "last_turn" and turns:  # what comes before it is what the template makes of it
            written = turns[-1]
            before = [(template.text(plain[:written], tools), False)] if written else []
            found, turns, plain = before, turns[-1:], plain[: written + 1]
        for at in [*turns, len(plain)]:
            if at > written:
                found.append((template.others(plain[:written], plain[written:at], tools), False))
            if at < len(plain):
                before, rendered, after = template.turn(plain[:at], plain[at], tools)
                found += [(before, False), (rendered, counts[at]), (after, False)]
                missing = lost_of(template, plain[at], before, rendered) if counts[at] else []
                lost += [f"message {at}: {one}" for one in missing]
            written = at + 1
        everything = self.train_on == "all"
        if not everything:  # which would train it as what follows an answer
            found.append((template.closing, False))
        runs = groupby(found, lambda piece: everything or piece[1])
        pieces = [(text, mask) for mask, run in runs if (text := "".join(text for text, _ in run))]
        return pieces, list(dict.fromkeys(lost))

    def _answered(self, row: Mapping[str, Any], unnamed: str) -> Messages:
        columns = self.columns
        prompt = self._prompt(row, _column(row, columns.prompt, "prompt_column"))
        answer = read_messages(_column(row, columns.response or unnamed, "response_column"), ASSISTANT)
        return [*_untrained(prompt), *answer]

    def _prompt(self, row: Mapping[str, Any], value: Any) -> Messages:
        if self.columns.prompt == _INSTRUCTION and isinstance(value, str) and row.get(_INPUT):
            value = f"{value}\n\n{row[_INPUT]}"
        return with_system(read_messages(value, "user"), row)

    def _pair(self, row: Mapping[str, Any], folder: Path | None) -> list[Tokens]:
        """Return the chosen and the rejected answer, each behind its prompt.

        Answers that begin with a message of the assistant follow the prompt's column. Others are whole: what both begin with is the prompt.
        """
        columns = self.columns
        names = {"chosen_column": columns.chosen, "rejected_column": columns.rejected}
        answers = [_column(row, name, setting) for setting, name in names.items()]
        prompt = row.get(columns.prompt)
        if prompt is None and all(isinstance(answer, str) for answer in answers):
            return _behind_common(*map(self._text, answers))
        chosen, rejected = (read_messages(answer, ASSISTANT) for answer in answers)
        if (chosen[0]["role"] == ASSISTANT) != (rejected[0]["role"] == ASSISTANT):
            raise DataError(
                f"column `{columns.chosen}` begins with a message of {chosen[0]['role']}, column `{columns.rejected}` with one of "
                f"{rejected[0]['role']}; expected two answers of the assistant, or two whole conversations"
            )
        if prompt is not None and chosen[0]["role"] == ASSISTANT:
            before = self._prompt(row, prompt)
        else:
            same = alike(chosen, rejected)
            before, chosen, rejected = with_system(chosen[:same], row), chosen[same:], rejected[same:]
        whole = ([*_untrained(before), *answer] for answer in (chosen, rejected))
        return [self._conversation(self._shown(messages, row, folder), row) for messages in whole]

    def _shown(self, messages: Messages, row: Mapping[str, Any], folder: Path | None) -> Messages:
        return with_images(messages, row.get(self.columns.images), folder, row.get(self.columns.videos))

    def _conversation(self, messages: Messages, row: Mapping[str, Any]) -> Tokens:
        messages, images = without_images(messages)
        if images and self.reader is None:
            raise DataError("it shows images, and the model sees none; use a vision-language model (docs/vision.md)")
        pieces, lost = self._pieces(messages, read_tools(row.get("tools")))
        if lost and self.refuse_lost:
            raise DataError(
                f"the chat template leaves out text that should be trained: {'; '.join(lost)}. Use another template "
                '(generator.chat_template), give such messages the weight 0, or set data.lost = "train" to train the rest'
            )
        trained = special_tokens(self.tokenizer).findall("".join(text for text, mask in pieces if mask))
        special = sum(one not in self._template.structure for one in trained)
        tokens = Tokens(*encoded_pieces(self.tokenizer, pieces), lost=lost, special=special)
        return tokens if self.reader is None else _placed(tokens, images, self.reader)

    def _text(self, text: Any) -> Tokens:
        if not isinstance(text, str):
            raise DataError(f"column `{self.columns.text}`: expected a text, found {text!r:.80}")
        ids = encoded(
            self.tokenizer, uncut_messages(text) if self.special_tokens else cut_messages(self.tokenizer, text)
        )
        bos = cast("int | None", self.tokenizer.bos_token_id)
        begin = [bos] if bos is not None and self.tokenizer.encode("")[:1] == [bos] else []
        end = [] if self.end_of_text is None else [self.end_of_text]
        return Tokens([*begin, *ids, *end], [False] * len(begin) + [True] * (len(ids) + len(end)))


def _untrained(messages: Messages) -> Messages:
    return [{**message, "weight": 0} for message in messages]


def _placed(row: Tokens, images: Sequence[Shown], reader: ImageReader) -> Tokens:
    """Return a row with what stands for each image and video, none of it trained."""
    ids = [reader.ids(image) for image in images]
    try:
        places = reader.placed(row.token_ids, images, ids)
    except DataError as error:
        raise DataError(
            f"{error}; what comes behind the last answer cannot show any with data.train_on_what = last_turn"
        ) from error
    token_ids, mask, placed = list[int](), list[bool](), list[tuple[int, int, Shown]]()
    for token_id, trained, place in zip(row.token_ids, row.mask, places, strict=True):
        stands = token_id in reader.never_said
        if stands:
            placed.append((len(token_ids), len(place), images[len(placed)]))
        token_ids += place
        mask += [trained and not stands] * len(place)
    return replace(row, token_ids=token_ids, mask=mask, images=placed)


def _margin(row: Mapping[str, Any], column: str | None) -> float:
    if column is None:
        return 0.0
    value = _column(row, column, "margin_column")
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < _LARGEST:
        raise DataError(f"column `{column}`: expected a finite number, the margin of the pair, found {value!r:.80}")
    return float(value)


def _label(row: Mapping[str, Any], column: str | None) -> float:
    assert column is not None
    value = _column(row, column, "label_column")
    if value not in (0, 1):
        raise DataError(
            f"column `{column}`: expected true or false, whether the answer is desirable, found {value!r:.80}"
        )
    return float(value)


def _behind_common(chosen: Tokens, rejected: Tokens) -> list[Tokens]:
    """Return both texts, of which the tokens that they begin with alike are not trained."""
    same = alike(chosen.token_ids, rejected.token_ids)
    return [Tokens(text.token_ids, [False] * same + text.mask[same:]) for text in (chosen, rejected)]


def _column(row: Mapping[str, Any], name: str, setting: str) -> Any:
    if row.get(name) is None:
        there = ", ".join(sorted(name for name, value in row.items() if value is not None)) or "none"
        raise DataError(f"no column `{name}` (data.{setting}); its columns are {there}")
    return row[name]


def _given(row: Mapping[str, Any]) -> Tokens:
    """Return the tokens of a row that has them: input_ids, with labels, -100 where a token is not trained, or with a loss_mask, or all."""
    ids = _whole_numbers(row, "input_ids")
    labels, mask = row.get("labels"), row.get("loss_mask")
    if labels is not None:
        labels = _whole_numbers(row, "labels", _UNTRAINED, len(ids))
        wrong = next(
            (at for at, (one, label) in enumerate(zip(ids, labels, strict=True)) if label not in (one, _UNTRAINED)),
            None,
        )
        if wrong is not None:
            raise DataError(
                f"column `labels`: entry {wrong} is {labels[wrong]}, expected the token's own id {ids[wrong]} or -100"
            )
        return Tokens(ids, [label != _UNTRAINED for label in labels])
    if mask is not None:
        return Tokens(ids, [value != 0 for value in _whole_numbers(row, "loss_mask", 0, len(ids))])
    return Tokens(ids, [True] * len(ids))


def _whole_numbers(row: Mapping[str, Any], name: str, least: int = 0, count: int | None = None) -> list[int]:
    values = row.get(name)
    if not isinstance(values, list) or not all(type(one) is int and least <= one < _MOST for one in values):
        raise DataError(f"column `{name}`: expected whole numbers from {least}, found {values!r:.80}")
    if count is not None and len(values) != count:
        raise DataError(f"column `{name}`: expected {count} entries, as many as input_ids, found {len(values)}")
    return values
