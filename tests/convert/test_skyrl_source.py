"""SkyRL's YAML and command lines as they are read: lists, tables, prefixes, interpolations, and what is refused."""

import subprocess
import sys
import time
from collections.abc import Callable

import pytest

from hpcrl.convert.conversion import Conversion
from hpcrl.convert.skyrl.convert import convert_yaml
from hpcrl.errors import ConfigError
from tests.convert.skyrl_material import ENGINE, command, entries, kinds


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("[a,b]", ["a", "b"]),
        ("['</a>','b c']", ["</a>", "b c"]),
        ("null", None),
        ('["</sql>", "</solution>"]', ["</sql>", "</solution>"]),
    ],
)
def test_lists_and_null(value: str, expected: list[str] | None) -> None:
    assert command(f"generator.sampling_params.stop={value}").values["generator.sampling_params.stop"] == expected


@pytest.mark.parametrize("value", ["{rope_type: yarn, factor: 2.0}", "{rope_type:yarn,factor:2.0}"])
def test_tables_as_yaml_and_as_hydra_write_them(value: str) -> None:
    assert command(f"trainer.rope_scaling={value}").values["trainer.rope_scaling"] == {
        "rope_type": "yarn",
        "factor": 2.0,
    }


def test_keys_of_a_free_table() -> None:
    conversion = command(
        "generator.chat_template_kwargs.enable_thinking=false", "generator.chat_template_kwargs.depth=2"
    )
    assert conversion.values["generator.chat_template_kwargs"] == {"enable_thinking": False, "depth": 2}


def test_quoted_text_and_later_words_win() -> None:
    conversion = command("environment.env_class=a", "environment.env_class='it is b'")
    assert conversion.values["environment.env_class"] == "it is b"


def test_a_plus_is_reported() -> None:
    conversion = command("+generator.engine_init_kwargs.language_model_only=true", "+trainer.my_own=3")
    assert conversion.values[ENGINE + "engine_init_kwargs"] == {"language_model_only": True}
    assert kinds(conversion, "+generator.engine_init_kwargs.language_model_only") == {"translated"}
    (unknown,) = [entry for entry in conversion.entries if entry.kind == "unknown"]
    assert unknown.source == "+trainer.my_own"
    assert "subclass" in unknown.message
    assert conversion.incomplete


def test_a_deletion_and_a_stray_word_are_reported() -> None:
    conversion = command("~trainer.epochs=1", "stray")
    assert kinds(conversion, "~trainer.epochs") == {"conflict"}
    assert kinds(conversion, "stray") == {"unknown"}


def test_the_program_and_its_options_are_left_out() -> None:
    words = [
        "CUDA_VISIBLE_DEVICES=0",
        "uv",
        "run",
        "--extra",
        "vllm",
        "-m",
        "skyrl_train.entrypoints.main_base",
        "trainer.epochs=3",
    ]
    conversion = command(*words)
    assert conversion.values["trainer.epochs"] == 3
    assert not conversion.incomplete


@pytest.mark.parametrize(
    ("word", "name", "near"),
    [
        ("trainer.policy.optimizer_config.leraning_rate=1", "trainer.policy.optimizer_config.leraning_rate", ""),
        ("trainer.train_batchsize=4", "trainer.train_batchsize", "trainer.train_batch_size"),
        ("generator.num_inference_engine=4", "generator.num_inference_engine", "generator.num_inference_engines"),
        ("trainer.polcy.model.path=x", "trainer.polcy", "trainer.policy"),
        ("epochs=3", "epochs", "trainer.epochs"),
    ],
)
def test_a_misspelt_key_is_reported_with_the_right_one(word: str, name: str, near: str) -> None:
    conversion = command(word)
    (entry,) = entries(conversion, name)
    assert entry.kind == "unknown"
    assert entry.message == "not among the settings of SkyRL of August 2026" + (
        f"; did you mean {near}?" if near else ""
    )
    assert conversion.incomplete


# Interpolation


def test_interpolations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    text = """
    data: {train_data: ["${oc.env:HOME}/${environment.env_class}/train.parquet"], val_data: "${data.train_data}"}
    environment: {env_class: sort}
    trainer:
      max_prompt_length: 300
      policy: {model: {path: "${oc.env:MODEL,fallback}"}}
      ref: {model: {path: "${trainer.policy.model.path}"}}
      train_batch_size: ${trainer.policy_mini_batch_size}
    generator:
      max_turns: 3
      max_input_length: ${trainer.max_prompt_length}
      sampling_params: {max_generate_length: "${..max_input_length}", temperature: 0.5}
      eval_sampling_params: ${generator.sampling_params}
    """
    values = convert_yaml(text, "file").values
    assert values["data.train_data"] == values["data.val_data"] == ["/home/somebody/sort/train.parquet"]
    assert values["trainer.policy.model.path"] == values["trainer.ref.model.path"] == "fallback"
    assert values["trainer.train_batch_size"] == 256  # the default of a setting that the file leaves out
    assert values["generator.sampling_params.max_generate_length"] == 300
    assert values["generator.eval_sampling_params.max_generate_length"] == 300
    assert values["generator.eval_sampling_params.temperature"] == 0.5


