"""A run among the jobs of a busy cluster, in virtual time: hours from submission to the last step, goodput and node hours.

    python benchmarks/replay_cluster.py [--nodes 64 | --swf FILE] [--load 0.8] [--size 16] [--steps 240]
        [--preempt-minutes M] [--grow-minutes 60] [--seeds 15]

The product decides which layout an attempt takes (hpcrl/launch/layouts.py), whether the run is requeued, which request yields, and when it grows
(hpcrl/launch/requeue). Slurm is a queue by time of arrival with EASY backfill; a job that is requeued, or released, arrives then.

Other jobs are those of a file in the Standard Workload Format (https://www.cs.huji.ac.il/labs/parallel/workload/swf.html), or drawn: sizes, run times
and hours of the day as in Lublin and Feitelson 2003 (J. Parallel Distrib. Comput. 63, all jobs), run time by time limit uniform as in Mu'alem and
Feitelson 2001, limits rounded up to usual ones as in Tsafrir and others 2005. Nodes fail 6.5 times in 1,000 days (Kokolis and others 2024). Gaps
between jobs are scaled to the load; the run comes on top of it.
"""

from __future__ import annotations

import argparse
import math
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from heapq import heappop, heappush
from itertools import count, cycle, islice, pairwise
from pathlib import Path
from statistics import median, quantiles
from typing import Any, NamedTuple

from hpcrl.config import Config
from hpcrl.launch.layouts import AttemptLayout, all_layouts, layouts_for, usable_layouts
from hpcrl.launch.requeue.growth import Growth, choose_growth, grew_lately
from hpcrl.launch.requeue.policy import decide
from hpcrl.launch.requeue.prologue import decide_claim
from hpcrl.launch.requeue.requeue import SOON
from hpcrl.launch.requeue.roles import RoleTimes, choose_layout, fewest_nodes
from hpcrl.launch.scheduler import GONE, JobState
from hpcrl.launch.submit.requests import layouts_of_request
from hpcrl.rundir.ledger import Attempt, Kind, Outcome

ROOT = Path(__file__).parents[1]
HOUR, DAY = 3600.0, 86400.0
LIMITS_S = [minutes * 60.0 for minutes in (5, 10, 15, 30, 60, 120, 180, 240, 360, 480, 720, 1080, 1440, 2160, 2880)]
SIZES = ("trainer.placement.policy_num_nodes", "generator.inference_engine.num_engines")
FAILURES_PER_NODE_S = 6.5 / (1000 * DAY)
FILLED_S = 5 * DAY  # the run comes to a cluster that has filled
SOON_S, REQUEUED_S = (
    float(SOON.removeprefix("now+")),
    120.0,
)  # a requeued job waits Slurm's two minutes unless it was interrupted
LOOK_S = 300.0
MEASURED_STEPS = 5  # fewer give an attempt no seconds per step
TAKEN, TAKEN_S = 1, HOUR  # nodes of a job that preempts the run, and for how long


class Job(NamedTuple):
    """A job of a trace; times in seconds."""

    submitted: float
    nodes: int
    seconds: float
    limit_s: float


def drawn_jobs(nodes: int, load: float, seed: int) -> Iterator[Job]:
    """Yield the jobs of a synthetic trace, without end."""
    draw, most = random.Random(seed), math.log2(nodes)
    each_day = load * nodes * DAY / _mean_work(most)
    for day in count():
        for moment in sorted(_drawn_hour(draw) for _ in range(round(draw.gauss(each_day, math.sqrt(each_day))))):
            size, seconds = _drawn_size(draw, most)
            asked = seconds / (1.0 - draw.random())
            yield Job(day * DAY + moment, size, seconds, next((one for one in LIMITS_S if one >= asked), LIMITS_S[-1]))


@cache
def _mean_work(most: float) -> float:
    draw = random.Random(0)
    return sum(math.prod(_drawn_size(draw, most)) for _ in range(50_000)) / 50_000


