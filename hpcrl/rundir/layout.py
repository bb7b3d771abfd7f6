"""Paths of a run directory; no other module builds one.

<root>/<project>/<run>/            0700
  config.toml                      resolved; the only configuration a job reads
  config.<attempt>.toml            what it was up to this attempt, where `hpcrl resume` changed it after
  code/                            snapshot of hpcrl/ and jobs/ that this run uses; commit.txt, of their git checkout, "with changes" where they differ
  slurm -> ../.slurm/<name>        submitit's folder: sbatch script, pickles, output of the batch script and of what no log has
  certificate.json                 digests by which two runs are compared, bit for bit (hpcrl/launch/manage/certificate.py)
  inputs.json                      datasets, templates and models that attempts read, by their checksums (hpcrl/launch/inputs.py)
  submission.json                  job id, executor, overrides
  attempts.jsonl                   each start of the run
  outcomes/<attempt>.json          how that attempt ended
  allocations/<job>.json           the nodes that a start of a job held, and for how long (hpcrl/rundir/allocations.py)
  secrets/token                    0600; every HTTP request carries it
  endpoints/                       one process status file per process, and the rendezvous of the newest attempt
  logs/<attempt>/<process>.log     and stacks/<process>.txt, what each thread did when somebody asked; collectives/<rank>, what NCCL did
  weights/v000042/                 HF names, safetensors, manifest; committed by rename
  samples/<replica>/g….safetensors finished groups; those that were handed over at once are in one file
  scores/<model>/g….safetensors    what scorers say of a finished group
  dataset/train-0/                 tokens of the first training dataset whose rows are trained as they are; validation-0 of the first that is evaluated
  turns/<worker>/g….v<k>.jsonl     what has ended of groups that have not, begun with version k
  snapshots/<sha256>.blocks        what programs have changed in sandboxes; blocks/<sha256>.z (hpcrl/sandboxes/snapshots.py)
  batches/s000042.json             which groups train step 42, in order, with the data cursor
  checkpoints/s000040/             model, optimizer, RNG, scheduler; manifest; COMMIT
  checkpoints/s000041u2/           the same after 2 optimizer steps of step 42, where a stop request came in between
  committed.json                   step of the newest commit in checkpoints/, for when that is not there
  checkpoints/starts.jsonl         which checkpoint each attempt loaded and went on from
  exports/s000040/                 HF format
  checkpoints -> <slurm.checkpoint_root>/<project>/<run>/checkpoints   where that is set; so are exports and tensorboard (hpcrl/rundir/other_roots.py)
  pictures/g….0.png                what the first sample of a group painted; trainer.multi_modal_log_interval
  pictures/g….image-0.png          the first image that all samples of a group were shown; g….0.image-1.png: the second one of its first sample
  dumps/s000042/                   what step 42 trained, with advantages; trainer.dump_data_batch
  evals/v000010/<replica>.jsonl    texts and scores of the evaluation samples
  evals/v000010/losses.json        of validation sets
  evals/v000010/<replica>.rows     what has ended of an evaluation that has not
  evals/v000010/begun.json         as long as it has not: its weights, and the checkpoint of its step, stay; the attempt that the version belongs to
  evals/v000010/failed.json        failures of the evaluation job at it, after the end of the run
  evaluations/<name>/              of `hpcrl eval`, each laid out as a run directory (hpcrl/launch/local/evaluate.py)
  metrics/*.jsonl                  one writer per file; the truth
  timeline/<attempt>/<process>.jsonl   what each process did when, and .old.jsonl what it did before (hpcrl/observe/timeline.py)
  profile/<attempt>/rank-0.json.gz PyTorch profiles of trainer ranks; rank-0.nsys-rep and rollout-0.nsys-rep, those of Nsight Systems
  profile/<attempt>/memory/rank-0-s000042.pickle   what allocated GPU memory in step 42; trainer.policy.record_memory. rank-0-oom.pickle: when it ran out
  tensorboard/<run>/               derived from metrics; can be rebuilt
  alerts.jsonl                     alerts of the run (hpcrl/rundir/alerts.py)
  trackers/<name>.json             what a tracker has received; <name>/ its own files
  uploads/<store>.json             what of exports/ and checkpoints/ is in a store elsewhere (hpcrl/upload/state.py)
  control/                         stop, stacks: requests to the agents; growth, the last one for more nodes (hpcrl/rundir/growth.py)
  claims/<number>.json             which start of which job the run belongs to, where several requests wait for it (hpcrl/rundir/claims.py)

<root>/.bench/<project>/<run>/     what `hpcrl bench` made and measured for that run (hpcrl/launch/bench/folder.py)
<root>/.tokens/                    tokens of datasets that runs share (hpcrl/data/token_cache.py)
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from hpcrl.errors import RunError

OTHER_ROOTS = {"checkpoint_root": "checkpoints", "export_root": "exports", "tensorboard_root": "tensorboard"}
"""Settings of section slurm, and the folder of a run that each places."""
COMMIT = "commit.txt"
_STEP = re.compile(r"s(\d{6,})")
_POSITION = re.compile(r"s(\d{6,})(?:u([1-9]\d*))?")
_VERSION = re.compile(r"v(\d{6,})")


def default_root() -> Path:
    """Return the default root of runs: $HPCRL_ROOT, else ./runs."""
    return expanded(os.environ.get("HPCRL_ROOT") or "runs")


def root_of(given: str | None) -> Path:
    """Return where runs are made whose slurm.root is this."""
    return expanded(given) if given else default_root()


def expanded(path: str | Path) -> Path:
    """Return a path with the home directory in place of a leading ~.

    Raises:
        RunError: there is none: no such user, or a user without HOME and without an entry in passwd, as in some containers.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise RunError(f"{path}: ~ leads to no home directory here; write the path out, or set HOME") from None


