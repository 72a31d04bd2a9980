"""The figures of one peer in one round. Each group leaves its peer mounted, empty and settled.

A group gives (figure, value) pairs as they are measured, so that what came before a failure counts.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sqlite3
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from bench import perop, proc
from bench.inputs import GIT, MIB, Inputs
from bench.peers import Failed, Peer

SQLITE_SECONDS = 4.0
Values = Iterator[tuple[str, float]]
Group = Callable[[Peer, Inputs, Path], Values]


def timed(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def tool(argv: Sequence[str | Path], env: dict[str, str] | None = None) -> bytes:
    """An ordinary program; its output. Raises `Failed`."""
    words = [os.fspath(word) for word in argv]
    try:
        done = subprocess.run(words, capture_output=True, timeout=300, env=env, check=False)
    except subprocess.TimeoutExpired as exc:
        raise Failed(f"{words[0]} took over 300 s") from exc
    if done.returncode:
        raise Failed(f"{' '.join(words[:3])}: {done.stderr.decode('utf-8', 'replace').strip()[-200:]}")
    return done.stdout


def remount(peer: Peer) -> tuple[float, float]:
    """Unmount until durable, drop the caches, mount. Seconds of the two."""
    peer.note_memory()
    down = timed(peer.unmount)
    proc.drop_caches()
    return down, timed(peer.mount)


def big(peer: Peer, inputs: Inputs, directory: Path) -> Values:
    """Write and fsync one large file; read it after a remount, every byte compared."""
    blob = memoryview(inputs.data.read_bytes())
    path = directory / "big"
    descriptor = os.open(path, os.O_CREAT | os.O_WRONLY, 0o644)

    def write() -> None:
        for at in range(0, len(blob), MIB):
            part = blob[at : at + MIB]
            while part:
                part = part[os.write(descriptor, part) :]
        os.fsync(descriptor)

    try:
        took = timed(write)
    finally:
        os.close(descriptor)
    yield "write + fsync, MiB/s", inputs.mib / took
    remount(peer)
    pieces: list[bytes] = []

    def read() -> None:
        with open(path, "rb", buffering=0) as file:
            while piece := file.read(MIB):
                pieces.append(piece)

    took = timed(read)
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(piece)
    if digest.digest() != hashlib.sha256(blob).digest():
        raise Failed("the bytes read differ from those written")
    yield "cold read, MiB/s", inputs.mib / took


def small(peer: Peer, inputs: Inputs, directory: Path) -> Values:
    """Untar until durable, list warm and cold, remove."""
    tree = directory / "tree"
    unpack = ["tar", "-xf", inputs.tar, "-C", directory, "--no-same-owner"]
    took = timed(lambda: tool(unpack))
    yield "untar, s", took
    down, _ = remount(peer)
    yield "untar until durable, s", took + down
    count = sum(len(names) for _, _, names in os.walk(tree))
    if count != inputs.files:
        raise Failed(f"{count} files after the remount, {inputs.files} unpacked")
    tool(["ls", "-lR", tree])
    yield "ls -lR warm, s", timed(lambda: tool(["ls", "-lR", tree]))
    _, up = remount(peer)
    if peer.daemons():
        yield "cold mount, s", up
    took = timed(lambda: tool(["ls", "-R", directory]))
    yield "first ls -R, s", took
    yield "cold mount + first ls -R, s", up + took
    yield "grep -r cold, s", timed(lambda: subprocess.run(["grep", "-rq", "no such text", tree], timeout=300))
    yield "rm -rf, s", timed(lambda: tool(["rm", "-rf", tree]))


def git(peer: Peer, inputs: Inputs, directory: Path) -> Values:
    """Clone by file://, then status twice."""
    environment = {**os.environ, **GIT}
    clone = directory / "clone"
    status = ["git", "-c", "safe.directory=*", "-C", clone, "status", "--porcelain"]
    source = f"file://{inputs.repo}"
    make = ["git", "clone", "-q", "--no-hardlinks", source, clone]
    yield "git clone, s", timed(lambda: tool(make, environment))
    yield "git status first, s", timed(lambda: tool(status, environment))
    yield "git status second, s", timed(lambda: tool(status, environment))
    if out := tool(status, environment):
        raise Failed(f"git status is not clean after a clone: {out[:150]!r}")


def sqlite(peer: Peer, inputs: Inputs, directory: Path) -> Values:
    """Commits of one row with the rollback journal and synchronous=FULL."""
    database = sqlite3.connect(directory / "t.db", isolation_level=None, timeout=20)
    try:
        database.execute("PRAGMA journal_mode=DELETE")
        database.execute("PRAGMA synchronous=FULL")
        database.execute("CREATE TABLE t(id INTEGER PRIMARY KEY, v TEXT)")
        done, start = 0, time.perf_counter()
        while time.perf_counter() - start < SQLITE_SECONDS:
            database.execute("BEGIN IMMEDIATE")
            database.execute("INSERT INTO t(v) VALUES(?)", ("x" * 100,))
            database.execute("COMMIT")
            done += 1
        took = time.perf_counter() - start
        verdict = database.execute("PRAGMA integrity_check").fetchone()[0]
    finally:
        database.close()
    if verdict != "ok":
        raise Failed(f"integrity_check: {verdict}")
    yield "SQLite FULL, tx/s", done / took


def operations(peer: Peer, inputs: Inputs, directory: Path) -> Values:
    yield from perop.measure(peer, directory)


GROUPS: dict[str, Group] = {
    "big": big,
    "small": small,
    "git": git,
    "sqlite": sqlite,
    "operations": operations,
}


def one_round(peer: Peer, group: str, inputs: Inputs, number: int) -> Values:
    """A group in a directory of its own, which is removed and settled afterwards, whatever happened."""
    directory = peer.root / f"{group}-{number}"
    directory.mkdir()
    try:
        yield from GROUPS[group](peer, inputs, directory)
    finally:
        peer.note_memory()
        shutil.rmtree(directory)
        peer.settle()
