"""What has ended of a group that has not outlives its worker: whoever generates the group next goes on from there."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hpcrl.config import EnvironmentConfig, GeneratorConfig, SamplingParams
from hpcrl.data.cache_files import read_turns, turn_files
from hpcrl.engines.embedded.engine import EmbeddedEngine
from hpcrl.engines.embedded.rollout import Embedded
from hpcrl.envs.base import Turn
from hpcrl.rollout.engines.base import Engine, Generation
from hpcrl.rollout.generate import GroupGenerator
from hpcrl.rollout.generation_cache import GenerationCache, GroupCache
from hpcrl.rollout.group import Group
from hpcrl.rollout.kept_answers import KeptAnswer, SampleAnswers, by_past
from hpcrl.rundir.commit import digest_of
from hpcrl.rundir.layout import Run
from hpcrl.types import Work
from tests.rollout.conftest import WithEngine, runner
from tests.rollout.environments import Dice
from tests.rollout.material import PROMPT, as_version, slowly
from tests.rollout.test_generate import HERE, TOKENIZER, work

WHOLE: dict[str, Any] = {"temperature": 1.0, "max_tokens": 40, "logprobs": 0}
N = 16
TOGETHER = EnvironmentConfig(group_reward_function={"own": 1.0, "rank": 1.0, "distinct": 0.5})
TALKS = GeneratorConfig(max_turns=3, sampling_params=SamplingParams(max_generate_length=60))


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


async def some_ended(engine: Engine, sampling: Mapping[str, Any]) -> tuple[dict[int, Generation], list[Generation]]:
    """Generate, and return what was told to have ended before all had, and all."""
    whole = asyncio.create_task(engine.generate(PROMPT, N, 5, sampling, "mine"))
    nameless = asyncio.create_task(engine.generate(PROMPT, N, 500, sampling))
    told = dict[int, Generation]()
    while not whole.done():
        found = await engine.ended()
        assert found.keys() <= {"mine"}
        assert not told.keys() & found.get("mine", {}).keys(), "told twice"
        told |= found.get("mine", {})
        await asyncio.sleep(0)  # the embedded engine takes 2 ms for a token
    await nameless
    return told, await whole


@pytest.mark.parametrize("options", [{}, {"top_k": 5, "logprobs": 8}])
def test_an_engine_tells_what_has_ended(
    with_each_engine: WithEngine[Any], models: list[Path], options: dict[str, Any]
) -> None:
    with slowly(models[0]):
        told, whole = with_each_engine(lambda engine: some_ended(engine, {**WHOLE, **options}))
    assert len(told) > 0
    assert {at: whole[at] for at in told} == told


def test_what_ended_under_older_weights_has_their_version(
    with_each_engine: WithEngine[Any], models: list[Path]
) -> None:
    async def play(engine: Engine) -> tuple[dict[int, Generation], list[Generation]]:
        sampling = {**WHOLE, "max_tokens": 400} if isinstance(engine, EmbeddedEngine) else WHOLE  # it is not slowed
        with slowly(models[0]):
            whole = asyncio.create_task(engine.generate(PROMPT, N, 5, sampling, "mine"))
            told = dict[int, Generation]()
            while not told:
                told = (await engine.ended()).get("mine", {})
                await asyncio.sleep(0)
            await engine.update_weights(as_version(models[0], 1))
        return told, await whole

    told, whole = with_each_engine(play)
    assert {at: whole[at] for at in told} == told
    assert all(set(said.versions) == {0} for said in told.values())
    assert any(1 in said.versions for said in whole)


async def begun(engine: Engine, run: Run, item: Work, config: GeneratorConfig, enough: int) -> None:
    """Generate a group as a worker that is killed when so many turns have ended."""
    kept = GenerationCache(run, "rollout-0", engine)
    cache = await kept.begin(item)
    generator = GroupGenerator(engine, TOKENIZER, config, TOGETHER)
    group = asyncio.create_task(generator.generate(item, cache))
    while not group.done() and sum(len(read_turns(path).turns) for path in written(run)) < enough:
        cache.note(await engine.ended())
        kept.write()
        await asyncio.sleep(0)
    assert not group.done(), "too late to kill its worker"
    group.cancel()
    await asyncio.gather(group, return_exceptions=True)


def written(run: Run) -> list[Path]:
    return [path for files in turn_files(run).values() for path in files]


async def gone_on(engine: Engine, run: Run, item: Work, config: GeneratorConfig) -> Group:
    """Generate a group as the next worker, which finds what the one before has left."""
    kept, found = GenerationCache(run, "rollout-1", engine), left(run, item)
    generator = GroupGenerator(engine, TOKENIZER, config, TOGETHER)
    group = await generator.generate(found, await kept.begin(found))
    kept.write()
    kept.remove([item.group_id])
    assert not written(run), "what was left, and what this one has written"
    return group


def tokens_left(run: Run, turn: int | None = None) -> int:
    turns = [one for path in written(run) for one in read_turns(path).turns]
    return sum(len(one["token_ids"]) for one in turns if turn in (None, one["turn"]))


def left(run: Run, item: Work) -> Work:
    return replace(item, turns=[str(path.relative_to(run.path)) for path in written(run)])


class Says:
    """An engine that always says the same."""

    def __init__(self, said: Generation, version: int) -> None:
        self._said, self.version = said, version

    async def generate(self, *_: object) -> list[Generation]:
        return [self._said]


async def left_by(run: Run, said: Generation, kind: Any = "train") -> GroupCache:
    """Return the turns of a worker that wrote one and was killed."""
    kept = GenerationCache(run, "rollout-0", Says(said, min(said.versions)))  # type: ignore[arg-type]
    kept.proven = max(said.versions)
    cache = await kept.begin(work("Talks", kind))
    await cache.generate(0, 0, PROMPT, 1, 7, WHOLE)
    kept.write()
    return cache


def same(one: Group, other: Group) -> bool:
    return all(
        (mine.token_ids == theirs.token_ids).all() and (mine.rewards == theirs.rewards).all()
        for mine, theirs in zip(one.samples, other.samples, strict=True)
    )


STEPS = replace(TALKS, step_wise_trajectories=True)
ONCE = replace(TALKS, max_turns=1, sampling_params=SamplingParams(max_generate_length=300))


@pytest.mark.parametrize(
    ("kind", "config", "enough"), [("train", TALKS, 12), ("train", STEPS, 12), ("train", ONCE, 4), ("eval", TALKS, 4)]
)
def test_the_next_worker_goes_on(
    with_each_engine: WithEngine[Any], run: Run, models: list[Path], kind: Any, config: GeneratorConfig, enough: int
) -> None:
    item = work("Talks", kind=kind, n_samples=8)

    async def play(engine: Engine) -> tuple[Group, Group, int, float]:
        calm = await GroupGenerator(engine, TOKENIZER, config, TOGETHER).generate(item)
        with slowly(models[0]):
            await begun(engine, run, item, config, enough)
        kept = tokens_left(run)
        before = await engine.tokens() or 0
        group = await gone_on(engine, run, item, config)
        return calm, group, kept, (await engine.tokens() or 0) - before

    calm, group, kept, generated = with_each_engine(play)
    assert same(group, calm)
    assert group.cached_tokens == kept > 0
    expected = sum(group.response_lengths) - kept
    assert expected <= generated <= expected + len(group.samples), "a sample that is given up may say one token more"


def test_from_where_an_environment_answers_otherwise_it_is_generated(
    with_engine: WithEngine[Any], run: Run, models: list[Path]
) -> None:
    item = work("Talks")
    other = replace(item, prompt=replace(item.prompt, env_class=f"{HERE}:TalksOtherwise"))

    async def play(engine: Engine) -> tuple[Group, Group, int]:
        calm = await GroupGenerator(engine, TOKENIZER, TALKS, TOGETHER).generate(other)
        with slowly(models[0]):
            await begun(engine, run, item, TALKS, 8)
        first = tokens_left(run, turn=0)
        return calm, await gone_on(engine, run, other, TALKS), first

    calm, group, first = with_engine(play)
    assert same(group, calm)
    assert group.cached_tokens == first > 0


@pytest.mark.parametrize(
    "change",
    [{"seed": 41}, {"prompt": replace(work("Talks").prompt, messages=[{"role": "user", "content": "sort: ba"}])}],
)
def test_what_was_asked_otherwise_is_not_found(
    with_engine: WithEngine[Any], run: Run, models: list[Path], change: dict[str, Any]
) -> None:
    async def play(engine: Engine) -> Group:
        with slowly(models[0]):
            await begun(engine, run, work("Talks"), TALKS, 4)
        return await gone_on(engine, run, replace(work("Talks"), **change), TALKS)

    assert with_engine(play).cached_tokens == 0


@pytest.mark.parametrize(("kind", "versions", "found"), [
    ("train", [2, 3], True), ("train", [3, 4], False), ("eval", [2, 3], False), ("eval", [3, 3], True),
])  # fmt: skip
def test_versions_of_what_is_found(run: Run, kind: Any, versions: list[int], found: bool) -> None:
    """Not of a policy that is yet to be trained, and an evaluation is of one version."""
    said = Generation([5, 1], [-1.0, -2.0], "stop", versions)
    first = asyncio.run(left_by(run, said, kind))
    assert first.version == min(versions)

    async def next_worker() -> tuple[int, list[Generation]]:
        engine = Says(replace(said, versions=[3, 3]), 3)
        cache = await GenerationCache(run, "rollout-1", engine).begin(left(run, work("Talks", kind)))
        return cache.version, await cache.generate(0, 0, PROMPT, 1, 7, WHOLE)

    version, (again,) = asyncio.run(next_worker())
    assert again.versions == (versions if found else [3, 3])
    assert version == (min(versions) if found else 3)


def test_nothing_is_kept_that_unproven_weights_may_have_chosen(run: Run) -> None:
    async def play() -> list[int]:
        kept = GenerationCache(run, "rollout-0", Says(Generation([5, 1], [-1.0, -2.0], "stop", [2, 3]), 2))  # type: ignore[arg-type]
        cache = await kept.begin(work("Talks"))
        await cache.generate(0, 0, PROMPT, 1, 7, WHOLE)
        kept.write()
        before = len(written(run))
        kept.proven = 3
        kept.write()
        return [before, len(written(run))]

    assert asyncio.run(play()) == [0, 1]


def test_damaged_lines_are_generated_again(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    said = Generation([5, 1], [-1.0, -2.0], "stop", [3, 3], [[5, 6], [1]])
    asyncio.run(left_by(run, said))
    (path,) = written(run)
    whole = path.read_bytes()
    (turn,), _, damaged = read_turns(path)
    assert (turn["token_ids"], turn["logprobs"], turn["sampling_mask"], damaged) == (
        [5, 1],
        [-1.0, -2.0],
        [[5, 6], [1]],
        0,
    )
    for content, turns, damaged in [
        (whole[:-1], 0, 0),  # cut off
        (whole.replace(b"-2.0", b"-3.0"), 0, 0),
        (whole.replace(b"-2.0", b"-3.0") + whole, 1, 1),
        (whole + whole[:40] + whole, 2, 1),
        (whole + b"\n{}" + whole, 2, 1),
        (b"", 0, 0),
    ]:
        path.write_bytes(content)
        assert (len(read_turns(path).turns), read_turns(path).damaged) == (turns, damaged)
    path.write_bytes(whole)
    newer = path.rename(path.with_name("g7.v4.jsonl"))
    assert read_turns(newer) == ([], [], 0), "it is of an older version than the file says"
    newer.rename(path)

    async def next_worker() -> list[Generation]:
        cache = await GenerationCache(run, "rollout-1", Says(said, 3)).begin(left(run, work("Talks")))
        return await cache.generate(0, 0, PROMPT, 1, 7, WHOLE)

    path.write_bytes(whole.replace(b"-2.0", b"-3.0") + whole[:-3])
    assert asyncio.run(next_worker()) == [said]
    assert "1 of its lines are damaged" in capsys.readouterr().out


def test_a_turn_that_is_found_is_heard(run: Run) -> None:
    said, heard = Generation([5, 1], [-1.0, -2.0], "stop", [3, 3]), list[Any]()

    async def play() -> list[Generation]:
        await left_by(run, said)
        cache = await GenerationCache(run, "rollout-1", Says(said, 3)).begin(left(run, work("Talks")))  # type: ignore[arg-type]
        found = await cache.generate(0, 0, PROMPT, 1, 7, WHOLE, lambda *piece: heard.append(piece))
        assert cache.cached_tokens == 2
        return found

    assert asyncio.run(play()) == [said]
    assert heard == [(said.token_ids, said.logprobs)]


def test_short_groups_leave_no_files(run: Run) -> None:
    """Only what takes longer than some seconds is written while it is under way."""

    async def play() -> None:
        kept = GenerationCache(run, "rollout-0", Says(Generation([1], [0.0], "stop", [3]), 3))
        keeping = asyncio.create_task(kept.write_periodically())
        cache = await kept.begin(work("Talks"))
        await cache.generate(0, 0, PROMPT, 1, 7, WHOLE)
        kept.remove(["g7"])
        await asyncio.sleep(0)
        keeping.cancel()

    asyncio.run(play())
    assert not run.turns.exists()


@pytest.fixture
def asked() -> list[str]:
    """What all Dice are asked."""
    Dice.asked.clear()
    return Dice.asked


def test_answers_of_an_environment_with_a_state_are_not_asked_for_again(
    embedded: Embedded, models: list[Path], run: Run, asked: list[str]
) -> None:
    """They are random: whoever asked again would get others, and generate all that follows again."""

    async def play(engine: Engine) -> tuple[list[dict[str, Any]], int, Group]:
        with slowly(models[0]):
            await begun(engine, run, work("Dice", n_samples=8), TALKS, 12)
        asked.clear()
        found = [one for path in written(run) for one in read_turns(path).answers]
        return found, tokens_left(run), await gone_on(engine, run, work("Dice", n_samples=8), TALKS)

    found, left_tokens, group = runner(embedded, models[0])(play)
    answered = [one for one in found if one["answer"]["metrics"]]
    turns = sum(message["role"] == "assistant" for messages in group.conversations for message in messages)
    assert "init" not in asked
    assert asked.count("step") == turns - len(answered) < turns
    assert group.cached_tokens == left_tokens, "each turn that was left is found"
    shown = [message["content"] for messages in group.conversations for message in messages]
    assert {one["answer"]["observations"][0]["content"] for one in answered} <= set(shown)
    assert [row.env_metrics["answered"] for row in group.samples] == [3.0] * 8


SAID, OTHER = Generation([5, 1], [-1.0, -2.0], "stop", [3, 3]), Generation([6, 1], [-1.0, -2.0], "stop", [3, 3])
ALONE = work("Dice", n_samples=1)


def played(
    run: Run, worker: str, item: Work, says: Generation = SAID, environment: EnvironmentConfig = TOGETHER
) -> Group:
    """Return a group by an engine that always says the same, and leave its turns as a worker that is killed at its end."""

    async def play() -> Group:
        engine: Any = Says(says, 3)
        kept = GenerationCache(run, worker, engine)
        group = await GroupGenerator(engine, TOKENIZER, TALKS, environment).generate(item, await kept.begin(item))
        kept.write()
        return group

    return asyncio.run(play())


def lose(run: Run, is_lost: Callable[[dict[str, Any]], bool]) -> None:
    """Lose lines of the only file of turns."""
    (path,) = written(run)
    lines = path.read_text().split("\n")
    path.write_text("\n".join(line for line in lines if not line or not is_lost(json.loads(line))))


def answer_of(line: dict[str, Any]) -> float | None:
    """Return how often the environment had answered with an answer; None for another line."""
    return line["answer"]["metrics"].get("answered", 0) if "answer" in line else None


def test_an_episode_that_is_done_needs_no_environment(run: Run, asked: list[str]) -> None:
    first = played(run, "rollout-0", work("Dice"))
    asked.clear()
    assert same(played(run, "rollout-1", left(run, work("Dice"))), first)
    assert asked == []


@pytest.mark.parametrize(("lost", "expected"), [
    (3, ["resume 2", "step"]), (2, ["resume 1", "step", "step"]), (0, ["init", "step", "step", "step"]),
])  # fmt: skip
def test_it_goes_on_after_the_last_answer_that_was_kept(
    run: Run, asked: list[str], lost: int, expected: list[str]
) -> None:
    """A kill leaves a turn without its answer, and damage leaves answers without those before them."""
    first = played(run, "rollout-0", ALONE)
    lose(run, lambda line: answer_of(line) == lost)
    asked.clear()
    again = played(run, "rollout-1", left(run, ALONE))
    assert asked == expected
    assert again.conversations[0][: max(0, 2 * lost - 1)] == first.conversations[0][: max(0, 2 * lost - 1)]
    assert again.samples[0].env_metrics["answered"] == 3.0
    asked.clear()
    assert same(played(run, "rollout-2", left(run, ALONE)), again), "of what two have left, too"
    assert asked == []


def test_from_where_the_policy_says_something_else_the_environment_goes_on(run: Run, asked: list[str]) -> None:
    played(run, "rollout-0", ALONE)
    lose(run, lambda line: line.get("turn", 0) > 0 or answer_of(line) == 3)
    asked.clear()
    again = played(run, "rollout-1", left(run, ALONE), OTHER)
    assert asked == ["resume 2", "resume 1", "step", "step"]
    assert again.samples[0].env_metrics["answered"] == 3.0
    assert again.cached_tokens == len(SAID.token_ids)


def test_an_environment_that_cannot_go_on_begins_again(
    run: Run, asked: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Such as after the loss of its snapshot."""
    played(run, "rollout-0", ALONE)
    lose(run, lambda line: answer_of(line) == 3)
    asked.clear()
    monkeypatch.setattr(Dice, "fails", True)
    again = played(run, "rollout-1", left(run, ALONE))
    assert asked == ["resume 2", "init", "step", "step", "step"]
    assert not again.failures
    assert "no such snapshot" in capsys.readouterr().out


