"""SkyRL's files and command lines converted: what the run did there, it does here, and what has no counterpart is reported."""

import json
from pathlib import Path
from typing import Any

import pytest

from hpcrl.config import Config
from hpcrl.convert.conversion import Conversion
from hpcrl.convert.skyrl.convert import convert_yaml
from hpcrl.convert.skyrl.fields import SKYRL_DEFAULTS
from tests.convert.skyrl_material import ALGORITHM, CORRECTION, CRITIC, ENGINE, command, entries, kinds, load
from tests.paths import ROOT

OVERVIEW = ROOT / "tests" / "spec" / "skyrl_overview.yaml"


# The page of the old layout


def test_the_overview_page_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    conversion = convert_yaml(OVERVIEW.read_bytes(), "overview")
    config = load(conversion, tmp_path)
    assert config.data.train_data == ["/home/somebody/data/gsm8k/train.parquet"]
    assert config.data.val_data == ["/home/somebody/data/gsm8k/validation.parquet"]
    assert config.trainer.policy.model.path == "Qwen/Qwen2.5-1.5B-Instruct"
    assert config.trainer.placement.policy_num_gpus_per_node == config.slurm.gpus_per_node == 4
    assert config.generator.inference_engine.tensor_parallel_size == 4
    assert config.generator.inference_engine.enforce_eager is False
    assert config.environment.env_class == "gsm8k"
    assert (config.trainer.project_name, config.trainer.run_name) == ("skyrl", "test_run")
    assert config.generator.eval_sampling.temperature == 1.0  # the page's, not greedy


def test_the_overview_page_says_what_the_run_did() -> None:
    conversion = convert_yaml(OVERVIEW.read_text(), "overview")
    values = conversion.values
    assert values["trainer.algorithm.loss_reduction"] == "sequence_mean"  # the old formula
    assert values["trainer.algorithm.policy_loss_type"] == "regular"
    assert values["trainer.algorithm.kl_estimator_type"] == "k3"
    assert values["trainer.placement.colocate_all"] is True
    assert values["trainer.ref.fsdp_config.cpu_offload"] is True
    assert values["generator.inference_engine.weight_sync_backend"] == "filesystem"
    assert values["trainer.logger"] == "wandb"
    assert "generator.max_input_length" not in values  # it is trainer.max_prompt_length, as it would be anyway
    assert not any(path.startswith("trainer.critic.") and value is not None for path, value in values.items())
    assert not {entry.kind for entry in conversion.entries} & {"unknown", "conflict"}


def test_the_overview_page_is_reported_line_by_line() -> None:
    conversion = convert_yaml(OVERVIEW.read_text(), "overview")
    (lost,) = entries(conversion, "trainer.policy.deepspeed_config")
    assert lost.kind == "dropped"
    assert kinds(conversion, "trainer.placement.reward_num_nodes") == {"dropped"}
    assert kinds(conversion, "generator.remote_inference_engine_urls") == {"dropped"}
    reported = {entry.source for entry in conversion.entries}
    assert len(reported & set(_leaves(OVERVIEW.read_text()))) == len(_leaves(OVERVIEW.read_text()))


