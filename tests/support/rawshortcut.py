"""The same raw requests once by the shortcut and once by the handlers.

`main` is a process of its own: `sys.argv[1]` is a directory for it, `sys.argv[2]` says by which. Prints one
JSON object: `answers`, what each request was and its whole answer, `handled`, which requests came to a
handler of names, attributes and writes, `looks`, how often the volume was asked for a name, `told`, which
names the kernel may have as absent, `asked`, see `waiting`, and `nonsense`, what is answered where a function
of the shortcut breaks. The clock stands still, so both give the same bytes.
"""

from __future__ import annotations

import json
import os
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fsd.kernel.requests import call_directly
from fsd.model.errors import NoSpace
from fsd.vfs.node import Inode
from fsd.vfs.types import Want
from support.rawfuse import (
    CREATE,
    FLUSH,
    FSYNC,
    GETATTR,
    GETXATTR,
    LINK,
    MKDIR,
    MKNOD,
    READ,
    RENAME,
    RENAME2,
    RMDIR,
    SETATTR,
    SETXATTR,
    SYMLINK,
    UNLINK,
    WRITE,
    Player,
)

LOOKUP, OPENDIR, RELEASEDIR, FSYNCDIR = 1, 27, 29, 30
MANY = 300
HANDLERS = {
    LOOKUP: "lookup",
    GETATTR: "getattr",
    GETXATTR: "getxattr",
    READ: "read",
    FLUSH: "flush",
    FSYNC: "fsync",
    OPENDIR: "opendir",
    RELEASEDIR: "releasedir",
    FSYNCDIR: "fsyncdir",
    SETATTR: "setattr",
    UNLINK: "unlink",
    RENAME: "rename",
    WRITE: "write",
    CREATE: "create",
    RENAME2: "rename",
}
CREATES = os.O_WRONLY | os.O_CREAT | os.O_EXCL
NOW = 1_700_000_000_123_456_789
MODE, UID, GID, SIZE, ATIME, MTIME, NOWS, KILLS = 1, 2, 4, 8, 16, 32, 1 << 7 | 1 << 8, 1 << 11


class Asker:
    """Asks, and notes each answer."""

    def __init__(self, player: Player) -> None:
        self.player = player
        self.answers: list[tuple[str, int, str]] = []
        self.handled: list[str] = []
        self.what = ""

    def count(self, name: str) -> None:
        """Note which requests a handler is called for."""
        operations: Any = self.player.operations
        call: Callable[..., Any] = getattr(operations, name)

        def counting(*args: Any) -> Any:
            self.handled.append(self.what)
            return call(*args)

        setattr(operations, name, counting)

    def ask(self, what: str, operation: int, node: int, body: bytes) -> bytes:
        self.what = what
        error, answer = self.player.kernel.ask(operation, node, body)
        self.answers.append((what, error, answer.hex()))
        return answer

    def create(
        self, what: str, parent: int, name: bytes, *, mode: int = 0o100644, flags: int = CREATES
    ) -> tuple[int, int]:
        """Its node and handle; zeros where it was refused."""
        answer = self.ask(what, CREATE, parent, struct.pack("<IIII", flags, mode, 0o022, 0) + name + b"\0")
        if not answer:
            return 0, 0
        return struct.unpack_from("<Q", answer)[0], struct.unpack_from("<Q", answer, 128)[0]

    def make(self, what: str, operation: int, parent: int, body: bytes) -> int:
        return int(struct.unpack_from("<Q", self.ask(what, operation, parent, body))[0])

    def write(
        self, what: str, fh: int, offset: int, data: bytes, told: int = 0, flags: int = os.O_WRONLY
    ) -> None:
        head = struct.pack("<QQIIQII", fh, offset, len(data), told, 0, flags, 0)
        self.ask(what, WRITE, 0, head + data)

    def set(
        self,
        what: str,
        node: int,
        valid: int,
        *,
        size: int = 0,
        atime: tuple[int, int] = (0, 0),
        mtime: tuple[int, int] = (0, 0),
        mode: int = 0,
        uid: int = 0,
        gid: int = 0,
    ) -> None:
        times = atime[0], mtime[0], 0, atime[1], mtime[1], 0
        body = struct.pack("<IIQQQqqqIIIIIIII", valid, 0, 0, size, 0, *times, mode, 0, uid, gid, 0)
        self.ask(what, SETATTR, node, body)

    def look(self, what: str, node: int) -> None:
        self.ask(f"attributes {what}", GETATTR, node, struct.pack("<IIQ", 0, 0, 0))

    def read(self, what: str, fh: int, offset: int, size: int) -> None:
        self.ask(f"read {what}", READ, 0, struct.pack("<QQIIQII", fh, offset, size, 0, 0, 0, 0))

    def value(self, what: str, node: int, name: bytes, size: int) -> None:
        self.ask(f"value {what}", GETXATTR, node, struct.pack("<II", size, 0) + name + b"\0")

    def handle(self, what: str, operation: int, fh: int) -> None:
        self.ask(what, operation, 0, struct.pack("<QIIQ", fh, 0, 0, 0))

    def named_twice(self, what: str, parent: int, *names: bytes) -> None:
        """The second time perhaps without a call of Python's."""
        for name in names * 2:
            self.named(f"{name!r} {what}", parent, name)

    def named(self, what: str, parent: int, name: bytes) -> None:
        self.ask(f"lookup {what}", LOOKUP, parent, name + b"\0")


