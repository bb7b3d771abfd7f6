"""The packages of trackers, each on this machine alone, get each value once over a restart. `make trackers` installs them."""

from __future__ import annotations

import json
import os
import sqlite3
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hpcrl.config import Config
from hpcrl.observe.metrics import MetricsWriter
from hpcrl.rundir.commit import write_text
from hpcrl.rundir.layout import Run
from tests.paths import QUICKSTART, ROOT

Points = list[tuple[int, float]]
ALONE = {"WANDB_MODE": "offline", "SWANLAB_MODE": "local", "TRACKIO_DISABLE_UPDATE_CHECK": "1"}


def of_mlflow(folder: Path) -> Points:
    (path,) = folder.glob("*/*/metrics/x")
    lines = [line.split() for line in path.read_text().splitlines()]
    return [(int(step), float(value)) for _, value, step in lines]


def of_swanlab(folder: Path) -> Points:
    lines = [json.loads(line) for path in folder.glob("run-*/logs/*/*.log") for line in path.read_text().splitlines()]
    return sorted((line["index"], line["data"]) for line in lines)


def of_trackio(folder: Path) -> Points:
    with sqlite3.connect(next(folder.glob("*.db"))) as database:
        rows = database.execute("select step, metrics from metrics order by step").fetchall()
    return [(step, json.loads(metrics)["x"]) for step, metrics in rows]


def of_wandb(folder: Path) -> Points:
    from wandb.proto.wandb_internal_pb2 import Record  # pyright: ignore[reportMissingImports]

    found = []
    for path in sorted(folder.glob("wandb/offline-run-*/run-*.wandb")):
        for content in blocks(path.read_bytes()):
            items = Record.FromString(content).history.item
            row = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in items}
            if "x" in row:
                found.append((row["step"], row["x"]))
    return found


def blocks(data: bytes) -> Iterator[bytes]:
    """Yield the records of a file in LevelDB's log format, behind its own header of 7 bytes."""
    at, whole = 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield whole
            whole = b""


@pytest.mark.trackers
@pytest.mark.parametrize("read", [of_wandb, of_mlflow, of_swanlab, of_trackio], ids=lambda read: read.__name__[3:])
def test_each_value_once(read: Callable[[Path], Points], tmp_path: Path) -> None:
    name, run = read.__name__[3:], Run(tmp_path / "project" / "rate.0-lr-1")
    write_text(run.config, Config.from_toml([QUICKSTART]).to_toml())
    for attempt, resume, last in ((1, 0, 5), (2, 3, 7)):
        with MetricsWriter(run, "trainer", attempt, resume) as writer:
            for step in range(resume + 1, last + 1):
                writer.write(step, {"x": 1000 * attempt + step})
        subprocess.run(
            [sys.executable, "-m", "hpcrl.cli.main", "sync", str(run.path), "--to", name],
            check=True, timeout=120, cwd=tmp_path, env={**os.environ, **ALONE, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"},
        )  # fmt: skip
    expected = [*((step, 1000.0 + step) for step in range(1, 6)), (6, 2006.0), (7, 2007.0)]
    assert read(run.tracker(name).with_suffix("")) == expected
