"""Asks the policy at the endpoint with OpenAI's client: it shows the picture of a row, and after a wrong answer its mirror image."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping
from typing import Any

from openai import OpenAI
from PIL import Image, ImageOps

from hpcrl.envs.base import AgentEnvironment, Endpoint, Messages, Turn

CLIENT = OpenAI(base_url="http://unset", api_key="unset")  # its connections are used again


class Looks(AgentEnvironment):
    """Reward 1 for the right number at the first look, a half for it at the second."""

    def __init__(self, extras: Mapping[str, Any]) -> None:
        self._count = extras["reward_spec"]["ground_truth"]

    def play(self, messages: Messages, endpoint: Endpoint) -> Turn:
        client = CLIENT.with_options(base_url=endpoint.base_url, api_key=endpoint.key)
        chat = client.chat.completions.create(model=endpoint.model, messages=messages)
        said = chat.choices[0].message.content
        if said == self._count:
            return Turn([], 1.0, done=True, metrics={"looks": 1.0})
        again = [*messages, {"role": "assistant", "content": said}, mirrored(messages[-1])]
        chat = client.chat.completions.create(model=endpoint.model, messages=again)
        found = chat.choices[0].message.content == self._count
        return Turn([], 0.5 * found, done=True, metrics={"looks": 2.0})


def mirrored(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message with the mirror image of its picture."""
    shown, asked = message["content"]
    picture = base64.b64decode(shown["image_url"]["url"].partition(",")[2])
    ImageOps.mirror(Image.open(io.BytesIO(picture))).save(file := io.BytesIO(), "png")
    url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    return {**message, "content": [{"type": "image_url", "image_url": {"url": url}}, asked]}
