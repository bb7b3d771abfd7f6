"""Datasets in all file formats become the same prompts, and a dataset with a fault says where it is."""

import json
from datetime import datetime

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hpcrl.data.prompts import drop_long, load_prompts, set_aside, source_names
from hpcrl.data.sources import Source
from hpcrl.errors import DataError

CHAT = [{"role": "user", "content": "sort: ba"}]
SPEC = {"ground_truth": "ab", "method": "rule"}
ROWS = [
    {"prompt": CHAT, "env_class": "sort_letters", "data_source": "letters", "reward_spec": SPEC, "level": 3},
    {"prompt": CHAT, "env_class": None, "data_source": None, "reward_spec": SPEC, "level": None},
]


def write(path, rows) -> str:
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    else:
        path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return str(path)


@pytest.mark.parametrize("suffix", [".parquet", ".json", ".jsonl"])
def test_formats_agree(tmp_path, suffix):
    first, second = load_prompts([Source(write(tmp_path / f"rows{suffix}", ROWS))], "other")
    assert (first.uid, first.env_class, first.data_source) == ("0", "sort_letters", "letters")
    assert first.messages == CHAT
    assert first.extras == {"reward_spec": SPEC, "level": 3}
    assert (second.uid, second.env_class, second.data_source) == ("1", "other", "rows"), "the name of the file"
    assert second.extras == {"reward_spec": SPEC, "level": None}


def test_several_files_keep_their_order(tmp_path):
    names = [write(tmp_path / "a.parquet", ROWS), write(tmp_path / "b.jsonl", [{"prompt": CHAT, "n": 9}])]
    prompts = load_prompts([Source(name) for name in names], "other")
    assert [prompt.uid for prompt in prompts] == ["0", "1", "2"]
    assert prompts[2].extras == {"n": 9}


def test_rows_without_a_source_have_their_files(tmp_path):
    (tmp_path / "gsm8k").mkdir()
    (tmp_path / "aime").mkdir()
    rows = [{"prompt": CHAT}, {"prompt": CHAT, "data_source": "named"}]
    names = [write(tmp_path / f"{folder}/test.jsonl", rows) for folder in ("gsm8k", "aime")]
    found = [prompt.data_source for prompt in load_prompts([Source(name) for name in names], "e")]
    assert found == ["gsm8k/test", "named", "aime/test", "named"]


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (["/data/math.jsonl"], ["math"]),
        (["a/test.json", "math.parquet"], ["test", "math"]),
        (["a/b/test.json", "c/b/test.json", "c/test.json"], ["a/b/test", "c/b/test", "c/test"]),
        (["test.json", "a/test.json"], ["test", "a/test"]),
        (["a/test.json", "a/test.jsonl"], ["a/test", "a/test"]),
        (["a/test.json", "a/test.json"], ["test"]),
    ],
)
def test_names_of_files(paths, names):
    assert list(source_names(paths).values()) == names
    assert list(source_names(paths)) == list(dict.fromkeys(paths))


def test_line_separators_inside_a_string_do_not_end_a_line(tmp_path):
    chat = [{"role": "user", "content": "one\u2028two"}]
    assert load_prompts([Source(write(tmp_path / "a.jsonl", [{"prompt": chat}]))], "e")[0].messages == chat


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"question": "2+2"}], "row uid 0: no column `prompt`.*question"),
        ([{"prompt": CHAT}], r"no `env_class`.*environment\.env_class"),
        (
            [ROWS[0], {"prompt": 4, "env_class": "e"}],
            "row uid 1, column `prompt`: expected text or a list of chat messages",
        ),
        ([{"prompt": [], "env_class": "e"}], "expected text or a list of chat messages"),
        ([{"prompt": "", "env_class": "e"}], "expected text or a list of chat messages"),
        ([{"prompt": [{"role": "user"}], "env_class": "e"}], "a message of user has no content"),
        ([{"prompt": ["hello"], "env_class": "e"}], "expected a chat message such as .* in 'hello'"),
        ([{"prompt": [{"role": "user", "content": None}], "env_class": "e"}], "a message of user has no content"),
        ([{"prompt": CHAT, "env_class": "e", "score": float("nan")}], "column `score` cannot be written as JSON"),
        (["hello"], "expected an object with columns, found str"),
        ([], "has no rows"),
    ],
)
def test_faulty_rows_are_named(tmp_path, rows, message):
    with pytest.raises(DataError, match=message) as caught:
        load_prompts([Source(write(tmp_path / "rows.json", rows))], None)
    assert "rows.json" in str(caught.value)


