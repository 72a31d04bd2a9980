"""A program that changes files as fast as it can, each system call with a number; and the model of it.

    python -m support.soakwriter DIRECTORY SEED COUNTERS

COUNTERS is a file of three numbers in shared memory: calls begun, calls returned, and 1 to stop. What
DIRECTORY holds after so many calls is a function of SEED alone (`Steps`), so a state of it can be told to be
a prefix of what the program did, and of which length.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import random
import struct
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

FILES: Final = 40  # at most, in a directory of its own and three below it
# Bytes of a call, at most one request of the kernel's.
SIZES: Final = (0, 17, 900, 4096, 20_000, 130_000, 700_000)
WEIGHTS: Final = (4, 20, 20, 30, 20, 5, 1)
# Bytes a second on average, some seconds' worth at once: calls come without pause, but what minutes of them
# leave has to fit a test's S3 server, which gives back what was deleted only later.
RATE: Final = 1_500_000
AHEAD: Final = 2.0
LARGEST: Final = 2_500_000
PAGE: Final = 4096
_NUMBERS: Final = struct.Struct("<q")
Value = tuple[str, int, str]  # kind, permission bits, hash or target
Step = tuple[str, str, int, int, int]  # what, path, and up to three numbers


class Counters:
    """The three numbers; one writer each."""

    def __init__(self, path: Path) -> None:
        if not path.exists():
            path.write_bytes(bytes(24))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 24)

    def _get(self, at: int) -> int:
        return int(_NUMBERS.unpack_from(self._map, at)[0])

    def _set(self, at: int, value: int) -> None:
        _NUMBERS.pack_into(self._map, at, value)

    begun = property(lambda self: self._get(0), lambda self, value: self._set(0, value))
    done = property(lambda self: self._get(8), lambda self, value: self._set(8, value))
    stop = property(lambda self: self._get(16), lambda self, value: self._set(16, value))


@dataclass
class Node:
    """A file with its bytes, or a symlink with its target."""

    mode: int
    data: bytearray = field(default_factory=bytearray)
    target: str = ""
    hashed: str = ""

    def value(self) -> Value:
        if self.target:
            return "l", 0o777, self.target
        self.hashed = self.hashed or hashlib.sha256(self.data).hexdigest()
        return "f", self.mode, self.hashed


class Steps:
    """What the program does, and the tree it makes; `next` says a call, `apply` is that call on the model."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self.count = 0
        self.nodes: dict[str, Node] = {}
        self.directories: set[str] = set()

    def next(self) -> Step:
        rng = self._rng
        files = sorted(path for path, node in self.nodes.items() if not node.target)
        where = rng.choice(["", *sorted(f"{one}/" for one in self.directories)])
        fresh = f"{where}f{self.count}"
        what = rng.random()
        if len(self.directories) < 3 and what < 0.1:
            return "mkdir", f"d{self.count}", 0, 0, 0
        if not files or (what < 0.25 and len(self.nodes) < FILES):
            return "create", fresh, 0, 0, 0
        path = rng.choice(files)
        if what < 0.6:
            size, length = len(self.nodes[path].data), rng.choices(SIZES, WEIGHTS)[0]
            at = rng.choice((0, size, rng.randrange(size + 1)))
            return "write", path, min(at, LARGEST - length), length, rng.getrandbits(32)
        if what < 0.66:
            return "truncate", path, rng.randrange(len(self.nodes[path].data) + 1), 0, 0
        if what < 0.72:
            return "chmod", path, rng.choice((0o600, 0o640, 0o755)), 0, 0
        if what < 0.8:
            return "rename", path, rng.randrange(len(files)), 0, 0
        if what < 0.83:
            return "link" if len(self.nodes) < FILES else "unlink", path, 0, 0, 0
        if what < 0.86:
            return "symlink", fresh, 0, 0, 0
        if what < 0.88 and self.directories:
            return "rmdir", rng.choice(sorted(self.directories)), 0, 0, 0
        if what < 0.9:
            return "fsync", path, 0, 0, 0
        return "unlink", rng.choice(sorted(self.nodes)), 0, 0, 0

    def other(self, step: Step) -> str:
        """Where a rename or link leads: onto a file there is, or to a new name."""
        if step[0] == "rename" and step[2] % 2:
            files = sorted(path for path, node in self.nodes.items() if not node.target)
            target = files[step[2]]
            if self.nodes[target] is not self.nodes[step[1]]:
                return target
        return f"n{self.count}"

    def apply(self, step: Step) -> None:
        what, path, first, length, number = step
        if what == "mkdir":
            self.directories.add(path)
        elif what == "rmdir":
            if not any(name.startswith(path + "/") for name in self.nodes):
                self.directories.remove(path)
        elif what == "create":
            self.nodes[path] = Node(0o644)
        elif what == "symlink":
            self.nodes[path] = Node(0o777, target=f"t{self.count}")
        elif what == "unlink":
            del self.nodes[path]
        elif what == "rename":
            target = self.other(step)
            self.nodes[target] = self.nodes.pop(path)
        elif what == "link":
            self.nodes[self.other(step)] = self.nodes[path]
        elif what == "chmod":
            self.nodes[path].mode = first
        elif what in ("write", "truncate"):
            node = self.nodes[path]
            node.hashed = ""
            if what == "truncate":
                del node.data[first:]
            else:
                node.data[first : first + length] = content(number, length)
        self.count += 1

    def begin(self, step: Step) -> bool:
        """The first part of a call that the kernel passes on in two: a write that begins within a page it has
        not cached goes to that page's end first. False: `step` is not of these."""
        what, path, first, length, number = step
        part = -first % PAGE
        if what != "write" or not 0 < part < length:
            return False
        node = self.nodes[path]
        node.hashed = ""
        node.data[first : first + part] = content(number, length)[:part]
        return True

    def manifest(self) -> dict[str, Value]:
        found = {path: node.value() for path, node in self.nodes.items()}
        found.update({path: ("d", 0o755, "") for path in self.directories})
        return found


