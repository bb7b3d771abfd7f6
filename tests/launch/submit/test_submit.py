"""`hpcrl submit` as a user types it: what is wrong is said before anything is queued, and nothing is half-made."""

from __future__ import annotations

import io
import os
import resource
import shutil
import struct
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from importlib.util import cache_from_source
from pathlib import Path

import pytest

from hpcrl.cli.main import main
from hpcrl.launch.submit import submit
from hpcrl.launch.submit.submit import commit_of
from tests.paths import CONFIGS

QUICKSTART = str(CONFIGS / "quickstart.toml")
HPCRL = str(Path(sys.executable).parent / "hpcrl")


def hpcrl(*arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [HPCRL, *arguments],
        cwd=cwd,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def called(*arguments: str | Path, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Call the command line in this process: one of its own imports transformers first, for two CPU seconds."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.chdir(cwd)
        for name, value in environment.items():
            patch.setenv(name, value)
        try:
            code = main([*map(str, arguments)])
        except SystemExit as ended:  # argparse's
            code = ended.code
    assert isinstance(code, int)
    return subprocess.CompletedProcess(arguments, code, out.getvalue(), err.getvalue())


def nothing_made(cwd: Path) -> bool:
    return not list(cwd.glob("runs/*/*")) and not list(cwd.glob("runs/*/.slurm/*"))


@pytest.mark.parametrize(
    ("settings", "code", "expected"),
    [
        (["trainer.learning_rate=1"], 2, "learning_rate"),
        (["trainer.policy.optimizer_config.lrr=1"], 2, "did you mean trainer.policy.optimizer_config.lr?"),
        (
            ["trainer.policy.model.path=/nowhere/model"],
            4,
            "trainer.policy.model.path: /nowhere/model is no model directory",
        ),
        (['data.train_data=["/nowhere.parquet"]'], 4, "data.train_data: no file /nowhere.parquet"),
        (["trainer.resume_mode=from_path", "trainer.resume_path=/nowhere/s000001"], 4, "no committed checkpoint"),
        (["--sweep", "slurm.time_minutes=10,20"], 2, "cannot vary the slurm section"),
        (["--sweep", "generator.inference_engine.num_engines=1,2"], 2, "the number of nodes"),
        (["--seeds", "one"], 2, "--seeds 'one'"),
    ],
)
def test_mistakes_are_named_before_anything_is_made(
    tmp_path: Path, settings: list[str], code: int, expected: str
) -> None:
    done = called("submit", QUICKSTART, "--local", *settings, cwd=tmp_path)
    assert done.returncode == code, done.stderr
    assert expected in done.stderr
    assert nothing_made(tmp_path)


def test_run_directory_that_exists_is_not_touched(tmp_path: Path) -> None:
    taken = tmp_path / "runs" / "quickstart" / "mine"
    taken.mkdir(parents=True)
    (taken / "keep").write_text("x")
    done = called("submit", QUICKSTART, "--local", "trainer.run_name=mine", cwd=tmp_path)
    assert done.returncode == 5
    assert "mine exists" in done.stderr
    assert "hpcrl resume mine" in done.stderr
    assert os.listdir(taken) == ["keep"]


def test_runs_are_made_where_they_are_looked_for(tmp_path: Path) -> None:
    """$HPCRL_ROOT means the same to submit and to status; slurm.root goes before it."""
    shared = str(tmp_path / "shared")
    done = called("submit", QUICKSTART, "--dry-run", "trainer.run_name=mine", cwd=tmp_path, HPCRL_ROOT=shared)
    assert f"\n{shared}/quickstart/mine\n" in done.stdout, done.stderr
    assert f"no runs under {shared}" in called("status", cwd=tmp_path, HPCRL_ROOT=shared).stdout
    own = ["trainer.run_name=mine", f"slurm.root={tmp_path}/own"]
    done = called("submit", QUICKSTART, "--dry-run", *own, cwd=tmp_path, HPCRL_ROOT=shared)
    assert f"\n{tmp_path}/own/quickstart/mine\n" in done.stdout, done.stderr


@pytest.mark.parametrize("mode", ["--dry-run", "--local"])
@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ("slurm.root=/dev/null/runs", "slurm.root: /dev/null/runs/quickstart cannot be made, because /dev/null is no"),
        (
            "slurm.export_root=/dev/null/x",
            "slurm.export_root: /dev/null/x/quickstart cannot be made, because /dev/null is no",
        ),
        ("slurm.checkpoint_root=scratch", "slurm.checkpoint_root: expected the absolute path of a directory, such as"),
        (f"trainer.run_name={'x' * 300}", "trainer.run_name: expected a directory name of at most 128"),
    ],
)
def test_a_place_that_cannot_be_is_told_without_a_traceback(tmp_path: Path, setting: str, told: str, mode: str) -> None:
    done = called("submit", QUICKSTART, mode, setting, cwd=tmp_path)
    assert done.returncode in (2, 3)
    assert told in done.stderr


