"""Certificates: digests of all that a run was given, trained and left, by which runs are compared bit for bit.

certificate.json, written by `hpcrl certify`:

    {"run": "first", "deterministic": true, "ranks": 2,
     "configuration": {"trainer.seed": 42, …},    settings that decide what is computed
     "earlier": {"config.1.toml": "0f34…"},       configurations before a resume changed them
     "code": {"commit": "4be1…", "files": "86ab…"},
     "inputs": {"data.train_data train.parquet": "71c2…", …},   datasets, templates, models, by the setting that names them
     "software": {"torch": "2.13.0", "image": null},
     "steps": [["51d0…", "93aa…"], …],            of each step what it trains, and the chain of all up to it
     "weights": {"v000006": "8c11…", …}, "checkpoints": {"s000006": "d0aa…", …},   those that were kept
     "blake2b": "413b…"}                          of the text before it
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePath
from typing import Any

from hpcrl.config import Config
from hpcrl.config.resume_changes import computing_settings
from hpcrl.data.batch_file import batch_content, batch_steps, group_contents, read_batch
from hpcrl.data.weight_files import PublishedWeights
from hpcrl.errors import DamagedError, RunError
from hpcrl.rundir.checkpoint_index import INDEX
from hpcrl.rundir.checkpoints import line_of
from hpcrl.rundir.commit import committed, digest_of, read_bytes, verify, write_text
from hpcrl.rundir.layout import COMMIT, Run, version_of
from hpcrl.rundir.records import parse_record, read_object, with_checksum
from hpcrl.types import Batch

Certificate = dict[str, Any]
GIVEN = ("configuration", "earlier", "code", "inputs", "software", "ranks", "deterministic")
_KEPT = ("weights", "checkpoints")
_MEMBERS = {*GIVEN, *_KEPT, "run", "steps"}


def certificate_of(run: Run) -> Certificate:
    """Return the certificate of a run as it is now.

    Raises:
        DataError, RunError, CommitError: a file that it is made of is missing or damaged.
    """
    config, facts = Config.from_toml([run.config]), dict[str, dict[str, Any]]()
    for path in line_of(run):
        facts[path.name] = verify(path, checksums=False)
    newest = next(reversed(facts.values()), {})
    return {
        "run": run.name,
        "deterministic": config.trainer.deterministic,
        "ranks": newest.get("world_size"),
        "configuration": json.loads(json.dumps(computing_settings(config), default=str)),
        "earlier": {path.name: digest_of(path.read_bytes()) for path in sorted(run.path.glob("config.*.toml"))},
        "code": _code(run),
        "inputs": _inputs(run),
        "software": {"torch": newest.get("torch"), "image": config.slurm.container.image},
        "steps": list(_steps(run)),
        "weights": {
            path.name: PublishedWeights.read(path).digest
            for path in map(run.weights_of, committed(run.weights, version_of))
        },
        "checkpoints": {name: _state(manifest) for name, manifest in facts.items()},
    }


def _code(run: Run) -> dict[str, str | None]:
    noted = read_object(run.checksums, "`hpcrl resume` writes it again") or {}
    files = {name: digest for name, digest in noted.items() if name.startswith("code/") or isinstance(digest, dict)}
    commit = read_bytes(run.code / COMMIT)
    text = str(sorted((name, digest) for name, digest in files.items() if name != f"code/{COMMIT}"))
    return {"commit": commit.decode(errors="replace").strip() if commit else None, "files": digest_of(text.encode())}


def _inputs(run: Run) -> dict[str, str]:
    """Return the checksums of inputs by setting and file name: the same files may lie elsewhere."""
    noted, numbers = read_object(run.inputs, "`hpcrl resume` writes it again") or {}, Counter[str]()
    found = dict[str, str]()
    for name, each in sorted(noted.get("files", {}).items()):
        key = f"{each['setting']} {PurePath(name).name}"
        numbers[key] += 1
        found[key if numbers[key] == 1 else f"{key} {numbers[key]}"] = each["digest"]
    return found


def _steps(run: Run) -> Iterator[tuple[str, str]]:
    chain = ""
    for number, step in enumerate(batch_steps(run), 1):
        file = read_batch(run.batch(step))
        if file is None or step != number:
            raise DamagedError(f"{run.batch(number)} is missing")
        content = batch_content(file.batch)
        chain = digest_of(f"{chain} {content}".encode())
        yield content, chain


def _state(manifest: Mapping[str, Any]) -> str:
    """Return the digest of the state in a checkpoint, from those of its files."""
    files = {name: entry["blake2b"] for name, entry in manifest["files"].items() if PurePath(name).name != INDEX}
    return digest_of(str(sorted(files.items())).encode())


def write_certificate(path: Path, certificate: Certificate) -> None:
    write_text(path, with_checksum(certificate)[0] + "\n")


def read_certificate(path: Path) -> Certificate:
    """Return the certificate in a file.

    Raises:
        DamagedError: it is none, or was changed since it was written.
        RunError: it is not there.
    """
    content = read_bytes(path, most=None)
    if content is None:
        raise RunError(f"{path} is not there; `hpcrl certify RUN` writes it")
    try:
        found, _ = parse_record(content, required=True)
    except ValueError as error:
        raise DamagedError(f"{path} is no certificate: {error}") from error
    if not isinstance(found, dict) or not _fits(found):
        raise DamagedError(f"{path} is no certificate: expected an object with {', '.join(sorted(_MEMBERS))}")
    return found


def _fits(found: dict[str, Any]) -> bool:
    tables = all(isinstance(found.get(name), dict) for name in (*_KEPT, "configuration", "code", "inputs", "software"))
    steps = found.get("steps")
    return (
        tables
        and found.keys() == _MEMBERS
        and isinstance(steps, list)
        and all(
            isinstance(each, list) and len(each) == 2 and all(isinstance(one, str) for one in each) for each in steps
        )
    )


def given_differences(one: Certificate, other: Certificate) -> list[str]:
    """Return in what two runs were given something else, a line for each."""
    found = list[str]()
    for name in GIVEN:
        left, right = one[name], other[name]
        if not (isinstance(left, dict) and isinstance(right, dict)):
            found += [f"{name}: {left} and {right}"] if left != right else []
            continue
        for key in left | right:
            if left.get(key) != right.get(key):
                found.append(f"{name}: {key}: {left.get(key)} and {right.get(key)}")
    return found


def first_difference(one: Certificate, other: Certificate) -> tuple[int, str] | None:
    """Return the first step whose bits differ, and in what; None: there is none among what both runs have."""
    found = list[tuple[int, int, str]]()
    for step, (left, right) in enumerate(zip(one["steps"], other["steps"], strict=False), 1):
        if left[0] != right[0]:
            found.append((step, 0, f"it trains something else ({left[0]} and {right[0]})"))
            break
    for order, kind in enumerate(_KEPT, 1):
        for name in sorted(one[kind].keys() & other[kind].keys()):
            if one[kind][name] != other[kind][name]:
                after, updates, _ = name[1:].partition("u")
                step = int(after) + bool(updates)  # s000041u2 has a part of step 42
                found.append((step, order, f"{kind} {name} differ ({one[kind][name]} and {other[kind][name]})"))
                break
    # weights that a step leaves differ after what it trains
    return min(((step, what) for step, _, what in sorted(found)), default=None, key=lambda each: each[0])


def compared(one: Certificate, other: Certificate) -> str:
    """Return how much two certificates have in common, in words."""
    steps = min(len(one["steps"]), len(other["steps"]))
    kept = [name for kind in _KEPT for name in sorted(one[kind].keys() & other[kind].keys())]
    return f"batches of {steps} steps, and {', '.join(kept) or 'no weights that both have'}"


def differing_groups(one: Batch, other: Batch) -> list[str]:
    """Return the groups of a step that two runs train and that differ, or that only one of them trains."""
    left, right = group_contents(one), group_contents(other)
    return [name.rpartition(".")[0] for name in left | right if left.get(name) != right.get(name)]
