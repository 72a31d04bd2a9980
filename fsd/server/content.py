"""Content by hash, as `mount.get_blobs` and a lane (`small`) answer it."""

from __future__ import annotations

from typing import Final

from fsd.model.errors import TooLarge, UsageError
from fsd.model.limits import BLOBS_GET_BYTES, BLOBS_GET_MAX, KIB
from fsd.server.streaming import Piece
from fsd.service.access import FsRef
from fsd.service.open import Service
from fsd.wire.frame import pack_head
from fsd.wire.messages import unpackb

HASHES_MAX: Final = 16 * KIB  # bytes of a list of them


def read_hashes(body: bytes | bytearray) -> tuple[bytes, ...]:
    """Raises `UsageError` or `TooLarge`."""
    hashes = unpackb(body, "the list of hashes")
    if not isinstance(hashes, tuple) or not all(isinstance(one, bytes) and len(one) == 32 for one in hashes):
        raise UsageError("the body is no list of SHA-256 hashes")
    if len(hashes) > BLOBS_GET_MAX:
        raise TooLarge(f"{len(hashes)} hashes in one request, at most {BLOBS_GET_MAX}")
    return hashes


def content_of(service: Service, fs: FsRef, body: bytes | bytearray) -> list[Piece]:
    """The frame of what `body` asks for: in stored form, in the order asked, cut at a bound. Blocks."""
    hashes = read_hashes(body)
    found, absent = service.packs.read_some(fs.id, hashes, BLOBS_GET_BYTES)
    blobs = [found[one] for one in dict.fromkeys(hashes) if one in found]
    rows = [(one.hash, one.codec, one.raw_len, len(one.stored)) for one in blobs]
    return [pack_head({"absent": absent}, rows), *(one.stored for one in blobs)]
