"""A hostile user and an unlucky operator: each bad input gets one clear error that says what to do, the right
exit code or errno, and loses nothing. What other modules try already (names and servers through the command
line, places that will not do, a server that is away) is not repeated here."""

from __future__ import annotations

import base64
import errno
import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.cli import Outcome, process
from support.full_disk import fill
from support.proxy import DAMAGE_REQUEST, FaultProxy, on
from support.sandbox import Sandbox
from support.server import Server, TestFs

from fsd.model.errors import Unavailable


def refused(found: Outcome, code: int, *words: str) -> None:
    """One clear error: the code, words of it, what to do; nothing on stdout, no traceback."""
    assert found.code == code, found.err
    assert found.out == b""
    assert "Traceback" not in found.err
    for word in words:
        assert word in found.err
    lines = [line for line in found.err.splitlines() if line.startswith("fsd [ERROR]")]
    assert len(lines) == 1, found.err
    assert found.error["hint"], found.err


# Tokens.


def _with(token: str, readable: bytes | str) -> str:
    """`token` with another readable part, which nothing protects."""
    first, _, secret = token.split(".")
    part = readable if isinstance(readable, str) else base64.urlsafe_b64encode(readable).decode().rstrip("=")
    return f"{first}.{part}.{secret}"


@pytest.mark.parametrize(
    "readable",
    [
        b"",
        b"[]",
        b"{}",
        b"\xff",
        b"[" * 4000,
        b'{"fs":"fs_aaaaaaaaaaaaaaaaaaaa","id":"t","r":{}}',
        b'{"fs":"../../healthz","id":"t","r":{"local":"http://127.0.0.1:9"}}',
        "eyJm\ncyI6",
        "eyJm cyI6",
        "é",
    ],
)
def test_damaged_tokens(shared_fs: TestFs, readable: bytes | str) -> None:
    token = _with(shared_fs.token, readable)
    found = process("ls", "/", env={"FSD_TOKEN": token, "FSD_ENDPOINT": shared_fs.server.url})
    refused(found, 3, "token")
    assert shared_fs.token[-43:] not in found.err


def test_tokens_cut_anywhere(shared_fs: TestFs) -> None:
    for at in (0, 3, 5, 40, len(shared_fs.token) - 44, len(shared_fs.token) - 1):
        found = process("cp", "-", ":/f", env={"FSD_TOKEN": shared_fs.token[:at]}, stdin=b"x")
        refused(found, 3, "token")
    assert process("ls", "/", env=shared_fs.env).json["entries"] == []