def token_cache(root: Path) -> Path:
    """Return where the runs of a root keep tokens for each other, with data.cache."""
    return root / ".tokens"


@dataclass(frozen=True)
class Run:
    """A run directory; every path in it has a name here.

    Attributes:
        path: absolute path of the run directory.
    """

    path: Path

    @classmethod
    def open(cls, path: str | Path) -> Run:
        """Return the run at `path`.

        Raises:
            RunError: `path` holds no submitted run.
        """
        run = cls(Path(path).absolute())
        if not run.config.is_file():
            raise RunError(f"{run.path} is not a run directory: it has no config.toml. `hpcrl status` lists the runs.")
        return run

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def project(self) -> str:
        return self.path.parent.name

    @property
    def root(self) -> Path:
        return self.path.parent.parent

    @property
    def config(self) -> Path:
        return self.path / "config.toml"

    @property
    def checksums(self) -> Path:
        return self.path / "checksums.json"

    @property
    def certificate(self) -> Path:
        return self.path / "certificate.json"

    @property
    def inputs(self) -> Path:
        return self.path / "inputs.json"

    @property
    def code(self) -> Path:
        return self.path / "code"

    @property
    def slurm(self) -> Path:
        return self.path / "slurm"

    @property
    def bench(self) -> Path:
        return self.root / ".bench" / self.project / self.name

    @property
    def submission(self) -> Path:
        return self.path / "submission.json"

    @property
    def attempts(self) -> Path:
        return self.path / "attempts.jsonl"

    @property
    def outcomes(self) -> Path:
        return self.path / "outcomes"

    @property
    def token(self) -> Path:
        return self.path / "secrets" / "token"

    @property
    def endpoints(self) -> Path:
        return self.path / "endpoints"

    @property
    def weights(self) -> Path:
        return self.path / "weights"

    @property
    def samples(self) -> Path:
        return self.path / "samples"

    @property
    def scores(self) -> Path:
        return self.path / "scores"

    def scores_of(self, name: str) -> Path:
        return self.scores / name

    @property
    def datasets(self) -> Path:
        return self.path / "dataset"

    def dataset(self, name: str) -> Path:
        return self.datasets / name

    def teacher_file(self, dataset: str) -> Path:
        """Teacher's log-probabilities of a dataset's rows, in a directory of `hpcrl score`."""
        return self.teacher / dataset

    @property
    def teacher(self) -> Path:
        return self.path / "teacher"

    @property
    def turns(self) -> Path:
        return self.path / "turns"

    @property
    def snapshots(self) -> Path:
        return self.path / "snapshots"

    @property
    def batches(self) -> Path:
        return self.path / "batches"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def committed(self) -> Path:
        return self.path / "committed.json"

    @property
    def starts(self) -> Path:
        return self.checkpoints / "starts.jsonl"

    @property
    def exports(self) -> Path:
        return self.path / "exports"

    @property
    def elsewhere(self) -> dict[Path, Path]:
        """The folders below other roots than slurm.root: symbolic links of the run directory, and the places that they lead to."""
        links = [self.path / name for name in OTHER_ROOTS.values()]
        return {link: self.path / link.readlink() for link in links if link.is_symlink()}

    @property
    def dumps(self) -> Path:
        return self.path / "dumps"

    def picture(self, sample: str) -> Path:
        """Return where the picture is that a sample, <group>.<place in it>, has painted, if it is kept."""
        return self.pictures / f"{sample}.png"

    @property
    def pictures(self) -> Path:
        return self.path / "pictures"

    def shown_picture(self, name: str, number: int) -> Path:
        """Return where an image is that a sample was shown, the first is 0, if it is kept.

        Args:
            name: of the sample; of its group, where all samples of it were shown the image.
        """
        return self.picture(f"{name}.image-{number}")

    def pictures_of(self, sample: str) -> list[Path]:
        """Return the pictures of a sample that are kept: those that it was shown, in their order, and what it has painted."""
        found, names = list[Path](), (sample.rpartition(".")[0], sample)
        while kept := [path for name in names if (path := self.shown_picture(name, len(found))).exists()]:
            found.append(kept[0])
        return [*found, *filter(Path.exists, [self.picture(sample)])]

    @property
    def evals(self) -> Path:
        return self.path / "evals"

    @property
    def evaluations(self) -> Path:
        return self.path / "evaluations"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def events(self) -> Path:
        """Folder of TensorBoard's events; TensorBoard names the run by it."""
        return self.tensorboard / self.name

    @property
    def alerts(self) -> Path:
        return self.path / "alerts.jsonl"

    def tracker(self, name: str) -> Path:
        """Metrics that a tracker has received; a folder of the same name without suffix has its own files."""
        return self.path / "trackers" / f"{name.replace(':', '.')}.json"

    @property
    def uploads(self) -> Path:
        return self.path / "uploads"

    def upload(self, store: str) -> Path:
        return self.uploads / f"{store}.json"

    @property
    def stop(self) -> Path:
        return self.path / "control" / "stop.json"

    @property
    def growth(self) -> Path:
        return self.path / "control" / "growth.json"

    @property
    def stacks_request(self) -> Path:
        return self.path / "control" / "stacks.json"

    @property
    def claims(self) -> Path:
        return self.path / "claims"

    def outcome(self, attempt: int) -> Path:
        return self.outcomes / f"{attempt}.json"

    def config_of(self, attempt: int) -> Path:
        return self.path / f"config.{attempt}.toml"

    def status_file(self, process: str) -> Path:
        return self.endpoints / f"{process}.json"

    @property
    def allocations(self) -> Path:
        return self.path / "allocations"

    def allocation(self, job: str) -> Path:
        return self.allocations / f"{job}.json"

    def rendezvous(self, attempt: int, scorer: str = "") -> Path:
        """Rendezvous of ranks on several nodes: the trainer's, or those of a scorer."""
        return self.endpoints / f"rendezvous-{attempt}{scorer and '-'}{scorer}.json"

    def meeting(self, attempt: int, replica: int) -> Path:
        """Rendezvous of the processes of an engine on several nodes."""
        return self.endpoints / f"rendezvous-{attempt}-rollout-{replica}.json"

    def part_ended(self, attempt: int, part: int) -> Path:
        return self.endpoints / f"rendezvous-{attempt}-part-{part}.json"

    def profiles(self, attempt: int) -> Path:
        return self.path / "profile" / str(attempt)

    def profile_of(self, attempt: int, rank: int) -> Path:
        return self.profiles(attempt) / f"rank-{rank}.json.gz"

    def nsys_report(self, attempt: int, process: str) -> Path:
        return self.profiles(attempt) / f"{process}.nsys-rep"

    def memory_snapshot(self, attempt: int, rank: int, step: int | None) -> Path:
        """Return the file of what allocated memory in `step`; None: at the moment at which it ran out."""
        when = "oom" if step is None else f"s{step:06d}"
        return self.profiles(attempt) / "memory" / f"rank-{rank}-{when}.pickle"

    def memory_snapshots(self, rank: int) -> list[Path]:
        """Return the memory snapshots of a rank, by attempt and step."""
        found = (self.path / "profile").glob(f"*/memory/rank-{rank}-s*.pickle")
        return sorted(found, key=lambda path: (attempt_of(path.parents[1]) or 0, path.name))

    def logs(self, attempt: int) -> Path:
        return self.path / "logs" / str(attempt)

    def log(self, attempt: int, process: str) -> Path:
        return self.logs(attempt) / f"{process}.log"

    def stacks(self, attempt: int, process: str) -> Path:
        return self.logs(attempt) / "stacks" / f"{process}.txt"

    def collectives(self, attempt: int) -> Path:
        return self.logs(attempt) / "collectives"

    def weights_of(self, version: int) -> Path:
        return self.weights / f"v{version:06d}"

    def batch(self, step: int) -> Path:
        return self.batches / f"s{step:06d}.json"

    def checkpoint(self, step: int, updates: int = 0) -> Path:
        """Return the checkpoint after `step`, and after so many optimizer steps of the next one, of critic and policy together."""
        return self.checkpoints / (f"s{step:06d}" + (f"u{updates}" if updates else ""))

    def export(self, step: int) -> Path:
        return self.exports / f"s{step:06d}"

    def dump(self, step: int) -> Path:
        return self.dumps / f"s{step:06d}"

    def samples_of(self, replica: int) -> Path:
        return self.samples / str(replica)

    def turns_of(self, worker: str) -> Path:
        return self.turns / worker

    def evals_of(self, version: int) -> Path:
        return self.evals / f"v{version:06d}"

    def eval_dump(self, version: int, replica: int) -> Path:
        return self.evals_of(version) / f"{replica}.jsonl"

    def eval_rows(self, version: int, replica: int) -> Path:
        return self.evals_of(version) / f"{replica}.rows"

    def eval_begun(self, version: int) -> Path:
        return self.evals_of(version) / "begun.json"

    def eval_job(self, version: int) -> Path:
        return self.evals_of(version) / "job.json"

    def eval_failures(self, version: int) -> Path:
        return self.evals_of(version) / "failed.json"

    def eval_losses(self, version: int) -> Path:
        return self.evals_of(version) / "losses.json"

    def eval_summary(self, version: int) -> Path:
        return self.evals_of(version) / "summary.json"

    def metrics_of(self, process: str) -> Path:
        return self.metrics / f"{process}.jsonl"

    @property
    def timelines(self) -> Path:
        return self.path / "timeline"

    def timeline(self, attempt: int) -> Path:
        return self.timelines / str(attempt)

    def timeline_of(self, attempt: int, process: str) -> Path:
        return self.timeline(attempt) / f"{process}.jsonl"

    def inside(self, relative: str) -> Path:
        """Return the path that a message names, refusing anything outside this run directory.

        Raises:
            RunError: the path leaves the run directory.
        """
        path = os.path.realpath(self.path / relative)
        if os.path.commonpath((path, self._real_path)) != self._real_path:
            raise RunError(f"path {relative!r} leaves the run directory {self.path}")
        return Path(path)

    @cached_property
    def _real_path(self) -> str:
        return os.path.realpath(self.path)


def step_of(path: Path) -> int | None:
    """Return the step that a checkpoint, export, dump or batch path names, or None for any other name, such as that of a
    checkpoint inside a step."""
    match = _STEP.fullmatch(path.stem)
    return int(match[1]) if match else None


def position_of(path: Path) -> tuple[int, int] | None:
    """Return the step and the optimizer steps of the next one that a checkpoint's path names, or None for any other name."""
    match = _POSITION.fullmatch(path.name)
    return (int(match[1]), int(match[2] or 0)) if match else None


def attempt_of(path: Path) -> int | None:
    """Return the attempt that a folder of logs or of a timeline names, or None for any other name."""
    return int(path.name) if path.name.isdecimal() else None


def version_of(path: Path) -> int | None:
    """Return the version that a weight directory names, or None for any other name."""
    match = _VERSION.fullmatch(path.name)
    return int(match[1]) if match else None
