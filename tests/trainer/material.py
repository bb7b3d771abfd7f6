"""A tiny model, random samples and batches, the parts of a training step one by one, and real torchrun."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from hpcrl.algorithms.reductions import Reduction
from hpcrl.config import AlgorithmConfig, ModelConfig, PolicyConfig, TrainerConfig
from hpcrl.rundir.commit import write_json
from hpcrl.rundir.layout import Run
from hpcrl.trainer.backends.base import ModelEngine, Objective, PolicyEngine, UpdateResult
from hpcrl.trainer.batching import MicroBatchLimit, RowRef, consecutive, split_micro_batches
from hpcrl.trainer.distributed import World, joined
from hpcrl.trainer.packing import MiniBatch, PackedRows, common_prefixes
from hpcrl.trainer.read_batch import load_mini_batches
from hpcrl.trainer.step import sum_over_ranks
from hpcrl.types import ROUTED_EXPERTS, Batch, Row, SamplingMask
from tests.paths import CONFIGS
from tests.rows import group_meta, write_group

VOCABULARY = 18
ROUNDING = 1e-6  # of gradients of the tiny models, summed in float32; less than half of it was seen
QUICKSTART = CONFIGS / "quickstart" / "model"


def load_weights(directory: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of all files of published weights or of an export."""
    return {name: tensor for file in directory.glob("*.safetensors") for name, tensor in load_file(file).items()}


def make_sample(generator: torch.Generator, length: int, prompt: int) -> Row:
    """Return a sample whose policy chose everything after the first `prompt` tokens, but one in the middle (as of a tool)."""
    mask = (torch.arange(length) >= prompt).float()
    if length - prompt > 4:
        mask[prompt + 2] = 0
    return Row(
        token_ids=torch.randint(0, VOCABULARY, (length,), generator=generator),
        loss_mask=mask,
        rollout_logprobs=-3 * torch.rand(length, generator=generator) * mask,
        versions=torch.where(mask > 0, 0, -1).int(),
        rewards=torch.zeros(length),
        stop_reason="stop",
    )


def with_mask(sample: Row) -> Row:
    """Return it with what every second token was sampled among: a few tokens, itself one of them."""
    draw = torch.Generator().manual_seed(len(sample.token_ids))
    kept: list[list[int]] = []
    for at, token_id in enumerate(sample.token_ids.tolist()):
        others = torch.randperm(VOCABULARY, generator=draw)[: 1 + at % 5].tolist()
        kept.append(sorted({token_id, *others}) if sample.versions[at] >= 0 and at % 2 else [])
    counts = torch.tensor([len(ids) for ids in kept], dtype=torch.int32)
    return replace(
        sample,
        sampling_mask=SamplingMask(torch.tensor([one for ids in kept for one in ids], dtype=torch.int32), counts),
    )


def make_batch(
    run: Run, step: int, groups: int, size: int, *, masked: bool = False, alike: int = 0, routed: bool = False
) -> Batch:
    """Write random groups and their batch into the run directory; the same for the same step.

    Args:
        masked: every second group has sampling masks.
        alike: with so many tokens at least all samples of a group begin alike.
        routed: samples tell to which two of four experts their tokens went in each of two layers: any, but for some that are not known.
    """
    generator = torch.Generator().manual_seed(step)
    metas = []
    for number in range(groups):
        lengths = torch.randint(5, 16, (size,), generator=generator).tolist()
        rewards = torch.rand(size, generator=generator).tolist()
        samples = [make_sample(generator, length, prompt=3) for length in lengths]
        for sample, reward in zip(samples, rewards, strict=True):
            sample.rewards[-1] = reward
        for sample in samples:
            sample.token_ids[:alike] = samples[0].token_ids[:alike]
        if masked and number % 2 == 0:
            samples = [with_mask(sample) for sample in samples]
        if routed:
            samples = [with_experts(sample) for sample in samples]
        meta = group_meta(
            group_id=f"g{step}-{number}",
            kind="train",
            replica=0,
            path=f"samples/0/g{step}-{number}.safetensors",
            rewards=rewards,
            lengths=lengths,
            response_lengths=[int(sample.loss_mask.sum()) for sample in samples],
            stop_reasons=["stop"] * size,
            oldest_version=step - 1,
            newest_version=step - 1,
            data_source="random",
            seconds=1.0,
            shared=common_prefixes(torch.cat([sample.token_ids for sample in samples]), lengths) if alike else [],
        )
        metas.append(write_group(run.path / meta.path, samples, meta))
    batch = Batch(step, metas, cursor=step * groups)
    write_json(run.batch(step), batch.to_json())
    return batch


def with_experts(sample: Row[torch.Tensor]) -> Row[torch.Tensor]:
    """Return a sample with experts that its tokens have gone to; those of its second token and its last are not known."""
    length = len(sample.token_ids)
    generator = torch.Generator().manual_seed(int(sample.token_ids.sum()))
    experts = torch.rand(length, 2, 4, generator=generator).argsort(-1)[..., :2].to(torch.int16)
    experts[[1, -1]] = -1
    return replace(sample, tensors={ROUTED_EXPERTS: experts})


def expect_same_metrics(
    found: Mapping[str, float], expected: Mapping[str, float], *, absolute: float, relative: float | None = None
) -> None:
    """Compare what was computed in another order, or on other ranks.

    A token whose ratio lies on the bound of a clip is clipped or not by rounding, which also differs between processors: it may be one of ten.
    """
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        bound = max(absolute, 0.1) if "clip" in name else absolute
        assert found[name] == pytest.approx(value, rel=relative, abs=bound, nan_ok=True), name


