"""fsd is installed anew below a mount: the daemon that is started when one was killed is of one version."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from support.sandbox import Sandbox
from support.server import TestFs

import fsd

pytestmark = [pytest.mark.kernel, pytest.mark.timeout(240)]

# What only the new version has, and needs of itself in modules the supervisor has loaded and has not.
NEWER = {
    "model/errors.py": "\n\nclass Newer(FsdError):\n    pass\n",
    "vfs/open.py": "\n\nfrom fsd.model.errors import Newer as Newer\n",
    "kernel/runtime.py": "\n\nRuntimeDir.newer = True\n",
    "kernel/daemon.py": "\n\nassert runtime.RuntimeDir.newer\n",
}


def test_a_daemon_started_again_is_of_what_is_installed_now(
    boxes: Callable[..., Sandbox], shared_fs: TestFs, tmp_path: Path
) -> None:
    installed = tmp_path / "lib" / "fsd"
    shutil.copytree(Path(fsd.__file__).parent, installed)
    box = boxes("box", shared_fs, "--io-timeout", "77s", supervised=True)
    box.env |= {"PYTHONPATH": os.fspath(installed.parent), "PYTHONSAFEPATH": "1"}
    box.mount()
    assert os.fspath(installed) in Path(f"/proc/{box.daemon}/maps").read_text()
    (box.mountpoint / "before").write_bytes(b"before")
    for name, more in NEWER.items():
        # As pip does: another file in the place of the old one.
        old = installed / name
        new = old.with_suffix(".new")
        new.write_text(old.read_text() + more)
        new.replace(old)
    killed = box.daemon
    os.kill(killed, signal.SIGKILL)
    box.wait_remounted(killed)
    assert (box.mountpoint / "before").read_bytes() == b"before"
    (box.mountpoint / "after").write_bytes(b"after")
    # And again: what is loaded in the child says nothing of the supervisor.
    killed = box.daemon
    os.kill(killed, signal.SIGKILL)
    box.wait_remounted(killed)
    assert (box.mountpoint / "after").read_bytes() == b"after"
    assert box.unmount()["status"] == "unmounted"
