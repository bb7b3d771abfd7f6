"""How an agent looks after the batch script of its job."""

from __future__ import annotations

import signal
import subprocess
import threading
from collections.abc import Iterator

import pytest

from hpcrl.launch.agent import start
from hpcrl.launch.agent.start import BatchScript
from hpcrl.launch.requeue.requeue import BATCH_SHELL


@pytest.fixture
def shell(monkeypatch: pytest.MonkeyPatch) -> Iterator[subprocess.Popen[bytes]]:
    """What stands for the process of the batch script."""
    handler = signal.getsignal(signal.SIGTERM)
    with subprocess.Popen(["sleep", "600"]) as process:
        monkeypatch.setenv(BATCH_SHELL, str(process.pid))
        yield process
        process.kill()
    signal.signal(signal.SIGTERM, handler)


def test_a_script_that_is_there_is_not_waited_for(shell: subprocess.Popen[bytes]) -> None:
    signals = list[int]()
    BatchScript(signals).require_its_end()
    assert signals == []
    assert shell.poll() is None


def test_slurm_has_to_know_that_the_script_was_killed(shell: subprocess.Popen[bytes]) -> None:
    signals = list[int]()
    script = BatchScript(signals)
    shell.kill()
    shell.wait()
    told = threading.Timer(0.5, lambda: signals.append(signal.SIGTERM))
    told.start()
    script.require_its_end()
    assert signals == [signal.SIGTERM]


def test_it_is_not_waited_for_without_end(
    shell: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(start, "_KNOWN_S", 0.0)
    script = BatchScript([])
    shell.kill()
    shell.wait()
    script.require_its_end()
    assert "Slurm sent no SIGTERM" in capsys.readouterr().out


def test_a_script_that_was_never_seen_is_not_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container whose processes have numbers of their own, or where an older version wrote the script."""
    handler = signal.getsignal(signal.SIGTERM)
    monkeypatch.delenv(BATCH_SHELL, raising=False)
    BatchScript([]).require_its_end()
    signal.signal(signal.SIGTERM, handler)
