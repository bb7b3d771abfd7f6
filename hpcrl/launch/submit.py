"""From configurations to queued runs: run directories, code snapshot, one submitit call.

Nothing is half-made: directories appear complete, and are removed again if the executor refuses.
"""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import signal
import socket
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import submitit
from submitit.core.core import Job
from submitit.core.utils import DelayedSubmission, FailedJobError, FailedSubmissionError, JobPaths

import hpcrl
from hpcrl.config import Config
from hpcrl.errors import RunError, SubmitError
from hpcrl.launch import agent
from hpcrl.launch.patient import submitted
from hpcrl.launch.plan import make_plan, trainer_nodes
from hpcrl.launch.sweep import run_names
from hpcrl.run.commit import discard, write_json, write_text
from hpcrl.run.layout import Run

_PASSED_ON = ("partition", "account", "qos", "constraint", "array_parallelism")


@dataclass(frozen=True)
class Element:
    """One run to be submitted.

    Attributes:
        overrides: what sets it apart in its sweep.
    """

    name: str
    config: Config
    overrides: list[str]


@dataclass(frozen=True)
class Submission:
    """What one submit call makes, before it is made.

    Attributes:
        folder: submitit's folder and the code snapshot, shared by the elements.
        elements: the runs, in the order of their array indices.
    """

    folder: Path
    elements: list[Element]

    @property
    def runs(self) -> list[Run]:
        return [Run(self.folder.parent.parent / element.name) for element in self.elements]

    @property
    def element_list(self) -> Path:
        """File from which the end of the batch script learns the run directory of each array index."""
        return self.folder / f"elements-{self.elements[0].name}-{len(self.elements)}.json"


class ArrayExecutor(submitit.SlurmExecutor):
    """Submits one function, too, as a job array: every run is an element, with an id of the form 12_0."""

    def _internal_process_submissions(self, delayed_submissions: list[DelayedSubmission]) -> list[Job[Any]]:
        if len(delayed_submissions) > 1:
            return super()._internal_process_submissions(delayed_submissions)
        folder = JobPaths.get_first_id_independent_folder(self.folder)
        folder.mkdir(parents=True, exist_ok=True)
        pickled = folder / f"{uuid.uuid4().hex}.pkl"
        delayed_submissions[0].set_timeout(self.parameters["time"], self.max_num_timeout)
        delayed_submissions[0].dump(pickled)
        self.parameters["map_count"] = 1
        array = self._submit_command(self._submitit_command_str)
        job = submitit.SlurmJob(folder=self.folder, job_id=f"{array.job_id}_0", tasks=list(range(array.num_tasks)))
        job.paths.move_temporary_file(pickled, "submitted_pickle")
        return [job]


def prepare(name: str, elements: Sequence[tuple[Config, list[str]]]) -> Submission:
    """Name the runs of a submission, one per element of a job array.

    Args:
        name: of the submission; the runs of a sweep add to it what sets them apart.
        elements: each configuration, and the overrides that it has alone.

    Raises:
        RunError: a run directory of that name exists.
    """
    first = elements[0][0]
    project = (Path(first.slurm.root).expanduser() / first.trainer.project_name).absolute()
    names = run_names(name, [overrides for _, overrides in elements])
    named = [Element(own, config, overrides) for own, (config, overrides) in zip(names, elements, strict=True)]
    submission = Submission(project / ".slurm" / name, named)
    for run in submission.runs:
        if run.path.exists():
            raise RunError(
                f"{run.path} exists; choose another trainer.run_name, or continue it with `hpcrl resume {run.name}`"
            )
    if submission.folder.exists():
        raise RunError(f"{submission.folder} exists from an earlier submission; choose another trainer.run_name")
    return submission


def code_sources() -> dict[str, Path]:
    """Return where hpcrl/ and jobs/ lie: side by side in a checkout, jobs inside the package in an installed wheel."""
    package = Path(hpcrl.__file__).parent
    inside = package / "_jobs"
    return {"hpcrl": package, "jobs": inside if inside.is_dir() else package.parent / "jobs"}


