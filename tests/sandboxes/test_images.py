"""Images: their sources, layers one over the other, archives that want to harm, and what nodes unpack."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import shutil
import stat
import subprocess
import tarfile
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from hpcrl.cli.main import main
from hpcrl.errors import DamagedError, DataError
from hpcrl.sandboxes.images import ImageStore
from hpcrl.sandboxes.sandbox import Sandbox, SandboxError
from hpcrl.sandboxes.trees import TreeBounds, read_tree
from tests.containers import missing
from tests.sandboxes.material import make_rootfs
from tests.sandboxes.test_sandbox import room_for

Entry = tuple[str, str | bytes, Mapping[str, Any]]
OWN = {"x86_64": "amd64", "aarch64": "arm64"}[os.uname().machine]
SIF = b"#!/usr/bin/env run-singularity\n\0SIF_MAGIC"
VARIABLES = {"PATH": "/opt/bin:/bin", "LANG": "C"}


def entry(name: str, content: str | bytes = b"", **fields: Any) -> Entry:
    return name, content, fields


def layer(*entries: Entry) -> bytes:
    """Return a tar archive, in the order of the entries."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name, content, fields in entries:
            info = tarfile.TarInfo(name)
            data = content.encode() if isinstance(content, str) else content
            info.size, info.mtime, info.mode, info.uid = len(data), 1_000_000, 0o644, 1234
            for field, value in fields.items():
                setattr(info, field, value)
            tar.addfile(info, io.BytesIO(data))
    return out.getvalue()


def folder(name: str, mode: int = 0o755) -> Entry:
    return entry(name, type=tarfile.DIRTYPE, mode=mode)


def soft(name: str, target: str) -> Entry:
    return entry(name, type=tarfile.SYMTYPE, linkname=target)


def hard(name: str, target: str) -> Entry:
    return entry(name, type=tarfile.LNKTYPE, linkname=target)


def config_of(layers: Sequence[bytes], architecture: str) -> bytes:
    digests = [f"sha256:{hashlib.sha256(one).hexdigest()}" for one in layers]
    settings = {"Env": [f"{name}={value}" for name, value in VARIABLES.items()], "WorkingDir": "/srv"}
    rootfs = {"type": "layers", "diff_ids": digests}
    return json.dumps({"architecture": architecture, "config": settings, "rootfs": rootfs}).encode()


def docker_archive(path: Path, *layers: bytes, architecture: str = OWN) -> Path:
    """Write what `docker save` writes."""
    names = [f"{number}/layer.tar" for number in range(len(layers))]
    manifest = [{"Config": "config.json", "RepoTags": ["tiny:1"], "Layers": names}]
    entries = [
        ("manifest.json", json.dumps(manifest).encode()),
        ("config.json", config_of(layers, architecture)),
        *zip(names, layers, strict=True),
    ]
    path.write_bytes(layer(*(entry(name, content) for name, content in entries)))
    return path


