"""`hpcrl data …`: what a configuration makes of its datasets, before anything is started."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import TYPE_CHECKING

from hpcrl.cli._common import positive, split
from hpcrl.text import one_line, printable

if TYPE_CHECKING:
    from hpcrl.data.conversations import Renderer, Tokens
    from hpcrl.data.pipelines.pictures import PictureRenderer
    from hpcrl.data.sources import Source
    from hpcrl.data.tokenize import Recipe

_SHARES = (0.5, 0.9, 0.99)
_ERRORS_SHOWN = 3
_OF_PAIR = (", chosen", ", rejected")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    text = "count the rows or pairs of the datasets of a run that learns from them, say how long they are and what would be left out, and show some"
    check = commands.add_parser("check", help=text, description=text[0].upper() + text[1:] + ".")
    check.add_argument(
        "settings", nargs="+", metavar="FILE|KEY=VALUE", help="TOML files and overrides, later ones over earlier ones"
    )
    check.add_argument("-n", type=positive, default=3, metavar="K", help="rows of each dataset that are shown (3)")
    check.set_defaults(action=_check)
    check.epilog = "The exit code is 1 if a row cannot be used, or none is left."


def _check(arguments: argparse.Namespace) -> int:
    from hpcrl.config import Config
    from hpcrl.config.derive import is_offline
    from hpcrl.data.token_cache import TokenCache, key_of
    from hpcrl.data.tokenize import Recipe, shared_facts, training_sources, validation_sources
    from hpcrl.errors import ConfigError
    from hpcrl.rundir.layout import root_of, token_cache

    config = Config.from_toml(*split(arguments.settings))
    if not is_offline(config.trainer):
        raise ConfigError(
            'trainer.mode: the rows of reinforcement learning are checked by `hpcrl submit`, and shown by `hpcrl env try`; expected "sft", "dpo" or "reward_model"'
        )
    recipe, usable = Recipe.of(config), True
    sources = training_sources(config.data)
    if config.trainer.eval_interval > 0:
        sources += validation_sources(config.data)
    renderer, cache = (
        recipe.renderer(),
        TokenCache(token_cache(root_of(config.slurm.root))) if config.data.cache else None,
    )
    _print_tokenizer(recipe)
    for source in sources:
        usable &= _dataset(source, recipe, renderer, arguments.n)
        if cache:
            folder = cache.folder / (key := key_of(shared_facts(source, recipe)))
            print(
                f"  {'kept in' if cache.record(key) else 'not kept yet; the first run that makes these tokens keeps them in'} {folder}"
            )
        print()
    return 0 if usable else 1


def _print_tokenizer(recipe: Recipe) -> None:
    """Print what is found of the tokenizer and the chat template; of pictures and of rows of tokens there is nothing to say."""
    from hpcrl.launch.doctor.tokenizer import of_tokenizer

    if recipe.pictures is not None or recipe.columns.format == "tokens":
        return
    for found in of_tokenizer(recipe.model, recipe.template, recipe.options, chats=recipe.columns.format != "text"):
        print(
            one_line(f"{found.level:8} {found.subject}: {found.found}")
            + (f"\n{'':8} -> {one_line(found.remedy)}" if found.remedy else "")
        )
    print()


def _dataset(source: Source, recipe: Recipe, renderer: Renderer | PictureRenderer, shown: int) -> bool:
    """Print what becomes of a dataset, and return whether a run could use it."""
    from hpcrl.data.tokenize import Counts, fitted
    from hpcrl.errors import DataError

    counts, lengths, errors = Counts(), list[int](), list[str]()
    first: list[tuple[int, list[Tokens]]] = []
    folder = source.files()[0].parent
    for at, row in enumerate(source.rows()):
        try:
            sequences = renderer.sequences(row, folder)
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
        most = (
            "trainer.max_length is" if recipe.pictures is None else "with max_prompt_length and a noise level at most"
        )
        shares = [f"{share:.0%} have at most {lengths[int(share * (len(lengths) - 1))]:,}" for share in _SHARES]
        print(f"  tokens per row: {', '.join(shares)}, the longest {lengths[-1]:,}; {most} {recipe.longest:,}")
    for error in errors[:_ERRORS_SHOWN]:
        print(one_line(f"  cannot be used: {error}"))
    if len(errors) > _ERRORS_SHOWN:
        print(f"  cannot be used: {len(errors) - _ERRORS_SHOWN:,} rows more")
    for at, sequences in first:
        for name, tokens in zip(("",) if len(sequences) == 1 else _OF_PAIR, sequences, strict=True):
            print("\n".join(_lines(f"row {at}{name}", tokens, renderer)))
    return bool(counts.rows) and not errors


def _lines(name: str, tokens: Tokens, renderer: Renderer | PictureRenderer) -> Iterator[str]:
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
