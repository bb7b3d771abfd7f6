"""Hyperparameters of a run for TensorBoard's HParams: the settings in which the runs of a sweep differ, and the most compared ones."""

# protoc's modules have their names only at run time.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import tomli
from tensorboard.plugins.hparams import (
    api_pb2,
    metadata,
    plugin_data_pb2,
)

from hpcrl.config.secrets import masked
from hpcrl.observe.summary import EVAL_LOSS, EVAL_SCORE, REWARD
from hpcrl.rundir.commit import read_json
from hpcrl.rundir.layout import Run

_COMPARED = (
    "trainer.policy.optimizer_config.lr",
    "trainer.train_batch_size",
    "trainer.policy_mini_batch_size",
    "generator.n_samples_per_prompt",
    "trainer.algorithm.advantage_estimator",
    "trainer.algorithm.policy_loss_type",
    "trainer.algorithm.kl_loss_coef",
    "trainer.fully_async.max_staleness_steps",
    "generator.sampling_params.temperature",
    "trainer.seed",
)
_SCORES = {EVAL_SCORE: "evaluation score", EVAL_LOSS: "validation loss", REWARD: "reward"}
"""Of each run, TensorBoard shows the last."""


def hparams_of(run: Run) -> Iterator[tuple[str, Any]]:
    """Yield tag and metadata of the two summaries of a run's hyperparameters."""
    own = _varied(run)
    values = dict(_values(run, [*own, *_COMPARED]))
    experiment = api_pb2.Experiment(
        hparam_infos=[
            # TensorBoard sorts by name, but first what differs between runs
            api_pb2.HParamInfo(name=name, display_name=name.rpartition(".")[2], type=_type(value), differs=name in own)
            for name, value in values.items()
        ],
        metric_infos=[
            api_pb2.MetricInfo(name=api_pb2.MetricName(tag=tag), display_name=text) for tag, text in _SCORES.items()
        ],
    )
    start = plugin_data_pb2.SessionStartInfo()
    for name, value in values.items():
        if isinstance(value, bool):
            start.hparams[name].bool_value = value
        elif isinstance(value, int | float):
            start.hparams[name].number_value = value
        else:
            start.hparams[name].string_value = value
    for tag, content in (
        (metadata.EXPERIMENT_TAG, plugin_data_pb2.HParamsPluginData(experiment=experiment)),
        (metadata.SESSION_START_INFO_TAG, plugin_data_pb2.HParamsPluginData(session_start_info=start)),
    ):
        yield tag, metadata.create_summary_metadata(content)


def _varied(run: Run) -> list[str]:
    """Return the dotted paths that the run was submitted with alone, as an element of a sweep; none where that record is damaged."""
    try:
        record = read_json(run.submission)
    except ValueError:
        record = None
    overrides = record.get("overrides") if isinstance(record, dict) else None
    return list(dict.fromkeys(str(override).partition("=")[0].strip() for override in overrides or []))


def _values(run: Run, paths: Iterable[str]) -> Iterator[tuple[str, bool | float | str]]:
    try:
        tree = masked(tomli.loads(run.config.read_text(encoding="utf-8")))
    except (ValueError, RecursionError):
        return
    for path in paths:
        value: Any = tree
        for name in path.split("."):
            value = value.get(name) if isinstance(value, dict) else None
        if value is not None:
            yield path, value if isinstance(value, bool | int | float) else str(value)


def _type(value: bool | float | str) -> Any:
    if isinstance(value, bool):
        return api_pb2.DATA_TYPE_BOOL
    return api_pb2.DATA_TYPE_STRING if isinstance(value, str) else api_pb2.DATA_TYPE_FLOAT64
