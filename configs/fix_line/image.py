"""Makes the image of configs/fix_line.toml: this machine's `sh`, `rm` and `mkdir`, with the libraries that they load.

    python configs/fix_line/image.py DIRECTORY

DIRECTORY is new, and has about 3 MB; `hpcrl image add shell DIRECTORY` reads it. Other images with these programs serve as well.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

PROGRAMS = ("sh", "rm", "mkdir")


def main(directory: Path) -> None:
    for name in ("bin", "dev", "proc", "tmp"):
        (directory / name).mkdir(parents=True)
    found = [path for name in PROGRAMS if (path := shutil.which(name, path="/bin:/usr/bin"))]
    for path in found:
        shutil.copy(path, directory / "bin")
    listed = subprocess.run(["ldd", *found], capture_output=True, text=True, check=True).stdout
    for library in set(re.findall(r"(/\S+) \(0x", listed)):
        place = directory / library.lstrip("/")
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(library, place)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