def test_the_hint_of_a_bad_admin_key_is_about_the_admin_key(shared_server: Server, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.touch(mode=0o600)
    for given in (tmp_path / "absent", tmp_path, empty, Path("/dev/zero")):
        found = process("list", "--admin-key-file", str(given), env={"FSD_ENDPOINT": shared_server.url})
        refused(found, 3, str(given))
        assert "admin.key" in found.error["hint"]
        assert "FSD_TOKEN" not in found.err
    found = process("list", env={"FSD_ENDPOINT": shared_server.url, "FSD_ADMIN_KEY": "k\x01y"})
    refused(found, 3)
    assert "FSD_TOKEN" not in found.err


# Paths and values at their limits.


@pytest.mark.parametrize("argv", [("ls",), ("stat",), ("cat",), ("find",)])
def test_a_path_no_request_can_hold(shared_fs: TestFs, argv: tuple[str, ...]) -> None:
    refused(process(*argv, "/" + "x/" * 40_000, env=shared_fs.env), 1, "ENAMETOOLONG")


def test_files_of_proc_and_sys_are_copied_whole(shared_fs: TestFs, tmp_path: Path) -> None:
    """Their size says 0, or a page, whatever they hold."""
    for path in ("/proc/self/limits", "/proc/filesystems", "/sys/kernel/mm/transparent_hugepage/enabled"):
        assert process("cp", path, ":/copy", env=shared_fs.env).code == 0
        assert process("cat", "/copy", env=shared_fs.env).out == Path(path).read_bytes(), path
    assert process("cp", "-r", "/proc/sys/kernel/random", ":/tree", env=shared_fs.env).code == 0
    assert (
        process("cat", "/tree/boot_id", env=shared_fs.env).out
        == Path("/proc/sys/kernel/random/boot_id").read_bytes()
    )
    grown = tmp_path / "f"
    grown.write_bytes(b"")
    assert process("cp", str(grown), ":/empty", env=shared_fs.env).code == 0
    assert process("stat", "/empty", env=shared_fs.env).json["size_bytes"] == 0


def test_times_before_1970_and_after_2262(shared_fs: TestFs, tmp_path: Path) -> None:
    old, far = tmp_path / "old", tmp_path / "far"
    for path, when in ((old, -2_000_000_000), (far, 15_000_000_000)):
        path.write_bytes(b"x")
        os.utime(path, (when, when))
        assert process("cp", str(path), f":/{path.name}", env=shared_fs.env).code == 0
    found = process("find", "/", env=shared_fs.env).json["matches"]
    assert {one["name"]: one["mtime"][:4] for one in found} == {"old": "1906", "far": "2262"}
    assert process("cp", ":/old", str(tmp_path / "back"), env=shared_fs.env).code == 0
    assert (tmp_path / "back").stat().st_mtime == -2_000_000_000


def test_an_error_does_not_promise_what_only_a_mount_does() -> None:
    """Nothing keeps what a failed copy was to send."""
    assert "later" not in Unavailable("no server").hint


# Full disks and buffers under a mount. Whatever was written is there when there is room again.


def _write_until_refused(place: Path) -> dict[str, bytes]:
    """Files of a mebibyte, one after the other, until ENOSPC; what was written."""
    written: dict[str, bytes] = {}
    for number in range(64):
        data = os.urandom(1 << 20)
        try:
            with open(place / f"f{number}", "wb", buffering=0) as file:
                file.write(data)
        except OSError as exc:
            if exc.errno != errno.ENOSPC:
                raise
            return written
        written[f"f{number}"] = data
    raise AssertionError("it never was full")


def _all_there(place: Path, written: dict[str, bytes]) -> None:
    for name, data in written.items():
        assert (place / name).read_bytes() == data, name


@pytest.mark.kernel
@pytest.mark.timeout(240)
def test_a_full_buffer_is_told_in_time(shared_fs: TestFs, proxy: FaultProxy, tmp_path: Path) -> None:
    options = ("--io-timeout", "2s", "--buffer-size", "8MiB")
    box = Sandbox(tmp_path, shared_fs, *options, endpoint=proxy.url)
    try:
        box.mount()
        (box.mountpoint / "early").write_bytes(b"the directory is in memory now")
        proxy.refuse()
        written = _write_until_refused(box.mountpoint)
        assert len(written) >= 4
        assert os.fspath(box.state) in box.logs(), "the log names the place that is full"
        proxy.accept()
        assert box.unmount()["status"] == "unmounted"
        box.lose()
        box.mount()
        _all_there(box.mountpoint, written)
    finally:
        box.close()


@contextmanager
def _small_disk(place: Path) -> Iterator[Path]:
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=40m", "tmpfs", place], check=True, timeout=50)
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", place], check=True, timeout=50)


@pytest.mark.kernel
@pytest.mark.timeout(240)
@pytest.mark.parametrize("filled", [False, True], ids=["nearly", "to the last byte"])
def test_a_disk_filled_by_others_under_the_state_directory(
    shared_fs: TestFs, proxy: FaultProxy, tmp_path: Path, filled: bool
) -> None:
    with _small_disk(tmp_path / "disk") as disk:
        box = Sandbox(
            tmp_path / "box", shared_fs, "--io-timeout", "2s", state=disk / "state", endpoint=proxy.url
        )
        try:
            box.mount()
            (box.mountpoint / "early").write_bytes(b"early")
            fill(disk / "filler")
            proxy.refuse()
            written = {"early": b"early", **_write_until_refused(box.mountpoint)}
            box.kill()
            box.detach()
            proxy.accept()
            if filled:
                fill(disk / "more")
                argv = ("mount", os.fspath(box.mountpoint), "--state-dir", os.fspath(box.state))
                done = box.fsd(*argv, "--no-supervisor", check=False)
                if done.returncode:
                    assert done.returncode == 1
                    assert f"the disk under the state directory {box.state}" in done.stderr
                    assert not os.path.ismount(box.mountpoint)
                else:
                    box.fsd("unmount", os.fspath(box.mountpoint))
                # The first filler too: the second may have found next to nothing to take.
                (disk / "more").unlink()
                (disk / "filler").unlink()
            box.mount()
            _all_there(box.mountpoint, written)
            (disk / "filler").unlink(missing_ok=True)
            (box.mountpoint / "late").write_bytes(b"late")
            assert box.unmount()["status"] == "unmounted"
        finally:
            box.close()
    for name, data in {**written, "late": b"late"}.items():
        assert process("cat", f"/{name}", env=shared_fs.env).out == data


# State directories that are not what a mount left.


def _flip(path: Path, at: int) -> None:
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 0xFF]))


