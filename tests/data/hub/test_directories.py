"""Where huggingface_hub keeps its files: hpcrl says what the library says, also where a variable is empty."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

LOOK = (
    "import hpcrl; from hpcrl.data.hub.directories import hub_cache, hub_home; import huggingface_hub.constants as hub; "
    "print(hub_home(), hub.HF_HOME, hub_cache(), hub.HF_HUB_CACHE, sep='\\n')"
)
NAMES = ("HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "XDG_CACHE_HOME", "HF_HUB_DOWNLOAD_TIMEOUT")


@pytest.mark.parametrize(
    ("given", "home", "cache"),
    [
        ({}, ".cache/huggingface", ".cache/huggingface/hub"),
        (dict.fromkeys(NAMES, ""), ".cache/huggingface", ".cache/huggingface/hub"),
        ({"XDG_CACHE_HOME": "~/there"}, "there/huggingface", "there/huggingface/hub"),
        ({"HF_HOME": "$HOME/models", "HF_HUB_CACHE": ""}, "models", "models/hub"),
        ({"HF_HUB_CACHE": "~/kept", "HUGGINGFACE_HUB_CACHE": "/other"}, ".cache/huggingface", "kept"),
        ({"HUGGINGFACE_HUB_CACHE": "~/kept"}, ".cache/huggingface", "kept"),
    ],
)
def test_places_are_those_of_the_library(tmp_path: Path, given: dict[str, str], home: str, cache: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name not in NAMES}
    environment |= {"HOME": str(tmp_path), **given}
    done = subprocess.run([sys.executable, "-c", LOOK], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(tmp_path / home)] * 2 + [str(tmp_path / cache)] * 2
