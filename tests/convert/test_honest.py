"""A converted file is the run that the source was, or it is refused with the reason: scripts of SkyRL, one construct each."""

from pathlib import Path

import pytest

from hpcrl.config import Config
from hpcrl.convert.skyrl.convert import convert_script
from hpcrl.errors import ConfigError
from tests.convert.skyrl_material import ENGINE, command, kinds, load

BASE = (
    "data.train_data=\"['$HOME/t.parquet']\" data.val_data=\"['$HOME/v.parquet']\" trainer.policy.model.path=org/model "
)
MAIN = "uv run --isolated --with 'x==1' -m skyrl.train.entrypoints.main_base "


def script(words: str, before: str = "", program: str = MAIN) -> str:
    return f'set -x\n{before}\n{program}{BASE} {words} "$@"\n'


VALID = {
    "plain": (script("environment.env_class=gsm8k"), {"environment.env_class": "gsm8k"}),
    "the old name of the program": (
        script("generator.num_inference_engines=4", "", "python -m skyrl_train.entrypoints.main_base "),
        {"generator.inference_engine.num_engines": 4},
    ),
    "arithmetic": (
        script("trainer.max_prompt_length=$LONG generator.sampling_params.max_generate_length=$((LONG * 4))", "LONG=$((1024 * 2))"),
        {"trainer.max_prompt_length": 2048, "generator.sampling_params.max_generate_length": 8192},
    ),
    "a decided condition": (
        script("trainer.epochs=$EPOCHS", 'SIZE=big\nEPOCHS=1\nif [ "$SIZE" = big ]; then EPOCHS=5; fi'),
        {"trainer.epochs": 5},
    ),
    "a false condition": (
        script("trainer.epochs=2", "DEBUG=0\nif [[ $DEBUG == 1 ]]; then\n  " + MAIN + "trainer.epochs=9\nfi"),
        {"trainer.epochs": 2},
    ),
    "settings in one variable": (
        script("$MORE trainer.seed=7", 'MORE="trainer.epochs=3 trainer.ckpt_interval=4"'),
        {"trainer.epochs": 3, "trainer.ckpt_interval": 4, "trainer.seed": 7},
    ),
    "a tracker": (script("trainer.logger=wandb"), {"trainer.logger": "wandb"}),
    "nothing to resume": (script("trainer.resume_mode=null"), {"trainer.resume_mode": "latest"}),
    "a name with a date": (script("trainer.run_name=run-$(date +%s) trainer.ckpt_path=/x/$USER"), {"trainer.run_name": None}),
    "one step off-policy": (
        script("trainer.placement.colocate_all=false", "", "uv run -m examples.train.async.main_async "),
        {"trainer.fully_async.max_staleness_steps": 1},
    ),
    "an overlong penalty": (
        script(
            "environment.env_class=gsm8k trainer.algorithm.overlong_buffer_len=$((256 * 2)) trainer.algorithm.overlong_buffer_penalty_factor=0.5",
            "", "uv run -m examples.train.algorithms.dapo.main_dapo ",
        ),
        {
            "environment.reward_function": {"gsm8k": 1.0, "overlong": 1.0}, "environment.env_class": None,
            "environment.overlong_reward.buffer_length": 512, "environment.overlong_reward.penalty_factor": 0.5,
        },
    ),
    "lora": (
        script("trainer.policy.model.lora.rank=8 trainer.policy.model.lora.alpha=32 trainer.policy.optimizer_config.lr=3e-5"),
        {"trainer.policy.model.lora.rank": 8, "trainer.policy.model.lora.alpha": 32.0},
    ),
    "an endpoint": (
        script(f"{ENGINE}enable_http_endpoint=true {ENGINE}http_endpoint_port=9000 {ENGINE}served_model_name=x"),
        {ENGINE + "enable_http_endpoint": True, ENGINE + "http_endpoint_port": 9000, ENGINE + "served_model_name": "x"},
    ),
}  # fmt: skip

