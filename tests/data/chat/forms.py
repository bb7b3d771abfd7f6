"""Small tokenizers in the forms that released models have, made on the spot, and chat templates in the manner of theirs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

SPECIAL = [
    "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>",
    "<think>", "</think>",
]  # fmt: skip
_CORPUS = [
    f"What is {i} + {j}? The answer is {i + j}. Thank you\n\nuser assistant system" for i in range(9) for j in range(9)
]

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ZEPHYR = "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}</s>\n{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
# as Llama 3's was first published: the header of an answer stands behind every conversation, asked for or not
LLAMA3 = (
    "{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content | trim }}<|eot_id|>{% endfor %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}"
)
# as Phi-3's: a conversation ends with the end of a text behind that of the turn
PHI3 = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% else %}<|endoftext|>{% endif %}"
)
# as R1-Distill's: thoughts are left out, in the last turn too
R1 = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<|im_start|>assistant\n{{ m.content.split('</think>')[-1] }}<|im_end|>"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOOLS = (
    "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% if m.tool_calls %}{% for c in m.tool_calls %}<tool_call>"
    "{{ {'name': c.function.name, 'arguments': c.function.arguments} | tojson }}</tool_call>{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_level(texts: Sequence[str] = _CORPUS, special: list[str] = SPECIAL, size: int = 600) -> Tokenizer:
    model = Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    model.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, special_tokens=special)
    )
    return model


def sentence_pieces(*, first: bool) -> Tokenizer:
    """As those of Llama 2 and Mistral.

    Args:
        first: a space is written before the text alone, and not behind each special token too.
    """
    model = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    if first:
        model.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    else:
        model.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    model.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    # a byte for each character of the templates that the corpus lacks, without which they would be unknown
    fallback = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=900, special_tokens=["<unk>", *SPECIAL, *fallback], initial_alphabet=["▁", "\n"]
    )
    model.train_from_iterator(_CORPUS, trainer)
    return model


FORMS = {
    "bytes": byte_level,
    "prefix": lambda: sentence_pieces(first=False),
    "first": lambda: sentence_pieces(first=True),
}


def made(form: str, template: str, eos: str) -> PreTrainedTokenizerBase:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=FORMS[form](), eos_token=eos)
    tokenizer.chat_template = template
    return tokenizer


def write_model(folder: Path, tokenizer: PreTrainedTokenizerBase, **config: Any) -> Path:
    """Write a tokenizer, and a config.json with some entries, as the files of a model."""
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **config}))
    return folder
