"""`hpcrl image …`: images of sandboxes."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from hpcrl.cli._common import Subcommands, add_root
from hpcrl.text import printable

if TYPE_CHECKING:
    from hpcrl.sandboxes.images import ImageStore


def add_arguments(parser: argparse.ArgumentParser) -> None:
    commands = Subcommands(parser)
    add = commands.add("add", "store an image, once for all nodes", _add)
    add.add_argument("name", metavar="NAME", help="letters, digits and . _ -")
    add.add_argument(
        "source",
        metavar="SOURCE",
        help="archive of `docker save`, OCI layout (archive or directory), directory, SIF file, or docker://IMAGE of a registry",
    )
    add.add_argument("--temporary", type=Path, metavar="DIR", help="where it is unpacked meanwhile (default: $TMPDIR)")
    ls = commands.add("ls", "list the images", _ls)
    rm = commands.add("rm", "remove an image", _rm)
    rm.add_argument("name", metavar="NAME")
    for command in (add, ls, rm):
        add_root(command)


def _store(arguments: argparse.Namespace) -> ImageStore:
    from hpcrl.rundir.layout import default_root
    from hpcrl.sandboxes.images import ImageStore

    return ImageStore(arguments.root or default_root())


def _add(arguments: argparse.Namespace) -> int:
    import signal

    from hpcrl.units import readable_size

    # what is unpacked has gigabytes, which nobody else removes
    ending = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, signal.default_int_handler) for number in ending}
    try:
        image = _store(arguments).add(arguments.name, arguments.source, temporary=arguments.temporary)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    print(f"{image.name}: {image.kind}, {readable_size(image.size)}, sha256 {image.digest}")
    return 0


def _ls(arguments: argparse.Namespace) -> int:
    import time

    from hpcrl.units import readable_size, rough_duration

    images = _store(arguments).list()
    width = max((len(image.name) for image in images), default=0)
    for image in images:
        age = rough_duration(time.time() - image.added)
        line = f"{image.name:{width}}  {readable_size(image.size):>10}  {image.kind}, {age} ago, {image.digest[:12]}"
        print(printable(line))
    if not images:
        print("no images; `hpcrl image add NAME SOURCE` stores one")
    return 0


def _rm(arguments: argparse.Namespace) -> int:
    _store(arguments).remove(arguments.name)
    print(f"removed {arguments.name}")
    return 0
