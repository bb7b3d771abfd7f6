"""Section `slurm`: the run directory's root, and the request to the cluster."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from hpcrl.config.conditions import ENGINES
from hpcrl.config.effects import CLUSTER, OTHER_DIRECTORY, OTHER_PLACE, SOFTWARE, SPREAD
from hpcrl.config.fields import Location
from hpcrl.config.setting import (
    COUNT,
    NOT_NEGATIVE,
    ONE_LINE,
    POSITIVE,
    Check,
    Effect,
    Range,
    on_one_line,
    section,
    setting,
)
from hpcrl.config.sizes import SIZE

_SBATCH = Check(
    "expected long names of sbatch options, and values of one line without control characters, found {value!r:.140}",
    lambda extra: all(re.fullmatch(r"[A-Za-z][\w-]*", name, re.ASCII) for name in extra) and on_one_line(extra),
)
_ABSOLUTE = Check(
    "expected the absolute path of a directory, such as /scratch/me, ~/runs or ./runs, of one line without control characters, found {value!r:.140}",
    lambda path: path.startswith(("/", "~/", "./", "../")) and on_one_line(path),
)

_INTERPRETER = Check(
    "expected an absolute path of one line without control characters, found {value!r:.140}",
    lambda path: path is None or (path.startswith("/") and on_one_line(path)),
)


@dataclass(frozen=True, kw_only=True)
class PatienceConfig:
    """For how long a process may make no progress, in seconds, before the attempt ends as a hang with the stacks of all of them.

    0: no limit.
    """

    load_seconds: int = setting(3600, range=NOT_NEGATIVE)
    """Imports, the ranks' rendezvous, loading of model, checkpoint and data."""

    step_seconds: int = setting(1800, range=NOT_NEGATIVE)
    """One micro-batch or one optimizer step, the first of which may compile. Waiting for a batch does not count."""

    save_seconds: int = setting(3600, range=NOT_NEGATIVE)
    """A checkpoint, an export, or the weights for the replicas. A controller that fails gives the trainer as long to save."""


@dataclass(frozen=True, kw_only=True)
class ElasticConfig:
    """Further replicas in a job array of their own, one element each, usually on a partition where they may be preempted.

    They join the run when Slurm starts them and leave it when Slurm takes them away; training goes on with those that are there.
    """

    replicas: int = setting(0, range=NOT_NEGATIVE)
    """Replicas beside those that start with the run (generator.inference_engine.num_engines; of a scorer's model its copies); 0: none. Where
    none start with the run, it depends on these, and waits for the first one as long as slurm.replica_patience_minutes allows."""

    at_once: int | None = setting(None, range=COUNT)
    """Elements that run at the same time at most; unset: all."""

    partition: str | None = setting(None, check=ONE_LINE)
    """Partition; unset: that of the run."""

    account: str | None = setting(None, check=ONE_LINE)
    """Account that is charged; unset: that of the run."""

    qos: str | None = setting(None, check=ONE_LINE)
    """Quality of service; unset: the partition's default."""

    constraint: str | None = setting(None, check=ONE_LINE)
    """Features that the nodes must have."""

    time_minutes: int | None = setting(None, range=Range(5))
    """Time limit of an element in minutes, after which it queues again; unset: that of the run."""

    cpus_per_task: int | None = setting(None, range=COUNT)
    """CPU cores asked for by each replica; unset: its share of slurm.cpus_per_task, or a whole node where the run takes whole nodes and a
    replica all GPUs of one."""

    mem_gb: int | None = setting(None, range=NOT_NEGATIVE)
    """Memory asked for by each replica in GB; 0: all of its node; unset: as cpus_per_task, of slurm.mem_gb."""

    extra: dict[str, Any] = setting({}, check=_SBATCH)
    """Further sbatch options by their long names; true: an option without a value."""


@dataclass(frozen=True, kw_only=True)
class ElasticReplicasConfig(ElasticConfig):
    replicas: int = setting(0, used_by=ENGINES)


@dataclass(frozen=True, kw_only=True)
class ElasticScorersConfig:
    """Further copies of the models that judge finished samples, as those of slurm.elastic: a job array for each model."""

    teacher: ElasticConfig = section(ElasticConfig)

    reference: ElasticConfig = section(ElasticConfig)

    reward_model: ElasticConfig = section(ElasticConfig)


