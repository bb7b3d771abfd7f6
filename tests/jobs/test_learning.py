"""Every family of algorithms learns the quickstart's task, in 30 steps each, asynchronous training learns as much as synchronous, and
several turns are learned, as whole samples and each on its own, right answers by supervised fine-tuning, better ones by DPO, by a reward model that learns from pairs, and by teachers; with the embedded engine, and some of it with vLLM.

Slow; see docs/development.md.
"""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from statistics import fmean

import pytest
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from hpcrl.rundir.layout import Run
from tests.jobs.small_run import curve, eval_score, hpcrl, logs_of
from tests.jobs.test_supervised import FREE
from tests.other_tokens import write_other_tokens
from tests.paths import QUICKSTART

STEPS = 30
ALGORITHM = "trainer.algorithm."
NO_REFERENCE = f"{ALGORITHM}use_kl_loss=false"

GAE = [
    f"{ALGORITHM}advantage_estimator=gae",
    f"trainer.critic.model.path={QUICKSTART.parent / 'quickstart' / 'model'}",
    "trainer.critic.optimizer_config.lr=5e-4",
    "trainer.critic.fsdp_config.mixed_precision.param_dtype=fp32",
    "trainer.critic_mini_batch_size=32",
]
STALE = ["trainer.fully_async.max_staleness_steps=2"]
FORWARD_KL = ["trainer.distillation.top_k=4", "trainer.distillation.jsd_beta=0"]

FAMILIES = {
    "grpo": [],
    "rloo": [f"{ALGORITHM}advantage_estimator=rloo"],
    "reinforce_plus_plus": [f"{ALGORITHM}advantage_estimator=reinforce++"],
    "gspo": [f"{ALGORITHM}policy_loss_type=gspo", f"{ALGORITHM}loss_reduction=sequence_mean"],
    "cispo": [f"{ALGORITHM}policy_loss_type=cispo", NO_REFERENCE],
    "remax": [f"{ALGORITHM}advantage_estimator=remax"],
    "optimal_token_baseline": [f"{ALGORITHM}advantage_estimator=optimal_token_baseline"],
    "pass_at_k": [f"{ALGORITHM}advantage_estimator=pass_at_k", f"{ALGORITHM}pass_at_k.k=2"],
    "top_entropy": [f"{ALGORITHM}top_entropy_quantile=0.5"],
    "gae": GAE,
    "vapo": [
        *GAE,
        "trainer.critic.warmup_steps=4",
        f"{ALGORITHM}gae.length_alpha=1.0",
        f"{ALGORITHM}critic_lambd=1.0",
        f"{ALGORITHM}positive_nll_coef=0.1",
    ],
    "gae_critic_apart": [*GAE, "trainer.placement.critic_num_nodes=1"],
    "sapo": [f"{ALGORITHM}policy_loss_type=sapo", f"{ALGORITHM}loss_reduction=sequence_mean"],
    "gdpo": [
        f"{ALGORITHM}advantage_estimator=gdpo",
        f"{ALGORITHM}gdpo.rewards={{reward = 1.0, letters_in_place = 0.5}}",
    ],
    "vespo": [
        f"{ALGORITHM}policy_loss_type=vespo",
        f"{ALGORITHM}off_policy_correction.token_mask_kl_threshold=0.1",
        *STALE,
    ],
    "dro": [f"{ALGORITHM}policy_loss_type=dro", *STALE],
    "m2po": [f"{ALGORITHM}policy_loss_type=m2po", *STALE],
    "a3po": [
        f"{ALGORITHM}approximate_old_logprobs=true",
        f"{ALGORITHM}off_policy_correction.tis_ratio_type=token",
        *STALE,
    ],
    "lora": ["trainer.policy.model.lora.rank=8", "trainer.policy.optimizer_config.lr=2e-3"],
    "lora_full_rank": [
        "trainer.policy.model.lora.rank=64",
        "trainer.policy.model.lora.alpha=64",
        "trainer.policy.optimizer_config.lr=1e-3",
    ],
    "online_dpo": [
        f"{ALGORITHM}advantage_estimator=online_dpo",
        f"{ALGORITHM}policy_loss_type=gpg",
        f"{ALGORITHM}loss_reduction=seq_mean_token_sum",
        f"{ALGORITHM}use_kl_in_reward=true",
        f"{ALGORITHM}kl_estimator_type=k1",
        f"{ALGORITHM}kl_loss_coef=0.1",
        "trainer.policy_mini_batch_size=64",
        "trainer.policy.optimizer_config.lr=5e-4",
        NO_REFERENCE,
    ],
    "shared_prefixes": ["trainer.shared_prefixes=true", "trainer.max_tokens_per_micro_batch=512"],
    "self_distillation": [
        NO_REFERENCE,
        "trainer.distillation.enable=true",
        "trainer.distillation.use_rewards=true",
        "trainer.distillation.self_teacher.model=ema",
        "trainer.distillation.self_teacher.template='sort: {answer}'",
        "trainer.distillation.top_k=4",
        "trainer.distillation.loss_weight=0.5",
        "trainer.distillation.kl_penalty_coef=0",
    ],
    "contrastive_self_distillation": [
        NO_REFERENCE,
        "trainer.distillation.enable=true",
        "trainer.distillation.use_rewards=true",
        "trainer.distillation.self_teacher.model=policy",
        "trainer.distillation.self_teacher.template='sort: {answer}'",
        "trainer.distillation.self_teacher.wrong_hints=4",
    ],
    "dapo": [
        f"{ALGORITHM}eps_clip_high=0.28",
        f"{ALGORITHM}dynamic_sampling.type=filter",
        "generator.apply_overlong_filtering=true",
        NO_REFERENCE,
    ],
}
"""What each family, after which its run is named, changes in configs/quickstart.toml."""


