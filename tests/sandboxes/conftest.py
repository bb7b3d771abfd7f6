"""An image for the tests of sandboxes, and a place that an ordinary user may write to."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hpcrl.sandboxes.sandbox import Sandbox
from tests.sandboxes.material import make_rootfs, ordinary


@pytest.fixture(scope="module")
def user() -> Iterator[Path]:
    """Be an ordinary user meanwhile; yields a directory of that user's."""
    with pytest.MonkeyPatch.context() as patch, ordinary(patch):
        path = Path(tempfile.mkdtemp(prefix="hpcrl-test-sandbox-", dir="/tmp"))
        yield path
        shutil.rmtree(path)


@pytest.fixture(scope="module")
def image(user: Path) -> Path:
    return make_rootfs(user / "image")


@pytest.fixture
def scratch(user: Path) -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(dir=user))
    yield path
    assert not list(path.iterdir()), "something of a sandbox was left"
    path.rmdir()


@pytest.fixture
def start(image: Path, scratch: Path) -> Iterator[Callable[..., Sandbox]]:
    """Starts sandboxes, which end with the test."""
    started = list[Sandbox]()

    def one(*arguments: Any, **named: Any) -> Sandbox:
        started.append(Sandbox(image, scratch, *arguments, **named))
        return started[-1]

    yield one
    for each in started:
        each.end()
