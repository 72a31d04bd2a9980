"""A client and a server in one process with a clock, a network and a disk that a test bends at will.

`World` drives a `Volume` against a real `Service` with random operations; beside it runs `Tree`, a model of
what was acknowledged. Everything random comes from one seed.
"""

from __future__ import annotations

import errno
import os
import random
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest

from fsd.model.errors import PosixError
from fsd.model.ops import RENAME_EXCHANGE, RENAME_NOREPLACE
from fsd.vfs.ranges import KEEP_SIZE, PUNCH_HOLE, ZERO_RANGE
from support.bench import Bench
from support.client import Client, Clock, assert_same, server_tree

T = TypeVar("T")


class Node:
    """A file, directory or symlink of the model."""

    def __init__(self, kind: int, mode: int) -> None:
        self.kind = kind
        self.mode = mode
        self.data = bytearray()
        self.names: dict[bytes, Node] = {}
        self.target: bytes | None = None
        self.xattrs: dict[bytes, bytes] = {}
        self.nlink = 0
        self.mtime = 0
        self.ino = 0

    @property
    def is_dir(self) -> bool:
        return self.kind == stat.S_IFDIR


class Tree:
    """The model: what every acknowledged call has made of the tree."""

    def __init__(self) -> None:
        self.root = Node(stat.S_IFDIR, 0o755)

    def dirs(self) -> list[tuple[bytes, Node]]:
        found = [(b"", self.root)]
        for path, node in found:
            found.extend((path + b"/" + n, c) for n, c in node.names.items() if c.is_dir)
        return found

    def walk(self) -> dict[str, tuple[Any, ...]]:
        """path -> everything that must survive."""
        found: dict[str, tuple[Any, ...]] = {}
        for path, node in self.dirs():
            for name, child in node.names.items():
                found[(path + b"/" + name).decode()] = shown(child)
        return found


def shown(node: Node) -> tuple[Any, ...]:
    if node.is_dir:
        return ("dir", node.mode, node.mtime, tuple(sorted(node.xattrs.items())))
    if node.kind == stat.S_IFLNK:
        return ("link", node.target)
    return ("file", bytes(node.data), node.mode, node.nlink, node.mtime, tuple(sorted(node.xattrs.items())))


