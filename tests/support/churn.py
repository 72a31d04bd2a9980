"""Writers flat out while states are kept, forked, let go and swept: each is compared byte by byte.

Contents come from a small pool, so that what one writer drops another has just uploaded again. A commit and
the model change together under one mutex; uploads, sweeps and reads of kept states run beside it.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from fsd.meta.database import Tx
from fsd.model.attrs import ROOT_INO
from fsd.model.blocks import decode
from fsd.model.errors import Busy
from fsd.model.limits import BLOCK
from fsd.model.ops import UNLINK, Op, Unlink
from fsd.service import pins
from fsd.service.access import FsRef
from fsd.service.native import Ask
from fsd.service.open import Service
from fsd.service.retained import At
from fsd.service.sessions import SessionInfo
from fsd.service.sweep import FIGURES, Terms
from fsd.wire.frame import Blob, make_blob, open_blob
from fsd.wire.messages import make_commit
from support.bench import ADMIN_GRANT, Bench, Mount

POOL: Final = 48
SIZES: Final = (200, 3_000, 70_000, 150_000)
NAMES: Final = 16
KEPT: Final = 4
ENOUGH_IN: Final = 40.0  # more seconds on a slow machine


def content(number: int) -> bytes:
    return random.Random(number).randbytes(SIZES[number % len(SIZES)])


def read_state(service: Service, fs: FsRef, seq: int) -> dict[str, bytes]:
    """Every file of a flat tree at a retained seq."""
    _, (listed,) = service.namespace.ask(fs, [("list", ROOT_INO, b"", 10_000)], At(seq=seq))
    found: dict[str, bytes] = {}
    for row in listed[0]:
        name, ino, size = bytes(row.name), row.attr.ino, row.attr.size
        _, (answer,) = service.namespace.ask(fs, [("blocks", ino, 0, 64)], At(seq=seq))
        data = bytearray(size)
        for idx, raw in answer[1]:
            for part in decode(raw):
                blobs = service.packs.read(fs.id, [part.hash])
                assert part.hash in blobs, f"{name!r} at {seq}: blob {part.hash.hex()} is lost"
                at = idx * BLOCK + part.off
                data[at : at + part.length] = open_blob(blobs[part.hash])[part.boff : part.boff + part.length]
        found[name.decode()] = bytes(data)
    return found


@dataclass
class Kept:
    """A state that is kept, and what it showed: by a checkpoint, or by a pin alone (`checkpoint` '')."""

    pin: int
    checkpoint: str
    seq: int
    files: dict[str, bytes]


@dataclass
class Churn:
    """`services` stand for replicas: writers and sweeps take them in turn."""

    bench: Bench
    services: Sequence[Service]
    rng: random.Random
    writers: int = 2
    sweepers: int = 2
    older: float = 0.0
    model: dict[str, tuple[int, bytes]] = field(default_factory=dict)  # name → inode, content
    kept: list[Kept] = field(default_factory=list)
    commits: int = 0
    resent: int = 0
    compared: int = 0
    forked: int = 0
    swept: dict[str, int] = field(default_factory=lambda: dict.fromkeys(FIGURES, 0))
    failures: list[BaseException] = field(default_factory=list)
    _mutex: threading.Lock = field(default_factory=threading.Lock)
    _stop: threading.Event = field(default_factory=threading.Event)

    def run(self, seconds: float) -> None:
        """All threads for so long, and until enough was done; raises what the first one failed with."""
        steps: list[Callable[[random.Random], None]] = [self._keeper, self._reader, self._forker]
        steps += [self._sweeper] * self.sweepers
        threads = [
            threading.Thread(target=self._guard, args=(step, random.Random(self.rng.random())), daemon=True)
            for step in steps
        ]
        threads += [
            threading.Thread(target=self._guard_writer, args=(number, self.rng.random()), daemon=True)
            for number in range(self.writers)
        ]
        for thread in threads:
            thread.start()
        began = time.monotonic()
        while not self.failures and time.monotonic() < began + seconds + ENOUGH_IN:
            time.sleep(0.05)
            if (
                time.monotonic() > began + seconds
                and self.commits > 20
                and self.swept["blobs"] > 5
                and self.forked
            ):
                break
        self._stop.set()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive(), "a thread hangs"
        if self.failures:
            raise self.failures[0]
        assert self.commits > 5 and self.compared and self.swept["blobs"] > 5, "the run did too little"
        assert self.forked, "nothing was forked"

    def _guard(self, step: Callable[[random.Random], None], rng: random.Random) -> None:
        try:
            while not self._stop.is_set():
                step(rng)
        except BaseException as exc:  # noqa: BLE001 - told by `run`
            self.failures.append(exc)

    def _guard_writer(self, number: int, seed: float) -> None:
        rng = random.Random(seed)
        service = self.services[number % len(self.services)]
        mount = self.bench.mount(f"w{number}")
        self._guard(lambda rng: self._write(service, mount, rng), rng)

    def _write(self, service: Service, mount: Mount, rng: random.Random) -> None:
        """One commit of a few changes; its blobs were mostly sent ahead."""
        fs = self.bench.fs
        wanted = [content(rng.randrange(POOL)) for _ in range(rng.randrange(1, 4))]
        blobs = {blob.hash: blob for blob in map(make_blob, wanted)}
        if rng.random() < 0.7:
            service.packs.store(fs.id, fs.name, list(blobs.values()))
        with self._mutex:
            changed = dict(self.model)
            for data in wanted:
                name = f"f{rng.randrange(NAMES)}"
                if name not in changed:
                    changed[name] = (mount.file(ROOT_INO, name.encode(), data), data)
                elif rng.random() < 0.4:
                    mount.unlink(ROOT_INO, name.encode(), changed.pop(name)[0], 2**40)
                else:
                    changed[name] = (changed[name][0], data)
                    mount.write(changed[name][0], data, 2**40)
            self._commit(service, mount, blobs)
            self.model = changed
            self.commits += 1

    def _commit(self, service: Service, mount: Mount, blobs: dict[bytes, Blob]) -> None:
        """First without blobs, as a mount does that sent them ahead; then with those that are missing."""
        along: list[Blob] = []
        while True:
            commit = make_commit(mount.session, mount.ticket, mount.queue, (0, 0, 0), along)
            answer = service.commits.commit(self.bench.fs, commit, ADMIN_GRANT)
            if not answer.missing:
                break
            self.resent += 1
            along = [blobs[digest] for digest in answer.missing]
        assert not answer.outcomes, f"told {answer.outcomes}"
        mount.ticket = answer.ticket
        mount.queue.clear()
        mount.blobs.clear()

    def _keeper(self, rng: random.Random) -> None:
        """Keep the present state, or let one go."""
        service = rng.choice(self.services)
        with self._mutex:
            kept = self.kept.pop(rng.randrange(len(self.kept))) if len(self.kept) >= KEPT else None
        if kept is not None:
            self._compare(service, kept)
            self._let_go(service, kept)
        with self._mutex:
            files = {name: data for name, (_, data) in self.model.items()}
            fs = self.bench.fs
            if rng.random() < 0.5:
                made = service.db.write(lambda tx: service.checkpoints.make(tx, fs, None, Ask()))
                self.kept.append(Kept(0, made["checkpoint_id"], made["fs_seq"], files))
            else:
                number, seq = service.db.write(lambda tx: pins.pin(tx, fs, "journal", "churn"))
                self.kept.append(Kept(number, "", seq, files))
        time.sleep(rng.random() / 20)

    def _let_go(self, service: Service, kept: Kept) -> None:
        def remove(tx: Tx) -> None:
            if kept.checkpoint:
                service.checkpoints.delete(tx, self.bench.fs, None, kept.checkpoint)
            else:
                pins.unpin(tx, service.packs, self.bench.fs, kept.pin)

        service.db.write(remove)

    def _forker(self, rng: random.Random) -> None:
        """Fork the present state; read the fork before, while and after it is copied; remove half of its
        files, so that packs are shared in part; sweep it; delete it."""
        service, fs = rng.choice(self.services), self.bench.fs
        with self._mutex:
            made = service.db.write(lambda tx: service.forks.create(tx, fs, "fork", []))
            model = dict(self.model)
        fork = service.filesystems.get(made["file_system_id"])
        files = {name: data for name, (_, data) in model.items()}
        assert read_state(service, fork, made["fs_seq"]) == files, "the alias shows something else"
        service.forks.finish(fork)
        assert read_state(service, fork, made["fs_seq"]) == files, "the copy shows something else"
        start = service.sessions.start(fork, SessionInfo("m", "fork", "/mnt", "/", False, "0"))
        gone = list(model)[::2]
        ops: list[Op] = [
            Unlink(at + 1, UNLINK, ROOT_INO, name.encode(), model[name][0], 2**40, 1)
            for at, name in enumerate(gone)
        ]
        if ops:
            commit = make_commit(start.session, start.ticket, ops, (0, 0, 0), [])
            assert not service.commits.commit(fork, commit, ADMIN_GRANT).outcomes
        self.sweep(service, fs=fork)
        left = {name: data for name, data in files.items() if name not in gone}
        assert read_state(service, fork, service.feed.head(fork)) == left
        assert read_state(service, fork, made["fs_seq"]) == files, "its base is kept"
        service.db.write(lambda tx: service.filesystems.delete(tx, fork.name))
        while service.filesystems.collect():
            pass
        self.forked += 1
        time.sleep(rng.random() / 10)

    def _reader(self, rng: random.Random) -> None:
        """A state that stays kept while it is read: only this thread holds it back."""
        service = rng.choice(self.services)
        with self._mutex:
            kept = self.kept.pop(rng.randrange(len(self.kept))) if self.kept else None
        if kept is None:
            time.sleep(0.01)
            return
        try:
            self._compare(service, kept)
        finally:
            with self._mutex:
                self.kept.append(kept)
        time.sleep(0.01)

    def _compare(self, service: Service, kept: Kept) -> None:
        found = read_state(service, self.bench.fs, kept.seq)
        assert found.keys() == kept.files.keys(), f"other files at {kept.seq}"
        different = [name for name in found if found[name] != kept.files[name]]
        assert not different, f"other content at {kept.seq}: {different}"
        self.compared += 1

    def _sweeper(self, rng: random.Random) -> None:
        service = rng.choice(self.services)
        self.sweep(service, f"{rng.randrange(16**16):016x}")

    def sweep(self, service: Service, token: str = "0" * 16, fs: FsRef | None = None) -> dict[str, int]:
        fs = fs or self.bench.fs
        done = dict.fromkeys(FIGURES, 0)
        cursor = ""
        while True:
            try:
                page = service.sweep.call(fs.name, Terms(self.older), cursor, token=token)
            except Busy:  # two at once: the lease passes between them
                service.db.write(lambda tx: tx.execute("UPDATE sweep SET holder='' WHERE fs=?", (fs.id,)))
                continue
            for name in FIGURES:
                done[name] += page[name]
            if page["next_cursor"] is None:
                break
            cursor = page["next_cursor"]
        with self._mutex:
            for name in FIGURES:
                self.swept[name] += done[name]
        return done

    def empty(self) -> None:
        """Let go of everything: states compared once more, files removed, all swept."""
        service = self.services[0]
        for kept in self.kept:
            self._compare(service, kept)
            self._let_go(service, kept)
        self.kept.clear()
        head = service.feed.head(self.bench.fs)
        found = read_state(service, self.bench.fs, head)
        assert found == {name: data for name, (_, data) in self.model.items()}
        mount = self.bench.mount("last")
        for name, (ino, _) in self.model.items():
            mount.unlink(ROOT_INO, name.encode(), ino, 2**40)
        if self.model:
            self._commit(service, mount, {})
        self.model.clear()
        for _ in range(2):
            self.sweep(service)
