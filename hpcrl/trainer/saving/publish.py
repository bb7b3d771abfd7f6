"""The policy as a model for others: weights/v<k> for inference engines, exports/s<k> for people.

Both are safetensors under Hugging Face names, to which every rank writes its part. An export has the model's number type and its other
files. Weights add the proof for engines: a digest of each tensor, and a probe. Between whole versions there may be
some whose files have only what has changed since the one before. Where engines load adapters, weights/v<k> is one instead, which rank 0
writes.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from hpcrl.config.sections.generator import ChatTemplateConfig
from hpcrl.config.sections.model import Pretrained
from hpcrl.data.chat.ending import trained_end
from hpcrl.data.exported_files import exported_files
from hpcrl.data.tokenizer import chat_template, load_tokenizer
from hpcrl.data.weight_files import Base, Probe, PublishedWeights, weight_facts, whole_digest
from hpcrl.errors import CommitError, HpcrlError
from hpcrl.rundir.commit import (
    abandon,
    begin,
    committed,
    committed_by,
    discard,
    finish,
    is_committed,
    listing,
    staging,
    write_bytes,
)
from hpcrl.rundir.evaluations import begun_evaluations
from hpcrl.rundir.layout import Run, step_of, version_of
from hpcrl.rundir.ledger import require_newest
from hpcrl.rundir.space import explained
from hpcrl.trainer.backends.base import PolicyEngine
from hpcrl.trainer.distributed import World
from hpcrl.trainer.models.adapter import Adapter
from hpcrl.trainer.models.forward import DTYPES
from hpcrl.trainer.saving.changes import ChangesWriter, Kept
from hpcrl.trainer.saving.shards import ShardPlan, ShardWriter

if TYPE_CHECKING:  # a server, which most trainers do not need
    from hpcrl.trainer.saving.send import WeightSender

log = logging.getLogger(__name__)

_INDEX = "model.safetensors.index.json"
_PROBE_TOKENS = 32
ADAPTER = "adapter"
"""Directory of an export with the adapters alone, where LoRA trained them."""


class _Written(NamedTuple):
    """Result of a commit: digests of all tensors, this rank's tensors where they are kept, and the bytes of all files."""

    tensors: dict[str, str]
    kept: dict[str, torch.Tensor]
    size: int


