"""Images in requests to the policy's endpoint: what is refused, with what remedy, and what they may cost."""

from __future__ import annotations

import asyncio
import base64
import json
import struct
import threading
import zlib
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from hpcrl.config import GeneratorConfig, InferenceEngineConfig
from hpcrl.config.sections.generator import ChatTemplateConfig
from hpcrl.config.sections.model import Pretrained
from hpcrl.data.tokenizer import load_tokenizer
from hpcrl.data.vision.images import image_text
from hpcrl.data.vision.messages import as_sent
from hpcrl.data.vision.reader import Context, ImageReader, SeenImage
from hpcrl.rollout.endpoint import images as images_module
from hpcrl.rollout.endpoint.anthropic_messages import messages_request
from hpcrl.rollout.endpoint.images import MOST_IMAGES
from hpcrl.rollout.endpoint.openai_responses import responses_request
from hpcrl.rollout.endpoint.requests import chat_request
from hpcrl.rollout.endpoint.server import serving
from hpcrl.rollout.endpoint.session import Session
from hpcrl.rollout.engines.base import Generation
from hpcrl.runtime.http_server import BadRequest
from tests.vision.material import IMAGE, drawn, write_model

SERVED = InferenceEngineConfig(enable_http_endpoint=True, served_model_name="m")
CONFIG = GeneratorConfig(max_turns=9, max_input_length=100, inference_engine=SERVED)
Post = Callable[..., Awaitable[httpx.Response]]


def url_of(content: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(content).decode()}"


def part(url: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def shows(*parts: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [*parts, {"type": "text", "text": "count: red"}]}]


