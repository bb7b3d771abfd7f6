"""An export on the hub: in one commit, right, resumed. The client is huggingface_hub, without Xet, whose servers there is no stand-in for."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from hpcrl.config.sections.upload import UploadConfig
from hpcrl.errors import CommitError
from hpcrl.rundir.commit import COMMIT, MANIFEST
from hpcrl.rundir.layout import Run
from hpcrl.upload.hub import HubStore, repository_name
from hpcrl.upload.store import Away, Committed, Patience, UploadRefused, Vanished
from tests.paths import ROOT
from tests.upload.hub_server import Hub
from tests.upload.material import ODD_NAMES, QUICK, write_export, write_files

NAME = "me/models-sorting"


def store(run: Run, hub: Hub, name: str = "models", patience: Patience = QUICK, **settings: Any) -> HubStore:
    return HubStore(run, UploadConfig(hf=True, hf_repo_name=name, hf_endpoint=hub.url, **settings), patience)


def send(one: HubStore, path: Path) -> tuple[int, int]:
    told = list[int]()
    return one.send(Committed.read(path), told.append), sum(told)


def files(path: Path) -> dict[str, bytes]:
    return {name: (path / name).read_bytes() for name in Committed.read(path).files}


def test_an_export_is_one_commit_and_is_not_sent_again(run: Run, hub: Hub) -> None:
    export = write_export(run, 4)
    total = sum(Committed.read(export).files.values())
    one = store(run, hub)
    assert send(one, export) == (total, total)
    assert one.place == f"{hub.url}/{NAME}"
    assert hub.repositories[NAME].items() >= files(export).items()
    assert MANIFEST in hub.repositories[NAME]
    assert COMMIT not in hub.repositories[NAME]
    assert send(one, export) == (0, total)
    assert hub.commits == [(NAME, "sorting: exports/s000004")]
    assert hub.visibility == {NAME: "private"}
    other = store(run, hub, "lab/open", hf_private=False)
    send(other, export)
    assert hub.visibility["lab/open-sorting"] == "public"


def test_a_later_export_takes_the_place_of_an_earlier_one(run: Run, hub: Hub) -> None:
    send(store(run, hub), write_export(run, 4))
    hub.repositories[NAME]["model-00002-of-00002.safetensors"] = b"of an export with more files"
    hub.repositories[NAME]["README.md"] = b"somebody's own"
    export = write_export(run, 8)
    send(store(run, hub), export)
    assert hub.repositories[NAME] == files(export) | {
        ".gitattributes": b"*.safetensors",
        "README.md": b"somebody's own",
    }


def test_odd_names_of_files_arrive_as_they_are_and_folders_of_git_are_refused(run: Run, hub: Hub) -> None:
    export = write_files(run, 4, *ODD_NAMES, "a\nb")
    send(store(run, hub), export)
    assert hub.repositories[NAME] == files(export) | {".gitattributes": b"*.safetensors"}
    with pytest.raises(UploadRefused, match=r"the hub takes no file 'sub/.git/config'"):
        send(store(run, hub), write_files(run, 8, "sub/.git/config"))


def test_after_a_kill_large_files_are_not_sent_again_and_nothing_was_there(run: Run, hub: Hub) -> None:
    export = write_export(run, 4)
    code = f"""
from pathlib import Path
from hpcrl.config.sections.trainer import UploadConfig
from hpcrl.rundir.layout import Run
from hpcrl.upload.hub import HubStore
from hpcrl.upload.store import Committed, Patience
upload = UploadConfig(hf=True, hf_repo_name="models", hf_endpoint={hub.url!r})
HubStore(Run(Path({str(run.path)!r})), upload, Patience()).send(Committed.read(Path({str(export)!r})), lambda _: None)
"""
    environment = os.environ | {"HPCRL_FAULT": "upload.large:kill", "PYTHONPATH": str(ROOT), "HF_HUB_DISABLE_XET": "1"}
    environment["HF_HUB_OFFLINE"] = "1"  # which a site may have set
    done = subprocess.run([sys.executable, "-c", code], env=environment, check=False, timeout=60)
    assert done.returncode == -9
    assert hub.puts == 1
    assert hub.repositories[NAME].keys() == {".gitattributes"}
    send(store(run, hub), export)
    assert hub.puts == 1
    assert hub.repositories[NAME].items() >= files(export).items()


def test_a_hub_that_fails_three_times_is_asked_again(run: Run, hub: Hub) -> None:
    export = write_export(run, 4)
    hub.failing = {"commit": 3}
    assert send(store(run, hub, patience=Patience(0.001, total_s=10)), export)[0] > 0
    hub.failing = {"commit": 10**6}
    with pytest.raises(Away, match=f"{NAME}: 503"):
        send(store(run, hub), write_export(run, 8))
    assert len(hub.commits) == 1


def test_what_arrives_damaged_is_found(run: Run, hub: Hub) -> None:
    hub.damages, export = True, write_export(run, 4)
    for _ in range(2):  # the stand-in keeps the damaged one, which the hub does not take
        with pytest.raises(Away, match=r"model-00001-of-00001.safetensors arrived damaged"):
            send(store(run, hub), export)


def test_what_is_damaged_here_or_gone_is_not_sent(run: Run, hub: Hub) -> None:
    export = write_export(run, 4)
    (export / "config.json").write_text('{"model_type": "qwen3"}')
    with pytest.raises(CommitError, match=r"checksum differs from the manifest"):
        send(store(run, hub), export)
    other = Committed.read(write_export(run, 8))
    shutil.rmtree(other.path)
    with pytest.raises((Vanished, FileNotFoundError)):
        store(run, hub).send(other, lambda _: None)
    assert hub.commits == []


def test_errors_name_the_repository_and_the_remedy(
    run: Run, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export, wrong = write_export(run, 4), tmp_path / "token"
    wrong.write_text("hf_very_secret\n")
    with pytest.raises(
        UploadRefused, match=r"lab/x-sorting: 401: .*one that the hub does not know.*#secrets"
    ) as refused:
        send(store(run, hub, "lab/x", hf_token_file=str(wrong)), export)
    assert "hf_very_secret" not in str(refused.value)
    with pytest.raises(UploadRefused, match=r"hf_token_file: .*none: No such file"):
        store(run, hub, hf_token_file=str(tmp_path / "none"))
    for other in (b"-----BEGIN KEY-----\nsecret\n", b"\xff\xfe", b""):  # which a stranger's configuration may name
        wrong.write_bytes(other)
        with pytest.raises(UploadRefused, match=r"hf_token_file: .*(one line with a token|it is no ASCII text)"):
            store(run, hub, hf_token_file=str(wrong))
    hub.forbidden = True
    with pytest.raises(UploadRefused, match=r"lab/x-sorting: 403: .*needs write access"):
        send(store(run, hub, "lab/x"), export)
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    with pytest.raises(UploadRefused, match=r"no token; where the token comes from: docs/uploads.md#secrets"):
        store(run, hub)


def test_names_of_repositories_are_such_as_the_hub_takes() -> None:
    assert repository_name("me/model", "a--b..c") == "me/model-a-b.c"
    assert repository_name("model", "run.0-lr-1") == "model-run.0-lr-1"
    long = repository_name("me/model", "r" * 128), repository_name("me/model", "r" * 127)
    assert long[0] != long[1]
    assert {len(name.partition("/")[2]) for name in long} == {96}
