"""Reads, checks and writes the whole configuration of a run."""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, is_dataclass, make_dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import tomli_w

from hpcrl.config.errors import Problem, raise_together
from hpcrl.config.family import family_of
from hpcrl.config.fields import values
from hpcrl.config.import_path import WRITTEN_WRONGLY
from hpcrl.config.layouts import combinations, ranges_of, with_sizes
from hpcrl.config.load import Merged, nested, read
from hpcrl.config.rules.combinations import alone, check, check_layout
from hpcrl.config.sections.algorithm import AlgorithmConfig
from hpcrl.config.sections.environment import EnvironmentConfig
from hpcrl.config.sections.generator import GeneratorConfig
from hpcrl.config.sections.trainer import TrainerConfig
from hpcrl.config.sections.tree import ConfigTree
from hpcrl.config.validate import build, without_unconverted
from hpcrl.errors import ConfigError

_C = TypeVar("_C", bound="Config")


@dataclass(frozen=True, kw_only=True)
class Config(ConfigTree):
    """Configuration of one run; components receive their section, never this."""

    @classmethod
    def from_toml(cls: type[_C], paths: Sequence[Path | str] | Path | str, overrides: Sequence[str] | str = ()) -> _C:
        """Return the checked configuration of TOML files, merged from left to right, and overrides `a.b.c=value`.

        Where they set `config_class`, and this is called on `Config` itself, the result is of that class.

        Raises:
            ConfigError: names everything that is wrong, each with its file, path, what was expected and what was found.
        """
        paths = [paths] if isinstance(paths, Path | str) else paths
        overrides = [overrides] if isinstance(overrides, str) else overrides
        merged = read(paths, overrides, cls)
        chosen = cls._chosen(merged)
        return chosen._checked(merged if chosen is cls else read(paths, overrides, chosen))

    @classmethod
    def from_tables(
        cls: type[_C], path: Path | str, names: Collection[str], otherwise: Mapping[str, Any] = MappingProxyType({})
    ) -> _C:
        """Return the settings of some tables of a TOML file, without rules for several settings; other tables have defaults.

        Args:
            otherwise: values by dotted path where the tables set none, as of what is required.
        """
        merged = read([path], [], cls)
        chosen = cls._chosen(merged)
        if chosen is not cls:
            merged = read([path], [], chosen)
        tables = {name: table for name, table in merged.tree.items() if name in names}
        merged.tree = nested(otherwise)
        merged.merge(tables, str(path))
        return build(chosen, merged.tree, merged.source_of, alone)

    @classmethod
    def from_cli_overrides(cls: type[_C], overrides: Sequence[str] | str | Mapping[str, Any]) -> _C:
        """Return the checked configuration of overrides alone: `a.b.c=value`, or a table with dotted or nested names."""
        return cls.from_toml([], overrides) if not isinstance(overrides, Mapping) else cls.from_dict(overrides)

    @classmethod
    def from_dict(cls: type[_C], tree: Mapping[str, Any]) -> _C:
        """Return the checked configuration of nested tables, whose keys may be dotted; paths in it are taken as they are."""
        merged = Merged(tree=nested(tree))
        return cls._chosen(merged)._checked(merged)

    def with_overrides(self: _C, overrides: Sequence[str] | str = ()) -> _C:
        """Return this configuration with overrides `a.b.c=value`, checked, also one that was built by hand.

        Relative locations in it are resolved against the working directory, as in overrides. Raises ConfigError as `from_toml`.
        """
        overrides = [overrides] if isinstance(overrides, str) else overrides
        merged = read([], overrides, type(self), self.to_dict())
        return self._chosen(merged)._checked(merged)

    def at(self: _C, sizes: Mapping[str, int]) -> _C:
        """Return the configuration of a layout: with these sizes, by path, in place of ranges."""
        return with_sizes(self, sizes)

    def layouts(self) -> Iterator[tuple[dict[str, int], list[Problem]]]:
        """Yield the sizes of each layout, the largest first, and what cannot work with them."""
        for sizes in combinations(self):
            yield sizes, check_layout(self.at(sizes))

    def largest(self: _C) -> _C:
        """Return the configuration of the largest layout that works; of one without ranges it is the only one."""
        if not ranges_of(self):
            return self
        return self.at(next((sizes for sizes, problems in self.layouts() if not problems), {}))

    @classmethod
    def from_dict_config(cls: type[_C], tree: Mapping[str, Any]) -> _C:
        """Return the checked configuration of OmegaConf's DictConfig, interpolations resolved; as SkyRL's method of this name.

        Raises:
            ConfigError: as in `from_toml`; also where an interpolation leads nowhere.
        """
        from omegaconf import OmegaConf
        from omegaconf.errors import OmegaConfBaseException

        try:
            plain: Any = OmegaConf.to_container(OmegaConf.create(tree), resolve=True)  # type: ignore[call-overload]
        except OmegaConfBaseException as error:
            raise ConfigError(str(error).partition("\n")[0]) from None
        return cls.from_dict(plain)

    @classmethod
    def _chosen(cls: type[_C], merged: Merged) -> type[_C]:
        name = merged.tree.get("config_class")
        _add_to_path(merged.tree.get("python_path"))
        if cls is not Config or not isinstance(name, str):
            return cls
        return _subclass(name, merged.source_of)  # type: ignore[return-value]

    @classmethod
    def _checked(cls: type[_C], merged: Merged) -> _C:
        tree, unsettled = without_unconverted(merged.tree)
        config = build(cls, tree, merged.source_of, lambda given: [*alone(given), *unsettled])
        raise_together([*unsettled, *check(config)], merged.source_of)
        return family_of(config).settled(config)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def changed(self) -> dict[str, Any]:
        """Return the tables of the settings that do not have their defaults."""
        return nested(
            {setting.path: _changed(value) for setting, value in values(self) if not setting.is_default(value)}
        )

    def to_toml(self, only_changed: bool = False) -> str:
        """Return TOML text; `from_toml` gives this configuration back.

        Args:
            only_changed: leave out what has its default.
        """
        return tomli_w.dumps(self.changed() if only_changed else _set_values(asdict(self)))