def _make_folder(folder: Path) -> None:
    """Take the name of the submission, and copy the code that every attempt will run, whatever happens to the checkout meanwhile.

    Raises:
        RunError: somebody took the name a moment ago.
    """
    try:
        folder.mkdir(parents=True, mode=0o700)  # what lies in it is executed by the job
    except FileExistsError:
        raise RunError(f"{folder} exists from another submission; choose another trainer.run_name") from None
    ignore = shutil.ignore_patterns("__pycache__", "*.pyc", "_jobs")
    for name, source in code_sources().items():
        shutil.copytree(source, folder / "code" / name, ignore=ignore)


def _make_run(run: Run, element: Element, folder: Path) -> None:
    staged = Run(run.path.with_name(f".tmp-{run.name}.{os.getpid()}"))
    staged.path.mkdir(parents=True, mode=0o700)
    write_text(staged.config, element.config.to_toml())
    token = staged.token
    token.parent.mkdir(mode=0o700)
    write_text(token, secrets.token_hex(32) + "\n", mode=0o600)
    shared = os.path.relpath(folder, run.path)
    staged.slurm.symlink_to(shared)
    staged.code.symlink_to(f"{shared}/code")
    for directory in (staged.endpoints, staged.stop.parent, staged.metrics, staged.samples, staged.batches):
        directory.mkdir()
    os.rename(staged.path, run.path)


def _setup_lines(config: Config, folder: Path) -> list[str]:
    code = _quote(folder / "code")
    return [
        "umask 077",
        *config.slurm.setup,
        f'export PYTHONPATH={code}"${{PYTHONPATH:+:$PYTHONPATH}}" PYTHONSAFEPATH=1 PYTHONUNBUFFERED=1',
    ]


def _quote(path: Path) -> str:
    return "'" + str(path).replace("'", "'\\''") + "'"


def slurm_executor(submission: Submission) -> submitit.SlurmExecutor:
    """Return the executor whose job array runs this submission. All elements share one batch script, made from the first."""
    config = submission.elements[0].config
    slurm, plan = config.slurm, make_plan(config)
    survives = len(plan) - trainer_nodes(plan) > 1  # the loss of a node that has one of several replicas
    parameters: dict[str, Any] = {
        "job_name": f"hpcrl-{submission.folder.name}",
        "comment": f"hpcrl:{submission.folder.name}",
        "time": slurm.time_minutes,
        "nodes": len(plan),
        "ntasks_per_node": 1,
        "signal_delay_s": slurm.signal_seconds,
        "wckey": None,
        "stderr_to_stdout": True,
        "setup": _setup_lines(config, submission.folder),
        "teardown": [
            f"{_quote(Path(sys.executable))} -m hpcrl.launch.finish {_quote(submission.element_list)}; exit $?"
        ],
        "srun_args": ["--kill-on-bad-exit=0", *(["--no-kill"] if survives else [])],
        "additional_parameters": {
            **({"no-kill": True} if survives else {}),
            "no-requeue" if config.trainer.resume_mode == "none" else "requeue": True,
            **slurm.extra,
        },
    }
    for name in _PASSED_ON:
        if (value := getattr(slurm, name)) is not None:
            parameters[name] = value
    if slurm.mem_gb is not None:
        parameters["mem"] = f"{slurm.mem_gb}GB"
    if slurm.exclusive:
        parameters["exclusive"] = True
    if slurm.gpus_per_node:
        parameters["gpus_per_node"] = slurm.gpus_per_node
    if slurm.cpus_per_task is not None:
        parameters["cpus_per_task"] = slurm.cpus_per_task
        parameters["srun_args"].append(f"--cpus-per-task={slurm.cpus_per_task}")
    executor = ArrayExecutor(folder=submission.folder / "%j")
    executor.update_parameters(**parameters)
    return executor


