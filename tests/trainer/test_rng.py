"""What a rank draws at random goes on where it was, also from generators of a backend."""

from __future__ import annotations

import pytest
import torch

from hpcrl.trainer import rng as module
from hpcrl.trainer.rng import draws_from, random_state, set_random_state

CPU = torch.device("cpu")


def test_all_generators_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_OTHERS", {})
    own = torch.Generator().manual_seed(3)
    draws_from("place0.own", own)
    saved = random_state(CPU)
    expected = [torch.rand(3), torch.rand(3, generator=own)]
    set_random_state(saved, CPU)
    assert all(map(torch.equal, expected, [torch.rand(3), torch.rand(3, generator=own)]))


def test_the_state_of_another_place_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    own = torch.Generator().manual_seed(3)
    monkeypatch.setattr(module, "_OTHERS", {"place0.own": own})
    before = own.get_state()
    set_random_state({"cpu": torch.get_rng_state(), "place1.own": torch.Generator().manual_seed(4).get_state()}, CPU)
    assert torch.equal(own.get_state(), before)
