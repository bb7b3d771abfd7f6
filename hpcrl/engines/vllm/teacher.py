"""A vLLM engine as a scorer's teacher: log-probabilities of the tokens of finished samples.

They are of whole distributions at temperature 1: vLLM processes no logits of prompts. hpcrl/config/rules refuse settings that need others.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hpcrl.algorithms.distillation import spread_over_spans
from hpcrl.config import Config, InferenceEngineConfig
from hpcrl.config.scorers import ScorerSet
from hpcrl.config.sections.distillation import TeacherEngineConfig
from hpcrl.config.token_limits import longest_sample
from hpcrl.data.alignment import TokenAligner
from hpcrl.data.group_file import read_group
from hpcrl.data.model_config import longest_input
from hpcrl.data.score_file import RowScores
from hpcrl.engines.vllm.client import EngineClient
from hpcrl.engines.vllm.server import Server, ServerOptions
from hpcrl.errors import DataError, EngineError, RefusedRequestError
from hpcrl.rundir.layout import Run
from hpcrl.runtime.scratch import Scratch
from hpcrl.trainer.models.build import scorer_source
from hpcrl.trainer.scoring.aligned import Spans, in_teacher_tokens
from hpcrl.types import GroupMeta, Row

log = logging.getLogger(__name__)


class EngineTeacher:
    """The teacher of one scorer.

    Args:
        run: whose samples are scored.
        top_k: most probable tokens in the place of each trained token that it names; 0: none.
        aligner: writes rows in the teacher's tokens; None: it reads the policy's own.
    """

    def __init__(self, run: Run, server: Server, top_k: int, aligner: TokenAligner | None = None) -> None:
        self._run, self._server, self._top_k, self._aligner = run, server, top_k, aligner

    def scores(self, groups: Sequence[GroupMeta], before: Callable[[], None]) -> dict[str, list[RowScores]]:
        """Return the scores of the groups' rows, by group id; as ScoringModel.scores.

        Args:
            before: called whenever a row is aligned or scored.

        Raises:
            DataError: a sample file is missing or damaged.
            EngineError: the engine has ended.
        """
        return asyncio.run(self._scores(groups, before))

    async def _scores(self, groups: Sequence[GroupMeta], before: Callable[[], None]) -> dict[str, list[RowScores]]:
        engine = self._server.connect(replica="the teacher")
        assert isinstance(engine, EngineClient)

        async def score(row: Row) -> RowScores:
            shown, spans = row, None
            try:
                if self._aligner is not None:
                    shown, spans = in_teacher_tokens(self._aligner, row.token_ids, row.loss_mask)
                    before()  # all rows are aligned before the first request is sent
                found = await engine.prompt_logprobs(shown.token_ids.tolist(), self._top_k)
            except (DataError, RefusedRequestError) as error:
                log.warning("a row of %d tokens has no scores: %s", len(row.token_ids), error)
                return _no_scores(len(row.token_ids), self._top_k)
            finally:
                before()
            scores = row_scores(shown, found, self._top_k)
            return scores if spans is None else _of_policy(row, scores, spans)

        try:
            rows = {one.group_id: read_group(self._run.inside(one.path), None, one) for one in groups}
            asked = {name: asyncio.gather(*map(score, own)) for name, own in rows.items()}
            await asyncio.gather(*asked.values())
            return {name: list(future.result()) for name, future in asked.items()}
        finally:
            await engine.close()


def row_scores(row: Row, said: Sequence[Mapping[str, Any] | None], top_k: int) -> RowScores:
    """Return the scores of a row of T tokens from an engine's answer.

    Args:
        said: for each token its log-probability and those of the most probable ones at its position, with their ranks, by their ids as
        texts; None for the first one.
    """
    length = len(row.token_ids)
    trained_T = np.append(row.loss_mask[1:] > 0, False)
    logprobs_T = np.zeros(length, np.float32)
    ids_TK, top_TK = np.full((length, top_k), -1, np.int32), np.zeros((length, top_k), np.float32)
    for at in np.flatnonzero(trained_T):
        entries = said[at + 1]
        assert entries is not None, "only the first token has no log-probability"
        logprobs_T[at] = entries[str(row.token_ids[at + 1])]["logprob"]
        if top_k:
            best = sorted((one["rank"], int(token_id), one["logprob"]) for token_id, one in entries.items())[:top_k]
            ids_TK[at], top_TK[at] = [token_id for _, token_id, _ in best], [logprob for *_, logprob in best]
    # vLLM returns -9999 for minus infinity, as JSON has no such number
    if not (np.isfinite(logprobs_T).all() and np.isfinite(top_TK).all() and logprobs_T.min(initial=0.0) > _NEVER):
        return _no_scores(length, top_k)
    return RowScores(logprobs_T, ids_TK, top_TK) if top_k else RowScores(logprobs_T)


def _of_policy(row: Row, scores: RowScores, spans: Spans) -> RowScores:
    """Return the scores of the policy's tokens, from those of the row in the teacher's."""
    own_T = torch.from_numpy(row.rollout_logprobs).roll(-1)
    logprobs_T = spread_over_spans(own_T, torch.from_numpy(scores.logprobs), *spans).numpy()
    return RowScores(logprobs_T) if np.isfinite(logprobs_T).all() else _no_scores(len(logprobs_T), 0)


def _no_scores(length: int, top_k: int) -> RowScores:
    """Return the scores of a row that could not be scored: NaN, by which its sample counts as failed."""
    top_TK = np.zeros((length, top_k), np.float32)
    logprobs_T = np.full(length, np.nan, np.float32)
    return RowScores(logprobs_T, top_TK.astype(np.int32), top_TK) if top_k else RowScores(logprobs_T)


_NEVER = -9000.0


def teacher_options(run: Run, config: Config, scorers: ScorerSet, own: TeacherEngineConfig) -> ServerOptions:
    """Return what the engine of a teacher serves."""
    trainer, longest = config.trainer, longest_sample(config) + 1  # it generates one token, which is ignored
    if trainer.distillation.cross_tokenizer:
        longest = own.max_model_len or _in_its_tokens(config, scorers, longest)
    return ServerOptions(
        model=scorers.model,
        engine=InferenceEngineConfig(
            model_dtype=own.model_dtype,
            tensor_parallel_size=own.tensor_parallel_size,
            max_num_batched_tokens=own.max_num_batched_tokens,
            engine_init_kwargs=own.engine_init_kwargs,
        ),
        memory_share=own.gpu_memory_utilization,
        seed=trainer.seed,
        max_model_len=longest,
        on_cpu=config.slurm.gpus == 0,
        run_name=run.name,
        token_file=run.token,
        rope_scaling=trainer.rope_scaling,
        rope_theta=trainer.rope_theta,
    )


def _in_its_tokens(config: Config, scorers: ScorerSet, longest: int) -> int:
    """Return for how many of a teacher's tokens there is room, where a request has `longest` of the policy's at most."""
    context = longest_input(scorer_source(config.trainer, scorers).config())
    return 2 * longest if context is None else max(longest, min(2 * longest, context))


@contextmanager
def engine_teacher(
    run: Run,
    config: Config,
    scorers: ScorerSet,
    aligner: TokenAligner | None,
    log: Path,
    still_waiting: Callable[[], None],
) -> Iterator[EngineTeacher]:
    """Run the teacher of one scorer within the `with` statement, once its engine is ready.

    Args:
        aligner: as of EngineTeacher.
        log: file of what the engine's own processes say.
        still_waiting: called now and then while it starts.
    """
    own = config.trainer.distillation.engine
    with ExitStack() as stack:
        scratch = Scratch("engine")
        stack.callback(scratch.remove)
        server = Server(teacher_options(run, config, scorers, own), scratch.path, log)
        stack.callback(server.stop)
        try:
            server.wait_ready(own.start_timeout_seconds, still_waiting)
            yield EngineTeacher(run, server, config.trainer.distillation.top_k, aligner)
        except EngineError as error:
            raise error if server.alive() else server.failure("ended") from error
