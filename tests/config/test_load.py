"""Files and overrides to a configuration: order, overrides, locations, round trip."""

from dataclasses import MISSING, dataclass, field, replace
from pathlib import Path
from typing import Any, get_args, get_origin

import pytest
import tomli
from omegaconf import OmegaConf

from hpcrl.config import Config, SamplingParams
from hpcrl.config.fields import Setting, alternatives, leaves, values
from hpcrl.config.load import nested, read
from hpcrl.config.sections.alerts import AlertRuleConfig
from hpcrl.config.sections.generator import EvalSamplingParams
from hpcrl.config.sections.megatron import MegatronConfig
from hpcrl.config.validate import build
from hpcrl.errors import ConfigError

MINIMAL = """
[data]
train_data = ["./train.parquet"]
[trainer]
eval_interval = 0
[trainer.policy.model]
path = "org/model"
"""


@pytest.fixture
def experiment(tmp_path: Path) -> Path:
    path = tmp_path / "experiment.toml"
    path.write_text(MINIMAL)
    return path


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_defaults_fill_what_a_file_leaves_out(experiment: Path) -> None:
    config = Config.from_toml([experiment])
    assert config.trainer.train_batch_size == 1024
    assert config.trainer.policy.optimizer_config.adam_betas == [0.9, 0.999]
    assert config.trainer.fully_async.max_staleness_steps == 0
    assert config.generator.eval_sampling_params == EvalSamplingParams()


def test_files_merge_from_left_to_right_and_overrides_come_last(experiment: Path, tmp_path: Path) -> None:
    one = write(tmp_path / "one.toml", '[slurm]\npartition = "a"\nsetup = ["x", "y"]\ntime_minutes = 5\n')
    two = write(tmp_path / "two.toml", '[slurm]\npartition = "b"\nsetup = ["z"]\n[slurm.extra]\nnice = 1\n')
    three = write(tmp_path / "three.toml", "[slurm.extra]\nreservation = 'r'\n")
    slurm = Config.from_toml([experiment, one, two, three]).slurm
    assert (slurm.partition, slurm.setup, slurm.time_minutes) == ("b", ["z"], 5)
    assert slurm.extra == {"nice": 1, "reservation": "r"}
    assert Config.from_toml([experiment, two, one]).slurm.partition == "a"
    assert Config.from_toml([experiment, two, one], ["slurm.partition=c"]).slurm.partition == "c"
    assert Config.from_toml([experiment], ["slurm.partition=c", "slurm.partition=d"]).slurm.partition == "d"


@pytest.mark.parametrize(
    ("override", "section", "name", "expected"),
    [
        ("slurm.time_minutes=7", "slurm", "time_minutes", 7),
        ("slurm.exclusive=true", "slurm", "exclusive", True),
        ("slurm.partition=main", "slurm", "partition", "main"),
        ('slurm.partition="7"', "slurm", "partition", "7"),
        ("slurm.partition='a=b'", "slurm", "partition", "a=b"),
        ("slurm.constraint=a=b", "slurm", "constraint", "a=b"),
        ("slurm.constraint=a&b|c", "slurm", "constraint", "a&b|c"),
        ("slurm.constraint=2024-01-01", "slurm", "constraint", "2024-01-01"),
        ("data.prompt_column=1\nshuffle = false", "data", "prompt_column", "1\nshuffle = false"),
        ('slurm.setup=["a=1", "b"]', "slurm", "setup", ["a=1", "b"]),
        ("slurm.extra={nice = 1}", "slurm", "extra", {"nice": 1}),
        ('data.image_processor_kwargs."a.b".c=1', "data", "image_processor_kwargs", {"a.b": {"c": 1}}),
        ("slurm.extra.spread-job=true", "slurm", "extra", {"spread-job": True}),
        ("trainer.run_name=", "trainer", "run_name", None),
        ('slurm.account=""', "slurm", "account", ""),
    ],
)
def test_override_values(experiment: Path, override: str, section: str, name: str, expected: object) -> None:
    config = Config.from_toml([experiment], ["slurm.extra={}", override])
    assert getattr(getattr(config, section), name) == expected


def test_override_of_a_nested_number_keeps_its_type(experiment: Path) -> None:
    optimizer = Config.from_toml([experiment], ["trainer.policy.optimizer_config.lr=1"]).trainer.policy.optimizer_config
    assert optimizer.lr == 1.0
    assert isinstance(optimizer.lr, float)
    assert (
        Config.from_toml([experiment], ["trainer.policy.optimizer_config.lr=3e-4"]).trainer.policy.optimizer_config.lr
        == 3e-4
    )