def _leaves(text: str) -> list[str]:
    """Return the dotted names of a YAML document of two-space indents, without a YAML reader."""
    found, above = [], []
    for line in text.splitlines():
        name, _, value = line.strip().partition(":")
        del above[(len(line) - len(line.lstrip())) // 2 :]
        above.append(name)
        if value.strip():
            found.append(".".join(above))
    return found


# Both layouts, both ways of giving them


@pytest.mark.parametrize("names", ["generator.", ENGINE], ids=["old", "present"])
def test_overrides_of_both_layouts_say_the_same(names: str, tmp_path: Path) -> None:
    old = names == "generator."
    conversion = command(
        "data.train_data=['a.parquet', b.jsonl]",
        f"{names}{'num_inference_engines' if old else 'num_engines'}=4",
        f"{names}{'inference_engine_tensor_parallel_size' if old else 'tensor_parallel_size'}=2",
        f"{names}enforce_eager=false",
        "trainer.policy.optimizer_config.lr=5e-7",
        "trainer.placement.policy_num_gpus_per_node=8",
    )
    config = load(conversion, tmp_path)
    engine = config.generator.inference_engine
    assert (engine.num_engines, engine.tensor_parallel_size, engine.enforce_eager) == (4, 2, False)
    assert config.data.train_data == ["a.parquet", "b.jsonl"]
    assert config.trainer.policy.optimizer_config.lr == 5e-7
    assert config.slurm.gpus_per_node == 8
    assert not conversion.incomplete


def test_a_command_without_anything_is_skyrls_default_run(tmp_path: Path) -> None:
    config = load(command("trainer.epochs=1"), tmp_path)
    assert config.data.train_data == [str(Path("~/data/gsm8k/train.parquet").expanduser())]
    assert config.trainer.policy.model.path == "Qwen/Qwen2.5-1.5B-Instruct"
    assert config.environment.env_class == "gsm8k"
    assert config.slurm.gpus_per_node == 1
    assert config.generator.eval_sampling.temperature == 0.0
    assert config.trainer.algorithm.loss_reduction == "token_mean"


def test_a_yaml_of_the_present_layout_with_every_default_loads(tmp_path: Path) -> None:
    tree: dict[str, Any] = {}
    for path, value in SKYRL_DEFAULTS.items():
        *above, last = path.split(".")
        table = tree
        for name in above:
            table = table.setdefault(name, {})
        table[last] = value
    conversion = convert_yaml(json.dumps(tree), "dump")
    assert {entry.kind for entry in conversion.entries} <= {
        "mapped",
        "translated",
        "dropped",
        "differs",
        "unimplemented",
    }
    config = load(conversion, tmp_path)
    assert (
        config.trainer.fully_async.max_staleness_steps == 0
    )  # a dump names it, but the program is the synchronous one
    assert config.generator.n_samples_per_prompt == 5


def test_what_an_environment_needs_is_written_out_where_skyrl_has_a_default() -> None:
    path = "environment.skyrl_gym.text2sql.db_path"
    assert command("environment.env_class=text2sql").values[path] == "/home/ray/default/sql_data"
    assert path not in command("environment.env_class=gsm8k").values


# Settings that are gone, or written differently


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([ALGORITHM + "ppo_loss_type=dual_clip"], {ALGORITHM + "policy_loss_type": "dual_clip"}),
        ([ALGORITHM + "init_kl_coef=0.1"], {ALGORITHM + "kl_loss_coef": 0.1}),
        (
            [ALGORITHM + "kl_target=0.3", ALGORITHM + "kl_ctrl.type=adaptive"],
            {ALGORITHM + "kl_ctrl.kl_target": 0.3},
        ),
        ([ALGORITHM + "use_kl_estimator_k3=true"], {ALGORITHM + "kl_estimator_type": "k3"}),
        ([ALGORITHM + "use_kl_estimator_k3=false"], {ALGORITHM + "kl_estimator_type": "k1"}),
        ([ALGORITHM + "use_abs_kl=true"], {ALGORITHM + "kl_estimator_type": "abs"}),
        (
            [ALGORITHM + "use_kl_estimator_k3=false", ALGORITHM + "use_abs_kl=true"],
            {ALGORITHM + "kl_estimator_type": "abs"},
        ),
        (
            [ALGORITHM + "use_tis=true", ALGORITHM + "tis_imp_ratio_cap=3.0"],
            {CORRECTION + "tis_ratio_type": "token", CORRECTION + "token_tis_ratio_clip_high": 3.0},
        ),
        ([ALGORITHM + "value_clip=null", CRITIC], {ALGORITHM + "value_clip": 0.0}),
        (
            ["trainer.num_warmup_steps=7", CRITIC],
            {f"trainer.{model}.optimizer_config.num_warmup_steps": 7 for model in ("policy", "critic")},
        ),
        (
            ["trainer.policy.model.lora.rank=8", "trainer.target_modules=[q_proj]", "trainer.exclude_modules=lm_head"],
            {
                "trainer.policy.model.lora.target_modules": ["q_proj"],
                "trainer.policy.model.lora.exclude_modules": "lm_head",
            },
        ),
        (["trainer.resume_mode=null"], {"trainer.resume_mode": "latest"}),
        (
            ["trainer.policy.fsdp_config.reshard_after_forward=false"],
            {"trainer.policy.fsdp_config.reshard_after_forward": False},
        ),
        (
            ["trainer.policy.fsdp_config.reshard_after_forward=4"],
            {"trainer.policy.fsdp_config.reshard_after_forward": 4},
        ),
        (["data.train_data=one.parquet"], {"data.train_data": ["one.parquet"]}),
        (["data.train_data=['$HOME/a.parquet', '~/b.json']"], {"data.train_data": ["~/a.parquet", "~/b.json"]}),
        (["data.train_data=['${HOME}/a.parquet']"], {"data.train_data": ["~/a.parquet"]}),
        (["trainer.policy.model.path=$HOME/models/x"], {"trainer.policy.model.path": "~/models/x"}),
        (["data.val_data=null", "trainer.eval_interval=-1"], {"data.val_data": []}),
        ([ENGINE + "weight_sync_backend=nccl"], {ENGINE + "weight_sync_backend": "filesystem"}),
        (["trainer.logger=console"], {"trainer.logger": "console"}),
        (["trainer.logger=[console, mlflow]"], {"trainer.logger": ["console", "mlflow"]}),
        (["trainer.project_name='my project: 2'"], {"trainer.project_name": "my-project-2"}),
        (["trainer.run_name=1234"], {"trainer.run_name": "1234"}),
        (
            ["trainer.strategy=megatron", "trainer.policy.megatron_config.lora_config.lora_type=canonical_lora"],
            {"trainer.policy.megatron_config.lora_type": "canonical_lora", "trainer.strategy": "megatron"},
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_values_that_are_written_differently(words: list[str], expected: dict[str, Any]) -> None:
    conversion = command(*words)
    assert {path: conversion.values.get(path) for path in expected} == expected
    assert not {entry.kind for entry in conversion.entries} & {"unknown"}


@pytest.mark.parametrize("cap", [[], [ALGORITHM + "tis_imp_ratio_cap=-1"], [ALGORITHM + "tis_imp_ratio_cap=0.0"]])
def test_a_cap_that_would_turn_the_loss_around_is_not_taken(cap: list[str]) -> None:
    conversion = command(ALGORITHM + "use_tis=true", CORRECTION + "token_tis_ratio_clip_high=-4", *cap)
    assert conversion.values[CORRECTION + "tis_ratio_type"] == "token"
    assert CORRECTION + "token_tis_ratio_clip_high" not in conversion.values
    assert any("fault" in entry.message for entry in entries(conversion, ALGORITHM + "tis_imp_ratio_cap"))


@pytest.mark.parametrize(
    ("value", "kind"), [("null", "dropped"), ("0", "dropped"), ("1", "dropped"), ("5", "conflict")]
)
def test_logprobs_are_always_returned(value: str, kind: str) -> None:
    name = "generator.sampling_params.logprobs"
    conversion = command(f"{name}={value}")
    (entry,) = entries(conversion, name)
    assert (entry.kind, entry.target) == (kind, "")
    assert f"{kind:13} {name}" in conversion.to_toml()


def test_directories_of_checkpoints_and_exports(tmp_path: Path) -> None:
    """A run has a folder of its own below them; what is no directory is left out, and said."""
    conversion = command("trainer.ckpt_path=$HOME/ckpts", "trainer.export_path=out/exports")
    config = load(conversion, tmp_path)
    assert config.slurm.checkpoint_root == f"{Path.home()}/ckpts"
    assert config.slurm.export_root == f"{tmp_path}/out/exports"
    for value in ("s3://bucket/ckpts", "/scratch/$USER"):
        conversion = command(f"trainer.ckpt_path={value}")
        assert "slurm.checkpoint_root" not in conversion.values
        (left_out,) = entries(conversion, "slurm.checkpoint_root")
        assert (left_out.kind, value in left_out.message) == ("dropped", True)


@pytest.mark.parametrize(
    ("word", "kind"),
    [
        (ALGORITHM + "normalize_reward=true", "dropped"),
        ("trainer.bf16=true", "dropped"),
        ("trainer.bf16=false", "dropped"),
        ("trainer.log_path=/tmp", "dropped"),
        ("trainer.policy.model.lora.lora_sync_path=/tmp", "dropped"),
        (ENGINE + "weight_transfer_threshold_cuda_ipc_GB=2.0", "dropped"),
        ("trainer.critic.optimizer_config.lr=1e-5", "dropped"),
        ("trainer.policy.megatron_config.tensor_model_parallel_size=2", "dropped"),
        ("trainer.fully_async.max_staleness_steps=2", "dropped"),
        ("deepspeed_config.zero_optimization.stage=3", "dropped"),
        ("generator.async_engine=false", "dropped"),
        ("generator.batched=true", "dropped"),
        ("generator.run_engines_locally=true", "dropped"),
        ("generator.run_engines_locally=false", "conflict"),
        ("generator.remote_inference_engine_urls=['a:1']", "dropped"),
        (ENGINE + "external_proxy_url=http://a:1", "conflict"),
        (ENGINE + "http_endpoint_port=9000", "dropped"),
        (ENGINE + "served_model_name=x", "dropped"),
        (ENGINE + "distributed_executor_backend=mp", "dropped"),
        (ENGINE + "enable_ray_prometheus_stats=true", "dropped"),
        (ENGINE + "override_existing_update_group=enable", "dropped"),
        (ENGINE + "vllm_v1_disable_multiproc=false", "dropped"),
        ("trainer.resume_mode=from_path", "conflict"),
        ("trainer.strategy=deepspeed", "conflict"),
        ("generator.backend=sglang", "conflict"),
        ("data.train_data=['$DATA/train.parquet']", "conflict"),
        ("data.train_data=3", "conflict"),
        ("trainer.epochs=null", "conflict"),
        ("trainer.epochs=many", "conflict"),
        ("trainer=3", "conflict"),
    ],
)
def test_what_becomes_of_a_setting_without_a_counterpart(word: str, kind: str) -> None:
    conversion = command(word)
    name = "deepspeed_config" if word.startswith("deepspeed") else word.partition("=")[0]
    found = [entry for entry in entries(conversion, name) if entry.kind == kind]
    assert found, [str(entry) for entry in conversion.entries]
    assert found[0].message
    assert ("conflict" in {entry.kind for entry in conversion.entries}) == (kind == "conflict")


def test_kl_in_the_reward_is_left_out_where_the_loss_has_no_advantages(tmp_path: Path) -> None:
    words = ["use_kl_loss=false", "use_kl_in_reward=true", "policy_loss_type=cross_entropy"]
    conversion = command(*(ALGORITHM + word for word in words), "trainer.ref.model.path=/models/reference")
    for name in (ALGORITHM + "use_kl_in_reward", "trainer.ref.model.path"):
        assert kinds(conversion, name) == {"dropped"}, name
    assert not load(conversion, tmp_path).trainer.uses_reference


def test_substitutes_are_written() -> None:
    conversion = command("trainer.strategy=deepspeed", "generator.backend=sglang")
    assert conversion.values["trainer.strategy"] == "fsdp2"
    assert conversion.values[ENGINE + "backend"] == "vllm"


def test_two_names_of_one_setting_that_differ() -> None:
    conversion = command("generator.num_inference_engines=2", ENGINE + "num_engines=3")
    assert "conflict" in {entry.kind for entry in conversion.entries}
    agreeing = command("generator.num_inference_engines=3", ENGINE + "num_engines=3")
    assert not agreeing.incomplete


# What a source leaves out


def test_an_old_file_that_leaves_things_out_has_the_old_defaults() -> None:
    conversion = convert_yaml("trainer: {algorithm: {ppo_loss_type: regular}}\ngenerator: {max_turns: 2}", "old")
    values = conversion.values
    assert values["trainer.placement.policy_num_gpus_per_node"] == values[ENGINE + "tensor_parallel_size"] == 4
    assert values[ENGINE + "enforce_eager"] is False
    assert values["generator.use_conversation_multi_turn"] is False
    assert values[ALGORITHM + "loss_reduction"] == "sequence_mean"
    assert values["generator.eval_sampling_params.temperature"] == 1.0


def test_an_old_file_that_names_its_reduction_keeps_it() -> None:
    flat = "generator: {num_inference_engines: 1}\n"
    assert convert_yaml(flat, "old").values[ALGORITHM + "loss_reduction"] == "sequence_mean"
    named = convert_yaml(flat + "trainer: {algorithm: {loss_reduction: token_mean}}", "old")
    assert named.values[ALGORITHM + "loss_reduction"] == "token_mean"
    later = convert_yaml(flat + "trainer: {algorithm: {policy_loss_type: regular}}", "old")
    assert ALGORITHM + "loss_reduction" not in later.values


def test_flat_names_on_a_command_line_have_the_present_defaults() -> None:
    values = command("generator.num_inference_engines=4").values
    assert "trainer.placement.policy_num_gpus_per_node" not in values
    assert ALGORITHM + "loss_reduction" not in values


def test_a_penalty_that_skyrl_never_hands_on_is_left_out(tmp_path: Path) -> None:
    name = "generator.sampling_params.repetition_penalty"
    conversion = command(f"{name}=1.2", "generator.eval_sampling_params.repetition_penalty=1.2")
    assert kinds(conversion, name) == {"dropped"}
    generator = load(conversion, tmp_path).generator
    assert (generator.sampling_params.repetition_penalty, generator.eval_sampling.repetition_penalty) == (1.0, 1.2)


def sampled_in_evaluation(conversion: Conversion, folder: Path) -> tuple[Any, ...]:
    sampling = load(conversion, folder).generator.eval_sampling
    return sampling.temperature, sampling.top_p, sampling.max_generate_length, sampling.stop or None


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], (0.0, 1.0, 1024, None)),
        (["generator.sampling_params.max_generate_length=50"], (0.0, 1.0, 50, None)),
        (["generator.sampling_params.stop=['</a>']"], (0.0, 1.0, 1024, None)),
        (["generator.eval_sampling_params.top_p=0.7"], (1.0, 0.7, 1024, None)),
        (
            ["generator.eval_sampling_params.top_p=0.7", "generator.sampling_params.max_generate_length=50"],
            (1.0, 0.7, 1024, None),
        ),
        (
            ["generator.eval_sampling_params.stop=null", "generator.sampling_params.stop=['</a>']"],
            (1.0, 1.0, 1024, None),
        ),
        (["generator.eval_sampling_params.temperature=1.0"], (1.0, 1.0, 1024, None)),
        (["generator.eval_sampling_params=null"], (0.0, 1.0, 1024, None)),
        (
            ["generator.sampling_params.temperature=0.6", "generator.eval_sampling_params.temperature=0.6"],
            (0.6, 1.0, 1024, None),
        ),
    ],
)
def test_evaluation_samples_as_in_skyrl(words: list[str], expected: tuple[Any, ...], tmp_path: Path) -> None:
    assert sampled_in_evaluation(command(*words, "trainer.epochs=1"), tmp_path) == expected