def test_a_line_break_reaches_no_batch_script(tmp_path: Path) -> None:
    folder = tmp_path / "a\n#SBATCH --exclusive"
    folder.mkdir()
    for arguments, place in (
        (['slurm.account="x\\n#SBATCH --exclusive"'], tmp_path),
        (['slurm.extra={"x\\n#SBATCH --exclusive\\n#" = 1}'], tmp_path),
        ([], folder),
    ):
        done = called("submit", QUICKSTART, "--dry-run", *arguments, cwd=place)
        assert done.returncode != 0
        assert "one line without control characters, found" in done.stderr
        assert "\n#SBATCH" not in done.stdout + done.stderr


def test_a_root_that_the_system_refuses_is_told(tmp_path: Path) -> None:
    done = called("submit", QUICKSTART, "--local", "slurm.root=/sys/runs", cwd=tmp_path)
    assert done.returncode == 3
    assert "slurm.root: /sys/runs/quickstart" in done.stderr


def test_without_slurm_the_remedy_is_named(tmp_path: Path) -> None:
    done = called("submit", QUICKSTART, cwd=tmp_path, PATH=str(tmp_path))
    assert done.returncode == 3
    assert "--local" in done.stderr
    assert nothing_made(tmp_path)
    done = called(
        "submit", QUICKSTART, "--dry-run", "--script", "slurm.elastic.replicas=1", cwd=tmp_path, PATH=str(tmp_path)
    )
    assert done.returncode == 0, done.stderr
    assert "# batch script of the " in done.stdout, "as the remedy says"


def test_dry_run_shows_everything_and_makes_nothing(tmp_path: Path) -> None:
    arguments = [
        "submit",
        QUICKSTART,
        "--dry-run",
        "--script",
        "generator.inference_engine.num_engines=2",
        "--seeds",
        "1,2",
    ]
    done = called(*arguments, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for part in (
        "#SBATCH --array=0-1",
        "#SBATCH --nodes=3",
        "node 0: trainer",
        "node 2: rollout-1",
        "trainer.seed=2",
        "[trainer.policy",
    ):
        assert part in done.stdout
    assert not (tmp_path / "runs").exists()


def test_a_run_needs_no_file(tmp_path: Path) -> None:
    (tmp_path / "t.parquet").write_bytes(
        (Path(QUICKSTART).parent / "quickstart" / "data" / "train.parquet").read_bytes()
    )
    words = ["data.train_data=[t.parquet]", "trainer.policy.model.path=org/m", "trainer.eval_interval=0"]
    done = called("submit", "--dry-run", *words, "environment.env_class=sort_letters", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "t.parquet" in done.stdout


def least_work(count: int, *arguments: str, cwd: Path) -> float:
    """The fewest CPU seconds of several calls: the clock on the wall also tells what else the machine does."""
    times = []
    for _ in range(count):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert hpcrl(*arguments, cwd=cwd).returncode == 0
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return min(times)


def test_the_commit_of_a_checkout_is_recorded(tmp_path: Path) -> None:
    package = tmp_path / "hpcrl"
    package.mkdir()
    (package / "__init__.py").touch()
    assert commit_of(package) == ""
    git = ["git", "-C", str(tmp_path), "-c", "user.name=x", "-c", "user.email=x"]
    for arguments in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "1"]):
        subprocess.run([*git, *arguments], check=True)
    assert commit_of(package) == "", "the package is installed beside another project"
    for arguments in (["add", "."], ["commit", "-q", "-m", "2"]):
        subprocess.run([*git, *arguments], check=True)
    found = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout
    assert commit_of(package) == found.strip()
    subprocess.run([*git, "config", "core.quotePath", "false"], check=True)
    no_text = package / os.fsdecode(b"jos\xe9.py")
    for file in (package / "new.py", package / "__init__.py", tmp_path / "jobs" / "new.py", no_text):
        file.parent.mkdir(exist_ok=True)
        before = file.read_text() if file.exists() else None
        file.write_text("changed = True\n")
        assert commit_of(package, tmp_path / "jobs") == f"{found.strip()} with changes", file
        file.unlink() if before is None else file.write_text(before)
    (tmp_path / "README.md").touch()
    assert commit_of(package, tmp_path / "jobs") == found.strip(), "of no code"


