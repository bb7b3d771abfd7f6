"""Submits configurations: run directories, code snapshot, one submitit call.

Nothing is half-made: directories appear complete, and are removed again if the executor refuses.
"""

from __future__ import annotations

import compileall
import logging
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import submitit
from submitit.core.core import Job
from submitit.core.utils import FailedJobError, FailedSubmissionError

import hpcrl
from hpcrl.config import Config
from hpcrl.config.setting import ONE_LINE
from hpcrl.errors import RunError, SubmitError
from hpcrl.launch.agent import agent, evaluation, pool
from hpcrl.launch.doctor.cluster import request_findings
from hpcrl.launch.doctor.disk_space import Sizes
from hpcrl.launch.pools import ROLLOUT, elastic_pools, with_few_cores
from hpcrl.launch.requeue.elastic import cancel_recorded_pools
from hpcrl.launch.requeue.evaluation import cancel_recorded_evaluation
from hpcrl.launch.scheduler import not_here
from hpcrl.launch.sharing import closed_above, share, writing_for
from hpcrl.launch.submit.executors import (
    Element,
    Submission,
    evaluation_executor,
    local_executor,
    pool_executor,
    slurm_executors,
    submit_with_retry,
    upload_executor,
    uploads_by_job,
)
from hpcrl.launch.submit.models import folder_of
from hpcrl.launch.submit.own_files import own_files, own_modules
from hpcrl.launch.submit.sweep import run_names
from hpcrl.observe.trial.plan import write_plan
from hpcrl.rundir.checksums import OwnFiles, note_checksums
from hpcrl.rundir.commit import discard, naming, read_json, write_json, write_text
from hpcrl.rundir.evaluations import MOST_OPEN
from hpcrl.rundir.layout import COMMIT, Run, root_of
from hpcrl.rundir.other_roots import make_folders, places_of, require_unused
from hpcrl.text import printable
from hpcrl.upload.send import job as upload_job

_AT_ONCE = 8  # files that are copied at the same time


def prepare(name: str, elements: Sequence[tuple[Config, list[str]]], names: Sequence[str] | None = None) -> Submission:
    """Name the runs of a submission, one per element of a job array.

    Args:
        name: of the submission; the runs of a sweep add their index and values.
        elements: each configuration, and the overrides that it has alone.
        names: of the runs; None: as of `run_names`.

    Raises:
        RunError: a run directory of that name exists.
    """
    first = elements[0][0]
    project = (root_of(first.slurm.root) / first.trainer.project_name).absolute()
    _require_writable(project, "root")
    names = names or run_names(name, [overrides for _, overrides in elements])
    named = [Element(own, config, overrides) for own, (config, overrides) in zip(names, elements, strict=True)]
    submission = Submission(project / ".slurm" / name, named)
    for run in submission.runs:
        if run.path.exists():
            raise RunError(
                f"{run.path} exists; choose another trainer.run_name, or continue it with `hpcrl resume {run.name}`"
            )
    for run, element in zip(submission.runs, named, strict=True):
        for setting, place in places_of(run, element.config.slurm).items():
            _require_writable(place.parents[1], setting)
            require_unused(place.parent)
    if submission.folder.exists():
        raise RunError(f"{submission.folder} exists from an earlier submission; choose another trainer.run_name")
    return submission


def _require_writable(folder: Path, setting: str) -> None:
    if setting == "root" and "%" in str(folder):
        raise SubmitError(
            f"slurm.root: {folder} has a %, which Slurm and submitit replace in the names of logs; choose another slurm.root"
        )
    if problem := ONE_LINE.error(str(folder)):
        raise SubmitError(f"slurm.{setting}: {problem}")
    place = folder
    while not os.path.lexists(place):
        place = place.parent
    if not place.is_dir():
        raise SubmitError(
            f"slurm.{setting}: {folder} cannot be made, because {place} is no directory; choose another slurm.{setting}"
        )
    if not os.access(place, os.W_OK | os.X_OK):
        raise SubmitError(
            f"slurm.{setting}: {folder} cannot be made, because you cannot write into {place}; choose another slurm.{setting}"
        )


def code_sources() -> dict[str, Path]:
    """Return where hpcrl/ and jobs/ lie: side by side in a checkout, jobs inside the package in an installed wheel."""
    package = Path(hpcrl.__file__).parent
    inside = package / "_jobs"
    return {"hpcrl": package, "jobs": inside if inside.is_dir() else package.parent / "jobs"}