@dataclass(frozen=True, kw_only=True)
class UploadJobConfig:
    """Where exports and checkpoints are uploaded from (trainer.upload)."""

    by: Literal["run", "job", "command"] = "run"
    """Who uploads. run: a process on the run's first node, beside the run. job: a job of its own, after the run's job has ended.
    command: only `hpcrl upload`, on a node that has a network."""

    wait_minutes: int = setting(10, range=NOT_NEGATIVE)
    """Minutes for which a run that is done keeps its nodes for uploads that are not finished; `hpcrl upload` sends what is missing then."""

    partition: str | None = setting(None, check=ONE_LINE)
    """Partition of the job, such as one for data transfers; unset: that of the run."""

    account: str | None = setting(None, check=ONE_LINE)
    """Account that the job is charged to; unset: that of the run."""

    qos: str | None = setting(None, check=ONE_LINE)
    """Quality of service of the job; unset: the partition's default."""

    constraint: str | None = setting(None, check=ONE_LINE)
    """Features that the job's node must have."""

    time_minutes: int = setting(240, range=Range(5))
    """Time limit of the job in minutes."""

    cpus_per_task: int | None = setting(None, range=COUNT)
    """CPU cores of the job; unset: the partition's default."""

    mem_gb: int | None = setting(None, range=NOT_NEGATIVE)
    """Memory of the job in GB; unset: the partition's default."""

    extra: dict[str, Any] = setting({}, check=_SBATCH)
    """Further sbatch options of the job by their long names; true: an option without a value."""


@dataclass(frozen=True, kw_only=True)
class EvaluationJobConfig:
    """Evaluation in a job array of its own, in place of the run's engines, which then only generate (docs/evaluation.md)."""

    when: Literal["never", "during", "after"] = "never"
    """When the job evaluates. never: the run's engines do. during: it starts after the run's job, evaluates the versions that wait, and
    queues again until the run is over. after: it starts when the run's job has ended for good."""

    engines: int = setting(1, range=COUNT)
    """Elements of the array, each with one engine on a node; versions are divided among them in turn."""

    again_minutes: int = setting(5, range=COUNT)
    """Minutes until an element without a version to evaluate may start again, as long as the run goes on."""

    partition: str | None = setting(None, check=ONE_LINE)
    """Partition, such as one for preemptible jobs; unset: that of the run."""

    account: str | None = setting(None, check=ONE_LINE)
    """Account that is charged; unset: that of the run."""

    qos: str | None = setting(None, check=ONE_LINE)
    """Quality of service; unset: the partition's default."""

    constraint: str | None = setting(None, check=ONE_LINE)
    """Features that the nodes must have."""

    time_minutes: int = setting(60, range=Range(5))
    """Time limit of an element in minutes. The next start goes on with the prompts that are left."""

    time_min_minutes: int | None = setting(None, range=Range(5))
    """The least time limit in minutes: Slurm may shorten the limit down to it where an element then starts earlier, by backfill. Unset: time_minutes."""

    gpu_type: str | None = setting(None, check=ONE_LINE)
    """Type of the GPUs, such as "a100"; unset: that of slurm.gpus_per_node. Their number is that of an engine."""

    cpus_per_task: int | None = setting(None, range=COUNT)
    """CPU cores of an element; unset: as those of slurm.elastic."""

    mem_gb: int | None = setting(None, range=NOT_NEGATIVE)
    """Memory of an element in GB; 0: all of its node; unset: as that of slurm.elastic."""

    extra: dict[str, Any] = setting({}, check=_SBATCH)
    """Further sbatch options by their long names; true: an option without a value."""


