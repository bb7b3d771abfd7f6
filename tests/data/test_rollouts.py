"""What a person sees of samples: who said what, what it earned, and where they are when they are gone."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hpcrl.cli.samples import _lines
from hpcrl.data.batch_file import FIRST, write_batch
from hpcrl.data.rollouts import evaluated_samples, ordered, read_trained, segments_of, trained_samples
from hpcrl.errors import DataError, RunError
from hpcrl.observe.report.samples import _trained
from hpcrl.rundir.layout import Run
from hpcrl.rundir.records import append_text
from hpcrl.types import Batch, Row, TurnEnd, TurnMeta
from tests.rows import group_meta, write_group


def two_turns() -> Row[np.ndarray]:
    """prompt 1 2, turn 3 4, observation 5, turn 6 and its end 7, which the policy did not choose but is paid."""
    return Row(
        token_ids=np.array([1, 2, 3, 4, 5, 6, 7]),
        loss_mask=np.array([0, 0, 1, 1, 0, 0, 0], np.float32),
        rollout_logprobs=np.zeros(7, np.float32),
        versions=np.array([-1, -1, 4, 4, -1, 5, -1], np.int32),
        rewards=np.array([0, 0, 0, 0.5, 0, 0, 2], np.float32),
        stop_reason="length",
        env_metrics={"guesses": 2.0},
    )


def decode(token_ids: list[int]) -> str:
    return " ".join(map(str, token_ids))


def train(run: Run, step: int, rewards: list[float], turns: Sequence[TurnMeta] = ()) -> None:
    """Write one group of two-turn samples, and the batch of it alone."""
    path = run.samples_of(3) / f"g{step}.safetensors"
    samples = [two_turns() for _ in rewards]
    meta = group_meta(
        group_id=f"g{step}", kind="train", replica=3, path=str(path.relative_to(run.path)), rewards=rewards,
        lengths=[7] * len(rewards), response_lengths=[3] * len(rewards), stop_reasons=["length"] * len(rewards),
        oldest_version=4, newest_version=5, data_source="letters", seconds=1.0, raw_rewards=[2.5] * len(rewards),
    )  # fmt: skip
    if turns:
        meta = replace(meta, samples=[replace(one, turns=[turns]) for one in meta.samples])
    write_batch(run, Batch(step, [write_group(path, samples, meta)], step), FIRST)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path / "project" / "run")


def test_turns_observations_and_what_each_turn_earned(run: Run) -> None:
    train(run, 1, [2.5, 0.0])
    step, found = trained_samples(run, None)
    first, second = read_trained(run, found, decode)
    assert (step, [place for _, place in found]) == (1, [0, 1])
    assert [(part.by, part.text, part.tokens, part.trained, part.reward) for part in first.parts] == [
        ("prompt", "1 2", 2, 0, None),
        ("policy", "3 4", 2, 2, 0.5),
        ("environment", "5", 1, 0, None),
        ("policy", "6", 1, 0, 2.0),
        ("environment", "7", 1, 0, None),
    ]
    assert (first.name, first.replica, first.versions, first.stop_reason) == ("g1.0", 3, (4, 5), "length")
    assert (first.reward, first.raw_reward, second.reward, second.raw_reward) == (2.5, None, 0.0, 2.5)
    assert first.env_metrics == {"guesses": 2.0}


def test_a_sample_in_which_the_policy_said_nothing() -> None:
    whole = two_turns()
    arrays = {name: value[:2] for name, value in vars(whole).items() if isinstance(value, np.ndarray)}
    (only,) = segments_of(replace(whole, **arrays), decode)
    assert (only.by, only.text) == ("prompt", "1 2")


def test_turns_have_the_roles_of_the_policy(run: Run) -> None:
    train(run, 1, [2.5], [TurnMeta(4, 0.5, "hinter", 0), TurnMeta(6, 2.0, "guesser", 1)])
    _, found = trained_samples(run, None)
    (sample,) = read_trained(run, found, decode)
    assert [(part.by, part.role) for part in sample.parts if part.role] == [("policy", "hinter"), ("policy", "guesser")]
    assert [line for line in _lines(sample) if "policy" in line] == [
        "--- turn 1, policy, as hinter, 2 tokens, reward 0.5",
        "--- turn 2, policy, as guesser, 1 tokens, not trained, reward 2",
    ]
    (group,) = _trained(run, 1, decode)
    assert group["samples"][0]["rows"][0]["roles"] == {0: "hinter", 3: "guesser"}
    dumped = segments_of(two_turns(), decode, [TurnEnd(4, "hinter", "a"), TurnEnd(6, "guesser", "b")])
    assert [part.role for part in dumped] == ["", "hinter", "", "guesser", ""]


def test_order() -> None:
    rewards = [1.0, 3.0, 0.0, 3.0, 2.0]
    assert ordered(rewards, None, 0) == [0, 1, 2, 3, 4]
    assert ordered(rewards, "best", 0) == [1, 3, 4, 0, 2]
    assert ordered(rewards, "worst", 0) == [2, 0, 4, 1, 3]
    drawn = [ordered(rewards, "random", seed) for seed in range(9)]
    assert drawn == [ordered(rewards, "random", seed) for seed in range(9)]
    assert len({tuple(order) for order in drawn}) > 1
    assert all(sorted(order) == [0, 1, 2, 3, 4] for order in drawn)


def test_samples_that_are_gone_are_said_to_be(run: Run) -> None:
    with pytest.raises(RunError, match="no batch yet"):
        trained_samples(run, None)
    for step in (1, 2, 3):
        train(run, step, [1.0])
    (run.samples_of(3) / "g1.safetensors").unlink()
    with pytest.raises(
        RunError, match=r"step 1 are gone: .* two checkpoints .* committed; those of steps 2 to 3 are there"
    ) as error:
        trained_samples(run, 1)
    assert "dumps" not in str(error.value)
    run.dump(1).mkdir(parents=True)
    with pytest.raises(RunError, match=r"what step 1 trained is in .*dumps/s000001"):
        trained_samples(run, 1)
    with pytest.raises(RunError, match="no batch of step 9; there are those of steps 1 to 3"):
        trained_samples(run, 9)
    assert trained_samples(run, None)[0] == 3
    assert trained_samples(run, 2)[0] == 2


def line(group: str, score: float, text: str) -> str:
    parts = [{"by": "prompt", "text": "sort"}, {"by": "policy", "text": text, "tokens": 2, "reward": score}]
    value = {
        "prompt": [], "group_id": group, "data_source": "letters", "score": score, "stop_reason": "stop", "env_metrics": {}, "parts": parts,
    }  # fmt: skip
    return json.dumps(value, ensure_ascii=False) + "\n"


def test_what_kills_leave_of_an_evaluation_is_shown_once(run: Run) -> None:
    """A worker is killed in the middle of a line, another one before it could report, and both rows are generated again."""

    def sample(group: str, at: int, text: str) -> str:
        return json.dumps({**json.loads(line(group, 1.0, text)), "sample": at}) + "\n"

    append_text(run.eval_dump(2, 0), sample("e1", 0, "a") + sample("e1", 1, "b") + sample("e0", 0, "c")[:-9])
    append_text(run.eval_dump(2, 0), sample("e0", 0, "c") + sample("e0", 1, "d"))
    append_text(run.eval_dump(2, 1), sample("e2", 0, "e") + sample("e1", 1, "b") + sample("e1", 0, "a"))
    _, found = evaluated_samples(run, 2)
    assert [(each.name, each.parts[1].text) for each in found] == [
        ("e0.0", "c"), ("e0.1", "d"), ("e1.0", "a"), ("e1.1", "b"), ("e2.0", "e"),
    ]  # fmt: skip


def test_samples_of_an_evaluation(run: Run) -> None:
    with pytest.raises(RunError, match=r"no samples of an evaluation: .*dump_eval_results"):
        evaluated_samples(run, None)
    for version, replica, text in (
        (2, 0, line("e1", 1.0, "one\u2028line") + line("e0", 0.0, "b") + line("e1", 0.5, "c")),
        (2, 1, line("e2", 0.0, "d") + '{"half'),
        (4, 0, line("e0", 1.0, "e")),
    ):
        run.eval_dump(version, replica).parent.mkdir(parents=True, exist_ok=True)
        run.eval_dump(version, replica).write_text(text, encoding="utf-8")
    version, found = evaluated_samples(run, 2)
    assert [(each.name, each.reward, each.replica) for each in found] == [
        ("e0.0", 0.0, 0), ("e1.0", 1.0, 0), ("e1.1", 0.5, 0), ("e2.0", 0.0, 1),
    ]  # fmt: skip
    assert [part.text for part in found[1].parts] == ["sort", "one\u2028line"]
    assert (version, evaluated_samples(run, None)[0]) == (2, 4)
    with pytest.raises(RunError, match="of version 3; there are those of 2, 4"):
        evaluated_samples(run, 3)
    run.eval_dump(4, 0).write_text('{"group_id": "e0"}\n')
    with pytest.raises(DataError, match=r"0.jsonl, line 1 is no sample"):
        evaluated_samples(run, 4)
