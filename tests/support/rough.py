"""`Rough`: a `World` in which more goes wrong: a disk that fills up, a buffer of a few segments, a process
that ends at a crash point, a server that sweeps blobs nobody names yet, limits so small that
every path is taken.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from fsd.meta.database import Tx
from fsd.model.errors import NoSpace
from fsd.vfs import build, content, flush
from fsd.vfs.segments import HEAD_LEN
from fsd.vfs.types import Park, Want
from fsd.vfs.volume import Volume
from support.world import World

T = TypeVar("T")

KIB = 1024


class Died(BaseException):
    """The process ends at a crash point; nothing after it runs."""


@contextmanager
def small_limits(enabled: bool) -> Iterator[None]:
    """Partial block lists, flights of several jobs, uploads ahead: in files of a few kilobytes."""
    values: list[tuple[Any, str, Any]] = [
        (content, "FULL_LIST_BLOCKS", 0),
        (flush, "LONG_LIST", 0),
        (flush, "JOB_BYTES", 32 * KIB),
        (flush, "FLUSH_BYTES", 40 * KIB),
        (flush, "INLINE_BUDGET", 64 * KIB),
        (build, "PACK_TARGET", 16 * KIB),
        (build, "PATCH_MIN_BLOCK", 4 * KIB),
    ]
    before = [getattr(module, name) for module, name, _ in values]
    try:
        for module, name, value in values:
            if enabled:
                setattr(module, name, value)
        yield
    finally:
        for (module, name, _), value in zip(values, before):
            setattr(module, name, value)


class Rough(World):
    """See the module. What goes wrong in a run depends on its seed."""

    def __init__(self, directory: Path, seed: int) -> None:
        self.full = 0.0  # how likely an append to the log fails
        self.crash_in = -1  # the process ends at this crash point from now; < 0: never
        self.crashed = 0
        self.failed = 0
        super().__init__(directory, seed)
        self.small = self.rng.random() < 0.5
        self.disk = self.rng.random() < 0.4
        self.ends = self.rng.random() < 0.4
        self.sweeps = self.rng.random() < 0.4
        if self.rng.random() < 0.4:
            self.options = replace(self.options, segment_size=16 * KIB, buffer_size=6 << 20)
            self.volume.limit = self.volume.core.capacity()
        self.clock.crash_at = self.passed

    def open(self) -> None:
        full, self.full = getattr(self, "full", 0.0), 0.0
        super().open()
        self.full = full
        log = self.volume.core.log
        write = log._write

        promised, prepare = (0, 0), log.prepare  # a segment, and up to where there is room in it

        def fail() -> None:
            if self.full and self.rng.random() < self.full:
                self.failed += 1
                raise NoSpace("the test's disk is full")

        def failing(kind: int, ino: int, offset: int, pieces: list[bytes], **more: Any) -> int:
            end = log._at + HEAD_LEN + sum(map(len, pieces))
            if log._segment != promised[0] or end > promised[1]:
                fail()
            return write(kind, ino, offset, pieces, **more)

        def promise(length: int) -> None:
            nonlocal promised
            fail()
            prepare(length)
            promised = log._segment, log._at + length

        log._write, log.prepare = failing, promise  # type: ignore[method-assign]

    def passed(self, name: str) -> None:
        if self.crash_in == 0:
            self.crash_in = -1
            raise Died(name)
        self.crash_in -= self.crash_in > 0

    def step(self) -> None:
        try:
            self.rough_step()
            super().step()
        except NoSpace:
            self.note("  no space")
        except Died as died:
            self.note(f"  died at {died}")
            self.after_death()

    def after_death(self) -> None:
        """The files of a dead process are closed; then the next mount."""
        self.crashed += 1
        for name in os.listdir("/proc/self/fd"):
            try:
                path = os.readlink(f"/proc/self/fd/{name}")
            except OSError:
                continue
            if path.startswith(str(self.options.state_dir) + "/"):
                os.close(int(name))
        self.full = 0.0
        self.open()
        self.after_crash()

    def rough_step(self) -> None:
        roll = self.rng.random()
        if self.disk and roll < 0.05:
            self.full = 0.0 if self.full else self.rng.choice((0.05, 0.5, 1.0))
            self.note(f"disk {self.full}")
        elif self.disk and roll < 0.10:
            self.full = 0.0
        elif self.ends and roll < 0.13:
            self.crash_in = self.rng.randrange(12)
        elif self.sweeps and roll < 0.2:
            self.note("sweep")
            self.sweep()

    def sweep(self) -> None:
        """Blobs that were uploaded and that no commit has named are gone, as after the grace period."""
        if self.volume.core.orphans or self.volume.committer.commit is not None:
            return  # what has lost its name a moment ago lives by the grace period
        # What `keep` names for copies that are not committed is young on the server for as long.
        fs, kept = self.bench.fs.id, self.volume.keeper._needed()

        def remove(tx: Tx) -> None:
            for (digest,) in tx.all("SELECT hash FROM blob WHERE fs=? AND refs=0", (fs,)):
                if bytes(digest) not in kept:
                    tx.execute("DELETE FROM blob WHERE fs=? AND hash=?", (fs, digest))

        self.bench.service.db.write(remove)

    def call(self, fn: Callable[[Volume], T]) -> T:
        """What waits for space gets it, in the end."""
        parked = 0

        def counted(volume: Volume) -> T:
            nonlocal parked
            try:
                return fn(volume)
            except Park:
                parked += 1
                if parked > 20:
                    self.full = 0.0
                raise

        return super().call(counted)

    def until(self, want: Want, limit: int = 20_000) -> None:
        if self.full:
            try:
                super().until(want, 300)
                return
            except AssertionError:
                self.full = 0.0
        super().until(want, limit)

    def settle(self) -> None:
        """Everything that went wrong is over."""
        self.full, self.crash_in = 0.0, -1
        self.net.faulty, self.net.cut = False, 0

    def undisturbed(self, check: Callable[[], None]) -> None:
        """Look without anything new going wrong."""
        before = self.full, self.crash_in
        self.full, self.crash_in = 0.0, -1
        check()
        self.full, self.crash_in = before

    def check_nothing_is_left(self) -> None:
        """What is committed holds nothing: no file, no flight, no log segment."""
        assert self.volume.pending().clean, self.volume.pending()
        core = self.volume.core
        left = core.dirty, core.flights, core.dead_jobs, self.volume.flusher.inline_bytes
        assert left == ({}, {}, 0, 0), left
        assert core.conflicts == 0, "one mount alone has no conflicts"

    def kind(self) -> str:
        names = ("small", "disk", "ends", "sweeps")
        return ", ".join(name for name in names if getattr(self, name)) or "plain"
