"""Copies in every direction against a real server: trees, names, streams, resumption, faults."""

from __future__ import annotations

import io
import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.filesclient import connect
from support.proxy import CUT_REQUEST, HTML_502, LOSE_REPLY, FaultProxy, on, truncate
from support.server import TestFs

from fsd.client import download as download_module
from fsd.client import upload as upload_module
from fsd.client.download import download
from fsd.client.files import Files, raw_path, raw_target
from fsd.client.http import BytesBody, Http
from fsd.client.identity import Claim, data_identity
from fsd.client.transfer import CopyOptions, Progress, copy_remote, download_stream
from fsd.client.upload import upload, upload_stream
from fsd.host.seam import Host
from fsd.model.errors import Conflict, FsdError, NotAuthenticated, NotFound, Unavailable, UsageError
from fsd.model.limits import STREAM_SPOOL

MIB = 1024 * 1024
TREE = CopyOptions(recursive=True)
ONE = CopyOptions()


@pytest.fixture
def here(tmp_path: Path) -> bytes:
    return os.fsencode(tmp_path)


def write(path: bytes, data: bytes, mode: int = 0o644, mtime_ns: int | None = None) -> None:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "wb") as out:
        out.write(data)
    os.chmod(path, mode)
    if mtime_ns is not None:
        os.utime(path, ns=(mtime_ns, mtime_ns))


def read(path: bytes) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def tree_of(top: bytes) -> dict[bytes, tuple[object, ...]]:
    """Everything a copy must keep, by path below `top`."""
    found: dict[bytes, tuple[object, ...]] = {}
    for directory, names, file_names in os.walk(top):
        for name in [*names, *file_names]:
            path = os.path.join(directory, name)
            there = os.lstat(path)
            below = os.path.relpath(path, top)
            if stat.S_ISLNK(there.st_mode):
                found[below] = ("link", os.readlink(path), there.st_mtime_ns)
            elif stat.S_ISDIR(there.st_mode):
                found[below] = ("dir", stat.S_IMODE(there.st_mode), there.st_mtime_ns)
            else:
                found[below] = ("file", stat.S_IMODE(there.st_mode), there.st_mtime_ns, read(path))
    return found


def make_tree(top: bytes) -> None:
    write(top + b"/README", b"readme\n", 0o644, 1_600_000_000_111_222_333)
    write(top + b"/bin/tool", b"#!/bin/sh\n", 0o755, 1_500_000_000_000_000_001)
    write(top + b"/deep/er/still/\xff\xfe name", b"bytes" * 1000, 0o600)
    write(top + b"/empty", b"")
    write(top + b"/big", os.urandom(3 * MIB + 5), 0o640)
    os.makedirs(top + b"/nothing/in/here")
    os.symlink(b"../README", top + b"/bin/link")
    os.symlink(b"/nowhere/at all", top + b"/broken")
    os.chmod(top + b"/deep", 0o700)
    os.utime(top + b"/nothing", ns=(10**18, 10**18 + 7))


def test_a_tree_goes_up_and_comes_down_equal(files: Files, here: bytes) -> None:
    make_tree(here + b"/src")
    up = upload(files, here + b"/src", b"/copy", TREE)
    assert up.ok and (up.files, up.symlinks) == (5, 2)
    down = download(files, b"/copy", here + b"/back", TREE)
    assert down.ok and down.files == 5 and down.bytes == up.bytes
    assert tree_of(here + b"/back") == tree_of(here + b"/src")


def test_a_tree_copied_within_the_server_is_equal(files: Files, here: bytes) -> None:
    make_tree(here + b"/src")
    upload(files, here + b"/src", b"/a", TREE)
    done = copy_remote(files, b"/a", b"/b/c", TREE)
    assert done.ok and done.files == 5
    download(files, b"/b/c", here + b"/back", TREE)
    assert tree_of(here + b"/back") == tree_of(here + b"/src")
    with pytest.raises(UsageError, match="into itself"):
        copy_remote(files, b"/a", b"/a/below", TREE)


