"""The mount family through the command line, with real processes and both spellings."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.cli import command, process
from support.sandbox import Sandbox
from support.server import Server, TestFs

pytestmark = pytest.mark.kernel


@pytest.fixture
def sandbox(shared_fs: TestFs, tmp_path: Path) -> Iterator[Sandbox]:
    made = Sandbox(tmp_path / "one", shared_fs, supervised=True)
    try:
        yield made
    finally:
        made.close()


def test_what_ordinary_tools_write_is_read_by_another_mount_elsewhere(
    sandbox: Sandbox,
    shared_fs: TestFs,
    tmp_path: Path,
) -> None:
    """The second half of the scenario: tools write, unmount, the state is deleted, another mount reads."""
    sandbox.mount()
    task = sandbox.mountpoint / "tasks" / "task-42"
    script = "mkdir -p out && echo result > out/r.txt && ln -s out/r.txt latest && tar cf all.tar out"
    task.mkdir(parents=True)
    subprocess.run(["sh", "-ec", script], cwd=task, check=True, timeout=60)
    told = sandbox.json("unmount", os.fspath(sandbox.mountpoint))
    assert told["status"] == "unmounted"
    assert told["pending"] == {"operations": 0, "files": 0, "bytes": 0}
    shutil.rmtree(sandbox.state)
    other = Sandbox(tmp_path / "two", shared_fs, "--remote-path", "/tasks/task-42", "--read-only")
    try:
        other.mount()
        assert (other.mountpoint / "latest").read_text() == "result\n"
        listing = subprocess.run(
            ["tar", "tf", other.mountpoint / "all.tar"], check=True, timeout=60, capture_output=True
        )
        assert listing.stdout.split() == [b"out/", b"out/r.txt"]
        with pytest.raises(OSError, match="Read-only"):
            (other.mountpoint / "new").write_text("x")
        other.unmount()
    finally:
        other.close()


def test_status_drain_and_wait_give_what_scripts_read(sandbox: Sandbox) -> None:
    sandbox.mount()
    where = os.fspath(sandbox.mountpoint)
    (sandbox.mountpoint / "a").write_text("x" * 1000)
    status = sandbox.status()
    assert set(status) >= {
        *("pid", "supervisor_pid", "restarts", "mount_session_id", "file_system_id", "state", "fs_seq"),
        *("pending", "oldest_pending_s", "conflicts", "cache", "server", "previous_session"),
    }
    assert set(status["pending"]) == {"operations", "files", "bytes"}
    assert set(status["cache"]) >= {"bytes", "hits", "misses"}
    assert set(status["server"]) >= {"reachable", "rtt_ms"}
    # Whoever reads the answer may be elsewhere.
    drained = sandbox.json("drain", os.path.relpath(where))
    assert drained["mount_path"] == where
    assert drained["fs_seq"] == sandbox.json("status", where)["fs_seq"]
    assert drained["fs_seq"] == sandbox.json("stat", "/a")["fs_seq"]
    drained = sandbox.drain()
    assert set(drained) >= {"status", "flushed", "pending", "first_failed_path", "reason", "duration_ms"}
    assert drained["status"] == "drained"
    seq = int(sandbox.json("stat", "/a")["fs_seq"])
    waited = sandbox.json("wait", where, "--seq", str(seq))
    assert waited["status"] == "reached"
    late = sandbox.fsd("wait", where, "--seq", str(seq + 1000), "--timeout", "300ms", check=False)
    assert late.returncode == 1
    long = sandbox.json("fs", "drain-file-system", "--mount-path", where)
    assert long["status"] == "drained"
    assert [m["mount_path"] for m in sandbox.json("mounts")["mounts"] if m["mount_path"] == where] == [where]
    sessions = sandbox.json("mounts", "--all")["sessions"]
    assert sessions[0]["session"] == status["mount_session_id"]
    assert sandbox.fsd("mount", where, "--state-dir", os.fspath(sandbox.state), check=False).returncode == 7
    assert sandbox.json("fs", "unmount-file-system", "--mount-path", where)["status"] == "unmounted"
    assert sandbox.json("wait-exit", where)["status"] == "ended"
    for verb in (("status",), ("drain",), ("wait", "--seq", "1")):  # as where there never was one
        over = sandbox.fsd(*verb, where, check=False)
        assert over.returncode == 5
        assert f"nothing is mounted at {where} any more" in over.stderr
        assert "recover" not in over.stderr


def test_the_long_spelling_of_mount_prints_tis_fields(sandbox: Sandbox) -> None:
    where = os.fspath(sandbox.mountpoint)
    told = sandbox.json(
        *("fs", "mount-file-system", "--mount-path", where, "--cache-dir", os.fspath(sandbox.state)),
        *(
            "--driver",
            "fuse",
            "--mount-profile",
            "none",
            "--read-cache-size-mb",
            "64",
            "--ready-timeout",
            "30s",
        ),
    )
    assert set(told) >= {
        *("status", "profile", "file_system_id", "mount_path", "remote_path", "driver", "endpoint"),
        *(
            "write_back_cache",
            "mount_profile",
            "local_root",
            "pack_paths",
            "pid",
            "log_file",
            "control_socket",
        ),
    }
    assert told["status"] == "mounted"
    assert os.path.ismount(where)
    assert sandbox.json("fs", "umount", "--mount-path", where)["status"] == "unmounted"


def test_a_place_where_nothing_is_mounted(sandbox: Sandbox) -> None:
    where = os.fspath(sandbox.mountpoint)
    for verb in ("status", "drain", "unmount"):
        assert sandbox.fsd(verb, where, check=False).returncode == 5, verb
    told = sandbox.json("fs", "unmount-file-system", "--mount-path", where, "--ignore-absent")
    assert told == {"status": "absent", "mount_path": where}


def test_a_mount_that_ends_while_the_service_is_away_is_in_nobodys_way(
    server: Server, tmp_path: Path
) -> None:
    """The service does not hear of its end: session and lease lapse, and nothing waits to be sent."""
    box = Sandbox(tmp_path / "box", server.create())
    try:
        box.mount("--exclusive", "--lease-time", "3s")
        (box.mountpoint / "a").write_text("kept")
        box.drain()
        first = box.status()["mount_session_id"]
        server.kill()
        assert box.unmount()["status"] == "unmounted"
        server.restart()
        box.mount("--exclusive", "--wait", "60s")
        assert (box.mountpoint / "a").read_text() == "kept"
        (box.mountpoint / "a").write_text("and changed")
        box.drain()
        second = box.status()["mount_session_id"]
        ends = {one["session"]: one["ended"] for one in box.json("mounts", "--all")["sessions"]}
        assert first != second and ends[first] in ("active", "lost") and ends[second] == "active"
    finally:
        box.close()


def test_absent_never_hides_what_was_not_sent(shared_fs: TestFs, server: Server, tmp_path: Path) -> None:
    """--ignore-absent is about a mount that is not there, not about one that cannot be emptied."""
    box = Sandbox(tmp_path / "box", server.create())
    where = os.fspath(box.mountpoint)
    try:
        box.mount("--stop-timeout", "1s")
        (box.mountpoint / "before").write_text("x")  # the directory is known from here on
        box.drain()
        server.kill()
        (box.mountpoint / "a").write_text("kept here")
        done = box.fsd(
            *("fs", "unmount-file-system", "--mount-path", where, "--ignore-absent", "--timeout", "1s"),
            check=False,
        )
        assert done.returncode == 6
        told = json.loads(done.stdout)
        assert told["pending"]["files"] == 1
        assert told["status"] != "absent"
    finally:
        box.close()


@pytest.mark.parametrize("kind", ["file", "absent", "not-empty"])
def test_wrong_mount_points(sandbox: Sandbox, tmp_path: Path, kind: str) -> None:
    place = tmp_path / kind
    if kind == "file":
        place.write_text("x")
    if kind == "not-empty":
        place.mkdir()
        (place / "x").write_text("x")
    found = sandbox.fsd("mount", os.fspath(place), "--state-dir", os.fspath(sandbox.state), check=False)
    assert found.returncode == (5 if kind == "absent" else 2)
    assert os.fspath(place) in found.stderr


def test_append_is_a_barrier_and_fails_with_the_mount(server: Server, tmp_path: Path) -> None:
    """Who reads the entry finds the files; where they cannot be sent, no entry is made."""
    box = Sandbox(tmp_path / "box", server.create())
    try:
        box.mount()
        box.fsd("journal", "create", "j")
        (box.mountpoint / "result").write_text("done")
        box.fsd("journal", "append", "j", "--entry-json", '{"type":"done"}')
        elsewhere = process("cat", "/result", env=box.fs.env)
        assert elsewhere.out == b"done"
        (entry,) = box.json("journal", "read", "j")["entries"]
        assert entry["barrier"] is True
        assert entry["fs_seq"] >= 1
        where = os.fspath(box.mountpoint)
        assert box.json("wait", where, "--journal", "j:1")["status"] == "reached"
        assert box.fsd("wait", where, "--journal", "j:2", check=False).returncode == 5
        box.fsd("journal", "append", "j", "--no-barrier", "--entry-json", '{"type":"quick"}')
        assert box.json("journal", "read", "j", "--after-seq", "1")["entries"][0]["barrier"] is False

        server.kill()
        (box.mountpoint / "unsent").write_text("x")
        server.restart()
        # A daemon that cannot answer is a barrier that failed, although the server would take the entry.
        box.kill()
        failed = box.fsd(
            *("journal", "append", "j", "--timeout", "2s", "--entry-json", '{"type":"never"}'), check=False
        )
        assert failed.returncode == 6, failed.stderr
        assert "nothing was appended" in failed.stderr
        box.detach()
        types = [e["type"] for e in box.json("journal", "read", "j")["entries"]]
        assert types == ["done", "quick"]
    finally:
        box.close()


def test_read_waits_until_the_mount_shows_the_files(sandbox: Sandbox, shared_fs: TestFs) -> None:
    sandbox.mount()
    assert os.listdir(sandbox.mountpoint) == []
    sandbox.fsd("journal", "create", "j")
    elsewhere = {**shared_fs.env}
    for at in range(5):
        assert process("cp", "-", f":/f{at}", env=elsewhere, stdin=b"there").code == 0
        entry = json.dumps({"type": "made", "path": f"f{at}"})
        assert process("journal", "append", "j", "--entry-json", entry, env=elsewhere).code == 0
        page = sandbox.json("journal", "read", "j", "--after-seq", str(at))
        path = page["entries"][0]["path"]
        assert (sandbox.mountpoint / path).read_text() == "there"


def test_a_mount_of_a_state_is_not_waited_for(sandbox: Sandbox) -> None:
    """It shows that state for good: reading a journal goes on, and waiting there says so at once."""
    made = sandbox.json("checkpoint", "create", "--remote")
    sandbox.mount("--checkpoint", made["checkpoint_id"])
    sandbox.fsd("mkdir", "/later")
    sandbox.fsd("journal", "create", "j")
    entry = sandbox.json("journal", "append", "j", "--entry-json", '{"type":"x"}')
    assert entry["first_seq"] == 1
    (found,) = sandbox.json("journal", "read", "j", "--timeout", "5s")["entries"]
    assert found["fs_seq"] > made["fs_seq"]
    assert found["barrier"] is False  # nothing was written here that an entry could speak of
    waited = sandbox.fsd("wait", os.fspath(sandbox.mountpoint), "--seq", str(found["fs_seq"]), check=False)
    assert waited.returncode == 2
    assert "for good" in waited.stderr


def test_recover_sends_what_a_lost_daemon_left(server: Server, tmp_path: Path) -> None:
    box = Sandbox(tmp_path / "box", server.create())
    where, state = os.fspath(box.mountpoint), os.fspath(box.state)
    try:
        box.mount()
        (box.mountpoint / "first").write_text("1")
        box.drain()
        server.kill()
        (box.mountpoint / "kept").write_text("only here")
        assert box.fsd("recover", where, "--state-dir", state, check=False).returncode == 7  # it is mounted
        box.kill()
        box.detach()
        assert box.fsd("wait-exit", where, check=False).returncode == 6
        over = box.fsd("status", where, check=False)
        assert over.returncode == 5
        assert f"stays in {state}" in over.stderr and "fsd recover" in over.stderr
        server.restart()
        told = box.json("recover", where, "--state-dir", state)
        assert told["status"] == "recovered"
        assert told["sent"]["files"] == 1
        assert process("cat", "/kept", env=box.fs.env).out == b"only here"
        assert box.json("recover", where, "--state-dir", state)["status"] == "nothing_left"
        assert box.fsd("recover", os.fspath(tmp_path), "--state-dir", state, check=False).returncode == 5
    finally:
        box.close()


def test_the_mount_does_not_hold_the_callers_pipes(sandbox: Sandbox) -> None:
    """`x=$(fsd mount …)` must return: the daemon keeps neither stdout nor stderr."""
    line = 'told=$("$@"); printf %s "$told"'
    argv = [*command(), "mount", os.fspath(sandbox.mountpoint), "--state-dir", os.fspath(sandbox.state)]
    done = subprocess.run(
        ["bash", "-c", line, "bash", *argv], env=sandbox.env, capture_output=True, timeout=60, check=True
    )
    assert json.loads(done.stdout)["status"] == "mounted"
    sandbox.unmount()


@pytest.mark.parametrize("closed", ["<&- >&- 2>&-", ">&-"])
def test_a_mount_by_who_has_closed_its_streams(sandbox: Sandbox, closed: str) -> None:
    """As some init scripts and launchers do: nothing of the mount's may get their numbers."""
    where, state = os.fspath(sandbox.mountpoint), os.fspath(sandbox.state)
    argv = [*command(), "mount", where, "--state-dir", state, *sandbox.options]
    done = subprocess.run(
        ["bash", "-c", f'"$@" {closed}', "bash", *argv],
        env=sandbox.env,
        capture_output=True,
        timeout=90,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b""), sandbox.logs()
    (sandbox.mountpoint / "f").write_text("kept")
    assert sandbox.status()["state"] == "mounted"
    sandbox.unmount()
    assert sandbox.fsd("cat", "/f").stdout == "kept"


def test_a_shell_that_is_in_the_mount_itself_is_told_so(sandbox: Sandbox) -> None:
    sandbox.mount()
    script = '"$@" unmount .; exit $?'
    done = subprocess.run(
        ["sh", "-c", script, "sh", *command()],
        cwd=sandbox.mountpoint,
        env=sandbox.env,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 7, done.stderr
    assert "(sh)" in done.stderr and "the shell this was typed in is one of them" in done.stderr
    sandbox.unmount()


def test_what_is_not_sent_lies_in_nobody_elses_reach(sandbox: Sandbox) -> None:
    """Whatever the umask: another user must not put a state directory of his in the place of one."""
    sandbox.state = sandbox.base / "new" / "state"
    before = os.umask(0)
    try:
        sandbox.mount()
        (sandbox.mountpoint / "f").write_text("x")
    finally:
        os.umask(before)
    (place,) = (sandbox.state / "mounts").iterdir()
    for directory in (place, *list(place.parents)[:3]):
        assert directory.stat().st_mode & 0o777 == 0o700, directory
