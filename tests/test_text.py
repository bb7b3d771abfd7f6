"""What data, users' exceptions and files of a run may say never steers a terminal."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from hpcrl.cli.env import _show
from hpcrl.cli.main import main
from hpcrl.observe.eval_report import summary
from hpcrl.rundir.commit import write_json
from hpcrl.rundir.layout import Run
from hpcrl.rundir.ledger import open_attempt, report_outcome
from hpcrl.runtime.process_status import StatusWriter
from hpcrl.text import log_lines, metric_name, one_line, printable
from tests.cli.test_damaged import made

EVIL = "\x1b]0;owned\x07\x1b[2J\r\x9b31m\x7f\u202e\ud800"
STEERS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e\ud800]")


def test_what_is_shown_of_it() -> None:
    assert printable("a\tb\nc é 漢 😀") == "a\tb\nc é 漢 😀"
    assert printable("\x1b[1m\x9b\u2066\ud800") == r"\u001b[1m\u009b\u2066\ud800"
    assert one_line("a\nb\x00") == r"a b\u0000"
    assert json.loads(printable(json.dumps([EVIL], ensure_ascii=False))) == [EVIL]
    assert not STEERS.search(printable(EVIL))
    assert metric_name(EVIL + "a/b c") == "_" * 2 + "0;owned__" + "_2J__31m___a/b c"


def test_a_log_keeps_its_text_without_its_colours() -> None:
    assert log_lines("\x1b[36m(EngineCore pid=7)\x1b[0;0m ok") == ["(EngineCore pid=7) ok"]
    assert log_lines("") == [""]
    assert log_lines("10%\r20%\x1b[K\r\x1b[2Jx") == ["10%", r"20%\u001b[K", r"\u001b[2Jx"]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """A run whose files say what its data, its environment and its processes said."""
    run = made(tmp_path, "evil")
    open_attempt(run, "local-2", ["n1"])
    StatusWriter(run, "trainer", 2).write(f"step {EVIL}")
    StatusWriter(run, "rollout-0", 2).write(f"failed: {EVIL}")
    report_outcome(run, 2, "failed", f"trainer-0: ValueError: {EVIL}\nfake", "agent-0")
    run.logs(2).mkdir(parents=True)
    run.log(2, "trainer-0").write_bytes(f"reading {EVIL}\n".encode(errors="replace"))
    parts = [{"by": "policy", "text": f"said {EVIL}\nmore", "tokens": 2}]
    line = {
        "prompt": [], "group_id": f"g{EVIL}", "data_source": EVIL, "score": 1.0, "stop_reason": EVIL, "env_metrics": {EVIL: 1.0}, "parts": parts,
    }  # fmt: skip
    run.eval_dump(0, 0).parent.mkdir(parents=True)
    run.eval_dump(0, 0).write_text(json.dumps(line) + "\n")
    return run


@pytest.mark.parametrize(
    "words",
    ["status", "status evil", "status --json", "follow evil", "logs evil", "samples evil --eval", "samples evil --eval --json", "cancel evil"],
)  # fmt: skip
def test_no_command_passes_it_on(run: Run, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    main([*words.split(), "--root", str(run.path.parent.parent)])
    printed = capsys.readouterr()
    text = printed.out + printed.err
    assert r"\u001b" in text
    assert not STEERS.search(text)
    if words == "status":
        assert len(text.splitlines()) == 1


def test_an_error_that_quotes_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = tmp_path / "rows.json"
    write_json(rows, [{"prompt": [f"a {EVIL}"]}])
    assert main(["env", "try", "math", "--data", str(rows)]) == 4
    assert not STEERS.search(capsys.readouterr().err)


def test_conversations_and_tables(capsys: pytest.CaptureFixture[str]) -> None:
    _show([{"role": f"user{EVIL}", "content": f"two\nlines {EVIL}"}])
    text = capsys.readouterr().out
    assert "two\nlines" in text
    assert not STEERS.search(text)
    columns = ("avg_score", "generate/avg_num_tokens")
    results = {
        "subject": "m", "prompts": {"x": 1, "all": 1}, "metrics": {f"eval/{source}/{name}": 1.0 for source in ("x", "all") for name in columns}, "too_long": 0,
        "n_samples": 1, "failures": [EVIL], "seconds": 1.0, "errors": {}, "solved": "reward ≥ 1",
    }  # fmt: skip
    assert not any(STEERS.search(line) for line in summary(results))
