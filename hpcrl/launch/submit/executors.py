"""Submits runs by executors: job arrays of Slurm, or processes of this machine."""

from __future__ import annotations

import os
import shlex
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import submitit
from submitit.core.core import Job
from submitit.core.utils import DelayedSubmission, FailedJobError, FailedSubmissionError, JobPaths

from hpcrl.config import Config, ElasticConfig, SlurmConfig
from hpcrl.config.sections.slurm import EvaluationJobConfig, SandboxesConfig, UploadJobConfig
from hpcrl.errors import ConfigError, SubmitError
from hpcrl.launch.container import Starter, lines_of_a_restart, seen_by
from hpcrl.launch.doctor.node import listed_gpus
from hpcrl.launch.layouts import (
    AttemptLayout,
    Check,
    all_layouts,
    nodes_of,
    unmeasured_layouts,
)
from hpcrl.launch.nodes import Node, make_plan, needed_nodes
from hpcrl.launch.pools import ROLLOUT, Pool, elastic_pools
from hpcrl.launch.requeue.prologue import NOTHING_TO_DO
from hpcrl.launch.requeue.requeue import ATTEMPTS_HERE, BATCH_SHELL, HERE, LEAST_NODES
from hpcrl.launch.scheduler import PATIENCE_S, cancel_slurm, is_away, queue
from hpcrl.launch.setup_lines import recorded_setup
from hpcrl.launch.sharing import umask_of
from hpcrl.launch.submit.models import rank_problems
from hpcrl.launch.submit.requests import layouts_of_request, working_layouts
from hpcrl.launch.submit.sweep import ONE_SCRIPT
from hpcrl.observe.trial.plan import Trial
from hpcrl.rundir.allocations import STARTED
from hpcrl.rundir.layout import Run
from hpcrl.upload.send import stores_of

_Asked = TypeVar("_Asked", bound=ElasticConfig | UploadJobConfig | EvaluationJobConfig | SandboxesConfig)


@dataclass(frozen=True)
class Element:
    """One run to be submitted.

    Attributes:
        overrides: settings in which it differs from other runs of its sweep.
        checks: what a layout must pass beside what ranks can share of the models, where the configuration has ranges.
        request: one of slurm.requests, into whose GPUs the layouts have to fit; empty: those of slurm.
    """

    name: str
    config: Config
    overrides: list[str]
    checks: tuple[Check, ...] = ()
    request: str = ""

    @cached_property
    def every_layout(self) -> list[AttemptLayout]:
        """All layouts of the run, those that cannot work too."""
        return all_layouts(self.config, rank_problems, *self.checks, request=self.request)

    @property
    def layouts(self) -> list[AttemptLayout]:
        """Layouts that attempts of the run may take, as of `usable_layouts`. Raises DataError where none works."""
        return working_layouts(self.every_layout, self.request)

    @property
    def plans(self) -> list[list[Node]]:
        """Nodes of one of them for each number of nodes, which an attempt takes without measures."""
        return [make_plan(self.config.at(layout.sizes)) for layout in unmeasured_layouts(self.layouts)]

    @property
    def planned(self) -> Config:
        """Configuration of the largest of them."""
        return self.config.at(self.layouts[-1].sizes)


