"""Two mounts of one filesystem, cuts, crashes and lost replies: nothing written is lost, and both converge.

Every write carries a token of its own; no step here removes content on purpose. At the end each token is
somewhere on the server (rule 1: content is never dropped), and what both mounts show is what the server has.
"""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest
from support.bench import Bench
from support.client import Client, Clock, assert_same, server_tree

from fsd.model.errors import FsdError
from fsd.model.ops import RENAME_EXCHANGE, RENAME_NOREPLACE

NAMES = (b"a", b"b", b"c")


class Duo:
    """Two clients and the tokens they wrote."""

    def __init__(self, directory: Path, seed: int) -> None:
        self.rng = random.Random(seed)
        clock = Clock()
        self.bench = Bench(directory / "server")
        self.clients = [
            Client(directory / name, self.bench, clock, self.rng, name) for name in ("alpha", "beta")
        ]
        for client in self.clients:
            client.open()
        self.tokens: dict[bytes, str] = {}
        self.count = 0
        self.handles: list[list[tuple[int, int]]] = [[], []]
        self.done: list[str] = []

    def step(self) -> None:
        at = self.rng.randrange(2)
        client = self.clients[at]
        kind = self.rng.choices(
            (
                "write",
                "create",
                "mkdir",
                "rename",
                "link",
                "close",
                "feed",
                "time",
                "cut",
                "sync",
                "crash",
                "look",
            ),
            (20, 12, 3, 6, 3, 6, 8, 8, 2, 3, 1, 4),
        )[0]
        self.done.append(f"{client.options.mount_id} {kind}")
        try:
            getattr(self, f"do_{kind}")(at, client)
        except FsdError as exc:
            self.done[-1] += f": {exc}"
        client.run_some(self.rng.randrange(6))

    def some_dir(self, client: Client) -> int:
        ino = client.volume.root_ino
        while self.rng.random() < 0.4:
            dirs = [i for _, i in client.listing(ino) if client.volume.node(i).is_dir]
            if not dirs:
                break
            ino = self.rng.choice(dirs)
        return ino

    def some_file(self, client: Client) -> int | None:
        found = [i for _, i in client.listing(self.some_dir(client)) if client.volume.node(i).is_file]
        return self.rng.choice(found) if found else None

    def token(self, at: int) -> bytes:
        self.count += 1
        made = b"<%d:%d:%s>" % (at, self.count, self.rng.randbytes(4).hex().encode())
        return made * self.rng.choice((1, 1, 1, 3000))

    def do_create(self, at: int, client: Client) -> None:
        where, name = self.some_dir(client), self.rng.choice(NAMES)
        node, fh = client.call(lambda v: v.create(where, name, 0o644, 0, 0, os.O_RDWR | os.O_APPEND))
        self.handles[at].append((fh, node.ino))
        self.put(at, client, fh, node.ino)

    def put(self, at: int, client: Client, fh: int, ino: int) -> None:
        token = self.token(at)
        size = client.volume.node(ino).size
        client.call(lambda v: v.write(fh, size, token))
        self.tokens[token[: token.index(b">") + 1]] = f"{client.options.mount_id} {ino:x}"
        self.done[-1] += f" {ino:x} at {size}"

    def do_write(self, at: int, client: Client) -> None:
        if self.handles[at] and self.rng.random() < 0.6:
            fh, ino = self.rng.choice(self.handles[at])
        else:
            file = self.some_file(client)
            if file is None:
                return
            ino = file
            append = self.rng.choice((0, os.O_APPEND))
            fh = client.call(lambda v: v.open(ino, os.O_RDWR | append))
            self.handles[at].append((fh, ino))
        self.put(at, client, fh, ino)

    def do_mkdir(self, at: int, client: Client) -> None:
        where, name = self.some_dir(client), self.rng.choice(NAMES)
        client.call(lambda v: v.mkdir(where, name, 0o755, 0, 0))

    def do_rename(self, at: int, client: Client) -> None:
        where, to = self.some_dir(client), self.some_dir(client)
        names = [n for n, _ in client.listing(where)]
        if names:
            name, new = self.rng.choice(names), self.rng.choice(NAMES)
            client.call(lambda v: v.rename(where, name, to, new, RENAME_NOREPLACE))
            self.done[-1] += f" {name!r} to {new!r}"

    def do_link(self, at: int, client: Client) -> None:
        file, to, name = self.some_file(client), self.some_dir(client), self.rng.choice(NAMES)
        if file is not None:
            client.call(lambda v: v.link(file, to, name))

    def do_close(self, at: int, client: Client) -> None:
        if self.handles[at]:
            fh, _ = self.handles[at].pop(self.rng.randrange(len(self.handles[at])))
            client.call(lambda v: v.release(fh))

    def do_feed(self, at: int, client: Client) -> None:
        client.feed()

    def do_time(self, at: int, client: Client) -> None:
        client.clock.seconds += self.rng.random() * 3
        client.volume.tick(client.clock.seconds)
        client.run_some(30)

    def do_cut(self, at: int, client: Client) -> None:
        client.net.cut = self.rng.randrange(20)

    def do_sync(self, at: int, client: Client) -> None:
        if self.handles[at]:
            fh, _ = self.rng.choice(self.handles[at])
            client.call(lambda v: v.fsync(fh, False))

    def do_look(self, at: int, client: Client) -> None:
        client.view()

    def do_crash(self, at: int, client: Client) -> None:
        client.kill()
        client.open()
        self.handles[at].clear()

    def settle(self) -> None:
        """The network behaves, everything is sent, everybody hears of it."""
        for client in self.clients:
            client.net.faulty, client.net.cut = False, 0
        for _ in range(3):
            for client in self.clients:
                client.until(client.volume.barrier())
                client.feed()

    def finish(self) -> None:
        self.settle()
        tree = server_tree(self.bench)
        everything = b"".join(what[1] for what in tree.values() if what[0] == "file")
        lost = {token: who for token, who in self.tokens.items() if token not in everything}
        assert not lost, f"lost {lost} of {len(self.tokens)}; the tree has {sorted(tree)}"
        self.agree(tree)
        for client in self.clients:
            assert client.volume.pending().clean, client.volume.pending()
        self.close()

    def agree(self, tree: dict[str, tuple[Any, ...]]) -> None:
        """Every mount shows what the server has."""
        for client in self.clients:
            client.feed()
            assert_same(tree, client.view())

    def close(self) -> None:
        for client in self.clients:
            client.volume.close()
        self.bench.close()


