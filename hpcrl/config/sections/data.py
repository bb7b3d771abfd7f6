"""Section `data`: which prompts are trained and evaluated."""

from __future__ import annotations

from dataclasses import dataclass, field

from hpcrl.config.fields import Location


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    train_data: list[Location]
    """Datasets of training prompts, concatenated in order."""

    val_data: list[Location] = field(default_factory=list)
    """Datasets of evaluation prompts; scores are reported per `data_source` column. Rows without one have the name of their file."""

    subset: str | None = None
    """Subset (configuration) of training datasets on a hub."""

    revision: str | None = None
    """Branch, tag or commit of training datasets on a hub."""

    val_subset: str | None = None
    """Subset (configuration) of evaluation datasets on a hub."""

    val_revision: str | None = None
    """Branch, tag or commit of evaluation datasets on a hub."""

    local_dir: Location | None = None
    """Folder where datasets of files are looked for."""

    test_size: float | int | None = None
    """Share (below 1) or number of training prompts set aside for evaluation where val_data is empty: the first of train_data."""

    shuffle: bool = True
    """Draw a new order of the training prompts for each epoch; otherwise each epoch trains them in the order of the files."""

    shuffle_seed: int | None = None
    """Seed of that order; unset: trainer.seed."""

    prompt_column: str = "prompt"
    """Column with the prompt: chat messages, or text that becomes one user message."""

    response_column: str | None = None
    """Column with the reference answer: reward_spec.ground_truth of rows that have none; unset: rows bring their own."""

    conversation_column: str = "conversations"
    """Column with the chat messages that supervised fine-tuning learns."""

    cache: bool = False
    """Keep tokenized samples on disk between runs."""

    num_workers: int = 0
    """Processes that prepare samples ahead."""

    prefetch_factor: int | None = None
    """Samples that each of them prepares ahead; needs num_workers."""

    drop_last: bool = True
    """Leave out the prompts that do not fill the last batch of an epoch."""
