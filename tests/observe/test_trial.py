"""Trials: their statistics, their looks, and who stops which run, on files as runs leave them."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks.trials import ALIKE, Case, rates
from hpcrl.cli.main import main
from hpcrl.errors import DataError, RunError
from hpcrl.observe.conclude import write_summary
from hpcrl.observe.report import page, project
from hpcrl.observe.report.page import project_page
from hpcrl.observe.report.project import project_of
from hpcrl.observe.trial.judge import beaten, due_look, take_looks
from hpcrl.observe.trial.plan import Trial, TrialFolder, find_trial, trial_of, write_plan
from hpcrl.observe.trial.report import describe_trial
from hpcrl.observe.trial.statistics import difference, level_of_look, seeds_needed, spent, t_quantile
from hpcrl.observe.trial.watch import main as watch
from hpcrl.observe.trial.watch import trial_process
from hpcrl.rundir.commit import write_text
from hpcrl.rundir.layout import Run
from hpcrl.rundir.ledger import open_attempt, read_outcome, report_outcome
from hpcrl.rundir.records import append_text
from hpcrl.runtime.signals import stop_asked, stop_cause
from tests.paths import CONFIGS, QUICKSTART

PROMPTS = 50
GOOD, BAD = (0.8, 0.82, 0.78), (0.3, 0.32, 0.28)


@pytest.mark.parametrize(
    ("level", "freedom", "expected"),
    [(0.05, 1, 12.706), (0.05, 2, 4.303), (0.01, 3, 5.841), (0.05, 4, 2.776), (0.001, 8, 5.041), (0.05, 30, 2.042)],
)
def test_quantiles_are_those_of_the_tables(level: float, freedom: int, expected: float) -> None:
    assert t_quantile(level, freedom) == pytest.approx(expected, abs=6e-4)


def test_the_interval_is_that_of_welch() -> None:
    first, second = [0.1, 0.2, 0.3], [0.5, 0.6, 0.9]
    found = difference(first, second, 0.05, 0.0)
    # variances 0.01 and 0.043333; error sqrt(0.0177778); degrees of freedom 2.88, rounded down to 2
    assert found.mean == pytest.approx(7 / 15)
    assert found.high - found.mean == pytest.approx(4.30265 * 0.0177778**0.5, rel=1e-4)
    alone = difference([0.1], second, 0.05, 0.0)
    assert (alone.low, alone.high) == (float("-inf"), float("inf"))


def test_runs_without_any_spread_are_no_proof_where_one_sample_makes_the_difference() -> None:
    assert difference([7 / 8] * 3, [1.0] * 3, 0.02, 1 / 8).low < 0
    assert difference([0.1] * 3, [0.9] * 3, 0.02, 1 / 256).low > 0


def test_looks_spend_the_error_once() -> None:
    shares = [0.0, 0.25, 0.5, 0.75, 1.0]
    levels = [level_of_look(share, before, 3) for before, share in pairwise(shares)]
    assert sum(3 * level for level in levels) == pytest.approx(spent(1.0)) == 0.05
    assert levels == sorted(levels)


def test_more_seeds_are_asked_for_where_runs_differ_more() -> None:
    few, many = (seeds_needed(deviation, 0.02, 0.025) for deviation in (0.01, 0.04))
    assert few is not None
    assert many is not None
    assert 2 < few < 10 < many < 100
    assert seeds_needed(10.0, 0.02, 0.025) is None


@pytest.mark.parametrize("name", ["same recipe twice", "a run in five collapses", "8 prompts", "four recipes alike"])
def test_verdicts_are_seldom_false(name: str) -> None:
    assert rates(ALIKE[name], 200)["false"] <= 0.05


@pytest.mark.slow
@pytest.mark.parametrize("name", ALIKE)
def test_of_thousands_of_trials_one_in_twenty_is_false_at_most(name: str) -> None:
    assert rates(ALIKE[name], 4000, seed=1)["false"] <= 0.05


def test_a_much_worse_recipe_is_found_and_stopped_early() -> None:
    found = rates(Case((0.0, 0.3), 5), 60)
    assert found["found"] == 1.0
    assert found["steps"] < 0.7
    assert rates(Case((0.0, 0.3), 5, at_once=2), 60)["steps"] < 0.9


def evaluated(run: Run, step: int, score: float, prompts: int = PROMPTS) -> None:
    """Write an evaluation in which the first prompts are solved, as many as make this score."""
    lines = [
        {
            "prompt": [{"role": "user", "content": f"task {row}"}], "data_source": "tasks", "response": "x", "score": float(row < round(score * prompts)),
            "stop_reason": "stop", "env_metrics": {}, "group_id": f"e{step:06d}-{row:08d}", "sample": 0, "parts": [],
        }
        for row in range(prompts)
    ]  # fmt: skip
    run.evals_of(step).mkdir(parents=True)
    append_text(run.eval_dump(step, 0), "".join(json.dumps(line) + "\n" for line in lines))
    write_summary(run, step, {"eval/all/avg_score": score})


@pytest.fixture
def folder(tmp_path: Path) -> TrialFolder:
    """A trial of two recipes with three runs each, of 20 steps, evaluated every 5."""
    trial = Trial({name: [f"t.{name}-{at}" for at in range(3)] for name in ("good", "bad")}, 20, 5, 0.02)
    path = tmp_path / "p" / ".slurm" / "t"
    path.mkdir(parents=True)
    write_plan(path, trial)
    for name in (name for runs in trial.recipes.values() for name in runs):
        run = Run(tmp_path / "p" / name)
        write_text(run.config, QUICKSTART.read_text())
        run.slurm.symlink_to("../.slurm/t")
    return TrialFolder(path)


def scored(folder: TrialFolder, step: int, **scores: tuple[float, ...]) -> None:
    for recipe, own in scores.items():
        for at, score in enumerate(own):
            evaluated(folder.run(f"t.{recipe}-{at}"), step, score)


def test_the_runs_stop_their_own_recipe_and_no_other(folder: TrialFolder, capsys: pytest.CaptureFixture[str]) -> None:
    bad, good = folder.run("t.bad-1"), folder.run("t.good-1")
    assert trial_of(bad) == folder
    assert trial_process(bad, 1)["trial"][1:] == [str(bad.path), "1"]
    scored(folder, 5, good=GOOD, bad=BAD)
    for run in (good, bad):
        open_attempt(run, "1", ["n1"])
    for run in (good, bad):
        watch(str(run.path), 1, lambda: False)
    assert stop_asked(good, 1) is None
    assert stop_asked(bad, 1) == "cancelled"
    cause = "trial t: recipe bad cannot win any more (look 1, at step 5)"
    assert stop_cause(bad, 1) == cause
    for name in ("t.bad-0", "t.bad-2"):  # they wait in the queue
        waiting = read_outcome(folder.run(name))
        assert waiting is not None
        assert (waiting.attempt, waiting.kind, waiting.message, waiting.source) == (
            0,
            "cancelled",
            cause,
            "hpcrl trial",
        )
    assert not any(read_outcome(run) for run in (bad, good)), "a run that has begun is asked, and looks for itself"
    root = str(folder.project.parent)
    capsys.readouterr()
    assert main(["trial", "status", "t", "--root", root, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["state"] == "decided"
    assert found["recipes"]["bad"]["stopped"] == 5
    assert found["pairs"][0]["verdict"] == "worse"
    assert found["pairs"][0]["difference"] == pytest.approx(0.5)
    low, high = found["pairs"][0]["interval"]
    assert 0 < low < 0.5 < high
    assert main(["trial", "status", "p/t", "--root", root]) == 0
    printed = capsys.readouterr().out
    assert "good is the best of 2 recipes" in printed
    assert "bad is worse than good, and was stopped: +0.5000 [" in printed


def test_a_run_of_a_stopped_recipe_goes_no_further_after_a_preemption(folder: TrialFolder) -> None:
    begun, interrupted, failed = (folder.run(f"t.bad-{at}") for at in range(3))
    for run in (begun, interrupted, failed):
        open_attempt(run, "1", ["n1"])
    report_outcome(interrupted, 1, "interrupted", "preempted", "agent")
    report_outcome(failed, 1, "failed", "an error", "trainer")
    scored(folder, 5, good=GOOD, bad=BAD)
    watch(str(folder.run("t.good-0").path), 1, lambda: False)
    assert read_outcome(begun) is None
    assert [outcome.kind for run in (interrupted, failed) if (outcome := read_outcome(run))] == ["cancelled", "failed"]


def test_a_run_looks_at_all_others_only_where_something_is_new(
    folder: TrialFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    run, lines, turn = folder.run("t.good-0"), list[int](), iter(range(5))

    def again() -> bool:
        lines.append(capsys.readouterr().out.count("no look: "))
        at = next(turn)
        if at == 1:
            folder.plan.write_text("{")  # from now on each look prints a line
        if at == 3:
            evaluated(run, 5, 0.5)
        return at < 4

    watch(str(run.path), 1, again)
    assert lines == [0, 0, 0, 0, 1]
    assert "no look: " in capsys.readouterr().out, "at the end it looks in any case"


def test_a_run_that_has_trained_to_its_end_is_not_stopped(folder: TrialFolder) -> None:
    scored(folder, 5, good=GOOD, bad=BAD)
    evaluated(folder.run("t.bad-1"), 20, 0.3)
    watch(str(folder.run("t.bad-1").path), 1, lambda: False)
    assert stop_asked(folder.run("t.bad-1"), 1) is None


def test_a_run_that_waits_only_to_save_its_end_is_not_cancelled(folder: TrialFolder) -> None:
    scored(folder, 5, good=GOOD, bad=BAD)
    interrupted = folder.run("t.bad-1")
    evaluated(interrupted, 20, 0.3)
    open_attempt(interrupted, "1", ["n1"])
    report_outcome(interrupted, 1, "interrupted", "preempted", "agent")
    watch(str(folder.run("t.good-0").path), 1, lambda: False)
    assert [one.kind for name in ("t.bad-1", "t.bad-0") if (one := read_outcome(folder.run(name)))] == [
        "interrupted",
        "cancelled",
    ]


def test_a_run_that_was_removed_stays_removed(folder: TrialFolder) -> None:
    scored(folder, 5, good=GOOD, bad=BAD)
    take_looks(folder)
    removed = folder.run("t.bad-0")
    shutil.rmtree(removed.path)
    watch(str(folder.run("t.bad-1").path), 1, lambda: False)
    assert not removed.path.exists()
    assert stop_asked(folder.run("t.bad-1"), 1) == "cancelled"


def test_a_look_is_taken_once_and_follows_from_its_record(folder: TrialFolder) -> None:
    scored(folder, 5, good=GOOD, bad=BAD)
    (look,) = take_looks(folder)
    assert folder.write(replace(look, stopped=["good"])) == look
    assert take_looks(folder) == [look] == folder.read_looks()
    assert look.stopped == beaten(folder.read(), look) == ["bad"]
    assert (look.share, look.before, look.prompts, look.resolution) == (0.25, 0.0, PROMPTS, 1 / PROMPTS)


def test_who_catches_up_is_not_stopped(folder: TrialFolder) -> None:
    scored(folder, 5, good=(0.8, 0.8, 0.8), bad=(0.2, 0.2, 0.2))
    scored(folder, 10, good=(0.8, 0.8, 0.8), bad=(0.5, 0.5, 0.5))
    assert take_looks(folder)[0].step == 10
    assert folder.read_looks()[0].stopped == []


def test_recipes_that_are_alike_cannot_be_told_apart(folder: TrialFolder) -> None:
    for step in (5, 10, 15, 20):
        scored(folder, step, good=(0.6, 0.7, 0.8), bad=(0.62, 0.68, 0.82))
        looks = take_looks(folder)
    assert [look.share for look in looks] == [0.25, 0.5, 0.75, 1.0]
    found = describe_trial(folder)
    assert found["state"] == "decided"
    assert [one["verdict"] for one in found["pairs"]] == ["cannot tell"]
    assert re.fullmatch(
        r"cannot tell bad from good: \+0\.0067 \[-.*\] at step 20, 3 and 3 runs; 0\.02 would be found with about \d+ seeds of each",
        found["verdict"][0],
    )


def test_the_last_look_waits_for_runs_and_not_for_failed_ones(folder: TrialFolder) -> None:
    trial, names = folder.read(), [name for runs in folder.read().recipes.values() for name in runs]
    done = {name: {20} for name in names} | {"t.bad-2": {5}}
    assert due_look(trial, [], done, set[str]().__contains__) is None
    assert due_look(trial, [], done, {"t.bad-2"}.__contains__) == (20, 1.0)
    scored(folder, 20, good=GOOD, bad=BAD[:2])
    late = folder.run("t.bad-2")
    for attempt in (1, 2):
        open_attempt(late, str(attempt), ["n1"])
        assert take_looks(folder) == [], "it trains, though its first attempt was cancelled"
        report_outcome(late, attempt, "cancelled", "by hand", "hpcrl cancel")
    (look,) = take_looks(folder)
    assert look.last
    assert [len(look.of(name)) for name in ("good", "bad")] == [3, 2]


def test_runs_that_failed_are_compared_as_far_as_they_came_until_they_are_resumed(
    folder: TrialFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["trial", "status", "t", "--root", str(folder.project.parent)]
    names = [name for runs in folder.read().recipes.values() for name in runs]
    for name in names:
        report_outcome(folder.run(name), 1, "cancelled", "by hand", "hpcrl cancel")
    assert main(words) == 0
    assert "no run has the score of step 20" in capsys.readouterr().out
    for name in names:  # as where trainer.epochs end before trainer.max_steps
        evaluated(folder.run(name), 12, 0.8 if "good" in name else 0.3)
    evaluated(folder.run("t.good-0"), 20, 0.8)
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert "bad is worse than good: +0.5000 [" in printed
    assert "t: unfinished" in printed
    assert "not decided: runs ended before step 20, and resumed ones may change this" in printed
    assert folder.read_looks() == []
    for name in names[1:]:
        evaluated(folder.run(name), 20, 0.6)
    (look,) = take_looks(folder)
    assert (look.step, folder.read_looks()) == (20, [look])


def test_other_prompts_are_not_compared(folder: TrialFolder) -> None:
    scored(folder, 5, good=GOOD, bad=BAD)
    path = folder.run("t.bad-0").eval_dump(5, 0)
    path.write_text(path.read_text().replace("task ", "another "))
    with pytest.raises(DataError, match="no prompt in common"):
        take_looks(folder)
    path.write_text(path.read_text().replace("another 1", "task 1"))
    assert take_looks(folder)[0].prompts == 11


@pytest.mark.parametrize(
    "content", ["[1]", '{"recipes": {"a": ["x"], "b": ["../../x"]}, "steps": 1, "interval": 1, "effect": 0.1}']
)
def test_a_damaged_plan_is_named(folder: TrialFolder, content: str) -> None:
    folder.plan.write_text(content)
    with pytest.raises(RunError, match=r"trial\.json"):
        folder.read()
    with pytest.raises(RunError, match="no trial 'other'"):
        find_trial("other", folder.project.parent)


_LOOK = {
    "number": 1, "time": 1.0, "step": 5, "share": 0.25, "before": 0.0, "scores": {"good": {"t.good-0": 0.5}}, "earlier": {}, "earlier_step": 0,
    "resolution": 0.1, "prompts": 5, "stopped": [],
}  # fmt: skip


@pytest.mark.parametrize(
    "content",
    [
        *("", "[1]", "{}", '{"number": 1}'),
        *(
            json.dumps(_LOOK | change)
            for change in (
                {"scores": {"good": 1}},
                {"scores": {"good": {"t.good-0": float("nan")}}},
                {"earlier": {"good": 10**400}},
                {"before": 0.5},
                {"share": 2.0},
            )
        ),
    ],
)
def test_a_damaged_look_is_named(folder: TrialFolder, content: str, capsys: pytest.CaptureFixture[str]) -> None:
    write_text(folder.looks / "000001.json", content)
    assert main(["trial", "status", "t", "--root", str(folder.project.parent)]) == 5
    assert "looks/000001.json" in capsys.readouterr().err


def test_recipes_of_a_trial_are_checked_before_anything_is_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, text in (
        ("a", ""),
        ("lr", "[trainer.policy.optimizer_config]\nlr = 1e-5\n"),
        ("n", "[generator]\neval_n_samples_per_prompt = 4\n"),
    ):
        (tmp_path / f"{name}.toml").write_text(text)
    base = ["--base", str(CONFIGS / "quickstart.toml"), "--dry-run", "--name", "t", f"slurm.root={tmp_path / 'runs'}"]
    files = {name: str(tmp_path / f"{name}.toml") for name in ("a", "lr", "n")}
    assert main(["trial", files["a"], files["a"], files["lr"], "--seeds", "2", *base]) == 0
    printed = capsys.readouterr().out
    runs = [line.rpartition("/")[2] for line in printed.splitlines() if "/runs/" in line]
    assert runs[0] == "t.0-a-seed-1"
    assert runs[1] == "t.1-a-2-seed-2  trainer.seed=2"
    assert runs[5] == "t.5-lr-seed-6  trainer.seed=6 trainer.policy.optimizer_config.lr=1e-05"
    for words, message in (
        ([files["a"]], "two recipes at least"),
        ([files["a"], files["n"]], "generator.eval_n_samples_per_prompt: 1 -> 4"),
        ([files["a"], files["lr"], "--effect", "0"], "above 0"),
        ([files["a"], files["lr"], "trainer.eval_interval=0"], "trainer.eval_interval above 0"),
        (
            [files["a"], files["lr"], "generator.inference_engine.seed=1"],
            "generator.inference_engine.seed would give all",
        ),
        ([files["a"], files["lr"], "data.shuffle_seed=1"], "data.shuffle_seed would give all"),
    ):
        assert main(["trial", *words, *base]) == 2
        assert message in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_the_page_of_a_project_has_runs_trials_and_links_and_needs_no_torch(
    folder: TrialFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    scored(folder, 5, good=GOOD, bad=BAD)
    other = folder.run("t.bad-0")
    other.config.write_text(other.config.read_text().replace("lr = 2e-4", 'lr = 1e-5 # "</script>'))
    (folder.project / "broken").mkdir()
    Run(folder.project / "broken").config.write_text("</script>[")
    now = time.time()
    for path in folder.project.rglob("*"):
        os.utime(path, (now - 600, now - 600), follow_symlinks=False)
    code = "import sys; from hpcrl.cli.main import main; code = main(sys.argv[1:]); sys.exit(code or len({'torch', 'transformers'} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code, "report", "--project", "p", "-o", "page.html"], cwd=tmp_path, capture_output=True, text=True,
        env={**os.environ, "HPCRL_ROOT": str(folder.project.parent)}, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "7 runs, 1 trials" in done.stdout
    monkeypatch.chdir(tmp_path)
    reports = [tmp_path / "page" / "p" / f"t.good-{at}.html" for at in range(2)]
    words = ["report", "--project", "p", "--root", str(folder.project.parent), "-o", "page.html"]

    def kept() -> list[bool]:
        files = [path.stat().st_ino for path in reports]
        assert main(words) == 0
        return [path.stat().st_ino == file for path, file in zip(reports, files, strict=True)]

    assert kept() == [True, True], "a run in which nothing changed got a new report"
    for named in (folder.project, folder.project.parent):
        assert main(["report", "--project", str(named), "-o", "page.html"]) == 0
        assert "7 runs, 1 trials" in capsys.readouterr().out
    evaluated(folder.run("t.good-0"), 10, 0.8)
    os.utime(folder.run("t.good-0").config, (now + 3600, now + 3600))  # this test may take its time
    assert kept() == kept() == [False, True], "what has just changed may have ended, which no file says"
    source = Path(page.__file__)
    source.chmod(source.stat().st_mode)  # as if it had just been installed
    project._installed.cache_clear()
    assert kept() == [False, False], "hpcrl is another one"
    text = (tmp_path / "page.html").read_text()
    found = json.loads(text.partition('id="data">')[2].partition("</script>")[0])
    rows = {row["name"]: row for row in found["rows"]}
    assert rows["t.bad-0"]["unlike"] == ["trainer.policy.optimizer_config.lr=1e-05"]
    assert (rows["t.good-0"]["unlike"], rows["t.good-0"]["score"]) == ([], 0.8)
    assert (tmp_path / rows["t.good-0"]["report"]).is_file()
    assert rows["broken"]["report"] is None
    assert found["trials"][0]["recipes"]["bad"]["stopped"] == 5


def test_a_run_that_diverged_is_on_the_page_too(folder: TrialFolder) -> None:
    run = folder.run("t.bad-0")
    run.evals_of(5).mkdir(parents=True)
    write_summary(run, 5, {"eval/all/avg_score": float("nan")})
    content = project_of("p", [run], [], lambda _: None)
    assert (content["rows"][0]["score"], content["rows"][0]["error"]) == (None, "")
    assert '"name":"t.bad-0"' in project_page(content)