@dataclass(frozen=True, kw_only=True)
class SandboxesConfig:
    """Sandboxes for environments that run programs (docs/sandboxes.md), on nodes of their own and on rollout nodes. Those of their own are a job
    array, one element each, that Slurm may take away and start again at any time."""

    nodes: int = setting(0, range=NOT_NEGATIVE)
    """Nodes of their own; 0: none."""

    per_node: int = setting(32, range=COUNT)
    """Sandboxes at a time on each of these at most; who wants another one asks the next node, or waits."""

    per_rollout_node: int = setting(0, range=NOT_NEGATIVE)
    """Sandboxes at a time at most on each node of the run that has replicas; 0: none. They share its cores and its memory."""

    memory_gb: float = setting(2.0, range=POSITIVE)
    """Memory of the processes of a sandbox in GB; above it all of them are killed."""

    disk_gb: float = setting(2.0, range=POSITIVE)
    """Changed files of a sandbox in GB. They are in the memory of the node, too."""

    files: int = setting(200_000, range=COUNT)
    """Files, directories and links that a sandbox makes at most."""

    processes: int = setting(256, range=COUNT)
    """Processes and threads of a sandbox at a time."""

    network: list[str] = setting([], check=ONE_LINE)
    """Names of the images whose sandboxes may have the network of their node; others have none."""

    lease_seconds: int = setting(300, range=Range(10))
    """Seconds after which a sandbox ends of which no rollout worker was heard."""

    at_once: int | None = setting(None, range=COUNT)
    """Elements that run at the same time at most; unset: all."""

    partition: str | None = setting(None, check=ONE_LINE)
    """Partition, such as one of CPU nodes; unset: that of the run."""

    account: str | None = setting(None, check=ONE_LINE)
    """Account that is charged; unset: that of the run."""

    qos: str | None = setting(None, check=ONE_LINE)
    """Quality of service; unset: the partition's default."""

    constraint: str | None = setting(None, check=ONE_LINE)
    """Features that the nodes must have."""

    time_minutes: int | None = setting(None, range=Range(5))
    """Time limit of an element in minutes, after which it queues again; unset: that of the run."""

    cpus_per_task: int | None = setting(None, range=COUNT)
    """CPU cores of an element; unset: the partition's default."""

    mem_gb: int | None = setting(None, range=NOT_NEGATIVE)
    """Memory of an element in GB, for memory_gb and disk_gb of all its sandboxes; 0: all of its node; unset: the partition's default."""

    extra: dict[str, Any] = setting({}, check=_SBATCH)
    """Further sbatch options by their long names; true: an option without a value."""

    @property
    def most_of_a_node(self) -> int:
        """Sandboxes at a time at most on any node; 0: there are none."""
        return max(self.per_node if self.nodes else 0, self.per_rollout_node)


PYXIS_LISTS = ("--container-mounts", "--container-env")
"""Options of srun that hpcrl gives to Pyxis, and to which slurm.container.arguments may add."""


@dataclass(frozen=True, kw_only=True)
class ContainerConfig:
    """A container in which the run's processes run on the nodes. The image needs hpcrl with all that it depends on; docs/containers.md."""

    kind: Literal["none", "apptainer", "pyxis"] = "none"
    """What starts it: the program apptainer, or srun with the plugin Pyxis, over Enroot."""

    image: Location | None = setting(None, check=ONE_LINE)
    """Image: a .sif file or a .sqsh file, or what else the one or the other takes."""

    mounts: list[str] = setting([], check=ONE_LINE)
    """Further directories of the node to be seen inside, SOURCE or SOURCE:TARGET or SOURCE:TARGET:ro; slurm.root, data, models and /tmp
    are seen without."""

    arguments: list[str] = setting([], check=ONE_LINE)
    """Further options: of `apptainer exec`, or of srun."""

    python: str = setting("python3", check=ONE_LINE)
    """Interpreter inside."""

    host_python: str | None = setting(None, check=ONE_LINE)
    """Interpreter on the nodes, outside, that ends the batch script and requeues its job: Python 3.10 or newer with hpcrl's dependencies
    for login nodes. Unset: the one inside, where Slurm's scontrol has to be then."""


_NODES = Check(SIZE.message, lambda nodes: nodes is None or SIZE.holds(nodes))
_GPUS = Check(
    'expected a number, or type and number such as "h100:8", found {value!r}',
    lambda gpus: not isinstance(gpus, str) or re.fullmatch(r"[A-Za-z][A-Za-z0-9._-]*:[1-9][0-9]*", gpus) is not None,
)