def test_paths_through_symlinks_are_the_same_places(files: Files, here: bytes) -> None:
    make_tree(here + b"/src")
    files.mkdir(b"/real")
    files.symlink(b"real", b"/via")
    upload(files, here + b"/src", b"/via/t", TREE)
    done = upload(files, here + b"/src", b"/via/t", CopyOptions(recursive=True, resume=True))
    assert (done.files, done.skipped) == (0, 7)
    assert copy_remote(files, b"/via/t", b"/via/t2", TREE).ok
    download(files, b"/via/t2", here + b"/back", TREE)
    assert tree_of(here + b"/back") == tree_of(here + b"/src")
    with pytest.raises(UsageError, match="into itself"):
        copy_remote(files, b"/real/t", b"/via/t/below/deep", TREE)
    assert files.stat(b"/real/t2/README")["size_bytes"] == 7


def test_where_a_copy_goes(files: Files, here: bytes) -> None:
    write(here + b"/f", b"x")
    files.mkdir(b"/dir")
    for target, lands in (
        (b"/named", b"/named"),
        (b"/dir", b"/dir/f"),
        (b"/new/", b"/new/f"),
        (b"/a/b/c", b"/a/b/c"),
    ):
        assert upload(files, here + b"/f", target, ONE).target_path == lands.decode()
        assert files.stat(lands)["kind"] == "file"
    os.mkdir(here + b"/into")
    download(files, b"/dir/f", here + b"/into", ONE)
    download(files, b"/dir/f", here + b"/into/g", ONE)
    assert sorted(os.listdir(here + b"/into")) == [b"f", b"g"]
    make_tree(here + b"/src")
    for _ in range(2):  # the same command twice is the same copy
        upload(files, here + b"/src", b"/tree", TREE)
    assert b"/tree/README" in [raw_path(one) for one in files.list(b"/tree")]
    assert b"/tree/src" not in [raw_path(one) for one in files.list(b"/tree")]
    upload(files, here + b"/src", b"/tree/", TREE)
    assert files.stat(b"/tree/src/README")["size_bytes"] == 7
    with pytest.raises(UsageError, match="is a directory"):
        upload(files, here + b"/src", b"/x", ONE)
    with pytest.raises(UsageError, match="is a directory"):
        download(files, b"/tree", here + b"/x", ONE)
    with pytest.raises(NotFound):
        upload(files, here + b"/absent", b"/x", ONE)
    with pytest.raises(NotFound):
        download(files, b"/absent", here + b"/x", ONE)


def test_streams_in_and_out(files: Files) -> None:
    small, large = b"plan\n" * 5, os.urandom(STREAM_SPOOL + 3 * MIB + 1)
    for data, where in ((small, b"/small"), (large, b"/large"), (b"", b"/empty")):
        done = upload_stream(files, io.BytesIO(data), where, ONE)
        assert done.bytes == len(data)
        out = io.BytesIO()
        assert download_stream(files, where, out) == len(data) and out.getvalue() == data
    out = io.BytesIO()
    download_stream(files, b"/large", out, offset=MIB - 3, length=7)
    assert out.getvalue() == large[MIB - 3 : MIB + 4]
    upload_stream(files, io.BytesIO(b"more"), b"/small", CopyOptions(append=True))
    assert b"".join(files.read(b"/small")) == small + b"more"
    with pytest.raises(Conflict):
        upload_stream(files, io.BytesIO(b"x"), b"/small", CopyOptions(overwrite=False))


def test_a_device_and_a_fifo_are_streams(files: Files, here: bytes) -> None:
    os.mkfifo(here + b"/pipe")
    feeder = threading.Thread(target=write, args=(here + b"/pipe", b"through a pipe"))
    feeder.start()
    upload(files, here + b"/pipe", b"/f", ONE)
    feeder.join(60)
    assert b"".join(files.read(b"/f")) == b"through a pipe"
    assert download(files, b"/f", b"/dev/null", ONE).bytes == 14
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)


def test_what_is_no_file_is_told_and_left(files: Files, here: bytes) -> None:
    write(here + b"/src/f", b"x")
    os.mkfifo(here + b"/src/pipe")
    done = upload(files, here + b"/src", b"/t", TREE)
    assert done.ok and done.not_copied == [os.fsdecode(here) + "/src/pipe"] and done.files == 1


