"""`hpcrl status` and `hpcrl tensorboard` as a user types them, on run directories."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from hpcrl.cli._common import short_name
from hpcrl.cli.main import main
from hpcrl.launch.manage.registry import all_runs
from hpcrl.observe.metrics import MetricsWriter
from hpcrl.rundir.alerts import AlertEvent, Event, append_event
from hpcrl.rundir.commit import begin, finish, write_json, write_text
from hpcrl.rundir.layout import Run
from hpcrl.rundir.ledger import open_attempt, report_outcome
from hpcrl.runtime.process_status import StatusWriter
from tests.paths import QUICKSTART


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A sweep of eleven and a single run, all of them done on this machine."""
    for submission, names in (("s", [f"s.{number}-lr-{number}" for number in range(11)]), ("single", ["single"])):
        for name in names:
            run = Run(tmp_path / "p" / name)
            write_text(run.config, QUICKSTART.read_text())
            run.slurm.symlink_to(f"../.slurm/{submission}")
            record = {
                "executor": "local",
                "host": socket.gethostname(),
                "job_id": "1",
                "overrides": [],
                "submitted": 1.0,
            }
            write_json(run.submission, record)
            open_attempt(run, "local-1", ["n1"])
            report_outcome(run, 1, "done", "finished", "agent-0")
            with MetricsWriter(run, "trainer", 1, 0) as writer:
                writer.write(1, {"x": 1.0})
    return tmp_path


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(list(arguments)) == 0
    return capsys.readouterr().out


