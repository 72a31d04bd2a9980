"""`fsd run` without a kernel mount: pull, run, push against its base, also after failures and signals."""

from __future__ import annotations

import os
import shutil
import signal
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgpack
import pytest
from support.cli import inside, process
from support.filesclient import connect
from support.processes import die_with_parent
from support.proxy import HTML_502, LOSE_REPLY, FaultProxy, on
from support.server import TestFs, clean_env
from support.wait import wait_for

from fsd.client.files import Files, PutOptions, raw_path
from fsd.client.http import BytesBody
from fsd.client.leases import Leases
from fsd.client.push import Pushed, push
from fsd.client.run import RunOptions, RunResult, left_overs, push_left, run
from fsd.client.transfer import stat_or_none
from fsd.model.errors import Busy, FsdError, Unavailable, UsageError


@pytest.fixture
def files(files: Files) -> Files:
    """With a tree in it."""
    for path in (b"/w/a", b"/w/b", b"/w/d/c", b"/w/d/\xff"):
        put(files, path, b"old " + path)
    files.symlink(b"a", b"/w/link")
    return files


def put(files: Files, path: bytes, data: bytes, **options: Any) -> None:
    files.write(path, BytesBody(data), PutOptions(**options))


def get(files: Files, path: bytes) -> bytes:
    return b"".join(files.read(path))


def names(files: Files) -> list[bytes]:
    return [raw_path(one)[3:] for one in files.list(b"/w", recursive=True)]


def shell(files: Files, tmp_path: Path, script: str, **more: Any) -> RunResult:
    options = RunOptions(
        more.pop("path", b"/w"),
        ["/bin/sh", "-ec", script],
        clean_env(),
        tmp_path / "base",
        label="host",
        **more,
    )
    return run(files, options)


def nothing_left(tmp_path: Path) -> bool:
    return not list((tmp_path / "base").iterdir())


def test_what_changed_is_pushed_and_nothing_else(files: Files, tmp_path: Path) -> None:
    before = {path: files.stat(path)["revision"] for path in (b"/w/b", b"/w/d/\xff")}
    done = shell(
        files,
        tmp_path,
        "test \"$(cat link)\" = 'old /w/a'; echo new > a; mkdir -p n/e; echo x > n/e/w; rm d/c;"
        " ln -sfn b link; ln -s nowhere l2; chmod 600 b; mkfifo pipe",
    )
    assert (done.exit_code, done.left, done.pushed.conflicts) == (0, None, [])
    assert get(files, b"/w/a") == b"new\n" and get(files, b"/w/n/e/w") == b"x\n"
    assert names(files) == [b"a", b"b", b"d", b"d/\xff", b"l2", b"link", b"n", b"n/e", b"n/e/w"]
    assert (files.stat(b"/w/link")["target"], files.stat(b"/w/b")["mode"]) == ("b", "600")
    assert {path: files.stat(path)["revision"] for path in before} == before
    assert (done.pushed.files, done.pushed.removed, done.pushed.not_pushed) == (2, 1, ["pipe"])
    assert nothing_left(tmp_path)


@pytest.mark.parametrize("mask", [0, 0o777])
def test_where_it_works_is_nobody_elses_whatever_the_umask(files: Files, tmp_path: Path, mask: int) -> None:
    """The mounts' state directories lie below the same one. Who takes off his own rights can work as well."""
    before = os.umask(mask)
    try:
        done = run(files, RunOptions(b"/w", ["true"], clean_env(), tmp_path / "a" / "b", label="host"))
    finally:
        os.umask(before)
    assert done.exit_code == 0
    assert [oct(stat.S_IMODE((tmp_path / one).stat().st_mode)) for one in ("a", "a/b")] == ["0o700"] * 2


def test_where_nothing_can_be_made_says_what_to_choose(files: Files) -> None:
    """The directory is there; on a read-only disk, say, what has to be in it cannot be made."""
    with pytest.raises(FsdError) as caught:
        run(files, RunOptions(b"/w", ["true"], clean_env(), Path("/proc"), label="host"))
    assert "--work-dir" in caught.value.hint