class World(Client):
    """One random run of one client. `done` lists the steps; the test prints the last when it fails."""

    NAMES = (b"a", b"b", b"c", b"d", b"e", b"f")

    def __init__(self, directory: Path, seed: int) -> None:
        super().__init__(directory / "mount", Bench(directory / "server"), Clock(), random.Random(seed))
        self.tree = Tree()
        self.handles: list[tuple[int, Node, int]] = []
        self.nameless: list[Node] = []
        self.copying: tuple[Node, int, bytes] | None = None  # a copy under way: to, where, what
        self.done: list[str] = []
        self.open()

    def close(self) -> None:
        self.volume.close()
        self.bench.close()

    # random steps ------------------------------------------------------------------------------------
    def step(self) -> None:
        """One random thing happens."""
        self.copying = None
        kinds: list[tuple[int, Callable[[], None]]] = [
            (14, self.do_create),
            (20, self.do_write),
            (4, self.do_burst),
            (5, self.do_truncate),
            (5, self.do_range),
            (6, self.do_copy),
            (4, self.do_unnamed),
            (6, self.do_name),
            (8, self.do_unlink),
            (10, self.do_rename),
            (5, self.do_mkdir),
            (3, self.do_rmdir),
            (3, self.do_link),
            (3, self.do_symlink),
            (4, self.do_attr),
            (4, self.do_xattr),
            (6, self.do_fsync),
            (8, self.do_open),
            (8, self.do_close),
            (8, self.do_read),
            (6, self.do_time),
            (3, self.do_cut),
            (2, self.do_barrier),
            (2, self.do_crash),
        ]
        pick = self.rng.choices([k[1] for k in kinds], [k[0] for k in kinds])[0]
        pick()
        if self.rng.random() < 0.5:
            self.run_some(self.rng.randrange(4))

    def note(self, what: str) -> None:
        self.done.append(what)

    def some_dir(self) -> Node:
        return self.rng.choice(self.tree.dirs())[1]

    def ino(self, node: Node) -> int:
        return self.volume.root_ino if node is self.tree.root else node.ino

    def expect(self, number: int, fn: Callable[[], Any]) -> None:
        with pytest.raises(PosixError) as told:
            fn()
        assert told.value.errno == number, f"{told.value} instead of {errno.errorcode[number]}"

    def times(self, *nodes: Node) -> None:
        """What the clock said is the client's to say; that it stays is what the test checks."""
        for node in nodes:
            node.mtime = self.mtime_of(self.ino(node))

    def mtime_of(self, ino: int) -> int:
        return self.call(lambda v: v.getattr(ino)).mtime

    def do_create(self) -> None:
        where, name = self.some_dir(), self.rng.choice(self.NAMES)
        self.note(f"create {name!r} in {where.ino:x}")
        if name in where.names:
            self.expect(
                errno.EEXIST,
                lambda: self.call(
                    lambda v: v.create(self.ino(where), name, 0o644, 0, 0, os.O_RDWR | os.O_EXCL)
                ),
            )
            return
        append = os.O_APPEND if self.rng.random() < 0.2 else 0
        made, fh = self.call(lambda v: v.create(self.ino(where), name, 0o644, 0, 0, os.O_RDWR | append))
        node = Node(stat.S_IFREG, 0o644)
        node.ino, node.nlink, node.mtime = made.ino, 1, made.mtime
        where.names[name] = node
        self.times(where)
        self.handles.append((fh, node, append))

    def do_write(self) -> None:
        if not self.handles:
            return
        fh, node, flags = self.rng.choice(self.handles)
        big = self.rng.random() < 0.05
        size = self.rng.randrange(1, 1_500_000 if big else 5000)
        data = self.rng.randbytes(min(size, 64)) * (size // 64 + 1)
        data = data[:size]
        offset = self.rng.choice((0, len(node.data), self.rng.randrange(len(node.data) + 100_000)))
        if flags & os.O_APPEND:
            offset = len(node.data)
        self.write(fh, node, offset, data)

    def write(self, fh: int, node: Node, offset: int, data: bytes) -> None:
        self.note(f"write {node.ino:x} {offset}+{len(data)}")
        assert self.call(lambda v: v.write(fh, offset, data)) == len(data)
        if len(node.data) < offset:
            node.data.extend(bytes(offset - len(node.data)))
        node.data[offset : offset + len(data)] = data
        self.times(node)

    def do_burst(self) -> None:
        """One file is written to while what was written is being sent: many log segments, many flights."""
        if not self.handles:
            return
        fh, node, _ = self.rng.choice(self.handles)
        for _ in range(12):
            self.write(fh, node, len(node.data), self.rng.randbytes(2000))
            self.clock.seconds += 0.3
            self.volume.tick(self.clock.seconds)
            self.run_some(self.rng.randrange(4))

    def do_truncate(self) -> None:
        if not self.handles:
            return
        _, node, _ = self.rng.choice(self.handles)
        size = self.rng.choice((0, self.rng.randrange(len(node.data) + 1), len(node.data) + 3000))
        self.note(f"truncate {node.ino:x} {size}")
        self.call(lambda v: v.setattr(node.ino, size=size))
        if size < len(node.data):
            del node.data[size:]
        else:
            node.data.extend(bytes(size - len(node.data)))
        self.times(node)

    def do_range(self) -> None:
        """A hole, zeros, or room."""
        if not self.handles:
            return
        fh, node, _ = self.rng.choice(self.handles)
        mode = self.rng.choice((PUNCH_HOLE | KEEP_SIZE, ZERO_RANGE, ZERO_RANGE | KEEP_SIZE, 0, KEEP_SIZE))
        start = self.rng.choice((0, self.rng.randrange(len(node.data) + 5000)))
        length = self.rng.choice((1, 4096, self.rng.randrange(1, 1_500_000)))
        self.note(f"fallocate {node.ino:x} {mode} {start}+{length}")
        self.call(lambda v: v.allocate(fh, mode, start, length))
        end = min(start + length, len(node.data))
        if mode & (PUNCH_HOLE | ZERO_RANGE) and start < end:
            node.data[start:end] = bytes(end - start)
        if not mode & KEEP_SIZE and start + length > len(node.data):
            node.data.extend(bytes(start + length - len(node.data)))
        self.times(node)

    def do_copy(self) -> None:
        """A range of one file into another, or the same."""
        if not self.handles:
            return
        (from_, source, _), (to, node, _) = self.rng.choice(self.handles), self.rng.choice(self.handles)
        start = self.rng.randrange(len(source.data) + 1)
        at = self.rng.choice((0, len(node.data), self.rng.randrange(len(node.data) + 5000)))
        length = min(self.rng.choice((100, 70_000, 2_000_000)), len(source.data) - start)
        if length <= 0 or (source is node and abs(start - at) < length):
            return
        self.note(f"copy {source.ino:x} {start}+{length} to {node.ino:x} {at}")
        self.copying = (node, at, bytes(source.data[start : start + length]))
        done = self.call(lambda v: v.copy_range(from_, start, to, at, length, 0))
        self.copying = None
        assert 0 < done <= length
        node.data.extend(bytes(max(0, at - len(node.data))))
        node.data[at : at + done] = source.data[start : start + done]
        self.times(node)

    def do_unnamed(self) -> None:
        where = self.some_dir()
        self.note(f"unnamed in {where.ino:x}")
        made, fh = self.call(lambda v: v.create_unnamed(self.ino(where), 0o644, 0, 0, os.O_RDWR))
        node = Node(stat.S_IFREG, 0o644)
        node.ino, node.mtime = made.ino, made.mtime
        self.handles.append((fh, node, 0))
        self.nameless.append(node)

    def do_name(self) -> None:
        """An unnamed file that is open gets its name."""
        open_now = [node for _, node, _ in self.handles if node in self.nameless]
        where, name = self.some_dir(), self.rng.choice(self.NAMES)
        if not open_now or name in where.names:
            return
        node = self.rng.choice(open_now)
        self.note(f"name {node.ino:x} {name!r} in {where.ino:x}")
        self.call(lambda v: v.link(node.ino, self.ino(where), name))
        self.nameless.remove(node)
        where.names[name] = node
        node.nlink = 1
        self.times(where)

    def child(self) -> tuple[Node, bytes, Node | None]:
        where = self.some_dir()
        name = self.rng.choice(list(where.names) or [b"zz"] if self.rng.random() < 0.9 else self.NAMES)
        return where, name, where.names.get(name)

    def do_unlink(self) -> None:
        where, name, node = self.child()
        self.note(f"unlink {name!r} in {where.ino:x}")
        if node is None or node.is_dir:
            number = errno.ENOENT if node is None else errno.EISDIR
            self.expect(number, lambda: self.call(lambda v: v.unlink(self.ino(where), name)))
            return
        self.call(lambda v: v.unlink(self.ino(where), name))
        del where.names[name]
        self.times(where)
        node.nlink -= 1

    def do_rmdir(self) -> None:
        where, name, node = self.child()
        if node is None or not node.is_dir:
            return
        self.note(f"rmdir {name!r} in {where.ino:x}")
        if node.names:
            self.expect(errno.ENOTEMPTY, lambda: self.call(lambda v: v.rmdir(self.ino(where), name)))
            return
        self.call(lambda v: v.rmdir(self.ino(where), name))
        del where.names[name]
        self.times(where)

    def do_mkdir(self) -> None:
        where, name = self.some_dir(), self.rng.choice(self.NAMES)
        if name in where.names or len(self.tree.dirs()) > 12:
            return
        self.note(f"mkdir {name!r} in {where.ino:x}")
        made = self.call(lambda v: v.mkdir(self.ino(where), name, 0o755, 0, 0))
        node = Node(stat.S_IFDIR, 0o755)
        node.ino = made.ino
        where.names[name] = node
        self.times(where, node)

    def do_symlink(self) -> None:
        where, name = self.some_dir(), self.rng.choice(self.NAMES)
        if name in where.names:
            return
        self.note(f"symlink {name!r} in {where.ino:x}")
        target = self.rng.choice(self.NAMES) * 3
        made = self.call(lambda v: v.symlink(self.ino(where), name, target, 0, 0))
        node = Node(stat.S_IFLNK, 0o777)
        node.ino, node.target, node.nlink = made.ino, target, 1
        where.names[name] = node
        self.times(where)

    def files(self) -> list[Node]:
        return [c for _, d in self.tree.dirs() for c in d.names.values() if c.kind == stat.S_IFREG]

    def do_link(self) -> None:
        files = self.files()
        where, name = self.some_dir(), self.rng.choice(self.NAMES)
        if not files or name in where.names:
            return
        node = self.rng.choice(files)
        self.note(f"link {node.ino:x} {name!r} in {where.ino:x}")
        self.call(lambda v: v.link(node.ino, self.ino(where), name))
        where.names[name] = node
        node.nlink += 1
        self.times(where)

    def do_rename(self) -> None:
        where, name, node = self.child()
        to, new = self.some_dir(), self.rng.choice(self.NAMES)
        if node is None:
            return
        over = to.names.get(new)
        flags = self.rng.choice((0, 0, 0, 0, RENAME_NOREPLACE, RENAME_EXCHANGE))
        self.note(
            f"rename {name!r} in {where.ino:x} to {new!r} in {to.ino:x} over {over and hex(over.ino)} {flags}"
        )
        fn = lambda: self.call(  # noqa: E731
            lambda v: v.rename(self.ino(where), name, self.ino(to), new, flags)
        )
        number = self.rename_error(where, node, to, over, flags)
        if number:
            self.expect(number, fn)
            return
        fn()
        if over is node:
            return
        self.times(where, to)
        if flags == RENAME_EXCHANGE:
            assert over is not None
            where.names[name], to.names[new] = over, node
            return
        del where.names[name]
        to.names[new] = node
        if over is not None and not over.is_dir:
            over.nlink -= 1

    def below(self, node: Node, top: Node) -> bool:
        return node is top or any(self.below(node, c) for c in top.names.values() if c.is_dir)

    def rename_error(self, where: Node, node: Node, to: Node, over: Node | None, flags: int) -> int:
        if flags == RENAME_EXCHANGE and over is None:
            return errno.ENOENT
        if flags == RENAME_NOREPLACE and over is not None:
            return errno.EEXIST
        if over is node:
            return 0
        if node.is_dir and self.below(to, node):
            return errno.EINVAL
        if over is None:
            return 0
        if flags == RENAME_EXCHANGE:
            return errno.EINVAL if over.is_dir and self.below(where, over) else 0
        if node.is_dir and not over.is_dir:
            return errno.ENOTDIR
        if over.is_dir and not node.is_dir:
            return errno.EISDIR
        return errno.ENOTEMPTY if over.is_dir and over.names else 0

    def do_attr(self) -> None:
        files = self.files()
        if not files:
            return
        node = self.rng.choice(files)
        if self.rng.random() < 0.5:
            mode = self.rng.choice((0o600, 0o644, 0o755))
            self.note(f"chmod {node.ino:x} {mode:o}")
            self.call(lambda v: v.setattr(node.ino, mode=mode))
            node.mode = mode
        else:
            mtime = self.rng.randrange(10**18)
            self.note(f"utimens {node.ino:x} {mtime}")
            self.call(lambda v: v.setattr(node.ino, mtime=mtime, atime=5))
            node.mtime = mtime

    def do_xattr(self) -> None:
        files = self.files()
        if not files:
            return
        node = self.rng.choice(files)
        name, value = b"user." + self.rng.choice(self.NAMES), self.rng.randbytes(5)
        self.note(f"setxattr {node.ino:x} {name!r}")
        self.call(lambda v: v.setxattr(node.ino, name, value))
        node.xattrs[name] = value

    def do_fsync(self) -> None:
        if not self.handles:
            return
        fh, node, _ = self.rng.choice(self.handles)
        self.note(f"fsync {node.ino:x}")
        self.call(lambda v: v.fsync(fh, False))
        self.check_file(node)

    def do_open(self) -> None:
        files = self.files()
        if not files:
            return
        node = self.rng.choice(files)
        flags = self.rng.choice((os.O_RDWR, os.O_RDWR | os.O_APPEND, os.O_RDWR | os.O_TRUNC))
        self.note(f"open {node.ino:x} {flags:o}")
        fh = self.call(lambda v: v.open(node.ino, flags))
        self.handles.append((fh, node, flags & os.O_APPEND))
        if flags & os.O_TRUNC:
            node.data.clear()
            self.times(node)

    def do_close(self) -> None:
        if not self.handles:
            return
        fh, node, _ = self.handles.pop(self.rng.randrange(len(self.handles)))
        self.note(f"close {node.ino:x}")
        self.call(lambda v: v.flush(fh))
        self.call(lambda v: v.release(fh))

    def do_read(self) -> None:
        if not self.handles:
            return
        fh, node, _ = self.rng.choice(self.handles)
        offset = self.rng.randrange(len(node.data) + 1)
        size = self.rng.randrange(1, 200_000)
        self.note(f"read {node.ino:x} {offset}+{size}")
        got = self.call(lambda v: v.read(fh, offset, size))
        assert got == bytes(node.data[offset : offset + size]), f"read of {node.ino:x} at {offset}"

    def do_time(self) -> None:
        self.note("time")
        self.clock.seconds += self.rng.random() * 3
        self.volume.tick(self.clock.seconds)
        self.run_some(self.rng.randrange(30))

    def do_cut(self) -> None:
        self.note("cut")
        self.net.cut = self.rng.randrange(30)

    def do_barrier(self) -> None:
        self.note("barrier")
        self.until(self.volume.barrier())
        self.check_server()

    def do_crash(self) -> None:
        self.note("crash")
        self.kill()
        self.open()
        self.after_crash()

    def after_crash(self) -> None:
        """Everything acknowledged is there; programs begin again."""
        self.handles.clear()
        self.nameless.clear()
        self.copied_partly()
        self.check_server()
        self.renumber(self.tree.root, self.volume.root_ino)

    def copied_partly(self) -> None:
        """A copy that was killed has done some of it, from its beginning, or nothing."""
        copying, self.copying = self.copying, None
        if copying is None or copying[0].nlink == 0:
            return
        node, at, wanted = copying
        _, (attrs,) = self.bench.service.namespace.ask(self.bench.fs, [("attrs", (node.ino,))])
        assert attrs[0] is not None
        found, node.mtime = self.bench.read(attrs[0]), attrs[0].mtime
        if found == node.data:
            return
        before = node.data + bytes(max(0, at - len(node.data)))
        # As far as the end of what is new, or as what differs reaches.
        done = len(found) - at if len(found) > len(before) else 0
        for offset in range(min(len(wanted), len(found) - at), done, -1):
            if found[at + offset - 1] != before[at + offset - 1]:
                done = offset
                break
        before[at : at + done] = wanted[:done]
        assert found == before, f"a killed copy to {node.ino:x} left something else"
        node.data = before

    def renumber(self, node: Node, ino: int) -> None:
        """Inode numbers survive a remount."""
        for name, child in node.names.items():
            found = self.call(lambda v, n=name: v.lookup(ino, n))  # type: ignore[misc]
            assert found is not None
            assert found.ino == child.ino or not child.ino, f"{name!r} has another inode number"
            child.ino = found.ino
            if child.is_dir:
                self.renumber(child, found.ino)

    # checks ------------------------------------------------------------------------------------------
    def check_file(self, node: Node) -> None:
        """What fsync promised."""
        if node.nlink == 0:
            return
        _, (attrs,) = self.bench.service.namespace.ask(self.bench.fs, [("attrs", (node.ino,))])
        assert attrs[0] is not None, f"fsynced file {node.ino:x} is not on the server"
        assert self.bench.read(attrs[0]) == bytes(node.data), f"fsynced content of {node.ino:x}"

    def check_server(self) -> None:
        assert_same(self.tree.walk(), server_tree(self.bench))

    def check_local(self) -> None:
        """What programs see is what they did."""
        assert_same(self.tree.walk(), self.view())
