"""The engine core, a process of its own as in vLLM: it says the tokens, and holds the weights' version."""

from __future__ import annotations

import random
from multiprocessing.connection import Connection
from typing import Any

END, FIRST_LETTER, LAST_LETTER = 1, 5, 16  # of the quickstart's tokenizer
LOGPROB = -1.25


def say(prompt: list[int], seed: int) -> list[int]:
    """Return the letters of the prompt: about every other time in order, otherwise as they come. The weights change nothing."""
    source = random.Random(f"{seed} {prompt}")
    letters = [token for token in prompt if FIRST_LETTER <= token <= LAST_LETTER]
    if source.random() < 0.5:
        letters.sort()
    else:
        source.shuffle(letters)
    return [*letters, END]


def run(requests: Connection) -> None:
    """Answer (number, verb, payload) by (number, answer) until the server is gone."""
    version = "default"
    while True:
        try:
            number, verb, payload = requests.recv()
        except EOFError:
            return
        answer: Any = None
        if verb == "generate":
            answer = [say(payload["token_ids"], payload["seed"] + i) for i in range(payload["n"])]
        elif verb == "finish":
            version = payload
        elif verb == "version":
            answer = version
        requests.send((number, answer))
