from __future__ import annotations

import pytest

from hpcrl.errors import ConfigError
from hpcrl.launch.sweep import elements


def test_no_sweep_is_one_element() -> None:
    assert elements([], None) == [[]]


def test_product_of_values_and_seeds() -> None:
    assert elements(["a.lr=1e-4,3e-4", "b=[1,2],[3]"], "0:2") == [
        [lr, b, seed]
        for lr in ("a.lr=1e-4", "a.lr=3e-4")
        for b in ("b=[1,2]", "b=[3]")
        for seed in ("trainer.seed=0", "trainer.seed=1")
    ]


def test_comma_in_quotes_is_no_separator() -> None:
    assert elements(['a="x,y",z'], None) == [['a="x,y"'], ["a=z"]]


@pytest.mark.parametrize(("sweeps", "seeds"), [(["a.lr"], None), (["=1,2"], None), ([], "x"), ([], "3:3")])
def test_nonsense_is_refused(sweeps: list[str], seeds: str | None) -> None:
    with pytest.raises(ConfigError, match="expected"):
        elements(sweeps, seeds)
