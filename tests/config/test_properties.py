"""What holds for every configuration, every slip of the pen and every input, shown on random ones."""

from __future__ import annotations

import string
import tempfile
from contextlib import suppress
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
import tomli
import tomli_w
import yaml
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from hpcrl.config import Config
from hpcrl.config.difference import as_yaml
from hpcrl.config.fields import Setting, alternatives, leaves
from hpcrl.config.fields import settings as settings_of
from hpcrl.config.load import nested, read
from hpcrl.config.validate import build
from hpcrl.docs.show import show
from hpcrl.errors import ConfigError

TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20)
NUMBER = st.integers(-(2**63), 2**63 - 1)
FLOAT = st.floats(allow_nan=False)
FREE = st.recursive(
    st.booleans() | NUMBER | FLOAT | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)
ALL = settings_of(Config)
LEAVES = {setting.path: setting for setting in leaves(Config)}
NAMES = {setting.path for setting in ALL}


def values(annotation: Any) -> st.SearchStrategy[Any]:
    return st.one_of(*(_values(kind) for kind in alternatives(annotation) if kind is not type(None)))


def _values(kind: Any) -> st.SearchStrategy[Any]:
    if get_origin(kind) is Literal:
        return st.sampled_from(get_args(kind))
    if get_origin(kind) is list:
        return st.lists(values(get_args(kind)[0]), max_size=3)
    if get_origin(kind) is dict:
        return st.dictionaries(TEXT, values(get_args(kind)[1]), max_size=3)
    if isinstance(kind, type) and is_dataclass(kind):
        held = {setting.name: setting for setting in leaves(kind)}
        given = {name: values(setting.annotation) for name, setting in held.items()}
        return st.fixed_dictionaries(
            {name: given.pop(name) for name, setting in held.items() if setting.required}, optional=given
        )
    return {str: TEXT, int: NUMBER, float: FLOAT, bool: st.booleans()}.get(kind, FREE)


@st.composite
def trees(draw: st.DrawFn) -> dict[str, Any]:
    """What is required, and some other settings, each with any value of its type."""
    chosen = draw(st.lists(st.sampled_from(sorted(LEAVES)), max_size=30))
    required = [path for path, setting in LEAVES.items() if setting.required]
    flat = {path: draw(values(LEAVES[path].annotation)) for path in dict.fromkeys([*required, *chosen])}
    return nested(flat)


