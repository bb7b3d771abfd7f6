"""Environments of NeMo-Gym, unchanged, with the policy behind them; `make agents` installs the package."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from statistics import fmean
from threading import Thread
from typing import Any

import httpx
import pytest

from hpcrl.config import EnvironmentConfig, GeneratorConfig, InferenceEngineConfig, SamplingParams
from hpcrl.config.sections.environment import AgentConfig, AgentServiceConfig, SkyRLGymConfig
from hpcrl.data.group_file import read_group
from hpcrl.rollout.endpoint.server import serving
from hpcrl.rollout.generate import GroupGenerator
from hpcrl.rollout.group import Group
from hpcrl.rundir.layout import Run
from hpcrl.types import Prompt, Work
from tests.jobs.agents.test_agents import running
from tests.jobs.agents.test_packages import ENVIRONMENTS
from tests.jobs.agents.tool_game import make_model
from tests.jobs.small_run import curve, groups_in, hpcrl, logs_of
from tests.paths import CONFIGS
from tests.rollout.test_transcript import Script, chosen, ended, text, tokenizer_of

PYTHON = ENVIRONMENTS / "nemo_gym" / "bin" / "python"
SERVICE = CONFIGS / "agents" / "nemo_gym_service.py"
COUNTER = "resources_servers/example_session_state_mgmt"
STEPS = int(os.environ.get("HPCRL_NEMO_GYM_STEPS", "40"))


@pytest.fixture(scope="module")
def counter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AgentServiceConfig]:
    """A service with the package's counter, which tools increment, and its simple agent."""
    token = tmp_path_factory.mktemp("service") / "token"
    token.write_text("secret")
    token.chmod(0o600)
    configuration = f"{COUNTER}/configs/example_session_state_mgmt.yaml"
    with running(SERVICE, PYTHON, "--token-file", str(token), configuration) as url:
        yield AgentServiceConfig(url=url, token_file=str(token))


def rows_of(path: Path) -> list[dict[str, Any]]:
    made = subprocess.run([PYTHON, SERVICE, "--rows", path], capture_output=True, text=True, check=True)
    return [json.loads(line) for line in made.stdout.splitlines()]


def played(
    service: AgentServiceConfig, row: dict[str, Any], said: list[str], max_turns: int, samples: int = 1
) -> tuple[Group, Any, Any]:
    """Return the samples of a row in which the policy says texts, the engine, and the tokenizer."""
    tokenizer = tokenizer_of("thinking")
    engine: Any = Script([ended(tokenizer, one) for one in said])
    served = InferenceEngineConfig(enable_http_endpoint=True, served_model_name="m")
    config = GeneratorConfig(
        max_turns=max_turns, max_input_length=1 << 16, inference_engine=served, sampling_params=SamplingParams()
    )
    agent = AgentConfig(service=service)
    environment = EnvironmentConfig(skyrl_gym=SkyRLGymConfig(agent=agent), timeout_seconds=300.0)
    prompt = Prompt("0", row["prompt"], row["env_class"], {"nemo_gym": row["nemo_gym"]})

    async def generate() -> Group:
        async with serving(config, tokenizer, 0) as server:
            generator = GroupGenerator(engine, tokenizer, config, environment, server=server)
            return await generator.generate(Work("g", "train", prompt, samples, seed=5))

    return asyncio.run(generate()), engine, tokenizer


def calling(thought: str, *calls: tuple[str, dict[str, Any]]) -> str:
    written = (json.dumps({"name": name, "arguments": arguments}) for name, arguments in calls)
    return f"<think>\n{thought}\n</think>\n\n" + "\n".join(f"<tool_call>\n{one}\n</tool_call>" for one in written)


SAID = [
    calling("Both.", ("increment_counter", {"count": 1}), ("increment_counter", {"count": 2})),
    calling("Now look.", ("get_counter_value", {})),
    "<think>\nIt is 6.\n</think>\n\nThe count is 6.",
]


