"""prime-rl's TOML, commands and scripts converted: what a run did there, it does here, and what has no counterpart is reported."""

import shlex
from pathlib import Path
from typing import Any

import pytest

from hpcrl.cli.main import main
from hpcrl.config import Config
from hpcrl.config.fields import settings
from hpcrl.convert.conversion import Conversion
from hpcrl.convert.mapping import Dropped, To, Translated
from hpcrl.convert.prime.convert import RULES, convert_script, convert_toml, convert_words
from hpcrl.convert.prime.fields import PRIME, TARGETS
from hpcrl.errors import ConfigError
from tests.convert.prime_material import FOUR_NODES, PROCESSES, PUBLISHED, REVERSE_TEXT
from tests.convert.skyrl_material import kinds, load

SETTINGS = {setting.path: setting for setting in settings(Config)}
VALID = ("reverse_text", "alphabet_sort", "wordle", "hendrycks")
REFUSED = {
    "wiki_search": {"orchestrator.train.source": "trainer.algorithm.dynamic_sampling"},
    "qwen_30b_math": {"max_steps": "write the last step"},
    "acereason": {
        "orchestrator.env": "older interface",
        "orchestrator.eval.env": "older interface",
        "orchestrator.eval.group_size": "have 1, 32",
    },
    "alphabet_sort_2025": {"orchestrator.env": "older interface"},
    "four_nodes": {"orchestrator.train.env": "no environment is named"},
}


def converted(text: str) -> Conversion:
    return convert_toml([(text, "rl.toml")])


def complaints(conversion: Conversion) -> dict[str, str]:
    found = [one for one in conversion.entries if one.kind in ("conflict", "unknown")]
    return {one.source: one.message for one in found if not one.message.startswith("required")}


def test_every_field_has_a_place_or_a_reason() -> None:
    for path, target in TARGETS.items():
        if isinstance(target, Dropped):
            assert len(target.reason) > 12, path
            continue
        for place in (target.path,) if isinstance(target, To) else target.paths:
            assert place in SETTINGS, place
    assert {path for path, target in TARGETS.items() if isinstance(target, Translated)} == set(RULES)


@pytest.mark.parametrize("name", VALID)
def test_published_files_load_and_are_complete(name: str, tmp_path: Path) -> None:
    conversion = converted(PUBLISHED[name])
    assert not complaints(conversion)
    config = load(conversion, tmp_path)
    assert config.environment.env_class == "agent"
    assert config.trainer.algorithm.policy_loss_type == "dppo"
    assert (config.trainer.algorithm.dppo.two_sided, config.trainer.algorithm.grpo_norm_by_std) == (True, False)


@pytest.mark.parametrize("name", REFUSED)
def test_published_files_that_are_refused_have_a_reason(name: str, tmp_path: Path) -> None:
    conversion = converted(PUBLISHED[name])
    found = complaints(conversion)
    assert found.keys() == REFUSED[name].keys()
    assert all(reason in found[path] for path, reason in REFUSED[name].items())
    with pytest.raises(ConfigError):
        load(conversion, tmp_path)


def test_every_default_that_is_another_here_is_written_and_reported() -> None:
    conversion = converted(REVERSE_TEXT)
    reported = {one.source for one in conversion.entries}
    for path, target in TARGETS.items():
        if path in RULES or not isinstance(target, To) or path in reported or target.path not in conversion.values:
            continue
        value = PRIME.defaults[path]
        value = target.values.get(value, value) if isinstance(value, str | int | float | None) else value
        assert value is None or SETTINGS[target.path].is_default(value), path


def test_a_run_trains_and_generates_as_in_prime_rl(tmp_path: Path) -> None:
    config = load(converted(PUBLISHED["wordle"]), tmp_path)
    trainer, engine = config.trainer, config.generator.inference_engine
    assert (trainer.train_batch_size, config.generator.n_samples_per_prompt) == (32, 16)
    assert (trainer.max_steps, trainer.epochs) == (200, 200)
    assert (trainer.placement.policy_num_gpus_per_node, trainer.placement.colocate_all) == (2, False)
    assert (engine.num_engines, engine.gpu_memory_utilization) == (6, 0.9)
    assert trainer.fully_async.max_staleness_steps == 8
    assert (trainer.max_prompt_length, config.generator.sampling_params.max_generate_length) == (7168, 1024)
    assert (trainer.algorithm.dynamic_sampling.type, trainer.gradient_checkpointing) == ("filter", True)
    assert config.data.train_data == ["wordle.jsonl"]


