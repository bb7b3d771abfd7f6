"""Submits and reads runs from Python: `hpcrl.submit`, `hpcrl.open_run`, and the handle of a run that both return."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Sequence
from pathlib import Path

from hpcrl.config import Config
from hpcrl.config.resume_changes import Change
from hpcrl.data.rollouts import Order, Rollout, find_samples
from hpcrl.errors import ConfigError
from hpcrl.launch.manage.cancel import SAVING_S, cancel
from hpcrl.launch.manage.poll import LOOK_S, RunPoller
from hpcrl.launch.manage.registry import find_run, known_states
from hpcrl.launch.manage.resume import resume
from hpcrl.launch.manage.state import RunState
from hpcrl.launch.submit.checked import checked_submission
from hpcrl.launch.submit.submit import require_slurm
from hpcrl.launch.submit.submit import submit as submit_runs
from hpcrl.observe.evaluations import Evaluation
from hpcrl.observe.metrics import merged
from hpcrl.observe.summary import Summary, summarise
from hpcrl.rundir.alerts import Alert, read_alerts
from hpcrl.rundir.layout import Run, default_root


def submit(
    config: Path | str | Sequence[Path | str] | Config, overrides: Sequence[str] | str = (), *, local: bool = False
) -> RunHandle:
    """Submit a run to Slurm, as `hpcrl submit` does. Warnings of its checks are Python warnings.

    Args:
        config: a TOML file, several that are merged from left to right, or a configuration, which is checked like a file.
        overrides: `a.b.c=value`, one or several.
        local: run on this machine, without Slurm.

    Raises:
        ConfigError, DataError: what is wrong with the settings, or with the files and models that they name.
        RunError: a run of that name exists.
        SubmitError: Slurm or the filesystem refused, or there is no Slurm here.
    """
    if isinstance(config, Config):
        _require_class(config)
        given = config
    else:
        given = [Path(path).expanduser() for path in ([config] if isinstance(config, Path | str) else config)]
    overrides = [overrides] if isinstance(overrides, str) else overrides
    submission, found = checked_submission(given, overrides, [[]])
    for warning in found:
        warnings.warn(warning, stacklevel=2)
    if not local:
        require_slurm()
    return RunHandle(*submit_runs(submission, local))


def _require_class(config: Config) -> None:
    if type(config) is not Config and config.config_class is None:
        own = type(config).__qualname__
        raise ConfigError(
            f'config_class: {own} is a configuration of your own; set config_class to "module:{own}", by which the processes of the run import it'
        )


def open_run(name: Path | str, root: Path | str | None = None) -> RunHandle:
    """Return the handle of a submitted run.

    Args:
        name: name, project/name or path of the run, as for the commands.
        root: directory in which runs are searched; None: $HPCRL_ROOT, else ./runs.

    Raises:
        RunError: none, or several, match.
    """
    return RunHandle(find_run(str(Path(name).expanduser()), Path(root).expanduser() if root else default_root()))


class RunHandle:
    """Reads and manages one run; each call reads the files, or asks the scheduler, again.

    Attributes:
        files: paths in the run directory.
    """

    def __init__(self, files: Run) -> None:
        self.files = files

    def __repr__(self) -> str:
        return f"hpcrl.open_run({str(self.path)!r})"

    @property
    def path(self) -> Path:
        return self.files.path

    @property
    def name(self) -> str:
        return self.files.name

    def config(self) -> Config:
        """Return the configuration of the newest attempt."""
        return Config.from_toml(self.files.config)

    def state(self) -> RunState:
        """Return the state as `hpcrl status` shows it: `kind`, `detail`, `advice`, `over` and more."""
        return known_states([self.files])[0]

    def wait(self, timeout: float | None = None) -> RunState:
        """Return the state of the run once it is over, also when it failed: `kind` tells.

        Args:
            timeout: in seconds; None: no limit.

        Raises:
            TimeoutError: the run is not over by then; it continues.
            RunError: a damaged file hides whether it is over.
        """
        poller, deadline = (
            RunPoller([self.files], known_states),
            time.monotonic() + (math.inf if timeout is None else timeout),
        )
        while not poller.over():
            if time.monotonic() >= deadline:
                (state,) = poller.states()
                raise TimeoutError(f"{self.name} is {state.kind} after {timeout:g} s, and continues: {state.detail}")
            time.sleep(LOOK_S)
        return poller.states()[0]

    def metrics(self, *names: str) -> list[dict[str, float]]:
        """Return the metrics of all processes as a table: one row per step, with its number as `step`, missing values left out.

        Args:
            names: of the metrics that are wanted, such as "reward/avg_raw_reward"; none: all.
        """
        return _table(merged(self.files, *names), "step")

    def evaluations(self) -> list[dict[str, float]]:
        """Return the metrics of all evaluations as a table: one row per version of the weights, with its number as `version`."""
        versions = {
            step: {name: value for name, value in metrics.items() if name.startswith("eval/")}
            for step, metrics in merged(self.files).items()
        }
        return _table({version: metrics for version, metrics in versions.items() if metrics}, "version")

    def evaluation(self, version: int | None = None) -> Evaluation:
        """Return the prompts and rewards of an evaluation, the newest one that is over where no version is named. Errors are those of `Evaluation.read`."""
        return Evaluation.read(self.files, version)

    def samples(
        self,
        step: int | None = None,
        *,
        evaluation: bool = False,
        order: Order | None = None,
        most: int | None = None,
        seed: int = 0,
    ) -> list[Rollout]:
        """Return the samples that a step trained, or an evaluation scored, as `hpcrl samples` prints them; errors are those of `find_samples`.

        Args:
            step: that trained them, or with `evaluation` the version; None: the newest.
            order: best or worst reward first, or random; None: by group.
            most: None: all.
            seed: of the random order.
        """
        return find_samples(self.files, step, evaluated=evaluation, order=order, seed=seed, most=most)[2]

    def summary(self) -> Summary:
        """Return steps, first and last reward and evaluation score, throughput and times."""
        return summarise(self.files)

    def alerts(self) -> list[Alert]:
        """Return the alerts, oldest first."""
        return read_alerts(self.files)

    def cancel(self, patience: float = SAVING_S) -> RunState:
        """Ask the run to save and stop, as `hpcrl cancel` does, and return its state.

        Args:
            patience: seconds for which its end is awaited; 0: end it now, without saving.

        Raises:
            RunError: it is over.
        """
        return cancel(self.files, patience)

    def resume(self, overrides: Sequence[str] | str = ()) -> list[Change]:
        """Start the next attempt, as `hpcrl resume` does, and return the changed settings; errors are those of that command."""
        return resume(self.files, [overrides] if isinstance(overrides, str) else overrides)


def _table(rows: dict[int, dict[str, float]], key: str) -> list[dict[str, float]]:
    return [{key: number, **rows[number]} for number in sorted(rows)]
