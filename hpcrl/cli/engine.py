"""`hpcrl engine`: a vLLM server outside of runs, for those whose generator.inference_engine.remote_urls name it."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from hpcrl.cli._common import split
from hpcrl.text import printable

if TYPE_CHECKING:
    from hpcrl.rollout.engines.vllm.server import ServerOptions

_LOOK_S = 0.5
_EVERY_ADDRESS = ("", "0.0.0.0", "::")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "It serves trainer.policy.model.path with the settings of generator.inference_engine, on the GPUs that CUDA_VISIBLE_DEVICES names "
        "(slurm.gpus_per_node=0: on CPUs), to one run at a time, until it is interrupted. Runs need the same files, the key, and a filesystem on which the server can read theirs. "
        "example: hpcrl engine experiment.toml --key-file ~/engine.key --host 10.0.0.7 --port 8000"
    )
    parser.add_argument("settings", nargs="+", metavar="FILE|KEY=VALUE", help="configuration files, then overrides")
    parser.add_argument(
        "--key-file", type=Path, required=True, help="has the key that clients show; is made where it is not there"
    )
    parser.add_argument("--host", default="127.0.0.1", help="address at which it listens (127.0.0.1)")
    parser.add_argument("--port", type=int, default=8000, help="(8000)")
    parser.add_argument("--certificate", type=Path, metavar="FILE", help="for TLS: certificate in PEM, with its chain")
    parser.add_argument("--private-key", type=Path, metavar="FILE", help="for TLS: key of the certificate")
    parser.add_argument("--log", type=Path, default=Path("engine.log"), help="file of what vLLM says (engine.log)")
    parser.set_defaults(action=_serve)


def _serve(arguments: argparse.Namespace) -> int:
    import signal
    import time

    from hpcrl.errors import ConfigError
    from hpcrl.launch.agent.environment import raise_open_files
    from hpcrl.rollout.engines.vllm.server import Server
    from hpcrl.runtime.scratch import Scratch
    from hpcrl.runtime.token import make_secret, read_secret

    if (arguments.certificate is None) != (arguments.private_key is None):
        raise ConfigError("TLS needs both --certificate and --private-key")
    try:
        make_secret(arguments.key_file)
    except OSError as error:
        raise ConfigError(f"--key-file: {arguments.key_file} cannot be made: {error.strerror}") from error
    read_secret(arguments.key_file, "--key-file")
    options = _options(arguments)
    raise_open_files()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    scratch, server = Scratch("engine"), None
    try:
        server = Server(options, scratch.path, arguments.log)
        server.wait_ready(options.engine.start_timeout_seconds)
        url = server.address.url
        print(printable(f"serving {options.model} at {url}; in the configuration of runs:"))
        print(f'generator.inference_engine.remote_urls = ["{url}"]')
        print(f'generator.inference_engine.remote_key_file = "{arguments.key_file.absolute()}"', flush=True)
        while server.alive():
            time.sleep(_LOOK_S)
        raise server.failure("ended")
    except KeyboardInterrupt:
        return 0
    finally:
        if server:
            server.stop()
        scratch.remove()


def _options(arguments: argparse.Namespace) -> ServerOptions:
    from hpcrl.config import Config
    from hpcrl.config.errors import raise_together
    from hpcrl.errors import ConfigError
    from hpcrl.launch.submit.engine import check_engine
    from hpcrl.rollout.engines.vllm.address import Listen
    from hpcrl.rollout.engines.vllm.remote import check_network
    from hpcrl.rollout.engines.vllm.server import served_options

    files, overrides = split(arguments.settings)
    if not files:
        raise ConfigError("no configuration file given; expected hpcrl engine FILE.toml … --key-file FILE")
    config = Config.from_toml([Path(file) for file in files], overrides)
    if config.generator.inference_engine.backend != "vllm":
        raise ConfigError(
            'generator.inference_engine.backend: expected "vllm", the only engine that serves others, found '
            f'"{config.generator.inference_engine.backend}"'
        )
    raise_together(list(check_engine(config)), lambda _: None)
    if arguments.host in _EVERY_ADDRESS:
        raise ConfigError(
            f"--host: expected one address of this machine, at which runs reach it, found {arguments.host}"
        )
    listen = Listen(arguments.host, arguments.port, arguments.certificate, arguments.private_key)
    check_network(listen.address)
    return served_options(config, arguments.key_file.absolute(), listen)
