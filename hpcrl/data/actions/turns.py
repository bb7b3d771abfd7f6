"""What a policy of actions says in a turn: as many tokens as its actions have numbers, and nothing else. Without torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hpcrl.config.sections.model import Pretrained
from hpcrl.config.sections.vla import VLAConfig
from hpcrl.data.actions.tokens import ActionScale, ActionTokens, action_scale, action_tokens
from hpcrl.errors import DataError

if TYPE_CHECKING:
    import numpy as np


class ActionTurns:
    """Between tokens and actions.

    Args:
        at_once: actions of a turn, K.
        numbers: of an action, A.
        scale: None: the tokens' numbers are the simulator's.
        parallel: all tokens of a turn are said at once, and a token follows them that ends a text (OpenVLA-OFT).

    Raises:
        DataError: the scale is one of other actions.
    """

    def __init__(
        self, tokens: ActionTokens, scale: ActionScale | None, at_once: int, numbers: int, *, parallel: bool = False
    ) -> None:
        if scale is not None and len(scale.low) != numbers:
            raise DataError(
                f"the model's actions have {len(scale.low)} numbers by vla.unnorm_key; set generator.sampling_params.max_generate_length to "
                f"{at_once * len(scale.low)}, that is times environment.skyrl_gym.robot.actions_per_turn ({at_once}), found {at_once * numbers}"
            )
        self._tokens, self._scale, self._shape, self.parallel = tokens, scale, (at_once, numbers), parallel

    @classmethod
    def of(cls, model: Pretrained, vla: VLAConfig, at_once: int, length: int) -> ActionTurns | None:
        """Return those of a model; None: it writes.

        Args:
            length: tokens of a turn.

        Raises:
            DataError: its configuration cannot be loaded, or says something else than `vla`.
        """
        from transformers import PreTrainedConfig

        try:
            entries, _ = PreTrainedConfig.get_config_dict(model.path, **model.at_revision)
        except (OSError, ValueError) as error:
            raise DataError(f"the configuration of {model} cannot be loaded: {error}") from error
        tokens = action_tokens(entries)
        if (tokens is not None) != vla.enable:
            raise DataError(f"vla.enable: {disagreement(str(model), tokens)}")
        if tokens is None:
            return None
        scale, parallel = action_scale(entries, vla.unnorm_key), vla.vla_type == "openvla-oft"
        return cls(tokens, scale, at_once, length // at_once, parallel=parallel)

    @property
    def sampling(self) -> dict[str, Any]:
        """What engines are asked for, under vLLM's names."""
        return {"allowed_token_ids": list(self._tokens.ids), "ignore_eos": True}

    def actions(self, token_ids: Sequence[int]) -> np.ndarray:
        """Return the actions of a turn, [K, A] float64."""
        numbers_KA = self._tokens.numbers(token_ids).reshape(self._shape)
        return numbers_KA if self._scale is None else self._scale.actions(numbers_KA)


def disagreement(model: str, tokens: ActionTokens | None) -> str:
    """Return what is wrong where a model has action tokens and the run is not one of robots, or the other way round."""
    if tokens is None:
        return f"{model} has no action tokens: its config.json has no n_action_bins"
    return f"required: the config.json of {model} has n_action_bins, so that it makes actions and writes no text"


def written(actions_KA: np.ndarray) -> str:
    """Return actions as people read them, one to a line."""
    return "\n".join(" ".join(f"{number:.3f}" for number in action) for action in actions_KA)
