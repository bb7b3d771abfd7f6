"""Evaluations read from what they left, and compared prompt by prompt, as `hpcrl compare` and `hpcrl rescore` do."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from hpcrl.cli.main import main
from hpcrl.config import Config
from hpcrl.controller.evaluation import begin_evaluation
from hpcrl.errors import DataError, RunError
from hpcrl.observe.conclude import write_summary
from hpcrl.observe.eval_report import report, summary
from hpcrl.observe.evaluations import Evaluation, compared
from hpcrl.rundir.commit import read_json, write_text
from hpcrl.rundir.eval_dumps import dumped_samples
from hpcrl.rundir.layout import Run
from hpcrl.rundir.records import append_text
from tests.paths import ROOT

WORDS = ["cab", "fed", "ihg", "lkj"]


def asked(word: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"sort: {word}"}]


def line(row: int, sample: int, word: str, response: Any, score: Any, **others: Any) -> str:
    parts = [
        {"by": "prompt", "text": word, "tokens": 5},
        {"by": "policy", "text": str(response), "tokens": len(response) + 1},
    ]
    value = {
        "prompt": asked(word), "data_source": "letters", "response": response, "score": score, "stop_reason": "stop",
        "env_metrics": {}, "group_id": f"e000001-{row:08d}", "sample": sample, "parts": parts, **others,
    }  # fmt: skip
    return json.dumps(value) + "\n"


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """A run with words as validation data, of which version 0 sorts none, and version 9 all but the first, with two samples each."""
    data = tmp_path / "words.jsonl"
    rows = [
        {"prompt": asked(word), "data_source": "letters", "reward_spec": {"ground_truth": "".join(sorted(word))}}
        for word in ["zzzzzzz", *WORDS]
    ]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = Config.from_dict(
        {
            "data": {"train_data": [str(data)], "val_data": [str(data)]},
            "trainer": {"policy": {"model": {"path": "/models/first"}}},
            "environment": {"env_class": "sort_letters"},
            "generator": {"eval_n_samples_per_prompt": 2, "eval_sampling_params": {"temperature": 1.0}},
        }
    )
    run = Run(tmp_path / "runs" / "letters" / "words")
    write_text(run.config, config.to_toml())
    for version in (0, 9):
        for row, word in enumerate(WORDS):
            right = "".join(sorted(word)) if version and row else word
            score = 1.0 if version and row else 0.0
            append_text(run.eval_dump(version, row % 2), "".join(line(row, at, word, right, score) for at in (0, 1)))
    return run


def said(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    assert main([*words]) == code
    captured = capsys.readouterr()
    return captured.out + captured.err


def test_two_versions_of_a_run(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    root = ["--root", str(run.path.parent.parent)]
    shown = said(capsys, "compare", *root, "words@0", "words@9")
    (head, score, *_) = shown.splitlines()
    assert head.split() == ["prompts", "words@0", "words@9", "difference,", "95", "%", "p", "better", "same", "worse"]
    assert score.split()[:5] == ["all", "score", "4", "0", "0.75"]
    assert score.split()[-3:] == ["3", "1", "0"]
    back = said(capsys, "compare", *root, "words", "words@0")
    assert "-0.75" in back
    assert "fell most:\n  1 -> 0  e000001-00000001  sort: fed" in back
    found = json.loads(said(capsys, "compare", *root, "words@0", "words", "--json"))
    assert (found["before"]["version"], found["after"]["version"]) == (0, 9)
    assert found["metrics"]["eval/letters/pass_at_2"]["mean"] == 0.75
    refused = said(capsys, "compare", *root, "words@0", "words@8", code=5)
    assert "no samples of an evaluation of version 8; there are those of 0, 9" in refused
    assert "expected RUN@VERSION" in said(capsys, "compare", *root, "words@last", "words", code=5)


def test_an_evaluation_that_goes_on_is_read_only_by_name(run: Run) -> None:
    append_text(run.eval_dump(12, 0), line(0, 0, "x", "x", 1.0))
    begin_evaluation(run, 12, 1)
    assert dumped_samples(run, None)[0] == Evaluation.read(run).version == 9
    assert len(dumped_samples(run, 12)[1]) == 1
    write_summary(run, 12, {})
    assert dumped_samples(run, None)[0] == 12
    for version in (0, 9, 12):
        run.eval_summary(version).unlink(missing_ok=True)
        begin_evaluation(run, version, 1)
    with pytest.raises(
        RunError, match=r"has no evaluation that is over; name a version to read what there is: 0, 9, 12"
    ):
        dumped_samples(run, None)


def test_prompts_that_one_of_them_lacks(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    for row, word in enumerate(["fed", "fed", "new"]):
        append_text(run.eval_dump(12, 0), line(row, 0, word, word, 0.5))
    shown = said(capsys, "compare", f"{run.path}@9", f"{run.path}@12")
    assert shown.splitlines()[1].split()[:5] == ["all", "score", "1", "1", "0.5"]
    assert "3 prompts are in words@9 only" in shown
    assert "2 prompts are in words@12 only" in shown
    append_text(run.eval_dump(13, 0), line(0, 0, "other", "", 0.0))
    with pytest.raises(DataError, match="have no prompt in common"):
        compared(Evaluation.read(run, 9), Evaluation.read(run, 13), 1.0)


def test_prompts_whose_samples_failed_are_in_no_difference(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    """Of four, one failed whole and one in one of two samples."""
    for row, word in enumerate(WORDS):
        for at in (0, 1):
            reason = "failed" if row == 3 or (row, at) == (2, 1) else "stop"
            append_text(run.eval_dump(12, 0), line(row, at, word, word, float(reason == "stop"), stop_reason=reason))
    shown = said(capsys, "compare", f"{run.path}@0", f"{run.path}@12").splitlines()
    assert shown[1].split()[:5] == ["all", "score", "3", "0", "1"]
    assert next(one for one in shown if "pass@2" in one).split()[:8] == [
        "all",
        "pass@2",
        "(reward",
        "≥",
        "1)",
        "2",
        "0",
        "1",
    ]
    assert "fell most" not in "".join(shown)


def test_a_line_that_is_none(run: Run) -> None:
    append_text(run.eval_dump(9, 0), line(5, 0, "x", "x", "much"))
    with pytest.raises(DataError, match=r"0.jsonl, line 5 is no sample of an evaluation: .*score is 'much'"):
        dumped_samples(run, 9)


def test_the_same_rewards_give_the_same_scores(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also where the dataset has rows that were too long; then with other rewards, and beside what was."""
    again, other = tmp_path / "again", tmp_path / "other"
    results = json.loads(said(capsys, "rescore", f"{run.path}@9", "-o", str(again), "--json"))
    assert results["metrics"]["eval/all/avg_score"] == 0.75
    assert results["too_long"] == 1
    assert read_json(again / "results.json") == results
    assert [one["score"] for one in dumped_samples(Run(again), None)[1].values()] == [0, 0, 1, 1, 1, 1, 1, 1]
    assert f"Scores of the samples of {run.path}, version 9" in (again / "report.md").read_text()
    rewards = "environment.eval_reward_function={ overlong = 1 }"
    shown = said(
        capsys, "rescore", str(again), rewards, "-o", str(other), "generator.eval_sampling_params.max_generate_length=4",
        "environment.overlong_reward.buffer_length=2",
    )  # fmt: skip
    assert f"hpcrl compare {again}@9 {other}" in shown
    scores = {one["score"] for one in dumped_samples(Run(other), 9)[1].values()}
    assert scores <= {-1.0, -0.5, 0.0}
    assert "worse" in said(capsys, "compare", str(again), str(other))
    assert "exists; move it away" in said(capsys, "rescore", str(again), "-o", str(other), code=5)


