"""Aligns the tokens of a policy with those of a teacher that has another tokenizer, by the bytes of their text.

A span ends wherever a token of both ends at the same byte: it is the shortest text of which both give a log-probability (chunks of
arXiv:2606.09456, section 4). Tokens of a span never belong to both a prompt and an answer, as the text is cut there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np

from hpcrl.config.sections.generator import ChatTemplateConfig
from hpcrl.config.sections.model import Pretrained
from hpcrl.data.tokenizer import PROBE, load_tokenizer
from hpcrl.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_BYTE = re.compile(r"<0x[0-9A-F]{2}>")
_SPACE, _UNKNOWN = "\u2581", "\ufffd"
_COMPATIBLE = "\u2026 \u00bd x\u00b2 \ufb01"
"""Characters that some tokenizers replace by others of the same look."""


def aligner_of(
    policy: Pretrained,
    teacher: Pretrained,
    template: ChatTemplateConfig,
    setting: str = "trainer.distillation.model_path",
) -> TokenAligner:
    """Return what writes rows of a policy in the tokens of a teacher.

    Args:
        setting: what names the teacher, for errors.

    Raises:
        ConfigError: as of `load_tokenizer`.
        DataError: their texts cannot be aligned, or one has no tokenizer.
    """
    tokenizers = load_tokenizer(policy, template), load_tokenizer(teacher, template, setting)
    aligner = TokenAligner(*tokenizers, f"{setting}: {teacher}")
    aligner.check()
    return aligner


class _TokenBytes:
    """The bytes that each token of a tokenizer writes.

    Args:
        name: of the tokenizer's setting and model, for errors.

    Attributes:
        by_bytes: whether every byte has a token, of byte-level BPE.
        special: text of each special token, by its id.
        eos: id of the token that ends a text; None without one.

    Raises:
        DataError: the tokenizer has another form than byte-level BPE, or pieces with bytes for unknown characters.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, name: str) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        kinds = set() if backend is None or backend.decoder is None else set(_kinds(backend.decoder))
        if not kinds & {"ByteLevel", "ByteFallback"}:
            raise DataError(
                f"{name}: the bytes of its tokens are not known; expected a tokenizer.json with a decoder of bytes (ByteLevel or "
                f"ByteFallback), found {', '.join(sorted(kinds)) or 'none'}. Choose a model with such a tokenizer"
            )
        assert backend is not None
        self.backend, self.by_bytes = backend, "ByteLevel" in kinds
        added = backend.get_added_tokens_decoder()
        added = {number: token for number, token in added.items() if not self._is_byte(token.content)}
        self.special = {number: token.content for number, token in added.items() if token.special}
        self._known = {number: text.encode() for number, text in self.special.items()}
        self._known |= {
            number: self._of(token.content, added=True) for number, token in added.items() if not token.special
        }
        self.eos = tokenizer.eos_token_id

    def __getitem__(self, token_id: int) -> bytes:
        if token_id not in self._known:
            text = self.backend.id_to_token(token_id)  # None: of a head with more tokens
            self._known[token_id] = _UNKNOWN.encode() if text is None else self._of(text)
        return self._known[token_id]

    def _of(self, text: str, *, added: bool = False) -> bytes:
        if self.by_bytes:
            own = added or not _BYTES.keys() >= set(text)
            return text.encode() if own else bytes(_BYTES[letter] for letter in text)
        return bytes.fromhex(text[3:5]) if self._is_byte(text) else text.replace(_SPACE, " ").encode()

    def _is_byte(self, text: str) -> bool:
        return not self.by_bytes and _BYTE.fullmatch(text) is not None


def _kinds(decoder: Any) -> Iterator[str]:
    waiting = [json.loads(decoder.__getstate__())]
    while waiting:
        one = waiting.pop()
        waiting += one.get("decoders", [])
        yield one["type"]


