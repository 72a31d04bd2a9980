"""Direct commands against a local directory: the same random calls, the same errors, the same tree."""

from __future__ import annotations

import errno
import os
import random
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.postgres import database_of

from fsd.host.seam import Host
from fsd.meta.database import Tx
from fsd.model.errors import FsdError
from fsd.model.names import split_path
from fsd.service.access import FsRef
from fsd.service.audit import audit
from fsd.service.open import Service, ServiceOptions, open_service
from fsd.service.paths import Paths, Plan, Put
from fsd.service.retained import state_of
from fsd.service.tree import resolve, walk
from fsd.service.upload import Folded, FoldNeeded, Reading, Uploading, fold

MIB = 1024 * 1024
NAMES = (b"a", b"b", b"\xff")
SIZES = (0, 1, 5, 300, 300, MIB - 1, MIB, MIB + 1, 2 * MIB + 77)
KINDS = (
    *("put", "put", "put", "append", "append", "fresh", "mkdir", "mkdir", "mkdir", "remove", "remove"),
    *("symlink", "link", "rename", "rename", "rename", "noreplace", "copy", "copy", "chmod"),
)
LOOK = 40  # steps between two looks at all content

Planned = Callable[[Paths, Tx, FsRef], Plan]


class Remote:
    """The calls as direct commands make them. Each returns the errno, 0 when it was done."""

    def __init__(self, service: Service, fs: FsRef) -> None:
        self.service, self.fs = service, fs

    def do(self, plan: Planned) -> int:
        def change(tx: Tx) -> None:
            tx.lock_fs(self.fs.id)
            self.service.paths.execute(tx, self.fs, plan(self.service.paths, tx, self.fs))

        try:
            self.service.db.write(change)
        except FsdError as exc:
            return exc.errno
        return 0

    def put(self, path: bytes, data: bytes, *, append: bool, fresh: bool) -> int:
        uploading = Uploading(self.service.packs, self.fs)
        uploading.add([data])
        content = uploading.finish()
        folded: Folded | None = None
        wanted = Put(split_path(path), append=append, overwrite=not fresh)
        while True:
            try:
                return self.do(lambda paths, tx, fs, f=folded: paths.put(tx, fs, wanted, content, f))
            except FoldNeeded as needed:
                folded = fold(self.service.packs, self.fs, needed)

    def tree(self) -> dict[bytes, tuple[object, ...]]:
        def read(tx: Tx) -> dict[bytes, tuple[object, ...]]:
            top = resolve(tx, self.fs.id, []).need()
            found: dict[bytes, tuple[object, ...]] = {}
            for path, attr in walk(tx, self.fs.id, top, b"", 10_000):
                mode = stat.S_IMODE(attr.mode)
                if attr.is_dir:
                    found[path] = ("dir", mode, attr.nlink)
                elif attr.is_file:
                    found[path] = ("file", mode, attr.nlink, attr.size)
                else:
                    found[path] = ("link", attr.target)
            return found

        return self.service.db.read(read)

    def content(self, path: bytes) -> bytes:
        def opened(tx: Tx) -> Reading:
            attr = resolve(tx, self.fs.id, split_path(b"/" + path)).need()
            return Reading.open(
                tx, self.service.db, self.service.packs, self.fs, state_of(tx, self.fs), attr, 0, attr.size
            )

        reading = self.service.db.read(opened)
        return b"".join(iter(reading.next_piece, b""))


class Local:
    """The same calls on a directory of this machine."""

    def __init__(self, top: bytes) -> None:
        self.top = top

    def at(self, path: bytes) -> bytes:
        return self.top + path

    def put(self, path: bytes, data: bytes, *, append: bool, fresh: bool) -> None:
        flags = os.O_WRONLY | os.O_CREAT | (os.O_APPEND if append else os.O_TRUNC)
        fd = os.open(self.at(path), flags | (os.O_EXCL if fresh else 0), 0o644)
        try:
            os.write(fd, data)
        finally:
            os.close(fd)

    def remove(self, path: bytes) -> None:
        there = os.lstat(self.at(path))
        (os.rmdir if stat.S_ISDIR(there.st_mode) else os.unlink)(self.at(path))

    def rename_to_free(self, one: bytes, other: bytes) -> None:
        """Rename, unless the name is taken."""
        os.stat(os.path.dirname(self.at(one)) + b"/.")
        os.stat(os.path.dirname(self.at(other)) + b"/.")
        os.lstat(self.at(one))
        if os.path.lexists(self.at(other)):
            raise OSError(errno.EEXIST, "taken")
        os.rename(self.at(one), self.at(other))

    def copy(self, source: bytes, target: bytes) -> None:
        one, other = self.at(source), self.at(target)
        there = os.lstat(one)
        if stat.S_ISDIR(there.st_mode):
            raise OSError(errno.EISDIR, "a directory")
        if stat.S_ISLNK(there.st_mode):
            if os.path.lexists(other):
                if os.path.isdir(other) and not os.path.islink(other):
                    raise OSError(errno.EEXIST, "a directory")
                pointed = os.readlink(one)
                if os.path.islink(other) and os.readlink(other) == pointed:
                    return
                os.unlink(other)
            os.symlink(os.readlink(one) if os.path.lexists(one) else pointed, other)
            return
        if os.path.exists(other) and os.path.samefile(one, other):
            raise OSError(errno.EINVAL, "the same file")
        with open(one, "rb") as file:
            data = file.read()
        self.put(target, data, append=False, fresh=False)
        os.chmod(other, stat.S_IMODE(there.st_mode))

    def escapes(self, path: bytes) -> bool:
        """Whether symlinks lead above the top, where this directory goes on and a filesystem does not."""
        stack: list[bytes] = []
        todo, hops = split_path(path)[::-1], 0
        while todo and hops < 50:
            name = todo.pop()
            if name == b"..":
                if not stack:
                    return True
                stack.pop()
                continue
            here = b"/".join([self.top, *stack, name])
            if os.path.islink(here):
                hops += 1
                todo += [part for part in os.readlink(here).split(b"/") if part != b"."][::-1]
            elif name != b".":
                stack.append(name)
        return False

    def tree(self) -> dict[bytes, tuple[object, ...]]:
        found: dict[bytes, tuple[object, ...]] = {}
        for directory, names, files in os.walk(self.top):
            for name in [*names, *files]:
                path = os.path.join(directory, name)
                there = os.lstat(path)
                below, mode = os.path.relpath(path, self.top), stat.S_IMODE(there.st_mode)
                if stat.S_ISDIR(there.st_mode):
                    found[below] = ("dir", mode, there.st_nlink)
                elif stat.S_ISREG(there.st_mode):
                    found[below] = ("file", mode, there.st_nlink, there.st_size)
                else:
                    found[below] = ("link", os.readlink(path))
        return found


