"""`hpcrl engine`: start an inference server outside of runs, for generator.inference_engine.remote_urls."""

from __future__ import annotations

import argparse
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

from hpcrl.cli._common import split

if TYPE_CHECKING:
    from hpcrl.config import Config

_EVERY_ADDRESS = ("", "0.0.0.0", "::")


class ServeBackend(Protocol):
    """The module `serve` of an engine that serves others than the run that starts it."""

    def serve(
        self, config: Config, key_file: Path, host: str, port: int, tls: tuple[Path, Path] | None, log: Path
    ) -> None:
        """Serve the model of a configuration until KeyboardInterrupt, and print the settings with which runs use the server.

        Args:
            key_file: has the key that each request shows.
            tls: certificate and private key; None: without TLS.
            log: file of what the engine says.

        Raises:
            ConfigError: the key would cross a public network in the clear.
            EngineError: the engine does not start, or has ended.
        """
        ...


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
    parser.add_argument(
        "--log", type=Path, default=Path("engine.log"), help="file of what the engine says (engine.log)"
    )
    parser.set_defaults(action=_serve)


def _serve(arguments: argparse.Namespace) -> int:
    import signal

    from hpcrl.errors import ConfigError
    from hpcrl.launch.agent.environment import raise_open_files
    from hpcrl.runtime.token import make_secret, read_secret

    if (arguments.certificate is None) != (arguments.private_key is None):
        raise ConfigError("TLS needs both --certificate and --private-key")
    try:
        make_secret(arguments.key_file)
    except OSError as error:
        raise ConfigError(f"--key-file: {arguments.key_file} cannot be made: {error.strerror}") from error
    read_secret(arguments.key_file, "--key-file")
    config, backend = _chosen(arguments)
    raise_open_files()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    tls = (arguments.certificate, arguments.private_key) if arguments.certificate else None
    with suppress(KeyboardInterrupt):
        backend.serve(config, arguments.key_file.absolute(), arguments.host, arguments.port, tls, arguments.log)
    return 0


def _chosen(arguments: argparse.Namespace) -> tuple[Config, ServeBackend]:
    from hpcrl.config import Config
    from hpcrl.config.backend import backend_of, backends
    from hpcrl.config.errors import raise_together
    from hpcrl.errors import ConfigError
    from hpcrl.launch.submit.engine import check_engine

    files, overrides = split(arguments.settings)
    if not files:
        raise ConfigError("no configuration file given; expected hpcrl engine FILE.toml … --key-file FILE")
    config = Config.from_toml([Path(file) for file in files], overrides).largest()
    backend = backend_of(config.generator.inference_engine)
    if "serve" not in backend.brings:
        serving = [f'"{name}"' for name, each in backends().items() if "serve" in each.brings]
        what = "the only engine that serves others" if len(serving) == 1 else "an engine that serves others"
        raise ConfigError(
            f'generator.inference_engine.backend: expected {" or ".join(serving)}, {what}, found "{backend.name}"'
        )
    raise_together(list(check_engine(config)), lambda _: None)
    if arguments.host in _EVERY_ADDRESS:
        raise ConfigError(
            f"--host: expected one address of this machine, at which runs reach it, found {arguments.host}"
        )
    return config, cast(ServeBackend, backend.layer("serve"))
