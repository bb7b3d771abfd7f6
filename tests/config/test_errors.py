"""Everything a user can get wrong is named: source, path, what was expected, what was found, the nearest right name."""

from pathlib import Path

import pytest

from hpcrl.config import Config
from hpcrl.errors import ConfigError

GOOD = """
[data]
train_data = ["t"]
val_data = ["v"]
[trainer.policy.model]
path = "m"
"""


def problems(tmp_path: Path, *overrides: str, text: str = "") -> list[str]:
    files = [tmp_path / "good.toml"]
    files[0].write_text(GOOD)
    if text:
        files.append(tmp_path / "bad.toml")
        files[1].write_text(text)
    with pytest.raises(ConfigError) as caught:
        Config.from_toml(files, overrides)
    return str(caught.value).splitlines()


def test_the_file_that_is_wrong_is_named(tmp_path: Path) -> None:
    assert problems(tmp_path, text="[slurm]\ntime_minutes = '1h'\n") == [
        f'{tmp_path}/bad.toml:2: slurm.time_minutes: expected a whole number, found "1h" (text)'
    ]


def test_every_problem_is_reported_at_once(tmp_path: Path) -> None:
    text = "[trainer]\nepochs = 'two'\nnonsense = 1\n[generator]\nn_samples_per_prompt = 2.0\n[zzz]\na = 1\n"
    lines = problems(tmp_path, "slurm.exclusive=1", text=text)
    assert len(lines) == 5
    assert [line.partition(": ")[0].rpartition(":")[2] for line in lines if "bad.toml" in line] == ["6", "3", "2", "5"]
    assert sum(line.startswith("override: slurm.exclusive: ") for line in lines) == 1


def test_wrong_types_hide_neither_impossible_values_nor_what_waits(tmp_path: Path) -> None:
    lines = problems(
        tmp_path, "trainer.seed=x", "trainer.epochs=0", "trainer.policy.low_precision.fp4=true", "trainer.epoch=1"
    )
    assert [line.split(": ")[1] for line in lines] == [
        "trainer.epoch",
        "trainer.seed",
        "trainer.epochs",
        "trainer.policy.low_precision.fp4",
    ]


def test_a_number_out_of_range_hides_no_rule_about_others(tmp_path: Path) -> None:
    lines = problems(tmp_path, "generator.sampling_params.top_p=3", "trainer.policy_mini_batch_size=7")
    assert [line.split(": ")[-2] for line in lines] == [
        "generator.sampling_params.top_p",
        "trainer.train_batch_size",
    ]


def test_a_name_with_dots_in_quotes_is_explained(tmp_path: Path) -> None:
    for text in ('"trainer.seed" = 3', '[trainer]\n"policy.compile_model" = true'):
        (line,) = problems(tmp_path, text=text)
        assert "bad.toml" in line
        assert "a dot in a quoted name" in line


def test_what_an_override_took_away_has_no_source(tmp_path: Path) -> None:
    (line,) = problems(tmp_path, "trainer=default")
    assert line.startswith("trainer.policy.model.path: required")


def test_a_key_that_is_set_twice_is_called_so(tmp_path: Path) -> None:
    (line,) = problems(tmp_path, text="[trainer]\nseed = 1\nseed = 2\n")
    assert (
        line
        == f"{tmp_path}/bad.toml:3: a key that is set twice: trainer.seed stands in line 2 already; leave one of them out"
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[trainer]\nseed = 1\n[trainer]\nepochs = 2\n", "3: [trainer] stands in line 1 already; put both together"),
        ("trainer.epochs = 3\n[trainer]\nseed = 1\n", "2: [trainer] stands in line 1 already; put both together"),
        ("[trainer]\nseed = 1\n[data]\nseed = 1\nseed = 2", "5: a key that is set twice: data.seed stands in line 4"),
        ('\n[trainer]\nrun_name = "a\nseed = 1\n', "3: not valid TOML: the text is not closed"),
        (
            "[trainer]\nepochs = ${EPOCHS}\n",
            "2: TOML has no variables; write the value, or trainer.epochs=${EPOCHS} on",
        ),
        ("[trainer]\nepochs = $X # a\n", "2: TOML has no variables; write the value, or trainer.epochs=$X on"),
        ("[trainer]\nflash_attn = True\n", "2: not valid TOML: True is no value; write true"),
        ("[trainer]\nrun_name = one\n", '2: not valid TOML: one is no value; quote it: "one"'),
        (
            "[data]\nval_data = [\n\n",
            "2: not valid TOML: a value, text, list or table is not closed before the file ends",
        ),
        ("a: 1\n", "1: looks like YAML; a run reads TOML"),
        ('{"a": 1}', "1: looks like JSON; a run reads TOML"),
    ],
)
def test_syntax_errors_have_the_line_and_plain_words(tmp_path: Path, text: str, expected: str) -> None:
    (line,) = problems(tmp_path, text=text)
    assert line.startswith(f"{tmp_path}/bad.toml:{expected}")


