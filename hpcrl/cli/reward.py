"""`hpcrl reward …`: serve and evaluate reward models outside of runs."""

from __future__ import annotations

import argparse

from hpcrl.cli._common import Subcommands, positive
from hpcrl.text import printable

_TOKEN = "REMOTE_REWARD_TOKEN"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from hpcrl.config.sections.environment import RewardServiceConfig

    default = RewardServiceConfig()
    text = "serve a reward model to runs whose environment.remote_reward asks it, until it is interrupted; needs torch"
    serve = Subcommands(parser).add("serve", text, _serve)
    serve.add_argument(
        "model", metavar="MODEL", help="directory, or name on the hub, of a sequence classifier of one label"
    )
    serve.add_argument("--host", default="127.0.0.1", help="address at which it listens (127.0.0.1)")
    serve.add_argument("--port", type=int, default=0, help="(default: a free one)")
    serve.add_argument(
        "--model-dtype",
        choices=("float32", "bfloat16", "float16"),
        default=default.model_dtype,
        help=f"number type of parameters and computation ({default.model_dtype})",
    )
    serve.add_argument(
        "--max-batch-tokens",
        type=positive,
        default=default.max_batch_tokens,
        metavar="N",
        help=f"tokens of a forward pass at most, padding included ({default.max_batch_tokens})",
    )
    serve.add_argument(
        "--chat-template", metavar="FILE", help="Jinja file, instead of the chat template of the tokenizer"
    )
    serve.epilog = f"The token that clients show is in the variable {_TOKEN}."


def _serve(arguments: argparse.Namespace) -> int:
    import asyncio
    import os

    from hpcrl.config.sections.environment import RewardServiceConfig
    from hpcrl.errors import ConfigError, SubmitError
    from hpcrl.launch.agent.environment import raise_open_files
    from hpcrl.runtime.http_server import Bearer, bind

    token = os.environ.get(_TOKEN)
    if not token:
        raise ConfigError(
            f"the service needs the variable {_TOKEN}: what clients show to be answered, such as `openssl rand -hex 32`"
        )
    try:
        listener = bind(arguments.host, arguments.port)
    except OSError as error:
        raise SubmitError(
            f"cannot listen at {arguments.host}, port {arguments.port}: {error}; name another --host or --port"
        ) from error
    from hpcrl.reward_service.model import RewardModel
    from hpcrl.reward_service.scoring import Scoring
    from hpcrl.reward_service.serve import asked_to_stop, serve_rewards

    settings = RewardServiceConfig(
        model_dtype=arguments.model_dtype,
        max_batch_tokens=arguments.max_batch_tokens,
        chat_template=arguments.chat_template,
    )
    model = RewardModel.load(arguments.model, settings, "MODEL")
    raise_open_files()
    url = "http://{}:{}".format(*listener.getsockname()[:2])
    print(printable(f"serving {arguments.model} at {url}; where you submit:"))
    print(f"export REMOTE_REWARD_ENQUEUE_URL={url}/enqueue REMOTE_REWARD_FETCH_URL={url}/fetch {_TOKEN}=…", flush=True)
    asyncio.run(serve_rewards(model, arguments.model, listener, Bearer(token), Scoring(model), asked_to_stop()))
    return 0
