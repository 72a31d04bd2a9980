"""A service on a temporary directory, and mount sessions that speak to it without a network.

`Bench` holds one filesystem at a time. `Mount` is a client's bookkeeping at its smallest: operation numbers,
the ticket, inode numbers, what each content operation held, so that it can answer `need_full` and `missing`.
"""

from __future__ import annotations

import stat
from pathlib import Path
from types import TracebackType
from typing import Self

from fsd.host.seam import Host
from fsd.model import ops
from fsd.model.attrs import ROOT_INO, Attr, Entry, make_ino
from fsd.model.blocks import Part, decode, encode, pieces
from fsd.model.limits import BLOCK
from fsd.model.ops import Content, Op, Outcome
from fsd.service.access import ADMIN_GRANT, FsRef
from fsd.service.audit import audit
from fsd.service.open import ServiceOptions, open_service
from fsd.service.sessions import SessionInfo
from fsd.wire.frame import Blob, make_blob, open_blob
from fsd.wire.messages import CommitAnswer, make_commit


class Bench:
    """A service with one filesystem; `close` checks the invariants first."""

    def __init__(self, directory: Path, host: Host | None = None, database: str | None = None) -> None:
        self.host = host or Host()
        self.directory = directory
        self.service = open_service(ServiceOptions(directory, database), self.host)
        self.service.tokens.announce({"local": "http://127.0.0.1:1"}, b"k" * 32)
        self.fs: FsRef = self.new_fs()

    def new_fs(self) -> FsRef:
        """Make another filesystem, and let this bench stand for it from now on."""
        made = self.service.db.write(lambda tx: self.service.filesystems.create(tx, "bench", []))
        self.fs = self.service.filesystems.get(made["file_system_id"])
        return self.fs

    def mount(self, name: str = "hostA", remote_path: str = "/") -> Mount:
        return Mount(self, name, remote_path)

    def audit(self) -> None:
        found = audit(self.service.db, self.fs)
        assert not found, "\n".join(map(str, found))

    def close(self) -> None:
        try:
            self.audit()
        finally:
            self.service.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.service.close()

    # Reading.

    def entries(self, ino: int = ROOT_INO) -> dict[bytes, Entry]:
        _, (answer,) = self.service.namespace.ask(self.fs, [("list", ino, b"", 10_000)])
        assert answer is not None, f"directory {ino} is gone"
        return {entry.name: entry for entry in answer[0]}

    def read(self, attr: Attr) -> bytes:
        """The whole content of a file, each blob verified."""
        data = bytearray(attr.size)
        _, (answer,) = self.service.namespace.ask(self.fs, [("blocks", attr.ino, 0, 4096)])
        assert answer is not None
        for idx, raw in answer[1]:
            parts = decode(raw)
            found = self.service.packs.read(self.fs.id, [part.hash for part in parts])
            for piece in pieces(parts, 0, BLOCK):
                at = idx * BLOCK + piece.at
                data[at : at + piece.length] = open_blob(found[piece.hash])[
                    piece.boff : piece.boff + piece.length
                ]
        assert len(data) == attr.size, "content behind the end of the file"
        return bytes(data)

    def tree(self, ino: int = ROOT_INO) -> dict[str, object]:
        """The whole tree: path → bytes of a file, None for a directory, ('symlink', target) and so on."""
        found: dict[str, object] = {}
        for name, entry in sorted(self.entries(ino).items()):
            path = name.decode("utf-8", "backslashreplace")
            if entry.attr.is_dir:
                found[path] = None
                found.update({f"{path}/{below}": what for below, what in self.tree(entry.attr.ino).items()})
            elif entry.attr.is_file:
                found[path] = self.read(entry.attr)
            else:
                found[path] = (stat.S_IFMT(entry.attr.mode), entry.attr.target)
        return found

    def find(self, path: str) -> Attr:
        """The inode at `path`."""
        names = tuple(part.encode() for part in path.split("/") if part)
        _, (answer,) = self.service.namespace.ask(self.fs, [("path", names)])
        assert answer[-1] is not None, f"no {path}"
        return answer[-1].attr


