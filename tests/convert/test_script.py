"""SkyRL commands in shell scripts, compared with what a real shell makes of them."""

import subprocess
from pathlib import Path

import pytest

from hpcrl.convert.script import command_of
from hpcrl.convert.skyrl.convert import convert_script
from hpcrl.errors import ConfigError

SCRIPT = r"""#!/usr/bin/env bash
set -x
# a comment with 'one quote and trainer.epochs=99

: "${DATA_DIR:="$HOME/data/gsm8k"}"
: "${NUM_GPUS:=4}"  # how many
: ${LOGGER:=console}
INFERENCE_BACKEND=vllm
export NAME=first-${UNSET_HERE:-second}

MORE=(
  trainer.seed=$NUM_GPUS  # one to a line
  "environment.env_class=a b"
)
MORE+=(trainer.eval_batch_size=$((4 * NUM_GPUS)) trainer.dump_data_batch=$(echo "true"))

CUDA_VISIBLE_DEVICES=0 uv run --isolated --extra $INFERENCE_BACKEND -m skyrl_train.entrypoints.main_base \
  data.train_data="['$DATA_DIR/train.parquet']" \
  trainer.placement.policy_num_gpus_per_node=$NUM_GPUS \
  generator.num_inference_engines="${NUM_GPUS}" \
  generator.sampling_params.stop='["</sql>", "</a b>"]' \
  trainer.run_name="$NAME" \
  trainer.logger=$LOGGER \
  "${MORE[@]}" \
  "$@" 2>&1 | tee log.txt
trainer.epochs=7
"""


def test_the_words_are_those_of_a_real_shell(tmp_path: Path) -> None:
    (tmp_path / "uv").write_text('#!/bin/sh\nprintf "%s\\0" "$@" > words\n')
    (tmp_path / "uv").chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "HOME": "/home/somebody"}
    subprocess.run(["bash", "-c", SCRIPT], cwd=tmp_path, env=environment, capture_output=True, check=False)
    real = (tmp_path / "words").read_text().split("\0")[:-1]
    found = command_of(SCRIPT, "run.sh")
    assert found.others == ["trainer.epochs=7"]
    assert found.words[:2] == ["CUDA_VISIBLE_DEVICES=0", "uv"]
    assert found.unknown == {"trainer.dump_data_batch": ['$(echo "true")']}
    real.remove("trainer.dump_data_batch=true")
    assert [word.replace("$HOME", "/home/somebody") for word in found.words[2:]] == real


def test_a_script_is_converted() -> None:
    conversion = convert_script(SCRIPT, "run.sh")
    assert conversion.values["data.train_data"] == ["~/data/gsm8k/train.parquet"]
    assert conversion.values["generator.inference_engine.num_engines"] == 4
    assert conversion.values["generator.sampling_params.stop"] == ["</sql>", "</a b>"]
    assert conversion.values["trainer.run_name"] == "first-second"
    assert conversion.values["environment.env_class"] == "a b"
    assert conversion.values["trainer.eval_batch_size"] == 16
    wrong = {entry.source: entry.message for entry in conversion.entries if entry.kind in ("unknown", "conflict")}
    assert wrong.keys() == {"trainer.epochs=7", "trainer.dump_data_batch", "environment.env_class"}
    assert "another command" in wrong["trainer.epochs=7"]
    assert '$(echo "true") is known only where the script runs' in wrong["trainer.dump_data_batch"]


def test_one_line_and_windows_line_ends() -> None:
    assert command_of("python -m x a.b=1 c.d='e f'", "f").words == ["python", "-m", "x", "a.b=1", "c.d=e f"]
    assert command_of("x \\\r\n  a.b=1 \\\r\n  c.d=2\r\n", "f").words == ["x", "a.b=1", "c.d=2"]


def test_a_variable_that_is_not_set_stays() -> None:
    script = "x data.train_data=[$WHERE/a.parquet]"
    assert command_of(script, "f").unknown == {"data.train_data": ["$WHERE"]}
    assert "$WHERE is known only where" in convert_script(script, "f").unconverted["data.train_data"]


@pytest.mark.parametrize("written", ["$PWD", "${PWD}", "$(pwd)", "`pwd`"])
def test_the_working_directory_is_the_current_one_until_it_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: str
) -> None:
    monkeypatch.chdir(tmp_path)
    script = f"data={written}/d\nexport PYTHONPATH={written}\nx data.train_data=[$data/a.parquet]"
    found = convert_script(script, "f")
    assert found.values["data.train_data"] == [f"{tmp_path}/d/a.parquet"]
    (note,) = [entry for entry in found.entries if entry.source == "$PWD"]
    assert (note.kind, str(tmp_path) in note.message) == ("translated", True)
    assert not [
        entry for entry in convert_script(f"PYTHONPATH={written} x a.b=1", "f").entries if entry.source == "$PWD"
    ]

    moved = convert_script(f"cd /elsewhere\nx data.train_data=[{written}/a.parquet]", "f")
    assert "$PWD after cd is known only where" in moved.unconverted["data.train_data"]


