"""Merges where both sides moved, removed or made anew directories: what comes of it is a tree, and nothing
that one side put somewhere is dropped without a word. Every filesystem passes the audit at the end."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from support.bench import Bench, Mount
from support.forking import fork, merge, on

from fsd.model.attrs import ROOT_INO
from fsd.service.access import FsRef
from fsd.service.audit import audit
from fsd.service.merge import CONFLICTS, MERGED, NOTHING

Kinds = set[tuple[str, str]]


class Two:
    """A filesystem with directories a, b and c, a file in a, and what a fork and it do to them."""

    def __init__(self, bench: Bench) -> None:
        self.bench, self.parent = bench, bench.fs
        mount = bench.mount()
        self.a, self.b, self.c = (mount.mkdir(ROOT_INO, name) for name in (b"a", b"b", b"c"))
        self.file = mount.file(self.a, b"file", b"base")
        self.loose = mount.file(ROOT_INO, b"loose", b"loose")
        mount.commit()
        self.child = fork(bench)

    def does(self, fs: FsRef, change: Callable[[Mount], Any]) -> None:
        mount = on(self.bench, fs).mount()
        change(mount)
        assert mount.commit() == []

    def merge(self, **wish: Any) -> tuple[str, Kinds]:
        """What it came to; what has no answer changes nothing, and whatever came of it is a tree."""
        before = on(self.bench, self.parent).tree()
        done = merge(self.bench, self.parent, self.child, **wish)
        found = audit(self.bench.service.db, self.parent)
        assert not found, found
        assert done["status"] != CONFLICTS or self.bench.tree() == before
        return done["status"], {(one["path"], one["kind"]) for one in done["conflicts"]}

    def tree(self) -> dict[str, object]:
        return on(self.bench, self.parent).tree()

    def head(self, fs: FsRef) -> int:
        return int(self.bench.service.feed.head(fs))


@pytest.fixture
def two(bench: Bench) -> Two:
    return Two(bench)


def test_what_was_moved_away_has_one_name_where_the_parent_removed_what_came(two: Two) -> None:
    """The fork moved b away and a file to its name, which the parent removed: with ours b is where the fork
    has it, and there alone."""

    def theirs(mount: Mount) -> None:
        mount.rename(ROOT_INO, b"b", two.b, two.c, b"moved")
        mount.rename(ROOT_INO, b"loose", two.loose, ROOT_INO, b"b")

    two.does(two.child, theirs)
    two.does(two.parent, lambda mount: mount.unlink(ROOT_INO, b"loose", two.loose, two.head(two.parent)))
    assert two.merge() == (CONFLICTS, {("/b", "removed-renamed")})
    assert two.merge(ours=("*",)) == (MERGED, set())
    assert two.tree() == {"a": None, "a/file": b"base", "c": None, "c/moved": None}


def test_what_was_replaced_stays_where_the_parent_removed_what_came(two: Two) -> None:
    """As above, but the fork has b no more: ours keeps it, theirs has the file back in its place."""

    def theirs(mount: Mount) -> None:
        mount.rmdir(ROOT_INO, b"b", two.b)
        mount.rename(ROOT_INO, b"loose", two.loose, ROOT_INO, b"b")

    two.does(two.child, theirs)
    two.does(two.parent, lambda mount: mount.unlink(ROOT_INO, b"loose", two.loose, two.head(two.parent)))
    assert two.merge() == (CONFLICTS, {("/b", "removed-renamed")})
    assert two.merge(theirs=("/b",)) == (MERGED, set())
    assert two.tree() == {"a": None, "a/file": b"base", "b": b"loose", "c": None}


def anew(two: Two, names: dict[bytes, bytes], mode: int = 0o755) -> Callable[[Mount], None]:
    """Remove directory a and what is in it, make another of that name."""

    def change(mount: Mount) -> None:
        mount.unlink(two.a, b"file", two.file, two.head(two.bench.fs))
        mount.rmdir(ROOT_INO, b"a", two.a)
        made = mount.mkdir(ROOT_INO, b"a")
        mount.setattr(made, mode=mode)
        for name, data in names.items():
            mount.file(made, name, data)

    return change


def test_a_directory_made_anew_keeps_what_the_parent_put_into_it(two: Two) -> None:
    two.does(two.child, anew(two, {b"built": b"theirs"}, 0o700))
    two.does(two.parent, lambda mount: mount.file(two.a, b"new", b"ours"))
    assert two.merge() == (MERGED, set())
    assert two.tree() == {
        "a": None,
        "a/built": b"theirs",
        "a/new": b"ours",
        "b": None,
        "c": None,
        "loose": b"loose",
    }
    assert two.bench.find("/a").mode & 0o777 == 0o700
    assert two.bench.find("/a").ino == two.a, "mounts that stand in it are not thrown out"
    two.does(two.child, lambda mount: mount.file(on(two.bench, two.child).find("/a").ino, b"more", b"later"))
    assert two.merge() == (MERGED, set())
    assert two.tree()["a/more"] == b"later"


def test_a_directory_made_anew_goes_where_the_parent_moved_it(two: Two) -> None:
    two.does(two.child, anew(two, {b"file": b"built"}))
    two.does(two.parent, lambda mount: mount.rename(ROOT_INO, b"a", two.a, two.c, b"moved"))
    assert two.merge() == (MERGED, set())
    assert two.tree() == {"b": None, "c": None, "c/moved": None, "c/moved/file": b"built", "loose": b"loose"}


def test_a_file_that_was_replaced_by_what_the_parent_made_of_it_is_no_conflict(two: Two) -> None:
    def theirs(mount: Mount) -> None:
        mount.unlink(two.a, b"file", two.file, two.head(two.child))
        mount.file(two.a, b"file", b"the same")

    two.does(two.child, theirs)
    two.does(two.parent, lambda mount: mount.write(two.file, b"the same", two.head(two.parent)))
    assert two.merge() == (MERGED, set())
    assert two.tree()["a/file"] == b"the same"


def test_a_file_changed_in_a_directory_made_anew_is_a_conflict(two: Two) -> None:
    two.does(two.child, anew(two, {b"file": b"built"}))
    two.does(two.parent, lambda mount: mount.write(two.file, b"edited", two.head(two.parent)))
    assert two.merge() == (CONFLICTS, {("/a/file", "both-changed")})
    assert two.merge(ours=("/a",))[0] in (MERGED, NOTHING)
    assert two.tree()["a/file"] == b"edited"


def test_a_directory_made_anew_that_the_parent_removed(two: Two) -> None:
    """As it was, but for what went: it goes."""

    def gone(mount: Mount) -> None:
        mount.unlink(two.a, b"file", two.file, two.head(two.parent))
        mount.rmdir(ROOT_INO, b"a", two.a)

    two.does(two.child, anew(two, {}))
    two.does(two.parent, gone)
    assert two.merge() == (NOTHING, set())
    assert two.tree() == {"b": None, "c": None, "loose": b"loose"}


@pytest.mark.parametrize("decided", ["ours", "theirs"])
def test_a_directory_made_anew_with_something_in_it_that_the_parent_removed(two: Two, decided: str) -> None:
    def gone(mount: Mount) -> None:
        mount.unlink(two.a, b"file", two.file, two.head(two.parent))
        mount.rmdir(ROOT_INO, b"a", two.a)

    two.does(two.child, anew(two, {b"built": b"theirs"}))
    two.does(two.parent, gone)
    assert two.merge() == (CONFLICTS, {("/a", "removed-changed")})
    assert two.merge(**{decided: ("/a",)})[0] != CONFLICTS
    assert two.tree().get("a/built") == (b"theirs" if decided == "theirs" else None)


def test_a_directory_the_fork_made_is_not_one_the_parent_moved_there(two: Two) -> None:
    """The fork has both: what it put into each under one name would be one."""

    def theirs(mount: Mount) -> None:
        mount.file(two.b, b"same", b"of b")
        mount.file(mount.mkdir(ROOT_INO, b"x"), b"same", b"of x")

    two.does(two.child, theirs)
    two.does(two.parent, lambda mount: mount.rename(ROOT_INO, b"b", two.b, ROOT_INO, b"x"))
    assert two.merge() == (CONFLICTS, {("/x", "both-added")})
    assert two.merge(ours=("*",)) == (MERGED, set())
    assert two.tree()["x/same"] == b"of b"


def test_what_the_parent_moved_over_a_file_is_not_that_file(two: Two) -> None:
    """The fork wrote into one and changed the mode of the other: both would be changes of one inode."""

    def theirs(mount: Mount) -> None:
        mount.write(two.loose, b"written", two.head(two.child))
        mount.setattr(two.file, mode=0o600)

    two.does(two.child, theirs)
    two.does(
        two.parent,
        lambda mount: mount.rename(
            ROOT_INO, b"loose", two.loose, two.a, b"file", two.file, two.head(two.parent)
        ),
    )
    assert two.merge() == (CONFLICTS, {("/a/file", "removed-changed")})
    assert two.merge(ours=("/a",)) == (MERGED, set())
    assert two.tree()["a/file"] == b"written"


@pytest.mark.parametrize("mode", [0o755, 0o700])
@pytest.mark.parametrize("put", [False, True])
def test_a_directory_the_fork_has_is_not_removed_where_the_parent_moved_it(
    two: Two, mode: int, put: bool
) -> None:
    """The parent moved c to where b had been; the fork has c where it was, and at b nothing or a file. Theirs
    for that name would leave the parent without c."""

    def theirs(mount: Mount) -> None:
        mount.rmdir(ROOT_INO, b"b", two.b)
        if put:
            mount.rename(ROOT_INO, b"loose", two.loose, ROOT_INO, b"b")
        mount.setattr(two.c, mode=mode)

    two.does(two.child, theirs)
    two.does(two.parent, lambda mount: mount.rename(ROOT_INO, b"c", two.c, ROOT_INO, b"b", two.b))
    assert two.merge() == (CONFLICTS, {("/b", "both-changed" if put else "changed-removed")})
    assert two.merge(theirs=("*",)) == (CONFLICTS, {("/b", "removed-changed")})
    assert two.merge(ours=("/b",))[0] == (NOTHING if mode == 0o755 else MERGED)
    assert two.tree() == {"a": None, "a/file": b"base", "b": None, "loose": b"loose"}
    assert two.bench.find("/b").ino == two.c and two.bench.find("/b").mode & 0o777 == mode


@pytest.mark.parametrize("changed", ["mode", "xattr", "nothing"])
def test_a_link_each_that_both_removed_of_a_file_whose_attributes_the_fork_changed(
    two: Two, changed: str
) -> None:
    """Of two names either side has one left: the names go, but not with a change nobody was told of."""
    two.does(two.child, lambda mount: mount.link(two.file, two.c, b"link"))
    assert two.merge() == (MERGED, set())

    def theirs(mount: Mount) -> None:
        mount.unlink(two.c, b"link", two.file, two.head(two.child))
        if changed == "mode":
            mount.setattr(two.file, mode=0o600)
        elif changed == "xattr":
            mount.setxattr(two.file, b"user.x", b"1")

    two.does(two.child, theirs)
    two.does(two.parent, lambda mount: mount.unlink(two.a, b"file", two.file, two.head(two.parent)))
    left = {"a": None, "b": None, "c": None, "loose": b"loose"}
    if changed == "nothing":
        assert two.merge() == (MERGED, set()) and two.tree() == left
        return
    for wish in ({}, {"theirs": ("*",)}):
        assert two.merge(**wish) == (CONFLICTS, {("/c/link", "removed-changed")})
    assert two.merge(ours=("/c",)) == (MERGED, set())
    assert two.tree() == {**left, "c/link": b"base"}
    kept = two.bench.find("/c/link")
    assert (kept.mode & 0o777, kept.xattrs or {}) == (
        (0o600, {}) if changed == "mode" else (0o644, {b"user.x": b"1"})
    )


@pytest.mark.parametrize("changed", ["mode", "owner", "xattr"])
def test_a_link_each_that_both_removed_of_a_file_whose_attributes_the_parent_changed(
    two: Two, changed: str
) -> None:
    """As above, the other way round."""
    two.does(two.child, lambda mount: mount.link(two.file, two.c, b"link"))
    assert two.merge() == (MERGED, set())
    two.does(two.child, lambda mount: mount.unlink(two.c, b"link", two.file, two.head(two.child)))

    def ours(mount: Mount) -> None:
        mount.unlink(two.a, b"file", two.file, two.head(two.parent))
        if changed == "mode":
            mount.setattr(two.file, mode=0o600)
        elif changed == "owner":
            mount.setattr(two.file, uid=1234)
        else:
            mount.setxattr(two.file, b"user.x", b"1")

    two.does(two.parent, ours)
    for wish in ({}, {"theirs": ("*",)}):
        assert two.merge(**wish) == (CONFLICTS, {("/c/link", "removed-changed")})
    assert two.merge(ours=("/c",)) == (NOTHING, set())
    kept = two.bench.find("/c/link")
    assert kept.nlink == 1
    assert {
        "mode": kept.mode & 0o777 == 0o600,
        "owner": kept.uid == 1234,
        "xattr": kept.xattrs == {b"user.x": b"1"},
    }[changed]


@pytest.mark.parametrize("changed", ["mode", "owner", "group", "xattr"])
@pytest.mark.parametrize("what", ["file", "directory", "link over it", "another type"])
def test_what_the_fork_removed_and_the_parent_gave_attributes_is_told(
    two: Two, changed: str, what: str
) -> None:
    """A change of the parent's that nothing has afterwards: as with a change of content."""
    path, ino = ("/b", two.b) if what == "directory" else ("/a/file", two.file)

    def theirs(mount: Mount) -> None:
        head = two.head(two.child)
        if what == "directory":
            mount.rmdir(ROOT_INO, b"b", two.b)
        elif what == "file":
            mount.unlink(two.a, b"file", two.file, head)
        elif what == "link over it":
            mount.rename(ROOT_INO, b"loose", two.loose, two.a, b"file", two.file, head)
        else:
            mount.unlink(two.a, b"file", two.file, head)
            mount.mkdir(two.a, b"file")

    def ours(mount: Mount) -> None:
        if changed == "xattr":
            mount.setxattr(ino, b"user.x", b"1")
        else:
            mount.setattr(ino, **{"mode": {"mode": 0o711}, "owner": {"uid": 9}, "group": {"gid": 9}}[changed])

    two.does(two.child, theirs)
    before = on(two.bench, two.parent).tree()
    two.does(two.parent, ours)
    kind = "changed-removed" if what in ("file", "directory") else "both-changed"
    assert two.merge() == (CONFLICTS, {(path, kind)})
    if what == "link over it":
        assert two.merge(theirs=("*",)) == (MERGED, set()), "loose has the place"
        assert two.tree()["a/file"] == b"loose" and "loose" not in two.tree()
        return
    kept = on(two.bench, two.parent).find(path)
    assert two.merge(ours=(path,))[0] in (MERGED, NOTHING)
    assert two.tree() == before and two.bench.find(path)._replace(ctime=0) == kept._replace(ctime=0)


