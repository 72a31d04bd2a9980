"""A path with a slash at its end asks for a directory, by every call and command, as on a local disk."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from support.cli import inside
from support.server import TestFs

from fsd.client.files import Files
from fsd.client.http import BytesBody, Http
from fsd.client.identity import Claim, data_identity
from fsd.host.seam import Host
from fsd.model.errors import FsdError

Remote = Callable[[Files], object]
Local = Callable[[], object]
DONE = 0


def read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def remote_read(path: bytes) -> Remote:
    return lambda files: b"".join(files.read(path))


# What is asked for; the same on a local disk; what both say. Where Linux says another of several,
# the third value is a pair: Linux's, ours.
CASES: dict[str, tuple[Remote, Local, int | tuple[int, int]]] = {
    "stat of a file": (lambda f: f.stat(b"/f/"), lambda: os.lstat("f/"), errno.ENOTDIR),
    "stat of a file, by /.": (lambda f: f.stat(b"/f/."), lambda: os.lstat("f/."), errno.ENOTDIR),
    "stat of a directory": (lambda f: f.stat(b"/d/"), lambda: os.lstat("d/"), DONE),
    "stat of a link to a file": (lambda f: f.stat(b"/lf/"), lambda: os.lstat("lf/"), errno.ENOTDIR),
    "stat of a link with a slash": (
        lambda f: f.stat(b"/lfs", follow=True),
        lambda: os.stat("lfs"),
        errno.ENOTDIR,
    ),
    "stat of nothing": (lambda f: f.stat(b"/n/"), lambda: os.lstat("n/"), errno.ENOENT),
    "read of a file": (remote_read(b"/f/"), lambda: read("f/"), errno.ENOTDIR),
    "read of a directory": (remote_read(b"/d/"), lambda: read("d/"), errno.EISDIR),
    "list of a file": (lambda f: list(f.list(b"/f/")), lambda: os.listdir("f/"), errno.ENOTDIR),
    "list of a link": (lambda f: list(f.list(b"/ld/")), lambda: os.listdir("ld/"), DONE),
    "chmod of a file": (lambda f: f.chmod(b"/f/", 0o600), lambda: os.chmod("f/", 0o600), errno.ENOTDIR),
    "utimens of a file": (
        lambda f: f.utimens(b"/f/", mtime_ns=1),
        lambda: os.utime("f/", ns=(1, 1)),
        errno.ENOTDIR,
    ),
    "setxattr of a file": (
        lambda f: f.setxattr(b"/f/", b"user.a", b"1"),
        lambda: os.setxattr("f/", "user.a", b"1"),
        errno.ENOTDIR,
    ),
    "mkdir": (lambda f: f.mkdir(b"/made/"), lambda: os.mkdir("made/"), DONE),
    "mkdir over a file": (lambda f: f.mkdir(b"/f/"), lambda: os.mkdir("f/"), errno.EEXIST),
    "remove of a file": (lambda f: f.remove(b"/f/"), lambda: os.unlink("f/"), errno.ENOTDIR),
    "remove of a directory": (lambda f: f.remove(b"/e/"), lambda: os.rmdir("e/"), DONE),
    "remove of a link": (lambda f: f.remove(b"/ld/"), lambda: os.unlink("ld/"), errno.ENOTDIR),
    "remove of a tree by a link": (
        lambda f: f.remove(b"/ld/", recursive=True),
        lambda: os.rmdir("ld/"),
        errno.ENOTDIR,
    ),
    "rename of a file": (lambda f: f.rename(b"/f/", b"/n"), lambda: os.rename("f/", "n"), errno.ENOTDIR),
    "rename of a file to": (lambda f: f.rename(b"/f", b"/n/"), lambda: os.rename("f", "n/"), errno.ENOTDIR),
    "rename of a file over": (lambda f: f.rename(b"/f", b"/g/"), lambda: os.rename("f", "g/"), errno.ENOTDIR),
    "rename of a directory": (lambda f: f.rename(b"/d/", b"/n/"), lambda: os.rename("d/", "n/"), DONE),
    "rename of a link": (lambda f: f.rename(b"/ld/", b"/n"), lambda: os.rename("ld/", "n"), errno.ENOTDIR),
    "rename over a link": (lambda f: f.rename(b"/d", b"/le/"), lambda: os.rename("d", "le/"), errno.ENOTDIR),
    "link of a file": (lambda f: f.hardlink(b"/f/", b"/n"), lambda: os.link("f/", "n"), errno.ENOTDIR),
    "link to": (lambda f: f.hardlink(b"/f", b"/n/"), lambda: os.link("f", "n/"), errno.ENOENT),
    "link over": (
        lambda f: f.hardlink(b"/f", b"/g/"),
        lambda: os.link("f", "g/"),
        (errno.EEXIST, errno.ENOTDIR),
    ),
    "symlink to": (lambda f: f.symlink(b"f", b"/n/"), lambda: os.symlink("f", "n/"), errno.ENOENT),
    "symlink over": (
        lambda f: f.symlink(b"x", b"/f/", overwrite=True),
        lambda: os.symlink("x", "f/"),
        (errno.EEXIST, errno.ENOTDIR),
    ),
    "write of nothing": (
        lambda f: f.write(b"/n/", BytesBody(b"x")),
        lambda: os.open("n/", os.O_CREAT | os.O_WRONLY),
        errno.EISDIR,
    ),
    "write of a file": (
        lambda f: f.write(b"/f/", BytesBody(b"x")),
        lambda: os.open("f/", os.O_CREAT | os.O_WRONLY),
        (errno.EISDIR, errno.ENOTDIR),
    ),
    "write by a link": (
        lambda f: f.write(b"/lns", BytesBody(b"x")),
        lambda: os.open("lns", os.O_CREAT | os.O_WRONLY),
        errno.EISDIR,
    ),
    "copy of a file": (lambda f: f.copy(b"/f/", b"/n"), lambda: read("f/"), errno.ENOTDIR),
    "copy to": (lambda f: f.copy(b"/f", b"/n/"), lambda: os.rename("f", "n/"), errno.ENOTDIR),
    "copy over": (lambda f: f.copy(b"/f", b"/g/"), lambda: os.rename("f", "g/"), errno.ENOTDIR),
}


@pytest.fixture
def files(shared_fs: TestFs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Files:
    """The same tree on the server and in the working directory."""
    found = Files(Http(data_identity(Claim(token=shared_fs.token)), Host()))
    monkeypatch.chdir(tmp_path)
    for name in ("f", "g"):
        found.write(b"/" + name.encode(), BytesBody(b"kept"))
        Path(name).write_bytes(b"kept")
    for name in ("d", "e"):
        found.mkdir(b"/" + name.encode())
        os.mkdir(name)
    found.write(b"/d/below", BytesBody(b"kept"))
    Path("d/below").write_bytes(b"kept")
    for name, target in (("lf", "f"), ("lfs", "f/"), ("ld", "d"), ("le", "e"), ("lns", "nothing/")):
        found.symlink(target.encode(), b"/" + name.encode())
        os.symlink(target, name)
    return found


def said_by(call: Callable[[], object]) -> int:
    try:
        call()
    except OSError as exc:
        return exc.errno or -1
    except FsdError as exc:
        return int(getattr(errno, str(exc.details["errno"])))
    return DONE


def test_as_a_local_disk(files: Files) -> None:
    """What is refused changes nothing, so all of it is tried on one tree; then what is done."""
    before = list(files.list(b"/", recursive=True))
    said, right = {}, {}
    for name, (remote, local, expected) in CASES.items():
        if expected != DONE:
            right[name] = expected if isinstance(expected, tuple) else (expected, expected)
            said[name] = (said_by(local), said_by(lambda call=remote: call(files)))  # type: ignore[misc]
    assert said == right
    assert list(files.list(b"/", recursive=True)) == before
    for remote, local, expected in CASES.values():
        if expected == DONE:
            remote(files)
            local()
    here = sorted(f"/{path}" for path in Path().rglob("*"))
    assert sorted(one["path"] for one in files.list(b"/", recursive=True)) == here
    assert {"/n", "/n/below"} < set(here)


REFUSED = (
    ("cat", "/f/"),
    ("cp", ":/f/", "copy"),
    ("cp", ":/f/", "-"),
    ("cp", "-r", ":/f/", "copy"),
    ("cp", ":/f/", ":/copy"),
    ("cp", "f/", ":/copy"),
    ("cp", "f", ":/g/"),
    ("cp", ":/f", "g/"),
    ("ls", "/f/"),
    ("stat", "/f/"),
    ("find", "/f/"),
    ("grep", "kept", "/f/"),
    ("mv", "/f/", "/n"),
    ("mv", "/f", "/n/"),
    ("rm", "/f/"),
    ("rm", "-r", "/ld/"),
    ("chmod", "600", "/f/"),
    ("ln", "/f/", "/n"),
)


def test_commands(files: Files, shared_fs: TestFs) -> None:
    before, here = list(files.list(b"/", recursive=True)), sorted(os.listdir())
    for argv in REFUSED:
        found = inside(*argv, env=shared_fs.env)
        assert (found.code, found.out) == (1, b""), (argv, found.out, found.err)
        assert found.error["details"]["errno"] == "ENOTDIR", (argv, found.err)
    assert (list(files.list(b"/", recursive=True)), sorted(os.listdir())) == (before, here)


def test_a_slash_means_what_it_meant_where_a_directory_is(files: Files, shared_fs: TestFs) -> None:
    for argv in (
        ("ls", "/ld/"),
        ("cp", "f", ":/d/"),
        ("cp", "f", ":/new/"),
        ("cp", "-r", ":/d/", "copied"),
        ("mkdir", "/made/"),
        ("mkdir", "-p", "/made/"),
        ("rm", "-r", "/made/"),
        ("stat", "/"),
    ):
        found = inside(*argv, env=shared_fs.env)
        assert found.code == 0, (argv, found.err)
    assert [raw["path"] for raw in files.list(b"/d")] == ["/d/below", "/d/f"]
    assert files.stat(b"/new/f")["kind"] == "file"
    assert sorted(os.listdir("copied")) == ["below", "f"]
