"""Finds the public address to which a plain http URL would send in the clear."""

from __future__ import annotations

import ipaddress
import socket
from urllib.parse import urlsplit


def public_address(url: str) -> str | None:
    """Return the address of a public network at which what is sent to `url` would be read in the clear; None where there is none, or it is https.

    Args:
        url: http or https.

    Raises:
        OSError: the name of its host cannot be resolved.
    """
    parts = urlsplit(url)
    if parts.scheme == "https":
        return None
    for *_, place in socket.getaddrinfo(parts.hostname, parts.port or 80, type=socket.SOCK_STREAM):
        found = ipaddress.ip_address(str(place[0]).partition("%")[0])
        if not found.is_private:
            return str(found)
    return None