@pytest.mark.parametrize("decided", ["ours", "theirs"])
def test_a_directory_whose_mode_the_parent_changed_stays_with_what_it_is_in(two: Two, decided: str) -> None:
    """The fork removed the tree it is in: one conflict, told at that one, and one answer is enough."""
    made: list[int] = []
    two.does(two.child, lambda mount: made.append(mount.mkdir(two.a, b"inner")))
    assert two.merge() == (MERGED, set())

    def theirs(mount: Mount) -> None:
        mount.unlink(two.a, b"file", two.file, two.head(two.child))
        mount.rmdir(two.a, b"inner", made[0])
        mount.rmdir(ROOT_INO, b"a", two.a)

    two.does(two.child, theirs)
    two.does(two.parent, lambda mount: mount.setattr(made[0], mode=0o700))
    assert two.merge() == (CONFLICTS, {("/a/inner", "changed-removed")})
    assert two.merge(**{decided: ("/a/inner",)}) == (MERGED, set())
    kept = {"a": None, "a/inner": None} if decided == "ours" else {}
    assert two.tree() == {**kept, "b": None, "c": None, "loose": b"loose"}
    assert not kept or two.bench.find("/a/inner").mode & 0o777 == 0o700


def test_a_link_that_the_fork_replaced_has_the_attributes_the_parent_changed(two: Two) -> None:
    """Each removed another name, but the fork put a file of its own there: what goes has an heir."""
    two.does(two.child, lambda mount: mount.link(two.file, two.c, b"link"))
    assert two.merge() == (MERGED, set())

    def theirs(mount: Mount) -> None:
        mount.unlink(two.c, b"link", two.file, two.head(two.child))
        mount.file(two.c, b"link", b"anew")

    def ours(mount: Mount) -> None:
        mount.unlink(two.a, b"file", two.file, two.head(two.parent))
        mount.setattr(two.file, mode=0o600)
        mount.setxattr(two.file, b"user.x", b"1")

    two.does(two.child, theirs)
    two.does(two.parent, ours)
    assert two.merge() == (MERGED, set())
    found = two.bench.find("/c/link")
    assert (two.tree()["c/link"], found.mode & 0o777, found.xattrs) == (b"anew", 0o600, {b"user.x": b"1"})