class Publisher:
    """Publishes the policy after a step. Every method is called by all ranks; each writes its tensors, rank 0 commits.

    Args:
        dtype: of published tensors, generator.inference_engine.model_dtype.
        kept_versions: of the newest, that must stay readable.
        longest: tokens that an engine takes at most; fewer than two: versions get no probe.
        adapters: whether engines load adapters, and get nothing else.
        engines: whether there are any; without them no version is written.
        full_interval: every so many versions one has all tensors; those between have what has changed since the one before.
        sender: sends this rank's files to who asks for them; None: all read them where they are written.
    """

    def __init__(
        self,
        run: Run,
        attempt: int,
        world: World,
        dtype: torch.dtype,
        kept_versions: int,
        longest: int = 0,
        *,
        adapters: bool = False,
        engines: bool = True,
        full_interval: int = 1,
        sender: WeightSender | None = None,
    ) -> None:
        self._engines, self._full_interval, self._sender = engines, full_interval, sender
        self._kept: Kept | None = None
        self._run, self._attempt, self._world, self._dtype = run, attempt, world, dtype
        self._adapters, self._kept_versions = adapters, kept_versions
        self._probe_tokens = min(_PROBE_TOKENS, longest - 1)  # an engine generates one more

    def resume(self, engine: PolicyEngine | None, step: int, *, from_model: bool = True) -> None:
        """Make weights/ fit a training that continues after `step`: version `step` is there and whole, and none above it.

        Args:
            engine: what the policy is after `step`; None: training continues inside the next one, and found the version whole.
            from_model: whether version 0 is the initial model where it lies.
        """
        self._forget_after(step)
        # writing a version again takes no longer than verifying it
        if (step > 0 or not from_model) and engine is not None:
            self.publish(engine, step)

    def _forget_after(self, step: int) -> None:
        def forget() -> None:
            self._fence()
            for path in list(self._run.weights.iterdir()) if self._run.weights.is_dir() else []:
                version = version_of(path)
                if (version is not None and version > step) or path.name.startswith((".tmp-", ".trash-")):
                    discard(path, self._fence)

        self._world.rank0_broadcast(forget)

    def publish(self, engine: PolicyEngine, version: int) -> dict[str, float]:
        """Commit weights/v<version>, and return metrics; what this attempt has committed is being read and stays as it is.

        Raises:
            CommitError: on every rank: they could not be written, or a newer attempt has begun.
        """
        target = self._run.weights_of(version)
        if not self._engines:
            return {}
        if self._world.rank0_broadcast(lambda: committed_by(target)) == self._attempt:
            return {}
        began = time.monotonic()
        with engine.evaluated():
            adapter, probe = engine.sampling_adapter() if self._adapters else None, self._probe(engine)
            if adapter:
                size = self._write_adapter(adapter.scaled(self._dtype), target, probe, version)
            else:
                size = self._write_version(engine, target, probe, version)
        return {"timing/publish_weights": time.monotonic() - began, "throughput/published_gib": size / 2**30}

    def _probe(self, engine: PolicyEngine) -> Probe | None:
        if self._probe_tokens < 2:
            return None
        token_ids = [(31 + 7919 * place * place) % engine.vocabulary for place in range(self._probe_tokens)]
        return Probe(token_ids, engine.probe(token_ids), str(engine.dtype).removeprefix("torch."))

    def retire(self) -> None:
        """Remove versions that no engine needs any more, for no open evaluation either; slow, and so called after engines know the newest."""

        def discard_old() -> None:
            evaluated = begun_evaluations(self._run)  # first: what begins later needs the newest
            versions = committed(self._run.weights, version_of)
            kept = {*versions[-self._kept_versions :], *(version for version in versions if version in evaluated)}
            try:
                needed = self._needed(kept)
            except CommitError as error:  # such as of a filesystem that shows it later
                log.warning("no version of the weights is removed now: %s", error)
                return
            for old in versions:
                if old not in needed:
                    discard(self._run.weights_of(old), self._fence)

        self._world.rank0_broadcast(discard_old)

    def _needed(self, versions: Iterable[int]) -> set[int]:
        """Return versions with those that they have the changes of; CommitError where the manifest of one cannot be read."""
        needed = set[int]()
        for version in versions:
            while version not in needed:
                needed.add(version)
                weights = PublishedWeights.read(self._run.weights_of(version))
                version = weights.base.version if weights.base else version
        return needed

    def _fence(self) -> None:
        if self._attempt:  # 0 writes beside the run's attempts
            require_newest(self._run, self._attempt)

    def export(
        self,
        engine: PolicyEngine,
        step: int,
        model: Pretrained | None,
        template: ChatTemplateConfig,
        target: Path | None = None,
        *,
        options: Mapping[str, Any] = MappingProxyType({}),
        texts: bool = False,
    ) -> Path:
        """Commit a model directory for transformers and vLLM, and return it; what this attempt has committed stays as it is.

        Args:
            model: whose tokenizer and other files it gets; None: the policy has none of its own.
            template: chat template with which the policy was trained; the tokenizer keeps it.
            target: the directory; None: exports/s<step>.
            options, texts: as of `trained_end`.

        Raises:
            ConfigError, DataError: as `load_tokenizer`; the model's files cannot be read.
            CommitError: on every rank: it could not be written, or a newer attempt has begun.
        """

        def complete(directory: Path) -> None:
            if model is not None:
                end = trained_end(load_tokenizer(model, template), model, options, texts=texts)
                for name, content in exported_files(model, chat_template(template), end).items():
                    write_bytes(directory / name, content)
            engine.export_config(directory, dtype)
            if adapter:
                adapter.write(directory / ADAPTER)

        place = target or self._run.export(step)
        name = self._world.rank0_broadcast(lambda: str(engine.source.export_dtype()).removeprefix("torch."))
        dtype = DTYPES[name]
        if self._world.rank0_broadcast(lambda: committed_by(place)) != self._attempt:
            with engine.evaluated():
                adapter, rank = engine.adapter(), self._world.rank
                self._write(
                    engine,
                    place,
                    lambda directory, plan: ShardWriter(directory, plan, rank),
                    lambda tensors: {"step": step, **weight_facts(tensors, None)},
                    dtype,
                    complete,
                )
        return place

    def misses_export(self, start: Path | None) -> bool:
        """Return whether training starts from a checkpoint of this run, after a step, of which there is no export."""
        step = step_of(start) if start is not None and start.parent == self._run.checkpoints else None
        return step is not None and not self._world.rank0_broadcast(lambda: is_committed(self._run.export(step)))

    def _write_version(self, engine: PolicyEngine, target: Path, probe: Probe | None, version: int) -> int:
        kept, self._kept = self._kept, None  # what fails leaves nothing that changes could be of
        before = kept if kept and kept.changes + 1 < self._full_interval else None
        senders = self._world.all_gather(self._sender.address) if self._sender else []
        keeps = self._full_interval > 1 or self._sender is not None

        def writer(directory: Path, plan: ShardPlan) -> ShardWriter | ChangesWriter:
            if before:
                return ChangesWriter(directory, self._world.rank, before.tensors)
            return ShardWriter(directory, plan, self._world.rank, keeps=keeps)

        def facts(tensors: Mapping[str, str]) -> dict[str, Any]:
            return {"version": version, **weight_facts(tensors, probe, before.base if before else None, senders)}

        written = self._write(engine, target, writer, facts, self._dtype, offered=version)
        if self._full_interval > 1:
            base = Base(target.name, version, whole_digest(written.tensors))
            self._kept = Kept(base, written.kept, before.changes + 1 if before else 0)
        return written.size

    def _write(
        self,
        engine: PolicyEngine,
        target: Path,
        writer_of: Callable[[Path, ShardPlan], ShardWriter | ChangesWriter],
        facts: Callable[[Mapping[str, str]], dict[str, Any]],
        dtype: torch.dtype,
        complete: Callable[[Path], None] = lambda _: None,
        offered: int | None = None,
    ) -> _Written:
        """Commit the policy at `target`.

        Args:
            facts: returns what the manifest says, from the digests of all tensors.
            dtype: of the written tensors.
            complete: writes what else belongs to it, on rank 0.
            offered: the version, where files are sent to who asks for them.
        """
        world, pieces = self._world, engine.export_pieces(dtype)
        plan = ShardPlan.of(pieces, world.size)
        try:
            world.rank0_broadcast(lambda: self._begin(target))
            writer = writer_of(staging(target, self._attempt), plan)
            for piece in engine.export_weights(dtype, plan.owners):
                writer.put(piece)
            parts = world.all_gather(lambda: self._written(target, writer))
            digests = {name: digest for part in parts for name, digest in part["tensors"].items()}
            tensors = {name: digests[name] for piece in pieces for name in piece.tensors}
            files = {name: entry for part in parts for name, entry in part["files"].items()}
            if self._sender and offered is not None:
                self._sender.offer(offered, writer.files)
            index = plan.index if isinstance(writer, ShardWriter) else None
            world.rank0_broadcast(lambda: self._finish(target, index, complete, files, **facts(tensors)))
        except HpcrlError:
            if world.first:
                abandon(target, self._attempt, self._fence)
            raise
        return _Written(tensors, writer.kept, sum(entry["size"] for entry in files.values()))

    def _write_adapter(self, adapter: Adapter, target: Path, probe: Probe | None, version: int) -> int:
        def write() -> int:
            try:
                self._begin(target)
                directory = staging(target, self._attempt)
                with explained(target):
                    tensors = adapter.write(directory)
                    files = listing(directory)
                    facts = weight_facts(tensors, probe)
                    finish(target, self._attempt, fence=self._fence, files=files, version=version, **facts)
            except HpcrlError:
                abandon(target, self._attempt, self._fence)
                raise
            return sum(entry["size"] for entry in files.values())

        return self._world.rank0_broadcast(write)

    def _begin(self, target: Path) -> None:
        self._fence()
        with explained(target):
            begin(target, self._attempt)

    def _written(self, target: Path, writer: ShardWriter | ChangesWriter) -> dict[str, Any]:
        """Return this rank's digests by tensor, and its files; those with whole tensors have digests in place of checksums."""
        with explained(target):
            tensors, directory = writer.finish(), staging(target, self._attempt)
            files = {name: {"size": (directory / name).stat().st_size} for name in writer.files}
            if isinstance(writer, ChangesWriter):
                files = listing(directory, lambda path: path.name in files)
            return {"tensors": tensors, "files": files}

    def _finish(
        self,
        target: Path,
        index: dict[str, object] | None,
        complete: Callable[[Path], None],
        files: dict[str, dict[str, Any]],
        **facts: Any,
    ) -> None:
        directory = staging(target, self._attempt)
        with explained(target):
            if index:
                (directory / _INDEX).write_text(json.dumps(index))
            complete(directory)
            others = listing(directory, lambda path: path.name not in files)
            finish(target, self._attempt, fence=self._fence, files=files | others, **facts)


class NoPublisher(Publisher):
    """Publisher of a rank without the policy: it writes nothing."""

    def __init__(self) -> None:
        pass

    def resume(self, *_: Any, **__: Any) -> None:
        pass

    def publish(self, *_: Any, **__: Any) -> dict[str, float]:
        return {}

    def retire(self) -> None:
        pass

    def export(self, *_: Any, **__: Any) -> Path:
        return Path()

    def misses_export(self, *_: Any, **__: Any) -> bool:
        return False