def test_an_override_goes_back_to_the_default(experiment: Path, tmp_path: Path) -> None:
    limit = write(tmp_path / "limit.toml", "[trainer]\nmax_steps = 3\nseed = 7\nrun_name = 'a'\n")
    assert Config.from_toml([experiment, limit]).trainer.max_steps == 3
    trainer = Config.from_toml([experiment, limit], ["trainer.max_steps=default", "trainer.seed=default"]).trainer
    assert (trainer.max_steps, trainer.seed) == (None, 42)
    assert Config.from_toml([experiment, limit], ["trainer.policy.fsdp_config=default"]).trainer.seed == 7
    assert Config.from_toml([experiment, limit], ["trainer.run_name=default"]).trainer.run_name == "default"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("trainer.seed", "a whole number"),
        ("trainer.max_steps", "a whole number"),
        ("trainer.policy.optimizer_config.lr", "a number"),
        ("trainer.resume_mode", 'one of "latest", "none", "from_path"'),
        ("data.val_data", "a list of texts"),
        ("generator.sampling_params.stop", "a list of texts"),
        ("trainer.flash_attn", "true or false"),
        ("trainer.policy.fsdp_config", "a table"),
    ],
)
def test_an_override_without_a_value_is_refused_where_no_text_is_expected(
    experiment: Path, name: str, expected: str
) -> None:
    """As a shell leaves `KEY=$VARIABLE` whose variable it does not know: the file's value must not make way for the default."""
    with pytest.raises(ConfigError) as caught:
        Config.from_toml([experiment], [f"{name}= "])
    assert f"expected {expected}, found nothing, as of a variable that the shell does not know" in str(caught.value)
    assert f"{name}=default goes back to the default" in str(caught.value)


def test_an_empty_override_takes_a_quoted_key_away(experiment: Path, tmp_path: Path) -> None:
    extra = write(tmp_path / "extra.toml", '[slurm.extra]\n"a.b" = 1\nnice = 2\n')
    assert Config.from_toml([experiment, extra], ['slurm.extra."a.b"=']).slurm.extra == {"nice": 2}


def test_an_eval_override_leaves_the_rest_as_in_training(experiment: Path) -> None:
    overrides = ["generator.eval_sampling_params.top_p=0.5", "generator.sampling_params.max_generate_length=7"]
    config = Config.from_toml([experiment], overrides)
    assert config.generator.eval_sampling_params == EvalSamplingParams(top_p=0.5)
    assert config.generator.eval_sampling == SamplingParams(top_p=0.5, max_generate_length=7)


def test_locations_are_relative_to_the_file_that_sets_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    monkeypatch.setenv("HOME", "/home/somebody")
    one = write(
        tmp_path / "one" / "a.toml",
        '[data]\ntrain_data = ["./t.parquet", "../u.parquet", "~/v.parquet", "w.parquet", "org/name", "/abs"]\n'
        '[trainer]\neval_interval = 0\n[trainer.policy.model]\npath = "./model"\n',
    )
    two = write(tmp_path / "two" / "b.toml", '[trainer.ref.model]\npath = "../ref"\n')
    config = Config.from_toml(
        [one, two], ["slurm.root=./here", "trainer.resume_mode=from_path", "trainer.resume_path=../c"]
    )
    assert config.data.train_data == [
        f"{tmp_path}/one/t.parquet",
        f"{tmp_path}/u.parquet",
        "/home/somebody/v.parquet",
        "w.parquet",
        "org/name",
        "/abs",
    ]
    assert config.trainer.policy.model.path == f"{tmp_path}/one/model"
    assert config.trainer.ref.model.path == f"{tmp_path}/ref"
    assert config.slurm.root == f"{tmp_path}/cwd/here"
    assert config.trainer.resume_path == f"{tmp_path}/c"
    relative = Config.from_toml([Path("../one/a.toml")])
    assert relative.data.train_data == config.data.train_data


