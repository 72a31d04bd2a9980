"""The tree by path over real HTTP: reading, writing, names, conditions, pages, faults."""

from __future__ import annotations

import base64
import hashlib
import os
import socket
import threading
from collections.abc import Iterator
from urllib.parse import quote

import pytest
from support.filesclient import connect
from support.proxy import HTML_502, LOSE_REPLY, FaultProxy, on, truncate
from support.server import Server, TestFs
from support.wait import wait_for

from fsd.client.files import Files, FindFilter, PutOptions, raw_path
from fsd.client.http import BytesBody
from fsd.model.errors import Conflict, FsdError, IdempotencyMismatch, NotFound, Unavailable, UsageError

MIB = 1024 * 1024


def put(files: Files, path: bytes, data: bytes, **options: object) -> dict[str, object]:
    return files.write(path, BytesBody(data), PutOptions(**options))  # type: ignore[arg-type]


def get(files: Files, path: bytes, **span: int) -> bytes:
    return b"".join(files.read(path, **span))


def errno_of(error: FsdError) -> object:
    return error.details.get("errno")


def test_a_written_file_is_read_back_with_its_attributes(files: Files) -> None:
    made = put(files, b"/tasks/task-42/plan.md", b"# Plan\n", mode=0o640, mtime_ns=1_700_000_000_123_456_789)
    there = files.stat(b"/tasks/task-42/plan.md")
    assert get(files, b"/tasks/task-42/plan.md") == b"# Plan\n"
    assert there == made
    assert (there["kind"], there["mode"], there["nlink"], there["size_bytes"]) == ("file", "640", 1, 7)
    assert there["mtime"] == "2023-11-14T22:13:20.123456789Z" and there["mtime_ns"] % 10**9 == 123456789
    assert there["fs_seq"] == 1, "directories, file and content are one commit"
    assert files.stat(b"/tasks")["mode"] == "755"


def test_large_content_and_every_kind_of_range(files: Files) -> None:
    data = os.urandom(9 * MIB + 17)
    put(files, b"/big", data)
    assert hashlib.sha256(get(files, b"/big")).digest() == hashlib.sha256(data).digest()
    for offset, length in ((0, 1), (MIB - 1, 2), (3 * MIB + 5, 4 * MIB), (9 * MIB, 100), (len(data), 5)):
        assert get(files, b"/big", offset=offset, length=length) == data[offset : offset + length]
    assert get(files, b"/big", offset=len(data) + 10) == b""
    reply = files.http.open(files._route("files", b"/big"), headers={"Range": "bytes=-5"})
    assert (reply.status, reply.read(10)) == (206, data[-5:])


def test_holes_and_empty_files(files: Files) -> None:
    put(files, b"/empty", b"")
    assert get(files, b"/empty") == b"" and files.stat(b"/empty")["size_bytes"] == 0
    put(files, b"/sparse", bytes(3 * MIB) + b"end")
    assert get(files, b"/sparse") == bytes(3 * MIB) + b"end"
    put(files, b"/sparse", b"x")
    assert get(files, b"/sparse") == b"x"


def test_many_appends_make_one_content(files: Files) -> None:
    want = b""
    for at in range(40):
        piece = b"%d;" % at * (1 if at % 7 else 200_000)
        want += piece
        put(files, b"/log", piece, append=True)
    assert get(files, b"/log") == want