def test_parquet_column_that_cannot_travel(tmp_path):
    rows = [{"prompt": CHAT, "env_class": "e", "made": datetime(2026, 1, 1)}]
    with pytest.raises(DataError, match="column `made` cannot be written as JSON"):
        load_prompts([Source(write(tmp_path / "rows.parquet", rows))], None)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("missing.parquet", None, "no such file"),
        ("some/dataset", None, "no such file"),
        ("rows.csv", b"prompt\n", r"expected a \.parquet, \.json, \.jsonl or \.arrow file"),
        ("rows.parquet", b"not parquet", "cannot be read as parquet"),
        ("rows.json", b"{", "cannot be read as JSON"),
        ("rows.json", b"\xff\xff", "cannot be read as JSON: not UTF-8 text: byte 0; saved as Latin-1"),
        (
            "rows.jsonl",
            b'{"prompt": "a"}\n{"a": "\xe9"}\n',
            "line 2 cannot be read as JSON: not UTF-8 text: byte 7; saved as Latin-1",
        ),
        (
            "rows.jsonl",
            "{}\n".encode("utf-16"),
            "line 1 cannot be read as JSON: not UTF-8 text: byte 0; saved as UTF-16",
        ),
        ("rows.json", b"{}", "expected a list of rows, found dict"),
        ("rows.jsonl", b'\n{"prompt": "a"}\n{', "line 3 cannot be read as JSON"),
    ],
)
def test_faulty_files_are_named(tmp_path, name, content, message):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        load_prompts([Source(str(path))], "e")
    assert str(path) in str(caught.value)


def test_drop_long_keeps_order(tmp_path):
    rows = [{"prompt": CHAT, "n": n} for n in (3, 9, 1, 4, 5)]
    prompts = load_prompts([Source(write(tmp_path / "a.jsonl", rows))], "e")
    kept = drop_long(prompts, lambda prompt: prompt.extras["n"], 4)
    assert [prompt.uid for prompt in kept] == ["0", "2", "3"]
    assert drop_long([], lambda _: 1, 4) == []
    with pytest.raises(DataError, match=r"all 5 prompts.*max_prompt_length = 0"):
        drop_long(prompts, lambda prompt: prompt.extras["n"], 0)


def test_columns_by_other_names(tmp_path):
    rows = [
        {"question": "1+1?", "answer": "2", "prompt": "unused", "level": 3},
        {"question": CHAT, "answer": "2", "prompt": "unused", "reward_spec": {"ground_truth": "two", "method": "rule"}},
        {"question": "2+2?", "answer": 4, "prompt": "unused", "reward_spec": {"method": "rule"}},
    ]
    source = write(tmp_path / "rows.jsonl", rows)
    one, two, three = load_prompts([Source(source)], "e", prompt_column="question", response_column="answer")
    assert one.messages == [{"role": "user", "content": "1+1?"}]
    assert two.messages == CHAT
    assert one.extras == {"answer": "2", "prompt": "unused", "level": 3, "reward_spec": {"ground_truth": "2"}}
    assert two.extras["reward_spec"] == {"ground_truth": "two", "method": "rule"}
    assert three.extras["reward_spec"] == {"ground_truth": 4, "method": "rule"}
    assert load_prompts([Source(source)], "e")[0].messages == [{"role": "user", "content": "unused"}]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "2+2"}, r"no column `question` \(data\.prompt_column\); its columns are prompt"),
        ({"question": "2+2"}, r"no column `answer` \(data\.response_column\); its columns are question"),
        ({"question": "2+2", "answer": "4", "reward_spec": "4"}, "column `reward_spec`: expected an object, found '4'"),
        ({"question": 4, "answer": "4"}, "column `question`: expected text or a list of chat messages"),
        ({"question": "2+2", "answer": float("nan")}, "cannot be written as JSON"),
    ],
)
def test_faulty_columns_by_other_names(tmp_path, row, message):
    with pytest.raises(DataError, match=message):
        load_prompts(
            [Source(write(tmp_path / "rows.json", [row]))], "e", prompt_column="question", response_column="answer"
        )


