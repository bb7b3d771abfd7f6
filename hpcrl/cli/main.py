"""Dispatches the commands of `hpcrl`; each command's module is imported only for it, so `hpcrl --help` is instant."""

from __future__ import annotations

import argparse
import errno
import importlib
import os
import re
import sys
from collections.abc import Collection, Sequence
from io import TextIOWrapper
from pathlib import Path

import hpcrl
from hpcrl.cli._common import note_empty_values
from hpcrl.cli.completion import complete
from hpcrl.cli.foreign import with_names_elsewhere
from hpcrl.errors import ConfigError, HpcrlError, did_you_mean
from hpcrl.rundir.layout import expanded
from hpcrl.text import printable

COMMANDS: dict[str, dict[str, tuple[str, str]]] = {
    "start": {
        "init": ("hpcrl.cli.init", "write an experiment to change: settings, rows, and a reward or an environment"),
        "submit": ("hpcrl.cli.submit", "start a run, or a sweep, from TOML files"),
        "trial": ("hpcrl.cli.trial", "run recipes over seeds, compare them while they run, and print the verdict"),
        "plan": (
            "hpcrl.cli.plan",
            "print the nodes and rank groups of a run, and their memory; starts nothing",
        ),
        "score": (
            "hpcrl.cli.score",
            "write a teacher's log-probabilities of the rows of datasets, for fine-tuning; on this machine, needs torch",
        ),
    },
    "watch": {
        "status": ("hpcrl.cli.status", "show the state, its reason and the progress of runs"),
        "follow": ("hpcrl.cli.follow", "show a run while it runs, and its results"),
        "logs": ("hpcrl.cli.logs", "print the logs of a run"),
        "tensorboard": ("hpcrl.cli.tensorboard", "print the command that shows the curves of runs"),
        "sync": ("hpcrl.cli.sync", "send the metrics of a run to a tracker"),
        "upload": ("hpcrl.cli.upload", "copy exports and checkpoints of a run to the Hugging Face hub or to S3"),
        "advise": ("hpcrl.cli.advise", "print for what each role of a run waits, and the settings that would help"),
        "goodput": ("hpcrl.cli.goodput", "print what the nodes of runs did, as shares of all their time"),
        "trace": ("hpcrl.cli.trace", "write the timeline of a run's processes, for Perfetto and chrome://tracing"),
        "stacks": ("hpcrl.cli.stacks", "show the present stacks of every process of a run"),
        "profile": ("hpcrl.cli.profile", "show where a process of a run spends its time, sampled while it runs"),
        "attach": (
            "hpcrl.cli.attach",
            "open a shell, or run a command, on a node of a running run, with its environment",
        ),
    },
    "steer": {
        "cancel": ("hpcrl.cli.cancel", "save, stop and take a run, or a sweep, off the cluster"),
        "requeue": ("hpcrl.cli.requeue", "save, and go back into the queue"),
        "resume": (
            "hpcrl.cli.resume",
            "start the next attempt of a run that ended early, or give a finished one a later end",
        ),
        "rm": ("hpcrl.cli.rm", "remove runs that are over, or all of them but their metrics"),
    },
    "look at results": {
        "samples": ("hpcrl.cli.samples", "show samples: prompt, turns, reward and why they ended"),
        "report": ("hpcrl.cli.report", "write one HTML file that shows runs: verdict, curves, timeline, samples"),
        "eval": ("hpcrl.cli.eval", "evaluate a checkpoint of a run, or a model, on this machine"),
        "compare": ("hpcrl.cli.compare", "test whether two evaluations of the same prompts differ, and show where"),
        "rescore": ("hpcrl.cli.rescore", "score the samples of an evaluation with other rewards; generates nothing"),
        "replay": (
            "hpcrl.cli.replay",
            "train a step again from the checkpoint before it, on this machine and outside the run; needs torch",
        ),
        "checkpoint": ("hpcrl.cli.checkpoint", "list, verify, export and delete the checkpoints of a run"),
        "verify": ("hpcrl.cli.verify", "compare the files of a run with their checksums"),
        "certify": (
            "hpcrl.cli.certify",
            "write a manifest of all bits of a run, check it, and compare two runs by theirs",
        ),
    },
    "serve": {
        "reward": ("hpcrl.cli.reward", "serve a reward model, whose scores are rewards of runs"),
        "engine": ("hpcrl.cli.engine", "serve a policy to runs that start no engines of their own; needs vLLM"),
    },
    "check": {
        "config": ("hpcrl.cli.config", "show, compare, explain, check and convert configurations"),
        "data": ("hpcrl.cli.data", "check the rows of datasets: counts, lengths, trained text"),
        "env": ("hpcrl.cli.env", "list environments, play one in the terminal, and check tasks of sandboxes"),
        "image": ("hpcrl.cli.image", "store, list and remove images of sandboxes"),
        "completion": ("hpcrl.cli.completion", "print the lines by which a shell completes commands and options"),
        "doctor": ("hpcrl.cli.doctor", "check this cluster, its filesystem and a compute node for a run"),
        "bench": ("hpcrl.cli.bench", "measure a cluster by a run whose processes are killed, and compare such reports"),
    },
}
"""By what a person wants: the commands, each with its module, whose `add_arguments` gets the command's parser, and its help."""
_MODULES = {name: command for group in COMMANDS.values() for name, command in group.items()}
_ELSEWHERE = {
    "new": "init",
    "create": "init",
    "run": "submit",
    "train": "submit",
    "launch": "submit",
    "clean": "rm",
    "delete": "rm",
    "ls": "status",
    "list": "status",
}
"""Commands of other tools -> the command here."""
_JOB_PACKAGES = ("aiohttp", "numpy", "pyarrow", "safetensors", "tensorboard", "torch", "transformers", "uvicorn")
"""What the extra `job` installs, and a login node may lack."""

