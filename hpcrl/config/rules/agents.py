"""Rules about environments that ask the policy themselves, and the endpoint at which they do."""

from __future__ import annotations

from collections.abc import Iterator

from hpcrl.config.derive import several_rows
from hpcrl.config.errors import Problem
from hpcrl.config.import_path import misnamed
from hpcrl.config.sections.environment import REWARDS
from hpcrl.config.sections.tree import ConfigTree

_ENDPOINT = "generator.inference_engine.enable_http_endpoint"
_AGENT = "environment.skyrl_gym.agent"
_OF_MESSAGES = tuple(name for name in REWARDS if name != "overlong")  # which is about all that was said


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
    if config.environment.env_class != "agent":
        return
    if not agent.command:
        yield Problem(f"{_AGENT}.command", 'required by agent: the program, such as ["python", "./agent.py"]')
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


def rows_of_samples(config: ConfigTree) -> Iterator[Problem]:
    """What does not work where a sample may have several rows."""
    if not several_rows(config):
        return
    path = "generator.step_wise_trajectories" if config.generator.step_wise_trajectories else _ENDPOINT
    algorithm = config.trainer.algorithm
    if algorithm.advantage_estimator in ("gae", "reinforce++"):
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
