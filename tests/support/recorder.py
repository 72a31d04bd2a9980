"""A program that works on a directory and tells each call before it makes it and after it returned.

`python recorder.py DIRECTORY SEED PROFILE STEPS` (standard library only; it stands for the user's tools).
One system call a line, as JSON on stdout, a pipe outside the mount: `{"n", "op", …}` before, `{"ok": n, "t"}`
after (CLOCK_MONOTONIC), `{"failed": n, "errno"}` when it failed, after which it stops. Which calls come is
decided by the seed alone. Profiles: `plain` never syncs; `sync` makes content durable in every way there is;
`map` stores through shared mappings and unmaps.

`fsd` is not imported: what is written here is what a reader must find, told in the plainest words.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import random
import sys
import time
from typing import Any

DIRECTORIES = 5
SIZES = (0, 1, 700, 4096, 5000, 30_000, 70_000, 100_000)


def payload(seed: int, n: int, size: int) -> bytes:
    """The bytes that call `n` writes; nothing else ever holds the same ones."""
    return hashlib.shake_128(b"%d:%d" % (seed, n)).digest(size)


class Recorder:
    """Makes random calls below the working directory. Paths are relative to it."""

    def __init__(self, seed: int, profile: str) -> None:
        self.seed, self.profile = seed, profile
        self.random = random.Random(seed)
        self.n = 0
        self.serial = 0
        self.files: list[str] = []
        self.dirs: list[str] = ["."]
        self.links: list[str] = []
        self.handles: dict[int, tuple[int, str]] = {}  # our number → (fd, path)

    def tell(self, line: dict[str, Any]) -> None:
        raw = json.dumps(line, separators=(",", ":")).encode() + b"\n"
        os.write(1, raw)

    def call(self, op: str, act: Any, **what: Any) -> Any:
        """Tell, act, tell. Ends the program when the call fails: what then is, nobody promised."""
        self.n += 1
        self.tell({"n": self.n, "op": op, **what})
        try:
            result = act()
        except OSError as exc:
            self.tell({"failed": self.n, "errno": exc.errno})
            raise SystemExit(0) from exc
        self.tell({"ok": self.n, "t": time.monotonic()})
        return result

    # Single calls.

    def open(self, path: str, flags: int) -> int:
        fd = self.call("open", lambda: os.open(path, flags, 0o644), path=path, flags=flags, h=self.n + 1)
        self.handles[self.n] = (fd, path)
        return self.n

    def write(self, h: int, size: int, off: int | None = None) -> None:
        fd, n = self.handles[h][0], self.n + 1
        data = payload(self.seed, n, size)
        if off is None:
            self.call("write", lambda: os.write(fd, data), h=h, size=size)
        else:
            self.call("pwrite", lambda: os.pwrite(fd, data, off), h=h, size=size, off=off)

    def close(self, h: int) -> None:
        fd, _ = self.handles.pop(h)
        self.call("close", lambda: os.close(fd), h=h)

    def sync(self, h: int) -> None:
        fd = self.handles[h][0]
        if self.random.random() < 0.7:
            self.call("fsync", lambda: os.fsync(fd), h=h)
        else:
            self.call("fdatasync", lambda: os.fdatasync(fd), h=h)

    def sync_dir(self, path: str) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            self.call("fsyncdir", lambda: os.fsync(fd), path=path)
        finally:
            os.close(fd)

    def store(self, h: int, size: int, finish: str) -> None:
        """A store through a shared mapping of the first `size` bytes, then msync or munmap."""
        fd, n = self.handles[h][0], self.n + 1
        self.call("ftruncate", lambda: os.ftruncate(fd, size), h=h, size=size)
        n = self.n + 1
        area = mmap.mmap(fd, size)
        data = payload(self.seed, n, size)

        def copy() -> None:
            area[:] = data

        self.call("store", copy, h=h, size=size)
        self.call(finish, area.flush if finish == "msync" else area.close, h=h)
        if finish == "msync":
            area.close()

    # Things a program does.

    def name(self) -> str:
        self.serial += 1
        base = self.random.choice(self.dirs)
        return os.path.normpath(f"{base}/f{self.serial}")

    def size(self) -> int:
        return self.random.choice(SIZES)

    def new_file(self) -> None:
        path = self.name()
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
        durable = self.profile == "sync"
        if durable and self.random.random() < 0.25:
            flags |= self.random.choice((os.O_SYNC, os.O_DSYNC))
        h = self.open(path, flags)
        self.files.append(path)
        self.write(h, self.size())
        if self.random.random() < 0.4:
            self.write(h, self.size())
        if durable and self.random.random() < 0.6:
            self.sync(h)
        self.close(h)

    def change_file(self) -> None:
        if not self.files:
            return
        path = self.random.choice(self.files)
        how = self.random.choice(("append", "middle", "truncate", "whole"))
        flags = {"append": os.O_RDWR | os.O_APPEND, "whole": os.O_RDWR | os.O_TRUNC}.get(how, os.O_RDWR)
        h = self.open(path, flags)
        if how == "truncate":
            fd, size = self.handles[h][0], self.random.randrange(0, 40_000)
            self.call("ftruncate", lambda: os.ftruncate(fd, size), h=h, size=size)
        else:
            self.write(h, self.size(), self.random.randrange(0, 20_000) if how == "middle" else None)
        if self.profile == "sync" and self.random.random() < 0.5:
            self.sync(h)
        self.close(h)

    def replace_file(self) -> None:
        """Write a temporary file, rename it over the old one."""
        if not self.files:
            return
        path = self.random.choice(self.files)
        temporary = os.path.join(os.path.dirname(path), f".t{self.serial}")
        self.serial += 1
        h = self.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        self.write(h, self.size())
        if self.profile == "sync" and self.random.random() < 0.5:
            self.sync(h)
        self.close(h)
        self.call("rename", lambda: os.rename(temporary, path), a=temporary, b=path)

    def map_file(self) -> None:
        path = self.name()
        h = self.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        self.files.append(path)
        self.store(h, max(1, self.size()), "msync" if self.profile == "sync" else "munmap")
        self.close(h)

    def namespace(self) -> None:
        choice = self.random.randrange(8)
        if choice == 0 and len(self.dirs) < DIRECTORIES:
            self.serial += 1
            path = os.path.normpath(f"{self.random.choice(self.dirs)}/d{self.serial}")
            self.call("mkdir", lambda: os.mkdir(path), path=path)
            self.dirs.append(path)
        elif choice in (1, 2) and self.files:
            path, to = self.random.choice(self.files), self.name()
            self.call("rename", lambda: os.rename(path, to), a=path, b=to)
            self.files[self.files.index(path)] = to
        elif choice == 3 and len(self.files) > 3:
            path = self.files.pop(self.random.randrange(len(self.files)))
            self.call("unlink", lambda: os.unlink(path), path=path)
        elif choice == 4:
            path = self.name() + ".l"
            target = f"to/{self.serial}"
            self.call("symlink", lambda: os.symlink(target, path), path=path, target=target)
        elif choice == 5 and self.files:
            path, to = self.random.choice(self.files), self.name()
            self.call("link", lambda: os.link(path, to), a=path, b=to)
            self.files.append(to)
        elif choice == 6 and self.files:
            path, mode = self.random.choice(self.files), self.random.choice((0o600, 0o640, 0o755))
            self.call("chmod", lambda: os.chmod(path, mode), path=path, mode=mode)
        elif choice == 7 and self.profile == "sync":
            self.sync_dir(self.random.choice(self.dirs))

    def step(self) -> None:
        if self.profile == "map":
            self.random.choice((self.map_file, self.namespace))()
            return
        acts = [self.new_file, self.new_file, self.change_file, self.replace_file, self.namespace]
        if self.profile == "sync":
            acts.append(self.map_file)
        self.random.choice(acts)()


def main() -> None:
    os.chdir(sys.argv[1])
    os.umask(0o022)
    recorder = Recorder(int(sys.argv[2]), sys.argv[3])
    for _ in range(int(sys.argv[4])):
        recorder.step()


if __name__ == "__main__":
    main()
