"""What a mount's own commits are answered: who waits is let go first, and the feed need not tell of them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support.client import Client
from support.clientcase import client_fixture as client_fixture
from support.clientcase import files, other, settled, take
from support.twin import clone

from fsd.model.errors import Unavailable
from fsd.vfs.commit import CommitJob
from fsd.vfs.types import Park, Want
from fsd.wire.messages import CommitAnswer


def written(client: Client, name: bytes, data: bytes) -> int:
    """A handle of a file with changes that are not sent."""
    root = client.volume.root_ino
    client.call(lambda v: v.lookup(root, name))
    _, fh = client.call(lambda v: v.create(root, name, 0o644, 0, 0, os.O_RDWR))
    client.call(lambda v: v.write(fh, 0, data))
    return fh


def fsync_of(client: Client, fh: int) -> Want:
    with pytest.raises(Park) as parked:
        client.volume.fsync(fh, False)
    return parked.value.want


def sent(client: Client) -> tuple[CommitJob, CommitAnswer]:
    """The commit that is due, at the server, and its answer."""
    job = take(client, CommitJob)
    assert isinstance(job, CommitJob)
    answer = client.run(job)
    assert isinstance(answer, CommitAnswer)
    return job, answer


def test_an_fsync_ends_before_the_answer_is_logged(client: Client) -> None:
    fh = written(client, b"a", b"data")
    want = fsync_of(client, fh)
    drained = client.volume.barrier()
    job, answer = sent(client)
    before = client.volume.core.log.last_number
    assert client.volume.heard(job, answer)
    assert want.finished and want.error is None
    assert client.volume.core.log.last_number == before, "what follows from the answer comes later"
    assert client.volume.pending().operations and not drained.finished, "and is told to nobody yet"
    client.volume.finish(job, answer)
    assert drained.finished and client.volume.pending().clean
    settled(client)


def test_who_waits_for_more_than_is_answered_waits_on(client: Client) -> None:
    first = fsync_of(client, written(client, b"a", b"one"))
    job, answer = sent(client)
    second = fsync_of(client, written(client, b"b", b"two"))
    assert client.volume.heard(job, answer)
    assert (first.finished, second.finished) == (True, False)
    client.volume.finish(job, answer)
    client.until(second)
    settled(client)


@pytest.mark.parametrize("wrong", [Unavailable("no answer"), CommitAnswer(1, b"t", 999, (), (), 0)])
def test_what_is_no_plain_answer_ends_nothing_before_it_is_looked_at(client: Client, wrong: object) -> None:
    want = fsync_of(client, written(client, b"a", b"data"))
    job, _ = sent(client)
    assert not client.volume.heard(job, wrong) and not want.finished
    client.volume.finish(job, wrong)
    assert not want.finished
    client.until(want)
    settled(client)


def test_an_outcome_is_looked_at_first(client: Client) -> None:
    """Who is told that a file is committed can be told where: it became a copy beside another's."""
    fh, rival = written(client, b"a", b"mine"), other(client)
    rival.put(rival.volume.root_ino, b"a", b"the other's", sync=True)
    want = fsync_of(client, fh)
    job, answer = sent(client)
    assert answer.outcomes
    assert not client.volume.heard(job, answer) and not want.finished
    client.volume.finish(job, answer)
    client.until(want)
    settled(client)
    assert sorted(files(client).values()) == [b"mine", b"the other's"]
    rival.volume.close()


def test_killed_after_the_fsync_ended_and_before_that_is_logged(client: Client) -> None:
    fh = written(client, b"a", b"first")
    client.until(fsync_of(client, fh))
    client.call(lambda v: v.write(fh, 0, b"again"))
    want = fsync_of(client, fh)
    job, answer = sent(client)
    assert client.volume.heard(job, answer) and want.finished
    client.kill()
    client.open()
    assert client.recoveries == 1, "the log does not know that it was answered"
    assert files(client) == {"/a": b"again"} and client.volume.core.conflicts == 0
    settled(client)


# The change feed.


