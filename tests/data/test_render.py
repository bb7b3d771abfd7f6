"""Chat templates of strangers: one that does not end, or takes all memory, is ended and named; others write what transformers writes."""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any

import pytest

from hpcrl.config.sections.generator import ChatTemplateConfig
from hpcrl.config.sections.model import Pretrained
from hpcrl.data import render as module
from hpcrl.data.chat.template import ChatTemplate
from hpcrl.data.render import RefusedError, render
from hpcrl.data.tokenizer import load_tokenizer
from hpcrl.errors import DataError
from tests.paths import CONFIGS
from tests.processes import errors_without_reader

MODEL = str(CONFIGS / "quickstart" / "model")
TALK: list[dict[str, Any]] = [{"role": "user", "content": "a\ud800"}, {"role": "assistant", "content": "b"}]
LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}{% endfor %}{% endfor %}{% endfor %}"
REQUEST = json.dumps(["fine", {"conversations": [[]]}]).encode()
WHOLE = len(REQUEST).to_bytes(8, "little") + REQUEST
WHERE_LONG = "{% if messages[0].content|length > 9 %}" + LOOPS + "{% endif %}fine"


def written(template: str, content: str = "a") -> str:
    return render(template, {"conversations": [[{"role": "user", "content": content}]]})


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SECONDS", 1)
    monkeypatch.setattr(module, "_RENDERER", module._Renderer())


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize("template", [LOOPS, "{{ (10 ** 9) ** (10 ** 7 + messages|length) }}"])
def test_a_template_that_does_not_end_is_ended_and_named(template: str) -> None:
    tokenizer = load_tokenizer(Pretrained(MODEL), ChatTemplateConfig())
    tokenizer.chat_template = template
    for _ in range(20):  # of which only the first takes its time
        with pytest.raises(DataError, match=rf"^the chat template of {MODEL}: it did not end within"):
            ChatTemplate(tokenizer, {}).text(TALK[1:])
    assert written("fine") == "fine"


@pytest.mark.usefixtures("soon")
def test_one_long_conversation_says_nothing_about_others() -> None:
    with pytest.raises(DataError, match="did not end"):
        written(WHERE_LONG, "a" * module._SMALL)
    assert written(WHERE_LONG) == "fine"
    with pytest.raises(DataError, match="did not end"):
        written(WHERE_LONG, "a" * 10)
    with pytest.raises(DataError, match="did not end"):
        written(WHERE_LONG)


@pytest.mark.parametrize(
    "template", ["{{ 'a' * 10 ** 10 }}", "{{ 'a' * (10 ** 10 + messages|length) }}", "{{ ('a' * 300000000) }}"]
)
def test_a_template_that_takes_all_memory_is_refused(template: str) -> None:
    with pytest.raises(RefusedError, match=r"needs more than 1 GiB of memory|it writes 300000000 characters"):
        written(template)
    assert written("fine") == "fine"


def test_signals_to_the_group_end_no_rendering() -> None:
    assert written("fine") == "fine"
    process = module._RENDERER._process
    assert process is not None
    for one in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2):
        process.send_signal(one)
    assert written("{{ messages[0].content }}", "b") == "b"
    assert process.poll() is None
    process.kill()
    process.wait()
    assert written("fine") == "fine"


@pytest.mark.parametrize("asked", [WHOLE, WHOLE[:-1]], ids=["whole", "half a request"])
def test_one_whose_asker_was_killed_ends_quietly(asked: bytes) -> None:
    """The answer has no reader any more."""
    command = [sys.executable, "-m", "hpcrl.data.render_process", "60"]
    assert errors_without_reader(command, asked) == b""


def test_a_forked_process_has_its_own() -> None:
    assert written("fine") == "fine"
    child = os.fork()
    if not child:
        os._exit(0 if [written("{{ messages[0].content }}", str(n)) for n in range(9)] == list("012345678") else 1)
    assert [written("{{ messages[0].content }}", f"a{n}") for n in range(9)] == [f"a{n}" for n in range(9)]
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize("prompt", [False, True])
def test_it_writes_what_transformers_writes(prompt: bool) -> None:
    tokenizer = load_tokenizer(Pretrained(MODEL), ChatTemplateConfig())
    expected = tokenizer.apply_chat_template(TALK, tokenize=False, add_generation_prompt=prompt)
    assert ChatTemplate(tokenizer, {})._rendered(TALK, (), prompt=prompt) == expected
    tokenizer.chat_template = "{{ bos_token }}{{ x }}{{ messages }}{{ tools }}"
    tools = [{"type": "function", "function": {"name": "f"}}]
    expected = tokenizer.apply_chat_template(TALK, tokenize=False, x="y", tools=tools)
    assert ChatTemplate(tokenizer, {"x": "y"})._rendered(TALK, tools, prompt=False) == expected
