"""A file that gets its first name when it is complete (O_TMPFILE): its making and its content are one, also
where the server refuses commits until it is found what it will not take, and where a kill came between."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from support.bench import Bench
from support.client import Client, Clock

from fsd.model.attrs import ROOT_INO
from fsd.model.errors import UsageError
from fsd.model.ops import Content, Create, Op
from fsd.wire.messages import Commit, CommitAnswer


class Picky:
    """A client whose server takes no commit with an operation that `refuses`; each commit is noted."""

    def __init__(self, base: Path, refuses: Callable[[Op], bool]) -> None:
        self.client = Client(base / "mount", Bench(base / "server"), Clock(), random.Random(1))
        self.client.net.faulty = False
        self.client.open()
        self.refuses = refuses
        self.sent: list[tuple[Op, ...]] = []
        self.real = self.client.remote.commit
        self.client.remote.commit = self.commit  # type: ignore[method-assign]

    def commit(self, commit: Commit, timeout: float) -> CommitAnswer:
        self.sent.append(commit.ops)
        if any(map(self.refuses, commit.ops)):
            raise UsageError("the test's server does not like it")
        return self.real(commit, timeout)

    def named(self, name: bytes, size: int = 50_000) -> int:
        """A complete file under its first name; its inode."""
        node, fh = self.client.call(lambda v: v.create_unnamed(ROOT_INO, 0o640, 0, 0, os.O_RDWR))
        self.client.call(lambda v: v.write(fh, 0, b"d" * size))
        self.client.call(lambda v: v.link(node.ino, ROOT_INO, name))
        self.client.call(lambda v: v.release(fh))
        return node.ino

    def whole(self, ino: int) -> int:
        """How many commits the file's making was in; each had its content."""
        count = 0
        for ops in self.sent:
            if any(isinstance(op, Create) and op.ino == ino for op in ops):
                assert any(isinstance(op, Content) and op.ino == ino for op in ops), (
                    "a name without its content"
                )
                count += 1
        return count

    def close(self) -> None:
        self.client.volume.close()
        self.client.bench.audit()
        self.client.bench.close()


@pytest.mark.parametrize("before", range(6))
def test_commits_get_smaller_and_never_less_than_both(tmp_path: Path, before: int) -> None:
    """Whatever number of operations stands before and behind, and where the halves end."""
    picky = Picky(tmp_path, lambda op: isinstance(op, Create) and op.name == b"bad")
    client = picky.client
    for number in range(before):
        client.call(lambda v, n=number: v.mkdir(ROOT_INO, b"d%d" % n, 0o755, 0, 0))
    made = [picky.named(b"one"), picky.named(b"two")]
    client.call(lambda v: v.mkdir(ROOT_INO, b"bad", 0o755, 0, 0))
    made.append(picky.named(b"three"))
    client.until(client.volume.barrier())
    assert all(picky.whole(ino) for ino in made)
    assert max(map(picky.whole, made)) > 1, "nothing was refused"
    entries = client.bench.entries()
    assert {b"one", b"two", b"three"} <= entries.keys()
    assert b"bad" not in entries
    assert all(client.bench.read(entries[name].attr) == b"d" * 50_000 for name in (b"one", b"three"))
    assert client.volume.pending().operations == 1
    picky.close()


@pytest.mark.parametrize("kind", [Create, Content])
def test_what_is_not_taken_is_put_aside_with_what_goes_with_it(tmp_path: Path, kind: type[Op]) -> None:
    inos: list[int] = []
    picky = Picky(tmp_path, lambda op: isinstance(op, kind) and op.ino in inos)
    client = picky.client
    inos.append(picky.named(b"unwanted"))
    good = picky.named(b"good")
    client.until(client.volume.barrier())
    assert picky.whole(inos[0])
    assert picky.whole(good)
    assert sorted(client.bench.entries()) == [b"good"]
    refused = sorted(tmp_path.glob("mount/refused/*"))
    assert [(place / "data").exists() for place in refused] == [False, True]
    assert (refused[1] / "data").read_bytes() == b"d" * 50_000
    assert client.call(lambda v: v.lookup(ROOT_INO, b"unwanted")) is None
    picky.close()


def test_a_recovery_sends_both_at_once(tmp_path: Path) -> None:
    picky = Picky(tmp_path, lambda op: isinstance(op, Create) and op.name == b"bad")
    client = picky.client
    client.listing(ROOT_INO)  # known from here on, also without the server
    client.net.cut = 10**9
    client.call(lambda v: v.mkdir(ROOT_INO, b"first", 0o755, 0, 0))
    client.call(lambda v: v.mkdir(ROOT_INO, b"bad", 0o755, 0, 0))
    ino = picky.named(b"file")
    client.kill()
    client.net.cut = 0
    picky.sent.clear()
    client.open()
    client.until(client.volume.barrier())
    assert picky.whole(ino) > 1, "nothing was refused"
    assert sorted(client.bench.entries()) == [b"file", b"first"]
    picky.close()