def test_a_default_location_that_is_written_out_stays_the_default(
    experiment: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    config = Config.from_toml([experiment])
    assert Config.from_toml([write(tmp_path / "config.toml", config.to_toml())]) == config


def full() -> Config:
    """A configuration of the right types in which every setting differs from its default, whether or not that can work."""
    return build(
        Config, nested({setting.path: CHOSEN.get(setting.path) or _other(setting) for setting in leaves(Config)})
    )


CHOSEN = {
    "trainer.alerts.rules": {"low": {"kind": "above", "metric": "x", "value": 0.5, "stop": True}},
    "trainer.policy.optimizer_config.adam_betas": [0.1, 1e-12],
    "generator.inference_engine.engine_init_kwargs": {"a-b": [1, 2.5, "x"], "nested": {"t": True, "é.f": "", "": [{}]}},
    "slurm.setup": ['echo "quoted" \\ back', "two\nlines\t\r\n", "ünïcode"],
    "slurm.extra": {"spread-job": True, "comment": ""},
    "slurm.requests": {"spot": {"nodes": "2-4", "gpus_per_node": "a100:8", "extra": {"spread-job": True}}, "é.f": {}},
    "trainer.policy.trainable_map": {"model.layers.0": False},
    **{
        f"trainer.{model}.optimizer_config.groups": {
            "head": {"match": "lm_head", "lr_factor": 0.5, "weight_decay": 0.1}
        }
        for model in ("policy", "critic")
    },
}


def _other(setting: Setting) -> object:
    kind = setting.types[-1]
    if setting.choices:
        return next((choice for choice in setting.choices if choice != setting.default), setting.default)
    if get_origin(kind) is list:
        return [
            _NEW[alternatives(get_args(kind)[0])[0]],
            *(setting.default or [] if setting.default is not MISSING else []),
        ]
    if get_origin(kind) is dict:
        return {"key": _NEW[alternatives(get_args(kind)[1])[0]]}
    return not setting.default if kind is bool else _NEW[kind]


_NEW = {bool: True, int: 987, float: 0.123456789012345678, str: "words", Any: [1, {"x": 2.0}], list[str]: ["one"]}


def test_round_trip_is_exact(tmp_path: Path, experiment: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # a location that exists here would become absolute
    for config in (full(), Config.from_toml([experiment])):
        path = write(tmp_path / "run" / "config.toml", config.to_toml())
        again = build(Config, read([path], [], Config).tree)
        assert again == config
        assert again.to_toml() == config.to_toml()
        assert build(Config, nested(config.to_dict())) == config
    assert Config.from_dict(config.to_dict()) == Config.from_toml([path]) == config


def test_every_setting_can_be_written_and_read() -> None:
    config = full()
    changed = {setting.path for setting, value in values(config) if not setting.is_default(value)}
    assert changed == {setting.path for setting in leaves(Config) if len(setting.choices) != 1 or setting.optional}
    assert changed <= set(_paths(tomli.loads(config.to_toml())))
    assert changed <= set(_paths(tomli.loads(config.to_toml(only_changed=True))))


def _paths(tree: dict[str, Any], prefix: str = "") -> list[str]:
    below = [_paths(value, f"{prefix}{name}.") for name, value in tree.items() if isinstance(value, dict)]
    return [prefix + name for name in tree] + [path for paths in below for path in paths]


def test_only_what_is_changed_is_written(experiment: Path) -> None:
    assert tomli.loads(Config.from_toml([experiment], ["trainer.seed=7"]).to_toml(only_changed=True)) == {
        "data": {"train_data": [f"{experiment.parent}/train.parquet"]},
        "trainer": {"eval_interval": 0, "seed": 7, "policy": {"model": {"path": "org/model"}}},
    }


def test_given_keys_of_a_table_replace_single_defaults() -> None:
    tree = {"transformer_config_kwargs": {"recompute_num_layers": 4, "x": 1}}
    merged = build(MegatronConfig, tree).transformer_config_kwargs
    assert merged == MegatronConfig().transformer_config_kwargs | tree["transformer_config_kwargs"]


@dataclass(frozen=True, kw_only=True)
class Named:
    """A section as users make them, with others below names of their own and in a list."""

    rules: dict[str, AlertRuleConfig] = field(default_factory=dict)
    listed: list[AlertRuleConfig] = field(default_factory=list)


def test_tables_of_sections(experiment: Path) -> None:
    low = {"kind": "entropy_below", "value": 1}
    named = build(Named, {"rules": {"low": low}, "listed": [low, {**low, "steps": 3}]})
    assert named.rules["low"] == named.listed[0] == AlertRuleConfig(kind="entropy_below", value=1.0)
    with pytest.raises(ConfigError) as caught:
        build(Named, {"rules": {"low": {"kind": "x"}, "b": {"vlaue": 1}}, "listed": [{**low, "steps": "3"}]})
    lines = str(caught.value).splitlines()
    assert [line.split(": ")[0] for line in lines] == [
        "rules.low.kind",
        "rules.b.vlaue",
        "rules.b.kind",
        "listed[0].steps",
    ]
    assert lines[1].endswith("unknown setting; did you mean value?")
    path, rules = (
        "trainer.alerts.rules",
        ["a={kind='no_progress', minutes=1}", "a.minutes=2", "b={kind='above', metric='x', value=0}"],
    )
    config = Config.from_toml([experiment], [f"{path}.{rule}" for rule in rules])
    changed = tomli.loads(config.to_toml(only_changed=True))["trainer"]["alerts"]
    assert changed == {
        "rules": {
            "a": {"kind": "no_progress", "minutes": 2.0},
            "b": {"kind": "above", "metric": "x", "value": 0.0},
        }
    }


def test_sections_cannot_be_changed(experiment: Path) -> None:
    config = Config.from_toml([experiment])
    with pytest.raises(AttributeError):
        config.trainer.epochs = 2  # type: ignore[misc]
    assert replace(config.trainer, epochs=2).epochs == 2


def test_files_of_other_systems(experiment: Path) -> None:
    config = Config.from_toml([experiment])
    experiment.write_bytes(b"\xef\xbb\xbf" + MINIMAL.replace("\n", "\r\n").encode())
    assert Config.from_toml([experiment]) == config
    experiment.write_bytes(experiment.read_bytes() + b"[slurm]\r\npartitions = 'main'\r\n")
    line = MINIMAL.count("\n") + 2
    with pytest.raises(ConfigError, match=rf"^{experiment}:{line}: slurm\.partitions: unknown"):
        Config.from_toml([experiment])


def test_one_file_and_one_override_need_no_list(experiment: Path) -> None:
    config = Config.from_toml([experiment], ["trainer.seed=7"])
    assert (
        Config.from_toml(experiment, "trainer.seed=7")
        == Config.from_toml(str(experiment), ["trainer.seed=7"])
        == config
    )


def test_none_is_unset_everywhere(experiment: Path) -> None:
    config = Config.from_toml([experiment])
    tree = {"trainer.seed": None, "trainer.placement": None, "slurm.extra": None, "trainer.max_steps": None}
    assert Config.from_dict({**config.to_dict(), **tree}) == config
    with pytest.raises(ConfigError, match=r"data\.train_data: required"):
        Config.from_dict({**config.to_dict(), "data": None})


def test_files_that_cannot_be_read_are_all_named(tmp_path: Path) -> None:
    broken = write(tmp_path / "broken.toml", "[data]\ntrain_data = [\n")
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b'a = "\xff"')
    missing = tmp_path / "missing.toml"
    with pytest.raises(ConfigError) as caught:
        Config.from_toml([broken, binary, missing, tmp_path])
    lines = str(caught.value).splitlines()
    assert len(lines) == 4
    assert lines[0].startswith(f"{broken}:2: not valid TOML: ")
    assert "not closed before the file ends" in lines[0]
    assert lines[1] == f"{binary}:1: not UTF-8 text: byte 5; saved as Latin-1? Save it as UTF-8"
    assert lines[2].startswith(f"{missing}: no such file")
    assert lines[3].startswith(f"{tmp_path}: cannot be read")


def test_a_syntax_error_names_the_line(tmp_path: Path) -> None:
    broken = write(tmp_path / "broken.toml", "[data]\ntrain_data = ['a']\nx = = 1\n")
    with pytest.raises(ConfigError, match=rf"^{broken}:3: not valid TOML: "):
        Config.from_toml([broken])


@pytest.mark.parametrize(
    "override", ["trainer.epochs", "=3", "trainer..epochs=3", ".epochs=1", 'slurm.extra."a=1', 'slurm.setup=["a"']
)
def test_malformed_overrides(experiment: Path, override: str) -> None:
    with pytest.raises(ConfigError, match="override"):
        Config.from_toml([experiment], [override])


def test_an_empty_override_of_an_unknown_name_is_an_error(experiment: Path) -> None:
    with pytest.raises(ConfigError, match=r"did you mean trainer\.max_steps"):
        Config.from_toml([experiment], ["trainer.max_step="])


def test_overrides_may_be_written_as_in_skyrl() -> None:
    words = ["data.train_data=[a.parquet, b.parquet]", "trainer.policy.model.path=m", "trainer.eval_interval=0"]
    config = Config.from_cli_overrides([*words, "generator.sampling_params.stop=null", "trainer.max_steps=null"])
    assert config.data.train_data == ["a.parquet", "b.parquet"]
    assert not config.generator.sampling_params.stop
    assert config.trainer.max_steps is None


def test_null_where_a_value_counts_names_the_default() -> None:
    with pytest.raises(
        ConfigError,
        match=r"null has no meaning here; trainer\.resume_mode=default goes back to the default, \"latest\"",
    ):
        Config.from_cli_overrides(["trainer.resume_mode=null"])


def test_a_dict_config_is_taken_with_its_lists_and_interpolations() -> None:
    tree = {
        "data": {"train_data": ["t.parquet"]},
        "trainer": {"policy": {"model": {"path": "${trainer.ref.model.path}"}}},
    }
    tree["trainer"] |= {"ref": {"model": {"path": "m"}}, "eval_interval": 0}
    config = Config.from_dict_config(OmegaConf.create(tree))
    assert (config.data.train_data, config.trainer.policy.model.path) == (["t.parquet"], "m")
    with pytest.raises(ConfigError, match="nowhere"):
        Config.from_dict_config(OmegaConf.create({"data": {"train_data": "${nowhere}"}}))