def test_fully_asynchronous_training_has_its_staleness() -> None:
    module = ["-m", "examples.fully_async.main_fully_async"]
    words = ["trainer.placement.colocate_all=false", "trainer.train_batch_size=256"]
    values = command(*module, *words).values
    assert values["trainer.fully_async.max_staleness_steps"] == 4
    assert values["trainer.fully_async.num_parallel_generation_workers"] == 768
    named = command(
        *words, "trainer.fully_async.max_staleness_steps=2", "trainer.fully_async.num_parallel_generation_workers=512"
    )
    assert named.values["trainer.fully_async.max_staleness_steps"] == 2
    synchronous = command(
        "-m", "skyrl_train.entrypoints.main_base", *words, "trainer.fully_async.max_staleness_steps=2"
    )
    assert "trainer.fully_async.max_staleness_steps" not in synchronous.values


def test_placement_of_reference_and_critic() -> None:
    four = "trainer.placement.policy_num_gpus_per_node=4"
    apart = ["trainer.placement.colocate_all=false", "trainer.placement.colocate_policy_ref=false"]
    ref = "trainer.placement.ref_num_gpus_per_node"
    assert ref not in command(four, f"{ref}=4").values
    assert command(four, *apart).values[ref] == 1  # SkyRL's default, which is not the policy's 4
    assert ref not in command(four, *apart, ALGORITHM + "use_kl_loss=false").values
    shared = command(four, f"{ref}=2")
    assert ref not in shared.values
    assert kinds(shared, ref) == {"conflict"}
    critic = "trainer.placement.critic_num_gpus_per_node"
    assert command(four, *apart, CRITIC).values[critic] == 1
    assert command(four, *apart, CRITIC, f"{critic}=4").values[critic] == 4, "as many as the policy, on GPUs of its own"
    assert critic not in command(four, CRITIC).values


