"""The README, word for word, and what somebody who follows it runs into."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.cli import command, inside, process
from support.processes import free_ports
from support.sandbox import Sandbox
from support.server import Server, TestFs, clean_env
from support.wait import wait_for

from fsd.host.seam import Host
from fsd.kernel import mountpoint, unmount
from fsd.kernel.control_client import NoDaemon
from fsd.kernel.runtime import RuntimeDir
from fsd.vfs.log import OP, STATE, Log

README = Path(__file__).parent.parent.parent / "README.md"
BIN = Path(sys.executable).parent


def blocks(heading: str) -> list[str]:
    """The shell blocks under a heading of the README."""
    section = README.read_text().partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    return re.findall(r"```sh\n(.*?)```", section, re.DOTALL)


def shell(script: str, where: Path, name: str, **env: str) -> str:
    """Run it as a new user's shell would, in an environment of nothing else; what it printed."""
    kept = {"FSD_TEST_RUN": os.environ["FSD_TEST_RUN"]} if "FSD_TEST_RUN" in os.environ else {}
    base = {"PATH": f"{BIN}:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": os.fspath(where), "LANG": "C.UTF-8"}
    out, err = where / f"{name}.out", where / f"{name}.err"
    with out.open("wb") as to, err.open("wb") as errors:
        done = subprocess.run(
            ["bash", "-euc", script], cwd=where, env={**base, **kept, **env}, stdin=subprocess.DEVNULL,
            stdout=to, stderr=errors, timeout=60, check=False,
        )  # fmt: skip
    assert done.returncode == 0, f"{script}\n{out.read_text()}\n{err.read_text()}"
    return out.read_text()


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    """A directory to work in; the server the README starts there ends with the test."""
    yield tmp_path
    subprocess.run(["umount", "-l", os.fspath(tmp_path / "work")], capture_output=True, check=False)
    pid = tmp_path / "server.pid"
    if pid.exists():
        os.kill(int(pid.read_text()), signal.SIGKILL)


@pytest.mark.kernel
def test_the_readme_word_for_word(home: Path) -> None:
    start, first, replacement = blocks("First file in five minutes")
    port = f":{free_ports(1)[0]}"
    lines = [line for line in start.splitlines() if "scripts/setup" not in line and "export PATH" not in line]
    assert len(lines) == len(start.splitlines()) - 2
    # Nothing is waited for between the lines: `create --wait` meets a server that just starts.
    script = "\n".join(lines).replace(":8333", port) + "\necho $! > server.pid\n"
    token = shell(script, home, "server").strip()
    assert token.startswith("fsd1."), token
    assert (home / "data" / "admin.key").stat().st_mode & 0o777 == 0o600
    values = "export FSD_TOKEN=… FSD_REGION_CODE=local"
    assert values in first
    shell(first.replace("…", token), home, "first")
    printed = shell(replacement, home, "replacement", FSD_TOKEN=token, FSD_REGION_CODE="local")
    assert printed.startswith("# Plan\n1. inspect\n")
    assert '"step": "inspection-complete"' in printed
    assert '"status": "unmounted"' in printed
    assert list((home / "work").iterdir()) == []


def test_create_with_wait_comes_before_its_server(tmp_path: Path) -> None:
    server = Server(tmp_path / "server")
    server.port = free_ports(1)[0]
    key = server.data_dir / "admin.key"
    said = tmp_path / "said"
    argv = ["create", "--wait", "--admin-key-file", os.fspath(key), "--query", "status", "--output", "text"]
    with said.open("wb") as errors:
        early = subprocess.Popen(
            [*command(), *argv],
            env=clean_env(FSD_ENDPOINT=server.url),
            stdout=subprocess.PIPE,
            stderr=errors,
        )
    try:
        wait_for(
            lambda: b"waiting for `fsd serve`" in said.read_bytes(), 30, "the command to say that it waits"
        )
        server.start()
        out, _ = early.communicate(timeout=40)
        assert early.returncode == 0, said.read_text()
        assert out == b"active\n"
    finally:
        early.kill()
        early.wait(60)
        server.end()


