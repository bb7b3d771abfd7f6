"""Images of registries: a real registry on this machine, from which skopeo and Apptainer pull."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from hpcrl.cli.main import main
from hpcrl.errors import DataError
from hpcrl.runtime.http_server import bind
from hpcrl.sandboxes.images import ImageStore
from tests.containers import missing
from tests.sandboxes.material import PATIENCE_S, make_rootfs
from tests.sandboxes.test_images import LOWER, UPPER, docker_archive, oci_layout, oci_of_another_machine, unpacked

CONFIGURATION = """\
version: 0.1
log: {{level: error}}
storage: {{filesystem: {{rootdirectory: {place}}}}}
http: {{addr: "{address}"}}
"""
STAND_IN = """#!/bin/sh
case "$1 $2" in
    "copy docker://there/tiny:1") cp -r {layout} "${{3#oci:}}" ;;
    "copy docker://there/foreign:1") cp -r {foreign} "${{3#oci:}}" ;;
    *) echo "no such image: $2" >&2; exit 1 ;;
esac
"""


def test_an_image_is_pulled_by_skopeo(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A program stands in for it."""
    layout, foreign = oci_layout(tmp_path / "layout", LOWER, UPPER), tmp_path / "foreign"
    program, root = tmp_path / "bin" / "skopeo", tmp_path / "runs"
    foreign.touch()
    oci_of_another_machine(foreign)
    program.parent.mkdir()
    program.write_text(STAND_IN.format(layout=layout, foreign=foreign))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    assert main(["image", "add", "tiny", "docker://there/tiny:1", "--root", str(root)]) == 0
    assert ImageStore(root).find("tiny").directory == "/srv"
    assert main(["image", "add", "other", "docker://there/other", "--root", str(root)]) == DataError.exit_code
    assert "skopeo cannot pull it: no such image: docker://there/other" in capsys.readouterr().err
    assert main(["image", "add", "other", "docker://there/foreign:1", "--root", str(root)]) == DataError.exit_code
    assert "docker://there/foreign:1: expected an image for" in capsys.readouterr().err, "not where it was unpacked"


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM])
def test_a_terminal_that_is_closed_leaves_nothing_of_an_image(tmp_path: Path, number: signal.Signals) -> None:
    program, temporary = tmp_path / "bin" / "skopeo", tmp_path / "temporary"
    for path in (program.parent, temporary):
        path.mkdir()
    program.write_text("#!/bin/sh\necho pulling && exec sleep 600\n")
    program.chmod(0o755)
    asked = ["env", "--default-signal=HUP", sys.executable]  # these tests may run under nohup
    command = [*asked, "-m", "hpcrl.cli.main", "image", "add", "tiny", "docker://there/tiny"]
    command += ["--temporary", str(temporary), "--root", str(tmp_path / "runs")]
    environment = os.environ | {"PATH": f"{program.parent}:{os.environ['PATH']}"}
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE) as process:
        assert process.stderr
        assert process.stderr.readline() == b"pulling\n"
        process.send_signal(number)
        try:
            assert process.wait(PATIENCE_S) == 130
        finally:
            process.kill()
    assert not list(temporary.iterdir())


def test_other_addresses_and_missing_programs_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = ImageStore(tmp_path)
    with pytest.raises(
        DataError, match="library://python: expected a file, a directory, or an image of a registry as docker://"
    ):
        store.add("x", "library://python")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(DataError, match="skopeo or Apptainer pulls images, and none is installed"):
        store.add("x", "docker://python:3.12")


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A registry with the image tiny:1; yields its address."""
    if reason := missing("docker-registry", "skopeo"):
        pytest.skip(reason)
    place = tmp_path_factory.mktemp("registry")
    with bind("127.0.0.1") as free:
        address = "{}:{}".format(*free.getsockname()[:2])
    (place / "config.yml").write_text(CONFIGURATION.format(place=place / "kept", address=address))
    settings = place / ".config" / "containers" / "registries.conf"
    settings.parent.mkdir(parents=True)
    settings.write_text(f'[[registry]]\nlocation = "{address}"\ninsecure = true\n')
    server = subprocess.Popen(["docker-registry", "serve", str(place / "config.yml")])
    try:
        deadline = time.monotonic() + PATIENCE_S
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("HOME", str(place))
            while True:
                with suppress(httpx.TransportError):
                    httpx.get(f"http://{address}/v2/")
                    break
                assert server.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.1)
            root = make_rootfs(place / "root")
            content = subprocess.run(["tar", "c", "-C", str(root), "."], capture_output=True, check=True).stdout
            archive = docker_archive(place / "archive", content)
            subprocess.run(["skopeo", "copy", f"docker-archive:{archive}", f"docker://{address}/tiny:1"], check=True)
            yield address
    finally:
        server.terminate()
        server.wait()


@pytest.mark.containers
@pytest.mark.parametrize("program", ["skopeo", "apptainer"])
def test_an_image_is_pulled_from_a_registry(
    registry: str, tmp_path: Path, program: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if reason := missing(program):
        pytest.skip(reason)
    if program == "apptainer":
        (tmp_path / "bin").mkdir()
        for name in ("apptainer", "timeout"):
            (tmp_path / "bin" / name).symlink_to(str(shutil.which(name)))
        monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    store = ImageStore(tmp_path / "runs")
    image = store.add("tiny", f"docker://{registry}/tiny:1")
    assert image.kind == {"skopeo": "oci", "apptainer": "sif"}[program]
    assert image.environment["PATH"].startswith("/opt/bin:/bin")
    assert (unpacked(store, "tiny", tmp_path / "node") / "etc" / "release").read_text() == "tiny\n"
    with pytest.raises(DataError, match=f"{program} cannot pull it: .*"):
        store.add("other", f"docker://{registry}/other:1")
