"""What differs between two configurations."""

from dataclasses import dataclass, replace

import pytest

from hpcrl.config import Config
from hpcrl.config.difference import Difference, differences

BASE = {"data": {"train_data": ["t"]}, "trainer": {"eval_interval": 0, "policy": {"model": {"path": "m"}}}}


def config(**settings: object) -> Config:
    return Config.from_dict({**BASE, **{path.replace("__", "."): value for path, value in settings.items()}})


def test_nothing_differs_from_itself() -> None:
    assert differences(config(), config()) == []
    assert differences(config(slurm__extra={"a": 1}), config(slurm__extra={"a": 1.0})) == []


def test_settings_and_keys_of_tables_in_their_order() -> None:
    one = config(data__image_processor_kwargs={"a": 1, "b": {"c": 2}, "d": 1}, trainer__epochs=2)
    other = config(data__image_processor_kwargs={"b": {"c": 3}, "d": True, "e.f": [1]}, slurm__partition="p")
    found = differences(one, other)
    assert found == [
        Difference("data.image_processor_kwargs.a", 1, None),
        Difference("data.image_processor_kwargs.b.c", 2, 3),
        Difference("data.image_processor_kwargs.d", 1, True),
        Difference("trainer.epochs", 2, 1),
        Difference("slurm.partition", None, "p"),
        Difference('data.image_processor_kwargs."e.f"', None, [1]),
    ]
    assert str(found[4]) == 'slurm.partition: unset -> "p"'
    assert {str(difference) for difference in differences(other, one)} == {
        str(Difference(difference.path, difference.right, difference.left)) for difference in found
    }


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ('a\nb"', '"a\\nb\\""'),
        (["a", "b"], '["a", "b"]'),
        ([1, [2.0, True]], "[1, [2.0, true]]"),
        ([{"x y": "z"}], '[{"x y" = "z"}]'),
    ],
)
def test_values_are_shown_on_one_line_as_toml(value: object, text: str) -> None:
    found = differences(config(), config(data__image_processor_kwargs={"x": value}))
    assert [str(difference) for difference in found] == [f"data.image_processor_kwargs.x: unset -> {text}"]


def test_a_setting_that_only_one_class_has() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Own(Config):
        mine: int = 3

    own = Own.from_dict(BASE)
    assert differences(config(), own) == [Difference("mine", None, 3)]
    assert differences(own, replace(own, mine=4)) == [Difference("mine", 3, 4)]