Given = dict[str, Any]  # fields of setattr; under "user.…" extended attributes


def made(where: int, name: bytes, given: Given, data: bytes | None) -> Callable[[Mount], None]:
    """Make a directory, or a file of `data`, with these attributes."""

    def change(mount: Mount) -> None:
        ino = mount.mkdir(where, name) if data is None else mount.file(where, name, data)
        fields = {key: value for key, value in given.items() if not key.startswith("user.")}
        mount.setattr(ino, **{"uid": 0, "gid": 0, **fields})
        for key in given.keys() - fields.keys():
            mount.setxattr(ino, key.encode(), given[key])

    return change


def given_to(two: Two, path: str) -> Given:
    """What `made` would need for it; without what is ordinary."""
    attr = on(two.bench, two.parent).find(path)
    fields = {"mode": attr.mode & 0o7777, "uid": attr.uid, "gid": attr.gid}
    ordinary = {"mode": 0o755 if attr.is_dir else 0o644, "uid": 0, "gid": 0}
    found = {key: value for key, value in fields.items() if value != ordinary[key]}
    return {**found, **{name.decode(): value for name, value in (attr.xattrs or {}).items()}}


ONE_SIDE: dict[str, tuple[Given, Given, Given]] = {  # the parent, the fork, what both have then
    "neither": ({}, {}, {}),
    "owner of the parent": ({"uid": 1000, "gid": 50}, {}, {"uid": 1000, "gid": 50}),
    "owner of the fork": ({}, {"uid": 1000, "gid": 50}, {"uid": 1000, "gid": 50}),
    "xattr of the parent": ({"user.x": b"1"}, {}, {"user.x": b"1"}),
    "xattr of the fork": ({}, {"user.x": b"1"}, {"user.x": b"1"}),
    "xattr each": ({"user.x": b"1", "user.z": b""}, {"user.y": b"2", "user.z": b""}, {
        "user.x": b"1", "user.y": b"2", "user.z": b"",
    }),
}  # fmt: skip
DIRECTORIES: dict[str, tuple[Given, Given, Given]] = {
    "mode of the parent": ({"mode": 0o700}, {}, {"mode": 0o700}),
    "mode of the fork": ({}, {"mode": 0o2775}, {"mode": 0o2775}),
    "mode here, xattr there": ({"mode": 0o700}, {"user.x": b"1"}, {"mode": 0o700, "user.x": b"1"}),
    "the same": ({"mode": 0o700, "uid": 5}, {"mode": 0o700, "uid": 5}, {"mode": 0o700, "uid": 5}),
}


