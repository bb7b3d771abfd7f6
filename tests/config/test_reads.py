"""A setting that works is read by something that runs, not only by what checks it."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcrl.config.fields import leaves
from hpcrl.config.root import Config
from tests.config.reads import is_read, read_by_name, read_in
from tests.paths import ROOT

# These look at settings without doing anything with them; algorithms/settings.py hands out all of a section by name.
ONLY_LOOKS = (
    *(f"hpcrl/config/{name}/" for name in ("rules", "docs", "convert")),
    "hpcrl/config/resume_changes.py",
    "hpcrl/algorithms/settings.py",
)
EXCEPTIONS = {
    "slurm.crash_budget": "read from config.toml without its class: launch/requeue/policy.py, after a job has ended",
}


def _is_looked_at(path: Path) -> bool:
    return not str(path.relative_to(ROOT)).startswith(ONLY_LOOKS)


def test_every_setting_that_works_is_read() -> None:
    modules = [path for folder in ("hpcrl", "jobs") for path in (ROOT / folder).rglob("*.py") if _is_looked_at(path)]
    found = read_in(path.read_text() for path in modules) | read_by_name()
    working = [setting for setting in leaves(Config) if setting.facts.unimplemented is None]
    assert {setting.path for setting in working if not is_read(setting, found)} == EXCEPTIONS.keys()


@pytest.mark.parametrize(
    "source",
    [
        "def f(engine: InferenceEngineConfig): return engine.seed",
        "def f(config: Config | None): return [e.seed for e in [config.generator.inference_engine]]",
        "class A:\n  def __init__(self, config: Config): self._g = config.generator\n  def b(self): return self._g.inference_engine.seed",
        "def f(engine: InferenceEngineConfig): return [getattr(engine, name) for name in ('seed', 'dtype')]",
        "def f(generator: GeneratorConfig): return vars(generator.inference_engine)",
        "class InferenceEngineConfig:\n  def f(self): return self.seed",
        "class Config:\n  @property\n  def first(self) -> InferenceEngineConfig: ...\ndef f(config: Config): return config.first.seed",
    ],
)
def test_a_read_of_a_section_is_found(source: str) -> None:
    assert ("InferenceEngineConfig", "seed") in read_in([source])


@pytest.mark.parametrize(
    "source",
    [
        "def f(trainer: TrainerConfig): return trainer.seed",
        "def f(engine): return engine.seed",
        "def f(engine: InferenceEngineConfig): engine.seed = 1",
    ],
)
def test_another_attribute_of_the_name_is_none(source: str) -> None:
    assert ("InferenceEngineConfig", "seed") not in read_in([source])
