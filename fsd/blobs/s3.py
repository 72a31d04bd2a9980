"""Objects in an S3-compatible store. Crash points `pack.put` before a put, `pack.durable` after it."""

from __future__ import annotations

import base64
import gc
import hashlib
from collections.abc import Iterable, Iterator
from typing import Any, Final

from fsd.model.plain import dataclass, field

try:
    import boto3
    from botocore.config import Config
    from botocore.exceptions import BotoCoreError, ClientError
except ImportError as exc:
    from fsd.model.errors import Unsupported

    raise Unsupported("S3 needs boto3, which is not installed", hint="pip install 'fsd[s3]'") from exc

from fsd.blobs.store import Listed, check_key
from fsd.host.seam import Host
from fsd.model.errors import FsdError, IntegrityError, NoSpace, NotFound, Unavailable
from fsd.model.limits import FAILED_PUTS_MAX

_MISSING: Final = ("NoSuchKey", "404", "NotFound")
_FULL: Final = ("InsufficientStorage", "QuotaExceeded", "XMinioStorageFull", "507")


@dataclass(frozen=True, slots=True)
class S3Options:
    """Where and as whom. `prefix` ('' or 'a/b/') stands before every key. Without keys boto3 looks for
    credentials where it always does (instance roles, its own files)."""

    bucket: str
    prefix: str = ""
    endpoint: str | None = None
    region: str = "us-east-1"
    access_key: str | None = None
    secret_key: str | None = field(default=None, repr=False)


class S3Store:
    """`BlobStore` in one bucket, which must exist. Raises `Unavailable` at once when it cannot be used."""

    page = 1000  # objects of one answer to `list`

    def __init__(self, options: S3Options, host: Host) -> None:
        self._host = host
        self._bucket = options.bucket
        self._prefix = options.prefix
        self._left_behind = 0
        self._client: Any = boto3.session.Session(
            aws_access_key_id=options.access_key,
            aws_secret_access_key=options.secret_key,
            region_name=options.region,
        ).client(
            "s3",
            endpoint_url=options.endpoint,
            config=Config(
                connect_timeout=5,
                read_timeout=60,
                retries={"max_attempts": 4, "mode": "standard"},
                max_pool_connections=32,
                s3={"addressing_style": "path" if options.endpoint else "auto"},
                # Trailing checksums are unknown to many compatible stores; Content-MD5 is understood by all.
                request_checksum_calculation="when_required",
                response_checksum_validation="when_required",
            ),
        )
        self._client.meta.events.register_last("before-call", _send_at_once)
        try:
            self._client.head_bucket(Bucket=self._bucket)
        except (ClientError, BotoCoreError) as exc:
            raise self._failed(exc, "") from exc

    def put(self, key: str, pieces: Iterable[bytes | memoryview]) -> None:
        body = b"".join(pieces)  # at most one upload (UPLOAD_MAX); S3 wants its length and sum first
        digest = hashlib.md5(body, usedforsecurity=False).digest()
        self._host.crash_point("pack.put")
        try:
            self._client.put_object(
                Bucket=self._bucket,
                Key=self._key(key),
                Body=body,
                ContentMD5=base64.b64encode(digest).decode(),
            )
        except (ClientError, BotoCoreError) as exc:
            self._collect(len(body))
            raise self._failed(exc, key) from exc
        self._host.crash_point("pack.durable")

    def get(self, key: str, offset: int, length: int) -> bytes:
        if length == 0:  # a range cannot say so
            if self.head(key) is None:
                raise NotFound(f"no object {key}")
            return b""
        try:
            answer = self._client.get_object(
                Bucket=self._bucket, Key=self._key(key), Range=f"bytes={offset}-{offset + length - 1}"
            )
            data: bytes = answer["Body"].read()
        except (ClientError, BotoCoreError) as exc:
            raise self._failed(exc, key) from exc
        if "ContentRange" not in answer:
            raise Unavailable(f"the answer for object {key} is not the range that was asked for")
        if len(data) != length:
            raise IntegrityError(f"object {key} ends before byte {offset + length}")
        return data

    def stretch(self, key: str, offset: int, length: int) -> None:
        """A bucket's objects are no files."""

    def head(self, key: str) -> int | None:
        try:
            answer = self._client.head_object(Bucket=self._bucket, Key=self._key(key))
        except (ClientError, BotoCoreError) as exc:
            error = self._failed(exc, key)
            if isinstance(error, NotFound):
                return None
            raise error from exc
        return int(answer["ContentLength"])

    def list(self, prefix: str, after: str = "") -> Iterator[Listed]:
        pages = self._client.get_paginator("list_objects_v2").paginate(
            Bucket=self._bucket,
            Prefix=self._prefix + prefix,
            **({"StartAfter": self._prefix + after} if after else {}),
            PaginationConfig={"PageSize": self.page},
        )
        try:
            for page in pages:
                for found in page.get("Contents", ()):
                    key = found["Key"].removeprefix(self._prefix)
                    yield Listed(key, int(found["Size"]), int(found["LastModified"].timestamp()))
        except (ClientError, BotoCoreError) as exc:
            raise self._failed(exc, prefix) from exc

    def delete(self, key: str) -> None:
        try:
            self._client.delete_object(Bucket=self._bucket, Key=self._key(key))
        except (ClientError, BotoCoreError) as exc:
            error = self._failed(exc, key)
            if not isinstance(error, NotFound):
                raise error from exc
        self._host.crash_point("pack.deleted")

    def tidy(self, above: str) -> None:
        """A bucket has no directories."""

    def space(self) -> None:
        """A bucket tells no limit."""

    def _key(self, key: str) -> str:
        return self._prefix + check_key(key)

    def _collect(self, size: int) -> None:
        """After a put that failed. botocore and urllib3 keep an error in circles with the frames it came
        through, and in these the object: while the bucket is away each try would leave its megabytes until
        the collector comes, which is seldom in a server. Any thread; a race calls it once more."""
        self._left_behind += size
        if self._left_behind >= FAILED_PUTS_MAX:
            self._left_behind = 0
            gc.collect()

    def _failed(self, exc: Exception, key: str) -> FsdError:
        """The error of the one tree; `key` '' where the bucket itself was asked for."""
        if isinstance(exc, ClientError):
            code = str(exc.response.get("Error", {}).get("Code", ""))
            if key and code in _MISSING:
                return NotFound(f"no object {key}")
            if code in ("InvalidRange", "416"):
                return IntegrityError(f"object {key} is shorter than its row says")
            if code in _FULL:
                return NoSpace(f"the bucket {self._bucket} is full")
            return Unavailable(
                f"the bucket {self._bucket} answered {code or 'an error'}: {exc}",
                hint="check bucket, region and keys",
            )
        return Unavailable(
            f"the bucket {self._bucket} cannot be reached: {exc}", hint="check endpoint and network"
        )


def _send_at_once(params: dict[str, Any], **_: object) -> None:
    """Without `Expect: 100-continue`: it costs each put a round trip, or a second where a proxy is silent."""
    params["headers"].pop("Expect", None)