@pytest.mark.slow
@pytest.mark.parametrize(("family", "engine"), [*((family, "transformers") for family in FAMILIES), ("grpo", "vllm")])
def test_family_learns_to_sort(place: Path, family: str, engine: str) -> None:
    run = quickstart(place, family, f"generator.inference_engine.backend={engine}", *FAMILIES[family])
    before, after = (eval_score(run, version) for version in (0, STEPS))
    print(f"{family}, {engine}: {before:.3f} -> {after:.3f}")
    assert before < 0.5
    assert after >= 0.9


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["vllm", "transformers"])
def test_stale_samples_teach_what_fresh_ones_do(place: Path, engine: str) -> None:
    """Two steps of staleness at most, which are used, and truncated importance sampling."""
    correction = f"{ALGORITHM}off_policy_correction.tis_ratio_type=token"
    found = {}
    for staleness in (0, 2):
        settings = [f"trainer.fully_async.max_staleness_steps={staleness}", correction]
        run = quickstart(place, f"stale-{staleness}", *settings, f"generator.inference_engine.backend={engine}")
        found[staleness] = after = eval_score(run, STEPS)
        stale = curve(run, "async/staleness_max")
        mean = fmean(curve(run, "async/staleness_mean").values())
        print(f"max_staleness_steps={staleness}: {eval_score(run, 0):.3f} -> {after:.3f}, mean staleness {mean:.2f}")
        assert max(stale.values()) == staleness
    assert found[0] >= 0.9
    assert found[2] >= found[0] - 0.05


TAUGHT = [
    *FORWARD_KL,
    "trainer.distillation.enable=true",
    f"trainer.distillation.model_path={QUICKSTART.parent / 'quickstart' / 'teacher'}",
    "trainer.distillation.loss_weight=1",
    "trainer.ref.fsdp_config.mixed_precision.param_dtype=fp32",
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "settings"), {"answers": [], "teacher": TAUGHT, "schedule_free": FREE}.items())
def test_right_answers_teach_sorting(place: Path, name: str, settings: list[str]) -> None:
    """configs/sft_tiny.toml as it is, from a teacher alone, or with another optimizer, and what it has learned by greedy decoding of the validation words."""
    run = learned(place, "sft_tiny.toml", name, 96, *settings)
    losses = curve(run, "eval/all/loss")
    print(f"{name}: validation loss {losses[0]:.3f} -> {losses[96]:.4f}")
    assert losses[0] > 0.3
    assert losses[96] < 0.01
    assert greedy_score(run, 96) >= 0.95


@pytest.mark.slow
def test_a_policy_learns_to_see(place: Path) -> None:
    """configs/count_shapes.toml as it is: whoever does not look says 0, which is right for a fifth of the images."""
    run = learned(place, "count_shapes.toml", "shapes", 60)
    before, after = (eval_score(run, version) for version in (0, 60))
    print(f"count_shapes: {before:.3f} -> {after:.3f}")
    assert (run.export(60) / "preprocessor_config.json").is_file()
    assert AutoModelForImageTextToText.from_pretrained(run.export(60)).num_parameters() > 100_000
    assert before < 0.3
    assert after >= 0.85


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "settings"),
    {
        "dpo": [],
        "dpo_lora": ["trainer.policy.model.lora.rank=8", "trainer.policy.optimizer_config.lr=4e-3"],
    }.items(),
)
def test_pairs_teach_sorting(place: Path, name: str, settings: list[str]) -> None:
    """configs/dpo_tiny.toml as it is and with adapters, and what it has learned by greedy decoding of the validation words."""
    run = learned(place, "dpo_tiny.toml", name, 93, *settings)
    losses, accuracies = (curve(run, f"eval/all/{metric}") for metric in ("loss", "rewards/accuracies"))
    score = greedy_score(run, 93)
    print(
        f"{name}: validation loss {losses[0]:.3f} -> {losses[93]:.4f}, accuracy {accuracies[93]:.3f}, greedy {score:.3f}"
    )
    assert losses[0] > 0.9
    assert losses[93] < 0.2
    assert accuracies[93] >= 0.99
    assert score >= 0.95


