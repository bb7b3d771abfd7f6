"""Records that processes of a run exchange.

A sample is one response to a prompt, and has one row or, with generator.step_wise_trajectories, a row for each of its turns. A row has no
prompt/response split: the loss mask says which tokens the policy chose. Letters for shapes: T tokens of one row, P packed tokens of one
micro-batch, B rows, V vocabulary.

    Prompt ──HTTP──> rollout worker ──Group file on disk──> trainer ──MicroBatch──> engine, loss
                            └──GroupMeta over HTTP──> controller ──Batch file──┘
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, compress, pairwise, starmap
from typing import TYPE_CHECKING, Any, Generic, Literal, NamedTuple

if TYPE_CHECKING:
    import numpy as np
    import torch
    from typing_extensions import TypeVar

    Array = TypeVar("Array", default=np.ndarray)
    T = TypeVar("T")
else:
    from typing import TypeVar

    Array, T = TypeVar("Array"), TypeVar("T")
"""numpy.ndarray in files and in rollout workers, which need no torch; torch.Tensor where packed rows are split."""

Kind = Literal["train", "eval"]
StopReason = Literal["stop", "length", "abort", "failed"]

LARGEST = 1e30
"""Of a reward or a metric of an environment: sums of many still fit into float32."""
LONGEST_NAME, LONGEST_FAILURE = 200, 2000

ROUTED_EXPERTS = "routed_experts"
"""In Row.tensors, [T, L, k] int16: the engine's experts of each token in each layer with experts. -1 where they are unknown, as of a last
token, which no engine computes."""


def is_name(value: Any) -> bool:
    """Return whether a value is a text that can stand in a table: not empty, not long, and without control characters or surrogates."""
    return type(value) is str and 0 < len(value) <= LONGEST_NAME and value.isprintable()


def is_plain_text(value: Any, longest: int) -> bool:
    """Return whether a value is a text of at most so many characters, all of which can be printed or are tabs and ends of lines."""
    if type(value) is not str or len(value) > longest:
        return False
    return value.isprintable() or all(letter.isprintable() or letter in "\n\t" for letter in value)


def plain_text(text: str, longest: int) -> str:
    """Return a text's beginning as `is_plain_text` wants it."""
    return "".join(
        letter if letter.isprintable() or letter in "\n\t" else "\N{REPLACEMENT CHARACTER}" for letter in text[:longest]
    )


@dataclass(frozen=True)
class Prompt:
    """One row of a dataset.

    Attributes:
        uid: stable name of the row in its dataset.
        messages: the conversation so far, as chat messages; images as of hpcrl/data/vision/images.py.
        env_class: environment that scores the responses.
        extras: the row's other columns; the environment reads its ground truth from them.
        data_source: where the row comes from; evaluation is reported by it.
    """

    uid: str
    messages: list[dict[str, Any]]
    env_class: str
    extras: dict[str, Any] = field(default_factory=dict)
    data_source: str = "unknown"


@dataclass(frozen=True)
class SamplingMask(Generic[Array]):
    """The tokens that each token of a row was sampled among, where sampling leaves tokens out (top_k, top_p, min_p, ...).

    Attributes:
        token_ids: [M] int32, those of one place after those of the place before; each has the sampled token itself.
        counts: [T] int32, how many of them belong to a place; 0: the whole vocabulary.
    """

    token_ids: Array
    counts: Array


@dataclass(frozen=True)
class Hint(Generic[Array]):
    """The prompt that a policy which teaches itself is shown.

    Attributes:
        token_ids: [H] int64.
        replaces: how many of the row's first tokens it takes the place of.
        wrong: the same prompt with wrong answers of the group instead, [H'] int64 each.
    """

    token_ids: Array
    replaces: int
    wrong: Sequence[Array] = ()


@dataclass(frozen=True)
class TurnEnd:
    """Where a turn ends in its row, and in which role and state the policy took it.

    Attributes:
        end: tokens of the row up to the turn's last one, that included.
        role: empty where the environment names none.
        anchor: digest of what names the state.
    """

    end: int
    role: str
    anchor: str