@pytest.mark.kernel
def test_what_was_left_is_named_with_the_command_that_sends_it(server: Server, tmp_path: Path) -> None:
    box = Sandbox(tmp_path / "box", server.create())
    place, state = os.fspath(box.mountpoint), os.fspath(box.state)
    other = tmp_path / "other"
    other.mkdir()

    def named() -> str:
        return box.fsd("doctor", "--state-dir", state, "--output", "text").stdout

    try:
        box.mount()
        assert os.listdir(box.mountpoint) == []  # known from here on without the server
        os.kill(server.pid, signal.SIGSTOP)
        (box.mountpoint / "kept").write_text("kept\n")
        assert box.fsd("unmount", place, "--timeout", "1s", check=False).returncode == 6
        os.kill(server.pid, signal.SIGCONT)
        send = f"fsd recover {place} --state-dir {state}"
        assert f"`{send}` sends it" in named()
        box.env["FSD_TOKEN"] = server.create().token
        assert f"`{send}` with a token for {box.fs.id} sends it" in named()
        box.env["FSD_TOKEN"] = box.fs.token
        # A mount of another place says so; its own clean end leaves nothing to be named.
        for _ in range(3):
            mounted = box.fsd("mount", os.fspath(other), "--state-dir", state, "--read-only")
            assert f"`{send}`" in mounted.stderr
            box.fsd("unmount", os.fspath(other))
            assert named().count("no running mount holds") == 1
        box.fsd(*send.split()[1:])
        assert "no running mount holds" not in named()
        assert box.fsd("cat", "/kept").stdout == "kept\n"
        box.mount()
        before = box.status()["previous_session"]
        assert set(before["pending_at_last_report"]) == {"operations", "files", "bytes"}
        with (box.mountpoint / "kept").open():
            busy = box.fsd("unmount", place, check=False)
        # No request of a server failed, so there is none to name.
        assert (busy.returncode, json.loads(busy.stderr.splitlines()[-1])["error"]["request_id"]) == (7, "")
        box.fsd("unmount", place)
    finally:
        os.kill(server.pid, signal.SIGCONT)
        box.fsd("unmount", os.fspath(other), "--lazy", "--ignore-absent", check=False)
        box.close()


def test_a_log_that_only_waits_to_be_erased_is_no_left_over(tmp_path: Path) -> None:
    place = tmp_path / "mounts" / "0123456789abcdef"
    place.mkdir(parents=True)
    for number in (3, 4):
        (place / f"log.{number:016x}").write_bytes(b"x" * 10)
    (place / "log-retired").write_text("4\n")
    doctor = ("doctor", "--state-dir", os.fspath(tmp_path), "--output", "text")
    assert "no running mount holds" not in inside(*doctor).text
    (place / "log.0000000000000005").write_bytes(b"x" * 7)
    assert f"{place}: 7 bytes of log that no running mount holds" in inside(*doctor).text


def test_a_log_in_which_nothing_was_done_is_no_left_over(tmp_path: Path) -> None:
    """As a killed mount of a checkpoint leaves it: it holds whose log it is, and room ahead."""
    idle, busy = (tmp_path / "mounts" / (letter * 16) for letter in ("a", "b"))
    for place in (idle, busy):
        place.mkdir(parents=True)
        log = Log.create(place, Host())
        log.rotate(b"state")
        log.append(STATE, 0, 0, [b"another session"])
        if place == busy:
            log.append(OP, 0, 0, [b"an operation"])
        log.abandon()
    told = inside("doctor", "--state-dir", os.fspath(tmp_path), "--output", "text").text
    assert told.count("no running mount holds") == 1 and f"{busy}: " in told