@pytest.mark.parametrize(
    ("test_size", "count"), [(0.2, 2), (0.25, 2), (0.01, 1), (0.99, None), (1, 1), (9, 9), (10, None)]
)
def test_the_first_prompts_are_set_aside(tmp_path, test_size, count):
    prompts = load_prompts([Source(write(tmp_path / "a.jsonl", [{"prompt": CHAT, "n": n} for n in range(10)]))], "e")
    if count is None:
        with pytest.raises(DataError, match=f"data.test_size = {test_size} leaves none of the 10 prompts"):
            set_aside(prompts, test_size)
    else:
        train, evaluation = set_aside(prompts, test_size)
        assert [prompt.extras["n"] for prompt in evaluation] == list(range(count))
        assert [prompt.extras["n"] for prompt in train] == list(range(count, 10))


def test_rows_that_rewards_score_need_no_environment(tmp_path):
    source = write(tmp_path / "a.jsonl", [{"prompt": CHAT}, {"prompt": CHAT, "env_class": "e"}])
    with pytest.raises(DataError, match="no `env_class`"):
        load_prompts([Source(source)], None)
    assert [prompt.env_class for prompt in load_prompts([Source(source)], None, env_class_required=False)] == ["", "e"]


def test_an_environment_is_named_by_a_text(tmp_path):
    source = write(tmp_path / "a.jsonl", [{"prompt": CHAT, "env_class": 5}])
    with pytest.raises(DataError, match="row uid 0, column `env_class`: expected a text, found 5"):
        load_prompts([Source(source)], "e")


@pytest.mark.parametrize("spec", [None, {}, {"ground_truth": None}])
def test_a_row_that_is_of_no_use(tmp_path, spec):
    def check(env_class, extras, data_source):
        assert (env_class, data_source) == ("e", "rows")
        if not (extras["reward_spec"] or {}).get("ground_truth"):
            raise DataError("no ground truth")

    rows = [
        {"prompt": CHAT, "answer": "2", "reward_spec": {"ground_truth": "2"}},
        {"prompt": CHAT, "answer": "4", "reward_spec": spec},
    ]
    source = write(tmp_path / "rows.json", rows)
    with pytest.raises(DataError, match=r"rows\.json, row uid 1: no ground truth"):
        load_prompts([Source(source)], "e", check=check)
    assert (
        len(load_prompts([Source(source)], "e"))
        == len(load_prompts([Source(source)], "e", check=check, first=1)) + 1
        == 2
    )
    assert len(load_prompts([Source(source)], "e", response_column="answer", check=check)) == 2


@pytest.mark.parametrize("suffix", [".parquet", ".json", ".jsonl"])
def test_the_first_rows_of_each_file(tmp_path, suffix):
    rows = [{"prompt": CHAT, "n": n} for n in range(3)]
    sources = [write(tmp_path / f"{name}{suffix}", rows) for name in "ab"]
    assert [prompt.extras["n"] for prompt in load_prompts([Source(source) for source in sources], "e", first=2)] == [
        0,
        1,
        0,
        1,
    ]
    if suffix == ".jsonl":
        (tmp_path / "a.jsonl").write_text(json.dumps(rows[0]) + "\nno json\n")
        assert len(load_prompts([Source(sources[0])], "e", first=1)) == 1


@pytest.mark.parametrize("source", [7, "\x1b[2J", "a\nb", "x" * 201], ids=repr)
def test_a_source_that_cannot_stand_in_a_table(tmp_path, source):
    path = write(tmp_path / "rows.json", [{"prompt": CHAT, "data_source": source}])
    with pytest.raises(DataError, match=r"row uid 0, column `data_source`: expected a text"):
        load_prompts([Source(path)], "e")


@pytest.mark.parametrize("row", [{"prompt": "\ud800"}, {"prompt": "x", "more": {"a": "\ud800"}}], ids=repr)
def test_text_that_no_message_can_carry(tmp_path, row):
    path = write(tmp_path / "rows.json", [row])
    with pytest.raises(DataError, match=r"row uid 0, column `(prompt|more)` cannot be written as JSON \(.*surrogates"):
        load_prompts([Source(path)], "e")
