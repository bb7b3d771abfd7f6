"""The TOML that a conversion writes: what is not implemented yet is a comment that becomes the setting when its mark is taken away."""

import re

import tomli

from hpcrl.config.convert.conversion import Conversion
from hpcrl.config.load import nested

VALUES = {
    "config_class": "mine:Config",
    "data.train_data": ["t.parquet"],
    "trainer.policy.model.path": "m",
    "trainer.eval_interval": 0,
    "trainer.profiler.enable_nsys": True,
    "trainer.critic.model.path": "c",
    "generator.n_samples_per_prompt": 4,
    "generator.inference_engine.engine_init_kwargs": {"a-b": [1, "x"], "nested": {"t": True}},
    "trainer.policy.low_precision.fp8": True,
    "trainer.policy.megatron_config.transformer_config_kwargs": {"a kwarg": 1.0, "b": 0.5},
}


def test_what_is_not_implemented_yet_is_a_comment_in_its_table() -> None:
    conversion = Conversion("somewhere", dict(VALUES))
    text = conversion.to_toml()
    assert tomli.loads(re.sub(r"^# (?=\w+ = )", "", text, flags=re.MULTILINE)) == nested(VALUES)
    active = tomli.loads(text)
    assert active["trainer"]["profiler"] == {}
    assert active["trainer"]["policy"]["low_precision"] == {}
    assert text.index("[generator]") < text.index("[generator.inference_engine]")


def test_a_result_that_cannot_work_is_reported() -> None:
    conversion = Conversion("somewhere", {"data.train_data": ["t"], "trainer.max_ckpts_to_keep": 0})
    conversion.finish()
    assert conversion.incomplete
    assert [entry.source for entry in conversion.entries if entry.kind == "conflict"] == ["trainer.policy.model.path"]


def test_defaults_are_left_out() -> None:
    conversion = Conversion("somewhere", {"trainer.epochs": 1, "trainer.max_steps": None})
    assert conversion.to_toml() == "# converted by `hpcrl config convert` from somewhere\n"


def test_the_report_ends_with_what_needs_a_hand() -> None:
    conversion = Conversion("somewhere")
    conversion.note("conflict", "x", "", "no")
    conversion.note("mapped", "a", "b")
    for name in ("c", "d", "e", "f", "g"):
        conversion.note("dropped", name, "", "old")
    conversion.note("mapped", "h", "h", "but")
    assert conversion.report().splitlines() == [
        "mapped        h: but",
        "dropped       c, d, e, f and 1 more: old",
        "conflict      x: no",
        "2 mapped, 5 dropped, 1 conflict",
    ]
    every = conversion.report(every=True).splitlines()
    assert every[:3] == ["conflict      x: no", "mapped        a -> b", "dropped       c: old"]
    assert len(every) == 9


def test_what_is_not_implemented_yet_takes_part_in_the_check_of_the_result() -> None:
    values = {"data.train_data": ["t.parquet"], "trainer.policy.model.path": "m", "trainer.eval_interval": 0}
    conversion = Conversion("somewhere", values | {"trainer.distillation.enable": True})
    conversion.finish()
    assert [(entry.kind, entry.source) for entry in conversion.entries] == [
        ("unimplemented", "trainer.distillation.enable"),
        ("conflict", "trainer.distillation.model_path"),  # required with it
    ]
