"""`hpcrl data …`: check the datasets of a configuration before submission."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from hpcrl.cli._common import Subcommands, positive, split
from hpcrl.text import one_line, printable

if TYPE_CHECKING:
    from hpcrl.config import Config
    from hpcrl.data.conversations import Tokens
    from hpcrl.data.family import RowRenderer
    from hpcrl.data.sources import Source
    from hpcrl.data.tokenize import Recipe

_SHARES = (0.5, 0.9, 0.99)
_ERRORS_SHOWN = 3
_MADE = 256  # prompts of a function, which has no end
_OF_PAIR = (", chosen", ", rejected")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    text = "count the rows, pairs or prompts of a run's datasets, and show some trained rows. Prints their lengths, what would be left out, and which columns nothing reads"
    check = Subcommands(parser).add("check", text, _check)
    check.add_argument(
        "settings", nargs="+", metavar="FILE|KEY=VALUE", help="TOML files and overrides, later ones over earlier ones"
    )
    check.add_argument("-n", type=positive, default=3, metavar="K", help="rows of each dataset that are shown (3)")
    check.epilog = "The exit code is 1 if a row cannot be used, or none is left."


def _check(arguments: argparse.Namespace) -> int:
    from hpcrl.config import Config

    config = Config.from_toml(*split(arguments.settings))
    usable = _rows(config, arguments.n) if config.trainer.offline else True
    return 0 if _prompts(config) and usable else 1


def _prompts(config: Config) -> bool:
    from hpcrl.data.datasets import counted_prompts, load_dataset, prompt_datasets, unread_columns
    from hpcrl.errors import DataError
    from hpcrl.launch.submit.preflight import writes_texts

    sections, usable = (config.data, config.environment, config.generator.max_turns), True
    named = [(source, kinds) for _, sources, kinds in prompt_datasets(config) for source in sources]
    if not named:
        return True
    count, most = counted_prompts(config)
    if not config.trainer.offline and writes_texts(config):
        _print_tokenizer(config, chats=True)
    for source, kinds in named:
        path = source.location
        try:
            prompts = load_dataset([source], kinds, *sections, first=None if source.ends else _MADE, own=True)
            unread = unread_columns(prompts, kinds, *sections)
        except DataError as error:
            print(one_line(f"{path} cannot be used: {error}"))
            usable = False
            continue
        lengths = sorted(map(count, prompts))
        fitting = sum(length <= most for length in lengths)
        print(one_line(f"{path}: {len(prompts):,} prompts, {len(prompts) - fitting:,} of them left out as too long"))
        _show_lengths("prompt", lengths, f"trainer.max_prompt_length is {most:,}")
        _show_unread(unread)
        print()
        usable &= fitting > 0
    return usable


def _show_lengths(what: str, lengths: list[int], most: str) -> None:
    shares = [f"{share:.0%} have at most {lengths[int(share * (len(lengths) - 1))]:,}" for share in _SHARES]
    print(f"  tokens per {what}: {', '.join(shares)}, the longest {lengths[-1]:,}; {most}")


def _show_unread(columns: Sequence[str]) -> None:
    if columns:
        print(one_line(f"  columns that nothing reads: {', '.join(columns)}"))


def _rows(config: Config, shown: int) -> bool:
    from hpcrl.data.sources import training_sources, validation_sources
    from hpcrl.data.token_cache import TokenCache, key_of
    from hpcrl.data.tokenize import Recipe, shared_facts
    from hpcrl.rundir.layout import root_of, token_cache

    recipe, usable = Recipe.of(config), True
    sources = training_sources(config.data)
    if config.trainer.eval_interval > 0:
        sources += validation_sources(config.data, config.data.val_data)
    renderer, cache = (
        recipe.renderer(),
        TokenCache(token_cache(root_of(config.slurm.root))) if config.data.cache else None,
    )
    if recipe.pictures is None and recipe.columns.format != "tokens":
        _print_tokenizer(config, chats=recipe.columns.format != "text")
    for source in sources:
        usable &= _dataset(source, recipe, renderer, shown)
        if cache:
            folder = cache.folder / (key := key_of(shared_facts(source, recipe)))
            print(
                f"  {'kept in' if cache.record(key) else 'not kept yet; the first run that makes these tokens keeps them in'} {folder}"
            )
        print()
    return usable


def _print_tokenizer(config: Config, *, chats: bool) -> None:
    """Print what is found of the policy's tokenizer and of the chat template, where rows are conversations."""
    from hpcrl.launch.doctor.tokenizer import of_tokenizer

    template, options = config.generator.chat_template, config.generator.chat_template_kwargs
    for found in of_tokenizer(config.trainer.policy.model.pretrained, template, options, chats=chats):
        print(
            one_line(f"{found.level:8} {found.subject}: {found.found}")
            + (f"\n{'':8} -> {one_line(found.remedy)}" if found.remedy else "")
        )
    print()


def _dataset(source: Source, recipe: Recipe, renderer: RowRenderer, shown: int) -> bool:
    from hpcrl.data.datasets import WatchedRow
    from hpcrl.data.tokenize import Counts, fitted
    from hpcrl.errors import DataError

    counts, lengths, errors = Counts(), list[int](), list[str]()
    columns, read = dict[str, None](), set[str]()
    first: list[tuple[int, list[Tokens]]] = []
    folder = source.files()[0].parent
    for at, row in enumerate(source.rows()):
        try:
            columns |= dict.fromkeys(row if isinstance(row, dict) else ())
            sequences = renderer.sequences(WatchedRow(row, read) if isinstance(row, dict) else row, folder)
            lengths.append(max(len(tokens.token_ids) for tokens in sequences))
            kept = fitted(sequences, recipe, counts)
        except DataError as error:
            errors.append(f"row {at}: {error}")
            continue
        if kept is not None and len(first) < shown:
            first.append((at, kept))
    print(one_line(f"{source.location}: {counts}"))
    if lengths:
        lengths.sort()
        most = "trainer.max_length is" if recipe.pictures is None else recipe.pictures.limit
        _show_lengths("row", lengths, f"{most} {recipe.longest:,}")
        _show_unread([name for name in columns if name not in read])
    for error in errors[:_ERRORS_SHOWN]:
        print(one_line(f"  cannot be used: {error}"))
    if len(errors) > _ERRORS_SHOWN:
        print(f"  cannot be used: {len(errors) - _ERRORS_SHOWN:,} rows more")
    for at, sequences in first:
        for name, tokens in zip(("",) if len(sequences) == 1 else _OF_PAIR, sequences, strict=True):
            print("\n".join(_lines(f"row {at}{name}", tokens, renderer)))
    return bool(counts.rows) and not errors


def _lines(name: str, tokens: Tokens, renderer: RowRenderer) -> Iterator[str]:
    from itertools import groupby

    from hpcrl.cli.samples import part_lines
    from hpcrl.data.rollouts import Segment

    yield f"=== {name}: {len(tokens.token_ids)} tokens, {tokens.trained} of them trained"
    pairs = zip(tokens.token_ids, tokens.mask, strict=True)
    for trained, run in groupby(pairs, lambda pair: pair[1]):
        ids = [token for token, _ in run]
        text = printable(renderer.decode(ids))
        part = Segment("trained" if trained else "context", text, len(ids), len(ids) if trained else 0)
        yield from part_lines(part, f"{part.by}, {len(ids)} tokens")
