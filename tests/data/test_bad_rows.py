"""One bad row of a dataset is named by its file and its place, before anything is trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hpcrl.cli.main import main
from hpcrl.data.prompts import load_prompts
from hpcrl.data.sources import Source
from hpcrl.errors import DataError

GOOD = {"prompt": "2 + 2", "reward_spec": {"ground_truth": "4"}}


def nested(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


BAD = [
    ({**GOOD, "prompt": "half \ud800"}, "column `prompt` .*surrogates not allowed"),
    ({**GOOD, "prompt": [{"role": "user", "content": "\udfff"}]}, "column `prompt` .*surrogates not allowed"),
    ({**GOOD, "prompt": [{"role": "user", "content": "x", "name": "\udfff"}]}, "column `prompt` .*surrogates"),
    ({**GOOD, "data_source": "\udfff"}, "column `data_source` .*surrogates not allowed"),
    ({**GOOD, "note\udfff": "x"}, "column `note.` cannot be .*surrogates not allowed"),
    ({**GOOD, "letters": {"\udfff": 1}}, "column `letters` .*surrogates not allowed"),
    ({**GOOD, "data_source": {"a": 1}}, "column `data_source`: expected a text, found {'a': 1}"),
    ({**GOOD, "env_class": 7}, "column `env_class`: expected a text, found 7"),
    ({**GOOD, "tree": nested(500)}, "column `tree` .*nested more than 100 deep"),
    ({**GOOD, "prompt": [nested(500)]}, "column `prompt` .*nested more than 100 deep"),
    ({**GOOD, "prompt": 7}, "column `prompt`: expected text or a list of chat messages .*found 7"),
    ({**GOOD, "reward_spec": 7}, "found 7"),
    ([1], "expected an object with columns, found list"),
]


@pytest.mark.parametrize(("row", "told"), BAD, ids=range(len(BAD)))
@pytest.mark.parametrize("kind", ["json", "jsonl"])
def test_a_bad_row_is_named(tmp_path: Path, kind: str, row: Any, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = tmp_path / f"first.{kind}", tmp_path / f"second.{kind}"
    for path, rows in ((first, [GOOD] * 3), (second, [GOOD, row, GOOD])):
        path.write_text(json.dumps(rows) if kind == "json" else "\n".join(map(json.dumps, rows)))
    place = rf"dataset {second}, row uid 4 \(row 1 of the file\)"
    with pytest.raises(DataError, match=f"(?s){place}.*{told}"):
        load_prompts(
            [Source(str(first)), Source(str(second))],
            "math",
            response_column="reward_spec" if row == BAD[-2][0] else None,
        )
    if row != BAD[-2][0]:
        assert main(["env", "try", "math", "--data", str(second), "--sample", "1"]) == 4
        capsys.readouterr().err.encode()


@pytest.mark.parametrize("text", ["[" * 100_000, '{"prompt": ' * 100_000, '{"prompt": "x", "tree": ' + "[" * 100_000])
def test_json_that_nobody_can_follow_is_named(tmp_path: Path, text: str) -> None:
    lines = tmp_path / "rows.jsonl"
    lines.write_text(json.dumps(GOOD) + "\n" + text + "\n")
    with pytest.raises(DataError, match=r"rows\.jsonl, line 2 cannot be read as JSON: it is nested too deeply"):
        load_prompts([Source(str(lines))], "math")
    whole = tmp_path / "rows.json"
    whole.write_text(text)
    with pytest.raises(DataError, match=r"rows\.json cannot be read as JSON: it is nested too deeply"):
        load_prompts([Source(str(whole))], "math")


def test_nested_as_rows_are(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({**GOOD, "tree": nested(99), "flat": [[]] * 1000}))
    assert load_prompts([Source(str(path))], "math")[0].extras["tree"] == nested(99)


def test_a_text_of_parquet_that_is_none_is_named(tmp_path: Path) -> None:
    texts = pa.array([*(b"%d" % number for number in range(2500)), b"\xff\xfe"], pa.binary())
    strings = pa.Array.from_buffers(pa.string(), len(texts), texts.buffers())
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"prompt": strings}), path, use_dictionary=False)
    with pytest.raises(DataError, match=r"rows\.parquet, row 2500 of the file: a text is no UTF-8"):
        load_prompts([Source(str(path))], "math")


def test_a_flipped_bit_of_parquet_that_has_checksums_is_found(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    table = pa.table({"prompt": [f"question {number}" for number in range(100)]})
    pq.write_table(table, path, write_page_checksum=True, use_dictionary=False, compression="none")
    assert len(load_prompts([Source(str(path))], "math")) == 100
    content = path.read_bytes()
    path.write_bytes(content.replace(b"question 42", b"question 43", 1))
    with pytest.raises(DataError, match=r"rows\.parquet cannot be read as parquet: .*(crc|CRC|checksum)"):
        load_prompts([Source(str(path))], "math")
