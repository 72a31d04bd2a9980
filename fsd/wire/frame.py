"""Framed bodies: a msgpack header, then blob bytes. Used by commits, uploads, blob answers and packs.

`FSD1` + u32 big-endian header length + header + payload. The header's `blobs` is a list of
`[hash, codec, raw length, stored length]`; the payload is the stored bytes in that order. The table comes
first, so a sender can pass the pieces to `sendmsg` without joining them, and a receiver can bound and place
each blob before its bytes arrive.
"""

from __future__ import annotations

import hashlib
import struct
import threading
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import msgpack
import zstandard

from fsd.model.errors import IntegrityError, TooLarge, UsageError
from fsd.model.limits import BLOCK, COMMIT_HEADER_MAX, KIB
from fsd.wire.sha import AT_ONCE, sha256_all

MAGIC: Final = b"FSD1"
_HEAD: Final = struct.Struct(">4sI")
RAW: Final = 0
ZSTD: Final = 1
_SAMPLE: Final = 64 * KIB
_LEAST: Final = 512  # bytes; of less nothing is compressed
PIECE_LEAST: Final = 64 * KIB  # a blob is not worth a call of its own below


class _Codecs(threading.local):
    """zstd's contexts for little, kept a thread: making one costs as much as 4 KiB through it (8 us), with
    new tables in it 25 to 85 more. What compresses whole blocks makes its own: it grows with them, to 1.3 MiB
    instead of 0.5, and a thread would keep that."""

    def __init__(self) -> None:
        self.compressor = zstandard.ZstdCompressor(level=1)
        self.decompressor = zstandard.ZstdDecompressor()


_codecs: Final = _Codecs()


class Blob(NamedTuple):
    """A blob as it travels and is stored: `stored` is `raw_len` bytes under `codec`. Where it is a view of a
    received body, it keeps all of that."""

    hash: bytes
    codec: int
    raw_len: int
    stored: bytes | memoryview


def make_blob(data: bytes, *, compress: bool = True, digest: bytes | None = None) -> Blob:
    """Hash `data`, unless its `digest` is known, and compress it with zstd 1 where a sample says that it pays
    (by an eighth or more)."""
    digest = digest or hashlib.sha256(data).digest()
    if compress and len(data) >= _LEAST:
        sample = data[:_SAMPLE]
        small = _codecs.compressor.compress(sample)
        if len(small) * 8 <= len(sample) * 7:
            whole = len(sample) == len(data)
            stored = small if whole else zstandard.ZstdCompressor(level=1).compress(data)
            if len(stored) * 8 <= len(data) * 7:
                return Blob(digest, ZSTD, len(data), stored)
    return Blob(digest, RAW, len(data), data)


def make_blobs(datas: Sequence[bytes], digests: Sequence[bytes]) -> list[Blob]:
    """As `make_blob` each, of up to 64 KiB: compressed by one call, without the interpreter's lock, which is
    given up and asked for again for each otherwise."""
    tried: list[bytes | bytearray | memoryview] = [data for data in datas if _LEAST <= len(data) <= _SAMPLE]
    shorter = iter(_codecs.compressor.multi_compress_to_buffer(tried) if tried else ())
    blobs = []
    for data, digest in zip(datas, digests, strict=True):
        blob = Blob(digest, RAW, len(data), data)
        if _LEAST <= len(data) <= _SAMPLE:
            stored = next(shorter).tobytes()
            if len(stored) * 8 <= len(data) * 7:
                blob = Blob(digest, ZSTD, len(data), stored)
        blobs.append(blob)
    return blobs


def open_blob(blob: Blob) -> bytes:
    """The verified bytes of `blob`; raises `IntegrityError`. The declared size bounds the inflation."""
    return bytes(_verified([blob])[0])


def open_all(blobs: Sequence[Blob]) -> Iterator[bytes]:
    """As `open_blob` each, in order, hashed some at a time."""
    for at in range(0, len(blobs), AT_ONCE):
        for data in _verified(blobs[at : at + AT_ONCE]):
            yield bytes(data)


def verify(blobs: Sequence[Blob]) -> None:
    """As `open_all`, for whoever does not need the bytes."""
    for at in range(0, len(blobs), AT_ONCE):
        _verified(blobs[at : at + AT_ONCE])


def _verified(blobs: Sequence[Blob]) -> list[bytes | memoryview]:
    found = [_inflated(blob) for blob in blobs]
    for blob, digest in zip(blobs, sha256_all(found), strict=True):
        if digest != blob.hash:
            raise IntegrityError(f"bytes do not match the blob {blob.hash.hex()}")
    return found


def _inflated(blob: Blob) -> bytes | memoryview:
    if not 0 < blob.raw_len <= BLOCK:
        raise IntegrityError(f"a blob declares {blob.raw_len} bytes, at most {BLOCK}")
    data: bytes | memoryview
    if blob.codec == RAW:
        data = blob.stored
    elif blob.codec == ZSTD:
        # The frame's own header must declare the same size: libzstd then never writes more than that.
        try:
            if zstandard.frame_content_size(blob.stored) != blob.raw_len:
                raise IntegrityError("a compressed blob declares another size than its frame")
            data = _codecs.decompressor.decompress(blob.stored, allow_extra_data=False)
        except zstandard.ZstdError as exc:
            raise IntegrityError("a compressed blob is damaged") from exc
    else:
        raise IntegrityError(f"unknown codec {blob.codec}")
    if len(data) != blob.raw_len:
        raise IntegrityError(f"bytes do not match the blob {blob.hash.hex()}")
    return data


