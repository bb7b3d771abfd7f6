"""A small server that takes models as the hub does: preupload, Git LFS batches, commits and trees, as huggingface_hub asks for them."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN = "hf_" + "t" * 20
_MODEL = re.compile(r"/api/models/([\w.-]+/[\w.-]+)/(tree|preupload|commit|revision)/main")
_BATCH = re.compile(r"/([\w.-]+/[\w.-]+)\.git/info/lfs/objects/batch")


@dataclass
class Hub:
    """What the hub has, and what it was asked.

    Attributes:
        repositories: content of each file, by its path, of each repository.
        large: content of large files that were sent, by SHA-256; commits name them.
        commits: repository and summary of each.
        private: visibility that each repository was made with.
        failing: so many of the next requests of a kind get 503, by kind.
        damages: the next large file arrives with a byte changed.
        forbidden: nobody may write.
    """

    url: str = ""
    repositories: dict[str, dict[str, bytes]] = field(default_factory=dict)
    large: dict[str, bytes] = field(default_factory=dict)
    commits: list[tuple[str, str]] = field(default_factory=list)
    visibility: dict[str, str] = field(default_factory=dict)
    failing: dict[str, int] = field(default_factory=dict)
    damages: bool = False
    forbidden: bool = False
    puts: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def answer(self, method: str, path: str, body: bytes) -> tuple[int, Any]:
        """Return status and JSON value of the answer."""
        match, batch = _MODEL.fullmatch(path), _BATCH.fullmatch(path)
        kind = match[2] if match else "batch" if batch else path.split("/")[1]
        if self.failing.get(kind):
            self.failing[kind] -= 1
            return 503, {"error": "busy"}
        if path == "/api/whoami-v2":
            return 200, {"name": "me", "type": "user"}
        if self.forbidden and method != "GET":
            return 403, {"error": "You don't have the rights to write"}
        if path == "/api/repos/create":
            return self._create(json.loads(body))
        if kind == "large":
            return self._take(path.rpartition("/")[2], body)
        if batch:
            return 200, {"objects": [self._wanted(one) for one in json.loads(body)["objects"]]}
        if not match or match[1] not in self.repositories:
            return 404, {"error": "Repository not found"}
        files = self.repositories[match[1]]
        if kind == "preupload":
            found = [one["path"] for one in json.loads(body)["files"]]
            modes = ["lfs" if name.endswith(".safetensors") else "regular" for name in found]
            return 200, {
                "files": [
                    {"path": name, "uploadMode": mode, "shouldIgnore": False}
                    for name, mode in zip(found, modes, strict=True)
                ]
            }
        if kind == "commit":
            return self._commit(match[1], [json.loads(line) for line in body.splitlines()])
        return 200, [_shown(name, content) for name, content in files.items()]

    def _create(self, asked: dict[str, Any]) -> tuple[int, Any]:
        name = f"{asked.get('organization') or 'me'}/{asked['name']}"
        if name in self.repositories:
            return 409, {"error": "You already created this model repo", "url": f"{self.url}/{name}"}
        self.repositories[name], self.visibility[name] = {".gitattributes": b"*.safetensors"}, asked["visibility"]
        return 200, {"url": f"{self.url}/{name}"}

    def _wanted(self, one: dict[str, Any]) -> dict[str, Any]:
        asked = {"oid": one["oid"], "size": one["size"]}
        if one["oid"] in self.large:
            return asked
        return asked | {"actions": {"upload": {"href": f"{self.url}/large/{one['oid']}"}}}

    def _take(self, digest: str, body: bytes) -> tuple[int, Any]:
        self.puts += 1
        content = bytearray(body)
        if self.damages:
            self.damages, content[-1] = False, content[-1] ^ 1
        self.large[digest] = bytes(content)
        return 200, {}

    def _commit(self, name: str, lines: list[dict[str, Any]]) -> tuple[int, Any]:
        files = dict(self.repositories[name])
        for line in lines[1:]:
            path, value = line["value"]["path"], line["value"]
            if line["key"] == "file":
                files[path] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[path] = self.large[value["oid"]]
            else:
                del files[path]
        self.repositories[name] = files
        self.commits.append((name, lines[0]["value"]["summary"]))
        return 200, {"commitUrl": f"{self.url}/{name}/commit/0", "commitOid": "0" * 40, "hookOutput": ""}


def _shown(name: str, content: bytes) -> dict[str, Any]:
    shown = {
        "type": "file",
        "path": name,
        "size": len(content),
        "oid": hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest(),
    }
    if name.endswith(".safetensors"):
        shown["lfs"] = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 130}
    return shown


@contextmanager
def hub_server() -> Iterator[Hub]:
    """Yield a hub that knows TOKEN alone."""
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            path = self.path.partition("?")[0]
            with hub.lock:
                if path.startswith("/large/") or self.headers.get("Authorization") == f"Bearer {TOKEN}":
                    status, value = hub.answer(self.command, path, body)
                else:
                    status, value = 401, {"error": "Invalid username or password."}
            content = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = do_PUT = do_HEAD = _answer

        def log_message(self, *_: object) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