def _logs(box: Sandbox) -> tuple[Path, list[Path]]:
    """The mount's own state directory and the segments in it."""
    (own,) = (box.state / "mounts").iterdir()
    return own, sorted(own.glob("log.*"))


@pytest.mark.kernel
@pytest.mark.timeout(240)
@pytest.mark.parametrize("at", [0, 60, 1500], ids=["first header", "first payload", "data"])
def test_a_log_damaged_in_the_middle_is_told_and_kept(
    shared_fs: TestFs, proxy: FaultProxy, tmp_path: Path, at: int
) -> None:
    """What cannot be read is not deleted as if it had been sent."""
    box = Sandbox(tmp_path, shared_fs, endpoint=proxy.url)
    try:
        box.mount()
        (box.mountpoint / "early").write_bytes(b"early")
        proxy.refuse()
        (box.mountpoint / "a").write_bytes(b"a" * 5000)
        (box.mountpoint / "b").write_bytes(b"only copy of b" * 100)
        box.kill()
        box.detach()
        own, (segment,) = _logs(box)
        _flip(segment, at)
        before = segment.read_bytes()
        proxy.accept()
        argv = ("mount", os.fspath(box.mountpoint), "--state-dir", os.fspath(box.state), *box.options)
        done = box.fsd(*argv)
        box.pids.append(json.loads(done.stdout)["pid"])
        (copy,) = (own / "damaged").glob("*/log.*")
        assert copy.read_bytes() == before
        assert str(copy.parent) in done.stderr
        assert str(copy.parent) in box.logs()
        box.unmount()
        found = box.fsd(
            "recover", os.fspath(box.mountpoint), "--state-dir", os.fspath(box.state), check=False
        )
        assert found.returncode == 1
        assert json.loads(found.stdout)["damaged_logs"] == [os.fspath(copy.parent)]
    finally:
        box.close()


@pytest.mark.kernel
@pytest.mark.timeout(240)
def test_a_torn_tail_is_no_damage(shared_fs: TestFs, proxy: FaultProxy, tmp_path: Path) -> None:
    """A process that is killed in a write leaves whole pages of the record, in order, and no more."""
    box = Sandbox(tmp_path, shared_fs, endpoint=proxy.url)
    try:
        box.mount()
        (box.mountpoint / "early").write_bytes(b"early")
        proxy.refuse()
        (box.mountpoint / "a").write_bytes(b"a" * 5000)
        fd = os.open(box.mountpoint / "b", os.O_WRONLY | os.O_CREAT)
        os.write(fd, b"b" * 20_000)
        box.kill()
        with pytest.raises(OSError, match="not connected"):
            os.close(fd)
        box.detach()
        own, (segment,) = _logs(box)
        written = segment.read_bytes()
        last = written.rindex(b"b" * 4096 * 2) // 4096 * 4096
        segment.write_bytes(written[:last] + bytes(len(written) - last))
        proxy.accept()
        box.mount()
        assert (box.mountpoint / "a").read_bytes() == b"a" * 5000
        assert (box.mountpoint / "b").read_bytes() == b""
        assert not (own / "damaged").exists()
        box.unmount()
    finally:
        box.close()


@pytest.mark.kernel
@pytest.mark.timeout(240)
@pytest.mark.parametrize("what", ["log", "lock", "refused"])
def test_a_directory_or_file_in_the_way_is_named(shared_fs: TestFs, tmp_path: Path, what: str) -> None:
    box = Sandbox(tmp_path, shared_fs)
    try:
        box.mount()
        box.unmount()
        (own,) = (box.state / "mounts").iterdir()
        way = own / {"log": "log.0000000000000009", "lock": "lock", "refused": "refused"}[what]
        way.unlink(missing_ok=True)
        if what == "refused":
            way.write_bytes(b"")
        else:
            way.mkdir()
        (own / "log.zzzzzzzzzzzzzzzz").write_bytes(b"not a segment")
        argv = ("mount", os.fspath(box.mountpoint), "--state-dir", os.fspath(box.state), "--no-supervisor")
        done = box.fsd(*argv, check=False)
        assert done.returncode == 2, done.stderr
        assert os.fspath(own) in done.stderr
        assert "ExceptionGroup" not in done.stderr
        assert not os.path.ismount(box.mountpoint)
        assert way.exists()
    finally:
        box.close()


