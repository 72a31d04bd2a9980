"""A mount that knows more inodes than it may keep: cold ones go, nothing is lost, nothing old is shown."""

from __future__ import annotations

from collections import Counter

from support.client import Client, assert_same, server_tree


class Kernel:
    """The lookups the kernel would hold, given back when it is told to forget a name."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.held: Counter[int] = Counter()
        self.names: dict[tuple[int, bytes], int] = {}

    def lookup(self, parent: int, name: bytes) -> int | None:
        node = self.client.call(lambda v: v.lookup(parent, name))
        if node is None:
            return None
        self.held[node.ino] += 1
        self.names[parent, name] = node.ino
        return node.ino

    def obey(self) -> int:
        """Do what was asked; returns how many inodes were forgotten."""
        volume, done = self.client.volume, 0
        for one in volume.take_invalidations():
            ino = self.names.pop((one.ino, one.name), None) if one.name is not None else None
            if ino is not None and self.held[ino]:
                volume.forget(ino, self.held.pop(ino))
                done += 1
        return done


def pass_time(client: Client, seconds: float) -> None:
    client.clock.seconds += seconds
    client.volume.tick(client.clock.seconds)


def fill(client: Client, kernel: Kernel, directories: int, each: int) -> dict[bytes, int]:
    """Directories of small files, committed."""
    root = client.volume.root_ino
    found = {}
    for at in range(directories):
        name = b"d%d" % at
        found[name] = client.call(lambda v, n=name: v.mkdir(root, n, 0o755, 0, 0)).ino  # type: ignore[misc]
        kernel.held[found[name]] += 1
        kernel.names[root, name] = found[name]
        for number in range(each):
            made = client.put(found[name], b"f%d" % number, b"%d of %d" % (number, at))
            kernel.held[made] += 2  # looked up in vain, made, ...
            kernel.names[found[name], b"f%d" % number] = made
    client.until(client.volume.barrier())
    return found


def test_cold_directories_go_first_and_are_there_again(client: Client) -> None:
    volume, kernel = client.volume, Kernel(client)
    volume.evictor.limit = 1000
    directories = fill(client, kernel, 10, 20)
    before = client.view()
    assert len(volume.core.nodes.by_ino) > 200
    pass_time(client, 1.0)
    for _ in range(3):
        assert kernel.lookup(directories[b"d3"], b"f1") is not None
        pass_time(client, 1.0)
    volume.evictor.limit = 100
    for _ in range(4):
        pass_time(client, 2.0)
        kernel.obey()
    assert len(volume.core.nodes.by_ino) <= 100
    assert volume.core.nodes.by_ino[directories[b"d3"]].complete, "the warm one went"
    assert_same(before, client.view())


def test_an_inode_of_two_numbers_goes_under_both(client: Client) -> None:
    """One that stayed would be a file of its own from then on, with what it was at that time."""
    core, kernel = client.volume.core, Kernel(client)
    directories = fill(client, kernel, 1, 3)
    node = core.nodes.by_ino[core.nodes.by_ino[directories[b"d0"]].entries[b"f1"] or 0]
    alias = core.new_ino()
    core.nodes.by_ino[alias], core.nodes.also[node.ino] = node, (alias,)
    for child in core.nodes.by_ino.values():
        child.lookups = 0 if child.is_file else child.lookups
    client.volume.evictor.limit = 1
    pass_time(client, 2.0)
    assert node.ino not in core.nodes.by_ino
    assert alias not in core.nodes.by_ino


def test_what_the_server_lacks_stays(client: Client) -> None:
    volume, kernel = client.volume, Kernel(client)
    volume.evictor.limit = 1000
    directories = fill(client, kernel, 4, 10)
    client.net.cut = 1 << 30
    target = directories[b"d1"]
    client.call(lambda v: v.unlink(target, b"f2"))
    client.put(target, b"f3", b"changed", offset=0)
    volume.evictor.limit = 5
    for _ in range(4):
        pass_time(client, 0.3)
        kernel.obey()
    client.net.cut = 0
    volume.evictor.limit = 1000
    assert client.call(lambda v: v.lookup(target, b"f2")) is None
    client.until(volume.barrier())
    assert_same(client.view(), server_tree(client.bench))


def test_a_name_the_kernel_knows_absent_is_told_after_its_directory_went(client: Client) -> None:
    """The kernel keeps "no such name" for a minute; another mount's creation must reach it all the same."""
    volume, kernel = client.volume, Kernel(client)
    volume.evictor.limit = 1000
    directories = fill(client, kernel, 3, 10)
    where = directories[b"d1"]
    assert client.call(lambda v: v.lookup(where, b"new")) is None
    volume.evictor.limit = 5
    for _ in range(4):
        pass_time(client, 2.0)
        kernel.obey()
    assert not volume.core.nodes.by_ino[where].complete
    other = Client(client.options.state_dir.with_name("other"), client.bench, client.clock, client.rng, "o")
    other.net.faulty = False
    other.open()
    other.put(other.call(lambda v: v.lookup(v.root_ino, b"d1")).ino, b"new", b"there")  # type: ignore[union-attr]
    other.until(other.volume.barrier())
    other.volume.close()
    feed = client.remote.service.feed
    page = feed.page(client.remote.fs, volume.feed_seq, 0.0, volume.root_ino)
    told = [one for one in volume.apply_feed(page) if one.name == b"new"]
    assert [one.ino for one in told] == [where]
    assert client.call(lambda v: v.lookup(where, b"new")) is not None