ORPO = ["trainer.dpo.loss_type=['sft', 'orpo']", "trainer.dpo.loss_weights=[1.0, 0.1]"]
SIMPO = ["trainer.dpo.loss_type=['simpo', 'sft']", "trainer.dpo.beta=2.0", "trainer.dpo.simpo_gamma=1.0"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "name", "steps", "settings"),
    [
        ("dpo_tiny.toml", "orpo", 93, ORPO),
        ("dpo_tiny.toml", "simpo", 93, SIMPO),
        ("sft_tiny.toml", "dft", 96, ["trainer.sft.loss_type=dft"]),
    ],
    ids=["orpo", "simpo", "dft"],
)
def test_losses_without_a_reference_teach_sorting(
    place: Path, config: str, name: str, steps: int, settings: list[str]
) -> None:
    """What each has learned by greedy decoding of the validation words, of which the start model sorts a third."""
    run = learned(place, config, name, steps, *settings)
    score = greedy_score(run, steps)
    print(f"{name}: greedy {score:.3f}")
    assert score >= 0.9


@pytest.mark.slow
def test_answers_with_labels_teach_sorting(place: Path) -> None:
    """configs/kto_tiny.toml as it is, and what it has learned by greedy decoding of the validation words."""
    run = learned(place, "kto_tiny.toml", "kto", 93)
    losses, margins = (curve(run, f"eval/all/{metric}") for metric in ("loss", "rewards/margins"))
    score = greedy_score(run, 93)
    print(f"kto: validation loss {losses[0]:.3f} -> {losses[93]:.4f}, margin {margins[93]:.2f}, greedy {score:.3f}")
    assert losses[0] == pytest.approx(0.5, abs=1e-5), "the policy is still the reference"
    assert losses[93] < 0.3
    assert score >= 0.95


@pytest.mark.slow
def test_a_reward_model_learns_from_pairs_and_teaches_sorting(place: Path) -> None:
    """configs/reward_model_tiny.toml as it is, with adapters too, then configs/reward_service_tiny.toml with what it has trained: the scores rise, and so do right answers."""
    adapters = ["trainer.policy.model.lora.rank=8", "trainer.policy.optimizer_config.lr=5e-3"]
    for name, settings in (("tiny", []), ("lora", adapters)):
        trained = learned(place, "reward_model_tiny.toml", name, 110, *settings)
        accuracies = curve(trained, "eval/all/rewards/accuracies")
        print(f"{name}: accuracy {accuracies[0]:.3f} -> {accuracies[110]:.3f}")
        assert accuracies[0] < 0.6
        assert accuracies[110] >= 0.98
    served = (
        f"environment.remote_reward.service.model={place / 'runs' / 'reward_model' / 'tiny' / 'exports' / 's000110'}"
    )
    config = QUICKSTART.with_name("reward_service_tiny.toml")
    ours = ["trainer.run_name=taught", served]
    done = hpcrl("submit", str(config), "--local", "--follow", *ours, cwd=place, timeout=1800)
    run = Run(place / "runs" / "reward_service" / "taught")
    assert done.returncode == 0, done.stderr + logs_of(run)
    rewards = [eval_score(run, version) for version in (0, STEPS)]
    before, after = (right_answers(run, version) for version in (0, STEPS))
    print(f"scores {rewards[0]:.2f} -> {rewards[1]:.2f}, right answers {before:.3f} -> {after:.3f}")
    assert rewards[0] < 0 < 2 < rewards[1]
    assert before < 0.5
    assert after >= 0.9


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "settings"),
    {
        "sampled_token": [],
        "top_4": ["trainer.distillation.top_k=4"],
        "policys_4": ["trainer.distillation.top_k=4", "trainer.distillation.top_k_from_teacher=false"],
        "prompts": [
            "trainer.distillation.top_k=4",
            "trainer.distillation.top_k_from_teacher=false",
            "trainer.distillation.rollout_top_k_recompute=true",
            "trainer.distillation.include_prompt=true",
        ],
        "forward_kl": [*FORWARD_KL, "trainer.distillation.loss_weight=1"],
        # the model that is taught is the teacher of all other rows, of which there are none
        "two_teachers": [
            f"trainer.distillation.model_path={QUICKSTART.parent / 'quickstart' / 'model'}",
            f"trainer.distillation.source_models.sort_letters={QUICKSTART.parent / 'quickstart' / 'teacher'}",
        ],
    }.items(),
)
def test_a_teacher_teaches_sorting(place: Path, name: str, settings: list[str]) -> None:
    """configs/distillation_tiny.toml, in which no answer has a reward."""
    path = QUICKSTART.with_name("distillation_tiny.toml")
    done = hpcrl(
        "submit", str(path), "--local", "--follow", f"trainer.run_name={name}", *settings, cwd=place, timeout=900
    )
    run = Run(place / "runs" / "distillation" / name)
    assert done.returncode == 0, done.stderr + logs_of(run)
    before, after = (eval_score(run, version) for version in (0, STEPS))
    print(f"{name}: {before:.3f} -> {after:.3f}")
    assert before < 0.5
    assert after >= 0.95


