"""Cache of finished turns of unfinished groups: files from which the next worker of a group goes on.

The key of a turn is its sample, its number, and a digest of prompt, seed and sampling. Answers of environments with a state are kept beside
the turns (kept_answers.py), and are not asked for again. Other environments start again. As long as one answers as before, the next turn has
the same prompt, and is found too. From the first other answer on, the sample is generated again.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

from hpcrl.data.cache_files import read_turns, turn_file
from hpcrl.data.vision.reader import SeenImage
from hpcrl.errors import EngineError
from hpcrl.rollout.engines.base import Engine, Generation, Heard
from hpcrl.rollout.engines.experts import experts_of, experts_text
from hpcrl.rollout.kept_answers import KeptAnswer, SampleAnswers, by_past
from hpcrl.rundir.checked_lines import append_lines
from hpcrl.rundir.commit import digest_of
from hpcrl.rundir.layout import Run
from hpcrl.runtime.threads import in_thread
from hpcrl.types import Kind, Work

KEEP_S = 5.0
"""Seconds between two writes of turns; a group that finishes sooner is never written."""
IDLE_S = 5.0
"""Seconds without a request after which a sample leaves its place in the engine to another one."""
_CALLS = count()
Key = tuple[int, int, str]
"""The sample, its turn, and a digest of the request."""


@dataclass(frozen=True, eq=False)
class _Call:
    """A request to the engine.

    Attributes:
        first: sample of the first response.
        turn: of these samples.
    """

    first: int
    turn: int
    prompt: Sequence[int]
    seed: int
    sampling: Mapping[str, Any]
    images: Sequence[SeenImage] = ()

    def key(self, at: int) -> Key:
        shown = [image.digest for image in self.images]
        asked = json.dumps([list(self.prompt), self.seed + at, self.sampling, *shown], sort_keys=True)
        return self.first + at, self.turn, digest_of(asked.encode())


class GroupCache:
    """Finished turns of one group while it is generated.

    Args:
        earlier: turns that earlier workers finished.
        answers: of environments, that they kept.
        version: that all turns have; None: those that the engine holds in turn.

    Attributes:
        begun: start by time.monotonic().
        version: the oldest that may have sampled a token.
        cached_tokens: tokens of turns that were found instead of being generated.
        files: written ones, relative to the run directory.
    """

    def __init__(
        self,
        engine: Engine,
        group_id: str,
        earlier: Mapping[Key, Generation] | None = None,
        version: int | None = None,
        answers: Mapping[str, KeptAnswer] | None = None,
    ) -> None:
        self._ask = engine.generate if version is None else engine.of_version(version)
        self._group_id, self._earlier = group_id, earlier or {}
        self.begun = time.monotonic()
        self.version = min(
            [engine.version if version is None else version, *(min(turn.versions) for turn in self._earlier.values())]
        )
        self.cached_tokens, self.files = 0, list[str]()
        self._asking, self._idle = Counter[int](), dict[int, float]()
        self._calls: dict[str, _Call] = {}
        self._ended: dict[tuple[_Call, int], Generation] = {}
        self._written = set[tuple[_Call, int]]()
        self._answers, self._kept, self._answers_written = list[SampleAnswers](), answers or {}, set[str]()

    async def generate(
        self,
        first: int,
        turn: int,
        prompt: Sequence[int],
        n: int,
        seed: int,
        sampling: Mapping[str, Any],
        heard: Heard | None = None,
        images: Sequence[SeenImage] = (),
    ) -> list[Generation]:
        """Return a turn of `n` samples from `first` on, found or as `Engine.generate` returns them; `heard` and `images` as there."""
        call = _Call(first, turn, list(prompt), seed, sampling, images)  # the given list grows with the sample
        with self._in_use(range(first, first + n)):
            return await self._found(call, n, heard)

    async def _found(self, call: _Call, n: int, heard: Heard | None) -> list[Generation]:
        found = {
            at: self._earlier[key] for at in range(n if self._earlier else 0) if (key := call.key(at)) in self._earlier
        }
        if not found:
            return await self._generate(call, n, heard)
        if heard:
            heard(found[0].token_ids, found[0].logprobs)
        self.cached_tokens += sum(len(one.token_ids) for one in found.values())
        left = [replace(call, first=call.first + at, seed=call.seed + at) for at in range(n) if at not in found]
        new = iter(await asyncio.gather(*(self._generate(one, 1) for one in left)))
        return [found[at] if at in found else next(new)[0] for at in range(n)]

    @property
    def idle(self) -> int:
        """The number of samples that have asked the engine nothing for a while: they wait for environments or rewards, or are done."""
        return sum(time.monotonic() - since > IDLE_S for since in self._idle.values())

    @contextmanager
    def _in_use(self, samples: Sequence[int]) -> Iterator[None]:
        """Note that samples ask the engine as long as the block lasts."""
        self._asking.update(samples)
        for sample in samples:
            self._idle.pop(sample, None)
        try:
            yield
        finally:
            self._asking.subtract(samples)
            self.leave(sample for sample in samples if not self._asking[sample])

    def leave(self, samples: Iterable[int]) -> None:
        """Note that samples ask the engine nothing until their next request."""
        self._idle |= dict.fromkeys(samples, time.monotonic())

    async def _generate(self, call: _Call, n: int, heard: Heard | None = None) -> list[Generation]:
        name = f"{self._group_id}/{next(_CALLS)}"
        self._calls[name] = call
        try:
            generated = await self._ask(call.prompt, n, call.seed, call.sampling, name, heard, call.images)
        finally:
            del self._calls[name]
        self._ended |= {(call, at): one for at, one in enumerate(generated)}
        return generated

    def answers(self, sample: str) -> SampleAnswers:
        """Return the answers of the environment of a sample, as of SampleAnswers."""
        self._answers.append(SampleAnswers(sample, self._kept))
        return self._answers[-1]

    def note(self, ended: Mapping[str, Mapping[int, Generation]]) -> None:
        """Add the responses of this group's calls that `Engine.ended` reports."""
        for name, call in self._calls.items():
            self._ended |= {(call, at): turn for at, turn in ended.get(name, {}).items()}

    def write(self, run: Run, worker: str, proven: int) -> None:
        """Append finished turns and answers to the group's file, each once; another thread may call it.

        Args:
            proven: turns with a token of a newer version are not written.
        """
        ended = self._ended.copy().items()
        left = {at: turn for at, turn in ended if at not in self._written and max(turn.versions) <= proven}
        told = [
            answer for one in self._answers for answer in one.new.copy() if answer.name not in self._answers_written
        ]
        if left or told:
            path = turn_file(run, worker, self._group_id, self.version)
            self.files = [str(path.relative_to(run.path))]
            lines = [_line(call.key(at), turn) for (call, at), turn in left.items()]
            append_lines(path, [*lines, *(answer.line for answer in told)])
            self._written |= left.keys()
            self._answers_written |= {answer.name for answer in told}


