"""A connection that brings small commits in a row: a thread of its own answers, and nobody can tell."""

from __future__ import annotations

import base64
import contextlib
import http.client
import os
import resource
import signal
import socket
import sqlite3
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from support.server import Server, TestFs
from support.wait import wait_for

from fsd.model import ops
from fsd.model.attrs import ROOT_INO, make_ino
from fsd.server.lanes import LANE_AFTER
from fsd.wire import messages
from fsd.wire.frame import make_blob
from fsd.wire.messages import make_commit, read_answer

LONG = 60.0


class Mount:
    """A session whose commits go over one connection."""

    def __init__(self, fs: TestFs) -> None:
        self.fs = fs
        got = fs.ask("POST", "/sessions", {"mount_id": "m1", "host": "box", "path": "/mnt"})
        assert got.status == 201
        self.session = got.json["session"]
        self.ticket = base64.b64decode(got.json["ticket"])
        self.opno = 1
        self.connection = http.client.HTTPConnection("127.0.0.1", fs.server.port, timeout=LONG)

    def body(self, *, padding: int = 0) -> bytes:
        """A commit that makes one file."""
        made = ops.Create(
            self.opno,
            ops.CREATE,
            ROOT_INO,
            b"f%d" % self.opno,
            make_ino(self.session, self.opno),
            0o100644,
            0,
            0,
            0,
            None,
            1,
        )
        blobs = [make_blob(os.urandom(padding))] if padding else []
        return b"".join(
            messages.commit_pieces(make_commit(self.session, self.ticket, [made], (0, 0, 0), blobs))
        )

    def ask(self, method: str, path: str, body: bytes | None = None, **more: str) -> tuple[Any, bytes]:
        """On the kept connection."""
        headers = {"Authorization": f"Bearer {self.fs.token}", "X-Fsd-Call": f"call{self.opno}", **more}
        self.connection.request(method, f"/v1/file-systems/{self.fs.id}{path}", body, headers)
        got = self.connection.getresponse()
        return got, got.read()

    def commit(self, *, padding: int = 0) -> dict[str, str]:
        """The answer's headers."""
        got, raw = self.ask("POST", "/commits", self.body(padding=padding))
        assert got.status == 200, raw
        assert got.getheader("X-Fsd-Call") == f"call{self.opno}"
        self.took(raw)
        return {name.lower(): value for name, value in got.getheaders()}

    def took(self, raw: bytes) -> None:
        answer = read_answer(raw)
        assert answer.next_op == self.opno + 1 and not answer.outcomes and not answer.missing
        self.ticket, self.opno = answer.ticket, answer.next_op

    def to_a_lane(self) -> None:
        for _ in range(LANE_AFTER):
            self.commit()
        wait_for(self.lent, LONG, "a lane")

    def lent(self) -> bool:
        """Whether a lane has the connection, or the next commit may bring it there."""
        if lanes(self.fs.server) == 1:
            return True
        self.commit()
        return False

    def raw(self) -> socket.socket:
        sock = self.connection.sock
        assert isinstance(sock, socket.socket)
        return sock

    def names(self) -> int:
        return len(self.fs.ask("GET", "/list/").json["entries"])


def lanes(server: Server) -> float:
    return metric(server, "fsd_lanes")


def metric(server: Server, name: str) -> float:
    text = server.ask("GET", "/metrics").body.decode()
    return float(next(line.rpartition(" ")[2] for line in text.splitlines() if line.startswith(name + " ")))


@pytest.fixture(scope="module")
def kept_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One whose lanes are this module's alone; not to be stopped."""
    made = Server(tmp_path_factory.mktemp("lanes"))
    try:
        yield made.start()
    finally:
        made.end()


@pytest.fixture
def mount(kept_server: Server) -> Iterator[Mount]:
    made = Mount(kept_server.create())
    yield made
    made.connection.close()
    wait_for(lambda: lanes(kept_server) == 0, LONG, "the lane to end with its client")