def test_the_feed_need_not_tell_of_own_commits(client: Client) -> None:
    """`wait` for a seq that `drain` told ends without it, and no page tells of them again."""
    for name in (b"a", b"b"):
        client.until(fsync_of(client, written(client, name, b"data")))
    assert client.volume.feed_seq == client.volume.core.seq == client.bench.service.feed.head(client.bench.fs)
    assert not client.volume.core.ahead


def test_what_others_did_before_own_commits_is_still_to_come(client: Client) -> None:
    core = client.volume.core
    client.until(fsync_of(client, written(client, b"a", b"data")))
    before = client.volume.feed_seq
    rival = other(client)
    rival.put(rival.volume.root_ino, b"theirs", b"x", sync=True)
    client.until(fsync_of(client, written(client, b"b", b"data")))
    client.until(fsync_of(client, written(client, b"c", b"data")))
    assert client.volume.feed_seq == before and len(core.ahead) == 2
    page = client.remote.changes(before, core.session, 0.0)
    theirs = page._replace(changes=page.changes[:1])  # read before the own ones were made
    assert theirs.changes[0].session == rival.volume.session
    client.volume.apply_feed(theirs)
    assert client.volume.feed_seq == core.seq == before + 3 and not core.ahead
    client.volume.apply_feed(page)
    assert client.volume.feed_seq == before + 3
    assert client.call(lambda v: v.lookup(v.root_ino, b"theirs")) is not None
    rival.volume.close()


def test_what_became_something_else_is_to_come_too(client: Client) -> None:
    client.until(fsync_of(client, written(client, b"a", b"data")))
    client.feed()
    before = client.volume.feed_seq
    fh, rival = written(client, b"b", b"mine"), other(client)
    rival.put(rival.volume.root_ino, b"b", b"the other's", sync=True)
    client.until(fsync_of(client, fh))
    assert client.volume.feed_seq == before and not client.volume.core.ahead
    client.feed()
    assert client.volume.feed_seq == client.bench.service.feed.head(client.bench.fs)
    assert not client.volume.core.surprises
    rival.volume.close()


def test_a_commit_that_changed_nothing_is_none_of_its_own(client: Client) -> None:
    """Its answer names the newest commit, which is another's."""
    root, core = client.volume.root_ino, client.volume.core
    client.until(fsync_of(client, written(client, b"a", b"data")))
    before = client.volume.feed_seq
    rival = other(client)
    rival.call(lambda v: v.lookup(root, b"a"))
    rival.call(lambda v: v.unlink(root, b"a"))
    rival.until(rival.volume.barrier())
    client.call(lambda v: v.unlink(root, b"a"))
    client.until(client.volume.barrier())
    assert core.seq > before, "the answer names what the other did"
    assert client.volume.feed_seq == before and not core.ahead
    rival.volume.close()


def test_what_a_copy_of_this_process_commits_is_told(client: Client, tmp_path: Path) -> None:
    """Both are one session until the second of them commits: one that only reads may never."""
    root, core = client.volume.root_ino, client.volume.core
    client.until(fsync_of(client, written(client, b"a", b"before")))
    assert client.call(lambda v: v.lookup(root, b"b")) is None
    copy = clone(client, tmp_path / "copy")
    ino = copy.put(root, b"a", b"after it", offset=0, sync=True)
    copy.put(root, b"b", b"new", sync=True)
    assert copy.volume.session == core.session
    client.feed()
    assert client.read_all(ino) == b"after it"
    assert client.read_all(client.number(root, b"b")) == b"new"
    client.until(fsync_of(client, written(client, b"c", b"data")))
    assert core.session != copy.volume.session
    copy.feed()
    assert copy.read_all(copy.number(root, b"c")) == b"data"
    settled(client)
    copy.volume.close()


def test_a_page_that_overtakes_an_answer_makes_nothing_stale(client: Client) -> None:
    client.until(fsync_of(client, written(client, b"a", b"data")))
    fsync_of(client, written(client, b"b", b"data"))
    job, answer = sent(client)
    core = client.volume.core
    page = client.remote.changes(core.feed_seq, core.session, 0.0)
    assert [(one.session, one.seq) for one in page.changes] == [(core.session, answer.seq)]
    assert client.volume.apply_feed(page) == []
    client.volume.finish(job, answer)
    assert client.volume.apply_feed(page) == [] and client.volume.feed_seq == answer.seq
    settled(client)
