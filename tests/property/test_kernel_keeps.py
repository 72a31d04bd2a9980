"""What the kernel keeps of a tree is what the server has, once everybody has heard of everything.

A model of the kernel's caches on a mount that only looks: names, attributes, and pages of files that stay
open, with the rules of Linux (nothing is asked for that is kept; other sizes or times make it drop pages).
Another mount changes the tree, also while this one's questions are on their way, and its feed may lag.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from property.test_two_mounts import Wild
from support.bench import Bench
from support.client import Client, Clock

from fsd.model.errors import FsdError
from fsd.vfs.asking import AskJob, BlobJob
from fsd.vfs.node import Inode
from fsd.vfs.types import Invalidation, Job, Park
from fsd.wire.messages import ATTRS, FeedPage

NAMES = (b"a", b"b", b"c", b"d", b"e", b"f", b"g", b"h")


@pytest.fixture(autouse=True)
def _more_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Listings of some pages."""
    monkeypatch.setattr("property.test_two_mounts.NAMES", NAMES)


class Told(NamedTuple):
    """Attributes as the kernel was told them."""

    mode: int
    nlink: int
    size: int
    mtime: int
    ctime: int


class Looker(Client):
    """A mount on which programs only look, under a kernel that keeps what it was told."""

    def __init__(self, directory: Path, bench: Bench, clock: Clock, rng: random.Random, duo: Keeps) -> None:
        super().__init__(directory, bench, clock, rng, "looker")
        self.duo = duo
        self.busy = True  # others do something at any time
        self.names: dict[tuple[int, bytes], int | None] = {}
        self.attrs: dict[int, Told] = {}
        self.last: dict[int, Told] = {}  # when it was told last, still good or not
        self.pages: dict[int, bytes] = {}
        self.open_files: dict[int, int] = {}

    def open(self) -> None:
        super().open()
        self.volume.core.take_absent = self.absent

    # What reaches the kernel.

    def absent(self) -> list[Invalidation]:
        return [Invalidation(*at) for at, means in self.names.items() if means is None]

    def tell(self, node: Inode) -> int:
        told = Told(node.mode, node.nlink, node.size, node.mtime, node.ctime)
        before = self.last.get(node.ino)
        if before is not None and (before.size, before.mtime) != (told.size, told.mtime):
            self.pages.pop(node.ino, None)
        self.attrs[node.ino] = self.last[node.ino] = told
        return node.ino

    def forget(self, ones: Iterable[Invalidation]) -> None:
        for one in ones:
            if one.name is not None:
                self.names.pop((one.ino, one.name), None)
            else:
                self.attrs.pop(one.ino, None)
                if not one.attr_only:
                    self.pages.pop(one.ino, None)

    def heard(self) -> None:
        self.forget(self.volume.take_invalidations())

    def feed(self) -> None:
        volume = self.volume
        page = self.remote.service.feed.page(
            self.remote.fs, volume.feed_seq, 0.0, volume.root_ino, volume.core.mark
        )
        if self.rng.random() < 0.05:
            page = page._replace(changes=(), reset=True)  # the server no longer knows what changed
        self.forget(volume.apply_feed(page))
        self.heard()

    def run(self, job: Job) -> object:
        """Others do something just before and just after the server answers, and the feed may be faster."""
        odd = self.busy and isinstance(job, AskJob | BlobJob)
        if odd and self.rng.random() < 0.3:
            self.duo.other()
        result = super().run(job)
        if odd and self.rng.random() < 0.3:
            self.duo.other()
            if self.rng.random() < 0.5:
                self.feed()
        return result

    # What programs do, by way of the kernel.

    def find(self, parent: int, name: bytes) -> int | None:
        if (parent, name) not in self.names:
            node = self.call(lambda v: v.lookup(parent, name))
            self.names[parent, name] = None if node is None else self.tell(node)
            self.heard()
        return self.names.get((parent, name))

    def stat(self, ino: int) -> Told:
        if ino not in self.attrs:
            self.tell(self.call(lambda v: v.getattr(ino)))
        return self.attrs[ino]

    def read_dir(self, ino: int) -> None:
        fh = self.call(lambda v: v.opendir(ino))
        cookie = 0
        while page := self.call(lambda v, c=cookie: v.readdir(fh, c, 2)):  # type: ignore[misc]
            for name, node, _ in page:
                self.volume.ref(node.ino)
                self.names[ino, name] = self.tell(node)
            cookie = page[-1][2]
            if self.rng.random() < 0.1:
                break
            if self.rng.random() < 0.3:
                self.duo.other()
                self.feed()
        self.call(lambda v: v.releasedir(fh))
        self.heard()

    def keep_open(self, ino: int) -> None:
        if ino in self.open_files:
            return
        self.open_files[ino] = fh = self.call(lambda v: v.open(ino, os.O_RDONLY))
        if not self.volume.pages_kept(fh):
            self.pages.pop(ino, None)

    def read(self, ino: int) -> None:
        told = self.stat(ino)
        if ino not in self.pages:
            fh = self.open_files[ino]
            self.pages[ino] = self.call(lambda v: v.read(fh, 0, told.size))

    def close_one(self) -> None:
        ino = self.rng.choice([*self.open_files])
        self.pages.pop(ino, None)
        fh = self.open_files.pop(ino)
        self.call(lambda v: v.release(fh))

    def look(self) -> None:
        """Walk to some place by names and do something there."""
        at: int | None = self.volume.root_ino
        assert at is not None
        while self.rng.random() < 0.6:
            found = self.find(at, self.rng.choice(NAMES))
            if found is None or not self.stat(found).mode & 0o040000:
                at = found or at
                break
            at = found
        if not self.stat(at).mode & 0o040000:
            self.keep_open(at)
            self.read(at)
        elif self.rng.random() < 0.5:
            self.read_dir(at)
        if self.open_files and self.rng.random() < 0.4:
            self.read(self.rng.choice([*self.open_files]))
        if self.open_files and self.rng.random() < 0.2:
            self.close_one()


