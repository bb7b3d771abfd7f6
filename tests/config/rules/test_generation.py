"""Combinations of `data`, `generator` and `environment` that cannot work, and those that can."""

from pathlib import Path

import pytest

from hpcrl.config import Config
from hpcrl.config.sections.generator import InferenceEngineConfig
from hpcrl.errors import ConfigError

GOOD = """
[data]
train_data = ["t"]
val_data = ["v"]
[trainer.policy.model]
path = "m"
"""
SAMPLING = "generator.sampling_params"
EVALUATION = "generator.eval_sampling_params"


def load(tmp_path: Path, *overrides: str) -> Config:
    path = tmp_path / "good.toml"
    path.write_text(GOOD)
    return Config.from_toml([path], overrides)


@pytest.mark.parametrize(
    ("overrides", "path", "words"),
    [
        (["data.test_size=0.1"], "data.test_size", "no effect with data.val_data"),
        (["data.test_size=1.5", "data.val_data=[]"], "data.test_size", "below 1 or a whole number"),
        (["data.test_size=0", "data.val_data=[]"], "data.test_size", "more than 0"),
        (["data.shuffle_seed=-1"], "data.shuffle_seed", "at least 0"),
        (["data.shuffle=false", "data.shuffle_seed=3"], "data.shuffle_seed", "no effect without data.shuffle=true"),
        (["data.response_column=prompt"], "data.response_column", "another column than data.prompt_column"),
        (["trainer.eval_batch_size=0"], "trainer.eval_batch_size", "at least 1"),
        (
            ["trainer.fully_async.num_parallel_generation_workers=1023"],
            "trainer.fully_async.num_parallel_generation_workers",
            "from 1024",
        ),
        (
            [f"{SAMPLING}.additional_kwargs.max_tokens=3"],
            f"{SAMPLING}.additional_kwargs.max_tokens",
            "max_generate_len",
        ),
        ([f"{SAMPLING}.additional_kwargs.top_k=3"], f"{SAMPLING}.additional_kwargs.top_k", f"set {SAMPLING}.top_k"),
        ([f"{SAMPLING}.additional_kwargs.n=3"], f"{SAMPLING}.additional_kwargs.n", "hpcrl sets"),
        ([f"{EVALUATION}.additional_kwargs.seed=3"], f"{EVALUATION}.additional_kwargs.seed", "hpcrl sets"),
        ([f"{EVALUATION}.additional_kwargs.stop=3"], f"{EVALUATION}.additional_kwargs.stop", f"set {EVALUATION}.stop"),
    ],
)
def test_impossible_values(tmp_path: Path, overrides: list[str], path: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, *overrides)
    (line,) = str(caught.value).splitlines()
    assert f"{path}: " in line
    assert words in line.split(f"{path}: ")[1]


@pytest.mark.parametrize(
    "overrides",
    [
        ["data.test_size=0.1", "data.val_data=[]"],
        ["data.test_size=7", "data.val_data=[]", "trainer.eval_interval=0"],
        ["data.prompt_column=question", "data.response_column=answer"],
        ["trainer.fully_async.num_parallel_generation_workers=2048", "trainer.fully_async.max_staleness_steps=1"],
        [f"{EVALUATION}.additional_kwargs={{min_tokens=3, presence_penalty=0.5}}"],
        [f"{EVALUATION}.include_stop_str_in_output=false"],
    ],
)
def test_possible_combinations_are_accepted(tmp_path: Path, overrides: list[str]) -> None:
    load(tmp_path, *overrides)


def test_order_of_prompts_follows_the_seed_of_the_run_unless_set(tmp_path: Path) -> None:
    def seed(*overrides: str) -> int | None:
        config = load(tmp_path, "trainer.seed=7", *overrides)
        return config.order_seed

    assert seed() == 7
    assert seed("data.shuffle_seed=0") == 0
    assert seed("data.shuffle=false") is None


def test_samples_follow_the_seed_of_the_run_unless_set(tmp_path: Path) -> None:
    def seed(*overrides: str) -> int:
        config = load(tmp_path, "trainer.seed=7", *overrides)
        return config.sampling_seed

    assert seed() == 7
    assert seed("generator.inference_engine.seed=0") == 0


def test_evaluation_samples_as_training_where_it_is_not_set(tmp_path: Path) -> None:
    training = [f"{SAMPLING}.include_stop_str_in_output=false", f"{SAMPLING}.additional_kwargs.ignore_eos=true"]
    same = load(tmp_path, *training).generator.eval_sampling
    assert (same.include_stop_str_in_output, same.additional_kwargs) == (False, {"ignore_eos": True})
    own = [f"{EVALUATION}.include_stop_str_in_output=true", f"{EVALUATION}.additional_kwargs={{}}"]
    other = load(tmp_path, *training, *own).generator.eval_sampling
    assert (other.include_stop_str_in_output, other.additional_kwargs) == (True, {})


def test_engines_have_the_trainers_rotary_positions_unless_set(tmp_path: Path) -> None:
    scaling = {"rope_type": "linear", "factor": 2.0}
    trainer = ["trainer.rope_theta=7.0", "trainer.rope_scaling={rope_type='linear', factor=2.0}"]
    assert load(tmp_path).engine_rope == ({}, None)
    assert load(tmp_path, *trainer).engine_rope == (scaling, 7.0)
    assert load(tmp_path, *trainer, "generator.rope_theta=9.0").engine_rope == (scaling, 9.0)
    own = {"rope_type": "linear", "factor": 3.0}
    assert load(
        tmp_path, *trainer, "generator.rope_scaling.factor=3.0", "generator.rope_scaling.rope_type=linear"
    ).engine_rope == (
        own,
        7.0,
    )


def test_gpus_of_a_replica(tmp_path: Path) -> None:
    assert InferenceEngineConfig().gpus == 1
    assert InferenceEngineConfig(tensor_parallel_size=3, pipeline_parallel_size=2).gpus == 6
    wide = load(tmp_path, "generator.inference_engine.tensor_parallel_size=3", "slurm.gpus_per_node=8")
    assert wide.replicas_per_node == 2
