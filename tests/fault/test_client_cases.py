"""Single histories of the client's state machine that once lost something or held something for ever."""

from __future__ import annotations

import errno
import os
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.bench import Bench
from support.client import Client, Clock, assert_same, server_tree
from support.clientcase import age, busy, files, finish, other, settled, take

from fsd.model.errors import PosixError, TooLarge, Unavailable
from fsd.model.limits import BLOCK, MIB
from fsd.service import namespace
from fsd.vfs import open as opening
from fsd.vfs.asking import AskJob
from fsd.vfs.build import BuildJob
from fsd.vfs.commit import CommitJob
from fsd.vfs.resession import SessionJob
from fsd.vfs.types import Park
from fsd.wire.messages import CommitAnswer

# Files that go while they are being sent.


def test_a_truncation_outlives_the_last_flight_of_a_file_without_a_name(client: Client) -> None:
    root = client.volume.root_ino
    client.put(root, b"a", b"x" * 5000, sync=True)
    node = client.call(lambda v: v.lookup(root, b"a"))
    assert node is not None
    fh = client.call(lambda v: v.open(node.ino, os.O_RDWR))
    client.call(lambda v: v.write(fh, 0, b"y" * 5000))
    client.call(lambda v: v.rename(root, b"a", root, b"b", 0))  # its content has a number now
    client.call(lambda v: v.setattr(node.ino, size=0))
    client.call(lambda v: v.write(fh, 1000, b"z"))
    client.call(lambda v: v.unlink(root, b"b"))
    settled_but_open = client.volume.barrier()
    client.until(settled_but_open)
    assert client.call(lambda v: v.read(fh, 0, 9000)) == bytes(1000) + b"z"
    client.call(lambda v: v.release(fh))
    settled(client)


def test_bytes_of_a_file_without_a_name_stay_in_the_log(client: Client) -> None:
    """After its last flight as well: nothing else has them."""
    client.volume.core.log._segment_size = 16 << 10
    root = client.volume.root_ino
    client.put(root, b"a", b"x" * 5000, sync=True)
    node = client.call(lambda v: v.lookup(root, b"a"))
    assert node is not None
    fh = client.call(lambda v: v.open(node.ino, os.O_RDWR))
    client.call(lambda v: v.write(fh, 0, b"y" * 5000))
    client.call(lambda v: v.rename(root, b"a", root, b"b", 0))
    client.call(lambda v: v.write(fh, 0, b"z" * 5000))
    client.call(lambda v: v.unlink(root, b"b"))
    for at in range(20):
        client.put(root, b"c", b"%d" % at * 1000, sync=True)
    client.run_some(1000)
    assert client.call(lambda v: v.read(fh, 0, 9000)) == b"z" * 5000
    client.call(lambda v: v.release(fh))
    settled(client)


def test_a_cancelled_file_holds_nothing(client: Client) -> None:
    """Made and ready to be sent, but removed before the commit before it was answered."""
    out = busy(client)
    root = client.volume.root_ino
    client.put(root, b"temporary", b"x" * 1000)
    age(client)
    finish(client, take(client, BuildJob))
    assert any(f.opno for f in client.volume.core.flights.values()), "it has to be made"
    client.call(lambda v: v.unlink(root, b"temporary"))
    finish(client, out)
    settled(client)
    assert set(server_tree(client.bench)) == {"/before"}


def test_a_cancelled_file_that_is_being_made_holds_nothing(client: Client) -> None:
    """Its number was reserved by a rename above it; the job that makes it ends after it went."""
    out = busy(client)
    root = client.volume.root_ino
    folder = client.call(lambda v: v.mkdir(root, b"d", 0o755, 0, 0))
    client.put(folder.ino, b"temporary", b"x" * 1000)
    client.call(lambda v: v.rename(root, b"d", root, b"e", 0))
    build = take(client, BuildJob)
    client.call(lambda v: v.unlink(folder.ino, b"temporary"))
    finish(client, build)
    finish(client, out)
    settled(client)
    assert set(server_tree(client.bench)) == {"/before", "/e"}


