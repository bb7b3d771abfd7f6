"""Tokenizes the datasets of a run that trains their rows: once, by the controller, into dataset/ of the run directory.

A run trains what it read at its first start: later attempts find the tokens there, and read no rows of the sources. One that was changed stops
them (hpcrl/launch/inputs.py).
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from itertools import chain, islice
from multiprocessing import get_context, parent_process
from pathlib import Path
from typing import Any

from hpcrl.config import Config
from hpcrl.config.sections.data import DataConfig
from hpcrl.config.sections.generator import ChatTemplateConfig
from hpcrl.config.sections.model import Pretrained
from hpcrl.config.token_limits import longest_sample
from hpcrl.data.conversations import RESPONSE, Columns, Format, Renderer, Tokens, TrainOnWhat
from hpcrl.data.family import RowFormat, RowRenderer, data_family
from hpcrl.data.prompts import count_aside, source_names
from hpcrl.data.sources import Source, training_sources, validation_sources
from hpcrl.data.token_cache import TokenCache, contents_of, key_of, made_by, tokenizer_facts
from hpcrl.data.token_file import TokenFile, open_tokens, write_tokens
from hpcrl.data.tokenizer import chat_template, load_tokenizer, without_torch
from hpcrl.data.vision.reader import ImageReader, Preparation
from hpcrl.errors import CommitError, DataError
from hpcrl.rundir.commit import Fence, is_committed, unfenced, verify
from hpcrl.rundir.layout import Run
from hpcrl.text import metric_name

HELD_OUT = "held_out"
"""The name of the rows that data.test_size sets aside."""
_ROWS_AT_ONCE = 256
AHEAD = 2
"""Parts that each process has before it, where data.prefetch_factor says nothing."""


@dataclass
class Counts:
    """Counts of a dataset's rows by their treatment.

    Attributes:
        cut, dropped: rows of more than trainer.max_length tokens; pairs of which one answer with its prompt has more.
        untrained: rows that are left out because none of their tokens, or of one of their answers, would be trained.
        lost: rows of which the chat template leaves out something that is to be trained, `data.lost`.
        special: special tokens within what is trained of messages, such as marks of thoughts.
        rows, tokens, trained: what is left.
        longest: tokens of the longest row, or answer with its prompt, before it was cut or dropped.
    """

    rows: int = 0
    cut: int = 0
    dropped: int = 0
    untrained: int = 0
    tokens: int = 0
    trained: int = 0
    longest: int = 0
    lost: int = 0
    special: int = 0

    def __str__(self) -> str:
        left_out = [
            f"{self.cut:,} cut",
            f"{self.dropped:,} dropped as too long",
            f"{self.untrained:,} with nothing to train",
        ]
        if self.lost:
            left_out.append(f"{self.lost:,} of which the chat template leaves out something that is to be trained")
        special = f", {self.special:,} of these special tokens within answers" if self.special else ""
        return f"{self.rows:,} rows, {self.tokens:,} tokens, {self.trained:,} of them trained{special}; longest row {self.longest:,}; {', '.join(left_out)}"


@dataclass(frozen=True)
class Recipe:
    """Settings that convert a row to tokens; other processes can receive them.

    Attributes:
        longest: tokens of a row at most.
        too_long: what becomes of a longer one.
        seeing: how images and videos are prepared.
        pictures: the format of rows that are no texts; None: tokens of texts are trained.
        lost: what becomes of a row of which the chat template leaves out something that is to be trained.
    """

    model: Pretrained
    template: ChatTemplateConfig
    options: dict[str, Any]
    columns: Columns
    train_on: TrainOnWhat
    longest: int
    too_long: str
    seeing: Preparation = field(default_factory=Preparation)
    pictures: RowFormat | None = None
    lost: str = "refuse"

    @classmethod
    def of(cls, config: Config) -> Recipe:
        data, generator = config.data, config.generator
        columns = Columns(
            _format(config),
            data.conversation_column,
            data.prompt_column,
            data.response_column,
            data.text_column,
            data.chosen_column,
            data.rejected_column,
            data.margin_column,
            data.image_column,
            data.video_column,
            data.label_column,
        )
        return cls(
            config.trainer.policy.model.pretrained,
            generator.chat_template,
            generator.chat_template_kwargs,
            columns,
            data.train_on_what,
            longest_sample(config),
            data.too_long,
            Preparation.of(data),
            data_family(config).row_format(config),
            data.lost,
        )

    def reader(self) -> ImageReader | None:
        """Return the reader of images; None: the model has no images."""
        sees = self.columns.format != "tokens" and self.pictures is None
        return ImageReader.of(self.model, self.seeing) if sees else None

    def prepared(self) -> dict[str, Any] | None:
        """Return the description of the images' preparation when a row is read; None: there are none."""
        if self.pictures is not None:
            return vars(self.pictures)
        with without_torch():
            sees = self.reader() is not None
        return {**vars(self.model), "seeing": asdict(self.seeing)} if sees else None

    def renderer(self) -> RowRenderer:
        """Return the renderer of rows; errors as of `load_tokenizer`."""
        if self.pictures is not None:
            with without_torch():
                return self.pictures.renderer(self.model, self.columns)
        with without_torch():
            tokenizer, reader = load_tokenizer(self.model, self.template), self.reader()
        special, refuse = self.template.allow_special_tokens, self.lost == "refuse"
        return Renderer(tokenizer, self.columns, self.options, special, self.train_on, reader, refuse, self.model)

    def facts(self) -> dict[str, Any]:
        """Return all that decides what a row becomes, as JSON has it."""
        facts = asdict(self) | {"model": str(self.model), "template": chat_template(self.template)}
        if self.pictures is None:
            del facts["pictures"]
        if self.columns.label is None:  # as before there were labels: what earlier attempts wrote stays valid
            del facts["columns"]["label"]
        return facts

    def facts_of_tokens(self) -> dict[str, Any]:
        """Return all that decides which tokens rows of the same contents become, and nothing else; errors as of `renderer`."""
        facts, columns, form = asdict(self), self.columns, self.columns.format
        del facts["model"], facts["template"], facts["seeing"], facts["pictures"]
        facts |= {"by": made_by(), "columns": _READ.get(form, asdict)(columns), "format": form}
        if form in ("text", "tokens"):
            del facts["train_on"], facts["options"], facts["lost"]
        if form != "tokens":
            renderer = self.renderer()
            assert isinstance(renderer, Renderer), "what is learned from pictures is not kept for other runs"
            facts["tokenizer"] = tokenizer_facts(renderer.tokenizer, template=form != "text")
            facts["special_tokens"] = self.template.allow_special_tokens
            facts["end_of_text"] = renderer.end_of_text if form in ("text", "preference") else None
        return facts


