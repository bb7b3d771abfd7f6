"""A teacher over the rows of datasets before a run: its log-probabilities of each trained token go into files."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from hpcrl.config import Config
from hpcrl.config.token_limits import micro_batch_tokens
from hpcrl.data.token_file import TokenFile
from hpcrl.rundir.commit import committed_directory
from hpcrl.trainer.backends.fsdp.model import PackedPolicy, load_model
from hpcrl.trainer.batching import RowRef, micro_batch_limits, planned
from hpcrl.trainer.distributed import World
from hpcrl.trainer.models.build import forward_config, policy_source, reference_source
from hpcrl.trainer.models.flops import ModelFlops
from hpcrl.trainer.models.packed.attention import PACKED
from hpcrl.trainer.offline.teacher_file import TeacherWriter, ends_of, make_room, write_index
from hpcrl.trainer.packing import MicroBatchStream, pack
from hpcrl.trainer.scoring.aligned import outputs
from hpcrl.trainer.scoring.model import passes, require_all_tokens, require_same_vocabulary

_ROWS_AT_ONCE = 256  # of each rank: enough to make micro-batches of


def require_row_teacher(config: Config) -> None:
    """Raise DataError where the teacher of a dataset's rows has another vocabulary than the policy."""
    policy, teacher = policy_source(config.trainer), reference_source(config.trainer)
    require_same_vocabulary(config.trainer.ref_model, config.trainer.policy.model.pretrained, config)
    known, wanted = (source.config().get_text_config().vocab_size for source in (teacher, policy))
    require_all_tokens(known, wanted, teacher)


class RowTeacher:
    """The teacher of a run's rows, as trainer ranks would have it beside the policy. All ranks have it, and call it alike."""

    def __init__(self, config: Config, world: World) -> None:
        trainer, self._world, self._data = config.trainer, world, world
        source, vocabulary = reference_source(trainer), policy_source(trainer).config().get_text_config().vocab_size
        quadratic = ModelFlops.of(source.empty(torch.float32, PACKED)).quadratic
        self._limits = micro_batch_limits(trainer, micro_batch_tokens(config), quadratic)
        self.top_k = min(trainer.distillation.top_k, vocabulary)
        forward = replace(forward_config(trainer, config.temperature), vocabulary=vocabulary)
        if trainer.strategy == "megatron":
            from hpcrl.trainer.scoring.megatron import forward_passes  # megatron-core is installed on its own

            layout = trainer.megatron_layout("ref")
            self._passes, self._data = forward_passes(trainer, layout, source, forward, "trainer.ref", world)
        else:
            self._data = world.sharing(trainer.ref_model_parallel_size)
            model = load_model(PackedPolicy, source, trainer.ref_sharding, forward, world, data=self._data)
            self._passes = partial(passes, model, device=world.device)

    def write(self, target: Path, tokens: TokenFile, progress: Callable[[int], None]) -> None:
        """Commit the teacher's log-probabilities of all rows of a dataset (hpcrl/trainer/offline/teacher_file.py).

        Args:
            progress: is called with the number of rows that are done, after each part of them.
        """
        ends, size = ends_of(tokens), self._data.size
        with self._shared(target) as directory:
            self._world.rank0_broadcast(lambda: make_room(directory, ends, self.top_k))
            writer, checksums = TeacherWriter(directory, ends, self.top_k), list[tuple[int, int]]()
            for first in range(0, len(tokens), _ROWS_AT_ONCE * size):
                part = range(first, min(first + _ROWS_AT_ONCE * size, len(tokens)))
                checksums += self._write_part(writer, tokens, part)
                progress(part.stop)
            writer.flush()
            every = sorted(pair for found in self._world.all_gather(lambda: checksums) for pair in found)
            self._world.rank0_broadcast(lambda: write_index(directory, tokens, ends, [one for _, one in every]))

    def _write_part(self, writer: TeacherWriter, tokens: TokenFile, rows: Sequence[int]) -> list[tuple[int, int]]:
        """Write this rank's share of consecutive rows; return its rows, each with the checksum of its entry."""
        lengths, rank = [sum(tokens.lengths(row)) for row in rows], self._data.rank
        plan = planned([RowRef(at, 0, length) for at, length in enumerate(lengths)], self._data.size, self._limits)
        refs = plan.shares[rank]
        samples = pack([tokens.read(rows[ref.group])[0] for ref in refs], refs)
        stream = MicroBatchStream(samples, plan.score[rank], lambda: None, self.top_k)
        columns = outputs(stream.parts, self._passes(stream))
        if not columns or not self._data.is_leader:
            return []
        _, ids_PK, top_PK = columns
        found, start = list[tuple[int, int]](), 0
        for ref, length in zip(samples.refs, samples.lengths, strict=True):
            where = start + (samples.loss_mask[start : start + length] > 0).nonzero()[:, 0]
            row, start = rows[ref.group], start + length
            found.append((row, writer.write(row, ids_PK[where].int().numpy(), top_PK[where].numpy())))
        return found

    @contextmanager
    def _shared(self, target: Path) -> Iterator[Path]:
        if not self._world.first:
            yield Path(self._world.rank0_broadcast(str))
            self._world.barrier()
            return
        with committed_directory(target, 0, top_k=self.top_k) as directory:
            self._world.rank0_broadcast(lambda: str(directory))
            yield directory
            self._world.barrier()
