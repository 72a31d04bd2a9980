"""Users that are not root, and machines that no init prepared for them."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from support.cli import command
from support.sandbox import Sandbox
from support.server import Server
from support.usermount import in_a_users_mount

pytestmark = [pytest.mark.kernel, pytest.mark.root, pytest.mark.timeout(240)]

USER = 65534  # nobody: fusermount3 wants a user with a name


def test_without_mtab_a_user_is_told_what_to_do(trusted: Server, open_dir: Path) -> None:
    """A bare chroot has no /etc/mtab: fusermount3 mounts without it and cannot unmount."""
    etc = open_dir / "etc"
    prepare = f"cp -a /etc {etc}; rm {etc}/mtab; chmod 777 {etc}; mount --bind {etc} /etc"
    fsd = " ".join(command())
    script = f"""
        {fsd} doctor --output text | grep mtab
        echo kept > m/kept
        {fsd} unmount m --output text 2>&1; echo unmounted: $?; cat m/kept
        ln -s ../proc/self/mounts /etc/mtab
    """
    told = in_a_users_mount(open_dir, trusted.create(), USER, script, prepare=prepare)
    assert "there is no /etc/mtab" in told, told
    assert told.count("as root: ln -s ../proc/self/mounts /etc/mtab") == 2, told
    assert "until then `fsd drain` sends everything" in told, told
    assert "unmounted: 1\nkept\n" in told, told


def test_a_user_without_a_name_is_told_what_to_do(trusted: Server, open_dir: Path) -> None:
    """A container that was started with a number for a user: fusermount3 mounts for nobody without a name."""
    nameless = 54321
    work = open_dir / "work"
    work.mkdir()
    os.chown(work, nameless, nameless)
    fs, fsd = trusted.create(), " ".join(command())
    as_root = f"""
        mknod {open_dir}/fuse0 c 10 229; chmod 666 {open_dir}/fuse0; mount --bind {open_dir}/fuse0 /dev/fuse
        cd {work}; export HOME={work}
        exec setpriv --reuid={nameless} --regid={nameless} --clear-groups bash -uc '
            mkdir m; {fsd} mount m --output text; echo mount: $?; {fsd} doctor --output text; ls m'
    """
    done = subprocess.run(
        ["unshare", "-m", "bash", "-euc", as_root],
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
        env={**os.environ, **fs.env},
    )
    assert "mount: 2\n" in done.stdout, done
    assert "uid 54321 has no name here" in done.stderr, done
    assert "has no name here" in done.stdout, done
    assert "fsd mount: does not work\n" in done.stdout, done
    [line] = {one for one in done.stdout.splitlines() if ">>/etc/passwd" in one}
    told = line.partition("echo ")[2].partition(" >>")[0]
    assert f":{nameless}:{nameless}:" in told, line
    passwd = open_dir / "passwd"
    prepare = f"cp /etc/passwd {passwd}; echo {told} >>{passwd}; mount --bind {passwd} /etc/passwd"
    assert "kept" in in_a_users_mount(
        open_dir, fs, nameless, "echo kept > m/kept; cat m/kept", prepare=prepare
    )


def test_a_home_that_is_anothers_is_told_with_what_to_choose(trusted: Server, open_dir: Path) -> None:
    """`su` without `-`, a container with another USER: HOME may not even be looked into."""
    closed = open_dir / "closed"
    closed.mkdir(mode=0o700)
    fsd = " ".join(command())
    script = f"""
        mkdir m2; export HOME={closed}
        {fsd} mount m2 --output text 2>&1; echo mount: $?
        {fsd} run --path / --output text -- true 2>&1; echo run: $?
        {fsd} doctor --output text; echo doctor: $?
    """
    told = in_a_users_mount(open_dir, trusted.create(), USER, script)
    choose = "HOME or XDG_STATE_HOME to a directory of yours"
    mount, _, rest = told.partition("mount: 2\n")
    assert f"the state directory {closed}/" in mount, told
    assert f"choose --state-dir, or set {choose}" in mount, told
    run, _, doctor = rest.partition("run: 1\n")
    assert f"choose --work-dir, or set {choose}" in run, told
    assert f"{closed} is not writable: mounts can keep no state there" in doctor, told
    assert "doctor: 0\n" in doctor, told


def test_anothers_mount_is_not_told_as_dead(trusted: Server, boxes: Callable[..., Sandbox]) -> None:
    """Its record is not for others to read, and says nothing about whether its daemon lives."""
    box = boxes("box", trusted.create())
    box.mount()
    mine = {one["mount_path"]: one["state"] for one in box.json("mounts")["mounts"]}
    assert mine[str(box.mountpoint)] == "mounted"
    nobody = ["setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups", *command()]
    env = {"PATH": box.env["PATH"], "HOME": "/nonexistent"}
    argv = [*nobody, "mounts", "--output", "json"]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=60, check=True)
    (seen,) = [one for one in json.loads(done.stdout)["mounts"] if one["mount_path"] == str(box.mountpoint)]
    assert (seen["state"], seen["pid"]) == ("foreign", None)