def test_a_mount_one_may_not_look_at_is_not_dead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What to do about a dead mount would be harm to another user's living one."""
    line = b"1 2 0:3 / /secret/m rw - fuse.fsd fsd:fs_aaaaaaaaaaaaaaaaaaaa:0123456789abcdef rw\n"
    (entry,) = mountpoint.parse_mountinfo(line)
    monkeypatch.setattr(mountpoint, "list_mounts", lambda: [entry])
    monkeypatch.setattr(mountpoint, "answers", lambda _path: PermissionError(13, "Permission denied"))
    found = inside("doctor", "--state-dir", os.fspath(tmp_path), "--output", "text").text
    assert "/secret/m is another user's" in found
    assert "--lazy" not in found


@pytest.mark.kernel
def test_a_killed_daemon_waits_for_the_server_and_that_is_told(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was called dead, with the advice to detach it."""
    monkeypatch.setattr(unmount, "RESTART_WAIT", 0.1)
    box = Sandbox(tmp_path / "box", server.create(), supervised=True)
    try:
        box.mount()
        directory = RuntimeDir(box.record.parent, Host())
        (box.mountpoint / "kept").write_text("kept\n")
        server.kill()
        os.kill(box.daemon, signal.SIGKILL)
        wait_for(lambda: box.record_state() == "restarting", 30, "another daemon")
        wanted = f"the mount at {box.mountpoint} has no daemon now: one is being started"
        with pytest.raises(NoDaemon, match=re.escape(wanted)) as told:
            unmount.status(box.mountpoint, directory)
        assert server.url in told.value.hint
        found = json.loads(box.fsd("doctor", "--output", "json", check=False).stdout)
        [row] = [c for c in found["checks"] if c["message"].startswith(os.fspath(box.mountpoint))]
        assert "one is being started" in row["message"]
        assert server.url in row["hint"]
        server.restart()
        wait_for(lambda: box.record_state() == "mounted", 60, "the mount")
        assert (box.mountpoint / "kept").read_text() == "kept\n"
        box.fsd("unmount", os.fspath(box.mountpoint))
    finally:
        box.close()


@pytest.mark.kernel
def test_a_subtree_that_is_not_there_yet(shared_fs: TestFs, tmp_path: Path) -> None:
    """As with the fstab line of the README on a fresh filesystem."""
    box = Sandbox(tmp_path / "box", shared_fs)
    try:
        failed = box.fsd("mount", os.fspath(box.mountpoint), "--remote-path", "/new tasks", check=False)
        assert failed.returncode == 5
        assert "no directory /new tasks in the filesystem" in failed.stderr
        assert "fsd mkdir '/new tasks'" in failed.stderr
        box.fsd("mkdir", "/new tasks")
        box.mount("--remote-path", "/new tasks")
        box.fsd("unmount", os.fspath(box.mountpoint))
    finally:
        box.close()


def test_install_ti_tells_its_usage() -> None:
    script = README.parent / "scripts" / "install-ti"
    told = subprocess.run([script, "--help"], capture_output=True, text=True, timeout=50, check=True)
    assert "install-ti [--force] [DIR]" in told.stdout
    wrong = subprocess.run([script, "--bogus"], capture_output=True, text=True, timeout=50, check=False)
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert "install-ti [--force] [DIR]" in wrong.stderr


def test_habits_of_other_tools(shared_fs: TestFs) -> None:
    made = process("cp", "-", ":/.hidden", env=shared_fs.env, stdin=b"x")
    assert made.code == 0, made.err
    # Bundled, as everybody types it; names with a dot are there with and without -a.
    for flags in (("-la",), ("-l",), ("-a",)):
        assert ".hidden" in process("ls", *flags, "/", "--output", "text", env=shared_fs.env).text
    bare = inside("cp", "-r", "--output", "text", env=shared_fs.env)
    assert bare.code == 2
    assert "fsd cp plan.md :/tasks/plan.md" in bare.err
