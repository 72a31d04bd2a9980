"""POSIX ACLs with `--acl`: what setfacl and getfacl do on a local disk, enforced, inherited, and kept."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.cli import command
from support.sandbox import Sandbox
from support.server import Server
from support.usermount import in_a_users_mount
from support.wait import wait_for

pytestmark = [pytest.mark.kernel, pytest.mark.timeout(240)]

BOB, TEAM, STRANGER = 23001, 23002, 23003
USER = 65534  # nobody: fusermount3 wants a user with a name

# Every rule once, on whatever filesystem this is: what is printed must be the same.
ALL = "all() { find $1 ! -type l | sort | xargs getfacl -n; }\n"
DAY = f"""{ALL}
    umask 022
    mkdir top; cd top
    echo x > f; chmod 640 f
    setfacl -m u:{BOB}:rw f; getfacl -n f; stat -c '%A %a' f
    chmod 600 f; getfacl -n f
    chmod g+r f; getfacl -n f
    setfacl -m m::rwx f; stat -c %a f
    setfacl -m u::r f; stat -c %a f
    setfacl -x u:{BOB} f; getfacl -n f
    setfacl -b f; getfacl -n f; stat -c '%A %a' f
    setfacl -m u:{BOB}:r-x,g:{TEAM}:rwx,g::r f; getfacl -n f
    setfacl -b f; stat -c %a f

    mkdir d; setfacl -m d:u:{BOB}:rwx,d:g::r-x,d:o::- d; getfacl -n d; stat -c '%A %a' d
    echo in > d/file; getfacl -n d/file; stat -c %a d/file
    (umask 077; echo in > d/private); getfacl -n d/private
    mkdir d/sub; getfacl -n d/sub
    (umask 077; mkdir -m 700 d/sub/tight); getfacl -n d/sub/tight
    mkfifo d/pipe; getfacl -n d/pipe
    ln -s file d/link; stat -c '%A %a' d/link
    mkdir m; setfacl -m d:u::rwx,d:g::rx,d:o::- m
    (umask 0; echo in > m/file; mkdir m/dir); getfacl -n m/file m/dir
    mkdir s; chgrp {TEAM} s; chmod 2775 s; setfacl -m d:g:{TEAM}:rwx s
    mkdir s/in; touch s/in/file; getfacl -n s/in s/in/file; stat -c '%a %g' s/in s/in/file
    setfacl -k s; getfacl -n s; mkdir s/plain; stat -c %a s/plain
    setfacl -m d:u:{BOB}:rw f 2>&1; echo $?
    setfacl -m u:{BOB}:r d/link; getfacl -n d/file
    setfacl -m u:{STRANGER}:r d/pipe; getfacl -n d/pipe
    cp -a d copied; all copied
    getfacl -Rn d > ../all; setfacl -Rb d; setfacl --restore=../all; all d
    mkdir r; rsync -aA d/ r/; all r
    ls -l d | tail -n +2 | cut -c 1-11
    mkdir e; for n in $(seq 100); do setfacl -m u:$((30000 + n)):r e; done; getfacl -n e | wc -l