class StepBounds:
    """How far weights may differ after Adam's steps when gradients were summed in another order, element by element.

    Adam divides by the root of the second moment: where a gradient is no larger than rounding, which differs between processors, a step may go
    either way.
    """

    def __init__(self, atol: float) -> None:
        self._atol, self._bounds = atol, dict[torch.nn.Parameter, torch.Tensor]()

    def add(self, optimizer: torch.optim.Optimizer) -> None:
        """Take in a step that the optimizer has just made."""
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if "exp_avg_sq" not in (state := optimizer.state[parameter]):
                    continue
                second = state["exp_avg_sq"] / (1 - group["betas"][1] ** float(state["step"]))
                share = (ROUNDING / (second.sqrt() + group["eps"])).clamp(max=1)
                self._bounds[parameter] = self._bounds.get(parameter, torch.zeros(())) + group["lr"] * share

    def expect(self, found: torch.Tensor, parameter: torch.nn.Parameter) -> None:
        bound = self._atol + self._bounds.get(parameter, torch.zeros(()))
        apart = (found - parameter.detach()).abs()
        assert (apart <= bound).all(), (
            f"differs by {apart.max():.2g}, {(apart / bound).max():.2g} of what rounding explains"
        )


def write_model(path: Path, *, tied: bool = True) -> Path:
    """Write a tiny model with grouped-query attention, and the quickstart's tokenizer; return its directory."""
    torch.manual_seed(7)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        initializer_range=0.2,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
    )
    Qwen2ForCausalLM(config).save_pretrained(path)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(QUICKSTART / name, path / name)
    return path


def write_teacher(path: Path, model: Path) -> Path:
    """Write a teacher of a model: the same one with other weights."""
    teacher = AutoModelForCausalLM.from_pretrained(model)
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in teacher.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    teacher.save_pretrained(path)
    return path


_worlds: list[World] = []


@contextmanager
def world_of_one() -> Iterator[World]:
    """Give a world of one rank, this process: the one that it is in already, or else a new one."""
    if _worlds:
        yield _worlds[-1]
        return
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {
            "RANK": "0",
            "LOCAL_RANK": "0",
            "WORLD_SIZE": "1",
        }.items():
            patch.setenv(name, value)
        with joined() as world:
            _worlds.append(world)
            try:
                yield world
            finally:
                _worlds.clear()
    assert not dist.is_initialized()


def load(
    run: Run,
    batch: Batch,
    algorithm: AlgorithmConfig,
    groups: int,
    limit: MicroBatchLimit,
    world: World,
    reduction: Reduction | None = None,
) -> list[MiniBatch]:
    """Return mini-batches of `groups` groups each."""
    trainer = TrainerConfig(
        policy=PolicyConfig(model=ModelConfig(path="")), algorithm=algorithm, policy_mini_batch_size=groups
    )
    return load_mini_batches(run, batch, trainer, (limit, limit), world, reduction or Reduction())


def score(engine: PolicyEngine, mini: MiniBatch, limit: MicroBatchLimit, *, old: bool, reference: bool) -> None:
    """Fill in log-probabilities, by micro-batches of this limit."""
    if limit.tokens is None:
        parts = split_micro_batches(mini.plan.shares, limit)
        mini.plan = replace(mini.plan, score=[consecutive(own) for own in parts])
    if old:
        mini.rows.scores.old_logprobs = mini.scored(engine.logprobs)
    if reference:
        mini.rows.scores.ref_logprobs = mini.scored(partial(engine.logprobs, reference=True))


def train(engine: ModelEngine, mini: MiniBatch, objective: Objective) -> UpdateResult:
    """Make one optimizer step."""
    sums = engine.forward_backward(mini.micro_batches(), objective)
    return UpdateResult(sum_over_ranks(sums, engine.data), engine.step() if mini.tokens else engine.skip())


@dataclass(frozen=True)
class View:
    """One of several packed samples."""

    packed: PackedRows
    at: int

    @property
    def ref(self) -> RowRef:
        return self.packed.refs[self.at]

    @property
    def tokens(self) -> slice:
        return self.packed.tokens_of(range(self.at, self.at + 1))

    @property
    def weight(self) -> float:
        return self.packed.weights[self.at]

    @property
    def nll_weight(self) -> float:
        return self.packed.nll_weights[self.at]

    @property
    def trained(self) -> int:
        return self.packed.trained[self.at]

    def of(self, column_P: torch.Tensor | None) -> torch.Tensor:
        """Return [T] of a column of all packed samples."""
        assert column_P is not None
        return column_P[self.tokens]


def views(packed: Iterable[PackedRows]) -> list[View]:
    return [View(samples, at) for samples in packed for at in range(len(samples.lengths))]


def make_run(path: Path) -> Run:
    path.mkdir(parents=True)
    (path / "config.toml").touch()
    return Run.open(path)


def run_of_two(path: Path, groups: int, size: int, *, alike: int = 0, routed: bool = False) -> Run:
    """Return a run that has the batches of its first two steps; arguments as of `make_batch`."""
    run = make_run(path)
    for step in (1, 2):
        make_batch(run, step, groups, size, alike=alike, routed=routed)
    return run


def torchrun(ranks: int, script: Path, *arguments: object) -> list[str]:
    """Return the command that starts `script` on a port that nobody else uses."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return [*launcher, str(script), *map(str, arguments)]


@torch.no_grad()
def spread_singular_values(model: torch.nn.Module) -> None:
    """Change the matrices of a model: singular values of a random one are too close together to be told apart."""
    for parameter in model.parameters():
        if parameter.dim() == 2:
            U, S, V = torch.linalg.svd(parameter, full_matrices=False)
            parameter.copy_((U * S * 0.7 ** torch.arange(len(S))) @ V)