def test_utf16_is_named_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "wide.toml").write_bytes("a = 1".encode("utf-16"))
    with pytest.raises(ConfigError) as caught:
        Config.from_toml(tmp_path / "wide.toml")
    assert str(caught.value) == f"{tmp_path}/wide.toml:1: not UTF-8 text: byte 0; saved as UTF-16? Save it as UTF-8"


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("generator.sampling_params.stop=</s>", '; put it into brackets: ["</s>"]'),
        ("data.train_data=t.jsonl", '; put it into brackets: ["t.jsonl"]'),
        ('trainer.policy.optimizer_config.lr="1e-6"', "; write 1e-6, without quotes"),
        ("trainer.flash_attn=True", "; write true, without quotes"),
        ('data.train_data=["$HOME/x.jsonl"]', '$HOME is not expanded here, ~ is; write "~" instead'),
        ("trainer.resume_path=${OLD}/x", "${OLD} is not expanded here, ~ is; write the value of ${OLD} into the path"),
        ("slurm.root=~nobody-here/x", "the ~ of ~nobody-here/x leads to no home directory here; write the path out"),
    ],
)
def test_a_value_of_the_wrong_form_gets_its_remedy(tmp_path: Path, override: str, expected: str) -> None:
    assert any(expected in line for line in problems(tmp_path, override))


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("trainer.epochs=1.0", "trainer.epochs: expected a whole number, found 1.0 (number)"),
        ("trainer.epochs=true", "trainer.epochs: expected a whole number, found true (true or false)"),
        ('trainer.epochs="1"', 'trainer.epochs: expected a whole number, found "1" (text)'),
        ("trainer.algorithm.eps_clip_low=true", "expected a number, found true"),
        ("trainer.gradient_checkpointing=1", "expected true or false, found 1 (whole number)"),
        ("trainer.gradient_checkpointing=True", 'expected true or false, found "True" (text)'),
        ("trainer.run_name=7", """expected text, found 7 (whole number); quote it: "7", on a command line '"7"'"""),
        ("data.train_data=t", 'data.train_data: expected a list of texts, found "t" (text)'),
        ('data.train_data=["t", 3]', "data.train_data[1]: expected text, found 3 (whole number)"),
        ("trainer=3", "trainer: expected a table, found 3 (whole number)"),
        ("trainer.policy.model=3", "trainer.policy.model: expected a table"),
        ("slurm=main", 'slurm: expected a table, found "main" (text)'),
        ("generator.eval_sampling_params=3", "generator.eval_sampling_params: expected a table"),
        ("slurm.extra=3", "slurm.extra: expected a table"),
        ("trainer.epochs={a=1}", "trainer.epochs: expected a whole number, found a table"),
        ("trainer.resume_mode=latst", 'expected one of "latest", "none", "from_path", found "latst" (text)'),
        ("trainer.strategy=ddp", 'trainer.strategy: expected one of "fsdp2", "megatron", found "ddp" (text)'),
        (
            "data.train_data=[2024-01-01]",
            'data.train_data[0]: expected text, a number, a list or a table, found "2024-01-01" (date); quote it',
        ),
    ],
)
def test_wrong_types(tmp_path: Path, override: str, expected: str) -> None:
    (line,) = problems(tmp_path, override)
    assert expected in line


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("trainer.epoch", "trainer.epochs"),
        ("trainer.n_samples_per_prompt", "generator.n_samples_per_prompt"),
        ("trainer.lr", "trainer.policy.optimizer_config.lr"),
        ("generator.sampling_params.topp", "generator.sampling_params.top_p"),
        ("train_batch_size", "trainer.train_batch_size"),
        ("slurm.partitions", "slurm.partition"),
        ("slurm.time", "slurm.time_minutes"),
        ("slurm.mem", "slurm.mem_gb"),
        ("trainer.batch_size", "trainer.train_batch_size"),
        ("trainer.max_training_steps", "trainer.max_steps"),
        ("traner.epochs", "trainer"),
        ("generator.temperature", "trainer.algorithm.temperature or generator.sampling_params.temperature"),
    ],
)
def test_unknown_names_lead_to_the_right_one(tmp_path: Path, name: str, meant: str) -> None:
    (line,) = problems(tmp_path, f"{name}=1")
    assert "unknown setting" in line
    assert f"; did you mean {meant}" in line