def test_existing_targets(files: Files, here: bytes) -> None:
    write(here + b"/f", b"new")
    write(here + b"/src/f", b"new")
    write(here + b"/src/g", b"g")
    upload(files, here + b"/f", b"/t/f", ONE)
    keep = CopyOptions(overwrite=False)
    with pytest.raises(Conflict):
        upload(files, here + b"/f", b"/t/f", keep)
    with pytest.raises(Conflict):
        download(files, b"/t/f", here + b"/f", keep)
    write(here + b"/src/f", b"newer")
    done = upload(files, here + b"/src", b"/t", CopyOptions(recursive=True, overwrite=False))
    assert done.ok and (done.files, done.skipped) == (1, 1)
    assert b"".join(files.read(b"/t/f")) == b"new"
    files.remove(b"/t/g")
    files.mkdir(b"/t/g")
    done = upload(files, here + b"/src", b"/t", TREE)
    assert [one.code for one in done.failed] == ["fs_error"] and "/src/g" in done.failed[0].path
    assert b"".join(files.read(b"/t/f")) == b"newer", "one failure does not stop the rest"


def test_a_directory_that_cannot_be_here_is_told_and_the_rest_comes(files: Files, here: bytes) -> None:
    """A file is in its place; another is removed while the copy runs, before it gets its mode and time."""
    make_tree(here + b"/up")
    upload(files, here + b"/up", b"/up", TREE)
    write(here + b"/down/deep", b"in the way")

    def on_progress(_progress: Progress) -> None:
        if os.path.isdir(here + b"/down/nothing/in/here"):
            os.rmdir(here + b"/down/nothing/in/here")

    done = download(files, b"/up", here + b"/down", TREE, on_progress)
    assert {one.path for one in done.failed} == {"/up/deep", "/up/nothing/in/here"}
    wanted = tree_of(here + b"/up")
    there = {path: what for path, what in wanted.items() if not path.startswith((b"deep", b"nothing/in"))}
    found = tree_of(here + b"/down")
    assert found.pop(b"nothing/in")[:2] == wanted[b"nothing/in"][:2]
    assert found.pop(b"deep")[-1] == b"in the way" and found == there


def test_a_target_that_is_a_symlink_is_written_through(files: Files, here: bytes) -> None:
    write(here + b"/real", b"old")
    os.symlink(b"real", here + b"/link")
    upload_stream(files, io.BytesIO(b"new"), b"/f", ONE)
    download(files, b"/f", here + b"/link", ONE)
    assert os.path.islink(here + b"/link") and read(here + b"/real") == b"new"


def test_resume_moves_only_what_is_missing(files: Files, here: bytes) -> None:
    make_tree(here + b"/src")
    upload(files, here + b"/src", b"/t", TREE)
    files.remove(b"/t/bin/tool")
    write(here + b"/src/README", b"changed\n")
    again = CopyOptions(recursive=True, resume=True)
    done = upload(files, here + b"/src", b"/t", again)
    assert done.ok and (done.files, done.skipped) == (2, 5)
    download(files, b"/t", here + b"/back", TREE)
    os.unlink(here + b"/back/empty")
    down = download(files, b"/t", here + b"/back", again)
    assert down.ok and (down.files, down.skipped) == (1, 6)
    assert tree_of(here + b"/back") == tree_of(here + b"/src")
    assert copy_remote(files, b"/t", b"/t2", TREE).files == 5
    assert copy_remote(files, b"/t", b"/t2", again).skipped == 7


def test_an_interrupted_copy_is_finished_by_resume(
    shared_fs: TestFs, files: Files, proxy: FaultProxy, here: bytes
) -> None:
    for at in range(60):
        write(here + b"/src/%d/f" % (at % 6) + b"%d" % at, os.urandom(2000))
    cut = connect(shared_fs, proxy.url, retry_for=0.1)
    seen = 0

    def progress(at: Progress) -> None:
        nonlocal seen
        seen = max(seen, at.files)
        if at.files == 20:
            proxy.always(HTML_502)

    with pytest.raises(Unavailable):
        upload(cut, here + b"/src", b"/t", TREE, progress)
    assert 20 <= seen < 60
    done = upload(files, here + b"/src", b"/t", CopyOptions(recursive=True, resume=True))
    assert done.ok and done.skipped >= 20 and done.files + done.skipped == 60
    download(files, b"/t", here + b"/back", TREE)
    assert tree_of(here + b"/back") == tree_of(here + b"/src")


