"""Adapters read what a case gives them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

import pytest

from tests.golden.adapters import adapter_of
from tests.golden.deliberate import read
from tests.golden.run import replay
from tests.golden.test_golden import CASES

UNREAD = {
    "*: tokenizer": "says how the cases' tokenizer works",
    "*: version": "says which version of the other framework answered",
    "*: commit": "says which version of the other framework answered",
    "*: schema": "says which version of the other framework answered",
    "LocalRewardCalculator.compute_rewards: reward": "says in words what the cases' reward is",
    "*_per_dataset: n_samples_per_prompt": "the groups show it",
    "sampling.dynamic: n_samples_per_prompt": "the groups show it",
    "remote_reward_advantage: eps": "there is one grpo; where it decides, the case is skipped",
    "remote_reward_advantage: std": "there is one grpo; where it decides, the case is skipped",
    "util.masked_whiten: shift_mean": "what false does is skipped",
    "trainer.advantages: response_mask": "it counts where there is no loss mask",
    "run_sampling: deterministic": "the solvers of these cases are",
    "rollout.per_token_rewards: *": "conditions.py reads them; where they decide, the case is skipped",
    "batch.to_tensors: rewards": "no part of a micro-batch; what is made of them is not compared",
    "pack_sequences: *": "padding and places of advantages, which are not compared",
    "compute_logprobs_for_top_k_indices: is_full_logits": "the shape of the logits shows it",
    "compute_teacher_*: include_prompt": "the masks show it",
    "compute_teacher_kl_advantages: jsd_beta": "of the k best tokens only",
    "distill_end_to_end: include_prompt": "the masks show it",
    "distill_end_to_end: mode": "top_k shows it",
    "masked_mean: axis": "always that of the rows",
    "async_safe_ce: *": "context parallelism and a target without labels have no setting of their own",
    "check_checkpoint_saving: epoch": "steps are counted, not epochs",
    "check_checkpoint_saving: remain_samples_num": "steps are counted, not samples",
    "prompt_throttle: type": "always grpo",
    "prompt_throttle: max_retry_for_on_policy": "dynamic sampling has a bound of its own (max_sample_batches)",
    "prompt_throttle: weight_version_to_prompt_num": "versions are not promised in advance",
}
"""Patterns on `fn: name` of what adapters do not read, to the reason."""


class Watched(dict[str, Any]):
    """A table that notes which of its names are read."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__(values)
        self.read = set[str]()

    def __getitem__(self, name: str) -> Any:
        self.read.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self.read.add(name)
        return super().get(name, default)

    def __iter__(self) -> Iterator[str]:
        self.read |= {*super().keys()}
        return super().__iter__()

    def keys(self) -> Any:
        self.read |= {*super().keys()}
        return super().keys()

    def items(self) -> Any:
        self.read |= {*super().keys()}
        return super().items()


@pytest.mark.faults_slow
def test_every_name_is_read() -> None:
    names: defaultdict[str, set[str]] = defaultdict(set)
    found: defaultdict[str, set[str]] = defaultdict(set)
    for case in CASES:
        if adapter_of(case.fn) is None or replay(case, read()).state == "skipped":
            continue
        watched = replace(case, params=Watched(case.params), inputs=Watched(case.inputs))
        replay(watched, [])
        names[case.fn] |= {*case.params, *case.inputs}
        found[case.fn] |= watched.params.read | watched.inputs.read  # type: ignore[attr-defined]
    unread = {f"{fn}: {name}" for fn in names for name in names[fn] - found[fn]}
    assert {name for name in unread if not any(fnmatchcase(name, pattern) for pattern in UNREAD)} == set()
    assert all(any(fnmatchcase(name, pattern) for name in unread) for pattern in UNREAD)