def test_a_new_subtree_begins_empty(files: Files, tmp_path: Path) -> None:
    done = shell(files, tmp_path, "echo first > f", path=b"/tasks/new")
    assert done.exit_code == 0 and get(files, b"/tasks/new/f") == b"first\n"
    with pytest.raises(UsageError, match="no directory"):
        shell(files, tmp_path, "true", path=b"/w/a")
    assert nothing_left(tmp_path)


def test_a_path_that_does_not_exist_is_told(files: Files, shared_fs: TestFs, tmp_path: Path) -> None:
    """Before the command runs: it may be a slip, and nothing is made of it unless something is left there."""
    env = {**shared_fs.env, "XDG_STATE_HOME": str(tmp_path)}
    done = process("run", "--path", "/typo/here", "--", "sh", "-c", "ls -A; echo ran >&2", env=env)
    assert (done.code, done.out) == (0, b"")
    told, ran = done.err.splitlines()
    assert told.startswith("fsd run: /typo/here does not exist") and ran == "ran"
    assert stat_or_none(files, b"/typo") is None
    known = process("run", "--path", "/w", "--", "true", env=env)
    assert (known.code, known.err) == (0, "")


def test_the_root_and_a_path_through_a_symlink(files: Files, tmp_path: Path) -> None:
    files.symlink(b"w", b"/via")
    done = shell(files, tmp_path, "test -f a; echo new > b", path=b"/via")
    assert done.exit_code == 0 and get(files, b"/w/b") == b"new\n"
    done = shell(files, tmp_path, "cat w/b > top; rm -r w/d", path=b"/")
    assert done.exit_code == 0 and get(files, b"/top") == b"new\n"
    assert names(files) == [b"a", b"b", b"link"] and files.stat(b"/via")["target"] == "w"
    assert nothing_left(tmp_path)


def test_kinds_that_change(files: Files, tmp_path: Path) -> None:
    done = shell(files, tmp_path, "rm a; mkdir a; echo x > a/x; rm -r d; echo f > d; rm link; mkdir link")
    assert done.exit_code == 0, done
    assert names(files) == [b"a", b"a/x", b"b", b"d", b"link"] and get(files, b"/w/d") == b"f\n"


def test_the_push_happens_after_a_failure_and_a_missing_command(files: Files, tmp_path: Path) -> None:
    done = shell(files, tmp_path, "echo new > a; exit 3")
    assert done.exit_code == 3 and get(files, b"/w/a") == b"new\n"
    done = shell(files, tmp_path, "echo newer > a; kill -9 $$")
    assert done.exit_code == 137 and get(files, b"/w/a") == b"newer\n"
    missing = RunOptions(b"/w", ["/no/such/command"], {}, tmp_path / "base")
    done = run(files, missing)
    assert done.exit_code == 127 and done.not_started.startswith("/no/such/command cannot be run: ")
    (tmp_path / "plain").touch()
    for name, code in (("plain", 126), ("absent", 127)):
        done = run(files, RunOptions(b"/w", [name], {"PATH": f"{tmp_path}"}, tmp_path / "base"))
        assert done.exit_code == code and done.not_started.startswith(f"{name} cannot be run: ")
    assert nothing_left(tmp_path)


