"""`HttpRemote` and a real `fsd serve`: every call of the mount, also when the network loses and doubles."""

from __future__ import annotations

import os
import stat
import threading
import time

import pytest
from support import proxy as faults
from support.proxy import FaultProxy, on
from support.reading import audit_all, committed_tree, remote_for
from support.server import Server, TestFs

from fsd.model import blocks
from fsd.model.attrs import ROOT_INO, Attr, Entry, make_ino
from fsd.model.blocks import Part
from fsd.model.errors import NotAuthenticated, SessionForked, SessionUnknown, Unavailable
from fsd.model.ops import CONTENT, CREATE, Content, Create, Op
from fsd.remote.api import SessionInfo
from fsd.remote.hot import HttpRemote
from fsd.wire.frame import Blob, make_blob, open_blob
from fsd.wire.messages import ATTRS, LIST, LOOKUP, PATH, TREE, CommitAnswer, make_commit

INFO = SessionInfo("mount-1", "box", "/mnt", "/", False, "0.1.0")
NOW = 1_700_000_000_123_456_789


class Client:
    """A mount session by hand: numbers its operations and inodes, keeps the ticket."""

    def __init__(self, remote: HttpRemote) -> None:
        self.remote = remote
        self.start = remote.start_session(INFO)
        self.session, self.ticket = self.start.session, self.start.ticket
        self.opno, self.counter = 0, 0

    def number(self) -> int:
        self.opno += 1
        return self.opno

    def file(self, name: bytes, data: bytes) -> tuple[list[Op], Blob]:
        """Operations that make `name` in the root with `data`, and its blob."""
        self.counter += 1
        ino, blob = make_ino(self.session, self.counter), make_blob(data)
        parts = blocks.encode((Part(0, len(data), 0, blob.hash),))
        mode = stat.S_IFREG | 0o644
        create = Create(self.number(), CREATE, ROOT_INO, name, ino, mode, 0, 0, 0, None, NOW)
        content = Content(self.number(), CONTENT, ino, 0, len(data), ((0, parts),), True, None, NOW, NOW)
        return [create, content], blob

    def commit(self, ops: list[Op], blobs: list[Blob], timeout: float = 10) -> CommitAnswer:
        commit = make_commit(self.session, self.ticket, ops, (0, 0, 0), blobs)
        answer = self.remote.commit(commit, timeout)
        if not answer.missing:
            self.ticket = answer.ticket
        return answer


def test_every_call_of_a_mount(shared_fs: TestFs) -> None:
    remote = remote_for(shared_fs.token)
    client = Client(remote)
    assert client.start.previous is None and client.start.block_size == 1 << 20
    data = b"hello " * 1000
    ops, blob = client.file(b"a", data)
    answer = client.commit(ops, [blob])
    assert answer.seq == client.start.seq + 1 and answer.next_op == 3 and not answer.outcomes

    more, large = client.file(b"b", os.urandom(300_000))
    missing = client.commit(more, [])
    assert missing.missing == (large.hash,)
    remote.upload([large], 10)
    assert client.commit(more, []).seq == answer.seq + 1

    questions = [
        (LOOKUP, ROOT_INO, b"a", 100),
        (LIST, ROOT_INO, b"", 100),
        (ATTRS, (ops[0].ino, 999)),
        (TREE, ROOT_INO, 100),
        (PATH, (b"a", b"x")),
        (LOOKUP, ROOT_INO, b"nothing", 0),
        (LIST, 999, b"", 10),
    ]
    seq, answers = remote.ask(questions, 10)
    assert seq == answer.seq + 1
    entry, listing = answers[0]
    assert isinstance(entry, Entry) and entry.name == b"a" and [e.name for e in listing] == [b"a", b"b"]
    assert [e.name for e in answers[1][0]] == [b"a", b"b"] and answers[1][1] is False
    assert isinstance(answers[2][0], Attr) and answers[2][1] is None and answers[2][0].mtime == NOW
    assert answers[3][0][0] == ROOT_INO
    assert answers[4][0] == entry and answers[4][1] is None
    assert answers[5][0] is None and answers[6] is None

    got, absent = remote.blobs([blob.hash, large.hash, b"x" * 32], 10)
    assert [one.hash for one in got] == [blob.hash, large.hash] and absent == [b"x" * 32]
    assert open_blob(got[0]) == data

    page = remote.changes(client.start.seq, client.session, 0)
    assert page.head == seq and [c.session for c in page.changes] == [client.session] * 2
    remote.report(client.session, (1, 2, 3))
    remote.end_session(client.session, "clean", (0, 0, 0))
    again = remote.start_session(INFO)
    assert again.previous is not None and again.previous.ended == "clean"
    assert again.session != client.session
    health = remote.health()
    assert health.reachable and health.rtt_ms is not None
    with pytest.raises(SessionUnknown):
        remote.report(8_000_000, (0, 0, 0))
    assert set(committed_tree(shared_fs.token)) == {"a", "b"}