@dataclass
class Row(Generic[Array]):
    """The tokens of one sequence that is trained: a whole sample, or with generator.step_wise_trajectories one of its turns and all before it.

    Attributes:
        token_ids: [T] int64, prompt and response laid end to end.
        loss_mask: [T] float32, 1 where the policy chose the token and it is to be trained.
        rollout_logprobs: [T] float32, of the engine, under the distribution that it sampled from; 0 where the policy did not choose.
        versions: [T] int32, policy version that chose the token; -1 where the policy did not choose.
        rewards: [T] float32, each reward at the last token of the turn that earned it.
        stop_reason: why the last turn ended; "failed": its environment raised, or took too long.
        env_metrics: numbers that the environment reports.
        sampling_mask: None where the policy chose among the whole vocabulary throughout.
        top_ids: [T, K] int32, the tokens that the policy finds most probable in the token's place, the most probable one first; -1 where nobody
            has asked. None: nowhere.
        hint: None where there is none.
        tensors: what the row has beside numbers for its tokens, by names that the family of the policy gives them: images, latents,
            experts, actions, ... each with at least one dimension.
        turns: that the policy took in the row, in their order; of rollout workers alone, as files have them in `SampleMeta`.
    """

    token_ids: Array
    loss_mask: Array
    rollout_logprobs: Array
    versions: Array
    rewards: Array
    stop_reason: StopReason
    env_metrics: dict[str, float] = field(default_factory=dict)
    sampling_mask: SamplingMask[Array] | None = None
    top_ids: Array | None = None
    hint: Hint[Array] | None = None
    tensors: dict[str, Array] = field(default_factory=dict)
    turns: Sequence[TurnEnd] = ()


class TurnMeta(NamedTuple):
    """Facts of one turn of a sample.

    Attributes:
        end: tokens of its row up to its last one, that included.
        reward: of the turn.
        role: in which the policy took it; empty where the environment names none.
        anchor: number of the state in which the policy took it; in a group, each role and state has one of its own.
    """

    end: int
    reward: float
    role: str
    anchor: int


@dataclass(slots=True)
class SampleMeta:
    """Facts of one sample of a finished group, for the controller.

    Attributes:
        reward: the sum of its rewards, of those in its last row where it has several. In a dataset's pair it is 1 for the chosen answer,
            which is the first, and 0 for the rejected one.
        lengths: tokens of each of its rows, prompt included.
        response_length: tokens that the policy chose.
        stop_reason: why its last turn ended.
        env_metrics: numbers that the environment reports.
        raw_reward: before generator.zero_reward_on_non_stop.
        shared: of each row, with how many tokens it begins as the row before it in the group does; empty: not known.
        model_reward: what a reward model that runs as a scorer adds to the reward of the sample, in `reward` by then; None: see `GroupMeta.judged`.
        turns: of each row, its turns; empty: not known, or no sample of the group has more than one.
    """

    reward: float
    lengths: Sequence[int]
    response_length: int
    stop_reason: str
    env_metrics: Mapping[str, float]
    raw_reward: float
    shared: Sequence[int] = ()
    model_reward: float | None = None
    turns: Sequence[Sequence[TurnMeta]] = ()


