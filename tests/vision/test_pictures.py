"""Images of groups: prepared in threads, each once while somebody has it; and kept as PNG files for people."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from hpcrl.config.sections.model import Pretrained
from hpcrl.data.vision.images import image_text
from hpcrl.data.vision.messages import with_images
from hpcrl.data.vision.reader import ImageReader
from hpcrl.errors import DataError
from hpcrl.rollout.images.preparing import ImagePreparation
from hpcrl.rollout.images.saved import SampleImages
from hpcrl.rundir.layout import Run
from tests.vision.material import asks, drawn, write_model


class Counting:
    """An image processor that counts what it is asked, and answers when it may."""

    def __init__(self, processor: Any) -> None:
        self._processor, self.merge_size = processor, processor.merge_size
        self.asked, self.may = 0, threading.Event()

    def __call__(self, images: Any, **options: Any) -> Any:
        self.asked += 1
        assert self.may.wait(60)
        return self._processor(images, **options)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Pretrained:
    return Pretrained(str(write_model(tmp_path_factory.mktemp("pictures") / "model", "qwen2_5_vl")))


@pytest.fixture
def reader(model: Pretrained) -> ImageReader:
    found = ImageReader.of(model)
    assert found is not None
    return found


def test_an_image_is_prepared_once_and_others_are_served_meanwhile(reader: ImageReader) -> None:
    """Also where one of those who wait for it is cancelled; and again only when nobody has it any more."""
    counting = reader._processor = Counting(reader._processor)
    messages = with_images(asks(1, 1))

    async def play() -> None:
        images = ImagePreparation(reader)
        waiting = [asyncio.create_task(images.prepare(messages)) for _ in range(3)]
        while not counting.asked:  # the processor blocks its thread, and this loop goes on
            await asyncio.sleep(0)
        waiting[0].cancel()
        counting.may.set()
        _, (first,), (second,) = await asyncio.gather(*waiting, return_exceptions=True)
        assert first is second
        assert counting.asked == 1
        for seed in range(2, 68):  # more than are remembered
            await images.prepare(with_images(asks(seed)))
        asked = counting.asked
        assert (await images.prepare(messages))[0] is first
        assert counting.asked == asked
        del first, second, waiting
        await images.prepare(messages)
        assert counting.asked == asked + 1
        with pytest.raises(DataError, match="No such file"):
            await images.prepare([{"role": "user", "content": [{"type": "image", "image": "/nowhere.png"}]}])
        assert await ImagePreparation(None).prepare(messages) == ()

    asyncio.run(play())


def test_pictures_of_a_group(reader: ImageReader, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What all samples begin with is there once; each has the images of all its turns, in their order; large ones become smaller."""
    run = Run(tmp_path)
    Image.new("RGB", (2000, 30), (255, 0, 0)).save(tmp_path / "wide.png")
    prompt, second, third, wide = [
        reader.seen(image_text(image)) for image in (drawn(1), drawn(2), drawn(3), str(tmp_path / "wide.png"))
    ]
    kept = SampleImages(run, 2)
    assert [kept.wants(*sample) for sample in (("train", 0), ("train", 1), ("eval", 1))] == [True, False, True]
    kept.save_inputs("g1-0", [[prompt, second, third], [prompt, wide], [prompt]])
    found = {at: run.pictures_of(f"g1-0.{at}") for at in range(4)}
    assert [[path.name for path in paths] for paths in found.values()] == [
        ["g1-0.image-0.png", "g1-0.0.image-1.png", "g1-0.0.image-2.png"],
        ["g1-0.image-0.png", "g1-0.1.image-1.png"],
        ["g1-0.image-0.png"],
        ["g1-0.image-0.png"],
    ]
    assert [Image.open(path).size for path in found[1]] == [(24, 24), (512, 8)]
    kept.save_generated("g1-1", [np.zeros((4, 4, 3), np.uint8)])
    assert [path.name for path in run.pictures_of("g1-1.0")] == ["g1-1.0.png"]
    (tmp_path / "wide.png").unlink()
    kept.save_inputs("g1-2", [[prompt], [wide]])
    assert "pictures are not kept: image" in capsys.readouterr().out
    assert run.pictures_of("g1-2.0") == []
