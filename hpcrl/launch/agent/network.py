"""Chooses addresses and ports: services bind one private address, ports are chosen, never fixed."""

from __future__ import annotations

import fcntl
import random
import socket
import struct
from pathlib import Path

from hpcrl.errors import ConfigError, RunError

_SIOCGIFADDR = 0x8915
_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
_FIRST_PORT = 10000
_RESERVED = list[socket.socket]()
"""UDP sockets at the numbers of the chosen TCP ports, until this process ends: other runs on the node do not choose these."""


def interface_address(interface: str) -> str:
    """Return the IPv4 address of a network interface.

    Raises:
        ConfigError: there is no such interface on this node, or it has no address.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        except OSError as error:
            names = ", ".join(name for _, name in socket.if_nameindex())
            raise ConfigError(
                f"slurm.network_interface = {interface!r}: no IPv4 address on {socket.gethostname()} ({error.strerror}); "
                f"interfaces here: {names}"
            ) from error
    return socket.inet_ntoa(answer[20:24])


def node_address(interface: str | None) -> str:
    """Return the address of this node on the network that the run uses.

    Raises:
        RunError: the hostname does not resolve to an address that other nodes can reach.
    """
    if interface:
        return interface_address(interface)
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError as error:
        raise RunError(f"hostname {name} does not resolve ({error}); set slurm.network_interface") from error
    if address.startswith("127."):
        raise RunError(
            f"hostname {name} resolves to {address} only; set slurm.network_interface to the cluster's network"
        )
    return address


def is_free(address: str, port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind((address, port))
        except OSError:
            return False
    return True


def choose_port(address: str) -> int:
    """Return a free TCP port that no other run on this node chooses while this process lives.

    It is below the range from which the kernel hands out ports to clients.

    Raises:
        RunError: none of many ports was free.
    """
    below = int(_EPHEMERAL.read_text().split()[0])
    ports = range(_FIRST_PORT, below) if below > _FIRST_PORT + 1000 else range(1024, below)
    for port in random.sample(ports, 200):
        if is_free(address, port) and _reserve(address, port):
            return port
    raise RunError(f"no free port on {address} between {ports.start} and {ports.stop}")


def _reserve(address: str, port: int) -> bool:
    """Reserve a port for this process; return whether it was not reserved.

    The port itself has to stay free for the program that it is chosen for, which may listen there minutes later.
    """
    held = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    try:
        held.bind((address, port))
    except OSError:
        held.close()
        return False
    _RESERVED.append(held)
    return True
