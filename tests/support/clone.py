"""A copy of a sandbox: the same paths, processes and runtime files of its own, as from a platform's snapshot.

The copy's directory is mounted over the first one's in a mount and PID namespace (root), so path, mount id
and state directory are equal. Memory cannot be copied so; that half is `tests/property/test_clones.py`.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from support.cli import command
from support.processes import die_with_parent
from support.sandbox import Sandbox
from support.wait import wait_for

# Nothing of the first sandbox is seen: its mount is detached here (it stays there), /run/fsd is empty.
SETUP = (
    'umount -il "$2" 2>/dev/null; mkdir -p /run/fsd && mount -t tmpfs tmpfs /run/fsd &&'
    ' mount --bind "$1" "$2/.." && touch "$2/../ready" && exec sleep infinity'
)


@contextmanager
def frozen(box: Sandbox) -> Iterator[None]:
    """The sandbox's processes do nothing meanwhile: what is copied now is one moment's state."""
    box.signal(signal.SIGSTOP)
    try:
        yield
    finally:
        box.signal(signal.SIGCONT)


def copy_of(box: Sandbox, where: Path) -> Path:
    """Copy everything the sandbox has on disk; freeze it before."""
    where.mkdir()
    (where / "m").mkdir()
    for name in ("state", "run", "home"):
        subprocess.run(["cp", "-a", os.fspath(box.base / name), os.fspath(where / name)], check=True)
    return where


class Clone(Sandbox):
    """The second sandbox. `mountpoint` is the same path as the first one's; `inside` is how tests see it."""

    def __init__(self, first: Sandbox, copied: Path) -> None:
        self.base, self.fs = first.base, first.fs
        self.mountpoint, self.state = first.mountpoint, first.state
        self.options, self.env = list(first.options), dict(first.env)
        self.pids, self._began = [], {}
        self.copied = copied
        self.holder = subprocess.Popen(
            [
                *("unshare", "-m", "-p", "--fork", "--kill-child", "--mount-proc"),
                *("--propagation", "private"),
                *("bash", "-c", SETUP, "-", os.fspath(copied), os.fspath(self.mountpoint)),
            ],
            preexec_fn=die_with_parent,
        )
        wait_for(lambda: (copied / "ready").exists(), 30, "the copy's namespaces")
        children = Path(f"/proc/{self.holder.pid}/task/{self.holder.pid}/children").read_text().split()
        self.init = int(children[0])

    @property
    def inside(self) -> Path:
        """The mount point as seen from the test's process."""
        return Path(f"/proc/{self.init}/root{self.mountpoint}")

    def fsd(self, *argv: str, timeout: float = 60, check: bool = True) -> subprocess.CompletedProcess[str]:
        """A command in the copy."""
        full = ["nsenter", "-t", str(self.init), "-m", "-p", "--", *command(), *argv]
        done = subprocess.run(
            full, env=self.env, capture_output=True, text=True, timeout=timeout, check=False
        )
        if check and done.returncode:
            raise AssertionError(
                f"fsd {' '.join(argv)}: exit {done.returncode}\n{done.stderr}\n{self.logs()}"
            )
        return done

    def logs(self) -> str:
        return "\n".join(
            f"--- {path.name}\n" + path.read_text(errors="replace")[-3000:]
            for path in sorted((self.copied / "state").rglob("*.log"))
        )

    def _note(self, told: dict[str, object]) -> None:
        """Its pids are those of another namespace."""

    def close(self) -> None:
        """Everything in the namespaces ends with them."""
        self.holder.kill()
        self.holder.wait(60)
        wait_for(lambda: not Path(f"/proc/{self.init}").exists(), 30, "the copy to end")
        shutil.rmtree(self.copied)
