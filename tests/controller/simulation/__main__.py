"""Prints what runs of the controller under a virtual clock come to: plain ones, with scorers, with lent engines.

    python -m tests.controller.simulation [--groups N] [--replicas N] [--staleness S] [--surplus E] [--interval K] [--evaluate K] [--seed N] [--scorers N]
    python -m tests.controller.simulation --lent N [--steps N] [--replicas N] [--staleness S] [--waves N] [--longest SECONDS] [--seed N]

With `--lent` a step has as many groups as its replicas have room for, times `--waves`, and the same run is played without leases before.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace

from tests.controller.simulation.lent import LeaseScene, LentPlay
from tests.controller.simulation.play import Play, Scene
from tests.controller.simulation.scored import ScoredPlay, ScoreScene


def play_lent(given: argparse.Namespace) -> LentPlay:
    scene = Scene(
        replicas=given.replicas, capacity=2, batch_size=2 * given.replicas * given.waves, steps=given.steps,
        bound=given.staleness, longest_s=given.longest, seed=given.seed,
    )  # fmt: skip
    apart, play = (LentPlay(scene, replace(LeaseScene(), lent=lent)) for lent in (0, given.lent))
    apart.run()
    play.run()
    print(f"{apart.now:,.0f} virtual seconds without leases, {apart.now / play.now:.2f} times as fast with them")
    print(f"replicas idle while there was work: {apart.idle_share:.3%} without leases, {play.idle_share:.3%} with them")
    print(f"{play.leases.pop('given')} leases; engines that died or fell silent, by their state:", end=" ")
    print(", ".join(f"{count} {state}" for state, count in play.leases.items()))
    return play


def play_plain(given: argparse.Namespace) -> Play:
    size = 2 * given.replicas
    scene = Scene(
        replicas=given.replicas, batch_size=size, steps=given.groups // size, bound=given.staleness, surplus=given.surplus,
        interval=given.interval, evaluate=given.evaluate, rows=2 * size, seed=given.seed,
    )  # fmt: skip
    play = ScoredPlay(scene, ScoreScene(given.scorers)) if given.scorers else Play(scene)
    play.run()
    print(f"{play.evaluated} evaluations of {scene.rows} rows")
    print(f"idle while there was work: {play.idle_share:.3%} of the replicas' time")
    if isinstance(play, ScoredPlay):
        print(f"{play.scored} scores counted, {play.unwanted} did not; {play.deaths} deaths of scorers")
    return play


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    defaults = {
        "groups": 1_000_000,
        "replicas": 1000,
        "staleness": 2,
        "surplus": 0,
        "interval": 1,
        "evaluate": 0,
        "seed": 0,
    }
    for name, default in {**defaults, "scorers": 0, "lent": 0, "steps": 60, "waves": 4, "longest": 60}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    given, began = parser.parse_args(), time.process_time()
    play = play_lent(given) if given.lent else play_plain(given)
    print(f"{play.admission.cursor} groups, {given.replicas} replicas, {play.scene.steps} steps", end=": ")
    print(f"{time.process_time() - began:.1f} s of processor, {play.now / 3600:.1f} virtual hours")
    print(f"{play.trained} trained, {play.dropped} dropped, {play.given_up} given up")
    print(", ".join(f"{count} {what}" for what, count in play.counts.items()))


if __name__ == "__main__":
    main()
