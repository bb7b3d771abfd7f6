"""Rules about environments that call the policy themselves, their endpoint, and simulated robots."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import urlsplit

from hpcrl.config.errors import Problem
from hpcrl.config.family import family_of
from hpcrl.config.import_path import misnamed
from hpcrl.config.rules.cluster import mount_problems
from hpcrl.config.sections.environment import MOST_SIMULATORS, SIMULATORS, AgentConfig
from hpcrl.config.sections.functions import REWARDS
from hpcrl.config.sections.tree import ConfigTree

_ENDPOINT = "generator.inference_engine.enable_http_endpoint"
_AGENT = "environment.skyrl_gym.agent"
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_OTHERS = "overlong", "by_data_source"
"""Rewards of a response that judge no whole conversation."""
_OF_MESSAGES = tuple(name for name in REWARDS if name not in _OTHERS)


def endpoint(config: ConfigTree) -> Iterator[Problem]:
    engine = config.generator.inference_engine
    if engine.http_endpoint_host in ("", "::", "0.0.0.0"):
        yield Problem(
            "generator.inference_engine.http_endpoint_host",
            f'expected one address of the nodes, such as "127.0.0.1", found "{engine.http_endpoint_host}", which stands for all of them',
        )
    if engine.enable_http_endpoint and config.environment.skyrl_gym.max_env_workers == 0:
        yield Problem(
            "environment.skyrl_gym.max_env_workers", f"{_ENDPOINT} needs threads in which environments ask; raise it"
        )


def agents(config: ConfigTree) -> Iterator[Problem]:
    agent, generator = config.environment.skyrl_gym.agent, config.generator
    for name in agent.reward_function:
        yield from misnamed(f"{_AGENT}.reward_function", name, _OF_MESSAGES, "names of")
    if agent.reward_function and not any(agent.reward_function.values()):
        yield Problem(
            f"{_AGENT}.reward_function",
            "every weight is 0, and so would be every reward; give one of them another weight",
        )
    if agent.reward_function and agent.reward == "exit_code":
        yield Problem(f"{_AGENT}.reward", "reward_function judges, not the exit code; leave one of them out")
    yield from _service(config)
    yield from _container(agent)
    if config.environment.env_class != "agent":
        return
    if not agent.command and not agent.service.url:
        yield Problem(
            f"{_AGENT}.command",
            'required by agent: the program, such as ["python", "./agent.py"]; or set service.url to have a service asked',
        )
    if not generator.inference_engine.enable_http_endpoint:
        yield Problem(_ENDPOINT, "required by agent, whose programs ask the policy there; set it to true")
    if generator.step_wise_trajectories:
        yield Problem(
            "generator.step_wise_trajectories",
            "has no effect with agent: rows are the conversations that its program has; leave it out",
        )
    if not generator.use_conversation_multi_turn:
        yield Problem(
            "generator.use_conversation_multi_turn", "agent asks with messages, each of its own; leave it out"
        )


def robots(config: ConfigTree) -> Iterator[Problem]:
    robot, section = config.environment.skyrl_gym.robot, "environment.skyrl_gym.robot"
    if robot.simulator is None:
        if config.environment.env_class == "robot":
            yield Problem(
                f"{section}.simulator",
                'required by robot: what is to be simulated, such as "gymnasium"; see docs/environments/robot.md',
            )
        return
    yield from misnamed(f"{section}.simulator", robot.simulator, SIMULATORS, "one of", "Class")
    lacks = {"gymnasium": "id", "libero": "suite"}.get(robot.simulator)
    if lacks and not isinstance(robot.options.get(lacks), str):
        yield Problem(f"{section}.options", f"{robot.simulator} needs `{lacks}`, found {robot.options}")
    path, most = family_of(config).samples_at_once(config)
    if most > MOST_SIMULATORS:
        yield Problem(
            path,
            f"expected at most {MOST_SIMULATORS} with {section}.simulator, found {most}: "
            "each sample that is being generated has a simulator in a process of its own",
        )


def _service(config: ConfigTree) -> Iterator[Problem]:
    agent, host = config.environment.skyrl_gym.agent, config.generator.inference_engine.http_endpoint_host
    if not agent.service.url:
        if agent.service.token_file:
            yield Problem(
                f"{_AGENT}.service.token_file", "has no effect without service.url; leave it out, or set that"
            )
        return
    address = urlsplit(agent.service.url)
    if address.scheme not in ("http", "https") or not address.hostname or "@" in address.netloc:
        yield Problem(
            f"{_AGENT}.service.url",
            f'expected an address such as "http://host:8080/play", without a password, found "{agent.service.url}"',
        )
    elif host in _LOOPBACK and address.hostname not in _LOOPBACK:
        yield Problem(
            "generator.inference_engine.http_endpoint_host",
            f'{address.hostname} ({_AGENT}.service.url) does not reach the policy at {host}; set it to "node"',
        )
    others = {"command": agent.command, "reward_function": agent.reward_function, "reward": agent.reward != "file"}
    for name in (name for name, found in others.items() if found):
        yield Problem(f"{_AGENT}.{name}", "a service plays and scores (service.url); leave one of them out")


def _container(agent: AgentConfig) -> Iterator[Problem]:
    container, section = agent.container, f"{_AGENT}.container"
    if container.kind == "none":
        for name in ("image", "mounts", "env", "arguments"):
            if getattr(container, name):
                yield Problem(f"{section}.{name}", f"has no effect without {section}.kind; leave it out, or set that")
        return
    if not container.image:
        yield Problem(f"{section}.image", f"set it: {section}.kind is {container.kind}")
    if agent.service.url:
        yield Problem(
            f"{section}.kind", "programs are started in it, and a service is asked (service.url); leave it out"
        )
    yield from mount_problems(f"{section}.mounts", container.mounts, enroot=container.kind == "enroot")
    for name in container.env:
        if not name.isidentifier():
            yield Problem(f"{section}.env", f"expected names of variables, found {name!r}")


def rows_of_samples(config: ConfigTree) -> Iterator[Problem]:
    """Refuse settings that do not work where a sample may have several rows."""
    if not config.several_rows:
        return
    path = "generator.step_wise_trajectories" if config.generator.step_wise_trajectories else _ENDPOINT
    algorithm = config.trainer.algorithm
    if algorithm.advantage_estimator in ("gae", "reinforce++", "optimal_token_baseline"):
        yield Problem(
            path,
            f"does not work with trainer.algorithm.advantage_estimator={algorithm.advantage_estimator}, which needs the whole sample",
        )
    if config.trainer.critic.model.path is not None:
        yield Problem(
            path,
            "does not work with trainer.critic.model.path: a critic learns from whole samples; leave one of them out",
        )
    if config.trainer.distillation.self_teacher.model is not None:
        yield Problem(
            path,
            "does not work with trainer.distillation.self_teacher.model: each row has a prompt of its own; leave one of them out",
        )
    if config.environment.reward_model.model is not None and path == _ENDPOINT:
        yield Problem(
            path, "does not work with environment.reward_model.model, which scores one conversation of a sample"
        )
    if algorithm.min_filter_prefix_tokens is not None:
        yield Problem(
            path,
            "does not work with trainer.algorithm.min_filter_prefix_tokens, which compares whole samples; leave one of them out",
        )