def test_evaluation_and_adapters(tmp_path: Path) -> None:
    config = load(converted(PUBLISHED["hendrycks"]), tmp_path)
    assert (config.trainer.eval_interval, config.generator.eval_n_samples_per_prompt) == (50, 32)
    assert (config.data.val_data, config.generator.eval_sampling_params.temperature) == (["aime2024.jsonl"], 1.0)
    assert config.trainer.max_tokens_per_micro_batch == 16384
    lora = load(converted(PUBLISHED["alphabet_sort"]), tmp_path).trainer.policy.model.lora
    assert (lora.rank, lora.alpha, lora.target_modules) == (32, 64, "all-linear")
    assert load(converted(PUBLISHED["alphabet_sort"]), tmp_path).generator.max_turns == 5


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ('trainer.loss.type = "cispo"', "expected ipo, icepop or default"),
        ("trainer.loss.max_importance_ratio = 2.0", "exp(20)"),
        ('trainer.loss = { type = "icepop", ratio_low = "low" }', "expected a number"),
        ('trainer.loss = { type = "ppo", ratio_low = 0.9 }', "of the loss ppo, which has no place here"),
        ("trainer.loss.adv_tau = 0.5", "scale the rewards"),
        ("trainer.loss.mask_ratio_low = 0.1", "of the loss of 2025"),
        ('trainer.optim.type = "sgd"', "expected adamw or muon"),
        ('trainer.model.attn = "flash_attention_4"', "there is no flash_attention_4"),
        ("trainer.model.fp8 = true", "low_precision"),
        ("trainer.ckpt.resume_step = 10", "name an export of it"),
        ('orchestrator.advantage.type = "custom"', "expected grpo or default"),
        ('orchestrator.algo = { type = "grpo", length_weighted_baseline = true }', "expected grpo or default"),
        ('orchestrator.pre_batch_filters = [{ type = "gibberish", enforce = true }]', "gibberish"),
        ("orchestrator.token_batch_size = 4096", "number of samples"),
        ("orchestrator.train.sampling.extra_body.logit_bias = { 5 = 1 }", "logit_bias"),
        ("orchestrator.gruop_size = 8", "did you mean orchestrator.group_size"),
        ("trainer.optim.learning_rate = 8", "no setting of prime-rl"),
    ],
)
def test_what_has_no_place_is_refused_with_its_reason(given: str, reason: str, tmp_path: Path) -> None:
    conversion = convert_toml([(REVERSE_TEXT, "rl.toml"), (given, "more.toml")])
    assert any(reason in message for message in complaints(conversion).values()), complaints(conversion)
    with pytest.raises(ConfigError):
        load(conversion, tmp_path)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("scheduler = { type = 'linear', warmup_steps = 2, decay_steps = 5, min_lr = 3e-7 }", ("linear", 2, 0.25, 0.1)),
        ("scheduler = { type = 'cosine' }", ("cosine", 10, None, 0.0)),
        ("scheduler = { type = 'constant' }", ("constant_with_warmup", 0, None, 0.0)),
    ],
)
def test_schedules(given: str, expected: tuple[Any, ...], tmp_path: Path) -> None:
    text = REVERSE_TEXT.replace("trainer.optim.lr = 3e-6", f"trainer.optim.lr = 3e-6\ntrainer.{given}")
    optimizer = load(converted(text), tmp_path).trainer.policy.optimizer_config
    found = (optimizer.scheduler, optimizer.num_warmup_steps, optimizer.decay_ratio, optimizer.min_lr_factor)
    assert found == pytest.approx(expected)


def test_a_batch_that_is_left_out(tmp_path: Path) -> None:
    text = REVERSE_TEXT.replace("\nbatch_size = 128\n", "\n")
    assert load(converted(text), tmp_path).trainer.train_batch_size == 128 // 16
    in_tokens = convert_toml([(text, "rl.toml"), ("orchestrator.token_batch_size = 4096", "more.toml")])
    assert "found None" in complaints(in_tokens)["orchestrator.batch_size"]


