"""What a policy marks by tags: rewards for <think>…</think>, <answer>…</answer> (DeepSeek-R1, arXiv:2501.12948), and reading any block."""

from __future__ import annotations

from collections.abc import Sequence

from hpcrl.config import EnvironmentConfig
from hpcrl.envs.rewards.answers import after_thought
from hpcrl.envs.rewards.response import Response, ground_truth

_THINK, _THINK_END, _ANSWER, _ANSWER_END = "<think>", "</think>", "<answer>", "</answer>"


def single_choice(response: Response, _environment: EnvironmentConfig) -> float:
    """Return 1 if the answer in <answer> tags is the ground truth, but for letter case and surrounding white space, else 0.

    The tags are those of arXiv:2501.12948.

    The answer is what the first <answer>…</answer> behind </think> holds, the whole text there where there is none; in the ground truth
    too.

    Formula:
        1 if the text in `<answer>` tags is the ground truth
    Use:
        multiple choice, single words
    Raises:
        DataError: the row has no ground truth.
    """
    expected = answer_in(ground_truth(response.ground_truth))
    return float(answer_in(response.text).lower() == expected.lower())


def well_formed(response: Response, _environment: EnvironmentConfig) -> float:
    """Return 1 if the text is one thought, an empty line and one answer, each in its tags, and nothing else, else 0.

    The tags are those of arXiv:2501.12948.

    Neither of the two may hold tags of its own kind. A line break at the very end is allowed.

    Formula:
        1 for `<think>…</think>`, an empty line, `<answer>…</answer>`
    Use:
        beside another one, with a small weight
    """
    text = response.text.removesuffix("\n")
    if not (text.startswith(_THINK) and text.endswith(_ANSWER_END)):
        return 0.0
    inside = text[len(_THINK) : -len(_ANSWER_END)]
    thought, between, answer = inside.partition(f"{_THINK_END}\n\n{_ANSWER}")
    nested = _THINK in thought or _THINK_END in thought or _ANSWER in answer or _ANSWER_END in answer
    return float(bool(between) and not nested)


def answer_in(text: str) -> str:
    """Return what the first <answer>…</answer> behind a thought holds, the whole text there where there is none, without white space around it."""
    block = first_block(text, ("answer",))
    return (block[1] if block else after_thought(text)).strip()


def first_block(text: str, names: Sequence[str]) -> tuple[str, str] | None:
    """Return the name and the content of the block that begins first behind </think>; None where there is none.

    A block without its end does not count. It ends at the first end tag of its name, so blocks of one name do not nest.
    """
    found, text = [], after_thought(text)
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
