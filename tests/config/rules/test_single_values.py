"""Every number has the range that it needs, and is refused outside it with the range in the message."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import pytest

from hpcrl.config import AlgorithmConfig, Config
from hpcrl.config.fields import Setting, leaves, values
from hpcrl.config.load import nested
from hpcrl.config.root import make_config
from hpcrl.config.rules.single_values import out_of_range
from hpcrl.config.setting import Range, setting
from hpcrl.config.validate import build

BASE = {"data.train_data": ["t"], "data.val_data": ["v"], "trainer.policy.model.path": "m"}
NUMBERS = [one for one in leaves(Config) if {int, float} & set(one.types)]
EACH_RANGE = list({(one.facts.range, float in one.types): one for one in NUMBERS if one.facts.range}.values())
"""A setting for each range, of whole numbers and of others."""
# Every finite number means something: bounds of rewards, advantages and covariances, and intervals whose 0 or less means never.
UNBOUNDED = {
    "trainer.algorithm.advantage_clip_high",
    "trainer.algorithm.advantage_clip_low",
    "trainer.algorithm.clip_cov.clip_cov_lb",
    "trainer.algorithm.clip_cov.clip_cov_ub",
    "trainer.algorithm.dynamic_sampling.max_sample_batches",
    "trainer.algorithm.off_policy_correction.negative_sample_mask_delta",
    "trainer.ckpt_interval",
    "trainer.critic.optimizer_config.max_grad_norm",
    "trainer.distillation.self_teacher.success_reward",
    "trainer.eval_interval",
    "trainer.hf_save_interval",
    "trainer.max_ckpts_to_keep",
    "trainer.policy.diffusers.logit_mean",
    "trainer.policy.optimizer_config.max_grad_norm",
    "environment.remote_reward.clip_max",
    "environment.remote_reward.clip_min",
    "environment.remote_reward.scale",
    "environment.reward_model.clip_max",
    "environment.reward_model.clip_min",
    "environment.reward_model.weight",
}


def told(path: str, value: Any) -> list[str]:
    problems = list(out_of_range(values(build(Config, nested({**BASE, path: value})))))
    assert all(problem.path == path for problem in problems)
    return [problem.message for problem in problems]


def beside(allowed: Range, whole: bool) -> tuple[list[float], list[float]]:
    """Return numbers just inside and just outside a range."""
    inside, outside = [], []
    for bound, is_open, outward in ((allowed.low, allowed.low_open, -1), (allowed.high, allowed.high_open, 1)):
        step = 1 if whole else 0.25
        if math.isfinite(bound):
            (outside if is_open else inside).append(bound)
            outside.append(bound + outward * step)
            inside.append(bound - outward * step)
    return [value for value in inside if value in allowed], outside


@pytest.mark.parametrize("setting", EACH_RANGE, ids=lambda setting: setting.path)
def test_a_number_is_accepted_inside_its_range_and_refused_outside(setting: Setting) -> None:
    allowed, whole = setting.facts.range, float not in setting.types
    assert allowed
    inside, outside = beside(allowed, whole)
    for value in inside:
        assert told(setting.path, int(value) if whole else value) == []
    not_finite = [] if whole else [math.nan, math.inf, -math.inf]
    for value in [*outside, *not_finite]:
        (message,) = told(setting.path, int(value) if whole else value)
        assert f"found {value:g}" in message or "expected more than 0" in message
        assert f"expected {allowed}" in message or "expected more than 0" in message


@pytest.mark.parametrize(
    ("allowed", "text"),
    [
        (Range(1), "at least 1"),
        (Range(0, low_open=True), "more than 0"),
        (Range(0, 1), "at least 0 and at most 1"),
        (Range(0, 1, low_open=True, high_open=True), "more than 0 and less than 1"),
        (Range(), "a finite number"),
    ],
)
def test_a_range_says_what_it_is(allowed: Range, text: str) -> None:
    assert str(allowed) == text


def test_every_number_has_a_range_or_means_something_everywhere() -> None:
    assert {one.path for one in NUMBERS if not (one.facts.range or one.facts.check)} == UNBOUNDED
    assert [one.path for one in leaves(Config) if one.facts.range and one not in NUMBERS] == []


@pytest.mark.parametrize(
    ("name", "value"),
    [("time_minutes", 4), ("nodes", "4-2"), ("partition", "a\n#SBATCH --exclusive"), ("gpus_per_node", "8")],
)
def test_sections_whose_names_are_the_users_are_looked_at(name: str, value: Any) -> None:
    problems = list(out_of_range(values(build(Config, nested({**BASE, f"slurm.requests.mine.{name}": value})))))
    assert [problem.path for problem in problems] == [f"slurm.requests.mine.{name}"]


@pytest.mark.parametrize("path", sorted(UNBOUNDED))
def test_what_has_no_range_is_finite_nevertheless(path: str) -> None:
    (setting,) = (setting for setting in leaves(Config) if setting.path == path)
    assert told(path, -7) == told(path, 0) == told(path, 7) == []
    if float in setting.types:
        assert told(path, math.nan) == ["expected a finite number, found nan"]


OTHERS: list[tuple[str, list[Any], dict[str, Any]]] = [
    ("generator.sampling_params.top_k", [-1, 1], {"expected -1 (all) or at least 1, found 0": 0}),
    ("generator.eval_sampling_params.top_k", [-1, 5], {"expected -1 (all) or at least 1, found -2": -2}),
    ("trainer.policy.fsdp_config.fsdp_size", [-1, 2], {"expected -1 (all) or at least 1, found 0": 0}),
    ("generator.sampling_params.temperature", [0.1], {"0 makes all samples of a group equal": 0.0}),
    ("generator.sampling_params.stop", [["a"]], {"expected texts that are not empty": ["a", ""]}),
    (
        "trainer.policy.fsdp_config.reshard_after_forward",
        [True, False, 1],
        {"expected true, false or at least 1 rank": 0},
    ),
    ("trainer.policy.diffusers.inference_size", [[1, 1]], {"expected height and width in pixels, found [8]": [8]}),
    ("trainer.policy.diffusers.inference_size", [[64, 32]], {"expected height and width in pixels": [8, 0]}),
    ("trainer.policy.model.lora.rank_pattern", [{"q": 1}], {"expected ranks of at least 1": {"q": 0}}),
    ("trainer.policy.model.lora.alpha_pattern", [{"q": 1.0}], {"expected finite numbers, found nan": {"q": math.nan}}),
    ("environment.reward_function", [{"format": -1.0}], {"expected finite numbers, found inf": {"format": math.inf}}),
    (
        "slurm.python",
        [None, "/a b/bin/python"],
        {"an absolute path of": "~/env/bin/python", "found 'python3'": "python3"},
    ),
    ("trainer.project_name", ["a.b-c_1"], {"expected a directory name": ".."}),
    ("trainer.run_name", ["r"], {"expected a directory name": "a/b"}),
    (
        "trainer.policy.optimizer_config.adam_betas",
        [[0.0, 0.999]],
        {"expected two numbers from 0 to below 1, found [0.9]": [0.9], "found [0.9, 1.0]": [0.9, 1.0]},
    ),
]


@pytest.mark.parametrize(("path", "right", "wrong"), OTHERS, ids=[path for path, _, _ in OTHERS])
def test_other_values(path: str, right: list[Any], wrong: dict[str, Any]) -> None:
    for value in right:
        assert told(path, value) == []
    for words, value in wrong.items():
        (message,) = told(path, value)
        assert words in message


SLURM_TEXTS = [
    one
    for one in leaves(Config)
    if one.path.startswith("slurm.") and not one.entry and (one.is_free or not {str, list[str]}.isdisjoint(one.types))
]


@pytest.mark.parametrize("setting", SLURM_TEXTS, ids=lambda setting: setting.path)
def test_texts_of_batch_scripts_have_one_line(setting: Setting) -> None:
    if setting.path in (
        "slurm.setup",
        "slurm.gpus_per_node",
        "slurm.nodes",
    ):  # lines of a shell; these have forms of their own
        return
    for text in ("a\n#SBATCH --exclusive", "a\r", "\x1b[2J", "a\u2028b", "a\x85b"):
        wrong = {"comment": text} if setting.is_free else [text] if str not in setting.types else text
        (message,) = told(setting.path, wrong)
        assert "one line without control characters, found" in message
        assert message.isprintable()


@pytest.mark.parametrize("name", ["a\nb", "", "-x", "nodes=9 --x", "a\u2028"])
@pytest.mark.parametrize(
    "section",
    ["slurm", "slurm.elastic", "slurm.elastic_scorers.teacher", "slurm.upload", "slurm.evaluation", "slurm.sandboxes"],
)
def test_names_of_sbatch_options(section: str, name: str) -> None:
    assert told(f"{section}.extra", {"mail-type": "END", "mail_user": "me@x", "reservation": True, "nice": 5}) == []
    (message,) = told(f"{section}.extra", {name: "x"})
    assert "expected long names of sbatch options" in message


@dataclass(frozen=True, kw_only=True)
class OwnAlgorithm(AlgorithmConfig):
    seed: int = -1
    share: float = setting(2.0, range=Range(0, 1))


def test_what_a_subclass_adds_may_have_any_value() -> None:
    own = build(make_config(algorithm_cls=OwnAlgorithm), nested(BASE))
    assert list(out_of_range(values(own))) == []
    wrong = replace(own, trainer=replace(own.trainer, epochs=0))
    assert [problem.path for problem in out_of_range(values(wrong))] == ["trainer.epochs"]
