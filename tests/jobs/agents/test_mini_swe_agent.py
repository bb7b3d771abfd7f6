"""mini-swe-agent, unchanged, at the policy's endpoint by each protocol that it has; `make agents` installs it."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from hpcrl.config import EnvironmentConfig, GeneratorConfig, InferenceEngineConfig, SamplingParams
from hpcrl.config.sections.environment import AgentConfig, SkyRLGymConfig
from hpcrl.data.group_file import read_group
from hpcrl.rollout.endpoint.server import serving
from hpcrl.rollout.generate import GroupGenerator
from hpcrl.rollout.group import Group
from hpcrl.rundir.layout import Run
from hpcrl.types import Prompt, Work
from tests.jobs.agents.test_packages import ENVIRONMENTS
from tests.jobs.agents.tool_game import make_model
from tests.jobs.small_run import curve, groups_in, hpcrl, logs_of
from tests.paths import CONFIGS
from tests.rollout.test_transcript import Script, chosen, ended, text, tokenizer_of, user

MINI = ENVIRONMENTS / "mini" / "bin"
AGENT = 'mini --yolo --exit-immediately --cost-limit 0 --model "$1" --model-class "$2" --task "Write 4 into answer.txt." --output run.json && grep -qx 4 answer.txt'
VARIABLES = {
    "MSWEA_CONFIGURED": "true",
    "MSWEA_SILENT_STARTUP": "1",
    "MSWEA_COST_TRACKING": "ignore_errors",
    "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
}


def calling(thought: str, command: str) -> str:
    call = json.dumps({"name": "bash", "arguments": {"command": command}})
    return f"<think>\n{thought}\n</think>\n\nI do it.\n<tool_call>\n{call}\n</tool_call>"


SAID = (
    calling("A file.", "echo 5 > answer.txt && cat answer.txt"),
    calling("It is wrong.", "sed -i 's/5/4/' answer.txt && cat answer.txt"),
    calling("Done.", "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"),
)


@pytest.fixture(autouse=True)
def variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**VARIABLES, "MSWEA_GLOBAL_CONFIG_DIR": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PATH", f"{os.environ['PATH']}:{MINI}")


@pytest.mark.agents
@pytest.mark.parametrize(
    ("model", "kind"),
    [("openai/m", "litellm"), ("anthropic/m", "litellm"), ("openai/m", "litellm_response")],
    ids=["chat completions", "messages", "responses"],
)
def test_its_turns_are_one_row(model: str, kind: str) -> None:
    """It repairs a file by tool calls; the row has the tokens of its answers, and the reward is its exit code."""
    tokenizer = tokenizer_of("thinking")
    engine: Any = Script([ended(tokenizer, one) for one in SAID])
    served = InferenceEngineConfig(enable_http_endpoint=True, served_model_name="m")
    config = GeneratorConfig(
        max_turns=9, max_input_length=1 << 16, inference_engine=served, sampling_params=SamplingParams()
    )
    agent = AgentConfig(command=["sh", "-c", AGENT, "sh", model, kind], reward="exit_code")
    environment = EnvironmentConfig(skyrl_gym=SkyRLGymConfig(agent=agent), timeout_seconds=300.0)

    async def generate() -> Group:
        async with serving(config, tokenizer, 0) as server:
            generator = GroupGenerator(engine, tokenizer, config, environment, server=server)
            return await generator.generate(Work("g", "train", Prompt("0", user("?"), "agent", {}), 1, seed=5))

    group = asyncio.run(generate())
    assert not group.failures, group.failures
    assert group.raw_rewards == [1.0]
    ((row,),) = group.rows
    assert chosen(row) == [token_id for one in SAID for token_id in ended(tokenizer, one)[0]]
    assert '"output": "5\\n"' in text(tokenizer, engine.prompts[1])


STEPS = int(os.environ.get("HPCRL_MINI_STEPS", "40"))
BASH = [{"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}]
CALL, CLOSE = '<tool_call>{"name": "bash", "arguments": {"command": "', '"}}</tool_call>'
WRITE, INTO, SUBMIT = "echo ", " > answer.txt", "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
OWN = {
    "agent": {"system_template": "system", "instance_template": "{{task}}", "step_limit": 2},
    "model": {"observation_template": "went", "format_error_template": "error"},
}
"""Short texts, of which each is one token of the tiny model."""


def taught() -> list[list[dict[str, Any]]]:
    """Return conversations that write each digit as often as any other, and submit."""

    def said(command: str) -> dict[str, Any]:
        return {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "bash", "arguments": {"command": command}}}]}  # fmt: skip

    opening = [{"role": "system", "content": "system"}, {"role": "user", "content": "task"}]
    result = {"role": "tool", "content": "went"}
    return [[*opening, said(f"{WRITE}{at % 10}{INTO}"), result, said(SUBMIT)] for at in range(8192)]


@pytest.mark.agents
def test_it_learns(place: Path) -> None:
    """A tiny policy that writes any digit into a file learns which one is wanted, by chat completions; HPCRL_MINI_STEPS: in so many steps."""
    phrases = ("system", "task", "went", "error", "bash", CALL, CLOSE, WRITE, INTO, SUBMIT)
    model = make_model(place / "model", phrases, taught(), BASH)
    (place / "mini.yaml").write_text(json.dumps(OWN))
    (place / "rows.jsonl").write_text(json.dumps({"prompt": user("task"), "env_class": "agent"}) + "\n")
    agent = f"mini --yolo --exit-immediately --cost-limit 0 --config {place}/mini.yaml --model openai/policy --task task --output run.json && grep -qx 4 answer.txt"
    settings = [
        *("trainer.run_name=mini", f"trainer.max_steps={STEPS}", f"trainer.epochs={STEPS}", "trainer.eval_interval=0"),
        *("trainer.train_batch_size=1", "trainer.policy_mini_batch_size=1", "generator.n_samples_per_prompt=8"),
        *(f"data.train_data={json.dumps([str(place / 'rows.jsonl')])}", "data.val_data=[]"),
        *(f"trainer.policy.model.path={model}", "generator.max_turns=2", "generator.max_input_length=48"),
        *("generator.sampling_params.max_generate_length=8", "environment.timeout_seconds=300"),
        f"environment.skyrl_gym.agent.command={json.dumps(['sh', '-c', agent])}",
        "environment.skyrl_gym.agent.reward=exit_code",
    ]
    config = CONFIGS / "guess_number_agent.toml"
    done = hpcrl("submit", str(config), "--local", "--follow", *settings, cwd=place, timeout=7200)
    run = Run(place / "runs" / "guess_number_agent" / "mini")
    assert done.returncode == 0, done.stderr + logs_of(run)
    assert set(curve(run, "generate/failed_samples").values()) <= {0.0}
    for path, meta in groups_in(run):
        rows = read_group(path, None, meta)
        assert meta.owners == list(range(8)), "both turns of a sample are one row"
        assert all(int((row.loss_mask[1:] > row.loss_mask[:-1]).sum()) <= 2 for row in rows)
    rewards = curve(run, "reward/avg_raw_reward")
    print(f"mini-swe-agent: {rewards}")
    assert STEPS < 40 or fmean(list(rewards.values())[-5:]) > 0.8