"""


def sh(directory: Path, script: str, uid: int = 0, *groups: int) -> str:
    """What `script` says in `directory`, with its errors; as another user where `uid` is given."""
    by = ["setpriv", f"--reuid={uid}", f"--regid={uid}"]
    by.append(f"--groups={','.join(map(str, groups))}" if groups else "--clear-groups")
    done = subprocess.run(
        [*(by if uid else ()), "bash", "-uc", script],
        cwd=directory, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    return done.stdout + done.stderr


@pytest.fixture
def boxes(trusted: Server, tmp_path: Path) -> Iterator[Callable[..., Sandbox]]:
    fs = trusted.create()
    made: list[Sandbox] = []

    def box(*options: str) -> Sandbox:
        made.append(Sandbox(tmp_path / f"box{len(made)}", fs, *options))
        made[-1].mount()
        return made[-1]

    yield box
    for one in made:
        one.close()


def facl(box: Sandbox, name: str) -> str:
    return sh(box.mountpoint, f"getfacl -n {name}; stat -c %a {name}")


def test_a_day_with_acls_is_as_on_a_local_disk(boxes: Callable[..., Sandbox], tmp_path: Path) -> None:
    local = tmp_path / "local"
    local.mkdir()
    box = boxes("--acl")
    here, there = sh(local, DAY), sh(box.mountpoint, DAY)
    assert "Operation not supported" not in there
    assert there == here
    told = sh(box.mountpoint, ALL + "all top")
    assert sh(local, ALL + "all top") == told

    # What the server has is the same, and another place mounts it so.
    box.unmount()
    other = boxes("--acl")
    assert sh(other.mountpoint, ALL + "all top") == told

    # So does an archive of it.
    archive, kept = tmp_path / "top.tar", other.json("checkpoint", "create")["checkpoint_id"]
    with archive.open("wb") as file:
        full = [*command(), "checkpoint", "export", kept, "/top"]
        subprocess.run(full, env=other.env, stdout=file, timeout=60, check=True)
    (tmp_path / "out").mkdir()
    assert sh(tmp_path / "out", "tar --acls --numeric-owner -xf ../top.tar") == ""
    assert sh(tmp_path / "out", ALL + "all top") == told

    # What is no ACL is taken from nobody.
    action = {"action": "setxattr", "path": "/top/f", "name": "system.posix_acl_access", "value_b64": "AAAA"}
    reply = other.fs.ask("POST", "/actions", action)
    assert b"EINVAL" in reply.body


@pytest.mark.root
def test_the_kernel_enforces_them_and_other_mounts_hear_of_changes(boxes: Callable[..., Sandbox]) -> None:
    one, two = boxes("--acl"), boxes("--acl")
    sh(one.mountpoint, "chmod 755 .; echo secret > f; chmod 600 f; mkdir -m 700 d; echo x > d/x")
    reading = "cat f 2>&1; cat d/x 2>&1"
    denied = "cat: f: Permission denied\ncat: d/x: Permission denied\n"
    assert sh(one.mountpoint, reading, BOB) == denied
    assert sh(one.mountpoint, f"setfacl -m u:{BOB}:r f; setfacl -m g:{TEAM}:rx d") == ""
    assert sh(one.mountpoint, reading, BOB, TEAM) == "secret\nx\n"
    assert sh(one.mountpoint, reading, BOB) == "secret\ncat: d/x: Permission denied\n"
    assert sh(one.mountpoint, reading, STRANGER) == denied
    assert sh(one.mountpoint, "echo no >> f", BOB).endswith("Permission denied\n")

    def seen(wanted: str, *who: int) -> Callable[[], bool]:
        return lambda: sh(two.mountpoint, reading, *who) == wanted

    wait_for(seen("secret\nx\n", BOB, TEAM), 30, "the ACLs to reach the other mount")
    assert sh(two.mountpoint, f"setfacl -x u:{BOB} f; chmod g-rx d") == ""
    began = time.monotonic()
    wait_for(lambda: sh(one.mountpoint, reading, BOB, TEAM) == denied, 30, "what was taken back")
    assert time.monotonic() - began < 30  # the kernel would keep them for a minute
    assert facl(one, "f") == facl(two, "f")

    # Who is neither root nor in the file's group sets an ACL: the set-group-ID bit goes, as with chmod.
    sh(one.mountpoint, f"touch g; chown {BOB}:{TEAM} g; chmod 2775 g")
    sh(one.mountpoint, f"setfacl -m u:{STRANGER}:r g", BOB)
    assert sh(one.mountpoint, "stat -c %a g") == "775\n"
    assert "not permitted" in sh(one.mountpoint, "setfacl -b g", STRANGER)


def test_a_mount_without_acls_keeps_them_and_its_chmod_counts(boxes: Callable[..., Sandbox]) -> None:
    with_acl, without = boxes("--acl"), boxes()
    sh(with_acl.mountpoint, f"echo x > f; setfacl -m u:{BOB}:rw f; setfattr -n user.k -v v f")
    with_acl.drain()
    wait_for(lambda: (without.mountpoint / "f").exists(), 30, "the file")
    assert sh(without.mountpoint, f"setfacl -m u:{BOB}:r f").endswith("Operation not supported\n")
    assert os.listxattr(without.mountpoint / "f") == ["user.k"]
    sh(without.mountpoint, "mv f g; echo y >> g; chmod 640 g")
    without.drain()
    wait_for(lambda: (with_acl.mountpoint / "g").exists(), 30, "the new name")
    wait_for(lambda: "mask::r--" in facl(with_acl, "g"), 30, "the mask")
    told = facl(with_acl, "g")
    assert f"user:{BOB}:rw-" in told
    assert told.endswith("640\n")


@pytest.mark.parametrize("loop", ["mini", pytest.param("trio", marks=pytest.mark.long)])
def test_inheritance_ignores_the_umask_after_a_killed_daemon_too(
    boxes: Callable[..., Sandbox], trusted: Server, tmp_path: Path, loop: str
) -> None:
    box = Sandbox(tmp_path / "killed", trusted.create(), "--acl", "--loop", loop, supervised=True)
    try:
        box.mount()
        top = box.mountpoint
        sh(top, f"mkdir d; setfacl -m d:u:{BOB}:rw,d:g::r d; umask 077; touch d/before plain")
        before = facl(box, "d/before")
        assert before.endswith("664\n")
        assert f"user:{BOB}:rw-" in before
        killed = box.daemon
        os.kill(killed, 9)
        box.wait_remounted(killed)
        assert facl(box, "d/before") == before
        sh(top, "umask 077; touch d/after plain2")
        assert facl(box, "d/after") == before.replace("before", "after")
        assert sh(top, "stat -c %a plain plain2") == "600\n600\n"
        assert box.unmount()["status"] == "unmounted"
    finally:
        box.close()


@pytest.mark.root
@pytest.mark.long
def test_a_user_mounts_with_acls(trusted: Server, open_dir: Path) -> None:
    """Without root it is fusermount3 that mounts; the umask is left to us all the same."""
    script = f"""
        cd m; mkdir d; setfacl -m d:g:{TEAM}:rw d; umask 077; touch d/f plain
        getfacl -n d/f; stat -c %a d/f plain
    """
    told = in_a_users_mount(open_dir, trusted.create(), USER, script, "--acl")
    assert f"group:{TEAM}:rw-" in told, told
    assert "\n664\n600\n" in told, told
