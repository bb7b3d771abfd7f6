"""Makes the submission of a trial: each recipe with as many seeds as the others, as elements of one job array."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from hpcrl.config import Config
from hpcrl.config.difference import differences, value_as_toml
from hpcrl.errors import ConfigError
from hpcrl.launch.submit.executors import Submission
from hpcrl.launch.submit.preflight import check_checkpoint, check_files
from hpcrl.launch.submit.submit import prepare
from hpcrl.launch.submit.sweep import load_elements, name_after, require_one_array
from hpcrl.observe.trial.plan import Trial

_EVALUATED_ALIKE = (
    "trainer.max_steps",
    "trainer.eval_interval",
    "data.val_",
    "data.test_size",
    "generator.eval_",
    "environment.env_class",
)
"""Settings, or how their paths begin, without which scores of two recipes cannot be compared."""


def trial_submission(
    recipes: Sequence[Path], shared: Sequence[Path], overrides: Sequence[str], name: str, seeds: int, effect: float
) -> tuple[Submission, list[str]]:
    """Return the submission of a trial, whose files are checked, and the warnings of these checks.

    No two runs have one seed. The first run of each recipe comes first, so that a trial with too few nodes for all runs compares early.

    Args:
        recipes: the last TOML file of each recipe.
        shared: TOML files that come before it in all of them.
        name: of the trial; empty: after the first recipe and the time.
        seeds: runs of each recipe.

    Raises:
        ConfigError, DataError: what is wrong with a recipe, or cannot be compared.
    """
    if len(recipes) < 2 or seeds < 2:
        raise ConfigError("a trial compares two recipes at least, and runs each with two seeds at least: --seeds 2")
    if effect <= 0:
        raise ConfigError(f"--effect {effect:g}: expected a difference of scores above 0, such as 0.02")
    warnings = dict[str, None]()

    def check(config: Config, source_of: Callable[[str], str | None]) -> None:
        warnings.update(dict.fromkeys([*check_files(config, source_of), *check_checkpoint(config)]))

    name = name or name_after(recipes[0], time.strftime("%m%d-%H%M%S"))
    own, labels = [*overrides, f"trainer.run_name={name}"], labels_of(recipes)
    configs = list[list[Config]]()
    for at, recipe in enumerate(recipes):
        seeded = [[f"trainer.seed={1 + seed * len(recipes) + at}"] for seed in range(seeds)]
        configs.append(load_elements([*shared, recipe], own, seeded, check))
    first = configs[0][0]
    for label, (config, *_) in zip(labels, configs, strict=True):
        _require_comparable(label, config, first)
    elements, names, runs = list[tuple[Config, list[str]]](), list[str](), {label: list[str]() for label in labels}
    for seed in range(seeds):
        for label, of_recipe in zip(labels, configs, strict=True):
            elements.append((of_recipe[seed], overrides_of(first, of_recipe[seed])))
            runs[label].append(f"{name}.{len(names)}-{label}-seed-{of_recipe[seed].trainer.seed}")
            names.append(runs[label][-1])
    require_one_array([config for config, _ in elements], names)
    steps, interval = first.trainer.max_steps, first.trainer.eval_interval
    assert steps is not None
    trial = Trial(runs, steps, interval, effect)
    return replace(prepare(name, elements, names), trial=trial), list(warnings)


def labels_of(recipes: Sequence[Path]) -> list[str]:
    """Return the name of each recipe, of its file; the second of one name is NAME-2."""
    seen, labels = Counter[str](), list[str]()
    for recipe in recipes:
        label = name_after(recipe, "").rstrip("-")
        seen[label] += 1
        labels.append(label if seen[label] == 1 else f"{label}-{seen[label]}")
    return labels


def overrides_of(first: Config, config: Config) -> list[str]:
    """Return the settings in which a configuration differs from the first one, as overrides."""
    return [f"{one.path}={value_as_toml(one.right)}" for one in differences(first, config) if one.right is not None]


def _require_comparable(label: str, config: Config, first: Config) -> None:
    """Raise ConfigError where the scores of a recipe cannot be compared with those of the first one."""
    trainer = config.trainer
    if trainer.max_steps is None or trainer.eval_interval <= 0 or not trainer.dump_eval_results:
        raise ConfigError(
            f"{label}: a trial compares evaluations of the same steps; set trainer.max_steps, trainer.eval_interval above 0, "
            "and trainer.dump_eval_results = true"
        )
    seeds = {
        "generator.inference_engine.seed": config.generator.inference_engine.seed,
        "data.shuffle_seed": config.data.shuffle_seed,
    }
    if fixed := [path for path, seed in seeds.items() if seed is not None]:
        raise ConfigError(
            f"{label}: the runs of a trial differ by trainer.seed, and {' and '.join(fixed)} would give all the same draws; leave it out"
        )
    unlike = [str(one) for one in differences(first, config) if one.path.startswith(_EVALUATED_ALIKE)]
    rewards = [one.environment.reward_weights("eval") for one in (first, config)]
    if rewards[0] != rewards[1]:
        unlike.append("rewards of evaluation; environment.eval_reward_function sets those alone")
    if unlike:
        raise ConfigError(f"{label}: recipes of a trial are evaluated alike, and this one differs: {'; '.join(unlike)}")
