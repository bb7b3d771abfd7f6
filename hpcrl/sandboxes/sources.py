"""Sources of images: archives of `docker save`, OCI layouts, plain directories, SIF files and registries, each unpacked into one directory."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

from hpcrl.errors import DataError
from hpcrl.sandboxes.archives import Hashed, uncompressed
from hpcrl.sandboxes.trees import TreeBounds, read_tree

_LAYOUT, _INDEX, _MANIFEST = "oci-layout", "index.json", "manifest.json"
_MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}
_REGISTRY = "docker://"
_DOCKERFILE = "Dockerfile"
_SIF, _SIF_AT = b"SIF_MAGIC", 32
_CONTAINED = ("--contain", "--pid", "--ipc", "--pwd=/")  # --containall would set LANG before the image does
_OF_APPTAINER = re.compile(r"(APPTAINER|SINGULARITY)_\w+|PS1|PROMPT_COMMAND|USER_PATH|HOME|PWD")
_BOUNDED = ("timeout", "--foreground", "--kill-after=5", "600")
_LARGEST_ENVIRONMENT = 1 << 20
_LARGEST_JSON = 16 << 20
_MOST_INDEXES = 4
_EXPECTED = f"expected an archive of `docker save` ({_MANIFEST}), an OCI layout ({_INDEX}), a directory or a SIF file"


class ImageSource(NamedTuple):
    """A source of an image.

    Attributes:
        kind: docker-archive, oci, directory or sif.
        tree: directory of the image's files.
        environment: variables that the image sets.
        directory: where its programs begin.
    """

    kind: str
    tree: Path
    environment: dict[str, str]
    directory: str


@contextmanager
def opened_source(source: Path | str, bounds: TreeBounds, temporary: Path | None = None) -> Iterator[ImageSource]:
    """Unpack a source as long as the block lasts; a plain directory is used where it is.

    Args:
        source: a path, or docker:// and the name of an image of a registry.
        temporary: where it is unpacked; None: where temporary files are made.

    Raises:
        DataError: it is none of the kinds, damaged, or larger than the bounds.
    """
    if temporary is not None and not temporary.is_dir():
        raise DataError(f"{temporary}: expected a directory, where the image is unpacked")
    with tempfile.TemporaryDirectory(prefix="hpcrl-image-", dir=temporary, ignore_cleanup_errors=True) as made:
        place, named = Path(made).absolute(), str(source)
        source = _pull(named, place) if "://" in named else Path(source)
        if not source.exists():
            raise DataError(f"{source} does not exist")
        if source.is_dir():
            archive = source if (source / _INDEX).is_file() and (source / _LAYOUT).is_file() else None
            if archive is None:
                _expect_files(source)
                yield ImageSource("directory", source, {}, "/")
                return
        elif _is_sif(source):
            yield _of_sif(source, place, named)
            return
        else:
            archive = place / "archive"
            archive.mkdir()
            try:
                _unpack([source], archive, bounds)
            except DataError as error:
                raise DataError(f"{error}; {_EXPECTED}") from error
        if (archive / _MANIFEST).is_file():
            kind, layers, config = "docker-archive", *_of_docker(archive)
        elif (archive / _INDEX).is_file():
            kind, layers, config = "oci", *_of_oci(archive)
        else:
            raise DataError(f"{named}: {_EXPECTED}; unpack an archive of plain files into a directory first")
        _expect_machine(config, named)
        tree = place / "tree"
        tree.mkdir()
        _unpack(layers, tree, bounds, _digests(config, len(layers), named))
        yield ImageSource(kind, tree, *_settings(config, named))


def _unpack(archives: Sequence[Path], directory: Path, bounds: TreeBounds, digests: Sequence[str] = ()) -> None:
    """Unpack archives one over the other, and compare the SHA-256 of each, uncompressed, with those of `digests`."""
    root = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for number, archive in enumerate(archives):
            try:
                with uncompressed(archive) as stream:
                    hashed = Hashed(stream)
                    read_tree(cast(IO[bytes], hashed), root, bounds)
            except DataError as error:
                raise DataError(f"{archive.name}: {error}") from error
            if digests and hashed.digest() != digests[number]:
                raise DataError(f"{archive.name}: expected the checksum {digests[number]}, found {hashed.digest()}")
    finally:
        os.close(root)


def _of_docker(archive: Path) -> tuple[list[Path], Any]:
    manifests = _json(archive / _MANIFEST)
    if not isinstance(manifests, list) or len(manifests) != 1 or not isinstance(manifests[0], dict):
        raise DataError(f"{_MANIFEST}: expected one image; save it alone, by `docker save IMAGE`")
    layers, config = manifests[0].get("Layers"), manifests[0].get("Config")
    if not isinstance(config, str) or not isinstance(layers, list) or not all(isinstance(one, str) for one in layers):
        raise DataError(f"{_MANIFEST}: expected Config and Layers, names of files")
    return [_inside(archive, one) for one in layers], _json(_inside(archive, config))


def _of_oci(archive: Path) -> tuple[list[Path], Any]:
    manifest, wanted = _json(archive / _INDEX), _own_machine()
    for _ in range(_MOST_INDEXES):
        if not isinstance(manifest, dict) or "layers" in manifest:
            break
        listed = [one for one in manifest.get("manifests", ()) if isinstance(one, dict)]
        fitting = [one for one in listed if (one.get("platform") or {}).get("architecture", wanted) == wanted]
        if len(fitting) != 1:
            raise DataError(
                f"{_INDEX}: expected one image for {wanted}, found {len(fitting)} of {len(listed)}; copy it alone, as by `skopeo --override-arch {wanted} copy`"
            )
        manifest = _json(_blob(archive, fitting[0]))
    if not isinstance(manifest, dict) or not isinstance(manifest.get("layers"), list):
        raise DataError(f"{_INDEX}: expected an image with layers")
    return [_blob(archive, one) for one in manifest["layers"]], _json(_blob(archive, manifest.get("config")))


def _blob(archive: Path, descriptor: Any) -> Path:
    """Return the file of a descriptor, whose checksum is its name."""
    digest = descriptor.get("digest") if isinstance(descriptor, dict) else None
    algorithm, _, value = digest.partition(":") if isinstance(digest, str) else ("", "", "")
    if algorithm != "sha256" or len(value) != 64 or not value.isalnum():
        raise DataError(f"expected a digest sha256:…, found {digest!r:.100}")
    path = _inside(archive, f"blobs/{algorithm}/{value}")
    with path.open("rb") as file:
        hashed = hashlib.sha256()
        while piece := file.read(1 << 20):
            hashed.update(piece)
    if hashed.hexdigest() != value:
        raise DataError(f"{path.name} is damaged: its checksum is {hashed.hexdigest()}")
    return path


def _inside(archive: Path, name: str) -> Path:
    """Return a regular file of an archive; it may be a link, as some versions of Docker write them, which stays inside."""
    path = Path(os.path.realpath(archive / name))
    if not path.is_relative_to(os.path.realpath(archive)) or not path.is_file():
        raise DataError(f"expected the file {name!r:.200} in the archive")
    return path


def _json(path: Path) -> Any:
    if path.stat().st_size > _LARGEST_JSON:
        raise DataError(f"{path.name}: expected JSON of at most {_LARGEST_JSON} bytes")
    try:
        return json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path.name}: expected JSON: {error}") from error


def _digests(config: Any, layers: int, source: str) -> list[str]:
    """Return the SHA-256 of each layer, uncompressed, that the configuration of an image lists."""
    listed = (config.get("rootfs") or {}).get("diff_ids") if isinstance(config, dict) else None
    if not isinstance(listed, list) or len(listed) != layers or not all(isinstance(one, str) for one in listed):
        raise DataError(f"{source}: expected rootfs.diff_ids of {layers} layers in the configuration of the image")
    return [one.removeprefix("sha256:") for one in listed]


def _own_machine() -> str:
    """Return the architecture of this machine, as images name it."""
    return _MACHINES.get(platform.machine(), platform.machine())


def _expect_machine(config: Any, source: str) -> None:
    """Refuse an image of another architecture: none of its programs would start. An older one may not name its own."""
    found, wanted = config.get("architecture") if isinstance(config, dict) else None, _own_machine()
    if found not in (None, "", wanted):
        raise DataError(
            f"{source}: expected an image for {wanted}, found one for {found!r:.80}; "
            f"get that one, as by `docker pull --platform linux/{wanted}` or `skopeo --override-arch {wanted} copy`"
        )


def _expect_files(directory: Path) -> None:
    """Refuse the folder that a Dockerfile is built in."""
    if (directory / _DOCKERFILE).is_file() and not any((directory / name).exists() for name in ("bin", "usr")):
        raise DataError(
            f"{directory} has a {_DOCKERFILE}, and no programs: no image is built here. Build it where Docker is, and add what `docker save` writes"
        )


def _settings(config: Mapping[str, Any], source: str) -> tuple[dict[str, str], str]:
    own = config.get("config") or {}
    variables, directory = own.get("Env") or [], own.get("WorkingDir") or "/"
    if not isinstance(directory, str) or not all(isinstance(one, str) and "=" in one for one in variables):
        raise DataError(f"{source}: expected Env, a list of NAME=VALUE, and WorkingDir in the configuration")
    return dict(one.split("=", 1) for one in variables), directory


def _pull(address: str, place: Path) -> Path:
    """Pull an image from a registry into an OCI layout by skopeo, or else into a SIF file by Apptainer, and return it."""
    if not address.startswith(_REGISTRY):
        raise DataError(f"{address}: expected a file, a directory, or an image of a registry as {_REGISTRY}python:3.12")
    layout, file = place / "pulled", place / "pulled.sif"
    if program := shutil.which("skopeo"):
        command, pulled = [program, "copy", address, f"oci:{layout}"], layout
    elif program := _apptainer():
        command, pulled = [program, "pull", str(file), address], file
    else:
        raise DataError(
            f"{address}: skopeo or Apptainer pulls images, and none is installed; "
            "add what `docker save` writes elsewhere, or an OCI layout"
        )
    _run(command, place, f"{address}: {Path(program).name} cannot pull it", stdout=2)
    return pulled


def _run(command: Sequence[str], place: Path, failed: str, stdout: int = subprocess.DEVNULL) -> None:
    """Run a program that has its temporary files in `place`. Raises DataError, which begins with `failed`, where it fails."""
    environment = os.environ | {"TMPDIR": str(place)}
    done = subprocess.run(
        command, stdout=stdout, stderr=subprocess.PIPE, env=environment, text=True, errors="replace", check=False
    )
    if done.returncode != 0:
        raise DataError(f"{failed}: {done.stderr.strip()[-400:]}")


def _apptainer() -> str | None:
    return shutil.which("apptainer") or shutil.which("singularity")


def _is_sif(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(_SIF_AT + len(_SIF))[_SIF_AT:] == _SIF


def _of_sif(source: Path, place: Path, named: str) -> ImageSource:
    """Unpack a SIF file, and return it with the variables that its scripts set, as Apptainer evaluates them inside.

    Args:
        place: directory in which it is unpacked.
        named: the source, for errors.
    """
    if (program := _apptainer()) is None:
        raise DataError(f"{named} is a SIF file, which Apptainer unpacks: do this where `apptainer` is installed")
    tree = place / "tree"
    unpack = [program, "build", "--sandbox", str(tree), str(source)]
    _run(unpack, place, f"{named}: apptainer cannot unpack it")
    begin, end = [program, "--silent", "exec", *_CONTAINED], ["env", "-0"]
    # it hands others on; without squashfuse, it unpacks the file once more
    outside = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    outside |= dict.fromkeys(("APPTAINER_TMPDIR", "SINGULARITY_TMPDIR"), str(place))
    with subprocess.Popen([*_BOUNDED, *begin, str(source), *end], stdout=subprocess.PIPE, env=outside) as shown:
        assert shown.stdout
        content = shown.stdout.read(_LARGEST_ENVIRONMENT)
    if shown.returncode != 0:
        show = shlex.join([*begin, named, *end])
        raise DataError(f"{named}: expected the variables of its programs from `{show}`, which failed")
    variables = dict(one.split("=", 1) for one in content.decode(errors="replace").split("\0") if "=" in one)
    own = {name: value for name, value in variables.items() if not _OF_APPTAINER.fullmatch(name)}
    return ImageSource("sif", tree, own, "/")
