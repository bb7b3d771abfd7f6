"""Estimates the tokens saved by trainer.shared_prefixes: the largest group of single turns."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hpcrl.config import Config
from hpcrl.config.token_limits import largest_micro_batch, longest_sample


@dataclass(frozen=True)
class SharedPrompt:
    """A group whose prompt and answers are as long as they may be.

    Attributes:
        samples: of the group.
        prompt, answer: tokens of its prompt, and of each answer.
        together: samples that a micro-batch has room for.
    """

    samples: int
    prompt: int
    answer: int
    together: int

    @property
    def whole(self) -> int:
        """Tokens of all samples, each with its prompt."""
        return self.samples * (self.prompt + self.answer)

    @property
    def computed(self) -> int:
        """Tokens that are left: the prompt is computed once in each micro-batch."""
        return self.micro_batches * self.prompt + self.samples * self.answer

    @property
    def micro_batches(self) -> int:
        return -(-self.samples // self.together)


def shared_prompt(config: Config) -> SharedPrompt | None:
    """Return the largest group; None: prefixes are not shared, or rows of a dataset are, of which nothing is known."""
    if not config.trainer.shared_prefixes or config.trainer.offline:
        return None
    longest, tokens = longest_sample(config), largest_micro_batch(config)
    prompt = min(config.trainer.max_prompt_length, longest - 1)
    answer, samples = longest - prompt, config.generator.n_samples_per_prompt
    return SharedPrompt(samples, prompt, answer, min(samples, max(1, (tokens - prompt) // answer)))


def describe_prefixes(config: Config) -> Iterator[str]:
    """Yield what `hpcrl plan` prints of it."""
    group = shared_prompt(config)
    if group is None:
        return
    yield (
        f"shared prefixes: of a group of {group.samples} samples, a prompt of {group.prompt:,} tokens and {group.answer:,} more in each, "
        f"{group.computed:,} of {group.whole:,} tokens are computed, {group.whole / group.computed:.2f} times fewer, in {group.micro_batches} "
        "micro-batch(es). Shorter answers and further turns save more"
    )
    yield ""
