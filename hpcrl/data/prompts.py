"""Reads datasets of prompts, with the columns of SkyRL's datasets.

A row has `prompt` (chat messages or text), `env_class` (or the configured default), `data_source`, and any further columns that its
environment wants. For tasks that are checked by a rule, `reward_spec` has the ground truth; verl's datasets call it `reward_model`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, count, islice
from pathlib import Path
from typing import Any

from hpcrl.data.chat.messages import read_messages, read_tools, with_system
from hpcrl.data.sources import Source
from hpcrl.data.vision.messages import with_images
from hpcrl.errors import ConfigError, DataError, UserCodeError
from hpcrl.types import LONGEST_NAME, Prompt, is_name

_DEEPEST = 100  # what sends and reads rows later has less room on the stack than what loads them


def load_prompts(
    sources: Sequence[Source], default_env_class: str | None, *columns: Any, first: int | None = None, **rules: Any
) -> list[Prompt]:
    """Return the rows of datasets, in order.

    Args:
        sources: the datasets.
        default_env_class, columns, rules: as of `prompt_reader`.
        first: rows of each dataset that are read at most; unset: all.
    """
    return [*chain.from_iterable(load_by_source(sources, default_env_class, *columns, first=first, **rules))]


def load_by_source(
    sources: Sequence[Source], default_env_class: str | None, *columns: Any, first: int | None = None, **rules: Any
) -> list[list[Prompt]]:
    """Return the rows of each dataset, whose uids count through all of them; arguments as of `load_prompts`."""
    uids, read = count(), prompt_reader(sources, default_env_class, *columns, **rules)
    return [
        [read(row, str(next(uids)), source, number) for number, row in enumerate(islice(source.rows(), first))]
        for source in sources
    ]


def prompt_reader(
    sources: Sequence[Source],
    default_env_class: str | None,
    prompt_column: str = "prompt",
    response_column: str | None = None,
    image_column: str = "images",
    video_column: str = "videos",
    *,
    env_class_required: bool = True,
    check: Callable[[str, Mapping[str, Any], str], None] | None = None,
    path_of: Callable[[str], str] = str,
) -> Callable[[Any, str, Source, int], Prompt]:
    """Return a function that builds a prompt from a row, its uid, its dataset and its number there.

    All columns but those of the prompt, env_class and data_source become `Prompt.extras`. Rows without a data_source have that of
    their file, see `source_names`. What is returned raises DataError where a row lacks what a prompt needs.

    Args:
        sources: the datasets.
        default_env_class: environment of the rows that name none.
        prompt_column: chat messages, or text that becomes one message of the user.
        response_column: reference answer, which becomes `reward_spec.ground_truth` where the row has none.
        image_column, video_column: images and videos that its prompt shows; they may be missing.
        env_class_required: whether each row must have an environment; otherwise `Prompt.env_class` may be empty.
        check: is called with a row's env_class, which may be empty, its extras and its data_source. Raises DataError or ConfigError
            where the environment cannot use the row, or UserCodeError where a user's environment fails.
        path_of: returns the environment that an env_class names, as of EnvironmentConfig; prompts have that.
    """
    shown = image_column, video_column
    names = source_names(source.location for source in sources)
    return _Columns(
        prompt_column, response_column, shown, default_env_class, env_class_required, check, path_of, names
    ).prompt


def source_names(paths: Iterable[str]) -> dict[str, str]:
    """Return a short name for each file: without folder and suffix, or with as many folders as make it unique.

    math.jsonl is math, beside gsm8k/test.parquet and aime/test.parquet, which are gsm8k/test and aime/test.
    """
    parts = {path: Path(path).with_suffix("").parts for path in dict.fromkeys(paths)}
    tails = dict.fromkeys(parts, ())
    for depth in range(1, max(map(len, parts.values()), default=0) + 1):
        alike = Counter(tails.values())
        tails = {
            path: own[-depth:] if alike[tails[path]] > 1 or depth == 1 else tails[path] for path, own in parts.items()
        }
    return {path: "/".join(tail) for path, tail in tails.items()}


def data_sources(sources: Sequence[Source]) -> set[str]:
    """Return the data sources of all rows of some datasets."""
    names = source_names(source.location for source in sources)
    rows = ((names[source.location], row) for source in sources for row in source.rows())
    return {str((isinstance(row, dict) and row.get("data_source")) or name) for name, row in rows}


def set_aside(prompts: Sequence[Prompt], test_size: float) -> tuple[list[Prompt], list[Prompt]]:
    """Return the prompts to train and those to evaluate: the first ones, which no seed and no tokenizer changes.

    Args:
        test_size: below 1 a share, of which at least one prompt is made, otherwise a number.
    """
    count = count_aside(len(prompts), test_size)
    return list(prompts[count:]), list(prompts[:count])


def count_aside(n_prompts: int, test_size: float) -> int:
    """Return how many of the prompts `set_aside` takes for evaluation; arguments and errors as there."""
    count = max(1, round(test_size * n_prompts)) if test_size < 1 else int(test_size)
    if count >= n_prompts:
        raise DataError(f"data.test_size = {test_size} leaves none of the {n_prompts} prompts to train; lower it")
    return count


def drop_long(prompts: Sequence[Prompt], count_tokens: Callable[[Prompt], int], max_prompt_length: int) -> list[Prompt]:
    """Return the prompts of at most `max_prompt_length` tokens, in order. Raises DataError where none is left."""
    kept = [prompt for prompt in prompts if count_tokens(prompt) <= max_prompt_length]
    if prompts and not kept:
        raise DataError(
            f"all {len(prompts)} prompts are longer than trainer.max_prompt_length = {max_prompt_length}; raise it"
        )
    return kept


@dataclass(frozen=True)
class _Columns:
    """Names of the columns of a row."""

    of_prompt: str
    of_response: str | None
    shown: tuple[str, str]
    default_env_class: str | None
    env_class_required: bool
    check: Callable[[str, Mapping[str, Any], str], None] | None
    path_of: Callable[[str], str]
    source_names: Mapping[str, str]

    def prompt(self, row: Any, uid: str, source: Source, number: int) -> Prompt:
        place = f"dataset {source.location}, row uid {uid}" + (
            f" (row {number} of the file)" if str(number) != uid else ""
        )
        if not isinstance(row, dict):
            raise DataError(f"{place}: expected an object with columns, found {type(row).__name__}")
        row = self._with_images(row, source, place)
        _check_json(row, place)
        for setting, column in (("prompt_column", self.of_prompt), ("response_column", self.of_response)):
            if column is not None and column not in row:
                columns = ", ".join(sorted(row)) or "none"
                raise DataError(f"{place}: no column `{column}` (data.{setting}); its columns are {columns}")
        env_class = row.get("env_class") or self.default_env_class
        if env_class is None and self.env_class_required:
            raise DataError(f"{place}: no `env_class`. Add the column, or set environment.env_class for all rows.")
        for name, value in (("env_class", env_class), ("data_source", row.get("data_source"))):
            if not isinstance(value, str | None):
                raise DataError(f"{place}, column `{name}`: expected a text, found {value!r:.80}")
        env_class = self.path_of(env_class or "")
        own = (self.of_prompt, "env_class", "data_source")
        extras = {name: value for name, value in row.items() if name not in own}
        if "reward_spec" not in extras and isinstance(row.get("reward_model"), dict):  # verl's name of it
            extras["reward_spec"] = extras.pop("reward_model")
        if self.of_response is not None:
            extras["reward_spec"] = _with_truth(extras.get("reward_spec"), row[self.of_response], place)
        data_source = row.get("data_source") or self.source_names[source.location]
        if not is_name(data_source):
            raise DataError(
                f"{place}, column `data_source`: expected a text of at most {LONGEST_NAME} characters that can be printed, found {data_source!r:.80}"
            )
        if self.check is not None:
            try:
                self.check(env_class, extras, data_source)
            except (ConfigError, DataError, UserCodeError) as error:
                raise DataError(f"{place}: {error}") from error
        return Prompt(
            uid=uid,
            messages=row[self.of_prompt],
            env_class=env_class,
            extras=extras,
            data_source=data_source,
        )

    def _with_images(self, row: dict[str, Any], source: Source, place: str) -> dict[str, Any]:
        images, videos = (row.get(name) for name in self.shown)
        left = {name: value for name, value in row.items() if name not in self.shown or value is None}
        if self.of_prompt not in row:
            return left
        if _is_deep(row[self.of_prompt], _DEEPEST):
            raise DataError(
                f"{place}, column `{self.of_prompt}` is nested more than {_DEEPEST} deep; convert or drop it"
            )
        try:
            messages = with_system(read_messages(row[self.of_prompt] or None, "user"), row)
            read_tools(row.get("tools"))
        except DataError as error:
            raise DataError(f"{place}, column `{self.of_prompt}`: {error}") from error
        try:
            return {**left, self.of_prompt: with_images(messages, images, _folder_of(source), videos)}
        except DataError as error:
            raise DataError(f"{place}: {error}") from error


@lru_cache(maxsize=64)
def _folder_of(source: Source) -> Path:
    return source.files()[0].parent


def _with_truth(reward_spec: Any, answer: Any, place: str) -> dict[str, Any]:
    spec = {} if reward_spec is None else reward_spec
    if not isinstance(spec, dict):
        raise DataError(f"{place}, column `reward_spec`: expected an object, found {spec!r:.80}")
    return spec if spec.get("ground_truth") is not None else {**spec, "ground_truth": answer}


def _check_json(row: dict[str, Any], place: str) -> None:
    """Prompts travel as JSON in UTF-8, and a timestamp, a NaN or half a character is better found now than in the middle of a run."""
    for name, value in row.items():
        try:
            text = json.dumps({name: value}, allow_nan=False, ensure_ascii=False)
            text.encode()
            if text.count("[") + text.count("{") > _DEEPEST and _is_deep(value, _DEEPEST):
                raise ValueError(f"it is nested more than {_DEEPEST} deep")
        except (TypeError, ValueError, RecursionError) as error:
            raise DataError(
                f"{place}, column `{name}` cannot be written as JSON ({error}); convert or drop it"
            ) from error


def _is_deep(value: Any, most: int) -> bool:
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return most < 0 or any(_is_deep(part, most - 1) for part in parts)
