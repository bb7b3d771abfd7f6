"""Trackers of other packages: Weights & Biases, MLflow, SwanLab, trackio; and lines of text.

Each is configured by its own environment variables (WANDB_MODE, MLFLOW_TRACKING_URI, SWANLAB_MODE, TRACKIO_DIR …). The packages are optional,
so they are imported where they are needed.
"""

# Packages of trackers need not be installed.
# pyright: reportMissingImports=false

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from hpcrl.observe.trackers.base import Open, TrackedRun

STEP = "step"
"""Name of the horizontal axis where a package requires growing steps, and late values belong to earlier ones."""
_MLFLOW_AT_ONCE, _MLFLOW_LONGEST = 100, 6000  # parameters per request, letters of one


class Wandb:
    def __init__(self, run: TrackedRun) -> None:
        import wandb

        self._run = wandb.init(
            project=run.project, name=run.name, group=run.group, id=run.key, resume="allow", dir=str(run.folder),
            config=run.configuration, settings=wandb.Settings(console="off", x_disable_stats=True),
        )  # fmt: skip
        self._run.define_metric("*", step_metric=STEP)

    def log(self, step: int, metrics: Mapping[str, float], time: float) -> None:
        self._run.log({**metrics, STEP: step, "_timestamp": time})

    def close(self) -> None:
        self._run.finish()


class Mlflow:
    """Values with the same name, step and time are one to MLflow's databases."""

    def __init__(self, run: TrackedRun) -> None:
        import mlflow
        from mlflow.entities import Param

        if not os.environ.get("MLFLOW_TRACKING_URI"):
            os.environ["MLFLOW_ALLOW_FILE_STORE"] = os.environ.get("MLFLOW_ALLOW_FILE_STORE") or "true"
            mlflow.set_tracking_uri(run.folder.as_uri())
        self._client = mlflow.MlflowClient()
        experiment = self._client.get_experiment_by_name(run.project)
        number = experiment.experiment_id if experiment else self._client.create_experiment(run.project)
        found = self._client.search_runs([number], f"tags.hpcrl_key = '{run.key}'")
        if found:
            self._id = found[0].info.run_id
            return
        tags = {"hpcrl_key": run.key} | ({"group": run.group} if run.group else {})
        self._id = self._client.create_run(number, tags=tags, run_name=run.name).info.run_id
        settings = [Param(name, str(value)[:_MLFLOW_LONGEST]) for name, value in leaves(run.configuration)]
        for first in range(0, len(settings), _MLFLOW_AT_ONCE):
            self._client.log_batch(self._id, params=settings[first : first + _MLFLOW_AT_ONCE])

    def log(self, step: int, metrics: Mapping[str, float], time: float) -> None:
        from mlflow.entities import Metric

        values = [Metric(name, value, round(1000 * time), step) for name, value in metrics.items()]
        self._client.log_batch(self._id, metrics=values)

    def close(self) -> None:
        self._client.set_terminated(self._id)


class Swanlab:
    def __init__(self, run: TrackedRun) -> None:
        import swanlab

        self._run = swanlab.init(
            project=run.project, experiment_name=run.name, group=run.group, id=run.key, resume="allow",
            config=run.configuration, logdir=str(run.folder),
        )  # fmt: skip

    def log(self, step: int, metrics: Mapping[str, float], _time: float) -> None:
        import swanlab

        swanlab.log(dict(metrics), step=step)

    def close(self) -> None:
        import swanlab

        swanlab.finish()


class Trackio:
    def __init__(self, run: TrackedRun) -> None:
        os.environ["TRACKIO_DIR"] = os.environ.get("TRACKIO_DIR") or str(run.folder)
        import trackio

        self._run = trackio.init(
            project=run.project, name=run.name, group=run.group, config=run.configuration, resume="allow", embed=False
        )

    def log(self, step: int, metrics: Mapping[str, float], _time: float) -> None:
        import trackio

        trackio.log(dict(metrics), step=step)

    def close(self) -> None:
        import trackio

        trackio.finish()


class Console:
    """Prints a line per value, to the log of its process."""

    def __init__(self, run: TrackedRun) -> None:
        print(f"{run.project}/{run.name}", flush=True)

    def log(self, step: int, metrics: Mapping[str, float], _time: float) -> None:
        print("\n".join(f"step {step} {name} {value:g}" for name, value in metrics.items()), flush=True)

    def close(self) -> None:
        pass


TRACKERS: dict[str, Open] = {
    "console": Console, "wandb": Wandb, "mlflow": Mlflow, "swanlab": Swanlab, "trackio": Trackio,
}  # fmt: skip


def leaves(tree: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Return dotted path and value of everything in nested tables."""
    found: list[tuple[str, Any]] = []
    for name, value in tree.items():
        found += leaves(value, f"{prefix}{name}.") if isinstance(value, dict) else [(prefix + name, value)]
    return found
