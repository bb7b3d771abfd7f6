"""Which files of a user's own code are noted: those of the modules that settings name, and of what these import beside them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from hpcrl.config import Config
from hpcrl.launch.submit import own_files as module
from hpcrl.launch.submit.own_files import own_files, own_modules
from tests.paths import QUICKSTART

NEVER = 'raise AssertionError("it is only read")\n'


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_modules_are_those_that_any_setting_names() -> None:
    given = [
        'environment.env_class="own_a.task:Mine"',
        'trainer.algorithm.policy_loss_type="own_c:loss"',
        'environment.custom={judge="own_d.judges:strict", url="http://host:80/x", address="host:8000"}',
    ]
    assert own_modules(Config.from_toml([QUICKSTART], given)) == {"own_a.task", "own_c", "own_d.judges"}
    assert own_modules(Config.from_toml([QUICKSTART], ["environment.names.calc=own_e.env:Calc"])) == {"own_e.env"}
    scored = ['environment.reward_function={"own_b:length"=1.0, format=0.5}', "environment.env_class="]
    assert own_modules(Config.from_toml([QUICKSTART], scored)) == {"own_b"}
    assert not own_modules(Config.from_toml([QUICKSTART]))


def test_what_a_module_imports_from_its_folder_is_followed(folder: Path) -> None:
    (folder / "own_p" / "deep").mkdir(parents=True)
    (folder / "own_p" / "__init__.py").write_text(NEVER + "from . import settings\n")
    (folder / "own_p" / "settings.py").write_text(NEVER)
    (folder / "own_p" / "task.py").write_text(
        NEVER + "import json, hpcrl.envs.base\nimport own_q as other\ndef f():\n    from .deep.tools import sharp\n"
    )
    (folder / "own_p" / "deep" / "tools.py").write_text(NEVER + "from .. import scale\nfrom own_p import task\n")
    (folder / "own_p" / "scale.py").write_text("this is no Python\n")
    (folder / "own_p" / "unused.py").write_text(NEVER)
    (folder / "own_q.py").write_text(NEVER)
    (folder / "hpcrl").mkdir()
    (folder / "hpcrl" / "__init__.py").write_text("")
    found = own_files(["own_p.task"])
    files = ["own_p/__init__.py", "own_p/deep/tools.py", "own_p/scale.py", "own_p/settings.py", "own_p/task.py"]
    assert found == {str(folder): [*files, "own_q.py"]}


def test_those_are_what_python_reads(folder: Path) -> None:
    """A package goes before a module of its name, a folder without __init__.py after it."""
    for path, text in {
        "read_r.py": "import read_s.x, read_t.x",
        "read_s/__init__.py": "",
        "read_s/x.py": "",
        "read_s.py": "",
        "read_t/x.py": "from read_t.y import *",
        "read_t/y/__init__.py": "",
        "read_t/y.py": "",
    }.items():
        (folder / path).parent.mkdir(exist_ok=True, parents=True)
        (folder / path).write_text(text)
    code = "import sys, read_r; print(*sorted(m.__file__ for n, m in sys.modules.items() if n[:5] == 'read_' and m.__file__), sep='\\n')"
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=True)
    (found,) = own_files(["read_r"]).values()
    assert [str(folder / name) for name in found] == done.stdout.split()


def test_installed_and_missing_modules_and_too_many_files(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert own_files(["own_nowhere.task", "math", "statistics_of_mine", "hpcrl.envs.base", "own..x", "gpu"]) == {}
    ((place, files),) = own_files(["pytest"]).items()
    assert (Path(place).name, files) == ("site-packages", ["pytest/__init__.py"])
    (folder / "own_u.py").write_text("import own_v, own_w")
    for name in ("own_v", "own_w"):
        (folder / f"{name}.py").touch()
    assert own_files(["own_u"]) == {str(folder): ["own_u.py", "own_v.py", "own_w.py"]}
    monkeypatch.setattr(module, "_MOST", 2)
    assert own_files(["own_u"]) == {str(folder): ["own_u.py"]}
