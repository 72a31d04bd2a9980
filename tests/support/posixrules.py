"""What file system calls answer, rule by rule, as tables of short sequences of operations.

A rule is a name and its steps (who, operation), for a directory of its own; the reference is what a local
filesystem answers in the same run, so no result is written down here. The tables go over the calls (every
call that takes a path, in every situation that makes a path fail), over kinds of files, over who owns what,
and over flags and times.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Final

from support.fileops import EXCHANGE, NOREPLACE, Op
from support.moreops import (
    AT_REMOVEDIR,
    AT_SYMLINK_FOLLOW,
    AT_SYMLINK_NOFOLLOW,
)

Step = tuple[int, Op]
ROOT, ALICE, BOB = 0, 1, 2  # indexes of `differential.identities()`
ALICES, BOBS, TEAM = 4001, 4002, 4003  # ids; alice is of the team too
CREATE: Final = os.O_CREAT | os.O_EXCL | os.O_WRONLY
LONG_NAME: Final = b"n" * 256
LONGEST_NAME: Final = b"n" * 255
AS_MANY_LINKS_AS_ALLOWED: Final = "chain of 40"
DEVICE: Final = os.makedev(1, 3)
KINDS: Final = ("file", "dir", "fifo", "sock", "char", "block", "link", "dangling")
ORDINARY: Final = ("file", "dir", "fifo", "sock", "link")  # what anybody can make


@dataclass(frozen=True, slots=True)
class Rule:
    name: str
    steps: tuple[Step, ...]

    @property
    def of_others(self) -> bool:
        """Whether it needs more than one identity."""
        return any(who for who, _ in self.steps)


def make(kind: str, path: bytes, mode: int = 0o644, who: int = ROOT) -> list[Step]:
    """Steps that make one file of a kind."""
    formats = {"fifo": stat.S_IFIFO, "sock": stat.S_IFSOCK, "char": stat.S_IFCHR, "block": stat.S_IFBLK}
    if kind == "file":
        return [
            (who, ("open", path, CREATE, mode, 9)),
            (who, ("close_slot", 9)),
            (who, ("chmod", path, mode)),
        ]
    if kind == "dir":
        return [(who, ("mkdir", path, mode)), (who, ("chmod", path, mode))]
    if kind in ("link", "dangling"):
        return [(who, ("symlink", b"target-of-none" if kind == "dangling" else b"..", path))]
    return [(who, ("mknod", path, formats[kind] | mode, DEVICE)), (who, ("chmod", path, mode))]


def made_by(owner: int, kind: str, path: bytes, mode: int = 0o644) -> list[Step]:
    """As root, then given to `owner`: an identity."""
    uid = (0, ALICES, BOBS)[owner]
    return [*make(kind, path, mode), (ROOT, ("chown", path, uid, uid, False)), *after_chown(kind, path, mode)]


def after_chown(kind: str, path: bytes, mode: int) -> list[Step]:
    return [] if kind in ("link", "dangling") else [(ROOT, ("chmod", path, mode))]


def path_calls(path: bytes) -> dict[str, Op]:
    """Every call that looks a path up, each with `path` in the place of interest."""
    return {
        "open": ("raw_open", path, os.O_RDONLY, 0),
        "open for writing": ("raw_open", path, os.O_WRONLY, 0),
        "open with truncation": ("raw_open", path, os.O_WRONLY | os.O_TRUNC, 0),
        "open a directory": ("raw_open", path, os.O_RDONLY | os.O_DIRECTORY, 0),
        "open no link": ("raw_open", path, os.O_RDONLY | os.O_NOFOLLOW, 0),
        "open as a path": ("raw_open", path, os.O_PATH, 0),
        "create": ("raw_open", path, os.O_CREAT | os.O_WRONLY, 0o644),
        "create anew": ("raw_open", path, CREATE, 0o644),
        "mkdir": ("mkdir", path, 0o755),
        "mkfifo": ("mknod", path, stat.S_IFIFO | 0o644, 0),
        "mknod a file": ("mknod", path, stat.S_IFREG | 0o644, 0),
        "mknod a socket": ("mknod", path, stat.S_IFSOCK | 0o644, 0),
        "mknod a device": ("mknod", path, stat.S_IFCHR | 0o644, DEVICE),
        "bind": ("bind", path),
        "connect": ("connect", path),
        "symlink": ("symlink", b"target", path),
        "link from": ("link", path, b"other-name"),
        "link from what it leads to": ("linkat", path, b"other-name", AT_SYMLINK_FOLLOW),
        "link to": ("link", b"plain", path),
        "rename from": ("rename", path, b"other-name", 0),
        "rename to": ("rename", b"plain", path, 0),
        "rename a directory to": ("rename", b"plain-dir", path, 0),
        "rename without replacing to": ("rename", b"plain", path, NOREPLACE),
        "exchange": ("rename", b"plain", path, EXCHANGE),
        "unlink": ("unlink", path),
        "rmdir": ("rmdir", path),
        "unlinkat a directory": ("unlinkpath", path, AT_REMOVEDIR),
        "chmod": ("chmod", path, 0o640),
        "chown": ("chown", path, -1, -1, True),
        "lchown": ("lchown", path, -1, -1),
        "truncate": ("truncate", path, 10),
        "truncate below zero": ("truncate", path, -1),
        "truncate beyond all": ("truncate", path, 1 << 62),
        "utimensat": ("utimensat", path, ((5, 5), (6, 6)), 0),
        "utimensat of the link": ("utimensat", path, ((5, 5), (6, 6)), AT_SYMLINK_NOFOLLOW),
        "stat": ("stat", path),
        "lstat": ("lstat", path),
        "access": ("access", path, os.R_OK | os.W_OK),
        "readlink": ("readlink", path),
        "listdir": ("listdir", path),
        "chdir": ("chdir", path),
        "statfs": ("statfs", path),
        "execute": ("execute", path),
        "setxattr": ("setxattr", path, "user.name", 5, 0, True),
        "setxattr of the link": ("setxattr", path, "user.name", 5, 0, False),
        "setxattr trusted of the link": ("setxattr", path, "trusted.name", 5, 0, False),
        "getxattr": ("getxattr", path, "user.name", True),
        "listxattr": ("listxattr", path, True),
        "removexattr": ("removexattr", path, "user.name", True),
    }


def forbidden() -> dict[str, tuple[list[Step], bytes]]:
    """Situations in which a directory above does not let a user do it."""
    return {
        "no search": (
            [*make("dir", b"d", 0o777), *make("file", b"d/x", 0o666), (ROOT, ("chmod", b"d", 0o666))],
            b"d/x",
        ),
        "no search above": (
            [*make("dir", b"d", 0o777), *make("dir", b"d/e", 0o777), (ROOT, ("chmod", b"d", 0o600))],
            b"d/e/x",
        ),
        "no write": (
            [*make("dir", b"d", 0o777), *make("file", b"d/x", 0o666), (ROOT, ("chmod", b"d", 0o555))],
            b"d/x",
        ),
        "no write, absent": (make("dir", b"d", 0o555), b"d/x"),
        "no write, a directory": (
            [*make("dir", b"d", 0o777), *make("dir", b"d/x", 0o777), (ROOT, ("chmod", b"d", 0o555))],
            b"d/x",
        ),
    }


def situations() -> dict[str, tuple[list[Step], bytes]]:
    """What a path meets: steps that bring it about, and the path."""
    chain = [(ROOT, ("symlink", b"c%d" % (n + 1), b"c%d" % n)) for n in range(41)]
    deep = b"/".join([b"."] * 2040)
    return {
        "absent": ([], b"absent"),
        "absent above": ([], b"absent/x"),
        "empty": ([], b""),
        "file above": (make("file", b"f"), b"f/x"),
        "fifo above": (make("fifo", b"f"), b"f/x"),
        "link to a file above": ([*make("file", b"f"), (ROOT, ("symlink", b"f", b"l"))], b"l/x"),
        "name of 255": ([], LONGEST_NAME),
        "name of 255, there": (make("file", LONGEST_NAME, 0o666), LONGEST_NAME),
        "name of 256": ([], LONG_NAME),
        "name of 256 above": ([], LONG_NAME + b"/x"),
        "path of 4095": ([], deep + b"/" + b"x" * (4095 - len(deep) - 1)),
        "path of 4096": ([], deep + b"/" + b"x" * (4096 - len(deep) - 1)),
        "loop": ([(ROOT, ("symlink", b"loop", b"loop"))], b"loop"),
        "loop of two above": (
            [(ROOT, ("symlink", b"p", b"q")), (ROOT, ("symlink", b"q", b"p"))],
            b"p/x",
        ),
        AS_MANY_LINKS_AS_ALLOWED: ([*chain, *make("file", b"c41", 0o666)], b"c1"),
        "chain of 41": ([*chain, *make("file", b"c41", 0o666)], b"c0"),
        **forbidden(),
        "dot": ([], b"."),
        "dot dot": ([], b".."),
        "dot of a directory": (make("dir", b"d", 0o777), b"d/."),
        "dot dot of a directory": (make("dir", b"d", 0o777), b"d/.."),
        "slash behind nothing": ([], b"absent/"),
        "slash behind a link to nothing": ([(ROOT, ("symlink", b"absent", b"l"))], b"l/"),
        "slash behind a link to a directory": (
            [*make("dir", b"d", 0o777), (ROOT, ("symlink", b"d", b"l"))],
            b"l/",
        ),
        "link to a directory": ([*make("dir", b"d", 0o777), (ROOT, ("symlink", b"d", b"l"))], b"l"),
        "link to a file": ([*make("file", b"f", 0o666), (ROOT, ("symlink", b"f", b"l"))], b"l"),
        "a directory not empty": ([*make("dir", b"d", 0o777), *make("file", b"d/x", 0o666)], b"d"),
        "another's file": (make("file", b"f", 0o600), b"f"),
        "another's directory": (make("dir", b"d", 0o700), b"d"),
        **{f"a {kind}": (make(kind, b"it", 0o666 if kind != "dir" else 0o777), b"it") for kind in KINDS},
        **{
            f"slash behind a {kind}": (make(kind, b"it", 0o666 if kind != "dir" else 0o777), b"it/")
            for kind in KINDS
        },
    }


def of_paths() -> Iterator[Rule]:
    """Each call in each situation, by root and by somebody else. What calls need besides belongs to alice."""
    for (where, (before, path)), who in product(situations().items(), (ROOT, ALICE)):
        for call, op in path_calls(path).items():
            needed = make("file", b"plain", 0o666, ALICE) if b"plain" in op else []
            needed += make("dir", b"plain-dir", 0o777, ALICE) if b"plain-dir" in op else []
            yield Rule(f"{call}: {where}, by {who}", (*before, *needed, (who, op), (who, ("lstat", path))))


def of_sticky_directories() -> Iterator[Rule]:
    """Who may remove or rename what in a directory with the sticky bit."""
    owners = (ROOT, ALICE, BOB)
    for directory, owner, kind in product(owners, owners, ("file", "dir", "link")):
        before = [*made_by(directory, "dir", b"d", 0o1777), *made_by(owner, kind, b"d/it", 0o777)]
        before += made_by(directory, "dir", b"e", 0o1777)
        more = [*made_by(ALICE, kind, b"mine", 0o777), *made_by(ALICE, kind, b"d/mine", 0o777)]
        acts: dict[str, Op] = {
            "remove": ("rmdir", b"d/it") if kind == "dir" else ("unlink", b"d/it"),
            "rename in it": ("rename", b"d/it", b"d/new", 0),
            "rename out": ("rename", b"d/it", b"out", 0),
            "rename into another": ("rename", b"d/it", b"e/it", 0),
            "rename over": ("rename", b"mine", b"d/it", 0),
            "rename over in it": ("rename", b"d/mine", b"d/it", 0),
            "exchange": ("rename", b"mine", b"d/it", EXCHANGE),
            "link": ("link", b"d/it", b"linked"),
        }
        for name, op in acts.items():
            yield Rule(
                f"sticky: {name}, {kind} of {owner} in a directory of {directory}",
                (*before, *more, (ALICE, op), (ROOT, ("listdir", b"d"))),
            )


def of_renames() -> Iterator[Rule]:
    """Every kind onto every kind, with every flag; and the rules about trees and second names."""
    for old, new, flags in product(KINDS, KINDS, (0, NOREPLACE, EXCHANGE)):
        looks: list[Step] = [(ROOT, ("lstat", b"old")), (ROOT, ("lstat", b"new"))]
        yield Rule(
            f"rename: {old} onto {new}, flags {flags}",
            (*make(old, b"old"), *make(new, b"new"), (ROOT, ("rename", b"old", b"new", flags)), *looks),
        )
    yield from _renames_in_a_tree()
    for flags in (0, NOREPLACE, EXCHANGE):
        yield Rule(
            f"rename: two names of one file, flags {flags}",
            (
                *make("file", b"a"),
                (ROOT, ("link", b"a", b"b")),
                (ROOT, ("rename", b"a", b"b", flags)),
                (ROOT, ("lstat", b"a")),
                (ROOT, ("lstat", b"b")),
                (ROOT, ("unlink", b"b")),
                (ROOT, ("lstat", b"a")),
            ),
        )
    # A directory that goes to another parent is written itself: its `..` changes.
    for owner, mode in product((ALICE, BOB), (0o755, 0o700, 0o555, 0o777)):
        yield Rule(
            f"rename: a directory of {owner} with mode {mode:o} to another parent",
            (
                *made_by(owner, "dir", b"d", mode),
                *made_by(ALICE, "dir", b"e", 0o755),
                (ALICE, ("rename", b"d", b"renamed", 0)),
                (ALICE, ("rename", b"d", b"e/d", 0)),
                (ALICE, ("rename", b"renamed", b"e/d", 0)),
                (ROOT, ("lstat", b"e")),
            ),
        )


def _renames_in_a_tree() -> Iterator[Rule]:
    """Below itself, onto itself, above, beside; with dots and slashes."""
    tree = [
        *make("dir", b"d", 0o755),
        *make("dir", b"d/e", 0o755),
        *make("file", b"d/e/f"),
        *make("dir", b"x", 0o755),
    ]
    for old, new in (
        (b"d", b"d/e"),
        (b"d", b"d/e/f"),
        (b"d", b"d/e/new"),
        (b"d/e", b"d"),
        (b"d", b"d"),
        (b"d/e/f", b"d/e/f"),
        (b"d", b"x"),
        (b"x", b"d"),
        (b"d/e", b"x"),
        (b"d/e/f", b"x/f"),
        (b"d/e/f", b"d"),
        (b".", b"x/y"),
        (b"..", b"x/y"),
        (b"d/.", b"x/y"),
        (b"d/..", b"x/y"),
        (b"x", b"."),
        (b"x", b".."),
        (b"x", b"d/."),
        (b"x/", b"y/"),
        (b"d/e/f", b"y/"),
        (b"d/e/f/", b"y"),
        (b"x", b"d/e/"),
        (b"d/e/f", b"d/e/"),
    ):
        for flags in (0, NOREPLACE, EXCHANGE, NOREPLACE | EXCHANGE, 8, 16):
            looks: list[Step] = [(ROOT, ("listdir", b".")), (ROOT, ("lstat", b"d")), (ROOT, ("lstat", b"x"))]
            yield Rule(
                f"rename: {old!r} to {new!r} of a tree, flags {flags}",
                (*tree, (ROOT, ("rename", old, new, flags)), *looks),
            )


def of_rights() -> Iterator[Rule]:
    """What owner, group and others may open, by each bit; and what a changed owner or mode leaves."""
    for bits, (uid, gid), kind in product(
        range(8), ((ALICES, BOBS), (0, ALICES), (0, TEAM), (0, 0)), ("file", "dir", "fifo")
    ):
        shift = 6 if uid == ALICES else 3 if gid in (ALICES, TEAM) else 0
        # The other classes have what this one lacks: it alone decides.
        mode = sum((bits if at == shift else 7 - bits) << at for at in (0, 3, 6))
        flags = (os.O_RDONLY, os.O_WRONLY, os.O_RDWR, os.O_RDONLY | os.O_TRUNC, os.O_WRONLY | os.O_TRUNC)
        acts: list[Step] = [(ALICE, ("raw_open", b"it", each, 0)) for each in flags]
        acts += [(ALICE, ("access", b"it", each)) for each in (os.R_OK, os.W_OK, os.X_OK)]
        acts += [(ALICE, ("truncate", b"it", 3)), (ALICE, ("listdir", b"it")), (ALICE, ("chdir", b"it"))]
        acts += [(ALICE, ("setxattr", b"it", "user.a", 3, 0, True)), (ALICE, ("listxattr", b"it", True))]
        acts += [(ALICE, ("utime", b"it", None, True)), (ALICE, ("utime", b"it", (1, 1), True))]
        acts += [
            (ALICE, ("mkdir", b"it/new", 0o755)),
            (ALICE, ("stat", b"it/.")),
            (ALICE, ("chmod", b"it", 0o777)),
        ]
        yield Rule(
            f"rights: {kind} of {uid}:{gid}, mode {mode:o}",
            (
                *make(kind, b"it"),
                (ROOT, ("chown", b"it", uid, gid, True)),
                (ROOT, ("chmod", b"it", mode)),
                *acts,
            ),
        )
    for mode, kind in product((0o0, 0o111, 0o777, 0o7777, 0o4755, 0o2755, 0o2644, 0o1777), ORDINARY[:4]):
        for uid, gid in ((ALICES, ALICES), (ALICES, TEAM), (ALICES, BOBS), (BOBS, ALICES)):
            given = [*make(kind, b"it"), (ROOT, ("chown", b"it", uid, gid, False))]
            owned: list[Step] = [(ALICE, ("chmod", b"it", mode)), (ROOT, ("lstat", b"it"))]
            for to in (
                (-1, -1),
                (ALICES, -1),
                (-1, ALICES),
                (-1, TEAM),
                (-1, BOBS),
                (BOBS, -1),
                (BOBS, BOBS),
            ):
                owned += [
                    (ROOT, ("chmod", b"it", mode)),
                    (ALICE, ("chown", b"it", *to, True)),
                    (ROOT, ("lstat", b"it")),
                ]
            owned += [
                (ROOT, ("chmod", b"it", mode)),
                (ROOT, ("chown", b"it", 7, 8, True)),
                (ROOT, ("lstat", b"it")),
            ]
            yield Rule(f"owner: {kind} of {uid}:{gid}, mode {mode:o}", (*given, *owned))


def of_new_files() -> Iterator[Rule]:
    """Mode by umask, owner by who makes it, group by the directory's set-group-ID bit."""
    for mask, mode, directory in product(
        (0, 0o022, 0o077, 0o777), (0o644, 0o777, 0o7777, 0), (0o777, 0o2777)
    ):
        steps: list[Step] = [*make("dir", b"d", directory), (ROOT, ("chown", b"d", BOBS, BOBS, True))]
        steps += [(ROOT, ("chmod", b"d", directory)), (ALICE, ("umask", mask))]
        steps += [
            (ALICE, ("raw_open", b"d/file", CREATE, mode)),
            (ALICE, ("mkdir", b"d/dir", mode)),
            (ALICE, ("mknod", b"d/fifo", stat.S_IFIFO | mode, 0)),
            (ALICE, ("bind", b"d/bound")),
            (ALICE, ("mknod", b"d/reg", stat.S_IFREG | mode, 0)),
            (ALICE, ("symlink", b"x", b"d/link")),
            (ALICE, ("umask", 0o022)),
        ]
        steps += [(ROOT, ("lstat", b"d/" + n)) for n in (b"file", b"dir", b"fifo", b"bound", b"reg", b"link")]
        yield Rule(f"new: umask {mask:o}, mode {mode:o}, in a directory of mode {directory:o}", tuple(steps))
    for who, kind in product((ROOT, ALICE), ("char", "block", "fifo", "sock")):
        for device in (0, os.makedev(4, 70_000), os.makedev(4000, 1), os.makedev(255, 255)):
            formats = {
                "fifo": stat.S_IFIFO,
                "sock": stat.S_IFSOCK,
                "char": stat.S_IFCHR,
                "block": stat.S_IFBLK,
            }
            made = ("mknod", b"it", formats[kind] | 0o660, device)
            yield Rule(f"mknod: {kind} {device} by {who}", ((who, made), (ROOT, ("lstat", b"it"))))
    for format_ in (0, stat.S_IFDIR, stat.S_IFLNK, 0o170000, 0o030000):
        yield Rule(
            f"mknod: format {format_:o}",
            ((ROOT, ("mknod", b"it", format_ | 0o644, 0)), (ROOT, ("lstat", b"it"))),
        )
    for length in (1, 4095, 4096):
        yield Rule(
            f"symlink: target of {length}",
            ((ROOT, ("symlink", b"t" * length, b"l")), (ROOT, ("lstat", b"l")), (ROOT, ("readlink", b"l"))),
        )
