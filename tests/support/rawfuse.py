"""A mount's handlers behind raw requests: the kernel's part is played through a socket.

`main` is a process of its own (`sys.argv[1]`: a directory for it), since pyfuse3 has one session. It makes
changes in two directories and asks after each what the kernel asks, twice: at once, when the answer may be
known ahead, and after a posted call, when a handler gives it. Prints one JSON object: for each change and
question both answers, and whether the first came from ahead; the same of reads; what became of handles whose
release was answered ahead; and how often the loop was asked for what else there is while ROW questions came
that are answered ahead.
"""

from __future__ import annotations

import itertools
import json
import os
import socket
import struct
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyfuse3

from fsd.host.seam import Host
from fsd.kernel.machine import Machine
from fsd.kernel.operations import FsdOperations
from fsd.kernel.requests import keep_forgotten, may_wait
from fsd.kernel.session import MAX_TASKS, MIN_TASKS, MiniLoop
from fsd.model.errors import NoSpace
from fsd.vfs.open import open_volume
from fsd.vfs.types import Park, VolumeOptions
from fsd.vfs.volume import Volume
from support.bench import Bench
from support.inproc import InProcess, NoCache

HEAD = struct.Struct("<IIQQIIIHH")
GETATTR, SETATTR, SYMLINK, MKNOD, MKDIR, UNLINK, RMDIR, RENAME, LINK = 3, 4, 6, 8, 9, 10, 11, 12, 13
SETXATTR, GETXATTR, REMOVEXATTR, INIT, CREATE, RENAME2 = 21, 22, 24, 26, 35, 45
OPEN, READ, WRITE, RELEASE, FSYNC, FLUSH = 14, 15, 16, 18, 20, 25
KEEP_CACHE = 1 << 1
CAPABILITY = b"security.capability"
ROW = 300
FLAGS = 1 << 13  # READDIRPLUS, which pyfuse3 wants; nothing that moves requests through pipes


class Kernel:
    """Asks and gets answers, one at a time."""

    def __init__(self) -> None:
        self.ours, self.theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.ours.settimeout(60)
        self._numbers = itertools.count(2, 2)

    def ask(self, operation: int, node: int, body: bytes) -> tuple[int, bytes]:
        """The error and the rest of the answer."""
        number = next(self._numbers)
        head = HEAD.pack(HEAD.size + len(body), operation, number, node, 0, 0, os.getpid(), 0, 0)
        self.ours.send(head + body)
        answer = self.ours.recv(1 << 16)
        length, error, about = struct.unpack_from("<IiQ", answer)
        assert (length, about) == (len(answer), number), "the answer is to this question, and whole"
        return error, answer[16:]

    def getattr(self, node: int) -> tuple[int, bytes]:
        return self.ask(GETATTR, node, struct.pack("<IIQ", 0, 0, 0))

    def capability(self, node: int) -> tuple[int, bytes]:
        return self.ask(GETXATTR, node, struct.pack("<II", 64, 0) + CAPABILITY + b"\0")

    def make(self, name: bytes, data: bytes) -> tuple[int, int]:
        """A new file with these bytes: its node, and a handle that writes it."""
        flags = os.O_RDWR | os.O_CREAT
        error, answer = self.ask(CREATE, 1, struct.pack("<IIII", flags, 0o100644, 0o022, 0) + name + b"\0")
        assert not error, os.strerror(-error)
        node, fh = struct.unpack_from("<Q", answer)[0], struct.unpack_from("<Q", answer, 128)[0]
        self.write(fh, 0, data)
        return node, fh

    def open(self, node: int, flags: int = os.O_RDONLY) -> tuple[int, int]:
        """A handle, and what the answer says of it."""
        error, answer = self.ask(OPEN, node, struct.pack("<II", flags, 0))
        assert not error, os.strerror(-error)
        fh, told = struct.unpack_from("<QI", answer)
        return fh, told

    def read(self, fh: int, offset: int = 0, size: int = 4096) -> tuple[int, bytes]:
        return self.ask(READ, 0, struct.pack("<QQIIQII", fh, offset, size, 0, 0, 0, 0))

    def write(self, fh: int, offset: int, data: bytes) -> None:
        body = struct.pack("<QQIIQII", fh, offset, len(data), 0, 0, os.O_RDWR, 0) + data
        assert not self.ask(WRITE, 0, body)[0]

    def flush(self, fh: int) -> tuple[int, bytes]:
        return self.ask(FLUSH, 0, struct.pack("<QIIQ", fh, 0, 0, 0))

    def release(self, fh: int, flags: int = os.O_RDONLY) -> None:
        assert self.ask(RELEASE, 0, struct.pack("<QIIQ", fh, flags, 0, 0)) == (0, b"")