def _make_folder(folder: Path) -> None:
    """Create the folder of the submission. Raises RunError where somebody took it a moment ago."""
    try:
        folder.mkdir(parents=True, mode=0o700)  # what lies in it is executed by the job
    except FileExistsError:
        raise RunError(f"{folder} exists from another submission; choose another trainer.run_name") from None
    except OSError as error:
        raise SubmitError(f"slurm.root: {folder} cannot be made: {error.strerror}; choose another slurm.root") from None


def _copy_code(folder: Path) -> None:
    """Copy the code that every attempt will run, whatever happens to the checkout meanwhile, with what Python has compiled of it.

    Without that each process of the first attempt compiles the modules that it imports.
    """
    copies = list[tuple[Path, Path]]()
    for name, source in code_sources().items():
        compileall.compile_dir(
            source, quiet=2
        )  # what is compiled already stays; a folder that cannot be written is left as it is
        for path in [source, *sorted(source.rglob("*"))]:
            target = folder / "code" / name / path.relative_to(source)
            if not {"_jobs", "_tiny_model"}.isdisjoint(path.relative_to(source).parts):
                continue
            if path.is_dir():
                target.mkdir(parents=True)
            elif "__pycache__" not in path.parts or path.name.endswith(f".{sys.implementation.cache_tag}.pyc"):
                copies.append((path, target))
    with ThreadPoolExecutor(_AT_ONCE) as threads:
        list(threads.map(_copy, copies))
    if commit := commit_of(*code_sources().values()):
        write_text(folder / "code" / COMMIT, commit + "\n")


def commit_of(package: Path, *others: Path) -> str:
    """Return the commit of the git checkout that a package is a part of; empty without one, or without git.

    " with changes" follows where files of the package, or of other folders of the checkout, differ from the commit or are not in it.
    """

    def git(*asked: str) -> str:
        command = ["git", "--no-optional-locks", "-C", str(package), *asked]
        return subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=10, check=True).stdout

    with suppress(OSError, subprocess.SubprocessError):
        commit = git("rev-parse", "HEAD", "HEAD:./__init__.py").split()[0]  # an error where it is not tracked
        changes = git("status", "--porcelain", "--untracked-files=normal", "--", str(package), *map(str, others))
        return commit + (" with changes" if changes else "")
    return ""


def _copy(copy: tuple[Path, Path]) -> None:
    source, target = copy
    content = source.read_bytes()
    with naming(target):
        target.write_bytes(content)
    changed = source.stat().st_mtime_ns
    with suppress(OSError):  # by this time Python knows what was compiled of it; not every filesystem lets one set it
        os.utime(target, ns=(changed, changed))


def _staged(run: Run) -> Run:
    return Run(run.path.with_name(f".tmp-{run.name}.{os.getpid()}"))


def _make_run(run: Run, element: Element, folder: Path, own: OwnFiles, made: list[Path]) -> None:
    staged = _staged(run)
    made.append(staged.path)
    staged.path.mkdir(parents=True, mode=0o700)
    make_folders(run, staged, element.config.slurm, made)
    write_text(staged.config, element.config.to_toml())
    token = staged.token
    token.parent.mkdir(mode=0o700)
    write_text(token, secrets.token_hex(32) + "\n", mode=0o600)
    relative = os.path.relpath(folder, run.path)
    staged.slurm.symlink_to(relative)
    staged.code.symlink_to(f"{relative}/code")
    note_checksums(staged, own)
    for directory in (staged.endpoints, staged.stop.parent, staged.metrics, staged.samples, staged.batches):
        directory.mkdir()
    if group := element.config.slurm.readable_by:
        for shared in (staged.path, *(place.parent for place in places_of(run, element.config.slurm).values())):
            share(shared, group)
    os.rename(staged.path, run.path)
    made.append(run.path)


def submit(submission: Submission, local: bool) -> list[Run]:
    """Make the run directories and hand them to Slurm, or to the local executor.

    Raises:
        SubmitError: the executor refused, or the filesystem; nothing is left behind.
    """
    if group := submission.elements[0].config.slurm.readable_by:
        _open_for(group, submission)
    with writing_for(group):
        return _submit(submission, local)


def _open_for(group: str, submission: Submission) -> None:
    """Make the directories above the runs, which are not theirs alone, and print those through which the group cannot pass."""
    above = [submission.folder]
    for run, element in zip(submission.runs, submission.elements, strict=True):
        above += [place.parent for place in places_of(run, element.config.slurm).values()]
    for folder in above:
        with suppress(OSError):  # the submission reports it
            folder.parent.mkdir(parents=True, exist_ok=True)
    for closed in sorted({path for folder in above for path in closed_above(folder, group)}):
        print(f"hpcrl: slurm.readable_by: {group} cannot pass {closed}, and so not read the run", file=sys.stderr)


