"""Continues a run that ended, with its configuration or a changed one."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path

from hpcrl.config import Config
from hpcrl.config.resume_changes import Change, changes
from hpcrl.errors import ConfigError, RunError
from hpcrl.launch.inputs import changed_inputs
from hpcrl.launch.layouts import Check
from hpcrl.launch.manage.poll import LOOK_S, RunPoller
from hpcrl.launch.manage.registry import RunState, states_of
from hpcrl.launch.sharing import share, writing_for
from hpcrl.launch.submit.executors import Element, Submission
from hpcrl.launch.submit.own_files import own_files, own_modules
from hpcrl.launch.submit.preflight import check_files
from hpcrl.launch.submit.submit import launch
from hpcrl.rundir.checkpoints import line_of, lost_with, require_checkpoints
from hpcrl.rundir.checksums import changed_files, note_checksums
from hpcrl.rundir.commit import committed, read_bytes, write_bytes, write_text
from hpcrl.rundir.layout import Run, position_of, step_of
from hpcrl.rundir.other_roots import own_homes, require_folders
from hpcrl.rundir.starts import require_starts
from hpcrl.text import one_line

_LEAVING_S = 60.0


def resume(run: Run, overrides: Sequence[str] = (), checks: Sequence[Check] = ()) -> list[Change]:
    """Start the next attempt of a run, by the executor that it was submitted to; one that is done goes on to a later end.

    A changed configuration takes the place of config.toml; the old one stays as config.<attempt>.toml.

    Args:
        overrides: settings to change, as for `hpcrl submit`.
        checks: as of `Element`.

    Returns:
        Changes since the configuration of the last attempt, of any origin.

    Raises:
        RunError: the run is active, is done and gets no later end, never continues, or is being resumed by another process.
        ConfigError: the overrides are wrong, or change what a run or an interrupted step must keep; then nothing has happened.
    """
    if not run.submission.exists():
        states_of([run])  # finds a job whose submission was cut short, and records it
    with _alone(run):
        state = _ended(run)
        config = Config.from_toml([run.config], overrides)  # first: it may change where a config_class lies
        current, kept = Config.from_toml([run.config]), run.config_of(state.attempt)
        before = Config.from_toml([kept]) if kept.exists() else current
        if state.kind == "done":
            _require_later_end(run, before.trainer.end, config.trainer.end)
        found = changes(before, config)
        if any(change.kind == "refused" for change in found):
            raise ConfigError("\n".join([*map(str, found), f"{run.name} was not changed; {_NEW_RUN}"]))
        if config.trainer.resume_mode == "none":
            raise RunError(
                f"{run.name} never continues a checkpoint (trainer.resume_mode is none): submit a new run, or resume this one "
                "with trainer.resume_mode=latest"
            )
        require_starts(run)
        require_checkpoints(run)
        require_folders(run)
        _check_end(run, config)
        _check_step(run, config)
        if found:
            check_files(config)
        folder = Path(os.path.realpath(run.slurm))
        element = Element(run.name, config, [*state.submission["overrides"], *overrides], tuple(checks))
        for edited in [*changed_files(run), *changed_inputs(run, current)]:
            message = f"hpcrl: {run.name}: {edited}; the next attempt begins with the files as they are"
            print(one_line(message), file=sys.stderr)
        group = config.slurm.readable_by
        with (
            writing_for(group),
            _changed_config(run, kept, config) if config != current else nullcontext(),
            _noted(run, config),
        ):
            if group != current.slurm.readable_by:
                for shared in (run.path, *own_homes(run), folder):
                    share(shared, group)
            launch(Submission(folder, [element]), local=state.submission["executor"] == "local")
        return found


_NEW_RUN = (
    "for what is refused, submit a new run; trainer.resume_mode=from_path starts it from a checkpoint of this one"
)


@contextmanager
def _alone(run: Run) -> Iterator[None]:
    """Hold the record of the last job; who waits for nothing finds in the next record that the run is active."""
    try:
        record = run.submission.open("r+")
    except FileNotFoundError:
        raise RunError(
            f"the submission of {run.name} was cut short, so there is nothing to resume; submit it again under another name"
        ) from None
    with record:
        try:
            fcntl.flock(record, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunError(f"{run.name} is being resumed by another `hpcrl resume`; wait for it") from None
        except OSError as error:
            if error.errno not in (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK):  # a filesystem without locks
                raise
        yield


def _ended(run: Run) -> RunState:
    poller, deadline = RunPoller([run], states_of), time.monotonic() + _LEAVING_S
    while (state := poller.states()[0]).kind == "ending" and time.monotonic() < deadline:
        time.sleep(LOOK_S)
    if not state.over:
        raise RunError(f"{run.name} is {state.kind}; there is nothing to resume")
    if state.damaged:
        raise RunError(state.complaint)
    return state


def _require_later_end(run: Run, before: tuple[float, float], after: tuple[float, float]) -> None:
    if all(later <= earlier for earlier, later in zip(before, after, strict=True)):
        raise RunError(
            f"{run.name} is done, with trainer.epochs={before[0]:g} and trainer.max_steps={before[1]:g}; to train on, give it a later end: "
            f"hpcrl resume {run.name} trainer.max_steps=N"
        )


def _check_end(run: Run, config: Config) -> None:
    steps, end = committed(run.checkpoints, step_of), config.trainer.max_steps
    if steps and end is not None and steps[-1] > end:
        raise ConfigError(
            f"trainer.max_steps: {run.name} has a checkpoint of step {steps[-1]}, beyond {end}; expected at least {steps[-1]}"
        )


def _check_step(run: Run, config: Config) -> None:
    """A step that was interrupted must go on with the settings that it was begun with."""
    lost, begun = lost_with(run, config.trainer.batch_settings)
    if not lost:
        return
    position = position_of(lost[0])
    assert position is not None, lost[0]
    earlier = next((path.name for path in reversed(line_of(run)) if path not in lost), "the beginning")
    names = " ".join(path.name for path in lost)
    values = ", ".join(f"trainer.{name} {json.dumps(value)}" for name, value in begun.items())
    raise ConfigError(
        f"{run.name} was interrupted inside step {position[0] + 1}, which was begun with {values}: with another value training "
        f"would start again from {earlier}, without {names}. Resume it with the values of that step, and change them after the next "
        f"whole checkpoint. Or give up the training since {earlier}: hpcrl checkpoint rm {run.name} {names} --force"
    )


@contextmanager
def _changed_config(run: Run, kept: Path, config: Config) -> Iterator[None]:
    """Change config.toml and keep the old one; both changes are taken back if what follows fails."""
    before = run.config.read_text()
    with ExitStack() as undo:
        if not kept.exists():  # else it was changed since already, and no attempt used that
            write_text(kept, before)
            undo.callback(kept.unlink)
        write_text(run.config, config.to_toml())
        undo.callback(write_text, run.config, before)
        yield
        undo.pop_all()


@contextmanager
def _noted(run: Run, config: Config) -> Iterator[None]:
    """Note the files that the next attempt begins with; what was noted before is noted again if what follows fails.

    Datasets, templates and models are noted by that attempt.
    """
    before, inputs = read_bytes(run.checksums), read_bytes(run.inputs)
    note_checksums(run, own_files(own_modules(config)))
    run.inputs.unlink(missing_ok=True)
    try:
        yield
    except BaseException:
        if inputs is not None:
            write_bytes(run.inputs, inputs)
        if before is None:
            run.checksums.unlink()
        else:
            write_bytes(run.checksums, before)
        raise
