"""Jobs that commands such as `hpcrl eval` run on this machine."""

from __future__ import annotations

import sys
from pathlib import Path

from hpcrl.launch.local.foreground import run_here
from hpcrl.rundir.layout import Run


def test_a_users_module_may_have_the_name_of_a_job(tmp_path: Path) -> None:
    own, jobs = tmp_path / "own", tmp_path / "jobs"
    for folder, text in ((own, "VALUE = 'mine'"), (jobs, "VALUE = 'of a job'")):
        folder.mkdir()
        (folder / "reward.py").write_text(text)
    lines = ["import sys", f"sys.path.append({str(own)!r})", "import reward", "print(reward.VALUE)"]
    (jobs / "eval.py").write_text("\n".join(lines))
    place = Run(tmp_path / "evaluation")
    run_here(place, "eval", [sys.executable, str(jobs / "eval.py")], {}, print)
    assert place.log(0, "eval").read_text() == "mine\n"
