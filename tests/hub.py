"""A small server that answers like the hub of models and datasets: files of a folder, as huggingface_hub asks for them."""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

_FILE = re.compile(r"/(?:datasets/)?(?P<name>[\w.-]+/[\w.-]+)/resolve/[^/]+/(?P<file>[\w./-]+)")
_COMMIT = "0" * 40


@contextmanager
def hub(folder: Path) -> Iterator[str]:
    """Yield the address at which the files `folder`/<owner>/<name>/<file> are to be had, for HF_ENDPOINT."""

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self._answer(body=False)

        def do_GET(self) -> None:
            self._answer(body=True)

        def _answer(self, body: bool) -> None:
            match = _FILE.fullmatch(self.path.partition("?")[0])
            file = folder / match["name"] / match["file"] if match else folder / "none"
            content = file.read_bytes() if file.is_file() else b""
            self.send_response(200 if file.is_file() else 404)
            if not file.is_file():
                self.send_header("X-Error-Code", "EntryNotFound")
            self.send_header("X-Repo-Commit", _COMMIT)
            self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if body:
                self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
