"""Actions as tokens: a turn has as many tokens as its actions have numbers, and no others. Without torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hpcrl.config.sections.model import Pretrained
from hpcrl.config.sections.vla import VLAConfig
from hpcrl.data.action_tokens import ActionTokens, Scale, action_tokens, scale_of
from hpcrl.errors import DataError

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True)
class States:
    """Input of the robot's measured state to the policy.

    Attributes:
        size: how many numbers they are.
        scale: None: they are shown as they are.
    """

    size: int
    scale: Scale | None

    @classmethod
    def of(cls, entries: Mapping[str, Any], vla: VLAConfig) -> States:
        """Return those of a model by its config.json.

        Raises:
            DataError: it lacks the number of values, or its statistics have another number.
        """
        size, scale = entries.get("proprio_dim"), scale_of(entries, vla.unnorm_key, vla.norm_type, "proprio")
        if not isinstance(size, int):
            raise DataError(
                "vla.use_proprio: the model's config.json lacks proprio_dim, how many numbers its proprio_projector takes; set "
                "trainer.policy.model_config_kwargs = {proprio_dim = 8}, or as many as the state of the simulator has"
            )
        if scale is not None and len(scale.low) != size:
            raise DataError(
                f"vla.use_proprio: the model takes {size} numbers (proprio_dim) and has statistics of {len(scale.low)}"
            )
        return cls(size, scale)

    def shown(self, measured: Sequence[float]) -> np.ndarray:
        """Return a state as the network has it, [1, size] float32. Raises DataError where the simulator measures another number of things."""
        import numpy as np

        if len(measured) != self.size:
            raise DataError(
                f"vla.use_proprio: the simulator measures {len(measured)} numbers, and the model takes {self.size} (proprio_dim of its config.json)"
            )
        found = np.array(measured)
        return (found if self.scale is None else self.scale.state(found)).astype(np.float32)[None]


class ActionTurns:
    """Conversion between tokens and actions.

    Args:
        at_once: actions of a turn, K.
        numbers: of an action, A.
        scale: None: the tokens' numbers are the simulator's.
        parallel: all tokens of a turn are sampled at once, and an end-of-text token follows (OpenVLA-OFT).
        states: how the policy is shown what is measured; None: it is not.

    Raises:
        DataError: the scale is one of other actions.
    """

    def __init__(
        self,
        tokens: ActionTokens,
        scale: Scale | None,
        at_once: int,
        numbers: int,
        *,
        parallel: bool = False,
        states: States | None = None,
    ) -> None:
        if scale is not None and len(scale.low) != numbers:
            raise DataError(
                f"the model's actions have {len(scale.low)} numbers by vla.unnorm_key; set generator.sampling_params.max_generate_length to "
                f"{at_once * len(scale.low)}, that is times environment.skyrl_gym.robot.actions_per_turn ({at_once}), found {at_once * numbers}"
            )
        self._tokens, self._scale, self._shape = tokens, scale, (at_once, numbers)
        self.parallel, self.states = parallel, states

    @classmethod
    def of(
        cls, model: Pretrained, vla: VLAConfig, at_once: int, length: int, changes: Mapping[str, Any] | None = None
    ) -> ActionTurns | None:
        """Return those of a model; None: it writes.

        Args:
            length: tokens of a turn.
            changes: entries of the model's config.json that are replaced.

        Raises:
            DataError: its configuration cannot be loaded, or differs from `vla`.
        """
        from transformers import PreTrainedConfig

        try:
            entries, _ = PreTrainedConfig.get_config_dict(model.path, **model.at_revision)
        except (OSError, ValueError) as error:
            raise DataError(f"the configuration of {model} cannot be loaded: {error}") from error
        entries = {**entries, **(changes or {})}
        tokens = action_tokens(entries)
        if (tokens is not None) != vla.enable:
            raise DataError(f"vla.enable: {disagreement(str(model), tokens)}")
        if tokens is None:
            return None
        scale, parallel = scale_of(entries, vla.unnorm_key, vla.norm_type), vla.vla_type == "openvla-oft"
        states = States.of(entries, vla) if vla.use_proprio else None
        return cls(tokens, scale, at_once, length // at_once, parallel=parallel, states=states)

    @property
    def sampling(self) -> dict[str, Any]:
        """What engines are asked for, under vLLM's names."""
        return {"allowed_token_ids": list(self._tokens.ids), "ignore_eos": True}

    def actions(self, token_ids: Sequence[int]) -> np.ndarray:
        """Return the actions of a turn, [K, A] float64."""
        numbers_KA = self._tokens.numbers(token_ids).reshape(self._shape)
        return numbers_KA if self._scale is None else self._scale.actions(numbers_KA)


def disagreement(model: str, tokens: ActionTokens | None) -> str:
    """Return an error where a model has action tokens and the run no robot, or the other way round."""
    if tokens is None:
        return f"{model} has no action tokens: its config.json has no n_action_bins"
    return f"required: the config.json of {model} has n_action_bins, so that it makes actions and writes no text"


def written(actions_KA: np.ndarray) -> str:
    """Return actions as people read them, one to a line."""
    return "\n".join(" ".join(f"{number:.3f}" for number in action) for action in actions_KA)
