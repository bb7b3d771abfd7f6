"""Images of datasets: as paths, data URLs and bytes, where texts say <image> and where messages have parts; and what a model sees of them."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import struct
from pathlib import Path
from typing import Any

import httpx
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image, ImageOps, PngImagePlugin

from hpcrl.config import GeneratorConfig, InferenceEngineConfig
from hpcrl.config.sections.generator import ChatTemplateConfig
from hpcrl.config.sections.model import Pretrained
from hpcrl.data.chat.count import token_counter
from hpcrl.data.chat.prompt_tokens import ChatTurns
from hpcrl.data.prompts import load_prompts
from hpcrl.data.sources import Source
from hpcrl.data.tokenizer import load_tokenizer
from hpcrl.data.vision.families import family_of, placeholders
from hpcrl.data.vision.images import check_pixels, image_text, opened, png, size_of
from hpcrl.data.vision.messages import with_images, without_images
from hpcrl.data.vision.reader import GRID, PIXELS, ImageReader, Preparation, named_tensors, row_images
from hpcrl.engines.vllm.images import _items
from hpcrl.errors import DataError, RefusedRequestError
from hpcrl.rollout.endpoint.server import serving
from hpcrl.rollout.engines.base import Generation
from hpcrl.types import Prompt
from tests.vision.material import IMAGE, KINDS, asks, drawn, write_model

PNG = drawn(1)
URL = f"data:image/png;base64,{base64.b64encode(PNG).decode()}"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Pretrained]:
    folder = tmp_path_factory.mktemp("models")
    return {kind: Pretrained(str(write_model(folder / kind, kind))) for kind in KINDS}


def rows(path: Path, *found: dict[str, Any]) -> list[Prompt]:
    pq.write_table(pa.Table.from_pylist(list(found)), path / "rows.parquet")
    return load_prompts([Source(str(path / "rows.parquet"))], "format")


def test_images_of_rows(tmp_path: Path) -> None:
    """A path beside the dataset, bytes as Hugging Face has them, a data URL; the column is no extra of the row."""
    (tmp_path / "a.png").write_bytes(PNG)
    for given, expected in (("a.png", str(tmp_path / "a.png")), ({"bytes": PNG, "path": None}, URL), (URL, URL)):
        text = "<image>count: red<image>"
        for prompt in (text, [{"role": "user", "content": text}]):
            (row,) = rows(tmp_path, {"prompt": prompt, "images": [given, given], "level": 3})
            image = {"type": "image", "image": expected}
            said = {"type": "text", "text": "count: red"}
            assert row.messages == [{"role": "user", "content": [image, said, image]}]
            assert row.extras == {"level": 3}
    (row,) = rows(tmp_path, {"prompt": "an <image> of nothing", "level": 3})
    assert row.messages == [{"role": "user", "content": "an <image> of nothing"}], "no images, no marks"


def test_parts_of_messages(tmp_path: Path) -> None:
    """As OpenAI's messages have them, or without an image of their own: the next of the column."""
    (tmp_path / "a.png").write_bytes(PNG)
    parts = [
        {"type": "image_url", "image_url": {"url": URL}},
        {"type": "text", "text": "and"},
        {"type": "image"},
    ]
    line = {"prompt": [{"role": "user", "content": parts}], "images": ["a.png"]}
    (tmp_path / "rows.jsonl").write_text(json.dumps(line))
    (row,) = load_prompts([Source(str(tmp_path / "rows.jsonl"))], "format")
    assert [part.get("image", "") for part in row.messages[0]["content"]] == [URL, "", str(tmp_path / "a.png")]
    texts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert with_images([{"role": "user", "content": texts}]) == [{"role": "user", "content": "ab"}]
    bare, images = without_images(row.messages)
    assert images == [URL, str(tmp_path / "a.png")]
    assert [part["type"] for part in bare[0]["content"]] == ["image", "text", "image"]


