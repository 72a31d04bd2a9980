"""A running sandbox is copied, memory and state directory and all, and both go on: nothing is lost."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from support.bench import Bench
from support.client import Client, Clock, assert_same, server_tree
from support.twin import clone


def work(client: Client, who: bytes, tokens: set[bytes], rounds: int) -> None:
    """Create, rewrite, rename and make directories, with a token of its own in each file."""
    rng = client.rng
    root = client.volume.root_ino
    for at in range(rounds):
        token = b"<%s-%d-%s>" % (who, at, rng.randbytes(3).hex().encode())
        name = rng.choice((b"x", b"y", b"%s-%d" % (who, at)))
        where = root
        folder = client.call(lambda v: v.lookup(root, b"folder"))
        if folder is None and rng.random() < 0.3:
            client.call(lambda v: v.mkdir(root, b"folder", 0o755, 0, 0))
        elif folder is not None:
            where = folder.ino
        client.put(where, name, token, sync=rng.random() < 0.3)
        tokens.add(token)
        client.clock.seconds += rng.random() * 2
        client.volume.tick(client.clock.seconds)
        client.run_some(rng.randrange(10))


def run(directory: Path, seed: int) -> int:
    rng = random.Random(seed)
    clock = Clock()
    bench = Bench(directory / "server")
    first = Client(directory / "first", bench, clock, rng)
    first.open()
    tokens: set[bytes] = set()
    work(first, b"before", tokens, rng.randrange(1, 6))
    second = clone(first, directory / "second")
    both = [(first, b"first"), (second, b"second")]
    for _ in range(3):
        for client, who in rng.sample(both, 2):
            work(client, who, tokens, rng.randrange(1, 4))
            client.feed()
    for client, _ in both:
        client.net.faulty, client.net.cut = False, 0
    for _ in range(2):
        for client, _ in both:
            client.until(client.volume.barrier())
            client.feed()
    tree = server_tree(bench)
    everything = b"".join(what[1] for what in tree.values() if what[0] == "file")
    lost = {token for token in tokens if token not in everything}
    assert not lost, f"lost {lost}; the tree has {sorted(tree)}"
    for client, _ in both:
        client.feed()
        assert_same(tree, client.view())
        client.volume.close()
    assert first.volume.session != second.volume.session, "one of the two has to take a new session"
    bench.close()
    return len(tree)


def test_both_copies_keep_everything(tmp_path: Path) -> None:
    for seed in range(10):
        try:
            run(tmp_path / str(seed), seed)
        except BaseException:
            print("seed", seed)
            raise


@pytest.mark.long
@pytest.mark.timeout(900)
def test_both_copies_keep_everything_for_long(tmp_path: Path) -> None:
    for seed in range(1000, 1300):
        run(tmp_path / str(seed), seed)


def test_a_copied_state_directory_is_mounted_while_the_first_goes_on(tmp_path: Path) -> None:
    """The copy's daemon starts anew (the supervisor, or `fsd mount` in the restored sandbox)."""
    for seed in range(6):
        rng = random.Random(seed)
        place = tmp_path / str(seed)
        clock = Clock()
        bench = Bench(place / "server")
        first = Client(place / "first", bench, clock, rng)
        first.open()
        tokens: set[bytes] = set()
        work(first, b"before", tokens, 5)
        first.snapshot_disk(place / "second")
        work(first, b"first", tokens, 5)
        second = Client(place / "second", bench, clock, rng)
        second.open()
        work(second, b"second", tokens, 5)
        for client in (first, second, first, second):
            client.net.faulty, client.net.cut = False, 0
            client.until(client.volume.barrier())
            client.feed()
        everything = b"".join(w[1] for w in server_tree(bench).values() if w[0] == "file")
        assert not {token for token in tokens if token not in everything}, f"seed {seed}"
        first.volume.close()
        second.volume.close()
        bench.close()
