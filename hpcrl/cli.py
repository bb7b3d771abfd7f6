"""The command line. Each command imports what it needs when it runs, so that `hpcrl --help` is instant."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import hpcrl
from hpcrl.cli_checkpoint import add_checkpoint
from hpcrl.cli_cluster import add_cluster
from hpcrl.cli_config import add_config
from hpcrl.cli_env import add_env
from hpcrl.cli_eval import add_eval
from hpcrl.cli_plan import add_plan
from hpcrl.cli_replay import add_replay
from hpcrl.cli_run import add_run_command, named_run
from hpcrl.cli_samples import add_samples
from hpcrl.cli_views import add_views
from hpcrl.errors import HpcrlError

if TYPE_CHECKING:
    from hpcrl.config import Config
    from hpcrl.launch.executors import Submission
    from hpcrl.run.layout import Run

_CANCEL_S = 150.0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hpcrl", description="Reinforcement-learning post-training of language models on Slurm clusters."
    )
    parser.add_argument("--version", action="version", version=f"hpcrl {hpcrl.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_submit(commands)
    add_plan(commands)

    def run_command(name: str, text: str) -> argparse.ArgumentParser:
        return add_run_command(commands, name, text, globals()[f"_{name}"])

    add_views(commands)
    logs = run_command("logs", "print the logs of a run")
    logs.add_argument("-f", "--follow", action="store_true", help="go on until the run is over")
    logs.add_argument("--role", choices=("trainer", "rollout", "engine", "controller", "agent"), help="only this role")
    logs.add_argument("--attempt", type=int, metavar="N", help="another attempt than the newest")
    cancel = run_command("cancel", "save, stop and take a run off the cluster")
    cancel.add_argument("--now", action="store_true", help="do not wait until the state is saved")
    run_command("requeue", "save, and go back into the queue")
    resume = run_command("resume", "start the next attempt of a run that ended early")
    resume.add_argument(
        "settings", nargs="*", metavar="KEY=VALUE", help="settings to change; what cannot be is refused"
    )
    resume.add_argument("--follow", action="store_true", help="show progress until the run is over")
    run_command("stacks", "show what every process of a run is doing now")
    add_samples(commands)
    add_replay(commands)
    add_eval(commands)
    add_checkpoint(commands)
    add_cluster(commands)
    add_config(commands)
    add_env(commands)
    return parser


def _add_submit(commands: argparse._SubParsersAction) -> None:
    submit = commands.add_parser(
        "submit",
        help="start a run, or a sweep, from TOML files",
        description="Start a run from TOML files, merged from left to right, and overrides such as trainer.seed=1.",
        epilog="example: hpcrl submit configs/quickstart.toml slurm/sites/devcluster.toml trainer.seed=1",
    )
    submit.add_argument("settings", nargs="+", metavar="FILE|KEY=VALUE", help="configuration files, then overrides")
    submit.add_argument("--local", action="store_true", help="run on this machine, without Slurm")
    submit.add_argument(
        "--dry-run", action="store_true", help="print configuration, batch script and plan; submit nothing"
    )
    submit.add_argument("--follow", action="store_true", help="show progress until the run is over")
    submit.add_argument(
        "--sweep", action="append", default=[], metavar="KEY=V1,V2", help="one array element per value; repeatable"
    )
    submit.add_argument("--seeds", metavar="1,2,3|0:4", help="one array element per trainer.seed")
    submit.add_argument(
        "--sweep-file", type=Path, metavar="FILE", help="one array element per line: KEY=VALUE [KEY=VALUE ...]"
    )
    submit.set_defaults(action=_submit)


def _submit(arguments: argparse.Namespace) -> int:
    from hpcrl.errors import ConfigError
    from hpcrl.launch import submit
    from hpcrl.launch.models import unchecked_layouts
    from hpcrl.launch.preflight import check_checkpoint, check_files
    from hpcrl.launch.sweep import elements, load_elements

    files = [Path(item) for item in arguments.settings if "=" not in item]
    overrides = [item for item in arguments.settings if "=" in item]
    if not files:
        raise ConfigError(
            "no configuration file given; expected hpcrl submit FILE.toml [FILE.toml ...] [KEY=VALUE ...]"
        )
    warnings = dict[str, None]()

    def check(config: Config) -> None:
        check_files(config)
        warnings.update(dict.fromkeys([*unchecked_layouts(config), *check_checkpoint(config)]))

    varied = elements(arguments.sweep, arguments.seeds, arguments.sweep_file)
    configs = load_elements(files, overrides, varied, check)
    for warning in warnings:
        print(f"hpcrl: {warning}", file=sys.stderr)
    name = configs[0].trainer.run_name or f"{files[0].stem}-{time.strftime('%m%d-%H%M%S')}"
    submission = submit.prepare(name, list(zip(configs, varied, strict=True)))
    if arguments.dry_run:
        _show_dry_run(submission)
        return 0
    if not arguments.local:
        submit.require_slurm()
    runs = submit.submit(submission, arguments.local)
    for run in runs:
        _announce(run)
    return _follow(runs) if arguments.follow else 0


def _show_dry_run(submission: Submission) -> None:
    from hpcrl.launch.executors import batch_scripts
    from hpcrl.launch.plan import describe_plan, describe_pool, make_plan

    config = submission.elements[0].config
    print("# configuration\n" + config.to_toml())
    for title, script in zip(
        ("batch script", "batch script of the elastic pool"), batch_scripts(submission), strict=False
    ):
        print(f"# {title}\n{script}")
    print("# plan")
    for run, element in zip(submission.runs, submission.elements, strict=True):
        print(f"{run.path}  {' '.join(element.overrides)}".rstrip())
    print("\n".join([*describe_plan(make_plan(config)), *describe_pool(config)]))
    print("dry run: nothing was submitted")


def _announce(run: Run) -> None:
    from hpcrl.run.commit import read_json

    record = read_json(run.submission)
    assert record, run.submission
    print(f"{run.name}: {record['executor']} job {record['job_id']}, {run.path}")
    print(f"  hpcrl status {_short(run)}    hpcrl logs -f {_short(run)}    hpcrl cancel {_short(run)}")


def _short(run: Run) -> str:
    from hpcrl.launch.registry import default_root

    known = run.path.parent.parent == default_root().absolute()
    return run.name if known else str(run.path)


def _follow(runs: list[Run]) -> int:
    """Show the first run until all are over; return 1 if one of them failed."""
    from hpcrl.launch.lookout import Lookout
    from hpcrl.launch.registry import known_states, states_of
    from hpcrl.observe.view import follow

    try:
        for run in runs:
            follow(run, Lookout(run, known_states).over)
    except KeyboardInterrupt:
        print(f"\nThe run goes on. hpcrl cancel {_short(runs[0])} ends it.")
        return 0
    states = states_of(runs)
    for state in states:
        if state.word != "done":
            print(f"{state.run.name}: {state.word}: {state.detail}")
    return int(any(state.word not in ("done", "cancelled", "interrupted") for state in states))


def _logs(arguments: argparse.Namespace) -> int:
    from hpcrl.errors import RunError
    from hpcrl.launch import logs
    from hpcrl.launch.lookout import Lookout
    from hpcrl.launch.registry import known_states

    run = named_run(arguments)
    if arguments.follow and arguments.attempt:
        raise RunError("--follow shows all attempts; leave out --attempt, or --follow")
    if arguments.follow:
        try:
            logs.follow(run, arguments.role, Lookout(run, known_states).over)
        except KeyboardInterrupt:
            return 0
    else:
        logs.show(run, arguments.role, arguments.attempt)
    return 0


def _cancel(arguments: argparse.Namespace) -> int:
    from hpcrl.launch.stop import cancel

    state = cancel(named_run(arguments), 0.0 if arguments.now else _CANCEL_S)
    print(f"{state.run.name}: {state.word}: {state.detail}")
    if not state.over:
        print("It was asked to save and to stop, and will; `hpcrl cancel --now` does not wait for that.")
    return 0


def _requeue(arguments: argparse.Namespace) -> int:
    from hpcrl.launch.requeue import requeue

    run = named_run(arguments)
    requeue(run)
    print(f"{run.name} was asked to save and to go back into the queue; hpcrl status {_short(run)} shows it")
    return 0


def _stacks(arguments: argparse.Namespace) -> int:
    from hpcrl.launch.stacks import stacks

    for process, text in stacks(named_run(arguments)).items():
        print(f"== {process}\n{text}")
    return 0


def _resume(arguments: argparse.Namespace) -> int:
    from hpcrl.launch.resume import resume

    run = named_run(arguments)
    for change in resume(run, arguments.settings):
        print(f"  {change}")
    _announce(run)
    return _follow([run]) if arguments.follow else 0


def main(argv: list[str] | None = None) -> int:
    parser = _parser()
    argv = sys.argv[1:] if argv is None else argv
    command = argv[argv.index("--") + 1 :] if "--" in argv else []  # of the user's own, after those of hpcrl
    argv = argv[: argv.index("--")] if command else argv
    arguments, rest = parser.parse_known_args(argv)
    settings = getattr(arguments, "settings", None)
    if settings is None or any(word.startswith("-") for word in rest):
        arguments = parser.parse_args(argv)  # says what is wrong
    else:
        settings += rest  # argparse takes no positional argument after an option that follows the first one
    if command and not hasattr(arguments, "command"):
        parser.error(f"unexpected: -- {' '.join(command)}")
    arguments.command = command
    try:
        return arguments.action(arguments)
    except HpcrlError as error:
        print(f"hpcrl: {error}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:  # the reader, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


if __name__ == "__main__":
    sys.exit(main())
