"""Copies in S3, or a store of its protocol: <prefix>/<project>/<run>/exports/s000040/<file>, and checkpoints in the same way.

The mark COMMIT is the last object of a directory: without it a copy is not complete, and with it `hpcrl checkpoint verify` accepts what is
copied back. A file above PART_BYTES is sent in parts, several at a time; the parts of a call that was killed are kept and used.

Parts carry their SHA-256, with which S3 compares what it receives. Afterwards the checksum and the ETag (MD5) of the whole object, as far as
the store has them, are compared with those of what was read. Both are computed of parts of the same sizes (AWS, "Checking object integrity").
"""

from __future__ import annotations

import hashlib
import os
import re
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import BoundedSemaphore
from typing import TYPE_CHECKING, Any, BinaryIO

from hpcrl.config.sections.upload import UploadConfig
from hpcrl.errors import CommitError, RunError
from hpcrl.faults import fault
from hpcrl.rundir.commit import COMMIT
from hpcrl.rundir.layout import Run
from hpcrl.upload.store import Away, Committed, Patience, UploadRefused, Vanished

if TYPE_CHECKING:
    from botocore.exceptions import ClientError

PART_BYTES = 64 << 20
_MOST_PARTS = 10_000
_AT_ONCE = 4  # parts that are in memory and on their way
_MD5 = re.compile(r'"?([0-9a-f]{32}(?:-\d+)?)"?')
_REMEDIES = {
    "NoSuchBucket": "create the bucket, or name another in trainer.upload.s3_bucket",
    "InvalidAccessKeyId": "the store does not know this access key; look at the credentials",
    "SignatureDoesNotMatch": "the secret key does not belong to the access key; look at the credentials",
    "ExpiredToken": "these credentials have expired; renew them",
    "AccessDenied": "the credentials need s3:ListBucket and s3:ListBucketMultipartUploads of the bucket, and s3:GetObject, "
    "s3:PutObject, s3:DeleteObject, s3:AbortMultipartUpload and s3:ListMultipartUploadParts of its objects",
}
_REMEDIES |= {"403": _REMEDIES["AccessDenied"], "Forbidden": _REMEDIES["AccessDenied"]}
_WHERE = "where credentials come from: docs/uploads.md#secrets"


@dataclass
class _Digests:
    """Digests of a file as it is read, part by part."""

    sha256: list[bytes] = field(default_factory=list)
    md5: list[bytes] = field(default_factory=list)
    whole: Any = field(default_factory=lambda: hashlib.blake2b(digest_size=16))

    def add(self, part: bytes) -> None:
        self.sha256.append(hashlib.sha256(part).digest())
        self.md5.append(hashlib.md5(part, usedforsecurity=False).digest())
        self.whole.update(part)

    def differs(self, shown: Mapping[str, Any], parts: bool) -> bool:
        """Return whether a store has another checksum than these, of those that it shows of an object.

        Args:
            parts: whether the object was sent in parts.
        """
        mine, theirs = _combined(self.sha256, hashlib.sha256, parts), shown.get("ChecksumSHA256", "").partition("-")[0]
        if theirs and theirs != _text(mine):
            return True
        found = _MD5.fullmatch(shown.get("ETag", ""))
        encrypted = shown.get("SSECustomerAlgorithm") or shown.get("ServerSideEncryption", "AES256") != "AES256"
        if found is None or encrypted:  # then the ETag is no MD5
            return False
        md5 = _combined(self.md5, lambda content: hashlib.md5(content, usedforsecurity=False), parts)
        return found[1] != md5.hex() + (f"-{len(self.md5)}" if parts else "")


def _combined(digests: list[bytes], digest: Callable[[bytes], Any], parts: bool) -> bytes:
    return digest(b"".join(digests)).digest() if parts else digests[0]


def _text(digest: bytes) -> str:
    return b64encode(digest).decode()


