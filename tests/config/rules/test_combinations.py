"""Every rule about combinations refuses what cannot work, by path and with the remedy, and nothing that can."""

from __future__ import annotations

import ast
import inspect
import sys
from types import FrameType
from typing import Any

import pytest

from hpcrl.config import Config
from hpcrl.config.errors import Problem
from hpcrl.config.fields import leaves
from hpcrl.config.load import nested
from hpcrl.config.rules import (
    agents,
    determinism,
    generation,
    lending,
    ranks,
    scorers,
    training,
    unused_settings,
    uploads,
)
from hpcrl.config.rules import alerts as alerting
from hpcrl.config.rules import cluster as site
from hpcrl.config.rules import combinations as rules
from hpcrl.config.rules import megatron_layouts as layouts
from hpcrl.config.rules import rewards as scoring
from hpcrl.config.rules.combinations import impossible
from hpcrl.config.validate import build
from hpcrl.engines.vllm import rules as vllm
from hpcrl.families.diffusion import rules as diffusion
from hpcrl.families.pi05 import rules as pi05
from hpcrl.families.robots import rules as vla
from tests.config.rules.cosmos_cases import COSMOS
from tests.config.rules.determinism_cases import OF_BITS
from tests.config.rules.engine_cases import AGENTS, ENGINES
from tests.config.rules.families.diffusion_cases import OF_PICTURES, PICTURES
from tests.config.rules.families.pi05_cases import FLOWS, OF_FLOWS
from tests.config.rules.families.vla_cases import ACTS, OF_ROBOTS
from tests.config.rules.mode_cases import OF_ALGORITHMS, OF_MODES
from tests.config.rules.outward_cases import OF_ALERTS, OF_UPLOADS
from tests.config.rules.own_cases import OURS
from tests.config.rules.scorer_cases import OF_SCORERS
from tests.config.rules.skyrl_cases import ALGORITHM, BASE, COLOCATED, CRITIC, ENGINE, PLACEMENT, SKYRL, TAUGHT, Case
from tests.config.rules.test_megatron_layouts import CASES as LAYOUTS
from tests.config.rules.test_training import CASES as TRAINER


def found(settings: dict[str, Any]) -> list[Problem]:
    return impossible(build(Config, nested({**BASE, **settings})))


MODULES = (
    rules,
    agents,
    determinism,
    alerting,
    diffusion,
    unused_settings,
    ranks,
    layouts,
    generation,
    lending,
    scoring,
    scorers,
    site,
    training,
    uploads,
    pi05,
    vla,
    vllm,
)


CASES = [
    *SKYRL,
    *COSMOS,
    *ENGINES,
    *OF_MODES,
    *OF_ALGORITHMS,
    *OF_SCORERS,
    *OF_ALERTS,
    *OURS,
    *OF_BITS,
    *OF_UPLOADS,
    *AGENTS,
    *OF_PICTURES,
    *OF_ROBOTS,
    *OF_FLOWS,
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.rule)
def test_a_rule_refuses_what_cannot_work_and_only_that(case: Case) -> None:
    told = [problem for problem in found(case.wrong) if problem.path == case.path]
    assert any(case.words in problem.message for problem in told), found(case.wrong)
    assert found(case.right) == []


def test_a_single_mistake_is_one_problem() -> None:
    for case in CASES:
        assert len(found(case.wrong)) == 1, (case.rule, found(case.wrong))


def test_defaults_are_possible() -> None:
    assert found({}) == []


def test_problems_of_several_rules_are_told_at_once() -> None:
    settings = {
        "data.train_data": [],
        "trainer.resume_mode": "from_path",
        f"{ALGORITHM}.advantage_estimator": "gae",
        f"{ENGINE}.num_engines": 2,
        **COLOCATED,
    }
    assert {problem.path for problem in found(settings)} == {
        "data.train_data",
        "trainer.resume_path",
        "trainer.critic.model.path",
        f"{PLACEMENT}.colocate_all",
    }


def test_values_out_of_range_do_not_hide_rules_that_need_no_arithmetic() -> None:
    settings = {
        "trainer.epochs": 0,
        "trainer.policy_mini_batch_size": 0,
        "trainer.max_ckpts_to_keep": 0,
        "data.train_data": [],
    }
    assert {problem.path for problem in found(settings)} == set(settings)


@pytest.mark.parametrize("value", [0, -1])
@pytest.mark.parametrize(
    "base",
    [
        {**CRITIC, **COLOCATED},
        ACTS,
        FLOWS,
        PICTURES,
        {**TAUGHT, f"{PLACEMENT}.colocate_policy_ref": False, "slurm.sandboxes.per_rollout_node": 4},
    ],
)
def test_no_rule_stumbles_over_a_value_out_of_range(base: dict[str, Any], value: int) -> None:
    """Every whole number at a value that may divide, multiply or count: problems, never a ZeroDivisionError."""
    numbers = [setting.path for setting in leaves(Config) if int in setting.types]
    for path in numbers:
        found({**base, path: value})
    assert len(found({**base, **dict.fromkeys(numbers, value)})) > 50


def test_no_rule_that_can_be_violated_goes_untested() -> None:
    """Every `yield Problem(…)` of the modules of rules is reached by a case."""
    reached: set[tuple[str, int]] = set()

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code.co_filename in files:
            if event == "line":
                reached.add((frame.f_code.co_filename, frame.f_lineno))
            return trace
        return None

    files = {inspect.getsourcefile(module) for module in MODULES}
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        for wrong in [*(case.wrong for case in CASES), *(case[0] for case in [*TRAINER, *LAYOUTS])]:
            found(wrong)
    finally:
        sys.settrace(before)
    untold = [
        f"{module.__name__}: {ast.unparse(node)}"
        for module in MODULES
        for node in ast.walk(ast.parse(inspect.getsource(module)))
        if isinstance(node, ast.Yield) and (inspect.getsourcefile(module), node.lineno) not in reached
    ]
    assert not untold
