"""`hpcrl rm` and the sizes of `hpcrl status`, on run directories."""

from __future__ import annotations

import json
import os
import pwd
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hpcrl.cli.main import main
from hpcrl.errors import RunError
from hpcrl.launch.manage.registry import all_runs
from hpcrl.launch.manage.remove import sizes_of
from hpcrl.rundir.commit import begin, finish, write_text
from hpcrl.rundir.layout import Run
from hpcrl.rundir.ledger import open_attempt, report_outcome
from hpcrl.rundir.starts import note
from tests.cli.test_status import root as root
from tests.paths import QUICKSTART, ROOT


def fill(run: Run) -> None:
    note(run, {"attempt": 1, "from": None})
    write_text(begin(run.checkpoint(3), 1) / "weights", "x" * 3000)
    finish(run.checkpoint(3), 1, step=3)
    write_text(run.export(3) / "model.safetensors", "x" * 2000)
    write_text(run.log(1, "trainer-0"), "log")


def test_a_run_is_removed_after_a_question(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = Run(root / "p" / "single")
    fill(run)
    write_text(run.bench / "model" / "weights", "x")
    other = Run(root / "other" / "single").bench / "nodes.json"
    write_text(other, "{}")
    assert main(["rm", "single", "--root", str(root)]) == RunError.exit_code, "no terminal to ask on"
    assert "--yes removes it" in capsys.readouterr().err
    assert run.config.exists()
    assert main(["rm", "single", "--yes", "--root", str(root)]) == 0
    assert capsys.readouterr().out.startswith(f"removed {run.path}, ")
    assert not list((root / "p").glob("*single*"))
    assert [path for path in (root / ".bench").rglob("*") if path.is_file()] == [other]
    assert len(all_runs(root)) == 11, "others stay"


def test_metrics_stay_on_wish(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = Run(root / "p" / "single")
    fill(run)
    (before,) = json.loads(_out(capsys, "status", "single", "--json", "--size", "--root", str(root)))
    assert before["bytes"]["checkpoints"] > 3000
    assert " · " in _out(capsys, "status", "s", "--size", "--root", str(root))
    assert "exports 2.0 KiB" in _out(capsys, "status", "single", "--size", "--root", str(root))
    shown = _out(capsys, "status", "single", "--root", str(root))
    _out(capsys, "rm", "single", "--yes", "--keep", "metrics", "--root", str(root))
    assert list(run.exports.iterdir()) == []
    assert [path.name for path in run.checkpoints.iterdir()] == ["starts.jsonl"]
    assert run.log(1, "trainer-0").exists()
    assert _out(capsys, "status", "single", "--root", str(root)) == shown.replace("s000003", "none   ").replace(
        "none   \n", "none\n"
    )


def test_a_sweep_goes_with_the_files_of_its_submission(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = root / "p" / ".slurm" / "s"
    folder.mkdir(parents=True)
    _out(capsys, "rm", "s.3", "--yes", "--root", str(root))
    assert folder.exists(), "ten runs of it are left"
    _out(capsys, "rm", "s", "--yes", "--root", str(root))
    assert not folder.exists()
    assert [run.name for run in all_runs(root)] == ["single"]


def test_folders_below_other_roots_go_too(root: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    run, home = Run(root / "p" / "single"), tmp_path_factory.mktemp("scratch") / "p" / "single"
    for name in ("checkpoints", "exports"):
        (home / name).mkdir(parents=True)
        (run.path / name).symlink_to(home / name)
    (home / "run").symlink_to(run.path)
    fill(run)
    assert sizes_of(run)["checkpoints"] > 3000
    assert main(["rm", "single", "--yes", "--keep", "metrics", "--root", str(root)]) == 0
    assert [path.name for path in (home / "checkpoints").iterdir()] == ["starts.jsonl"]
    assert list((home / "exports").iterdir()) == []
    other = home.with_name("of-another")
    (other / "checkpoints").mkdir(parents=True)
    (other / "run").symlink_to(root / "p" / "s.1-lr-1")
    assert main(["rm", "single", "--yes", "--root", str(root)]) == 0
    assert sorted(path.name for path in home.parent.iterdir()) == ["of-another"]


def test_a_run_that_goes_on_stays(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = Run(root / "p" / "single")
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)", "submitit"])
    try:
        record = json.loads(run.submission.read_text())
        write_text(run.submission, json.dumps({**record, "job_id": str(child.pid)}))
        open_attempt(run, f"local-{child.pid}", ["n1"])
        assert main(["rm", "single", "--yes", "--root", str(root)]) == RunError.exit_code
        assert "`hpcrl cancel single` ends it first" in capsys.readouterr().err
        assert run.config.exists()
    finally:
        child.kill()
        child.wait()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to be somebody else")
def test_runs_of_others_are_not_hidden(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = Run(tmp_path / "runs" / "p" / "mine")
    write_text(run.config, "")
    run.path.chmod(0o700)
    for folder in (tmp_path, *tmp_path.parents[:3], tmp_path / "runs", run.path.parent):
        if folder != Path("/tmp"):
            folder.chmod(0o755)
    assert _out(capsys, "status", "--root", str(tmp_path / "runs")).startswith("p/mine ")
    os.seteuid(65534)  # what the command imports is there
    try:
        theirs = _out(capsys, "status", "--root", str(tmp_path / "runs"))
    finally:
        os.seteuid(0)
    assert theirs == f"no runs under {tmp_path / 'runs'}, but 1 that you may not read\n"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to be somebody else")
def test_runs_of_all_users(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As another user and as root: what may be read with its owner, the rest by owner; a project, a run and a whole home that are closed."""
    for user, uid, mode in (("ann", 65534, 0o755), ("bob", 1, 0o755), ("eve", 2, 0o700)):
        for name in ("open", "closed"):
            run = Run(tmp_path / user / "runs" / "p" / name)
            write_text(run.config, QUICKSTART.read_text())
            record = {"executor": "slurm", "host": "", "job_id": "7", "overrides": [], "submitted": 1.0}
            write_text(run.submission, json.dumps(record))
            open_attempt(run, "7.0", ["n1"])
            for path in (run.path, *run.path.rglob("*")):
                os.chown(path, uid, uid)
            run.path.chmod(0o755 if name == "open" else 0o700)
        os.chown(tmp_path / user, uid, uid)
        (tmp_path / user).chmod(mode)
    for folder in (tmp_path, *tmp_path.parents[:3]):
        if folder != Path("/tmp"):
            folder.chmod(0o755)
    asked = ["status", "--all-users", "--root", str(tmp_path / "*" / "runs")]
    report_outcome(Run(tmp_path / "ann" / "runs" / "p" / "open"), 1, "done", "finished", "agent-0")
    os.seteuid(65534)  # what the command imports is there
    try:
        theirs = _out(capsys, *asked).splitlines()
        listed = json.loads(_out(capsys, *asked, "--json"))
    finally:
        os.seteuid(0)
    daemon, nobody, eve = (pwd.getpwuid(uid).pw_name for uid in (1, 65534, 2))
    assert [line.split()[:2] for line in theirs[:3]] == [[daemon, "p/open"], [nobody, "p/closed"], [nobody, "p/open"]]
    assert "unknown" in theirs[0], "a job of another user that Slurm does not show is not lost"
    assert theirs[3:] == [f"{user:12} 1 directory that you may not read" for user in sorted((daemon, eve))]
    assert {(one["user"], one["run"]) for one in listed} == {(daemon, "open"), (nobody, "closed"), (nobody, "open")}
    everything = _out(capsys, *asked).splitlines()
    assert [line.split()[0] for line in everything] == sorted([daemon, eve, nobody] * 2)
    assert main(["status", "open", "--all-users"]) == 2


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to be somebody else")
def test_a_run_is_shared_as_the_page_for_administrators_says(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, run = (ROOT / "docs" / "administrators.md").read_text(), Run(root / "p" / "single")
    (commands,) = re.findall(r"^```\n(chgrp .*?)^```", page, re.MULTILINE | re.DOTALL)
    fill(run)
    write_text(run.token, "x", mode=0o600)
    write_text(run.slurm.resolve() / "own.py", "")
    for folder in (root, *root.parents[:3], run.path.parent):
        if folder != Path("/tmp"):
            folder.chmod(0o755)
    for folder in (run.path, run.slurm.resolve()):
        subprocess.run(["chmod", "-R", "go-rwx", str(folder)], check=True)
    script = commands.replace("GROUP", "65534").replace("RUN", "single")
    subprocess.run(["sh", "-e", "-c", script], cwd=run.path.parent, check=True)
    seen = subprocess.run(
        ["find", "-L", str(run.path), "-readable", "-type", "f"],
        user=65534,
        group=65534,
        extra_groups=[],
        capture_output=True,
        text=True,
    ).stdout.split()
    assert {str(run.config), str(run.slurm / "own.py"), str(run.log(1, "trainer-0"))} <= set(seen)
    assert str(run.token) not in seen
    assert (run.token.stat().st_mode & 0o777, run.token.parent.stat().st_mode & 0o050) == (0o600, 0)
    assert main(["status", "single", "--root", str(root)]) == 0
    assert capsys.readouterr().out.startswith("single: done")


def _out(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(list(words)) == 0
    return capsys.readouterr().out


def test_what_links_of_a_run_lead_to_stays(
    root: Path, tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a copy of somebody else's run, the links may lead to anything of this user's."""
    run, place = Run(root / "p" / "single"), tmp_path_factory.mktemp("home")
    files = [place / folder / "mine" for folder in ("papers/drafts", "weights", ".slurm/thesis")]
    for file in files:
        write_text(file, "x")
    fill(run)
    shutil.move(run.checkpoints, place / "of-run")
    for link, target in (("checkpoints", "papers"), ("weights", "weights"), ("slurm", ".slurm/thesis")):
        (run.path / link).unlink(missing_ok=True)
        (run.path / link).symlink_to(place / target)
    for kept in ("metrics", "last", "export"):
        assert main(["rm", "single", "--yes", "--keep", kept, "--root", str(root)]) == RunError.exit_code
        assert (
            f"{run.checkpoints} leads to {place}/papers, which is not known to be of this run"
            in capsys.readouterr().err
        )
    assert main(["checkpoint", "rm", "single", "3", "--root", str(root)]) == RunError.exit_code
    assert sizes_of(run).keys().isdisjoint({"checkpoints", "papers"})
    run.checkpoints.unlink()
    _out(capsys, "rm", "single", "--yes", "--keep", "metrics", "--root", str(root))
    assert not run.weights.is_symlink(), "the link itself goes"
    _out(capsys, "rm", "single", "--yes", "--root", str(root))
    assert not list((root / "p").glob("*single*"))
    assert all(map(Path.exists, files))