def test_a_file_changed_by_both_is_kept_twice(files: Files, shared_fs: TestFs, tmp_path: Path) -> None:
    (tmp_path / "go").write_text("")
    other = connect(shared_fs)
    put(other, b"/w/e", b"e")

    def change() -> None:
        put(other, b"/w/a", b"theirs")
        other.remove(b"/w/b")
        put(other, b"/w/d/c", b"theirs")
        put(other, b"/w/n", b"theirs")
        put(other, b"/w/dir", b"theirs")
        other.symlink(b"theirs", b"/w/link", overwrite=True)

    script = (
        "echo ours > a; echo ours > b; rm d/c; echo ours > n; mkdir dir; echo x > dir/x; ln -sfn ours link;"
        f" echo > {tmp_path}/ready; while test -e {tmp_path}/go; do sleep 0.02; done"
    )
    pid = os.fork()
    if pid == 0:
        wait_for(lambda: (tmp_path / "ready").exists(), 30, "the command")
        change()
        (tmp_path / "go").unlink()
        os._exit(0)
    done = shell(files, tmp_path, script)
    assert os.waitpid(pid, 0)[1] == 0
    assert done.command_exit == 0 and done.exit_code == 1 and done.left is None
    kept = {clash.path: clash.kept_as.encode() for clash in done.pushed.conflicts}
    assert set(kept) == {"a", "b", "d/c", "n", "dir", "link"}
    for name in ("a", "n"):
        assert get(files, b"/w/" + name.encode()) == b"theirs"
        assert get(files, kept[name]) == b"ours\n" and b".conflict-host-" in kept[name]
    assert kept["b"] == b"/w/b" and get(files, b"/w/b") == b"ours\n", "what was removed comes back"
    assert kept["d/c"] == b"" and get(files, b"/w/d/c") == b"theirs", "a removal loses"
    assert get(files, b"/w/dir") == b"theirs" and get(files, kept["dir"] + b"/x") == b"x\n"
    assert files.stat(b"/w/link")["target"] == "theirs" and files.stat(kept["link"])["target"] == "ours"
    beside = {kept[name].decode(): f"/w/{name}" for name in ("a", "n", "dir", "link")}
    listed = list(Leases(files.http).conflicts(b"/"))
    assert {one["path"]: one["original"] for one in listed} == beside
    assert {(one["host"], one["mount"], one["session"], one["reason"]) for one in listed} == {
        ("host", "", 0, "conflict")
    }
    assert all(one["detail"] and one["at"] for one in listed)
    shown = inside("conflicts", env=shared_fs.env, terminal=True).text
    assert f"conflict  {kept['a'].decode()}  for /w/a  by host  " in shown
    files.remove(kept["a"])
    assert len(list(Leases(files.http).conflicts(b"/"))) == 3


