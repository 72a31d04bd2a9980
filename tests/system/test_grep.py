"""`fsd grep`: content searched by path, without a mount."""

from __future__ import annotations

import base64
import os
import signal
import subprocess
import sys
from pathlib import Path

from support.cli import Outcome, process
from support.processes import die_with_parent
from support.server import TestFs, clean_env
from support.wait import wait_for

from fsd.client import grep as searching
from fsd.client.files import Files
from fsd.client.http import Http
from fsd.client.identity import Claim, data_identity
from fsd.host.seam import Host
from fsd.model.limits import GREP_LINE_MAX, GREP_LINE_SHOWN


def put(fs: TestFs, path: str, data: bytes) -> None:
    assert fs.ask("PUT", f"/files{path}?parents=1", data).status == 200


def processor_time(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def grep(fs: TestFs, *argv: str | bytes) -> Outcome:
    return process("grep", *argv, env=fs.env)


def lines(found: Outcome) -> list[tuple[str, int, str]]:
    assert found.code == 0, found.err
    return [(m["path"], m["line"], m["text"]) for m in found.json["matches"]]


def test_lines_of_files_in_order(shared_fs: TestFs) -> None:
    put(shared_fs, "/b", b"one\nTODO two\r\nthree\nTODO last")
    put(shared_fs, "/a/x", "todo ä\nTODO ö\n".encode())
    put(shared_fs, "/a/binary", b"TODO\0")
    put(shared_fs, "/a/empty", b"")
    put(shared_fs, "/a/%FF", b"TODO \xff\n")
    found = grep(shared_fs, "TODO")
    assert lines(found) == [
        ("/a/x", 2, "TODO ö"),
        ("/a/\\xff", 1, "TODO \\xff"),
        ("/b", 2, "TODO two"),
        ("/b", 4, "TODO last"),
    ]
    odd = found.json["matches"][1]
    assert (
        base64.b64decode(odd["path_b64"]) == b"/a/\xff" and base64.b64decode(odd["text_b64"]) == b"TODO \xff"
    )
    assert (found.json["files_searched"], found.json["files_binary"]) == (4, 1)
    assert found.json["truncated"] is False
    assert lines(grep(shared_fs, "-i", "^todo .$", "/a/x")) == [("/a/x", 1, "todo ä"), ("/a/x", 2, "TODO ö")]
    assert lines(grep(shared_fs, b"TODO \xff", "/")) == [("/a/\\xff", 1, "TODO \\xff")]
    assert lines(grep(shared_fs, "nowhere")) == []
    text = process("grep", "two", "/b", "--output", "text", env=shared_fs.env)
    assert text.text == "/b:2:TODO two\n"
    old = process("fs", "search-file-content", "--pattern", "last$", "--path", "/", env=shared_fs.env)
    assert lines(old) == [("/b", 4, "TODO last")]


def test_bounds_and_refusals(shared_fs: TestFs) -> None:
    for number in range(70):  # more than one batch
        put(shared_fs, f"/d/{number:02}", b"x\n" * 3)
    some = grep(shared_fs, "x", "/d", "--limit", "200")
    assert len(lines(some)) == 200 and some.json["truncated"] is True
    assert lines(some)[-1] == ("/d/66", 2, "x")
    whole = grep(shared_fs, "x", "/d", "--limit", "210")
    assert len(lines(whole)) == 210 and whole.json["truncated"] is False
    assert grep(shared_fs, "(", "/").code == 2
    assert grep(shared_fs, "x", "/none").code == 5
    assert grep(shared_fs, "x", "relative").code == 2


def test_a_long_line_is_searched_in_parts(shared_fs: TestFs) -> None:
    put(shared_fs, "/long", b"a" * (2 * GREP_LINE_MAX + 5) + b"needle\nneedle\n")
    api = Files(Http(data_identity(Claim(token=shared_fs.token)), Host()))
    found = searching.grep(api, b"/long", searching.compiled("needle", ignore_case=False), 10)
    assert [one["line"] for one in found.matches] == [1, 2]
    assert len(found.matches[0]["text"]) <= GREP_LINE_SHOWN


def test_only_what_is_there_is_a_line(shared_fs: TestFs) -> None:
    put(shared_fs, "/ended", b"a\n\nb\n")
    put(shared_fs, "/open", b"a\n\nb")
    put(shared_fs, "/empty", b"")
    put(shared_fs, "/long", b"a" * (GREP_LINE_MAX + 1) + b"\n")
    assert lines(grep(shared_fs, "^$")) == [("/ended", 2, ""), ("/open", 2, "")]
    assert [m[:2] for m in lines(grep(shared_fs, "", "/open"))] == [("/open", 1), ("/open", 2), ("/open", 3)]


def test_a_long_line_is_told_once_and_cut_between_characters(shared_fs: TestFs) -> None:
    put(shared_fs, "/long", b"a" + "ä".encode() * GREP_LINE_MAX + b"\nend\n")
    found = grep(shared_fs, "ä|end", "/long")
    assert [line for _, line, _ in lines(found)] == [1, 2]
    first = found.json["matches"][0]
    assert "text_b64" not in first and len(first["text"].encode()) == GREP_LINE_SHOWN - 1


def test_a_link_is_followed_where_it_is_named(shared_fs: TestFs) -> None:
    put(shared_fs, "/d/f", b"x\n")
    for link, target in (("/to-file", "d/f"), ("/to-directory", "d"), ("/d/inside", "f")):
        got = shared_fs.ask("POST", "/actions", {"action": "symlink", "path": link, "target": target})
        assert got.status == 200, got.body
    for top in ("/to-file", "/to-directory", "/"):
        assert lines(grep(shared_fs, "x", top)) == [("/d/f", 1, "x")], top


def test_ctrl_c_ends_an_expression_that_explodes(shared_fs: TestFs, tmp_path: Path) -> None:
    put(shared_fs, "/f", b"a" * 60 + b"!\n")
    with (tmp_path / "err").open("wb") as err:
        running = subprocess.Popen(
            [sys.executable, "-m", "fsd", "grep", "(a+)+$"],
            env=clean_env(**shared_fs.env),
            stdout=err,
            stderr=err,
            preexec_fn=die_with_parent,
        )
    try:
        wait_for(lambda: processor_time(running.pid) > 2, 60, "it to search")
        running.send_signal(signal.SIGINT)
        assert running.wait(60) == -signal.SIGINT, (tmp_path / "err").read_text()
    finally:
        running.kill()
        running.wait(60)


def test_as_it_was(shared_fs: TestFs, tmp_path: Path) -> None:
    put(shared_fs, "/f", b"before\n")
    made = shared_fs.ask("POST", "/checkpoints", {}).json["checkpoint_id"]
    put(shared_fs, "/f", b"after\n")
    assert lines(grep(shared_fs, "before|after", "/", "--checkpoint", made)) == [("/f", 1, "before")]
    assert lines(grep(shared_fs, "before|after")) == [("/f", 1, "after")]
