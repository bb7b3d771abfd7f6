"""Views of a directory for tests: on this machine, or on the nodes of a test cluster."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from tests.filesystem.view import Behaviour
from tests.paths import ROOT

SERVE = [sys.executable, "-B", "-S", "-m", "tests.filesystem.serve"]
LEAVING_S = 30.0


@contextmanager
def view(source: Path, place: Path, behaviour: Behaviour, entering: list[str] | None = None) -> Iterator[Counter[str]]:
    """Let `place` show `source` as `behaviour` says; skip the test where this user may not mount it.

    Args:
        entering: a command that enters a node's namespaces.

    Yields:
        How often what happened, filled in at the end: "late" is how often a name was said not to be there that was, "stale" how often a
        file was gone that this node remembered, the names of `Behaviour.errors` how often they failed.
    """
    argv = [
        *(entering or []),
        "env",
        f"PYTHONPATH={ROOT}",
        *SERVE,
        str(source),
        str(place),
        json.dumps(asdict(behaviour)),
    ]
    counts = Counter[str]()
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout
        said = server.stdout.readline()
        if said.startswith("refused"):
            pytest.skip(f"no FUSE for this user here: {said}")
        assert said == "mounted\n"
        try:
            yield counts
        finally:
            told, _ = server.communicate(timeout=LEAVING_S)
            counts.update(json.loads(told or "{}"))  # it may have ended with its node


@contextmanager
def views(directory: Path, nodes: Mapping[str, int], behaviour: Behaviour) -> Iterator[list[Counter[str]]]:
    """Let each node see `directory` through a view of its own, with a seed of its own.

    Args:
        nodes: a process of each node, by the node's name.

    Yields:
        For each node what `view` does.
    """
    with ExitStack() as stack:
        counts = list[Counter[str]]()
        for seed, process in enumerate(nodes.values()):
            entering = ["nsenter", f"--target={process}", "--mount", "--pid"]
            own = replace(behaviour, seed=behaviour.seed + seed)
            counts.append(stack.enter_context(view(directory, directory, own, entering)))
        yield counts