def oci_layout(path: Path, *layers: bytes) -> Path:
    """Write an OCI layout with compressed layers, and an index of two machines."""
    blobs = path / "blobs" / "sha256"
    blobs.mkdir(parents=True)

    def blob(content: bytes, **more: Any) -> dict[str, Any]:
        digest = hashlib.sha256(content).hexdigest()
        (blobs / digest).write_bytes(content)
        return {"digest": f"sha256:{digest}", "size": len(content), **more}

    manifest = {"config": blob(config_of(layers, OWN)), "layers": [blob(gzip.compress(one, mtime=0)) for one in layers]}
    inner = {"manifests": [
        blob(json.dumps(manifest).encode(), platform={"os": "linux", "architecture": OWN}),
        {"digest": "sha256:" + "0" * 64, "platform": {"os": "linux", "architecture": "s390x"}},
    ]}  # fmt: skip
    (path / "index.json").write_text(json.dumps({"manifests": [blob(json.dumps(inner).encode())]}))
    (path / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
    return path


@pytest.fixture
def store(tmp_path: Path) -> ImageStore:
    return ImageStore(tmp_path / "runs")


def unpacked(store: ImageStore, name: str, place: Path) -> Path:
    place.mkdir(exist_ok=True)
    return store.unpack(store.find(name), place)


def files(tree: Path) -> dict[str, str]:
    """Return the content of all files of a tree, and the targets of its links."""
    found = {}
    for path in sorted(tree.rglob("*")):
        name = str(path.relative_to(tree))
        if path.is_symlink():
            found[name] = f"-> {os.readlink(path)}"
        elif path.is_file():
            found[name] = path.read_text()
    return found


LOWER = layer(
    folder("./"), folder("etc"), entry("etc/one", "1"), entry("etc/two", "2"), folder("usr"), folder("usr/lib"), soft("lib", "usr/lib"),
    entry("usr/lib/kept", "k"), folder("gone"), entry("gone/deep", "x"), folder("opaque"), entry("opaque/old", "o"), folder("opaque/both"), entry("opaque/both/old", "o"),
    entry("file", "f"), folder("turns"), entry("turns/inner", "i"), soft("out", "../../../../etc/passwd"), soft("absolute", "/etc/one"), entry("shared", "s"), hard("same", "shared"),
)  # fmt: skip
UPPER = layer(
    entry("etc/.wh.one"), entry("etc/two", "two"), entry("lib/new", "n"), entry(".wh.gone"), folder("opaque"), folder("opaque/both"), entry("opaque/new", "n"),
    entry("opaque/.wh..wh..opq"), folder("file"), entry("file/below", "b"), entry("turns", "t"), entry("shared", "changed"), hard("etc/hard", "etc/two"),
)  # fmt: skip
EXPECTED = {
    "absolute": "-> /etc/one", "etc/hard": "two", "etc/two": "two", "file/below": "b", "lib": "-> usr/lib", "opaque/new": "n", "out": "-> ../../../../etc/passwd",
    "same": "s", "shared": "changed", "turns": "t", "usr/lib/kept": "k", "usr/lib/new": "n",
}  # fmt: skip


@pytest.mark.parametrize("kind", ["docker-archive", "docker-archive.gz", "oci", "oci.tar", "directory"])
def test_every_source_gives_the_same_files(store: ImageStore, tmp_path: Path, kind: str) -> None:
    source = tmp_path / "source"
    if kind.startswith("docker"):
        docker_archive(source, LOWER, UPPER)
        if kind.endswith("gz"):
            source.write_bytes(gzip.compress(source.read_bytes()))
    else:
        oci_layout(source, LOWER, UPPER)
    if kind == "oci.tar":
        packed = tmp_path / "packed"
        with tarfile.open(packed, "w") as tar:
            tar.add(source, ".")
        source = packed
    if kind == "directory":
        store.add("first", source)
        source = unpacked(store, "first", tmp_path / "node")
    image = store.add("tiny", source)
    tree = unpacked(store, "tiny", tmp_path / "other")
    assert files(tree) == EXPECTED
    assert {path.name for path in tree.iterdir()} >= {"dev", "proc", "tmp"}
    assert (tree / "etc" / "hard").samefile(tree / "etc" / "two")
    assert not (tree / "shared").samefile(tree / "same")
    assert (tree / "etc" / "two").stat().st_mtime == 1_000_000
    if kind != "directory":
        assert (image.kind, image.directory) == (kind.partition(".")[0], "/srv")
        assert image.environment == {"PATH": "/opt/bin:/bin", "LANG": "C"}


def test_an_image_is_stored_once_whatever_its_names(store: ImageStore, tmp_path: Path) -> None:
    source = docker_archive(tmp_path / "a", LOWER, UPPER)
    one = store.add("one", source)
    two = store.add("two", oci_layout(tmp_path / "b", LOWER, UPPER))
    assert one.digest == two.digest
    names = sorted(path.name for path in (tmp_path / "runs" / ".images").iterdir())
    assert names == sorted([f"{one.digest}.tar.gz", "lock", "one.json", "two.json"])
    assert [image.name for image in store.list()] == ["one", "two"]
    with pytest.raises(DataError, match=r"there is an image one already.*hpcrl image rm one"):
        store.add("one", source)
    store.remove("one")
    assert unpacked(store, "two", tmp_path / "node").is_dir()
    store.remove("two")
    assert [path.name for path in (tmp_path / "runs" / ".images").iterdir()] == ["lock"]
    with pytest.raises(DataError, match=r"no image 'two'; .*there are: none"):
        store.find("two")
    for name in ("../x", "", ".x", "a/b", "x" * 200):
        with pytest.raises(DataError, match="expected a name"):
            store.add(name, source)
        with pytest.raises(DataError, match="no image"):
            store.find(name)


def test_what_a_user_cannot_have_is_left_out(store: ImageStore, tmp_path: Path) -> None:
    source = docker_archive(tmp_path / "a", layer(
        entry("bin", "x", mode=0o4755), entry("null", type=tarfile.CHRTYPE, devmajor=1, devminor=3), entry("sda", type=tarfile.BLKTYPE, devmajor=8),
        entry("whiteout", type=tarfile.CHRTYPE), entry("closed", "c", mode=0), folder("shut", 0), entry("shut/in", "i"), entry("queue", type=tarfile.FIFOTYPE),
    ))  # fmt: skip
    store.add("tiny", source)
    tree = unpacked(store, "tiny", tmp_path / "node")
    assert files(tree) == {"bin": "x", "closed": "c", "shut/in": "i"}
    assert {path.name for path in tree.iterdir()} == {"bin", "closed", "shut", "queue", "dev", "proc", "tmp"}
    assert stat.S_IMODE((tree / "bin").stat().st_mode) == 0o755
    assert {path.stat().st_uid for path in tree.rglob("*")} == {os.getuid()}


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ([entry("../x", "1")], "leads out of it"),
        ([entry("/etc/x", "1")], "leads out of it"),
        ([entry("a/../../x", "1")], "leads out of it"),
        ([hard("x", "../../etc/passwd")], "leads out of it"),
        ([hard("x", "nothing")], "No such file"),
        ([soft("a", "b"), soft("b", "a"), entry("a/x", "1")], "in a circle"),
        ([entry("a", "1"), entry("a/x", "1")], "is no directory"),
        ([entry("/".join("a" * 300), "1")], "too long"),
        ([entry("x", bytes(3 << 20))], "more than 1257472 bytes"),
        ([entry(f"x{number}") for number in range(60)], "more than 50 files"),
        ([entry(".wh...")], "hides nothing"),
        ([entry("x", pax_headers={"path": "a" * (17 << 20)})], "header of|more than"),
        ([soft("dev", "/tmp")], "/dev of the image is no directory"),
    ],
)  # fmt: skip
def test_archives_that_want_to_harm_are_refused(
    store: ImageStore, tmp_path: Path, entries: Sequence[Entry], said: str
) -> None:
    source = tmp_path / "source"
    docker_archive(source, layer(*entries))
    if "1257472" in said:
        oci_layout(source.with_name("oci"), layer(*entries))
        source = source.with_name("oci")
    with pytest.raises(DataError, match=said):
        store.add(
            "evil", source, TreeBounds(size=1 << 20 if "1257472" in said else 64 << 20, entries=50), temporary=tmp_path
        )
    assert store.list() == []
    assert {path.name for path in tmp_path.iterdir()} <= {"source", "oci", "runs"}
    assert [path.name for path in (tmp_path / "runs" / ".images").iterdir()] == []