def pack_pieces(header: dict[str, Any], blobs: list[Blob]) -> list[bytes | memoryview]:
    """The frame as pieces for `sendmsg`; `header` gets its `blobs` table."""
    rows = [(b.hash, b.codec, b.raw_len, len(b.stored)) for b in blobs]
    return [pack_head(header, rows), *(b.stored for b in blobs)]


def pack_head(header: dict[str, Any], rows: Sequence[Row]) -> bytes:
    """What stands before the blobs of a frame with this table."""
    raw = msgpack.packb({**header, "blobs": rows}, use_bin_type=True)
    return b"".join((_HEAD.pack(MAGIC, len(raw)), raw))


def pack(header: dict[str, Any], blobs: list[Blob]) -> bytes:
    """The frame as one byte string (small frames and tests)."""
    return b"".join(pack_pieces(header, blobs))


def header_length(start: bytes | bytearray, most: int = COMMIT_HEADER_MAX) -> int:
    """Length of the header that follows the first 8 bytes; raises `UsageError` or `TooLarge`."""
    if len(start) < _HEAD.size:
        raise UsageError("the body is truncated before its header")
    magic, length = _HEAD.unpack_from(start)
    if magic != MAGIC:
        raise UsageError("the body is no fsd frame")
    if length > most:
        raise TooLarge(f"a header of {length} bytes, at most {most}")
    return int(length)


Row: TypeAlias = tuple[bytes, int, int, int]  # hash, codec, raw length, stored length


def _row(digest: object, codec: object, raw_len: object, stored: object) -> Row:
    """A row of the table by its types; bytes(n) and int(x) would also take what is neither."""
    if type(digest) is bytes and type(codec) is int and type(raw_len) is int and type(stored) is int:
        return digest, codec, raw_len, stored
    raise TypeError("a row of the blob table has other types")


def _header(
    raw: bytes | bytearray, left: int, blobs_max: int, bytes_max: int
) -> tuple[dict[str, Any], list[Row]]:
    """The header in `raw`, without its table, and that; `left` bytes of blobs follow."""
    try:
        header = msgpack.unpackb(raw, raw=False, use_list=False)
        table = header.pop("blobs")
        rows = [_row(*row) for row in table]
    except (ValueError, TypeError, KeyError, AttributeError, msgpack.exceptions.UnpackException) as exc:
        raise UsageError("the frame's header cannot be read") from exc
    if len(rows) > blobs_max:
        raise TooLarge(f"{len(rows)} blobs in one body, at most {blobs_max}")
    total = 0
    for digest, _, raw_len, stored in rows:
        if stored < 0 or not 0 < raw_len <= BLOCK or len(digest) != 32:
            raise UsageError("the frame's blob table is damaged")
        total += stored
    if total > bytes_max:
        raise TooLarge(f"{total} blob bytes in one body, at most {bytes_max}")
    if left != total:
        raise UsageError(f"the body has {left} bytes of blobs, its table says {total}")
    return header, rows


def _sliced(rows: list[Row], body: bytes | memoryview, at: int = 0) -> list[Blob]:
    blobs = []
    for digest, codec, raw_len, stored in rows:
        blobs.append(Blob(digest, codec, raw_len, body[at : at + stored]))
        at += stored
    return blobs


class FrameReader:
    """A frame that arrives in pieces: `next` says how long each is to be, `frame` then gives what `unpack`
    would. Large blobs are pieces of their own, which nobody has to copy. One frame; raises as `unpack`."""

    def __init__(self, *, blobs_max: int, bytes_max: int, header_max: int = COMMIT_HEADER_MAX) -> None:
        self._bounds = blobs_max, bytes_max
        self._header_max = header_max
        self._header: dict[str, Any] = {}
        self._rows: list[Row] | None = None

    def next(self, pieces: Sequence[bytes], left: int) -> int:
        """The length of the piece that follows `pieces`, with `left` bytes to come; 0: all of them."""
        if not pieces:
            return _HEAD.size
        if len(pieces) == 1:
            return header_length(pieces[0], self._header_max)
        if self._rows is None:
            self._header, self._rows = _header(pieces[1], left, *self._bounds)
        if any(row[3] < PIECE_LEAST for row in self._rows):
            return 0
        return self._rows[len(pieces) - 2][3]

    def frame(self, pieces: Sequence[bytes]) -> tuple[dict[str, Any], list[Blob]]:
        """Header and blobs; the blobs not yet verified."""
        if self._rows is None:
            raise UsageError("the body is truncated inside its header")
        stored = pieces[2:]
        if len(stored) != len(self._rows):  # together in one
            return self._header, _sliced(self._rows, memoryview(b"".join(stored)))
        return self._header, [Blob(*row[:3], piece) for row, piece in zip(self._rows, stored, strict=True)]


def unpack(
    body: bytes | bytearray,
    *,
    blobs_max: int,
    bytes_max: int,
    header_max: int = COMMIT_HEADER_MAX,
    views: bool = False,
) -> tuple[dict[str, Any], list[Blob]]:
    """Header and blobs of a whole frame; raises `UsageError` (damaged, truncated) or `TooLarge`. With `views`
    the blobs are views of `body`, which must not change any more.

    Blobs are not yet verified: `open_blob` does that.
    """
    length = header_length(body, header_max)
    head_end = _HEAD.size + length
    if len(body) < head_end:
        raise UsageError("the body is truncated inside its header")
    header, rows = _header(body[_HEAD.size : head_end], len(body) - head_end, blobs_max, bytes_max)
    if not views and type(body) is bytes:
        return header, _sliced(rows, body, head_end)
    blobs = _sliced(rows, memoryview(body), head_end)
    return header, blobs if views else [blob._replace(stored=bytes(blob.stored)) for blob in blobs]
