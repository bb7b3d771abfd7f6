"""What `hpcrl eval` evaluates, and with which settings."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpcrl.config import Config
from hpcrl.config.sections.model import Pretrained
from hpcrl.errors import ConfigError, DataError, RunError
from hpcrl.families.diffusion.launch import evaluated_model
from hpcrl.launch.local.evaluate import Subject, configured, default_place, evaluate, find_subject
from hpcrl.rundir.commit import committed_directory, write_text
from hpcrl.rundir.layout import Run
from tests.paths import CONFIGS

SAMPLED = "generator.eval_sampling_params.temperature=1.0"


@pytest.fixture
def run(tmp_path: Path) -> Run:
    run = Run(tmp_path / "runs" / "project" / "letters")
    config = Config.from_dict(
        {
            "data": {"train_data": ["train.jsonl"], "test_size": 0.5},
            "trainer": {"policy": {"model": {"path": "/models/first"}}, "seed": 7, "eval_interval": 3},
            "environment": {"env_class": "sort_letters"},
        }
    )
    write_text(run.config, config.to_toml())
    for step in (2, 10):
        with committed_directory(run.checkpoint(step), 1) as directory:
            (directory / "file").touch()
    return run


@pytest.fixture
def data(tmp_path: Path) -> str:
    path = tmp_path / "letters.jsonl"
    path.write_text(json.dumps({"prompt": "sort: ba", "reward_spec": {"ground_truth": "ab"}}) + "\n")
    return str(path)


def test_a_run_means_its_newest_checkpoint_or_the_one_that_is_named(run: Run) -> None:
    root = run.path.parent.parent
    newest = find_subject("letters", None, root)
    assert newest == Subject(run, run.checkpoint(10), Pretrained(str(run.exports / "s000010")), 10)
    assert newest.name == "letters s000010"
    for name in ("2", "s000002"):
        assert find_subject(str(run.path), name, root).checkpoint == run.checkpoint(2)
    before = find_subject("letters", "0", root)
    assert (before.checkpoint, before.model, before.version) == (None, Pretrained("/models/first"), 0)
    with pytest.raises(RunError, match=r"no checkpoint 3; there are: s000002, s000010"):
        find_subject("letters", "3", root)
    with pytest.raises(RunError, match="no run 'letter'"):
        find_subject("letter", None, root)


def test_an_id_of_the_hub_is_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    model = tmp_path / "models--org--small"
    (model / "refs").mkdir(parents=True)
    (model / "refs" / "main").write_text("abc")
    (model / "snapshots" / "abc").mkdir(parents=True)
    (model / "snapshots" / "abc" / "config.json").write_text("{}")
    assert find_subject("org/small", None, tmp_path / "runs") == Subject(None, None, Pretrained("org/small"))
    with pytest.raises(RunError, match="has no checkpoints"):
        find_subject("org/small", "3", tmp_path / "runs")


def test_a_directory_with_a_model_is_a_model(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    found = find_subject(str(tmp_path / "model"), None, tmp_path)
    assert found == Subject(None, None, Pretrained(str(tmp_path / "model")))
    with pytest.raises(RunError, match="is a model, which has no checkpoints"):
        find_subject(str(tmp_path / "model"), "2", tmp_path)


def test_what_is_evaluated_is_laid_over_the_settings_of_the_run(run: Run, data: str, tmp_path: Path) -> None:
    subject = find_subject("letters", None, tmp_path / "runs")
    extra = tmp_path / "site.toml"
    extra.write_text("[generator.inference_engine]\nmax_num_seqs = 5\n")
    config = configured(subject, [data], 4, [extra], [SAMPLED, "generator.inference_engine.model_dtype=float32"])
    assert (config.data.val_data, config.data.test_size) == ([data], None)
    assert config.trainer.policy.model.path == str(run.exports / "s000010")
    assert (config.trainer.seed, config.environment.env_class) == (7, "sort_letters")
    assert config.generator.eval_n_samples_per_prompt == 4
    assert config.generator.inference_engine.max_num_seqs == 5
    assert config.generator.inference_engine.model_dtype == "float32"
    assert default_place(subject).parent == run.evaluations


def test_a_model_needs_no_file(data: str) -> None:
    config = configured(Subject(None, None, Pretrained("/models/one")), [data], None, [], [])
    assert config.trainer.policy.model.path == "/models/one"
    assert config.data.val_data == [data]


def test_several_greedy_samples_are_refused(run: Run, data: str) -> None:
    subject = find_subject("letters", "0", run.path.parent.parent)
    with pytest.raises(ConfigError, match=r"4 samples of a prompt would all be the same.*temperature=1\.0"):
        configured(subject, [data], 4, [], [])
    assert configured(subject, [data], 1, [], []).generator.eval_n_samples_per_prompt == 1


def test_data_that_is_not_there_is_found_before_anything_is_made(data: str, tmp_path: Path) -> None:
    place, subject = Run(tmp_path / "out"), Subject(None, None, Pretrained("/models/one"))
    with pytest.raises(DataError, match="no such file"):
        evaluate(
            subject,
            configured(subject, [data, f"{tmp_path}/other.jsonl"], None, [], ["environment.env_class=sort_letters"]),
            place,
            print,
            tmp_path,
        )
    with pytest.raises(DataError, match="no `env_class`"):
        evaluate(subject, configured(subject, [data], None, [], []), place, print, tmp_path)
    assert not place.path.exists()
    place.path.mkdir()
    with pytest.raises(RunError, match="out exists"):
        evaluate(
            subject,
            configured(subject, [data], None, [], ["environment.env_class=sort_letters"]),
            place,
            print,
            tmp_path,
        )


def test_lengths_that_nobody_chose_fit_the_model(data: str, tmp_path: Path) -> None:
    """A model of 256 positions is evaluated as documented, without a configuration."""
    model = str(CONFIGS / "quickstart" / "model")
    subject = find_subject(model, None, tmp_path)

    def lengths(*settings: str) -> tuple[int, int]:
        config = configured(subject, [data], None, [], ["environment.env_class=sort_letters", *settings])
        return config.trainer.max_prompt_length, config.generator.sampling_params.max_generate_length

    assert lengths() == (85, 171)
    assert lengths("trainer.max_prompt_length=56", "generator.sampling_params.max_generate_length=200") == (56, 200)
    with pytest.raises(ConfigError, match=r"override: trainer.max_prompt_length: 56 tokens .* more than the 256"):
        lengths("trainer.max_prompt_length=56")


def test_a_pipeline_with_the_exported_transformer(tmp_path: Path) -> None:
    run, tiny = Run(tmp_path / "runs" / "project" / "pictures"), CONFIGS / "diffusion_tiny.toml"
    write_text(run.config, Config.from_toml([tiny]).to_toml())
    with committed_directory(run.checkpoint(2), 1) as directory:
        (directory / "file").touch()
    subject = find_subject("pictures", None, run.path.parent.parent)
    prompts = str(CONFIGS / "diffusion_tiny" / "data" / "validation.jsonl")
    assert configured(subject, [prompts], 4, [], []).generator.eval_n_samples_per_prompt == 4  # they are not greedy
    export = Path(subject.model.path)
    export.mkdir(parents=True)
    (export / "config.json").write_text("exported")
    place = evaluated_model(run, export, tmp_path / "pipeline")
    assert (place / "transformer" / "config.json").read_text() == "exported"
    theirs = CONFIGS / "diffusion_tiny" / "model"
    assert {path.name for path in place.iterdir()} == {path.name for path in theirs.iterdir()}
    assert (place / "vae" / "config.json").read_text() == (theirs / "vae" / "config.json").read_text()
    assert find_subject(str(theirs), None, tmp_path) == Subject(None, None, Pretrained(str(theirs)))