IPO, DPPO, ICEPOP = ("dppo", True), ("dppo", False), ("rollout_is", False)


@pytest.mark.parametrize(
    ("loss", "expected", "changed"),
    [
        ("", (*IPO, 0.3, 0.3, 0.0), {"type", "eps", "kl_tau"}),
        ('type = "ipo"', (*IPO, 0.3, 0.3, 0.0), {"eps", "kl_tau"}),
        ("eps = 0.2", (*IPO, 0.2, 0.2, 0.0), {"type", "kl_tau"}),
        ('type = "ipo"\neps = 0.1\nkl_tau = 0.001', (*IPO, 0.1, 0.1, 0.001), set()),
        ('type = "ipo"\nipo_threshold = 0.2', (*IPO, 0.2, 0.2, 0.001), set()),  # of June to August 2026
        ('type = "default"', (*DPPO, 0.2, 0.2, 0.001), set()),
        ("dppo_mask_low = 0.1\nkl_tau = 0.0", (*DPPO, 0.1, 0.2, 0.0), set()),
        ('type = "icepop"\nratio_high = 4.0', (*ICEPOP, 0.2, 0.2, 0.0), set()),
    ],
)
def test_the_loss_of_each_version(loss: str, expected: tuple[Any, ...], changed: set[str], tmp_path: Path) -> None:
    conversion = converted(f"{REVERSE_TEXT}\n[trainer.loss]\n{loss}")
    algorithm = load(conversion, tmp_path).trainer.algorithm
    dppo = algorithm.dppo
    assert (algorithm.policy_loss_type, dppo.two_sided, dppo.delta_low, dppo.delta_high, dppo.kl_tau) == expected
    if "icepop" in loss:
        assert (algorithm.eps_clip_low, algorithm.eps_clip_high) == (0.8, 3.0)
    found = {one.source for one in conversion.entries if one.kind == "differs" and "before it was" in one.message}
    assert {path.rpartition(".")[2] for path in found if path.startswith("trainer.loss.")} == changed


def test_defaults_that_changed_outside_the_loss(tmp_path: Path) -> None:
    conversion = converted(REVERSE_TEXT)
    trainer = load(conversion, tmp_path).trainer
    assert trainer.policy.optimizer_config.weight_decay == 0
    assert (trainer.algorithm.dynamic_sampling.type, trainer.algorithm.dynamic_sampling.max_sample_batches) == (
        "filter",
        0,
    )
    for path, before in (("trainer.optim.weight_decay", "0.01"), ("orchestrator.constant_trainer_batch_size", "false")):
        assert any(one.source == path and f"before it was {before}" in one.message for one in conversion.entries)
    named = (
        "trainer.optim.weight_decay = 0.01\norchestrator.constant_trainer_batch_size = false\ntrainer.model.ac = 'None'"
    )
    conversion = convert_toml([(REVERSE_TEXT, "rl.toml"), (named, "more.toml")])
    trainer = load(conversion, tmp_path).trainer
    assert (trainer.policy.optimizer_config.weight_decay, trainer.gradient_checkpointing) == (0.01, False)
    assert (trainer.algorithm.dynamic_sampling.type, trainer.algorithm.zero_variance_filter) == (None, True)


def test_names_of_earlier_versions_bring_their_defaults(tmp_path: Path) -> None:
    filters = "\npost_batch_filters = []\n[[orch"
    for text in (REVERSE_TEXT.replace("\n[[orch", filters), REVERSE_TEXT + '[trainer.loss]\ntype = "default"\n'):
        conversion = converted(text)
        trainer = load(conversion, tmp_path).trainer
        dppo = trainer.algorithm.dppo
        assert (dppo.two_sided, dppo.delta_high, dppo.kl_tau) == (False, 0.2, 0.001)
        assert (trainer.policy.optimizer_config.weight_decay, trainer.algorithm.dynamic_sampling.type) == (0.01, None)
        assert trainer.algorithm.zero_variance_filter == ("[trainer.loss]" in text)
        (told,) = [one.message for one in conversion.entries if one.source == "trainer.loss.kl_tau"]
        assert told.startswith("left out: 0.001, prime-rl's default until September 18 2026")