@dataclass(frozen=True)
class GroupMeta:
    """Facts of a finished group, for the controller.

    The file has the rows of a sample after those of the sample before it, and with generator.step_wise_trajectories turn after turn.

    Attributes:
        group_id: name of the group in the whole run.
        path: file of its samples, relative to the run directory.
        oldest_version, newest_version: over all tokens of all samples.
        seconds: from claim to the last token.
        baseline: reward of the policy's greedy response to the prompt, where the advantage estimator compares with it. That response
            is no sample of the group, and nothing else of it is kept.
        failures: what went wrong in samples whose environment failed.
        digest: of what its file says of the rows, with a checksum of each; empty: nothing knows it, as of groups that have no file.
        scores: digests of what scorers say of the group, by the names of their models; of a batch's groups alone.
        row: which row of the dataset at `path` its only sample is, or the pair of its two; None: `path` is a file of samples.
        offset: where the group begins in that file, in bytes.
        judged: a reward model that runs as a scorer has scored the samples. One without a model_reward is then not trained: the model failed
            at it.
    """

    group_id: str
    kind: Kind
    replica: int
    path: str
    samples: list[SampleMeta]
    oldest_version: int
    newest_version: int
    data_source: str
    seconds: float
    baseline: float | None = None
    failures: list[str] = field(default_factory=list)
    digest: str = ""
    row: int | None = None
    offset: int = 0
    scores: dict[str, str] = field(default_factory=dict)
    judged: bool = False

    @property
    def rewards(self) -> list[float]:
        return [sample.reward for sample in self.samples]

    @property
    def env_metrics(self) -> list[Mapping[str, float]]:
        return [sample.env_metrics for sample in self.samples]

    @property
    def response_lengths(self) -> list[int]:
        return [sample.response_length for sample in self.samples]

    @property
    def stop_reasons(self) -> list[str]:
        return [sample.stop_reason for sample in self.samples]

    @property
    def lengths(self) -> list[int]:
        """Tokens of each row, as they lie in the file."""
        return [length for sample in self.samples for length in sample.lengths]

    @property
    def owners(self) -> list[int]:
        """The sample that each row is of."""
        return [at for at, sample in enumerate(self.samples) for _ in sample.lengths]

    @property
    def roles(self) -> list[str]:
        """Names of the roles in which the policy took turns; empty where it had none."""
        found = {turn.role: None for sample in self.samples for row in sample.turns for turn in row}
        return list(found) if any(found) else []

    @property
    def scored(self) -> list[bool]:
        """Whether each sample has a reward of its own; a failed one has the mean of the others, or 0."""
        return [
            sample.stop_reason != "failed" and not (self.judged and sample.model_reward is None)
            for sample in self.samples
        ]

    @property
    def scored_samples(self) -> list[SampleMeta]:
        """The samples that are `scored`, which means are taken over."""
        return list(compress(self.samples, self.scored))

    def to_json(self) -> dict[str, Any]:
        """Return the fields and, instead of samples, a list for each of theirs: JSON of many groups is read and checked by columns."""
        own, samples = dict(vars(self)), self.samples
        del own["samples"], own["judged"]
        own |= {name: [getattr(sample, field) for sample in samples] for name, field in _COLUMNS.items()}
        own["lengths"], own["rows"] = self.lengths, [len(sample.lengths) for sample in samples]
        own["shared"] = [size for sample in samples for size in sample.shared]
        turns = [row for sample in samples for row in sample.turns]
        if turns:
            own["turns"] = [len(row) for row in turns]
            own |= {
                f"turn_{name}s": [getattr(turn, name) for row in turns for turn in row] for name in TurnMeta._fields
            }
        own["model_rewards"] = [sample.model_reward for sample in samples] if self.judged else []
        return own

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> GroupMeta:
        """Return the group that `to_json` wrote; columns that a sample can do without may be missing or empty.

        Raises:
            KeyError, TypeError, ValueError: a field is missing, unknown, or its list is not as long as the others.
        """
        own = dict(value)
        rewards, lengths = own.pop("rewards"), own.pop("lengths")
        count = len(rewards)
        rows, shared = own.pop("rows", None) or [1] * count, own.pop("shared", None)
        model_rewards, turns = own.pop("model_rewards", None), _turns(own)
        if len(lengths) != sum(rows) or len(shared or lengths) != len(lengths):
            raise ValueError(f"{len(lengths)} lengths and {len(shared or lengths)} shared of {sum(rows)} rows")
        if turns and len(turns) != len(lengths):
            raise ValueError(f"turns of {len(turns)} rows where {len(lengths)} are expected")
        columns = (
            rewards,
            _by_sample(lengths, rows),
            own.pop("response_lengths"),
            own.pop("stop_reasons"),
            own.pop("env_metrics", None) or [{}] * count,
            own.pop("raw_rewards", None) or rewards,
            _by_sample(shared, rows) if shared else [()] * count,
            model_rewards or [None] * count,
            _by_sample(turns, rows) if turns else [()] * count,
        )
        if {*map(len, columns)} != {count}:
            raise ValueError(f"lists of {sorted({*map(len, columns)})} samples where {count} are expected")
        return cls(samples=list(map(SampleMeta, *columns)), judged=bool(model_rewards), **own)


_COLUMNS = {
    "rewards": "reward",
    "response_lengths": "response_length",
    "stop_reasons": "stop_reason",
    "env_metrics": "env_metrics",
    "raw_rewards": "raw_reward",
}
"""Key in JSON -> field of SampleMeta."""


def _turns(columns: dict[str, Any]) -> list[Sequence[TurnMeta]]:
    """Take the columns of turns out of those of a group, and return the turns of each row; empty where there are none."""
    counts = columns.pop("turns", None) or []
    turns = zip(*(columns.pop(f"turn_{name}s", None) or [] for name in TurnMeta._fields), strict=True)
    flat = list(starmap(TurnMeta, turns))
    if len(flat) != sum(counts):
        raise ValueError(f"{len(flat)} turns where rows have {sum(counts)}")
    ends = [*accumulate(counts, initial=0)]
    return [tuple(flat[start:end]) for start, end in pairwise(ends)]


def _by_sample(values: Sequence[T], rows: Sequence[int]) -> list[Sequence[T]]:
    """Return the values of the rows of each sample; `rows`: how many each has."""
    if len(values) == len(rows):
        return [(value,) for value in values]
    ends = [*accumulate(rows, initial=0)]
    return [tuple(values[start:end]) for start, end in pairwise(ends)]


