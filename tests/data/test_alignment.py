"""Tokens of two tokenizers are aligned by the bytes of their text."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from hpcrl.data.alignment import AlignedTokens, TokenAligner
from hpcrl.errors import DataError
from tests.data.chat.forms import CHATML, made

OTHER = ["bytes", "prefix", "first"]


@pytest.fixture(scope="module")
def policy() -> PreTrainedTokenizerFast:
    return made("bytes", CHATML, "<|im_end|>")


def bytes_of_spans(tokenizer: PreTrainedTokenizerFast, ids: list[int], spans: np.ndarray) -> list[str]:
    """Return the text of each span, as the tokenizer itself decodes its tokens together."""
    count = spans.max() + 1 if len(spans) else 0
    return [tokenizer.decode([one for one, at in zip(ids, spans, strict=True) if at == span]) for span in range(count)]


@pytest.mark.parametrize("form", OTHER)
def test_a_span_has_the_same_text_in_both_and_ends_where_both_end(form: str, policy: PreTrainedTokenizerFast) -> None:
    teacher = made(form, CHATML, "</s>")
    aligner = TokenAligner(policy, teacher, "teacher")
    aligner.check()
    asked, said = (
        "<|im_start|>user\nWhat is 3 + 4?<|im_end|>\n",
        "The answer is 12 + 7, na\u00efve \U0001f642<|im_end|>",
    )
    before, answer = policy.encode(asked), policy.encode(said)
    found = aligner.align(before + answer, [0] * len(before) + [1] * len(answer))
    assert (found.spans_T[: len(before)] == -1).all()
    own = bytes_of_spans(policy, before + answer, found.spans_T)
    theirs = bytes_of_spans(teacher, found.token_ids.tolist(), found.spans_U)
    assert [text.strip() for text in own] == [text.strip() for text in theirs], (
        "sentence pieces lose a space at a border"
    )
    assert len(own) > 8
    assert policy.decode(answer) == said
    for spans in (found.spans_T, found.spans_U):
        numbers = spans[spans >= 0]
        assert {after - one for one, after in pairwise(numbers)} <= {0, 1}, "spans follow one another"
    shown = teacher.decode(found.token_ids[found.spans_U < 0])
    assert shown.replace("<|im_start|> ", "<|im_start|>").strip() == asked.strip()


def test_tokens_of_one_tokenizer_are_spans_of_their_own(policy: PreTrainedTokenizerFast) -> None:
    ids = policy.encode("<|im_start|>user\nThank you<|im_end|>")
    same = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(policy.backend_tokenizer.to_str()))
    found = TokenAligner(policy, same, "teacher").align(ids, [1] * len(ids))
    assert found.token_ids.tolist() == ids
    assert found.spans_T.tolist() == found.spans_U.tolist() == list(range(len(ids)))


def letters(*words: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer of byte-level BPE with these words, each made of its first part and its last letter."""
    names = [*"abcde", *words]
    merges = [(word[:-1], word[-1]) for word in words]
    model = Tokenizer(models.BPE(vocab={name: at for at, name in enumerate(names)}, merges=merges))
    model.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=model)


def aligned(
    policy: PreTrainedTokenizerFast, teacher: PreTrainedTokenizerFast, text: str, trained: str
) -> AlignedTokens:
    """Align a text of which the last letters are trained; the policy's tokens end at their border."""
    parts = [policy.encode(text.removesuffix(trained)), policy.encode(trained)]
    return TokenAligner(policy, teacher, "teacher").align(
        parts[0] + parts[1], [0] * len(parts[0]) + [1] * len(parts[1])
    )


def test_spans_by_hand() -> None:
    found = aligned(letters("ab", "cd"), letters("bc", "de"), "eabcdab", "abcdab")  # ab cd ab and a bc d a b
    assert found.token_ids.tolist() == [4, 0, 5, 3, 0, 1]
    assert found.spans_T.tolist() == [-1, 0, 0, 1]
    assert found.spans_U.tolist() == [-1, 0, 0, 0, 1, 1]


def test_no_span_has_tokens_of_a_prompt_and_of_its_answer() -> None:
    found = aligned(letters(), letters("ab"), "ccab", "b")
    assert found.token_ids.tolist() == [2, 2, 0, 1], "not the teacher's token ab, which would be of both"
    assert found.spans_U.tolist() == [-1, -1, -1, 0]


def test_bytes_that_are_no_text_are_read_as_unknown_letters(policy: PreTrainedTokenizerFast) -> None:
    teacher = made("first", CHATML, "</s>")
    ids = policy.encode("7 \U0001f642 is")
    cut = [one for one in ids if one != policy.encode("\U0001f642")[-1]]  # the last of the four bytes is lost
    assert len(cut) == len(ids) - 1
    found = TokenAligner(policy, teacher, "teacher").align(cut, [1] * len(cut))
    assert "\ufffd\ufffd\ufffd is" in teacher.decode(found.token_ids)
    assert found.spans_T.max() == found.spans_U.max() > 3


def test_tokens_without_a_text_are_unknown_letters_too(policy: PreTrainedTokenizerFast) -> None:
    """Of a head with more tokens than the tokenizer: without a span, the teacher's log-probability of them would be 0."""
    end = policy.eos_token_id
    found = TokenAligner(policy, made("bytes", CHATML, "</s>"), "teacher").align([end, len(policy) + 5, end], [0, 1, 1])
    assert found.spans_T.tolist() == [-1, 0, 1]


def test_what_a_teachers_file_has_of_its_training_cuts_and_fills_no_text(policy: PreTrainedTokenizerFast) -> None:
    teacher = made("bytes", CHATML, "</s>")
    teacher.backend_tokenizer.enable_truncation(40)
    teacher.backend_tokenizer.enable_padding(length=64, pad_token="</s>", pad_id=teacher.eos_token_id)
    aligner, ids = TokenAligner(policy, teacher, "teacher"), policy.encode("The answer is 12. " * 20)
    assert teacher.decode(aligner.align(ids, [1] * len(ids)).token_ids) == "The answer is 12. " * 20


def test_letters_that_the_teacher_would_compose_are_read_as_they_were_written(policy: PreTrainedTokenizerFast) -> None:
    teacher = made("bytes", CHATML, "</s>")
    teacher.backend_tokenizer.normalizer = normalizers.NFC()
    ids = policy.encode("cafe\u0301 is")
    assert (
        teacher.decode(TokenAligner(policy, teacher, "teacher").align(ids, [1] * len(ids)).token_ids) == "cafe\u0301 is"
    )


def test_added_pieces_have_spaces_too(policy: PreTrainedTokenizerFast) -> None:
    """As Gemma's, whose pieces of several spaces are among its added tokens."""
    teacher = made("prefix", CHATML, "</s>")
    (piece,) = teacher.convert_tokens_to_ids(["is\u2581"])
    teacher.add_tokens([AddedToken("is\u2581", normalized=False)])
    ids = policy.encode("is it")
    assert piece in TokenAligner(policy, teacher, "teacher").align(ids, [1] * len(ids)).token_ids


def test_texts_that_cannot_be_aligned_are_refused(policy: PreTrainedTokenizerFast) -> None:
    with pytest.raises(DataError, match=r"teacher: the teacher's tokens of \"Hello World .* write 'edcc'"):
        TokenAligner(policy, letters(), "teacher").check()
    words = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordPiece({"[UNK]": 0})))
    with pytest.raises(DataError, match=r"teacher: the bytes of its tokens are not known; .* found none"):
        TokenAligner(policy, words, "teacher")
