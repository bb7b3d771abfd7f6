"""Stores and a run for the tests of uploads."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from hpcrl.rundir.layout import Run
from tests.jobs.conftest import place  # noqa: F401
from tests.upload.hub_server import TOKEN, Hub, hub_server
from tests.upload.material import made_run
from tests.upload.s3_server import KEY, SECRET, S3Server, client, s3_server


@pytest.fixture(scope="module")
def store_server() -> Iterator[S3Server]:
    with s3_server() as server:
        yield server


@pytest.fixture
def server(store_server: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> S3Server:
    for name, value in {"ACCESS_KEY_ID": KEY, "SECRET_ACCESS_KEY": SECRET, "DEFAULT_REGION": "us-east-1"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.setenv("HOME", str(tmp_path))
    store_server.failing, store_server.damages = 0, ""
    store_server.requests.clear()
    return store_server


@pytest.fixture
def bucket(server: S3Server) -> str:
    name = f"test-{secrets.token_hex(4)}"
    client(server).create_bucket(Bucket=name)
    server.requests.clear()
    return name


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with hub_server() as server:
        yield server


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return made_run(tmp_path, [])
