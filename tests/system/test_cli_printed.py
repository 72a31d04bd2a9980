"""What commands print, and where: one document, errors of the output itself, readers that go away, ^C."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from support.server import TestFs
from test_cli import fsd


def test_a_reader_that_goes_away_is_no_error_message(shared_fs: TestFs) -> None:
    fsd(shared_fs, "cp", "-", ":/big", stdin=b"line\n" * 2_000_000)
    script = f'"{sys.executable}" -m fsd cat /big | head -n 1; echo "${{PIPESTATUS[0]}}"'
    env = {"PATH": os.environ["PATH"], **shared_fs.env}
    done = subprocess.run(["bash", "-c", script], env=env, capture_output=True, timeout=60, check=True)
    first, code = done.stdout.split()
    assert first == b"line"
    assert code == b"141"
    assert done.stderr == b""


def test_one_document_on_stdout_and_nothing_else(shared_fs: TestFs) -> None:
    for argv in (
        ("fs", "create-directory", "--path", "/one"),
        ("ls", "/"),
        ("conflicts",),
        ("mounts", "--all"),
    ):
        assert isinstance(fsd(shared_fs, *argv).json, dict)


def test_entries_that_are_followed_are_safe_for_a_terminal(shared_fs: TestFs) -> None:
    fsd(shared_fs, "journal", "create", "shown")
    entry = '{"type": "note", "text": "u\x9b2J"}'
    fsd(shared_fs, "journal", "append", "shown", "--entry-json", entry)
    read = fsd(shared_fs, "journal", "read", "shown", "--output", "text").text
    follow = ("journal", "follow", "shown", "--count", "1", "--output", "text")
    assert fsd(shared_fs, *follow).text == read
    assert r"u\x9b2J" in read


def test_errors_of_the_output_are_told(shared_fs: TestFs) -> None:
    fsd(shared_fs, "cp", "-", ":/file", stdin=b"x" * 100_000)
    env = {"PATH": os.environ["PATH"], **shared_fs.env}

    def run(command: str) -> tuple[int, bytes]:
        words = ["bash", "-c", f'"{sys.executable}" -m fsd {command}']
        done = subprocess.run(words, env=env, capture_output=True, timeout=60, check=False)
        return done.returncode, done.stderr

    for command in ("cat /file", "ls /", "--help"):
        code, told = run(f"{command} > /dev/full")
        assert code == 1, command
        assert told.count(b"fsd [ERROR]") == 1, "told once"
        assert b"No space left" in told
        assert b"Traceback" not in told
    assert run("--help | true; exit ${PIPESTATUS[0]}") == (141, b"")
    # Who closed the output wants no answer; bytes that were asked for and went nowhere are an error.
    assert run("ls / >&-") == (0, b"")
    assert run("ls / >&- 2>&-") == (0, b"")
    code, told = run("cat /file >&-")
    assert (code, b"standard output failed: Bad file descriptor" in told) == (1, True), told
    assert run("cp :/file - >&-")[0] == 1
    # Messages that cannot be written change no exit code.
    assert run("cat /none 2>/dev/full") == (5, b"")
    assert run("nonsense 2>/dev/full") == (2, b"")
    assert run("cat /none 2> >(true); exit $?")[0] == 5


def test_ctrl_c_ends_a_copy_with_130_and_leaves_no_half_file(shared_fs: TestFs) -> None:
    copy = subprocess.Popen(
        [sys.executable, "-m", "fsd", "cp", "-", ":/half"],
        env={"PATH": os.environ["PATH"], **shared_fs.env},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        assert copy.stdin is not None
        copy.stdin.write(b"x" * 9_000_000)  # more than it keeps in memory, so it is sending
        copy.stdin.flush()
        copy.send_signal(signal.SIGINT)
        out, err = copy.communicate(timeout=30)
    finally:
        copy.kill()
    assert copy.returncode == 130, err.decode()
    assert out == b""
    assert b"Traceback" not in err
    assert fsd(shared_fs, "stat", "/half", code=5)
