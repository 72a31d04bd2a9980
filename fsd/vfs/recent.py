"""`Recent`: bytes of blobs at hand without the server: those last read, and those own flushes made.

A file that was just written is often read next (a compiler, `git status`, SQLite): its changes were committed
meanwhile, so its bytes are blobs now, which no cache has. Small ones that were made on this thread stay in
memory; of the others it is kept how they were made from the log, as long as the log has those bytes.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable
from typing import Final

from fsd.model.errors import IntegrityError
from fsd.model.limits import BLOB_MEMORY, KIB, RECENT_SOURCES
from fsd.vfs.build import Source, from_log
from fsd.vfs.log import Log

_LARGE: Final = 256 * KIB


class Recent:
    """See the module. The volume's thread."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._blobs: OrderedDict[bytes, bytes] = OrderedDict()
        self._bytes = 0
        self._sources: OrderedDict[bytes, Source] = OrderedDict()

    def get(self, digest: bytes) -> bytes | None:
        """The verified bytes of a blob, if they are at hand."""
        data = self._blobs.get(digest)
        if data is not None:
            self._blobs.move_to_end(digest)
            return data
        source = self._sources.get(digest)
        if source is None:
            return None
        try:
            data = from_log(source, self._log)
        except IntegrityError:
            data = None
        if data is None or hashlib.sha256(data).digest() != digest:
            del self._sources[digest]
            return None
        self.keep(digest, data)
        return data

    def in_memory(self, digest: bytes) -> bytes | None:
        """The same where that costs nothing."""
        return self._blobs.get(digest)

    def passed(self, digest: bytes) -> None:
        """A reader has reached the end of the blob: a large one is the first to go, before what was read
        ahead and not used yet."""
        if len(self._blobs.get(digest, b"")) >= _LARGE:
            self._blobs.move_to_end(digest, last=False)

    def __contains__(self, digest: bytes) -> bool:
        """Whether `get` would probably have it."""
        return digest in self._blobs or digest in self._sources

    def keep(self, digest: bytes, data: bytes) -> None:
        """Hold verified bytes in memory, within BLOB_MEMORY."""
        if digest in self._blobs:
            return
        self._blobs[digest] = data
        self._bytes += len(data)
        while self._bytes > BLOB_MEMORY and len(self._blobs) > 1:
            _, old = self._blobs.popitem(last=False)
            self._bytes -= len(old)

    def made(self, sources: Iterable[Source]) -> None:
        """Blobs that were committed, and how to make them again."""
        for source in sources:
            if source.hash not in self._blobs:
                self._sources[source.hash] = source
        while len(self._sources) > RECENT_SOURCES:
            self._sources.popitem(last=False)

    def source(self, digest: bytes) -> Source | None:
        """How to make a blob again, for a job on another thread."""
        return self._sources.get(digest)
