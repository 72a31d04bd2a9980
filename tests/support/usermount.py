"""A mount that somebody without root makes, through fusermount3, and works in."""

from __future__ import annotations

import os
import shlex
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.cli import command
from support.server import TestFs


@pytest.fixture
def open_dir() -> Iterator[Path]:
    """A directory that others may look into, which pytest's are not."""
    with tempfile.TemporaryDirectory() as made:
        os.chmod(made, 0o755)
        yield Path(made)


def in_a_users_mount(
    open_dir: Path,
    fs: TestFs,
    user: int,
    script: str,
    *options: str,
    timeout: float = 90,
    prepare: str = "",
) -> str:
    """What `script` said, run by `user` in a directory with the mount `m` that he made; unmounted at the end.
    The device is made everybody's in a mount namespace of its own: here only root may open it. `prepare` is
    run there as root before."""
    home = open_dir / "home"
    home.mkdir()
    os.chown(home, user, user)
    fsd = shlex.join(command())
    given = " ".join(f"{key}={shlex.quote(value)}" for key, value in fs.env.items())
    as_user = f"""
        cd {home}; mkdir m run; export {given} HOME={home} XDG_RUNTIME_DIR={home}/run
        {fsd} chmod 1777 / >&2
        {fsd} mount m --state-dir state --no-supervisor {shlex.join(options)} >&2 || exit
        ( {script} )
        {fsd} unmount m
    """
    as_root = f"""
        mknod {open_dir}/fuse c 10 229; chmod 666 {open_dir}/fuse; mount --bind {open_dir}/fuse /dev/fuse
        {prepare}
        exec setpriv --reuid={user} --regid={user} --clear-groups bash -uc {shlex.quote(as_user)}
    """
    done = subprocess.run(
        ["unshare", "-m", "bash", "-euc", as_root],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert '"unmounted"' in done.stdout, done.stdout[-5000:] + done.stderr[-2000:]
    return done.stdout