@pytest.mark.parametrize("data", [None, b"the same"])
def test_what_both_made_has_the_attributes_that_either_gave_it(two: Two, data: bytes | None) -> None:
    cases = ONE_SIDE | (DIRECTORIES if data is None else {})
    for at, (ours, theirs, _) in enumerate(cases.values()):
        two.does(two.parent, made(ROOT_INO, b"new%d" % at, ours, data))
        two.does(two.child, made(ROOT_INO, b"new%d" % at, theirs, data))
    assert two.merge() == (MERGED, set())
    assert {name: given_to(two, f"/new{at}") for at, name in enumerate(cases)} == {
        name: both for name, (_, _, both) in cases.items()
    }
    assert two.merge() == (NOTHING, set())


@pytest.mark.parametrize("data", [None, b"the same"])
@pytest.mark.parametrize("decided", ["ours", "theirs"])
def test_what_both_made_with_other_attributes_is_a_conflict(
    two: Two, data: bytes | None, decided: str
) -> None:
    cases: dict[str, tuple[Given, Given]] = {
        "/uid": ({"uid": 1000}, {"uid": 1001}),
        "/gid": ({"gid": 1000}, {"gid": 1001}),
        "/xattr": ({"user.x": b"1"}, {"user.x": b"2"}),
    }
    if data is None:
        cases["/mode"] = ({"mode": 0o700}, {"mode": 0o775})
    for path, (ours, theirs) in cases.items():
        two.does(two.parent, made(ROOT_INO, path[1:].encode(), ours, data))
        two.does(two.child, made(ROOT_INO, path[1:].encode(), theirs, data))
    assert two.merge() == (CONFLICTS, {(path, "attributes") for path in cases})
    assert two.merge(**{decided: ("*",)})[0] == (NOTHING if decided == "ours" else MERGED)
    wanted = {path: pair[decided == "theirs"] for path, pair in cases.items()}
    assert {path: given_to(two, path) for path in cases} == wanted
    assert two.merge() == (NOTHING, set())