def local_executor(submission: Submission) -> submitit.LocalExecutor:
    """Return the executor that runs the same agents as processes of this machine, one per node of the plan."""
    config = submission.elements[0].config
    plan = make_plan(config)
    executor = submitit.LocalExecutor(folder=submission.folder / "%j")
    executor.update_parameters(
        timeout_min=config.slurm.time_minutes,
        tasks_per_node=len(plan),
        gpus_per_node=sum(node.gpus for node in plan),
        visible_gpus=_visible_gpus(),
        signal_delay_s=config.slurm.signal_seconds,
        stderr_to_stdout=True,
        setup=_setup_lines(config, submission.folder),
    )
    return executor


def _visible_gpus() -> list[int]:
    """Return the devices that the user has left to this run, or nothing where all are."""
    listed = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    return [int(device) for device in listed] if all(device.isdigit() for device in listed) else []


def batch_script(submission: Submission) -> str:
    """Return the sbatch script that submitit would write."""
    executor = slurm_executor(submission)
    executor.parameters["map_count"] = len(submission.elements)
    return executor._make_submission_file_text(executor._submitit_command_str, "dry-run")


def submit(submission: Submission, local: bool) -> list[Run]:
    """Make the run directories and hand them to Slurm, or to the local executor.

    Raises:
        SubmitError: the executor refused; nothing is left behind.
    """
    folder, runs = submission.folder, submission.runs
    _make_folder(folder)
    made = [folder]
    try:
        for run, element in zip(runs, submission.elements, strict=True):
            _make_run(run, element, folder)
            made.append(run.path)
        launch(submission, local)
    except BaseException:
        for path in made:
            discard(path)
        for parent in (folder.parent, folder.parent.parent, folder.parent.parent.parent):
            with suppress(OSError):  # others' runs are in it
                parent.rmdir()
        raise
    return runs


def launch(submission: Submission, local: bool) -> None:
    """Start agents for run directories that exist, and record the job in each of them.

    Raises:
        SubmitError: the executor refused.
    """
    logging.getLogger("submitit").setLevel(logging.ERROR)
    runs = submission.runs
    write_json(submission.element_list, [str(run.path) for run in runs])
    executor = local_executor(submission) if local else slurm_executor(submission)
    paths = [str(run.path) for run in runs]
    try:
        with submitit.helpers.clean_env(), _detached(submission.folder / "local.log") if local else nullcontext():
            jobs = submitted(lambda: executor.map_array(agent.main, paths), submission.folder)
    except (FailedJobError, FailedSubmissionError) as error:
        raise SubmitError(f"Slurm refused the job: {_refusal(str(error))}") from error
    try:
        for run, element, job in zip(runs, submission.elements, jobs, strict=True):
            record = {
                "executor": "local" if local else "slurm",
                "host": socket.gethostname(),
                "job_id": job.job_id,
                "overrides": element.overrides,
                "submitted": time.time(),
            }
            write_json(run.submission, record)
    except BaseException:
        for job in jobs:  # nobody would find it
            job.cancel(check=False)
        raise


@contextmanager
def _detached(log: Path) -> Iterator[None]:
    """Let what is started inside outlive this terminal: it ignores Ctrl-C and hang-up, and holds none of our files open."""
    ours = [os.dup(number) for number in range(3)]
    ignored = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGHUP)}
    sys.stdout.flush()
    with log.open("ab") as file, open(os.devnull, "rb") as nothing:
        for number, stream in enumerate((nothing, file, file)):
            os.dup2(stream.fileno(), number)
        try:
            yield
        finally:
            for number, saved in enumerate(ours):
                os.dup2(saved, number)
                os.close(saved)
            for number, handler in ignored.items():
                signal.signal(number, handler)


def _refusal(text: str) -> str:
    lines = [line.partition("sbatch: error: ")[2].strip() for line in text.splitlines() if "sbatch: error: " in line]
    return "; ".join(lines) or text.strip()


def require_slurm() -> None:
    """Raise SubmitError where sbatch is not to be found."""
    if shutil.which("sbatch") is None:
        raise SubmitError(
            "there is no Slurm here (no sbatch on PATH): use --local to run on this machine, --dry-run to see what would be "
            "submitted, or slurm/devcluster to try a small Slurm of your own"
        )