def test_answers_are_the_same_by_either_way(mount: Mount) -> None:
    before = mount.commit()
    mount.to_a_lane()
    by_lane = mount.commit()
    assert lanes(mount.fs.server) == 1
    assert set(by_lane) == set(before)
    same = ("content-type", "server", "connection")
    assert [by_lane.get(one) for one in same] == [before.get(one) for one in same]
    assert by_lane["x-request-id"].startswith("req_") and by_lane["x-request-id"] != before["x-request-id"]
    count = 'fsd_requests_total{route="/v1/file-systems/{id}/commits",method="POST",status="200"}'
    # It is counted after it was answered.
    wait_for(lambda: metric(mount.fs.server, count) >= mount.opno - 1, LONG, "each to be counted")
    assert mount.names() == mount.opno - 1


def test_what_is_no_small_commit_goes_back_and_later_ones_come_again(mount: Mount) -> None:
    for method, path, body in (("GET", "/stat/", None), ("POST", "/commits", b"no commit" * 10_000)):
        mount.to_a_lane()
        got, raw = mount.ask(method, path, body)
        assert got.status == (200 if method == "GET" else 400), raw
        wait_for(lambda: lanes(mount.fs.server) == 0, LONG, "the loop to have it again")
        if mount.connection.sock is None:
            continue  # after an error in a large body the loop closes it
        mount.commit()
    mount.to_a_lane()
    mount.commit(padding=300_000)  # a large one, by the loop; its like do not come to a lane
    for _ in range(2 * LANE_AFTER):
        mount.commit(padding=300_000)
    assert lanes(mount.fs.server) == 0
    assert mount.names() == mount.opno - 1


def test_pieces_and_two_requests_at_once(mount: Mount) -> None:
    mount.to_a_lane()
    one = request(mount)
    for at in range(0, len(one), 50):
        mount.raw().sendall(one[at : at + 50])
    mount.took(reply(mount.raw())[1])
    assert lanes(mount.fs.server) == 1
    commit = request(mount)
    question = commit.replace(b"POST", b"GET", 1).replace(b"/commits", b"/stat/", 1)
    head = question[: question.index(b"\r\n\r\n") + 4]
    mount.raw().sendall(commit + head.replace(b"Content-Length", b"X-Length"))
    mount.took(reply(mount.raw())[1])
    assert reply(mount.raw())[0] == 200
    assert mount.names() == mount.opno - 1


def test_who_waits_to_be_told_to_send_the_body_is_told(mount: Mount) -> None:
    mount.to_a_lane()
    head, _, body = request(mount).partition(b"\r\n\r\n")
    mount.raw().sendall(head + b"\r\nExpect: 100-continue\r\n\r\n")
    said = b""
    while not said.endswith(b"\r\n\r\n"):
        said += mount.raw().recv(1)
    assert said == b"HTTP/1.1 100 Continue\r\n\r\n"
    mount.raw().sendall(body)
    mount.took(reply(mount.raw())[1])
    assert mount.names() == mount.opno - 1


def test_errors_are_told_as_ever_and_a_revocation_holds_at_once(mount: Mount) -> None:
    got, raw = mount.ask("POST", "/commits", b"rubbish")
    by_loop = (got.status, raw, set(got.headers))
    mount.to_a_lane()
    got, raw = mount.ask("POST", "/commits", b"rubbish")
    ids = [one.partition(b'"request_id":')[2] for one in (by_loop[1], raw)]
    assert ids[0] != ids[1]
    assert (got.status, raw.replace(ids[1], ids[0]), set(got.headers)) == by_loop
    assert lanes(mount.fs.server) == 1
    server = mount.fs.server
    listed = server.admin("GET", f"/v1/file-systems/{mount.fs.id}/tokens").json
    token = listed["tokens"][0]["token_id"]
    assert server.admin("POST", f"/v1/file-systems/{mount.fs.id}/tokens/{token}/disable").status == 200
    got, raw = mount.ask("POST", "/commits", mount.body())
    assert got.status == 401 and got.getheader("WWW-Authenticate") == "Bearer", raw
    assert mount.fs.token not in server.log.read_text()


