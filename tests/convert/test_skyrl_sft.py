"""SkyRL's supervised fine-tuning, a program with settings of its own."""

from pathlib import Path

import pytest

from hpcrl.convert.conversion import Conversion
from tests.convert.skyrl_material import command, entries, kinds, load

PROGRAM = ("uv", "run", "--isolated", "python", "-m", "skyrl.train.main_sft")
WORDS = (
    "strategy=fsdp",
    "model.path=org/model",
    "train_datasets=[org/rows]",
    "train_dataset_splits=[train[:1000]]",
    "max_length=512",
    "num_steps=10",
    "batch_size=8",
    "placement.num_gpus_per_node=2",
    "ckpt_path=",
    "logger=console",
)


def sft(*words: str) -> Conversion:
    return command(*PROGRAM, *WORDS, *words)


def test_a_run_of_conversations(tmp_path: Path) -> None:
    config = load(sft(), tmp_path)
    assert config.trainer.mode == "sft"
    assert config.data.train_data == ["org/rows:train[:1000]"]
    assert (config.data.conversation_column, config.data.train_on_what) == ("messages", "last_turn")
    assert (config.trainer.train_batch_size, config.trainer.policy_mini_batch_size) == (8, 8)
    assert (config.trainer.micro_train_batch_size_per_gpu, config.trainer.max_length) == (2, 512)
    assert (config.trainer.max_steps, config.trainer.epochs) == (10, 10)
    assert config.trainer.ckpt_interval == 0  # a run without ckpt_path writes none
    assert config.trainer.eval_interval == 0
    assert config.slurm.gpus_per_node == 2
    assert config.trainer.policy.optimizer_config.lr == 1e-6
    assert config.trainer.strategy == "fsdp2"


def test_what_is_left_out_has_the_defaults_of_fine_tuning(tmp_path: Path) -> None:
    config = load(command(*PROGRAM, "max_length=512"), tmp_path)
    assert config.trainer.policy.model.path == "Qwen/Qwen3-0.6B"
    assert config.trainer.strategy == "megatron"
    assert config.trainer.policy.megatron_config.tensor_model_parallel_size == 2
    assert config.trainer.policy.megatron_config.pipeline_model_parallel_size == 2
    assert config.trainer.placement.policy_num_gpus_per_node == config.slurm.gpus_per_node == 4
    assert config.data.train_data == ["yahma/alpaca-cleaned:train[:100]"]
    assert config.data.format == "prompt_response"
    assert (config.data.prompt_column, config.data.response_column) == ("instruction", "output")
    assert (config.trainer.epochs, config.trainer.max_steps, config.trainer.train_batch_size) == (1, None, 4)


def test_names_of_earlier_versions(tmp_path: Path) -> None:
    words = (
        "dataset_name=org/rows",
        "dataset_split=train[:30]",
        "eval_dataset_name=org/rows",
        "eval_dataset_split=train[-5:]",
    )
    words += (
        "optimizer.lr=2e-5",
        "fsdp.cpu_offload=true",
        "use_sample_packing=false",
        "strategy=fsdp2",
        "max_length=9",
    )
    config = load(command(*PROGRAM, *words, "eval_interval=50"), tmp_path)
    assert config.data.train_data == ["org/rows:train[:30]"]
    assert config.data.val_data == ["org/rows:train[-5:]"]
    assert config.trainer.eval_interval == 50
    assert config.trainer.policy.optimizer_config.lr == 2e-5
    assert config.trainer.policy.fsdp_config.cpu_offload
    assert not config.trainer.use_sample_packing


def test_packed_batches_are_counted_in_tokens(tmp_path: Path) -> None:
    megatron = ("strategy=megatron", "megatron_config.pipeline_model_parallel_size=1", "use_sequence_packing=true")
    assert load(sft(*megatron), tmp_path).trainer.max_tokens_per_micro_batch == 512
    config = load(sft(*megatron, "max_tokens_per_microbatch=2048"), tmp_path)
    assert config.trainer.max_tokens_per_micro_batch == 2048
    assert config.trainer.micro_train_batch_size_per_gpu is None


def test_an_evaluation_without_an_interval_is_one_after_the_last_step(tmp_path: Path) -> None:
    config = load(sft("eval_datasets=[org/rows]", "eval_dataset_splits=[test]"), tmp_path)
    assert config.data.val_data == ["org/rows:test"]
    assert config.trainer.eval_interval > 1e6
    assert not config.trainer.eval_before_train


@pytest.mark.parametrize(
    ("splits", "shares", "often"),
    [
        ("[train[:800],train[:200]]", "[0.8,0.2]", []),
        ("[train[:800],train[200:400]]", "[1,1]", [0.625, 2.5]),
        ("[train[:100],train[:100]]", None, []),
    ],
)
def test_shares_of_datasets_become_how_often_their_rows_are_trained(
    splits: str, shares: str | None, often: list[float], tmp_path: Path
) -> None:
    words = ["train_datasets=[org/a,org/b]", f"train_dataset_splits={splits}"]
    conversion = sft(*words, *([f"train_dataset_weights={shares}"] if shares else []))
    assert kinds(conversion, "train_dataset_weights") >= {"differs"}
    assert load(conversion, tmp_path).data.weights == often


@pytest.mark.parametrize(
    ("words", "source", "message"),
    [
        (["train_datasets=[org/a,org/b]", "train_dataset_splits=[train,train]"], "train_dataset_weights", "set it"),
        (
            ["train_datasets=[org/a,yahma/alpaca-cleaned]", "train_dataset_splits=[train[:9],train[:9]]"],
            "train_datasets",
            "data.format is one for all datasets",
        ),
        (["train_dataset_splits=[train,test]"], "train_dataset_splits", "2 splits of 1 datasets"),
        (["max_length=null"], "max_length", "Here it is a number"),
        (["sampler=custom"], "sampler", "a class of the user's"),
        (["resume_from=/ckpts/global_step_3"], "resume_from", "which hpcrl cannot read"),
        (["dummy_run_full_ctx=true"], "dummy_run_full_ctx", "every run trains on a dataset"),
        (["tools_key=functions"], "tools_key", "the column of tools is called tools here"),
    ],
)
def test_what_it_cannot_be_is_a_conflict(words: list[str], source: str, message: str) -> None:
    conversion = sft(*words)
    assert conversion.incomplete
    assert any(entry.kind == "conflict" and message in entry.message for entry in entries(conversion, source))


def test_rows_of_tokens(tmp_path: Path) -> None:
    words = ("pretokenized_dataset_paths=[/data/store]", "eval_pretokenized_dataset_paths=[/data/held]", "max_length=9")
    config = load(command(*PROGRAM, *words, "sampler=sequential"), tmp_path)
    assert (config.data.train_data, config.data.val_data) == (["/data/store"], ["/data/held"])
    assert (config.data.format, config.data.shuffle) == ("tokens", False)


def test_a_setting_of_the_other_program_is_unknown() -> None:
    assert kinds(sft("trainer.epochs=2"), "trainer") == {"unknown"}
