"""Writes a teacher's log-probabilities of the rows of datasets: torchrun jobs/score.py DIRECTORY, which `hpcrl score` has made
(hpcrl/launch/local/score.py)

consumes   config.toml, score.json and dataset/ of the directory, the teacher that config.toml names
waits for  nothing
produces   teacher/ of the directory, for each dataset as a whole
ends       with 0 when all rows are written; with the exit code of hpcrl/errors.py otherwise
"""

from __future__ import annotations

from hpcrl.runtime.signals import die_with_parent

if __name__ == "__main__":
    die_with_parent()

import sys

from torch.distributed.elastic.multiprocessing.errors import record

from hpcrl.config import Config
from hpcrl.data.token_file import open_tokens
from hpcrl.errors import HpcrlError
from hpcrl.launch.local.score import PROCESS
from hpcrl.rundir.layout import Run
from hpcrl.runtime.process_status import StatusWriter
from hpcrl.runtime.signals import end_process
from hpcrl.trainer.distributed import World, joined
from hpcrl.trainer.scoring.rows import RowTeacher, require_row_teacher


@record
def main(path: str) -> None:
    place = Run.open(path)
    config = Config.from_toml([place.config])
    with joined(config.trainer.deterministic, config.slurm.gpus > 0, config.slurm.patience) as world:
        write(place, config, world, StatusWriter(place, PROCESS, 0) if world.first else None)


def write(place: Run, config: Config, world: World, status: StatusWriter | None) -> None:
    """Write what the teacher says of each dataset."""

    def tell(state: str) -> None:
        if status:
            status.write(state)

    tell("loading the teacher")
    world.rank0_broadcast(lambda: require_row_teacher(config))
    teacher = RowTeacher(config, world)
    for at, location in enumerate(config.data.train_data):
        tokens = open_tokens(place.dataset(f"train-{at}"))
        teacher.write(
            place.teacher_file(f"train-{at}"),
            tokens,
            lambda done: tell(f"{location}: {done:,} of {len(tokens):,} rows"),  # noqa: B023 - called before the next one
        )
    tell("finished")


if __name__ == "__main__":
    try:
        main(sys.argv[1])
    except HpcrlError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        end_process(error.exit_code)
    end_process()
