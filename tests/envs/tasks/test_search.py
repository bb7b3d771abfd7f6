"""A search engine as a tool: over HTTP, and BM25 over a small corpus."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from hpcrl.config.sections.environment import SearchConfig, SkyRLGymConfig
from hpcrl.envs.registry import make_environment
from hpcrl.envs.tasks import search
from hpcrl.envs.tasks.search import normal
from hpcrl.envs.tools.retrieve import Corpus, shown
from hpcrl.errors import ConfigError, DataError, ServiceError
from tests.envs.server import Asked, serving

CAPITALS = """France Paris, Norway Oslo, Japan Tokyo, Peru Lima, Kenya Nairobi, Chile Santiago, Egypt Cairo, Cuba Havana, Iran Tehran,
Italy Rome, Spain Madrid, Greece Athens, Poland Warsaw, Latvia Riga, Malta Valletta, Serbia Belgrade, Austria Vienna, Hungary Budapest,
Ghana Accra, Nepal Kathmandu, Oman Muscat, Qatar Doha, Fiji Suva, Tonga Nukualofa, Samoa Apia, Canada Ottawa, Mexico Mexico-City,
Panama Panama-City, Jamaica Kingston, Bolivia Sucre, Uruguay Montevideo, Ecuador Quito, Iceland Reykjavik, Finland Helsinki,
Sweden Stockholm, Denmark Copenhagen, Estonia Tallinn, Ireland Dublin, Portugal Lisbon, Morocco Rabat, Tunisia Tunis, Libya Tripoli,
Sudan Khartoum, Zambia Lusaka, Angola Luanda, Botswana Gaborone, Mongolia Ulaanbaatar, Vietnam Hanoi, Laos Vientiane, Thailand Bangkok"""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "corpus.jsonl"
    lines = []
    for number, pair in enumerate(CAPITALS.replace("\n", " ").split(", ")):
        country, city = pair.split()
        contents = f'"{city}"\n{city} is the capital of {country}.'
        document = {"contents": contents} if number % 2 else {"title": city, "text": contents.partition("\n")[2]}
        lines.append(json.dumps({"id": str(number), **document}))
    path.write_text("\n".join(lines) + "\n\n")
    assert len(lines) == 50
    return path


def play(config: SearchConfig, *actions: str, turns: int = 4, truth: Any = "Oslo") -> list[Any]:
    gym = SkyRLGymConfig(search=config)
    row = {"max_turns": turns, "skyrl_gym": gym, "reward_spec": {"ground_truth": truth}}
    environment = make_environment("search", row)
    environment.init([])
    played = [environment.step(action) for action in actions]
    environment.close()
    return played


def seen(turn: Any) -> str:
    return turn.observations[0]["content"]


def result(*texts: str) -> dict[str, Any]:
    return {"result": [[{"document": {"id": "7", "contents": text}, "score": 0.5} for text in texts]]}


def test_the_service_is_asked_and_its_documents_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(lambda _: (200, result('"Oslo"\nOslo is a city.', "Bergen"))) as server:
        config = SearchConfig(search_url=f"{server.url}/retrieve", topk=2, log_requests=True)
        first, last = play(
            config, "<think>hm</think><search> capital of Norway\n</search>", "<answer>the Oslo!</answer>"
        )
    (asked,) = server.asked
    assert (asked.path, asked.json) == (
        "/retrieve",
        {"queries": ["capital of Norway"], "topk": 2, "return_scores": True},
    )
    assert seen(first) == '<information>\nDoc 1: "Oslo"\nOslo is a city.\n\nDoc 2: Bergen\n</information>'
    assert (first.reward, first.done, last.reward, last.done) == (0.0, False, 1.0, True)
    assert last.metrics == {"searches": 1.0, "answered": 1.0}
    assert capsys.readouterr().out == "search: 'capital of Norway': 2 documents\n"


@pytest.mark.parametrize(
    ("answer", "truth", "reward"),
    [
        ("oslo", "Oslo", 1.0),
        (" The  city of: Oslo. ", ["Bergen", "a City of Oslo"], 1.0),
        ("Paris", {"target": ["Paris", "Lyon"]}, 1.0),
        ("1984", [1984], 1.0),
        ("Oslo or Bergen", "Oslo", 0.0),
        ("", "Oslo", 0.0),
        ("the", "Oslo", 0.0),
        ("Bergen</answer><answer>Oslo", "Oslo", 0.0),
        ("<answer>Oslo", "Oslo", 0.0),
    ],
)
def test_what_an_answer_is_worth(answer: str, truth: Any, reward: float) -> None:
    (turn,) = play(SearchConfig(), f"<answer>{answer}</answer>", truth=truth)
    assert (turn.reward, turn.done) == (reward, True)


def test_the_normal_form_keeps_words_apart() -> None:
    assert normal("An  apple-a-day: the THEORY") == "appleaday theory"
    assert normal("Ünïcode 1,000") == "ünïcode 1000"


@pytest.mark.parametrize("truth", [None, "", [], {"target": []}, {"target": None}, "the", {"other": "x"}])
def test_rows_without_an_answer(truth: Any) -> None:
    with pytest.raises(DataError, match="with one or more answers as `ground_truth`, found"):
        play(SearchConfig(), truth=truth)


def test_turns_end_and_tags_get_in_the_way(corpus: Path) -> None:
    config = SearchConfig(corpus=str(corpus))
    (turn,) = play(config, "<search>Norway</search>", turns=1)
    assert (turn.reward, turn.done, turn.metrics) == (0.0, True, {"searches": 0.0, "answered": 0.0})
    (turn,) = play(config, "Oslo, I think")
    assert "<answer>…</answer>" in seen(turn)
    (turn,) = play(config, "<search>Japan</search><information>Oslo</information><answer>Oslo</answer>")
    assert not turn.done
    assert "Tokyo" in seen(turn)
    (turn,) = play(config, "<search>Norway <answer>Oslo</answer>")
    assert turn.reward == 1.0
    (turn,) = play(config, "<search> </search>")
    assert "No document was found." in seen(turn)


def test_bm25_finds_the_right_document_first(corpus: Path) -> None:
    index = Corpus(corpus)
    for pair in CAPITALS.replace("\n", " ").split(", "):
        country, city = pair.split()
        assert f"{city} is the capital of {country}." in index.find(f"What is the capital of {country}?", 3)[0]
    assert len(index.find("capital", 3)) == 3
    assert len(index.find("capital", 500)) == 50
    assert index.find("Norway", 3) == ['"Oslo"\nOslo is the capital of Norway.']
    for nothing in ("zebra", "", "?", "the of", "\0", "x" * 100_000):
        assert index.find(nothing, 3) == []


def test_a_rare_word_counts_more_than_a_common_one(tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl"
    texts = ["common common common", "common rare", "common other words that make this long", "common"]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    assert Corpus(path).find("common rare", 1) == ["common rare"]


def test_a_corpus_is_read_once_by_threads_that_begin_together(corpus: Path, tmp_path: Path) -> None:
    path = tmp_path / "own.jsonl"
    path.write_bytes(corpus.read_bytes())
    found: list[str] = []
    turns = [
        threading.Thread(
            target=lambda: found.append(seen(play(SearchConfig(corpus=str(path)), "<search>Peru</search>")[0]))
        )
        for _ in range(8)
    ]
    for turn in turns:
        turn.start()
    for turn in turns:
        turn.join()
    path.unlink()
    found.append(seen(play(SearchConfig(corpus=str(path)), "<search>Peru</search>")[0]))
    assert len(found) == 9
    assert set(found) == {'<information>\nDoc 1: "Lima"\nLima is the capital of Peru.\n</information>'}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "has no documents"),
        (b"\n\n", "has no documents"),
        (b'{"text": "a"}\n{"title": "b"}\n', "line 2 of .*: expected a document with `contents`"),
        (b'{"text": "a"}\n{\n', "line 2 of "),
        (b"\xff\xfe", "line 1 of .*: not UTF-8 text: byte 0; saved as UTF-16"),
        (b"[1]\n", r"line 1 of .*, found \[1\]"),
        (b'{"contents": 3}\n', "line 1 of "),
    ],
)
def test_a_corpus_that_cannot_be_read(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "corpus.jsonl"
    path.write_bytes(content)
    with pytest.raises(DataError, match=f"environment.skyrl_gym.search.corpus: .*{words}"):
        Corpus(path)
    with pytest.raises(DataError, match="cannot read"):
        Corpus(tmp_path / "missing.jsonl")


def test_a_service_that_fails_for_a_while() -> None:
    answers = iter([(500, "warming up"), (502, "warming up"), (200, result("Oslo"))])
    with serving(lambda _: next(answers)) as server:
        (turn,) = play(SearchConfig(search_url=server.url), "<search>Norway</search>")
    assert "Doc 1: Oslo" in seen(turn)


@pytest.mark.parametrize(
    ("status", "said", "words"),
    [
        (404, "no", "it answered 404"),
        (200, b"{", "expected JSON"),
        (200, {}, 'expected {"result":'),
        (200, [], 'expected {"result":'),
        (200, {"result": []}, 'expected {"result":'),
        (200, {"result": [[], []]}, 'expected {"result":'),
        (200, {"result": [["text"]]}, 'expected {"result":'),
        (200, {"result": [[{"document": {"id": 1}}]]}, 'expected {"result":'),
        (200, {"result": 3}, 'expected {"result":'),
    ],
)
def test_a_service_that_answers_in_another_form(status: int, said: Any, words: str) -> None:
    with serving(lambda _: (status, said)) as server, pytest.raises(ServiceError, match=words) as error:
        play(SearchConfig(search_url=server.url), "<search>Norway</search>")
    assert "environment.skyrl_gym.search.search_url" in str(error.value)


def test_documents_may_come_without_scores_and_more_than_asked_for() -> None:
    plain = {"result": [[{"contents": "one"}, {"title": "Two", "text": "two"}, {"text": "three"}, {"text": "four"}]]}
    with serving(lambda _: (200, plain)) as server:
        (turn,) = play(SearchConfig(search_url=server.url), "<search>x</search>")
    assert seen(turn) == "<information>\nDoc 1: one\n\nDoc 2: Two\ntwo\n\nDoc 3: three\n</information>"


def test_what_is_asked_and_what_is_shown_are_bounded() -> None:
    def answer(asked: Asked) -> tuple[int, Any]:
        assert len(asked.json["queries"][0]) == search.LONGEST_QUERY
        return 200, result("a" * 100_000, "b", "c" * 100_000)

    with serving(answer) as server:
        (turn,) = play(SearchConfig(search_url=server.url), f"<search>{'x' * 50_000}</search>")
    assert len(seen(turn)) < search.CHARACTERS + 100
    assert "Doc 2: b" in seen(turn)
    assert shown([], 10) == ""


def test_an_address_that_is_none() -> None:
    with pytest.raises(ConfigError, match=r"environment\.skyrl_gym\.search\.search_url"):
        play(SearchConfig(search_url="bm25:corpus"), "<search>x</search>")
