"""A service that plays guess_number by tool calls, twice from one first call, for two numbers: a sample has two branches of several turns. It
accepts what it is asked, plays in a thread, and posts the score when it is known. It has OpenAI's client and nothing of hpcrl. Prints its address.

    python branching_service.py TOOLS      a JSON file with the tools
"""

from __future__ import annotations

import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from openai import OpenAI

GUESSES = 3
CLIENT = OpenAI(base_url="http://unset", api_key="unset")
TOOLS = json.loads(Path(sys.argv[1]).read_text())


class Player:
    """Asks the policy of one sample, and counts how often it calls a tool."""

    def __init__(self, asked: dict[str, Any]) -> None:
        self.client = CLIENT.with_options(base_url=asked["base_url"], api_key=asked["api_key"])
        self._model = asked["model"]
        self.answers = self.calls = 0

    def ask(self, messages: list[Any]) -> Any:
        answer = self.client.chat.completions.create(model=self._model, messages=messages, tools=TOOLS)
        message = answer.choices[0].message
        self.answers, self.calls = self.answers + 1, self.calls + bool(message.tool_calls)
        return message

    def found(self, messages: list[Any], said: Any, row: dict[str, Any], secret: int) -> bool:
        """Go on from the first answer, and return whether the number is found."""
        for left in reversed(range(GUESSES)):
            if not said.tool_calls:
                return False
            (call,) = said.tool_calls[:1]
            number = json.loads(call.function.arguments).get("number")
            if number == secret or not left:
                return number == secret
            valid = isinstance(number, int) and row["low"] <= number <= row["high"]
            told = (
                ("Higher." if number < secret else "Lower.")
                if valid
                else f"Say a whole number from {row['low']} to {row['high']}."
            )
            messages = [*messages, said, {"role": "tool", "tool_call_id": call.id, "content": told}]
            said = self.ask(messages)
        return False


def play(asked: dict[str, Any]) -> None:
    row, player = asked["row"], Player(asked)
    first = player.ask(row["prompt"])
    secret = int(row["reward_spec"]["ground_truth"])
    secrets = (secret, row["low"] + row["high"] - secret)
    both = [player.found(row["prompt"], first, row, one) for one in secrets]
    metrics = {"found": sum(both) / 2, "calls": player.calls / player.answers}
    player.client.post("/score", body={"reward": sum(both) / 2, "metrics": metrics}, cast_to=object)


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
