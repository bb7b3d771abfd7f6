from __future__ import annotations

import socket

import pytest

from hpcrl.errors import ConfigError
from hpcrl.launch.agent import network


def test_chosen_port_is_free_and_no_client_port() -> None:
    port = network.choose_port("127.0.0.1")
    assert port < int(network._EPHEMERAL.read_text().split()[0])
    with socket.create_server(("127.0.0.1", port)):
        assert not network.is_free("127.0.0.1", port)


def test_interface_by_name() -> None:
    assert network.node_address("lo") == "127.0.0.1"
    with pytest.raises(ConfigError, match=r"nope0.*interfaces here: .*lo"):
        network.node_address("nope0")