@pytest.mark.kernel
@pytest.mark.parametrize("state", ["/proc/nothing", "/dev/null/x", __file__])
def test_a_state_directory_that_cannot_be(shared_fs: TestFs, tmp_path: Path, state: str) -> None:
    point = tmp_path / "m"
    point.mkdir()
    refused(process("mount", str(point), "--state-dir", state, env=shared_fs.env), 2, state)
    assert not os.path.ismount(point)


@pytest.mark.kernel
@pytest.mark.timeout(240)
def test_a_mount_point_of_any_bytes(shared_fs: TestFs, tmp_path: Path) -> None:
    base = os.fsencode(tmp_path)
    state = base + b"/state"
    for name in (b"\xff\xfe", b"a b\n\t\\c", "ü日".encode() * 40):
        point = base + b"/" + name
        os.mkdir(point)
        argv = ("mount", point, "--state-dir", state)
        try:
            found = process(*argv, env=shared_fs.env)
            assert found.code == 0, found.err
            with open(point + b"/f", "wb") as file:
                file.write(name)
            assert process("status", point, env=shared_fs.env).code == 0
        finally:
            found = process("unmount", point, env=shared_fs.env)
        assert found.code == 0, found.err
        assert process("cat", "/f", env=shared_fs.env).out == name
    sessions = process("mounts", "--all", env=shared_fs.env).json["sessions"]
    assert len(sessions) == 3


def test_find_by_time(shared_fs: TestFs) -> None:
    assert shared_fs.ask("PUT", "/files/f", b"x").status == 200
    for flags, names in (
        (("--newer", "2026-01-31"), ["f"]),
        (("--older", "2026-01-31"), []),
        (("--newer", "1971-01-01", "--older", "2200-01-01T00:00:00Z"), ["f"]),
    ):
        found = process("find", "/", *flags, env=shared_fs.env)
        assert [one["name"] for one in found.json["matches"]] == names, flags


# An unlucky operator of the server.


def _serve(*options: str, cwd: Path) -> Outcome:
    """`fsd serve` that must refuse to start."""
    return process("serve", *options, "--listen", "127.0.0.1:0", cwd=cwd, timeout=50)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (("--data-dir", ""), "--data-dir is empty"),
        (("--data-dir", "d", "--blobs", "ftp://x/y"), "s3://"),
        (("--data-dir", "d", "--tls-cert", __file__, "--tls-key", __file__), "PEM"),
        (("--data-dir", "/proc/nothing"), "/proc/nothing"),
    ],
)
def test_a_server_that_cannot_be_started_so(tmp_path: Path, options: tuple[str, ...], word: str) -> None:
    refused(_serve(*options, cwd=tmp_path), 2, word)
    assert not (tmp_path / "fsd.db").exists()


def test_an_empty_path_is_not_the_working_directory(shared_fs: TestFs, tmp_path: Path) -> None:
    point = tmp_path / "m"
    point.mkdir()
    refused(process("mount", str(point), "--state-dir", "", env=shared_fs.env, cwd=tmp_path), 2, "is empty")
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


@pytest.mark.parametrize("how", ["emptied", "gone"])
def test_a_database_that_went_away_is_not_begun_anew(server: Server, tmp_path: Path, how: str) -> None:
    """Its packs are still there: whoever restores the database has everything."""
    fs = server.create()
    data = os.urandom(200_000)
    assert fs.ask("PUT", "/files/f", data).status == 200
    assert server.stop() == 0
    database, saved = server.data_dir / "fsd.db", tmp_path / "saved"
    database.rename(saved)
    if how == "emptied":
        database.touch()
    found = _serve("--data-dir", str(server.data_dir), cwd=tmp_path)
    refused(found, 1, "missing or empty", str(database))
    saved.rename(database)
    server.restart()
    assert fs.ask("GET", "/files/f").body == data


