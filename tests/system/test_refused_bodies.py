"""What a refused request brought along goes when it was answered, not when the collector comes: a mount that
is told to try again does so with all its megabytes."""

from __future__ import annotations

import os
import re
from pathlib import Path

from support.server import Server

from fsd.model.limits import MIB
from fsd.wire.frame import make_blob
from fsd.wire.messages import commit_pieces, make_commit

NOBODY = 999_999  # no session has this number


def memory(server: Server) -> int:
    found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{server.pid}/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def test_refused_commits_leave_nothing_in_memory(server: Server) -> None:
    fs = server.create()
    blobs = [make_blob(os.urandom(MIB)) for _ in range(7)]
    bodies = {  # refused by its transaction, and while it is read
        404: b"".join(commit_pieces(make_commit(NOBODY, b"t" * 16, [], (0, 0, 0), blobs[:3]))),
        413: b"".join(commit_pieces(make_commit(NOBODY, b"t" * 16, [], (0, 0, 0), blobs))),
    }

    def refused(times: int) -> None:
        for _ in range(times):
            for status, body in bodies.items():
                got = fs.ask("POST", "/commits", body)
                assert got.status == status, got.body

    refused(2)
    before = memory(server)
    refused(12)  # 120 MiB
    assert memory(server) - before < 60 * MIB
