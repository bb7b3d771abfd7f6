"""Released tokenizers and shapes of conversations: hpcrl trains and prompts with the ids of tokenizer.json for the template's text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from tests.released import subject
from tests.released.expected import Reference, Refused, Turn
from tests.released.material import CASES, SHAPES, Messages, Shape, assistant, folder_of, template_file

pytestmark = pytest.mark.released

_NOT_WRITTEN = "the template refuses this conversation, or leaves out what the assistant does; test_supervised has it"

Tokenizers = tuple[Reference, PreTrainedTokenizerBase]


@pytest.fixture(scope="module", params=CASES)
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizers:
    """A tokenizer by itself, and as hpcrl loads it."""
    case = CASES[request.param]
    folder = folder_of(case, tmp_path_factory.mktemp("tokenizers"))
    if not folder.is_dir():
        pytest.skip(f"{folder} is not there; make released installs it")
    own = template_file(case)
    return Reference(folder, case, own), subject.tokenizer_of(folder, own)


@pytest.fixture(params=SHAPES)
def shape(request: pytest.FixtureRequest) -> Shape:
    return SHAPES[request.param]


def turns_of(reference: Reference, shape: Shape) -> list[Turn] | None:
    """Return the answers of a conversation; None: the template refuses it, or leaves out what the assistant does."""
    try:
        turns = reference.turns(shape.messages, shape.tools)
    except Refused:
        return None
    whole = "".join(turn.answer for turn in turns)
    return turns if all(text in whole for text in shape.shown) else None


def stretches(trained: subject.Trained) -> list[list[int]]:
    """Return the tokens that are trained, one list for each answer."""
    pairs = zip(*trained, strict=True)
    return [[token_id for token_id, _ in run] for mask, run in groupby(pairs, key=lambda pair: pair[1]) if mask]


def check(reference: Reference, found: subject.Trained, turns: Sequence[Turn], *, last_turn: bool = False) -> None:
    """Compare a row with the text of its turns."""
    texts = [(text, trained) for turn in turns for text, trained in ((turn.before, False), (turn.answer, True))]
    if last_turn:
        texts, turns = [(text, at == len(texts) - 1) for at, (text, _) in enumerate(texts)], turns[-1:]
    ids, mask = reference.trained(texts)
    assert reference.text(found[0][: len(ids)]) == reference.text(ids)
    assert found[0][: len(ids)] == ids
    assert found[1][: len(ids)] == mask
    assert not any(found[1][len(ids) :])
    check_answers(reference, stretches(found), turns)


def check_answers(reference: Reference, said: list[list[int]], turns: Sequence[Turn]) -> None:
    """Compare trained tokens with the answers that are to come back from them, each with its end token once."""
    assert len(said) == len(turns)
    for token_ids, turn in zip(said, turns, strict=True):
        assert token_ids.count(reference.id_of(turn.end)) == 1
        assert token_ids[-1] == reference.id_of(turn.end)
        # a token may have characters on both sides of the border: line breaks of the header and of the answer, for one
        assert reference.text(token_ids).endswith(reference.text(reference.ids(turn.answer)).lstrip())


def test_supervised(both: Tokenizers, shape: Shape) -> None:
    reference, tokenizer = both
    turns = turns_of(reference, shape)
    if turns is None:
        with pytest.raises(subject.Refusal):
            subject.supervised(tokenizer, shape.messages, shape.tools, "assistant")
        return
    check(reference, subject.supervised(tokenizer, shape.messages, shape.tools, "assistant"), turns)


def test_supervised_last_turn(both: Tokenizers, shape: Shape) -> None:
    """The text is the template's own, from its beginning to the end token."""
    reference, tokenizer = both
    turns = turns_of(reference, shape)
    if turns is None:
        pytest.skip(_NOT_WRITTEN)
    prompt = reference.written(shape.messages[:-1], shape.tools, prompt=True)
    whole = reference.written(shape.messages, shape.tools)
    assert whole.startswith(prompt + turns[-1].answer)
    found = subject.supervised(tokenizer, shape.messages, shape.tools, "last_turn")
    check(reference, found, [replace(turns[-1], before=prompt)])


