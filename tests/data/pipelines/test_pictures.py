"""Rows of datasets of pictures and videos: what is kept of them, what a sample carries, and rows that cannot be used."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from hpcrl.config import Config
from hpcrl.data.sources import training_sources
from hpcrl.data.token_file import TokenFile
from hpcrl.data.tokenize import Recipe, Tokenizer
from hpcrl.errors import DamagedError, DataError
from hpcrl.rundir.layout import Run
from tests.paths import CONFIGS
from tests.trainer.material import make_run

RED, BLUE = (255, 0, 0), (0, 0, 255)
VIDEO = "trainer.policy.diffusers.is_video=true", "trainer.policy.diffusers.train_frames=5"


def picture(path: Path, *colours: tuple[int, int, int], size: tuple[int, int] = (32, 32)) -> str:
    """Write a PNG file, with a frame of each colour."""
    first, *others = [Image.new("RGB", size, colour) for colour in colours]
    first.save(path, **({"save_all": True, "append_images": others} if others else {}))
    return path.name


def prepared(folder: Path, rows: list[dict[str, Any]], *overrides: str) -> tuple[Run, TokenFile]:
    """Return a run with the dataset of these rows."""
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    named = [f"data.train_data=['{file}']", *overrides]
    config = Config.from_toml([CONFIGS / "diffusion_sft_tiny.toml"], named)
    (source,) = training_sources(config.data)
    run = make_run(folder / "run")
    return run, Tokenizer(run, 0, Recipe.of(config)).dataset("train-0", "pictures", source)


def test_a_picture_is_cut_around_its_middle(tmp_path: Path) -> None:
    wide = np.zeros((16, 48, 3), np.uint8)
    wide[:, 16:32] = RED
    Image.fromarray(wide).save(tmp_path / "wide.png")
    rows = [
        {"prompt": "a Sunset", "images": "wide.png"},
        {"prompt": [{"role": "user", "content": "x" * 99}], "images": ["wide.png"]},
    ]
    run, file = prepared(tmp_path, rows)
    (first,), (second,) = file.read(0), file.read(1)
    assert (
        first.tensors["prompt"].tobytes() == b"a Sunset"
    )  # as encoders read it, whatever the first tokenizer makes of it
    image = first.tensors["image"]
    assert image.shape == (32, 32, 3)
    assert image[:, 4:-4].mean((0, 1)) == pytest.approx(RED, abs=1)
    assert (first.tensors["noise_seed"], second.tensors["noise_seed"]) == (0, 1)
    assert (len(second.token_ids), second.loss_mask.sum(), second.loss_mask[-1]) == (
        33,
        1.0,
        1.0,
    )  # 32 of the prompt at most
    (run.dataset("train-0") / "images.bin").open("r+b").write(b"?")
    with pytest.raises(DamagedError, match=r"image 0 of .* is damaged"):
        file.read(0)


def test_frames_are_those_of_files_one_after_the_other(tmp_path: Path) -> None:
    animated = picture(tmp_path / "four.png", RED, BLUE, RED, BLUE)
    more = picture(tmp_path / "three.png", BLUE, RED, RED)
    _, file = prepared(tmp_path, [{"prompt": "it blinks", "images": [animated, more]}], *VIDEO)
    (sample,) = file.read(0)
    assert [tuple(frame[0, 0]) for frame in sample.tensors["image"]] == [RED, BLUE, RED, BLUE, BLUE]


@pytest.mark.parametrize(
    ("row", "overrides", "expected"),
    [
        ({"images": "one.png"}, (), r"row 0: column `prompt` \(data.prompt_column\): expected a text, found None"),
        ({"prompt": "p"}, (), "row 0: expected an image as a path"),
        ({"prompt": "p", "images": ["one.png", "one.png"]}, (), "has 2 pictures; expected one"),
        ({"prompt": "p", "images": "gone.png"}, (), "gone.png: no such file"),
        ({"prompt": "p", "images": "text.png"}, (), "row 0: image .*text.png"),
        ({"prompt": "p", "images": ["one.png"] * 4}, VIDEO, "has 4 frames; expected .*train_frames = 5 at least"),
    ],
)  # fmt: skip
def test_rows_that_cannot_be_used(
    row: dict[str, Any], overrides: tuple[str, ...], expected: str, tmp_path: Path
) -> None:
    picture(tmp_path / "one.png", RED)
    (tmp_path / "text.png").write_text("no picture")
    with pytest.raises(DataError, match=expected):
        prepared(tmp_path, [row], *overrides)
