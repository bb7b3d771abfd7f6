"""hpcrl beside TRL: the same work by both in turns on this machine, each a whole command; a table, and a line of JSON per run.

    python benchmarks/peers/run.py [--work quickstart|larger|trainer] [--engines vllm,transformers] [--repeats N]
                                   [--prompt N] [--root DIR] [--environment DIR | --python FILE] [KEY=VALUE ...]

quickstart   configs/quickstart.toml, from the start model to its last step, with a greedy evaluation every five steps
larger       the same prompts and batches with a random model of 34 million parameters and answers of up to 96 tokens: two steps
trainer      no generation: both train the same given samples, each in some ways (trainer.py)

Peaks of memory: the kernel's high-water mark of each process, summed over all that the command started; pages that processes share count for each
of them. Memory together: the most that they had at one time, each page counted once.
Scores are of one function for both (work.py): transformers generates greedily, hpcrl's environment gives the reward. settings.py says how TRL's settings correspond to
hpcrl's. KEY=VALUE are settings of hpcrl, for both.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from shlex import join

from benchmarks.peers import trainer
from benchmarks.peers.report import Record, largest_difference, table
from benchmarks.peers.settings import ENGINES
from benchmarks.peers.work import LARGER, QUICKSTART, ROOT, Work, make_larger_model, score_of
from benchmarks.process_tree import measured
from hpcrl.config import Config
from hpcrl.observe.metrics import merged
from hpcrl.observe.summary import STEP_SECONDS, TOKENS_PER_SECOND
from hpcrl.rundir.layout import Run

_HERE = Path(__file__).parent
LOCK = _HERE / "trl.lock"
_CPU_ENGINE = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1"}
"""For TRL's vLLM; hpcrl sets the like itself."""
_ALONE = {"trainer": {"hpcrl": tuple(trainer.OWN_WAYS), "TRL": trainer.WAYS}}
"""The work without engines, a script of its own, and in which ways the tools do it."""


class Comparison:
    """Runs one work with both tools.

    Args:
        root: directory of all that the runs leave.
        python: of the environment that has TRL.
        given: settings of hpcrl, from the command line.
    """

    def __init__(self, work: str, root: Path, python: Path, given: Sequence[str]) -> None:
        self._name, self._root, self._python = work, root, python
        self._settings = list(given)
        self._model = root / "model"
        if work == "larger":
            make_larger_model(self._model)
            self._settings = [*LARGER, f"trainer.policy.model.path={self._model}", *given]
        if work in _ALONE:
            trainer.make_model(self._model)
        else:
            self._work = Work.of(Config.from_toml(QUICKSTART, self._settings))

    def run(self, tool: str, engine: str, place: Path) -> Record:
        """Run a tool once in the new directory `place`."""
        place.mkdir(parents=True)
        command = {"hpcrl": self._hpcrl, "TRL": self._trl}[tool](engine, place)
        record = Record(
            self._name,
            f"{tool}, {engine}" if engine else tool,
            join(map(str, command)),
            time.strftime("%Y-%m-%d %H:%M", time.gmtime()),
            commit(),
            f"{cpu_name()}, {os.cpu_count()} cores, Python {platform.python_version()}",
            os.getloadavg()[0],
        )
        variables, log = {"PYTHONPATH": str(ROOT), **_CPU_ENGINE} if tool == "TRL" else {}, place / "log.txt"
        usage = measured([str(word) for word in command], log, os.environ | variables)
        if usage.returncode:
            return replace(record, error=last_line(log))
        record = replace(
            record, wall_s=usage.wall_s, cpu_s=usage.cpu_s, peak_mib=usage.peak_mib, together_mib=usage.together_mib
        )
        if self._name in _ALONE:
            taken = json.loads((place / "taken.json").read_text())
            return replace(record, step_s=taken.pop("seconds"), **taken)
        return self._described(record, tool, place)

    def _hpcrl(self, engine: str, place: Path) -> list[str | Path]:
        if self._name in _ALONE:
            return [sys.executable, *self._alone("hpcrl", engine, place)]
        own = [
            f"slurm.root={place}",
            "trainer.run_name=peers",
            f"trainer.hf_save_interval={self._work.steps}",
            f"generator.inference_engine.backend={engine}",
        ]
        submit = [sys.executable, "-m", "hpcrl.cli.main", "submit", QUICKSTART, "--local", "--follow"]
        return [*submit, *self._settings, *own]

    def _trl(self, engine: str, place: Path) -> list[str | Path]:
        if self._name in _ALONE:
            return [self._python, *self._alone("trl", engine, place)]
        script = [self._python, _HERE / "train_with_trl.py", "--engine", engine, "--output", place]
        return [*script, QUICKSTART, *self._settings]

    def _alone(self, tool: str, way: str, place: Path) -> list[str | Path]:
        script = [_HERE / f"{self._name}.py", tool, "--way", way, *self._settings]
        return [*script, "--model", self._model, "--output", place / "taken.json"]

    def _described(self, record: Record, tool: str, place: Path) -> Record:
        work = self._work
        if tool == "hpcrl":
            run = Run.open(place / "quickstart" / "peers")
            steps = [metrics for _, metrics in sorted(merged(run).items()) if STEP_SECONDS in metrics]
            seconds = [metrics[STEP_SECONDS] for metrics in steps]
            tokens = [metrics[TOKENS_PER_SECOND] * metrics[STEP_SECONDS] for metrics in steps]
            model = run.export(work.steps)
        else:
            taken = json.loads((place / "steps.json").read_text())
            seconds, tokens, model = taken["seconds"], taken["tokens"], place / "model"
        start = work.config.trainer.policy.model.path
        scores = [score_of(work, one) for one in (start, model)] if work.validation else []
        return replace(record, step_s=seconds, tokens=tokens, scores=scores)