def test_a_wrong_ticket_is_a_fork_of_the_session(shared_fs: TestFs) -> None:
    client = Client(remote_for(shared_fs.token))
    ops, blob = client.file(b"a", b"x")
    client.commit(ops, [blob])
    client.ticket = b"wrong"
    more, other = client.file(b"b", b"y")
    with pytest.raises(SessionForked):
        client.commit(more, [other])


def test_a_wrong_token_is_told_and_not_shown(shared_fs: TestFs) -> None:
    wrong = shared_fs.token[:-4] + "AAAA"
    with pytest.raises(NotAuthenticated) as caught:
        remote_for(wrong).ask([(LIST, ROOT_INO, b"", 1)], 5)
    assert wrong[-20:] not in str(caught.value)


@pytest.mark.parametrize(
    "fault",
    [
        faults.LOSE_REPLY,
        faults.CUT_REQUEST,
        faults.SWALLOW_REPLY,
        faults.HTML_502,
        faults.HTML_502_AFTER,
        faults.EMPTY_200_AFTER,
        faults.truncate(90),
        faults.DOUBLE_REQUEST,
        faults.DOUBLE_REPLY,
    ],
    ids=lambda fault: f"{fault.kind}{'' if fault.acts else ' before'}",
)
def test_a_commit_repeated_until_answered_is_one_commit(
    shared_fs: TestFs,
    fault: faults.Fault,
) -> None:
    with FaultProxy(shared_fs.server.url) as proxy:
        client = Client(remote_for(shared_fs.token, proxy.url))
        for n in range(6):
            ops, blob = client.file(b"f%d" % n, b"data %d" % n)
            proxy.next(fault, on("commits"))
            # Silence alone takes so long, once; on a slow machine more tries may be in vain.
            for patience in (0.7, 2.0, 5.0, 20.0, 40.0):
                try:
                    answer = client.commit(ops, [blob], timeout=patience)
                    break
                except Unavailable:
                    continue
            else:
                pytest.fail("never answered")
            assert answer.seq == client.start.seq + n + 1 and not answer.outcomes
        assert proxy.pending() == 0
    assert len(committed_tree(shared_fs.token)) == 6


def test_the_feed_waits_and_wakes(shared_fs: TestFs) -> None:
    client, reader = Client(remote_for(shared_fs.token)), Client(remote_for(shared_fs.token))
    seq = client.start.seq
    began = time.monotonic()
    assert not client.remote.changes(seq, client.session, 0.5).changes
    assert 0.4 < time.monotonic() - began < 20
    heard: list[float] = []
    asked = threading.Event()

    def listen() -> None:
        asked.set()
        page = reader.remote.changes(seq, reader.session, 30)
        assert page.changes
        heard.append(time.monotonic())

    thread = threading.Thread(target=listen)
    thread.start()
    assert asked.wait(60)
    ops, blob = client.file(b"a", b"x")
    client.commit(ops, [blob])
    done = time.monotonic()
    thread.join(60)
    assert heard and heard[0] - done < 20


def test_a_server_killed_and_started_again_is_the_same(server: Server) -> None:
    fs = server.create()
    client = Client(remote_for(fs.token, server.url))
    ops, blob = client.file(b"a", b"x" * 10_000)
    answer = client.commit(ops, [blob])
    server.kill()
    with pytest.raises(Unavailable):
        client.commit(*_one(client.file(b"b", b"y")), timeout=2)
    server.restart()
    client.opno -= 2
    client.counter -= 1
    assert client.commit(*_one(client.file(b"b", b"y"))).seq == answer.seq + 1
    assert set(committed_tree(fs.token, server.url)) == {"a", "b"}
    server.stop()
    assert not audit_all(server.data_dir)


def _one(made: tuple[list[Op], Blob]) -> tuple[list[Op], list[Blob]]:
    return made[0], [made[1]]