def test_ranks_that_share_tokens() -> None:
    two, size = "trainer.policy.sequence_parallel_size=2", "trainer.ref.sequence_parallel_size"
    conversion = command(two, f"{size}=1", CRITIC, "trainer.critic.sequence_parallel_size=2")
    assert conversion.values["trainer.policy.sequence_parallel_size"] == 2
    assert conversion.values["trainer.critic.sequence_parallel_size"] == 2
    assert size not in conversion.values, "it has the policy's samples"
    assert kinds(conversion, size) == {"translated"}
    apart = ["trainer.placement.colocate_all=false", "trainer.placement.colocate_policy_ref=false"]
    assert command(two, f"{size}=1", *apart).values[size] == 1


# Round trip, and what is no configuration


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    conversion = command(
        "data.train_data=[a.parquet]",
        "data.val_data=[b.parquet]",
        "trainer.policy.model.path=model",
        "trainer.algorithm.kl_loss_coef=0.01",
        "trainer.max_prompt_length=1024",
        "trainer.train_batch_size=64",
        "trainer.policy_mini_batch_size=32",
        "generator.n_samples_per_prompt=8",
        "generator.sampling_params.temperature=0.7",
        "generator.engine_init_kwargs={language_model_only: true}",
        "environment.env_class=sort_letters",
        "trainer.policy.optimizer_config.adam_betas=[0.9,0.95]",
    )
    config = load(conversion, tmp_path)
    assert config.to_toml(only_changed=True) == Config.from_dict(config.to_dict()).to_toml(only_changed=True)
    for path, value in conversion.values.items():
        found: Any = config
        for name in path.split("."):
            found = getattr(found, name)
        assert found == value, path