def test_a_big_file_that_goes_while_it_is_being_made_holds_nothing(client: Client) -> None:
    """Several pieces of it travel in one job."""
    root = client.volume.root_ino
    node, fh = client.call(lambda v: v.create(root, b"big", 0o644, 0, 0, os.O_RDWR))
    client.call(lambda v: v.write(fh, 0, os.urandom(7 * MIB + 600_000)))
    client.call(lambda v: v.write(fh, 9 * MIB, b"x"))
    client.volume.flusher.freeze(node)
    jobs = [job for job in client.volume.jobs() if isinstance(job, BuildJob)]
    client.call(lambda v: v.release(fh))
    client.call(lambda v: v.unlink(root, b"big"))
    assert jobs, "nothing was being made"
    for job in jobs:
        finish(client, job)
    settled(client)
    assert server_tree(client.bench) == {}


def test_a_removed_file_does_not_come_back_when_the_process_ends_in_the_unlink(client: Client) -> None:
    """That the last name went and that its changes are not needed is one record."""
    root = client.volume.root_ino
    client.put(root, b"a", b"old", sync=True)
    client.put(root, b"a", b"new", truncate=True, offset=0)
    log = client.volume.core.log
    before = log._number
    client.call(lambda v: v.unlink(root, b"a"))
    assert log._number == before + 1
    client.kill()
    client.open()
    assert files(client) == {}


# Answers that come late.


def test_a_late_block_list_does_not_undo_a_truncation(client: Client) -> None:
    root = client.volume.root_ino
    client.put(root, b"a", b"x" * (2 * BLOCK), sync=True)
    second = other(client)
    node = second.call(lambda v: v.lookup(root, b"a"))
    assert node is not None
    with pytest.raises(Park):
        second.volume.open(node.ino, os.O_RDONLY)
    ask = take(second, AskJob)
    answer = second.run(ask)
    fh = second.call(lambda v: v.open(node.ino, os.O_RDWR | os.O_TRUNC))
    second.call(lambda v: v.write(fh, 0, b"new"))
    second.call(lambda v: v.fsync(fh, False))
    second.call(lambda v: v.write(fh, 10, b"er"))
    second.volume.finish(ask, answer)
    want = b"new" + bytes(7) + b"er"
    assert second.call(lambda v: v.read(fh, 0, 100)) == want
    second.call(lambda v: v.release(fh))
    settled(second)
    assert files(client) == {"/a": want}
    second.volume.close()


def test_a_file_removed_elsewhere_is_not_read_as_zeros(client: Client) -> None:
    root = client.volume.root_ino
    client.put(root, b"a", b"x" * (2 * BLOCK), sync=True)
    second = other(client)
    node = second.call(lambda v: v.lookup(root, b"a"))
    assert node is not None
    client.call(lambda v: v.unlink(root, b"a"))
    settled(client)
    with pytest.raises(PosixError) as told:
        second.call(lambda v: v.open(node.ino, os.O_RDONLY))
    assert told.value.errno == errno.ESTALE
    second.volume.close()


