"""What Cosmos-RL makes of its files, against its own answers (tests/spec/cosmos)."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import tomli

from hpcrl.convert.cosmos.resolve import fields, resolve
from hpcrl.errors import ConfigError
from tests.paths import ROOT

SPEC = ROOT / "tests" / "spec" / "cosmos"
CASES: list[dict[str, Any]] = json.loads((ROOT / "tests" / "golden" / "cases" / "cosmos_config.json").read_text())[
    "cases"
]
DELIBERATE = {314: 'an explicit type = "grpo" is honoured; the version of January 2026 made it sft'}
NOW = "TS"


def table(name: str) -> list[dict[str, str]]:
    with (SPEC / name).open() as file:
        return list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))


def of_policy(**settings: Any) -> dict[str, Any]:
    return {"train": {"train_policy": settings}}


@pytest.mark.parametrize("path", sorted((SPEC / "resolved").glob("*.json")), ids=lambda path: path.stem)
def test_every_field_has_the_value_that_cosmos_gives_it(path: Path) -> None:
    tree = tomli.loads((SPEC / "configs" / f"{path.stem}.toml").read_text())
    tree["train"].setdefault("timestamp", NOW)
    assert resolve(tree).tree == json.loads(path.read_text())


@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case["id"]))
def test_single_rules_are_those_of_cosmos(case: dict[str, Any]) -> None:
    outputs = case["outputs"]
    if "error" in outputs:
        with pytest.raises(ConfigError) as caught:
            resolve(case["inputs"]["toml"])
        section = outputs["message"].removesuffix(".grpo")
        assert " " in section or any(line.startswith(section + ".") for line in str(caught.value).splitlines())
        return
    source = resolve(case["inputs"]["toml"])
    found = {path: source[path] for path in outputs}
    assert (found == outputs) is (case["id"] not in DELIBERATE)


def test_all_fields_are_known() -> None:
    known = {(field.path, field.variant): field for field in fields()}
    sections = {path.rpartition(".")[0] for path, _ in known}
    changed = {row["property"] for row in table("fields_head_delta.tsv") if row["change"] in ("default", "type")}
    for row in table("fields.tsv"):
        path, variant = row["path"], row["variant"]
        if path in sections:
            continue
        field = known[path, variant]
        if row["default"] != "(required)" and path.rpartition(".")[2] not in changed:
            assert field.setting.default == json.loads(row["default"]), path
    assert {field.path for field in fields() if field.since == "seed"} == {
        f"train.train_policy.remote_reward.{row['property']}"
        for row in table("fields_head_delta.tsv")
        if row["change"] == "removed"
    }


def test_fields_of_the_newest_version_are_known() -> None:
    known = {field.path.rpartition(".")[2]: field.setting.default for field in fields()}
    delta = [row for row in table("fields_head_delta.tsv") if row["definition"] != "RewardFunctionConfig"]
    added = {row["property"]: row["default"] for row in delta if row["change"] == "added"}
    assert len(added) > 30
    for name, default in added.items():
        assert known[name] == json.loads(default), name
    changed = {(row["definition"], row["property"]): row["default"] for row in delta if row["change"] == "default"}
    assert len(changed) == 3
    defaults = {field.path: field.setting.default for field in fields()}
    sections = {"DiffusersConfig": "policy.diffusers", "DistillationConfig": "distillation"}
    for (definition, name), default in changed.items():
        assert defaults[f"{sections[definition]}.{name}"] == json.loads(default.partition(" -> ")[2]), name


@pytest.mark.parametrize(
    ("tree", "problem"),
    [
        ({"train": {"epoch": "two"}}, 'train.epoch: expected a whole number, found "two" (text)'),
        ({"train": 3}, "train: expected a table, found 3 (whole number)"),
        ({"train": {"ckpt": {"save_mode": 1}}}, "train.ckpt.save_mode: expected text"),
        (of_policy(type="ppo"), 'train.train_policy.type: expected one of "grpo", "sft", found "ppo"'),
        (of_policy(type="grpo", variant="ppo"), "train.train_policy.variant: expected one of grpo, gspo, dapo"),
        (of_policy(type="grpo", reward_function=[]), "at least one reward function"),
        (of_policy(type="sft", enable_dp_load_balancing=True), "train.max_num_steps: required"),
        ({"train": {"optm_lr": {"model.visual": 1e-5}}}, "the key global"),
        ({"train": {"fsdp_offload": True}, "policy": {"parallelism": {"pp_size": 2}}}, "train.fsdp_offload"),
        ({"train": {}, "policy": {"model_name_or_path": ""}}, "policy.model_name_or_path: expected a model"),
        ({"train": {}, "policy": {"trainable_pattern": ["a"], "freeze_pattern": ["b"]}}, "leave one of them out"),
        ({"policy": {}}, "train: expected the table [train]"),
    ],
)  # fmt: skip
def test_refusals_name_the_setting(tree: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(tree)
    assert problem in str(caught.value)


def test_all_refusals_come_at_once() -> None:
    tree = {"train": {"max_num_steps": 0, "async_tp_enabled": True, "compile": False, "ckpt": {"save_freq": 0}}}
    with pytest.raises(ConfigError) as caught:
        resolve(tree)
    assert [line.partition(":")[0] for line in str(caught.value).splitlines()] == [
        "train.ckpt.save_freq",
        "train.async_tp_enabled",
        "train.max_num_steps",
    ]


def test_lists_and_texts_take_one_form() -> None:
    source = resolve({
        **of_policy(reward_function=["format", "gsm8k"], kl_beta=0.1, dataset={"split": ["a", "b"]}),
        "validation": {"reward_function": {"gsm8k": 2}},
    })  # fmt: skip
    assert source["train.train_policy.reward_function"] == {"format": 1.0, "gsm8k": 1.0}
    assert source["validation.reward_function"] == {"gsm8k": 2.0}
    assert source["train.train_policy.dataset.split"] == ["a", "b"]


def test_rewards_of_a_service_in_both_versions() -> None:
    new = resolve(of_policy(use_remote_reward=True, remote_reward={"reward_fns": [{"name": "hpsv2", "weight": 2}]}))
    (reward,) = new["train.train_policy.remote_reward.reward_fns"]
    assert reward == {"name": "hpsv2", "weight": 2.0, "score_key": "hpsv2", "clip_min": -5.0, "clip_max": 5.0}
    assert new["validation.remote_reward.reward_fns"] == [reward]
    old = resolve(of_policy(use_remote_reward=True, remote_reward={"reward_fn": {"ocr": 1.0}, "score_key": "a+b"}))
    assert old["train.train_policy.remote_reward.reward_fn"] == {"ocr": 1.0}
    assert not old.unknown


def test_what_on_policy_means_for_other_settings() -> None:
    source = resolve(
        {
            "train": {
                "coalesce_weight_sync": True,
                "train_policy": {"type": "grpo", "on_policy": True, "max_inflight_steps": 0},
            }
        }
    )
    assert source["train.train_policy.allowed_outdated_steps"] == 0
    assert source["train.train_policy.max_inflight_steps"] == 1
    assert source["train.coalesce_weight_sync"] is False


def test_unknown_keys_get_the_nearest_right_name() -> None:
    source = resolve({
        "redis": "12800",
        "train": {"train_policy": {"type": "grpo", "clip_ratio_c": 10.0, "system_prompt": "x"}},
        "policy": {
            "model_gradient_checkpointig": True,
            "diffusers": {"timestep_fraction": 0.99},
            "parallelism": {"cp_rotate_method": "allgather"},
        },
        "logging": {"report_mfu": True},
        "distillation": {"model_max_length": 4096},
    })  # fmt: skip
    assert set(source.given) == {"redis", "train.train_policy.type", "logging.report_mfu"}
    assert "policy.model_gradient_checkpointing" in source.unknown["policy.model_gradient_checkpointig"]
    assert "policy.diffusers.timesteps_fraction" in source.unknown["policy.diffusers.timestep_fraction"]
    assert "policy.model_max_length" in source.unknown["distillation.model_max_length"]
    assert 'type = "sft"' in source.unknown["train.train_policy.system_prompt"]
    assert "does not know it" in source.unknown["policy.parallelism.cp_rotate_method"]
    assert len(source.unknown) == 6


def test_the_tree_that_is_read_stays_as_it_is() -> None:
    tree = of_policy(type="grpo", reward_function="gsm8k", remote_reward={"reward_fns": [{"name": "ocr"}]})
    before = json.dumps(tree)
    resolve(tree)
    assert json.dumps(tree) == before