def _format(config: Config) -> Format:
    if config.data.label_column is not None:
        return "labelled"
    return "preference" if config.trainer.pairwise or config.trainer.unpaired else config.data.format


_READ: dict[str, Callable[[Columns], Any]] = {
    "conversations": lambda columns: columns.conversation,
    "prompt_response": lambda columns: (columns.prompt, columns.response or RESPONSE),
    "text": lambda columns: columns.text,
    "tokens": lambda _: (),
}
"""Names of the columns that a format reads."""


@dataclass(frozen=True)
class Tokenizer:
    """Tokenizes datasets into the run directory, where they are not there yet.

    Args:
        progress: is called now and then while rows are read.
        cache: has the tokens of other runs, and gets those of this one; None: none are shared.
    """

    run: Run
    attempt: int
    recipe: Recipe
    workers: int = 0
    ahead: int = AHEAD
    fence: Fence = unfenced
    progress: Callable[[], None] = unfenced
    cache: TokenCache | None = None

    def dataset(self, folder: str, name: str, source: Source) -> TokenFile:
        """Return the tokens of a dataset, made now or by an earlier attempt from a source and settings of the same name."""
        target, made_of = self.run.dataset(folder), {"source": source.facts(), **self.recipe.facts()}
        if not self._is_there(target, made_of):
            facts, prepared = {"name": name, "made_of": made_of}, self.recipe.prepared()
            if prepared is not None:  # what files they are is not known to the cache
                facts["images"] = prepared
            self._made(target, source, facts) if prepared or not self.cache else self._shared(target, source, facts)
            open_tokens.cache_clear()
        return open_tokens(target)

    def _made(self, target: Path, source: Source, facts: dict[str, Any]) -> None:
        counts = Counts()
        rows = self._kept(tokenized(source, self.recipe, self.workers, self.ahead), source, counts)
        sequences, of_each_row = chain.from_iterable(rows), self.recipe.columns.sequences
        write_tokens(target, self.attempt, sequences, self.fence, of_each_row, counts=vars(counts), **facts)
        print(f"{facts['name']}: {counts}", flush=True)

    def _shared(self, target: Path, source: Source, facts: dict[str, Any]) -> None:
        assert self.cache is not None
        what = shared_facts(source, self.recipe, self.progress)
        key = key_of(what)
        if (found := self.cache.take(key, target, self.attempt, self.fence, **facts)) is not None:
            print(
                f"{facts['name']}: {Counts(**found['counts'])}; as another run made them ({self.cache.folder / key})",
                flush=True,
            )
            return
        self._made(target, source, facts)
        if shared_facts(source, self.recipe, self.progress) == what:  # else its files changed while they were read
            self.cache.put(key, target, what)

    def _is_there(self, target: Path, made_of: dict[str, Any]) -> bool:
        try:
            return is_committed(target) and verify(target)["made_of"] == made_of
        except CommitError as error:
            print(f"{error}; tokenized again", flush=True)
            return False

    def _kept(self, rows: Iterable[list[Tokens]], source: Source, counts: Counts) -> Iterator[list[Tokens]]:
        for row in rows:
            self.progress()
            if (kept := fitted(row, self.recipe, counts)) is not None:
                yield kept
        if not counts.rows:
            raise DataError(
                f"dataset {source.location}: no row is left ({counts}); look at trainer.max_length, data.too_long and data.train_on_what; "
                "`hpcrl data check` shows what becomes of the rows"
            )


