"""What is said of a GPU's memory behind an error: of the devices of this process, where the driver says something."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcrl.runtime.gpu_memory import describe_memory


@pytest.fixture
def nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shown = tmp_path / "nvidia-smi"
    lines = ["0, GPU-1a, 1024 MiB, 81559 MiB", "1, GPU-2b, 512 MiB, 81559 MiB", "2, GPU-3c, [N/A], [N/A]"]
    shown.write_text("#!/bin/sh\n" + "".join(f'echo "{line}"\n' for line in lines))
    shown.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    return shown


@pytest.mark.parametrize(
    ("devices", "told"),
    [
        ("1", ", GPU 1: 512.0 MiB of 79.6 GiB free"),
        ("GPU-1a,1", ", GPU 0: 1.0 GiB of 79.6 GiB free, GPU 1: 512.0 MiB of 79.6 GiB free"),
        ("2", ""),
        ("", ""),
    ],
)
def test_free_memory_of_these_devices(
    nvidia_smi: Path, monkeypatch: pytest.MonkeyPatch, devices: str, told: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", devices)
    assert describe_memory() == told
    nvidia_smi.write_text("#!/bin/sh\nexit 1\n")
    assert describe_memory() == ""
