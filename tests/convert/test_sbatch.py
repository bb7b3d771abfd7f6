"""The `#SBATCH` lines of batch scripts."""

from typing import Any

import pytest

from hpcrl.convert.skyrl.convert import convert_script

COMMAND = "python -m skyrl.train.entrypoints.main_base trainer.placement.policy_num_gpus_per_node=4 generator.num_inference_engines=4\n"


def slurm(*options: str) -> dict[str, Any]:
    """Return the settings of slurm that such lines give."""
    lines = [f"#SBATCH {option}" for option in options]
    conversion = convert_script("\n".join(["#!/bin/bash", *lines, COMMAND]), "run.sbatch")
    named = {
        path.removeprefix("slurm."): value for path, value in conversion.values.items() if path.startswith("slurm.")
    }
    return named | {"conflicts": [entry.source for entry in conversion.entries if entry.kind == "conflict"]}


@pytest.mark.parametrize(
    ("option", "setting", "value"),
    [
        ("--time=04:00:00", "time_minutes", 240),
        ("--time=90", "time_minutes", 90),
        ("--time-min=1:00:00", "time_min_minutes", 60),
        ("-t 30:30", "time_minutes", 30),
        ("--time=1-12", "time_minutes", 36 * 60),
        ("--time=2-01:30:00", "time_minutes", 49 * 60 + 30),
        ("-p gpu", "partition", "gpu"),
        ("--partition gpu", "partition", "gpu"),
        ("--account=a", "account", "a"),
        ("-q high", "qos", "high"),
        ('--constraint="ib&h100"  # fast', "constraint", "ib&h100"),
        ("--gpus-per-node=8", "gpus_per_node", 8),
        ("--gpus-per-node=h100:4", "gpus_per_node", "h100:4"),
        ("--gres=gpu:8", "gpus_per_node", 8),
        ("--gres=gpu:a100:4", "gpus_per_node", "a100:4"),
        ("--mem=512G", "mem_gb", 512),
        ("--mem=65536", "mem_gb", 64),
        ("--mem=0", "mem_gb", 0),
        ("-c 16", "cpus_per_task", 16),
        ("--exclusive", "exclusive", True),
        ("--array=0-9%3", "array_parallelism", 3),
        ("--reservation=r", "extra", {"reservation": "r"}),
        ("--contiguous", "extra", {"contiguous": True}),
    ],
)
def test_an_option_becomes_a_setting(option: str, setting: str, value: object) -> None:
    found = slurm(option)
    assert found[setting] == value
    assert found["conflicts"] == []


def test_gres_is_asked_for_as_gres() -> None:
    assert slurm("--gres=gpu:8")["gpu_option"] == "gres"
    assert "gpu_option" not in slurm("--gpus-per-node=8")


def test_several_options_stand_in_a_line() -> None:
    found = slurm("--account=a --qos=q -p p")
    assert (found["account"], found["qos"], found["partition"]) == ("a", "q", "p")


@pytest.mark.parametrize("option", ["--time=soon", "--mem=lots", "--gpus-per-node=some", "--gpus-per-node=2"])
def test_what_cannot_be_is_a_conflict(option: str) -> None:
    assert slurm(option)["conflicts"] == [f"#SBATCH {option}"]


def test_lines_behind_the_first_command_are_comments() -> None:
    conversion = convert_script(f"#SBATCH -p one\nset -x\n#SBATCH -p two\n{COMMAND}", "run.sh")
    assert conversion.values["slurm.partition"] == "one"
    assert not any("two" in entry.source for entry in conversion.entries)
