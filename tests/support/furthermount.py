"""`tinymount` with the operations that reach us past pyfuse3, or without the extension that passes them on.

Run as `python -m support.furthermount with|without MOUNTPOINT LOOP LOGFILE` in tests/. SEEK_DATA answers one
byte further on, from 90 on with what is no offset; fallocate raises `ValueError` with KEEP_SIZE and else
parks until LOGFILE.go exists. An open with O_TRUNC changes the mode, and the kernel's pages are never given
up; `statfs` tells the open handles in `f_bavail`.
"""

from __future__ import annotations

import importlib
import os
import stat
import sys

if sys.argv.pop(1) == "without":
    sys.modules["fsd.kernel._extra"] = None  # type: ignore[assignment]
importlib.import_module("fsd.kernel.extra")  # before pyfuse3

from fsd.kernel.direct import DirectWrites  # noqa: E402
from fsd.vfs.ranges import KEEP_SIZE, Found  # noqa: E402
from fsd.vfs.types import Park, Want  # noqa: E402
from support import tinymount  # noqa: E402
from support.tinyvolume import TinyVolume  # noqa: E402


class FurtherVolume(TinyVolume):
    def seek(self, fh: int, offset: int, whence: int) -> Found:
        return Found(offset + 1 if offset < 90 else 1 << 70, hole=False)

    def allocate(self, fh: int, mode: int, offset: int, length: int) -> None:
        if mode & KEEP_SIZE:
            raise ValueError("a bug")
        want = self._waits(b"held", "an allocation")
        if want is not None:
            raise Park(want, again=False)

    def open(self, ino: int, flags: int, *caller: object) -> int:
        if flags & os.O_TRUNC:
            self.nodes[ino].mode &= ~(stat.S_ISUID | stat.S_ISGID)
        return super().open(ino, flags, *caller)

    def statfs(self) -> dict[str, int]:
        return {**super().statfs(), "f_bavail": len(self.handles)}


if __name__ == "__main__":
    DirectWrites.give_up_pages = lambda self, ino: Want("for ever")  # type: ignore[method-assign]
    tinymount.TinyVolume = FurtherVolume  # type: ignore[misc]
    code = tinymount.main()
    os._exit(code)
