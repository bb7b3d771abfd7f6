"""Launches vLLM for a rollout worker, or takes a server that somebody else started."""

from __future__ import annotations

from hpcrl.config import Config
from hpcrl.engines.vllm.multi_node import start_first_node
from hpcrl.engines.vllm.server import Server, server_options
from hpcrl.rollout.engines.base import Launched
from hpcrl.rollout.engines.launch import EnginePlace


def launch(config: Config, place: EnginePlace) -> Launched:
    if config.generator.inference_engine.remote_urls:
        # its client takes time to import, which a server's start need not wait for
        from hpcrl.engines.vllm.remote import Remote, remote_options

        owner = f"{place.log.stem} of {place.run.path}"
        return Remote(remote_options(config, owner, place.replica, trains=place.trains))
    if place.trains and config.engine_nodes > 1:
        return start_first_node(config, place)
    return Server(server_options(place.run, config, place.replica), place.directory, place.log)