def test_preferences(both: Tokenizers, shape: Shape) -> None:
    reference, tokenizer = both
    prompt, right = shape.messages[:-1], str(shape.messages[-1]["content"])
    if turns_of(reference, shape) is None:
        pytest.skip(_NOT_WRITTEN)
    texts = (right, f"{right.strip()} Or not?")
    pair = subject.preference(tokenizer, prompt, texts, shape.tools)
    for found, text in zip(pair, texts, strict=True):
        turns = reference.turns([*prompt, assistant(text)], shape.tools)
        check(reference, found, turns, last_turn=True)


def parts(messages: Messages) -> tuple[Messages, list[Messages]]:
    """Return the messages before the first answer, and those between each answer and the next."""
    runs = [(asked, list(run)) for asked, run in groupby(messages, key=lambda one: one["role"] != "assistant")]
    first, *following = [run for asked, run in runs if asked]
    return first, following


def played(
    reference: Reference, tokenizer: PreTrainedTokenizerBase, shape: Shape, place: Path, *, at_endpoint: bool
) -> tuple[list[str], subject.Played, list[list[int]]]:
    """Return the answers of a conversation, the sample in which the policy has said them, and the prompts that are expected."""
    turns = turns_of(reference, shape)
    assert turns is not None
    said, prompts, text = list[list[int]](), list[list[int]](), ""
    for at, turn in enumerate(turns):
        text += turn.before
        before = reference.ids(text)
        whole = reference.ids(text + turn.answer)
        # an engine continues the prompt, also where the tokenizer would join characters on both sides of the border
        said.append(whole[len(before) :] if whole[: len(before)] == before else reference.ids(turn.answer))
        following = reference.ids(turns[at - 1].answer + turn.before)
        between = following[following.index(reference.id_of(turns[at - 1].end)) + 1 :] if at else before
        prompts.append([*prompts[-1], *said[at - 1], *between] if at else before)
        text += turn.answer
    first, observations = parts(shape.messages)
    row: dict[str, Any] = {"prompt": first, **({"tools": shape.tools} if shape.tools else {})}
    sample = subject.play(tokenizer, row, said, observations, place, at_endpoint=at_endpoint)
    assert stretches(sample.trained) == said
    check_answers(reference, said, turns)
    answers = [reference.text(one[:-1]) for one in said]
    return answers, sample, prompts


@pytest.mark.parametrize("at_endpoint", [False, True], ids=["environment", "endpoint"])
def test_turns(both: Tokenizers, shape: Shape, tmp_path: Path, at_endpoint: bool) -> None:
    reference, tokenizer = both
    if turns_of(reference, shape) is None:
        pytest.skip(_NOT_WRITTEN)
    answers, sample, prompts = played(reference, tokenizer, shape, tmp_path, at_endpoint=at_endpoint)
    for found, expected in zip(sample.prompts, prompts, strict=True):
        assert reference.text(found) == reference.text(expected)
        assert found == expected
    ids, mask = sample.trained
    assert ids[: len(prompts[-1])] == prompts[-1]
    if not (at_endpoint and shape.tools):  # calls are objects there
        assert sample.texts == answers
    ended = {reference.id_of(end) for end in (reference.case.end, reference.case.call_end) if end}
    assert sum(one in ended for one, trained in zip(ids, mask, strict=True) if trained) == len(answers)


def test_prompts(both: Tokenizers, shape: Shape, tmp_path: Path) -> None:
    """A prompt that ends with any of the user's messages has the ids of the template's text, whatever stands before it."""
    reference, tokenizer = both
    for at, message in enumerate(shape.messages):
        if message["role"] != "user":
            continue
        before = shape.messages[: at + 1]
        try:
            expected = reference.ids(reference.written(before, shape.tools, prompt=True))
        except Refused:
            continue
        row = {"prompt": before, **({"tools": shape.tools} if shape.tools else {})}
        if any("tool_calls" in one for one in before) and shape.shown[0] not in reference.text(expected):
            with pytest.raises(subject.Refusal, match="leaves out message 1: the tool call add"):
                subject.play(tokenizer, row, [reference.ids("7" + reference.case.end)], [], tmp_path)
            continue
        sample = subject.play(tokenizer, row, [reference.ids("7" + reference.case.end)], [], tmp_path)
        assert sample.prompts == [expected]