class Keeps(Wild):
    """The first mount changes what the second looks at."""

    def __init__(self, directory: Path, seed: int) -> None:
        super().__init__(directory, seed)
        self.clients[1].volume.close()
        self.looker = Looker(directory / "looker", self.bench, self.clients[0].clock, self.rng, self)
        self.looker.open()
        self.checked = 0

    def other(self) -> None:
        """The other mount does something, which is committed at once."""
        writer = self.clients[0]
        kind = self.rng.choice(("write", "create", "mkdir", "rename", "link", *self.KINDS))
        if kind == "unlink_open":
            kind = "unlink"
        self.done.append(f"other {kind}")
        try:
            getattr(self, f"do_{kind}")(0, writer)
            writer.until(writer.volume.barrier())
        except FsdError as exc:
            self.done[-1] += f": {exc}"
        writer.feed()

    def step(self) -> None:
        roll = self.rng.random()
        if roll < 0.3:
            self.other()
            return
        self.done.append("look")
        try:
            if roll < 0.4:
                self.looker.feed()
            elif roll < 0.5:
                self.do_time(1, self.looker)
                self.looker.heard()
            else:
                self.looker.look()
        except FsdError as exc:
            self.done[-1] += f": {exc}"

    def settle(self) -> None:
        super_client = self.clients[0]
        super_client.net.faulty = self.looker.net.faulty = False
        super_client.until(super_client.volume.barrier())
        for _ in range(3):
            self.looker.run_some(100)
            self.looker.feed()

    def check(self) -> None:
        looker, entries = self.looker, {}
        for ino, told in looker.attrs.items():
            attr = self.server_attr(ino)
            if attr is None:
                continue
            if attr.is_dir:
                entries[ino] = self.bench.entries(attr.ino)
            now = Told(attr.mode, attr.nlink, attr.size, attr.mtime, attr.ctime)
            assert now == told, f"the kernel keeps old attributes of {ino:x}"
            self.checked += 1
        for ino, data in looker.pages.items():
            attr = self.server_attr(ino)
            if attr is not None and ino in looker.attrs:
                assert data == self.bench.read(attr), f"the kernel keeps old pages of {ino:x}"
                self.checked += 1
        for (parent, name), means in looker.names.items():
            attr = self.server_attr(parent)
            if attr is None:
                continue
            entry = self.bench.entries(attr.ino).get(name)
            there = None if entry is None else looker.volume.core.local(entry.attr.ino)
            assert there == means, f"the kernel keeps {name!r} in {parent:x} as {means}, it is {there}"
            self.checked += 1

    def server_attr(self, ino: int) -> Any:
        wire = self.looker.volume.core.wire.out(ino)
        _, ((attr,),) = self.bench.service.namespace.ask(self.bench.fs, [(ATTRS, (wire,))])
        return attr

    def finish(self) -> None:
        self.settle()
        self.check()
        self.clients = [self.clients[0]]
        self.close()
        self.looker.volume.close()


