"""Where the engine's stop texts cut what a policy said."""

from __future__ import annotations

from collections.abc import Sequence

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