def test_every_setting_is_reported_and_carried_at_its_default() -> None:
    defaults = {path: value for path, value in SKYRL_DEFAULTS.items() if "_kwargs." not in path}
    conversion = command(*(f"{path}={json.dumps(value)}" for path, value in defaults.items()))
    assert [path for path in defaults if not entries(conversion, path)] == [], "the report leaves them out"
    assert [entry for entry in conversion.entries if entry.kind in ("unknown", "conflict")] == []


@pytest.mark.parametrize(
    ("words", "differing"),
    [
        ([ALGORITHM + "use_kl_loss=false", ALGORITHM + "loss_reduction=sequence_mean"], set()),
        ([], {"use_kl_loss", "loss_reduction"}),
        ([ALGORITHM + "policy_loss_type=cross_entropy", ALGORITHM + "use_entropy_loss=true"], {"policy_loss_type"}),
        (
            [ALGORITHM + "policy_loss_type=importance_sampling", ALGORITHM + "use_entropy_loss=true"],
            {"policy_loss_type", "use_kl_loss", "use_entropy_loss"},
        ),
    ],
)
def test_numbers_that_come_out_otherwise_are_said(words: list[str], differing: set[str]) -> None:
    conversion = command("trainer.epochs=2", *words)
    told = {entry.source.rpartition(".")[2] for entry in conversion.entries if entry.kind == "differs"}
    assert told == differing
    assert all(
        f"differs       {entry.source}" in conversion.to_toml()
        for entry in conversion.entries
        if entry.kind == "differs"
    )
