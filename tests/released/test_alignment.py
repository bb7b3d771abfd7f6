"""Texts of released tokenizers are aligned with those of another one, by their bytes."""

from __future__ import annotations

import pytest
from transformers import PreTrainedTokenizerFast

from hpcrl.data.alignment import TokenAligner
from tests.released.material import FOLDER, SHAPES

pytestmark = pytest.mark.released

PAIRS = [("qwen3", "llama2"), ("llama3_1", "gemma3"), ("gemma3", "qwen3"), ("llama2", "gptoss")]


@pytest.mark.parametrize(("policy", "teacher"), PAIRS)
def test_answers_of_a_policy_are_read_by_the_teacher(policy: str, teacher: str) -> None:
    if not (FOLDER / policy).is_dir() or not (FOLDER / teacher).is_dir():
        pytest.skip(f"{FOLDER} lacks them; make released installs them")
    own, other = (PreTrainedTokenizerFast.from_pretrained(FOLDER / name) for name in (policy, teacher))
    aligner = TokenAligner(own, other, teacher)
    aligner.check()
    for shape in SHAPES.values():
        text = "\n".join(message["content"] for message in shape.messages)
        ids = [*own.encode(text, add_special_tokens=False), own.eos_token_id]
        found = aligner.align(ids, [1] * len(ids))
        kept = found.token_ids[found.spans_U >= 0]
        assert kept[-1] == other.eos_token_id
        said = other.decode(kept[:-1], skip_special_tokens=False)
        assert said.lstrip(" ") == own.decode(ids[:-1]).lstrip(" "), "sentence pieces lose spaces at the beginning"
        spans = found.spans_T.max() + 1
        assert spans == found.spans_U.max() + 1
        assert spans > 0.5 * min(len(ids), len(kept)), "most tokens end where one of the other tokenizer does"