def test_an_older_servers_list_lacks_a_copy_and_it_is_told(
    files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy is there, pushed, and named with why it is not listed."""

    def refused(self: Files, path: bytes, *_: Any) -> Any:
        return self.http.json("POST", self._route("find", path))

    monkeypatch.setattr(Files, "note_conflict", refused)

    def pushing(*given: Any) -> None:
        put(files, b"/w/a", b"theirs")
        push(*given)

    monkeypatch.setattr("fsd.client.run.push", pushing)
    done = shell(files, tmp_path, "echo ours > a")
    (clash,) = done.pushed.conflicts
    assert "not in the list of `fsd conflicts`: this route has no such method" in clash.reason
    assert get(files, clash.kept_as.encode()) == b"ours\n"
    assert not done.pushed.failed and done.left is None and done.exit_code == 1


def test_what_cannot_be_pushed_stays_and_is_pushed_later(
    files: Files, shared_fs: TestFs, proxy: FaultProxy, tmp_path: Path
) -> None:
    cut = connect(shared_fs, proxy.url, retry_for=0.1)
    work = tmp_path / "work"
    proxy.always(HTML_502, lambda request: request.method != "GET")
    done = shell(cut, tmp_path, "echo new > a; rm b; echo n > new", work_dir=work)
    assert done.exit_code == 6 and done.left == work and isinstance(done.error, Unavailable)
    assert (work / "tree/a").read_text() == "new\n" and get(files, b"/w/a") == b"old /w/a"
    with pytest.raises(Busy, match="could not push"):
        shell(cut, tmp_path, "true", work_dir=work)
    assert push_left(cut, work).exit_code == 6
    state = (work / "state").read_bytes()
    for damaged in (b"", state[:-1], msgpack.packb({**msgpack.unpackb(state), "moved": 7})):
        (work / "state").write_bytes(damaged)
        with pytest.raises(UsageError, match="damaged"):
            push_left(cut, work)
    (work / "state").write_bytes(state)
    proxy.clear()
    proxy.next(LOSE_REPLY, on("files"))
    proxy.next(LOSE_REPLY, on("actions"))
    done = push_left(cut, work)
    assert done.exit_code == 0 and not done.pushed.conflicts
    assert get(files, b"/w/a") == b"new\n" and b"b" not in names(files) and b"new" in names(files)
    with pytest.raises(UsageError):
        push_left(cut, work)
    assert shell(cut, tmp_path, "true", work_dir=work).exit_code == 0


CHILD = """
import sys
from pathlib import Path
from fsd.client.files import Files
from fsd.client.http import Http
from fsd.client.identity import Claim, data_identity
from fsd.client.run import RunOptions, run
from fsd.client.transfer import stat_or_none
from fsd.host.seam import Host
files = Files(Http(data_identity(Claim(token=sys.argv[1])), Host()))
options = RunOptions(b"/w", ["/bin/sh", "-c", sys.argv[3]], {"PATH": "/usr/bin:/bin"}, Path(sys.argv[2]))
sys.exit(run(files, options).exit_code)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT])
@pytest.mark.parametrize("stubborn", [False, True])
def test_a_signal_ends_the_command_and_the_push_still_happens(
    files: Files, shared_fs: TestFs, tmp_path: Path, number: int, stubborn: bool
) -> None:
    ready, got, fifo = tmp_path / "ready", tmp_path / "got", tmp_path / "fifo"
    # Blocks in the shell itself, on a fifo nobody writes to: a child process could outlive the test.
    block = f"echo > {ready}; while read x <> {fifo}; do :; done"
    if stubborn:
        block = f"trap 'echo > {got}' TERM INT HUP QUIT; echo > {ready}; while :; do read x <> {fifo}; done"
    child = subprocess.Popen(
        [
            *(sys.executable, "-c", CHILD, shared_fs.token, str(tmp_path / "base")),
            f"echo new > a; mkfifo {fifo}; {block}",
        ],
        stdin=subprocess.DEVNULL,
        env=clean_env(),
        preexec_fn=die_with_parent,
    )
    wait_for(ready.exists, 30, "the command to be ready")
    child.send_signal(number)
    if stubborn and number in (signal.SIGINT, signal.SIGQUIT):
        wait_for(got.exists, 30, "the command to ignore it")
        child.send_signal(signal.SIGINT)  # nothing but another one ends what ignores ^C
        if number == signal.SIGQUIT:
            child.send_signal(signal.SIGTERM)
    assert child.wait(30) == (137 if stubborn else 128 + number)
    assert get(files, b"/w/a") == b"new\n" and nothing_left(tmp_path)


def test_what_outlives_the_command_keeps_its_directory(files: Files, tmp_path: Path) -> None:
    """A server that was left running in the background: what it writes is not lost with the directory."""
    go, stay, on = tmp_path / "go", tmp_path / "stay", tmp_path / "on"
    for fifo in (go, stay):  # opened anew, `go` could still have its writer, and end at once
        os.mkfifo(fifo)
    later = f"read x < {go}; echo late > late; echo > {on}; read x < {stay}"
    script = f"({later}) > /dev/null 2>&1 & echo $! > pid; echo 1 > a"
    done = shell(files, tmp_path, script)
    child = int(get(files, b"/w/pid"))
    try:
        assert done.exit_code == 0 and done.left is None and done.kept is not None
        assert [pid for pid, _ in done.at_work] == [child]
        assert get(files, b"/w/a") == b"1\n" and b"late" not in names(files)
        assert left_overs(tmp_path / "base") == [done.kept]
        go.write_text("go\n")
        wait_for(on.exists, 30, "the background process to write")
        again = push_left(files, done.kept)
        assert again.exit_code == 0 and again.kept == done.kept, "it is at work still"
        assert get(files, b"/w/late") == b"late\n"
    finally:
        os.kill(child, signal.SIGKILL)
    wait_for(lambda: not push_left(files, done.kept).kept, 30, "the process to go")
    assert nothing_left(tmp_path)


