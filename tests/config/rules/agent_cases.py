"""Cases of rules about agents' programs and the endpoint at which they ask."""

from __future__ import annotations

from tests.config.rules.skyrl_cases import ALGORITHM, CRITIC, ENGINE, FOUR_GPUS, GYM, Case

ENDPOINT = f"{ENGINE}.enable_http_endpoint"
COMMAND = {f"{GYM}.agent.command": ["python", "agent.py"]}
AGENT = {"environment.env_class": "agent", ENDPOINT: True, "generator.max_turns": 3, **COMMAND}

AGENTS = [
    Case(
        "an endpoint has one address",
        {ENDPOINT: True, f"{ENGINE}.http_endpoint_host": "0.0.0.0"}, f"{ENGINE}.http_endpoint_host", "expected one address",
        {ENDPOINT: True, f"{ENGINE}.http_endpoint_host": "127.0.0.2"},
    ),
    Case(
        "those who ask at an endpoint have threads",
        {ENDPOINT: True, f"{GYM}.max_env_workers": 0}, f"{GYM}.max_env_workers", "needs threads", {f"{GYM}.max_env_workers": 0},
    ),
    Case("an agent has a program", {**AGENT, f"{GYM}.agent.command": []}, f"{GYM}.agent.command", "required by agent", AGENT),
    Case("an agent has an endpoint", {**AGENT, ENDPOINT: False}, ENDPOINT, "required by agent", {ENDPOINT: False, **COMMAND}),
    Case(
        "an agent's rows are its conversations",
        {**AGENT, "generator.step_wise_trajectories": True}, "generator.step_wise_trajectories", "no effect with agent", AGENT,
    ),
    Case(
        "an agent speaks in messages",
        {**AGENT, "generator.use_conversation_multi_turn": False}, "generator.use_conversation_multi_turn", "asks with messages",
        {"generator.use_conversation_multi_turn": False},
    ),
    Case(
        "what an agent said is judged by rewards that there are",
        {**AGENT, f"{GYM}.agent.reward_function": {"overlong": 1.0}}, f"{GYM}.agent.reward_function", "overlong",
        {**AGENT, f"{GYM}.agent.reward_function": {"gsm8k": 1.0}},
    ),
    Case(
        "one of an agent's rewards counts",
        {**AGENT, f"{GYM}.agent.reward_function": {"gsm8k": 0.0}}, f"{GYM}.agent.reward_function", "every weight is 0",
        {**AGENT, f"{GYM}.agent.reward_function": {"gsm8k": 1.0, "format": 0.0}},
    ),
    Case(
        "an agent has one reward",
        {**AGENT, f"{GYM}.agent.reward": "exit_code", f"{GYM}.agent.reward_function": {"gsm8k": 1.0}},
        f"{GYM}.agent.reward", "not the exit code", {**AGENT, f"{GYM}.agent.reward": "exit_code"},
    ),
    Case(
        "an agent's samples have no critic",
        {**AGENT, **CRITIC}, ENDPOINT, "does not work with trainer.critic.model.path", AGENT,
    ),
    Case(
        "an agent's samples have one advantage",
        {**AGENT, f"{ALGORITHM}.advantage_estimator": "reinforce++"}, ENDPOINT, "advantage_estimator=reinforce++",
        {**AGENT, **FOUR_GPUS, "trainer.policy_mini_batch_size": 2, "generator.n_samples_per_prompt": 3},
    ),
]  # fmt: skip
