"""Exclusive mounts in one process with their server, and time that is moved: one writer, and nothing lost."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from support.bench import Bench
from support.client import Client, Clock, server_tree
from support.twin import clone

from fsd.model.errors import FsdError, LeaseHeld, LeaseLost
from fsd.model.limits import LEASE_TTL
from fsd.vfs.open import prepare, recover
from fsd.vfs.refused import count_refused


@contextmanager
def expect_errno(number: int) -> Iterator[None]:
    with pytest.raises(FsdError) as told:
        yield
    assert errno.errorcode[told.value.errno] == errno.errorcode[number], told.value


class Place:
    """A server and mounts of its filesystem, all by one clock."""

    def __init__(self, directory: Path, seed: int) -> None:
        self.directory = directory
        self.rng = random.Random(seed)
        self.clock = Clock()
        self.bench = Bench(directory / "server", self.clock.host(self.rng))
        self.clients: list[Client] = []

    def client(self, name: str, *, exclusive: bool = False, remote_path: bytes = b"/") -> Client:
        made = Client(self.directory / name, self.bench, self.clock, self.rng, name)
        made.net.faulty = False
        made.options = replace(made.options, exclusive=exclusive, remote_path=remote_path)
        self.clients.append(made)
        return made

    def pass_(self, seconds: float) -> None:
        self.clock.wall += int(seconds * 1e9)
        self.clock.seconds += seconds

    def everything(self) -> bytes:
        return b"".join(what[1] for what in server_tree(self.bench).values() if what[0] == "file")

    def recover(self, client: Client, *, shared: bool) -> None:
        """As `fsd recover`."""
        lock = prepare(client.options)
        try:
            recover(client.options, client.host, client.remote, client.cache, shared=shared)
        finally:
            os.close(lock)


def renew(client: Client) -> None:
    """What the daemon does now and then."""
    volume = client.volume
    session, fence = volume.session, volume.core.fence
    try:
        volume.lease_kept(session, client.remote.renew_lease(session, fence, LEASE_TTL))
    except LeaseLost as exc:
        volume.lease_lost(session, exc)


def drain(client: Client) -> None:
    client.until(client.volume.barrier())


def test_others_get_erofs_below_it_and_lose_nothing_they_had_begun(tmp_path: Path) -> None:
    place = Place(tmp_path, 1)
    other = place.client("other")
    other.open()
    root = other.volume.root_ino
    top = other.call(lambda v: v.mkdir(root, b"t", 0o755, 0, 0)).ino
    inner = other.call(lambda v: v.mkdir(top, b"in", 0o755, 0, 0)).ino
    begun = other.put(inner, b"begun", b"first")
    free = other.put(root, b"free", b"first")
    drain(other)
    fh = other.call(lambda v: v.open(begun, os.O_RDWR))
    other.call(lambda v: v.write(fh, 0, b"<on its way>"))
    holder = place.client("holder", exclusive=True, remote_path=b"/t")
    holder.open()
    with pytest.raises(LeaseHeld, match="holder:/mnt is the writer of /t"):
        place.client("second", exclusive=True).open()
    other.feed()
    calls = (
        lambda v: v.write(fh, 0, b"more"),
        lambda v: v.open(begun, os.O_WRONLY),
        lambda v: v.open(begun, os.O_TRUNC),
        lambda v: v.create(inner, b"new", 0o644, 0, 0, os.O_RDWR),
        lambda v: v.mkdir(top, b"d", 0o755, 0, 0),
        lambda v: v.setattr(begun, mode=0o600),
        lambda v: v.setattr(top, mode=0o700),
        lambda v: v.setxattr(begun, b"user.x", b"1"),
        lambda v: v.unlink(inner, b"begun"),
        lambda v: v.rmdir(top, b"in"),
        lambda v: v.rename(inner, b"begun", root, b"out", 0),
        lambda v: v.rename(root, b"free", inner, b"free", 0),
        lambda v: v.rename(root, b"t", root, b"u", 0),
        lambda v: v.link(free, inner, b"linked"),
    )
    for call in calls:
        with expect_errno(errno.EROFS):
            other.call(call)
    assert other.call(lambda v: v.read(fh, 0, 99)) == b"<on its way>"
    other.put(root, b"free", b"written", offset=0)
    with expect_errno(errno.EROFS):  # it was refused, and its handle is told
        other.call(lambda v: v.fsync(fh, False))
    drain(other)
    assert count_refused(other.options.state_dir) == 1
    kept = list((other.options.state_dir / "refused").glob("*/data"))
    assert kept[0].read_bytes() == b"<on its way>"
    holder.put(holder.volume.root_ino, b"mine", b"of the holder", sync=True)
    holder.remote.release_lease(holder.volume.core.fence)
    other.feed()
    assert not other.volume.core.guarded
    other.put(inner, b"begun", b"again", offset=0, sync=True)
    assert b"again" in place.everything()
    place.bench.close()


def test_all_of_a_mount_below_a_lease_is_read_only(tmp_path: Path) -> None:
    place = Place(tmp_path, 2)
    maker = place.client("maker")
    maker.open()
    root = maker.volume.root_ino
    inner = maker.call(lambda v: v.mkdir(root, b"t", 0o755, 0, 0)).ino
    maker.call(lambda v: v.mkdir(inner, b"in", 0o755, 0, 0))
    drain(maker)
    below = place.client("below", remote_path=b"/t/in")
    below.open()
    holder = place.client("holder", exclusive=True, remote_path=b"/t")
    holder.open()
    below.feed()
    with expect_errno(errno.EROFS):
        below.call(lambda v: v.create(v.root_ino, b"x", 0o644, 0, 0, os.O_RDWR))
    assert "holder:/mnt" in str(below.volume.status()["leases"])
    place.pass_(LEASE_TTL + 1)
    below.feed()  # it expired, and binds nobody
    below.put(below.volume.root_ino, b"x", b"free again", sync=True)
    renew(holder)
    assert holder.volume.core.fenced is None
    below.feed()
    with expect_errno(errno.EROFS):
        below.call(lambda v: v.create(v.root_ino, b"y", 0o644, 0, 0, os.O_RDWR))
    place.bench.close()


def test_expired_and_not_taken_it_goes_on_silently(tmp_path: Path) -> None:
    place = Place(tmp_path, 3)
    holder = place.client("holder", exclusive=True)
    holder.open()
    before = holder.volume.core.fence
    for at in range(3):
        place.pass_(LEASE_TTL * 3)
        holder.put(holder.volume.root_ino, b"f%d" % at, b"<%d>" % at, sync=True)
        renew(holder)
    assert holder.volume.core.fence > before
    assert holder.volume.status()["exclusive"] == {
        "fence": holder.volume.core.fence,
        "state": "held",
        "reason": None,
    }
    holder.kill()
    holder.open()  # its daemon starts anew: the lease passes on at once
    holder.put(holder.volume.root_ino, b"last", b"<last>", sync=True)
    assert all(b"<%s>" % one in place.everything() for one in (b"0", b"1", b"2", b"last"))
    place.bench.close()


def fenced_off(place: Place) -> tuple[Client, Client]:
    """A holder that was cut off with changes of its own, and who took its lease."""
    late = place.client("late", exclusive=True)
    late.open()
    root = late.volume.root_ino
    late.put(root, b"shared", b"<common>", sync=True)
    late.put(root, b"shared", b"<of the late one>", offset=0)
    late.put(root, b"own", b"<own of the late one>")
    place.pass_(LEASE_TTL + 1)
    second = place.client("second", exclusive=True)
    second.open()
    second.put(second.volume.root_ino, b"shared", b"<of the second>", offset=0, sync=True)
    return late, second


@pytest.mark.parametrize("told_by", ["commit", "renewal"])
def test_fenced_off_it_is_read_only_keeps_its_log_and_says_why(tmp_path: Path, told_by: str) -> None:
    place = Place(tmp_path, 4)
    late, second = fenced_off(place)
    root = late.volume.root_ino
    shared = late.number(root, b"shared")
    fh = late.call(lambda v: v.open(shared, os.O_RDWR))
    if told_by == "commit":
        with expect_errno(errno.EIO):
            late.call(lambda v: v.fsync(fh, False))
    else:
        renew(late)
    for _ in range(2):
        with expect_errno(errno.EIO):
            late.call(lambda v: v.fsync(fh, False))
    with pytest.raises(LeaseLost, match="it expired, and second:/mnt took it"):
        drain(late)
    with expect_errno(errno.EROFS):
        late.call(lambda v: v.write(fh, 0, b"more"))
    with expect_errno(errno.EROFS):
        late.call(lambda v: v.create(root, b"new", 0o644, 0, 0, os.O_RDWR))
    assert late.call(lambda v: v.read(fh, 0, 99)) == b"<of the late one>"  # what it wrote is still shown
    told = late.volume.status()
    assert told["exclusive"]["state"] == "lost"  # type: ignore[index]
    assert "second:/mnt took it" in str(told["reason"])
    assert not late.volume.pending().clean
    late.volume.close()
    for exclusive in (True, False):  # the next mount of the place does not decide for its user
        late.options = replace(late.options, exclusive=exclusive)
        with pytest.raises(LeaseLost):
            late.open()
    with pytest.raises(LeaseLost):
        place.recover(late, shared=False)
    second.remote.release_lease(second.volume.core.fence)
    place.recover(late, shared=True)
    everything = place.everything()
    for one in (b"<of the late one>", b"<own of the late one>", b"<of the second>"):
        assert one in everything
    assert any("shared.conflict-late-" in path for path in server_tree(place.bench))
    late.options = replace(late.options, exclusive=True)
    late.open()
    place.bench.close()


def test_without_changes_a_fenced_off_mount_leaves_nothing_to_decide(tmp_path: Path) -> None:
    place = Place(tmp_path, 5)
    late = place.client("late", exclusive=True)
    late.open()
    late.put(late.volume.root_ino, b"f", b"<f>", sync=True)
    place.pass_(LEASE_TTL + 1)
    second = place.client("second", exclusive=True)
    second.open()
    renew(late)
    drain(late)  # there is nothing that only it has
    late.volume.close()
    with pytest.raises(LeaseHeld):
        late.open()
    late.options = replace(late.options, exclusive=False)
    late.open()
    place.bench.close()


def test_a_conflict_copy_of_its_own_does_not_cost_the_lease(tmp_path: Path) -> None:
    """While it was expired somebody wrote: the holder's content goes beside, and the server takes its number
    for the copy, so it goes on in another session."""
    place = Place(tmp_path, 6)
    holder, other = place.client("holder", exclusive=True), place.client("other")
    holder.open()
    holder.put(holder.volume.root_ino, b"f", b"<first>", sync=True)
    other.open()
    place.pass_(LEASE_TTL + 1)
    other.feed()
    other.put(other.volume.root_ino, b"f", b"<of the other>", truncate=True, sync=True)
    holder.put(holder.volume.root_ino, b"f", b"<of the holder>", truncate=True)
    before = holder.volume.session
    drain(holder)
    holder.put(holder.volume.root_ino, b"g", b"<after>", sync=True)
    assert holder.volume.session != before
    assert holder.volume.core.fenced is None
    renew(holder)
    assert holder.volume.core.fenced is None
    assert len(place.bench.service.leases.held(place.bench.fs)) == 1
    everything = place.everything()
    assert all(one in everything for one in (b"<of the other>", b"<of the holder>", b"<after>"))
    place.bench.close()


def copies(directory: Path, seed: int) -> None:
    """A running exclusive sandbox is copied; the copy that commits first keeps the lease."""
    place = Place(directory, seed)
    rng = place.rng
    first = place.client("first", exclusive=True)
    first.open()
    root = first.volume.root_ino
    tokens = set()

    def write(client: Client, who: bytes, rounds: int) -> None:
        for at in range(rounds):
            token = b"<%s-%d-%s>" % (who, at, rng.randbytes(3).hex().encode())
            name = rng.choice((b"x", b"y", who + b"%d" % at))
            try:
                client.put(root, name, token, sync=rng.random() < 0.4)
            except FsdError as exc:
                if exc.errno == errno.EROFS:
                    continue  # nothing was taken
                if exc.errno != errno.EIO:
                    raise
            tokens.add(token)
            client.run_some(rng.randrange(8))

    write(first, b"before", 4)
    second = clone(first, directory / "second")
    second.net.faulty = False
    place.clients.append(second)
    for _ in range(3):
        for client, who in rng.sample([(first, b"first"), (second, b"second")], 2):
            write(client, who, 3)
            client.feed()
            place.pass_(rng.random() * LEASE_TTL / 4)
            renew(client)
    lost = []
    for client in (first, second):
        try:
            drain(client)
        except LeaseLost:
            lost.append(client)
    assert len(lost) == 1, f"seed {seed}: one copy keeps the lease, not {2 - len(lost)}"
    winner = second if lost[0] is first else first
    write(winner, b"winner", 2)
    drain(winner)
    winner.remote.release_lease(winner.volume.core.fence)
    lost[0].volume.close()
    place.recover(lost[0], shared=True)
    gone = {token for token in tokens if token not in place.everything()}
    assert not gone, f"seed {seed}: lost {gone}"
    place.bench.close()


def test_the_lease_stays_with_the_copy_that_commits_first(tmp_path: Path) -> None:
    for seed in range(8):
        copies(tmp_path / str(seed), seed)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_lease_stays_with_the_copy_that_commits_first_for_long(tmp_path: Path) -> None:
    for seed in range(1000, 1200):
        copies(tmp_path / str(seed), seed)


def opened(place: Place, client: Client) -> bool:
    """Mount; False where another is or was the writer."""
    try:
        client.open()
    except LeaseHeld:
        return False
    except LeaseLost:
        # Its user decides. While another is the writer the command would say so and do nothing.
        client.net.faulty = False
        if not place.bench.service.leases.held(place.bench.fs):
            place.recover(client, shared=True)
        return False
    return True


def days(directory: Path, seed: int) -> int:
    """Two exclusive mounts of one place in the filesystem, time that jumps, a network that fails: at each
    moment one writer, so no conflict ever, and every file that was taken is there in the end.

    Returns how many changes a mount was refused because it was not the writer any more.
    """
    place = Place(directory, seed)
    rng = place.rng
    clients = [place.client(name, exclusive=True) for name in ("a", "b")]
    tokens: set[bytes] = set()
    mounted: set[str] = set()
    refused = 0
    for step in range(rng.randrange(40, 80)):
        client = rng.choice(clients)
        name = client.options.mount_id
        place.pass_(rng.choice((0.1, 1.0, 5.0, LEASE_TTL / 2, LEASE_TTL + 1)))
        client.net.faulty = rng.random() < 0.5
        if name not in mounted:
            if opened(place, client):
                mounted.add(name)
            continue
        roll = rng.random()
        if roll < 0.55:
            token = b"<%s-%d>" % (name.encode(), step)
            try:
                client.put(client.volume.root_ino, token[1:-1], token, sync=rng.random() < 0.5)
                tokens.add(token)
            except FsdError as exc:
                refused += 1
                if exc.errno == errno.EIO:
                    tokens.add(token)  # taken, and told that it could not be made durable
                elif exc.errno != errno.EROFS:
                    raise
        elif roll < 0.8 and client.volume.core.fenced is None:
            client.net.faulty = False
            renew(client)
        elif roll < 0.9:
            client.kill()
            mounted.discard(name)
        else:
            client.run_some(rng.randrange(20))
            client.feed()
    for client in clients:
        client.net.faulty, client.net.cut = False, 0
        if client.options.mount_id in mounted:
            client.kill()
    place.pass_(LEASE_TTL + 1)  # nobody is the writer: what is left is sent by the rules for all
    for client in clients:
        place.recover(client, shared=True)
    tree = server_tree(place.bench)
    gone = {token for token in tokens if token not in place.everything()}
    assert not gone, f"lost {gone}"
    assert not [path for path in tree if ".conflict-" in path], sorted(tree)
    assert tokens, "nothing was written"
    place.bench.close()
    return refused


def test_at_each_moment_one_writer_and_nothing_lost(tmp_path: Path) -> None:
    refused = 0
    for seed in range(5):
        try:
            refused += days(tmp_path / str(seed), seed)
        except BaseException:
            print("seed", seed)
            raise
    assert refused > 0, "nobody was ever fenced off"


@pytest.mark.long
@pytest.mark.timeout(900)
def test_at_each_moment_one_writer_and_nothing_lost_for_long(tmp_path: Path) -> None:
    for seed in range(1000, 1250):
        days(tmp_path / str(seed), seed)
