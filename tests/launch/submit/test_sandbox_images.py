"""Images of sandboxes that are not there are named before anything is queued."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpcrl.config import Config
from hpcrl.launch.submit.preflight import check_files
from hpcrl.sandboxes.images import ImageStore
from tests.paths import QUICKSTART


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "file").touch()
    ImageStore(tmp_path / "runs").add("python-3.12", tmp_path / "tree")
    return tmp_path / "runs"


def warned(root: Path, *images: str, env_class: str = "sandbox", network: str = "[]") -> list[str]:
    path = root / "rows.jsonl"
    rows = [
        {"prompt": "?", "image": image, "tests": {"command": "true"}, "reward_spec": {"ground_truth": "1"}}
        for image in images
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = [
        f'data.train_data=["{path}"]', "data.val_data=[]", "trainer.eval_interval=0", "trainer.train_batch_size=1",
        "trainer.policy_mini_batch_size=1", f"environment.env_class={env_class}", "slurm.sandboxes.nodes=1",
        f"slurm.sandboxes.network={network}", f"slurm.root={root}", "generator.max_turns=3",
    ]  # fmt: skip
    return [line for line in check_files(Config.from_toml([QUICKSTART], given)) if "images that" in line]


def test_images_of_rows_that_are_not_there_are_named(root: Path) -> None:
    assert warned(root, "python-3.12", "python-3.12") == []
    (line,) = warned(root, *["python-3.12"] * 20, "pyhton-3.12", "other")
    assert f"has images that {root} lacks: pyhton-3.12, other; did you mean python-3.12?; what needs one fails" in line
    assert line.startswith("data.train_data: ")


def test_images_of_the_network_that_are_not_there_are_named(root: Path) -> None:
    assert warned(root, "python-3.12", network='["python-3.12"]') == []
    (line,) = warned(root, "python-3.12", network='["python-3.13"]')
    assert line.startswith(f"slurm.sandboxes.network has images that {root} lacks: python-3.13")


def test_other_environments_may_have_an_image_of_their_own(root: Path) -> None:
    assert warned(root, "a picture", env_class="gsm8k") == []
