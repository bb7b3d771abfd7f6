"""The service of configs/quickstart/service.py at an address of its node, over TLS, for who shows a token. Prints its address, and notes what it was asked.

python agents_elsewhere.py HOST CERTIFICATE PRIVATE_KEY TOKEN_FILE NOTES
"""

from __future__ import annotations

import json
import runpy
import ssl
import sys
from pathlib import Path
from typing import Any

from openai import AuthenticationError

HOST, CERTIFICATE, PRIVATE_KEY, TOKEN_FILE, NOTES = sys.argv[1:]
TOKEN = Path(TOKEN_FILE).read_text().strip()
SERVICE: dict[str, Any] = runpy.run_path(str(Path(__file__).parents[2] / "configs" / "quickstart" / "service.py"))


class Handler(SERVICE["Handler"]):
    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.headers["authorization"] != f"Bearer {TOKEN}":
            self.send_error(401)
            return
        with open(NOTES, "a") as file:
            file.write(json.dumps({**asked, "refuses_others": refuses_others(asked["base_url"])}) + "\n")
        body = json.dumps(SERVICE["play"](asked)).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def refuses_others(base_url: str) -> bool:
    try:
        SERVICE["CLIENT"].with_options(base_url=base_url, api_key="another's").models.list()
    except AuthenticationError:
        return True
    return False


if __name__ == "__main__":
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(CERTIFICATE, PRIVATE_KEY)
    with SERVICE["Server"]((HOST, 0), Handler) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        print(f"https://{HOST}:{server.server_port}/play", flush=True)
        server.serve_forever()