def test_a_comment_leaves_the_end_of_its_line() -> None:
    assert command_of("N=4 # don't\npython a.b=$N\n", "f").words == ["python", "a.b=4"]


def test_a_comment_ends_a_continued_command() -> None:
    script = "x a.b=1 \\\n  # c.d=2 \\\n  e.f=3\n"
    assert (command_of(script, "f").words, command_of(script, "f").others) == (["x", "a.b=1"], ["e.f=3"])


@pytest.mark.parametrize("text", ["", "echo hello", "x a.b='open", "NAME=value", "a=1"])
def test_what_holds_no_command_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^run\.sh(:1)?: "):
        command_of(text, "run.sh")


INNER = """: "${RUN_NAME:=inner}"
: "${SYNC_DIR:?set it}"
uv run -m skyrl.train.entrypoints.main_base trainer.run_name="$RUN_NAME" trainer.seed=${SEED:-1} trainer.epochs=4 \\
  trainer.ckpt_path="$SYNC_DIR" "$@"
"""


@pytest.mark.parametrize(
    "start", ['bash "$HERE/inner.sh" "$@"', "./inner.sh", "srun --mpi=none bash inner.sh", "sbatch inner.sh"]
)
def test_a_script_that_a_script_starts_is_followed(tmp_path: Path, start: str) -> None:
    (tmp_path / "inner.sh").write_text(INNER)
    outer = f'HERE="$(cd "$(dirname "$0")" && pwd)"\nexport SEED=7\nOTHER=3\nRUN_NAME=outer SYNC_DIR=/tmp/x {start}\n'
    conversion = convert_script(outer, str(tmp_path / "outer.sh"))
    assert conversion.values["trainer.run_name"] == "outer"
    assert conversion.values["trainer.seed"] == 7
    assert conversion.values["trainer.epochs"] == 4
    assert any(entry.source == str(tmp_path / "inner.sh") for entry in conversion.entries)


def test_arguments_reach_the_script_that_is_started(tmp_path: Path) -> None:
    (tmp_path / "inner.sh").write_text(INNER)
    conversion = convert_script("bash inner.sh trainer.epochs=9 trainer.seed=5", str(tmp_path / "outer.sh"))
    assert (conversion.values["trainer.epochs"], conversion.values["trainer.seed"]) == (9, 5)


def test_a_script_that_trains_nothing_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "prepare.sh").write_text("mkdir data")
    (tmp_path / "inner.sh").write_text(INNER)
    outer = "bash prepare.sh\nbash inner.sh trainer.seed=5\n"
    assert convert_script(outer, str(tmp_path / "outer.sh")).values["trainer.seed"] == 5
    with pytest.raises(ConfigError, match=r"prepare\.sh: no command with settings"):
        command_of("bash prepare.sh", str(tmp_path / "outer.sh"))


def test_a_script_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"outer\.sh: starts gone/inner\.sh, which is not there"):
        command_of("bash gone/inner.sh", str(tmp_path / "outer.sh"))


def test_scripts_that_start_each_other_end(tmp_path: Path) -> None:
    (tmp_path / "a.sh").write_text("bash b.sh")
    (tmp_path / "b.sh").write_text("bash a.sh")
    with pytest.raises(ConfigError, match="which is not there to be followed"):
        command_of("bash a.sh", str(tmp_path / "outer.sh"))


def test_valid_bash_that_is_not_followed_is_named_for_what_it_is() -> None:
    with pytest.raises(ConfigError, match=r"run\.sh:2: cannot be followed: associative arrays are not followed"):
        command_of(f"set -x\ndeclare -A SIZES=([a]=1)\n{INNER}", "run.sh")


def test_a_batch_script_that_starts_ray_is_followed() -> None:
    """Slurm sets variables for its `#SBATCH` lines; names of nodes are known only in the job, and are no settings."""
    script = """#!/bin/bash
#SBATCH --nodes=2 --gpus-per-node=4
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
if ((${#nodes[@]} != SLURM_JOB_NUM_NODES)); then
    exit 1
fi
head=${nodes[0]}
srun -w "$head" ray start --head &
srun -w "$head" python -m skyrl.train.entrypoints.main_base trainer.seed=$SLURM_NNODES trainer.placement.policy_num_gpus_per_node="${SLURM_GPUS_PER_NODE}"
"""
    command = command_of(script, "run.sbatch")
    assert command.words[-2:] == ["trainer.seed=2", "trainer.placement.policy_num_gpus_per_node=4"]
    assert not command.unknown
