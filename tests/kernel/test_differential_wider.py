"""The mount against a local directory with the rarer operations too: mappings, unbuffered handles, ACLs,
listings while entries change, handles without a name; with kills, remounts and looks from a second mount."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from support.diffbench import Bench, follows
from support.differential import Maker, Pair, differences, identities, tree
from support.fileops import Actor
from support.moreops import AT_SYMLINK_NOFOLLOW, GROUP_OBJ, NO_ID, OTHER, USER_OBJ
from support.server import Server
from support.wait import wait_for
from support.wider import WiderMaker, WidestMaker

pytestmark = [pytest.mark.kernel, pytest.mark.timeout(300)]
KINDS = {"plain": ((), WiderMaker), "acl": (("--acl",), WidestMaker)}


@pytest.fixture(params=[pytest.param("plain", marks=pytest.mark.long), "acl"])
def bench(shared_server: Server, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Bench]:
    options, maker = KINDS[request.param]
    made = Bench(shared_server, tmp_path, *options, maker=maker)
    yield made
    made.close()


def day(bench: Bench, seed: int, sequences: int, steps: int) -> None:
    """Sequences, some with the daemon killed behind them; what the first mount shows, the second shows soon,
    and so does everything that is mounted later."""
    second = bench.new_box()
    for number in range(sequences):
        bench.random(seed + number, steps)
        whole = tree(bench.box.mountpoint, exact=True)
        if number % 2:
            bench.killed()
            assert not differences(whole, tree(bench.box.mountpoint, exact=True))
        bench.box.drain()
        wait_for(
            partial(follows, whole, second.mountpoint), 30, f"the second mount to show the same (seed {seed})"
        )
    second.unmount()
    bench.same_everywhere()


def test_random_days(bench: Bench, seed: int) -> None:
    day(bench, seed, 2, 100)


@pytest.mark.long
@pytest.mark.timeout(3000)
def test_many_random_days(bench: Bench, seed: int) -> None:
    for turn in range(6):
        day(bench, seed + 1000 * turn, 20, 300)


@pytest.mark.long
@pytest.mark.timeout(3000)
def test_one_pair_with_two_mounts_for_long(bench: Bench, seed: int) -> None:
    """Handles stay open over many rounds, while a second mount has all of it in its caches."""
    second = bench.new_box()
    pair = Pair(bench.local / "p", bench.box.mountpoint / "p")
    try:
        maker: Maker = bench.maker(seed, len(identities()))
        for _ in range(60):
            pair.play(maker.steps(60))
            bench.box.drain()
            whole = tree(bench.box.mountpoint, exact=True)
            wait_for(partial(follows, whole, second.mountpoint), 30, f"the second mount (seed {seed})")
    finally:
        pair.close()


# Found by sequences and rules like those above.


@pytest.fixture(scope="module")
def calm(shared_server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """One for several tests."""
    made = Bench(shared_server, tmp_path_factory.mktemp("calm"), "--acl", maker=WidestMaker)
    yield made
    made.close()


@pytest.mark.parametrize("first", [os.O_RDWR | os.O_APPEND, os.O_WRONLY | os.O_APPEND, os.O_RDWR])
@pytest.mark.parametrize("second", [os.O_RDWR | os.O_APPEND, os.O_RDWR])
def test_a_mapping_keeps_its_place_beside_handles_that_append(calm: Bench, first: int, second: int) -> None:
    """The kernel writes a mapping's pages by any handle of the file; what is appended goes to the end."""
    calm.play(
        [
            (0, ("open", b"f", os.O_CREAT | os.O_WRONLY, 0o666, 0)),
            (0, ("write", 0, 1, 9000, 0)),
            (0, ("close_slot", 0)),
            (0, ("open", b"f", first, 0, 1)),
            (0, ("open", b"f", second, 0, 2)),
            (0, ("map_write", 2, 2, 100, 50)),
            (0, ("write_on", 1, 3, 10)),
            (0, ("map_write", 2, 4, 5000, 4090)),
            (0, ("fstat", 1)),
            (0, ("read", 2, 20_000, 0)),
        ]
    )