def test_status_of_all_of_a_sweep_and_of_one(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert len(said(capsys, "status", "--root", str(root)).splitlines()) == 12
    names = [line.split()[0] for line in said(capsys, "status", "s", "--root", str(root)).splitlines()]
    assert names == [f"p/s.{number}-lr-{number}" for number in range(11)]
    one = said(capsys, "status", "s.3", "--root", str(root))
    assert one.startswith("s.3-lr-3: done: finished\n")
    assert "found in the queue" not in one
    (value,) = json.loads(said(capsys, "status", "single", "--json", "--root", str(root)))
    assert (value["run"], value["state"], value["over"], value["attempt"]) == ("single", "done", True, 1)
    assert value["outcome"]["kind"] == "done"
    assert len(json.loads(said(capsys, "status", "--json", "--root", str(root)))) == 12


def test_tensorboard_of_runs_and_sweeps(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    single = Run(root / "p" / "single")
    command, page, ssh = said(capsys, "tensorboard", "single", "--root", str(root)).splitlines()
    assert command.endswith(f"tensorboard --logdir {single.tensorboard} --host 127.0.0.1 --port 6006")
    assert page == "opens at: http://127.0.0.1:6006/#custom_scalars"
    assert ssh == f"from your own machine: ssh -L 6006:127.0.0.1:6006 {socket.gethostname()}"
    (made,) = single.events.iterdir()
    said(capsys, "tensorboard", "single", "--root", str(root))
    assert list(single.events.iterdir()) == [made], "nothing is rebuilt unless told"
    said(capsys, "tensorboard", "single", "--rebuild", "--root", str(root))
    assert made.stat().st_size == 0 or not made.exists()

    command = said(capsys, "tensorboard", "s", "single", "--port", "7000", "--root", str(root)).splitlines()[0]
    spec = command.split()[2].split(",")
    assert spec == [f"{root}/p/{name}/tensorboard" for name in [*(f"s.{i}-lr-{i}" for i in range(11)), "single"]]
    assert main(["tensorboard", "nope", "--root", str(root)]) == 5


def slurm_run(root: Path, name: str, *, done: bool) -> Run:
    run = Run(root / "p" / name)
    write_text(run.config, '[trainer]\nresume_mode = "latest"\n')
    run.slurm.symlink_to(f"../.slurm/{name}")
    write_json(
        run.submission, {"executor": "slurm", "host": "login", "job_id": "7_0", "overrides": [], "submitted": 1.0}
    )
    open_attempt(run, "7_0.0", ["n1"])
    if done:
        report_outcome(run, 1, "done", "finished", "agent-0")
    return run


def test_where_there_is_no_cluster(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is over is over whatever Slurm can say; its complaint, of several lines, stands in one with each of the others."""
    slurm_run(root, "over", done=True)
    slurm_run(root, "open", done=False)
    squeue = tmp_path / "bin" / "squeue"
    write_text(
        squeue, "#!/bin/sh\nprintf 'squeue: error: no\\nsqueue: error: configuration\\n' >&2; exit 1\n", mode=0o700
    )
    monkeypatch.setenv("PATH", f"{squeue.parent}:/usr/bin:/bin")
    lines = said(capsys, "status", "--root", str(root)).splitlines()
    assert len(lines) == 14
    (over,) = [line for line in lines if line.startswith("p/over ")]
    assert over.split() == ["p/over", "done", "job", "7_0", "finished"]
    (opened,) = [line for line in lines if line.startswith("p/open ")]
    assert "squeue: squeue: error: no squeue: error: configuration; the state of the jobs is unknown" in opened


@pytest.mark.parametrize("command", ["cancel", "resume", "requeue"])
def test_what_cannot_be_done_with_any_run_of_a_sweep(
    root: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, "s", "--root", str(root)]) == 5
    printed = capsys.readouterr()
    assert printed.out == ""
    names = {line.partition(" is ")[0].partition(" runs on ")[0] for line in printed.err.splitlines()}
    assert names == {f"hpcrl: s.{number}-lr-{number}" for number in range(11)}


def test_a_command_that_there_is_not(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["sumbit", "configs/quickstart.toml"])
    assert ended.value.code == 2
    assert capsys.readouterr().err.endswith("hpcrl: error: there is no command 'sumbit'; did you mean submit?\n")


def test_status_tells_what_was_learned(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = Run(root / "p" / "single")
    with MetricsWriter(run, "controller", 1, 0) as writer:
        for step in (1, 2):
            writer.write(step, {"reward/avg_raw_reward": step / 4})
    for version, score in ((0, 0.25), (2, 0.75)):
        write_json(run.evals_of(version) / "summary.json", {"eval/all/avg_score": score})
    with MetricsWriter(run, "trainer", 1, 0) as writer:
        writer.write(2, {"timing/step": 3.0})
    (line,) = [line for line in said(capsys, "status", "--root", str(root)).splitlines() if "p/single" in line]
    assert "2 steps · reward 0.250 → 0.500 · eval 0.250 → 0.750 · " in line
    assert "finished" not in line
    one = said(capsys, "status", "single", "--root", str(root))
    assert one.startswith("single: done: 2 steps · reward")
    assert "\n  eval score  0.250 (step 0) → 0.750 (step 2)\n" in one
    (value,) = json.loads(said(capsys, "status", "single", "--json", "--root", str(root)))
    assert value["summary"]["reward_last"] == [2, 0.5]
    followed = said(capsys, "follow", "single", "--root", str(root))
    assert "0.250 (step 0) → 0.750 (step 2)" in followed


def test_alerts_mark_a_run(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Those that last mark it in the list; the run itself, and its report, have all of them."""
    run = Run(root / "p" / "single")
    events: list[tuple[str, Event, int]] = [
        ("kl", "raised", 3),
        ("kl", "told", 3),
        ("low", "raised", 4),
        ("low", "cleared", 6),
    ]
    for alert, event, step in events:
        append_event(run, AlertEvent(alert, event, step, 1, 1.0, f"{alert} is odd\x1b"))
    marked = [line for line in said(capsys, "status", "--root", str(root)).splitlines() if "!" in line]
    assert len(marked) == 1
    assert marked[0].startswith("p/single ")
    assert marked[0].endswith(" · ! kl at step 3: kl is odd\\u001b")
    one = said(capsys, "status", "single", "--root", str(root)).splitlines()
    assert [line for line in one if " alert " in line] == [
        "  alert       kl at step 3: kl is odd\\u001b",
        "  alert       low at step 4: low is odd\\u001b; over at step 6",
    ]
    (value,) = json.loads(said(capsys, "status", "single", "--json", "--root", str(root)))
    assert [(alert["alert"], alert["step"], alert["cleared"]) for alert in value["alerts"]] == [
        ("kl", 3, None),
        ("low", 4, 6),
    ]
    report = said(capsys, "report", "single", "-o", str(tmp_path / "r.html"), "--root", str(root))
    assert "p/single  bad   alert: kl at step 3: kl is odd" in report
    assert "p/single  look  alert: low at step 4: low is odd" in report
    main(["verify", "single", "--root", str(root)])
    assert "\n  alerts: ok\n" in capsys.readouterr().out
    run.alerts.write_text(run.alerts.read_text().replace('"step": 3', '"step": 2', 1))
    main(["verify", "single", "--root", str(root)])
    assert f"{run.alerts}: 1 of its lines" in capsys.readouterr().out


def test_following_runs_that_are_all_over_lists_them(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert len(said(capsys, "status", "--follow", "--root", str(root)).splitlines()) == 12
    followed = said(capsys, "status", "single", "--follow", "--root", str(root))
    assert "│ outcome │ done: finished" in followed


def test_a_path_with_spaces_is_quoted_in_commands(tmp_path: Path) -> None:
    assert short_name(Run(tmp_path / "my runs" / "p" / "one")) == f"'{tmp_path}/my runs/p/one'"


@pytest.mark.parametrize(
    ("words", "told"), [(["submit", "x.toml", "--locall"], "--local"), (["status", "--jsn"], "--json")]
)
def test_a_misspelt_option_is_told_with_the_nearest(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(words)
    assert f"there is no option {words[-1]}; did you mean {told}?" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["submission.json", "outcomes/1.json", "config.toml", "attempts.jsonl"])
@pytest.mark.parametrize("content", ["", "{", "[1]"])
def test_one_damaged_file_does_not_hide_the_other_runs(
    root: Path, capsys: pytest.CaptureFixture[str], name: str, content: str
) -> None:
    (root / "p" / "single" / name).write_text(content)
    lines = said(capsys, "status", "--root", str(root)).splitlines()
    assert len(lines) == 12
    assert sum("done" in line for line in lines) >= 11
    assert len(json.loads(said(capsys, "status", "--json", "--root", str(root)))) == 12
    said(capsys, "status", "single", "--root", str(root))


def test_a_list_tells_which_run_lost_the_list_of_its_attempts(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By the outcome or by the logs of the attempt that the list would have next; checkpoints are looked through for one run alone."""
    for name, left in (("s.1-lr-1", "outcomes"), ("s.2-lr-2", "logs"), ("s.3-lr-3", "checkpoints")):
        run = Run(root / "p" / name)
        if left != "outcomes":
            run.outcome(1).unlink()
        if left == "logs":
            run.logs(1).mkdir(parents=True)
        if left == "checkpoints":
            begin(run.checkpoint(1), 1)
            finish(run.checkpoint(1), 1, step=1)
        run.attempts.unlink()
    lines = said(capsys, "status", "--root", str(root)).splitlines()
    assert len(lines) == 12
    assert [line.split()[0] for line in lines if "does not know attempt" in line] == ["p/s.1-lr-1", "p/s.2-lr-2"]
    assert "does not know attempt 1" in said(capsys, "status", "s.3-lr-3", "--root", str(root))


def test_a_list_reads_little_of_each_run(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """However long their metrics and process statuses are: 1,000 runs are listed in a second."""
    for run in all_runs(root):
        with run.metrics_of("trainer").open("a") as file:
            for step in range(1, 4001):
                record = {"attempt": 1, "step": step, "time": 1.0, "metrics": {"timing/step": 1.0, "x" * 100: 0.5}}
                file.write(json.dumps(record) + "\n")
        StatusWriter(run, "trainer", 1).write("finished")
    said(capsys, "status", "--root", str(root))
    before = reads()
    listed = said(capsys, "status", "--root", str(root))
    calls, size = (after - earlier for after, earlier in zip(reads(), before, strict=True))
    assert listed.count("4000 steps") == 12
    assert calls / 12 < 20
    assert size / 12 < 100_000


def reads() -> tuple[int, int]:
    """Return how often this process has read, and how many bytes."""
    facts = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(facts["syscr"]), int(facts["rchar"])
