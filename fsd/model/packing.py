"""msgpack of little: records, operations, block lists.

A packer is kept a thread: `msgpack.packb` makes one for each call, with a buffer of 256 KiB, which costs
twice as much as packing an operation with it.
"""

from __future__ import annotations

import threading
from typing import Final

import msgpack

from fsd.model.limits import KIB

_LARGE: Final = 256 * KIB  # of more the buffer, which grew for it, is not kept


class _Packer(threading.local):
    def __init__(self) -> None:
        self.pack = msgpack.Packer(use_bin_type=True).pack


_packer: Final = _Packer()


def packb(value: object) -> bytes:
    """As `msgpack.packb`. Any thread."""
    raw: bytes = _packer.pack(value)
    if len(raw) > _LARGE:
        _packer.pack = msgpack.Packer(use_bin_type=True).pack
    return raw