def shared_facts(source: Source, recipe: Recipe, progress: Callable[[], None] = unfenced) -> dict[str, Any]:
    """Return the facts that decide the tokens of a dataset, in all runs alike.

    Args:
        progress: is called now and then while its files are read.

    Raises:
        DataError: they cannot be found; others as of `Recipe.renderer`.
    """
    try:
        chosen: dict[str, Any] = {"part": source.part} if source.part else {}
        if source.size is not None:
            chosen["size"] = source.size
        return {"contents": contents_of(source.files(), progress), **chosen, **recipe.facts_of_tokens()}
    except OSError as error:
        raise DataError(f"dataset {source.location} cannot be read: {error}") from error


def fitted(row: list[Tokens], recipe: Recipe, counts: Counts) -> list[Tokens] | None:
    """Return the sequences of a row as they are trained, and count it; None: it is left out.

    Raises:
        DataError: it is too long, and such rows are refused.
    """
    length = max(len(sequence.token_ids) for sequence in row)
    counts.longest = max(counts.longest, length)
    if length > recipe.longest:
        if recipe.too_long == "refuse":
            raise DataError(
                f"a row has {length} tokens, more than trainer.max_length = {recipe.longest}; raise that, or set data.too_long"
            )
        if recipe.too_long == "drop":
            counts.dropped += 1
            return None
        counts.cut += 1
        row = [sequence.cut(recipe.longest) for sequence in row]
    if not all(any(sequence.mask[1:]) for sequence in row):  # nothing predicts the first token
        counts.untrained += 1
        return None
    counts.rows += 1
    counts.tokens += sum(len(sequence.token_ids) for sequence in row)
    counts.trained += sum(sequence.trained for sequence in row)
    counts.special += sum(sequence.special for sequence in row)
    counts.lost += any(sequence.lost for sequence in row)
    return row


