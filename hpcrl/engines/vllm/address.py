"""Addresses of vLLM servers, for clients and for listening."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import httpx


@dataclass(frozen=True)
class Address:
    """Where a server answers.

    Attributes:
        url: without a path; of a unix socket only its scheme counts.
        socket: path of the unix socket; None: TCP.
        ca_file: certificates with which the server's is signed, if it has one; None: those that the machine trusts.
        verified: whether a certificate is looked at; it need not be of a server that this process has started itself.
    """

    url: str = "http://engine"
    socket: Path | None = None
    ca_file: Path | None = None
    verified: bool = True

    def client(self) -> dict[str, Any]:
        """Return arguments of httpx.Client."""
        at_socket = httpx.HTTPTransport(uds=str(self.socket)) if self.socket else None
        return {"transport": at_socket or httpx.HTTPTransport(verify=self._certificates()), "base_url": self.url}

    def connector(self) -> aiohttp.BaseConnector:
        """Return what connects an aiohttp.ClientSession, as many times at once as it has requests."""
        # each request has a connection of its own, which costs next to nothing on a unix socket: the server closes one that was idle
        # for 5 s, and on a busy machine this process may notice only after it has sent the next request there, which is lost then
        if self.socket:
            return aiohttp.UnixConnector(str(self.socket), limit=0, force_close=True)
        return aiohttp.TCPConnector(ssl=self._certificates(), limit=0, force_close=True)

    def _certificates(self) -> ssl.SSLContext | bool:
        return ssl.create_default_context(cafile=self.ca_file) if self.verified else False


@dataclass(frozen=True)
class Listen:
    """Address of a server outside of runs.

    Attributes:
        certificate, private_key: for TLS; None: without.
    """

    host: str
    port: int
    certificate: Path | None = None
    private_key: Path | None = None

    @property
    def address(self) -> Address:
        scheme = "https" if self.certificate else "http"
        return Address(f"{scheme}://{self.host}:{self.port}", verified=False)

    @property
    def options(self) -> dict[str, Any]:
        """vLLM's options."""
        files = {"ssl-certfile": self.certificate, "ssl-keyfile": self.private_key}
        return {"host": self.host, "port": self.port} | {
            name: str(path.absolute()) for name, path in files.items() if path
        }
