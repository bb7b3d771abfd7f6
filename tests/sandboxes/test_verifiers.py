"""A taskset of verifiers, unchanged, whose commands and tests run in a sandbox by configs/agents/hpcrl_sandbox.py; `make agents` installs it."""

from __future__ import annotations

import asyncio
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from hpcrl.config import EnvironmentConfig, GeneratorConfig, InferenceEngineConfig, SamplingParams
from hpcrl.config.sections.environment import AgentConfig, SkyRLGymConfig
from hpcrl.rollout.endpoint.server import serving as policy_server
from hpcrl.rollout.generate import GroupGenerator
from hpcrl.rollout.group import Group
from hpcrl.rollout.own_services import sandboxes_of
from hpcrl.rundir.layout import Run
from hpcrl.rundir.process_names import worker_name
from hpcrl.types import Prompt, Work
from tests.jobs.agents.test_mini_swe_agent import calling, chosen
from tests.jobs.agents.test_packages import ENVIRONMENTS
from tests.paths import CONFIGS
from tests.rollout.test_transcript import Script, ended, text, tokenizer_of
from tests.sandboxes.test_mini_swe_agent import run

__all__ = ["run"]

PROGRAM = [str(ENVIRONMENTS / "verifiers" / "bin" / "python"), str(CONFIGS / "agents" / "verifiers_agent.py")]
SETTINGS = {"id": "hpcrl-sandbox", "taskset": {"id": "correct-file-v1"}, "images": {"tiny:*": "tiny"}}
SAID = (
    calling("A file.", "pwd; cat $NAME; exit 3"),
    calling("It is wrong.", 'echo "it\'s 4" > answer.txt'),
    "Done.",
)


@pytest.mark.agents
@pytest.mark.parametrize(("turns", "reward"), [(9, 1.0), (1, 0.0)])
def test_its_commands_and_tests_run_in_a_sandbox(
    run: Run, monkeypatch: pytest.MonkeyPatch, turns: int, reward: float
) -> None:
    """It corrects a file that is in the sandbox alone, and the reward is the taskset's own, also where its turns are over before."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent / "of_verifiers"))
    made = subprocess.run([*PROGRAM, json.dumps(SETTINGS)], capture_output=True, text=True, check=True)
    row = json.loads(made.stdout)
    assert row["image"] == "tiny"
    tokenizer = tokenizer_of("thinking")
    engine: Any = Script([ended(tokenizer, one) for one in SAID])
    served = InferenceEngineConfig(enable_http_endpoint=True, served_model_name="m")
    config = GeneratorConfig(
        max_turns=turns, max_input_length=1 << 16, inference_engine=served, sampling_params=SamplingParams()
    )
    environment = EnvironmentConfig(
        skyrl_gym=SkyRLGymConfig(agent=AgentConfig(command=PROGRAM)), timeout_seconds=1200.0
    )

    async def generate() -> Group:
        async with policy_server(config, tokenizer, 0) as server:
            sandboxes = sandboxes_of(run, 1, 1, worker_name(0))
            generator = GroupGenerator(engine, tokenizer, config, environment, server=server, sandboxes=sandboxes)
            return await generator.generate(Work("g", "train", Prompt("0", row.pop("prompt"), "agent", row), 1, seed=5))

    group = asyncio.run(generate())
    assert not group.failures, group.failures
    assert group.raw_rewards == [reward]
    ((one,),) = group.rows
    said = SAID[:turns]
    assert chosen(one) == [token_id for answer in said for token_id in ended(tokenizer, answer)[0]]
    if turns > 1:
        assert "/repo\n5\n(exit code 3)" in text(tokenizer, engine.prompts[1])
    assert one.env_metrics == pytest.approx({"background": 1.0, "length": float(len("it's 4\n" if reward else "5\n"))})