def play(directory: Path, seed: int, steps: int) -> int:
    duo = Keeps(directory, seed)
    try:
        for _ in range(steps):
            duo.step()
            if duo.rng.random() < 0.05:
                duo.settle()
                duo.check()
        duo.finish()
    except BaseException:
        print(f"seed {seed}, after {len(duo.done)} steps; the last:")
        print("\n".join(duo.done[-40:]))
        raise
    return duo.checked


@pytest.fixture
def small_directories(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most directories are too large to come along with a name of theirs."""
    monkeypatch.setattr("fsd.vfs.loads.DIR_INLINE_MAX", 1)


def enough(directory: Path, seed: int) -> bool:
    """Four days at least, and more until much was kept: how much one keeps is chance."""
    kept = 0
    for at in range(40):
        kept += play(directory / str(at), seed + at, 120)
        if at >= 3 and kept > 100:
            return True
    return False


def test_what_the_kernel_keeps_is_what_the_server_has(tmp_path: Path, seed: int) -> None:
    assert enough(tmp_path, seed)


@pytest.mark.usefixtures("small_directories")
def test_what_the_kernel_keeps_of_large_directories(tmp_path: Path, seed: int) -> None:
    assert enough(tmp_path, seed)


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("inline", [1, 10_000])
def test_what_the_kernel_keeps_in_many_days(
    tmp_path: Path, seed: int, inline: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fsd.vfs.loads.DIR_INLINE_MAX", inline)
    assert sum(play(tmp_path / str(at), seed * 1000 + at, 200) for at in range(100)) > 1000


# The single cases behind it.


class Pair(NamedTuple):
    """A mount that changes things and one that looks, without faults of the network."""

    writer: Client
    looker: Looker
    root: int

    def change(self, name: bytes, data: bytes) -> None:
        self.writer.put(self.root, name, data)
        self.writer.until(self.writer.volume.barrier())


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    keeps = Keeps(tmp_path, 1)
    writer, looker = keeps.clients[0], keeps.looker
    looker.busy = False
    writer.net.faulty = looker.net.faulty = False
    looker.volume.evictor.limit = 1000
    yield Pair(writer, looker, writer.volume.root_ino)
    keeps.clients.pop()
    keeps.close()
    looker.volume.close()


def test_a_name_that_went_while_it_was_asked_for_is_asked_for_again(pair: Pair) -> None:
    """The feed is faster than the answer that is older than it; the directory was not known before."""
    pair.change(b"f", b"x")
    pair.looker.feed()
    with pytest.raises(Park):
        pair.looker.volume.lookup(pair.root, b"f")
    (job,) = pair.looker.volume.jobs()
    answer = Client.run(pair.looker, job)
    pair.writer.call(lambda v: v.rename(pair.root, b"f", pair.root, b"g", 0))
    pair.writer.until(pair.writer.volume.barrier())
    plain_feed(pair.looker)
    pair.looker.volume.finish(job, answer)
    assert pair.looker.find(pair.root, b"f") is None
    assert pair.looker.find(pair.root, b"g") is not None


def test_what_an_answer_tells_before_the_feed_the_kernel_forgets(pair: Pair) -> None:
    """A file of two names: its new version comes with the listing of the directory of the other one."""
    writer, looker, root = pair
    made = writer.call(lambda v: v.mkdir(root, b"d", 0o755, 0, 0))
    pair.change(b"f", b"x")
    ino = writer.number(root, b"f")
    writer.call(lambda v: v.link(ino, made.ino, b"second"))
    writer.until(writer.volume.barrier())
    plain_feed(looker)
    found, directory = looker.find(root, b"f"), looker.find(root, b"d")
    assert found is not None
    assert directory is not None
    looker.keep_open(found)
    looker.read(found)
    pair.change(b"f", b"longer")
    assert looker.find(directory, b"absent") is None
    plain_feed(looker)
    assert looker.stat(found).size == 7
    looker.read(found)
    assert looker.pages[found] == b"xlonger"


def test_starting_over_the_kernel_forgets_what_did_not_exist(pair: Pair) -> None:
    assert pair.looker.find(pair.root, b"f") is None
    pair.change(b"f", b"x")
    page = pair.looker.volume.apply_feed(FeedPage(pair.writer.volume.core.seq, (), True))
    pair.looker.forget(page)
    assert pair.looker.find(pair.root, b"f") is not None


def plain_feed(looker: Looker) -> None:
    volume = looker.volume
    page = looker.remote.service.feed.page(looker.remote.fs, volume.feed_seq, 0.0, volume.root_ino)
    looker.forget(volume.apply_feed(page))
