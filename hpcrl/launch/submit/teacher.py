"""Checks whether a teacher can judge the policy's tokens, and whether files of `hpcrl score` are of the run's teacher and rows."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hpcrl.config import Config
from hpcrl.config.errors import Problem
from hpcrl.config.sections.model import Pretrained
from hpcrl.data.entries import CONFIG
from hpcrl.data.sources import training_sources
from hpcrl.data.tokenize import Recipe, shared_facts
from hpcrl.errors import DataError
from hpcrl.launch.submit.engine import different_token
from hpcrl.launch.submit.models import folder_of
from hpcrl.rundir.commit import digest_of, is_committed
from hpcrl.rundir.layout import Run
from hpcrl.rundir.records import damaged, read_object

FACTS = "score.json"
_SETTING = "trainer.distillation.precomputed_logprobs"
_REMEDY = "write it again with `hpcrl score`, or leave it out"
_END = 1 << 20
_KINDS = {
    "teacher": str,
    "weights": str | None,
    "model_config_kwargs": dict,
    "rotary positions": list,
    "temperature": int | float,
    "number types": list,
    "top_k": int,
    "datasets": list,
}
_DECIDES = ("model_config_kwargs", "rotary positions", "temperature", "number types")


def facts_of(config: Config) -> dict[str, Any]:
    """Return exactly the facts that decide the teacher's log-probabilities of a run's rows, as JSON values."""
    trainer, recipe, model = config.trainer, Recipe.of(config), config.trainer.ref_model
    precision = (
        trainer.ref.megatron_config.dtype
        if trainer.strategy == "megatron"
        else trainer.ref_sharding.mixed_precision.param_dtype
    )
    facts = {
        "teacher": str(model),
        "weights": _identity(model),
        "model_config_kwargs": trainer.ref.config_overrides,
        "rotary positions": [trainer.rope_scaling, trainer.rope_theta],
        "temperature": config.temperature,
        "number types": [precision, trainer.algorithm.logprob_dtype],
        "top_k": trainer.distillation.top_k,
        "datasets": [shared_facts(source, recipe) for source in training_sources(config.data)],
    }
    return json.loads(json.dumps(facts, default=str))


def _identity(model: Pretrained) -> str | None:
    """Return the identity of a model: its config.json, and of each file of weights name, size and both ends; None: it is not on this machine."""
    folder = folder_of(model)
    weights = [] if folder is None else sorted([*folder.glob("*.safetensors"), *folder.glob("*.bin")])
    if folder is None or not weights:
        return None
    found = [digest_of((folder / CONFIG).read_bytes())]
    for path in weights:
        with path.open("rb") as file:
            first = file.read(_END)
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _END))
            found.append(f"{path.name} {size} {digest_of(first)} {digest_of(file.read(_END))}")
    return digest_of("\n".join(found).encode())


def check_teacher_tokens(config: Config) -> Iterator[Problem]:
    """Yield why teachers cannot judge the policy's tokens, of those that are on this machine beside it."""
    own, policy = config.trainer.distillation, config.trainer.policy.model.pretrained
    for teacher, sources in own.teachers.items():
        if folder_of(policy) is None or folder_of(teacher) is None or own.precomputed_logprobs is not None:
            continue
        setting = f"trainer.distillation.{'model_path' if sources is None else 'source_models'}"
        if own.cross_tokenizer:
            from hpcrl.data.alignment import aligner_of  # with numpy, which no other submission needs

            try:
                aligner_of(policy, teacher, config.generator.chat_template, setting)
            except DataError as error:
                yield Problem(setting, str(error).removeprefix(f"{setting}: "))
        elif (named := different_token(teacher, policy)) is not None:
            remedy = "choose a teacher of the same family" + (
                "" if config.trainer.offline else ", or set trainer.distillation.cross_tokenizer"
            )
            yield Problem(
                setting,
                f"its tokens are others than those of the policy {policy}, such as {named}: {teacher}; {remedy}",
            )


def check_precomputed(config: Config) -> Iterator[Problem]:
    """Yield why files of a teacher's log-probabilities are not those that a run wants.

    Whether the rows have the same tokens is looked at again for each row that is read (hpcrl/trainer/offline/teacher_file.py).
    """
    written = config.trainer.distillation.precomputed_logprobs
    if written is None:
        return
    place, names = Run(Path(written)), [f"train-{at}" for at in range(len(config.data.train_data))]
    written_facts = _written(place.path / FACTS)
    if written_facts is None or len(written_facts["datasets"]) != len(names):
        expected = f"of {len(names)} dataset(s), as data.train_data has"
        found = "there is none" if written_facts is None else f"it has {len(written_facts['datasets'])}"
        yield Problem(_SETTING, f"expected a directory that `hpcrl score` wrote {expected}; {found}: {written}")
        return
    if missing := [name for name in names if not is_committed(place.teacher_file(name))]:
        yield Problem(_SETTING, f"{written} lacks {', '.join(missing)}: `hpcrl score` did not finish it; {_REMEDY}")
    try:
        wanted = facts_of(config)
    except (DataError, ModuleNotFoundError):  # which the look at the datasets themselves tells
        return
    yield from (Problem(_SETTING, f"{written} {what}; {_REMEDY}") for what in _differences(written_facts, wanted))


def _written(path: Path) -> dict[str, Any] | None:
    """Return what `hpcrl score` has written of the teacher and the rows, or None. Raises RunError where the file is damaged."""
    facts = read_object(path, _REMEDY)
    if facts is not None:
        for name, kind in _KINDS.items():
            if not isinstance(facts.get(name), kind):
                raise damaged(path, f"{name!r} is {facts.get(name)!r:.80}", _REMEDY)
        if not all(isinstance(one, dict) for one in facts["datasets"]):
            raise damaged(path, f"'datasets' is {facts['datasets']!r:.80}", _REMEDY)
    return facts


def _differences(written_facts: dict[str, Any], wanted: dict[str, Any]) -> Iterator[str]:
    known = None not in (written_facts["weights"], wanted["weights"])
    what = "weights" if known else "teacher"  # the same weights wherever they lie
    if written_facts[what] != wanted[what]:
        trained = written_facts["teacher"] == wanted["teacher"]
        other = "which has other weights now" if trained else f"and this run's is {wanted['teacher']}"
        yield f"is of the teacher {written_facts['teacher']}, {other}"
    if written_facts["top_k"] < wanted["top_k"]:
        yield f"has the {written_facts['top_k']} most probable tokens of each place, fewer than trainer.distillation.top_k = {wanted['top_k']}"
    for name in _DECIDES:
        if written_facts[name] != wanted[name]:
            yield f"was computed with other {name}, {written_facts[name]}, than this run has, {wanted[name]}"
    for at, (one, other) in enumerate(zip(written_facts["datasets"], wanted["datasets"], strict=True)):
        keys = sorted(key for key in (one.keys() | other.keys()) - {"by"} if one.get(key) != other.get(key))
        if keys:
            yield f"has other rows than data.train_data[{at}] has here: {', '.join(keys)} differ"
