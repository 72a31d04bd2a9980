"""What people and agents type from habit: several paths, modes as changes, `ln -sfn`, `cp -a`."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from support.cli import Outcome, inside
from support.server import TestFs

from fsd.cli import modes
from fsd.client.files import Files
from fsd.model.errors import Unavailable

CHANGES = (
    *("644", "0755", "4711", "u+x", "+x", "go-w", "a=rX", "a=,u+rw", "u=rwx,g=rx,o=", "g=u", "o+g-x", "u+s"),
    *("g+s", "+t", "-t", "ug-s", "=", "+w", "-x", "a+X", "o=u-w", "g-s,+X", "u=g,o=u"),
)


def run(fs: TestFs, *argv: str, code: int = 0, stdin: bytes = b"") -> Outcome:
    done = inside(*argv, env=fs.env, stdin=stdin)
    assert done.code == code, (argv, done.code, done.out, done.err)
    return done


def mode(fs: TestFs, path: str) -> str:
    found: str = run(fs, "stat", path).json["mode"]
    return found


@pytest.mark.parametrize("directory", [False, True])
def test_a_change_of_a_mode_is_what_chmod_makes_of_it(tmp_path: Path, directory: bool) -> None:
    """Against the system's own chmod. (Of octal digits it keeps a directory's set-id bits; we take them.)"""
    befores = (0o644, 0o755, 0o000, 0o2770, 0o4751, 0o1777)
    places = [tmp_path / f"{before:o}" for before in befores]
    for place in places:
        place.mkdir() if directory else place.touch()
    for text in (text for text in CHANGES if not (directory and text[0].isdigit())):
        for place, before in zip(places, befores):
            os.chmod(place, before)
        subprocess.run(["chmod", "--", text, *places], check=False, stderr=subprocess.DEVNULL)
        for place, before in zip(places, befores):
            after = os.stat(place).st_mode & 0o7777
            absolute = modes.absolute(modes.change(text))
            ours = modes.applied(text, before, directory=directory) if absolute is None else absolute
            assert oct(ours) == oct(after), (oct(before), text)


@pytest.mark.parametrize("text", ["", "x", "u", "u+y", "9", "88888", "u+x,", "+rwg", "755,u+x", "o"])
def test_what_is_no_mode(shared_fs: TestFs, text: str) -> None:
    before = mode(shared_fs, "/")
    assert "MODE" in run(shared_fs, "chmod", text, "/", code=2).err
    assert mode(shared_fs, "/") == before


def test_several_paths(shared_fs: TestFs) -> None:
    fs = shared_fs
    assert [one["path"] for one in run(fs, "mkdir", "/a", "/b", "-p", "/c/d").json["results"]] == [
        *("/a", "/b", "/c/d")
    ]
    for name in ("/a/x", "/b/y"):
        run(fs, "cp", "-", f":{name}", stdin=name.encode() + b"\n")
    assert run(fs, "cat", "/a/x", "/b/y").out == b"/a/x\n/b/y\n"
    partly = run(fs, "cat", "/a/x", "/nope", "/b/y", code=5)
    assert partly.out == b"/a/x\n/b/y\n" and "/nope" in partly.err
    run(fs, "cat", "/a/x", "/b/y", "--offset", "1", code=2)
    for argv in (("cat", "/a/x"), ("mkdir", "/new"), ("chmod", "700", "/a"), ("ls", "/a"), ("stat", "/a")):
        wrong = run(fs, *argv, "b", code=2)
        assert "'b'" in wrong.err and wrong.out == b"", "before anything is done"
    run(fs, "stat", "/new", code=5)
    assert mode(fs, "/a") == "755"
    assert run(fs, "ls", "/a", "/b", "--output", "text").text == "/a:\nx\n\n/b:\ny\n"
    listed = run(fs, "ls", "/a", "/none", "/b", "/gone", code=5)
    assert [one["path"] for one in listed.json["results"]] == ["/a", "/b"]
    assert [(one["path"], one["code"]) for one in listed.json["failed"]] == [
        *(("/none", "not_found"), ("/gone", "not_found"))
    ]
    assert "/none" in listed.err and "/gone" in listed.err
    assert [one["size_bytes"] for one in run(fs, "stat", "/a/x", "/b/y").json["results"]] == [5, 5]
    text = run(fs, "stat", "/a/x", "/b/y", "--output", "text").text
    assert text.startswith("/a/x:\npath") and "\n\n/b/y:\npath" in text
    assert run(fs, "ls", "/a").json.keys() == {"path", "entries", "next_after"}, "one prints what it did"

    dry = run(fs, "rm", "/a/x", "/nope", "--dry-run", code=5)
    assert dry.json["would_send_request"] is False
    assert dry.json["request"]["description"] == "remove /a/x, /nope"
    run(fs, "rm", "/a/x", "b/y", code=2)
    gone = run(fs, "rm", "-rf", "/a", "/nope", "/b").json
    assert [one["removed"] for one in gone["results"]] == [2, 0, 2] and gone["failed"] == []
    some = run(fs, "rm", "/nope", "/c", "/c/d", code=5).json
    assert [one["path"] for one in some["results"]] == ["/c/d"]
    assert [one["path"] for one in some["failed"]] == ["/nope", "/c"]
    run(fs, "rm", "/c")


def test_modes_of_trees(shared_fs: TestFs) -> None:
    fs = shared_fs
    run(fs, "mkdir", "-p", "/t/d")
    for name in ("/t/run", "/t/d/plain"):
        run(fs, "cp", "-", f":{name}", "--mode", "640", stdin=b"x")
    run(fs, "ln", "-s", "run", "/t/link")
    assert run(fs, "chmod", "u+x", "/t/run").json.keys() == {"action", "status", "fs_seq", "stat", "path"}
    assert mode(fs, "/t/run") == "740"
    done = run(fs, "chmod", "-R", "a=rX,u+w", "/t").json
    assert done["changed"] == 3, "/t, run and plain; d has it already"
    assert [mode(fs, path) for path in ("/t", "/t/d", "/t/run", "/t/d/plain")] == ["755", "755", "755", "644"]
    run(fs, "chmod", "go=", "/t/run", "/t/d/plain")
    assert [mode(fs, path) for path in ("/t/run", "/t/d/plain")] == ["700", "600"]
    run(fs, "chmod", "-R", "700", "/t", "--dry-run")
    assert mode(fs, "/t") == "755"
    run(fs, "fs", "chmod-file", "--path", "/t", "--mode", "o-rx")
    assert mode(fs, "/t") == "750"
    run(fs, "chmod", "u+x", "/none", code=5)


def test_links_in_the_place_of_others(shared_fs: TestFs) -> None:
    fs = shared_fs
    for name in ("/one", "/two"):
        run(fs, "cp", "-", f":{name}", stdin=name.encode())
    run(fs, "ln", "-s", "one", "/latest")
    run(fs, "ln", "-s", "two", "/latest", code=1)
    run(fs, "ln", "-sfn", "two", "/latest")
    assert run(fs, "stat", "/latest").json["target"] == "two"
    run(fs, "ln", "-sf", "two", "/fresh")
    run(fs, "ln", "/one", "/two", code=1)
    assert run(fs, "ln", "-f", "/one", "/two", "--dry-run").json["would_send_request"] is True
    assert run(fs, "cat", "/two").out == b"/two"
    done = run(fs, "ln", "-f", "/one", "/two").json
    assert done["action"] == "hardlink" and done["stat"]["path"] == "/two"
    assert run(fs, "cat", "/two").out == b"/one" and run(fs, "stat", "/one").json["nlink"] == 2
    run(fs, "ln", "-f", "/one", "/two", code=1)  # the same file: it stays
    run(fs, "ln", "-f", "/none", "/two", code=5)
    assert run(fs, "cat", "/two").out == b"/one"
    run(fs, "ln", "-f", "/one", "/latest")
    assert run(fs, "stat", "/one").json["nlink"] == 3
    run(fs, "mkdir", "/dir")
    run(fs, "ln", "-sf", "one", "/dir", code=1)
    run(fs, "ln", "-f", "/one", "/dir", code=1)


def test_a_link_that_cannot_take_the_place_leaves_what_is_there(
    shared_fs: TestFs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second of its two requests fails: the name has never led nowhere, and nothing is left beside it."""
    fs = shared_fs
    for name in ("/one", "/two"):
        run(fs, "cp", "-", f":{name}", stdin=name.encode())

    def refused(*_: object, **__: object) -> None:
        assert run(fs, "cat", "/two").out == b"/two"
        raise Unavailable("away")

    with monkeypatch.context() as patch:
        patch.setattr(Files, "rename", refused)
        assert "away" in run(fs, "ln", "-f", "/one", "/two", code=1).err
    assert run(fs, "cat", "/two").out == b"/two"
    assert [one["name"] for one in run(fs, "ls", "/").json["entries"]] == ["one", "two"]