@pytest.mark.slow
def test_a_teacher_with_another_tokenizer_teaches_sorting(place: Path) -> None:
    """It has tokens of two letters, other ids and another end of a text, and has itself learned from right answers, from random weights."""
    begun = place / "other_tokens"
    write_other_tokens(begun)
    own = [f"trainer.policy.model.path={begun}", "trainer.epochs=9"]
    teacher = learned(place, "sft_tiny.toml", "teacher", 288, *own)
    path, role = QUICKSTART.with_name("distillation_tiny.toml"), "trainer.distillation"
    settings = [f"{role}.cross_tokenizer=true", f"{role}.model_path={teacher.export(288)}", "trainer.run_name=cross"]
    done = hpcrl("submit", str(path), "--local", "--follow", *settings, cwd=place, timeout=3600)
    run = Run(place / "runs" / "distillation" / "cross")
    assert done.returncode == 0, done.stderr + logs_of(run)
    before, after = (eval_score(run, version) for version in (0, STEPS))
    print(f"cross_tokenizer: {before:.3f} -> {after:.3f}")
    assert before < 0.5
    assert after >= 0.9


IPA = [
    f"{ALGORITHM}advantage_estimator=turn_returns",
    f"{ALGORITHM}gamma=0.95",
    f"{ALGORITHM}policy_loss_type=ipa",
    "trainer.policy_mini_batch_size=64",
]
TURNS = {
    "turn_gspo": [f"{ALGORITHM}policy_loss_type=turn_gspo", f"{ALGORITHM}loss_reduction=sequence_mean"],
    "ipa": [*IPA, *STALE],
    "gigpo": [f"{ALGORITHM}advantage_estimator=gigpo", f"{ALGORITHM}gamma=0.95"],
    "turn_grpo": [f"{ALGORITHM}advantage_estimator=turn_grpo"],
}
"""What each loss or estimator of turns changes in configs/guess_number.toml."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("own", "engine", "steps", "least"),
    [
        ([], "vllm", 50, 0.8),
        (["generator.step_wise_trajectories=true"], "transformers", 50, 0.8),
        ([f"{ALGORITHM}observation_nll_coef=0.05"], "transformers", 50, 0.8),
        *((own, "transformers", 30, 0.6) for own in TURNS.values()),
    ],
    ids=["whole", "step_wise", "echo", *TURNS],
)
def test_several_turns_are_learned(place: Path, own: list[str], engine: str, steps: int, least: float) -> None:
    """From the stubborn start model to one that finds its number by what it was answered: three guesses alone find three of seven."""
    config = QUICKSTART.with_name("guess_number.toml")
    ours = ["trainer.run_name=learns", f"trainer.max_steps={steps}", f"generator.inference_engine.backend={engine}"]
    done = hpcrl("submit", str(config), "--local", "--follow", *ours, *own, cwd=place, timeout=1800)
    run = Run(place / "runs" / "guess_number" / "learns")
    assert done.returncode == 0, done.stderr + logs_of(run)
    before, after = eval_score(run, 0), eval_score(run, steps)
    print(f"guess_number {' '.join(own)}: {before:.3f} -> {after:.3f}")
    assert before <= 0.4
    assert after >= least


@pytest.mark.slow
@pytest.mark.parametrize("estimator", ["rae", "grpo", "gigpo"])
def test_two_roles_learn_a_code(place: Path, estimator: str) -> None:
    """configs/hint_number.toml: a policy that hints at numbers to itself, from one number in seven to most of them."""
    config = QUICKSTART.with_name("hint_number.toml")
    settings = [f"trainer.run_name={estimator}", f"{ALGORITHM}advantage_estimator={estimator}"]
    done = hpcrl("submit", str(config), "--local", "--follow", *settings, cwd=place, timeout=1800)
    run = Run(place / "runs" / "hint_number" / estimator)
    assert done.returncode == 0, done.stderr + logs_of(run)
    before, after = eval_score(run, 0), eval_score(run, 40)
    print(f"hint_number {estimator}: {before:.3f} -> {after:.3f}")
    assert before <= 0.3
    assert after >= 0.85


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "steps", "least"), [("reach", 40, 0.85), ("reach_vla", 20, 0.75)], ids=["robot", "actions"]
)
def test_an_arm_learns_to_reach(place: Path, name: str, steps: int, least: float) -> None:
    """From an arm in MuJoCo that never moves to one whose tip finds its target, by numbers as text or by actions of their own and frames alone."""
    config = QUICKSTART.with_name(f"{name}.toml")
    done = hpcrl("submit", str(config), "--local", "--follow", "trainer.run_name=learns", cwd=place, timeout=1800)
    run = Run(place / "runs" / name / "learns")
    assert done.returncode == 0, done.stderr + logs_of(run)
    before, after = eval_score(run, 0), eval_score(run, steps)
    print(f"{name}: {before:.3f} -> {after:.3f}")
    assert before <= 0.1
    assert after >= least


def learned(place: Path, config: str, name: str, steps: int, *settings: str) -> Run:
    """Return a run of an experiment that learns from a dataset, which was trained to its end and exported there."""
    ours = [f"trainer.run_name={name}", f"trainer.hf_save_interval={steps}"]
    path = QUICKSTART.with_name(config)
    done = hpcrl("submit", str(path), "--local", "--follow", *ours, *settings, cwd=place, timeout=3600)
    assert done.returncode == 0, done.stdout + done.stderr
    return Run.open(place / "runs" / Path(config).stem.removesuffix("_tiny") / name)


def right_answers(run: Run, version: int) -> float:
    """Return the share of an evaluation's answers that are in order."""
    lines = [json.loads(line) for line in run.eval_dump(version, 0).read_text().splitlines()]
    right = [line["response"] == "".join(sorted(line["prompt"][-1]["content"].split()[-1])) for line in lines]
    return fmean(right)