@dataclass(frozen=True)
class Submission:
    """Run directories and jobs of one submit call, before they are created.

    Attributes:
        folder: submitit's folder and the code snapshot, shared by the elements.
        elements: the runs, in the order of their array indices.
        trial: that the runs are of; None: of none.
    """

    folder: Path
    elements: list[Element]
    trial: Trial | None = None

    @property
    def runs(self) -> list[Run]:
        return [Run(self.folder.parent.parent / element.name) for element in self.elements]

    @property
    def layouts(self) -> list[AttemptLayout]:
        """Layouts of the first run, as of `usable_layouts`. Raises ConfigError where another run asks for other nodes."""
        first = self.elements[0]
        for index, element in enumerate(self.elements[1:], 1):
            if element.plans != first.plans:
                own, others = (", ".join(str(len(plan)) for plan in one.plans) for one in (element, first))
                where = f"element {index} ({' '.join(element.overrides)}): works on {own} nodes, element 0 on {others}"
                raise ConfigError(f"{where}; {ONE_SCRIPT}")
        return first.layouts

    def asked_by(self, request: str) -> Submission:
        """Return the submission whose layouts have to fit into the GPUs of one of slurm.requests; an empty name: of the only one."""
        if not request or not self.elements[0].config.slurm.has_own_layouts(request):
            return self
        return replace(self, elements=[replace(each, request=request) for each in self.elements])

    @property
    def planned(self) -> Config:
        """Configuration of the first run, for the largest of them: the batch script is made from it."""
        return self.elements[0].config.at(self.layouts[-1].sizes)

    @property
    def element_list(self) -> Path:
        """File from which the end of the batch script takes the run directory of each array index."""
        return self.folder / f"elements-{self.elements[0].name}-{len(self.elements)}.json"


class ArrayExecutor(submitit.SlurmExecutor):
    """Submits one function, too, as a job array: every run is an element, with an id of the form 12_0."""

    @classmethod
    def affinity(cls) -> int:
        """Return that the executor can be used, also without srun: a dry run prints batch scripts anywhere."""
        return 2

    def _num_tasks(self) -> int:
        """Return the tasks of a job, one on each node; of a range of nodes the most."""
        return int(str(self.parameters.get("nodes", 1)).rpartition("-")[2])

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


def _lines_of_the_job(config: Config) -> list[str]:
    return [
        f"umask {umask_of(config.slurm.readable_by):03o}",
        f"export {BATCH_SHELL}=$$",
        f"export {STARTED}=${{SLURM_JOB_START_TIME:-$(date +%s)}}",
        *(["export PYTHONNOUSERSITE=1"] if config.slurm.container.kind != "none" else []),  # the home is seen inside
    ]


def _lines_of_the_setup(config: Config, folder: Path) -> list[str]:
    code = shlex.quote(str(folder / "code"))
    return [
        *recorded_setup(config.slurm.setup),
        f'export PYTHONPATH={code}"${{PYTHONPATH:+:$PYTHONPATH}}" PYTHONSAFEPATH=1 PYTHONUNBUFFERED=1',
    ]


def slurm_executors(submission: Submission) -> dict[str, ArrayExecutor]:
    """Return the executor of each request, whose job array runs this submission, by its name; the only one has none."""
    slurm = submission.elements[0].config.slurm
    if not slurm.requests:
        return {"": _slurm_executor(submission, slurm, "", submission.layouts)}
    layouts = {
        name: layouts_of_request(submission.asked_by(name).layouts, name, one.nodes)
        for name, one in slurm.requests.items()
    }
    asked = {name: slurm.asked_by(name) for name in layouts}
    gpus = {name: (one.gpu_memory_gb, one.gpus_per_node) for name, one in asked.items()}
    executors = dict[str, ArrayExecutor]()
    for name, own in layouts.items():
        # on other GPUs a run has other layouts, and steps of another length
        alike = {other: each for other, each in layouts.items() if gpus[other] == gpus[name]}
        executors[name] = _slurm_executor(submission, asked[name], name, own, alike)
    return executors