def loaded(text: str) -> Config:
    """Return the configuration of a file whose types are right, whether or not its values are possible."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.toml"
        path.write_text(text, encoding="utf-8", newline="")
        return build(Config, read([path], [], Config).tree)


@given(trees())
@settings(max_examples=100, deadline=None)
def test_from_toml_to_configuration_to_toml_is_the_identity(tree: dict[str, Any]) -> None:
    config = loaded(tomli_w.dumps(tree))
    assert loaded(config.to_toml()) == config
    assert loaded(config.to_toml()).to_toml() == config.to_toml()
    assert loaded(config.to_toml(only_changed=True)) == config
    assert build(Config, nested(config.to_dict())) == config


@given(trees())
@example(
    nested(
        {
            "data.train_data": [],
            "trainer.policy.model.path": "",
            "trainer.alerts.rules": {
                "": {"kind": "fell", "window": 3},
                "a.b": {"kind": "above", "metric": "\n", "value": 0.0},
            },
        }
    )
)
@example(
    nested(
        {"data.train_data": [], "trainer.policy.model.path": "", "generator.inference_engine.tensor_parallel_size": 0}
    )
)
@settings(max_examples=30, deadline=None)
def test_from_configuration_to_yaml_to_configuration_is_the_identity(tree: dict[str, Any]) -> None:
    config = build(Config, tree)
    for text in (show(config, in_yaml=True), as_yaml(config.changed())):
        assert build(Config, yaml.safe_load(text)) == config


@given(st.sampled_from(ALL), st.data())
@settings(max_examples=300, deadline=None)
def test_any_one_letter_slip_leads_to_the_right_name(setting: Setting, data: st.DataObject) -> None:
    name, letter = setting.name, data.draw(st.sampled_from(string.ascii_letters + string.digits + "_-"))
    at = data.draw(st.integers(0, len(name) - 1))
    slips = {
        "drop": name[:at] + name[at + 1 :],
        "insert": name[:at] + letter + name[at:],
        "replace": name[:at] + letter + name[at + 1 :],
        "swap": name[:at] + name[at : at + 2][::-1] + name[at + 2 :],
    }
    parent = setting.path.rpartition(".")[0]
    wrong = f"{parent}.{slips[data.draw(st.sampled_from(sorted(slips)))]}".strip(".")
    assume(wrong not in NAMES and wrong != parent)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.toml"
        path.write_text(tomli_w.dumps(nested({wrong: 1})))
        try:
            Config.from_toml([path])
        except ConfigError as error:
            (line,) = [line for line in str(error).splitlines() if "unknown setting" in line]
    assert f"{path}:" in line
    assert f": {wrong}: " in line
    assert setting.path in line.partition("did you mean ")[2].removesuffix("?").split(" or ")


PATHS = st.sampled_from([*sorted(NAMES), "nonsense", "slurm.extra.a.b", "trainer.policy.trainable_map.x"])
ANYTHING = st.one_of(
    FREE,
    st.integers(),
    st.floats(),
    st.datetimes(),
    st.dates(),
    st.times(),
    st.text(),
    st.sampled_from(
        ["./", "~", "~root/x", "../" * 400, "/" * 5000, "a" * 5000, "\0", "./\0", "hpcrl:x", ".:x", "..x:y", ":"]
    ),
)
ASSIGNMENTS = st.builds(lambda path, value: f"{path}={value}", PATHS | st.text(max_size=10), st.text() | ANYTHING)
FILES = st.one_of(
    st.binary(max_size=60),
    st.text().map(lambda text: text.encode("utf-8", "surrogatepass")),
    st.builds(
        lambda tree: tomli_w.dumps(nested(tree)).encode("utf-8", "replace"),
        st.dictionaries(PATHS, ANYTHING, max_size=4),
    ),
    st.builds(lambda tree, more: tomli_w.dumps(tree).encode() + more, trees(), st.binary(max_size=5)),
    st.integers(1, 3000).map(lambda n: b"a=" + b"[" * n + b"]" * n),
    st.integers(1, 3000).map(lambda n: b"a." * n + b"b=1"),
    st.integers(1, 6000).map(lambda n: b"trainer.seed=" + b"9" * n),
)


@given(st.lists(FILES, max_size=2), st.lists(ASSIGNMENTS | st.text(), max_size=2))
@example([b"[trainer]\nseed = " + b"9" * 5000], [])
@example([b"a=" + b"{a=" * 5000], [])
@example([b"\xff\xfe"], ["trainer.run_name=\udcff", "\ud800=1"])
@example([], ["config_class=.x:Y", "slurm.root=./\0", "python_path=3"])
@settings(max_examples=400, deadline=None)
def test_no_input_gets_past_the_error_class(files: list[bytes], overrides: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / f"{number}.toml" for number in range(len(files))]
        for path, content in zip(paths, files, strict=True):
            path.write_bytes(content)
        try:
            config = Config.from_toml(paths, overrides)
        except ConfigError:
            return
        assert tomli.loads(config.to_toml())


@given(st.text() | st.sampled_from(["a\0b", "\ud800", "x" * 300, "/" + "x/" * 3000, "", ".", "/dev/null"]))
@settings(max_examples=50, deadline=None)
def test_no_name_of_a_file_gets_past_the_error_class(name: str) -> None:
    with pytest.raises(ConfigError):
        Config.from_toml([Path(name)])


@given(st.dictionaries(PATHS | st.text() | st.integers(), st.none() | ANYTHING | st.binary(), max_size=4))
@settings(max_examples=200, deadline=None)
def test_no_table_gets_past_the_error_class(tree: dict[Any, Any]) -> None:
    with suppress(ConfigError):
        Config.from_dict(tree)