def _drawn_size(draw: random.Random, most: float) -> tuple[int, float]:
    """Return nodes and seconds of a job; `most`: log2 of the cluster's nodes."""
    kind, size = draw.random(), 1
    if kind > 0.244:
        exponent = draw.uniform(0.8, most - 2.5) if draw.random() <= 0.86 else draw.uniform(most - 2.5, most)
        size = round(2 ** (round(exponent) if kind <= 0.244 + 0.576 else exponent))
    while True:
        short = draw.random() <= 0.78 - 0.0054 * size
        log_s = draw.gammavariate(4.2, 0.94) if short else draw.gammavariate(312, 0.03)
        if log_s <= 12:
            return size, math.exp(log_s)


def _drawn_hour(draw: random.Random) -> float:
    while True:  # half hours of a day that begins with the 11th
        moment = draw.gammavariate(8.1737, 3.9631)
        if 11 <= moment < 59:
            return (moment - 11) * 1800


def read_swf(path: Path) -> tuple[int, list[Job]]:
    """Return the nodes of a cluster and its jobs from a file in the Standard Workload Format; jobs that never ran are left out."""
    header, rows = dict[str, int](), list[list[float]]()
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        name, _, value = line.lstrip("; ").partition(":")
        if not line.startswith(";") and line.strip():
            rows.append([float(word) for word in line.split()])
        elif value.split() and value.split()[0].isdecimal():
            header[name.strip()] = int(value.split()[0])
    rows = [[submitted, max(given, asked), seconds, max(seconds, limit)]
            for _, submitted, _, seconds, given, _, _, asked, limit, *_ in rows if seconds > 0 and max(given, asked) > 0]  # fmt: skip
    processors = header.get("MaxProcs") or int(max(row[1] for row in rows))
    nodes = header.get("MaxNodes") or processors
    jobs = [Job(at, min(nodes, math.ceil(used * nodes / processors)), *times) for at, used, *times in rows]
    return nodes, sorted(jobs, key=lambda job: job.submitted)


def repeated_jobs(nodes: int, jobs: Sequence[Job], load: float, seed: int) -> Iterator[Job]:
    """Yield the jobs of a trace from a random one on, again and again, at another load."""
    gaps = [after.submitted - before.submitted for before, after in pairwise(jobs)]
    gaps.append(sum(gaps) / len(gaps))
    scale = sum(job.nodes * job.seconds for job in jobs) / (load * nodes * sum(gaps))
    first, now = random.Random(seed).randrange(len(jobs)), 0.0
    for job, gap in islice(cycle(zip(jobs, gaps, strict=True)), first, None):
        yield job._replace(submitted=now)
        now += gap * scale


@dataclass(eq=False)
class Request:
    """A job in Slurm's hands; `least_limit_s`: how far its limit may be shortened, `held`: it waits for another job's end, `until`: of its limit."""

    least: int
    most: int
    limit_s: float
    begin: Callable[[Request], None]
    least_limit_s: float = math.inf
    queued: float = 0.0
    eligible: float = 0.0
    held: bool = False
    nodes: int = 0
    until: float = 0.0


