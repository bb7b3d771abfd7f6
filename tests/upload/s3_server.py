"""moto's S3 server on this machine, with what goes wrong at times in front of it.

python -m tests.upload.s3_server ADDRESS BUCKET     serves a bucket until its standard input ends; prints where
"""

from __future__ import annotations

import io
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from boto3.session import Session
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
from werkzeug.serving import make_server

from hpcrl.rundir.commit import COMMIT

KEY, SECRET = "test-key", "test-secret-key"


class _Silent(MotoRequestHandler):
    def log(self, *_: Any) -> None:
        return


@dataclass
class S3Server:
    """What the server does, and what it was asked.

    Attributes:
        failing: so many of the next requests get 503.
        damages: a part of the path of an object; the next one that is put there arrives with a byte changed.
        requests: method and path with query of each one.
        client: of the test.
    """

    url: str = ""
    failing: int = 0
    damages: str = ""
    requests: list[tuple[str, str]] = field(default_factory=list)
    client: Any = None
    lock: threading.Lock = field(default_factory=threading.Lock)

    def puts(self) -> list[str]:
        """Return the paths of objects and parts that were put since the last call."""
        with self.lock:
            puts = [path for method, path in self.requests if method == "PUT"]
            self.requests.clear()
            return puts

    def refusal(self, environ: dict[str, Any]) -> tuple[str, str] | None:
        """Return status and code of the answer to a request that does not get through."""
        with self.lock:
            self.requests.append((environ["REQUEST_METHOD"], f"{environ['PATH_INFO']}?{environ['QUERY_STRING']}"))
            if f"Credential={KEY}/" not in environ.get("HTTP_AUTHORIZATION", ""):
                return "403 Forbidden", "InvalidAccessKeyId"
            if self.failing:
                self.failing -= 1
                return "503 Slow Down", "SlowDown"
            if self.damages and environ["REQUEST_METHOD"] == "PUT" and self.damages in environ["PATH_INFO"]:
                self.damages = ""
                content = bytearray(environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"])))
                content[-1] ^= 1
                environ["wsgi.input"] = io.BytesIO(content)
        return None


@contextmanager
def s3_server(address: str = "127.0.0.1") -> Iterator[S3Server]:
    """Yield a server that knows KEY alone; buckets are shared by all servers of a process."""
    server, moto = S3Server(), DomainDispatcherApplication(create_backend_app)

    def answer(environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        refused = server.refusal(environ)
        if refused is None:
            return moto(environ, start)
        status, code = refused
        environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        start(status, [("Content-Type", "application/xml")])
        return [f"<Error><Code>{code}</Code><Message>as the test wants it</Message></Error>".encode()]

    http = make_server(address, 0, answer, threaded=True, request_handler=_Silent)
    thread = threading.Thread(target=http.serve_forever, daemon=True)
    thread.start()
    server.url = f"http://{address}:{http.server_address[1]}"
    try:
        yield server
    finally:
        http.shutdown()
        http.server_close()
        thread.join()


def client(server: S3Server) -> Any:
    """A client of its own, made once: to make one takes a while."""
    if server.client is None:
        session = Session(aws_access_key_id=KEY, aws_secret_access_key=SECRET, region_name="us-east-1")
        server.client = session.client("s3", endpoint_url=server.url)
    return server.client


def keys(server: S3Server, bucket: str) -> dict[str, bytes]:
    """Return the objects of a bucket."""
    found = client(server).list_objects_v2(Bucket=bucket).get("Contents", [])
    return {one["Key"]: client(server).get_object(Bucket=bucket, Key=one["Key"])["Body"].read() for one in found}


def copies(server: S3Server, bucket: str) -> list[str]:
    """Return the directories of a bucket that are complete."""
    return sorted(key.removesuffix(f"/{COMMIT}") for key in keys(server, bucket) if key.endswith(COMMIT))


if __name__ == "__main__":
    with s3_server(sys.argv[1]) as made:
        client(made).create_bucket(Bucket=sys.argv[2])
        print(made.url, flush=True)
        sys.stdin.read()
