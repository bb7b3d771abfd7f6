"""Groups of trained parameters, each with a learning rate and a weight decay of its own (optimizer_config.groups)."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from hpcrl.config.sections.model import OptimizerConfig, ParameterGroupConfig
from hpcrl.errors import DataError
from hpcrl.trainer.models.lora import own_name

_LETTER, _NUMBER = re.compile(r"(\.lora_[AB])\.default\."), re.compile(r"(?<=\.)\d+(?=\.)")
_REST = ParameterGroupConfig(match="")


@dataclass(frozen=True)
class ParameterGroup:
    """A group of parameters.

    Attributes:
        names: as they were given to `parameter_groups`.
        lr_factor: of the learning rate.
        weight_decay: per unit of the learning rate.
    """

    names: frozenset[str]
    lr_factor: float
    weight_decay: float


def parameter_groups(trained: Iterable[str], optimizer: OptimizerConfig, role: str) -> list[ParameterGroup]:
    """Return the groups of trained parameters: first all parameters that no pattern finds, then those of each pattern.

    Args:
        trained: names of all trained parameters of the model, those that other ranks have included.
        role: section of the model, for errors: trainer.policy or trainer.critic.

    Raises:
        DataError: a pattern finds no parameter, or one of another group.
    """
    in_files = {name: _LETTER.sub(r"\1.", own_name(name)) for name in trained}
    group_of = dict[str, str]()
    for group, settings in optimizer.groups.items():
        where = f'{role}.optimizer_config.groups.{group}.match "{settings.match}"'
        found = [name for name, in_file in in_files.items() if re.search(settings.match, in_file)]
        if not found:
            kinds = dict.fromkeys(_NUMBER.sub("N", in_file) for in_file in in_files.values())
            raise DataError(f"{where} finds no trained parameter; these are trained: {', '.join(kinds)}")
        for name in found:
            if name in group_of:
                raise DataError(
                    f"{where} finds {in_files[name]}, which is in the group {group_of[name]} too; change one of the two patterns"
                )
            group_of[name] = group
    return [
        ParameterGroup(
            frozenset(name for name in in_files if group_of.get(name) == group),
            settings.lr_factor,
            optimizer.weight_decay if settings.weight_decay is None else settings.weight_decay,
        )
        for group, settings in {None: _REST, **optimizer.groups}.items()
    ]