@pytest.mark.agents
@pytest.mark.parametrize(
    ("said", "max_turns", "reward"),
    [(SAID, 9, 1.0), ([calling("One.", ("increment_counter", {"count": 1}))], 1, 0.0)],
    ids=["to its end", "no more turns"],
)
def test_its_own_row_is_played(counter: AgentServiceConfig, said: list[str], max_turns: int, reward: float) -> None:
    """The package's agent, tools and `verify`: one row has the tokens of all answers, and where turns end what was done is verified."""
    (path,) = PYTHON.parents[1].glob(f"lib/python3*/site-packages/{COUNTER}/data/example.jsonl")
    row = rows_of(path)[0]
    assert row["prompt"] == [{"role": "user", "content": "add 1 then add 2 then get the count"}]
    group, engine, tokenizer = played(counter, row, said, max_turns)
    assert not group.failures, group.failures
    assert group.raw_rewards == [reward]
    ((sample,),) = group.rows
    assert chosen(sample) == [token_id for one in said for token_id in ended(tokenizer, one)[0]]
    shown = text(tokenizer, engine.prompts[-1])
    assert ('{"count":6}' in shown) == (reward == 1.0)


@pytest.mark.agents
def test_a_row_that_its_server_refuses_fails_the_sample(counter: AgentServiceConfig) -> None:
    """The error of the package's server is that of the sample."""
    asked = {"input": "add 1", "tools": []}
    row = {"prompt": [{"role": "user", "content": "add 1"}], "env_class": "agent"}
    group, _, _ = played(counter, {**row, "nemo_gym": {"responses_create_params": asked}}, [], 1)
    assert "initial_count" in str(group.failures)


@pytest.mark.agents
def test_who_lacks_the_token_is_refused(counter: AgentServiceConfig) -> None:
    """Else anybody on the node could have it send requests anywhere."""
    assert counter.url
    assert httpx.post(counter.url, json={}, headers={"authorization": "Bearer other"}, timeout=60).status_code == 401


@pytest.mark.agents
def test_samples_wait_where_files_are_few() -> None:
    """Each has listeners and connections of its own; without a file left, none would go on."""
    limited = ("-c", 'ulimit -n 96; exec "$0" "$@"', str(PYTHON), str(SERVICE))
    configuration = f"{COUNTER}/configs/example_session_state_mgmt.yaml"
    asked = {"responses_create_params": {"input": "add 1"}, "initial_count": 3, "expected_count": 3}
    row = {"prompt": [{"role": "user", "content": "add 1"}], "env_class": "agent", "nemo_gym": asked}
    with running(Path(limited[0]), "sh", *limited[1:], configuration) as url:
        group, _, _ = played(AgentServiceConfig(url=url), row, ["It is 3."] * 24, 1, 24)
    assert not group.failures, group.failures
    assert len(group.raw_rewards) == 24


class Over(BaseHTTPRequestHandler):
    """An endpoint whose session is over."""

    asked = 0

    def do_POST(self) -> None:
        Over.asked += 1
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(429)
        self.send_header("content-length", "0")
        self.end_headers()


@pytest.mark.agents
def test_an_agent_ends_with_its_samples_request(counter: AgentServiceConfig) -> None:
    """The package asks again and again where it finds no endpoint, or one that answers 429."""
    assert counter.url
    assert counter.token_file
    asked = {"responses_create_params": {"input": "add 1"}, "initial_count": 3, "expected_count": 3}
    key = {"authorization": f"Bearer {Path(counter.token_file).read_text()}"}
    with ThreadingHTTPServer(("127.0.0.1", 0), Over) as endpoint:
        Thread(target=endpoint.serve_forever, daemon=True).start()
        policy = {"base_url": f"http://127.0.0.1:{endpoint.server_port}/v1", "api_key": "k", "model": "m"}
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(counter.url, json={**policy, "row": {"nemo_gym": asked}}, headers=key, timeout=10)
        assert Over.asked > 0, "the agent did not ask"
        deadline, before = time.monotonic() + 120, -1
        while Over.asked != before:
            assert time.monotonic() < deadline, "the agent goes on"
            before = Over.asked
            time.sleep(6)
        endpoint.shutdown()