def _slurm_executor(
    submission: Submission,
    slurm: SlurmConfig,
    request: str,
    layouts: Sequence[AttemptLayout],
    alike: Mapping[str, Sequence[AttemptLayout]] = MappingProxyType({}),
) -> ArrayExecutor:
    """Return the executor of one request. All elements share one batch script, made from the first.

    Args:
        alike: layouts of each request for the same GPUs.
    """
    first = submission.elements[0]
    config, plans = first.planned, [make_plan(first.config.at(layout.sizes)) for layout in layouts]
    survives = layouts[0].nodes < layouts[-1].nodes or any(
        len(needed_nodes(plan, slurm.elastic.replicas)) < len(plan) for plan in plans
    )
    starter = _starter(submission)
    last = starter.outside_step(slurm.container)
    elements = shlex.quote(str(submission.element_list))
    finish = f"{last} -m hpcrl.launch.requeue.epilogue {elements}"
    parameters = _common(config, submission.folder) | {
        "job_name": f"hpcrl-{submission.folder.name}" + (f"-{request}" if request else ""),
        "comment": f"hpcrl:{submission.folder.name}",
        "time": slurm.time_minutes,
        "nodes": nodes_of(layouts),
        "teardown": _until_decided(finish),
        "srun_args": ["--kill-on-bad-exit=0", *(["--no-kill", "--wait=0"] if survives else [])],
        "additional_parameters": {
            **({"no-kill": True} if survives else {}),
            **({"time-min": slurm.time_min_minutes} if slurm.time_min_minutes is not None else {}),
            "no-requeue" if config.trainer.resume_mode == "none" else "requeue": True,
            **slurm.extra,
        },
    }
    if len(layouts) > 1:
        # as an option of sbatch it would ask for the tasks of the least nodes, and Slurm would give no node more than it has tasks for
        parameters["ntasks_per_node"] = None
        parameters["srun_args"].append("--ntasks-per-node=1")
        parameters["setup"] += [f"export {LEAST_NODES}={layouts[0].nodes}"]
        parameters["teardown"] = [*_until_decided(finish)[:-1], *_next_attempt_here(finish)]
    if slurm.whole_nodes:
        parameters |= {"exclusive": True, "mem": "0"}
        # where a site binds tasks to cores, the agent, one task of a node, and all its processes would have one core
        parameters["srun_args"].append("--cpu-bind=none")
    if len(layouts) > 1:
        parameters["setup"] += ["while true; do"]
    if request:
        growing = alike if slurm.grow_minutes is not None else {}
        nodes = {name: ",".join(map(str, sorted({one.nodes for one in own}))) for name, own in growing.items()}
        words = [elements, *(shlex.quote(f"{name}={counts}") for name, counts in nodes.items())]
        begin = f"{last} -m hpcrl.launch.requeue.prologue {' '.join(words)}"
        parameters["setup"] += [f"{begin} || {{ status=$?; exit $((status == {NOTHING_TO_DO} ? 0 : status)); }}"]
    parameters |= _gpus(slurm, slurm.gpus_per_node)
    if slurm.array_parallelism is not None:
        parameters["array_parallelism"] = slurm.array_parallelism
    return _executor(submission.folder, parameters, slurm, starter)


def _next_attempt_here(finish: str) -> list[str]:
    """Return the last lines of a batch script whose other lines, from srun on, are the body of a loop: it goes on with the nodes that are left.

    Where Slurm does not tell them for two and a half minutes, `finish` is called again and leaves the next attempt to the queue.
    """
    nodes = "squeue -h -r -j ${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID -o '%D %N'"
    return [
        f"[ $decided -eq {HERE} ] || exit $decided",
        "for _ in {1..15}; do",
        # srun takes these for the nodes of the job
        f"  read -r SLURM_NNODES SLURM_JOB_NODELIST < <({nodes}) && break",
        "  sleep 10",
        "done",
        'if [ -z "$SLURM_JOB_NODELIST" ]; then',
        f"unset {LEAST_NODES}",
        *_until_decided(finish)[1:],
        "fi",
        "export SLURM_NNODES SLURM_JOB_NODELIST SLURM_JOB_NUM_NODES=$SLURM_NNODES SLURM_NODELIST=$SLURM_JOB_NODELIST",
        "export SLURM_OVERLAP=1",  # Slurm still counts the step that lost a node
        f"export {ATTEMPTS_HERE}=$((${{{ATTEMPTS_HERE}:-0}} + 1)) {STARTED}=$(date +%s)",
        "done",
    ]


