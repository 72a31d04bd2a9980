"""`tinymount` with the operations that reach us past pyfuse3, or without the extension that passes them on.

Run as `python -m support.furthermount with|without MOUNTPOINT LOOP LOGFILE` in tests/. SEEK_DATA answers one
byte further on; fallocate raises `ValueError` with KEEP_SIZE and else parks until LOGFILE.go exists.
"""

from __future__ import annotations

import importlib
import os
import sys

if sys.argv.pop(1) == "without":
    sys.modules["fsd.kernel._extra"] = None  # type: ignore[assignment]
importlib.import_module("fsd.kernel.extra")  # before pyfuse3

from fsd.vfs.ranges import KEEP_SIZE, Found  # noqa: E402
from fsd.vfs.types import Park  # noqa: E402
from support import tinymount  # noqa: E402
from support.tinyvolume import TinyVolume  # noqa: E402


class FurtherVolume(TinyVolume):
    def seek(self, fh: int, offset: int, whence: int) -> Found:
        return Found(offset + 1, hole=False)

    def allocate(self, fh: int, mode: int, offset: int, length: int) -> None:
        if mode & KEEP_SIZE:
            raise ValueError("a bug")
        want = self._waits(b"held", "an allocation")
        if want is not None:
            raise Park(want, again=False)


if __name__ == "__main__":
    tinymount.TinyVolume = FurtherVolume  # type: ignore[misc]
    code = tinymount.main()
    os._exit(code)
