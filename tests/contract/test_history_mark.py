"""A service that went back to an older copy of its data takes nothing that was made on what it lost: whoever
has seen a commit shows when it was made, and that moment is not the same twice."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support.bench import Bench

from fsd.model.attrs import ROOT_INO
from fsd.model.errors import HistoryChanged
from fsd.service.access import ADMIN_GRANT
from fsd.service.sessions import SessionInfo
from fsd.wire.messages import NO_MARK, Mark, make_commit

INFO = SessionInfo("m", "h", "/m", "/", False, "1")


def shows(bench: Bench) -> list[Callable[[Mark], object]]:
    """Every request that shows what its sender has seen."""
    mount = bench.mount("shows")
    service, fs = bench.service, bench.fs

    def commit(mark: Mark) -> object:
        sent = make_commit(mount.session, mount.ticket, [], (0, 0, 0), [], known=mark)
        return service.commits.commit(fs, sent, ADMIN_GRANT)

    return [
        commit,
        lambda mark: service.feed.read(fs, 0, known=mark),
        lambda mark: service.sessions.start(fs, INFO, known=mark),
    ]


def test_commits_and_pages_tell_when_a_commit_was_made(bench: Bench) -> None:
    mount = bench.mount()
    mount.create(ROOT_INO, b"first")
    sent = make_commit(mount.session, mount.ticket, mount.queue, (0, 0, 0), [], known=NO_MARK)
    answer = bench.service.commits.commit(bench.fs, sent, ADMIN_GRANT)
    assert answer.at > 0
    feed = bench.service.feed
    assert feed.read(bench.fs, 0, known=NO_MARK).mark == Mark(answer.seq, answer.at)
    # Also where there is nothing new: a reader that begins at the head has seen nothing yet.
    assert feed.read(bench.fs, answer.seq, known=NO_MARK).mark == Mark(answer.seq, answer.at)
    assert feed.read(bench.fs, answer.seq, known=Mark(answer.seq, answer.at)).mark is None
    assert feed.read(bench.fs, 0).mark is None  # an older client
    assert bench.service.commits.commit(bench.fs, sent, ADMIN_GRANT) == answer  # the same request again


def test_who_has_seen_another_history_is_told(bench: Bench) -> None:
    mount = bench.mount()
    mount.file(ROOT_INO, b"f", b"1")
    mount.commit()
    asks = shows(bench)
    real = bench.service.feed.read(bench.fs, 0, known=NO_MARK).mark
    assert real is not None
    for ask in asks:
        for other in (real._replace(at=real.at + 1), real._replace(seq=real.seq + 1)):
            with pytest.raises(HistoryChanged, match=f"does not have commit {other.seq} of {bench.fs.name}"):
                ask(other)
        ask(real)
        ask(NO_MARK)


def test_where_the_row_was_pruned_nobody_is_turned_away(bench: Bench) -> None:
    mount = bench.mount()
    for at in range(3):
        mount.create(ROOT_INO, b"f%d" % at)
        mount.commit()
    asks = shows(bench)
    bench.service.db.write(lambda tx: tx.execute("DELETE FROM change WHERE fs=? AND seq<3", (bench.fs.id,)))
    for ask in asks:
        with pytest.raises(HistoryChanged):
            ask(Mark(3, 12345))
        ask(Mark(2, 12345))
