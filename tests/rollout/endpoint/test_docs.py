"""The environment of docs/agents.md plays, with OpenAI's own client."""

from __future__ import annotations

import asyncio
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from hpcrl.config import EnvironmentConfig, GeneratorConfig, InferenceEngineConfig
from hpcrl.data.chat import messages
from hpcrl.rollout.endpoint import images, requests, server, session
from hpcrl.rollout.endpoint.server import serving
from hpcrl.rollout.generate import GroupGenerator
from hpcrl.runtime.http_server import MAX_BODY
from hpcrl.types import Prompt, Work
from tests.paths import ROOT
from tests.rollout.test_transcript import Script, ended, text, tokenizer_of, user

PAGE = (ROOT / "docs" / "agents.md").read_text(encoding="utf-8")


def test_the_environment_of_the_page_plays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("openai")
    (code,) = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    (tmp_path / "debating.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    tokenizer = tokenizer_of("chatml")
    engine = Script([ended(tokenizer, "3"), ended(tokenizer, "no, 4")])
    served = InferenceEngineConfig(enable_http_endpoint=True, served_model_name="m")
    config = GeneratorConfig(max_turns=2, inference_engine=served)
    work = Work("g", "train", Prompt("0", user("2+2"), "debating:Debate", {"reward_spec": {"ground_truth": "4"}}), 1, 5)

    async def play() -> Any:
        async with serving(config, tokenizer, 0) as server:
            generator = GroupGenerator(engine, tokenizer, config, EnvironmentConfig(), server=server)  # type: ignore[arg-type]
            return await generator.generate(work)

    group = asyncio.run(play())
    sys.modules.pop("debating")
    assert not group.failures
    assert [row.rewards.sum() for row in group.rows[0]] == [0.0, 1.0]
    assert "Somebody says: 3 Is that right?" in text(tokenizer, engine.prompts[1])


def test_the_limits_of_the_page_are_those_of_the_code() -> None:
    assert f"more than {MAX_BODY >> 20} MiB" in PAGE
    assert f"{session.PER_SECOND:g} requests per second are read, {session.AT_ONCE:g} in a burst" in PAGE
    assert f"at most {session.MOST_HELD >> 20} MiB of one key, and {server._MOST_HELD >> 20} MiB of all" in PAGE
    assert (
        f"at most {session.MOST_OPEN} choices (`n`), {requests._MOST_STOPS} stop texts of {requests._LONGEST_STOP:,} characters"
        in PAGE
    )
    assert f"{requests._MOST_MARKS:,} brackets, commas and quotation marks" in PAGE
    assert f"{messages._DEEPEST} objects and lists in each other" in PAGE
    assert f"above {session._QUICK >> 10} KiB are read and tokenized" in PAGE
    assert f"at most {images.MOST_IMAGES}, history included, of at most {images.MOST_PIXELS:,} pixels each" in PAGE
    assert f"images of a sample have at most {images.MOST_SHOWN >> 20} MiB" in PAGE
    assert f"{session.MOST_OPEN} answers are generated at a time" in PAGE
