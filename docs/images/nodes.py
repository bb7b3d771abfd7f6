"""Draws nodes.svg: the nodes that three kinds of runs had, from submission to the last step, among the same jobs of a replayed cluster.

python docs/images/nodes.py

Of the seeds it is the one in which the ratio of the growing run's time to the fixed size's is the median (benchmarks/replay_cluster.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.replay_cluster import HOUR, RunPlay, Times, drawn_jobs, kinds_of_runs, play

CLUSTER, LOAD, SIZE, STEPS, SEEDS = 64, 0.8, 32, 240, 15
KINDS = {
    "fixed": (f"{SIZE} nodes, fixed", "#8aa0c0"),
    "two requests": (f"2 to {SIZE // 2}, or {SIZE} nodes", "#e0a458"),
    "range, shorter limits": (f"2 to {SIZE} nodes", "#4c9f70"),
}
LEFT, WIDTH, TOP, ROW, HEIGHT = 190, 700, 50, 105, 70


def main() -> None:
    seeds = [[_played(name, seed) for name in KINDS] for seed in range(SEEDS)]
    seeds.sort(key=lambda runs: _hours(runs[-1]) / _hours(runs[0]))
    runs = seeds[len(seeds) // 2]
    (Path(__file__).parent / "nodes.svg").write_text("\n".join(_drawing(runs)) + "\n")


def _played(name: str, seed: int) -> RunPlay:
    settings, growth = kinds_of_runs(SIZE)[name]
    return play(CLUSTER, drawn_jobs(CLUSTER, LOAD, seed), settings, Times(STEPS, **growth), seed)


def _hours(run: RunPlay) -> float:
    return (run.ended - run.submitted) / HOUR


def _drawing(runs: Sequence[RunPlay]) -> Iterator[str]:
    longest = max(map(_hours, runs))
    scale, bottom = WIDTH / longest, TOP + len(runs) * ROW
    font = 'font-family="DejaVu Sans, Verdana, Arial, sans-serif" font-size="14"'
    yield f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 1000 {bottom + 45}" role="img" {font} fill="#111">'
    yield "  <title>Nodes of a run from its submission to its last step</title>"
    yield f'  <rect width="1000" height="{bottom + 45}" rx="10" fill="#fff" stroke="#d0d0d0"/>'
    yield f'  <text x="20" y="28" font-weight="bold">{STEPS} steps on a cluster of {CLUSTER} nodes at {LOAD:.0%} load: nodes over hours</text>'
    for row, ((title, colour), run) in enumerate(zip(KINDS.values(), runs, strict=True)):
        base = TOP + row * ROW + HEIGHT + 10
        yield f'  <text x="20" y="{base - HEIGHT / 2:.0f}">{title}</text>'
        yield f'  <path d="M{LEFT} {base}h{_hours(run) * scale:.1f}" stroke="#999"/>'
        for start, end, nodes in run.held:
            left, height = LEFT + (start - run.submitted) / HOUR * scale, HEIGHT * nodes / SIZE
            wide = max(1.0, (end - start) / HOUR * scale)
            yield f'  <rect x="{left:.1f}" y="{base - height:.1f}" width="{wide:.1f}" height="{height:.1f}" fill="{colour}" stroke="#fff" stroke-width="0.5"/>'
        yield f'  <text x="{LEFT + _hours(run) * scale + 6:.0f}" y="{base}" font-weight="bold">{_hours(run):.1f} h</text>'
    step = next(hours for hours in (1, 2, 5, 10, 20, 50) if longest / hours <= 10)
    for hours in range(0, int(longest) + 1, step):
        yield f'  <text x="{LEFT + hours * scale:.0f}" y="{bottom + 25}" font-size="12" text-anchor="middle">{hours} h</text>'
    yield "</svg>"


if __name__ == "__main__":
    main()
