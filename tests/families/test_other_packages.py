"""A family of another package: installed, it is found by its entry point, and answers in the place of hpcrl's own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.paths import CONFIGS

FAMILY = """
from hpcrl.config.errors import Problem
from hpcrl.config.family import Family


def no_megatron(config):
    if FAMILY.matches(config) and config.trainer.strategy != "fsdp2":
        yield Problem("trainer.strategy", "expected fsdp2 of a toy")


class Toy(Family):
    name, package = "toy", "toy_family"
    brings = ("launch",)
    rules = (no_megatron,)
    model_file, model_kind, writes_texts = "toy.json", "box of toys", False

    def matches(self, config):
        return "toys" in (config.trainer.policy.model.path or "")


FAMILY = Toy()
"""
LAUNCH = """
import json
from pathlib import Path

from hpcrl.errors import DataError


def check_model(config):
    model = config.trainer.policy.model.pretrained
    file = Path(model.path, "toy.json")
    if file.is_file() and not json.loads(file.read_text()):
        raise DataError(f"trainer.policy.model.path: {model} is an empty box")


def evaluated_model(run, export, place):
    return export
"""
COMMAND = [sys.executable, "-m", "hpcrl.cli.main"]


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    """Return a folder as pip fills it, with a package that has a family."""
    folder = tmp_path / "site-packages"
    installed, package = folder / "toy_family-1.0.dist-info", folder / "toy_family"
    installed.mkdir(parents=True)
    package.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-family\nVersion: 1.0\n")
    (installed / "entry_points.txt").write_text("[hpcrl.families]\ntoy = toy_family.family:FAMILY\n")
    (package / "__init__.py").touch()
    (package / "family.py").write_text(FAMILY)
    (package / "launch.py").write_text(LAUNCH)
    return folder


def submit(packages: Path, box: Path, *settings: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(filter(None, [str(packages), os.environ.get("PYTHONPATH")]))
    words = ["submit", str(CONFIGS / "quickstart.toml"), "--dry-run", f"trainer.policy.model.path={box}", *settings]
    environment = os.environ | {"PYTHONPATH": path}
    return subprocess.run(
        [*COMMAND, *words], cwd=box, env=environment, capture_output=True, text=True, timeout=300, check=False
    )


def test_a_run_is_checked_by_its_family(packages: Path, tmp_path: Path) -> None:
    box = tmp_path / "toys"
    box.mkdir()
    missing = submit(packages, box)
    assert missing.returncode == 4
    assert f"trainer.policy.model.path: {box} is no box of toys (it has no toy.json)" in missing.stderr
    (box / "toy.json").write_text("[]")
    empty = submit(packages, box)
    assert f"trainer.policy.model.path: {box} is an empty box" in empty.stderr
    (box / "toy.json").write_text(json.dumps(["duck"]))
    refused = submit(packages, box, "trainer.strategy=megatron")
    assert refused.returncode == 2
    assert "trainer.strategy: expected fsdp2 of a toy" in refused.stderr
    whole = submit(packages, box)
    assert whole.returncode == 0, whole.stderr
    assert "Traceback" not in whole.stderr


def test_a_family_that_cannot_be_loaded_is_named(packages: Path, tmp_path: Path) -> None:
    (packages / "toy_family" / "family.py").write_text("import toys_that_nobody_has\n")
    done = submit(packages, tmp_path)
    assert done.returncode == 2
    assert (
        "family toy (entry point toy_family.family:FAMILY of the group hpcrl.families) cannot be loaded" in done.stderr
    )
    (packages / "toy_family" / "family.py").write_text("FAMILY = 3\n")
    done = submit(packages, tmp_path)
    assert "expected an object of a subclass of hpcrl.config.family.Family, found 3" in done.stderr
    assert "Traceback" not in done.stderr