@pytest.mark.parametrize("read", [lambda text: convert_yaml(text, "file"), lambda text: command(f"data={text[8:]}")])
def test_variables_of_the_shell_are_no_interpolations(read: Callable[[str], Conversion]) -> None:
    conversion = read("  data: {train_data: ['${HOME}/a.parquet'], val_data: ['${DATA_DIR}/b.parquet']}")
    assert conversion.values["data.train_data"] == ["~/a.parquet"]
    assert "data.val_data" not in conversion.values
    (entry,) = entries(conversion, "data.val_data")
    assert (entry.kind, entry.message) == ("conflict", "$DATA_DIR is a variable of the shell; write its value out")


def test_an_interpolation_finds_a_setting_by_either_name() -> None:
    conversion = command(
        "generator.num_inference_engines=3",
        "trainer.epochs=${generator.inference_engine.num_engines}",
        "generator.max_turns=${generator.num_inference_engines}",
    )
    assert conversion.values["trainer.epochs"] == conversion.values["generator.max_turns"] == 3


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("${oc.env:HPCRL_NO_SUCH_VARIABLE}", "'HPCRL_NO_SUCH_VARIABLE' not found"),
        ("${deepspeed_config.train}", "'deepspeed_config.train' not found"),
        ("${trainer.run_name}", "Recursive interpolation"),
        ("${nowhere:1}", "Unsupported interpolation type nowhere"),
        ("???", "Missing mandatory value"),
    ],
)
def test_an_interpolation_that_leads_nowhere_is_reported(text: str, reason: str) -> None:
    conversion = convert_yaml(f"trainer: {{run_name: '{text}', epochs: 2}}", "file")
    (entry,) = entries(conversion, "trainer.run_name")
    assert entry.kind == "conflict"
    assert reason in entry.message
    assert "trainer.run_name" not in conversion.values
    assert conversion.values["trainer.epochs"] == 2


def test_a_model_that_cannot_be_resolved_is_not_replaced_by_skyrls_default() -> None:
    conversion = command("trainer.policy.model.path=${oc.env:HPCRL_NO_SUCH_VARIABLE}")
    assert "trainer.policy.model.path" not in conversion.values
    assert any(entry.message.startswith("required") for entry in entries(conversion, "trainer.policy.model.path"))


def bomb() -> str:
    levels = "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 10))
    return "a0: &a0 [1]\n" + levels


@pytest.mark.parametrize(
    ("document", "place"),
    [
        ("trainer: [1, 2", "line 1"),
        ("trainer: {epochs: 1}\ntrainer: {epochs: 2}", "line 2"),
        ("a: 1\n\tb: 2", "line 2"),
        ("- 1\n- 2", "line 1"),
        ("just text", "line 1"),
        ("", "empty document"),
        ("# a comment", "empty document"),
        ("a: &a [*a]", "recursive alias"),
        ("a: *nowhere", "line 1"),
        (bomb(), "expan"),
        ("a: " + "[" * 100_000, "line 1: nested more than 64"),
        ("a: " + "{a: " * 500 + "1" + "}" * 500, "nested more than 64"),
        ("a: !!python/object/apply:os.system [ls]", "line 1: has the tag"),
        ("a: !!bool x", "line 1: has the tag"),
        ("a: " + "9" * 5000, "not a configuration"),
        ("? [1, 2]\n: 3", "not valid YAML"),
        ("null: 3", "not a configuration"),
        ("a: {b: '${'}", "a.b: not a configuration"),
        ("a: =", "line 1"),
        ("a: <<", "line 1"),
        ("a: 1\n--- \nb: 2", "line 2"),
        (b"a: \xff\xfe", "not UTF-8 text: byte 3"),
        ("a: \ud800", "not valid YAML"),
        ("a: \0", "not valid YAML"),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_what_is_no_configuration_is_refused_with_its_place(document: str | bytes, place: str) -> None:
    began = time.monotonic()
    with pytest.raises(ConfigError) as caught:
        convert_yaml(document, "some/file.yaml")
    assert str(caught.value).startswith("some/file.yaml")
    assert place in str(caught.value)
    assert time.monotonic() - began < 10


@pytest.mark.parametrize(
    "word",
    ["trainer.epochs=[1", "trainer.epochs={a", "trainer.epochs='x", "trainer.epochs=!!bool x", "trainer.epochs=${"],
)
def test_a_value_that_is_no_yaml_is_refused_with_its_word(word: str) -> None:
    with pytest.raises(ConfigError, match=r"^command: override"):
        command(word)


@pytest.mark.parametrize(
    "value", ["2020-01-01", ".nan", "0x10", "1_000", "~", "off", "'x'", "{1: 2}", "[[1], {a: b}]", "!"]
)
def test_strange_values_are_no_crash(value: str) -> None:
    conversion = convert_yaml(
        f"trainer: {{run_name: {value}, rope_scaling: {value}, epochs: {value}}}" if value != "!" else "a: '!'", "f"
    )
    assert conversion.to_toml()


def test_converting_is_lazy_about_omegaconf() -> None:
    code = "import sys, hpcrl.convert.skyrl.convert as s; assert not {'omegaconf', 'yaml', 'torch'} & set(sys.modules); print(len(s.TARGETS))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 300
