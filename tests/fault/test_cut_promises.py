"""What a checkpoint through a mount promises when something is in the way, without a kernel."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.bench import Bench
from support.client import Client, Clock
from support.inproc import InProcess
from support.twin import clone

from fsd.model.errors import Busy, NotAuthenticated, NotDrained, UsageError
from fsd.model.ops import REFUSED, Content, Outcome
from fsd.service.retained import At
from fsd.vfs.types import Want
from fsd.wire.messages import Commit, CommitAnswer, make_commit

ASK = {"label": "cut"}


@pytest.fixture
def box(tmp_path: Path) -> Iterator[Client]:
    client = Client(tmp_path / "mount", Bench(tmp_path / "server"), Clock(), random.Random(7))
    client.net.faulty = False
    client.open()
    yield client
    client.volume.close()
    client.bench.close()


def cut(box: Client, *, partial: bool = False, within: float | None = None, ask: Any = ASK) -> Want:
    return box.volume.checkpoint(ask, partial=partial, within=within)


def checkpoints(box: Client) -> list[dict[str, Any]]:
    read = box.bench.service.db.read
    found, _ = read(lambda tx: box.bench.service.checkpoints.page(tx, box.bench.fs, None, None, 100))
    return found


def names_at(box: Client, seq: int) -> list[bytes]:
    _, ((entries, _),) = box.bench.service.namespace.ask(box.bench.fs, [("list", 1, b"", 100)], At(seq=seq))
    return [entry.name for entry in entries]


def made(want: Want) -> dict[str, Any]:
    assert isinstance(want.result, dict)
    return want.result


def test_the_commit_that_reaches_the_cut_makes_the_checkpoint(box: Client) -> None:
    box.put(box.volume.root_ino, b"f", b"x")
    before = len(box.remote.calls)
    want = cut(box)
    box.until(want)
    assert box.remote.calls[before:] == ["commit"], "one request for all"
    assert names_at(box, made(want)["fs_seq"]) == [b"f"]


def test_with_nothing_to_commit_one_call_makes_it(box: Client) -> None:
    before = len(box.remote.calls)
    want = cut(box)
    box.until(want)
    assert box.remote.calls[before:] == ["checkpoint"]
    assert made(want)["label"] == "cut"


def test_later_changes_and_their_fsyncs_wait(box: Client) -> None:
    box.put(box.volume.root_ino, b"before", b"x")
    box.net.cut = 3
    want = cut(box)
    with pytest.raises(Busy):
        cut(box)
    box.put(box.volume.root_ino, b"later", b"y", sync=True)
    assert want.finished, "the later fsync came before the checkpoint"
    assert names_at(box, made(want)["fs_seq"]) == [b"before"]
    assert set(box.bench.tree()) == {"before", "later"}


def test_what_is_removed_after_the_cut_is_in_it(box: Client) -> None:
    """Made and removed before it was sent, it would never have left this machine."""
    box.put(box.volume.root_ino, b"brief", b"content")
    want = cut(box)
    box.call(lambda v: v.unlink(v.root_ino, b"brief"))
    box.until(want)
    assert names_at(box, made(want)["fs_seq"]) == [b"brief"]
    box.until(box.volume.barrier())
    assert box.bench.tree() == {}


def test_a_server_that_is_away_is_told_and_nothing_is_half(box: Client) -> None:
    box.put(box.volume.root_ino, b"f", b"x")
    box.net.cut = 1 << 30
    want = cut(box, within=5.0)
    with pytest.raises(NotDrained):
        box.until(want)
    box.net.cut = 0
    box.put(box.volume.root_ino, b"g", b"y", sync=True)
    assert checkpoints(box) == [], "it was given up"
    assert set(box.bench.tree()) == {"f", "g"}


def test_one_that_is_made_too_late_does_not_stay(box: Client) -> None:
    """The server acts when who asked has been told that there is none."""
    for dirty in (True, False):
        if dirty:
            box.put(box.volume.root_ino, b"f", b"x")
        want = cut(box, within=5.0)
        (job,) = [job for job in box.volume.jobs() if type(job).__name__ in ("CommitJob", "CheckpointJob")]
        result = box.run(job)
        box.clock.seconds += 6
        box.volume.tick(box.clock.seconds)
        with pytest.raises(NotDrained):
            box.volume.done(want)
        assert len(checkpoints(box)) == 1
        box.volume.finish(job, result)
        box.until(box.volume.barrier())
        box.run_some(5)
        assert checkpoints(box) == []


def test_lost_answers_make_no_second_checkpoint(box: Client) -> None:
    for number in range(6):
        if number % 2:
            box.put(box.volume.root_ino, b"f%d" % number, b"x")
        lost: list[str] = []

        def lose(route: str, lost: list[str] = lost) -> str:
            if route in ("commit", "checkpoint") and len(lost) < 2:
                lost.append(route)
                return "lose"
            return "pass"

        box.remote.fault = lose
        want = cut(box)
        box.until(want)
        assert len(lost) == 2
    assert len(checkpoints(box)) == 6


def test_a_revoked_token_ends_it(box: Client) -> None:
    box.put(box.volume.root_ino, b"f", b"x")

    def refuse(route: str) -> str:
        raise NotAuthenticated("the token is disabled")

    fault, box.remote.fault = box.remote.fault, refuse
    with pytest.raises(NotAuthenticated):
        box.until(cut(box))
    box.remote.fault = fault
    box.until(box.volume.barrier())
    assert set(box.bench.tree()) == {"f"}


def test_a_wrong_request_does_not_stop_the_data(box: Client) -> None:
    box.put(box.volume.root_ino, b"f", b"x")
    want = cut(box, ask={"label": "two\nlines"})
    with pytest.raises(UsageError):
        box.until(want)
    assert set(box.bench.tree()) == {"f"}
    assert checkpoints(box) == []
    box.until(cut(box))


def test_a_copied_mount_goes_on_under_a_new_session(box: Client, tmp_path: Path) -> None:
    box.put(box.volume.root_ino, b"both", b"x")
    copy = clone(box, tmp_path / "copy")
    copy.put(copy.volume.root_ino, b"copy", b"c", sync=True)
    session = box.volume.session
    for number in range(40):
        box.put(box.volume.root_ino, b"f%d" % number, b"y")
    want = cut(box)
    box.put(box.volume.root_ino, b"later", b"z")
    box.until(want)
    assert box.volume.session != session
    names = set(names_at(box, made(want)["fs_seq"]))
    assert {b"f%d" % number for number in range(40)} <= names
    assert b"copy" in names
    assert b"later" not in names
    assert len(checkpoints(box)) == 1
    box.until(box.volume.barrier())
    copy.volume.close()


class Refusing(InProcess):
    """A server that refuses the content of one file, as one with a quota does."""

    victim = 0

    def commit(self, commit: Commit, timeout: float) -> CommitAnswer:
        ops = commit.ops
        refused = [op for op in ops if isinstance(op, Content) and op.ino == self.victim]
        if not refused:
            return super().commit(commit, timeout)
        rest = [op for op in ops if op not in refused]
        ask = commit.checkpoint if commit.checkpoint and commit.checkpoint["partial"] else None
        answer = super().commit(
            make_commit(commit.session, commit.ticket, rest, commit.pending, commit.blobs, ask), timeout
        )
        told = [Outcome(op.opno, REFUSED, errno.EDQUOT, 0, 0, b"", "the quota is used up") for op in refused]
        return answer._replace(outcomes=tuple(sorted((*answer.outcomes, *told))), next_op=ops[-1].opno + 1)


def refuse(box: Client, name: bytes) -> None:
    """A file whose next content is refused."""
    ino = box.put(box.volume.root_ino, name, b"before", sync=True)
    refusing = Refusing(box.bench.service, box.bench.fs)
    refusing.victim = ino
    box.remote = refusing
    fh = box.call(lambda v: v.open(ino, os.O_RDWR))
    box.call(lambda v: v.write(fh, 0, b"too much"))
    box.call(lambda v: v.release(fh))


def test_refused_changes_are_named_and_prevent_it(box: Client) -> None:
    refuse(box, b"victim")
    box.put(box.volume.root_ino, b"other", b"x")
    with pytest.raises(NotDrained) as told:
        box.until(cut(box))
    assert told.value.details["not_flushed"] == [{"path": "/victim", "reason": "the quota is used up"}]
    assert checkpoints(box) == []
    assert set(box.bench.tree()) == {"other", "victim"}


def test_refused_changes_are_named_in_a_partial_one(box: Client) -> None:
    refuse(box, b"victim")
    want = cut(box, partial=True)
    box.until(want)
    assert made(want)["not_flushed"] == [{"path": "/victim", "reason": "the quota is used up"}]
    assert len(checkpoints(box)) == 1


def test_a_crash_in_the_middle_leaves_all_or_nothing(box: Client, seed: int) -> None:
    """The daemon dies at any moment after the cut; the next one sends the rest."""
    rng = random.Random(seed)
    for turn in range(12):
        count = len(checkpoints(box))
        for number in range(5):
            box.put(box.volume.root_ino, b"%d-%d" % (turn, number), rng.randbytes(3000))
        want = cut(box)
        box.put(box.volume.root_ino, b"%d-later" % turn, b"z")
        box.run_some(rng.randrange(6))
        done = want.finished
        box.kill()
        box.open()
        there = checkpoints(box)
        assert len(there) - count in ((1,) if done else (0, 1))
        if len(there) > count:
            names = names_at(box, there[0]["fs_seq"])
            assert sum(name.startswith(b"%d-" % turn) for name in names) == 5
            assert b"%d-later" % turn not in names
        assert len([name for name in box.bench.tree() if name.startswith(f"{turn}-")]) == 6