@pytest.mark.agents
def test_a_judge_that_is_the_policy_is_refused(tmp_path: Path) -> None:
    """A server of all samples cannot ask the policy of one."""
    server = {"entrypoint": "app.py", "domain": "agent"}
    judge = {"judge_model_server": {"type": "responses_api_models", "name": "policy_model"}}
    agent = {"entrypoint": "app.py", "resources_server": {"type": "resources_servers", "name": "judged"}}
    config = {
        "judged": {"resources_servers": {"example_session_state_mgmt": {**server, **judge}}},
        "agent": {"responses_api_agents": {"simple_agent": {**agent, "model_server": judge["judge_model_server"]}}},
    }
    (tmp_path / "judged.yaml").write_text(json.dumps(config))
    done = subprocess.run([PYTHON, SERVICE, tmp_path / "judged.yaml"], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "judged asks policy_model" in done.stderr


@pytest.mark.agents
def test_the_policy_learns(place: Path, counter: AgentServiceConfig) -> None:
    """A tiny policy that adds any digit learns which one is wanted; HPCRL_NEMO_GYM_STEPS: in so many steps."""
    opened, closed, went = (
        '<tool_call>{"name": "increment_counter", "arguments": {"count": ',
        "}}</tool_call>",
        '{"success":true}',
    )
    tool = {"name": "increment_counter", "parameters": {"type": "object", "properties": {"count": {"type": "integer"}}}}
    phrases = ("task", "increment_counter", "done", opened, closed, went)

    def taught(digit: int) -> list[dict[str, Any]]:
        call = {"function": {"name": "increment_counter", "arguments": {"count": digit}}}
        said = {"role": "assistant", "content": "", "tool_calls": [call]}
        result = {"role": "tool", "content": went}
        return [{"role": "user", "content": "task"}, said, result, {"role": "assistant", "content": "done"}]

    model = make_model(
        place / "model", phrases, [taught(at % 10) for at in range(8192)], [{"type": "function", "function": tool}]
    )
    asked = {"input": [{"role": "user", "content": "task"}], "tools": [{"type": "function", "strict": True, **tool}]}
    (place / "nemo.jsonl").write_text(
        json.dumps({"responses_create_params": asked, "initial_count": 3, "expected_count": 7})
    )
    (place / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows_of(place / "nemo.jsonl")))
    settings = [
        *("trainer.run_name=nemo", f"trainer.max_steps={STEPS}", f"trainer.epochs={STEPS}", "trainer.eval_interval=0"),
        *("trainer.train_batch_size=1", "trainer.policy_mini_batch_size=1", "generator.n_samples_per_prompt=8"),
        *(f"data.train_data={json.dumps([str(place / 'rows.jsonl')])}", "data.val_data=[]"),
        *(f"trainer.policy.model.path={model}", "generator.max_turns=2", "generator.max_input_length=48"),
        *("generator.sampling_params.max_generate_length=8", "environment.timeout_seconds=600"),
        *("environment.skyrl_gym.agent.command=[]", f"environment.skyrl_gym.agent.service.url={counter.url}"),
        f"environment.skyrl_gym.agent.service.token_file={counter.token_file}",
    ]
    config = CONFIGS / "guess_number_agent.toml"
    done = hpcrl("submit", str(config), "--local", "--follow", *settings, cwd=place, timeout=7200)
    run = Run(place / "runs" / "guess_number_agent" / "nemo")
    assert done.returncode == 0, done.stderr + logs_of(run)
    assert set(curve(run, "generate/failed_samples").values()) <= {0.0}
    for path, meta in groups_in(run):
        rows = read_group(path, None, meta)
        assert meta.owners == list(range(8)), "both turns of a sample are one row"
        assert all(int((row.loss_mask[1:] > row.loss_mask[:-1]).sum()) <= 2 for row in rows)
    rewards = curve(run, "reward/avg_raw_reward")
    print(f"NeMo-Gym's counter: {rewards}")
    assert STEPS < 40 or fmean(list(rewards.values())[-10:]) > 0.6, "a digit of ten is right by chance"


def test_a_python_without_the_package_is_named() -> None:
    """hpcrl's own has none: the package wants another."""
    done = subprocess.run([sys.executable, "-S", SERVICE], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert f"{sys.executable} has no nemo-gym" in done.stderr