@pytest.mark.parametrize(("env_class", "said"), [
    ("Talks", None), ("Remembers", None), ("TooMuch", "expected a text of at most"), ("Tuples", None),
])  # fmt: skip
def test_what_is_not_kept(run: Run, env_class: str, said: str | None) -> None:
    """Answers without a state, of a class that calls something else its state, and messages that JSON would change."""
    group = played(run, "rollout-0", work(env_class, n_samples=1))
    assert sum(len(read_turns(path).answers) for path in written(run)) == (env_class == "Tuples")
    assert [said in failure for failure in group.failures] == [True] if said else not group.failures


def test_rewards_that_were_given_are_kept(run: Run, asked: list[str]) -> None:
    """They may have taken minutes."""
    paid = EnvironmentConfig(reward_function={f"{HERE}:paid": 1.0})
    first = played(run, "rollout-0", work(), environment=paid)
    assert asked == ["paid"] * 6
    assert same(played(run, "rollout-1", left(run, work()), environment=paid), first)
    assert asked == ["paid"] * 6
    played(run, "rollout-1", left(run, work()), environment=replace(paid, reward_function={f"{HERE}:paid": 2.0}))
    assert asked == ["paid"] * 12, "of other settings they are others"


def test_answers_that_an_earlier_version_has_kept_follow_each_other() -> None:
    """Before turns had roles; each names the one before it by a digest of its line."""
    answer = {"observations": [], "reward": 0.0, "done": False, "metrics": {}, "action": None}
    first = {"past": "sample", "said": "a", "answer": answer, "state": "1"}
    second = {**first, "past": digest_of(json.dumps(first).encode()), "state": "2"}
    kept = by_past(filter(None, map(KeptAnswer.of, (first, second))))
    last = SampleAnswers("sample", kept).last
    assert last
    assert last.state == "2"
    new = KeptAnswer("sample", "a", Turn([], 0.0, done=False, role="guesser", trained=False), "1")
    assert KeptAnswer.of(json.loads(json.dumps(new.line))) == new
