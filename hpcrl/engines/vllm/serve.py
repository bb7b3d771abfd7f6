"""A vLLM server outside of runs (`hpcrl engine`)."""

from __future__ import annotations

import time
from pathlib import Path

from hpcrl.config import Config
from hpcrl.engines.vllm.address import Listen
from hpcrl.engines.vllm.remote import check_network
from hpcrl.engines.vllm.server import Server, served_options
from hpcrl.runtime.scratch import Scratch
from hpcrl.text import printable

_LOOK_S = 0.5


def serve(config: Config, key_file: Path, host: str, port: int, tls: tuple[Path, Path] | None, log: Path) -> None:
    listen = Listen(host, port, *(tls or ()))
    check_network(listen.address)
    options = served_options(config, key_file, listen)
    scratch, server = Scratch("engine"), None
    try:
        server = Server(options, scratch.path, log)
        server.wait_ready(options.engine.start_timeout_seconds)
        url = server.address.url
        print(printable(f"serving {options.model} at {url}; in the configuration of runs:"))
        print(f'generator.inference_engine.remote_urls = ["{url}"]')
        print(f'generator.inference_engine.remote_key_file = "{key_file}"', flush=True)
        while server.alive():
            time.sleep(_LOOK_S)
        raise server.failure("ended")
    finally:
        if server:
            server.stop()
        scratch.remove()