@pytest.mark.parametrize("mode", [0o2767, 0o2666, 0o6666])
@pytest.mark.parametrize("late", [False, True])
def test_somebody_else_writes_a_file_with_set_group_id(calm: Bench, mode: int, late: bool) -> None:
    """Who may write may do so, and takes the bit that nobody may execute by; set before or after the open."""
    other = len(identities()) > 1
    opened, given = (other, ("open", b"f", os.O_RDWR, 0, 1)), (0, ("chmod", b"f", mode))
    calm.play(
        [
            (0, ("open", b"f", os.O_CREAT | os.O_RDWR, 0o666, 1)),
            (0, ("write", 1, 1, 5000, 0)),
            (0, ("chown", b"f", *((4002, 4002) if other else (-1, -1)), True)),
            (0, ("chmod", b"f", 0o666)),
            *((opened, given) if late else (given, opened)),
            (other, ("write", 1, 7, 10, 0)),
            (0, ("lstat", b"f")),
        ]
    )


@pytest.mark.parametrize("which", ["access", "default"])
def test_an_acl_that_is_not_there_can_be_taken_away(calm: Bench, which: str) -> None:
    calm.play([(0, ("mkdir", b"d", 0o755)), (0, ("drop_acl", b"d", which)), (0, ("get_acl", b"d", which))])


@pytest.mark.parametrize("who", range(len(identities())))
def test_an_acl_that_says_what_the_mode_says_changes_nothing(calm: Bench, who: int) -> None:
    """No time either: there is no record that could bring it back after a kill."""
    same = ((USER_OBJ, 7, NO_ID), (GROUP_OBJ, 5, NO_ID), (OTHER, 5, NO_ID))
    calm.play([(who, ("mkdir", b"d", 0o755)), (who, ("set_acl", b"d", "access", same))])
    whole = tree(calm.box.mountpoint, exact=True)
    calm.killed()
    assert not differences(whole, tree(calm.box.mountpoint, exact=True))


def test_a_listing_of_the_empty_path_stays_in_its_directory(calm: Bench, tmp_path: Path) -> None:
    """`/` behind an empty path is the machine's root, where what the first side makes meets the second's."""
    listing = ("list_and_change", b"", 3, 2)
    calm.play([(who, listing) for who in range(len(identities()))])
    actor = Actor(tmp_path, identities()[0])
    try:
        assert actor.do(listing) == ("ENOENT", [])
    finally:
        actor.close()


def test_no_operation_leaves_its_directory_by_an_absolute_path(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    outside = tmp_path / "outside"
    (tmp_path / "top").mkdir()
    actor = Actor(tmp_path / "top", identities()[0])
    try:
        with pytest.raises(EOFError):
            actor.do(("mkdir", os.fsencode(outside), 0o755))
    finally:
        actor.close()
    assert not outside.exists()
    assert "os.mkdir of" in capfd.readouterr().err


def test_a_file_without_a_name_is_older_than_1970(calm: Bench) -> None:
    """Its part of the log begins with what it was, before the first change of what it holds."""
    calm.play(
        [
            (0, ("open", b".", os.O_TMPFILE | os.O_RDWR, 0o640, 0)),
            (0, ("futimens", 0, ((7, 8), (-5, 1)))),
            (0, ("write", 0, 2, 100, 50)),
            (0, ("futimens", 0, ((-7, 8), (-5, 1)))),
            (0, ("name_slot", 0, b"f")),
            (0, ("lstat", b"f")),
        ]
    )
    whole = tree(calm.box.mountpoint, exact=True)
    calm.killed()
    assert not differences(whole, tree(calm.box.mountpoint, exact=True))


def test_two_threads_that_append_do_so_in_order(calm: Bench) -> None:
    """A place means nothing to a handle that appends: the two writes meet at the end, on any filesystem."""
    both = ("two_threads", ("write", 0, 3, 5000, 0), ("write", 0, 4, 5000, 8192))
    calm.play([(0, ("open", b"f", os.O_CREAT | os.O_RDWR | os.O_APPEND, 0o666, 0)), *[(0, both)] * 100])


def test_the_times_of_a_symlink_that_leads_to_itself(calm: Bench) -> None:
    """Looking at them by that path reads it: an access, which moves there what was just set."""
    given = ((7, 8), (7, 8))
    calm.play([(0, ("symlink", b".", b"b")), (0, ("utimensat", b"b/b", given, AT_SYMLINK_NOFOLLOW))])
