"""The settings as a whole: each is documented and has a default that fits, files in configs/ load, nothing heavy is imported."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import tomli

from hpcrl.config import Config
from hpcrl.config.fields import Setting, leaves, settings
from hpcrl.config.validate import build
from hpcrl.docs.describe import pages
from hpcrl.docs.schema import json_schema
from tests.paths import ROOT

CONFIGS = sorted((ROOT / "configs").rglob("*.toml"))
SITES = sorted((ROOT / "slurm" / "sites").glob("*.toml"))


@pytest.fixture(scope="module")
def schema() -> jsonschema.Draft202012Validator:
    schema = json_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def test_the_generated_pages_are_current() -> None:
    stale = [str(path) for path, text in pages(ROOT).items() if not path.is_file() or path.read_text() != text]
    assert not stale, "run: python -m hpcrl.docs.describe"


def faults(setting: Setting) -> Iterator[str]:
    """Yield what is wrong with the meaning and the default of a setting."""
    if not setting.meaning.endswith(".") or "\n" in setting.meaning:
        yield f"{setting.path}: the meaning {setting.meaning!r} is no line that ends in a dot"
    if setting.required:
        return
    if (setting.default is None) != setting.optional:
        yield f"{setting.path}: optional, and its default is {setting.default!r}, or neither"
    if not setting.optional:
        read = with_defaults()
        for part in setting.path.split("."):
            read = getattr(read, part)
        if repr(read) != repr(setting.default):
            yield f"{setting.path}: {read!r} is read, and the default is {setting.default!r}"
    allowed, check = setting.facts.range, setting.facts.check
    if setting.default is not None and not (allowed is None or setting.default in allowed):
        yield f"{setting.path}: the default {setting.default!r} is not in {allowed}"
    if setting.default is not None and not (check is None or check.holds(setting.default)):
        yield f"{setting.path}: the default {setting.default!r} fails its check"


def test_every_setting_has_a_meaning_and_a_default_of_its_type() -> None:
    assert [fault for setting in leaves(Config) for fault in faults(setting)] == []


@cache
def with_defaults() -> Any:
    """Return a configuration that names every setting which has a default, with that."""
    tree = {}
    for setting in leaves(Config):
        if not (setting.required or setting.optional):
            value = setting.default
            for part in reversed(setting.path.split(".")):
                value = {part: value}
            tree = _merged(tree, value)
    return build(Config, _with_required(tree))


def _with_required(tree: dict) -> dict:
    required = {"data": {"train_data": []}, "trainer": {"policy": {"model": {"path": "m"}}}}
    return _merged(required, tree)


def _merged(one: dict, other: dict) -> dict:
    both = {
        key: _merged(one[key], other[key])
        for key in one.keys() & other.keys()
        if isinstance(one[key], dict) and isinstance(other[key], dict)
    }
    return {**one, **other, **both}


def test_choices_are_in_the_order_in_which_their_section_has_them() -> None:
    """Python takes two Literals for equal whose choices are the same in another order."""
    choices = {setting.path: setting.choices for setting in leaves(Config)}
    assert choices["trainer.algorithm.logprob_dtype"] == ("fp32", "bf16", "fp16")
    assert choices["trainer.policy.fsdp_config.mixed_precision.param_dtype"] == ("bf16", "fp32", "fp16")


def test_the_schema_says_what_the_loader_says(schema: jsonschema.Draft202012Validator) -> None:
    for setting in settings(Config):
        entry = schema.schema
        for part in setting.path.split("."):
            entry = entry["properties"][part]
        if setting.subsection:
            assert entry["additionalProperties"] is False
        else:
            assert entry["description"].startswith(setting.meaning)
            assert ("Not implemented yet" in entry["description"]) == (setting.facts.unimplemented is not None)
            assert setting.default is None or setting.required or jsonschema.validate(setting.default, entry) is None


@pytest.mark.parametrize("path", [*CONFIGS, *SITES], ids=lambda path: path.stem)
def test_every_file_fits_the_schema(path: Path, schema: jsonschema.Draft202012Validator) -> None:
    schema.validate(tomli.loads(path.read_text()))
    first, *_ = path.read_text().splitlines()
    if first.startswith("#:schema "):
        assert json.loads((path.parent / first.removeprefix("#:schema ")).read_text()) == schema.schema


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("trainer.epochs", 1.5),
        ("trainer.epochs", 0),
        ("trainer.epochs", "1"),
        ("trainer.strategy", "ddp"),
        ("trainer.epoch", 1),
        ("generator.sampling_params.top_p", 0),
        ("data.train_data", ["t", 3]),
        ("trainer.policy.trainable_map", {"x": "yes"}),
        ("trainer.alerts.rules.low.kind", "entropy"),
        ("trainer.alerts.rules.low.vlaue", 1),
        ("trainer.policy.fsdp_config.reshard_after_forward", "no"),
    ],
)
def test_the_schema_refuses_what_the_loader_refuses(
    path: str, value: object, schema: jsonschema.Draft202012Validator
) -> None:
    tree: object = value
    for part in reversed(path.split(".")):
        tree = {part: tree}
    with pytest.raises(jsonschema.ValidationError):
        schema.validate(tree)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_experiment_loads(path: Path) -> None:
    config = Config.from_toml([path])
    assert Config.from_dict(config.to_dict()) == config


@pytest.mark.parametrize("site", SITES, ids=lambda path: path.stem)
@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_experiment_loads_with_every_site(path: Path, site: Path) -> None:
    Config.from_toml([path, site])


def test_loading_and_checking_takes_few_calls_and_imports_nothing_heavy() -> None:
    code = (
        "import cProfile, sys; from pathlib import Path; from hpcrl.config import Config\n"
        "profile = cProfile.Profile()\n"
        f"profile.runcall(Config.from_toml, [Path({str(CONFIGS[0])!r})], ['trainer.seed=1'])\n"
        "print(sum(entry.callcount for entry in profile.getstats()))\n"
        "heavy = {'torch', 'transformers', 'vllm', 'numpy', 'pydantic', 'rich', 'submitit', 'httpx', 'omegaconf', 'yaml'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
    )
    run = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert 10_000 < int(run.stdout) < 240_000, "240,000 calls take about 50 ms; a time would depend on the processor"