def names(asker: Asker) -> None:
    asker.set("times of the root", 1, ATIME | MTIME, atime=(1, 0), mtime=(1, 0))  # its own are the server's
    one = asker.make("mkdir", MKDIR, 1, struct.pack("<II", 0o2775, 0) + b"one\0")
    two = asker.make("mkdir", MKDIR, 1, struct.pack("<II", 0o755, 0) + b"two\0")
    asker.set("of a group", one, GID | MODE, gid=7, mode=0o42775)
    node, _ = asker.create("create", one, b"file")
    asker.create("create again", one, b"file")
    asker.create("create what is there", one, b"file", flags=os.O_WRONLY | os.O_CREAT)
    asker.create("create set-id", two, b"program", mode=0o106755)
    asker.create("create in a file", node, b"below")
    asker.create("create nowhere", 1 << 40, b"below")
    asker.create("create a long name", two, b"n" * 255)
    asker.create("create too long a name", two, b"n" * 256)
    asker.create("create bytes", two, bytes(range(128, 255)))
    asker.make("mknod", MKNOD, one, struct.pack("<IIII", 0o020644, 0x12345, 0, 0) + b"device\0")
    asker.make("symlink", SYMLINK, one, b"link\0target\0")
    asker.make("link", LINK, two, struct.pack("<Q", node) + b"second\0")
    for name in (b"file", b"device", b"link", b"nothing", b"n" * 256):
        asker.named(repr(name[:9]), one, name)
    asker.named("the directory", 1, b"one")
    asker.named("in a file", node, b"below")

    def rename(what: str, name: bytes, to: int, new: bytes, flags: int | None = 0) -> None:
        head = struct.pack("<Q", to) if flags is None else struct.pack("<QII", to, flags, 0)
        asker.ask(what, RENAME if flags is None else RENAME2, one, head + name + b"\0" + new + b"\0")
        asker.look(f"after {what}", one)
        asker.look(f"there, after {what}", to)

    rename("rename", b"file", one, b"other", None)
    rename("rename away", b"other", two, b"away", None)
    rename("rename what is not", b"other", two, b"away")
    rename("rename over", b"link", two, b"program")
    rename("rename, not over", b"device", two, b"away", 1)
    rename("exchange", b"device", two, b"away", 2)
    rename("unknown flags", b"away", two, b"x", 8)
    rename("rename to dots", b"away", two, b"..")
    rename("rename too long", b"away", two, b"n" * 256)
    for name, parent in ((b"away", two), (b"second", two), (b"second", two), (b"one", 1)):
        asker.ask(f"unlink {name!r}", UNLINK, parent, name + b"\0")
        asker.look(f"after unlink {name!r}", parent)


def absent(asker: Asker) -> None:
    """Names that do not exist, do, and do no more."""
    three = asker.make("mkdir", MKDIR, 1, struct.pack("<II", 0o755, 0) + b"three\0")
    four = asker.make("mkdir", MKDIR, three, struct.pack("<II", 0o755, 0) + b"four\0")
    asker.named_twice("in a new directory", three, b"none", b"four", b"", b"n" * 255, b"n" * 256)
    asker.named_twice("in another", four, b"none")
    asker.create("create none", three, b"none")
    asker.named_twice("that was made", three, b"none", b"other")
    asker.ask("rename none", RENAME, three, struct.pack("<Q", four) + b"none\0other\0")
    asker.named_twice("that went", three, b"none")
    asker.named_twice("that came", four, b"none", b"other")
    asker.ask("unlink other", UNLINK, four, b"other\0")
    asker.named_twice("that was removed", four, b"other")
    volume = asker.player.volume
    asker.player.posted(lambda: volume.mkdir(volume.node(four).ino, b"none", 0o755, 0, 0))
    asker.named_twice("that was made otherwise", four, b"none", b"other")
    asker.ask("rmdir", RMDIR, four, b"none\0")
    asker.ask("rmdir", RMDIR, three, b"four\0")
    asker.named_twice("without a directory", three, b"four")
    for at in range(MANY):
        asker.named("of many", three, b"%d" % at)


