"""PATH begins with a directory of the mount, as where a virtual environment lies in it and is activated.

Whoever starts a program by its name alone then asks the mount for it, and the daemon that does so waits for
itself: for good, where Python's `subprocess` waits in vfork(2) with the interpreter's lock held.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest
from support.sandbox import Sandbox
from support.server import Server, TestFs
from support.usermount import in_a_users_mount

USER = 65534  # nobody: fusermount3 wants a user with a name

pytestmark = pytest.mark.kernel


@pytest.mark.root
def test_as_root(trusted: Server, boxes: Callable[..., Sandbox]) -> None:
    """The mount's line in util-linux's table is made by the daemon, through mount(8)."""
    box = boxes("path", trusted.create(), supervised=True)
    box.env["PATH"] = f"{box.mountpoint}/bin:{box.env['PATH']}"
    box.mount()
    (box.mountpoint / "f").write_bytes(b"x")
    killed = box.daemon
    os.kill(killed, signal.SIGKILL)
    box.wait_remounted(killed)
    assert (box.mountpoint / "f").read_bytes() == b"x"
    assert box.unmount()["status"] == "unmounted"


@dataclass
class With:
    """A filesystem's two values, and more of an environment."""

    env: dict[str, str]


@pytest.mark.root
def test_as_a_user(trusted: Server, open_dir: Path) -> None:
    """It is unmounted by the daemon, through fusermount3."""
    inside = open_dir / "home/m/bin"
    env = {**trusted.create().env, "PATH": f"{inside}:{os.environ['PATH']}"}
    said = in_a_users_mount(
        open_dir, cast(TestFs, cast(Any, With(env))), USER, "mkdir m/bin; echo x >m/bin/f; cat m/bin/f"
    )
    assert said.startswith("x\n")
    assert '"unmounted"' in said