def test_faults_on_the_way_are_repaired(shared_fs: TestFs, proxy: FaultProxy, here: bytes) -> None:
    files = connect(shared_fs, proxy.url)
    make_tree(here + b"/src")
    for fault in (LOSE_REPLY, CUT_REQUEST, HTML_502):
        proxy.next(fault, on("files"))
        proxy.next(fault, on("actions"))
    assert upload(files, here + b"/src", b"/t", TREE).ok
    for fault in (truncate(700), truncate(MIB), LOSE_REPLY):
        proxy.next(fault, on("files"))
    proxy.next(truncate(100), on("list"))
    assert download(files, b"/t", here + b"/back", TREE).ok
    assert proxy.pending() == 0
    assert tree_of(here + b"/back") == tree_of(here + b"/src")


def test_a_large_stream_that_breaks_changes_nothing(
    shared_fs: TestFs, files: Files, proxy: FaultProxy
) -> None:
    upload_stream(files, io.BytesIO(b"before"), b"/f", ONE)
    cut = connect(shared_fs, proxy.url)
    proxy.next(CUT_REQUEST, on("files"))
    with pytest.raises(Unavailable):
        upload_stream(cut, io.BytesIO(bytes(STREAM_SPOOL) + b"x"), b"/f", ONE)
    assert proxy.count("files") == 1, "a stream that cannot be read again is not sent again"
    assert b"".join(files.read(b"/f")) == b"before"


def test_a_source_that_fails_changes_nothing(files: Files) -> None:
    class Breaking(io.RawIOBase):
        left = STREAM_SPOOL + 2 * MIB

        def read(self, size: int = -1) -> bytes:
            if self.left <= 0:
                raise OSError(5, "the disk broke")
            self.left -= size
            return b"x" * size

    upload_stream(files, io.BytesIO(b"before"), b"/f", ONE)
    with pytest.raises(FsdError, match="Input/output"):
        upload_stream(files, Breaking(), b"/f", ONE)  # type: ignore[arg-type]
    assert b"".join(files.read(b"/f")) == b"before"


def test_a_download_that_fails_leaves_the_old_file(shared_fs: TestFs, proxy: FaultProxy, here: bytes) -> None:
    files = connect(shared_fs, proxy.url, retry_for=0.1)
    upload_stream(files, io.BytesIO(os.urandom(2 * MIB)), b"/f", ONE)
    write(here + b"/f", b"old")
    proxy.always(truncate(20), on("files"))
    with pytest.raises(Unavailable):
        download(files, b"/f", here + b"/f", ONE)
    assert os.listdir(here) == [b"f"] and read(here + b"/f") == b"old"


def test_a_file_that_changes_while_copied_is_told(files: Files, here: bytes) -> None:
    write(here + b"/log", b"x" * (2 * MIB))

    def grow(_at: Progress) -> None:
        with open(here + b"/log", "ab") as out:
            out.write(b"y" * 10)

    done = upload(files, here + b"/log", b"/log", ONE, grow)
    assert not done.ok and done.changed == [os.fsdecode(here) + "/log"]
    assert b"".join(files.read(b"/log"))[: 2 * MIB] == b"x" * (2 * MIB)

    quiet: list[int] = []

    def once(_at: Progress) -> None:
        if not quiet:
            quiet.append(1)
            grow(_at)

    assert upload(files, here + b"/log", b"/log", ONE, once).ok, "begun again, and then it held still"
    assert b"".join(files.read(b"/log")) == read(here + b"/log")


