"""mount(8) and umount(8) through the helpers: fstab options, honest ends, clear refusals."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.sandbox import Sandbox
from support.server import Server

from fsd.cli.table import load

pytestmark = [pytest.mark.kernel, pytest.mark.timeout(240)]

SCRIPTS = Path(__file__).parent.parent.parent / "scripts"


@pytest.fixture
def box(server: Server, tmp_path: Path) -> Iterator[Sandbox]:
    made = Sandbox(tmp_path / "box", server.create())
    made.state.mkdir()
    yield made
    os.kill(server.pid, signal.SIGCONT)
    while made.mountpoint.is_mount():
        made.fsd("unmount", os.fspath(made.mountpoint), "--lazy", "--timeout", "2s", check=False)
        made.detach()
    made.close()


# Flags of `fsd mount` that make no sense in an fstab.
NOT_IN_FSTAB = {
    "mount-path",
    "foreground",
    "writeback",
    "output",
    "query",
    "help",
    "version",
    "fs-token",
    "dry-run",
}


def test_every_flag_of_mount_is_an_option(tmp_path: Path) -> None:
    """The README says so. What the program is called with is written down by one in its place."""
    program, log, place = tmp_path / "fsd", tmp_path / "log", str(tmp_path / "place")
    program.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" > {shlex.quote(str(log))}\n')
    program.chmod(0o755)
    found = load().find(["mount"])
    assert found is not None
    options, expected = ["keep=one"], ["--keep", "one,two"]
    for flag in found[0].all_flags(long=False):
        name = flag.names[0][2:] if flag.names else ""
        if not name or name in {"remote-path", "keep"} | NOT_IN_FSTAB:
            continue
        options.append(name if flag.convert is None else f"{name}=a*b")
        expected += [f"--{name}"] if flag.convert is None else [f"--{name}", "a*b"]
    assert len(options) > 20
    options.append("keep=two")
    helper = [
        "sh",
        str(SCRIPTS / "mount.fuse.fsd"),
        str(program),
        "fsd:/tasks",
        place,
        "-o",
        ",".join(options),
    ]
    # By a program that is not `mount -a` and has an option of that name.
    caller = ["sh", "-c", 'shift; "$@"; exit $?', "sh", "--all"]
    subprocess.run([*caller, *helper], check=True, timeout=30, cwd="/")
    called = log.read_text().splitlines()
    assert called[:6] == ["mount", place, "--output", "text", "--remote-path", "/tasks"]
    assert sorted(called[6:]) == sorted(expected)


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """`fsd` as one path, as the wrapper in /sbin passes it."""
    path = tmp_path / "fsd"
    path.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m fsd "$@"\n')
    path.chmod(0o755)
    return path


def call(box: Sandbox, *command: str) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in box.env.items() if name != "FSD_TOKEN"}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=40, check=False)


def token_file(box: Sandbox) -> Path:
    path = box.base / "token"
    path.write_text(box.fs.token)
    path.chmod(0o600)
    return path


def test_the_helpers_themselves(box: Sandbox, program: Path, tmp_path: Path) -> None:
    mount = tmp_path / "mount"  # by its name to the system
    mount.symlink_to("/bin/sh")
    place = os.fspath(box.mountpoint)
    options = f"rw,_netdev,noauto,acl,x-systemd.automount,token-file={token_file(box)},state-dir={box.state}"
    mounted = call(box, str(SCRIPTS / "mount.fuse.fsd"), str(program), "fsd", place, "-s", "-o", options)
    assert (mounted.returncode, mounted.stdout) == (0, ""), mounted.stderr
    assert box.mountpoint.is_mount()
    for all_of_them, code in ((["-a"], 0), (["-Fav"], 0), (["-oatime"], 7), ([], 7)):
        parent = [str(mount), "-c", f'shift {len(all_of_them)}; "$@"; exit $?', "mount", *all_of_them]
        helper = [str(SCRIPTS / "mount.fuse.fsd"), str(program), "fsd", place, "-o", options]
        assert call(box, *parent, *helper).returncode == code, "mount -a leaves it alone"
    (box.mountpoint / "sub").mkdir()
    (box.mountpoint / "sub" / "file").write_bytes(b"x")
    subprocess.run(["setfacl", "-m", "u:23001:r", box.mountpoint / "sub" / "file"], check=True, timeout=50)
    with open(box.mountpoint / "sub" / "file", "rb"):
        busy = call(box, str(SCRIPTS / "umount.fuse.fsd"), str(program), place)
        assert busy.returncode == 7
        assert str(os.getpid()) in busy.stderr
        assert box.mountpoint.is_mount()
    gone = call(box, str(SCRIPTS / "umount.fuse.fsd"), str(program), place, "-v")
    assert (gone.returncode, gone.stdout) == (0, ""), gone.stderr
    assert not box.mountpoint.is_mount()
    again = call(
        box, str(SCRIPTS / "mount.fuse.fsd"), str(program), "fsd:/sub", place, "-n", f"-oro,{options}"
    )
    assert again.returncode == 0, again.stderr
    assert os.listdir(box.mountpoint) == ["file"]
    with pytest.raises(OSError, match="Read-only"):
        (box.mountpoint / "x").touch()
    lazy = call(box, str(SCRIPTS / "umount.fuse.fsd"), str(program), place, "-l")
    assert lazy.returncode == 0, lazy.stderr


NEWER_MOUNT = """#!/bin/sh
[ "${LIBMOUNT_FORCE_MOUNT2-}" = always ] || { echo "mount: fsconfig() failed" >&2; exit 32; }
exec "$REAL_MOUNT" "$@"
"""


@pytest.mark.root
def test_remount(box: Sandbox, program: Path, tmp_path: Path) -> None:
    """As mount(8) calls the helper: with what fstab or the kernel's table says beside it. From util-linux
    2.39 on it remounts no FUSE by itself."""
    newer, real = tmp_path / "bin" / "mount", shutil.which("mount", path=box.env["PATH"])
    assert real
    newer.parent.mkdir()
    newer.write_text(NEWER_MOUNT)
    newer.chmod(0o755)
    box.env |= {"PATH": f"{newer.parent}:{box.env['PATH']}", "REAL_MOUNT": real}
    place = os.fspath(box.mountpoint)
    helper = [str(SCRIPTS / "mount.fuse.fsd"), str(program), "fsd", place]
    ours = f"token-file={token_file(box)},state-dir={box.state}"
    table = "nosuid,nodev,relatime,user_id=0,group_id=0,default_permissions,allow_other,uhelper=fuse.fsd"
    assert call(box, *helper, "-o", ours).returncode == 0
    (box.mountpoint / "file").write_bytes(b"x")
    with open(box.mountpoint / "file", "ab"):
        busy = call(box, *helper, "-o", f"remount,ro,{table}")
        assert busy.returncode != 0
        assert "busy" in busy.stderr
    assert call(box, *helper, "-o", f"ro,remount,{table}").returncode == 0
    with pytest.raises(OSError, match="Read-only"):
        (box.mountpoint / "file").unlink()
    assert (box.mountpoint / "file").read_bytes() == b"x"
    assert call(box, *helper, "-o", f"{ours},remount,noexec,rw,nosuid,nodev").returncode == 0
    (box.mountpoint / "file").unlink()
    flags = subprocess.run(
        ["findmnt", "-no", "OPTIONS", place], capture_output=True, text=True, check=True, timeout=30
    ).stdout.split(",")
    assert {"rw", "nosuid", "nodev", "noexec"} <= set(flags)
    assert call(box, str(SCRIPTS / "umount.fuse.fsd"), str(program), place).returncode == 0
    assert call(box, *helper, "-o", f"ro,{ours}").returncode == 0
    no = call(box, *helper, "-o", f"remount,rw,{table}")
    assert no.returncode == 1
    assert "mount it anew" in no.stderr
    with pytest.raises(OSError, match="Read-only"):
        (box.mountpoint / "file").touch()


@pytest.mark.root
@pytest.mark.parametrize("line", ["", "fsd {place} fuse.fsd noauto,_netdev 0 0\n"], ids=["", "in-fstab"])
def test_a_remount_changes_what_it_names_and_nothing_else(
    box: Sandbox, program: Path, tmp_path: Path, line: str
) -> None:
    """By mount(8), which tells the helper neither what is to be allowed again nor what fstab leaves out."""
    assert Path("/sbin/mount.fuse.fsd").exists(), "run scripts/setup as root"
    box.mount()
    place = os.fspath(box.mountpoint)
    helper, fstab = tmp_path / "helper", tmp_path / "fstab"
    given = shlex.join([str(SCRIPTS / "mount.fuse.fsd"), str(program)])
    helper.write_text(f'#!/bin/sh\nexec {given} "$@"\n')
    helper.chmod(0o755)
    fstab.write_text(line.format(place=place))
    wanted = {
        "noexec": {"rw", "nosuid", "nodev", "noexec"},
        "exec": {"rw", "nosuid", "nodev"},
        "ro": {"ro", "nosuid", "nodev"},
        "rw,suid,dev": {"rw"},
        "nosuid": {"rw", "nosuid"},
        "nodev,noexec": {"rw", "nosuid", "nodev", "noexec"},
        "relatime": {"rw", "nosuid", "nodev", "noexec"},
    }
    look = f"findmnt -nro VFS-OPTIONS --mountpoint {place}"
    steps = [f"mount -o remount,{flags} {place}; {look}" for flags in wanted]
    script = "\n".join([f"mount --bind {helper} /sbin/mount.fuse.fsd", *steps])
    env = box.env | {"LIBMOUNT_FSTAB": os.fspath(fstab)}
    done = subprocess.run(
        ["unshare", "-m", "sh", "-euc", script],
        env=env,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    told = [set(options.split(",")) - {"relatime"} for options in done.stdout.splitlines()]
    assert told == list(wanted.values())


@pytest.mark.parametrize(
    ("source", "options", "word"),
    [("fsd", "nonsense", "unknown option: nonsense"), ("//cifs/share", "ro", "the source is fsd")],
)
def test_refusals(box: Sandbox, program: Path, source: str, options: str, word: str) -> None:
    done = call(
        box, str(SCRIPTS / "mount.fuse.fsd"), str(program), source, str(box.mountpoint), "-o", options
    )
    assert done.returncode == 1
    assert word in done.stderr
    assert not box.mountpoint.is_mount()


def test_mount_and_umount_of_the_system(box: Sandbox, server: Server) -> None:
    """As in fstab. umount returns when everything is on the server, however slow that is."""
    wrapper = Path("/sbin/umount.fuse.fsd")
    assert wrapper.exists(), "run scripts/setup as root: it puts the helpers into /sbin"
    place = os.fspath(box.mountpoint)
    options = f"token-file={token_file(box)},state-dir={box.state}"
    mounted = call(box, "mount", "-t", "fuse.fsd", "fsd:/", place, "-o", options)
    assert mounted.returncode == 0, mounted.stderr
    (box.mountpoint / "file").write_bytes(b"x" * 100_000)
    os.kill(server.pid, signal.SIGSTOP)
    resume = threading.Timer(1.0, os.kill, (server.pid, signal.SIGCONT))
    start = time.monotonic()
    resume.start()
    gone = call(box, "umount", place)
    resume.join()
    assert gone.returncode == 0, gone.stderr
    assert time.monotonic() - start >= 1.0
    assert not box.mountpoint.is_mount()
    assert len(box.fsd("cat", "/file").stdout) == 100_000


def test_umount_of_a_mount_made_by_the_command(box: Sandbox, server: Server) -> None:
    """The daemon enters itself where umount(8) looks."""
    assert Path("/sbin/umount.fuse.fsd").exists(), "run scripts/setup as root"
    box.mount()
    (box.mountpoint / "file").write_bytes(b"x" * 100_000)
    assert call(box, "umount", os.fspath(box.mountpoint)).returncode == 0
    assert not box.mountpoint.is_mount()
    assert len(box.fsd("cat", "/file").stdout) == 100_000
    box.mount()
    with open(box.mountpoint / "file", "rb"):
        assert call(box, "umount", os.fspath(box.mountpoint)).returncode != 0
    assert box.mountpoint.is_mount()


@pytest.mark.long
def test_a_forced_umount_does_not_wait_for_a_server_that_is_away(
    box: Sandbox, server: Server, program: Path
) -> None:
    box.mount()
    os.listdir(box.mountpoint)
    os.kill(server.pid, signal.SIGSTOP)
    (box.mountpoint / "file").write_bytes(b"kept")
    began = time.monotonic()
    forced = call(box, str(SCRIPTS / "umount.fuse.fsd"), str(program), os.fspath(box.mountpoint), "-f")
    assert time.monotonic() - began < 120, "the I/O time-out is 300 s"
    assert (forced.returncode, box.mountpoint.is_mount()) == (6, False)
    os.kill(server.pid, signal.SIGCONT)
    box.mount()
    assert (box.mountpoint / "file").read_bytes() == b"kept"


@pytest.mark.parametrize("name", ["mount.fuse.fsd", "umount.fuse.fsd"])
def test_the_helper_of_a_removed_checkout_says_so(name: str, tmp_path: Path) -> None:
    made = Path("/sbin", name).read_text()
    checkout = made.partition('[ -x "')[2].partition("/.venv/")[0]
    helper = tmp_path / name
    helper.write_text(made.replace(checkout, str(tmp_path / "removed")))
    done = subprocess.run(
        ["sh", str(helper), str(tmp_path)], capture_output=True, text=True, timeout=50, check=False
    )
    assert done.returncode != 0
    assert f"the fsd in {tmp_path}/removed is gone; run scripts/setup" in done.stderr
    # umount(8) does it then, and says what is wrong with the place.
    assert ("not mounted" in done.stderr) == name.startswith("umount")
