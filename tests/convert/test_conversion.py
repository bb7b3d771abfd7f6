"""The TOML that a conversion writes: what it cannot say or hpcrl cannot do yet makes it refused; its header says what has changed."""

import re
from pathlib import Path

import pytest
import tomli

from hpcrl.config import Config
from hpcrl.config.load import nested
from hpcrl.convert.conversion import Conversion
from hpcrl.convert.skyrl.convert import convert_overrides
from hpcrl.errors import ConfigError
from tests.convert.skyrl_material import load

VALUES = {
    "config_class": "mine:Config",
    "data.train_data": ["t.parquet"],
    "trainer.policy.model.path": "m",
    "trainer.eval_interval": 0,
    "trainer.critic.model.path": "c",
    "generator.n_samples_per_prompt": 4,
    "generator.inference_engine.engine_init_kwargs": {"a-b": [1, "x"], "nested": {"t": True}},
    "trainer.policy.low_precision.fp4": True,
    "trainer.policy.megatron_config.transformer_config_kwargs": {"a kwarg": 1.0, "b": 0.5},
}


def test_what_is_not_implemented_yet_is_written() -> None:
    conversion = Conversion("somewhere", dict(VALUES))
    text = conversion.to_toml()
    assert tomli.loads(text) == nested(VALUES)
    assert text.index("[generator]") < text.index("[generator.inference_engine]")


def test_what_is_not_implemented_yet_is_refused(tmp_path: Path) -> None:
    words = ["data.train_data=[t.parquet]", "trainer.policy.model.path=m"]
    conversion = convert_overrides([*words, "trainer.logger=wandb", "trainer.eval_interval=-1"], "a command")
    conversion.values["trainer.policy.low_precision.fp4"] = True
    message = _refusal(conversion, tmp_path)
    assert "trainer.policy.low_precision.fp4: true (true or false) is not implemented yet (training in FP4" in message
    assert "trainer.logger" not in message


@pytest.mark.parametrize(
    ("line", "others"),
    [
        ("trainer.epochs = 2", []),
        ("generator.max_input_length = 1", ["generator.max_input_length: expected trainer.max_prompt_length"]),
        (
            'trainer.epochs = "2"\ntrainer.eval_batch_size = 0',
            ["trainer.epochs: expected", "trainer.eval_batch_size: expected"],
        ),
        ("trainer.epoch = 2", ["trainer.epoch: unknown setting"]),
    ],
)
def test_what_no_setting_can_say_is_listed_with_all_else_that_is_wrong(
    line: str, others: list[str], tmp_path: Path
) -> None:
    path = tmp_path / "converted.toml"
    path.write_text(
        f'data.train_data = ["t"]\ntrainer.policy.model.path = "m"\ntrainer.eval_interval = 0\n{line}\n[unconverted]\nx = "lost"\n'
    )
    with pytest.raises(ConfigError) as error:
        Config.from_toml([path])
    message = str(error.value)
    assert len(message.splitlines()) == 1 + len(others)
    assert "unconverted.x: lost; settle it" in message
    assert all(other in message for other in others)


def test_what_no_setting_can_say_is_refused_until_its_line_is_deleted(tmp_path: Path) -> None:
    conversion = Conversion(
        "somewhere", {"data.train_data": ["t"], "trainer.policy.model.path": "m", "trainer.eval_interval": 0}
    )
    conversion.note("unknown", "a.b\nc", "", "no such setting")
    conversion.note("conflict", "d", "trainer.epochs", "left out")
    conversion.note("conflict", "d", "", "and more")
    conversion.finish()
    message = _refusal(conversion, tmp_path)
    assert "unconverted.d: left out; and more; settle it, then delete this line" in message
    assert re.search(r"converted\.toml:\d+: unconverted\.a\.b", message)
    text = (tmp_path / "converted.toml").read_text()
    header, _, rest = text.partition("\n\n")
    assert "unknown       a.b c: no such setting" in header
    assert "conflict      d -> trainer.epochs: left out" in header
    (tmp_path / "settled.toml").write_text(rest.partition("\n\n")[2])
    Config.from_toml([tmp_path / "settled.toml"])


def _refusal(conversion: Conversion, folder: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        load(conversion, folder)
    return str(caught.value)


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
    fp4 = "trainer.policy.low_precision.fp4"
    conversion = Conversion("somewhere", values | {fp4: True, "trainer.policy.diffusers.enable": True})
    conversion.finish()
    found = [(entry.kind, entry.source) for entry in conversion.entries]
    assert ("unimplemented", fp4) in found
    assert (
        "conflict",
        "trainer.policy.diffusers.sample.deterministic_sampling",
    ) in found  # which the default solver needs


def test_what_no_switch_turns_on_is_dropped(tmp_path: Path) -> None:
    words = ["data.train_data=[t.parquet]", "trainer.policy.model.path=m", "trainer.eval_interval=-1"]
    conversion = convert_overrides(
        [*words, "trainer.algorithm.clip_ratio_c=10", "trainer.algorithm.kl_cov.ppo_kl_coef=2"], "a command"
    )
    assert {entry.source: entry.kind for entry in conversion.entries}["trainer.algorithm.clip_ratio_c"] == "dropped"
    assert load(conversion, tmp_path).trainer.algorithm.clip_ratio_c == 3.0
