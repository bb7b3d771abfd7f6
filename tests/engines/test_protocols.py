"""Each engine's modules have the functions that the layers ask for, with the same parameters."""

from __future__ import annotations

from typing import get_args

import pytest

from hpcrl.cli.engine import ServeBackend
from hpcrl.config.backend import OPTIONAL, Backend, Layer, backends
from hpcrl.config.sections.generator import InferenceEngineConfig
from hpcrl.launch.backend import LaunchBackend
from hpcrl.planning.backend import PlanBackend
from hpcrl.rollout.engines.launch import NodesBackend, RolloutBackend
from hpcrl.trainer.scoring.engine import TeacherBackend
from tests.families.test_protocols import functions_of, parameters
from tests.paths import ROOT

PROTOCOLS: dict[Layer, type] = {
    "rollout": RolloutBackend,
    "multi_node": NodesBackend,
    "teacher": TeacherBackend,
    "launch": LaunchBackend,
    "plan": PlanBackend,
    "serve": ServeBackend,
}


@pytest.mark.parametrize("backend", backends().values(), ids=lambda backend: backend.name)
def test_modules_are_as_their_protocols(backend: Backend) -> None:
    assert set(PROTOCOLS) == set(get_args(Layer))
    folder = ROOT.joinpath(*backend.package.split("."))
    if backend.package.startswith(
        "hpcrl.engines."
    ):  # the folder of a family has modules of these names for its own layers
        assert {path.stem for path in folder.glob("*.py")} & set(PROTOCOLS) == set(backend.brings)
    for layer in backend.brings:
        module = backend.layer(layer)
        for name, expected in functions_of(PROTOCOLS[layer]).items():
            assert parameters(getattr(module, name)) == expected, f"{module.__name__}.{name}"


def test_settings_that_engines_read_are_there() -> None:
    assert set(OPTIONAL) <= set(vars(InferenceEngineConfig()))
    assert all(set(backend.reads) <= set(OPTIONAL) for backend in backends().values())