def pool_executor(submission: Submission, run: Run, config: Config, pool: Pool, gangs: Sequence[str]) -> ArrayExecutor:
    """Return the executor whose job array is an elastic pool of one run: an element on a node of its own for each of its workers.

    Args:
        gangs: the run's own jobs, one for each request; no element starts before one of them does.
    """
    slurm, asked, whose = config.slurm, pool.asked, "" if pool.name == ROLLOUT else f"-{pool.name}"
    # the exit status of the agent, srun's own, decides; see launch/requeue/elastic.py
    starter = _starter(submission)
    last = starter.outside_step(slurm.container)
    finish = f"{last} -m hpcrl.launch.requeue.elastic {shlex.quote(str(run.path))}"
    parameters = _common(config, submission.folder) | {
        "job_name": f"hpcrl-{run.name}-pool{whose}",
        "comment": f"hpcrl-pool:{run.name}",
        "time": asked.time_minutes or slurm.time_minutes,
        "nodes": 1,
        "teardown": _until_decided(finish),
        "srun_args": ["--kill-on-bad-exit=0"],
        "array_parallelism": asked.at_once or len(pool.nodes),
        "dependency": "?".join(f"after:{gang}" for gang in gangs),
        "additional_parameters": {"requeue": True, **asked.extra},
    }
    if gpus := pool.nodes[0].gpus:
        kind, colon, _ = str(slurm.gpus_per_node).rpartition(":")
        parameters |= _gpus(slurm, f"{kind}{colon}{gpus}")
    cpus, memory, whole = pool.element(config)
    if whole:
        parameters["exclusive"] = True
    asked = replace(_as_the_run(asked, slurm), cpus_per_task=cpus, mem_gb=memory)
    return _executor(submission.folder, parameters, asked, starter)


def upload_executor(submission: Submission, run: Run, config: Config, gangs: Sequence[str]) -> ArrayExecutor:
    """Return the executor of the job that uploads what a run has left.

    Args:
        gangs: the run's own jobs, which have to end first, however that is.
    """
    asked = _as_the_run(config.slurm.upload, config.slurm)
    parameters = _common(config, submission.folder) | {
        "job_name": f"hpcrl-{run.name}-upload",
        "comment": f"hpcrl-upload:{run.name}",
        "time": asked.time_minutes,
        "nodes": 1,
        "srun_args": [],
        "dependency": f"afterany:{':'.join(gangs)}",
        "additional_parameters": {"requeue": True, **config.slurm.upload.extra},
    }
    return _executor(submission.folder, parameters, asked, _starter(submission))


def evaluation_executor(submission: Submission, run: Run, config: Config, gangs: Sequence[str]) -> ArrayExecutor:
    """Return the executor of the job array that evaluates the versions of a run, each element on a node of its own.

    Args:
        gangs: the run's own jobs; no element starts before one of them does, or with when="after" before all have ended.
    """
    slurm, asked, starter = config.slurm, config.slurm.evaluation, _starter(submission)
    last = starter.outside_step(slurm.container)
    finish = f"{last} -m hpcrl.launch.requeue.evaluation {shlex.quote(str(run.path))} {asked.again_minutes}"
    starts = "?".join(f"after:{gang}" for gang in gangs)
    least = {} if asked.time_min_minutes is None else {"time-min": asked.time_min_minutes}
    parameters = _common(config, submission.folder) | {
        "job_name": f"hpcrl-{run.name}-evaluation",
        "comment": f"hpcrl-evaluation:{run.name}",
        "time": asked.time_minutes,
        "nodes": 1,
        "teardown": _until_decided(finish),
        "srun_args": ["--kill-on-bad-exit=0"],
        "dependency": starts if asked.when == "during" else f"afterany:{':'.join(gangs)}",
        "additional_parameters": {"requeue": True, **least, **asked.extra},
    }
    kind, colon, _ = str(slurm.gpus_per_node).rpartition(":")
    kind, colon = (asked.gpu_type, ":") if asked.gpu_type else (kind, colon)
    parameters |= _gpus(slurm, f"{kind}{colon}{config.generator.inference_engine.gpus}")
    cpus, memory, whole = slurm.element(asked, config.replicas_per_node)
    if whole:
        parameters["exclusive"] = True
    asked = replace(_as_the_run(asked, slurm), cpus_per_task=cpus, mem_gb=memory)
    return _executor(submission.folder, parameters, asked, starter)


