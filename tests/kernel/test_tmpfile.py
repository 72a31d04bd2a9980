"""O_TMPFILE: a file without a name, and one that gets its first name with linkat."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from support.sandbox import Sandbox, sandbox
from support.wait import wait_for

from fsd.model.limits import MIB

pytestmark = [pytest.mark.kernel, pytest.mark.timeout(120)]


def unnamed(top: Path, mode: int = 0o640, flags: int = 0) -> int:
    return os.open(top, os.O_TMPFILE | os.O_RDWR | flags, mode)


def name(fd: int, path: Path) -> None:
    # With a directory's descriptor, which an absolute path does not need, it is linkat(AT_SYMLINK_FOLLOW).
    os.link(f"/proc/self/fd/{fd}", path, src_dir_fd=fd, follow_symlinks=True)


def test_it_is_nobodys_until_it_has_a_name(box: Sandbox, tmp_path: Path) -> None:
    """As on the local disk, call by call."""
    told = []
    for top in (box.mountpoint, tmp_path):
        place = top / "dir"
        place.mkdir()
        before = os.stat(place)
        fd = unnamed(place, 0o6751)
        got: list[object] = [os.write(fd, b"some bytes"), os.fstat(fd).st_nlink, os.listdir(place)]
        got.append(os.fstat(fd).st_mode)
        got.append((os.stat(place).st_mtime_ns == before.st_mtime_ns, os.pread(fd, 100, 3)))
        os.fsync(fd)
        os.fchmod(fd, 0o600)
        os.setxattr(fd, "user.kind", b"temporary")
        os.utime(fd, ns=(5 * 10**17, 6 * 10**17))
        name(fd, place / "named")
        stat = os.stat(place / "named")
        got += [
            stat.st_nlink,
            stat.st_mode,
            stat.st_size,
            stat.st_mtime_ns,
            stat.st_ino == os.fstat(fd).st_ino,
        ]
        got.append(os.getxattr(place / "named", "user.kind"))
        os.pwrite(fd, b"more", 20)
        os.link(place / "named", place / "second")
        got += [(place / "second").read_bytes(), os.fstat(fd).st_nlink, sorted(os.listdir(place))]
        os.close(fd)
        exclusive = unnamed(place, flags=os.O_EXCL)
        with pytest.raises(FileNotFoundError):
            name(exclusive, place / "never")
        again = unnamed(place)
        with pytest.raises(FileExistsError):
            name(again, place / "named")
        os.close(exclusive)
        os.close(again)
        told.append(got)
    assert told[0] == told[1]
    box.drain()
    box.unmount()
    box.mount()
    assert (box.mountpoint / "dir/named").read_bytes() == b"some bytes" + bytes(10) + b"more"
    assert os.getxattr(box.mountpoint / "dir/named", "user.kind") == b"temporary"
    assert os.stat(box.mountpoint / "dir/named").st_nlink == 2


def test_another_mount_sees_the_name_with_all_its_bytes(box: Sandbox, tmp_path: Path) -> None:
    """From the first moment on it is there; an unnamed one is never seen, nor sent."""
    data = os.urandom(9 * MIB)
    kept = unnamed(box.mountpoint)
    os.write(kept, data)
    with sandbox(tmp_path / "two", box.fs) as other:
        for number in (0, 3):
            fd = unnamed(box.mountpoint)
            os.write(fd, data[: (number + 1) * 2 * MIB])
            name(fd, box.mountpoint / f"f{number}")
            os.fsync(fd)
            os.close(fd)
            there = other.mountpoint / f"f{number}"
            wait_for(there.exists, 30, "the name")
            assert there.stat().st_size == (number + 1) * 2 * MIB
            assert there.read_bytes() == data[: (number + 1) * 2 * MIB]
        assert sorted(os.listdir(other.mountpoint)) == ["f0", "f3"]
    os.close(kept)


def test_kills(box: Sandbox) -> None:
    """One that had no name goes with its daemon; one that had is there with what was written."""
    top, data = box.mountpoint, os.urandom(3 * MIB + 5)
    box.drain()
    assert os.listdir(top) == []  # known from here on, also without the server
    box.fs.server.stop()
    lost, kept, sparse = unnamed(top), unnamed(top), unnamed(top)
    for fd in (lost, kept):
        os.write(fd, data)
    os.ftruncate(sparse, 5 * MIB)
    os.pwrite(sparse, b"x", 2 * MIB)
    name(kept, top / "kept")
    name(sparse, top / "sparse")
    os.pwrite(kept, b"later", 10)
    box.kill()
    box.fs.server.start()
    box.detach()
    box.mount()
    assert sorted(os.listdir(top)) == ["kept", "sparse"]
    want = data[:10] + b"later" + data[15:]
    assert (top / "kept").read_bytes() == want
    assert (top / "sparse").read_bytes() == bytes(2 * MIB) + b"x" + bytes(3 * MIB - 1)
    box.drain()
    assert (top / "kept").read_bytes() == want


def test_tools(box: Sandbox) -> None:
    """Python's tempfile takes O_TMPFILE where it is."""
    script = """
        import os, tempfile
        with tempfile.TemporaryFile(dir=".") as file:
            file.write(b"abc" * 100000); file.flush()
            assert os.fstat(file.fileno()).st_nlink == 0 and os.listdir(".") == []
            file.seek(0); assert file.read() == b"abc" * 100000
    """
    done = subprocess.run(
        ["python3", "-c", "if True:" + script], cwd=box.mountpoint, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
