"""Sandboxes of an ordinary user inside a real container, as the server of a run in containers starts them."""

from __future__ import annotations

import os
import pwd
import subprocess
import tempfile
from pathlib import Path

import pytest

from tests.containers import SYSTEM, make_image, missing
from tests.paths import ROOT

pytestmark = pytest.mark.containers
PYTHON = "/usr/bin/python3"
PROBE = "from hpcrl.sandboxes.probe import expect_sandboxes; print('starts', expect_sandboxes())"
PROGRAMS = {
    "apptainer": ["apptainer", "mksquashfs"],
    "enroot": ["enroot", "mksquashfs", "unsquashfs", "squashfuse", "fuse-overlayfs"],
}


def command(kind: str, image: Path, packages: str, place: str) -> list[str]:
    mounts = [*SYSTEM, *(f"{path}:{path}:ro" for path in (str(ROOT), packages)), f"{place}:{place}:rw"]
    if kind == "apptainer":
        return ["apptainer", "exec", *(f"--bind={mount}" for mount in mounts), str(image)]
    parts = [mount.split(":") for mount in mounts]
    options = [f"--mount={source}:{target}:none:x-create=auto,rbind,{mode}" for source, target, mode in parts]
    return ["enroot", "start", *options, str(image)]


@pytest.mark.skipif(os.geteuid() != 0, reason="it becomes an ordinary user")
@pytest.mark.parametrize("kind", PROGRAMS)
def test_sandboxes_start_inside(kind: str) -> None:
    if reason := missing(*PROGRAMS[kind]):
        pytest.skip(reason)
    user = next((one for one in pwd.getpwall() if one.pw_uid >= 1000 and one.pw_shell.endswith("sh")), None)
    if user is None:
        pytest.skip("nobody but root may log in here")
    packages = str(Path(pytest.__file__).parents[1])
    as_user = ["setpriv", f"--reuid={user.pw_uid}", f"--regid={user.pw_gid}", "--clear-groups"]
    with tempfile.TemporaryDirectory(dir="/tmp") as place:
        os.chmod(place, 0o777)
        own = {"PATH": os.environ["PATH"], "HOME": place, "TMPDIR": place}
        own |= {f"ENROOT_{name}_PATH": f"{place}/{name}" for name in ("DATA", "RUNTIME", "CACHE")}
        probe = ["env", f"PYTHONPATH={ROOT}:{packages}", PYTHON, "-c", PROBE]
        outside = subprocess.run([*as_user, *probe], env=own, capture_output=True, text=True, cwd="/")
        if outside.returncode != 0:
            pytest.skip(f"{user.pw_name} starts no sandboxes here: {outside.stderr[-300:]}")
        image = make_image(Path(place) / "image.sqsh")
        inside = [*as_user, *command(kind, image, packages, place), *probe]
        done = subprocess.run(inside, env=own, capture_output=True, text=True, cwd="/")
        assert done.stdout.startswith("starts"), done.stderr
