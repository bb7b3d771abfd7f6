"""State of a batch that a stop request interrupts between two of its optimizer steps, in a checkpoint beside the models.

It makes a stop lossless at any interval of checkpoints. Without it, a stop inside a batch would lose up to trainer.ckpt_interval steps:
the state before the batch is gone with its first optimizer step.

    checkpoints/s000041u2/        step 41 is complete, and 2 optimizer steps of step 42: the critic's before the policy's, or some of each
    on ranks of their own
      batch.json                  the groups, the settings they are split by, metrics of the optimizer steps that were made
      batch-<rank>.safetensors    scores of each sample before the first of them, by the ranks that had them

The rest of the batch is then trained as without the stop, also on another number of ranks: mini-batch, group and index identify samples,
and each rank reads its own. A batch of which no optimizer step was made leaves nothing: it is scored again.

In batch-<rank>.safetensors a name begins with the number of the mini-batch: `<m>.groups`, `<m>.samples`, `<m>.lengths` [B] are the samples
in `<m>.advantages`, `<m>.old_logprobs`, ... [P], as far as there are such, laid out as PackedRows are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from hpcrl.config.sections.trainer import TrainerConfig
from hpcrl.data.batch_file import check_batch, read_batch
from hpcrl.data.weight_files import check_weights
from hpcrl.errors import CommitError, DataError, RunError
from hpcrl.rundir.checkpoints import FACTS, changed_since
from hpcrl.rundir.commit import read_json, write_json
from hpcrl.rundir.layout import Run, position_of
from hpcrl.trainer.advantages import Advantages
from hpcrl.trainer.backends.base import UpdateResult
from hpcrl.trainer.distributed import World
from hpcrl.trainer.packing import MiniBatch, PackedRows, Scores
from hpcrl.trainer.saving.committer import save_tensors
from hpcrl.types import Batch

_LAYOUT = 2  # type of each token's entry by name in batch-<rank>.safetensors


@dataclass
class PartialBatch:
    """A batch that is being trained.

    Attributes:
        settings: `TrainerConfig.batch_settings` that it is trained with.
        data: the ranks that its samples are assigned to.
        minis: this rank's part of it, scored.
        kl_penalty: metrics of the KL penalty on rewards.
        critic, policy: the optimizer steps that were made.
        seconds: rank 0's, by phase, as far as attempts before this one spent them.
    """

    data: World
    settings: Mapping[str, Any]
    batch: Batch
    minis: list[MiniBatch]
    kl_penalty: dict[str, float]
    advantages: Advantages
    critic: list[UpdateResult] = field(default_factory=list)
    policy: list[UpdateResult] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def updates(self) -> int:
        """Optimizer steps that were made."""
        return len(self.critic) + len(self.policy)

    def write(self, directory: Path) -> None:
        """Write it into an existing directory, each rank its samples."""
        if not self.data.is_leader:
            return
        columns: dict[str, torch.Tensor] = {}
        for number, mini in enumerate(self.minis):
            columns |= {f"{number}.{name}": value for name, value in _columns(mini.rows).items()}
        save_tensors(columns, directory / _file(self.data.rank))
        if self.data.first:
            facts = {
                "layout": _LAYOUT,
                "ranks": self.data.size,
                "groups": _named(self.batch),
                "settings": dict(self.settings),
                "charged": self.kl_penalty,
                "advantages": asdict(self.advantages),
                "critic": [asdict(update) for update in self.critic],
                "policy": [asdict(update) for update in self.policy],
                "seconds": self.seconds,
            }
            write_json(directory / FACTS, facts)


def read_partial_batch(
    checkpoint: Path, settings: Mapping[str, Any], batch: Batch, minis: list[MiniBatch], data: World, world: World
) -> PartialBatch:
    """Return the partial batch of a committed checkpoint, with the scores of this rank's samples filled in.

    Raises:
        RunError: the checkpoint is about another batch.
    """
    facts = world.rank0_broadcast(lambda: read_json(checkpoint / FACTS))
    if facts["groups"] != _named(batch):
        raise RunError(
            f"{checkpoint} was saved inside step {batch.step}, but the controller gives that step another batch; remove the "
            "checkpoint, and training continues from the one before it"
        )
    ranks = sorted(range(facts["ranks"]), key=lambda rank: rank != data.rank)  # as a rule a rank needs its own alone
    _fill_in(minis, [checkpoint / _file(rank) for rank in ranks])
    return PartialBatch(
        data,
        settings,
        batch,
        minis,
        facts["charged"],
        Advantages(**facts["advantages"]),
        [UpdateResult.of(value) for value in facts["critic"]],
        [UpdateResult.of(value) for value in facts["policy"]],
        facts["seconds"],
    )


def unusable(run: Run, trainer: TrainerConfig, checkpoint: Path) -> str | None:
    """Return why training cannot go on inside the step that a committed checkpoint was saved in; None: it can, or it was saved after one.

    The batch must be the one that the controller gives next: that one is there, complete, and cut as before.
    """
    step, updates = position_of(checkpoint) or (0, 0)
    if not updates:
        return None
    facts = read_json(checkpoint / FACTS)
    if facts is None:
        return f"it has no {FACTS}"
    if facts.get("layout") != _LAYOUT:
        return "an earlier version of hpcrl saved it, which kept advantages and returns one token later"
    if changed := changed_since(facts["settings"], trainer.batch_settings):
        return f"the batch was begun with another trainer.{', trainer.'.join(changed)}"
    try:
        file = read_batch(run.batch(step + 1))
        if file is None or facts["groups"] != _named(file.batch):
            return f"{run.batch(step + 1)} is not the batch that was begun"
        check_batch(run, file.batch)
        published = not trainer.offline and (step > 0 or not trainer.policy.model.lora.begins_with_model)
        if published:  # nobody can make them from a policy that went on
            check_weights(run.weights_of(step))
    except (CommitError, DataError, RunError) as error:
        return str(error)
    return None


def _named(batch: Batch) -> list[list[str]]:
    return [[group.group_id, group.digest] for group in batch.groups]


def _columns(samples: PackedRows) -> dict[str, torch.Tensor]:
    index = {
        "groups": [ref.group for ref in samples.refs],
        "samples": [ref.index for ref in samples.refs],
        "lengths": samples.lengths,
    }
    return {name: torch.tensor(values, dtype=torch.int64) for name, values in index.items()} | samples.scores.present()


def _fill_in(minis: Sequence[MiniBatch], files: Sequence[Path]) -> None:
    """Set the scores of the samples from the files; no other samples are read."""
    missing = {
        (number, ref.group, ref.index): mini.rows.tokens_of(range(at, at + 1))
        for number, mini in enumerate(minis)
        for at, ref in enumerate(mini.rows.refs)
    }
    found = [dict[str, torch.Tensor]() for _ in minis]
    for file in files:
        if not missing:
            break
        with safe_open(file, "pt") as saved:
            names = set(saved.keys())
            for number, mini in enumerate(minis):
                groups, samples, lengths = (
                    saved.get_tensor(f"{number}.{name}").tolist() for name in ("groups", "samples", "lengths")
                )
                columns = [name for name in vars(Scores()) if f"{number}.{name}" in names]
                end = 0
                for group, sample, length in zip(groups, samples, lengths, strict=True):
                    start, end = end, end + length
                    tokens = missing.pop((number, group, sample), None)
                    for name in columns if tokens is not None else ():
                        part = saved.get_slice(f"{number}.{name}")[start:end]
                        whole = found[number].setdefault(
                            name, part.new_zeros(len(mini.rows.token_ids), *part.shape[1:])
                        )
                        whole[tokens] = part
    if missing:
        raise RunError(f"{files[0].parent} lacks samples of its batch, such as {next(iter(missing))}")
    for mini, columns in zip(minis, found, strict=True):
        mini.rows.scores = Scores(**columns)


def _file(rank: int) -> str:
    return f"batch-{rank}.safetensors"
