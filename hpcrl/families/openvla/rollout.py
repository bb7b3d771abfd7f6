"""Generator of OpenVLA: its functions are those of hpcrl.rollout.family.RolloutFamily. Engines are those of language models."""

from __future__ import annotations

from functools import partial

from hpcrl.config import Config
from hpcrl.families.robots.family import videos_of
from hpcrl.families.text.rollout import importing_transformers, load_conversations
from hpcrl.rollout.family import LoadedGenerator
from hpcrl.rundir.layout import Run


def load_generator(run: Run, config: Config, interval: int | None) -> LoadedGenerator:
    from hpcrl.families.openvla.actions import ActionTurns
    from hpcrl.families.openvla.generate import ActionGroups

    at_once = config.environment.skyrl_gym.robot.actions_per_turn
    tokens, entries = config.generator.sampling_params.max_generate_length, config.trainer.policy.config_overrides
    with importing_transformers(config):
        actions = ActionTurns.of(config.trainer.policy.model.pretrained, config.vla, at_once, tokens, entries)
    assert actions is not None
    states = actions.states.shown if actions.states else None
    generator = partial(ActionGroups, actions=actions, videos=videos_of(run, config.vla))
    return load_conversations(run, config, interval, states, generator)


def own_engine(config: Config) -> None:  # noqa: ARG001
    return None