def test_a_link_that_a_node_cannot_make_now_is_no_damage(tmp_path: Path) -> None:
    """Its disk was full, for instance: the image was to be removed and added again, and no other node was asked."""
    tiny, root = layer(folder("a"), entry("a/x", "x"), hard("b", "a/x")), os.open(tmp_path, os.O_RDONLY)
    try:
        with room_for(2), pytest.raises(OSError, match="Too many open files"):
            read_tree(io.BytesIO(tiny), root, TreeBounds(1 << 20, 3))
    finally:
        os.close(root)
    assert files(tmp_path) == {"a/x": "x"}


def test_links_of_an_image_lead_nowhere_outside(store: ImageStore, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_text("mine")
    store.add("evil", docker_archive(tmp_path / "a", layer(
        soft("up", "../" * 30 + str(outside)), entry("up/file", "x"), soft("absolute", str(outside)), entry("absolute/new", "x"),
        soft("over", str(outside / "file")), entry("over", "x"), soft("gone", str(outside)),
    ), layer(entry(".wh.gone"), entry("absolute/.wh.new"))))  # fmt: skip
    tree = unpacked(store, "evil", tmp_path / "node")
    assert files(outside) == {"file": "mine"}
    assert (tree / "over").read_text() == "x"
    assert (tree / str(outside)[1:] / "file").read_text() == "x"
    assert not (tree / str(outside)[1:] / "new").exists()


DAMAGES = {
    "not there": (lambda path: path.unlink(), "does not exist"),
    "text": (lambda path: path.write_text("no archive, but long enough" * 40), "damaged.*; expected an archive of `docker save`"),
    "another machine's": (lambda path: docker_archive(path, LOWER, architecture="s390x"), f"for {OWN}, found one for 's390x'"),
    "another machine's layout": (lambda path: oci_of_another_machine(path), f"for {OWN}, found one for 's390x'"),
    "folder of a Dockerfile": (lambda path: folder_of_dockerfile(path), "no image is built here"),
    "cut": (lambda path: path.write_bytes(path.read_bytes()[:3000]), "damaged|expected"),
    "cut and compressed": (lambda path: path.write_bytes(gzip.compress(path.read_bytes())[:300]), "damaged"),
    "other layer": (lambda path: path.write_bytes(path.read_bytes().replace(b"\x001", b"\x002")), "checksum|damaged"),
    "sif": (lambda path: path.write_bytes(SIF), "apptainer"),
}  # fmt: skip


def oci_of_another_machine(path: Path) -> None:
    """Write what `skopeo copy` makes: its index does not name the machine."""
    blobs = {hashlib.sha256(one).hexdigest(): one for one in (LOWER, config_of([LOWER], "s390x"))}
    content, config = ({"digest": f"sha256:{digest}"} for digest in blobs)
    manifest = json.dumps({"config": config, "layers": [content]}).encode()
    name = hashlib.sha256(manifest).hexdigest()
    path.unlink()
    (path / "blobs" / "sha256").mkdir(parents=True)
    for digest, one in {**blobs, name: manifest}.items():
        (path / "blobs" / "sha256" / digest).write_bytes(one)
    (path / "index.json").write_text(json.dumps({"manifests": [{"digest": f"sha256:{name}"}]}))
    (path / "oci-layout").write_text("{}")


def folder_of_dockerfile(path: Path) -> None:
    path.unlink()
    path.mkdir()
    (path / "Dockerfile").write_text("FROM python:3.12\nRUN pip install numpy\n")


@pytest.mark.parametrize("name", DAMAGES)
def test_sources_that_cannot_be_used(store: ImageStore, tmp_path: Path, name: str) -> None:
    source = docker_archive(tmp_path / "source", LOWER)
    damage, said = DAMAGES[name]
    damage(source)
    with pytest.raises(DataError, match=said):
        store.add("x", source)
    assert store.list() == []


def test_files_that_may_not_be_read_are_named() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as place:
        os.chmod(place, 0o777)
        folder = Path(place, "source", "etc")
        folder.mkdir(parents=True)
        (folder / "hidden").touch(mode=0o000)
        if os.geteuid() == 0:
            os.seteuid(65534)
        try:
            with pytest.raises(DataError, match="etc/hidden may not be read by this user"):
                ImageStore(Path(place, "runs")).add("x", folder.parent)
        finally:
            if os.getuid() == 0:
                os.seteuid(0)


APPTAINER = """#!/bin/sh
case "$*" in
    "build --sandbox "*) [ "${{3%/*}}" = "$TMPDIR" ] && mkdir -p "$3/etc" && cp {file} "$3/etc/two" ;;
    "pull "*) [ "${{2%/*}}" = "$TMPDIR" ] && cp {file}.sif "$2" ;;
    *exec*) [ -z "$SECRET" ] && printf '%s\\0' "APPTAINER_TMPDIR=${{APPTAINER_TMPDIR:?}}" HOME=/root PATH=/opt/bin:/bin 'LINES=a
b' ;;
    *) exit 1 ;;
esac
"""


def test_a_sif_file_is_unpacked_by_apptainer(
    store: ImageStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program stands in for it."""
    (tmp_path / "two").write_text("2")
    program, source = tmp_path / "bin" / "apptainer", tmp_path / "two.sif"
    program.parent.mkdir()
    program.write_text(APPTAINER.format(file=tmp_path / "two"))
    program.chmod(0o755)
    source.write_bytes(SIF)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("SECRET", "of the account")
    image = store.add("x", source)
    assert image.environment == {"PATH": "/opt/bin:/bin", "LINES": "a\nb"}
    assert files(unpacked(store, "x", tmp_path / "node")) == {"etc/two": "2"}
    program.write_text(APPTAINER.format(file=tmp_path / "two").replace("[ -z", "[ -n"))
    with pytest.raises(DataError, match=r"expected the variables of its programs from `.*two\.sif env -0`"):
        store.add("y", source)
    for name in ("timeout", "mkdir", "cp"):
        (program.parent / name).symlink_to(str(shutil.which(name)))
    monkeypatch.setenv("PATH", str(program.parent))
    with pytest.raises(DataError, match=r"docker://there/tiny: expected .* from `.* docker://there/tiny env -0`"):
        store.add("y", "docker://there/tiny")


@pytest.mark.containers
def test_a_sif_file_of_a_docker_image_keeps_its_variables(
    store: ImageStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real Apptainer makes one, and takes it apart."""
    if reason := missing("apptainer", "mksquashfs", "unsquashfs"):
        pytest.skip(reason)
    monkeypatch.setitem(VARIABLES, "PATH", "/opt/bin:/bin")
    monkeypatch.setitem(VARIABLES, "SPACED", "a 'b' c=d")
    monkeypatch.setitem(VARIABLES, "LANG", "de_DE.UTF-8")
    root = make_rootfs(tmp_path / "root")
    content = subprocess.run(["tar", "c", "-C", str(root), "."], capture_output=True, check=True).stdout
    archive, made = docker_archive(tmp_path / "archive", content), tmp_path / "made.sif"
    subprocess.run(["apptainer", "build", made, f"docker-archive:{archive}"], capture_output=True, check=True)
    found = store.add("made", made).environment
    assert found.pop("PATH").startswith(f"{VARIABLES.pop('PATH')}:"), "Apptainer adds usual directories"
    assert found == VARIABLES | {"LD_LIBRARY_PATH": "/.singularity.d/libs"}
    assert (unpacked(store, "made", tmp_path / "node") / "etc" / "release").read_text() == "tiny\n"


def test_a_node_unpacks_an_image_once(store: ImageStore, tmp_path: Path) -> None:
    image = store.add("tiny", docker_archive(tmp_path / "a", LOWER, UPPER))
    node = tmp_path / "node"
    node.mkdir()
    found = list[tuple[Path, int]]()

    def unpack() -> None:
        tree = store.unpack(image, node)
        found.append((tree, tree.stat().st_ino))

    threads = [threading.Thread(target=unpack) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert len(set(found)) == 1
    assert sorted(path.name for path in node.iterdir()) == sorted([image.digest, f"{image.digest}.lock"])


@pytest.mark.parametrize("content", ["", "{", "[1]", "{}", '{"digest": "../../x"}'])
def test_a_damaged_record_is_named_and_can_be_removed(
    store: ImageStore, tmp_path: Path, content: str, capsys: pytest.CaptureFixture[str]
) -> None:
    source = docker_archive(tmp_path / "a", LOWER)
    image = store.add("tiny", source)
    record = tmp_path / "runs" / ".images" / "tiny.json"
    whole = {**asdict(image), **json.loads(content)} if "digest" in content else None
    record.write_text(json.dumps(whole) if whole else content)
    root = ["--root", str(tmp_path / "runs")]
    assert main(["image", "ls", *root]) == 5
    assert f"{record} is damaged" in capsys.readouterr().err
    other = store.add("other", source)
    assert main(["image", "rm", "other", *root]) == 5, "whether its archive is that of the damaged one is not known"
    assert store.find("other") == other
    assert main(["image", "rm", "tiny", *root]) == 0
    assert main(["image", "add", "tiny", str(source), *root]) == 0


def test_apt_stays_root_in_an_image_that_has_it(store: ImageStore, tmp_path: Path) -> None:
    tiny = layer(folder("etc/apt/apt.conf.d"), soft("etc/apt/apt.conf.d/99-sandbox", "/etc/passwd"))
    store.add("tiny", docker_archive(tmp_path / "a", tiny))
    found = files(unpacked(store, "tiny", tmp_path / "node"))
    assert found == {"etc/apt/apt.conf.d/99-sandbox": 'APT::Sandbox::User "root";\n'}
    store.add("other", docker_archive(tmp_path / "b", LOWER))
    assert not any("apt" in name for name in files(unpacked(store, "other", tmp_path / "node")))


def test_an_archive_that_has_changed_is_not_unpacked(store: ImageStore, tmp_path: Path) -> None:
    image = store.add("tiny", docker_archive(tmp_path / "a", LOWER))
    archive, node = store.archive(image), tmp_path / "node"
    node.mkdir()
    content = bytearray(gzip.decompress(archive.read_bytes()))
    content[content.index(b"1", 512 * 20)] ^= 1
    for damaged in (gzip.compress(bytes(content)), archive.read_bytes()[:-20], b"", gzip.compress(b"x" * 2000)):
        archive.write_bytes(damaged)
        with pytest.raises(DamagedError, match="hpcrl image rm"):
            store.unpack(image, node)
        assert [path.name for path in node.iterdir()] == [f"{image.digest}.lock"]


def test_who_shares_the_root_may_read_an_archive(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        store = ImageStore(tmp_path / "runs")
        assert (
            stat.S_IMODE(store.archive(store.add("tiny", docker_archive(tmp_path / "a", LOWER))).stat().st_mode)
            == 0o644
        )
    finally:
        os.umask(before)


def test_an_archive_that_cannot_be_read_is_named() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as place:
        os.chmod(place, 0o777)
        store, node = ImageStore(Path(place, "runs")), Path(place, "node")
        image = store.add("tiny", docker_archive(Path(place, "a"), LOWER))
        store.archive(image).chmod(0o000)
        if os.geteuid() == 0:
            os.seteuid(65534)
        try:
            node.mkdir()
            with pytest.raises(DataError, match=r"may not be read by this user; .*chmod a\+r"):
                store.unpack(image, node)
        finally:
            if os.getuid() == 0:
                os.seteuid(0)
        store.archive(image).unlink()
        with pytest.raises(DamagedError, match="is missing; remove it by `hpcrl image rm`"):
            store.unpack(image, node)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return docker_archive(tmp_path / "a", LOWER)


def test_the_command(tmp_path: Path, source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = ["--root", str(tmp_path / "runs")]
    assert main(["image", "ls", *root]) == 0
    assert "no images" in capsys.readouterr().out
    assert main(["image", "add", "tiny", str(source), *root]) == 0
    assert "tiny: docker-archive, " in capsys.readouterr().out
    assert main(["image", "add", "tiny", str(source), *root]) == 4
    assert "already" in capsys.readouterr().err
    assert main(["image", "add", "other", str(source), "--temporary", str(tmp_path / "none"), *root]) == 4
    assert "none: expected a directory" in capsys.readouterr().err
    assert main(["image", "ls", *root]) == 0
    assert "docker-archive, 0 s ago" in capsys.readouterr().out
    assert main(["image", "rm", "tiny", *root]) == 0
    assert main(["image", "rm", "tiny", *root]) == 4


@pytest.mark.skipif(os.geteuid() != 0, reason="for root")
def test_root_gets_no_sandbox(tmp_path: Path) -> None:
    with pytest.raises(SandboxError, match="for ordinary users"):
        Sandbox(tmp_path, tmp_path)
    assert not list(tmp_path.iterdir())