@dataclass(frozen=True, kw_only=True)
class RequestConfig:
    """One of several requests for the nodes of a run, such as slurm.requests.spot. All of them wait in the queue; the first that starts is
    the run, and the others wait until Slurm takes that one away.
    """

    nodes: int | str | None = setting(None, range=COUNT, check=_NODES)
    """Nodes, a number or a range such as "2-4", for which the run has a layout (docs/placement.md); unset: any for which it has one."""

    partition: str | None = setting(None, check=ONE_LINE)
    """Partition; unset: slurm.partition. Of several partitions and nothing else, slurm.partition="a,b" makes one request."""

    account: str | None = setting(None, check=ONE_LINE)
    """Account that is charged; unset: slurm.account."""

    qos: str | None = setting(None, check=ONE_LINE)
    """Quality of service; unset: slurm.qos."""

    constraint: str | None = setting(None, check=ONE_LINE)
    """Features that the nodes must have; unset: slurm.constraint."""

    time_minutes: int | None = setting(None, range=Range(5))
    """Time limit of an attempt in minutes; unset: slurm.time_minutes."""

    gpus_per_node: int | str | None = setting(None, range=NOT_NEGATIVE, check=_GPUS)
    """GPUs asked for on each node, of a type where the cluster has several: "a100:4". Of another number than slurm.gpus_per_node, the request
    has layouts of its own; a trainer on all GPUs of a node is on all of these. Unset: slurm.gpus_per_node."""

    gpu_memory_gb: float | None = setting(None, range=POSITIVE)
    """Memory of each of them in GB (2^30 bytes), which the layouts of this request have to fit in; unset: slurm.gpu_memory_gb."""

    extra: dict[str, Any] = setting({}, check=_SBATCH)
    """Further sbatch options by their long names, beside those of slurm.extra and before them."""


