"""A teacher's log-probabilities of its own tokens become those of the policy's tokens, span by span."""

from __future__ import annotations

import pytest
import torch

from hpcrl.algorithms.distillation import spread_over_spans

D = torch.float64


def test_golden_value() -> None:
    """Spans [-1, -2] against -1.5, and -0.5 against [-2, -1]: excess of +1.5 and -2.5, shared by two tokens and by one."""
    policy, teacher = torch.tensor([-9.0, -1.0, -2.0, -0.5], dtype=D), torch.tensor([-1.5, -8.0, -2.0, -1.0], dtype=D)
    found = spread_over_spans(policy, teacher, torch.tensor([-1, 0, 0, 1]), torch.tensor([0, -1, 1, 1]))
    assert found.tolist() == [0.0, -0.25, -1.25, -3.0]


def test_spans_sum_to_the_teachers_and_keep_the_policys_differences() -> None:
    draw = torch.Generator().manual_seed(0)
    for _ in range(20):
        sizes = torch.randint(1, 5, (2, 6), generator=draw)
        spans_T, spans_U = (torch.arange(6).repeat_interleave(own) for own in sizes)
        policy, teacher = (-torch.rand(len(spans), generator=draw, dtype=D) for spans in (spans_T, spans_U))
        found = spread_over_spans(policy, teacher, spans_T, spans_U)
        for span in range(6):
            own = spans_T == span
            assert found[own].sum().item() == pytest.approx(teacher[spans_U == span].sum().item(), abs=1e-12)
            excess = (policy - found)[own]
            assert torch.allclose(excess, excess[0])


def test_without_other_tokens_it_is_the_teachers_own() -> None:
    spans, teacher = torch.tensor([-1, 0, 1, 2, -1]), torch.tensor([-7.0, -1.0, -2.0, -3.0, -7.0], dtype=D)
    found = spread_over_spans(torch.full((5,), -0.3, dtype=D), teacher, spans, spans)
    assert found.tolist() == pytest.approx([0, -1, -2, -3, 0])
    none = torch.full((3,), -1)
    assert spread_over_spans(teacher[:3], teacher[:2], none, none[:2]).tolist() == [0, 0, 0]