def test_conditions_travel(files: Files, here: bytes) -> None:
    write(here + b"/f", b"1")
    first = upload(files, here + b"/f", b"/f", ONE).revision
    second = upload(files, here + b"/f", b"/f", CopyOptions(if_match=first)).revision
    assert first is not None and second not in (None, first)
    with pytest.raises(Conflict):
        upload(files, here + b"/f", b"/f", CopyOptions(if_match=first))


def test_a_wrong_token_and_a_plain_endpoint(shared_fs: TestFs, here: bytes) -> None:
    write(here + b"/f", b"1")
    wrong = shared_fs.token[:-3] + ("AAA" if shared_fs.token[-3:] != "AAA" else "BBB")
    identity = data_identity(Claim(token=wrong))
    with pytest.raises(NotAuthenticated):
        upload(Files(Http(identity, Host())), here + b"/f", b"/f", ONE)
    with pytest.raises(UsageError, match="plain HTTP"):
        data_identity(Claim(token=shared_fs.token, endpoint="http://192.0.2.1:80"))


def test_a_sparse_file_takes_no_more_room_when_it_comes_back(files: Files, here: bytes) -> None:
    source, back = here + b"/sparse", here + b"/back"
    with open(source, "wb") as out:
        for at, data in ((5 * MIB + 7, b"middle"), (9 * MIB, bytes(100)), (20 * MIB, b"")):
            out.seek(at)
            out.write(data)
        out.truncate(20 * MIB + 1)
    upload(files, source, b"/sparse", ONE)
    download(files, b"/sparse", back, ONE)
    with open(source, "rb") as before, open(back, "rb") as after:
        assert before.read() == after.read()
    assert os.stat(back).st_blocks * 512 <= 4 * MIB
    # Zeros at the end alone: the size is right all the same.
    write(source, bytes(3 * MIB))
    upload(files, source, b"/zeros", ONE)
    download(files, b"/zeros", back, ONE)
    assert os.stat(back).st_size == 3 * MIB
    assert os.stat(back).st_blocks == 0


def names_of(top: bytes) -> list[list[bytes]]:
    """The files below `top` that have several names there, each by its names."""
    found: dict[int, list[bytes]] = {}
    for directory, _, names in os.walk(top):
        for name in names:
            path = os.path.join(directory, name)
            found.setdefault(os.lstat(path).st_ino, []).append(os.path.relpath(path, top))
    return sorted(sorted(names) for names in found.values() if len(names) > 1)


def test_names_of_one_file_stay_names_of_one_file(files: Files, here: bytes) -> None:
    top, back = here + b"/top", here + b"/back"
    write(top + b"/a/one", b"one", mtime_ns=10**18)
    write(top + b"/apart", b"one", mtime_ns=10**18)
    for name in (b"/a/two", b"/z", b"/b"):
        os.link(top + b"/a/one", top + name)
    os.symlink(b"one", top + b"/a/link")
    os.utime(top + b"/a/link", ns=(5, 7), follow_symlinks=False)
    want = [[b"a/one", b"a/two", b"b", b"z"]]
    assert names_of(top) == want
    done = upload(files, top, b"/links", TREE)
    assert (done.ok, done.files, done.bytes) == (True, 5, 6)  # what it is linked to is not sent again
    assert files.stat(b"/links/z")["nlink"] == 4
    got = download(files, b"/links", back, TREE)
    assert (got.ok, got.files, got.bytes) == (True, 5, 6)
    assert (tree_of(back), names_of(back)) == (tree_of(top), want)

    # Again, over what is there: the same; where a name is another file it becomes one of this.
    again = upload(files, top, b"/links", TREE)
    assert (again.ok, again.files + again.skipped) == (True, 5)
    assert files.stat(b"/links/z")["nlink"] == 4
    files.remove(b"/links/z")
    copy_remote(files, b"/links/apart", b"/links/z", ONE)
    os.unlink(back + b"/z")
    write(back + b"/z", b"another")
    assert upload(files, top, b"/links", TREE).ok
    assert files.stat(b"/links/z")["ino"] == files.stat(b"/links/b")["ino"]
    assert download(files, b"/links", back, TREE).ok
    assert (tree_of(back), names_of(back)) == (tree_of(top), want)
    kept = {raw_path(one) for one in files.list(b"/links", recursive=True)}
    assert not [path for path in kept if path.endswith(b".part")]


