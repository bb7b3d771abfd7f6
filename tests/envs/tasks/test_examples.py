"""Each environment has example rows that it can use, a docs page with a conversation that goes as it says, and a line in the index."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
from collections.abc import Callable
from fractions import Fraction
from itertools import islice
from pathlib import Path
from typing import Any, cast

import pytest
from pyarrow import Table, parquet

from hpcrl.config import DataConfig, EnvironmentConfig
from hpcrl.config.sections.environment import LLMJudgeConfig, RobotConfig, SearchConfig, SkyRLGymConfig, Text2SQLConfig
from hpcrl.data.datasets import load_dataset
from hpcrl.data.sources import Source
from hpcrl.envs.base import Environment, Turn, state_of
from hpcrl.envs.examples import CORPUS, databases, rows_of
from hpcrl.envs.examples.make import MAKERS, rows
from hpcrl.envs.registry import ENVIRONMENTS, common_extras, environment_class, make_environment
from hpcrl.errors import DataError
from hpcrl.types import Prompt
from tests.paths import ROOT

DATA = DataConfig(train_data=[])
DOCS = ROOT / "docs" / "environments"


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EnvironmentConfig:
    folder = tmp_path_factory.mktemp("databases")
    databases.make(folder)
    gym = SkyRLGymConfig(
        search=SearchConfig(corpus=str(CORPUS)),
        text2sql=Text2SQLConfig(db_path=str(folder)),
        llm_as_a_judge=LLMJudgeConfig(model="judge", base_url="http://127.0.0.1:9/v1"),
        robot=RobotConfig(
            simulator="gymnasium",
            options={"id": "hpcrl.envs.simulators.arm:hpcrl/Arm-v0", "joints": 1},
            action_bins=5,
            state_bins=16,
        ),
    )
    return EnvironmentConfig(skyrl_gym=gym)


def examples(name: str, config: EnvironmentConfig) -> list[Prompt]:
    return load_dataset([Source(str(rows_of(name)))], ("train",), DATA, config, 4)


COMPARING = [
    "arithmetic", "calculator", "direct_math", "geometry3k", "gsm8k", "gsm8k_multi_turn", "guess_number", "math", "python_tool", "search",
    "single_choice", "sort_letters", "text2sql",
]  # fmt: skip


@pytest.mark.parametrize("name", COMPARING)
def test_a_ground_truth_is_worth_1_as_the_answer(name: str, config: EnvironmentConfig) -> None:
    for prompt in examples(name, config):
        environment = cast(Environment, make_environment(name, {**common_extras(config, 4), **prompt.extras}))
        environment.init(prompt.messages)
        text = environment.solution()
        assert text is not None
        assert environment.step(text).reward == 1.0, text
        environment.close()


def made_of(nums: list[Fraction], texts: list[str], target: Fraction) -> str | None:
    """Return an expression of the numbers that makes the target, found by trying all."""
    for value, text in zip(nums, texts, strict=True):
        if value == target:
            return text
    for i, j in itertools.permutations(range(len(nums)), 2):
        rest = [k for k in range(len(nums)) if k not in (i, j)]
        for sign in "+-*/":
            if sign == "/" and nums[j] == 0:
                continue
            value = {"+": nums[i] + nums[j], "-": nums[i] - nums[j], "*": nums[i] * nums[j]}.get(sign)
            joined = nums[i] / nums[j] if value is None else value
            text = f"({texts[i]} {sign} {texts[j]})"
            found = made_of([joined, *(nums[k] for k in rest)], [text, *(texts[k] for k in rest)], target)
            if found:
                return found
    return None


def truth(extras: dict[str, Any]) -> str:
    return extras["reward_spec"]["ground_truth"]


SOLUTIONS: dict[str, Callable[[dict[str, Any]], str | None]] = {
    "arithmetic": truth,
    "calculator": truth,
    "count_letters": lambda extras: str(sum(letter == extras["letter"] for letter in extras["word"])),
    "countdown": lambda extras: made_of(
        [Fraction(n) for n in extras["nums"]], [*map(str, extras["nums"])], extras["target"]
    ),
    "direct_math": lambda extras: f"Answer: {truth(extras)}",
    "format": lambda _: "<think>…</think>\n\n<answer>…</answer>",
    "geometry3k": lambda extras: f"\\boxed{{{truth(extras)}}}",
    "gsm8k": truth,
    "gsm8k_multi_turn": truth,
    "guess_number": truth,
    "math": lambda extras: f"\\boxed{{{truth(extras)}}}",
    "python_tool": lambda extras: f"<answer>{truth(extras)}</answer>",
    "reverse_word": lambda extras: "".join(reversed(extras["word"])),
    "search": lambda extras: f"<answer>The {extras['reward_spec']['ground_truth']['target'][0]}.</answer>",
    "single_choice": lambda extras: f"<answer>{truth(extras)}</answer>",
    "sort_letters": truth,
    "text2sql": lambda extras: f"<solution>{truth(extras)}</solution>",
}
"""What a policy says that is right at once."""

OF_OTHERS = {"agent": 4, "llm_as_a_judge": 4, "robot": 4, "sandbox": 8}
"""Environments in which something else than hpcrl judges, with the number of their rows; tests/sandboxes plays those of sandbox."""


@pytest.mark.parametrize("name", sorted(SOLUTIONS))
def test_example_rows_can_be_solved(name: str, config: EnvironmentConfig) -> None:
    found = examples(name, config)
    assert 4 <= len(found) <= 8
    for prompt in found:
        assert (prompt.env_class, prompt.data_source) == (name, name)
        environment = make_environment(name, {**common_extras(config, 4), **prompt.extras})
        solution = SOLUTIONS[name](prompt.extras)
        assert solution is not None
        turn = environment.step(solution)
        assert (turn.reward, turn.done) == (1.0, True), (prompt, solution)


def test_every_environment_has_example_rows(config: EnvironmentConfig) -> None:
    assert sorted({*SOLUTIONS, *OF_OTHERS}) == sorted(ENVIRONMENTS)
    assert {name: len(examples(name, config)) for name in OF_OTHERS} == OF_OTHERS


def test_skyrl_rows_of_geometry3k_are_read(tmp_path: Path, config: EnvironmentConfig) -> None:
    row = json.loads(rows_of("geometry3k").read_text(encoding="utf-8").splitlines()[0])
    question = {"type": "text", "text": "Find x.", "image_url": None}
    figure = {"type": "image_url", "text": None, "image_url": {"url": row["images"][0]}}
    written = {
        "prompt": [{"role": "user", "content": [figure, question]}],
        "env_class": "geometry3k",
        "reward_spec": row["reward_spec"],
        "extra_info": {"index": 0, "answer": "10"},
    }
    parquet.write_table(Table.from_pylist([written]), tmp_path / "train.parquet")
    (prompt,) = load_dataset([Source(str(tmp_path / "train.parquet"))], ("train",), DATA, config, 4)
    assert [part["type"] for part in prompt.messages[0]["content"]] == ["image", "text"]
    environment = make_environment("geometry3k", {**common_extras(config, 4), **prompt.extras})
    assert environment.step("\\boxed{10}").reward == 1.0


def test_the_corpus_answers_the_example_rows_of_search(config: EnvironmentConfig) -> None:
    for prompt in examples("search", config):
        question = prompt.messages[-1]["content"].rpartition("\n")[2]
        environment = make_environment("search", {**common_extras(config, 4), **prompt.extras})
        first = environment.step(f"<search>{question}</search>").observations[0]["content"]
        country = question.removesuffix("?").split()[-1]
        city = first.partition(f" is the capital of {country}")[0].split()[-1]
        second = environment.step(f"<search>river that flows through {city}</search>").observations[0]["content"]
        assert prompt.extras["reward_spec"]["ground_truth"]["target"][0] in (
            first if "river" not in question else second
        )


@pytest.mark.parametrize("name", MAKERS)
def test_shipped_rows_are_those_that_are_made(name: str) -> None:
    shipped = [json.loads(line) for line in rows_of(name).read_text(encoding="utf-8").splitlines()]
    assert list(islice(rows(name, 0), len(shipped))) == shipped
    assert list(islice(rows(name, 1), len(shipped))) != shipped
    many = [json.dumps(row) for row in islice(rows(name, 0), 60)]
    assert len(set(many)) == len(many)


def test_rows_are_printed_as_many_as_there_are() -> None:
    program = [sys.executable, "-m", "hpcrl.envs.examples.make"]
    three = subprocess.run([*program, "countdown", "--rows", "3"], capture_output=True, text=True, check=True)
    assert three.stdout == "".join(rows_of("countdown").read_text().splitlines(keepends=True)[:3])
    few = subprocess.run([*program, "reverse_word", "--rows", "100"], capture_output=True, text=True, check=False)
    assert few.returncode == 1
    assert f"only about {len(few.stdout.splitlines())} different rows" in few.stderr


def test_every_environment_has_a_first_line_and_an_entry_in_the_index() -> None:
    index = (DOCS / "README.md").read_text(encoding="utf-8")
    linked = re.findall(r"^\| \[(\w+)\]\((\w+)\.md\) \|", index, re.MULTILINE)
    assert sorted(name for name, _ in linked) == sorted(ENVIRONMENTS)
    for name, page in linked:
        assert f"`{name}`" in (DOCS / f"{page}.md").read_text(encoding="utf-8")
        assert (environment_class(name).__doc__ or "").strip()


PAGES = [
    (page.stem, number, json.loads(text))
    for page in sorted(DOCS.glob("*.md"))
    for number, text in enumerate(
        re.findall(r"^```json\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    )
    if '"turns"' in text and page.stem != "sandbox"
]


def environment_of(row: dict[str, Any], config: EnvironmentConfig) -> Environment:
    extras = {name: value for name, value in row.items() if name not in ("prompt", "env_class", "data_source")}
    return cast(Environment, make_environment(row["env_class"], {**common_extras(config, 4), **extras}))


@pytest.mark.parametrize(("page", "number", "played"), PAGES, ids=[f"{page}-{number}" for page, number, _ in PAGES])
def test_conversations_of_the_docs_go_as_they_say(
    page: str, number: int, played: dict[str, Any], config: EnvironmentConfig
) -> None:
    row = played["row"]
    if row["env_class"] == "python_tool" and sys.version_info < (3, 11):
        pytest.skip("older Pythons have no marks in a traceback")
    assert row["env_class"] in ENVIRONMENTS
    environment = environment_of(row, config)
    prompt = row["prompt"]
    environment.init([{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt)
    for turn in played["turns"]:
        answer = environment.step(turn["action"])
        found = {"action": turn["action"], "reward": answer.reward}
        assert found | ({} if answer.done else {"observation": answer.observations[0]["content"]}) == turn
    environment.close()
    assert answer.done, (page, number)


@pytest.mark.parametrize("page", ["python_tool", "search", "text2sql"])
def test_another_process_goes_on_after_each_turn(page: str, config: EnvironmentConfig) -> None:
    played = next(played for name, _, played in PAGES if name == page)
    first = environment_of(played["row"], config)
    first.init([])
    for turn in played["turns"]:
        state, second = state_of(first), environment_of(played["row"], config)
        assert state is not None
        second.resume(state)
        assert second.step(turn["action"]) == first.step(turn["action"])


def test_the_environment_of_the_docs_works() -> None:
    code, _settings, turns = re.findall(
        r"^```python\n(.*?)^```", (DOCS / "README.md").read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )
    names: dict[str, Any] = {}
    exec(code, names)
    environment = names["Negotiate"]({"price": 100, **common_extras(EnvironmentConfig(), 4)})
    assert environment.init([{"role": "user", "content": "?"}]) == [{"role": "user", "content": "?"}]
    turn = environment.step("Too much.")
    assert turn.observations[0]["content"] == "I could sell it for 90. You have 3 more words with me."
    assert environment.step("Deal!").reward == pytest.approx(0.1)
    environment.close()
    hint, answer = (eval(line, {"Turn": Turn}) for line in turns.splitlines())
    assert (hint.role, answer.rewards) == ("hinter", {"hinter": 0.5})
    with pytest.raises(DataError, match="`price`"):
        names["Negotiate"]({})