def test_data_that_were_changed_since(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = tmp_path / "words.jsonl"
    rows = data.read_text().splitlines(keepends=True)
    data.write_text("".join(rows[:2] + rows[3:]))
    told = said(capsys, "rescore", str(run.path), code=4)
    assert "group e000001-00000001 of the evaluation has a prompt that the data have no more" in told


def test_rewards_of_ones_own_that_fail(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rewards_of_mine.py").write_text(
        "def first(response, environment):\n    return {'c': 2.0}.get(response.text[0], 0.0)\n"
        "def picky(response, environment):\n    return 1.0 / (response.text[0] != 'd')\n"
    )
    ours = [f"python_path=['{tmp_path}']", "environment.eval_reward_function={ 'rewards_of_mine:%s' = 0.5 }"]
    found = said(capsys, "rescore", str(run.path), "--json", ours[0], ours[1] % "first")
    assert json.loads(found)["metrics"]["eval/all/avg_score"] == 0.25
    failed = json.loads(
        said(capsys, "rescore", str(run.path), "--json", ours[0], ours[1] % "picky", "-o", str(tmp_path / "picky"))
    )
    assert len(failed["failures"]) == 2
    assert "ZeroDivisionError" in failed["failures"][0]
    assert failed["stop_reasons"]["all"] == {"failed": 2, "stop": 6}
    assert failed["metrics"]["eval/all/avg_score"] == 0.5, "of the six that have a score"


def test_several_turns_are_played_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """guess_number answers each guess; what was said after it is done would count for nothing."""
    data = tmp_path / "numbers.jsonl"
    row = json.loads((ROOT / "hpcrl" / "envs" / "examples" / "guess_number.jsonl").read_text().splitlines()[0])
    data.write_text(json.dumps(row) + "\n")
    config = Config.from_dict(
        {
            "data": {"train_data": [str(data)], "val_data": [str(data)]},
            "trainer": {"policy": {"model": {"path": "/models/first"}}},
            "generator": {"max_turns": 4},
        }
    )
    run = Run(tmp_path / "runs" / "guess" / "one")
    write_text(run.config, config.to_toml())
    number = str(row["reward_spec"]["ground_truth"])
    for version, guesses in ((0, ["1", "2"]), (1, ["1", f"<answer>{number}</answer>"])):
        conversation: Sequence[dict[str, str]] = [
            message
            for guess in guesses
            for message in ({"role": "assistant", "content": guess}, {"role": "user", "content": "other"})
        ]
        text = line(0, 0, "x", conversation, -5.0, prompt=row["prompt"], data_source=row["data_source"])
        append_text(run.eval_dump(version, 0), text)
    scores = [
        json.loads(said(capsys, "rescore", f"{run.path}@{version}", "-o", str(tmp_path / str(version)), "--json"))["metrics"]["eval/all/avg_score"]
        for version in (0, 1)
    ]  # fmt: skip
    assert scores[0] < scores[1]
    assert -5.0 not in scores


def test_report() -> None:
    results = {
        "subject": "run s000040", "model": "a|b", "version": 40, "seed": 7, "data": ["math.jsonl"], "n_samples": 2, "seconds": 3.2, "solved": "reward ≥ 1",
        "too_long": 1, "failures": ["a <script>"], "sampling": {"temperature": 1.0, "stop": None},
        "prompts": {"all": 3, "math": 2, "code": 1},
        "metrics": {
            f"eval/{source}/{name}": value
            for source in ("all", "math", "code")
            for name, value in (("avg_score", 0.5), ("pass_at_1", 0.5), ("pass_at_2", 0.75), ("generate/avg_num_tokens", 12.0))
        },
        "errors": {"eval/all/avg_score": 0.1, "eval/math/pass_at_2": 0.05},
        "stop_reasons": {"all": {"length": 1, "stop": 5}, "math": {"stop": 4}, "code": {"length": 1, "stop": 1}},
    }  # fmt: skip
    lines = summary(results)
    assert lines[0] == "run s000040: 3 prompts, 2 samples each, 3 s, 1 were longer than trainer.max_prompt_length"
    assert lines[1].split() == [
        "source",
        "prompts",
        "score",
        "pass@1",
        "(reward",
        "≥",
        "1)",
        "pass@2",
        "(reward",
        "≥",
        "1)",
        "tokens",
    ]
    assert lines[2].split() == ["math", "2", "0.5", "0.5", "0.75", "±0.098", "12"]
    assert lines[4].split() == ["all", "3", "0.5", "±0.2", "0.5", "0.75", "12"]
    text = report(results)
    assert "| code | 50.0% | 50.0% |" in text
    assert "| model | a\\|b |" in text
    assert "- a &lt;script>" in text
    assert "| stop |" not in text.partition("## What was asked for")[2]