def _line(key: Key, generation: Generation) -> dict[str, Any]:
    sample, turn, asked = key
    experts = None if generation.experts is None else experts_text(generation.experts)
    return {"sample": sample, "turn": turn, "asked": asked, **vars(generation), "experts": experts}


class GenerationCache:
    """Cache of the groups of a worker.

    Args:
        worker: its name.

    Attributes:
        proven: the newest version whose weights in the engine were checked against the published ones.
    """

    def __init__(self, run: Run, worker: str, engine: Engine) -> None:
        self._run, self._worker, self._engine = run, worker, engine
        self.proven = engine.version
        self._groups: dict[str, tuple[Work, GroupCache]] = {}

    async def begin(self, work: Work) -> GroupCache:
        """Return the cache of a group that begins, with the turns of earlier workers."""
        earlier, answers = await in_thread(self._read, work) if work.turns else ({}, {})
        cache = GroupCache(self._engine, work.group_id, earlier, work.version, answers)
        self._groups[work.group_id] = work, cache
        return cache

    async def write_periodically(self) -> None:
        """Write the finished turns of groups that take longer than KEEP_S, every KEEP_S."""
        while True:
            await asyncio.sleep(KEEP_S)
            long = [cache for _, cache in self._groups.values() if time.monotonic() - cache.begun > KEEP_S]
            if long:
                with suppress(EngineError):  # whether it hangs is seen by the watchdog
                    ended = await self._engine.ended()
                    for _, cache in self._groups.values():
                        cache.note(ended)
                await in_thread(self._write, long)

    def write(self) -> None:
        """Write the finished turns of all groups: this worker ends before they do."""
        self._write([cache for _, cache in self._groups.values()])

    def idle(self, group: str) -> int:
        """Return how many samples of a group use no engine, as of `GroupCache.idle`."""
        return self._groups[group][1].idle if group in self._groups else 0

    def remove(self, groups: Iterable[str]) -> None:
        """Remove the files of groups that are handed over or no longer wanted."""
        for work, cache in [self._groups.pop(group) for group in groups if group in self._groups]:
            for path in [*work.turns, *cache.files]:
                self._run.inside(path).unlink(missing_ok=True)

    def _read(self, work: Work) -> tuple[dict[Key, Generation], dict[str, KeptAnswer]]:
        earlier, answers = dict[Key, Generation](), list[KeptAnswer | None]()
        version = self._engine.version if work.version is None else work.version
        for path in work.turns:
            turns, told, damaged = read_turns(self._run.inside(path))
            if damaged:
                print(f"{path}: {damaged} of its lines are damaged; these turns are generated again", flush=True)
            answers += map(KeptAnswer.of, told)
            for turn in turns:
                key = turn.pop("sample"), turn.pop("turn"), turn.pop("asked")
                experts = turn.pop("experts", None)
                generation = Generation(**turn, experts=experts_of(experts) if experts else None)
                if _usable(generation, work.kind, version):
                    earlier.setdefault(key, generation)
        return earlier, by_past(filter(None, answers))

    def _write(self, groups: Sequence[GroupCache]) -> None:
        try:
            for cache in groups:
                cache.write(self._run, self._worker, self.proven)
        except OSError as error:
            print(f"finished turns cannot be written, and would be generated again: {error}", flush=True)


def _usable(turn: Generation, kind: Kind, version: int) -> bool:
    """Return whether a turn may be part of a group generated with `version`; evaluation has one version alone."""
    return max(turn.versions) <= version and (kind == "train" or min(turn.versions) == version)
