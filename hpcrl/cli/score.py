"""`hpcrl score`: compute a teacher's log-probabilities of the rows that a run will learn."""

from __future__ import annotations

import argparse
from pathlib import Path

from hpcrl.cli._common import positive, split


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "example: hpcrl score sft.toml -o teacher-logprobs; then "
        "hpcrl submit sft.toml trainer.distillation.precomputed_logprobs=teacher-logprobs"
    )
    parser.add_argument("settings", nargs="+", metavar="FILE|KEY=VALUE", help="configuration files, then overrides")
    parser.add_argument(
        "--ranks",
        type=positive,
        metavar="R",
        help="processes that share the teacher (default: the trainer's of one of its nodes, or those that share a model)",
    )
    parser.add_argument("-o", "--output", type=Path, metavar="DIR", required=True, help="directory that is made")
    parser.set_defaults(action=_score)


def _score(arguments: argparse.Namespace) -> int:
    from shlex import quote

    from hpcrl.config import Config
    from hpcrl.errors import ConfigError
    from hpcrl.launch.local.foreground import to_stderr
    from hpcrl.launch.local.replay import ranks_here
    from hpcrl.launch.local.score import score
    from hpcrl.rundir.layout import Run

    files, overrides = split(arguments.settings)
    if not files:
        raise ConfigError("no configuration file given; expected hpcrl score FILE.toml [KEY=VALUE ...] -o DIR")
    # a file that names what is written here serves for both
    config = Config.from_toml(files, [*overrides, "trainer.distillation.precomputed_logprobs="]).largest()
    place = Run(arguments.output.absolute())
    score(config, ranks_here(config.trainer, arguments.ranks, "ref"), place, to_stderr)
    print(
        f"{place.path}\n  hpcrl submit {quote(files[0])} trainer.distillation.precomputed_logprobs={quote(str(place.path))}    learns from it"
    )
    return 0