def tokenized(source: Source, recipe: Recipe, workers: int = 0, ahead: int = AHEAD) -> Iterator[list[Tokens]]:
    """Yield the rows of a dataset as sequences of tokens, in order.

    Args:
        workers: further processes that make them; 0: this one does.
        ahead: parts of some hundred rows that each of them has before it.

    Raises:
        DataError: names the row that cannot be used.
    """
    parts = _parts(source, _ROWS_AT_ONCE)
    if not workers:
        _prepare(recipe)
        for part in parts:
            yield from _rendered(*part)
        return
    with ProcessPoolExecutor(workers, get_context("spawn"), _begin, (recipe,)) as pool:
        waiting = deque[Future[list[list[Tokens]]]]()
        for part in parts:
            waiting.append(pool.submit(_rendered, *part))
            if len(waiting) >= workers * ahead:
                yield from waiting.popleft().result()
        while waiting:
            yield from waiting.popleft().result()


def _parts(source: Source, size: int) -> Iterator[tuple[str, Path, int, list[Any]]]:
    rows, first, folder = source.rows(), 0, source.files()[0].parent
    while part := list(islice(rows, size)):
        yield source.location, folder, first, part
        first += len(part)


_OF_PROCESS = list[tuple[Recipe, RowRenderer]]()


def _begin(recipe: Recipe) -> None:
    """Prepare a further process. It has an end of each pipe of the pool, and would wait for rows for ever where this run's process is killed."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _prepare(recipe)


def _end_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _prepare(recipe: Recipe) -> None:
    if [made_by for made_by, _ in _OF_PROCESS] != [recipe]:  # datasets come one after the other, with one tokenizer
        _OF_PROCESS[:] = [(recipe, recipe.renderer())]


def _rendered(location: str, folder: Path, first: int, rows: Sequence[Any]) -> list[list[Tokens]]:
    ((_, renderer),), found = _OF_PROCESS, list[list[Tokens]]()
    for at, row in enumerate(rows, first):
        try:
            found.append(renderer.sequences(row, folder))
        except DataError as error:
            raise DataError(f"dataset {location}, row {at}: {error}") from error
    return found


@dataclass(frozen=True)
class Rows:
    """Consecutive rows of a dataset."""

    file: TokenFile
    places: range


def tokenize_datasets(config: Config, tokenizer: Tokenizer) -> None:
    """Make the training and evaluation datasets of a run; errors as of `Tokenizer.dataset`."""
    data = config.data
    for at, (name, source) in enumerate(zip(_names(data.train_data), training_sources(data), strict=True)):
        tokenizer.dataset(f"train-{at}", name, source)
    if config.trainer.eval_interval > 0:
        for at, (name, source) in enumerate(
            zip(_names(data.val_data), validation_sources(data, data.val_data), strict=True)
        ):
            tokenizer.dataset(f"validation-{at}", name, source)


def training_rows(run: Run, data: DataConfig) -> list[Rows]:
    """Return the rows to train of each dataset, without those that are set aside."""
    return [Rows(file, range(aside, len(file))) for file, aside in _set_aside(run, data)]


def validation_rows(run: Run, data: DataConfig) -> dict[str, list[Rows]]:
    """Return the rows of each validation set by its name; errors as of `training_rows`."""
    if data.test_size is not None:
        return {HELD_OUT: [Rows(file, range(aside)) for file, aside in _set_aside(run, data) if aside]}
    files = [open_tokens(run.dataset(f"validation-{at}")) for at in range(len(data.val_data))]
    return {file.name: [Rows(file, range(len(file)))] for file in files}


def _set_aside(run: Run, data: DataConfig) -> list[tuple[TokenFile, int]]:
    """Return each training dataset with the number of its first rows that are evaluated instead."""
    files = [open_tokens(run.dataset(f"train-{at}")) for at in range(len(data.train_data))]
    left = 0 if data.test_size is None else count_aside(sum(map(len, files)), data.test_size)
    found = list[tuple[TokenFile, int]]()
    for file in files:
        found.append((file, min(left, len(file))))
        left -= found[-1][1]
    return found


def _names(locations: Sequence[str]) -> list[str]:
    short = source_names(locations)
    return [metric_name(short[one]) for one in locations]