def random_path(rng: random.Random) -> bytes:
    return b"".join(b"/" + rng.choice(NAMES) for _ in range(rng.choice((1, 1, 2, 2, 3))))


def step(rng: random.Random, remote: Remote, local: Local) -> tuple[str, int, int]:
    """One random call on both sides: what it was, and both errnos."""
    one, other = random_path(rng), random_path(rng)
    while local.escapes(one) or local.escapes(other):
        one, other = random_path(rng), random_path(rng)
    kind = rng.choice(KINDS)
    data = rng.randbytes(rng.choice(SIZES))
    mode = rng.choice((0o600, 0o755, 0o444, 0o4711))
    first, second = split_path(one), split_path(other)
    target = rng.choice((b"a", b"b", b"../a", b"../b/a", b"../../b", b"\xff/../a", b"."))
    there: Callable[[], int]
    if kind in ("put", "append", "fresh"):
        how = {"append": kind == "append", "fresh": kind == "fresh"}
        there, here = lambda: remote.put(one, data, **how), lambda: local.put(one, data, **how)
    elif kind == "mkdir":
        there, here = (
            lambda: remote.do(lambda p, tx, fs: p.mkdir(tx, fs, first)),
            lambda: os.mkdir(local.at(one), 0o755),
        )
    elif kind == "remove":
        there, here = (
            lambda: remote.do(lambda p, tx, fs: p.remove(tx, fs, first)),
            lambda: local.remove(one),
        )
    elif kind == "symlink":
        there, here = (
            lambda: remote.do(lambda p, tx, fs: p.symlink(tx, fs, target, first)),
            lambda: os.symlink(target, local.at(one)),
        )
    elif kind == "link":
        there, here = (
            lambda: remote.do(lambda p, tx, fs: p.hardlink(tx, fs, first, second)),
            lambda: os.link(local.at(one), local.at(other), follow_symlinks=False),
        )
    elif kind == "rename":
        there, here = (
            lambda: remote.do(lambda p, tx, fs: p.rename(tx, fs, first, second)),
            lambda: os.rename(local.at(one), local.at(other)),
        )
    elif kind == "noreplace":
        there, here = (
            lambda: remote.do(lambda p, tx, fs: p.rename(tx, fs, first, second, overwrite=False)),
            lambda: local.rename_to_free(one, other),
        )
    elif kind == "copy":
        there, here = (
            lambda: remote.do(lambda p, tx, fs: p.copy(tx, fs, first, second, overwrite=True)),
            lambda: local.copy(one, other),
        )
    else:
        there, here = (
            lambda: remote.do(lambda p, tx, fs: p.setattr(tx, fs, first, mode=mode)),
            lambda: os.chmod(local.at(one), mode),
        )
    told = there()
    try:
        here()
    except OSError as exc:
        return f"{kind} {one!r} {other!r} {target!r} {len(data)}", told, exc.errno or 0
    return f"{kind} {one!r} {other!r} {target!r} {len(data)}", told, 0


@pytest.fixture(params=["sqlite", "postgresql"])
def service(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Service]:
    made = open_service(ServiceOptions(tmp_path / "data", database=database_of(request)), Host())
    made.tokens.announce({"r1": "http://127.0.0.1:1"}, b"m" * 32)
    yield made
    made.close()


@pytest.mark.parametrize("seed", [1, 2])
def test_the_same_calls_make_the_same_tree(service: Service, seed: int, tmp_path: Path) -> None:
    steps = 600 if service.db.engine == "sqlite" else 150
    rng = random.Random(seed)
    made = service.db.write(lambda tx: service.filesystems.create(tx, "random", []))
    remote = Remote(service, service.filesystems.get(made["file_system_id"]))
    top = os.fsencode(tmp_path / "local")
    os.mkdir(top)
    local = Local(top)
    done = refused = 0
    before = os.umask(0o022)
    try:
        for at in range(steps):
            what, told, want = step(rng, remote, local)
            where = f"seed {seed} step {at}: {what}"
            assert errno.errorcode.get(told, told) == errno.errorcode.get(want, want), where
            tree = local.tree()
            assert remote.tree() == tree, where
            done, refused = done + (not want), refused + bool(want)
            if at % LOOK == LOOK - 1:
                for path, there in tree.items():
                    if there[0] == "file":
                        assert remote.content(path) == (tmp_path / "local" / os.fsdecode(path)).read_bytes()
                assert audit(service.db, remote.fs) == []
    finally:
        os.umask(before)
    assert done > steps // 8 and refused > steps // 8, "calls of both kinds were made"
