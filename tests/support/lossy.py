"""`Lossy`: a `Rough` world in which the server loses blobs that only an uncommitted copy names, as after its
grace with the mount away. What cannot be made any more is put aside; the model is then taken anew from what
is there, and everything else goes on being compared.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from fsd.meta.database import Tx
from fsd.model.errors import FsdError, IntegrityError, NoSpace, PosixError
from fsd.vfs.decide import kept
from support.rough import Died, Rough
from support.world import Node, Tree


class Lossy(Rough):
    """See the module. `aside` counts what was put aside; `stale`: the model may differ because of it."""

    def __init__(self, directory: Path, seed: int) -> None:
        self.known: set[str] = set()
        self.aside = 0
        self.stale = False
        super().__init__(directory, seed)
        self.sweeps = True

    def sweep(self) -> None:
        fs = self.bench.fs.id

        def remove(tx: Tx) -> None:
            tx.execute("DELETE FROM blob WHERE fs=? AND refs=0", (fs,))

        self.bench.service.db.write(remove)
        recent = self.volume.core.recent
        recent._blobs.clear()
        recent._sources.clear()
        recent._bytes = 0

    def put_aside(self) -> bool:
        """Whether something was put aside since this was asked last."""
        found = {one.place.name for one in kept(self.options.state_dir)}
        new, self.known = found - self.known, self.known | found
        self.aside += len(new)
        return bool(new)

    def step(self) -> None:
        try:
            if self.rng.random() < 0.06:
                self.losing()
            super().step()
        except (IntegrityError, PosixError) as exc:
            self.note(f"  told {exc}")
            self.stale = True
        except AssertionError:
            if not self.put_aside() and not self.stale:
                raise
            self.stale = True
        if self.put_aside() or self.stale:
            self.look_again()

    def losing(self) -> None:
        try:
            self.copy_and_lose()
        except NoSpace:
            self.note("  no space")
        except Died as died:
            self.note(f"  died at {died}")
            self.after_death()

    def copy_and_lose(self) -> None:
        """A copy, changed in few or in many places, whose source is emptied and committed before it."""
        if len(self.handles) < 2:
            return
        (from_, source, reads), (to, node, appends) = self.rng.sample(self.handles, 2)
        if source is node or (reads | appends) & os.O_APPEND:
            return
        self.note(f"copy and lose {source.ino:x} to {node.ino:x}")
        if len(source.data) < 100_000:
            self.write(from_, source, 0, self.rng.randbytes(150_000))
        self.call(lambda v: v.fsync(from_, False))
        self.copying = (node, 0, bytes(source.data))
        done = self.call(lambda v: v.copy_range(from_, 0, to, 0, len(source.data), 0))
        self.copying = None
        node.data[:done] = source.data[:done]
        self.times(node)
        for _ in range(self.rng.choice((0, 3, 25))):
            self.write(to, node, self.rng.randrange(len(node.data)), self.rng.randbytes(50))
        self.call(lambda v: v.setattr(source.ino, size=0))
        source.data.clear()
        self.times(source)
        self.call(lambda v: v.fsync(from_, False))
        self.sweep()

    def after_crash(self) -> None:
        if self.put_aside() or self.stale:
            self.copying, self.stale = None, True
            self.handles.clear()
            self.nameless.clear()
        else:
            super().after_crash()

    def look_again(self) -> None:
        """Send what is left, and take the model from what programs see; the server has the same."""
        before = self.full, self.crash_in, self.net.faulty
        self.settle()
        for fh, _, _ in self.handles:
            self.call(lambda v, one=fh: v.release(one))  # type: ignore[misc]
        self.handles.clear()
        self.nameless.clear()
        self.drain()
        self.put_aside()
        self.tree, files = Tree(), dict[int, Node]()
        self.take(self.tree.root, self.volume.root_ino, files)
        self.drain()
        self.check_server()
        self.check_local()
        self.stale = False
        self.full, self.crash_in, self.net.faulty = before

    def drain(self) -> None:
        """A barrier may be told of what is put aside, each time once."""
        for _ in range(50):
            try:
                self.until(self.volume.barrier())
            except FsdError as exc:
                self.note(f"  barrier told {exc}")
                continue
            core = self.volume.core
            left = core.dirty, core.flights, len(core.queue), core.dead_jobs, self.volume.flusher.inline_bytes
            assert left == ({}, {}, 0, 0, 0), left
            return
        raise AssertionError("what cannot be made is tried for ever")

    def take(self, node: Node, ino: int, files: dict[int, Node]) -> None:
        for name, number in self.listing(ino):
            seen = self.call(lambda v, one=number: v.getattr(one))  # type: ignore[misc]
            if number in files:
                node.names[name] = files[number]
                files[number].nlink += 1
                continue
            made = node.names[name] = Node(stat.S_IFMT(seen.mode), seen.mode & 0o7777)
            made.ino, made.mtime, made.target, made.nlink = number, seen.mtime, seen.target, 1
            made.xattrs = dict(seen.xattrs or {})
            if made.is_dir:
                self.take(made, number, files)
            elif made.target is None:
                made.data = bytearray(self.read_all(number))
                files[number] = made
