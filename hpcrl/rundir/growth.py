"""Records the newest attempt that stopped in order to go on with more nodes, or with other roles of its nodes: control/growth.json."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from hpcrl.rundir.commit import write_text
from hpcrl.rundir.layout import Run
from hpcrl.rundir.records import as_record, read_object, with_checksum

_REMEDY = "remove it: the run may then grow again at once"


@dataclass(frozen=True)
class GrowthRecord:
    """Growth that an attempt was asked to stop for.

    Attributes:
        attempt: that stopped.
        time: Unix time.
        nodes: of the next attempt, where Slurm starts it on them; as many as the attempt has where their roles move.
        job: that should start next, one of several requests; it goes before the others.
    """

    attempt: int
    time: float
    nodes: int
    job: str


def read_growth(run: Run) -> GrowthRecord | None:
    """Return the newest growth; None: there was none. Raises RunError where the record is damaged."""
    value = read_object(run.growth, _REMEDY)
    return None if value is None else as_record(GrowthRecord, value, run.growth, _REMEDY)


def write_growth(run: Run, growth: GrowthRecord) -> None:
    write_text(run.growth, with_checksum(asdict(growth))[0])
