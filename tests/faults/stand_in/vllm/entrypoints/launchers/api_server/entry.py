"""The main module of the server, under the name that vLLM gives it."""

from hpcrl.data.tokenizer import without_torch
from vllm.server import main

with without_torch():  # a tokenizer is all that hpcrl/engines/vllm/main.py needs of it here
    import transformers  # noqa: F401

__all__ = ["main"]