def _as_the_run(asked: _Asked, slurm: SlurmConfig) -> _Asked:
    """Return the request of another job of a run, with partition and account of the run where it has none of its own."""
    return replace(asked, partition=asked.partition or slurm.partition, account=asked.account or slurm.account)


def _until_decided(finish: str) -> list[str]:
    """Return the last lines of a batch script: `finish` gets the status of srun, and is called again where a signal ended it."""
    return [
        "status=$?",
        "for _ in 1 2 3 4 5; do",
        f"  {finish} $status",
        "  decided=$?",
        "  [ $decided -lt 128 ] && break",
        "done",
        "exit $decided",
    ]


def _gpus(slurm: SlurmConfig, wanted: int | str) -> dict[str, Any]:
    if slurm.gpus == 0 or slurm.gpu_option == "none":
        return {}
    return {"gres": f"gpu:{wanted}"} if slurm.gpu_option == "gres" else {"gpus_per_node": wanted}


def _starter(submission: Submission) -> Starter:
    configs = [element.config for element in submission.elements]
    root = submission.folder.parents[2]
    return Starter.of(configs[0].slurm, seen_by(root, configs), configs[0].slurm.gpus > 0)


def _common(config: Config, folder: Path) -> dict[str, Any]:
    return {
        "ntasks_per_node": 1,
        "signal_delay_s": config.slurm.signal_seconds,
        "wckey": None,
        "stderr_to_stdout": True,
        "setup": [
            *_lines_of_the_job(config),
            *_lines_of_the_setup(config, folder),
            *lines_of_a_restart(config.slurm.container),
        ],
    }


def _executor(
    folder: Path,
    parameters: dict[str, Any],
    asked: SlurmConfig | ElasticConfig | UploadJobConfig | EvaluationJobConfig | SandboxesConfig,
    starter: Starter,
) -> ArrayExecutor:
    for name in ("partition", "account", "qos", "constraint"):
        if (value := getattr(asked, name)) is not None:
            parameters[name] = value
    if asked.mem_gb is not None:
        parameters["mem"] = f"{asked.mem_gb}GB" if asked.mem_gb else "0"
    if asked.cpus_per_task is not None:
        parameters["cpus_per_task"] = asked.cpus_per_task
        parameters["srun_args"] = [*parameters["srun_args"], f"--cpus-per-task={asked.cpus_per_task}"]
    # submitit's own names begin with a directory that it makes once sbatch has answered; Slurm fails a job that starts before that
    log = f"{folder}/%A_%a_%t.out"
    parameters["srun_args"] = [f"--output={log}", *parameters["srun_args"], *starter.srun]
    parameters["additional_parameters"] = {"output": log.replace("%t", "batch"), **parameters["additional_parameters"]}
    executor = ArrayExecutor(folder=folder / "%j", python=starter.python)
    executor.update_parameters(**parameters)
    return executor


def local_executor(submission: Submission) -> submitit.LocalExecutor:
    """Return the executor that runs the same agents as processes of this machine, one per node of the plan."""
    config = submission.planned
    plan = make_plan(config)
    gpus = sum(node.gpus for node in plan)
    starts = f'exec {shlex.quote(config.slurm.python or sys.executable)} "$@"'
    # submitit runs its own setup by /bin/sh, and only as far as a line that fails; a batch script is bash's, and goes on
    lines = "\n".join([*_lines_of_the_setup(config, submission.folder), starts])
    executor = submitit.LocalExecutor(folder=submission.folder / "%j", python=shlex.join(["bash", "-c", lines, "bash"]))
    executor.update_parameters(
        timeout_min=config.slurm.time_minutes,
        tasks_per_node=len(plan),
        gpus_per_node=gpus,
        signal_delay_s=config.slurm.signal_seconds,
        stderr_to_stdout=True,
        # the shell has the job's process id: it lives on while the agents save, where SIGTERM met all processes
        setup=["trap : TERM", *_devices(gpus), *_lines_of_the_job(config)],
    )
    return executor