def content(number: int, length: int) -> bytes:
    """Bytes that do not compress; of few different ones, so that what one drops another uploads."""
    return random.Random(number % 97).randbytes(length)


def call(top: Path, steps: Steps, step: Step) -> None:
    """The one system call that changes something."""
    what, name, first, length, number = step
    path = top / name
    if what == "mkdir":
        path.mkdir(0o755)
    elif what == "rmdir":
        try:
            path.rmdir()
        except OSError:
            assert any(path.iterdir()), f"{path} is empty and cannot be removed"
    elif what == "create":
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
    elif what == "symlink":
        path.symlink_to(f"t{steps.count}")
    elif what == "unlink":
        path.unlink()
    elif what == "rename":
        path.rename(top / steps.other(step))
    elif what == "link":
        os.link(path, top / steps.other(step))
    elif what == "chmod":
        path.chmod(first)
    elif what == "truncate":
        os.truncate(path, first)
    else:
        handle = os.open(path, os.O_RDWR)
        try:
            if what == "fsync":
                os.fsync(handle)
            else:
                assert os.pwrite(handle, content(number, length), first) == length
        finally:
            os.close(handle)


def main() -> None:
    top, steps, counters = Path(sys.argv[1]), Steps(int(sys.argv[2])), Counters(Path(sys.argv[3]))
    os.umask(0o022)
    began, written = time.monotonic(), 0
    while not counters.stop:
        step = steps.next()
        counters.begun = steps.count + 1
        call(top, steps, step)
        steps.apply(step)
        counters.done = steps.count
        written += step[3] if step[0] == "write" else 0
        time.sleep(max(0.0, written / RATE - AHEAD - (time.monotonic() - began)))


if __name__ == "__main__":
    main()