def files(asker: Asker) -> None:
    node, fh = asker.create("create", 1, b"written", mode=0o106755)
    asker.write("write", fh, 0, b"abc")
    asker.write("write behind", fh, 5000, b"abc" * 1000)
    asker.write("write, appending", fh, 0, b"end", flags=os.O_WRONLY | os.O_APPEND)
    asker.write("write nothing", fh, 10, b"")
    asker.write("write too far", fh, 1 << 62, b"x")
    asker.write("write, no handle", fh + 1000, 0, b"x")
    asker.look("written", node)
    asker.write("write from pages", fh, 0, b"page", told=1)
    asker.write("write that kills", fh, 0, b"x", told=4)
    asker.look("killed", node)
    _, other = asker.create("create another", 1, b"another")
    asker.write("write the other", other, 0, b"x" * 2048)
    asker.set("mode", node, MODE, mode=0o100640)
    asker.set("owner", node, UID | GID, uid=4242, gid=4243)
    asker.set("owner that kills", node, UID | KILLS, uid=4244)
    asker.set("times", node, ATIME | MTIME, atime=(1, 2), mtime=(1 << 33, 999_999_999))
    asker.set("times before 1970", node, ATIME | MTIME, atime=(-5, 7), mtime=(-1, 0))
    asker.set("one time", node, MTIME, mtime=(77, 0))
    asker.set("times of now", node, ATIME | MTIME | NOWS, atime=(79, 1), mtime=(80, 2))
    asker.set("size", node, SIZE, size=10)
    asker.set("size and time", node, SIZE | MTIME, size=12, mtime=(78, 0))
    asker.set("nothing that is there", 1 << 40, MODE, mode=0o100640)
    asker.set("mode of the root", 1, MODE, mode=0o040711)
    asker.look("set", node)
    asker.look("root", 1)
    reader, _ = asker.player.kernel.open(node)
    asker.write("write by who reads", reader, 0, b"x")
    value = struct.pack("<II", 4, 0) + b"security.capability\0caps"
    asker.ask("capability", SETXATTR, node, value)
    asker.write("write to a program", fh, 0, b"y")
    asker.player.posted(lambda: asker.player.operations.entries.silent(True))
    asker.named("while the feed is silent", 1, b"written")
    asker.named("of nothing, while it is", 1, b"absent")
    asker.set("mode, while it is", node, MODE, mode=0o100600)


def handles(asker: Asker) -> None:
    """What is asked of open files and directories, and of attributes."""
    node, fh = asker.create("create", 1, b"open")
    asker.write("write, to be read", fh, 0, b"abc" * 1000)
    reader, _ = asker.player.kernel.open(node)
    asker.player.posted()
    pieces = [("all", 0, 1 << 17), ("a part", 5, 7), ("the end", 2990, 4096), ("behind", 1 << 20, 1)]
    for what, offset, size in pieces:
        asker.read(what, reader, offset, size)
    asker.read("no handle", reader + 1000, 0, 1)
    asker.ask("set a value", SETXATTR, node, struct.pack("<II", 5, 0) + b"user.some\0value")
    for what, name in (("there", b"user.some"), ("absent", b"user.none"), ("label", b"security.selinux")):
        for size in (0, 3, 64):
            asker.value(f"{what}, {size}", node, name, size)
    asker.value("of no class", node, b"name", 64)
    asker.value("of a name of nothing", node, b"user.", 64)
    asker.value("of nothing that is there", 1 << 40, b"user.some", 64)
    asker.look("of an open file", node)
    asker.look("of nothing that is there", 1 << 40)
    for operation, what in ((FLUSH, "flush"), (FSYNC, "fsync"), (FSYNCDIR, "fsyncdir")):
        asker.handle(f"{what}, no handle", operation, fh + 1000)
    asker.player.posted()  # the flush is not known to be for nothing
    asker.handle("flush", FLUSH, fh)
    directory = asker.make("mkdir", MKDIR, 1, struct.pack("<II", 0o755, 0) + b"opened\0")
    for what, which in (("root", 1), ("directory", directory), ("file", node), ("nothing", 1 << 40)):
        answer = asker.ask(f"opendir {what}", OPENDIR, which, struct.pack("<II", 0, 0))
        if answer:
            asker.handle(f"releasedir {what}", RELEASEDIR, struct.unpack_from("<Q", answer)[0])