REFUSED = {
    "lora by eva": (script("trainer.policy.model.lora.rank=8 trainer.policy.model.lora.init_method=eva"), 'model.lora.init_method: adapters are made when a run starts'),
    "a program of its own": (script("", "", "python -m mine.main "), "unconverted.mine.main: a program of its own"),
    "a file of its own": (script("", "", "python train/mine.py "), "unconverted.train/mine.py: a program of its own"),
    "another script": (script("trainer.epochs=2", "", "bash other/run.sh "), "unconverted.other/run.sh: a script of its own"),
    "no training": (script("", "", "uv run -m skyrl.train.entrypoints.main_generate "), "main_generate: only generates and scores"),
    "an unknown environment": (script("environment.env_class=mine"), "environment.env_class: expected one of"),
    "a misspelt environment": (script("environment.env_class=gms8k"), "did you mean gsm8k"),
    "a penalty without its reward": (
        script("environment.env_class=math trainer.algorithm.overlong_buffer_len=9 trainer.algorithm.overlong_buffer_penalty_factor=1"),
        "environment.overlong_reward is that",
    ),
    "a setting of other code": (script("generator.my_own_limit=3"), "unconverted.generator.my_own_limit"),
    "engines of others": (script("generator.inference_engine.run_engines_locally=false"), "run_engines_locally"),
    "a command's output": (script("trainer.train_batch_size=$(nproc)"), "$(nproc) is known only where the script runs"),
    "a variable of nobody": (script("trainer.train_batch_size=$BATCH"), "$BATCH is known only where the script runs"),
    "further words": (script("$(cat more.txt)"), "$(cat more.txt) is known only where the script runs"),
    "a file that may exist": (script("trainer.epochs=$N", "N=1\nif [ -e big ]; then N=2; fi"), "$N is known only"),
    "perhaps not started": ("if nvidia-smi; then\n" + script("") + "fi", "decides whether the command is started"),
    "two runs": (script("") + script("trainer.epochs=2"), "belongs to another command"),
    "from a checkpoint of theirs": (script("trainer.resume_mode=from_path trainer.resume_path=/x"), "a checkpoint of SkyRL"),
}  # fmt: skip


@pytest.mark.parametrize("name", VALID)
def test_what_hpcrl_can_do_is_the_run_that_it_was(name: str, tmp_path: Path) -> None:
    text, expected = VALID[name]
    config = load(convert_script(text, "run.sh"), tmp_path)
    for path, value in expected.items():
        found: object = config
        for part in path.split("."):
            found = getattr(found, part)
        assert (path, found) == (path, value)


@pytest.mark.parametrize("name", REFUSED)
def test_what_it_cannot_do_is_refused_with_the_reason(name: str, tmp_path: Path) -> None:
    text, reason = REFUSED[name]
    conversion = convert_script(text, "run.sh")
    with pytest.raises(ConfigError) as caught:
        load(conversion, tmp_path)
    assert reason in str(caught.value)
    assert conversion.incomplete
    header = (tmp_path / "converted.toml").read_text().partition("\n\n")[0]
    assert all(line.startswith("#") for line in header.splitlines())
    assert name == "a misspelt environment" or not {"conflict", "unknown", "unimplemented"}.isdisjoint(header.split())


def test_settings_that_are_settled_by_hand_are_accepted(tmp_path: Path) -> None:
    text = convert_script(script("", "", "python -m mine.main "), "run.sh").to_toml()
    (tmp_path / "settled.toml").write_text(
        "\n".join(line for line in text.splitlines() if not line.startswith('"mine.main"'))
    )
    assert Config.from_toml([tmp_path / "settled.toml"]).environment.env_class is None


@pytest.mark.parametrize(
    ("words", "shared"),
    [
        ([], True),
        (
            [
                "trainer.placement.policy_num_gpus_per_node=4",
                ENGINE + "num_engines=2",
                ENGINE + "tensor_parallel_size=2",
            ],
            True,
        ),
        ([ENGINE + "num_engines=2"], False),
        (["trainer.strategy=megatron"], True),
        (["trainer.placement.colocate_all=false"], False),
    ],
)
def test_trainer_and_engines_share_gpus_where_they_did_and_can(words: list[str], shared: bool) -> None:
    offload = "trainer.policy.optimizer_config.offload_after_step"
    conversion = command(*words, f"{offload}=false")
    assert conversion.values["trainer.placement.colocate_all"] is shared
    assert kinds(conversion, offload) == {"mapped" if shared else "dropped"}