class Cluster:
    """Slurm with EASY backfill, in virtual time."""

    def __init__(self, nodes: int, jobs: Iterator[Job]) -> None:
        self.now, self._free, self._jobs = 0.0, nodes, jobs
        self._queue, self._running = list[Request](), list[Request]()
        self._events, self._order = list[tuple[float, int, Callable[..., object], tuple[Any, ...]]](), count()
        self._arrive(None)

    def at(self, moment: float, event: Callable[..., object], *arguments: Any) -> None:
        heappush(self._events, (moment, next(self._order), event, arguments))

    def play(self, over: Callable[[], bool]) -> None:
        while not over():
            self.now, _, event, arguments = heappop(self._events)
            event(*arguments)
            if self._events[0][0] > self.now:
                for request in [*self._start()]:
                    request.begin(request)

    def submit(self, request: Request, after_s: float = 0.0) -> None:
        request.queued, request.eligible = self.now, self.now + after_s
        self._queue.append(request)
        self.at(request.eligible, lambda: None)

    def give(self, request: Request, nodes: int, limit_s: float) -> None:
        request.nodes, request.until = nodes, self.now + limit_s
        self._running.append(request)
        self._free -= nodes
        assert self._free >= 0

    def end(self, request: Request) -> None:
        self._running.remove(request)
        self._free += request.nodes

    def keep(self, request: Request, nodes: int) -> None:
        """Take the other nodes of a running job."""
        self._free += request.nodes - nodes
        request.nodes = nodes

    def idle(self) -> int:
        """Return the idle nodes; 0 while a job waits for nodes."""
        return 0 if self._waiting() else self._free

    def _waiting(self) -> list[Request]:
        return [one for one in self._queue if one.eligible <= self.now and not one.held]

    def _start(self) -> Iterator[Request]:
        """Yield the jobs that start now: none delays the first one that waits."""
        shadow, spare = math.inf, 0
        for one in sorted(self._waiting(), key=lambda one: one.queued):
            nodes, limit_s = min(one.most, self._free), one.limit_s
            if self.now + limit_s > shadow:
                if nodes > spare and self.now + one.least_limit_s <= shadow:
                    limit_s = shadow - self.now
                else:
                    nodes = min(nodes, spare)
                    spare -= nodes if nodes >= one.least else 0
            if nodes >= one.least:
                self._queue.remove(one)
                self.give(one, nodes, limit_s)
                yield one
            elif shadow == math.inf:
                spare = self._free - one.least
                for each in sorted(self._running, key=lambda each: each.until):
                    spare += each.nodes
                    if spare >= 0:
                        shadow = each.until
                        break

    def _arrive(self, job: Job | None) -> None:
        if job is not None:
            seconds = job.seconds
            self.submit(Request(job.nodes, job.nodes, job.limit_s, lambda one: self.at(self.now + seconds, self.end, one)))  # fmt: skip
        following = next(self._jobs)
        self.at(following.submitted, self._arrive, following)


@dataclass(frozen=True)
class Times:
    """What a run takes; seconds, of a step those on the largest layout.

    Attributes:
        start_s: from the start of a job to its first step. A first start of vLLM on an H100 took 80 s (docs/gpu.md).
        preempt_s: after which an attempt is preempted.
        grows: onto idle nodes, while no other job waits.
        takes_over: a larger request waits on while a smaller one runs, and takes the run over when it starts.
        grow_minutes: least time between two of these.
    """

    steps: int = 240
    step_s: float = 60.0
    start_s: float = 80.0
    save_s: float = 20.0
    preempt_s: float = math.inf
    grows: bool = False
    takes_over: bool = False
    grow_minutes: float = 60.0