@pytest.mark.kernel
@pytest.mark.timeout(240)
def test_requests_damaged_on_the_way_are_sent_again(
    shared_fs: TestFs, proxy: FaultProxy, tmp_path: Path
) -> None:
    """Taken for the sender's fault, they would be put aside as refused."""
    box = Sandbox(tmp_path, shared_fs, endpoint=proxy.url)
    try:
        box.mount()
        written = {}
        for number, size in enumerate((10, 3000, 3_000_000)):
            proxy.next(DAMAGE_REQUEST, on("commits"), times=2)
            proxy.next(DAMAGE_REQUEST, on("packs"))
            written[f"f{number}"] = data = os.urandom(size)
            with open(box.mountpoint / f"f{number}", "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        status = box.status()
        assert status["refused"] == 0
        assert status["conflicts"] == 0
        assert box.unmount()["status"] == "unmounted"
    finally:
        box.close()
    for name, data in written.items():
        assert process("cat", f"/{name}", env=shared_fs.env).out == data


@pytest.mark.kernel
@pytest.mark.timeout(240)
def test_a_subtree_of_any_bytes(shared_fs: TestFs, tmp_path: Path) -> None:
    point = tmp_path / "m"
    point.mkdir()
    for name in (b"\xff\xfe", b"a b\n"):
        assert process("mkdir", b"/" + name, env=shared_fs.env).code == 0
        argv = ("mount", str(point), "--state-dir", str(tmp_path / "state"), "--remote-path", b"/" + name)
        found = process(*argv, env=shared_fs.env)
        assert found.code == 0, found.err
        try:
            (point / "f").write_bytes(name)
        finally:
            assert process("unmount", str(point), env=shared_fs.env).code == 0
        assert process("cat", b"/" + name + b"/f", env=shared_fs.env).out == name


@pytest.mark.kernel
@pytest.mark.timeout(240)
def test_the_state_of_another_filesystem_is_refused_and_stays(
    shared_server: Server, shared_fs: TestFs, proxy: FaultProxy, tmp_path: Path
) -> None:
    one, other = Sandbox(tmp_path, shared_fs, endpoint=proxy.url), shared_server.create()
    argv = ("mount", os.fspath(one.mountpoint), "--state-dir", os.fspath(one.state), "--no-supervisor")
    try:
        one.mount()
        (one.mountpoint / "early").write_bytes(b"early")
        proxy.refuse()
        (one.mountpoint / "mine").write_bytes(b"mine")
        one.kill()
        one.detach()
        proxy.accept()
        own, _ = _logs(one)
        # A mount of the other filesystem at the same place names its directory itself; ours is put there.
        env = {**one.env, **other.env}
        made = process(*argv, env=env)
        assert made.code == 0, made.err
        assert process("unmount", os.fspath(one.mountpoint), env=env).code == 0
        theirs = Path(made.json["state_dir"])
        theirs.rename(tmp_path / "aside")
        own.rename(theirs)
        found = process(*argv, env=env)
        refused(found, 2, f"belongs to filesystem {shared_fs.id}")
        assert not os.path.ismount(one.mountpoint)
        theirs.rename(own)
        one.mount()
        assert (one.mountpoint / "mine").read_bytes() == b"mine"
        one.unmount()
    finally:
        one.close()


@pytest.mark.parametrize("text", [b"%d/x" % 2**70, b"-1/x", b"x/x", b"/", b"\xff"])
def test_a_cursor_of_conflicts_that_is_none(shared_fs: TestFs, text: bytes) -> None:
    cursor = base64.urlsafe_b64encode(text).decode()
    assert shared_fs.ask("GET", f"/conflicts/?cursor={cursor}").status == 400


@pytest.mark.parametrize("field", ["host", "detail"])
def test_texts_of_a_conflict_that_no_database_holds(shared_fs: TestFs, field: str) -> None:
    assert shared_fs.ask("PUT", "/files/copy", b"x").status == 200
    for text in ("a\0b", "x" * 10_000):
        answer = shared_fs.ask("POST", "/conflicts/copy", {"original": "/f", field: text})
        assert (answer.status, answer.json["error"]["code"]) == (400, "invalid_argument")
    assert shared_fs.ask("GET", "/conflicts/").json["conflicts"] == []


def test_what_others_call_themselves_does_not_reach_the_terminal_as_it_is(shared_fs: TestFs) -> None:
    assert shared_fs.ask("PUT", "/files/copy", b"x").status == 200
    said = {"original": "/f\x1b[2J\n", "host": "other\x1b]0;title\x07\nlost  /x", "detail": "\x9b31m"}
    assert shared_fs.ask("POST", "/conflicts/copy", said).status == 200
    found = process("conflicts", "/", "--output", "text", env=shared_fs.env)
    lines = found.out.decode().splitlines()
    assert len(lines) == 1
    assert lines[0].isprintable()
    assert process("conflicts", "/", env=shared_fs.env).json["conflicts"][0]["host"] == said["host"]
