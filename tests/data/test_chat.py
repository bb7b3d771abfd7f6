"""Chat templates that come with hpcrl, and those of a file."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from hpcrl.config import Config
from hpcrl.config.sections.generator import ChatTemplateConfig
from hpcrl.config.sections.model import Pretrained
from hpcrl.data.chat.prompt_tokens import ChatTurns
from hpcrl.data.tokenizer import chat_template, load_tokenizer
from hpcrl.errors import ConfigError, DataError
from hpcrl.launch.submit.preflight import check_files
from tests.paths import CONFIGS

MODEL = CONFIGS / "quickstart" / "model"
TALK = [
    {"role": "system", "content": "sort"},
    {"role": "user", "content": "cab"},
    {"role": "assistant", "content": "<think>\na</think> b</think>\n\nabc"},
    {"role": "user", "content": "ed"},
    {"role": "assistant", "content": "<think>\nd</think>\n\nde"},
]
BEFORE = "<|im_start|>system\nsort<|im_end|>\n<|im_start|>user\ncab<|im_end|>\n<|im_start|>assistant\n"
AFTER = "<|im_end|>\n<|im_start|>user\ned<|im_end|>\n<|im_start|>assistant\n<think>\nd</think>\n\nde<|im_end|>\n"
OPEN = "<|im_start|>assistant\n"


def named(name: str) -> ChatTemplateConfig:
    return ChatTemplateConfig(name_or_path=name)


def rendered(template: ChatTemplateConfig, messages: list[dict[str, str]], generation_prompt: bool) -> str:
    tokenizer = load_tokenizer(Pretrained(str(MODEL)), template)
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=generation_prompt, tokenize=False)
    assert isinstance(text, str)
    return text


@pytest.mark.parametrize("generation_prompt", [False, True])
@pytest.mark.parametrize(
    ("name", "thought"), [("qwen3_with_thinking", "<think>\na</think> b</think>\n\n"), ("qwen3_without_thinking", "")]
)
def test_thoughts_of_earlier_turns_stay_or_go(name: str, thought: str, generation_prompt: bool) -> None:
    expected = BEFORE + thought + "abc" + AFTER + OPEN * generation_prompt
    assert rendered(named(name), TALK, generation_prompt) == expected


@pytest.mark.parametrize("name", ["qwen3_with_thinking", "qwen3_without_thinking"])
def test_the_assistants_last_turn_keeps_its_thoughts_also_when_the_user_speaks_after_it(name: str) -> None:
    first = rendered(named(name), TALK[:4], True)
    assert first == BEFORE + TALK[2]["content"] + "<|im_end|>\n<|im_start|>user\ned<|im_end|>\n" + OPEN
    assert rendered(named(name), TALK[1:2], True) == "<|im_start|>user\ncab<|im_end|>\n" + OPEN


def test_a_file_or_the_tokenizers_own(tmp_path: Path) -> None:
    path = tmp_path / "own.jinja"
    path.write_text("{% for message in messages %}<{{ message.content }}>{% endfor %}", encoding="utf-8")
    assert rendered(ChatTemplateConfig(source="file", name_or_path=str(path)), TALK[:2], True) == "<sort><cab>"
    assert chat_template(ChatTemplateConfig()) is None
    assert (
        load_tokenizer(Pretrained(str(MODEL)), ChatTemplateConfig()).chat_template
        == (MODEL / "chat_template.jinja").read_text()
    )


def faulty(folder: Path, kind: str) -> str:
    path = folder / "template"
    if kind == "folder":
        path.mkdir()
    elif kind == "large":
        path.write_bytes(b"x" * ((1 << 20) + 1))
    elif kind == "latin":
        path.write_bytes(b"\xe4")
    return str(path)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("missing", "cannot be read .*No such file"),
        ("folder", "no regular file"),
        ("large", "1048577 bytes; expected at most 1048576"),
        ("latin", "cannot be read .*utf-8"),
    ],
)
def test_faulty_files_are_named_before_anything_is_queued(tmp_path: Path, kind: str, message: str) -> None:
    name = faulty(tmp_path, kind)
    with pytest.raises(ConfigError, match="generator.chat_template.name_or_path: .*" + message):
        chat_template(ChatTemplateConfig(source="file", name_or_path=name))
    data = tmp_path / "rows.jsonl"
    data.write_text("{}")
    config = Config.from_dict(
        {
            "data": {"train_data": [str(data)]},
            "trainer": {"policy": {"model": {"path": str(MODEL)}}, "eval_interval": 0},
            "generator": {"chat_template": {"source": "file", "name_or_path": name}},
        }
    )
    with pytest.raises(DataError, match="generator.chat_template.name_or_path: .*" + message):
        check_files(config)


@pytest.mark.parametrize(("text", "line"), [("\n{% for %}", 2), ("{{ messages | nothing }}", 1), ("{% if x %}", 1)])
def test_a_template_that_is_no_jinja(tmp_path: Path, text: str, line: int) -> None:
    path = tmp_path / "own.jinja"
    path.write_text(text)
    with pytest.raises(ConfigError, match=f"name_or_path: {path}, line {line}: "):
        load_tokenizer(Pretrained(str(MODEL)), ChatTemplateConfig(source="file", name_or_path=str(path)))


def test_names_that_are_none() -> None:
    with pytest.raises(ConfigError, match=r"generator\.chat_template\.name_or_path: .*null"):
        chat_template(ChatTemplateConfig(source="file", name_or_path="a\0b"))
    with pytest.raises(
        ConfigError, match='no template "qwen3"; expected one of openvla, qwen3_with_thinking, qwen3_without_'
    ):
        chat_template(named("qwen3"))


def test_prompts_are_counted_without_torch() -> None:
    """As the controller does it; what needs torch afterwards has it. Nothing is said of models that transformers does not know, such as OpenVLA."""
    code = """
import sys
from hpcrl.config.sections.generator import ChatTemplateConfig
from hpcrl.config.sections.model import Pretrained
from hpcrl.data.chat.count import token_counter
from hpcrl.data.tokenizer import load_tokenizer, without_torch
from hpcrl.types import Prompt
with without_torch():
    load_tokenizer(Pretrained(sys.argv[2]), ChatTemplateConfig())
    count = token_counter(Pretrained(sys.argv[1]), ChatTemplateConfig(), {})
print(count(Prompt("0", [{"role": "user", "content": "sort: cba"}], "sort_letters")), "torch" in sys.modules)
import torch
print(torch.ones(2).sum().item())
"""
    models = [str(MODEL), str(CONFIGS / "reach_vla" / "model")]
    done = subprocess.run([sys.executable, "-c", code, *models], capture_output=True, text=True, check=True)
    ids = ChatTurns(load_tokenizer(Pretrained(str(MODEL)), ChatTemplateConfig()), {}).prompt_ids(
        [{"role": "user", "content": "sort: cba"}]
    )
    assert (done.stdout, done.stderr) == (f"{len(ids)} False\n2.0\n", "")


def test_a_model_that_is_not_there_is_named_with_its_setting(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=rf"trainer.policy.model.path: the tokenizer of {tmp_path}/none cannot be loaded"
    ):
        load_tokenizer(Pretrained(str(tmp_path / "none")), ChatTemplateConfig())


def test_a_byte_order_mark_is_no_part_of_a_template(tmp_path: Path) -> None:
    file = tmp_path / "t.jinja"
    file.write_bytes(b"\xef\xbb\xbf{{ messages[0].content }}\r\n")
    assert chat_template(ChatTemplateConfig(source="file", name_or_path=str(file))) == "{{ messages[0].content }}\n"
