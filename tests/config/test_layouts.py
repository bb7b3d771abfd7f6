"""Ranges in a configuration: which texts are ranges, and what of a layout is an error."""

from __future__ import annotations

import pytest

from hpcrl.config import Config
from hpcrl.errors import ConfigError
from tests.paths import QUICKSTART

NODES, ENGINES = "trainer.placement.policy_num_nodes", "generator.inference_engine.num_engines"


def load(*settings: str) -> Config:
    return Config.from_toml([QUICKSTART], settings)


def test_a_range_stays_in_the_file_and_layouts_have_numbers() -> None:
    config = load(f"{NODES}=1-4", f"{ENGINES}=2-3")
    assert 'policy_num_nodes = "1-4"' in config.to_toml()
    works = {tuple(sizes.values()): not problems for sizes, problems in config.layouts()}
    assert works == {(nodes, engines): nodes != 3 for nodes in (1, 2, 3, 4) for engines in (2, 3)}  # 32 x 8 samples
    assert next(iter(works)) == (4, 3)
    two = config.at({NODES: 2, ENGINES: 3})
    assert (two.trainer.placement.policy_ranks, two.max_replicas) == (2, 3)
    assert two.trainer.train_batch_size == config.trainer.train_batch_size
    assert config.largest() == config.at({NODES: 4, ENGINES: 3})


def test_sizes_of_settings_that_are_no_ranges_change_nothing() -> None:
    config = load(f"{NODES}=2")
    assert config.at({NODES: 4}) == config == config.largest()


def test_a_range_is_no_size() -> None:
    with pytest.raises(ConfigError, match=r"policy_num_nodes: 1-4 is a range.*expected a number, such as .*=4"):
        print(load(f"{NODES}=1-4").trainer.placement.policy_ranks)


@pytest.mark.parametrize("text", ["4-1", "0-2", "1-", "one", "1,2", "1-2-3", " 1-2", '"3"'])
def test_other_texts_are_no_ranges(text: str) -> None:
    with pytest.raises(ConfigError) as error:
        load(f"{NODES}={text}", "trainer.train_batch_size=7")
    assert 'policy_num_nodes: expected a whole number, or a range of them such as "1-4", found' in str(error.value)
    assert "trainer.train_batch_size" in str(error.value), "all errors at once"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ([f"{NODES}=5-7"], r"shared equally by 7 trainer ranks .*\(of all layouts with .*=5 to 7 none works, and this"),
        ([f"{NODES}=1-999"], "expected at most 256 layouts, found 999"),
        ([f"{ENGINES}=1-2", "slurm.elastic.replicas=1"], "num_engines: expected no range with slurm.elastic.replicas"),
        (
            ["trainer.deterministic=true", f"{NODES}=1-2"],
            "policy_num_nodes: expected one number of nodes of the trainer",
        ),
        (["trainer.deterministic=true", "slurm.nodes=2-4"], "slurm.nodes: expected one number of nodes of the trainer"),
        (["slurm.nodes=1"], "slurm.nodes: expected at least 2, one of them for the trainer, found 1"),
        (["slurm.nodes=4-2"], r'slurm.nodes: expected a whole number, or a range of them such as "1-4", found'),
        (["slurm.nodes=2-4", f"{NODES}=1-2"], "policy_num_nodes: expected a number with slurm.nodes"),
        (["slurm.nodes=2-4", "slurm.elastic.replicas=1"], "slurm.nodes: expected no range with slurm.elastic.replicas"),
        (
            ["slurm.nodes=2-4", "trainer.placement.colocate_policy_ref=false"],
            "slurm.nodes: divides nodes between trainer and",
        ),
        (["slurm.extra.time-min=10"], "set slurm.time_min_minutes instead"),
        (
            ["slurm.grow_minutes=60"],
            "slurm.grow_minutes: needs a range of slurm.nodes, trainer.placement.policy_num_nodes or",
        ),
    ],
)
def test_what_no_layout_can_mend_is_refused(settings: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(*settings)