class Wild(Duo):
    """The same with everything that removes and replaces: what is lost then was lost on purpose, but both
    mounts still have to agree."""

    KINDS = ("unlink", "unlink_open", "rmdir", "truncate", "chmod", "xattr", "over", "exchange", "symlink")

    def step(self) -> None:
        if self.rng.random() < 0.7:
            super().step()
            return
        at = self.rng.randrange(2)
        client = self.clients[at]
        kind = self.rng.choice(self.KINDS)
        self.done.append(f"{client.options.mount_id} {kind}")
        try:
            getattr(self, f"do_{kind}")(at, client)
        except FsdError as exc:
            self.done[-1] += f": {exc}"
        client.run_some(self.rng.randrange(6))

    def pick(self, client: Client) -> tuple[int, bytes, int] | None:
        """A directory, a name in it, and what that means."""
        where = self.some_dir(client)
        rows = client.listing(where)
        return (where, *self.rng.choice(rows)) if rows else None

    def do_unlink(self, at: int, client: Client) -> None:
        if (found := self.pick(client)) is not None:
            client.call(lambda v: v.unlink(found[0], found[1]))

    def do_unlink_open(self, at: int, client: Client) -> None:
        if (found := self.pick(client)) is not None:
            fh = client.call(lambda v: v.open(found[2], os.O_RDWR))
            self.handles[at].append((fh, found[2]))
            client.call(lambda v: v.unlink(found[0], found[1]))

    def do_rmdir(self, at: int, client: Client) -> None:
        if (found := self.pick(client)) is not None:
            client.call(lambda v: v.rmdir(found[0], found[1]))

    def do_truncate(self, at: int, client: Client) -> None:
        file, size = self.some_file(client), self.rng.choice((0, 10, 50_000))
        if file is not None:
            client.call(lambda v: v.setattr(file, size=size))

    def do_chmod(self, at: int, client: Client) -> None:
        mode = self.rng.choice((0o600, 0o755))
        if (found := self.pick(client)) is not None:
            client.call(lambda v: v.setattr(found[2], mode=mode))

    def do_xattr(self, at: int, client: Client) -> None:
        value = self.rng.randbytes(3)
        if (found := self.pick(client)) is not None:
            client.call(lambda v: v.setxattr(found[2], b"user.x", value))

    def do_over(self, at: int, client: Client) -> None:
        to, new = self.some_dir(client), self.rng.choice(NAMES)
        if (found := self.pick(client)) is not None:
            client.call(lambda v: v.rename(found[0], found[1], to, new, 0))

    def do_exchange(self, at: int, client: Client) -> None:
        one, two = self.pick(client), self.pick(client)
        if one is not None and two is not None:
            client.call(lambda v: v.rename(one[0], one[1], two[0], two[1], RENAME_EXCHANGE))

    def do_symlink(self, at: int, client: Client) -> None:
        where, name = self.some_dir(client), self.rng.choice(NAMES)
        client.call(lambda v: v.symlink(where, name, b"t", 0, 0))

    def finish(self) -> None:
        self.settle()
        self.agree(server_tree(self.bench))
        self.close()


def run(directory: Path, seed: int, steps: int, kind: type[Duo] = Duo) -> Duo:
    duo = kind(directory, seed)
    try:
        for _ in range(steps):
            duo.step()
        duo.finish()
    except BaseException:
        print(f"seed {seed}, after {len(duo.done)} steps; the last:")
        print("\n".join(duo.done[-40:]))
        raise
    return duo


def test_nothing_written_is_lost_and_both_mounts_agree(tmp_path: Path) -> None:
    conflicts = 0
    for seed in range(8):
        duo = run(tmp_path / str(seed), seed, 100)
        conflicts += sum(client.volume.core.conflicts for client in duo.clients)
        assert len(duo.tokens) > 10
    assert conflicts > 0, "the mounts never met"


def test_both_mounts_agree_whatever_was_done(tmp_path: Path) -> None:
    conflicts = 0
    for seed in range(8):
        duo = run(tmp_path / str(seed), seed, 100, Wild)
        conflicts += sum(client.volume.core.conflicts for client in duo.clients)
    assert conflicts > 0, "the mounts never met"


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_both_mounts_agree_for_long(tmp_path: Path) -> None:
    for seed in range(100, 180):
        run(tmp_path / str(seed), seed, 200, Wild)


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_nothing_written_is_lost_for_long(tmp_path: Path) -> None:
    for seed in range(100, 160):
        run(tmp_path / str(seed), seed, 200)
