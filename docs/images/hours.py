"""Draws hours.svg: hours from submission to the last step of runs among the jobs of a replayed cluster, a dot for each seed.

PYTHONPATH=. python docs/images/hours.py
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import ceil, log2
from pathlib import Path
from statistics import median

from benchmarks.replay_cluster import HOUR, Times, drawn_jobs, kinds_of_runs, play

CLUSTER, LOAD, SIZE, STEPS, PREEMPT_MINUTES, GROW_MINUTES, SEEDS = 64, 0.8, 16, 240, 30, 20, 15
ROWS = {
    "fixed": f"{SIZE} nodes",
    "range, shorter limits": f"a range, 2 to {SIZE} nodes",
    "two requests": f"two requests: {SIZE} nodes, and 2 to {SIZE // 2}",
    "the larger takes over": f"the same, slurm.grow_minutes = {GROW_MINUTES}",
}
LEFT, WIDTH, TOP, ROW = 290, 640, 60, 50


def main() -> None:
    hours = {title: [_played(name, seed) for seed in range(SEEDS)] for name, title in ROWS.items()}
    (Path(__file__).parent / "hours.svg").write_text("\n".join(_drawing(hours)) + "\n")


def _played(name: str, seed: int) -> float:
    settings, own = kinds_of_runs(SIZE)[name]
    times = Times(STEPS, preempt_s=60 * PREEMPT_MINUTES, grow_minutes=GROW_MINUTES, **own)
    run = play(CLUSTER, drawn_jobs(CLUSTER, LOAD, seed), settings, times, seed)
    return (run.ended - run.submitted) / HOUR


def _drawing(rows: Mapping[str, Sequence[float]]) -> Iterator[str]:
    bottom = TOP + len(rows) * ROW
    ticks = [
        2.0**n for n in range(int(log2(min(map(min, rows.values())))), ceil(log2(max(map(max, rows.values())))) + 1)
    ]

    def at(hours: float) -> float:
        return LEFT + WIDTH * log2(hours / ticks[0]) / log2(ticks[-1] / ticks[0])

    font = 'font-family="DejaVu Sans, Verdana, Arial, sans-serif" font-size="14"'
    yield f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 1000 {bottom + 40}" role="img" {font} fill="#111">'
    yield "  <title>Hours from submission to the last step</title>"
    yield f'  <rect width="1000" height="{bottom + 40}" rx="10" fill="#fff" stroke="#d0d0d0"/>'
    what = f"Hours to step {STEPS}, simulated: {CLUSTER} nodes at {LOAD:.0%} load, a preemption every {PREEMPT_MINUTES} minutes; a dot is a run"
    yield f'  <text x="20" y="28" font-weight="bold">{what}</text>'
    for hours in ticks:
        yield f'  <path d="M{at(hours):.0f} {TOP - 15}V{bottom}" stroke="#e4e4e4"/>'
        yield f'  <text x="{at(hours):.0f}" y="{bottom + 22}" font-size="12" text-anchor="middle">{hours:g} h</text>'
    for row, (title, hours) in enumerate(rows.items()):
        line, middle = TOP + row * ROW + 18, median(hours)
        yield f'  <text x="20" y="{line + 5}">{title}</text>'
        for each in hours:
            yield f'  <circle cx="{at(each):.1f}" cy="{line}" r="6" fill="#8aa0c0" fill-opacity="0.7"/>'
        yield f'  <path d="M{at(middle):.1f} {line - 16}v32" stroke="#b58900" stroke-width="3"/>'
        yield f'  <text x="{at(middle) + 6:.1f}" y="{line + 25}" font-size="12" fill="#7a5c00">median {middle:.1f} h</text>'
    yield "</svg>"


if __name__ == "__main__":
    main()
