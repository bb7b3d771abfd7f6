"""Evaluation by a job of its own: what the controller leaves to it, and to which attempt scores belong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpcrl.controller.service import Service
from hpcrl.data.cache_files import EvalRow, append_rows
from hpcrl.observe.conclude import conclude_by_job, conclude_generated
from hpcrl.observe.metrics import MetricsReader, merged
from hpcrl.rundir.commit import discard, read_json
from hpcrl.rundir.evaluations import attempt_of_evaluation, begun_evaluations, note_generated, versions_of_element
from hpcrl.rundir.layout import Run
from tests.controller.test_api import finish, make_run
from tests.controller.test_beside import FIRST, begin, scores_of, train
from tests.controller.test_evaluation import publish
from tests.controller.test_service import service

JOB: dict[str, Any] = {"eval_by_job": True, "eval_before_train": True, "eval_interval": 2, "total_steps": 4}
SCORER = "evaluation-0"


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return make_run(tmp_path / "project" / "run")


def trained(run: Run, first: int, last: int, controller: Service) -> None:
    for step in range(first, last + 1):
        train(run, controller, step)
        publish(run, step, str(step))
        controller.published(step)
        controller.seen(FIRST, step, "waiting")


def conclude(run: Run, version: int, attempt: int, reward: float = 1.0) -> bool:
    """Score three rows as the job does."""
    scorer = service(run, 9, eval_interval=2, eval_before_train=True)
    groups = [finish(run, item, version, reward) for item in scorer.work.eval_work(version)]
    return conclude_by_job(run, version, attempt, SCORER, groups, 1.0)


def test_workers_get_no_rows_and_the_run_does_not_wait(run: Run) -> None:
    controller = begin(run, FIRST, **JOB)
    trained(run, 1, 4, controller)
    assert controller.stop == "finished"
    assert begun_evaluations(run) == [0, 2, 4]
    assert scores_of(run) == []
    assert conclude(run, 2, 1, 0.5)
    summary = read_json(run.eval_summary(2))
    assert summary
    assert summary.items() <= merged(run)[2].items()
    assert begun_evaluations(run) == [0, 4]


def test_the_next_attempt_takes_over_what_waits_and_evaluates_what_it_trains_again(run: Run) -> None:
    """Version 4 of the first attempt is given up. Scores that a job writes for it after that are void."""
    trained(run, 1, 4, begin(run, FIRST, **JOB))
    assert conclude(run, 4, 1, 0.25)
    again = service(run, 2, **JOB)
    again.start(2)
    assert begun_evaluations(run) == [0, 2]
    assert [attempt_of_evaluation(run, version) for version in (0, 2, 4)] == [2, 2, None]
    assert scores_of(run) == []
    assert not conclude(run, 4, 1, 0.25)
    assert not conclude(run, 2, 1), "its rows are finished, and count for the attempt that has it now"
    assert conclude(run, 2, 2)
    again.seen(FIRST, 2, "waiting")
    trained(run, 3, 4, again)
    assert begun_evaluations(run) == [0, 4]
    assert conclude(run, 4, 2, 1.0)
    assert {step: merged(run)[step]["eval/all/avg_score"] for step in scores_of(run)} == {2: 1.0, 4: 1.0}
    assert again.stop == "finished"


def test_scores_of_the_job_make_no_other_records_void(run: Run) -> None:
    """It writes at a step before that of its attempt, which has not continued there."""
    trained(run, 1, 3, begin(run, FIRST, **JOB))
    service(run, 2, **JOB).start(3)
    reader = MetricsReader(run)
    before = {record.step for record in reader.poll()[0]}
    assert conclude(run, 0, 2)
    assert conclude(run, 2, 2)
    records, outdated = reader.poll()
    assert ([record.step for record in records], outdated) == ([0, 2], False)
    assert {record.step for record in MetricsReader(run).poll()[0]} == {*before, 0, 2}


def test_an_evaluation_whose_weights_are_gone_is_given_up(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    trained(run, 1, 3, begin(run, FIRST, **JOB))
    discard(run.weights_of(2))
    service(run, 2, **JOB).start(3)
    assert begun_evaluations(run) == [0], "engines begin with that version"
    assert "version 2 is not evaluated any more" in capsys.readouterr().out


def test_elements_take_the_evaluations_in_turn(run: Run) -> None:
    controller = begin(run, FIRST, **{**JOB, "total_steps": 5})
    trained(run, 1, 5, controller)
    assert [versions_of_element(run, element, 2, 2) for element in (0, 1)] == [[0, 4], [2, 5]]


def test_versions_are_concluded_in_order(run: Run) -> None:
    """Trackers and alerts take no value at a step before the last one."""
    trained(run, 1, 4, begin(run, FIRST, **JOB))
    scorer = service(run, 9, eval_interval=2, eval_before_train=True)

    def generate(version: int) -> None:
        groups = [(item, finish(run, item, version, 1.0)) for item in scorer.work.eval_work(version)]
        append_rows(run.eval_rows(version, 5), [EvalRow(group, item.asked, "") for item, group in groups])
        note_generated(run, version, 1)

    generate(2)
    assert conclude_generated(run, SCORER, 1.0) == [], "version 0 waits"
    generate(0)
    assert conclude_generated(run, SCORER, 1.0) == [0, 2]
    assert scores_of(run) == [0, 2]
    assert not run.eval_job(2).exists()


def test_a_damaged_version_holds_no_later_one_back(run: Run) -> None:
    trained(run, 1, 4, begin(run, FIRST, **JOB))
    assert conclude(run, 2, 1)
    scorer = service(run, 9, eval_interval=2, eval_before_train=True)
    rows = [EvalRow(finish(run, item, 4, 1.0), item.asked, "") for item in scorer.work.eval_work(4)]
    append_rows(run.eval_rows(4, 5), rows)
    note_generated(run, 4, 1)
    note_generated(run, 0, 1, damaged=True)
    assert conclude_generated(run, SCORER, 1.0) == [4], "damaged ones hold nothing back"