def _submit(submission: Submission, local: bool) -> list[Run]:
    folder, runs = submission.folder, submission.runs
    _make_folder(folder)
    made = [folder]
    try:
        _copy_code(folder)
        if submission.trial:
            write_plan(folder, submission.trial)
        if group := submission.elements[0].config.slurm.readable_by:
            share(folder, group)
        own = {modules: own_files(modules) for modules in {own_modules(each.config) for each in submission.elements}}
        for run, element in zip(runs, submission.elements, strict=True):
            _make_run(run, element, folder, own[own_modules(element.config)], made)
        launch(submission, local)
    except BaseException as error:
        for path in made:
            discard(path)
        for parent in dict.fromkeys([*folder.parents[:3], *(path.parent for path in made)]):
            with suppress(OSError):  # others' runs are in it
                parent.rmdir()
        if isinstance(error, OSError):
            where = error.filename or folder
            raise SubmitError(f"{where} cannot be written: {error.strerror}; look at that filesystem") from error
        raise
    return runs


def launch(submission: Submission, local: bool) -> None:
    """Start agents for run directories that exist, and record the jobs in each of them. Raises SubmitError where the executor refuses."""
    logging.getLogger("submitit").setLevel(logging.ERROR)
    runs, config = submission.runs, submission.planned
    _require_ordinary_user(config)
    if local:
        _require_local(submission)
    else:
        _require_cluster(config)
    write_json(submission.element_list, [str(run.path) for run in runs])
    executors = {"": local_executor(submission)} if local else slurm_executors(submission)
    paths, jobs = [str(run.path) for run in runs], list[Job[Any]]()
    sizes = [Sizes.of(element.config, folder_of) for element in submission.elements]
    try:
        with submitit.helpers.clean_env(), _detached(submission.folder / "local.log") if local else nullcontext():
            requests = dict[str, list[Job[Any]]]()
            for name, executor in executors.items():
                elements = submission.asked_by(name).elements
                layouts = [element.layouts for element in elements]
                # the code of older runs takes none
                of_agents = [layouts] if any(layout.sizes for own in layouts for layout in own) else []
                start = partial(executor.map_array, agent.main, paths, sizes, *of_agents)
                requests[name] = submit_with_retry(start, submission.folder)
                jobs += requests[name]
            gangs = [{name: own[at].job_id for name, own in requests.items()} for at in range(len(runs))]
            arrays = [_start_pools(submission, at, own, jobs, sizes[at]) for at, own in enumerate(gangs)]
            uploads = [_start_upload(submission, at, own, jobs) for at, own in enumerate(gangs)]
            evaluations = [_start_evaluation(submission, at, own, jobs) for at, own in enumerate(gangs)]
        beside = zip(runs, submission.elements, gangs, arrays, uploads, evaluations, strict=True)
        for run, element, own, pool_jobs, upload, evaluating in beside:
            earlier = read_json(run.submission) or {}
            record = {
                "executor": "local" if local else "slurm",
                "host": socket.gethostname(),
                "job_id": next(iter(own.values())),
                **({"requests": own} if config.slurm.requests and not local else {}),
                "pool": pool_jobs.pop(ROLLOUT, None),
                "scorer_pools": pool_jobs,
                "upload": upload,
                "evaluation": evaluating,
                "overrides": element.overrides,
                "submitted": time.time(),
            }
            write_json(run.submission, record)
            cancel_recorded_pools(earlier)
            cancel_recorded_evaluation(earlier)
    except BaseException as error:
        for job in jobs:  # nobody would find it
            job.cancel(check=False)
        if isinstance(error, FailedJobError | FailedSubmissionError):
            raise SubmitError(f"Slurm refused the job: {_refusal(str(error))}") from error
        raise


def _require_ordinary_user(config: Config) -> None:
    """Raise SubmitError where a run with sandboxes would be root's."""
    if config.sandbox_servers and os.geteuid() == 0:
        raise SubmitError(
            "slurm.sandboxes: sandboxes are for ordinary users, because root would be root of the node inside; submit the run as one"
        )