_INTERRUPTED = 130  # as of a program that SIGINT ends
_OTHER_PLACE = "look at its permissions, or name another place"
_MAKE_ROOM = "make room (`hpcrl status --size`, `hpcrl checkpoint rm`, `hpcrl rm`), or name another place"
_OF_FILESYSTEMS = {
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), _OTHER_PLACE),
    errno.ENOSPC: _MAKE_ROOM,
    errno.EDQUOT: f"this is your quota: {_MAKE_ROOM}",
    **dict.fromkeys((errno.EIO, errno.ESTALE), "the filesystem or its server fails: tell its administrators"),
}
"""Remedies for errors of files that no fault of hpcrl causes."""


def _parser(argv: Sequence[str]) -> tuple[argparse.ArgumentParser, argparse.ArgumentParser]:
    """Return the parser of this command line, and that of its command, which alone has its arguments."""
    named = next((word for word in argv if not word.startswith("-")), None)
    parser, commands = _parsers({named} if named in _MODULES else _MODULES, {named})
    if named is not None and named not in commands:
        parser.error(f"there is no command {named!r}{_meant(named)}")
    return parser, commands[named] if named else parser


def _parsers(
    names: Collection[str | None], with_arguments: Collection[str | None]
) -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    """Return the parser of some commands, and that of each; the modules of those `with_arguments` are imported."""
    parser = argparse.ArgumentParser(
        prog="hpcrl",
        usage="hpcrl [-h] [--version] COMMAND ...",
        description="Post-training of language models, and of models that see, paint or act, on Slurm clusters: reinforcement learning, supervised fine-tuning, preferences and reward models.",
        epilog=_overview(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"hpcrl {hpcrl.__version__}")
    group = parser.add_subparsers(prog="hpcrl", metavar="COMMAND", required=True, help=argparse.SUPPRESS)
    commands = dict[str, argparse.ArgumentParser]()
    for name in (name for name in _MODULES if name in names):
        module, text = _MODULES[name]
        commands[name] = group.add_parser(name, description=text[0].upper() + text[1:] + ".")
        if name in with_arguments:
            importlib.import_module(module).add_arguments(commands[name])
    return parser, commands


def _meant(word: str) -> str:
    """Return which command may be meant: one that other tools call so, a command of a command, or one that is spelt alike."""
    if word in _ELSEWHERE:
        return f"; did you mean hpcrl {_ELSEWHERE[word]}?"
    _, commands = _parsers(_MODULES, _MODULES)
    listed = re.compile(rf"^    {re.escape(word)}\b", re.MULTILINE)
    own = [f"hpcrl {name} {word}" for name, command in commands.items() if listed.search(command.format_help())]
    return f"; did you mean {' or '.join(own)}?" if own else did_you_mean(word, commands)


def _overview() -> str:
    width = max(len(name) for group in COMMANDS.values() for name in group)
    lines = []
    for title, group in COMMANDS.items():
        lines += [f"{title}:", *(f"  {name:{width}}  {text}" for name, (_, text) in group.items()), ""]
    return "\n".join([*lines, "`hpcrl COMMAND --help` describes a command. Exit codes: docs/commands.md."])


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    if "_ARGCOMPLETE" in os.environ:  # a shell asks for the words that may follow
        words = os.environ["COMP_LINE"].split()
        complete(_parsers(_MODULES, words)[0])
    parser, chosen = _parser(argv)
    if not argv:
        parser.print_help(sys.stderr)
        return 2
    command = argv[argv.index("--") + 1 :] if "--" in argv else []  # of the user's own, after those of hpcrl
    argv = argv[: argv.index("--")] if command else argv
    arguments, rest = parser.parse_known_args(argv)
    settings = getattr(arguments, "settings", None)
    unknown = next((word.partition("=")[0] for word in rest if word.startswith("--")), "")
    if unknown and settings is not None and "." in unknown:
        override = next(word for word in rest if word.startswith(unknown)).lstrip("-")
        chosen.error(f"there is no option {unknown}; settings have no dashes: {override}")
    if near := did_you_mean(unknown, re.findall(r"--[a-z][a-z-]+", chosen.format_help())) if unknown else "":
        chosen.error(f"there is no option {unknown}{near}")
    if settings is None or any(word.startswith("-") for word in rest):
        arguments = parser.parse_args(argv)  # says what is wrong
    else:
        settings += rest  # argparse takes no positional argument after an option that follows the first one
    if command and not hasattr(arguments, "command"):
        parser.error(f"unexpected: -- {' '.join(command)}")
    arguments.command = command
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # names and texts may have what the terminal's encoding lacks
            stream.reconfigure(errors="backslashreplace")
    note_empty_values(settings or [])
    try:
        for name, value in vars(arguments).items():
            if isinstance(value, Path):  # a shell leaves the ~ of --root=~/runs
                setattr(arguments, name, expanded(value))
        return arguments.action(arguments)
    except HpcrlError as error:
        if isinstance(error, ConfigError):
            error = with_names_elsewhere(error)
        print(f"hpcrl: {printable(str(error))}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return _INTERRUPTED
    except BrokenPipeError:  # the reader, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in _JOB_PACKAGES:
            raise
        print(f"hpcrl: this needs {package}: do it where the jobs run, or pip install 'hpcrl[job]'", file=sys.stderr)
        return HpcrlError.exit_code
    except OSError as error:
        if (remedy := _OF_FILESYSTEMS.get(error.errno or 0)) is None:
            raise
        where = printable(str(error.filename or "a file"))
        print(f"hpcrl: {where}: {error.strerror}; {remedy}", file=sys.stderr)
        return HpcrlError.exit_code


if __name__ == "__main__":
    sys.exit(main())
