"""A scorer of a run, one process per rank, started by torchrun where there are several: python jobs/scorer.py RUN

consumes   a model that is not trained, samples/
waits for  finished groups of the controller
produces   scores/<model>/, timeline/
ends       with 0 when the controller says stop or on SIGTERM; with the exit code of hpcrl/errors.py otherwise. ConfigError and DataError would
           end every scorer of that model
"""

from __future__ import annotations

from hpcrl.rundir.process_names import scorer_name
from hpcrl.runtime.signals import die_with_parent, end_process

if __name__ == "__main__":
    die_with_parent()

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, nullcontext
from pathlib import Path

from torch.distributed.elastic.multiprocessing.errors import record

from hpcrl.config import Config
from hpcrl.config.scorers import REWARD, ScorerSet, samples_at_once, scorer_number
from hpcrl.errors import HpcrlError
from hpcrl.observe.timeline import Timeline, process_start
from hpcrl.rundir.attempt_config import attempt_config
from hpcrl.rundir.layout import Run
from hpcrl.runtime.heartbeat import DIRECTORY, Heartbeat
from hpcrl.runtime.process_status import StatusWriter, ending_told, renewed
from hpcrl.trainer.distributed import World, joined
from hpcrl.trainer.scoring.engine import engine_of_teacher
from hpcrl.trainer.scoring.model import ScoringModel, fitting_teacher
from hpcrl.trainer.scoring.reward import RewardScoringModel
from hpcrl.trainer.scoring.worker import Judge, ScoreWorker


@record
def main(path: str) -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    run, attempt, number = Run.open(path), int(os.environ["HPCRL_ATTEMPT"]), int(os.environ["HPCRL_SCORER"])
    name, first = scorer_name(number), os.environ["RANK"] == "0"
    if not first:  # the others go where rank 0 goes, so that its agent watches that one
        os.environ.pop(DIRECTORY, None)
    heartbeat, status = Heartbeat(run, attempt, name), StatusWriter(run, name, attempt)
    config = attempt_config(run, attempt)
    trainer, scorers = config.trainer, scorer_number(config, number)
    if first:
        status.write(f"loading the {scorers.title}")

    def still_starting() -> None:
        heartbeat.beat()
        status.write("starting the teacher's engine")

    with (
        ending_told(status) if first else nullcontext(),
        closing(
            Timeline(run, name if first else f"{name}-rank-{os.environ['RANK']}", attempt, began=process_start())
        ) as timeline,
        ExitStack() as stack,
    ):
        tells = first and not scorers.engine  # of an engine, `still_starting` does
        on_gpu = config.slurm.gpus > 0 and not scorers.engine
        with renewed(status, f"loading the {scorers.title}") if tells else nullcontext():
            world = stack.enter_context(joined(trainer.deterministic, on_gpu, config.slurm.patience))
            log = run.log(attempt, f"engine-{name}")
            model = stack.enter_context(model_of(run, config, scorers, world, log, still_starting))
        samples = samples_at_once(config, scorers)
        ScoreWorker(run, attempt, name, scorers.name, model, samples, world, status, heartbeat, timeline).run()


@contextmanager
def model_of(
    run: Run, config: Config, scorers: ScorerSet, world: World, log: Path, still_starting: Callable[[], None]
) -> Iterator[Judge]:
    """Have the model of a scorer: in its ranks, or in an engine beside it."""
    if scorers.role == REWARD:
        yield RewardScoringModel(run, config, scorers, world)
    elif not scorers.engine:
        yield ScoringModel(run, config, scorers, world)
    else:
        aligner = fitting_teacher(config, scorers)
        with engine_of_teacher(config).engine_teacher(run, config, scorers, aligner, log, still_starting) as model:
            yield model


if __name__ == "__main__":
    try:
        main(sys.argv[1])
    except HpcrlError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        end_process(error.exit_code)
    end_process()