def _byte_letters() -> dict[str, int]:
    """Return the byte that each letter of byte-level BPE stands for: printable ones themselves, the others in order from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + at): byte for at, byte in enumerate(others)}


_BYTES = _byte_letters()


@dataclass(frozen=True)
class AlignedTokens:
    """The text of a row of T tokens in the U tokens of a teacher.

    Attributes:
        token_ids: [U] int64.
        spans_T, spans_U: [T] and [U] int64, the number of each token's span; -1 for tokens that are not trained.
    """

    token_ids: np.ndarray
    spans_T: np.ndarray
    spans_U: np.ndarray


class TokenAligner:
    """Writes rows of a policy in the tokens of a teacher.

    A special token of the policy becomes the teacher's of the same text, the one that ends a text the teacher's own, and any other its text.

    Args:
        teacher: its tokenizer, which nothing else may use: from now on it reads special tokens in texts as texts, and normalizes none.
        name: of the teacher, for errors.

    Raises:
        DataError: as of _TokenBytes.
    """

    def __init__(self, policy: PreTrainedTokenizerBase, teacher: PreTrainedTokenizerBase, name: str) -> None:
        self._name = name
        self._policy, self._teacher = _TokenBytes(policy, "trainer.policy.model.path"), _TokenBytes(teacher, name)
        theirs = {text: number for number, text in self._teacher.special.items()}
        self._same = {number: theirs[text] for number, text in self._policy.special.items() if text in theirs}
        if self._policy.eos is not None and self._teacher.eos is not None:
            self._same.setdefault(self._policy.eos, self._teacher.eos)
        self._teacher.backend.encode_special_tokens = True
        self._teacher.backend.no_truncation()  # files of a trained model may have what its training set
        self._teacher.backend.no_padding()
        if self._teacher.by_bytes:  # it can read letters that it would compose to others, as the policy wrote them
            self._teacher.backend.normalizer = None
        begun = self._teacher.backend.encode("a", add_special_tokens=True).ids[:1]
        self._begin = [token_id for token_id in begun if token_id in self._teacher.special]

    def check(self) -> None:
        """Raise DataError where the teacher's tokens do not write the texts of the policy's, in any script."""
        for text in (*PROBE, _COMPATIBLE):
            ids = self._policy.backend.encode(text, add_special_tokens=False).ids
            self.align(ids, [1] * len(ids))

    def align(self, token_ids: Sequence[int], mask_T: Sequence[float]) -> AlignedTokens:
        """Return a row in the teacher's tokens. Bytes that are no text are U+FFFD for the teacher, as are tokens of the head without a text.

        Args:
            mask_T: above 0 for the tokens that are trained.

        Raises:
            DataError: the teacher's tokens write another text than the policy's.
        """
        ids, spans_T, spans_U, count = [*self._begin], np.full(len(token_ids), -1), [np.full(len(self._begin), -1)], 0
        for at, (same, trained, places) in enumerate(self._pieces(token_ids, mask_T)):
            if same is None:
                own, ends_T, ends_U = self._written([self._policy[token_ids[place]] for place in places])
            else:
                own, ends_T, ends_U = [same], np.ones(1), np.ones(1)
                if at == 0 and own == self._begin:
                    ids, spans_U = [], []
            common = np.intersect1d(ends_T, ends_U) if trained else np.zeros(0)
            common = common[common > 0]
            if len(common):
                spans_T[places] = count + np.searchsorted(common, ends_T)
            spans_U.append(count + np.searchsorted(common, ends_U) if len(common) else np.full(len(own), -1))
            ids, count = ids + own, count + len(common)
        return AlignedTokens(np.array(ids, np.int64), spans_T, np.concatenate([np.zeros(0, np.int64), *spans_U]))

    def _pieces(
        self, token_ids: Sequence[int], mask_T: Sequence[float]
    ) -> Iterator[tuple[int | None, bool, list[int]]]:
        """Yield the teacher's token for a special token of the policy, or None for a text, whether it is trained, and where it is."""

        def key(place: int) -> tuple[int, bool]:
            return (place if token_ids[place] in self._same else -1), mask_T[place] > 0

        for (special, trained), places in groupby(range(len(token_ids)), key):
            yield (None if special < 0 else self._same[token_ids[special]]), trained, [*places]

    def _written(self, parts: Sequence[bytes]) -> tuple[list[int], np.ndarray, np.ndarray]:
        """Return the teacher's tokens of a text, and where tokens of the policy and of the teacher end, in bytes of what the teacher reads."""
        letters = b"".join(parts).decode("utf-8", "surrogateescape")  # a byte that is no text is a letter of its own
        lost = ["\ud800" <= letter <= "\udfff" for letter in letters]
        text = "".join(_UNKNOWN if gone else letter for letter, gone in zip(letters, lost, strict=True))
        ids, wanted = self._teacher.backend.encode(text, add_special_tokens=False).ids, text.encode()
        written = [self._teacher[token_id] for token_id in ids]
        found = b"".join(written)
        before = int(found == b" " + wanted)  # sentence pieces begin with a space
        if found[before:] != wanted:
            raise DataError(
                f"{self._name}: the teacher's tokens of {text[:80]!r} write {found.decode('utf-8', 'replace')[:80]!r}, so that the texts of the "
                "policy cannot be aligned with them. Choose a teacher whose tokenizer changes no text and has a token for each byte"
            )
        steps = [
            step
            for letter, gone in zip(letters, lost, strict=True)
            for step in ([3] if gone else [1] * len(letter.encode()))
        ]
        shown = np.cumsum([0, *steps])
        return ids, shown[_ends(parts)], np.maximum(_ends(written) - before, 0)


def _ends(parts: Iterable[bytes]) -> np.ndarray:
    return np.cumsum([len(part) for part in parts], dtype=np.int64)