def _devices(count: int) -> list[str]:
    """Return the setup line that leaves a run `count` of the devices that the user has left, if the user has left only some. Raises SubmitError where there are fewer.

    submitit takes numbers alone; CUDA_VISIBLE_DEVICES may also hold ids such as GPU-8932f937-... and MIG-....
    """
    devices = listed_gpus()
    if not count or devices is None:
        return []
    if len(devices) < count:
        listed = os.environ["CUDA_VISIBLE_DEVICES"]
        raise SubmitError(
            f"the run needs {count} GPU(s) on this machine, CUDA_VISIBLE_DEVICES={listed!r} names {len(devices)}"
        )
    return [f"export CUDA_VISIBLE_DEVICES={shlex.quote(','.join(devices[:count]))}"]


def uploads_by_job(config: Config) -> bool:
    return config.slurm.upload.by == "job" and bool(stores_of(config.trainer.upload))


def batch_scripts(submission: Submission) -> dict[str, str]:
    """Return the sbatch scripts that submitit would write, by title: of the runs, and of the first one's pools, upload and evaluation where it has them."""
    first, run = submission.planned, submission.runs[0]
    executors = {
        f"batch script of request {name}" if name else "batch script": (executor, len(submission.elements))
        for name, executor in slurm_executors(submission).items()
    }
    gangs = [f"JOB-{name}_0" if name else "JOB_0" for name in slurm_executors(submission)]
    for pool in elastic_pools(first):
        executor = pool_executor(submission, run, first, pool, gangs)
        executors[f"batch script of the {pool.title}"] = executor, len(pool.nodes)
    if uploads_by_job(first):
        executors["batch script of the upload"] = upload_executor(submission, run, first, gangs), 1
    if first.slurm.evaluation.when != "never":
        executor = evaluation_executor(submission, run, first, gangs)
        executors["batch script of the evaluation"] = executor, first.slurm.evaluation.engines
    texts = dict[str, str]()
    for title, (executor, count) in executors.items():
        executor.parameters["map_count"] = count
        texts[title] = executor._make_submission_file_text(executor._submitit_command_str, "dry-run")
    return texts


_RETRY_S = 5.0
_T = TypeVar("_T")


def submit_with_retry(submit: Callable[[], _T], folder: Path) -> _T:
    """Call `submit`, again while slurmctld does not answer, and return its result.

    A slurmctld that did not answer may have taken the job all the same. What it took is cancelled then: submitit has not given it what it
    needs to start.

    Args:
        submit: calls sbatch with a script in `folder`.
    """
    deadline, reported = time.monotonic() + PATIENCE_S, False
    while True:
        before = set(_scripts(folder))
        try:
            return submit()
        except (FailedJobError, FailedSubmissionError) as error:
            if not is_away(str(error)) or time.monotonic() > deadline:
                raise
            if not reported:
                reason = str(error).strip().splitlines()[-1]
                print(f"hpcrl: {reason}; trying again for {PATIENCE_S:.0f} s", file=sys.stderr, flush=True)
                reported = True
        _take_back({str(script) for script in _scripts(folder) if script not in before})
        time.sleep(_RETRY_S)


def _scripts(folder: Path) -> list[Path]:
    return sorted(folder.glob(".submission_file_*.sh"))


def _take_back(scripts: set[str]) -> None:
    taken = {
        job.partition("_")[0] for job, state in queue(PATIENCE_S).items() if state.active and state.script in scripts
    }
    for job in sorted(taken):
        cancel_slurm(job)
