"""What the family of a policy brings to whoever generates with an engine: its generator, and what its rows say. Chosen here for runs and evaluations."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from hpcrl.config import Config
from hpcrl.config.derive import max_input_length, model_config_kwargs, names_own_code, policy_model
from hpcrl.config.families import is_diffusion, moves_by_flow
from hpcrl.data.vision.videos import EpisodeVideos
from hpcrl.rollout.images.kept import KeptPictures
from hpcrl.rundir.layout import Run

if TYPE_CHECKING:
    from hpcrl.data.rollouts import Decode
    from hpcrl.rollout.generate import Maker


@dataclass(frozen=True)
class Family:
    """What a policy's family needs beside the engine.

    Attributes:
        maker: returns what makes groups; its arguments are those of `conversations` that have names, which say nothing to policies that do not write.
        decode: of the tokens of its rows.
    """

    maker: Callable[..., Maker]
    decode: Decode


def load_family(run: Run, config: Config, interval: int | None) -> Family:
    """Load it, which needs no engine: it may still be starting.

    Args:
        run: whose pictures and videos are kept; an evaluation has a directory laid out as a run.
        interval: versions of which pictures are kept, as trainer.multi_modal_log_interval says it; None: of none.
    """
    model, generator, environment = policy_model(config.trainer), config.generator, config.environment
    kept, videos = KeptPictures(run, interval) if interval else None, EpisodeVideos.of(run, config.vla)
    if is_diffusion(config.trainer):
        from hpcrl.data.pipelines.tokens import row_decoder
        from hpcrl.rollout.diffusion.generate import pictures

        painting = pictures(generator, environment, kept)
        return Family(lambda **_: painting, row_decoder(model))
    if moves_by_flow(config.vla):
        from hpcrl.data.pi05 import inputs
        from hpcrl.rollout.actions.generate import Robotics, actions

        moving = actions(generator, environment, config.vla, Robotics.of(model), videos)
        return Family(lambda **_: moving, inputs.row_decoder(model))
    from hpcrl.data.actions.turns import ActionTurns
    from hpcrl.data.tokenizer import decoder, load_tokenizer, without_torch
    from hpcrl.data.vision.reader import ImageReader, Preparation
    from hpcrl.rollout.generate import conversations

    # code of the user's may use models of transformers, which need torch; nothing else here does
    with nullcontext() if names_own_code(config) else without_torch():
        tokenizer = load_tokenizer(model, generator.chat_template)
        at_once, length = environment.skyrl_gym.robot.actions_per_turn, generator.sampling_params.max_generate_length
        said = ActionTurns.of(model, config.vla, at_once, length, model_config_kwargs(config.trainer.policy))
        states = said.states.shown if said and said.states else None
        reader = ImageReader.of(model, Preparation.of(config.data), states)
    generator = replace(generator, max_input_length=max_input_length(generator, config.trainer))
    maker = partial(conversations, tokenizer, generator, environment, reader, kept, said, videos, model=model)
    return Family(maker, decoder(tokenizer))
