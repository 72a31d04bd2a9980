"""A directory of very many names through a mount that has not listed it: names at once, listings in bounded
memory."""

from __future__ import annotations

import errno
import itertools
import os
import stat
from pathlib import Path

import pytest
from support.sandbox import Sandbox, sandbox
from support.server import Server, TestFs

from fsd.host.seam import Host
from fsd.model.attrs import ROOT_INO, make_ino
from fsd.model.limits import COMMIT_OPS_MAX, LISTING_MAX
from fsd.model.ops import CREATE, Create, Op
from fsd.service.access import ADMIN_GRANT
from fsd.service.open import ServiceOptions, open_service
from fsd.service.sessions import SessionInfo
from fsd.wire.messages import make_commit

pytestmark = [pytest.mark.kernel, pytest.mark.long, pytest.mark.timeout(600)]

COUNT = 3 * LISTING_MAX


def fill(server: Server, fs: TestFs, count: int) -> None:
    """A directory `large` of `count` empty files, committed on the stopped server's data in bulk."""
    service = open_service(ServiceOptions(server.data_dir, None), Host())
    try:
        ref = service.filesystems.get(fs.id)
        start = service.sessions.start(ref, SessionInfo("fill", "fill", "/mnt", "/", False, "test"))
        top, time = make_ino(start.session, 1), 1_700_000_000_000_000_000
        ops: list[Op] = [
            Create(1, CREATE, ROOT_INO, b"large", top, stat.S_IFDIR | 0o755, 0, 0, 0, None, time)
        ]
        for number in range(count):
            ino, name = make_ino(start.session, number + 2), b"n%07d" % number
            ops.append(Create(number + 2, CREATE, top, name, ino, stat.S_IFREG | 0o644, 0, 0, 0, None, time))
        ticket = start.ticket
        for at in range(0, len(ops), COMMIT_OPS_MAX):
            some = ops[at : at + COMMIT_OPS_MAX]
            commit = make_commit(start.session, ticket, some, (0, 0, 0), [], None, 0)
            answer = service.commits.commit(ref, commit, ADMIN_GRANT)
            assert not answer.outcomes
            ticket = answer.ticket
    finally:
        service.close()


def memory(box: Sandbox) -> int:
    """The daemon's peak, MiB."""
    for line in Path(f"/proc/{box.daemon}/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) // 1024
    raise AssertionError("no VmHWM")


def test_a_directory_of_very_many_names(tmp_path: Path) -> None:
    server = Server(tmp_path / "server")
    server.start()
    fs = server.create()
    server.stop()
    fill(server, fs, COUNT)
    server.start()
    try:
        with sandbox(tmp_path / "box", fs) as box:
            large = box.mountpoint / "large"
            before = memory(box)
            for number in range(0, COUNT, COUNT // 300):
                assert stat.S_ISREG(os.stat(large / f"n{number:07d}").st_mode)
                with pytest.raises(FileNotFoundError):
                    os.stat(large / f"absent{number}")
            (large / "new").write_text("new")
            os.unlink(large / "n0000007")
            assert box.status()["inodes"] < 1000, "names were loaded that nobody asked for"

            with os.scandir(large) as listing:
                names = [entry.name for entry in listing]
            assert len(names) == len(set(names)) == COUNT
            assert set(names) == {f"n{number:07d}" for number in range(COUNT) if number != 7} | {"new"}
            # Two at once, the second a little behind: what one has passed the other still has before it.
            with os.scandir(large) as first, os.scandir(large) as second:
                ahead = [entry.name for entry in itertools.islice(first, 11_000)]
                pairs = list(itertools.zip_longest(first, second))
            assert len(ahead) + sum(one is not None for one, _ in pairs) == COUNT
            assert {entry.name for _, entry in pairs if entry is not None} == set(names)
            assert memory(box) - before < 350, "a listing took memory for all names at once"
            with pytest.raises(OSError, match="not empty") as caught:
                os.rmdir(large)
            assert caught.value.errno == errno.ENOTEMPTY
            box.drain()
    finally:
        server.end()
