"""mini-swe-agent, unchanged, whose commands run in a sandbox by the configuration of docs/agents.md; `make agents` installs it."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
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
from hpcrl.sandboxes.images import ImageStore
from hpcrl.types import Prompt, Work
from tests.jobs.agents.test_mini_swe_agent import MINI, VARIABLES, calling
from tests.paths import ROOT
from tests.rollout.test_transcript import Script, ended, text, tokenizer_of
from tests.rollout.test_transcript import user as asked
from tests.sandboxes.material import make_rootfs, ordinary
from tests.sandboxes.test_job import make_run, serves, serving, until

AGENT = 'mini --yolo --exit-immediately --cost-limit 0 --config mini.yaml --config "$0" --model openai/m --task "Correct /repo/answer.txt." --output run.json'
ROW = {
    "image": "tiny",
    "directory": "/repo",
    "files": {"/repo/answer.txt": "5\n"},
    "tests": {"command": 'test "$(cat answer.txt)" = 4', "seconds": 60},
}
SAID = (
    calling("A file.", "pwd; cat answer.txt"),
    calling("It is wrong.", "echo 4 > answer.txt && ls /proc/1/root"),
    calling("Done.", "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"),
)


@pytest.fixture
def run() -> Iterator[Run]:
    """A run whose sandboxes an ordinary user's process serves; the test stays who it is, as the Python of mini-swe-agent may be root's."""
    with ExitStack() as stack:
        with pytest.MonkeyPatch.context() as patch, ordinary(patch):
            folder = Path(tempfile.mkdtemp(prefix="hpcrl-test-sandbox-", dir="/tmp"))
            run = make_run(folder)
            ImageStore(run.root).add("tiny", make_rootfs(folder / "rootfs", ["bash"]), temporary=folder)
            process = stack.enter_context(serving(run, folder / "temporary"))
            until(lambda: serves(run, process), process)
        yield run
    shutil.rmtree(folder)


@pytest.mark.agents
def test_its_commands_run_in_a_sandbox(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It corrects a file that is in the sandbox alone; the tests of the row decide."""
    for name, value in {**VARIABLES, "MSWEA_GLOBAL_CONFIG_DIR": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PATH", f"{os.environ['PATH']}:{MINI}")
    (page,) = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs" / "agents.md").read_text(encoding="utf-8"), re.DOTALL)
    (tmp_path / "box.yaml").write_text(f"{page}  timeout: 300\n")  # other tests have the cores
    tokenizer = tokenizer_of("thinking")
    engine: Any = Script([ended(tokenizer, one) for one in SAID])
    served = InferenceEngineConfig(enable_http_endpoint=True, served_model_name="m")
    config = GeneratorConfig(
        max_turns=9, max_input_length=1 << 16, inference_engine=served, sampling_params=SamplingParams()
    )
    agent = AgentConfig(command=["sh", "-c", AGENT, str(tmp_path / "box.yaml")])
    environment = EnvironmentConfig(skyrl_gym=SkyRLGymConfig(agent=agent), timeout_seconds=1200.0)

    async def generate() -> Group:
        async with policy_server(config, tokenizer, 0) as server:
            generator = GroupGenerator(
                engine, tokenizer, config, environment, server=server, sandboxes=sandboxes_of(run, 1, 1, worker_name(0))
            )
            return await generator.generate(Work("g", "train", Prompt("0", asked("?"), "agent", ROW), 1, seed=5))

    group = asyncio.run(generate())
    assert not group.failures, group.failures
    assert group.raw_rewards == [1.0]
    assert "/repo\\n5\\n" in text(tokenizer, engine.prompts[1])
