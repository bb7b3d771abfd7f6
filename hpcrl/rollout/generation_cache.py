"""Turns that have ended in a group that has not: kept on the disk, and found again by whoever generates the group next.

A turn is found by what it was asked: its sample, its place in it, prompt, seed and sampling. Environments are not kept; they are made and
asked anew. As long as one answers as it did before, the next turn has the prompt that it had, and is found too; from where it answers
otherwise the sample is generated anew.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from typing import Any

from hpcrl.data.cache_files import read_turns, turn_file
from hpcrl.data.vision.reader import SeenImage
from hpcrl.errors import EngineError
from hpcrl.rollout.engines.base import Engine, Generation, Heard
from hpcrl.rollout.engines.experts import experts_of, experts_text
from hpcrl.rollout.threads import in_thread
from hpcrl.rundir.checked_lines import append_lines
from hpcrl.rundir.commit import digest_of
from hpcrl.rundir.layout import Run
from hpcrl.types import Kind, Work

KEEP_S = 5.0
"""Between two times that turns are written. A group that is done sooner never is: its file is written then."""
_CALLS = count()
Key = tuple[int, int, str]
"""The sample, its turn, and a digest of what was asked."""


@dataclass(frozen=True, eq=False)
class _Call:
    """What the engine is asked.

    Attributes:
        first: the sample that the first response is of.
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


class Turns:
    """Those of one group while it is generated.

    Args:
        found: what others have left.

    Attributes:
        begun: when, by time.monotonic().
        version: the oldest that may have chosen a token.
        kept_tokens: of turns that were found instead of being generated.
        files: that were written, relative to the run directory.
    """

    def __init__(self, engine: Engine, group_id: str, found: Mapping[Key, Generation] | None = None) -> None:
        self._engine, self._group_id, self._found = engine, group_id, found or {}
        self.begun = time.monotonic()
        self.version = min([engine.version, *(min(said.versions) for said in self._found.values())])
        self.kept_tokens, self.files = 0, list[str]()
        self._calls: dict[str, _Call] = {}
        self._ended: dict[tuple[_Call, int], Generation] = {}
        self._written = set[tuple[_Call, int]]()

    async def say(
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
        call = _Call(first, turn, list(prompt), seed, sampling, images)  # what is given grows with the sample
        said = {at: self._found[key] for at in range(n if self._found else 0) if (key := call.key(at)) in self._found}
        if not said:
            return await self._generate(call, n, heard)
        if heard:
            heard(said[0].token_ids, said[0].logprobs)
        self.kept_tokens += sum(len(one.token_ids) for one in said.values())
        left = [_Call(first + at, turn, call.prompt, seed + at, sampling, images) for at in range(n) if at not in said]
        new = iter(await asyncio.gather(*(self._generate(one, 1) for one in left)))
        return [said[at] if at in said else next(new)[0] for at in range(n)]

    async def _generate(self, call: _Call, n: int, heard: Heard | None = None) -> list[Generation]:
        name = f"{self._group_id}/{next(_CALLS)}"
        self._calls[name] = call
        try:
            said = await self._engine.generate(call.prompt, n, call.seed, call.sampling, name, heard, call.images)
        finally:
            del self._calls[name]
        self._ended |= {(call, at): one for at, one in enumerate(said)}
        return said

    def note(self, ended: Mapping[str, Mapping[int, Generation]]) -> None:
        """Take in what `Engine.ended` tells of this group's calls."""
        for name, call in self._calls.items():
            self._ended |= {(call, at): said for at, said in ended.get(name, {}).items()}

    def write(self, run: Run, worker: str, proven: int) -> None:
        """Append what has ended and is not written to the group's file; another thread may call it.

        Args:
            proven: no turn with a token of a newer version is written.
        """
        ended = self._ended.copy().items()
        left = {at: said for at, said in ended if at not in self._written and max(said.versions) <= proven}
        if left:
            path = turn_file(run, worker, self._group_id, self.version)
            self.files = [str(path.relative_to(run.path))]
            append_lines(path, (_line(call.key(at), said) for (call, at), said in left.items()))
            self._written |= left.keys()


def _line(key: Key, said: Generation) -> dict[str, Any]:
    sample, turn, asked = key
    experts = None if said.experts is None else experts_text(said.experts)
    return {"sample": sample, "turn": turn, "asked": asked, **vars(said), "experts": experts}


class KeptTurns:
    """Those of all groups of a worker.

    Args:
        worker: its name.

    Attributes:
        proven: the newest version that the engine is known to hold as it was published.
    """

    def __init__(self, run: Run, worker: str, engine: Engine) -> None:
        self._run, self._worker, self._engine = run, worker, engine
        self.proven = engine.version
        self._groups: dict[str, tuple[Work, Turns]] = {}

    async def begin(self, work: Work) -> Turns:
        """Return the turns of a group that is to be generated, with those that others have left."""
        found = await in_thread(self._read, work) if work.turns else None
        turns = Turns(self._engine, work.group_id, found)
        self._groups[work.group_id] = work, turns
        return turns

    async def keep(self) -> None:
        """Write what has ended of groups that take long, again and again."""
        while True:
            await asyncio.sleep(KEEP_S)
            long = [turns for _, turns in self._groups.values() if time.monotonic() - turns.begun > KEEP_S]
            if long:
                with suppress(EngineError):  # whether it hangs is seen by the watchdog
                    ended = await self._engine.ended()
                    for _, turns in self._groups.values():
                        turns.note(ended)
                await in_thread(self._write, long)

    def write(self) -> None:
        """Write what has ended of all groups: this worker ends before they do."""
        self._write([turns for _, turns in self._groups.values()])

    def forget(self, groups: Iterable[str]) -> None:
        """Remove what is kept of groups that are handed over, or that nobody wants."""
        for work, turns in [self._groups.pop(group) for group in groups if group in self._groups]:
            for path in [*work.turns, *turns.files]:
                self._run.inside(path).unlink(missing_ok=True)

    def _read(self, work: Work) -> dict[Key, Generation]:
        found, version = dict[Key, Generation](), self._engine.version
        for path in work.turns:
            turns, damaged = read_turns(self._run.inside(path))
            if damaged:
                print(f"{path}: {damaged} of its lines are damaged; these turns are generated again", flush=True)
            for turn in turns:
                key = turn.pop("sample"), turn.pop("turn"), turn.pop("asked")
                experts = turn.pop("experts", None)
                said = Generation(**turn, experts=experts_of(experts) if experts else None)
                if _usable(said, work.kind, version):
                    found.setdefault(key, said)
        return found

    def _write(self, groups: Sequence[Turns]) -> None:
        try:
            for turns in groups:
                turns.write(self._run, self._worker, self.proven)
        except OSError as error:
            print(f"turns that have ended cannot be kept, and would be generated again: {error}", flush=True)


def _usable(said: Generation, kind: Kind, version: int) -> bool:
    """Return whether a turn may stand in a group that is generated with `version`: not of a policy that is yet to be trained, and a score
    belongs to one version."""
    return max(said.versions) <= version and (kind == "train" or min(said.versions) == version)
