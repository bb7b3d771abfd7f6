"""Writes and reads the file in which a scorer hands its model's scores of a finished group to the trainer.

There is one safetensors file per group and model. Its name has the digest of its content, and the batch that trains the group records it. Two
scorers that score the same group leave two files, of which the batch names one. Entries lie as the trainer packs samples: entry t of a row
belongs to token t + 1, which position t predicts; the last one of a row is 0. A reward model's scores of whole samples are in the header. The
most probable tokens of a teacher are stored for trained tokens alone.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

from hpcrl.errors import DamagedError
from hpcrl.rundir.commit import children, digest_of, naming, read_bytes, write_files
from hpcrl.rundir.layout import Run
from hpcrl.types import GroupMeta

if TYPE_CHECKING:
    import numpy as np

_NAME = re.compile(r"(?P<group>g\d+)-(?P<digest>[0-9a-f]{32})\.safetensors", re.ASCII)
_SAMPLES, _REWARDS = "hpcrl_samples", "hpcrl_rewards"
_LOGPROBS, _PLACES, _IDS, _TOP = "logprobs", "places", "top_ids", "top_logprobs"


@dataclass(frozen=True)
class RowScores:
    """Scores of a row of T tokens by a model.

    Attributes:
        logprobs: [T] float32, of the row's own tokens; 0 where they are not trained, all of them NaN where the model failed.
        top_ids, top_logprobs: [T, K] int32 and float32, the most probable tokens in the token's place; ids of -1, or 0 once they were written and
            read, where it is not trained. None where they were not asked for.
    """

    logprobs: np.ndarray
    top_ids: np.ndarray | None = None
    top_logprobs: np.ndarray | None = None


@dataclass(frozen=True)
class GroupRewards:
    """Scores of each sample of a group by a reward model; None where it failed."""

    scores: list[float | None]


def write_scores(
    run: Run, name: str, found: Iterable[tuple[GroupMeta, Sequence[RowScores] | GroupRewards]]
) -> dict[str, str]:
    """Write the scores of groups, each file as a whole or not at all; return their digests by the ids of the groups.

    Args:
        name: of the model, as of ScorerSet.
        found: groups with the scores of each of their rows, or of each of their samples.
    """
    from safetensors.numpy import save

    digests, contents = dict[str, str](), dict[str, bytes]()
    for group, scores in found:
        if isinstance(scores, GroupRewards):
            columns, facts = dict[str, "np.ndarray"](), {_REWARDS: json.dumps(scores.scores)}
            known, expected = len(scores.scores), len(group.samples)
        else:
            columns, facts = _columns(scores), dict[str, str]()
            known, expected = [len(row.logprobs) for row in scores], group.lengths
        assert known == expected, f"group {group.group_id}: scores of {known}, expected {expected}"
        content = save(columns, {_SAMPLES: group.digest, **facts})
        digests[group.group_id] = digest = digest_of(content)
        contents[_file_name(group.group_id, digest)] = content
    write_files(run.scores_of(name), contents)
    return digests


def _columns(rows: Sequence[RowScores]) -> dict[str, np.ndarray]:
    import numpy as np

    columns = {_LOGPROBS: np.concatenate([row.logprobs for row in rows]).astype(np.float32)}
    ids = [row.top_ids for row in rows if row.top_ids is not None]
    if ids:
        assert len(ids) == len(rows), "some rows have the most probable tokens, others not"
        whole = np.concatenate(ids).astype(np.int32)
        places = np.nonzero(whole[:, 0] >= 0)[0]
        top = np.concatenate([row.top_logprobs for row in rows if row.top_logprobs is not None]).astype(np.float32)
        columns |= {_PLACES: places.astype(np.int32), _IDS: whole[places], _TOP: top[places]}
    return columns


def _file_name(group_id: str, digest: str) -> str:
    return f"{group_id}-{digest}.safetensors"


def read_scores(run: Run, name: str, group: GroupMeta) -> list[RowScores]:
    """Return the scores of a group that a batch names, of each of its rows. Raises DamagedError where the file is missing, damaged or about other samples."""
    import numpy as np
    from safetensors.numpy import load

    columns = load(_content(run, name, group))
    parts = [slice(start, end) for start, end in pairwise([0, *accumulate(group.lengths)])]
    logprobs = columns[_LOGPROBS]
    if _PLACES not in columns:
        return [RowScores(logprobs[part]) for part in parts]
    whole = {}
    for one in (_IDS, _TOP):
        whole[one] = np.zeros((len(logprobs), columns[one].shape[1]), columns[one].dtype)
        whole[one][columns[_PLACES]] = columns[one]
    return [RowScores(logprobs[part], whole[_IDS][part], whole[_TOP][part]) for part in parts]


def read_rewards(run: Run, name: str, group: GroupMeta) -> list[float | None]:
    """Return a reward model's score of each sample of a group, without numpy; args and errors as of `read_scores`."""
    return json.loads(_facts(_content(run, name, group))[_REWARDS])


def check_scores(run: Run, group: GroupMeta) -> None:
    """Compare all scores of a group that a batch names with what it knows of them; errors as of `read_scores`."""
    for name in group.scores:
        _content(run, name, group)


def found_scores(run: Run, name: str, groups: Mapping[str, GroupMeta]) -> dict[str, str]:
    """Return the digests of scores that are there of finished groups, by the ids of these; what is damaged or about other samples is removed.

    Args:
        groups: by their ids.
    """
    found = dict[str, str]()
    for entry in children(run.scores_of(name)):
        match = _NAME.fullmatch(entry)
        if match is None or match["group"] not in groups:
            continue
        group = groups[match["group"]]
        try:
            _content(run, name, group, match["digest"])
        except DamagedError as error:
            print(error, flush=True)
            (run.scores_of(name) / entry).unlink(missing_ok=True)
        else:
            found[group.group_id] = match["digest"]
    return found


def remove_scores(run: Run, unwanted: Callable[[str], bool]) -> None:
    """Remove all scores of the groups for which `unwanted` returns True, given the id of each."""
    for name in children(run.scores):
        for entry in children(run.scores_of(name)):
            match = _NAME.fullmatch(entry)
            if match and unwanted(match["group"]):
                (run.scores_of(name) / entry).unlink(missing_ok=True)


def _content(run: Run, name: str, group: GroupMeta, digest: str | None = None) -> bytes:
    digest = group.scores[name] if digest is None else digest
    path = run.scores_of(name) / _file_name(group.group_id, digest)
    with naming(path):
        content = read_bytes(path, most=None)
    if content is None:
        raise DamagedError(f"score file {path} is missing: it was removed, or this node does not see the run")
    if digest_of(content) != digest:
        raise DamagedError(f"score file {path} is damaged; remove it, and the next attempt scores the group again")
    if _facts(content)[_SAMPLES] != group.digest:
        raise DamagedError(f"score file {path} is about other samples of group {group.group_id} than the batch has")
    return content


def _facts(content: bytes) -> dict[str, str]:
    """Return the facts of a file's header: the digest of the scored samples, and the scores of a reward model."""
    size = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + size])["__metadata__"]
