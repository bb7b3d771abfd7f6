"""Declares what data requires of a policy's family: prompts as tokens, tokens as text, and rows that are no texts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, cast

from hpcrl.config import Config
from hpcrl.config.family import families, family_of
from hpcrl.types import Prompt

if TYPE_CHECKING:
    import numpy as np

    from hpcrl.config.sections.model import Pretrained
    from hpcrl.data.conversations import Columns, Tokens


class RowRenderer(Protocol):
    """Makes sequences of tokens of a dataset's rows."""

    @property
    def decode(self) -> Callable[[list[int]], str]: ...

    def sequences(self, row: Any, folder: Path | None = None) -> list[Tokens]:
        """Return a row as it is trained.

        Args:
            folder: that relative paths in the row begin at.

        Raises:
            DataError: the row cannot be used.
        """
        ...


class RowFormat(Protocol):
    """The rows of datasets of a family that learns no texts. A dataclass of JSON values, which are noted with the tokens."""

    limit: ClassVar[str]
    """Names the limit of a row's tokens in messages."""

    def renderer(self, model: Pretrained, columns: Columns) -> RowRenderer:
        """Return the renderer of rows; errors as of the family's tokenizer."""
        ...

    def tensors(self, contents: Sequence[bytes], row: int) -> dict[str, np.ndarray]:
        """Return the tensors of a row's sample.

        Args:
            contents: the files that the row's sequence shows, behind its prompt in UTF-8.
            row: its number in the dataset.

        Raises:
            DataError: a file cannot be read.
        """
        ...


class DataFamily(Protocol):
    """The module `data` of a family. It imports neither torch nor, before it is called, transformers."""

    def counted_prompts(self, config: Config) -> tuple[Callable[[Prompt], int], int]:
        """Return a counter of a prompt's tokens, and the most that a prompt may have.

        Raises:
            DataError: there is no tokenizer.
        """
        ...

    def decoder(self, config: Config) -> Callable[[list[int]], str]:
        """Return the decoder of a run's tokens.

        Raises:
            DataError, OSError, ValueError: the tokenizer cannot be loaded.
        """
        ...

    def row_format(self, config: Config) -> RowFormat | None:
        """Return the format of rows of datasets that are trained; None: they are texts."""
        ...

    def noted_format(self, noted: Mapping[str, Any]) -> RowFormat | None:
        """Return the format of which these are the values; None: it is none of the family's."""
        ...


def data_family(config: Config) -> DataFamily:
    return cast(DataFamily, family_of(config).layer("data"))


def noted_format(noted: Mapping[str, Any]) -> RowFormat | None:
    """Return the format, of any family, of which these are the values; None: there is none."""
    layers = (cast(DataFamily, family.layer("data")) for family in families() if "data" in family.brings)
    return next((found for layer in layers if (found := layer.noted_format(noted)) is not None), None)
