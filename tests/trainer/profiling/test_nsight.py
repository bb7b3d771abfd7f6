"""Which steps Nsight Systems records, and which ranges it sees."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcrl.config.sections.profiler import ProfilerConfig
from hpcrl.observe.timeline import Timeline
from hpcrl.rundir.layout import Run
from hpcrl.trainer.metrics import PhaseTimer
from hpcrl.trainer.profiling.nsight import PhaseRanges, bracketed


class Ranges:
    """Stands in for torch.cuda.nvtx, which needs a build with CUDA: it keeps what begins and ends, in order."""

    def __init__(self) -> None:
        self.seen, self._names = list[str](), list[str]()

    def range_start(self, msg: str) -> int:
        self.seen.append(f"+{msg}")
        self._names.append(msg)
        return len(self._names) - 1

    def range_end(self, range_id: int) -> None:
        self.seen.append(f"-{self._names[range_id]}")


def test_the_phases_of_the_timeline_are_ranges_within_their_step(tmp_path: Path) -> None:
    ranges, timeline = Ranges(), Timeline(Run(tmp_path), "rank-0", 1)
    timeline.follow(PhaseRanges(ranges))
    timer = PhaseTimer(timeline)
    timer.begin(7)
    with timer("policy_train"):
        pass
    timer.begin(8)
    timeline.close()
    assert ranges.seen == [
        "+load", "-load", "+other", "-other", "+step 7", "+other", "-other", "+policy_train", "-policy_train", "+other",
        "-other", "-step 7", "+step 8", "+other",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("steps", "expected"),
    [(1, []), (2, ["start 2", "stop 2"]), (3, ["start 2", "stop 3"]), (9, ["start 2", "stop 4"])],
)
def test_the_steps_that_were_asked_for(steps: int, expected: list[str]) -> None:
    seen, done = list[str](), 0
    with bracketed(
        ProfilerConfig(wait_steps=1, warmup_steps=1, active_steps=2),
        lambda: seen.append(f"start {done}"), lambda: seen.append(f"stop {done}"),
    ) as after:  # fmt: skip
        for _ in range(steps):
            done += 1
            after()
    assert seen == expected


def test_from_the_first_step_on() -> None:
    seen = list[str]()
    config = ProfilerConfig(wait_steps=0, warmup_steps=0)
    with bracketed(config, lambda: seen.append("start"), lambda: seen.append("stop")) as after:
        assert seen == ["start"]
        after()
        assert seen == ["start", "stop"]
    assert seen == ["start", "stop"]
