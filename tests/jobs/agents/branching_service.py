"""A service that plays guess_number twice from one first guess, for two numbers: a sample has two branches of several turns. It accepts what it is
asked, plays in a thread, and posts the score when it is known. Prints its address.
"""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from openai import OpenAI

GUESSES = 3
CLIENT = OpenAI(base_url="http://unset", api_key="unset")


def found(client: OpenAI, model: str, messages: list[Any], guess: str, row: dict[str, Any], secret: int) -> bool:
    """Go on from the first guess, and return whether the number is found."""
    for left in reversed(range(GUESSES)):
        if guess == str(secret) or not left:
            break
        valid = guess.isdecimal() and row["low"] <= int(guess) <= row["high"]
        told = (
            ("Higher." if int(guess) < secret else "Lower.")
            if valid
            else f"Say a whole number from {row['low']} to {row['high']}."
        )
        messages = [*messages, {"role": "assistant", "content": guess}, {"role": "user", "content": told}]
        guess = str(client.chat.completions.create(model=model, messages=messages).choices[0].message.content)
    return guess == str(secret)


def play(asked: dict[str, Any]) -> None:
    row, model = asked["row"], asked["model"]
    client = CLIENT.with_options(base_url=asked["base_url"], api_key=asked["api_key"])
    first = str(client.chat.completions.create(model=model, messages=row["prompt"]).choices[0].message.content)
    secret = int(row["reward_spec"]["ground_truth"])
    secrets = (secret, row["low"] + row["high"] - secret)
    both = [found(client, model, row["prompt"], first, row, one) for one in secrets]
    score = {"reward": sum(both) / 2, "metrics": {"found": sum(both) / 2}}
    client.post("/score", body=score, cast_to=object)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        threading.Thread(target=play, args=[asked], daemon=True).start()
        self.send_response(202)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


class Server(ThreadingHTTPServer):
    daemon_threads, request_queue_size = True, 128


if __name__ == "__main__":
    with Server(("127.0.0.1", 0), Handler) as server:
        print(f"http://127.0.0.1:{server.server_port}/play", flush=True)
        server.serve_forever()