class S3Store:
    """Copies of one run.

    Raises:
        RunError: boto3 is missing, or no bucket is named.
        UploadRefused: the credentials cannot be read.
    """

    def __init__(self, run: Run, upload: UploadConfig, patience: Patience, part_bytes: int = PART_BYTES) -> None:
        if upload.s3_bucket is None:
            raise RunError(f"{run.name}: no bucket is named; set trainer.upload.s3_bucket, or give --bucket")
        self._bucket, self._part_bytes, self._patience = upload.s3_bucket, part_bytes, patience
        self._root = "/".join(filter(None, [upload.s3_prefix, run.project, run.name]))
        self.place = f"s3://{self._bucket}/{self._root}"
        self._client = _client(upload)

    def send(self, directory: Committed, sent: Callable[[int], None]) -> int:
        """Send a directory; see `Store`."""
        prefix = f"{self._root}/{directory.name}/"
        try:
            return self._send(directory, prefix, sent)
        except Vanished:
            self._remove_incomplete(prefix)
            raise

    def _send(self, directory: Committed, prefix: str, sent: Callable[[int], None]) -> int:
        there, missing = self._sizes(prefix), dict[str, int]()
        for name, size in directory.files.items():
            if there.get(prefix + name) == size and self._has(directory, name, size, prefix + name):
                sent(size)
            else:
                missing[name] = size
        mark, length = prefix + COMMIT, len(directory.mark)
        if not missing and there.get(mark) == length and self._has(directory, COMMIT, length, mark):
            return 0
        if mark in there:
            self._ask("delete_object", Key=mark)
        for name, size in missing.items():
            self._send_file(directory, name, size, prefix + name, sent)
        directory.require_there()
        self._ask("put_object", Key=mark, Body=directory.mark, **_checked(hashlib.sha256(directory.mark).digest()))
        return sum(missing.values())

    def _remove_incomplete(self, prefix: str) -> None:
        there = self._sizes(prefix)
        if prefix + COMMIT in there:
            return
        for key in there:
            self._ask("delete_object", Key=key)
        for begun in self._ask("list_multipart_uploads", Prefix=prefix).get("Uploads", []):
            self._ask("abort_multipart_upload", Key=begun["Key"], UploadId=begun["UploadId"])

    def _sizes(self, prefix: str) -> dict[str, int]:
        found, more = dict[str, int](), dict[str, str]()
        while True:
            page = self._ask("list_objects_v2", Prefix=prefix, **more)
            found |= {entry["Key"]: entry["Size"] for entry in page.get("Contents", [])}
            if not page.get("IsTruncated"):
                return found
            more = {"ContinuationToken": page["NextContinuationToken"]}

    def _has(self, directory: Committed, name: str, size: int, key: str) -> bool:
        shown = self._ask("head_object", Key=key, ChecksumMode="ENABLED")
        digests = _Digests()
        for part in self._parts(directory, name, size):
            digests.add(part)
        return not digests.differs(shown, parts=size > self._part_size(size))

    def _part_size(self, size: int) -> int:
        return max(self._part_bytes, -(-size // _MOST_PARTS))

    def _parts(self, directory: Committed, name: str, size: int) -> Iterator[bytes]:
        step, read = self._part_size(size), 0
        with _read(directory, name) as file:
            while read < size or not size:
                part = file.read(step)
                read += len(part)
                yield part
                if len(part) < step:
                    break
        if read != size:
            directory.require_there()
            raise CommitError(f"{directory.path / name}: expected {size} bytes, found {read}")

    def _send_file(self, directory: Committed, name: str, size: int, key: str, sent: Callable[[int], None]) -> None:
        digests, in_parts = _Digests(), size > self._part_size(size)
        if in_parts:
            self._send_parts(directory, name, size, key, digests, sent)
        else:
            (content,) = self._parts(directory, name, size)
            digests.add(content)
            self._require_right(directory, name, digests)
            self._ask("put_object", Key=key, Body=content, **_checked(digests.sha256[0]))
            sent(size)
        shown = self._ask("head_object", Key=key, ChecksumMode="ENABLED")
        if shown["ContentLength"] != size or digests.differs(shown, in_parts):
            self._ask("delete_object", Key=key)
            raise Away(
                f"{self.place}: {directory.name}/{name} arrived damaged and was deleted there; it is sent again later"
            )

    def _send_parts(
        self, directory: Committed, name: str, size: int, key: str, digests: _Digests, sent: Callable[[int], None]
    ) -> None:
        upload, have = self._begun(key)
        slots, done = BoundedSemaphore(_AT_ONCE), list[dict[str, Any]]()

        def put(number: int, part: bytes, sha256: bytes) -> dict[str, Any]:
            try:
                answer = self._ask(
                    "upload_part", Key=key, UploadId=upload, PartNumber=number, Body=part, **_checked(sha256)
                )
            finally:
                slots.release()
            fault("upload.part")
            sent(len(part))
            return {"PartNumber": number, "ETag": answer["ETag"], "ChecksumSHA256": _text(sha256)}

        with ThreadPoolExecutor(_AT_ONCE, "upload") as pool:
            going = []
            for number, part in enumerate(self._parts(directory, name, size), 1):
                digests.add(part)
                md5, sha256 = digests.md5[-1], digests.sha256[-1]
                if have.get(number) == (len(part), md5.hex()):
                    done.append({"PartNumber": number, "ETag": f'"{md5.hex()}"', "ChecksumSHA256": _text(sha256)})
                    sent(len(part))
                    continue
                slots.acquire()
                if any(one.done() and one.exception() for one in going):
                    slots.release()
                    break
                going.append(pool.submit(put, number, part, sha256))
            done += [one.result() for one in going]
        self._require_right(directory, name, digests)
        done.sort(key=lambda part: part["PartNumber"])
        self._ask("complete_multipart_upload", Key=key, UploadId=upload, MultipartUpload={"Parts": done})

    def _begun(self, key: str) -> tuple[str, dict[int, tuple[int, str]]]:
        """Return an upload in parts, one that was begun before where there is one, and size and MD5 of the parts that it has."""
        begun = self._ask("list_multipart_uploads", Prefix=key).get("Uploads", [])
        # other programs begin some too, with checksums of another kind
        ours = [
            one["UploadId"] for one in begun if one["Key"] == key and one.get("ChecksumAlgorithm", "SHA256") == "SHA256"
        ]
        if not ours:
            made = self._ask("create_multipart_upload", Key=key, ChecksumAlgorithm="SHA256")
            return made["UploadId"], {}
        have, after = dict[int, tuple[int, str]](), 0
        while True:
            page = self._ask("list_parts", Key=key, UploadId=ours[-1], PartNumberMarker=after)
            have |= {part["PartNumber"]: (part["Size"], part["ETag"].strip('"')) for part in page.get("Parts", [])}
            if not page.get("IsTruncated"):
                return ours[-1], have
            after = page["NextPartNumberMarker"]

    def _require_right(self, directory: Committed, name: str, digests: _Digests) -> None:
        expected = directory.checksums.get(name)
        if expected is not None and digests.whole.hexdigest() != expected:
            directory.require_there()
            raise CommitError(f"{directory.path / name}: checksum differs from the manifest; it is not uploaded")

    def _ask(self, name: str, **arguments: Any) -> Any:
        from botocore import exceptions as of

        def ask() -> Any:
            try:
                return getattr(self._client, name)(Bucket=self._bucket, **arguments)
            except of.ClientError as error:
                raise self._error(name, error) from error
            except (of.NoCredentialsError, of.PartialCredentialsError) as error:
                raise UploadRefused(f"{self.place}: {error}; {_WHERE}") from error
            except of.BotoCoreError as error:
                raise Away(f"{self.place}: {name}: {error}") from error

        return self._patience.repeat(ask)

    def _error(self, name: str, error: ClientError) -> Away | UploadRefused:
        details, status = error.response["Error"], error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        code = details.get("Code", "")
        message = f"{self.place}: {name}: {status} {code}: {details.get('Message', '')}"
        if status >= 500 or status in (408, 429) or code in ("RequestTimeout", "SlowDown", "BadDigest"):
            return Away(message)
        return UploadRefused(f"{message}; {_REMEDIES.get(code, 'look at trainer.upload.s3_* and the credentials')}")


def _checked(sha256: bytes) -> dict[str, str]:
    return {"ChecksumAlgorithm": "SHA256", "ChecksumSHA256": _text(sha256)}


@contextmanager
def _read(directory: Committed, name: str) -> Iterator[BinaryIO]:
    """Open a file; where it cannot be read, say whether the run has deleted the directory."""
    path = directory.path / name
    try:
        with path.open("rb") as file:
            yield file
    except OSError as error:
        directory.require_there()
        raise CommitError(f"{path} cannot be read: {error.strerror}") from error


def _client(upload: UploadConfig) -> Any:
    try:
        from boto3.session import Session
        from botocore.config import Config
        from botocore.exceptions import BotoCoreError
        from botocore.session import get_session
    except ImportError as error:
        raise RunError(f"uploads to S3 need {error.name}: pip install 'hpcrl[s3]'") from error
    session = get_session()
    if upload.s3_credentials_file:
        path = os.path.expanduser(upload.s3_credentials_file)
        if not os.path.isfile(path):
            raise UploadRefused(f"trainer.upload.s3_credentials_file: no file {path}; {_WHERE}")
        session.set_config_variable("credentials_file", path)
        session.set_config_variable("profile", os.environ.get("AWS_PROFILE") or "default")  # before keys in variables
    options = Config(
        retries={"total_max_attempts": 1},  # Patience repeats what failed
        connect_timeout=10,
        read_timeout=60,
        request_checksum_calculation="when_required",  # other stores than AWS know no checksums at the end of a request
        response_checksum_validation="when_required",
    )
    try:
        return Session(botocore_session=session).client("s3", endpoint_url=upload.s3_endpoint or None, config=options)
    except (BotoCoreError, ValueError) as error:
        raise UploadRefused(f"S3: {error}; {_WHERE}") from error
