"""Where an attempt ended in the middle of an evaluation."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hpcrl.controller.service import Service
from hpcrl.data.cache_files import EvalRow, append_rows, turn_file
from hpcrl.data.weight_files import PublishedWeights
from hpcrl.observe.scores import scores
from hpcrl.rundir.checked_lines import append_lines
from hpcrl.rundir.commit import committed_directory, discard, read_json
from hpcrl.rundir.layout import Run
from hpcrl.types import Work
from tests.controller.test_api import finish, make_run, prompts
from tests.controller.test_service import SCHEDULE, do, service, train_to
from tests.observe.test_scores import group

ROWS = 6


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return make_run(tmp_path / "project" / "run")


def evaluating(run: Run, attempt: int, rows: int = ROWS, last: str = "p", **changes: Any) -> Service:
    """Return an attempt's controller.

    Args:
        rows: of the validation set.
        last: name of the last of them.
    """
    settings = {
        "eval_before_train": True,
        "eval_interval": 2,
        "eval_settings": "greedily",
        "colocated": True,
        **changes,
    }
    *validation, end = prompts(rows)
    return Service(
        run, attempt, replace(SCHEDULE, **settings), prompts(9), [*validation, replace(end, extras={"answer": last})]
    )


def publish(run: Run, version: int, tensor: str) -> str:
    """Commit a version as the trainer does, and return its digest."""
    with committed_directory(
        run.weights_of(version), 1, version=version, tensors={"w": tensor}, probe=None
    ) as directory:
        (directory / "w").touch()
    return PublishedWeights.read(run.weights_of(version)).digest


def reward_of(item: Work) -> float:
    return float(item.group_id[-1]) - 2.0


def evaluate(run: Run, controller: Service, version: int, weights: str, count: int, replica: int = 0) -> list[Work]:
    """Finish so many rows as a worker does; return all that it claimed."""
    work = [item for item in controller.claim(f"rollout-{replica}", version, 99) if item.kind == "eval"]
    for item in work[:count]:
        meta = finish(run, item, version, reward_of(item))
        append_rows(run.eval_rows(version, replica), [EvalRow(meta, item.asked, weights)])
        assert controller.complete([meta]) == {}
    return work


def interrupted(run: Run, version: int, count: int) -> str:
    """Play an attempt that ends when so many rows of an evaluation are finished; return the digest of the weights."""
    weights = publish(run, version, "1") if version else ""
    if version:
        first = service(run, eval_interval=0)
        first.start(0)
        train_to(run, first, 1, version)
    controller = evaluating(run, 1)
    controller.start(version)
    evaluate(run, controller, version, weights, count)
    return weights


def all_but_the_summary(run: Run) -> None:
    """Play two attempts, of which the second one ends before the last row is reported."""
    interrupted(run, 0, ROWS - 1)
    second = evaluating(run, 2)
    second.start(0)
    (item,) = [item for item in second.claim("rollout-1", 0, 9) if item.kind == "eval"]
    append_rows(run.eval_rows(0, 1), [EvalRow(finish(run, item, 0, reward_of(item)), item.asked, "")])


def rows_of(work: list[Work]) -> list[int]:
    return [int(item.group_id[-1]) for item in work]


@pytest.mark.parametrize("version", [0, 2])
@pytest.mark.parametrize("count", [1, 4, ROWS - 1])
def test_rows_that_an_earlier_attempt_has_finished_are_not_asked_for_again(run: Run, version: int, count: int) -> None:
    weights = interrupted(run, version, count)
    left = turn_file(run, "rollout-0", f"e{version:06d}-00000000", version)
    append_lines(left, [{"versions": [version]}])  # of a row whose worker was killed before it could remove them
    again = evaluating(run, 2)
    again.start(version)
    assert not left.exists()
    assert again.status()["eval_open"] == ROWS - count
    assert rows_of(evaluate(run, again, version, weights, ROWS, replica=1)) == list(range(count, ROWS))
    expected = scores([group("letters", [row - 2.0], [2]) for row in range(ROWS)], 1.0)
    assert read_json(run.eval_summary(version)) == expected
    assert not list(run.evals.glob("*/*.rows")), "they have served"
    assert again.status()["eval_open"] == 0


def test_an_evaluation_of_which_only_the_summary_is_missing(run: Run) -> None:
    all_but_the_summary(run)
    again = evaluating(run, 3)
    again.start(0)
    summary = read_json(run.eval_summary(0))
    assert summary is not None
    assert summary["eval/all/avg_score"] == pytest.approx(0.5)
    work = again.claim("rollout-0", 0, 9)
    assert {item.kind for item in work} == {"train"}
    do(run, again, work, 0)
    assert again.batch(1) is not None


def test_rows_whose_lines_are_damaged_are_generated_again(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    interrupted(run, 0, 5)
    path = run.eval_rows(0, 0)
    whole = path.read_bytes()
    _, *lines = whole.split(b"\n")
    assert len(lines) == 5
    changed = lines[1].replace(b'"rewards": [-1.0]', b'"rewards": [1.0]')
    assert changed != lines[1]
    path.write_bytes(b"\n".join([b"", lines[0], changed, lines[2], lines[3] + lines[3], lines[4][:-1]]))
    again = evaluating(run, 2)
    again.start(0)
    assert "2 of its lines are damaged" in capsys.readouterr().out
    assert rows_of(evaluate(run, again, 0, "", ROWS, replica=1)) == [1, 3, 4, 5]
    summary = read_json(run.eval_summary(0))
    assert summary is not None
    assert summary["eval/all/avg_score"] == pytest.approx(0.5)


@pytest.mark.parametrize(
    "changes",
    [{"eval_settings": "at 0.7"}, {"seed": 2}, {"eval_n_samples": 2}, {"rows": ROWS - 2}, {"last": "q"}],
    ids=str,
)
def test_rows_of_other_settings_or_prompts_do_not_count(run: Run, changes: dict[str, Any]) -> None:
    all_but_the_summary(run)
    run.eval_dump(0, 0).write_text("what was said then")
    again = evaluating(run, 3, **changes)
    again.start(0)
    assert not run.eval_dump(0, 0).exists()
    assert len(evaluate(run, again, 0, "", 0)) == changes.get("rows", ROWS)


def test_a_prompt_that_was_added_is_evaluated_with_the_others_kept(run: Run) -> None:
    interrupted(run, 0, 4)
    again = evaluating(run, 2, rows=ROWS + 1)
    again.start(0)
    assert rows_of(evaluate(run, again, 0, "", 0)) == [4, 5, 6]


@pytest.mark.parametrize("weights", ["others", "none"])
def test_rows_of_other_weights_do_not_count(run: Run, weights: str) -> None:
    """A version may be trained once more; its weights are compared, not its number."""
    interrupted(run, 2, 4)
    discard(run.weights_of(2))
    if weights == "others":
        publish(run, 2, "2")
    again = evaluating(run, 2)
    again.start(2)
    assert len(evaluate(run, again, 2, "", 0)) == ROWS


def test_rows_of_versions_that_are_trained_anew_do_not_count(run: Run) -> None:
    weights = interrupted(run, 2, 4)
    again = evaluating(run, 2, eval_before_train=False)
    again.start(1)
    train_to(run, again, 2, 2)
    assert len(evaluate(run, again, 2, weights, 0)) == ROWS
