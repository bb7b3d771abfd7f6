"""From tokens to actions and back, by the numbers that OpenVLA's own code gives."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hpcrl.config.sections.model import Pretrained
from hpcrl.config.sections.vla import VLAConfig
from hpcrl.data.action_tokens import ActionTokens, action_tokens, scale_of
from hpcrl.errors import DataError
from hpcrl.families.openvla.actions import ActionTurns, written

LLAMA = {"text_config": {"vocab_size": 32064}, "pad_to_multiple_of": 64, "n_action_bins": 256}
STATISTICS = {"q01": [-0.5, 0.0], "q99": [0.5, 1.0], "mask": [True, False]}


def test_the_last_ids_before_the_padding_are_the_bins() -> None:
    tokens = action_tokens(LLAMA)
    assert tokens == ActionTokens(32000, 256)
    assert tokens is not None
    assert tokens.ids == range(31744, 32000)
    assert action_tokens({"text_config": {"vocab_size": 10}}) is None
    assert action_tokens({"vocab_size": 10, "n_action_bins": 4}) == ActionTokens(10, 4)


def test_numbers_are_middles_of_bins_as_in_openvla() -> None:
    """Bins are numpy's linspace(-1, 1, 256), of which 255 have a middle; id 31999 is the first, and 31744 and 31745 are the last."""
    tokens, edges = ActionTokens(32000, 256), np.linspace(-1, 1, 256)
    numbers = tokens.numbers([31999, 31998, 31745, 31744])
    assert numbers == pytest.approx([(edges[0] + edges[1]) / 2, (edges[1] + edges[2]) / 2, 0.99607843, 0.99607843])
    assert tokens.tokens(np.array([-2.0, -1.0, 0.0, 1.0, 3.0])) == [31999, 31999, 31872, 31744, 31744]
    every = list(range(31745, 32000))
    assert tokens.tokens(tokens.numbers(every)) == every


def test_statistics_scale_what_their_mask_says() -> None:
    scale = scale_of({"norm_stats": {"a": {"action": STATISTICS}}}, None)
    assert scale is not None
    assert scale.actions(np.array([[-1.0, -1.0], [0.0, 0.5], [1.0, 1.0]])).tolist() == [
        [-0.5, -1.0],
        [0.0, 0.5],
        [0.5, 1.0],
    ]
    assert scale_of({}, None) is None


def test_bounds_are_those_of_the_whole_data() -> None:
    """As OpenVLA-OFT has it for ALOHA; states are cut to what the data had, with numbers that never change, but for those that no bounds are of."""
    of_state = {"min": [0.0, 2.0, 0.0], "max": [4.0, 2.0, 9.0], "mask": [True, True, False]}
    known = {"norm_stats": {"a": {"action": {"min": [-2.0], "max": [6.0]}, "proprio": of_state}}}
    actions, states = scale_of(known, None, "bounds"), scale_of(known, "a", "bounds", "proprio")
    assert actions is not None
    assert states is not None
    assert actions.actions(np.array([[-1.0], [0.0], [1.0]])).tolist() == [[-2.0], [2.0], [6.0]]
    assert states.state(np.array([1.0, 2.0, 0.25])) == pytest.approx([-0.5, -1.0, 0.25])
    assert states.state(np.array([9.0, 3.0, -7.0])).tolist() == [1.0, 1.0, -1.0]
    with pytest.raises(DataError, match=r"lack q01 or q99 of `proprio` .* vla.norm_type=bounds_q99"):
        scale_of(known, None, what="proprio")


@pytest.mark.parametrize(
    ("statistics", "key", "told"),
    [
        ({"a": {}, "b": {}}, None, "vla.unnorm_key: required; the model's config.json has statistics of a, b"),
        ({"a": {}}, "c", "found 'c'"),
        ({}, "c", "leave it out"),
        ({"a": {"action": {"q01": [0.0]}}}, "a", "lack q01 or q99"),
        ({"a": {"action": {"q01": [0.0], "q99": [1.0, 2.0]}}}, "a", "have (1,), (2,) and (1,) numbers"),
    ],
)
def test_statistics_that_are_not_there(statistics: object, key: str | None, told: str) -> None:
    with pytest.raises(DataError) as caught:
        scale_of({"norm_stats": statistics}, key)
    assert told in str(caught.value)


def test_a_turn_is_whole_actions(reach: Path) -> None:
    model = Pretrained(str(reach))
    turns = ActionTurns.of(model, VLAConfig(enable=True), 2, 2)
    assert turns is not None
    tokens = ActionTokens(turns.sampling["allowed_token_ids"][-1] + 1, 16)
    assert len(turns.sampling["allowed_token_ids"]) == 16
    actions_KA = turns.actions(tokens.tokens(np.array([-1.0, 0.0])))
    assert actions_KA == pytest.approx(np.array([[-0.84], [0.0]]), abs=1e-9)
    assert written(actions_KA) == "-0.840\n0.000"
    with pytest.raises(DataError, match=r"set generator.sampling_params.max_generate_length to 2"):
        ActionTurns.of(model, VLAConfig(enable=True), 2, 6)
    with pytest.raises(DataError, match=r"vla.enable: required"):
        ActionTurns.of(model, VLAConfig(), 2, 2)