@dataclass(frozen=True)
class Work:
    """One group that a worker is asked to generate.

    Attributes:
        n_samples: samples of the group.
        seed: base of the sampling seeds; sample i uses seed + i, so a group does not depend on who generates it.
        turns: files, relative to the run directory, with turns of it that earlier workers have left.
        asked: digest of all that decides what a row of an evaluation becomes, but the weights; empty: nobody asks for it once more.
        version: that a row of an evaluation is generated with; None: the one that the engine holds.
    """

    group_id: str
    kind: Kind
    prompt: Prompt
    n_samples: int
    seed: int
    turns: list[str] = field(default_factory=list)
    asked: str = ""
    version: int | None = None

    def to_json(self) -> dict[str, Any]:
        return vars(self) | {"prompt": vars(self.prompt)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Work:
        return cls(**{**value, "prompt": Prompt(**value["prompt"])})


@dataclass(frozen=True)
class Drawn:
    """What a batch adds to the curriculum, see hpcrl/controller/curriculum.py.

    Attributes:
        first: index of the first group whose row was drawn since the batch before.
        rows: of that group and the following ones, counted through all datasets; -1 - row of a group that adds no pass rate.
        visit: visit of the dataset that the next drawn row begins to look at.
        passed: a row and its pass rate for each finished group of the step, dropped ones too.
        metrics: of the step.
    """

    first: int
    rows: list[int]
    visit: int
    passed: list[tuple[int, float]]
    metrics: dict[str, float]


@dataclass(frozen=True)
class Batch:
    """The groups of one training step, in order: the unit of commit between controller and trainer.

    Attributes:
        step: the step that trains these groups; the first is 1.
        cursor: index in the prompt stream of the first group that no batch up to this one has used.
        dropped: ids of groups of this step that dynamic sampling keeps from training, with the mean over a group's samples of their
            judged value, None where all of them failed. No step generates or trains them again.
        given_up: ids of surplus groups that this step did not wait for, and that are too old for the next one. The same holds for them.
        drawn: rows of later groups and pass rates; None: there is no curriculum.
    """

    step: int
    groups: list[GroupMeta]
    cursor: int
    dropped: dict[str, float | None] = field(default_factory=dict)
    given_up: list[str] = field(default_factory=list)
    drawn: Drawn | None = None

    @property
    def generated(self) -> set[str]:
        """Ids of all groups that were begun for this step, and that no other step trains."""
        return {group.group_id for group in self.groups} | self.dropped.keys() | set(self.given_up)

    def to_json(self) -> dict[str, Any]:
        groups, drawn = [group.to_json() for group in self.groups], self.drawn
        return vars(self) | {"groups": groups, "drawn": None if drawn is None else vars(drawn)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Batch:
        groups, drawn = [GroupMeta.from_json(group) for group in value["groups"]], value.get("drawn")
        return cls(**{**value, "groups": groups, "drawn": None if drawn is None else Drawn(**drawn)})


@dataclass(frozen=True)
class SharedPrefixes:
    """Computed tokens of a micro-batch with shared prefixes, where a common beginning of rows is computed once: D of its P tokens.

    A row shares prefixes with the one before it, and through this with others, so that rows are the paths of trees.

    Attributes:
        lengths: of each row, the tokens behind those that it begins with as the row before it does; at least 1. They sum to D.
        cu_lengths: [B + 1] int32, cumulative lengths from 0.
        kept: [D] int64, ascending: the tokens that are computed.
        places: [P] int64, which of those a token is, or is the same as.
    """

    lengths: list[int]
    cu_lengths: torch.Tensor
    kept: torch.Tensor
    places: torch.Tensor

    def to(self, device: torch.device) -> SharedPrefixes:
        """Return it with all tensors on `device`; see `to_device`."""
        tensors = {name: value for name, value in vars(self).items() if name != "lengths"}
        return replace(self, **{name: to_device(value, device) for name, value in tensors.items()})


@dataclass
class MicroBatch:
    """Rows laid end to end for one forward and backward. Labels are shifted once, in packing.

    Entry p of every [P] tensor but `token_ids` and `positions` is about the token that position p predicts, the next one.

    Attributes:
        token_ids: [P] int64.
        positions: [P] int64, restarting at 0 with each row.
        lengths: tokens of each packed row; they sum to P.
        cu_seqlens: [B + 1] int32, cumulative lengths from 0; made of them where it is not given.
        labels: [P] int64, the next token of the same row; 0 at a row's last position.
        loss_mask: [P] float32, 0 at a row's last position.
        weights: [P] float32, the loss mask times the weight of each row (hpcrl/algorithms/reductions.py). The loss of a
            mini-batch is the sum of weight x loss over all its micro-batches, of all ranks.
        nll_weights: [P] float32, the same for the mean over the tokens of rows with positive reward.
        rollout_logprobs, old_logprobs, ref_logprobs, advantages: [P] float32; the last three are None until computed.
        values, returns: [P] float32, a critic's value before the token, and its target; None without one.
        selected: [P] float32, 1 where the policy loss counts the token, 0 elsewhere; None: it counts all trained ones.
        margins: [P] float32, the margin of a pair at the end of its chosen answer; None where no scores are trained.
        desirable: [P] float32, 1 at all tokens of a desirable answer, 0 at those of an undesirable one; None where answers have no label.
        shifts: [P] float32, what log-ratios of the row's answer are compared with; None where answers have no label.
        current: [P] float32, 1 where the token is trained and was chosen by the version that the step begins with; None: nowhere.
        staleness: [P] float32, age in versions of the version that chose the token; None where old log-probabilities are not estimated by it.
        observation_weights: [P] float32, weights of the tokens of the environment in the mean over those of a mini-batch, 0 elsewhere; None where none is learned.
        sampling_mask: [P, K] int32, the tokens that the token was sampled among, padded with -1; all of a row -1: the whole vocabulary.
            None: all rows are such.
        teacher_ids, teacher_top: [P, K] int32 and float32, tokens at which policy and teacher are compared, and their log-probabilities
            by the teacher; ids of -1 where there is no teacher. None without a teacher whose divergence is over several tokens.
        top_k: number of most probable tokens that a pass without gradient returns at each place, or of `teacher_ids` if there are any.
        head_rows: [R] int64, ascending: the entries that a policy's head computes, all other outputs are 0. By default those of
            trained tokens, and of learned tokens of the environment.
        prefixes: None: each row is computed whole.
        tensors: of each packed row, as of Row.
        share: of each row in the mini-batch, which may be spread over ranks; 0: there is none to be trained.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    lengths: list[int]
    labels: torch.Tensor
    loss_mask: torch.Tensor
    weights: torch.Tensor
    nll_weights: torch.Tensor
    rollout_logprobs: torch.Tensor
    old_logprobs: torch.Tensor | None = None
    ref_logprobs: torch.Tensor | None = None
    advantages: torch.Tensor | None = None
    values: torch.Tensor | None = None
    returns: torch.Tensor | None = None
    selected: torch.Tensor | None = None
    margins: torch.Tensor | None = None
    desirable: torch.Tensor | None = None
    shifts: torch.Tensor | None = None
    current: torch.Tensor | None = None
    staleness: torch.Tensor | None = None
    observation_weights: torch.Tensor | None = None
    sampling_mask: torch.Tensor | None = None
    teacher_ids: torch.Tensor | None = None
    teacher_top: torch.Tensor | None = None
    top_k: int = 0
    cu_seqlens: torch.Tensor = None  # pyright: ignore[reportAssignmentType]
    head_rows: torch.Tensor = None  # pyright: ignore[reportAssignmentType]
    prefixes: SharedPrefixes | None = None
    tensors: list[dict[str, torch.Tensor]] = field(default_factory=list)
    share: float = 0.0

    def __post_init__(self) -> None:
        if self.cu_seqlens is None:
            import torch

            self.cu_seqlens = torch.tensor([0, *accumulate(self.lengths)], dtype=torch.int32)
        if self.head_rows is None:
            learned_P = (
                self.loss_mask if self.observation_weights is None else self.loss_mask + self.observation_weights
            )
            self.head_rows = learned_P.nonzero()[:, 0]
        self.tensors = self.tensors or [{} for _ in self.lengths]

    def to(self, device: torch.device) -> MicroBatch:
        """Return it with all tensors on `device`; see `to_device`."""
        others = ("lengths", "top_k", "prefixes", "tensors", "share")
        tensors = {name: value for name, value in vars(self).items() if name not in others and value is not None}
        own = [{name: to_device(value, device) for name, value in row.items()} for row in self.tensors]
        moved = {name: to_device(value, device) for name, value in tensors.items()}
        return replace(self, prefixes=self.prefixes.to(device) if self.prefixes else None, tensors=own, **moved)


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return `tensor` on `device`. The host does not wait for a copy to a GPU, so that it can prepare what comes next meanwhile."""
    if device.type != "cuda" or tensor.is_cuda:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