def test_a_file_whose_first_name_cannot_be_copied_is_copied_by_another(files: Files, here: bytes) -> None:
    top, back = here + b"/top", here + b"/back"
    write(top + b"/a", b"new")
    os.link(top + b"/a", top + b"/b")
    os.link(top + b"/a", top + b"/c")
    files.mkdir(b"/first/a", parents=True)  # in the way
    up = upload(files, top, b"/first", TREE)
    assert len(up.failed) == 1
    assert [b"".join(files.read(b"/first/" + name)) for name in (b"b", b"c")] == [b"new", b"new"]

    files.remove(b"/first/a", recursive=True)
    assert upload(files, top, b"/first", TREE).ok
    write(back + b"/a/in the way", b"x")
    write(back + b"/b", b"old")
    down = download(files, b"/first", back, TREE)
    assert len(down.failed) == 1
    assert [read(back + b"/" + name) for name in (b"b", b"c")] == [b"new", b"new"]


def once_before(patch: pytest.MonkeyPatch, module: object, name: str, do: Callable[[], object]) -> None:
    """Have the next call of a function do something else first."""
    true, left = getattr(module, name), [do]

    def first(*args: Any, **more: Any) -> Any:
        if left:
            left.pop()()
        return true(*args, **more)

    patch.setattr(module, name, first)


def test_a_name_that_became_another_file_meanwhile_shares_nothing_with_the_others(
    files: Files, here: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when an editor replaces the first name of a file between the listing and the copy."""
    top, back = here + b"/top", here + b"/back"
    write(top + b"/a", b"shared")
    os.link(top + b"/a", top + b"/b")
    write(here + b"/new", b"edited")
    listed, further = threading.Event(), upload_module._Tree._is_further_name

    def seen(self: Any, entry: Any, remote: bytes) -> bool:
        found = further(self, entry, remote)
        if found:
            listed.set()
        return found

    def replace() -> None:
        assert listed.wait(60)
        os.rename(here + b"/new", top + b"/a")

    with monkeypatch.context() as patch:
        patch.setattr(upload_module._Tree, "_is_further_name", seen)
        once_before(patch, upload_module, "put_file", replace)
        assert upload(files, top, b"/edited", TREE).ok
    assert [b"".join(files.read(b"/edited/" + name)) for name in (b"a", b"b")] == [b"edited", b"shared"]

    files.remove(b"/edited/a")
    files.hardlink(b"/edited/b", b"/edited/a")

    def edit() -> None:
        files.write(b"/edited/new", BytesBody(b"again"))
        files.rename(b"/edited/new", b"/edited/a")

    with monkeypatch.context() as patch:
        once_before(patch, download_module, "get_file", edit)
        assert download(files, b"/edited", back, TREE).ok
    assert [read(back + b"/" + name) for name in (b"a", b"b")] == [b"again", b"shared"]


def test_a_symlink_to_a_file_is_no_name_of_it(files: Files, here: bytes) -> None:
    top, back = here + b"/top", here + b"/back"
    write(top + b"/a", b"one")
    os.link(top + b"/a", top + b"/b")
    assert upload(files, top, b"/two-names", TREE).ok
    os.mkdir(back)
    os.symlink(b"a", back + b"/b")
    assert download(files, b"/two-names", back, TREE).ok
    assert names_of(back) == [[b"a", b"b"]]
    assert not os.path.islink(back + b"/b")


def test_a_copied_symlink_keeps_its_time(files: Files, here: bytes) -> None:
    files.symlink(b"there", b"/link")
    files.utimens(b"/link", mtime_ns=10**18 + 7, follow=False)
    for _ in range(2):  # new, and over itself
        assert copy_remote(files, b"/link", b"/copied", TREE).ok
        found = files.stat(b"/copied")
        assert (raw_target(found), found["mtime_ns"]) == (b"there", files.stat(b"/link")["mtime_ns"])
        files.utimens(b"/copied", mtime_ns=1, follow=False)
