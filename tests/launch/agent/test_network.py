from __future__ import annotations

import socket
import subprocess
import sys
from contextlib import ExitStack

import pytest

from hpcrl.errors import ConfigError
from hpcrl.launch.agent import network
from tests.paths import ROOT

CHOOSE = """
import random
from hpcrl.launch.agent.network import choose_port
random.seed(7)
print(choose_port("127.0.0.1"), choose_port("127.0.0.1"), flush=True)
input()
"""


def test_chosen_port_is_free_and_no_client_port() -> None:
    port = network.choose_port("127.0.0.1")
    assert port < int(network._EPHEMERAL.read_text().split()[0])
    with socket.create_server(("127.0.0.1", port)):
        assert not network.is_free("127.0.0.1", port)


def test_processes_that_draw_alike_choose_different_ports() -> None:
    """Two of three runs on the same nodes had one port: ranks of one would have met the other's."""
    chosen = set[str]()
    with ExitStack() as stack:
        for _ in range(3):
            command = [sys.executable, "-c", CHOOSE]
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT, text=True)
            stack.callback(process.communicate, "")
            assert process.stdout
            chosen.update(process.stdout.readline().split())
    assert len(chosen) == 6


def test_interface_by_name() -> None:
    assert network.node_address("lo") == "127.0.0.1"
    with pytest.raises(ConfigError, match=r"nope0.*interfaces here: .*lo"):
        network.node_address("nope0")