def test_muon_has_its_own_defaults(tmp_path: Path) -> None:
    text = REVERSE_TEXT.replace("trainer.optim.lr = 3e-6", 'trainer.optim = { type = "muon", mu = 0.9 }')
    optimizer = load(converted(text), tmp_path).trainer.policy.optimizer_config
    assert (optimizer.name, optimizer.muon_momentum, optimizer.adam_betas) == ("Muon", 0.9, [0.9, 0.95])


def test_slurm_and_filters(tmp_path: Path) -> None:
    more = 'slurm = { job_name = "r", partition = "gpu", time = "1-00:00:00", exclude = "n7" }\n'
    filters = '\npre_batch_filters = [{ type = "zero_advantage", enforce = true }]\n[[orch'
    config = load(converted(more + REVERSE_TEXT.replace("\n[[orch", filters)), tmp_path)
    assert (config.slurm.partition, config.slurm.time_minutes) == ("gpu", 24 * 60)
    assert config.slurm.extra == {"exclude": "n7"}
    assert config.trainer.algorithm.dynamic_sampling.type == "filter"


# Commands, scripts, and the files of processes

ENVIRONMENT = """
[[orchestrator.train.env]]
name = "math"
env.taskset.id = "math-v1"
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in {**PROCESSES, "four.toml": FOUR_NODES, "math.toml": ENVIRONMENT}.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def test_a_command_merges_its_files_and_overrides(folder: Path, tmp_path: Path) -> None:
    words = shlex.split(
        "uv run rl @ four.toml @ math.toml --max-steps 7 --trainer.optim.lr=2e-6 --orchestrator.group_size 16"
    )
    conversion = convert_words(words, "command", folder)
    assert not complaints(conversion)
    config = load(conversion, tmp_path)
    assert (config.trainer.max_steps, config.trainer.policy.optimizer_config.lr) == (7, 2e-6)
    assert (config.trainer.placement.policy_num_nodes, config.slurm.gpus_per_node) == (2, 8)
    assert (config.generator.inference_engine.num_engines, config.trainer.policy.sequence_parallel_size) == (2, 2)


def test_a_script_is_converted_with_its_batch_options(folder: Path, tmp_path: Path) -> None:
    script = folder / "run.sbatch"
    script.write_text(
        "#!/bin/bash\n#SBATCH --time=04:00:00\nSTEPS=${STEPS:-9}\n"
        "uv run rl @ four.toml @ math.toml \\\n  --max-steps $STEPS --orchestrator.group_size 16\n"
    )
    config = load(convert_script(script.read_text(), str(script)), tmp_path)
    assert (config.trainer.max_steps, config.slurm.time_minutes) == (9, 240)
    assert main(["config", "convert", str(script), "-o", str(tmp_path / "o.toml")]) == 0


def test_files_of_processes_are_one_run(folder: Path, tmp_path: Path) -> None:
    files = [str(folder / name) for name in PROCESSES]
    assert main(["config", "convert", *files, "-o", str(tmp_path / "o.toml")]) == 0
    config = Config.from_toml([tmp_path / "o.toml"])
    assert (config.trainer.max_steps, config.trainer.train_batch_size) == (100, 64)
    assert config.generator.inference_engine.gpu_memory_utilization == 0.8
    words = f"rl --trainer @ {files[0]} --orchestrator @ {files[1]} --inference @ {files[2]}".split()
    assert (
        convert_words(words, "command", folder).values == convert_toml([(Path(f).read_text(), f) for f in files]).values
    )


def test_its_files_are_recognized(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "validate", str(folder / "four.toml")]) == 2
    assert "this is a file of prime-rl; hpcrl config convert" in capsys.readouterr().err
    assert main(["config", "convert", str(folder / "four.toml")]) == 1
    assert "no environment is named" in capsys.readouterr().err


def test_a_missing_file_is_named(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.toml: cannot be read"):
        convert_words(["rl", "@", "none.toml"], "command", folder)


def test_a_name_that_differs_between_processes_is_a_conflict() -> None:
    conversion = converted(REVERSE_TEXT.replace("inference = {}", 'inference.model.name = "other"'))
    assert kinds(conversion, "inference.model.name") == {"conflict"}
