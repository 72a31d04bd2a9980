"""The Python library: one filesystem of a server, without a mount.

    with fsd.client.connect(token) as fs:
        fs.write("/notes/today.txt", b"done\\n")
        head = fs.checkpoints.get_head("thread-1")

Everything blocks; `fsd.client.connect_async` is the same for asyncio and trio. Any thread. Errors are
`fsd.model.errors.FsdError` and its classes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import TracebackType
from typing import BinaryIO, TypeAlias

from fsd.client.checkpoints import Blobs, Checkpoints, Instances
from fsd.client.contract import Contract
from fsd.client.download import download
from fsd.client.files import Files, JsonObject, PutOptions
from fsd.client.http import Body, BytesBody, Http, HttpOptions
from fsd.client.identity import Claim, data_identity
from fsd.client.sources import StreamBody
from fsd.client.transfer import CopyOptions, CopyResult
from fsd.client.upload import upload
from fsd.host.seam import Host
from fsd.model.errors import UsageError

Path: TypeAlias = str | bytes
LocalPath: TypeAlias = str | bytes | os.PathLike[str]
Bytes: TypeAlias = bytes | bytearray | memoryview


class FileSystem:
    """Remote paths are absolute, text or bytes; entries are the stat objects of docs/protocol.md."""

    def __init__(self, http: Http) -> None:
        self.http = http
        self.id = http.identity.file_system_id
        self._files = Files(http)
        contract = Contract(http)
        self.checkpoints = Checkpoints(contract)
        self.instances = Instances(contract)
        self.blobs = Blobs(contract)

    def __enter__(self) -> FileSystem:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Drop the connections; calls that wait for another try end."""
        self.http.close()

    # -- files ---------------------------------------------------------------------------------------

    def read(self, path: Path, *, offset: int = 0, length: int | None = None) -> bytes:
        """The bytes of a file, or a range of them, of one state. Raises `NotFound`, `Conflict` (it changed
        meanwhile)."""
        return b"".join(self.stream(path, offset=offset, length=length))

    def stream(self, path: Path, *, offset: int = 0, length: int | None = None) -> Iterator[bytes]:
        """As `read`, piece by piece as they arrive."""
        return self._files.read(_raw(path), offset=offset, length=length)

    def write(
        self,
        path: Path,
        data: Bytes | BinaryIO,
        *,
        append: bool = False,
        overwrite: bool = True,
        mode: int | None = None,
        if_match: str | None = None,
    ) -> JsonObject:
        """Write a whole file (or append to it): visible and durable when this returns; its stat object.
        Missing directories are made. `if_match` is the revision the file must still have. Raises
        `Conflict`; `TypeError` for a text."""
        options = PutOptions(overwrite=overwrite, append=append, mode=mode, if_match=if_match)
        return self._files.write(_raw(path), _body(data), options)

    def stat(self, path: Path, *, follow: bool = True) -> JsonObject:
        """What is at a path; raises `NotFound`."""
        return self._files.stat(_raw(path), follow=follow)

    def list(self, path: Path = "/", *, recursive: bool = False) -> Iterator[JsonObject]:
        """The entries of a directory in order of name, or all below it, parents first."""
        return self._files.list(_raw(path), recursive=recursive)

    def make_dir(self, path: Path, *, parents: bool = True) -> JsonObject:
        """Make a directory; with `parents` one that exists is no error."""
        return self._files.mkdir(_raw(path), parents=parents)

    def remove(self, path: Path, *, recursive: bool = False) -> int:
        """Remove a file, an empty directory, or with `recursive` a tree; how many entries went."""
        return int(self._files.remove(_raw(path), recursive=recursive)["removed"])

    def rename(self, source: Path, target: Path, *, overwrite: bool = True) -> JsonObject:
        return self._files.rename(_raw(source), _raw(target), overwrite=overwrite)

    def upload_dir(self, local: LocalPath, path: Path, *, resume: bool = False) -> CopyResult:
        """Copy a local tree to exactly `path`, in parallel, each file whole or not at all. `resume` leaves
        what has its size and mtime there already. What could not be copied is in the result (`ok`,
        `failed`)."""
        options = CopyOptions(recursive=True, resume=resume)
        return upload(self._files, _local_dir(local), _raw(path).rstrip(b"/") or b"/", options)

    def download_dir(self, path: Path, local: LocalPath, *, resume: bool = False) -> CopyResult:
        """Copy a remote tree to exactly the local `local`."""
        options = CopyOptions(recursive=True, resume=resume)
        return download(self._files, _raw(path), os.fsencode(local), options)


def _raw(path: Path) -> bytes:
    raw = path if isinstance(path, bytes) else os.fsencode(path)
    if not raw.startswith(b"/"):
        raise UsageError(f"a remote path is absolute: {path!r}", hint="begin it with '/'")
    return raw


def _body(data: Bytes | BinaryIO) -> Body:
    if isinstance(data, (bytes, bytearray, memoryview)):
        return BytesBody(bytes(data))
    if not hasattr(data, "read"):
        raise TypeError(f"what is written is bytes or an open binary file, not {type(data).__name__}")
    return StreamBody(data, b"the stream")


def _local_dir(local: LocalPath) -> bytes:
    raw = os.fsencode(local)
    if not os.path.isdir(raw):
        raise UsageError(f"{local!r} is no local directory")
    return os.path.realpath(raw)


def open_http(
    token: str,
    *,
    region: str | None = None,
    endpoint: str | None = None,
    ca_file: str | None = None,
    insecure: bool = False,
    timeout: float | None = None,
    retry_for: float | None = None,
) -> Http:
    """The transport for a token; see `connect`."""
    claim = Claim(token=token, region=region, endpoint=endpoint, insecure=insecure)
    usual = HttpOptions()
    options = HttpOptions(
        timeout=usual.timeout if timeout is None else timeout,
        retry_for=usual.retry_for if retry_for is None else retry_for,
        ca_file=ca_file,
    )
    return Http(data_identity(claim), Host(), options)


def connect(
    token: str,
    *,
    region: str | None = None,
    endpoint: str | None = None,
    ca_file: str | None = None,
    insecure: bool = False,
    timeout: float | None = None,
    retry_for: float | None = None,
) -> FileSystem:
    """The filesystem that `token` names, on the server its region code leads to (`endpoint` overrides).

    Nothing is asked yet. `timeout` bounds a silence of the server, `retry_for` how long failed tries go on
    (seconds). `insecure` lets the token travel over plain HTTP to another machine. Raises
    `NotAuthenticated`, `UnknownRegion`, `UsageError`.
    """
    return FileSystem(
        open_http(
            token,
            region=region,
            endpoint=endpoint,
            ca_file=ca_file,
            insecure=insecure,
            timeout=timeout,
            retry_for=retry_for,
        )
    )
