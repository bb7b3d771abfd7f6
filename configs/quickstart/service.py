"""Plays the quickstart's task as a service that keeps an agent running: it has OpenAI's client, and knows nothing of training.

    python configs/quickstart/service.py 8080      environment.skyrl_gym.agent.service.url = "http://127.0.0.1:8080/play"

docs/agents.md has the protocol. One that runs for long would answer 202 at once and post the score later.
"""

from __future__ import annotations

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from openai import OpenAI

CLIENT = OpenAI(base_url="http://unset", api_key="unset")  # its connections are used again


def play(asked: dict[str, Any]) -> dict[str, Any]:
    """Ask the policy once, and compare what it says with the row's answer."""
    row = asked["row"]
    client = CLIENT.with_options(base_url=asked["base_url"], api_key=asked["api_key"])
    answer = client.chat.completions.create(model=asked["model"], messages=row["prompt"])
    text, wanted = answer.choices[0].message.content, row["reward_spec"]["ground_truth"]
    right = sum(given == letter for given, letter in zip(text, wanted, strict=False))
    return {"reward": float(text == wanted), "metrics": {"letters_in_place": right / len(wanted)}}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        body = json.dumps(play(asked)).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_DELETE(self) -> None:
        """The sample is over: what it asks is refused from now on, so there is nothing to stop here."""
        self.send_response(204)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


class Server(ThreadingHTTPServer):
    daemon_threads, request_queue_size = True, 128


if __name__ == "__main__":
    with Server(("127.0.0.1", int(sys.argv[1]) if sys.argv[1:] else 0), Handler) as server:
        print(f"http://127.0.0.1:{server.server_port}/play", flush=True)
        server.serve_forever()