@pytest.mark.parametrize(
    ("prompt", "images", "said"),
    [
        ("<image><image>", [URL], "messages show more images than the row has"),
        ("count: red", [URL], "1 of 1 images are shown by no message; write <image>"),
        ("<image>", ["none.png"], "none.png: no such file"),
        ("<image>", ["https://a.b/c.png"], "images are not downloaded"),
        ("<image>", [b"GARBAGE"], "expected the bytes of a png, jpeg, webp, gif, bmp file"),
        ("<image>", ["data:text/html;base64,aa"], "expected data:image/<type>;base64"),
        ([{"role": "user", "content": [{"type": "audio"}]}], None, "expected parts of the type text, image or video"),
    ],
)
def test_rows_that_show_no_images_are_refused(tmp_path: Path, prompt: Any, images: Any, said: str) -> None:
    row = {"prompt": prompt} if images is None else {"prompt": prompt, "images": images}
    with pytest.raises(DataError) as caught:
        rows(tmp_path, row)
    assert said in str(caught.value)
    assert "row uid 0" in str(caught.value)


def test_files_that_are_no_images(tmp_path: Path) -> None:
    broken = image_text(PNG[:60])
    for read in (opened, lambda text: opened(text).load()):
        with pytest.raises(DataError, match="image data:image/png"):
            read(broken)
    eps = tmp_path / "a.eps"
    eps.write_text("%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n")
    with pytest.raises(DataError, match=r"a\.eps"):
        size_of(str(eps))


def photograph(orientation: int) -> bytes:
    """Return a JPEG of four colours that its EXIF turns."""
    file, exif = io.BytesIO(), Image.Exif()
    exif[274], exif[282] = orientation, 72.0
    taken = Image.frombytes("RGB", (2, 2), bytes(range(0, 240, 20))).resize((40, 10), Image.Resampling.NEAREST)
    taken.save(file, "jpeg", exif=exif)
    return file.getvalue()


@pytest.mark.parametrize("orientation", range(1, 10))
def test_a_turned_photograph_is_seen_upright(orientation: int) -> None:
    """As Pillow turns it."""
    file = photograph(orientation)
    text, seen = image_text(file), opened(image_text(file))
    upright = ImageOps.exif_transpose(Image.open(io.BytesIO(file))).convert("RGB")
    assert (seen.size, seen.tobytes()) == (upright.size, upright.tobytes())
    assert size_of(text) == (seen.height, seen.width)
    assert (seen.size == (10, 40)) == (5 <= orientation <= 8)


@pytest.mark.parametrize(("tag", "kind"), [(274, 2), (274, 7), (282, 2), (282, 7)])
def test_an_image_is_seen_whatever_its_exif_has(tag: int, kind: int) -> None:
    """Such as a text in the place of its orientation or its resolution."""
    file = photograph(3)
    at = next(at for order in "<>" if (at := file.find(struct.pack(f"{order}H", tag), 20)) > 0)
    order = "<" if file[at] == tag & 255 else ">"
    text = image_text(file[: at + 2] + struct.pack(f"{order}H", kind) + file[at + 4 :])
    turned = opened(text).tobytes() == opened(image_text(photograph(3))).tobytes()
    assert (size_of(text), turned) == ((10, 40), tag != 274)


XMP = '<rdf:Description tiff:Orientation="6"/>'


def turning(kind: bytes, tag: int = 274) -> bytes:
    """Return a chunk of a PNG that turns it a quarter; with another tag than the orientation's it does not."""
    exif = Image.Exif()
    exif[tag] = 6
    data = {
        b"eXIf": exif.tobytes().removeprefix(b"Exif\0\0"),
        b"tEXt": b"Raw profile type exif\0\nexif\n9\n" + exif.tobytes().hex().encode(),
        b"iTXt": b"XML:com.adobe.xmp\0\0\0\0\0" + XMP.encode(),
    }[kind]
    PngImagePlugin.putchunk(file := io.BytesIO(), kind, data)
    return file.getvalue()


