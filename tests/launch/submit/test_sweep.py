from __future__ import annotations

import re
from pathlib import Path

import pytest

from hpcrl.config import Config
from hpcrl.errors import ConfigError, DataError
from hpcrl.launch.submit.preflight import check_files
from hpcrl.launch.submit.sweep import elements, load_elements, run_names
from tests.paths import CONFIGS

QUICKSTART = [CONFIGS / "quickstart.toml"]
LR = "trainer.policy.optimizer_config.lr"


def lines(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "sweep.txt"
    file.write_text(text)
    return file


def test_no_sweep_is_one_element() -> None:
    assert elements([], None) == [[]]


def test_product_of_values_and_seeds() -> None:
    assert elements(["a.lr=1e-4,3e-4", "b=[1,2],[3]"], "0:2") == [
        [lr, b, seed]
        for lr in ("a.lr=1e-4", "a.lr=3e-4")
        for b in ("b=[1,2]", "b=[3]")
        for seed in ("trainer.seed=0", "trainer.seed=1")
    ]


def test_comma_in_quotes_is_no_separator() -> None:
    assert elements(['a="x,y",z'], None) == [['a="x,y"'], ["a=z"]]


def test_one_line_of_a_file_is_one_element_and_words_are_a_shells(tmp_path: Path) -> None:
    file = lines(
        tmp_path,
        '# learning rate and clipping belong together\n\na.lr=1e-4 a.clip=0.2\na.lr=3e-4   \'b=["x", "y z"]\'  # bold\n',
    )
    assert elements([], None, file) == [["a.lr=1e-4", "a.clip=0.2"], ["a.lr=3e-4", 'b=["x", "y z"]']]
    assert elements(["c=1,2"], "7", file)[2] == ["a.lr=3e-4", 'b=["x", "y z"]', "c=1", "trainer.seed=7"]


@pytest.mark.parametrize(("sweeps", "seeds"), [(["a.lr"], None), (["=1,2"], None), ([], "x"), ([], "3:3")])
def test_nonsense_is_refused(sweeps: list[str], seeds: str | None) -> None:
    with pytest.raises(ConfigError, match="expected"):
        elements(sweeps, seeds)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("# nothing\n", "expected a line such as trainer.seed=1 for each run, found none"),
        (
            "a=1\nb='x\na=2 oops\n",
            r"sweep.txt:2: No closing quotation.*\n.*sweep.txt:3: expected key=value, found 'oops'",
        ),
    ],
)
def test_files_that_are_no_list_of_overrides(tmp_path: Path, text: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        elements([], None, lines(tmp_path, text))
    with pytest.raises(ConfigError, match="nowhere: cannot be read"):
        elements([], None, tmp_path / "nowhere")


def test_a_setting_is_varied_in_one_place(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"trainer\.seed is varied twice"):
        elements([], "0:2", lines(tmp_path, "a=1 trainer.seed=3\n"))


def test_names_say_what_differs() -> None:
    assert run_names("quickstart", [[]]) == ["quickstart"]
    assert run_names("q", [["trainer.seed=3"]]) == ["q.0-seed-3"]
    assert run_names("q", elements([f"{LR}=1e-6,2e-6"], "1:3")) == [
        "q.0-lr-1e-6-seed-1",
        "q.1-lr-1e-6-seed-2",
        "q.2-lr-2e-6-seed-1",
        "q.3-lr-2e-6-seed-2",
    ]
    assert run_names("q", [["a.b=1", "c.d=2"], ["a.b=1"]]) == ["q.0-d-2", "q.1"], "what all share sets none apart"


def test_names_are_short_directory_names() -> None:
    varied = [
        ['data.train_data=["/data/one set.parquet"]'],
        ["generator.sampling_params.max_generate_length=1024", *(f"a.key{i}=value{i}" for i in range(20))],
        ["slurm.extra.x=ä/../.", "b.c="],
    ]
    names = run_names("q", varied)
    assert names[0] == "q.0-train_data-one-set.parquet"
    assert names[1].startswith("q.1-max_generate_len-1024-key0-value0-")
    assert names[2] == "q.2-x-c"
    for name in names:
        assert re.fullmatch(r"[A-Za-z0-9._-]{3,80}", name), name
        assert not name.endswith((".", "-"))
    long = "x" * 90
    assert run_names(long, [["a=1"], ["a=2"]]) == [f"{long}.0", f"{long}.1"]


def problems(varied: list[list[str]], *overrides: str) -> tuple[type[Exception], list[str]]:
    with pytest.raises((ConfigError, DataError)) as caught:
        load_elements(QUICKSTART, overrides, varied, check_files)
    return caught.type, str(caught.value).splitlines()


def test_elements_are_loaded_in_order() -> None:
    configs = load_elements(QUICKSTART, ["trainer.epochs=2"], elements([], "3,1"), check_files)
    assert [config.trainer.seed for config in configs] == [3, 1]
    assert {config.trainer.epochs for config in configs} == {2}
    assert all(type(config) is Config for config in configs)


def test_all_problems_of_all_elements_are_told_at_once_and_common_ones_once() -> None:
    kind, found = problems(elements([f"{LR}=1e-4,x,-1", "trainer.epochs=1,0"], None), "trainer.ckpt_intervall=1")
    assert kind is ConfigError
    assert sum("ckpt_intervall" in line for line in found) == 1, found
    assert found[0].startswith("override: trainer.ckpt_intervall"), "not of an element"
    assert any(line.startswith(f"element 2 ({LR}=x trainer.epochs=1): ") for line in found)
    kind, found = problems([[f"{LR}=x"], [f"{LR}=1e-4"], ['data.train_data=["/nowhere.parquet"]', "trainer.epochs=2"]])
    assert kind is ConfigError
    assert [line.partition(": ")[0] for line in found] == [
        f"element 0 ({LR}=x)",
        'element 2 (data.train_data=["/nowhere.parquet"] trainer.epochs=2)',
    ]


def test_missing_files_alone_are_a_data_error() -> None:
    kind, found = problems([["trainer.policy.model.path=/nowhere/a"], ["trainer.policy.model.path=/nowhere/b"]])
    assert kind is DataError
    assert len(found) == 2
    assert "element 1 " in found[1]
    assert "/nowhere/b is no model directory" in found[1]


def test_the_same_run_twice_is_refused_however_it_is_written() -> None:
    _, found = problems(elements([f"{LR}=1e-4,0.0001,2e-4"], None))
    assert found == [f"element 1 ({LR}=0.0001): the same run as element 0; leave one of them out"]


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("slurm.time_minutes=10", "cannot vary the slurm section"),
        ("generator.inference_engine.num_engines=2", "the number of nodes"),
        ("trainer.run_name=x", "cannot vary trainer.run_name"),
        ("trainer.project_name=x", "cannot vary trainer.project_name"),
        ("trainer.resume_mode=none", "whether its runs are requeued"),
    ],
)
def test_what_one_job_array_cannot_hold(override: str, expected: str) -> None:
    _, found = problems([["trainer.seed=1"], [override], ["trainer.seed=2"]])
    assert len(found) == 1
    assert found[0].startswith(f"element 1 ({override}): ")
    assert expected in found[0]


def test_a_file_of_windows(tmp_path: Path) -> None:
    file = tmp_path / "sweep.txt"
    file.write_bytes(b"\xef\xbb\xbftrainer.seed=1\r\ntrainer.seed=2\r\n")
    assert elements([], None, file) == [["trainer.seed=1"], ["trainer.seed=2"]]