def trl_python(folder: Path) -> Path:
    """Return the interpreter of TRL's environment in `folder`: hpcrl's own, as the Makefile makes it, and what `LOCK` names.

    It is made if it is missing: two minutes, and 3 GB.
    """
    folder = folder.absolute()
    python, done = folder / "bin" / "python", folder / "trl-installed"
    if not done.is_file() or done.read_text() != LOCK.read_text():
        print(f"making an environment with TRL in {folder}", file=sys.stderr, flush=True)
        make = ["make", "-C", str(ROOT), f"PYTHON={sys.executable}", f"VENV={folder}", str(folder / "installed")]
        subprocess.run(make, check=True, stdout=sys.stderr)
        subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-deps", "-r", LOCK], check=True)
        done.write_text(LOCK.read_text())
    return python


def commit() -> str:
    """Return the commit of this checkout, with a + where files differ from it."""

    def git(*words: str) -> str:
        return subprocess.run(["git", "-C", ROOT, *words], capture_output=True, text=True, check=True).stdout.strip()

    return git("rev-parse", "--short", "HEAD") + ("+" if git("status", "--porcelain") else "")


def cpu_name() -> str:
    names = [line.split(":")[1] for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line]
    return names[0].strip() if names else platform.machine()


def last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else "it printed nothing"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", choices=("quickstart", "larger", *_ALONE), default="quickstart")
    parser.add_argument("--engines", help="of vllm, transformers (default: both)")
    parser.add_argument("--prompt", type=int, help="tokens of a prompt, of --work trainer (default: 16)")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--root", type=Path, default=Path("runs") / time.strftime("peers-%Y%m%d-%H%M%S"), help="new")
    parser.add_argument("--environment", type=Path, default=_HERE / ".venv", help="of TRL; made if it is missing")
    parser.add_argument("--python", type=Path, help="an interpreter that has TRL, and what hpcrl needs, already")
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE")
    arguments = parser.parse_args()
    engines = arguments.engines.split(",") if arguments.engines else list(ENGINES)
    tools = [(tool, engine) for engine in engines for tool in ("hpcrl", "TRL")]
    if not {*engines} <= {*ENGINES}:
        parser.error(f"--engines: expected some of {', '.join(ENGINES)}, found {arguments.engines}")
    if arguments.work in _ALONE:
        if arguments.engines or arguments.settings:
            parser.error(
                f"--work {arguments.work}: no engine and no configuration takes part; leave out --engines and KEY=VALUE"
            )
        tools = [(tool, way) for tool, ways in _ALONE[arguments.work].items() for way in ways]
    if arguments.prompt:
        if arguments.work != "trainer":
            parser.error("--prompt: goes with --work trainer")
        arguments.settings = ["--prompt", str(arguments.prompt)]
    root, records = arguments.root.absolute(), list[Record]()
    root.mkdir(parents=True)
    python = arguments.python.absolute() if arguments.python else trl_python(arguments.environment)
    comparison = Comparison(arguments.work, root, python, arguments.settings)
    for number in range(arguments.repeats):
        for tool, engine in tools:
            record = comparison.run(tool, engine, root / f"{number}-{tool}-{engine}")
            records.append(record)
            with (root / "records.jsonl").open("a") as file:
                file.write(json.dumps(asdict(record)) + "\n")
            print(f"{record.tool}: {record.error or f'{record.wall_s:.1f} s'}", file=sys.stderr, flush=True)
    first = records[0]
    load = f"{min(one.load for one in records):.1f} to {max(one.load for one in records):.1f}"
    print(f"python {join(sys.argv)}")
    print(f"{first.machine}; commit {first.commit}, {first.date} UTC; load before each run {load}\n")
    print(table(records))
    print(largest_difference(records))


if __name__ == "__main__":
    main()
