"""What PI0.5 is shown."""

from __future__ import annotations

import numpy as np

from hpcrl.config.sections.model import Pretrained
from hpcrl.families.pi05.inputs import prompt_counter, resized, row_decoder, written_prompt
from hpcrl.types import Prompt
from tests.paths import CONFIGS

MODEL = Pretrained(str(CONFIGS / "reach_pi05" / "model"))


def test_text_is_written_as_openpi_writes_it() -> None:
    state = np.array([-1.0, -0.5, 0.0, 1.0, 3.0])
    assert written_prompt(" pick_up the\ncup ", state) == "Task: pick up the cup, State: 0 64 128 255 255;\nAction: "
    assert written_prompt("reach", None) == "reach\n"
    decode = row_decoder(MODEL)
    ids = [20, 7, 5, 21]
    assert decode(ids) == "Task: reach"
    assert decode([*ids, 270, 271]) == "Task: reach2 actions"
    assert prompt_counter(MODEL)(Prompt("0", [{"role": "user", "content": "reach"}], "robot")) == 1


def test_images_keep_their_shape_in_the_middle_of_black() -> None:
    image = np.full((4, 8, 3), 200, np.uint8)
    found = resized(image, 16)
    assert found.shape == (16, 16, 3)
    assert (found[4:12] == 200).all()
    assert not found[:4].any()
    assert not found[12:].any()
    cut = resized(np.full((6, 10, 3), 200, np.uint8), 16)  # 9.6 rows, of which there are 9
    assert cut.any((1, 2)).tolist() == [False] * 3 + [True] * 9 + [False] * 4
