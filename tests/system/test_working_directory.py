"""Who works in a directory keeps its path: the kernel is not made to forget the name of one that exists."""

from __future__ import annotations

import os
import subprocess
import threading
from pathlib import Path

import pytest
from support.proxy import BLACK_HOLE, FaultProxy
from support.sandbox import sandbox
from support.server import Server
from support.wait import wait_for

from fsd.model.limits import ABSENT_MAX

pytestmark = [pytest.mark.kernel, pytest.mark.timeout(240)]


def where(worker: subprocess.Popen[bytes]) -> str:
    return os.readlink(f"/proc/{worker.pid}/cwd")


def test_a_new_directory_keeps_its_path(trusted: Server, tmp_path: Path) -> None:
    """Its name was absent once. More absent names than are remembered, and then a silent server, make the
    kernel forget what was absent: not what is there by now."""
    fs = trusted.create()
    with FaultProxy(trusted.url) as proxy, sandbox(tmp_path, fs, endpoint=proxy.url) as box:
        workers = []
        try:
            for name in ("first", "second"):
                made = box.mountpoint / name
                assert not made.exists()
                made.mkdir()
                workers.append(subprocess.Popen(["sleep", "100"], cwd=made))
                if name == "first":
                    for number in range(ABSENT_MAX + 10):
                        assert not (box.mountpoint / f"absent{number}").exists()
            proxy.always(BLACK_HOLE)
            proxy.cut_all()
            wait_for(lambda: "silent for" in box.logs(), 30, "the silence to be noticed")
            threading.Event().wait(1)  # far more than forgetting takes; a look would bring the names back
            assert [where(worker) for worker in workers] == [
                str(box.mountpoint / name) for name in ("first", "second")
            ]
        finally:
            for worker in workers:
                worker.kill()
                worker.wait(60)
