"""A tokenizer without files."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import AddedToken

_EOS = 1


class Letters:
    """A token per character."""

    eos_token_id = _EOS
    eos_token = chr(_EOS)
    chat_template = (
        "{% for message in messages %}[{{ message['role'] }}]{{ message['content'] }}{{ eos_token }}{{ '\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    special_tokens_map: Mapping[str, str] = {"eos_token": eos_token}
    name_or_path = "letters"
    is_fast = False
    all_special_tokens: Sequence[str] = (eos_token,)
    added_tokens_decoder: Mapping[int, Any] = {_EOS: AddedToken(eos_token, special=True)}

    def __len__(self) -> int:
        return sys.maxunicode + 1

    def get_chat_template(self, *_: object) -> str:
        return self.chat_template

    def encode(self, text: str, **_: object) -> list[int]:
        return [ord(letter) for letter in text]

    def decode(self, ids: Sequence[int], **_: object) -> str:
        return "".join(chr(token) for token in ids if token != _EOS)