def test_an_unknown_name_without_a_value_is_unknown(tmp_path: Path) -> None:
    (line,) = problems(tmp_path, "trainer.epoch=")
    assert line == "override: trainer.epoch: unknown setting; did you mean trainer.epochs?"


def test_an_unknown_name_that_resembles_nothing_lists_its_neighbours(tmp_path: Path) -> None:
    (line,) = problems(tmp_path, "environment.qqqqq=1")
    assert "unknown setting; expected one of env_class" in line


@pytest.mark.parametrize("text", ["", "[trainer]\n", "[trainer.policy]\n", "[trainer.policy.model]\n", "[data]\n"])
def test_what_is_required_is_named_with_its_full_path(tmp_path: Path, text: str) -> None:
    path = tmp_path / "empty.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        Config.from_toml([path])
    lines = [line.removeprefix(f"{path}: ") for line in str(caught.value).splitlines()]
    assert [line.partition(": ")[0] for line in lines] == ["data.train_data", "trainer.policy.model.path"]
    assert "required: expected a list of texts" in lines[0]


@pytest.mark.parametrize(
    ("overrides", "path", "words"),
    [
        (
            ["trainer.train_batch_size=10", "trainer.policy_mini_batch_size=4"],
            "trainer.train_batch_size",
            "multiple of",
        ),
        (["trainer.placement.policy_num_nodes=3"], "trainer.policy_mini_batch_size", "3 trainer ranks"),
        (["trainer.max_ckpts_to_keep=0"], "trainer.max_ckpts_to_keep", "keep all"),
        (["trainer.resume_mode=from_path"], "trainer.resume_path", "required"),
        (["trainer.resume_path=/c"], "trainer.resume_path", "no effect"),
        (["generator.sampling_params.temperature=0"], "generator.sampling_params.temperature", "nothing to learn"),
        (["generator.sampling_params.temperature=-1"], "generator.sampling_params.temperature", "more than 0"),
        (["generator.sampling_params.temperature=nan"], "generator.sampling_params.temperature", "more than 0"),
        (["trainer.algorithm.temperature=0"], "trainer.algorithm.temperature", "more than 0"),
        (["generator.sampling_params.top_p=0"], "generator.sampling_params.top_p", "at most 1"),
        (["generator.sampling_params.top_p=1.1"], "generator.sampling_params.top_p", "at most 1"),
        (["generator.sampling_params.top_k=0"], "generator.sampling_params.top_k", "-1"),
        (
            ["generator.eval_sampling_params.min_p=2"],
            "generator.eval_sampling_params.min_p",
            "at least 0 and at most 1",
        ),
        (
            ["generator.sampling_params.repetition_penalty=0"],
            "generator.sampling_params.repetition_penalty",
            "more than 0",
        ),
        (
            ["generator.sampling_params.max_generate_length=0"],
            "generator.sampling_params.max_generate_length",
            "at least 1",
        ),
        (['generator.sampling_params.stop=["a", ""]'], "generator.sampling_params.stop", "not empty"),
        (["data.train_data=[]"], "data.train_data", "at least one"),
        (["data.val_data=[]"], "trainer.eval_interval", "data.val_data is empty"),
        (
            ["trainer.policy.optimizer_config.adam_betas=[0.9]"],
            "trainer.policy.optimizer_config.adam_betas",
            "two numbers",
        ),
        (
            ["trainer.policy.optimizer_config.adam_betas=[0.9, 1]"],
            "trainer.policy.optimizer_config.adam_betas",
            "two numbers",
        ),
        (["trainer.policy.optimizer_config.lr=nan"], "trainer.policy.optimizer_config.lr", "at least 0"),
        (["trainer.algorithm.eps_clip_low=1.5"], "trainer.algorithm.eps_clip_low", "at most 1"),
        (["trainer.algorithm.entropy_loss_coef=inf"], "trainer.algorithm.entropy_loss_coef", "a finite number"),
        (["trainer.run_name=a/b"], "trainer.run_name", "directory name"),
        (["trainer.project_name=.."], "trainer.project_name", "directory name"),
        (["trainer.epochs=0"], "trainer.epochs", "at least 1"),
        (["trainer.fully_async.max_staleness_steps=-1"], "trainer.fully_async.max_staleness_steps", "at least 0"),
        (
            ["generator.inference_engine.gpu_memory_utilization=80"],
            "generator.inference_engine.gpu_memory_utilization",
            "at most 1",
        ),
        (["generator.inference_engine.max_num_seqs=9000"], "generator.inference_engine.max_num_batched_tokens", "9000"),
        (
            ["generator.inference_engine.engine_init_kwargs.enforce-eager=true"],
            "enforce-eager",
            "enforce_eager instead",
        ),
        (
            ["generator.inference_engine.engine_init_kwargs.dtype=half"],
            "engine_init_kwargs.dtype",
            "model_dtype instead",
        ),
        (
            ["slurm.gpus_per_node=2", "generator.inference_engine.tensor_parallel_size=3"],
            "tensor_parallel_size",
            "2 GPUs",
        ),
        (
            ["slurm.gpus_per_node=1", "trainer.placement.policy_num_gpus_per_node=2"],
            "policy_num_gpus_per_node",
            "1 GPUs",
        ),
        (
            ["slurm.gpus_per_node=4", "generator.inference_engine.tensor_parallel_size=2", "slurm.replicas_per_node=3"],
            "slurm.replicas_per_node",
            "6 GPUs",
        ),
        (["slurm.extra.no-requeue=true"], "slurm.extra.no-requeue", "leave it out"),
        (["slurm.extra.time=5"], "slurm.extra.time", "slurm.time_minutes instead"),
        (["slurm.time_minutes=0"], "slurm.time_minutes", "at least 5"),
    ],
)
def test_impossible_values(tmp_path: Path, overrides: list[str], path: str, words: str) -> None:
    (line,) = problems(tmp_path, *overrides)
    assert f"{path}: " in line
    assert words in line.split(f"{path}: ")[1]