@pytest.mark.parametrize("frames", [1, 2])
@pytest.mark.parametrize("kind", [b"eXIf", b"tEXt", b"iTXt"])
@pytest.mark.parametrize("before", [b"IDAT", b"fcTL", b"IEND", b"none"])
def test_a_png_has_the_size_that_is_seen(before: bytes, kind: bytes, frames: int) -> None:
    """Wherever its EXIF is: before its pixels, behind them, behind those of its first frame alone, or nowhere."""
    file = png([Image.new("RGB", (40, 10), colour) for colour in ("red", "blue")[:frames]])
    at = file.rfind(before) - 4
    text = image_text(file[:at] + turning(kind) + file[at:] if at > 0 else file)
    seen = opened(text)
    assert size_of(text) == (seen.height, seen.width)
    assert (seen.size == (10, 40)) == (
        before == b"IDAT" or (before == b"IEND" and frames == 1) or (before == b"fcTL" and frames == 2)
    )


@pytest.mark.parametrize("kind", [b"eXIf", b"iTXt"])
def test_what_is_behind_the_pixels_of_a_png_does_not_count_where_exif_is_before_them(kind: bytes) -> None:
    """Its placeholders would be those of an image that lies on its side, and its patches those of one that does not."""
    file = png([Image.new("RGB", (40, 10))])
    before, behind = (file.rfind(chunk) - 4 for chunk in (b"IDAT", b"IEND"))
    text = image_text(file[:before] + turning(b"eXIf", 296) + file[before:behind] + turning(kind) + file[behind:])
    assert size_of(text) == (opened(text).height, opened(text).width) == (10, 40)


def test_the_size_of_a_png_is_found_without_its_pixels() -> None:
    """Those of this one cannot be decoded."""
    file = png([Image.new("RGB", (40, 10))])
    at = file.find(b"IDAT") + 4
    text = image_text(file[:at] + b"?" * 8 + file[at + 8 :])
    assert size_of(text) == (10, 40)
    with pytest.raises(DataError, match="image data:image/png"):
        opened(text)


@pytest.mark.parametrize("kind", ["bmp", "png", "jpeg", "gif"])
def test_the_size_is_found_without_decoding_the_base64_of_the_pixels(kind: str) -> None:
    """Each request shows all images of its history again. What is behind the first kilobytes of this one is no base64."""
    file = io.BytesIO()
    Image.effect_noise((300, 200), 90).convert("RGB").save(file, kind)
    text = image_text(file.getvalue())
    broken = f"{text[: len(text) - 1000]}!{text[len(text) - 999 :]}"
    assert size_of(text) == (200, 300)
    check_pixels(broken, 60_000)
    with pytest.raises(DataError, match="expected at most 59,999 pixels"):
        check_pixels(broken, 59_999)
    assert (opened(text).height, opened(text).width) == (200, 300)
    with pytest.raises(DataError, match="no base64"):
        opened(broken)


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_has_as_many_placeholders_as_the_model_sees_patches(models: dict[str, Pretrained], kind: str) -> None:
    """What the controller counts, from sizes alone, is what a worker makes."""
    model = models[kind]
    reader = ImageReader.of(model)
    assert reader is not None
    tokenizer = load_tokenizer(model, ChatTemplateConfig())
    template = ChatTurns(tokenizer, {}, reader=reader)
    count = token_counter(model, ChatTemplateConfig(), {})
    for seeds in ((1,), (2, 3), ()):
        messages = with_images(asks(*seeds))
        found = template.opening(messages)
        assert len(found.token_ids) == count(Prompt("0", messages, "format"))
        assert sum(token == IMAGE for token in found.token_ids) == sum(image.tokens for image in found.images)
        assert [image.tokens for image in found.images] == [
            4 if kind == "llava" else 9 if seed % 2 else 6 for seed in seeds
        ]
        images = row_images(named_tensors(found.images))
        assert [set(image) for image in images] == [{PIXELS} if kind == "llava" else {PIXELS, GRID}] * len(seeds)
    again = [template.opening(with_images(asks(1))).images[0].digest for _ in range(2)]
    assert len(set(again)) == 1
    assert IMAGE in reader.never_said