def source_of(paths: Sequence[Path | str], overrides: Sequence[str], path: str) -> str | None:
    """Return which of these files, with the line, or overrides sets a path; None: none of them."""
    return read(paths, overrides, Config).source_of(path)


def make_config(
    *,
    algorithm_cls: type[AlgorithmConfig] | None = None,
    trainer_cls: type[TrainerConfig] = TrainerConfig,
    generator_cls: type[GeneratorConfig] = GeneratorConfig,
    environment_cls: type[EnvironmentConfig] = EnvironmentConfig,
) -> type[Config]:
    """Return a subclass of Config whose sections are your own dataclasses.

    Assign it to a name in a module, and choose it from TOML by `config_class = "your_module:ThatName"`.

    Args:
        algorithm_cls: class of trainer.algorithm, of `trainer_cls` too; None: that of `trainer_cls`.
    """
    trainer = _replaced(trainer_cls, "algorithm", algorithm_cls) if algorithm_cls else trainer_cls
    config = _replaced(_replaced(Config, "trainer", trainer), "generator", generator_cls)
    return _replaced(config, "environment", environment_cls)


def _replaced(section: Any, name: str, cls: type) -> Any:
    required = section.__dataclass_fields__[name].default_factory is MISSING
    spec = (name, cls) if required else (name, cls, field(default_factory=cls))
    return make_dataclass(section.__name__, [spec], bases=(section,), frozen=True, kw_only=True)


_CLASS_NAME = re.compile(r"\w+(\.\w+)*:\w+")
_WHERE = 'Install it, or name the folder that holds it: python_path = ["."] is the folder of the TOML file'


def _add_to_path(folders: Any) -> None:
    """Add folders to sys.path, in every process that reads the configuration: each process of a run does."""
    for folder in folders if isinstance(folders, list) else ():
        if isinstance(folder, str) and folder not in sys.path and os.path.isdir(folder):
            sys.path.append(folder)


def _subclass(name: str, source_of: Callable[[str], str | None]) -> type[Config]:
    module_name, _, class_name = name.partition(":")
    found, why = None, ""
    if _CLASS_NAME.fullmatch(name):
        try:
            module = importlib.import_module(module_name)
        except ImportError as error:
            why = f"; {error}. {_WHERE}"
        except WRITTEN_WRONGLY as error:
            why = f"; {module_name} cannot be imported: {type(error).__name__}: {error}"
        else:
            found, why = getattr(module, class_name, None), f"; see {module.__file__}"
    if not (isinstance(found, type) and issubclass(found, Config)):
        expected = f'expected "package.module:Class" of a dataclass below hpcrl.config.Config, found "{name}"{why}'
        raise_together([Problem("config_class", expected)], source_of)
    return found  # type: ignore[return-value]  # raise_together raised


def _changed(value: Any) -> Any:
    """Return a value as TOML holds it; of sections in it, whose names are the user's, what does not have its default."""
    if isinstance(value, dict):
        return {key: _changed(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_changed(item) for item in value]
    if not is_dataclass(value):
        return value
    return {setting.path: item for setting, item in values(value) if not setting.is_default(item)}


def _set_values(tree: dict[str, Any]) -> dict[str, Any]:
    return {
        key: _set_values(value) if isinstance(value, dict) else value
        for key, value in tree.items()
        if value is not None
    }