def _require_local(submission: Submission) -> None:
    """Raise SubmitError where a submission needs jobs of Slurm, or packages that this environment lacks."""
    config = submission.planned
    pools = [each for element in submission.elements for each in elastic_pools(element.planned)]
    if pools:
        raise SubmitError(
            f"{pools[0].number}: this machine has no partitions; with --local, set it to 0 and {pools[0].instead} higher"
        )
    if threading.current_thread() is not threading.main_thread():  # only that one may have signals ignored
        raise SubmitError("a run on this machine is started by the main thread of Python: call this there")
    if uploads_by_job(config):
        raise SubmitError(
            'slurm.upload.by: with --local there are no jobs; set it to "run", or to "command" and call `hpcrl upload`'
        )
    if config.slurm.evaluation.when != "never":
        raise SubmitError('slurm.evaluation.when: with --local there are no jobs; set it to "never"')
    if config.slurm.container.kind != "none":
        raise SubmitError(
            'slurm.container: with --local the agents run as they are here; set slurm.container.kind = "none"'
        )
    if _lacks_torch(config):
        raise SubmitError(
            f"--local: {sys.executable} has no torch; pip install 'hpcrl[job]', or set slurm.python to an interpreter that has it"
        )


def _require_cluster(config: Config) -> None:
    """Print warnings about the request. Raises SubmitError where there is no sbatch."""
    if shutil.which("sbatch") is None:
        raise not_here("sbatch")
    warnings = [f"{one.found}: {one.remedy}" for one in request_findings(config.slurm, with_few_cores(config))]
    if _lacks_torch(config):
        warnings.append(
            f"slurm.python: not set, so jobs run {sys.executable}, which has no torch here; set it to an interpreter that has hpcrl[job]"
        )
    if config.slurm.evaluation.when != "never" and config.trainer.max_steps is None:
        warnings.append(
            "slurm.evaluation: without trainer.max_steps it is not known how many versions may wait for it, whose weights stay; "
            f"the check of disk space counts {MOST_OPEN}"
        )
    for warning in warnings:
        print(printable(f"hpcrl: {warning}"), file=sys.stderr)


def _lacks_torch(config: Config) -> bool:
    return not config.slurm.other_environment and find_spec("torch") is None


def _start_pools(
    submission: Submission, at: int, gangs: Mapping[str, str], jobs: list[Job[Any]], sizes: Sizes | None
) -> dict[str, str]:
    """Submit the elastic pools of one run, and return the id of each one's array; their elements are added to `jobs`."""
    run, config, arrays = submission.runs[at], submission.elements[at].planned, dict[str, str]()
    for each in elastic_pools(config):
        executor, count = pool_executor(submission, run, config, each, [*gangs.values()]), len(each.nodes)
        of_elements = [str(run.path)] * count, each.workers, [sizes] * count
        elements = submit_with_retry(partial(executor.map_array, pool.main, *of_elements), submission.folder)
        jobs += elements
        arrays[each.name] = elements[0].job_id.partition("_")[0]
    return arrays


def _start_upload(submission: Submission, at: int, gangs: Mapping[str, str], jobs: list[Job[Any]]) -> str | None:
    """Submit the job that uploads what a run will have left, if it is to have one, and return its id; it is added to `jobs`."""
    run, config = submission.runs[at], submission.elements[at].config
    if not uploads_by_job(config):
        return None
    executor = upload_executor(submission, run, config, [*gangs.values()])
    patience_s = 60.0 * config.slurm.upload.time_minutes - config.slurm.signal_seconds
    (job,) = submit_with_retry(lambda: executor.map_array(upload_job, [str(run.path)], [patience_s]), submission.folder)
    jobs.append(job)
    return job.job_id


def _start_evaluation(submission: Submission, at: int, gangs: Mapping[str, str], jobs: list[Job[Any]]) -> str | None:
    """Submit the job that evaluates the versions of one run, if it is to have one, and return the id of its array; its elements are added
    to `jobs`."""
    run, config = submission.runs[at], submission.elements[at].planned
    engines = config.slurm.evaluation.engines
    if config.slurm.evaluation.when == "never":
        return None
    executor = evaluation_executor(submission, run, config, [*gangs.values()])
    start = partial(executor.map_array, evaluation.main, [str(run.path)] * engines, range(engines))
    elements = submit_with_retry(start, submission.folder)
    jobs += elements
    return elements[0].job_id.partition("_")[0]


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
            "there is no Slurm here (no sbatch on PATH): use --local to run on this machine, --dry-run to print the submission, or "
            "slurm/devcluster for a small Slurm of your own"
        )
