"""The mount against a local directory: the same random operations, the same results, errnos and trees."""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
from support.diffbench import Bench, follows
from support.differential import Maker, Pair, differences, identities, tree
from support.fileops import Op
from support.server import Server
from support.wait import wait_for

pytestmark = [pytest.mark.kernel, pytest.mark.timeout(240)]
ALICE, BOB = (1, 2) if os.geteuid() == 0 else (0, 0)


@contextmanager
def committing(path: Path) -> Iterator[None]:
    """Writes to a file and fsyncs it, without pause; all of it is there in the end."""
    over = threading.Event()
    written, failed = [0], list[OSError]()

    def work() -> None:
        try:
            with path.open("wb", buffering=0) as file:
                while not over.is_set():
                    file.write(b"more")
                    written[0] += 1
                    os.fsync(file)
        except OSError as exc:
            failed.append(exc)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
    assert not failed
    assert path.read_bytes() == b"more" * written[0]


@pytest.fixture
def bench(shared_server: Server, tmp_path: Path) -> Iterator[Bench]:
    made = Bench(shared_server, tmp_path)
    yield made
    made.close()


@pytest.fixture(scope="module")
def calm(shared_server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """One for several tests."""
    made = Bench(shared_server, tmp_path_factory.mktemp("calm"))
    yield made
    made.close()


def test_random_operations(bench: Bench, seed: int) -> None:
    """Several sequences; after them the whole of it again in other places."""
    for number in range(8):
        bench.random(seed + number, 150)
    bench.same_everywhere()


def test_killed_with_everything_acknowledged(bench: Bench, seed: int) -> None:
    """SIGKILL of the daemon right behind the last answer, nothing drained: all of it is there."""
    for number in range(3):
        bench.random(seed + number, 120)
        whole = tree(bench.box.mountpoint, exact=True)
        bench.killed()
        assert not differences(whole, tree(bench.box.mountpoint, exact=True))
        assert not differences(tree(bench.local), tree(bench.box.mountpoint))


def test_random_operations_between_commits(bench: Bench, seed: int) -> None:
    """While something else on the mount makes it commit all the time, so that answers come at any moment."""
    with committing(bench.box.mountpoint / "other"):
        for number in range(4):
            bench.random(seed + number, 150)
    (bench.local / "other").write_bytes((bench.box.mountpoint / "other").read_bytes())
    bench.same_everywhere()


def test_a_second_mount_follows(bench: Bench, seed: int) -> None:
    """It has all of it in its caches and the kernel's, each time, and shows the changes all the same."""
    second = bench.new_box()
    pair = Pair(bench.local / "p", bench.box.mountpoint / "p")
    try:
        maker = Maker(seed, len(identities()))
        for _ in range(15):
            pair.play(maker.steps(25))
            bench.box.drain()
            whole = tree(bench.box.mountpoint, exact=True)
            wait_for(
                partial(follows, whole, second.mountpoint),
                30,
                f"the second mount to show the same (seed {seed})",
            )
    finally:
        pair.close()


@pytest.mark.long
@pytest.mark.timeout(1500)
def test_many_random_operations(bench: Bench, seed: int) -> None:
    """Longer sequences and more of them."""
    for turn in range(8):
        for number in range(25):
            bench.random(seed + turn * 25 + number, 300)
        bench.same_everywhere()


# Found by sequences like those above.


def test_opening_an_empty_file_with_truncation_makes_it_new(calm: Bench) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    calm.play([(0, ("open", b"stamp", flags, 0o666, 1)), (0, ("open", b"stamp", flags, 0o666, 2))])
    calm.play([(0, ("open", b"stamp", flags, 0o666, 1)), (0, ("open", b"stamp", os.O_TRUNC, 0o666, 2))])


def test_changing_the_owner_to_nobody_else_moves_ctime(calm: Bench) -> None:
    calm.play([(0, ("mkdir", b"d", 0o755)), (0, ("chown", b"d", -1, -1, True))])


@pytest.mark.parametrize("mode", [0o6755, 0o2745, 0o2755, 0o4600, 0o755])
@pytest.mark.parametrize("data", [0, 100])
def test_opening_with_truncation_takes_the_set_id_bits(calm: Bench, mode: int, data: int) -> None:
    """Of an empty file and of another; root keeps them."""
    for who in {ALICE, 0}:
        calm.play(
            [
                (who, ("open", b"f", os.O_WRONLY | os.O_CREAT, 0o600, 1)),
                (who, ("write_on", 1, 7, data)),
                (who, ("fchmod", 1, mode)),
                (who, ("open", b"f", os.O_RDWR | os.O_TRUNC, 0o666, 2)),
                (who, ("fstat", 1)),
            ]
        )


@pytest.mark.parametrize("mode", [0o6755, 0o2600, 0o2645, 0o4600])
@pytest.mark.parametrize("change", [("truncate", b"f", 10), ("write", 2, 1, 5, 2), ("ftruncate", 2, 3)])
def test_changing_a_file_takes_the_set_id_bits(calm: Bench, mode: int, change: Op) -> None:
    """Also set-group-ID without the right to execute, when who changes it is not of that group."""
    owner, group = (4001, 4002) if ALICE else (-1, -1)
    calm.play(
        [
            (0, ("open", b"f", os.O_WRONLY | os.O_CREAT, 0o600, 1)),
            (0, ("fchown", 1, owner, group)),
            (0, ("fchmod", 1, mode)),
            (ALICE, ("open", b"f", os.O_RDWR, 0, 2)),
            (ALICE, change),
            (0, ("fstat", 1)),
        ]
    )


@pytest.mark.parametrize("mode", [0o6755, 0o2600, 0o4600, 0o755])
@pytest.mark.parametrize("kind", [stat.S_IFREG, stat.S_IFIFO, stat.S_IFDIR])
def test_chown_and_the_set_id_bits(calm: Bench, mode: int, kind: int) -> None:
    """To nobody else by the owner, by another, and to another group by the owner."""
    owner, group = (4001, 4002) if ALICE else (-1, -1)
    made = ("mkdir", b"f", 0o700) if kind == stat.S_IFDIR else ("mknod", b"f", kind | 0o600, 0)
    for who, to in ((ALICE, -1), (BOB, -1), (ALICE, 4003 if ALICE else -1)):
        calm.play(
            [
                (0, made),
                (0, ("chown", b"f", owner, group, True)),
                (0, ("chmod", b"f", mode)),
                (who, ("chown", b"f", -1, to, True)),
                (0, ("lstat", b"f")),
            ]
        )


def test_names_of_trusted_attributes_are_roots(calm: Bench) -> None:
    made = [
        (0, ("open", b"f", os.O_CREAT | os.O_RDWR, 0o666, 1)),
        (0, ("setxattr", b"f", "trusted.t", 10, 0, True)),
        (0, ("setxattr", b"f", "user.u", 10, 0, True)),
    ]
    calm.play([*made, (ALICE, ("listxattr", b"f", True)), (0, ("listxattr", b"f", True))])


@pytest.mark.parametrize("kept", [False, True], ids=["", "open"])
def test_a_removed_working_directory_is_opened_and_empty(calm: Bench, kept: bool) -> None:
    """By its own name, also below a removed one; what was open before as well."""
    calm.play(
        [
            (0, ("mkdir", b"d", 0o755)),
            (0, ("mkdir", b"d/e", 0o755)),
            (0, ("enter", b"d/e")),
            *([(0, ("open", b".", os.O_RDONLY, 0, 1))] if kept else []),
            (0, ("rmdir", b"../e")),
            (0, ("listdir", b".")),
            (0, ("rmdir", b"../../d")),
            (0, ("listdir", b".")),
            (0, ("listdir", b"..")),
            (0, ("open", b".", os.O_RDONLY | os.O_DIRECTORY, 0, 2)),
            (0, ("listfd", 2)),
            (0, ("listfd", 1)),
            (0, ("fstat", 2)),
            (0, ("mkdirat", 2, b"x", 0o755)),
            (0, ("openat", 2, b".", os.O_RDONLY, 0, 3)),
            (0, ("listfd", 3)),
        ]
    )
