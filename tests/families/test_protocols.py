"""Each family's modules have the functions that the layers ask for, with the same parameters."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, get_args

import pytest

from hpcrl.config.family import Family, Layer, families
from hpcrl.data.family import DataFamily
from hpcrl.families import PACKAGES
from hpcrl.launch.family import LaunchFamily
from hpcrl.planning.family import PlanFamily
from hpcrl.rollout.engines.launch import EngineFamily
from hpcrl.rollout.family import RolloutFamily
from hpcrl.trainer.family import TrainerFamily
from tests.paths import ROOT

PROTOCOLS: dict[Layer, Sequence[type]] = {
    "data": [DataFamily],
    "rollout": [RolloutFamily, EngineFamily],
    "trainer": [TrainerFamily],
    "plan": [PlanFamily],
    "launch": [LaunchFamily],
}


def functions_of(protocol: type) -> dict[str, list[str]]:
    """Return the parameters of a protocol's methods, without self."""
    methods = {name: each for name, each in vars(protocol).items() if inspect.isfunction(each) and name[0] != "_"}
    return {name: list(inspect.signature(each).parameters)[1:] for name, each in methods.items()}


def parameters(function: Any) -> list[str]:
    return list(inspect.signature(function).parameters)


def test_layers_have_protocols() -> None:
    assert set(PROTOCOLS) == set(get_args(Layer))
    assert all(functions_of(protocol) for protocols in PROTOCOLS.values() for protocol in protocols)


@pytest.mark.parametrize("family", families(), ids=lambda family: family.name)
def test_modules_are_as_their_protocols(family: Family) -> None:
    folder = ROOT.joinpath(*family.package.split("."))
    assert {path.stem for path in folder.glob("*.py")} & set(PROTOCOLS) == set(family.brings)
    for layer, protocols in PROTOCOLS.items():
        module = family.layer(layer)
        own = module.__name__.startswith(f"{family.package}.")
        assert own == (layer in family.brings)
        for protocol in protocols:
            for name, expected in functions_of(protocol).items():
                assert parameters(getattr(module, name)) == expected, f"{module.__name__}.{name}"


@pytest.mark.parametrize("family", families(), ids=lambda family: family.name)
def test_answers_to_the_configuration_have_the_same_parameters(family: Family) -> None:
    own = {name: each for name, each in vars(type(family)).items() if inspect.isfunction(each)}
    for name, each in own.items():
        assert name[0] == "_" or parameters(each) == parameters(getattr(Family, name)), name


def test_every_folder_is_a_family_or_shared_by_some() -> None:
    folders = {path.parent.name for path in Path(ROOT, "hpcrl", "families").glob("*/__init__.py")}
    assert folders - {package.rpartition(".")[2] for package in PACKAGES} == {"robots"}
    assert families()[-1] is import_module("hpcrl.families.text.family").FAMILY