def test_what_is_too_much_for_one_answer_is_asked_for_in_several(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Block lists of large files that are read at the same time were EFBIG."""
    root = client.volume.root_ino
    for name in (b"a", b"b", b"c"):
        client.put(root, name, os.urandom(2 * BLOCK), sync=True)
    second = other(client)
    nodes = [second.call(lambda v, n=name: v.lookup(root, n)) for name in (b"a", b"b", b"c")]
    monkeypatch.setattr(namespace, "NS_BYTES_MAX", 600)
    wants = [second.volume.loader.block_list(node) for node in nodes if node is not None]
    for want in wants:
        second.until(want)
    assert [want.error for want in wants] == [None] * 3
    for node in nodes:
        assert node is not None
        assert sorted(node.file().base or {}) == [0, 1]
    monkeypatch.setattr(namespace, "NS_BYTES_MAX", 100)
    with pytest.raises(TooLarge):  # one alone is told
        second.until(second.volume.loader.attrs([node for node in nodes[:1] if node is not None]))
    second.volume.close()


# Bases.


def test_a_name_made_elsewhere_since_it_was_looked_up_is_looked_up_again(client: Client) -> None:
    """Who opens with O_CREAT alone is not told that it exists: on ESTALE the kernel looks, and opens it."""
    root, second = client.volume.root_ino, other(client)
    assert client.call(lambda v: v.lookup(root, b"name")) is None
    second.put(root, b"name", b"theirs", sync=True)
    client.feed()
    for flags, number in ((os.O_EXCL, errno.EEXIST), (0, errno.ESTALE)):
        with pytest.raises(PosixError) as caught:
            client.call(lambda v, f=flags: v.create(root, b"name", 0o644, 0, 0, os.O_RDWR | os.O_CREAT | f))
        assert caught.value.errno == number
    found = client.call(lambda v: v.lookup(root, b"name"))
    assert found is not None
    assert client.read_all(found.ino) == b"theirs"
    second.volume.close()


def test_a_new_session_does_not_take_its_own_new_file_for_another_s(client: Client) -> None:
    """A file made and committed empty, written afterwards, sent under another session: no conflict."""
    root = client.volume.root_ino
    _, fh = client.call(lambda v: v.create(root, b"a", 0o644, 0, 0, os.O_RDWR))
    client.until(client.volume.barrier())
    client.call(lambda v: v.write(fh, 0, b"text"))
    client.volume.committer.forked = True
    client.call(lambda v: v.release(fh))
    settled(client)
    assert files(client) == {"/a": b"text"}
    assert client.volume.core.conflicts == 0


def test_killed_between_a_conflict_and_the_new_session_nothing_goes_into_the_copy(client: Client) -> None:
    """The old session's number of the file means the copy on the server. Programs go on with the copy, and
    with the other's file: a recovery must not send both to the one."""
    root, rival = client.volume.root_ino, other(client)
    ino = client.put(root, b"f", b"base", sync=True)
    rival.feed()
    fh = client.call(lambda v: v.open(ino, os.O_RDWR))
    rival.put(root, b"f", b", the rival's", sync=True)
    client.call(lambda v: v.write(fh, 0, b"MINE"))
    client.volume.barrier()
    for _ in range(10):
        jobs = [job for job in client.volume.jobs() if not isinstance(job, SessionJob)]
        if not jobs:
            break
        for job in jobs:
            finish(client, job)
    assert client.volume.committer.forked
    client.waiting.clear()
    theirs = client.call(lambda v: v.lookup(root, b"f"))
    assert theirs is not None
    assert theirs.ino != ino
    client.call(lambda v: v.write(fh, 4, b" and more of mine"))
    client.put(root, b"f", b", and what came of it here")
    client.waiting.clear()
    client.kill()
    client.open()
    settled(client)
    found = files(client)
    assert found.pop("/f") == b"base, the rival's, and what came of it here"
    assert b"MINE and more of mine" in found.values()
    rival.volume.close()


@pytest.mark.parametrize("change", ["truncate", "write", "nothing"])
def test_a_removal_that_came_too_late_leaves_the_file_as_the_server_has_it(
    client: Client, change: str
) -> None:
    """What was changed before it here was given up with the name: it is not shown when the file is back."""
    root, rival = client.volume.root_ino, other(client)
    ino = client.put(root, b"f", b"as it was, and as it is", sync=True)
    rival.feed()
    rival.call(lambda v: v.rename(root, b"f", root, b"moved", 0))
    rival.until(rival.volume.barrier())
    if change == "truncate":
        client.call(lambda v: v.setattr(ino, size=3))
    elif change == "write":
        client.put(root, b"f", b"lost with the name", offset=3)
    client.call(lambda v: v.unlink(root, b"f"))
    settled(client)
    for one in (client, rival):
        one.feed()
        assert_same(server_tree(client.bench), one.view())
    assert files(client) == {"/moved": b"as it was, and as it is"}
    rival.volume.close()


@pytest.mark.parametrize("is_open", [False, True])
def test_a_name_another_gave_outlives_the_removal_of_the_last_one_known(
    client: Client, is_open: bool
) -> None:
    """The listing with the new name is younger than what is known of the file's links."""
    root, rival = client.volume.root_ino, other(client)
    folder = client.call(lambda v: v.mkdir(root, b"d", 0o755, 0, 0)).ino
    ino = client.put(folder, b"f", b"content", sync=True)
    client.until(client.volume.barrier())
    rival.view()
    rival.call(lambda v: v.rename(folder, b"f", root, b"moved", 0))
    rival.put(folder, b"f", b"another", sync=True)
    if is_open:
        fh = client.call(lambda v: v.open(ino, os.O_RDWR))
    client.feed()
    client.volume.node(folder).names_stale.discard(b"f")  # as if that had not been heard yet
    assert len(client.listing(root)) == 2
    client.call(lambda v: v.unlink(folder, b"f"))
    client.until(client.volume.barrier())
    assert_same(server_tree(client.bench), client.view())
    assert files(client) == {"/moved": b"content", "/d/f": b"another"}
    if is_open:
        assert client.call(lambda v: v.read(fh, 0, 100)) == b"content"
        client.call(lambda v: v.release(fh))
    rival.volume.close()


def test_the_base_is_said_again_behind_the_whole_answer(client: Client) -> None:
    """Two flights of one file in one answer while a third change waits; then the process ends."""
    root = client.volume.root_ino
    client.volume.core.log._segment_size = 4 << 10
    out = busy(client)
    node, fh = client.call(lambda v: v.create(root, b"a", 0o644, 0, 0, os.O_RDWR))
    for at in range(2):
        client.call(lambda v, a=at: v.write(fh, 0, b"%d" % a * 3000))  # type: ignore[misc]
        client.volume.flusher.freeze(node, inline=True)
    client.volume.barrier()
    client.call(lambda v: v.write(fh, 3000, b"end"))
    finish(client, out)
    finish(client, take(client, CommitJob))
    client.kill()
    client.open()
    assert files(client)["/a"] == b"1" * 3000 + b"end"


# Names.


def test_a_listing_leaves_no_name_out_whose_inode_was_forgotten(client: Client) -> None:
    """The other name of a hard link, last seen under one that was removed."""
    root = client.volume.root_ino
    ino = client.put(root, b"a", b"x", sync=True)
    folder = client.call(lambda v: v.mkdir(root, b"d", 0o755, 0, 0))
    client.call(lambda v: v.link(ino, folder.ino, b"x"))
    client.until(client.volume.barrier())
    second = other(client)
    assert {name for name, _ in second.listing(root)} == {b"a", b"d"}
    second.call(lambda v: v.lookup(root, b"a"))
    second.call(lambda v: v.lookup(folder.ino, b"x"))
    client.call(lambda v: v.unlink(folder.ino, b"x"))
    client.until(client.volume.barrier())
    second.feed()
    assert second.call(lambda v: v.lookup(folder.ino, b"x")) is None
    second.volume.forget(ino, 2)
    assert {name for name, _ in second.listing(root)} == {b"a", b"d"}
    second.volume.close()


def test_a_late_listing_does_not_hide_where_a_file_went(client: Client) -> None:
    """A listing read before a commit whose outcome moved a name, delivered after it."""
    root = client.volume.root_ino
    second = other(client)
    assert second.listing(root) == []
    client.put(root, b"x", b"first", sync=True)
    second.put(root, b"x", b"second")
    second.volume.feed.forget_everything(0)  # as after a change of session
    fh = second.volume.opendir(root)
    with pytest.raises(Park):
        second.volume.readdir(fh, 0)
    ask = take(second, AskJob)
    answer = second.run(ask)
    second.until(second.volume.barrier())
    second.volume.finish(ask, answer)
    second.feed()
    assert_same(server_tree(client.bench), second.view())
    assert len(second.view()) == 2
    second.volume.close()


# What close promises.


def test_close_durability_covers_a_new_empty_file(client: Client) -> None:
    client.volume.close()
    client.options = replace(client.options, durability="close")
    client.open()
    root = client.volume.root_ino
    _, fh = client.call(lambda v: v.create(root, b"empty", 0o644, 0, 0, os.O_WRONLY))
    client.call(lambda v: v.flush(fh))
    assert files(client) == {"/empty": b""}
    client.call(lambda v: v.release(fh))


def test_what_was_written_is_read_again_without_the_server(tmp_path: Path) -> None:
    client = Client(tmp_path / "mount", Bench(tmp_path / "server"), Clock(), random.Random(1))
    client.net.faulty = False
    client.options = replace(client.options, segment_size=64 * MIB)
    client.open()
    volume = client.volume
    client.call(lambda v: v.lookup(v.root_ino, b"absent"))
    contents = {b"small": b"s" * 5000, b"blocks": random.Random(2).randbytes(2 * BLOCK + 77)}
    for name, content in contents.items():
        _, fh = volume.create(volume.root_ino, name, 0o644, 0, 0, os.O_RDWR)
        for at in range(0, len(content), BLOCK):
            volume.write(fh, at, content[at : at + BLOCK])
        client.until(volume.sync_want(volume.handle(fh)))
        volume.release(fh)
    settled(client)
    for name, content in contents.items():
        node = volume.lookup(volume.root_ino, name)
        assert node is not None
        client.net.cut = 0
        client.call(lambda v, node=node: v.know_blocks(node))
        client.net.cut = 1 << 30
        fh = volume.open(node.ino, os.O_RDONLY)
        assert b"".join(volume.read(fh, at, BLOCK) for at in range(0, len(content), BLOCK)) == content
        volume.release(fh)
    client.net.cut = 0
    volume.close()
    client.bench.close()


def test_a_small_change_of_a_small_file_is_made_at_once(client: Client) -> None:
    """Its base is at hand: no job that reads blobs stands between a write and its commit."""
    volume = client.volume
    client.call(lambda v: v.lookup(v.root_ino, b"absent"))
    _, fh = volume.create(volume.root_ino, b"t.db", 0o644, 0, 0, os.O_RDWR)
    volume.write(fh, 0, b"a" * 20_000)
    client.until(volume.sync_want(volume.handle(fh)))
    for at in range(5):
        volume.write(fh, 4096 * at, b"b" * 10)
        want = volume.sync_want(volume.handle(fh))
        assert not any(isinstance(job, BuildJob) for job in volume.core.jobs)
        client.until(want)
    volume.release(fh)
    settled(client)
    assert (
        files(client)["/t.db"]
        == b"".join(b"b" * 10 + b"a" * 4086 for _ in range(4)) + b"b" * 10 + b"a" * 3606
    )


# Files that stay.


@pytest.mark.parametrize("how", ["removed", "moved"])
def test_a_file_that_is_not_replaced_after_all_has_what_was_written(client: Client, how: str) -> None:
    """Another mount removed or moved what was to replace it, before the rename came to the server."""
    root = client.volume.root_ino
    for name in (b"target", b"source"):
        client.put(root, name, b"old " + name, sync=True)
    second = other(client)
    assert second.call(lambda v: v.lookup(root, b"source"))
    if how == "removed":
        second.call(lambda v: v.unlink(root, b"source"))
    else:
        second.call(lambda v: v.rename(root, b"source", root, b"elsewhere", 0))
    settled(second)
    client.put(root, b"target", b"NEW", offset=0)
    client.call(lambda v: v.rename(root, b"source", root, b"target", 0))
    settled(client)
    rest = {} if how == "removed" else {"/elsewhere": b"old source"}
    assert files(client) == {"/target": b"NEW target", **rest}
    second.volume.close()


def test_what_a_new_file_replaces_is_never_sent(client: Client) -> None:
    """Nobody else can have removed that."""
    root = client.volume.root_ino
    client.put(root, b"target", b"old", sync=True)
    client.put(root, b"target", b"written and replaced", truncate=True, offset=0)
    client.put(root, b"temporary", b"new")
    client.call(lambda v: v.rename(root, b"temporary", root, b"target", 0))
    assert sum(queued.flight is not None for queued in client.volume.core.queue) == 1
    settled(client)
    assert files(client) == {"/target": b"new"}


# Answers that are none.


@pytest.mark.parametrize("wrong", ["behind", "before", "full of another", "full again"])
def test_an_answer_about_other_operations_acknowledges_none(client: Client, wrong: str) -> None:
    """By the numbers in it operations are taken for done: too high a one would let a recovery drop what was
    never sent."""
    root, core = client.volume.root_ino, client.volume.core
    client.put(root, b"f", b"kept")
    want = client.volume.barrier()
    client.waiting.extend(client.volume.jobs())
    for build in [job for job in client.waiting if isinstance(job, BuildJob)]:
        client.waiting.remove(build)
        finish(client, build)
    job = take(client, CommitJob)
    answer = client.run(job)
    assert isinstance(answer, CommitAnswer)
    sent = [queued.opno - core.shift for queued in core.queue.sent]
    changed = {
        "behind": {"next_op": max(sent) + 2},
        "before": {"next_op": min(sent)},
        "full of another": {"need_full": max(sent) + 9},
        "full again": {"need_full": max(sent)},
    }[wrong]
    client.volume.finish(job, answer._replace(**changed))
    assert core.queue.sent
    assert core.acked <= min(sent) + core.shift
    assert "other operations" in client.volume.pending().reason
    client.until(want)
    settled(client)
    assert files(client) == {"/f": b"kept"}


def test_an_inode_of_another_type_than_it_was_is_told_to_who_asked(client: Client) -> None:
    root = client.volume.root_ino
    ino = client.put(root, b"f", b"kept", sync=True)
    looker = other(client)
    node = looker.call(lambda v: v.lookup(root, b"f"))
    assert node is not None
    node.stale = True
    with pytest.raises(Park) as parked:
        looker.volume.getattr(ino)
    job = take(looker, AskJob)
    result: Any = looker.run(job)
    seq, answers = result
    answers[0][0] = answers[0][0]._replace(mode=0o40755, parts=None)
    looker.volume.finish(job, (seq, answers))
    with pytest.raises(Unavailable, match="another type"):
        looker.volume.done(parked.value.want)
    assert looker.call(lambda v: v.getattr(ino)).is_file
    assert looker.read_all(ino) == b"kept"
    looker.volume.close()


# A mount that has just begun.


@pytest.mark.parametrize("remote_path", [b"/", b"/below"])
@pytest.mark.parametrize("large", [False, True])
def test_a_new_mount_takes_changes_at_its_top_while_the_server_is_away(
    client: Client, remote_path: bytes, large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing was looked at there before. Of more names than fit into an answer it cannot know."""
    top = client.call(lambda v: v.mkdir(client.volume.root_ino, b"below", 0o755, 0, 0)).ino
    for where in (client.volume.root_ino, top):
        client.put(where, b"there", b"before", sync=True)
    monkeypatch.setattr(opening, "DIR_INLINE_MAX", 1 if large else 2)
    made = Client(client.options.state_dir.with_name("new"), client.bench, client.clock, client.rng, "new")
    made.options, made.knows_root = replace(made.options, remote_path=remote_path, io_timeout=5.0), True
    made.net.faulty = False
    made.open()
    made.net.cut = 10**9
    root = made.volume.root_ino
    if large and remote_path == b"/":
        with pytest.raises(Unavailable):
            made.call(lambda v: v.mkdir(root, b"new", 0o755, 0, 0))
        made.net.cut = 0
    else:
        made.put(root, b"new", b"made without a server")
        assert {name for name, _ in made.listing(root)} >= {b"there", b"new"}
        with pytest.raises(PosixError) as caught:
            made.call(lambda v: v.mkdir(root, b"there", 0o755, 0, 0))
        assert caught.value.errno == errno.EEXIST
        made.net.cut = 0
        made.until(made.volume.barrier())
        place = "" if remote_path == b"/" else remote_path.decode()
        assert files(client)[f"{place}/new"] == b"made without a server"
    made.volume.close()
