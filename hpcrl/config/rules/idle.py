"""Settings that another one switches on: refused where they are set and it does not, because a file should not promise what does not happen.

A loss of the user's own may read any of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from hpcrl.config.errors import Problem
from hpcrl.config.fields import values
from hpcrl.config.sections.algorithm import AlgorithmConfig
from hpcrl.config.sections.tree import ConfigTree

_ALGORITHM = "trainer.algorithm."
_CORRECTION = "off_policy_correction."

READ_BY_LOSSES: dict[str, tuple[str, ...]] = {
    "eps_clip_low": ("regular", "dual_clip", "gspo", "rollout_is", "clip_cov"),
    "eps_clip_high": ("regular", "dual_clip", "gspo", "rollout_is", "clip_cov"),
    "clip_ratio_c": ("dual_clip",),
    "sapo": ("sapo",),
    "cispo": ("cispo",),
    "clip_cov": ("clip_cov",),
    "kl_cov": ("kl_cov",),
    "aipo_rho": ("aipo",),
    "dppo": ("dppo",),
    "gmpo": ("gmpo",),
}
"""Settings and sections of trainer.algorithm to the losses that read them."""


@dataclass(frozen=True)
class Switch:
    """What switches some settings on.

    Attributes:
        names: settings and sections of trainer.algorithm.
        needs: the switch, as an error names it.
        is_on: whether it does.
    """

    names: tuple[str, ...]
    needs: str
    is_on: Callable[[AlgorithmConfig], bool]


def _reads(losses: tuple[str, ...]) -> Callable[[AlgorithmConfig], bool]:
    return lambda algorithm: algorithm.policy_loss_type in losses


def _correction(name: str, value: str) -> Callable[[AlgorithmConfig], bool]:
    return lambda algorithm: getattr(algorithm.off_policy_correction, name) == value


_SWITCHES = (
    *(
        Switch((name,), f"{_ALGORITHM}policy_loss_type={' or '.join(losses)}", _reads(losses))
        for name, losses in READ_BY_LOSSES.items()
    ),
    Switch(("entropy_loss_coef",), f"{_ALGORITHM}use_entropy_loss=true", lambda algorithm: algorithm.use_entropy_loss),
    Switch(
        ("kl_ctrl.kl_target", "kl_ctrl.horizon"),
        f'{_ALGORITHM}kl_ctrl.type="adaptive"',
        lambda algorithm: algorithm.kl_ctrl.type == "adaptive",
    ),
    Switch(
        ("max_seq_len",),
        f"{_ALGORITHM}loss_reduction=seq_mean_token_sum_norm",
        lambda algorithm: algorithm.loss_reduction == "seq_mean_token_sum_norm",
    ),
    Switch(
        (f"{_CORRECTION}geo_mask_low", f"{_CORRECTION}geo_mask_high"),
        f'{_ALGORITHM}{_CORRECTION}sequence_mask_metric="geometric"',
        _correction("sequence_mask_metric", "geometric"),
    ),
    Switch(
        (f"{_CORRECTION}product_mask_low", f"{_CORRECTION}product_mask_high"),
        f'{_ALGORITHM}{_CORRECTION}sequence_mask_metric="product"',
        _correction("sequence_mask_metric", "product"),
    ),
)


def not_switched_on(config: ConfigTree) -> Iterator[Problem]:
    algorithm = config.trainer.algorithm
    own_loss = ":" in algorithm.policy_loss_type
    idle = [switch for switch in _SWITCHES if not switch.is_on(algorithm)]
    for setting, value in values(config):
        name = setting.path.removeprefix(_ALGORITHM)
        if own_loss or name == setting.path or setting.is_default(value):
            continue
        for switch in idle:
            if any(name == other or name.startswith(other + ".") for other in switch.names):
                yield Problem(setting.path, f"has no effect without {switch.needs}; leave it out, or set that")
