"""A small process of the daemon's that empties shared mappings: it opens files through the mount and fsyncs
them, since only that makes the kernel write what was stored through a mapping.

A process, not a thread: a thread of the daemon that waits for the daemon's own mount cannot be killed, and
with it the daemon could not. Run as a script, without the package: it has to start in some milliseconds.

In: the mount point, then pairs of inode number and path below it, all ended by NUL. Out: a byte for each
pair: `s` synced, `m` moved (another file has that path), `x` it cannot be opened or synced.
"""

from __future__ import annotations

import os
import sys

SYNCED, MOVED, FAILED = b"s", b"m", b"x"


def sync_one(top: int, ino: int, path: bytes) -> bytes:
    try:
        fd = os.open(
            path.lstrip(b"/"), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=top
        )
    except FileNotFoundError:
        return MOVED
    except OSError:
        return FAILED
    try:
        if os.fstat(fd).st_ino != ino:
            return MOVED
        os.fsync(fd)
        return SYNCED
    except OSError:
        return FAILED
    finally:
        os.close(fd)


def main() -> None:
    place, *rest = sys.stdin.buffer.read().split(b"\0")[:-1]
    top = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    answers = [sync_one(top, int(ino), path) for ino, path in zip(rest[::2], rest[1::2])]
    sys.stdout.buffer.write(b"".join(answers))


if __name__ == "__main__":
    main()
