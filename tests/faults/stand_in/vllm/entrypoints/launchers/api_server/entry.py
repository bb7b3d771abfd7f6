"""The main module of the server, under the name that vLLM gives it."""

from vllm.server import main

__all__ = ["main"]
