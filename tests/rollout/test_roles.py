"""Roles in one sample: what each is shown, which tokens are trained, where rewards stand, and what the trainer is sent of the turns."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from hpcrl.controller.schema import Schemas
from hpcrl.envs.base import Turn
from hpcrl.envs.rewards.judged import JudgedRewards
from hpcrl.errors import ConfigError
from hpcrl.rollout.group import Group
from hpcrl.runtime.http_server import BadRequest
from hpcrl.types import GroupMeta
from tests.rollout.test_transcript import Script, chosen, ended, played, text, tokenizer_of, user

TOKENIZER = tokenizer_of("chatml")
GAME = [
    Turn(user("your hint?"), 0.0, False, role="guesser"),
    Turn(user("a hint: up"), 0.25, False, role="hinter", trained=False, anchor="hinted"),
    Turn([], 1.0, True, role="guesser", rewards={"hinter": 0.5, "judge": 9.0}),
]


def game(turns: list[Turn] = GAME, **settings: Any) -> tuple[Group, Script]:
    return played(TOKENIZER, [ended(TOKENIZER, word) for word in ("one", "up", "three")], turns, **settings)


@pytest.mark.parametrize("step_wise", [False, True])
def test_rewards_of_other_roles_stand_at_their_last_turns(step_wise: bool) -> None:
    group, _ = game(step_wise_trajectories=step_wise)
    (sample,) = group.meta(0, "p").samples
    turns = [turn for row in sample.turns for turn in row]
    assert [len(row) for row in sample.turns] == ([1, 1, 1] if step_wise else [3])
    assert [turn.role for turn in turns] == ["guesser", "hinter", "guesser"]
    assert [turn.reward for turn in turns] == [0.0, 0.75, 1.0], "a role that has not acted gets none"
    assert sum(float(row.rewards.sum()) for row in group.samples) == 1.75
    assert sample.reward == (1.0 if step_wise else 1.75)
    assert [turn.end for turn in turns] == [len(row.token_ids) for row in group.samples] if step_wise else True
    assert turns[-1].end == len(group.samples[-1].token_ids)


@pytest.mark.parametrize("step_wise", [False, True])
def test_a_role_that_is_not_trained_has_no_trained_token(step_wise: bool) -> None:
    group, _ = game(step_wise_trajectories=step_wise)
    trained = [token for row in group.samples for token in chosen(row)]
    assert text(TOKENIZER, trained) == "one<|im_end|>three<|im_end|>"
    meta = group.meta(0, "p")
    assert meta.response_lengths == [len(trained) + 3], "the policy chose them all the same"
    assert sum(int((row.versions >= 0).sum()) for row in group.samples) == len(trained) + 3


def test_a_role_sees_only_what_it_is_shown() -> None:
    turns = [replace(GAME[0], fresh=True), *GAME[1:]]
    group, engine = game(turns, step_wise_trajectories=True)
    shown = [text(TOKENIZER, prompt) for prompt in engine.prompts]
    assert "guess" not in shown[1]
    assert "one" not in shown[1]
    assert shown[1].endswith("user\nyour hint?<|im_end|>\n<|im_start|>assistant\n")
    assert "your hint?" in shown[2], "what follows goes on from there"
    assert [one["content"] for one in group.conversations[0]] == ["one", "your hint?", "up", "a hint: up", "three"]
    with pytest.raises(ConfigError, match=r"set generator\.step_wise_trajectories=true"):
        game(turns)


def test_turns_in_the_same_state_have_the_same_number() -> None:
    same = [Turn(user("go on"), 0.0, False)] * 2
    (sample,) = game([*same, Turn([], 1.0, True)])[0].meta(0, "p").samples
    assert [turn.anchor for turn in sample.turns[0]] == [0, 1, 1]
    named = [replace(one, anchor=name) for one, name in zip(same, ("a", "b"), strict=True)]
    (sample,) = game([*named, Turn([], 1.0, True)])[0].meta(0, "p").samples
    assert [turn.anchor for turn in sample.turns[0]] == [0, 1, 2]


def test_a_group_of_single_turns_says_nothing_of_them() -> None:
    group, _ = game([Turn([], 1.0, True)])
    assert group.meta(0, "p").samples[0].turns == ()
    assert "turns" not in group.meta(0, "p").to_json()


def test_the_controller_and_the_batch_have_the_turns() -> None:
    meta = replace(game(step_wise_trajectories=True)[0].meta(0, "p"), group_id="g00000007")
    told = json.loads(json.dumps(replace(meta, path="samples/0/g00000007.safetensors").to_json()))
    schemas = Schemas(1, 4, 1, 1)
    told |= {"oldest_version": 3, "newest_version": 3}
    (group,) = schemas.groups([told])
    assert [[*map(tuple, row)] for row in group.samples[0].turns] == [
        [*map(tuple, row)] for row in meta.samples[0].turns
    ]
    assert group.roles == ["guesser", "hinter"]
    assert GroupMeta.from_json(json.loads(json.dumps(group.to_json()))) == group
    for changes, said in (
        ({"turns": [1, 1]}, "turns': expected one entry per row, or none"),
        ({"turns": [1, 1, 2]}, "turn_ends': expected 4 entries, one per turn"),
        ({"turn_roles": ["a", "b", "\x1b"]}, "turn_roles': expected a list of names, or of empty texts"),
        ({"turn_rewards": [0.0, 1e31, 0.0]}, "turn_rewards'"),
        ({"turn_ends": [told["turn_ends"][0] + 1, *told["turn_ends"][1:]]}, "turn_ends': expected numbers from 1 to"),
        ({"turn_anchors": [0, -1, 0]}, "turn_anchors'"),
    ):
        with pytest.raises(BadRequest) as caught:
            schemas.groups([{**told, **changes}])
        assert said in str(caught.value)


def test_what_a_reward_model_adds_belongs_to_the_last_turn() -> None:
    meta = game()[0].meta(0, "p")
    judged = JudgedRewards(weight=2.0, clip_min=-5, clip_max=5).complete(meta, [0.5])
    before, after = meta.samples[0], judged.samples[0]
    assert [turn.reward for turn in after.turns[0]] == [0.0, 0.75, 2.0]
    assert sum(turn.reward for turn in after.turns[0]) == after.reward == before.reward + 1.0


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"role": "a\nb"}, "a role is called 'a"),
        ({"rewards": {"x" * 201: 1.0}}, "a role is called 'xx"),
        ({"rewards": {"hinter": float("nan")}}, "reward of 'hinter'"),
        ({"trained": 1}, "trained: expected true or false, found 1"),
        ({"anchor": 7}, "anchor: expected a text or None, found 7"),
    ],
    ids=str,
)
def test_what_an_environment_may_say_of_roles(changes: dict[str, Any], said: str) -> None:
    group, _ = game([replace(GAME[-1], **changes)])
    assert said in group.failures[0]
    assert group.samples[0].stop_reason == "failed"
