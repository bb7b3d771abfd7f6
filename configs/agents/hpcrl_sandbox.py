"""Plays tasks of `verifiers` (0.4) in the sandbox of their sample: an environment and a harness of that package, by the id `hpcrl-sandbox`.

    python verifiers_agent.py '{"id": "hpcrl-sandbox", "taskset": {"id": "my-taskset"}}' > rows.jsonl

The task's own setup, rewards and metrics run their commands there, and find their files there. The harness asks the policy outside of it and
offers the tool `bash`, so that the image needs neither a network nor Python. docs/agents.md says more.
"""

from __future__ import annotations

import asyncio
import json
import posixpath
import re
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any

import verifiers.v1 as vf
from openai import AsyncOpenAI, BadRequestError
from sandbox_calls import SandboxRefusal, read, run, write
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.runtimes import BaseRuntimeInfo

__all__ = ["SandboxEnv", "SandboxHarness"]

ID = "hpcrl-sandbox"
DIRECTORY = "/app"  # verifiers' own, where a task names none
OVER = ("max_turns", "context_length_exceeded")  # codes of the endpoint that end the work of a sample
BASH: Any = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Run a command in bash; answers what it writes.",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
    },
}
_NO_NAME = re.compile(r"[^A-Za-z0-9._-]+")


class SandboxRuntime(vf.Runtime):
    """The sandbox of this sample, as verifiers uses a container. It ends with the sample.

    Args:
        data: of the task, whose working directory it has.
    """

    def __init__(self, data: vf.TaskData) -> None:
        super().__init__()
        # the kind of verifiers' own that it is most like: a container on this machine, whose network may be cut
        self.config = vf.DockerConfig(image=data.image or "", workdir=data.workdir or DIRECTORY)
        self.info = BaseRuntimeInfo(id=self.name)

    async def start(self) -> None:
        """Find the sandbox, and whether it has a network. Raises vf.SandboxError where there is none."""
        with _as_verifiers():
            await run(["mkdir", "-p", self._directory], {}, "/")
            interfaces = (await run(["cat", "/proc/net/dev"], {}, "/")).stdout.splitlines()[2:]
        if len(interfaces) == 1:  # the loopback; with none seen, tasks that want no network are refused
            self.config = self.config.model_copy(update={"allow": [], "block": ["*"]})

    async def run(self, argv: list[str], env: dict[str, str]) -> vf.ProgramResult:
        with _as_verifiers():
            ran = await run(argv, self.process_env(env), self._directory)
        return vf.ProgramResult(ran.code, ran.stdout.decode(errors="replace"), ran.stderr.decode(errors="replace"))

    async def run_background(self, argv: list[str], env: dict[str, str], log: str) -> None:
        await self.run(["sh", "-c", f"{shlex.join(argv)} > {shlex.quote(log)} 2>&1 &"], env)

    async def _read(self, path: str, max_bytes: int | None = None) -> bytes:
        with _as_verifiers():  # the sandbox's server refuses large files itself
            return (await read(posixpath.join(self._directory, path)))[:max_bytes]

    async def write(self, path: str, data: bytes) -> None:
        with _as_verifiers():
            await write(posixpath.join(self._directory, path), data)

    async def expose(self, port: int) -> str:
        raise vf.SandboxError(
            f"port {port}: no port of a sandbox is reached from outside; expected a task without servers in it"
        )

    @property
    def _directory(self) -> str:
        assert self.config.workdir, "of __init__"
        return self.config.workdir


class SandboxHarnessConfig(vf.HarnessConfig):
    """Settings of the harness."""

    command_seconds: float = 120.0
    """A command that takes longer is ended."""
    output_characters: int = 8000
    """Of what a command writes, its beginning and its end; the rest is left out."""


class SandboxHarness(vf.Harness[SandboxHarnessConfig]):
    """Asks the policy until it calls no tool, and runs what it calls in the task's runtime."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_RESUME = True
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,  # noqa: ARG002  part of the interface
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],  # noqa: ARG002
        data: vf.TaskData,
    ) -> vf.ProgramResult:
        system, prompt = self.resolve_prompt(data)
        asked = [vf.UserMessage(content=prompt)] if isinstance(prompt, str) else prompt or []
        messages: list[Any] = [{"role": "system", "content": system}] if system else []
        messages += [message_to_wire(message) for message in asked]
        async with AsyncOpenAI(base_url=endpoint, api_key=secret, timeout=None) as client:
            while calls := await _answer(client, ctx.model, messages):
                for call in calls:
                    said = await self._called(runtime, call.function.name, call.function.arguments)
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": said})
        return vf.ProgramResult(0, "", "")

    async def _called(self, runtime: vf.Runtime, name: str, written: str) -> str:
        """Return what a call of the policy answers."""
        try:
            command = json.loads(written)["command"]
        except (ValueError, KeyError, TypeError):
            command = None
        if name != "bash" or not isinstance(command, str) or "\0" in command:
            return 'error: expected a call of the tool bash with {"command": "…"}'
        try:
            async with asyncio.timeout(self.config.command_seconds):
                result = await runtime.run(["bash", "-c", command], {})
        except TimeoutError:
            return f"(the command was ended after {self.config.command_seconds:g} s)"
        text, half = result.stdout + result.stderr, self.config.output_characters // 2
        if len(text) > 2 * half:
            text = f"{text[:half]}\n({len(text) - 2 * half} characters are left out)\n{text[-half:]}"
        if result.exit_code == 0:
            return text
        unended = bool(text) and not text.endswith("\n")
        return text + "\n" * unended + f"(exit code {result.exit_code})"


class SandboxEnvConfig(vf.EnvConfig):
    """Settings of the environment."""

    agent: vf.AgentConfig = vf.AgentConfig(harness=SandboxHarnessConfig(id=ID), runtime=vf.SubprocessConfig())
    """The policy."""
    images: dict[str, str] = {}
    """Names of `hpcrl image ls` by patterns of a task's name or image; the first that matches counts. Else the name is the image's, with dashes."""


class SandboxEnv(vf.Env[SandboxEnvConfig]):
    """Lets an agent play each task in the sandbox of this sample."""

    def image_of(self, data: vf.TaskData) -> str:
        """Return the image that the row of a task names. Raises ValueError where there is none."""
        named = [one for one in (data.name, data.image) if one] or [""]
        for pattern, name in self.config.images.items():
            if any(fnmatchcase(one, pattern) for one in named):
                return name
        if not data.image:
            raise ValueError(f'task {data.idx} has no image; expected one in "images", such as {{"*": "python-3.12"}}')
        return _NO_NAME.sub("-", data.image).strip("-.")

    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        runtime = SandboxRuntime(task.data)
        await runtime.start()
        await agents.agent.run(task, runtime=runtime)


async def _answer(client: AsyncOpenAI, model: str, messages: list[Any]) -> list[Any]:
    """Add the policy's next answer to the messages; return the tools that it calls, none where it may say no more."""
    try:
        completion = await client.chat.completions.create(model=model, messages=messages, tools=[BASH])
    except BadRequestError as error:
        if any(code in str(error) for code in OVER):
            return []
        raise
    message = completion.choices[0].message
    messages.append(message.model_dump(exclude_none=True))
    return message.tool_calls or []


@contextmanager
def _as_verifiers() -> Iterator[None]:
    """Raise a refusal of the sandbox as verifiers' own error."""
    try:
        yield
    except SandboxRefusal as refusal:
        raise vf.SandboxError(str(refusal)) from refusal
