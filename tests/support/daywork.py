"""A day's work of the service in a few calls: something of everything, for tests that look at all of it."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence

from fsd.model import blocks, ops
from fsd.model.attrs import ROOT_INO, make_ino
from fsd.model.limits import BLOCK
from fsd.service import pins
from fsd.service.access import ADMIN_GRANT, FsRef
from fsd.service.barriers import BarrierAnswer
from fsd.service.difference import Difference
from fsd.service.history import history
from fsd.service.merge import Wish as Merge
from fsd.service.native import Ask
from fsd.service.open import Service
from fsd.service.restore import Wish
from fsd.service.retained import At
from fsd.service.sessions import SessionInfo
from fsd.service.sweep import Terms
from fsd.wire.frame import Blob, make_blob
from fsd.wire.messages import ATTRS, BLOCKS, LIST, LOOKUP, PATH, TREE, make_commit


def work(service: Service) -> FsRef:
    """Commits, conflicts of two sessions, retries, every question, pins, feed; on which filesystem."""
    service.tokens.announce({"r1": "http://127.0.0.1:1"}, b"m" * 32)
    made = service.db.write(lambda tx: service.filesystems.create(tx, "plans", [("k", "v")]))
    fs = service.filesystems.get(made["file_system_id"])
    service.filesystems.describe(fs.name)
    one, two = Mount(service, fs, "a"), Mount(service, fs, "b")
    directory, file, link = one.ino(), one.ino(), one.ino()
    blobs = [make_blob(os.urandom(1000)) for _ in range(3)]
    large = [make_blob(os.urandom(40_000)) for _ in range(3)]
    service.packs.store(fs.id, fs.name, large)
    mode = stat.S_IFREG | 0o644
    one.commit(
        [
            one.create(ROOT_INO, b"d", directory, stat.S_IFDIR | 0o755),
            one.create(directory, b"f", file, mode),
            one.create(directory, b"s", link, stat.S_IFLNK | 0o777, b"f"),
            ops.Content(
                one.op(), ops.CONTENT, file, 0, 2 * BLOCK + 1000, content_of(blobs), True, None, 5, 5
            ),
            ops.Link(one.op(), ops.LINK, file, ROOT_INO, b"hard", 6),
            ops.Setxattr(one.op(), ops.SETXATTR, file, b"user.a", b"v", 7),
            ops.Setattr(one.op(), ops.SETATTR, file, 0o600, None, None, None, 8, 8),
        ],
        blobs,
    )
    number, _ = service.db.write(lambda tx: pins.pin(tx, fs, "checkpoint", "c1"))
    head = service.feed.head(fs)
    one.commit(
        [
            ops.Content(one.op(), ops.CONTENT, file, head, 1000, content_of(large[:1]), True, None, 9, 9),
            ops.Rename(one.op(), ops.RENAME, directory, b"f", file, ROOT_INO, b"g", 0, 0, 0, 10),
            ops.Unlink(one.op(), ops.UNLINK, directory, b"s", link, 0, 10),
        ],
        [],
    )
    late, clash = two.ino(), two.ino()
    two.commit(
        [
            two.create(directory, b"late", late, mode),
            two.create(ROOT_INO, b"g", clash, mode),
            ops.Content(two.op(), ops.CONTENT, file, head, 1000, content_of(large[1:2]), True, None, 9, 9),
            ops.Rmdir(two.op(), ops.RMDIR, ROOT_INO, b"d", directory, 11),
            ops.Unlink(two.op(), ops.UNLINK, ROOT_INO, b"hard", file, head, 12),
        ],
        [],
    )
    _ask_everything(service, fs, file, head)
    checkpoints(service, fs, head)
    service.db.write(lambda tx: pins.unpin(tx, service.packs, fs, number))
    service.packs.read(fs.id, [blob.hash for blob in blobs + large])
    service.feed.page(fs, 0)
    for mount in (one, two):
        service.sessions.report(fs, mount.start.session, (0, 0, 0))
        service.sessions.end(fs, mount.start.session, "clean", (0, 0, 0))
    service.sessions.list(fs, 10)
    _sweep(service, fs)
    _forks(service, fs)
    return fs


def _ask_everything(service: Service, fs: FsRef, file: int, seq: int) -> None:
    """Of now, and of the retained state `seq`."""
    questions = [
        (LOOKUP, ROOT_INO, b"g", 100),
        (LIST, ROOT_INO, b"", 100),
        (ATTRS, (ROOT_INO, file, 99)),
        (BLOCKS, file, 0, 10),
        (TREE, ROOT_INO, 1000),
        (PATH, (b"d", b"late")),
    ]
    service.namespace.ask(fs, questions)
    service.namespace.ask(fs, questions, At(seq=seq))


def checkpoints(service: Service, fs: FsRef, seq: int) -> None:
    """Everything that is done with checkpoints; `seq` is a retained state."""
    made = service.db.write(lambda tx: service.checkpoints.make(tx, fs, None, Ask(keep_s=1e6)))
    service.db.read(lambda tx: service.checkpoints.page(tx, fs, None, None, 10))
    service.db.read(lambda tx: service.checkpoints.page(tx, fs, made["thread_id"], None, 10))
    service.db.read(lambda tx: service.checkpoints.show(tx, fs, made["checkpoint_id"]))
    assert service.checkpoints.expire() == 0
    service.db.read(lambda tx: Difference(tx, fs.id, seq, made["fs_seq"]).changes())
    service.db.read(lambda tx: history(tx, fs, (b"g",), None, 10))
    for path in ((b"d", b"f"), ()):
        wish = Wish(At(seq=seq), path, force=True)
        service.db.read(lambda tx, w=wish: service.restores.plan(tx, fs, w))  # type: ignore[misc]
        service.db.write(lambda tx, w=wish: service.restores.restore(tx, fs, None, w))  # type: ignore[misc]
    asked = service.barriers.ask(fs, ADMIN_GRANT, 10)
    service.barriers.asks(fs, asked[0].session, 0)
    service.barriers.answer(fs, asked[0].session, asked[0].id, BarrierAnswer(True, 1, (0, 0, 0), ""))
    service.barriers.answers(asked)
    service.barriers.done(asked)
    service.db.write(lambda tx: service.checkpoints.delete(tx, fs, None, made["checkpoint_id"]))


def _sweep(service: Service, fs: FsRef) -> None:
    """Rounds over a filesystem with idle blobs, a sparse pack, a soft pin and an object to delete."""
    three = [make_blob(os.urandom(40_000)) for _ in range(3)]
    service.packs.store(fs.id, fs.name, three)
    last = Mount(service, fs, "c")
    file = last.ino()
    last.commit(
        [
            last.create(ROOT_INO, b"sparse", file, stat.S_IFREG | 0o644),
            ops.Content(last.op(), ops.CONTENT, file, 0, 40_000, content_of(three[:1]), True, None, 9, 9),
        ],
        [],
    )
    service.db.write(lambda tx: pins.pin(tx, fs, "mount", "m", 1))
    ahead = Terms(-1.0)  # the clock is coarse
    done = [service.sweep.call(fs.name, ahead, "") for _ in range(2)]
    for name in ("pins", "blobs", "packs_rewritten", "objects"):
        assert done[0][name] + done[1][name], f"the sweep had no {name} to do"
    while service.sweep.turn():
        pass


def _forks(service: Service, fs: FsRef) -> None:
    """Forks of the head and of forks, read as aliases, copied, changed, merged, rolled back and deleted."""
    refs: list[FsRef] = [fs]
    for _ in range(2):
        made = service.db.write(lambda tx: service.forks.create(tx, refs[-1], "f", []))
        refs.append(service.filesystems.get(made["file_system_id"]))
    fork, second = refs[1:]
    service.namespace.ask(second, [(LIST, ROOT_INO, b"", 100)])
    first = Mount(service, fork, "d")
    top, file, link = first.ino(), first.ino(), first.ino()
    blob = make_blob(os.urandom(1000))
    mode = stat.S_IFREG | 0o644
    first.commit(
        [
            first.create(ROOT_INO, b"top", top, stat.S_IFDIR | 0o755),
            first.create(top, b"file", file, mode),
            first.create(top, b"link", link, stat.S_IFLNK | 0o777, b"file"),
            ops.Content(
                first.op(), ops.CONTENT, file, 0, BLOCK + 1000, content_of([blob, blob]), True, None, 9, 9
            ),
        ],
        [blob],
    )
    while service.forks.copy_some():
        continue
    service.merges.rehearse(fs, fork, Merge())
    done = service.db.write(lambda tx: service.merges.merge(tx, fs, fork, None, Merge()))
    assert done["status"] == "merged"
    head = service.feed.head(fork)
    first.commit([ops.Rename(first.op(), ops.RENAME, top, b"file", file, ROOT_INO, b"x", 0, 0, 0, head)], [])
    service.merges.changes(fork, 10)
    service.db.write(lambda tx: service.merges.roll_back(tx, fork, service.restores, force=True))
    service.forks.page(fs, "", 10)
    service.forks.below(fs)
    service.forks.chain(second)
    service.db.read(lambda tx: service.forks.describe(tx, second))
    service.db.read(lambda tx: service.forks.need_descendant(tx, fs, second.name))
    service.db.write(lambda tx: service.filesystems.delete(tx, second.name, cascade=True))


def content_of(blobs: Sequence[Blob]) -> tuple[tuple[int, bytes | None], ...]:
    return tuple(
        (index, blocks.encode((blocks.Part(0, blob.raw_len, 0, blob.hash),)))
        for index, blob in enumerate(blobs)
    )


class Mount:
    """A session that commits what it is given and sends every commit twice."""

    def __init__(self, service: Service, fs: FsRef, name: str) -> None:
        self.service, self.fs = service, fs
        self.start = service.sessions.start(fs, SessionInfo(name, name, "/mnt", "/", False, "0"))
        self.ticket = self.start.ticket
        self._op = self._ino = 0

    def op(self) -> int:
        self._op += 1
        return self._op

    def ino(self) -> int:
        self._ino += 1
        return make_ino(self.start.session, self._ino)

    def create(self, parent: int, name: bytes, ino: int, mode: int, target: bytes | None = None) -> ops.Op:
        return ops.Create(self.op(), ops.CREATE, parent, name, ino, mode, 0, 0, 0, target, 1)

    def commit(self, some: list[ops.Op], blobs: list[Blob]) -> None:
        commit = make_commit(self.start.session, self.ticket, some, (0, 0, 0), blobs)
        answer = self.service.commits.commit(self.fs, commit, ADMIN_GRANT)
        assert not answer.missing
        assert not answer.need_full
        assert self.service.commits.commit(self.fs, commit, ADMIN_GRANT) == answer
        self.ticket = answer.ticket