@dataclass(frozen=True, kw_only=True)
class SlurmConfig:
    root: Location | None = setting(None, check=ONE_LINE, on_change=OTHER_DIRECTORY)
    """Directory on a filesystem that all nodes share; a run is <root>/<project>/<run>. Unset: $HPCRL_ROOT, else ./runs, where commands look for runs too."""

    checkpoint_root: Location | None = setting(None, check=_ABSOLUTE, on_change=OTHER_PLACE)
    """Directory that all nodes share, for checkpoints/ of runs, on scratch for example: <checkpoint_root>/<project>/<run>/checkpoints, to
    which the run directory has a symbolic link. Unset: checkpoints/ lies in the run directory."""

    export_root: Location | None = setting(None, check=_ABSOLUTE, on_change=OTHER_PLACE)
    """The same for exports/, on project space for example."""

    tensorboard_root: Location | None = setting(None, check=_ABSOLUTE, on_change=OTHER_PLACE)
    """The same for tensorboard/."""

    partition: str | None = setting(None, check=ONE_LINE, on_change=CLUSTER)
    """Partition; unset: the cluster's default."""

    account: str | None = setting(None, check=ONE_LINE, on_change=CLUSTER)
    """Account that is charged; unset: the user's default."""

    qos: str | None = setting(None, check=ONE_LINE, on_change=CLUSTER)
    """Quality of service; unset: the default."""

    constraint: str | None = setting(None, check=ONE_LINE, on_change=CLUSTER)
    """Features that the nodes must have."""

    time_minutes: int = setting(60, range=Range(5), on_change=CLUSTER)
    """Time limit of one attempt in minutes."""

    time_min_minutes: int | None = setting(None, range=Range(5), on_change=CLUSTER)
    """The least time limit in minutes with which an attempt may start: Slurm may shorten the limit down to it where the attempt then starts
    earlier (sbatch --time-min). Unset: time_minutes. Attempts save before the limit that they got."""

    grow_minutes: int | None = setting(None, range=COUNT, on_change=CLUSTER)
    """Let a run start again where the restart pays, at most once in so many minutes, such as 60 (docs/placement.md). With a range it does so
    once Slurm has more nodes idle, or on its own nodes once they would be faster in other roles. With several requests it does so once a
    larger one starts. Unset: never."""

    nodes: int | str | None = setting(None, range=COUNT, check=_NODES, on_change=SPREAD)
    """Nodes of an attempt, a number or a range such as "2-16". They are divided between trainer and replicas in the ratio of the nodes that
    policy_num_nodes and num_engines ask for (docs/placement.md). Unset: the sum of those."""

    gpus_per_node: int | str = setting(
        0,
        range=NOT_NEGATIVE,
        check=_GPUS,
        on_change=SPREAD,
    )
    """GPUs asked for on each node, of a type where the cluster has several: "h100:8"; 0: a run on CPU."""

    gpu_option: Literal["gpus-per-node", "gres", "none"] = setting("gpus-per-node", on_change=CLUSTER)
    """The option of sbatch that asks for them: --gpus-per-node; --gres=gpu:N; or none, where whole nodes are lent without counting GPUs."""

    gpu_memory_gb: float | None = setting(None, range=POSITIVE, on_change=CLUSTER)
    """Memory of each GPU in GB (2^30 bytes), with which `hpcrl plan` compares its estimate; unset: that of this machine's GPUs."""

    cpus_per_task: int | None = setting(None, range=COUNT, on_change=CLUSTER)
    """CPU cores asked for on each node (one task runs per node); unset: all where nodes are not shared, else the cluster's default."""

    mem_gb: int | None = setting(None, range=NOT_NEGATIVE, on_change=CLUSTER)
    """Memory asked for on each node in GB; 0: all of it; unset: all where nodes are not shared, else the cluster's default."""

    exclusive: bool | None = setting(None, on_change=CLUSTER)
    """Share no node with other jobs; unset: true for a run on GPUs that sets neither cpus_per_task nor mem_gb. Defaults of clusters are usually
    one core and its share of the memory, independent of the GPUs."""

    requests: dict[str, RequestConfig] = setting({}, on_change=CLUSTER)
    """Several requests for the same run, by names of your own: [slurm.requests.spot] and [slurm.requests.reserved] are two jobs, of which one
    at a time is the run (docs/operations.md). What a request does not set is as in this section; none: this section is the only request."""

    replicas_per_node: int | None = setting(None, range=COUNT, on_change=CLUSTER)
    """Replicas on one rollout node; unset: as many as its GPUs allow, at least 1."""

    min_replicas: int = setting(1, range=COUNT, on_change=CLUSTER)
    """Replicas, without slurm.eval_replicas, below which a run does not go on for long: when replica_patience_minutes are over, it saves and fails."""

    eval_replicas: int = setting(0, range=NOT_NEGATIVE, on_change=CLUSTER)
    """Replicas, the last of generator.inference_engine.num_engines, that only evaluate; 0: all generate, and evaluate beside. They idle
    where no evaluation is open. Where none of them is there, the others evaluate."""

    min_scorers: int = setting(1, range=COUNT, on_change=CLUSTER)
    """Copies of each scorer's model below which a run does not go on for long, as min_replicas."""

    replica_patience_minutes: int = setting(15, range=COUNT, on_change=CLUSTER)
    """How long a run goes on with fewer replicas than min_replicas, those whose engines start included, or fewer scorers than min_scorers."""

    elastic: ElasticReplicasConfig = section(ElasticReplicasConfig, on_change=CLUSTER)

    elastic_scorers: ElasticScorersConfig = section(ElasticScorersConfig, on_change=CLUSTER)

    upload: UploadJobConfig = section(UploadJobConfig, on_change=CLUSTER)

    evaluation: EvaluationJobConfig = section(EvaluationJobConfig, on_change=CLUSTER)

    sandboxes: SandboxesConfig = section(SandboxesConfig, on_change=CLUSTER)

    container: ContainerConfig = section(ContainerConfig, on_change=SOFTWARE)

    readable_by: str | None = setting(
        None, check=ONE_LINE, on_change=Effect("warning", "other people may read the run, or may not any more")
    )
    """Unix group that may read the run directory, its folders below other roots and the files of its submission, all but secrets/; unset: only you."""

    python: str | None = setting(None, check=_INTERPRETER, on_change=SOFTWARE)
    """Interpreter of the jobs, an absolute path on the nodes; its environment has the same hpcrl with the extra job. Unset: the one that
    submits. In a container it is slurm.container.python."""

    setup: list[str] = setting([], on_change=SOFTWARE)
    """Shell lines that the batch script runs first."""

    extra: dict[str, Any] = setting({}, check=_SBATCH, on_change=CLUSTER)
    """Further sbatch options by their long names; true: an option without a value."""

    network_interface: str | None = setting(None, check=ONE_LINE, on_change=CLUSTER)
    """Interface whose address the servers bind; unset: the one to which the node's name resolves."""

    array_parallelism: int | None = setting(None, range=COUNT, on_change=CLUSTER)
    """Elements of a sweep that run at the same time; unset: 256."""

    signal_seconds: int = setting(150, range=Range(60), on_change=CLUSTER)
    """Seconds before the time limit at which a run saves and stops; a save may take 30 seconds less."""

    crash_budget: int = setting(3, range=COUNT, on_change=CLUSTER)
    """Crashes without a new checkpoint between them after which a run is held instead of requeued; 1: a crash is never retried."""

    replica_restarts: int = setting(3, range=NOT_NEGATIVE, on_change=CLUSTER)
    """Restarts of a replica or a scorer that fails, in one attempt, before it is given up; training goes on with the others."""

    patience: PatienceConfig = section(PatienceConfig, on_change=CLUSTER)
    """When a process that makes no progress counts as hanging."""

    def asked_by(self, request: str) -> SlurmConfig:
        """Return the section with the settings of one of `requests` in place of its own."""
        one = self.requests[request]
        names = [field.name for field in fields(one) if field.name != "nodes"]
        own = {name: value for name in names if (value := getattr(one, name)) is not None}
        return replace(self, **{**own, "extra": {**self.extra, **one.extra}, "requests": {}})

    def has_own_layouts(self, request: str) -> bool:
        """Return whether the layouts of one of `requests` are not those of the run: its GPUs have another memory, or are more or fewer."""
        one = self.requests[request]
        return one.gpu_memory_gb is not None or self.asked_by(request).gpus != self.gpus

    @property
    def gpus(self) -> int:
        """GPUs that are asked for on each node, without their type."""
        if isinstance(self.gpus_per_node, int):
            return max(0, self.gpus_per_node)
        count = self.gpus_per_node.rpartition(":")[2]
        return int(count) if count.isdecimal() else 0

    @property
    def other_environment(self) -> bool:
        """Whether jobs have other packages than the process that submits: those of a container or of `python`."""
        return self.container.kind != "none" or self.python is not None

    @property
    def whole_nodes(self) -> bool:
        """Whether a run shares no node with other jobs; where it is not set: if it asks for GPUs, and not for cores or memory."""
        if self.exclusive is not None:
            return self.exclusive
        return self.gpus > 0 and self.cpus_per_task is None and self.mem_gb is None

    def element(self, asked: ElasticConfig | EvaluationJobConfig, share: int) -> tuple[int | None, int | None, bool]:
        """Return the cores and the GB of memory that an element of an elastic pool asks for, and whether it takes its whole node.

        Where they are not set they are the run's, divided among those of the same kind on a node. None: the cluster's default.

        Args:
            share: how many of these a node of the run has.
        """
        uncounted = self.gpus > 0 and self.gpu_option == "none"  # two elements on a node would take the same GPUs
        if asked.cpus_per_task is not None or asked.mem_gb is not None:
            return asked.cpus_per_task, asked.mem_gb, uncounted
        if self.whole_nodes and (share == 1 or uncounted):
            return self.cpus_per_task, self.mem_gb or 0, True
        cpus = None if self.cpus_per_task is None else max(1, self.cpus_per_task // share)
        memory = self.mem_gb // share if self.mem_gb else self.mem_gb if share == 1 else None
        return cpus, memory, False

    @property
    def scarce_cores(self) -> bool:
        """Whether a run on GPUs asks for no cores and takes no whole nodes: most clusters give it one core per node."""
        asks = self.cpus_per_task is not None or self.whole_nodes or _asks_for_cores(self.extra)
        return self.gpus > 0 and not asks

    def has_scarce_elements(self, asked: ElasticConfig | EvaluationJobConfig, share: int) -> bool:
        """Return whether the elements of an elastic pool on GPUs ask for no cores and take no whole nodes; arguments as of `element`."""
        cpus, _, whole = self.element(asked, share)
        return self.gpus > 0 and not (cpus is not None or whole or _asks_for_cores(asked.extra))


def _asks_for_cores(extra: Mapping[str, Any]) -> bool:
    return bool({name.replace("-", "_") for name in extra} & {"cpus_per_gpu", "exclusive"})