def test_what_is_written_during_the_push_is_pushed_too(
    files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By somebody who has ended when the push has: nobody is at work then, and nothing may be missing."""
    write, writes = files.write, list[bytes]()

    def meanwhile(path: bytes, *more: Any) -> Any:
        answer = write(path, *more)
        if not writes:
            [tree] = (tmp_path / "base").glob("run-*/tree")
            (tree / "a").write_text("two")
            (tree / "b").unlink()
            (tree / "new").write_text("new")
        writes.append(path)
        return answer

    monkeypatch.setattr(files, "write", meanwhile)
    done = shell(files, tmp_path, "echo one > a")
    assert (done.exit_code, done.left, done.kept) == (0, None, None)
    assert writes[0] == b"/w/a" and set(writes[1:]) == {b"/w/a", b"/w/new"}
    assert get(files, b"/w/a") == b"two" and get(files, b"/w/new") == b"new" and b"b" not in names(files)
    assert nothing_left(tmp_path)


def test_what_is_written_until_nobody_is_at_work_is_pushed(
    files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who writes after the push and ends just before somebody looks who is at work."""
    looked: list[Path] = []

    def look(tree: Path) -> list[tuple[int, str]]:
        if not looked:
            (tree / "late").write_text("late")
        looked.append(tree)
        return []

    monkeypatch.setattr("fsd.client.run.users", look)
    assert shell(files, tmp_path, "echo one > a").exit_code == 0
    assert get(files, b"/w/late") == b"late" and nothing_left(tmp_path)


@pytest.mark.parametrize("cut", [False, True])
def test_what_got_a_conflict_name_goes_on_there(
    files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cut: bool
) -> None:
    """The push that gave the name is not the last: another follows at once, or (`cut`) by `push_left`."""
    work, pushes = tmp_path / "work", []

    def pushing(*given: Any) -> None:
        pushes.append(given)
        if len(pushes) == 1:
            for name in (b"a", b"n", b"e"):
                put(files, b"/w/" + name, b"theirs")
            push(*given)
            for path in ("a", "e/x", "e/new"):
                (work / "tree" / path).write_text("later")
            (work / "tree/e").chmod(0o700)
            (work / "tree/n").unlink()
            return
        if len(pushes) == 2 and cut:
            raise Unavailable("the server is away")
        push(*given)

    monkeypatch.setattr("fsd.client.run.push", pushing)
    done = shell(files, tmp_path, "echo ours > a; echo ours > n; mkdir e; echo x > e/x", work_dir=work)
    assert len(pushes) == 2 and {clash.path for clash in done.pushed.conflicts} == {"a", "n", "e"}
    kept = {clash.path: clash.kept_as.encode() for clash in done.pushed.conflicts}
    assert (kept["n"][3:] in names(files)) == cut
    if cut:
        done = push_left(files, work)
        assert not done.pushed.conflicts
    assert len(kept) == 3 and done.left is None and not done.pushed.failed
    assert all(get(files, b"/w/" + name) == b"theirs" for name in (b"a", b"n", b"e"))
    later = (kept["a"], kept["e"] + b"/x", kept["e"] + b"/new")
    assert all(get(files, path) == b"later" for path in later)
    assert files.stat(kept["e"])["mode"] == "700" != files.stat(b"/w/e")["mode"]
    assert {name for name in names(files) if b".conflict-" in name} == {
        *(path[3:] for path in later),
        kept["e"][3:],
    }


def test_what_a_killed_push_had_brought_is_no_conflict(files: Files, tmp_path: Path) -> None:
    """It met its own files as somebody else's: each got a copy beside it. What only looks alike is one."""
    work = tmp_path / "work"

    def killed(*args: Any) -> None:
        """All arrives, nothing of it comes into the record."""
        server, remote, tree, base, moved, label, _ = args
        push(server, remote, tree, dict(base), dict(moved), label, Pushed())
        raise Unavailable("killed")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fsd.client.run.push", killed)
        script = "echo newer > a; echo q > d/c; echo n > d/new; : > empty; echo 1234 > b"
        done = shell(files, tmp_path, script, work_dir=work)
    assert done.left == work
    other = os.stat(work / "tree/b")
    put(files, b"/w/b", b"4321\n", mode=0o644, mtime_ns=other.st_mtime_ns)
    done = push_left(files, work)
    assert [(one.path, get(files, one.kept_as.encode())) for one in done.pushed.conflicts] == [
        ("b", b"1234\n")
    ]
    assert (get(files, b"/w/a"), get(files, b"/w/d/c"), get(files, b"/w/d/new")) == (
        b"newer\n",
        b"q\n",
        b"n\n",
    )
    assert get(files, b"/w/b") == b"4321\n" and get(files, b"/w/empty") == b""
    assert sum(b".conflict-" in name for name in names(files)) == 1


def test_a_killed_run_is_found_and_pushed_by_the_next(
    files: Files, shared_fs: TestFs, tmp_path: Path
) -> None:
    ready, base = tmp_path / "ready", tmp_path / "base"
    child = subprocess.Popen(
        [
            *(sys.executable, "-c", CHILD, shared_fs.token, str(base)),
            f"echo new > a; rm b; echo $$ > {ready}; exec sleep 60",
        ],
        env=clean_env(),
        preexec_fn=die_with_parent,
    )
    command = int(wait_for(lambda: ready.exists() and ready.read_text().strip(), 30, "the command"))
    try:
        assert left_overs(base) == [], "it is at work"
        with pytest.raises(Busy, match="in use"):
            push_left(files, next(base.iterdir()))
        child.kill()
        child.wait(60)
    finally:
        os.kill(command, signal.SIGKILL)
    [left] = left_overs(base)
    assert get(files, b"/w/a") == b"old /w/a"
    assert push_left(files, left).exit_code == 0
    assert get(files, b"/w/a") == b"new\n" and b"b" not in names(files)
    assert left_overs(base) == [] and not left.exists()


def test_a_command_that_removes_its_own_directory_emptied_it(files: Files, tmp_path: Path) -> None:
    """As through a mount, whose top stays."""
    done = shell(files, tmp_path, 'rm -rf "$PWD"')
    assert (done.exit_code, done.left, done.error) == (0, None, None)
    assert names(files) == [] and stat_or_none(files, b"/w") is not None
    assert nothing_left(tmp_path)


@pytest.mark.parametrize(
    ("script", "word"),
    [('rm -rf "${PWD%/*}"', "removed"), ('d="$PWD"; rm -rf "$d"; ln -s /usr/bin "$d"', "no directory")],
)
def test_a_directory_that_is_another_says_nothing_about_files(
    files: Files, tmp_path: Path, script: str, word: str
) -> None:
    before = names(files)
    done = shell(files, tmp_path, script)
    assert done.exit_code == 6
    assert done.error is not None and word in done.error.message
    assert names(files) == before


def test_a_tree_that_went_after_its_run_says_nothing_about_files(
    files: Files, shared_fs: TestFs, tmp_path: Path
) -> None:
    """The run was killed, and then somebody tidied up."""
    ready, base = tmp_path / "ready", tmp_path / "base"
    argv = [sys.executable, "-c", CHILD, shared_fs.token, str(base), f"echo $$ > {ready}; exec sleep 60"]
    child = subprocess.Popen(argv, env=clean_env(), preexec_fn=die_with_parent)
    command = int(wait_for(lambda: ready.exists() and ready.read_text().strip(), 30, "the command"))
    child.kill()
    child.wait(60)
    os.kill(command, signal.SIGKILL)
    [left] = left_overs(base)
    shutil.rmtree(left / "tree")
    before = names(files)
    with pytest.raises(UsageError, match="is gone"):
        push_left(files, left)
    assert names(files) == before != []


def test_a_push_that_breaks_off_is_gone_on_with(
    files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What had arrived was taken for somebody else's: each file got a conflict copy of its own."""

    def breaks(*args: Any) -> None:
        push(*args)
        raise RuntimeError("a defect")

    with monkeypatch.context() as patch:
        patch.setattr("fsd.client.run.push", breaks)
        with pytest.raises(RuntimeError, match="a defect"):
            shell(files, tmp_path, "echo new > a; echo more > b")
    (left,) = left_overs(tmp_path / "base")
    (left / "tree" / "b").write_bytes(b"later")
    done = push_left(files, left)
    assert (done.exit_code, done.pushed.conflicts, done.pushed.files) == (0, [], 1)
    assert get(files, b"/w/a") == b"new\n" and get(files, b"/w/b") == b"later"