def test_an_archive_is_a_tree(shared_fs: TestFs, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "f").write_text("x")
    os.utime(tree / "f", (1, 1))
    (tree / "l").symlink_to("f")
    run(shared_fs, "cp", "-a", os.fspath(tree), ":/kept")
    assert run(shared_fs, "stat", "/kept/f").json["mtime"].startswith("1970-01-01T00:00:01")
    assert run(shared_fs, "stat", "/kept/l").json["target"] == "f"


def test_what_is_in_a_tree(shared_fs: TestFs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`cp -r dir/. there/` in all three directions: the way into the root, and out of it."""
    fs = shared_fs
    tree = tmp_path / "tree"
    (tree / "d").mkdir(parents=True)
    (tree / "d" / "f").write_text("x")

    def names(*argv: str) -> list[str]:
        return [one["path"] for one in run(fs, "ls", "-r", *argv).json["entries"]]

    run(fs, "cp", "-r", os.fspath(tree) + "/.", ":/")
    assert names("/") == ["/d", "/d/f"]
    run(fs, "cp", "-r", ":/d/.", ":/e/")
    run(fs, "cp", "-r", ":/d", ":/e/")
    assert names("/e") == ["/e/d", "/e/d/f", "/e/f"]
    monkeypatch.chdir(tree)
    run(fs, "cp", "-r", ".", ":/here/")
    run(fs, "cp", "-r", "./", ":/slash/")
    run(fs, "cp", "-r", os.fspath(tree), ":/named/")
    assert names("/here") == ["/here/d", "/here/d/f"] and names("/slash") == ["/slash/d", "/slash/d/f"]
    assert names("/named") == ["/named/tree", "/named/tree/d", "/named/tree/d/f"]
    into = tmp_path / "into"
    into.mkdir()
    run(fs, "cp", "-r", ":/here/.", f"{into}/")
    assert (into / "d" / "f").read_text() == "x"
    run(fs, "cp", "-r", ":/here", f"{into}/")
    assert (into / "here" / "d" / "f").read_text() == "x"
    monkeypatch.chdir(into)
    run(fs, "cp", "-r", ":/e/.", ".")
    assert (into / "f").read_text() == "x"
    run(fs, "cp", "-r", ":/d/f/.", f"{into}/", code=1)  # a file has nothing in it


def test_several_sources_go_into_a_directory(shared_fs: TestFs, tmp_path: Path) -> None:
    fs = shared_fs
    names = [*("s one", "s two", "s-three")]
    for name in names:
        (tmp_path / name).write_text(name)
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "leaf").write_text("leaf")
    here = [os.fspath(tmp_path / name) for name in names]
    run(fs, "mkdir", "/into", "/into/other")

    done = run(fs, "cp", *here, ":/into").json
    assert [one["target_path"] for one in done["results"]] == [f"/into/{name}" for name in names]
    assert run(fs, "cat", *(f"/into/{name}" for name in names)).text == "".join(names)
    run(fs, "cp", "-r", os.fspath(tmp_path / "tree"), here[0], ":/into/other/")
    assert run(fs, "cat", "/into/other/tree/leaf", "/into/other/s one").text == "leafs one"
    back = tmp_path / "back"
    back.mkdir()
    run(fs, "cp", "-r", ":/into/other", ":/into/s two", f"{back}/")
    assert (back / "other" / "tree" / "leaf").read_text() == "leaf" and (
        back / "s two"
    ).read_text() == "s two"
    run(fs, "cp", ":/into/s one", here[1], ":/into/other")  # from there and from here
    assert run(fs, "cat", "/into/other/s two").text == "s two"

    partly = run(fs, "cp", here[0], os.fspath(tmp_path / "none"), here[2], ":/into/other", code=5)
    assert [one["source_path"] for one in partly.json["results"]] == [here[0], here[2]]
    assert [one["path"] for one in partly.json["failed"]] == [os.fspath(tmp_path / "none")]

    dry = run(fs, "cp", *here, ":/into", "--dry-run").json["request"]["description"]
    assert dry == f"copy {', '.join(here)} to :/into"


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (("cp", "{a}", "{b}", ":/nodir"), "/nodir is none"),
        (("cp", "{a}", "{b}", ":/nodir/"), "/nodir/ is none"),
        (("cp", "{a}", "{b}", ":/file"), "/file is none"),
        (("cp", ":/file", ":/there", "{a}"), "is none"),
        (("cp", "{a}", "-", ":/there"), "a stream is one file"),
        (("cp", ":/file", ":/file2", "-"), "a stream is one file"),
        (("cp", "{a}", "{d}/a", ":/there"), "have one name"),
        (("cp", "{a}", "{b}", "{d}"), "neither side is remote"),
        (("cp", "{a}", "{b}", ":/there", "--if-match", "1:2"), "--if-match"),
        (("mv", "/file", "/file2", "/nodir"), "/nodir is none"),
        (("mv", "/file", "/there/file", "/there"), "have one name"),
        (("mv", "/file", "/", "/there"), "has no name of its own"),
    ],
)
def test_several_sources_that_cannot_go_anywhere(
    shared_fs: TestFs, tmp_path: Path, argv: tuple[str, ...], told: str
) -> None:
    """Nothing at all is done then."""
    fs, inner = shared_fs, tmp_path / "d"
    inner.mkdir()
    for place in (tmp_path / "a", tmp_path / "b", inner / "a"):
        place.write_text("x")
    run(fs, "mkdir", "-p", "/there")
    for name in (":/file", ":/file2"):
        run(fs, "cp", "-", name, stdin=b"x")
    before = [_bare(run(fs, "ls", path).json["entries"]) for path in ("/", "/there")]
    typed = [word.format(a=tmp_path / "a", b=tmp_path / "b", d=inner) for word in argv]
    assert told in run(fs, *typed, code=2).err
    assert [_bare(run(fs, "ls", path).json["entries"]) for path in ("/", "/there")] == before


def _bare(entries: list[dict[str, object]]) -> list[tuple[object, object]]:
    return [(one["path"], one["ino"]) for one in entries]


def test_a_move_into_a_directory(shared_fs: TestFs) -> None:
    fs = shared_fs
    run(fs, "mkdir", "-p", "/box", "/tree/below")
    for name in (":/m1", ":/m2", ":/m3", ":/m4"):
        run(fs, "cp", "-", name, stdin=name.encode())
    assert run(fs, "mv", "/m1", "/box").json["target_path"] == "/box/m1"
    assert run(fs, "mv", "/m2", ":/box/").json["target_path"] == "/box/m2"
    assert run(fs, "mv", "/tree", "/box").json["target_path"] == "/box/tree"
    moved = run(fs, "mv", "/m3", "/m4", "/box/tree").json
    assert [one["target_path"] for one in moved["results"]] == ["/box/tree/m3", "/box/tree/m4"]
    assert run(fs, "cat", "/box/m1", "/box/m2", "/box/tree/m3", "/box/tree/m4").text == ":/m1:/m2:/m3:/m4"
    run(fs, "stat", "/box/tree/below")

    run(fs, "cp", "-", ":/m1", stdin=b"new")
    run(fs, "mv", "/m1", "/box", code=1)  # what is there has the name
    run(fs, "mv", "/m1", "/box/", "--overwrite")
    assert run(fs, "cat", "/box/m1").text == "new"
    run(fs, "mv", "/box/m1", "/box/m2", code=1)
    run(fs, "mkdir", "/empty")
    run(fs, "mv", "/box/tree", "/empty", "--overwrite")  # the name that is given, as it was
    run(fs, "stat", "/empty/below")
    run(fs, "mv", "/empty", "/renamed/")  # nothing is there: a directory's own new name
    run(fs, "stat", "/renamed/below")
    run(fs, "mv", "/box/m1", "/nodir/", code=1)
    # The long spelling means the name that is given.
    long = ("fs", "move-file", "--from-remote", "/box/m1", "--to-remote")
    run(fs, *long, "/renamed", code=1)
    run(fs, *long, "/renamed/m1")