def syncs(asker: Asker) -> None:
    """What waits for a commit: that is made, refused, and not waited for any more."""
    player = asker.player
    player.posted(lambda: player.loop.hook(player.machine.pump, player.operations.abort))
    _, fh = asker.create("create to be synced", 1, b"synced")
    answer = asker.ask("opendir to sync", OPENDIR, 1, struct.pack("<II", 0, 0))
    directory = struct.unpack_from("<Q", answer)[0]
    asker.handle("fsyncdir", FSYNCDIR, directory)
    asker.handle("fsyncdir of nothing", FSYNCDIR, directory)
    asker.write("write to be synced", fh, 0, b"x" * 100)
    asker.handle("fsync", FSYNC, fh)
    asker.handle("fsync of nothing", FSYNC, fh)
    player.posted(lambda: player.volume.handles[fh].__setattr__("error", NoSpace("full")))
    asker.handle("fsync that is told", FSYNC, fh)
    asker.handle("fsync after that", FSYNC, fh)

    def refuse() -> None:
        player.volume.core.fail_commit_wants(NoSpace("full"))
        player.machine.settle()

    for end in (refuse, player.operations.abort):
        player.posted(lambda: setattr(player.volume.committer, "kick", lambda: player.loop.post(end)))  # noqa: B023
        asker.write("write in vain", fh, 0, b"y" * 100)
        asker.handle("fsync in vain", FSYNC, fh)
    player.posted(lambda: player.volume.committer.__dict__.pop("kick"))
    asker.handle("fsync at last", FSYNC, fh)
    asker.handle("releasedir", RELEASEDIR, directory)


def waiting(asker: Asker) -> int:
    """How many questions it takes to look up a name, and to make one, where the names are not known."""
    player, volume = asker.player, asker.player.volume
    node = asker.make("mkdir", MKDIR, 1, struct.pack("<II", 0o755, 0) + b"five\0")
    _, fh = player.kernel.make(b"committed", b"x")
    asker.create("create before", node, b"there")
    player.posted(lambda: player.committed(fh))
    asked: list[bytes] = []
    name = volume.loader.name

    def asking(parent: Inode, what: bytes, **more: Any) -> Want:
        asked.append(what)
        return name(parent, what, **more)

    def forget() -> None:
        directory = volume.node(node)
        directory.complete = False
        directory.entries.clear()

    volume.loader.name = asking  # type: ignore[method-assign, assignment]
    player.machine.start()
    player.posted(forget)
    asker.named("a name that has to be asked for", node, b"there")
    player.posted(forget)
    asker.create("create what has to be asked for", node, b"there")
    return len(asked)


def breaks(*args: object) -> Any:
    raise RuntimeError("a defect")


def defect(asker: Asker) -> None:
    """The volume breaks in a call."""
    volume: Any = asker.player.volume
    unlink = volume.unlink
    volume.unlink = breaks
    asker.ask("unlink with a defect", UNLINK, 1, b"another\0")
    volume.unlink = unlink
    asker.ask("unlink after a defect", UNLINK, 1, b"another\0")


def nonsense(asker: Asker) -> list[int]:
    """The errors told where what is called instead of a handler raises, or gives what is no answer."""
    player = asker.player
    jobs = player.volume.waiting_jobs
    gives: list[Callable[..., Any]] = [breaks, lambda *args: "text", lambda *args: 1 << 70]
    errors = []
    for given in gives:
        player.posted(lambda given=given: call_directly({UNLINK: given}, jobs))  # type: ignore[misc]
        errors.append(player.kernel.ask(UNLINK, 1, b"nothing\0")[0])
    player.posted(lambda: call_directly({UNLINK: lambda *args: 0}, jobs))
    return [*errors, player.kernel.ask(UNLINK, 1, b"nothing\0")[0]]


def main() -> None:
    player = Player(Path(sys.argv[1]), wall_ns=lambda: NOW)
    asker = Asker(player)
    for name in sorted(set(HANDLERS.values())):
        asker.count(name)
    player.start()
    player.operations.told_of_privileges = True
    if sys.argv[2] == "handlers":
        player.posted(lambda: call_directly(dict.fromkeys(HANDLERS, lambda *args: None), ()))
    looks: list[bytes] = []
    lookup = player.volume.lookup

    def looking(parent: int, name: bytes, *args: Any) -> Any:
        looks.append(name)
        return lookup(parent, name, *args)

    player.volume.lookup = looking  # type: ignore[method-assign, assignment]
    names(asker)
    absent(asker)
    files(asker)
    defect(asker)
    handles(asker)
    asked = waiting(asker)
    syncs(asker)
    player.posted()
    told = sorted((one.ino, repr(one.name)) for one in player.operations.entries.take_absent())
    counts = {"asked": asked, "looks": len(looks), "told": told, "nonsense": nonsense(asker)}
    print(json.dumps({"answers": asker.answers, "handled": asker.handled, **counts}), flush=True)
    os._exit(0)  # the loop's thread waits for requests
