"""Section `data`: prompts, or rows of datasets, for training and evaluation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from hpcrl.config.conditions import ENGINES, OFFLINE, PAIRS, RL, RL_OR_SFT, SFT
from hpcrl.config.effects import OTHER_PROMPTS, OTHER_TOKENS, READING_SPEED, SCORES
from hpcrl.config.fields import Location
from hpcrl.config.sections.dpo import UNPAIRED
from hpcrl.config.setting import (
    COUNT,
    NOT_NEGATIVE,
    POSITIVE,
    SHARE,
    SHARE_ABOVE_0,
    Check,
    Range,
    any_of,
    required,
    section,
    setting,
    when,
)

_EVALUATED = any_of(when("data.val_data"), when("data.val_prompts"), needs="data.val_data or data.val_prompts")
DATASET_FILES = (".parquet", ".json", ".jsonl", ".arrow")
"""Endings of names of files that are read as datasets."""

_SELDOM = Range(0.01, 1)
_USERS_OWN = "the user names the data; SkyRL's default is a path in its authors' setup"


_CURRICULUM = when(".is_on", needs="{section}.easy or {section}.hard below 1")


@dataclass(frozen=True, kw_only=True)
class CurriculumConfig:
    easy: float = setting(1.0, range=_SELDOM, on_change=OTHER_PROMPTS)
    """Share of the passes through the dataset that train a prompt which the policy solves nearly always; 1: all. With 0.25 each fourth pass has it, and it comes back as often as others once it is solved less."""

    hard: float = setting(1.0, range=_SELDOM, on_change=OTHER_PROMPTS)
    """Share of the passes that train a prompt which the policy solves hardly ever; 1: all."""

    easy_from: float = setting(0.9, range=SHARE, used_by=_CURRICULUM, on_change=OTHER_PROMPTS)
    """Pass rate from which on a prompt is easy: the share of its samples that are solved, by generator.success_reward."""

    hard_to: float = setting(0.05, range=SHARE, used_by=_CURRICULUM, on_change=OTHER_PROMPTS)
    """Pass rate up to which a prompt is hard; below easy_from."""

    newest: float = setting(0.5, range=SHARE_ABOVE_0, used_by=_CURRICULUM, on_change=OTHER_PROMPTS)
    """Weight of a prompt's newest group in its pass rate, a moving average; 1: no other group counts."""

    @property
    def is_on(self) -> bool:
        """Whether some prompts come more seldom than others."""
        return self.easy < 1 or self.hard < 1


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    train_data: list[Location] = required(on_change=OTHER_PROMPTS, why=_USERS_OWN)
    """Datasets of training prompts, concatenated in order: files (.parquet, .json, .jsonl, .arrow), folders (also of Hugging Face's datasets), and names of its hub. A split, or a part of one such as `train[:100]`, follows behind a colon; without one the split is train."""

    train_function: str | None = setting(None, used_by=RL, on_change=OTHER_PROMPTS)
    """Function of your own that makes training prompts without end, in the place of train_data = []: "package.module:function". It is called with a seed (shuffle_seed, else trainer.seed) and the number of a row, and returns the columns of that row as a dict. They depend on its arguments alone. Of a row that is too long, that with a number higher by 10^12 takes the place. Needs trainer.max_steps."""

    train_function_args: dict[str, Any] = setting({}, used_by=when(".train_function"), on_change=OTHER_PROMPTS)
    """Further arguments of train_function, by their names."""

    val_data: list[Location] = setting([], on_change=SCORES, why=_USERS_OWN)
    """Datasets of evaluation prompts; scores are reported per `data_source` column. Rows without one have the name of their file. With another trainer.mode than "rl": datasets whose loss is reported, each by the name of its file."""

    val_prompts: list[Location] = setting([], used_by=when("trainer.mode", "sft", "dpo"), on_change=SCORES)
    """With another trainer.mode than "rl": datasets of prompts that are evaluated as in reinforcement learning, by engines that generate and environments that score; empty: there are no engines."""

    subset: str | None = setting(None, on_change=OTHER_PROMPTS)
    """Subset (configuration) of training datasets of several; unset: the only one, or the default: called so, or marked `default: true`."""

    revision: str | None = setting(None, on_change=OTHER_PROMPTS)
    """Branch, tag or commit of training datasets on the hub; unset: the main branch."""

    val_subset: str | None = setting(None, used_by=_EVALUATED, on_change=SCORES)
    """Subset (configuration) of evaluation datasets of several; unset: as for training datasets."""

    val_revision: str | None = setting(None, used_by=_EVALUATED, on_change=SCORES)
    """Branch, tag or commit of evaluation datasets on the hub; unset: the main branch."""

    val_size: float | int | None = setting(None, range=POSITIVE, used_by=_EVALUATED, on_change=SCORES)
    """Share (below 1) or number of rows of each evaluation dataset that are evaluated, the first ones; unset: all."""

    local_dir: Location | None = setting(None, on_change=OTHER_PROMPTS)
    """Folder in which datasets with a relative name are looked for, before the hub is asked."""

    val_local_dir: Location | None = setting(None, used_by=_EVALUATED, on_change=SCORES)
    """Folder in which evaluation datasets with a relative name are looked for; unset: data.local_dir."""

    test_size: float | int | None = setting(None, range=POSITIVE, on_change=OTHER_PROMPTS)
    """Share (below 1) or number of training prompts set aside for evaluation where val_data is empty: the first of train_data. With another trainer.mode than "rl", of the rows that are left."""

    shuffle: bool = setting(True, on_change=OTHER_PROMPTS)
    """Draw a new order of the training prompts for each epoch; otherwise each epoch trains them in the order of the files."""

    shuffle_seed: int | None = setting(
        None, range=NOT_NEGATIVE, used_by=when(".shuffle", True), on_change=OTHER_PROMPTS
    )
    """Seed of that order; unset: trainer.seed."""

    prompt_column: str = setting("prompt", on_change=OTHER_PROMPTS)
    """Column with the prompt: chat messages, or text that becomes one user message. With trainer.mode="sft" it is read with format="prompt_response"; of pairs it may be missing, where each answer holds the whole conversation or text."""

    image_column: str = setting("images", on_change=OTHER_PROMPTS)
    """Column with the images of a prompt or a conversation, which may be missing. Images are paths relative to the file of the dataset, data URLs, or bytes as in Hugging Face's datasets. Each stands where a text says `<image>`, or where a message has a part of the type image. With trainer.mode="sft" of a diffusion policy: the picture that the prompt is to become, or the frames of a video."""

    image_processor_kwargs: dict[str, Any] = setting({}, on_change=OTHER_PROMPTS)
    """Settings of the policy's image processor (preprocessor_config.json) that are replaced, such as max_pixels, which bounds the tokens of an image."""

    video_column: str = setting("videos", on_change=OTHER_PROMPTS)
    """Column with the videos of a prompt or a conversation, which may be missing. A video is a list of frames (images as in image_column), the path of a folder of frames or of a file, or bytes. Files are GIF, animated WebP or PNG, and MP4, WebM and others where OpenCV is installed. `{"video": …, "fps": …}` states the frames per second, 2 by default. Each stands where a text says `<video>`, or where a message has a part of the type video."""

    video_frames: int = setting(64, range=COUNT, on_change=OTHER_PROMPTS)
    """Frames of a video that are shown at most; of one with more, so many at equal distances."""

    video_pixels: int | None = setting(None, range=COUNT, on_change=OTHER_PROMPTS)
    """Pixels of a frame of a video at most, which bounds its tokens; unset: as the policy's video processor (video_preprocessor_config.json) bounds them."""

    response_column: str | None = setting(
        None,
        used_by=any_of(
            RL_OR_SFT,
            ENGINES,
            when(".label_column"),
            needs='trainer.mode="rl" or "sft", data.val_prompts or data.label_column',
        ),
        on_change=OTHER_PROMPTS,
    )
    """Column with the reference answer: reward_spec.ground_truth of rows that have none; unset: rows bring their own. With trainer.mode="sft" it is the answer that format="prompt_response" trains; unset: response. With a label_column it is the answer that has the label; unset: completion."""

    conversation_column: str = setting("conversations", used_by=SFT, on_change=OTHER_PROMPTS)
    """Column with the chat messages that supervised fine-tuning learns: `role` and `content`, or ShareGPT's `from` and `value`; a message of weight 0 is not trained. A column `tools`, a list of objects or its JSON text, goes to the chat template, also in other formats and in reinforcement learning. The text of a column `system` stands before messages without one."""

    format: Literal["conversations", "prompt_response", "text", "tokens"] = setting(
        "conversations", used_by=SFT, on_change=OTHER_PROMPTS
    )
    """Content of the rows of supervised fine-tuning: chat messages, a prompt with its response, plain text, or tokens. Tokens are `input_ids` with `labels` (-100 where a token is not trained) or with a `loss_mask`."""

    chosen_column: str = setting("chosen", used_by=PAIRS, on_change=OTHER_PROMPTS)
    """Column with the better answer of a pair (trainer.mode="dpo" or "reward_model"): chat messages, or text that becomes one message of the assistant. One that begins with another message than the assistant's, and a text without a prompt_column, is whole: what both answers begin with is the prompt."""

    rejected_column: str = setting("rejected", used_by=PAIRS, on_change=OTHER_PROMPTS)
    """Column with the worse answer."""

    label_column: str | None = setting(None, used_by=UNPAIRED, on_change=OTHER_PROMPTS)
    """Column with whether the answer of a row (response_column) is desirable: true or false, 1 or 0. Unset: rows are pairs, of which the chosen answer is desirable and the rejected one is not."""

    margin_column: str | None = setting(None, used_by=when("trainer.mode", "reward_model"), on_change=OTHER_PROMPTS)
    """Column with the margin of a pair, a number: by how much the score of the better answer should be ahead, with trainer.mode="reward_model". Unset: 0."""

    text_column: str = setting("text", used_by=SFT, on_change=OTHER_PROMPTS)
    """Column with the text of format="text"; all its tokens are trained, with the one that ends it."""

    train_on_what: Literal["assistant", "last_turn", "all"] = setting("assistant", used_by=SFT, on_change=OTHER_TOKENS)
    """Which tokens of a conversation are trained: those of all messages of the assistant, of its last one, or all."""

    too_long: Literal["cut", "drop", "refuse"] = setting("cut", used_by=OFFLINE, on_change=OTHER_TOKENS)
    """Treatment of a row with more than trainer.max_length tokens, or of a pair with such a side. Its end is cut off, it is left out, or the run ends with an error."""

    lost: Literal["refuse", "train"] = setting("refuse", used_by=OFFLINE, on_change=OTHER_TOKENS)
    """Treatment of a row where the chat template omits text that should be trained, such as thoughts or tool calls. The run ends with an error, or trains the rest and counts such rows."""

    weights: list[float] = setting(
        [],
        check=Check(
            "expected weights of more than 0, found {value}", lambda weights: all(weight > 0 for weight in weights)
        ),
        on_change=OTHER_PROMPTS,
    )
    """How often an epoch has the rows of each dataset of train_data: 2 means twice, 0.5 half of them, others in each epoch; empty: once."""

    curriculum: CurriculumConfig = section(CurriculumConfig, used_by=RL)

    cache: bool = setting(False, used_by=OFFLINE, on_change=READING_SPEED)
    """Keep the tokens of supervised fine-tuning in slurm.root too (.tokens), for other runs that make the same of the same contents."""

    num_workers: int = setting(0, range=NOT_NEGATIVE, used_by=OFFLINE, on_change=READING_SPEED)
    """Further processes that tokenize the rows of datasets; 0: the controller does it alone."""

    prefetch_factor: int | None = setting(
        None, range=COUNT, used_by=(OFFLINE, when(".num_workers")), on_change=READING_SPEED
    )
    """Parts of 256 rows that each of them has before it; unset: 2. Needs num_workers."""

    drop_last: bool = setting(True, on_change=OTHER_PROMPTS)
    """Leave out the prompts, or rows, that do not fill the last batch of an epoch. false: the first ones of the next epoch fill it, and only the last epoch leaves some out."""