class RunPlay:
    """One run on a cluster, from its submission to its last step.

    Attributes:
        uses: node seconds by categories of docs/goodput.md; those of trainer and engines are both "training".
        held: start, end and nodes of each attempt.
    """

    def __init__(self, cluster: Cluster, settings: Sequence[str], times: Times, seed: int) -> None:
        self._config, layouts = planned(tuple(settings))
        self._cluster, self._times, self._draw = cluster, times, random.Random(seed)
        self.submitted, self.ended, slurm = 0.0, 0.0, self._config.slurm
        self.uses, self.held, self._largest = Counter[str](), list[tuple[float, float, int]](), layouts[-1]
        self._layouts = dict[Request, list[AttemptLayout]]()
        for name in slurm.requests or [""]:
            own = layouts_of_request(layouts, name, slurm.requests[name].nodes) if name else [*layouts]
            asked = slurm.asked_by(name) if name else slurm
            shortest = 60.0 * asked.time_min_minutes if asked.time_min_minutes is not None else math.inf
            request = Request(own[0].nodes, own[-1].nodes, 60.0 * asked.time_minutes, self._begin, shortest)
            self._layouts[request] = own
        self._attempts, self._outcomes, self._steps = list[Attempt](), list[Outcome](), 0.0
        self._owner: Request | None = None
        self._next: Request | None = None
        self._layout = layouts[-1]
        self._waits: RoleTimes | None = None
        self._stops, self._measured, self._grown = False, dict[int, float](), -math.inf

    def submit(self) -> None:
        self.submitted = self._cluster.now
        for request in self._layouts:
            self._cluster.submit(request)

    def _begin(self, request: Request) -> None:
        now, times = self._cluster.now, self._times
        if self._owner and not self._stops and self._takes_over(request):
            self._grown = now
            self._stop(len(self._attempts), "interrupted")
        decision = decide_claim(JobState("RUNNING") if self._owner else GONE, self._stops)
        if decision == "yield":
            self._cluster.end(request)
            again = self._again_at(request)
            self._cluster.submit(request, REQUEUED_S if again is None else again - now)
            request.held = again is None
        self._next = request if decision == "wait" else None
        if decision != "claim":
            return
        self._owner = request
        for other in self._layouts:
            other.held = other is not request and not (times.takes_over and other.most > request.nodes)
            if other is not request and not other.held and grew_lately(now, self._grown, 60 * times.grow_minutes):
                other.eligible = self._grown + 60 * times.grow_minutes
                self._cluster.at(other.eligible, lambda: None)
        self._layout = layout = self._chosen(request)
        if layout.sizes and layout.nodes < request.nodes:
            self._cluster.keep(request, layout.nodes)
        number = len(self._attempts) + 1
        job = [*self._layouts].index(request)
        self._attempts.append(Attempt(number, f"{job}.{number}", [f"n{n}" for n in range(layout.nodes)], now, layout.sizes))  # fmt: skip
        ends: list[tuple[float, Kind, bool]] = [
            (now + times.start_s + (times.steps - self._steps) * self._step_s(layout), "done", False),
            (request.until - self._config.slurm.signal_seconds, "interrupted", False),
            (now + times.preempt_s, "interrupted", True),
            (now + self._draw.expovariate(FAILURES_PER_NODE_S * request.nodes), "lost", False),
        ]
        moment, kind, preempted = min(ends)
        self._cluster.at(moment, self._stop, number, kind, preempted)
        if times.grows:
            self._cluster.at(now + times.start_s + LOOK_S, self._look, number)

    def _chosen(self, request: Request) -> AttemptLayout:
        """Return the layout of an attempt on the nodes of a request, by the waits of the last one that trained enough steps."""
        fitting, times = layouts_for(self._layouts[request], request.nodes), self._waits
        if times is None:
            return fitting[-1]
        smaller = [layout for layout in self._layouts[request] if layout.nodes < fitting[0].nodes]
        return fewest_nodes(choose_layout(fitting, times), smaller, times).layout

    def _slower(self, layout: AttemptLayout) -> list[float]:
        """Return how often as long as on the largest layout each role takes, the trainer first."""
        return [most / layout.sizes[path] for path, most in self._largest.sizes.items()]

    def _step_s(self, layout: AttemptLayout) -> float:
        return self._times.step_s * max(self._slower(layout), default=1.0)

    def _look(self, number: int) -> None:
        """Let the run grow, if the queue has room and it is worth a restart."""
        request, now = self._owner, self._cluster.now
        if request is None or self._stops or number != len(self._attempts):
            return
        lately = grew_lately(now, self._grown, 60 * self._times.grow_minutes)
        if not lately and self._growth(request, request.nodes + self._cluster.idle()):
            self._grown = now
            self._stop(number, "interrupted")
        else:
            self._cluster.at(now + LOOK_S, self._look, number)

    def _takes_over(self, request: Request) -> bool:
        """Return whether a request that starts with a larger layout than the attempt has is worth its restart."""
        if not self._times.takes_over or self._nodes(request) <= self._layout.nodes:
            return False
        if grew_lately(self._cluster.now, self._grown, 60 * self._times.grow_minutes):
            return False
        begun = self._attempts[-1].started + self._times.start_s
        few = self._cluster.now < begun + MEASURED_STEPS * self._step_s(self._layout)
        return few or self._growth(request, request.nodes) is not None

    def _again_at(self, request: Request) -> float | None:
        """Return when a request that has yielded may start again although the attempt goes on; None: once that has ended."""
        now, every_s = self._cluster.now, 60 * self._times.grow_minutes
        if not self._times.takes_over:
            return None
        if grew_lately(now, self._grown, every_s):
            return self._grown + every_s
        few = self._nodes(request) <= self._layout.nodes < self._layouts[request][-1].nodes
        return now + every_s if few else None

    def _nodes(self, request: Request) -> int:
        return layouts_for(self._layouts[request], request.nodes)[-1].nodes

    def _growth(self, request: Request, nodes: int) -> Growth | None:
        """Return the growth to these nodes, under the time limit of a request, where it is worth a restart."""
        layout, now, times = self._layout, self._cluster.now, self._times
        step_s = self._measured[layout.nodes] = self._step_s(layout)
        return choose_growth(
            held=layout.nodes,
            candidates=[layouts_for(self._layouts[request], nodes)[-1].nodes],
            restart_s=times.save_s + SOON_S + times.start_s,
            step_s=self._measured,
            steps_left=times.steps - self._steps - (now - self._attempts[-1].started - times.start_s) / step_s,
            left_s=request.until - self._config.slurm.signal_seconds - now,
        )

    def _stop(self, number: int, kind: Kind, preempted: bool = False) -> None:
        """End training: count what the attempt made, and save if there is time."""
        request, layout, times, trainer = self._owner, self._layout, self._times, self._config.trainer
        if request is None or self._stops or number != len(self._attempts):
            return
        self._stops, step_s = True, self._step_s(layout)
        if layout.sizes and (self._cluster.now - self._attempts[-1].started - times.start_s) / step_s > MEASURED_STEPS:
            trains, generates = (slower * times.step_s / step_s for slower in self._slower(layout))
            self._waits = RoleTimes(layout.sizes, step_s, trains, generates, 1 - trains, 1 - generates)
        save_s = 0.0 if kind == "lost" else times.save_s
        held_s = self._cluster.now + save_s - self._attempts[-1].started
        trained = max(0.0, held_s - save_s - times.start_s) / step_s
        unit = trainer.ckpt_interval if kind == "lost" else trainer.policy_mini_batch_size / trainer.train_batch_size
        kept = trained if kind == "done" else max(0.0, (self._steps + trained) // unit * unit - self._steps)
        self._steps += kept
        spent = {
            "training": kept * times.step_s * self._largest.nodes,
            "starting": min(times.start_s, held_s - save_s) * layout.nodes,
            "saving": save_s * layout.nodes,
            "lost": (trained - kept) * step_s * layout.nodes,
            "idle": (request.nodes - layout.nodes) * held_s,
        }
        self.uses.update({**spent, "waiting": request.nodes * held_s - sum(spent.values())})
        self._cluster.at(self._cluster.now + save_s, self._end, request, kind, preempted)

    def _end(self, request: Request, kind: Kind, preempted: bool) -> None:
        """End the batch script: the run is done, or requeued."""
        now, attempt = self._cluster.now, self._attempts[-1]
        self._owner, self._stops = None, False
        self._cluster.end(request)
        self.held.append((attempt.started, now, request.nodes))
        self._outcomes.append(Outcome(attempt.number, kind, kind, "replay", now, int(self._steps)))
        decision = decide(self._attempts, self._outcomes, self._config.slurm.crash_budget, resumes=True)
        if not decision.requeue:
            assert kind == "done", decision.why
            self.ended = now
            return
        for other in self._layouts:
            other.queued = now if other.held else other.queued
            other.held, other.eligible = False, min(other.eligible, now)
        if self._next:
            self._begin(self._next)
        self._cluster.submit(request, SOON_S if kind == "interrupted" else REQUEUED_S)
        if preempted:
            taken = Request(1, TAKEN, TAKEN_S, self._begin)
            self._cluster.give(taken, min(TAKEN, request.nodes), TAKEN_S)
            self._cluster.at(taken.until, self._cluster.end, taken)


def play(nodes: int, jobs: Iterator[Job], settings: Sequence[str], times: Times, seed: int) -> RunPlay:
    """Return a run that was played to its last step."""
    cluster = Cluster(nodes, jobs)
    run = RunPlay(cluster, settings, times, seed)
    cluster.at(FILLED_S + random.Random(seed).random() * DAY, run.submit)
    cluster.play(lambda: run.ended > 0)
    return run


@cache
def planned(settings: tuple[str, ...]) -> tuple[Config, list[AttemptLayout]]:
    """Return the configuration of a run, and the layouts that its attempts may take."""
    files = [ROOT / "configs" / "recipes" / "gsm8k_1.5b.toml", ROOT / "slurm" / "sites" / "example.toml"]
    config = Config.from_toml(files, ["generator.inference_engine.tensor_parallel_size=8", *settings])
    return config, usable_layouts(all_layouts(config))


def kinds_of_runs(size: int) -> dict[str, tuple[tuple[str, ...], dict[str, Any]]]:
    """Return by name the settings of the runs that are compared, `size` nodes at most, and times of theirs alone."""
    fixed, ranges = (tuple(f"{path}={sizes}" for path in SIZES) for sizes in (size // 2, f"1-{size // 2}"))
    shorter, large = (*ranges, "slurm.time_min_minutes=60"), f"slurm.requests.large.nodes={size}"
    two = (*shorter, large, f"slurm.requests.small.nodes=2-{size // 2}")
    return {
        "fixed": (fixed, {}),
        "range": (ranges, {}),
        "range, shorter limits": (shorter, {}),
        "two requests": ((*two, "slurm.requests.small.time_minutes=120"), {}),
        "growth": (shorter, {"grows": True}),
        "the larger takes over": (two, {"takes_over": True}),
    }


def table(runs: Mapping[str, Sequence[RunPlay]]) -> Iterator[str]:
    """Yield a table of medians over seeds; ratios are those of the same seed."""
    shares = ("training", "starting", "saving", "waiting", "lost")
    yield f"| | hours to the last step | quartiles | of `fixed` | without nodes | attempts | node hours | {' | '.join(shares)} |"
    yield "|" + "---|" * (7 + len(shares))
    hours = {name: [(run.ended - run.submitted) / HOUR for run in plays] for name, plays in runs.items()}
    for name, plays in runs.items():
        low, middle, high = quantiles(hours[name], n=4)
        ratio = median(own / fixed for own, fixed in zip(hours[name], hours["fixed"], strict=True))
        held = [sum(end - start for start, end, _ in run.held) / HOUR for run in plays]
        queued = median(all_of - own for all_of, own in zip(hours[name], held, strict=True))
        figures = [f"{middle:.1f}", f"{low:.1f} to {high:.1f}", f"{ratio:.2f}", f"{queued:.1f}"]
        figures += [
            f"{median(len(run.held) for run in plays):.0f}",
            f"{median(run.uses.total() for run in plays) / HOUR:.0f}",
        ]
        figures += [f"{median(run.uses[what] / run.uses.total() for run in plays):.1%}" for what in shares]
        yield f"| {name} | {' | '.join(figures)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--swf", type=Path)
    numbers = {
        "nodes": 64,
        "load": 0.8,
        "size": 16,
        "steps": 240,
        "start-seconds": 80.0,
        "preempt-minutes": math.inf,
        "grow-minutes": 60.0,
        "seeds": 15,
    }
    for name, default in numbers.items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    given = parser.parse_args()
    nodes, jobs = read_swf(given.swf) if given.swf else (given.nodes, [])
    found = dict[str, list[RunPlay]]()
    for name, (settings, growth) in kinds_of_runs(given.size).items():
        preempt_s, every = 60 * given.preempt_minutes, given.grow_minutes
        times = Times(given.steps, start_s=given.start_seconds, preempt_s=preempt_s, grow_minutes=every, **growth)
        for seed in range(given.seeds):
            trace = repeated_jobs(nodes, jobs, given.load, seed) if jobs else drawn_jobs(nodes, given.load, seed)
            found.setdefault(name, []).append(play(nodes, trace, settings, times, seed))
    print(f"{given.size} of {nodes} nodes at {given.load:.0%} load, {given.steps} steps, {given.seeds} seeds")
    print("\n".join(table(found)))


if __name__ == "__main__":
    main()