def test_concurrent_appends_all_arrive_once(files: Files) -> None:
    def append(who: int) -> None:
        for at in range(10):
            put(files, b"/log", b"%d.%d\n" % (who, at), append=True)

    threads = [threading.Thread(target=append, args=(who,)) for who in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    lines = get(files, b"/log").splitlines()
    assert sorted(lines) == sorted(b"%d.%d" % (who, at) for who in range(4) for at in range(10))
    for who in range(4):
        mine = [line for line in lines if line.startswith(b"%d." % who)]
        assert mine == sorted(mine, key=lambda line: int(line.split(b".")[1]))


NAMES = (b"a b", b"%41", b"?x=1#y", b"\xff\xfe", "ü☃".encode(), b"..x", b"x" * 255, b"\n", b'"\\', b"+")


@pytest.mark.parametrize("name", NAMES, ids=repr)
def test_names_of_any_bytes(files: Files, name: bytes) -> None:
    path = b"/d/" + name
    put(files, path, name)
    assert get(files, path) == name
    assert [raw_path(one) for one in files.list(b"/d")] == [path]
    files.rename(path, path[:-1] + b"~")
    assert raw_path(files.stat(path[:-1] + b"~")) == path[:-1] + b"~"
    files.remove(path[:-1] + b"~")
    assert list(files.list(b"/d")) == []


@pytest.mark.parametrize(
    ("path", "code"),
    [(b"/" + b"x" * 256, "ENAMETOOLONG"), (b"/a/../b", None), (b"/", None), (b"/a\0b", "EINVAL")],
)
def test_bad_names_are_refused(files: Files, path: bytes, code: str | None) -> None:
    with pytest.raises(FsdError) as told:
        put(files, path, b"")
    assert errno_of(told.value) == code and told.value.status in (400, 409)
    assert list(files.list(b"/")) == []


def test_conditions_hold_or_nothing_happens(files: Files) -> None:
    first = str(put(files, b"/f", b"one")["revision"])
    second = str(put(files, b"/f", b"two", if_match=first)["revision"])
    assert first != second
    with pytest.raises(Conflict) as told:
        put(files, b"/f", b"three", if_match=first)
    assert told.value.details["revision"] == second
    with pytest.raises(Conflict):
        put(files, b"/f", b"three", overwrite=False)
    with pytest.raises(Conflict):
        put(files, b"/gone", b"three", if_match=first)
    with pytest.raises(Conflict):
        files.remove(b"/f", if_match=first)
    assert get(files, b"/f") == b"two"
    files.chmod(b"/f", 0o600)
    put(files, b"/f", b"four", if_match=second)
    assert get(files, b"/f") == b"four" and files.stat(b"/f")["mode"] == "600"


def test_missing_parents_and_wrong_kinds(files: Files) -> None:
    put(files, b"/file", b"x")
    files.mkdir(b"/dir")
    for call, want in (
        (lambda: put(files, b"/no/parent", b"", parents=False), "ENOENT"),
        (lambda: put(files, b"/file/below", b""), "ENOTDIR"),
        (lambda: put(files, b"/dir", b""), "EISDIR"),
        (lambda: get(files, b"/dir"), "EISDIR"),
        (lambda: list(files.list(b"/file")), "ENOTDIR"),
        (lambda: files.stat(b"/nothing"), "ENOENT"),
        (lambda: files.mkdir(b"/dir"), "EEXIST"),
        (lambda: files.mkdir(b"/file", parents=True), "EEXIST"),
        (lambda: files.hardlink(b"/dir", b"/x"), "EPERM"),
        (lambda: files.remove(b"/"), "EBUSY"),
        (lambda: files.rename(b"/dir", b"/dir/sub"), "EINVAL"),
        (lambda: files.rename(b"/file", b"/dir"), "EISDIR"),
        (lambda: files.rename(b"/dir", b"/file"), "ENOTDIR"),
        (lambda: files.removexattr(b"/file", b"user.x"), "ENODATA"),
    ):
        with pytest.raises(FsdError) as told:
            call()
        assert errno_of(told.value) == want, told.value
    assert [one["name"] for one in files.list(b"/")] == ["dir", "file"]


def test_rename_over_files_and_directories(files: Files) -> None:
    put(files, b"/a", b"a")
    put(files, b"/b", b"b")
    with pytest.raises(Conflict):
        files.rename(b"/a", b"/b", overwrite=False)
    files.rename(b"/a", b"/b")
    assert get(files, b"/b") == b"a" and [one["name"] for one in files.list(b"/")] == ["b"]
    put(files, b"/d1/x", b"")
    files.mkdir(b"/d2")
    files.rename(b"/d1", b"/d2")
    put(files, b"/d3/y", b"")
    with pytest.raises(FsdError) as told:
        files.rename(b"/d2", b"/d3")
    assert errno_of(told.value) == "ENOTEMPTY"
    assert [raw_path(one) for one in files.list(b"/", recursive=True)] == [
        b"/b", b"/d2", b"/d2/x", b"/d3", b"/d3/y",
    ]  # fmt: skip


def test_links_and_their_targets(files: Files) -> None:
    put(files, b"/d/f", b"text")
    files.symlink(b"d", b"/link")
    files.symlink(b"../link/f", b"/d/far")
    files.symlink(b"round", b"/round")
    files.symlink(b"/etc/passwd", b"/out")
    assert get(files, b"/d/far") == b"text"
    assert files.stat(b"/link")["target"] == "d"
    assert files.stat(b"/link/far", follow=True)["path"] == "/d/f"
    with pytest.raises(FsdError) as told:
        get(files, b"/round")
    assert errno_of(told.value) == "ELOOP"
    with pytest.raises(NotFound, match="outside"):
        get(files, b"/out")
    files.hardlink(b"/d/f", b"/hard")
    put(files, b"/hard", b"other")
    assert get(files, b"/d/f") == b"other" and files.stat(b"/d/f")["nlink"] == 2
    with pytest.raises(FsdError):
        files.symlink(b"x", b"/link")
    files.symlink(b"x", b"/link", overwrite=True)
    assert files.stat(b"/link")["target"] == "x"


def test_attributes(files: Files) -> None:
    put(files, b"/f", b"x", uid=5, gid=6)
    files.chmod(b"/f", 0o4711)
    files.chown(b"/f", 7, None)
    files.utimens(b"/f", mtime_ns=-5, atime_ns=2**40)
    files.setxattr(b"/f", b"user.tag.stage", b"final")
    files.setxattr(b"/f", b"user.raw", b"\0\xff")
    there = files.stat(b"/f")
    assert (there["mode"], there["uid"], there["gid"]) == ("4711", 7, 6)
    assert (there["mtime_ns"], there["atime_ns"]) == (-5, 2**40)
    assert there["tags"] == {"stage": "final"}
    assert base64.b64decode(there["xattrs"]["user.raw"]) == b"\0\xff"
    files.removexattr(b"/f", b"user.raw")
    assert set(files.stat(b"/f")["xattrs"]) == {"user.tag.stage"}


def test_copy_shares_content_and_keeps_attributes(files: Files, shared_fs: TestFs) -> None:
    data = os.urandom(3 * MIB)
    put(files, b"/a", data, mode=0o751, mtime_ns=10**18)
    files.setxattr(b"/a", b"user.tag.k", b"v")
    files.copy(b"/a", b"/b")
    put(files, b"/a", b"changed")
    assert get(files, b"/b") == data
    there = files.stat(b"/b")
    assert (there["mode"], there["mtime_ns"], there["tags"]) == ("751", 10**18, {"k": "v"})
    with pytest.raises(Conflict):
        files.copy(b"/a", b"/b", overwrite=False)
    files.copy(b"/a", b"/b")
    assert get(files, b"/b") == b"changed" and files.stat(b"/b")["tags"] == {"k": "v"}


def test_pages_meet_each_entry_once_in_order(files: Files) -> None:
    paths = [b"/t/%02d/%d" % (d, f) for d in range(6) for f in range(4)]
    for path in paths:
        put(files, path, b"")
    every = sorted([*paths, *(b"/t/%02d" % d for d in range(6))])
    for limit in (1, 3, 7, 1000):
        found: list[bytes] = []
        after = None
        while True:
            page = files.page(b"/t", recursive=True, limit=limit, after=after)
            assert len(page["entries"]) <= limit
            found += [raw_path(one) for one in page["entries"]]
            after = page["next_after"]
            if after is None:
                break
        assert found == every
    flat = files.page(b"/t", limit=4)
    assert [one["name"] for one in flat["entries"]] == ["00", "01", "02", "03"]
    rest = files.page(b"/t", limit=4, after=flat["next_after"])
    assert [one["name"] for one in rest["entries"]] == ["04", "05"] and rest["next_after"] is None


def test_pages_with_large_tags_end_early(files: Files) -> None:
    names = [b"/tagged/%02d" % number for number in range(75)]
    for name in names:
        put(files, name, b"")
        files.setxattr(name, b"user.tag.long", b"x" * 60_000)
    page = files.page(b"/tagged")
    assert 0 < len(page["entries"]) < 75 and page["next_after"] is not None
    assert [raw_path(one) for one in files.list(b"/tagged")] == names
    assert [raw_path(one) for one in files.find(b"/tagged", FindFilter(tag="long"))] == names


def test_find_by_every_filter(files: Files) -> None:
    put(files, b"/x/one.md", b"1", mtime_ns=1000)
    put(files, b"/x/two.txt", b"22", mtime_ns=2000)
    put(files, b"/x/\xff.md", b"333", mtime_ns=3000)
    files.symlink(b"one.md", b"/x/link")
    files.setxattr(b"/x/two.txt", b"user.tag.stage", b"final")

    def names(**wanted: object) -> list[bytes]:
        return [raw_path(one) for one in files.find(b"/", FindFilter(**wanted))]  # type: ignore[arg-type]

    assert names(name=b"*.md") == [b"/x/one.md", b"/x/\xff.md"]
    assert names(name=b"\xff*") == [b"/x/\xff.md"]
    assert names(kind="directory") == [b"/x"]
    assert names(kind="symlink") == [b"/x/link"]
    assert names(kind="file", min_size=2) == [b"/x/two.txt", b"/x/\xff.md"]
    assert names(kind="file", max_size=2, min_size=2) == [b"/x/two.txt"]
    assert names(kind="file", newer_ns=1000, older_ns=3000) == [b"/x/two.txt"]
    assert names(tag="stage") == names(tag="stage=final") == [b"/x/two.txt"]
    assert names(tag="stage=draft") == []
    assert len(list(files.find(b"/", FindFilter(), limit=2))) == 2
    with pytest.raises(UsageError):
        names(kind="nonsense")


def test_a_tree_is_removed_in_bounded_steps(files: Files) -> None:
    for at in range(30):
        put(files, b"/t/%d/f" % at, b"")
    with pytest.raises(FsdError) as told:
        files.remove(b"/t")
    assert errno_of(told.value) == "ENOTEMPTY"
    dry = Files(files.http, dry_run=True).remove(b"/t", recursive=True)
    assert dry["dry_run"] and dry["removed"] == 61
    assert files.remove(b"/t", recursive=True)["removed"] == 61
    assert list(files.list(b"/")) == []


def test_a_tree_of_more_than_one_step_goes_whole(shared_fs: TestFs, files: Files) -> None:
    for at in range(260):
        files.mkdir(b"/t/%d/x" % at, parents=True)
    answer = shared_fs.ask("POST", "/actions", {"action": "remove", "path": "/t", "recursive": True}).json
    assert answer["more"] and answer["removed"] == 500
    assert files.remove(b"/t", recursive=True)["removed"] == 21
    with pytest.raises(NotFound):
        files.stat(b"/t")


# -- faults ------------------------------------------------------------------------------------------


def test_a_lost_reply_does_nothing_twice(shared_fs: TestFs, proxy: FaultProxy) -> None:
    files = connect(shared_fs, proxy.url)
    put(files, b"/log", b"a")
    for data in (b"b", b"c"):
        proxy.next(LOSE_REPLY, on("files"))
        put(files, b"/log", data, append=True)
    proxy.next(LOSE_REPLY, on("files"))
    put(files, b"/new", b"x", overwrite=False)
    proxy.next(LOSE_REPLY, on("actions"))
    files.rename(b"/new", b"/moved")
    proxy.next(LOSE_REPLY, on("actions"))
    files.remove(b"/moved")
    assert proxy.pending() == 0
    assert get(files, b"/log") == b"abc" and [one["name"] for one in files.list(b"/")] == ["log"]


def test_a_key_is_bound_to_path_and_content(files: Files, shared_fs: TestFs) -> None:
    first = files.write(b"/f", BytesBody(b"one"), key="k1")
    assert files.write(b"/f", BytesBody(b"one"), key="k1") == first
    for path, data in ((b"/f", b"two"), (b"/g", b"one")):
        with pytest.raises(IdempotencyMismatch):
            files.write(path, BytesBody(data), key="k1")
    assert files.stat(b"/f")["fs_seq"] == 1


def test_a_reply_cut_short_is_continued_where_it_ended(shared_fs: TestFs, proxy: FaultProxy) -> None:
    data = os.urandom(5 * MIB)
    files = connect(shared_fs, proxy.url)
    put(files, b"/f", data)
    proxy.reset_counts()
    proxy.next(truncate(2 * MIB), on("files"))
    proxy.next(truncate(MIB), on("files"))
    assert get(files, b"/f") == data
    assert proxy.count("files") == 3 and proxy.pending() == 0


def test_a_file_changed_while_it_is_read_is_never_a_mixture(shared_fs: TestFs, proxy: FaultProxy) -> None:
    old, new = b"o" * (3 * MIB), b"n" * (3 * MIB)
    files = connect(shared_fs, proxy.url)
    put(files, b"/f", old)
    proxy.next(truncate(MIB), on("files"))
    pieces = files.read(b"/f")
    got = bytearray(next(pieces))
    put(connect(shared_fs), b"/f", new)
    with pytest.raises(Conflict, match="changed"):
        got.extend(b"".join(pieces))
    assert got == old[: len(got)]


def test_answers_that_are_none_are_told(shared_fs: TestFs, proxy: FaultProxy) -> None:
    files = connect(shared_fs, proxy.url, retry_for=0.3)
    proxy.always(HTML_502)
    with pytest.raises(Unavailable, match="502 with text/html"):
        files.stat(b"/")
    proxy.clear()
    proxy.refuse()
    with pytest.raises(Unavailable, match="nothing listens"):
        files.stat(b"/")
    proxy.accept()
    assert files.stat(b"/")["is_dir"]


@pytest.mark.parametrize("chunked", [False, True])
def test_a_request_cut_short_changes_nothing(files: Files, shared_fs: TestFs, chunked: bool) -> None:
    put(files, b"/f", b"before")
    how = "Transfer-Encoding: chunked" if chunked else f"Content-Length: {3 * MIB}"
    head = (
        f"PUT /v1/file-systems/{shared_fs.id}/files/f HTTP/1.1\r\nHost: x\r\n"
        f"Authorization: Bearer {shared_fs.token}\r\n{how}\r\n\r\n"
    )
    body = b"x" * (2 * MIB)
    with socket.create_connection(("127.0.0.1", shared_fs.server.port), 10) as sock:
        sock.sendall(head.encode() + (b"%x\r\n%b\r\n" % (len(body), body) if chunked else body))
    wait_for(lambda: in_flight(shared_fs) == 1, 30, "the server to notice")
    assert get(files, b"/f") == b"before" and files.stat(b"/")["fs_seq"] == 1


def test_a_large_body_that_cannot_be_written_is_refused_before_it_is_sent(files: Files) -> None:
    class Long:
        length = 64 * MIB
        repeatable = False
        sent = 0

        def pieces(self) -> Iterator[bytes]:
            for _ in range(64):
                self.sent += 1
                yield bytes(MIB)

    put(files, b"/f", b"x")
    body = Long()
    with pytest.raises(Conflict):
        files.write(b"/f", body, PutOptions(overwrite=False))
    assert body.sent < 64
    assert get(files, b"/f") == b"x"


def test_a_large_request_again_gets_its_kept_answer(shared_fs: TestFs, proxy: FaultProxy) -> None:
    files = connect(shared_fs, proxy.url)
    proxy.next(LOSE_REPLY, on("files"))
    data = os.urandom(5 * MIB)
    put(files, b"/f", data, overwrite=False)
    assert proxy.pending() == 0 and get(files, b"/f") == data


def in_flight(fs: TestFs) -> int:
    """Requests being answered, this one included."""
    text = fs.server.ask("GET", "/metrics").body.decode()
    lines = [line for line in text.splitlines() if "in_flight" in line and not line.startswith("#")]
    assert lines, text
    return int(float(lines[0].split()[-1]))


def test_a_wrong_size_or_condition_in_a_raw_request(shared_fs: TestFs) -> None:
    assert shared_fs.ask("PUT", "/files/f?size=5", b"four").status == 400
    assert shared_fs.ask("PUT", "/files/f?nonsense=1", b"").status == 400
    assert shared_fs.ask("PUT", "/files/f", b"", headers={"If-None-Match": "*"}).status == 200
    refused = shared_fs.ask("PUT", "/files/f", b"", headers={"If-None-Match": "*"})
    assert refused.status == 409
    assert refused.json["error"]["details"]["revision"] == shared_fs.ask("GET", "/stat/f").json["revision"]
    assert shared_fs.ask("PUT", "/files/f", b"", headers={"If-Match": "x"}).status == 400
    long = "/x" * 40_000
    assert shared_fs.ask("POST", "/actions", {"action": "mkdir", "path": long}).status == 413
    deep = {"action": "mkdir", "path": "/x" * 5000, "parents": True}
    assert shared_fs.ask("POST", "/actions", deep).code == "too_large"
    assert shared_fs.ask("GET", "/stat/x").status == 404
    assert shared_fs.ask("POST", "/actions", {"action": "explode"}).status == 400
    assert shared_fs.ask("POST", "/actions", {"action": "mkdir", "path": "/d", "mod": "7"}).status == 400
    assert shared_fs.ask("GET", f"/stat/{quote('nicht/da')}").code == "not_found"
    assert shared_fs.ask("GET", "/list/?after=%21").status == 400


def test_acknowledged_writes_survive_a_killed_server(server: Server) -> None:
    fs = server.create()
    files = connect(fs, retry_for=0.2)
    done: list[bytes] = []

    def write() -> None:
        for at in range(10_000):
            try:
                put(files, b"/d/%d" % at, b"%d" % at * 1000)
            except Unavailable:
                return
            done.append(b"/d/%d" % at)

    writer = threading.Thread(target=write)
    writer.start()
    wait_for(lambda: len(done) >= 20, 30, "some writes")
    server.kill()
    writer.join(60)
    server.restart()
    for path in done:
        assert get(files, path) == path[3:] * 1000
    extra = {raw_path(one) for one in files.list(b"/d")} - set(done)
    assert len(extra) <= 1