def greedy_score(run: Run, step: int) -> float:
    """Return the share of the validation words that an export sorts."""
    made = runpy.run_path(str(QUICKSTART.parent / "quickstart" / "make.py"))
    tokenizer, words = made["make_tokenizer"](), made["draw_words"](1, made["VALIDATION_ROWS"])
    return made["score"](AutoModelForCausalLM.from_pretrained(run.export(step)), tokenizer, words)


def quickstart(place: Path, name: str, *settings: str, steps: int = STEPS) -> Run:
    """Return a run of the quickstart, evaluated before its steps and after them."""
    ours = [f"trainer.run_name={name}", f"trainer.max_steps={steps}", f"trainer.eval_interval={steps}"]
    done = hpcrl("submit", str(QUICKSTART), "--local", "--follow", *ours, *settings, cwd=place, timeout=900)
    run = Run(place / "runs" / "quickstart" / name)
    assert done.returncode == 0, done.stderr + logs_of(run)
    return run


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "metric", "steps", "least", "most"),
    [
        ("rl", "avg_score", 20, 0.9, 1.0),
        ("environment", "avg_score", 20, 0.6, 1.0),
        ("sft", "loss", 64, 0.0, 0.1),
        ("dpo", "loss", 64, 0.0, 0.1),
    ],
)
def test_what_init_writes_learns_as_it_is(
    place: Path, kind: str, metric: str, steps: int, least: float, most: float
) -> None:
    assert hpcrl("init", "mine", "--kind", kind, cwd=place).returncode == 0
    runpy.run_path(str(place / "mine" / "make_rows.py"), run_name="__main__")
    done = hpcrl("submit", "mine/experiment.toml", "--local", "--follow", "trainer.run_name=a", cwd=place, timeout=1800)
    run = Run(place / "runs" / "mine" / "a")
    assert done.returncode == 0, done.stderr + logs_of(run)
    values = curve(run, f"eval/all/{metric}")
    print(f"{kind}: {metric} {values[0]:.3f} -> {values[steps]:.3f}")
    assert not least <= values[0] <= most
    assert least <= values[steps] <= most