def black(width: int, height: int) -> bytes:
    """Return a PNG of which almost nothing is stored."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    pixels = zlib.compress(bytes((width + 7) // 8 + 1) * height)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


PICTURE = url_of(drawn(1))


def body(**fields: Any) -> bytes:
    return json.dumps({"model": "m", **fields}).encode()


@pytest.mark.parametrize(
    ("given", "remedy"),
    [
        (part("https://example.org/a.png"), "expected an image with its bytes as data:image/png;base64"),
        (part("/etc/passwd"), "nothing is downloaded"),
        (part("file:///etc/passwd"), "nothing is downloaded"),
        (part("data:video/mp4;base64,AAAA"), "expected an image with its bytes"),
        (part("data:image/png,abc"), "expected data:image/<type>;base64"),
        (part(None), "there are no uploaded files here"),
        ({"type": "image", "image": "/etc/passwd"}, "expected the types text, image_url"),
        ({"type": "file", "file": {"file_id": "file-1"}}, "send its text, or its pages as images"),
        ({"type": "input_audio", "input_audio": {}}, "send what is heard as text"),
        ({"type": "video_url", "video_url": {}}, "send its frames as images"),
        ({"type": ["video_url"]}, "expected the types text, image_url"),
    ],
)
def test_parts_that_are_not_taken_of_chat_completions(given: dict[str, Any], remedy: str) -> None:
    with pytest.raises(BadRequest, match=remedy):
        chat_request(body(messages=shows(given)))


@pytest.mark.parametrize(
    ("given", "remedy"),
    [
        ({"type": "document", "source": {}}, "send its text, or its pages as images"),
        ({"type": "image", "source": {"type": "file", "file_id": "file_1"}}, "there are no uploaded files here"),
        ({"type": "image", "source": {"type": "url", "url": "http://a/b.png"}}, "nothing is downloaded"),
        ({"type": "image", "source": {"type": "base64", "data": "AAAA"}}, "expected an image with its bytes"),
        ({"type": "image"}, "expected the types text, image"),
    ],
)
@pytest.mark.parametrize("within", [False, True], ids=["", "result"])
def test_blocks_that_are_not_taken_of_messages(given: dict[str, Any], remedy: str, within: bool) -> None:
    block = {"type": "tool_result", "tool_use_id": "1", "content": [given]} if within else given
    with pytest.raises(BadRequest, match=remedy):
        messages_request(body(messages=[{"role": "user", "content": [block]}]))


@pytest.mark.parametrize(
    ("given", "remedy"),
    [
        ({"type": "input_file", "file_id": "file-1"}, "send its text, or its pages as images"),
        ({"type": "input_image", "file_id": "file-1"}, "there are no uploaded files here"),
        ({"type": "input_audio"}, "send what is heard as text"),
        ({"type": "input_image", "image_url": "http://a/b.png"}, "nothing is downloaded"),
    ],
)
def test_parts_that_are_not_taken_of_responses(given: dict[str, Any], remedy: str) -> None:
    for item in ({"role": "user", "content": [given]}, {"type": "function_call_output", "output": [given]}):
        with pytest.raises(BadRequest, match=remedy):
            responses_request(body(input=[item]))


def test_images_are_the_same_by_each_protocol() -> None:
    parts = [{"type": "image", "image": PICTURE}, {"type": "text", "text": "so"}]
    chat = [
        {"role": "user", "content": [part(PICTURE), {"type": "text", "text": "so"}]},
        {"role": "tool", "tool_call_id": "1", "content": [part(PICTURE), {"type": "text", "text": "so"}]},
    ]
    source = {"type": "base64", "media_type": "image/png", "data": PICTURE.partition(",")[2]}
    blocks = [{"type": "image", "source": source}, {"type": "text", "text": "so"}]
    result = {"type": "tool_result", "tool_use_id": "1", "content": blocks}
    items = [{"type": "input_image", "image_url": PICTURE}, {"type": "input_text", "text": "so"}]
    found = [
        chat_request(body(messages=chat)),
        messages_request(body(messages=[{"role": "user", "content": blocks}, {"role": "user", "content": [result]}])),
        responses_request(
            body(
                input=[
                    {"role": "user", "content": items},
                    {"type": "function_call_output", "call_id": "1", "output": items},
                ]
            )
        ),
    ]
    wanted = [{"role": "user", "content": parts}, {"role": "tool", "tool_call_id": "1", "content": parts}]
    assert [one.messages for one in found] == [wanted] * 3
    thinks = {"role": "user", "content": [part(PICTURE)], "reasoning_content": "so"}
    assert chat_request(body(messages=[thinks])).messages == [{"role": "user", "content": parts[:1]}]
    for role in ("assistant", "system"):
        with pytest.raises(BadRequest, match=f"expected images in messages of user and tool, found one of {role}"):
            chat_request(body(messages=[{"role": role, "content": [part(PICTURE)]}]))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "qwen2_5_vl", "qwen2_5_vl")


def asked(model: Path, reader: ImageReader | None, play: Callable[[Session, Post], Awaitable[None]]) -> list[Context]:
    """Let a function ask in a session; return the prompts that the policy has got."""
    prompts = list[Context]()

    async def say(_turn: int, prompt: Context, *_: Any) -> Generation:
        prompts.append(prompt)
        return Generation([5, 1], [-0.5] * 2, "stop", [0] * 2)

    async def main() -> None:
        tokenizer, pretrained = load_tokenizer(Pretrained(str(model)), ChatTemplateConfig()), Pretrained(str(model))
        async with (
            serving(CONFIG, tokenizer, 0, pretrained, reader) as server,
            httpx.AsyncClient(timeout=600) as http,
        ):
            assert server is not None
            async with server.session(say, CONFIG.sampling_params) as (session, endpoint):

                async def post(path: str = "chat/completions", **fields: Any) -> httpx.Response:
                    headers = {"authorization": f"Bearer {endpoint.key}"}
                    given = {"model": "m", **fields}
                    return await http.post(f"{endpoint.base_url}/{path}", json=given, headers=headers)

                await play(session, post)

    asyncio.run(main())
    return prompts


async def refused(answer: Awaitable[httpx.Response]) -> str:
    found = await answer
    assert found.status_code == 400, found.text
    return f"{found.json()['error']['code']}: {found.json()['error']['message']}"


def test_a_text_model_takes_none(model: Path) -> None:
    async def play(_session: Session, post: Post) -> None:
        assert "the policy is a model that takes none" in await refused(post(messages=shows(part(PICTURE))))

    assert not asked(model, None, play)


def test_images_that_are_none_too_large_or_too_many(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = ImageReader.of(Pretrained(str(model)))
    assert reader is not None
    monkeypatch.setattr(images_module, "MOST_SHOWN", 3 * len(PICTURE))
    many = [part(url_of(drawn(seed))) for seed in range(20)]

    async def play(session: Session, post: Post) -> None:
        for url, said in (
            ("data:image/png;base64,!", "no base64"),
            (url_of(b"no image"), "cannot identify image file"),
            (url_of(drawn(1)[:90]), "image"),
            (url_of(black(8200, 8200)), "expected at most 33,554,432 pixels"),
        ):
            assert said in await refused(post(messages=shows(part(url))))
        most = await refused(post(messages=shows(*[part(PICTURE)] * (MOST_IMAGES + 1))))
        assert "101 images; expected at most 100" in most
        long = await refused(post(messages=shows(*many)))
        assert long.startswith("context_length_exceeded: prompt is too long: it has 108 tokens of images")
        assert session.too_long
        assert not any(reader.known(one["image_url"]["url"]) for one in many), "none was decoded for the policy"
        for at in (0, 1, 0, 1):
            assert (await post(messages=shows(many[at]))).status_code == 200
        assert "the images of this sample have more than" in await refused(post(messages=shows(*many[2:4])))
        first, other, again, _ = session.answers
        assert again.asked[0]["content"][0]["image"] is first.asked[0]["content"][0]["image"]  # type: ignore[index]
        assert again.images == first.images != other.images

    assert len(asked(model, reader, play)) == 4


def test_token_ids_go_on_from_an_answer_with_images(model: Path) -> None:
    async def play(session: Session, post: Post) -> None:
        assert (await post(messages=shows(part(PICTURE)))).status_code == 200
        known = session.answers[0].token_ids
        assert known.count(IMAGE) == 9
        assert (await post("completions", prompt=[*known, 5])).status_code == 200
        for prompt in ([*known, IMAGE], known[:-1], [5, IMAGE]):
            said = await refused(post("completions", prompt=prompt))
            assert f"token {IMAGE} stands for an image" in said
        (row,) = session.transcripts()
        assert [image.source for image in row.images] == [PICTURE]

    first, second = asked(model, ImageReader.of(Pretrained(str(model))), play)
    assert second.images == first.images


def test_images_are_read_outside_of_the_event_loop(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A few bytes may be many pixels."""
    reader = ImageReader.of(Pretrained(str(model)))
    assert reader is not None
    seen, ids, threads = reader._seen, reader.ids, list[tuple[str, threading.Thread]]()

    def seeing(shown: Any) -> SeenImage:
        threads.append(("seen", threading.current_thread()))
        return seen(shown)

    def counting(shown: Any) -> list[int]:
        threads.append(("ids", threading.current_thread()))
        return ids(shown)

    monkeypatch.setattr(reader, "_seen", seeing)
    monkeypatch.setattr(reader, "ids", counting)

    async def play(_session: Session, post: Post) -> None:
        for _ in range(2):
            assert (await post(messages=shows(part(url_of(black(640, 480)))))).status_code == 200

    asked(model, reader, play)
    assert [what for what, _ in threads] == ["ids", "seen"], "and once"
    assert threading.main_thread() not in [thread for _, thread in threads]


def test_rows_images_are_sent_as_clients_send_them(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(drawn(1))
    messages = [
        {"role": "system", "content": "so"},
        {"role": "user", "content": [{"type": "image", "image": image_text("a.png", tmp_path)}]},
    ]
    sent = as_sent(messages)
    assert sent == [messages[0], {"role": "user", "content": [part(PICTURE)]}]
    assert chat_request(body(messages=sent)).messages[1]["content"] == [{"type": "image", "image": PICTURE}]  # type: ignore[index]