def test_text_is_no_image(models: dict[str, Pretrained]) -> None:
    """A user who writes the placeholder has written a text; where special tokens count, it is told."""
    model = models["qwen2_5_vl"]
    reader, tokenizer = ImageReader.of(model), load_tokenizer(model, ChatTemplateConfig())
    evil = [{"role": "user", "content": "count: <|image_pad|>"}]
    assert IMAGE not in ChatTurns(tokenizer, {}, reader=reader).opening(evil).token_ids
    with pytest.raises(DataError, match="writes 1 placeholders for 0 images"):
        ChatTurns(tokenizer, {}, special_tokens=True, reader=reader).opening(evil)
    with pytest.raises(DataError, match="the policy is a model that takes none"):
        ChatTurns(tokenizer, {}).opening(with_images(asks(1)))


def test_where_vllm_is_told_that_images_are(models: dict[str, Pretrained]) -> None:
    reader, tokenizer = (
        ImageReader.of(models["qwen2_5_vl"]),
        load_tokenizer(models["qwen2_5_vl"], ChatTemplateConfig()),
    )
    ids, images = ChatTurns(tokenizer, {}, reader=reader).opening(with_images(asks(1, 2)))
    places = [item.places for item in _items(ids, images)]
    assert [place["length"] for place in places] == [9, 6]
    for place in places:
        end = place["offset"] + place["length"]
        assert set(ids[place["offset"] : end]) == {IMAGE}
        assert IMAGE not in (ids[place["offset"] - 1], ids[end])
    with pytest.raises(RefusedRequestError, match="has not the 6 placeholders"):
        list(_items(ids[: end - 1], images))


def test_settings_of_the_image_processor(models: dict[str, Pretrained]) -> None:
    reader = ImageReader.of(models["qwen2_5_vl"], Preparation({"max_pixels": 256, "min_pixels": 64}))
    assert reader is not None
    text = image_text(drawn(1))
    assert (len(reader.ids(text)), reader.seen(text).tokens) == (4, 4)
    with pytest.raises(DataError, match="200"):
        reader.ids(image_text(Image.new("RGB", (900, 1))))


def test_models_that_see_nothing(tmp_path: Path) -> None:
    from tests.trainer.material import write_model as write_text_model

    model = Pretrained(str(write_text_model(tmp_path / "text")))
    assert ImageReader.of(model) is None
    assert family_of({"model_type": "qwen2"}) is None
    assert placeholders({"model_type": "qwen2", "image_token_id": 3}) == []
    count = token_counter(model, ChatTemplateConfig(), {})
    with pytest.raises(DataError, match=r"it shows images, and .* sees none"):
        count(Prompt("0", with_images(asks(1)), "format", data_source="rows"))


def test_placeholders_are_no_token_ids_of_requests(models: dict[str, Pretrained]) -> None:
    """At the policy's endpoint, which takes no images: an engine would look for one."""
    model = models["qwen2_5_vl"]
    tokenizer = load_tokenizer(model, ChatTemplateConfig())
    reader = ImageReader.of(model)
    served = InferenceEngineConfig(enable_http_endpoint=True, served_model_name="policy")

    async def say(*_: Any) -> Generation:
        return Generation([5], [-0.5], "stop", [0])

    async def play() -> None:
        config = GeneratorConfig(max_turns=2, inference_engine=served)
        async with serving(config, tokenizer, 0, model, reader) as server, httpx.AsyncClient() as http:
            assert server is not None
            async with server.session(say, config.sampling_params) as (_, endpoint):
                for prompt, status in (([5, 6], 200), ([5, IMAGE, 6], 400)):
                    answer = await http.post(
                        f"{endpoint.base_url}/completions",
                        json={"model": "policy", "prompt": prompt},
                        headers={"authorization": f"Bearer {endpoint.key}"},
                    )
                    assert answer.status_code == status, answer.text
                assert f"token {IMAGE} stands for an image" in answer.json()["error"]["message"]

    asyncio.run(play())
