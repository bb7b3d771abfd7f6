"""Makes the database that the example rows of text2sql ask about: python -m hpcrl.envs.examples.databases FOLDER

FOLDER is then what environment.skyrl_gym.text2sql.db_path names.
"""

from __future__ import annotations

import sqlite3
import sys
from contextlib import closing
from pathlib import Path


def make(folder: Path) -> Path:
    """Write the database shop, in the place of one that is there, and return its file."""
    path = folder / "shop" / "shop.sqlite"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(f"BEGIN; {Path(__file__).with_name('text2sql.sql').read_text()} COMMIT;")
    return path


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    print(make(Path(sys.argv[1])))
