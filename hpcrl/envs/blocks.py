"""Finds what a policy marked by tags, such as <answer>…</answer>."""

from __future__ import annotations

from collections.abc import Sequence


def first_block(text: str, names: Sequence[str]) -> tuple[str, str] | None:
    """Return the name and the content of the block that begins first; None where there is none.

    A block without its end does not count. It ends at the first end tag of its name, so blocks of one name do not nest.
    """
    found = []
    for name in names:
        opening = f"<{name}>"
        start = text.find(opening)
        end = text.find(f"</{name}>", start) if start >= 0 else -1
        if end >= 0:
            found.append((start, name, text[start + len(opening) : end]))
    if not found:
        return None
    _, name, content = min(found)
    return name, content
