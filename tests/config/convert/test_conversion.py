"""The TOML that a conversion writes: what waits is a comment that becomes the setting when its mark is taken away."""

import re
import tomllib

from hpcrl.config.convert.conversion import Conversion
from hpcrl.config.load import nested

VALUES = {
    "config_class": "mine:Config",
    "data.train_data": ["t.parquet"],
    "trainer.policy.model.path": "m",
    "trainer.eval_interval": 0,
    "trainer.algorithm.min_filter_prefix_tokens": 8,
    "trainer.critic.model.path": "c",
    "generator.n_samples_per_prompt": 4,
    "generator.inference_engine.engine_init_kwargs": {"a-b": [1, "x"], "nested": {"t": True}},
    "environment.reward_function": {"boxed math": 1.0, "format": 0.5},
}


def test_what_waits_is_a_comment_in_its_table() -> None:
    conversion = Conversion("somewhere", dict(VALUES))
    text = conversion.to_toml()
    assert tomllib.loads(re.sub(r"^# (?=\w+ = )", "", text, flags=re.MULTILINE)) == nested(VALUES)
    active = tomllib.loads(text)
    assert active["trainer"]["algorithm"] == {}
    assert active["environment"] == {}
    assert text.index("[generator]") < text.index("[generator.inference_engine]")


def test_a_result_that_cannot_work_is_reported() -> None:
    conversion = Conversion("somewhere", {"data.train_data": ["t"], "trainer.max_ckpts_to_keep": 0})
    conversion.finish()
    assert conversion.incomplete
    assert [entry.source for entry in conversion.entries if entry.kind == "conflict"] == ["trainer.policy.model.path"]


def test_defaults_are_left_out() -> None:
    conversion = Conversion("somewhere", {"trainer.epochs": 1, "trainer.max_steps": None})
    assert conversion.to_toml() == "# converted by `hpcrl config convert` from somewhere\n"