def test_many_mounts_at_once_lose_nothing(kept_server: Server) -> None:
    mounts = [Mount(kept_server.create()) for _ in range(8)]
    failed: list[BaseException] = []

    def play(one: Mount) -> None:
        try:
            for _ in range(20):
                one.commit()
        except BaseException as exc:
            failed.append(exc)
            raise

    threads = [threading.Thread(target=play, args=(one,)) for one in mounts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert [one.names() for one in mounts] == [20] * 8
    for one in mounts:
        one.connection.close()
    wait_for(lambda: lanes(kept_server) == 0, LONG, "the lanes to end with their clients")


def test_where_no_descriptor_is_left_the_loop_goes_on_serving(server: Server) -> None:
    mount = Mount(server.create())
    mount.commit()
    used = {int(name) for name in os.listdir(f"/proc/{server.pid}/fd")}
    least = next(number for number in range(len(used) + 1) if number not in used)
    before = resource.prlimit(server.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (least, before[1]))
    kept = mount.raw()
    for _ in range(2 * LANE_AFTER):
        mount.commit()
    assert mount.connection.sock is kept
    resource.prlimit(server.pid, resource.RLIMIT_NOFILE, before)
    mount.to_a_lane()
    assert mount.names() == mount.opno - 1
    assert "Traceback" not in server.log.read_text()
    mount.connection.close()


def test_a_stop_ends_lanes_at_once(server: Server) -> None:
    mount = Mount(server.create())
    mount.to_a_lane()
    assert server.stop() == 0
    with contextlib.suppress(ConnectionError):
        assert mount.raw().recv(100) == b""
    mount.connection.close()
    server.restart()
    mount.commit()  # http.client connects anew
    assert mount.names() == mount.opno - 1
    mount.connection.close()


def test_a_stop_waits_for_the_commit_under_way(server: Server) -> None:
    """It is held in its transaction by the lock of a second writer."""
    mount = Mount(server.create())
    mount.to_a_lane()
    other = sqlite3.connect(server.data_dir / "fsd.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    mount.raw().sendall(request(mount))
    wait_for(lambda: metric(server, "fsd_lanes_busy") == 1, LONG, "the commit to begin")
    assert metric(server, "fsd_requests_in_flight") == 2, "it and the question"
    os.kill(server.pid, signal.SIGTERM)
    wait_for(lambda: refused(server), LONG, "the server to listen no more")
    other.execute("ROLLBACK")
    other.close()
    mount.took(reply(mount.raw())[1])
    assert server.process is not None and server.process.wait(60) == 0
    mount.connection.close()
    server.restart()
    assert mount.names() == mount.opno - 1
    mount.connection.close()


def refused(server: Server) -> bool:
    try:
        socket.create_connection(("127.0.0.1", server.port), LONG).close()
    except ConnectionRefusedError:
        return True
    return False


def request(mount: Mount) -> bytes:
    body = mount.body()
    return (
        f"POST /v1/file-systems/{mount.fs.id}/commits HTTP/1.1\r\nHost: x\r\n"
        f"Authorization: Bearer {mount.fs.token}\r\nContent-Length: {len(body)}\r\n\r\n"
    ).encode() + body


def reply(sock: socket.socket) -> tuple[int, bytes]:
    """One answer, and not a byte more."""
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        got = sock.recv(1)
        assert got, head
        head += got
    fields = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:-2])
    body = b""
    while len(body) < int(fields[b"content-length"]):
        got = sock.recv(int(fields[b"content-length"]) - len(body))
        assert got, body
        body += got
    return int(head.split()[1]), body
