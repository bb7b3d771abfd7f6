"""The command line as a whole: what it completes, what it suggests, its exit codes, and an environment of the dependencies alone."""

from __future__ import annotations

import json
import os
import re
import subprocess
from argparse import _SubParsersAction
from pathlib import Path

import pytest

from hpcrl.cli.main import _MODULES, COMMANDS, _parsers, main
from hpcrl.errors import HpcrlError
from hpcrl.rundir.layout import Run
from tests.cli.test_status import root as root
from tests.environments import dependencies, make_environment
from tests.paths import QUICKSTART, ROOT

BASH = """
eval "$(hpcrl completion bash)"
COMP_WORDS=({line}) COMP_CWORD={last} COMP_LINE='{line}' COMP_POINT={point} COMP_TYPE=9
_python_argcomplete hpcrl
echo "${{COMPREPLY[@]}}"
"""


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("hpcrl su", ["submit"]),
        ("hpcrl submit --fo", ["--follow"]),
        ("hpcrl config val", ["validate"]),
        ("hpcrl init mine --kind env", ["environment"]),
        ("hpcrl follow --ro", ["--root"]),
    ],
)
def test_bash_completes(line: str, words: list[str], tmp_path: Path) -> None:
    programs = make_environment(tmp_path / "light", ["argcomplete", "httpx", "rich", "tomli"])
    script = BASH.format(line=line, last=len(line.split()) - 1, point=len(line))
    environment = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, env=environment, check=True)
    assert done.stdout.split() == words


def test_the_page_lists_the_commands_that_print_json() -> None:
    _, commands = _parsers(_MODULES, _MODULES)
    nested = {"": commands}
    for name, command in commands.items():
        nested[f"{name} "] = next(
            (dict(each.choices) for each in command._actions if isinstance(each, _SubParsersAction)), {}
        )
    found = [
        f"{of}{name}" for of, own in nested.items() for name, each in own.items() if "--json" in each.format_help()
    ]
    section = (ROOT / "docs" / "commands.md").read_text().partition("## JSON")[2].partition("## ")[0]
    assert re.findall(r"`([a-z ]+)`", section) == sorted(found)


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("validate", "hpcrl config validate"),
        ("export", "hpcrl checkpoint export"),
        ("train", "hpcrl submit"),
        ("new", "hpcrl init"),
        ("clean", "hpcrl rm"),
        ("sumbit", "submit"),
    ],
)
def test_a_command_of_other_tools(word: str, meant: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([word])
    assert ended.value.code == 2
    assert capsys.readouterr().err.endswith(f"there is no command {word!r}; did you mean {meant}?\n")


def test_without_a_command_all_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    listed = capsys.readouterr().err
    assert all(f"  {name} " in listed for group in COMMANDS.values() for name in group)


def test_the_table_of_exit_codes_is_that_of_the_errors() -> None:
    def errors(kind: type[HpcrlError]) -> set[int]:
        return {kind.exit_code}.union(*map(errors, kind.__subclasses__()))

    text = (ROOT / "docs" / "commands.md").read_text().partition("## Exit codes")[2]
    listed = {int(code) for code in re.findall(r"^\| (\d+) \|", text, re.MULTILINE)}
    assert listed == {0, 1, 2} | errors(HpcrlError)


ALL = """
import contextlib, io, json, sys
from hpcrl.cli.main import main
said = {}
for words in json.load(sys.stdin):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(words)
        except SystemExit as ended:
            code = ended.code
        except Exception as error:
            code = repr(error)
    said[" ".join(words[:2])] = [code, err.getvalue()]
print(json.dumps(said))
"""


@pytest.fixture
def light(tmp_path: Path) -> Path:
    """The programs of an environment of the dependencies alone."""
    return make_environment(tmp_path / "light", dependencies())


def test_every_command_in_an_environment_of_the_dependencies_alone(root: Path, tmp_path: Path, light: Path) -> None:
    run = str(Run(root / "p" / "single").path)
    names = [name for group in COMMANDS.values() for name in group if name not in ("doctor", "follow", "attach", "rm")]
    more = {
        "init": [str(tmp_path / "mine")],
        "submit": [str(QUICKSTART), "--dry-run"],
        "plan": [str(QUICKSTART)],
        "score": [str(QUICKSTART), "-o", str(tmp_path / "scores")],
        "sync": [run, "--to", "wandb"],
        "trace": [run, "-o", str(tmp_path / "trace.json")],
        "report": [run, "-o", str(tmp_path / "report.html")],
        "eval": [run, "--data", str(QUICKSTART.with_name("quickstart.jsonl"))],
        "trial": ["status", "none"],
        "compare": [run, run],
        "replay": [run, "--step", "1"],
        "checkpoint": ["export", run],
        "reward": ["serve", str(tmp_path)],
        "engine": [str(QUICKSTART), "--key-file", str(tmp_path / "key")],
        "config": ["validate", str(QUICKSTART)],
        "data": ["check", str(QUICKSTART)],
        "env": ["ls"],
        "image": ["ls"],
        "completion": ["bash"],
        "rm": ["--yes", run],
    }
    done = subprocess.run(
        [light / "python", "-c", ALL],
        input=json.dumps([[name, *more.get(name, [run])] for name in [*names, "rm"]]),
        capture_output=True,
        text=True,
        env={**os.environ, "HPCRL_ROOT": str(root)},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    said = {words.split()[0]: answer for words, answer in json.loads(done.stdout).items()}
    assert set(said) == {*names, "rm"}
    broken = {name: answer for name, answer in said.items() if not isinstance(answer[0], int)}
    assert broken == {}
    lacking = {name for name, (_, text) in said.items() if "where the jobs run" in text}
    assert lacking == set(re.findall(r"`hpcrl (\w+)", _paragraph("docs/installation.md", "need what jobs need"))), said


def submitted(light: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Submit the quickstart from an environment without torch."""
    place = light.parents[1]
    named = [str(QUICKSTART), "trainer.run_name=mine", f"slurm.root={place}/runs"]
    command = [str(light / "hpcrl"), "submit", *named, *words]
    return subprocess.run(
        command, cwd=place, capture_output=True, text=True, env={**os.environ, **environment}, check=False
    )


def test_jobs_without_torch_are_refused_here_and_warned_of_on_a_cluster(tmp_path: Path, light: Path) -> None:
    done = submitted(light, "--local")
    assert (done.returncode, list(tmp_path.glob("runs*"))) == (3, [])
    assert f"--local: {light}/python has no torch; pip install 'hpcrl[job]', or set slurm.python" in done.stderr
    sbatch = tmp_path / "bin" / "sbatch"
    sbatch.parent.mkdir()
    sbatch.write_text("#!/bin/sh\necho 'sbatch: error: nothing today' >&2; exit 1\n")
    sbatch.chmod(0o755)
    path = f"{sbatch.parent}:{os.environ['PATH']}"
    for settings, warned in (((), True), (("slurm.python=/fat/bin/python",), False)):
        done = submitted(light, *settings, PATH=path)
        assert done.returncode == 3
        assert "nothing today" in done.stderr
        assert ("slurm.python: not set, so jobs run " in done.stderr) == warned


def _paragraph(page: str, words: str) -> str:
    (line,) = [line for line in (ROOT / page).read_text().splitlines() if words in line]
    return line
