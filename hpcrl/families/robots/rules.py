"""Rules about policies that move robots: requirements, and settings of policies that write text."""

from __future__ import annotations

from collections.abc import Iterator

from hpcrl.config.errors import Problem
from hpcrl.config.sections.tree import ConfigTree
from hpcrl.config.sections.vla import VLAConfig

_ROBOT = "environment.skyrl_gym.robot"
_LENGTH = "generator.sampling_params.max_generate_length"


def actions(config: ConfigTree) -> Iterator[Problem]:
    """Requirements of training a policy of actions, and of its environment."""
    trainer, generator, vla, robot = config.trainer, config.generator, config.vla, config.environment.skyrl_gym.robot
    if not vla.enable:
        return
    if trainer.offline or trainer.policy.diffusers.enable:
        what = (
            "trainer.policy.diffusers.enable" if trainer.policy.diffusers.enable else f'trainer.mode="{trainer.mode}"'
        )
        yield Problem(
            "vla.enable", f"actions are learned by reinforcement in simulators, not with {what}; leave one out"
        )
        return
    if robot.simulator is None:
        yield Problem(
            f"{_ROBOT}.simulator", "required with vla.enable: where the policy acts, such as gymnasium or libero"
        )
    used = {
        f"{_ROBOT}.show_state": robot.show_state,
        f"{_ROBOT}.action_bins": robot.action_bins is not None,
        f"{_ROBOT}.state_bins": robot.state_bins is not None,
    }
    for name in (name for name, wanted in used.items() if wanted):
        instead = "set it to false" if name.endswith("show_state") else "leave it out"
        yield Problem(name, f"belongs to policies that read and write numbers; {instead} with vla.enable")
    for told, params in (
        () if vla.moves_by_flow else (("", generator.sampling_params), ("eval_", generator.eval_sampling))
    ):
        path = _LENGTH.replace("sampling_params", f"{told}sampling_params")
        if params.max_generate_length % robot.actions_per_turn:
            yield Problem(
                path,
                f"expected a multiple of {_ROBOT}.actions_per_turn ({robot.actions_per_turn}), found {params.max_generate_length}: "
                "with vla.enable it is the tokens of a turn, one for each number of each action",
            )
            break
        if params.max_generate_length != generator.sampling_params.max_generate_length:
            yield Problem(path, f"expected {_LENGTH}: an action has as many numbers in evaluations; leave it out")
    if generator.max_turns > 1 and not generator.step_wise_trajectories:
        yield Problem(
            "generator.step_wise_trajectories",
            "required with vla.enable: the policy is shown what cameras see now, and not what they saw; set it to true",
        )


def decoding(config: ConfigTree) -> Iterator[Problem]:
    """Requirements of each way of decoding actions."""
    if not config.vla.enable:
        return
    if config.vla.use_proprio and config.vla.vla_type == "openvla":
        yield Problem(
            "vla.use_proprio", 'OpenVLA is shown no states; leave it out, or set vla.vla_type = "openvla-oft"'
        )
    if config.vla.vla_type == "openvla-oft" and not config.trainer.use_sample_packing:
        yield Problem(
            "trainer.use_sample_packing", "openvla-oft needs it: its tokens see those behind them; set it to true"
        )


def simulators(config: ConfigTree) -> Iterator[Problem]:
    """The number of simulators, and videos of them."""
    vla = config.vla
    if not vla.enable:
        return
    samples = config.generator.n_samples_per_prompt + config.trainer.algorithm.needs_baselines
    if vla.num_envs is not None and vla.num_envs < samples:
        yield Problem(
            "vla.num_envs",
            f"expected at least {samples}, found {vla.num_envs}: the samples of a group (generator.n_samples_per_prompt) act at the same time",
        )
    if vla.save_video and not vla.trace_verbosity:
        yield Problem("vla.save_video", "has no effect with vla.trace_verbosity=0; leave it out, or set that to 1 or 2")


def of_writers(config: ConfigTree) -> Iterator[Problem]:
    """Settings about texts of a policy."""
    vla, generator, trainer = config.vla, config.generator, config.trainer
    if not vla.enable:
        default = VLAConfig()
        for name, value in vars(vla).items():
            if value != getattr(default, name):
                yield Problem(f"vla.{name}", "has no effect without vla.enable; leave it out, or set that")
        return
    if trainer.policy.diffusers.enable:
        return  # refused above
    used = {
        "generator.sampling_params.stop": bool(generator.sampling_params.stop),
        "generator.inference_engine.enable_http_endpoint": generator.inference_engine.enable_http_endpoint,
        "environment.reward_function": bool(config.environment.reward_weights("train")),
        "environment.reward_model.model": config.environment.reward_model.model is not None,
        "environment.group_reward_function": bool(config.environment.group_reward_function),
        "trainer.distillation.enable": trainer.distillation.enable,
    }
    for name in (name for name, wanted in used.items() if wanted):
        yield Problem(name, "belongs to policies that write; leave it out with vla.enable")


RULES = (actions, decoding, simulators, of_writers)
