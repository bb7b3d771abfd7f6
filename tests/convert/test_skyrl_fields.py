"""Every setting of SkyRL has a place here or a reason why it has none; every default that differs has a reason too."""

import csv
import json
import re

import pytest

from hpcrl.config import Config
from hpcrl.config.fields import settings
from hpcrl.convert.mapping import Dropped, To, Translated
from hpcrl.convert.skyrl.convert import convert_overrides
from hpcrl.convert.skyrl.fields import OLD_DEFAULTS, ONLY_OLD, RENAMED, RL, SFT, SKYRL_DEFAULTS, TARGETS, Layout
from hpcrl.convert.skyrl.translate import TRANSLATIONS
from hpcrl.docs.explain import why_not_skyrls
from tests.paths import ROOT

SPEC = ROOT / "tests" / "spec"
SETTINGS = {setting.path: setting for setting in settings(Config)}
FREE = [setting.path for setting in SETTINGS.values() if setting.is_free]
NO_PATH = "(absent) legacy policy-loss formula"


def table(name: str) -> list[dict[str, str]]:
    with (SPEC / name).open(encoding="utf-8", newline="") as lines:
        return list(csv.DictReader(lines, delimiter="\t", quoting=csv.QUOTE_NONE))


FIELDS = [row for row in table("skyrl_fields.tsv") if row["kind"] != "group"]
SINCE_MARCH = table("skyrl_fields_2026_08.tsv")
LEGACY = [row for row in table("skyrl_legacy.tsv") if row["legacy_path"] != NO_PATH]


def test_the_packaged_table_is_skyrls() -> None:
    assert {row["path"]: json.loads(row["default"]) for row in [*FIELDS, *SINCE_MARCH]} == SKYRL_DEFAULTS


@pytest.mark.parametrize("layout", [RL, SFT], ids=["rl", "sft"])
def test_every_setting_has_a_place_or_a_reason(layout: Layout) -> None:
    for path, target in layout.targets.items():
        places = () if isinstance(target, Dropped) else (target.path,) if isinstance(target, To) else target.paths
        assert places or len(getattr(target, "reason", "")) > 10, path
        for place in places:
            assert place in SETTINGS or any(place.startswith(table + ".") for table in FREE), (path, place)


def test_every_field_has_a_place_or_a_reason() -> None:
    paths = [row.get("path") or row["legacy_path"] for row in [*FIELDS, *LEGACY]]
    targets = {path: TARGETS[path] for path in paths}
    dropped = {path: target.reason for path, target in targets.items() if isinstance(target, Dropped)}
    assert {path: reason for path, reason in dropped.items() if len(reason) <= 20} == {}
    kept = {path: target for path, target in targets.items() if not isinstance(target, Dropped)}
    places = [
        (path, place)
        for path, target in kept.items()
        for place in ((target.path,) if isinstance(target, To) else target.paths)
    ]
    free = tuple(f"{table}." for table in FREE)
    assert [each for each in places if each[1] not in SETTINGS and not each[1].startswith(free)] == []
    assert [path for path, target in kept.items() if isinstance(target, Translated) and not target.how] == []


def test_every_translated_setting_is_translated() -> None:
    assert {path for path, target in TARGETS.items() if isinstance(target, Translated)} - set(RENAMED) <= set(
        TRANSLATIONS
    )
    assert set(TRANSLATIONS) <= set(TARGETS)


def test_settings_of_the_old_layout_go_where_their_successors_go() -> None:
    for row in LEGACY:
        old, new = row["legacy_path"], row["new_path"]
        if row["status"] in ("moved", "renamed", "moved+renamed") and old in RENAMED:
            assert RENAMED[old] == new
            assert TARGETS[old] == TARGETS[new]
        elif new:
            target = TARGETS[old]
            assert old == new or (isinstance(target, Translated) and new in target.paths), old


def test_names_of_the_old_layout_are_those_that_are_gone() -> None:
    gone = {row["legacy_path"] for row in LEGACY} - set(SKYRL_DEFAULTS)
    sections = {"deepspeed_config"}  # an interpolation of the old page points into it
    assert gone - {"generator.model_name"} == ONLY_OLD - sections


def test_defaults_of_the_old_layout() -> None:
    changed = {}
    for row in LEGACY:
        old, new = _json(row["legacy_default"]), _json(row["new_default"])
        if (
            old != new
            and row["legacy_default"]
            and row["status"] in ("same", "moved", "moved+renamed")
            and "$" not in str(old)
        ):
            changed[row["new_path"]] = old
    del changed["generator.inference_engine.remote_urls"]  # it never counted: run_engines_locally is true by default
    implied = {"trainer.algorithm.loss_reduction": "sequence_mean", "generator.eval_sampling_params.temperature": 1.0}
    assert changed | implied == OLD_DEFAULTS


def _json(text: str) -> object:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def test_every_default_that_differs_has_a_reason_and_every_reason_a_difference() -> None:
    differing = set()
    for row in FIELDS:
        target = TARGETS[row["path"]]
        places = (target.path,) if isinstance(target, To) else getattr(target, "paths", ())
        same_name = [place for place in places if place.endswith("." + row["path"].rpartition(".")[2])]
        differing |= {
            place
            for place in same_name
            if place in SETTINGS and not SETTINGS[place].is_default(json.loads(row["default"]))
        }
    reasons = {path: why_not_skyrls(setting) for path, setting in SETTINGS.items() if setting.facts.why}
    assert {path for path, reason in reasons.items() if reason} == differing
    assert all(len(reason) > 20 for reason in reasons.values() if reason)


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("trainer.epoch", "trainer.epochs"),
        ("epochs", "trainer.epochs"),
        ("trainer.polcy", "trainer.policy"),
        ("generator.num_inference_engine", "generator.num_inference_engines"),
        ("generator.inference_engine.num_engine", "generator.inference_engine.num_engines"),
        ("trainer.algorithm.eps_clip_hi", "trainer.algorithm.eps_clip_high"),
    ],
)
def test_the_nearest_name(wrong: str, right: str) -> None:
    found = [entry.message for entry in convert_overrides([f"{wrong}=1"], "f").entries if entry.kind == "unknown"]
    assert [re.split(r" or |\?", message)[0] for message in found] == [
        f"not among the settings of SkyRL of August 2026; did you mean {right}"
    ]


def test_a_name_like_no_other() -> None:
    (entry,) = [entry for entry in convert_overrides(["trainer.zzz=1"], "f").entries if entry.kind == "unknown"]
    assert entry.message == "not among the settings of SkyRL of August 2026"