class Player:
    """`handled` counts the questions that came to a handler."""

    def __init__(self, directory: Path, wall_ns: Callable[[], int] | None = None) -> None:
        host = Host() if wall_ns is None else Host(wall_ns=wall_ns)
        self.bench = Bench(directory / "server")
        self.remote = InProcess(self.bench.service, self.bench.fs, lambda route: "pass")
        options = VolumeOptions(
            state_dir=directory / "state", mount_id="m", hostname="h", path="/m", io_timeout=0
        )
        self.volume: Volume = open_volume(options, host, self.remote, NoCache())
        self.loop = MiniLoop()
        self.machine = Machine(self.volume, self.remote, NoCache(), self.loop, host, 300.0)
        self.operations = FsdOperations(self.machine)
        self.kernel = Kernel()
        self.handled = 0
        for name in ("flush", "getattr", "getxattr", "read"):
            setattr(self.volume, name, self.counted(getattr(self.volume, name)))

    def counted(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counting(*args: Any) -> Any:
            self.handled += 1
            return call(*args)

        return counting

    def start(self) -> None:
        while True:  # the root is known before its names are asked for
            try:
                self.volume.lookup(self.volume.root_ino, b"nothing")
                break
            except Park:
                for job in self.volume.jobs():
                    self.volume.finish(job, job.run(self.remote, NoCache()))
        self.loop.install()
        where = f"/dev/fd/{self.kernel.theirs.fileno()}"
        pyfuse3.init(self.operations, where, {*pyfuse3.default_options})
        keep_forgotten()
        self.loop.scheduler.on_news = self.operations.answer_ahead()
        self.loop.scheduler.may_wait = may_wait()

        async def main() -> None:
            await pyfuse3.main(min_tasks=MIN_TASKS, max_tasks=MAX_TASKS)

        threading.Thread(target=self.loop.run, args=(main,), daemon=True).start()
        self.kernel.ask(INIT, 0, struct.pack("<IIII", 7, 31, 1 << 20, FLAGS))
        for _ in range(2 * MIN_TASKS):  # till all workers are there
            self.kernel.getattr(1)

    def posted(self, call: Callable[[], object] = lambda: None) -> None:
        """Have something happen that is no request."""
        done = threading.Event()
        self.loop.post(lambda: (call(), done.set()))
        assert done.wait(60), "the loop does not go on"

    def committed(self, fh: int) -> None:
        """What was written by this handle is at the server. On the loop's thread."""
        try:
            self.volume.fsync(fh, False)
        except Park as park:
            while not park.want.finished:
                for job in self.volume.jobs():
                    self.volume.finish(job, job.run(self.remote, NoCache()))

    def both(self, ask: Callable[[int], tuple[int, bytes]], node: int) -> dict[str, object]:
        """The answer at once, and that of a handler."""
        before = self.handled
        first = ask(node)
        ahead = self.handled == before
        self.posted()
        before = self.handled
        second = ask(node)
        assert self.handled == before + 1, "after something else happened a handler is asked"
        return {"ahead": ahead, "first": shown(first), "second": shown(second)}


def changes(player: Player) -> dict[str, dict[str, object]]:
    """Every change of names, seen in the two directories."""
    kernel, volume = player.kernel, player.volume
    root = 1

    def made(operation: int, node: int, body: bytes) -> int:
        error, answer = kernel.ask(operation, node, body)
        assert not error, os.strerror(-error)
        return int(struct.unpack_from("<Q", answer)[0])

    one = made(MKDIR, root, struct.pack("<II", 0o755, 0) + b"one\0")
    two = made(MKDIR, root, struct.pack("<II", 0o755, 0) + b"two\0")
    create = struct.pack("<IIII", os.O_WRONLY | os.O_CREAT, 0o100644, 0o022, 0)
    file = made(CREATE, one, create + b"file\0")
    swap = struct.pack("<QII", two, 2, 0)  # RENAME_EXCHANGE
    mode = struct.pack("<IIQQQQQQIIIIIIII", 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0o40700, 0, 0, 0, 0)
    steps: list[tuple[str, int, int, bytes]] = [
        ("create", CREATE, one, create + b"new\0"),
        ("mknod", MKNOD, one, struct.pack("<IIII", 0o010644, 0, 0, 0) + b"pipe\0"),
        ("mkdir", MKDIR, one, struct.pack("<II", 0o755, 0) + b"below\0"),
        ("symlink", SYMLINK, one, b"link\0target\0"),
        ("link", LINK, two, struct.pack("<Q", file) + b"second\0"),
        ("rename inside", RENAME2, one, struct.pack("<QII", one, 0, 0) + b"new\0newer\0"),
        ("rename", RENAME2, one, struct.pack("<QII", two, 0, 0) + b"below\0moved\0"),
        ("exchange", RENAME2, one, swap + b"newer\0moved\0"),
        ("unlink", UNLINK, one, b"file\0"),
        ("chmod", SETATTR, one, mode),
        ("rmdir", RMDIR, one, b"newer\0"),
        ("refused", RMDIR, one, b"nothing\0"),
    ]
    found: dict[str, dict[str, object]] = {}
    for what, operation, node, body in steps:
        for directory in (one, two):
            kernel.getattr(directory)  # as the kernel knows them before
        error, _ = kernel.ask(operation, node, body)
        if what == "create":  # as an untar does
            assert not kernel.ask(SETATTR, file, mode)[0]
        assert bool(error) == (what == "refused"), (what, error)
        for name, directory in (("one", one), ("two", two)):
            before = player.handled
            first, ahead = kernel.getattr(directory), player.handled == before
            if name == "two":
                player.posted()
            found[f"{what}, {name}"] = {"ahead": ahead, "first": shown(first)}
        for name, directory in (("one", one), ("two", two)):
            before = player.handled
            found[f"{what}, {name}"]["second"] = shown(kernel.getattr(directory))
            assert player.handled == before + 1, "once something else happened a handler is asked"
    assert volume.node(one).mode == 0o40700
    return found


def capabilities(player: Player) -> dict[str, dict[str, object]]:
    """The question for `security.capability` at the moments at which its answer may change."""
    kernel, volume = player.kernel, player.volume
    create = struct.pack("<IIII", os.O_WRONLY | os.O_CREAT, 0o100644, 0o022, 0)
    file = int(struct.unpack_from("<Q", kernel.ask(CREATE, 1, create + b"program\0")[1])[0])
    value = struct.pack("<II", 4, 0) + CAPABILITY + b"\0caps"
    found = {"made": player.both(kernel.capability, file)}
    kernel.getattr(file)
    found["told again"] = player.both(kernel.capability, file)
    kernel.getattr(file)
    assert not kernel.ask(SETXATTR, file, value)[0]
    found["given"] = player.both(kernel.capability, file)
    kernel.getattr(file)
    found["has it"] = player.both(kernel.capability, file)
    assert not kernel.ask(REMOVEXATTR, file, CAPABILITY + b"\0")[0]
    found["taken"] = player.both(kernel.capability, file)
    kernel.getattr(file)
    player.posted(lambda: setattr(volume.node(file), "xattrs", {CAPABILITY: b"by another mount"}))
    found["given by another mount"] = player.both(kernel.capability, file)
    return found


def reads(player: Player) -> dict[str, dict[str, object]]:
    """Reads of small files, after all that may change what they give."""
    kernel, volume = player.kernel, player.volume
    data = os.urandom(3000)
    node, writer = kernel.make(b"small", data)
    found: dict[str, dict[str, object]] = {}

    def look(what: str, offset: int = 0, size: int = 4096, then: Callable[[], object] | None = None) -> None:
        fh, _ = kernel.open(node)
        if then is not None:
            then()
        found[what] = player.both(lambda fh: kernel.read(fh, offset, size), fh)
        kernel.release(fh)

    look("written")
    look("a part", 1000, 500)
    look("over the end", 2500)
    look("at the end", 3000)
    look("behind it", 9000)
    look("written since", then=lambda: kernel.write(writer, 10, b"other"))
    look("again")
    size = struct.pack("<IIQQQQQQIIIIIIII", 1 << 3, 0, 0, 100, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0)
    look("cut since", then=lambda: kernel.ask(SETATTR, node, size))
    look(
        "emptied since",
        then=lambda: kernel.release(kernel.open(node, os.O_WRONLY | os.O_TRUNC)[0], os.O_WRONLY),
    )
    kernel.write(writer, 0, data)
    look("another removed since", then=lambda: kernel.ask(UNLINK, 1, b"nothing\0"))
    look("by others since", then=lambda: player.posted(lambda: volume.write(writer, 0, b"posted")))
    player.posted(lambda: player.committed(writer))
    look("committed")
    kernel.write(writer, 0, os.urandom(4096))
    kernel.write(writer, 4096, os.urandom(4096))
    look("of two pieces", 0, 8192)
    node, _ = kernel.make(b"large", os.urandom(70_000))
    look("large", 65_536)
    return found


def flushes(player: Player) -> dict[str, dict[str, object]]:
    """The flush of a handle that writes, after what may give it something to tell."""
    kernel, volume = player.kernel, player.volume

    def refused() -> None:
        """A result of the server's."""
        volume.tell(volume.handles[fh].node.ino, NoSpace("no room"))

    node, fh = kernel.make(b"flushed", b"abc")
    found = {"made": player.both(kernel.flush, fh)}
    kernel.write(fh, 0, b"def")
    found["written"] = player.both(kernel.flush, fh)
    other, _ = kernel.open(node, os.O_WRONLY)
    found["opened"] = player.both(kernel.flush, other)
    kernel.write(fh, 0, b"ghi")
    kernel.getattr(node)
    kernel.write(other, 0, b"jkl")
    found["of two"] = player.both(kernel.flush, fh)
    player.posted(refused)
    found["refused"] = player.both(kernel.flush, fh)
    player.posted(refused)
    kernel.write(fh, 0, b"mno")
    found["written since it was refused"] = player.both(kernel.flush, fh)
    kernel.write(fh, 0, b"pqr")
    found["written since that was told"] = player.both(kernel.flush, fh)
    reader, _ = kernel.open(node)
    found["read"] = player.both(kernel.flush, reader)
    return found


def releases(player: Player) -> dict[str, object]:
    """What is known of handles right after their release, and after the next handler."""
    kernel, volume = player.kernel, player.volume
    node, writer = kernel.make(b"released", os.urandom(3000))
    kernel.release(writer, os.O_RDWR)
    found: dict[str, object] = {}
    (first, told), before = kernel.open(node), len(volume.handles)
    found["pages kept by the first"] = bool(told & KEEP_CACHE)
    kernel.read(first)
    kernel.release(first)
    found["at once"] = before - len(volume.handles)
    second, told = kernel.open(node)
    found["pages kept by the next"] = bool(told & KEEP_CACHE)
    found["after the next"] = before - len(volume.handles)
    kernel.release(second)
    player.posted()
    found["after a posted call"] = before - len(volume.handles)
    gone, _ = kernel.open(node)
    assert not kernel.ask(UNLINK, 1, b"released\0")[0]
    found["open without a name"] = len(volume.core.orphans)
    kernel.release(gone)
    kernel.getattr(1)
    found["closed without a name"] = len(volume.core.orphans)
    _, writer = kernel.make(b"written", b"x")
    before = len(volume.handles)
    kernel.release(writer, os.O_RDWR)
    found["a writer at once"] = before - len(volume.handles)
    player.posted()
    found["a writer after a posted call"] = before - len(volume.handles)
    many = [kernel.open(kernel.make(b"many", b"x")[0])[0] for _ in range(1)]
    many += [kernel.open(volume.node(1).entries[b"many"] or 0)[0] for _ in range(ROW)]
    before = len(volume.handles)
    for fh in many:
        kernel.release(fh)
    kernel.getattr(1)
    player.posted()
    found["many"] = before - len(volume.handles) == len(many)
    return found


def in_a_row(player: Player) -> int:
    """How often the loop had a turn while one question after the other was answered ahead."""
    scheduler, turns = player.loop.scheduler, list[int]()
    leave = scheduler.may_wait
    assert leave is not None
    player.kernel.getattr(1)
    assert not player.kernel.ask(MKDIR, 1, struct.pack("<II", 0o755, 0) + b"row\0")[0]
    before = player.handled
    scheduler.may_wait = lambda fd: (turns.append(fd), leave(fd))[1]
    for _ in range(ROW):
        player.kernel.getattr(1)
    assert player.handled == before, "all of them are answered ahead"
    return len(turns)


def main() -> None:
    player = Player(Path(sys.argv[1]))
    player.start()
    found = {**changes(player), **capabilities(player)}
    more = {"reads": reads(player), "releases": releases(player), "flushes": flushes(player)}
    print(json.dumps({"answers": found, **more, "asked": ROW, "turns": in_a_row(player)}), flush=True)
    os._exit(0)  # the loop's thread waits for requests


def shown(answer: tuple[int, bytes]) -> list[object]:
    return [answer[0], answer[1].hex()]