def test_impossible_values_are_all_reported_at_once(tmp_path: Path) -> None:
    assert len(problems(tmp_path, "trainer.epochs=0", "trainer.max_ckpts_to_keep=0", "data.train_data=[]")) == 3


def test_a_default_that_is_wrong_has_no_source(tmp_path: Path) -> None:
    (line,) = problems(tmp_path, "trainer.policy_mini_batch_size=100")
    assert line.startswith("trainer.train_batch_size: expected a multiple")


@pytest.mark.parametrize(
    "overrides",
    [
        ["generator.n_samples_per_prompt=1"],
        ["trainer.eval_interval=0", "data.val_data=[]"],
        ["trainer.placement.policy_num_gpus_per_node=2", "slurm.gpus_per_node=0"],
        ["trainer.resume_mode=from_path", "trainer.resume_path=/c"],
        ["generator.eval_sampling_params.temperature=0"],
        ["trainer.max_ckpts_to_keep=-1", "trainer.ckpt_interval=0", "trainer.policy.optimizer_config.max_grad_norm=0"],
    ],
)
def test_possible_combinations_are_accepted(tmp_path: Path, overrides: list[str]) -> None:
    path = tmp_path / "good.toml"
    path.write_text(GOOD)
    Config.from_toml([path], overrides)


def test_a_name_that_no_section_has_leads_to_its_own_section(tmp_path: Path) -> None:
    (found,) = problems(tmp_path, "trainer.fully_async.enabled=true")
    assert "trainer.fully_async.enabled: unknown setting; expected one of max_staleness_steps" in found


def test_what_is_not_implemented_yet_is_not_explained_any_further(tmp_path: Path) -> None:
    both = [f"trainer.policy.low_precision.{name}=true" for name in ("fp8", "fp4")]
    (told,) = [line for line in problems(tmp_path, *both) if "low_precision.fp4: " in line]
    assert "not implemented yet (training in FP4" in told


def test_control_characters_of_a_file_are_shown_as_escapes(tmp_path: Path) -> None:
    (found,) = problems(tmp_path, 'environment.env_class="\\u001b]0;x\\u0007"')
    assert found.isprintable()
    assert r'found "\x1b]0;x\x07"' in found