def test_two_new_files_of_the_fork_with_other_attributes_are_not_one_of_the_parent(two: Two) -> None:
    """The parent made one under two names; the fork's are equal but for an attribute."""

    def ours(mount: Mount) -> None:
        mount.link(mount.file(ROOT_INO, b"one", b"new"), ROOT_INO, b"two")

    def theirs(mount: Mount) -> None:
        for name, value in ((b"one", b"1"), (b"two", b"2")):
            mount.setxattr(mount.file(ROOT_INO, name, b"new"), b"user.x", value)

    two.does(two.parent, ours)
    two.does(two.child, theirs)
    assert two.merge() == (CONFLICTS, {("/two", "both-added")})
    assert two.merge(theirs=("*",)) == (MERGED, set())
    found = [two.bench.find(path).xattrs for path in ("/one", "/two")]
    assert found == [{b"user.x": b"1"}, {b"user.x": b"2"}]


@pytest.mark.parametrize("what", ["file", "directory"])
def test_what_made_room_for_what_the_parent_moved_elsewhere_has_one_name(two: Two, what: str) -> None:
    """The fork moved it away and another to its name, which the parent moved too: with ours that other is
    where the parent has it, and what made room where the fork has it, there alone."""
    name, ino = (b"loose", two.loose) if what == "file" else (b"c", two.c)

    def theirs(mount: Mount) -> None:
        mount.rename(ROOT_INO, name, ino, two.b, b"moved")
        mount.rename(two.a, b"file", two.file, ROOT_INO, name)

    two.does(two.child, theirs)
    two.does(two.parent, lambda mount: mount.rename(two.a, b"file", two.file, ROOT_INO, b"ours"))
    assert two.merge() == (CONFLICTS, {("/a/file", "both-renamed")})
    assert two.merge(ours=("*",)) == (MERGED, set())
    rest = {"c": None, "b/moved": b"loose"} if what == "file" else {"loose": b"loose", "b/moved": None}
    assert two.tree() == {"a": None, "b": None, "ours": b"base", **rest}
    assert what == "directory" or two.bench.find("/b/moved").nlink == 1