class Mount:
    """One mount session. Methods queue operations; `commit` sends them and answers what the server asks."""

    def __init__(self, bench: Bench, name: str, remote_path: str = "/") -> None:
        self.bench, self.name = bench, name
        info = SessionInfo(f"mount-{name}", name, "/mnt", remote_path, False, "test")
        start = bench.service.sessions.start(bench.fs, info)
        self.session, self.ticket, self.previous = start.session, start.ticket, start.previous
        self.next_op = 1
        self.fence = 0  # of a writer lease
        self.counter = 0
        self.time = 1_700_000_000_000_000_000 + self.session
        self.queue: list[Op] = []
        self.blobs: dict[bytes, Blob] = {}
        self.whole: dict[int, bytes] = {}  # content operation → all it stands for
        self.asked_full = 0

    def number(self) -> int:
        self.next_op += 1
        return self.next_op - 1

    def new_ino(self) -> int:
        self.counter += 1
        return make_ino(self.session, self.counter)

    def add(self, op: Op) -> Op:
        self.queue.append(op)
        return op

    def create(
        self, parent: int, name: bytes, mode: int = stat.S_IFREG | 0o644, target: bytes | None = None
    ) -> int:
        ino = self.new_ino()
        self.add(ops.Create(self.number(), ops.CREATE, parent, name, ino, mode, 7, 8, 0, target, self.time))
        return ino

    def mkdir(self, parent: int, name: bytes) -> int:
        return self.create(parent, name, stat.S_IFDIR | 0o755)

    def symlink(self, parent: int, name: bytes, target: bytes) -> int:
        return self.create(parent, name, stat.S_IFLNK | 0o777, target)

    def link(self, ino: int, parent: int, name: bytes) -> None:
        self.add(ops.Link(self.number(), ops.LINK, ino, parent, name, self.time))

    def unlink(self, parent: int, name: bytes, ino: int, base: int) -> None:
        self.add(ops.Unlink(self.number(), ops.UNLINK, parent, name, ino, base, self.time))

    def rmdir(self, parent: int, name: bytes, ino: int) -> None:
        self.add(ops.Rmdir(self.number(), ops.RMDIR, parent, name, ino, self.time))

    def rename(
        self,
        parent: int,
        name: bytes,
        ino: int,
        new_parent: int,
        new_name: bytes,
        over: int = 0,
        over_base: int = 0,
        flags: int = 0,
    ) -> None:
        self.add(
            ops.Rename(
                self.number(),
                ops.RENAME,
                parent,
                name,
                ino,
                new_parent,
                new_name,
                flags,
                over,
                over_base,
                self.time,
            )
        )

    def setattr(self, ino: int, **fields: int) -> None:
        mode, uid, gid, atime, mtime = (fields.get(name) for name in ("mode", "uid", "gid", "atime", "mtime"))
        self.add(ops.Setattr(self.number(), ops.SETATTR, ino, mode, uid, gid, atime, mtime, self.time))

    def setxattr(self, ino: int, name: bytes, value: bytes | None) -> None:
        self.add(ops.Setxattr(self.number(), ops.SETXATTR, ino, name, value, self.time))

    def parts(self, data: bytes) -> tuple[tuple[int, bytes | None], ...]:
        """The block list of `data`, its blobs made."""
        found: list[tuple[int, bytes | None]] = []
        for at in range(0, len(data), BLOCK):
            blob = make_blob(data[at : at + BLOCK])
            self.blobs[blob.hash] = blob
            found.append((at // BLOCK, encode((Part(0, blob.raw_len, 0, blob.hash),))))
        return tuple(found)

    def write(
        self, ino: int, data: bytes, base: int, *, full: bool = True, appended_from: int | None = None
    ) -> None:
        """The file's new content; without `full` named by the blocks behind `appended_from`, or the first."""
        blocks = self.parts(data)
        if not full:
            blocks = blocks[(appended_from or 0) // BLOCK :] if appended_from is not None else blocks[:1]
        number = self.number()
        self.whole[number] = data
        self.add(
            Content(
                number,
                ops.CONTENT,
                ino,
                base,
                len(data),
                blocks,
                full,
                appended_from,
                self.time,
                self.time,
            )
        )

    def file(self, parent: int, name: bytes, data: bytes) -> int:
        """Create and write."""
        ino = self.create(parent, name)
        if data:
            self.write(ino, data, 0)
        return ino

    def send(self, queue: list[Op], *, with_blobs: bool = True) -> CommitAnswer:
        """One commit as it stands; keeps nothing of the answer."""
        blobs = list(self.blobs.values()) if with_blobs else []
        commit = make_commit(self.session, self.ticket, queue, (0, 0, 0), blobs, fence=self.fence)
        return self.bench.service.commits.commit(self.bench.fs, commit, ADMIN_GRANT)

    def commit(self) -> list[Outcome]:
        """Send everything queued; the outcomes told."""
        told: list[Outcome] = []
        while True:
            answer = self.send(self.queue)
            assert not answer.missing, "all blobs came along"
            self.ticket = answer.ticket
            self.seq = answer.seq
            told.extend(answer.outcomes)
            self.queue = [op for op in self.queue if op.opno >= answer.next_op]
            if not self.queue:
                self.blobs.clear()
                return told
            if answer.next_op == self.queue[0].opno and not answer.need_full:
                continue  # what was done before was told apart; the rest goes by itself
            assert answer.need_full == self.queue[0].opno, "the server left operations without a reason"
            op = self.queue[0]
            assert isinstance(op, Content)
            assert not op.full, "a full list is asked for again"
            self.asked_full += 1
            self.queue[0] = op._replace(blocks=self.parts(self.whole[op.opno]), full=True)
