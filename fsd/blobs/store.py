"""`BlobStore`: what the service needs of an object store, and the rule for keys."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple, Protocol

from fsd.model.errors import UsageError
from fsd.model.plain import dataclass
from fsd.model.space import Space

_KEY: Final = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]*(/[A-Za-z0-9_-][A-Za-z0-9_.-]*)*")
KEY_MAX: Final = 512


class Listed(NamedTuple):
    """An object as `list` tells it: `mtime` in whole seconds by the store's clock."""

    key: str
    size: int
    mtime: int


class OpenFile:
    """A descriptor, closed when nobody refers to it any more: an answer may end anywhere on its way."""

    __slots__ = ("fd",)

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __del__(self) -> None:
        os.close(self.fd)


@dataclass(frozen=True, slots=True)
class Stretch:
    """Bytes of an object that is a file, which were not read: the kernel can pass them on (sendfile)."""

    file: OpenFile
    offset: int
    length: int

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, some: slice) -> Stretch:
        start, stop, _ = some.indices(self.length)
        return Stretch(self.file, self.offset + start, max(0, stop - start))

    def with_next(self, other: Stretch) -> Stretch | None:
        """Both in one, where `other` follows in the same file."""
        if other.file is not self.file or other.offset != self.offset + self.length:
            return None
        return Stretch(self.file, self.offset, self.length + other.length)

    def read(self) -> bytes:
        """The bytes, fewer where the file has become shorter."""
        return os.pread(self.file.fd, self.length, self.offset)


class BlobStore(Protocol):
    """Objects that are written whole and never change. Blocking; any thread.

    Keys are `name/name/…` of letters, digits, `_ . -`, no name beginning with a dot. Every method raises
    `Unavailable` when the store cannot be reached and `NoSpace` when it is full.
    """

    def put(self, key: str, pieces: Iterable[bytes | memoryview]) -> None:
        """Store the pieces as one object, durable on return, all or nothing. Putting a key again replaces
        the object in one step."""
        ...

    def get(self, key: str, offset: int, length: int) -> bytes:
        """`length` bytes from `offset`. Raises `NotFound`, or `IntegrityError` when the object is shorter."""
        ...

    def stretch(self, key: str, offset: int, length: int) -> Stretch | None:
        """As `get`, with no more than a look at its beginning; None where objects are no files. What fails
        behind that, its reader meets."""
        ...

    def head(self, key: str) -> int | None:
        """The size, None when there is no such object."""
        ...

    def list(self, prefix: str, after: str = "") -> Iterator[Listed]:
        """Every object whose key begins with `prefix` and comes after `after`, in order of key. Unfinished
        ones do not appear; of those that come and go meanwhile, each may or may not."""
        ...

    def delete(self, key: str) -> None:
        """Remove the object; none there is no error."""
        ...

    def tidy(self, above: str) -> None:
        """Remove the empty directory `above` (`name/name`), where there are directories; others stay."""
        ...

    def space(self) -> Space | None:
        """The room for objects now, None where nobody says. Cheap: asked for with each page of the feed."""
        ...


def check_key(key: str) -> str:
    """`key`; raises `UsageError` for one that is none."""
    if len(key) > KEY_MAX or not _KEY.fullmatch(key):
        raise UsageError(f"{key!r} is no object key")
    return key
