"""Rows that are generated together: they join while others are under way, and go when they end (continuous batching).

All rows end in the same column, that of the newest token; what has a shorter prompt, or came later, begins further to the right. The samples of
a prompt share its forward pass. A row's response depends on its own tokens and seed alone, but for rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from transformers import PreTrainedModel

from hpcrl.data.models.routers import ExpertRecorder
from hpcrl.data.vision.inputs import has_planes, model_inputs, one_kind, plane_positions
from hpcrl.data.vision.reader import SeenImage
from hpcrl.engines.embedded.blocks import computes_in_blocks, newest_logits
from hpcrl.engines.embedded.cache import CacheColumns, ColumnCache
from hpcrl.engines.embedded.parallel import decodes_in_parallel, said_at_once
from hpcrl.engines.embedded.sampling import (
    Choice,
    RowSampling,
    Sampling,
    allowed,
    among_allowed,
    biased,
    biases,
    choose,
    penalised,
)
from hpcrl.rollout.engines.base import Generation, Heard
from hpcrl.trainer.models.packed.blocks import rounded_up
from hpcrl.types import StopReason

_AHEAD = 64  # spare columns before the rows are laid out again
_OF_A_CHARACTER = 4  # tokens that a character may consist of
_GONE = 0.25  # share of rows that have ended at which the others are laid out without them


@dataclass
class DecodingRequest:
    """Samples of one prompt.

    Attributes:
        limit: tokens of each response at most.
        responses: set when all have ended.
        ended: those that have, by their number.
        heard: called with each token of the only sample, in the thread that computes.
        abandoned: whether nobody waits for them any more.
        images: that the prompt shows.
        ahead: how far the position of a token behind the prompt is from its place in the row, where images have positions of their own.
        whole: request that it is a sample of; None: it is whole itself.
    """

    prompt: list[int]
    seeds: list[int]
    sampling: Sampling
    limit: int
    responses: Future[list[Generation]] = field(default_factory=Future)
    ended: dict[int, Generation] = field(default_factory=dict)
    heard: Heard | None = None
    abandoned: bool = False
    images: Sequence[SeenImage] = ()
    ahead: int = 0
    whole: DecodingRequest | None = None

    def alone(self) -> list[DecodingRequest]:
        """Return a request for each sample, which together end this one."""
        return [replace(self, seeds=[seed], responses=Future(), whole=self) for seed in self.seeds]

    @property
    def unwanted(self) -> bool:
        """Whether nobody waits for its samples any more."""
        return self.abandoned if self.whole is None else self.whole.abandoned

    def end(self, number: int, said: Generation) -> None:
        """Record a response."""
        if self.whole is not None:
            self.whole.end(self.whole.seeds.index(self.seeds[number]), said)
            return
        self.ended[number] = said
        if len(self.ended) == len(self.seeds):
            self.responses.set_result([self.ended[at] for at in range(len(self.seeds))])

    @property
    def longest(self) -> int:
        return len(self.prompt) + self.limit


@dataclass
class _Row:
    """One sample under way.

    Attributes:
        begin: place of the prompt's first token. A place is a column, with columns counted from where they were at first.
        masks: for each token so far, what it was sampled among; None where the request does not ask.
        tops: for each token so far, the most probable ones in its place; None where the request does not ask.
    """

    request: DecodingRequest
    number: int
    begin: int
    masks: list[list[int]] | None
    tops: list[list[int]] | None

    @property
    def said_from(self) -> int:
        return self.begin + len(self.request.prompt)

    @property
    def end(self) -> int:
        """The place after the last token that it may generate."""
        return self.said_from + self.request.limit


class DecodingBatch:
    """The rows and their caches.

    Args:
        end_tokens: ids that end a response, the tokenizer's own first; a request may name more.
        decode: token ids to text, for stop texts.
        prefill_tokens: of one forward pass over prompts at most; a longer prompt has one of its own.
        recorder: notes the experts that tokens go to; None: nobody asks.

    Attributes:
        tokens: sampled so far by all rows that ever were.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        end_tokens: Sequence[int],
        decode: Callable[[list[int]], str],
        prefill_tokens: int,
        recorder: ExpertRecorder | None = None,
    ) -> None:
        self._recorder, self._in_blocks = recorder, computes_in_blocks(model)  # with one row at a time
        self._model, self._decode, self._prefill_tokens = model, decode, prefill_tokens
        self._device, self._end = model.device, list(end_tokens)
        self._layers = model.config.get_text_config().num_hidden_layers
        self._rows: list[_Row | None] = []
        self._columns: CacheColumns | None = None
        self._offset = 0  # of places against columns
        self.tokens = 0

    @property
    def living(self) -> list[_Row]:
        """Rows that have not ended."""
        return [row for row in self._rows if row is not None]

    @property
    def size(self) -> tuple[int, int]:
        """The number of unfinished rows, and the longest one's maximum of tokens."""
        living = self.living
        return len(living), max((row.request.longest for row in living), default=0)

    @torch.inference_mode()
    def join(self, requests: Sequence[DecodingRequest], version: int) -> None:
        """Add requests, and sample the first token of each of their rows.

        Args:
            version: of the weights.
        """
        if decodes_in_parallel(self._model):
            self._say_at_once(requests, version)
            return
        parts, logits_RV = list[tuple[CacheColumns, torch.Tensor]](), list[torch.Tensor]()
        for some in self._together(requests):
            columns, logits_QV = self._read_prompts(some)
            counts = torch.tensor([len(request.seeds) for request in some], device=self._device)
            which = torch.arange(len(some), device=self._device).repeat_interleave(counts)
            parts.append((columns, which))
            logits_RV.append(logits_QV[which])
        width = max(columns.width for columns in [*(part for part, _ in parts), self._columns] if columns)
        before = len(self.living)
        self._lay_out(width, [request for request in requests for _ in request.seeds], parts)
        self._take(before, torch.cat(logits_RV), version)

    def _say_at_once(self, requests: Sequence[DecodingRequest], version: int) -> None:
        for some in self._together(requests):
            for request, said in zip(some, said_at_once(self._model, some, self._end[0], version), strict=True):
                for number, one in enumerate(said):
                    self.tokens += len(one.token_ids)
                    request.end(number, one)

    @torch.inference_mode()
    def step(self, version: int) -> None:
        """Sample a token for each row, of which there is one at least."""
        columns = self._columns
        assert columns is not None
        if columns.width == columns.capacity or self._rows.count(None) >= _GONE * len(self._rows):
            columns = self._lay_out(columns.width + self._offset - min(row.begin for row in self.living))
        newest = slice(columns.width - 1, columns.width)
        if self._in_blocks:
            logits_RV = newest_logits(self._model, columns.tokens[:, : columns.width], columns.cache)
        else:
            logits_RV = self._forward(columns.tokens[:, newest], self._begins, columns.cache, ahead=self._ahead)
        if self._recorder is not None and columns.experts is not None:
            columns.experts[:, newest] = self._recorder.taken(len(logits_RV))
        self._take(0, logits_RV, version)

    def drop_caches(self) -> None:
        """Release the caches until `recompute`."""
        if self._columns is not None:
            self._columns.cache.release()

    @torch.inference_mode()
    def recompute(self) -> None:
        """Recompute the caches with the present weights."""
        columns = self._columns
        if columns is None:
            return
        width, cache = columns.width - 1, columns.cache
        cache.allocate()
        cache.use(0)
        at_once = max(1, self._prefill_tokens // width)
        for at in range(0, len(self._rows), at_once):
            part = slice(at, at + at_once)
            tokens, rows = columns.tokens[part, :width], self._rows[part]
            if None in rows:  # whose images are gone
                gone = torch.tensor([row is None for row in rows], device=self._device)
                tokens = tokens.masked_fill(gone[:, None], 0)
            images = [image for row in rows if row is not None for image in row.request.images]
            self._forward(tokens, self._begins[part], cache.rows(part), images)
        # experts stay: these tokens were generated with them
        cache.use(width)

    def _together(self, requests: Sequence[DecodingRequest]) -> list[list[DecodingRequest]]:
        passes, longest = list[list[DecodingRequest]](), 0
        for request in requests:
            longest = max(longest, len(request.prompt))
            if not passes or longest * (len(passes[-1]) + 1) > self._prefill_tokens:
                passes.append([])
                longest = len(request.prompt)
            passes[-1].append(request)
        return passes

    def _read_prompts(self, requests: Sequence[DecodingRequest]) -> tuple[CacheColumns, torch.Tensor]:
        """Return the columns of prompts, with an empty one for the next token, and the logits for it, [Q, V]."""
        width = max(len(request.prompt) for request in requests)
        missing = [width - len(request.prompt) for request in requests]
        padded = [[0] * short + request.prompt + [0] for short, request in zip(missing, requests, strict=True)]
        tokens = torch.tensor(padded, device=self._device)
        cache = ColumnCache(self._layers, rounded_up(width) if self._in_blocks else width)
        begins = torch.tensor(missing, device=self._device)
        images = [image for request in requests for image in request.images]
        logits_QV = self._forward(tokens[:, :-1], begins, cache, images)
        if images and has_planes(self._model):
            positions = self._positions(tokens[:, :-1], begins, images)
            for request, newest in zip(requests, positions.amax((0, 2)).tolist(), strict=True):
                request.ahead = newest + 1 - len(request.prompt)
        experts = None
        if self._recorder is not None:
            of_prompts = self._recorder.taken(len(tokens))
            experts = torch.cat([of_prompts, torch.full_like(of_prompts[:, :1], -1)], 1)
        logprobs = torch.zeros_like(tokens, dtype=torch.float32)
        return CacheColumns(tokens, logprobs, tokens.int(), cache, experts), logits_QV

    def _forward(
        self,
        tokens_RQ: torch.Tensor,
        begins: torch.Tensor,
        cache: ColumnCache,
        images: Sequence[SeenImage] = (),
        ahead: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the logits [R, V] after tokens that follow the cached ones.

        Args:
            images: that the tokens show; the cache is empty then.
            ahead: [R], as of DecodingRequest; None: 0.
        """
        if self._in_blocks:
            return newest_logits(self._model, tokens_RQ, cache)
        columns = torch.arange(cache.length + tokens_RQ.shape[1], device=self._device)
        positions = (columns[cache.length :] - begins[:, None]).clamp(min=0)
        if ahead is not None:
            positions = positions + ahead[:, None]
        inputs = model_inputs([image.tensors for image in images], self._device) if images else {}
        if images and has_planes(self._model):
            positions = self._positions(tokens_RQ, begins, images)
            tokens_RQ = one_kind(self._model, tokens_RQ)
        answer = self._model(
            input_ids=tokens_RQ,
            attention_mask=columns >= begins[:, None],
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
            **inputs,
        )
        return answer.logits[:, -1]

    def _positions(self, tokens_RQ: torch.Tensor, begins: torch.Tensor, images: Sequence[SeenImage]) -> torch.Tensor:
        """Return the positions [3, R, Q] of tokens that show images, of which the first column is the first of all."""
        filled_RQ = torch.arange(tokens_RQ.shape[1], device=self._device) >= begins[:, None]
        return plane_positions(self._model, tokens_RQ, filled_RQ, [image.tensors for image in images])

    def _lay_out(
        self,
        width: int,
        joining: Sequence[DecodingRequest] = (),
        prompts: Sequence[tuple[CacheColumns, torch.Tensor]] = (),
    ) -> CacheColumns:
        """Leave out rows that have ended, and put rows that join below the others; return the columns.

        Args:
            width: columns afterwards.
            joining: the request of each row that joins.
            prompts: their columns, and which row of them each row that joins has.
        """
        parts = []
        if self._columns is not None and self.living:
            kept = [at for at, row in enumerate(self._rows) if row is not None]
            parts = [(self._columns, torch.tensor(kept, device=self._device))]
            self._offset += self._columns.width - width
        rows, numbers = self.living, dict[int, int]()
        for request in joining:
            number = numbers[id(request)] = numbers.get(id(request), -1) + 1
            begin = width - 1 - len(request.prompt) + self._offset
            told, masked = request.sampling.logprobs > 0, request.sampling.top_k > 0
            masks, tops = [] if told and masked else None, [] if told and not masked else None
            rows.append(_Row(request, number, begin, masks, tops))
        capacity = min(width + _AHEAD, max(row.end for row in rows) - self._offset)
        capacity = rounded_up(capacity) if self._in_blocks else capacity
        self._columns, self._rows = CacheColumns.of([*parts, *prompts], width, capacity), list(rows)
        self._note(rows)
        return self._columns

    def _note(self, rows: Sequence[_Row]) -> None:

        def vector(values: list[Any], dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.tensor(values, dtype=dtype, device=self._device)

        asked = [row.request.sampling for row in rows]
        self._begins = vector([row.begin - self._offset for row in rows])
        self._said_from = vector([row.said_from - self._offset for row in rows])
        self._ends = vector([row.end - self._offset for row in rows])
        ahead = [row.request.ahead for row in rows]
        self._ahead = vector(ahead) if any(ahead) else None
        stops = [{*(() if one.ignore_eos else self._end), *one.stop_token_ids} for one in asked]
        width = max(map(len, stops), default=0)
        self._stops = vector([[*some, *[-1] * (width - len(some))] for some in stops]).reshape(len(rows), width)
        least = [sampling.min_tokens for sampling in asked]
        self._least = vector(least) if any(least) else None
        if self._least is not None:
            held = [[*self._end, *one.stop_token_ids] for one in asked]
            width = max(map(len, held))
            self._held_back = vector([[*some, *some[:1] * (width - len(some))] for some in held])
        penalties = [sampling.repetition_penalty for sampling in asked]
        self._biases, self._allowed = biases(asked, self._device), allowed(asked, self._device)
        self._penalties = vector(penalties, torch.float32) if set(penalties) != {1.0} else None
        seeds = [row.request.seeds[row.number] for row in rows]
        self._sampling = RowSampling.of(list(zip(asked, seeds, strict=True)), self._device)

    def _take(self, first: int, logits_RV: torch.Tensor, version: int) -> None:
        """Sample a token for each row from `first` on, into the last column, and see which rows have ended."""
        columns = self._columns
        assert columns is not None
        at, count = columns.width - 1, len(self._rows)
        said = at - self._said_from[first:]
        if self._penalties is not None:
            used = columns.tokens[first:, :at]
            used = torch.where(torch.arange(at, device=self._device) >= self._begins[first:, None], used, used[:, -1:])
            logits_RV = penalised(logits_RV, used, self._penalties[first:])
        if self._biases is not None:
            logits_RV = biased(logits_RV, self._biases[first:])
        if self._allowed is not None:
            logits_RV = among_allowed(logits_RV, self._allowed[first:])
        if self._least is not None:
            early = (said < self._least[first:])[:, None]
            logits_RV = logits_RV.scatter(1, self._held_back[first:], -torch.inf).where(early, logits_RV)
        choice = choose(logits_RV, self._sampling.part(first, count), said)
        columns.tokens[first:, at], columns.logprobs[first:, at] = choice.tokens, choice.logprobs
        columns.versions[first:, at] = version
        self._keep_masks(first, choice)
        self._keep_tops(first, logits_RV)
        stopped = (choice.tokens[:, None] == self._stops[first:]).any(1)
        over = stopped | (at + 1 >= self._ends[first:])
        self._end_rows(first, stopped.tolist(), over.tolist())

    def _keep_masks(self, first: int, choice: Choice) -> None:
        wanted = [number for number, row in enumerate(self._rows[first:]) if row and row.masks is not None]
        if choice.kept is None or not wanted:
            return
        kept = choice.kept[torch.tensor(wanted, device=self._device)]
        tokens = iter(kept.nonzero()[:, 1].split(kept.sum(-1).tolist()))
        for number, mask in zip(wanted, tokens, strict=True):
            row = self._rows[first + number]
            assert row is not None
            assert row.masks is not None
            row.masks.append(mask.tolist())

    def _keep_tops(self, first: int, logits_RV: torch.Tensor) -> None:
        wanted = {at: row for at, row in enumerate(self._rows[first:]) if row is not None and row.tops is not None}
        if not wanted:
            return
        counts = [row.request.sampling.logprobs for row in wanted.values()]
        ids = logits_RV[torch.tensor(list(wanted), device=self._device)].topk(max(counts)).indices.tolist()
        for row, count, best in zip(wanted.values(), counts, ids, strict=True):
            assert row.tops is not None
            row.tops.append(best[:count])

    def _end_rows(self, first: int, stopped: list[bool], over: list[bool]) -> None:
        """Hand over the rows that have ended with the token that was sampled last, and leave out those that nobody waits for."""
        ended = dict[int, StopReason]()
        for at, (stop, full) in enumerate(zip(stopped, over, strict=True), first):
            row = self._rows[at]
            if row is None:
                continue
            self.tokens += 1
            if row.request.unwanted:
                self._rows[at] = None
                continue
            if row.request.heard:
                self._tell(at, row.request.heard)
            if stop or (row.request.sampling.stop and self._says_stop(at, row)):
                ended[at] = "stop"
            elif full:
                ended[at] = "length"
        if ended:
            self._hand_over(ended)
        if not self.living:
            self._rows, self._columns, self._offset = [], None, 0

    def _tell(self, at: int, heard: Heard) -> None:
        columns = self._columns
        assert columns is not None
        newest = at, columns.width - 1
        heard([int(columns.tokens[newest])], [float(columns.logprobs[newest])])

    def _hand_over(self, ended: dict[int, StopReason]) -> None:
        columns, index = self._columns, list(ended)
        assert columns is not None
        grids = [grid[index].tolist() for grid in (columns.tokens, columns.logprobs, columns.versions)]
        for (at, reason), tokens, logprobs, versions in zip(ended.items(), *grids, strict=True):
            row, self._rows[at] = self._rows[at], None
            assert row is not None
            said, before_last = slice(row.said_from - self._offset, columns.width), columns.width - 1
            experts = None
            if columns.experts is not None:
                experts = columns.experts[at, row.begin - self._offset : before_last].cpu().numpy().copy()
            row.request.end(
                row.number,
                Generation(tokens[said], logprobs[said], reason, versions[said], row.masks, row.tops, experts),
            )

    def _says_stop(self, at: int, row: _Row) -> bool:
        assert self._columns is not None
        sampling, width = row.request.sampling, self._columns.width
        longest = max(map(len, sampling.stop)) + _OF_A_CHARACTER
        begin = max(row.said_from - self._offset, width - longest)
        if width - (row.said_from - self._offset) < sampling.min_tokens:
            return False
        text = self._decode(self._columns.tokens[at, begin:width].tolist())
        return any(stop in text for stop in sampling.stop)
