"""Files of a teacher's log-probabilities are compared with what a run wants before it is submitted."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from hpcrl.config import Config
from hpcrl.errors import RunError
from hpcrl.launch.submit.teacher import FACTS, check_precomputed, facts_of
from hpcrl.rundir.commit import committed_directory, write_json
from hpcrl.rundir.layout import Run
from tests.launch.submit.test_submit import called as hpcrl
from tests.launch.submit.test_submit import nothing_made
from tests.paths import CONFIGS

SFT_TINY, SETTING = CONFIGS / "sft_tiny.toml", "trainer.distillation.precomputed_logprobs"
TEACHER, POLICY = CONFIGS / "quickstart" / "teacher", CONFIGS / "quickstart" / "model"


def configured(*settings: str) -> Config:
    own = [
        "trainer.distillation.enable=true",
        f"trainer.distillation.model_path={TEACHER}",
        "trainer.distillation.top_k=4",
        "trainer.distillation.loss_weight=0.5",
    ]
    return Config.from_toml([SFT_TINY], [*own, *settings])


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `hpcrl score` leaves, as far as it is looked at before a run begins."""
    place = Run(tmp_path_factory.mktemp("written"))
    write_json(place.path / FACTS, facts_of(configured()))
    with committed_directory(place.teacher_file("train-0"), 0, top_k=4):
        pass
    return place.path


def problems(written: Path, *settings: str) -> list[str]:
    found = list(check_precomputed(configured(f"{SETTING}={written}", *settings)))
    assert {problem.path for problem in found} <= {SETTING}
    return [problem.message for problem in found]


def test_what_was_written_for_a_run_fits_it(written: Path, tmp_path: Path) -> None:
    assert not list(check_precomputed(configured()))
    assert problems(written) == []
    assert problems(written, "trainer.distillation.top_k=2", "trainer.train_batch_size=128", "data.weights=[2.0]") == []
    moved = shutil.copytree(TEACHER, tmp_path / "moved")
    assert problems(written, f"trainer.distillation.model_path={moved}") == [], "the weights are the same"


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (f"trainer.distillation.model_path={POLICY}", f"is of the teacher {TEACHER}, and this run's is {POLICY}"),
        ("trainer.distillation.top_k=5", "has the 4 most probable tokens of each place, fewer than"),
        (
            "trainer.ref.fsdp_config.mixed_precision.param_dtype=bf16",
            "was computed with other number types, ['fp32', 'fp32']",
        ),
        ("trainer.max_length=16", "has other rows than data.train_data[0] has here: longest differ"),
        (
            "data.train_data=['./quickstart/data/sft_validation.parquet']",
            "data.train_data[0] has here: contents differ",
        ),
        ("trainer.rope_theta=7.0", "was computed with other rotary positions"),
    ],
)
def test_what_was_written_for_another_run_is_refused(setting: str, message: str, written: Path) -> None:
    if "train_data" in setting:
        setting = setting.replace("./", f"{CONFIGS}/")
    (found,) = problems(written, setting)
    assert message in found
    assert str(written) in found
    assert found.endswith("write it again with `hpcrl score`, or leave it out")


def test_a_teacher_that_was_trained_since_is_another_one(tmp_path: Path) -> None:
    teacher = shutil.copytree(TEACHER, tmp_path / "teacher")
    setting = f"trainer.distillation.model_path={teacher}"
    place = Run(tmp_path / "written")
    write_json(place.path / FACTS, facts_of(configured(setting)))
    with committed_directory(place.teacher_file("train-0"), 0, top_k=4):
        pass
    assert problems(place.path, setting) == []
    with (teacher / "model.safetensors").open("r+b") as file:
        file.seek(-4, 2)
        file.write(b"\0\0\0\0")
    (found,) = problems(place.path, setting)
    assert f"is of the teacher {teacher}, which has other weights now" in found
    shutil.rmtree(teacher)
    assert problems(place.path, setting) == [], "nothing loads it"


def test_another_vocabulary_is_refused(written: Path, tmp_path: Path) -> None:
    """The same dataset by another tokenizer."""
    model = shutil.copytree(POLICY, tmp_path / "model")
    path = model / "tokenizer.json"
    path.write_text(path.read_text().replace('"a"', '"Q"'))
    assert any("tokenizer" in message for message in problems(written, f"trainer.policy.model.path={model}"))


def test_what_was_not_finished_is_refused(written: Path, tmp_path: Path) -> None:
    begun = shutil.copytree(written, tmp_path / "begun")
    (begun / "teacher" / "train-0" / "COMMIT").unlink()
    assert problems(begun) == [
        f"{begun} lacks train-0: `hpcrl score` did not finish it; write it again with `hpcrl score`, or leave it out"
    ]
    (nothing,) = problems(tmp_path / "nothing")
    assert nothing.startswith("expected a directory that `hpcrl score` wrote of 1 dataset(s)")
    two = "data.train_data=" + json.dumps([str(CONFIGS / "quickstart" / "data" / "sft_train.parquet")] * 2)
    assert "it has 1: " in problems(written, two)[0]


def test_submit_refuses_it(written: Path, tmp_path: Path) -> None:
    settings = [
        "trainer.distillation.enable=true",
        f"trainer.distillation.model_path={TEACHER}",
        "trainer.distillation.top_k=8",
        "trainer.distillation.loss_weight=0.5",
        f"{SETTING}={written}",
    ]
    done = hpcrl("submit", str(SFT_TINY), "--local", *settings, cwd=tmp_path)
    assert done.returncode == 4
    assert f"{SETTING}: {written} has the 4 most probable tokens of each place" in done.stderr
    assert nothing_made(tmp_path)


def test_rows_without_a_teacher_have_nothing_to_write(tmp_path: Path) -> None:
    done = hpcrl("score", str(SFT_TINY), "-o", "out", cwd=tmp_path)
    assert done.returncode == 2
    assert 'trainer.distillation.enable: expected true, with trainer.mode="sft"' in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("content", ["{", "[1]", "{}", '{"datasets": [1]}'])
def test_a_damaged_record_is_named(written: Path, tmp_path: Path, content: str) -> None:
    damaged = shutil.copytree(written, tmp_path / "damaged")
    if content.startswith('{"'):
        content = json.dumps(facts_of(configured()) | json.loads(content))
    (damaged / FACTS).write_text(content)
    with pytest.raises(RunError, match=rf"{damaged / FACTS} is damaged: .*write it again with `hpcrl score`"):
        problems(damaged)
