"""Videos of datasets: lists of frames, folders and files; which frames are shown, how large they are, and what a model is told of when."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoConfig

from hpcrl.config.sections.generator import ChatTemplateConfig
from hpcrl.config.sections.model import Pretrained
from hpcrl.data.chat.count import token_counter
from hpcrl.data.chat.prompt_tokens import ChatTurns
from hpcrl.data.conversations import Columns
from hpcrl.data.prompts import load_prompts
from hpcrl.data.sources import Source
from hpcrl.data.tokenize import Recipe, Tokenizer
from hpcrl.data.tokenizer import load_tokenizer
from hpcrl.data.vision.frames import FrameChoice, Video, frames_of, kept_of, shown_of
from hpcrl.data.vision.images import png
from hpcrl.data.vision.inputs import plane_positions
from hpcrl.data.vision.messages import with_images, without_images
from hpcrl.data.vision.reader import GRID, PIXELS, SECONDS, ImageReader, Preparation, row_images
from hpcrl.data.vision.video_processor import VideoProcessor
from hpcrl.engines.vllm.images import _items
from hpcrl.errors import DataError
from hpcrl.text import said_in
from hpcrl.types import Prompt
from tests.trainer.material import make_run
from tests.vision.material import IMAGE, VIDEO, asks, drawn, opened, plays, write_model

KINDS = ("qwen2_5_vl", "qwen3_vl")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Pretrained]:
    folder = tmp_path_factory.mktemp("models")
    return {kind: Pretrained(str(write_model(folder / kind, kind))) for kind in KINDS}


def reader_of(model: Pretrained, preparation: Preparation | None = None) -> ImageReader:
    found = ImageReader.of(model, preparation)
    assert found is not None
    return found


def grey(level: int, width: int = 32, height: int = 24) -> Image.Image:
    return Image.new("RGB", (width, height), (level, level, level))


def animated(path: Path, count: int, ms: int) -> Path:
    first, *others = (grey(20 * at) for at in range(count))
    options = {"lossless": True} if path.suffix == ".webp" else {}
    first.save(path, save_all=True, append_images=others, duration=ms, **options)
    return path


def encoded(path: Path, count: int, fps: float) -> Path:
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter.fourcc(*"mp4v"), fps, (32, 24))
    for at in range(count):
        writer.write(np.asarray(grey(20 * at)))
    writer.release()
    return path


def levels(video: Video, most: int) -> tuple[list[int], FrameChoice]:
    choice = FrameChoice.of(video, most)
    return [round(float(np.asarray(frame).mean()) / 20) for frame in frames_of(video, choice)], choice


def test_forms_of_a_video(tmp_path: Path) -> None:
    """A list, a folder, files with all frames, and their bytes: the same frames at the same times."""
    folder = tmp_path / "frames"
    folder.mkdir()
    for at in range(10):
        grey(20 * at).save(folder / f"{at:03}.png")
    (folder / "notes.txt").write_text("no frame")
    files = [
        animated(tmp_path / "a.gif", 10, 250),
        animated(tmp_path / "a.webp", 10, 250),
        encoded(tmp_path / "a.mp4", 10, 4.0),
    ]
    values: list[Any] = [[f"frames/{at:03}.png" for at in range(10)], "frames", *(file.name for file in files)]
    values += [{"bytes": file.read_bytes(), "path": None} for file in files]
    for value in values:
        given = value if isinstance(value, str | dict) and value != "frames" else {"video": value, "fps": 4}
        video = Video.of(given, tmp_path)
        for own in (video, shown_of(kept_of(video))):
            assert isinstance(own, Video)
            assert levels(own, 64)[0] == list(range(10)), value
            shown, choice = levels(own, 4)
            assert shown == list(choice.places) == [0, 3, 6, 9]
            assert choice.seconds == [0, 0.75, 1.5, 2.25]
            assert choice.every == 10 / 4 / 4
    assert FrameChoice.of(Video.of("frames", tmp_path), 2).seconds == [0, 4.5], "two a second, where nothing says it"


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ([], "expected a video with frames, found none"),
        ("empty", "expected a video with frames, found none"),
        ("none.gif", "none.gif: no such file"),
        ("https://a.b/c.mp4", "are not downloaded"),
        ({"video": ["a.png"], "fps": 0}, "expected fps, the frames a second of a video, above 0, found 0"),
        ({"video": ["a.png", "b.png"]}, "frame 1 has 16 x 24 pixels, and the first 32 x 24"),
        ("broken.mp4", "broken.mp4: OpenCV cannot read it"),
        (["broken.mp4", "broken.mp4"], "expected one file of a video, found 2"),
        ("short.mp4", "fewer frames than it says"),
        (7, "expected an image as a path"),
    ],
)
def test_videos_that_cannot_be_shown(tmp_path: Path, value: Any, said: str) -> None:
    (tmp_path / "empty").mkdir()
    grey(0).save(tmp_path / "a.png")
    grey(0, 16).save(tmp_path / "b.png")
    (tmp_path / "broken.mp4").write_bytes(b"no video")
    whole = encoded(tmp_path / "whole.mp4", 10, 4.0).read_bytes()
    at = whole.index(b"mdat")
    (tmp_path / "short.mp4").write_bytes(
        whole[: at + 4] + bytes(len(whole[at + 4 : whole.index(b"moov")])) + whole[whole.index(b"moov") :]
    )
    with pytest.raises(DataError) as caught:
        levels(Video.of(value, tmp_path), 64)
    assert said in str(caught.value)


def test_without_opencv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    video = Video.of(str(encoded(tmp_path / "a.mp4", 2, 4.0)))
    monkeypatch.setitem(sys.modules, "cv2", None)
    with pytest.raises(DataError, match=r"a\.mp4: OpenCV decodes such files.*pip install 'hpcrl\[videos\]'"):
        levels(video, 2)


def test_videos_of_rows(tmp_path: Path) -> None:
    """In the column beside that of images, where texts say <video>, or in parts with a video of their own."""
    clip = animated(tmp_path / "a.gif", 3, 250)
    (tmp_path / "b.png").write_bytes(drawn(1))
    parts = [{"type": "video"}, {"type": "text", "text": "and"}, {"type": "video_url", "video_url": {"url": str(clip)}}]
    rows = [
        {"prompt": "<video>is <image>?", "images": "b.png", "videos": [{"video": ["b.png", "b.png"], "fps": 1}]},
        {"prompt": [{"role": "user", "content": parts}], "videos": "a.gif"},
        {"prompt": "a <video>"},
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    first, second, third = load_prompts([Source(str(tmp_path / "rows.jsonl"))], "format")
    image = str(tmp_path / "b.png")
    bare, shown = without_images(first.messages)
    assert shown == [Video((image, image), 1.0), image]
    assert [part["type"] for part in bare[0]["content"]] == ["video", "text", "image", "text"]
    assert said_in(first.messages[0]["content"]) == "<video>is <image>?"
    assert without_images(second.messages)[1] == [Video((str(clip),))] * 2
    assert not first.extras
    assert third.messages[0]["content"] == "a <video>"
    for row, said in (
        (rows[0] | {"prompt": "<image>"}, "1 of 1 videos"),
        (rows[1] | {"videos": []}, "more videos than"),
    ):
        (tmp_path / "wrong.jsonl").write_text(json.dumps(row))
        with pytest.raises(DataError, match=said):
            load_prompts([Source(str(tmp_path / "wrong.jsonl"))], "format")


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_has_what_stands_for_its_videos(models: dict[str, Pretrained], kind: str) -> None:
    """As the controller counts it; vLLM is told of runs of placeholders."""
    model = models[kind]
    reader, tokenizer = reader_of(model), load_tokenizer(model, ChatTemplateConfig())
    messages = with_images(asks(1))
    messages[0]["content"].insert(0, Video.of(plays(5, fps=4.0)["video"], fps=4.0).part)
    found = ChatTurns(tokenizer, {}, reader=reader).opening(messages)
    assert len(found.token_ids) == token_counter(model, ChatTemplateConfig(), {})(Prompt("0", messages, "format"))
    video, image = found.images
    assert video.tensors[GRID].tolist() == [[3, 6, 6]]
    assert video.tokens == 27
    assert image.tokens == 9
    items = list(_items(found.token_ids, found.images))
    for item in items:
        begin, end = item.places["offset"], item.places["offset"] + item.places["length"]
        assert set(found.token_ids[begin:end]) == {item.image.token}
        assert not {IMAGE, VIDEO} & {found.token_ids[begin - 1], found.token_ids[end]}
    modalities = [item.modality for item in items]
    if kind == "qwen2_5_vl":
        assert video.ids == [VIDEO] * 27
        assert video.tensors[SECONDS].tolist() == [0.5]
        assert modalities == ["video", "image"]
        return
    assert modalities == ["image"] * 4
    said = [tokenizer.encode(f"<{when} seconds>", add_special_tokens=False) for when in ("0.1", "0.6", "1.0")]
    start, end = (
        AutoConfig.from_pretrained(model.path).to_dict()[f"vision_{name}_token_id"] for name in ("start", "end")
    )
    assert video.ids == [token_id for text in said for token_id in (*text, start, *[VIDEO] * 9, end)]


def test_a_pair_of_frames_is_two_planes(models: dict[str, Pretrained]) -> None:
    """A frame that is alone fills both, as an image does; numbers of each are those of its image."""
    reader = reader_of(models["qwen2_5_vl"])
    pictures = [reader.seen(with_images(asks(seed))[0]["content"][0]["image"]).tensors[PIXELS] for seed in (1, 3, 5)]
    video = reader.seen(Video.of([drawn(seed) for seed in (1, 3, 5)])).tensors[PIXELS]
    planes = video.reshape(2, 36, 3, 2, 16)
    for at, picture in enumerate((*pictures, pictures[-1])):
        np.testing.assert_array_equal(planes[at // 2, :, :, at % 2], picture.reshape(36, 3, 2, 16)[:, :, 0])
    few = reader_of(models["qwen2_5_vl"], Preparation(video_frames=2, video_pixels=16 * 16))
    small = few.seen(Video.of([drawn(seed) for seed in (1, 3, 5)]))
    assert small.tensors[GRID].tolist() == [[1, 4, 4]]
    assert small.tensors[SECONDS].tolist() == [1.5]
    with pytest.raises(DataError, match="one side is more than 200 times the other"):
        few.ids(Video.of([grey(0, 900, 3)]))


class Sizes:
    patch_size, merge_size, temporal_patch_size = 14, 2, 2


@pytest.mark.parametrize(
    ("videos", "frames", "height", "width", "size"),
    [
        # what transformers' processors answer; tests/vision/test_processors.py asks them
        ("seconds", 4, 480, 640, (476, 644)),
        ("seconds", 4, 2000, 3000, (616, 924)),
        ("seconds", 4, 30, 50, (252, 420)),
        ("order", 9, 10, 900, (56, 3024)),
        ("timestamps", 4, 480, 640, (336, 448)),
        ("timestamps", 64, 480, 640, (84, 112)),
        ("timestamps", 3, 30, 50, (168, 252)),
        ("timestamps", 1, 10, 20, (168, 336)),
    ],
)
def test_sizes_of_frames(videos: Any, frames: int, height: int, width: int, size: tuple[int, int]) -> None:
    processor = VideoProcessor(Sizes(), videos, 128 * 28 * 28, 768 * 28 * 28)
    choice = FrameChoice(range(frames), [0.0] * frames, 1.0, height, width)
    _, rows, columns = processor.grid(choice)
    assert (rows * 14, columns * 14) == size
    smaller = replace(processor, least=28 * 28, frame_most=10 * 28 * 28)
    _, rows, columns = smaller.grid(choice)
    assert rows * columns <= 4 * 10


def test_positions_go_on_with_time_and_behind_a_video(models: dict[str, Pretrained]) -> None:
    """Half seconds count, where transformers 5.17 cuts them off; and a text goes on behind the last moment, which may be later than the video is
    high or wide."""

    class Model:
        config = AutoConfig.from_pretrained(models["qwen2_5_vl"].path)

    def video(time: int, seconds: float) -> dict[str, Any]:
        return {GRID: np.array([[time, 2, 4]]), SECONDS: np.array([seconds], np.float32)}

    ids = torch.tensor([[3, *[VIDEO] * 8, 5, 7, 0, 0], [3, 5, *[VIDEO] * 6, 7, *[IMAGE] * 2, 7, 7]])
    filled = ids > 0
    images = [video(4, 0.75), video(3, 1.25), {GRID: np.array([[1, 2, 4]])}]
    model: Any = Model()
    found = plane_positions(model, ids, filled, images)
    times, rows, columns = found[:, 0].tolist()
    assert times == [0, *(1 + when for when in (0, 0, 1, 1, 3, 3, 4, 4)), 6, 7, 0, 0]
    assert rows == [0, *[1] * 8, 6, 7, 0, 0]
    assert columns == [0, *[1, 2] * 4, 6, 7, 0, 0]
    assert found[0, 1].tolist() == [0, 1, 2, 2, 4, 4, 7, 7, 8, 9, 9, 11, 12]


def test_supervised_rows_keep_their_videos(models: dict[str, Pretrained], tmp_path: Path) -> None:
    """Also when their files are gone; a row is cut before a video, and none of it is trained, also not what is said of times."""
    clip = encoded(tmp_path / "a.mp4", 6, 2.0)
    (tmp_path / "b.gif").write_bytes(png([opened(drawn(at)) for at in range(3)], 500))
    talk = [{"role": "user", "content": "<video>count: <image>"}, {"role": "assistant", "content": "2"}]
    talk += [{"role": "user", "content": "<video>"}, {"role": "assistant", "content": "3"}]
    (tmp_path / "c.png").write_bytes(drawn(1))
    row = {"conversations": talk, "images": "c.png", "videos": ["a.mp4", "b.gif"]}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    source = Source(str(tmp_path / "rows.jsonl"))
    recipe = Recipe(
        models["qwen3_vl"], ChatTemplateConfig(), {}, Columns(), "all", 400, "cut", Preparation(video_frames=4)
    )
    (tokens,) = recipe.renderer().sequences(next(source.rows()), tmp_path)
    assert [count for _, count, _ in tokens.images] == [
        len(reader_of(models["qwen3_vl"], recipe.seeing).ids(shown)) for *_, shown in tokens.images
    ]
    for begin, count, _ in tokens.images:
        assert not any(tokens.mask[begin : begin + count])
        assert len(tokens.cut(begin + count - 1).token_ids) == begin
    pair = {"prompt": "<video>", "videos": "b.gif", "chosen": "1", "rejected": "2"}
    pairs = replace(recipe, columns=Columns("preference")).renderer().sequences(pair, tmp_path)
    assert [[shown for *_, shown in one.images] for one in pairs] == [[Video((str(tmp_path / "b.gif"),))]] * 2
    file = Tokenizer(make_run(tmp_path / "run"), 1, recipe).dataset("train-0", "rows", source)
    clip.unlink()
    ((sample,),) = ([one] for one in file.read(0))
    grids = [image[GRID].tolist() for image in row_images(sample.tensors)]
    assert [grid[0][0] for grid in grids] == [2, 1, 2]
    assert int((sample.token_ids == VIDEO).sum()) == sum(int(np.prod(grid)) for grid in (grids[0], grids[2])) // 4
    assert sum(tokens.mask) == int(sample.loss_mask.sum())
