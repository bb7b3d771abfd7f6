"""What is said of a model's tokenizer and chat template before anything is queued: at submit, by `hpcrl doctor` and by `hpcrl data check`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpcrl.cli.main import main
from hpcrl.config import Config
from hpcrl.config.sections.generator import ChatTemplateConfig
from hpcrl.config.sections.model import Pretrained
from hpcrl.errors import DataError
from hpcrl.launch.doctor.tokenizer import of_tokenizer
from hpcrl.launch.submit.preflight import check_files
from tests.data.chat.forms import CHATML, LLAMA3, R1, TOOLS, made, write_model

NO_END = "{% for m in messages %}### {{ m.role }}:\n{{ m.content }}\n\n{% endfor %}"
PAST = "{{ messages | length }}" + CHATML


def model(place: Path, template: str, eos: str = "<|im_end|>") -> Path:
    return write_model(place / "model", made("bytes", template, eos), eos_token_id=3)


def submitted(place: Path, template: str, prompt: object = "What is 1 + 2?") -> list[str]:
    """Return the warnings of a run of reinforcement learning, as submit has them."""
    rows = place / "rows.jsonl"
    rows.write_text((json.dumps({"prompt": prompt, "reward_spec": {"ground_truth": "3"}}) + "\n") * 8)
    tree = {
        "data": {"train_data": [str(rows)]},
        "trainer": {"policy": {"model": {"path": str(model(place, template))}}, "eval_interval": 0, "train_batch_size": 4, "policy_mini_batch_size": 4},
        "environment": {"env_class": "gsm8k"},
    }  # fmt: skip
    return check_files(Config.from_dict(tree))


@pytest.mark.parametrize(
    ("template", "level", "found"),
    [
        (TOOLS, "ok", "it writes turns, thoughts, tool calls, system message"),
        (CHATML, "warning", "tool calls: it leaves out the tool call add"),
        (R1, "warning", "thoughts: it leaves out content 'let me add'"),
        (PAST, "warning", "turns: the chat template writes what comes before a message of assistant in another way"),
        (NO_END, "warning", "no token that ends it"),
        (LLAMA3, "warning", "<|im_end|>, <|eot_id|> (chat template: <|eot_id|>; config.json: <|im_end|>; tokenizer: <|im_end|>)"),
        ("", "error", "the tokenizer has none"),
        ("{{ raise_exception('never') }}", "warning", "it takes no question with an answer"),
    ],
)  # fmt: skip
def test_what_a_template_makes_of_conversations(tmp_path: Path, template: str, level: str, found: str) -> None:
    place = write_model(tmp_path, made("bytes", template, "<|im_end|>"))
    place.joinpath("config.json").write_text(
        json.dumps(
            {"model_type": "llama", "eos_token_id": made("bytes", "", "<s>").convert_tokens_to_ids("<|im_end|>")}
        )
    )
    findings = list(of_tokenizer(Pretrained(str(place)), ChatTemplateConfig(), {}))
    assert any(one.level == level and found in one.found for one in findings), findings
    assert all(one.remedy for one in findings if one.level != "ok")
    assert findings[0].found.endswith("the ids of tokenizer.json, and texts come back")


def test_the_command_looks_at_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", str(model(tmp_path, R1))]) == 0
    said = capsys.readouterr().out
    assert "rewards see </s>, </think>, <s>, <think>" in said
    assert "-> rows with thoughts need another template (generator.chat_template)" in said
    assert main(["doctor", str(model(tmp_path / "none", ""))]) == 1
    own = tmp_path / "own.jinja"
    own.write_text(CHATML)
    settings = ["generator.chat_template.source=file", f"generator.chat_template.name_or_path={own}"]
    assert main(["doctor", str(tmp_path / "none" / "model"), *settings]) == 0


def test_submit_names_the_setting_and_says_what_is_used(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"generator.chat_template: the tokenizer has none; set generator.chat_template \(source"
    ):
        submitted(tmp_path, "")
    assert any("no token that ends it" in one for one in submitted(tmp_path, NO_END))
    told = [one for one in submitted(tmp_path, LLAMA3) if one.startswith("end of a turn")]
    assert len(told) == 1
    assert "all of them end a turn; <|eot_id|> is trained" in told[0]
    assert not any(one.startswith(("end of", "tokenizer")) for one in submitted(tmp_path, CHATML))


def test_submit_writes_the_first_prompts(tmp_path: Path) -> None:
    with pytest.raises(
        DataError,
        match=r"data.train_data: .*rows.jsonl, row uid 0, of rows: the chat template refuses its messages: TypeError",
    ):
        submitted(tmp_path, "{{ messages[0].content + 1 }}")
    talk = [{"role": "user", "content": "x"}, {"role": "tool", "content": "y"}]
    with pytest.raises(DataError, match="row uid 0, of rows: the chat template refuses its messages: no tool"):
        submitted(
            tmp_path,
            "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tool') }}{% endif %}{% endfor %}"
            + CHATML,
            prompt=talk,
        )