def test_the_code_of_a_run_is_compiled_already(tmp_path: Path) -> None:
    """Python uses what was compiled where it holds time of change and size of its source (PEP 552), which the copies have to keep."""
    submit._copy_code(tmp_path)
    sources = sorted((tmp_path / "code").rglob("*.py"))
    assert len(sources) > 500
    for source in sources:
        held = Path(cache_from_source(str(source))).read_bytes()[8:16]
        assert held == struct.pack("<II", int(source.stat().st_mtime), source.stat().st_size), source


def test_what_python_is_writing_meanwhile_is_not_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It writes x.cpython-311.pyc.12345 and renames it, so such a file may be gone when it is copied."""
    package = tmp_path / "package"
    compiled = Path(cache_from_source(str(package / "one.py")))
    compiled.parent.mkdir(parents=True)
    for path in (package / "one.py", package / "notes.12345", compiled.with_name(compiled.name + ".12345")):
        path.write_text("")
    monkeypatch.setattr(submit, "code_sources", lambda: {"hpcrl": package})
    submit._copy_code(tmp_path / "folder")
    copied = {path.name for path in (tmp_path / "folder" / "code").rglob("*") if path.is_file()}
    assert copied == {"one.py", "notes.12345", compiled.name}


def test_answers_are_quick(tmp_path: Path) -> None:
    assert least_work(3, "--help", cwd=tmp_path) < 0.3
    # most of it is the import of transformers, which looks at the tokenizer and writes the first prompts
    assert least_work(3, "submit", QUICKSTART, "--dry-run", cwd=tmp_path) < 2.5


def test_status_without_runs_and_unknown_names(tmp_path: Path) -> None:
    done = called("status", cwd=tmp_path)
    assert done.returncode == 0
    assert "no runs under" in done.stdout
    for command in ("status", "logs", "cancel", "resume", "tensorboard"):
        done = called(command, "nobody", cwd=tmp_path)
        assert done.returncode == 5
        assert "no run 'nobody'" in done.stderr


def test_plan_of_a_gpu_cluster(tmp_path: Path) -> None:
    """Two trainer nodes of 4 GPUs and five replicas of two GPUs each: two replicas fit on a node of 4."""
    settings = [
        "slurm.gpus_per_node=4",
        "trainer.placement.policy_num_nodes=2",
        "trainer.placement.policy_num_gpus_per_node=4",
        "generator.inference_engine.num_engines=5",
        "generator.inference_engine.backend=vllm",
        "generator.inference_engine.tensor_parallel_size=2",
    ]
    done = called("submit", QUICKSTART, "--dry-run", "--script", *settings, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "#SBATCH --gpus-per-node=4" in done.stdout
    assert "node 1: trainer, 4 rank(s), 4 GPU(s)" in done.stdout
    assert "node 3: rollout-2, rollout-3, 4 GPU(s)" in done.stdout
    assert "node 4: rollout-4, 2 GPU(s)" in done.stdout


def test_hpcrl_command_is_installed() -> None:
    assert shutil.which(HPCRL)