def test_links_of_one_new_file_of_the_parent_are_not_two_files_of_the_fork(two: Two) -> None:
    """The parent put one file under two names; the fork wrote into each of the two that were there."""

    def theirs(mount: Mount) -> None:
        mount.write(two.loose, b"one", two.head(two.child))
        mount.write(two.file, b"two", two.head(two.child))

    def ours(mount: Mount) -> None:
        head = two.head(two.parent)
        mount.unlink(ROOT_INO, b"loose", two.loose, head)
        mount.unlink(two.a, b"file", two.file, head)
        mount.link(mount.file(ROOT_INO, b"loose", b"loose"), two.a, b"file")

    two.does(two.child, theirs)
    two.does(two.parent, ours)
    status, kinds = two.merge()
    assert status == CONFLICTS and {kind for _, kind in kinds} <= {"removed-changed", "both-changed"}


MOVES: dict[str, Callable[[Two, Mount], Any]] = {
    "b into c": lambda two, m: m.rename(ROOT_INO, b"b", two.b, two.c, b"b"),
    "c into b": lambda two, m: m.rename(ROOT_INO, b"c", two.c, two.b, b"c"),
    "b over c": lambda two, m: m.rename(ROOT_INO, b"b", two.b, ROOT_INO, b"c", two.c),
    "c over b": lambda two, m: m.rename(ROOT_INO, b"c", two.c, ROOT_INO, b"b", two.b),
    "a over b": lambda two, m: m.rename(ROOT_INO, b"a", two.a, ROOT_INO, b"b", two.b),
    "b and c swapped": lambda two, m: m.rename(ROOT_INO, b"b", two.b, ROOT_INO, b"c", two.c, 0, 2),
    "b away": lambda two, m: m.rename(ROOT_INO, b"b", two.b, two.a, b"b"),
    "b removed": lambda two, m: m.rmdir(ROOT_INO, b"b", two.b),
    "b anew": lambda two, m: (m.rmdir(ROOT_INO, b"b", two.b), m.mkdir(ROOT_INO, b"b")),
    "b filled": lambda two, m: m.file(two.b, b"f", b"f"),
    "b moved, anew": lambda two, m: (m.rename(ROOT_INO, b"b", two.b, two.c, b"o"), m.mkdir(ROOT_INO, b"b")),
    "file to b": lambda two, m: (
        m.rename(ROOT_INO, b"b", two.b, two.c, b"o"),
        m.rename(ROOT_INO, b"loose", two.loose, ROOT_INO, b"b"),
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("theirs", MOVES)
def test_moves_of_directories_on_both_sides(bench: Bench, theirs: str) -> None:
    """Every pair of them, with every answer: merged, or conflicts that have changed nothing; always a tree,
    and a file that one side alone put somewhere is somewhere."""
    tried = 0
    for ours, change in MOVES.items():
        for wish in ({}, {"ours": ("*",)}, {"theirs": ("*",)}, {"ours": ("/b",), "theirs": ("*",)}):
            bench.fs = bench.new_fs()
            two = Two(bench)
            two.does(two.child, partial(MOVES[theirs], two))
            two.does(two.parent, partial(change, two))
            status, kinds = two.merge(**wish)
            assert (status == CONFLICTS) == bool(kinds), (ours, wish)
            held = list(two.tree().values())
            for data in (b"base", b"loose"):
                assert held.count(data) == 1, (ours, wish, data)
            if "b filled" in (ours, theirs) and status == MERGED:
                assert b"f" in held, (ours, wish)
            tried += 1
    assert tried == 4 * len(MOVES)
