"""More rules, in the manner of `posixrules`: handles and what is done with them, times, second names, bad
pointers, extended attributes and ACLs; and all of them together."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from itertools import product
from typing import Any, Final

from support import posixrules
from support.fileops import Op
from support.moreops import (
    ALIGNED,
    AT_FDCWD,
    AT_SYMLINK_NOFOLLOW,
    GROUP,
    GROUP_OBJ,
    MASK,
    NO_ID,
    OTHER,
    USER,
    USER_OBJ,
    UTIME_NOW,
    UTIME_OMIT,
)
from support.posixrules import (
    ALICE,
    ALICES,
    BOB,
    BOBS,
    CREATE,
    KINDS,
    ROOT,
    TEAM,
    Rule,
    Step,
    made_by,
    make,
)


def of_set_id_bits() -> Iterator[Rule]:
    """Writing and cutting takes set-user-ID and set-group-ID away, unless root does it."""
    changes: tuple[list[Op], ...] = (
        [("write", 1, 7, 10, 0)],
        [("write", 1, 7, 0, 0)],
        [("ftruncate", 1, 3)],
        [("ftruncate", 1, 0)],
        [("truncate", b"it", 3)],
        [("direct_write", 1, 7, 1, 0)],
        [("map_write", 1, 7, 3, 0)],
        [("raw_open", b"it", os.O_WRONLY | os.O_TRUNC, 0)],
        [("fchown", 1, -1, -1)],
        [("fchmod", 1, 0o6777)],
        [("setxattr", b"it", "user.a", 3, 0, True)],
        [("utime", b"it", None, True)],
    )
    for mode, change, who, late in product(
        (0o4777, 0o2777, 0o6777, 0o2767, 0o6666), changes, (ROOT, ALICE), (False, True)
    ):
        opened: list[Step] = [(who, ("open", b"it", os.O_RDWR, 0, 1))]
        given: list[Step] = [(ROOT, ("chmod", b"it", mode))]
        yield Rule(
            f"set-id: {mode:o}, {change[0][:1]} {change[0][2:4]} by {who}, set late: {late}",
            (
                (ROOT, ("open", b"it", os.O_CREAT | os.O_RDWR, 0o666, 1)),
                (ROOT, ("write", 1, 1, ALIGNED, 0)),
                (ROOT, ("chown", b"it", BOBS, BOBS, True)),
                (ROOT, ("chmod", b"it", 0o666)),
                *(opened + given if late else given + opened),
                *[(who, op) for op in change],
                (ROOT, ("lstat", b"it")),
            ),
        )


def of_opens() -> Iterator[Rule]:
    """Flags against kinds."""
    accesses = (os.O_RDONLY, os.O_WRONLY, os.O_RDWR, 3)
    flags = (
        0,
        os.O_CREAT,
        os.O_CREAT | os.O_EXCL,
        os.O_TRUNC,
        os.O_APPEND,
        os.O_DIRECTORY,
        os.O_NOFOLLOW,
        os.O_PATH,
        os.O_NOATIME,
        os.O_DIRECT,
        os.O_SYNC,
        os.O_DSYNC,
        os.O_CREAT | os.O_NOFOLLOW,
        os.O_PATH | os.O_NOFOLLOW,
        os.O_DIRECTORY | os.O_NOFOLLOW,
        os.O_CREAT | os.O_TRUNC,
    )
    for kind, access, flag, who in product((*KINDS, "none"), accesses, flags, (ROOT, ALICE)):
        if kind in ("char", "block"):
            continue  # what a device says is no filesystem's; the mount's options decide whether it is opened
        before = [] if kind == "none" else make(kind, b"it", 0o777 if kind == "dir" else 0o666)
        yield Rule(
            f"open: {kind}, flags {access | flag:o} by {who}",
            (*before, (who, ("raw_open", b"it", access | flag, 0o640)), (ROOT, ("listdir", b"."))),
        )


def of_running_programs() -> Iterator[Rule]:
    """What may be done to a program while it runs, and whether one runs."""
    running = [
        ("raw_open", b"it", os.O_WRONLY, 0),
        ("raw_open", b"it", os.O_RDWR, 0),
        ("raw_open", b"it", os.O_RDONLY, 0),
        ("truncate", b"it", 0),
        ("raw_open", b"it", os.O_WRONLY | os.O_TRUNC, 0),
        ("unlink", b"it"),
        ("rename", b"it", b"new", 0),
        ("chmod", b"it", 0o700),
        ("link", b"it", b"new"),
    ]
    for op in running:
        yield Rule(
            f"running: {op}",
            (*[(ROOT, ("program", b"it"))], (ROOT, ("while_it_runs", b"it", *op)), (ROOT, ("listdir", b"."))),
        )
    yield Rule(
        "running: not while it is open for writing",
        (
            (ROOT, ("program", b"it")),
            (ROOT, ("open", b"it", os.O_WRONLY, 0, 1)),
            (ROOT, ("execute", b"it")),
            (ROOT, ("close_slot", 1)),
            (ROOT, ("execute", b"it")),
            (ROOT, ("chmod", b"it", 0o644)),
            (ALICE, ("execute", b"it")),
        ),
    )


def of_handles() -> Iterator[Rule]:
    """What a handle allows by its flags, and what by the kind it is of."""
    for access, op in product(
        (os.O_RDONLY, os.O_WRONLY, os.O_RDWR, os.O_PATH, os.O_RDWR | os.O_APPEND),
        (
            ("ftruncate", 1, 5),
            ("ftruncate", 1, -1),
            ("ftruncate", 1, 1 << 62),
            ("write", 1, 1, 3, 2),
            ("read", 1, 3, 0),
            ("fchmod", 1, 0o600),
            ("fchown", 1, -1, -1),
            ("fsync", 1),
            ("fstat", 1),
            ("listfd", 1),
            ("posix_fallocate", 1, 0, 10),
            ("posix_fallocate", 1, 0, 0),
            ("posix_fallocate", 1, -1, 5),
            ("posix_fallocate", 1, 5, -1),
            ("posix_fallocate", 1, 0, 1 << 62),
            ("posix_fallocate", 1, 6000, 20),
            ("futimens", 1, ((5, 5), (6, 6))),
            ("map_write", 1, 1, 2, 0),
            ("map_read", 1, 2, 0),
            ("direct_read", 1, 1, 0),
            ("direct_write", 1, 3, 1, 1),
            ("read", 1, 3, 1 << 62),
            ("write", 1, 1, 3, 1 << 62),
        ),
    ):
        yield Rule(
            f"handle: {op[0]} {op[2:]} of flags {access:o}",
            (
                (ROOT, ("open", b"it", os.O_CREAT | os.O_RDWR, 0o644, 1)),
                (ROOT, ("write", 1, 1, 5000, 0)),
                (ROOT, ("open", b"it", access, 0, 1)),
                (ROOT, op),
                (ROOT, ("lstat", b"it")),
            ),
        )
    for kind, op in product(
        ("dir", "fifo"), (("ftruncate", 1, 5), ("posix_fallocate", 1, 0, 10), ("fsync", 1), ("read_on", 1, 3))
    ):
        yield Rule(
            f"handle: {op[0]} of a {kind}",
            (*make(kind, b"it", 0o755), (ROOT, ("open", b"it", os.O_RDONLY, 0, 1)), (ROOT, op)),
        )


def of_times() -> Iterator[Rule]:
    """Who may set which times to what."""
    forms = {
        "now": ((0, UTIME_NOW), (0, UTIME_NOW)),
        "omit": ((0, UTIME_OMIT), (0, UTIME_OMIT)),
        "now and omit": ((0, UTIME_NOW), (0, UTIME_OMIT)),
        "omit and now": ((0, UTIME_OMIT), (0, UTIME_NOW)),
        "omit and given": ((0, UTIME_OMIT), (7, 123_456_789)),
        "given": ((1_000_000_001, 1), (1_000_000_002, 999_999_999)),
        "given and now": ((3, 4), (0, UTIME_NOW)),
        "too many nanoseconds": ((3, 10**9), (4, 0)),
        "negative nanoseconds": ((3, 0), (4, -1)),
        "before 1970": ((-1, 5), (-100, 999_999_999)),
        "in 2038": ((2**31, 0), (2**31 + 1, 1)),
        "in 2105": ((2**32 - 1, 0), (2**32, 1)),
    }
    for (form, times), (owner, mode), kind in product(
        forms.items(),
        ((ALICE, 0o000), (BOB, 0o666), (BOB, 0o444), (ROOT, 0o646)),
        ("file", "dir", "fifo", "link"),
    ):
        act = ("utimensat", b"it", times, AT_SYMLINK_NOFOLLOW if kind == "link" else 0)
        yield Rule(
            f"times: {form}, {kind} of {owner}, mode {mode:o}",
            (*made_by(owner, kind, b"it", mode), (ALICE, act), (ROOT, ("lstat", b"it"))),
        )


def of_links() -> Iterator[Rule]:
    """Second names of every kind, by root and by others; counts come and go."""
    for kind, owner, who in product(KINDS, (ROOT, ALICE), (ROOT, ALICE)):
        yield Rule(
            f"link: {kind} of {owner} by {who}",
            (
                *made_by(owner, kind, b"it", 0o666 if kind != "dir" else 0o777),
                (who, ("link", b"it", b"two")),
                (who, ("link", b"two", b"three")),
                (ROOT, ("lstat", b"it")),
                (who, ("unlink", b"it")),
                (ROOT, ("lstat", b"three")),
                (who, ("link", b"three", b"two")),
                (who, ("unlink", b"three")),
                (ROOT, ("lstat", b"two")),
                (ROOT, ("listdir", b".")),
            ),
        )
    yield Rule(
        "link: an open file without a name has none and gets none",
        (
            (ROOT, ("open", b"it", os.O_CREAT | os.O_RDWR, 0o644, 1)),
            (ROOT, ("write_on", 1, 1, 10)),
            (ROOT, ("unlink", b"it")),
            (ROOT, ("fstat", 1)),
            (ROOT, ("ftruncate", 1, 100)),
            (ROOT, ("read", 1, 100, 0)),
            (ROOT, ("fchmod", 1, 0o600)),
            (ROOT, ("fchown", 1, 1, 2)),
            (ROOT, ("fstat", 1)),
            (ROOT, ("listdir", b".")),
        ),
    )
    yield Rule(
        "mkdir: counts of a directory",
        (
            *make("dir", b"d", 0o755),
            *make("dir", b"d/a", 0o755),
            *make("dir", b"d/b", 0o755),
            *make("file", b"d/f"),
            (ROOT, ("lstat", b"d")),
            (ROOT, ("rmdir", b"d/a")),
            (ROOT, ("lstat", b"d")),
            (ROOT, ("rename", b"d/b", b"b", 0)),
            (ROOT, ("lstat", b"d")),
            (ROOT, ("lstat", b".")),
            (ROOT, ("open", b"d", os.O_RDONLY, 0, 1)),
            (ROOT, ("unlink", b"d/f")),
            (ROOT, ("rmdir", b"d")),
            (ROOT, ("fstat", 1)),
            (ROOT, ("listfd", 1)),
            (ROOT, ("mkdirat", 1, b"x", 0o755)),
        ),
    )


def of_pointers() -> Iterator[Rule]:
    """EFAULT of every call that takes a pointer."""
    calls: tuple[tuple[Any, ...], ...] = (
        ("open", None, os.O_RDONLY),
        ("open", None, CREATE, 0o644),
        ("mkdir", None, 0o755),
        ("mkfifo", None, 0o644),
        ("mknod", None, stat.S_IFIFO | 0o644, 0),
        ("link", None, b"x"),
        ("link", b"f", None),
        ("symlink", None, b"x"),
        ("symlink", b"f", None),
        ("rename", None, b"x"),
        ("rename", b"f", None),
        ("unlink", None),
        ("rmdir", None),
        ("chmod", None, 0o644),
        ("chown", None, 0, 0),
        ("lchown", None, 0, 0),
        ("truncate", None, 0),
        ("chdir", None),
        ("utimensat", AT_FDCWD, b"f", None, 0),
        ("access", None, 0),
        ("readlink", None, None, 10),
        ("readlink", b"l", None, 10),
        ("setxattr", None, b"user.a", b"v", 1, 0),
        ("setxattr", b"f", None, b"v", 1, 0),
        ("setxattr", b"f", b"user.a", None, 1, 0),
        ("getxattr", b"f", None, None, 0),
        ("removexattr", b"f", None),
        ("listxattr", b"f", None, 1000),
    )
    for call in calls:
        yield Rule(
            f"pointer: {call}",
            (
                *make("file", b"f"),
                (ROOT, ("symlink", b"f", b"l")),
                (ROOT, ("setxattr", b"f", "user.b", 3, 0, True)),
                (ROOT, ("fault", *call)),
            ),
        )


def of_attributes() -> Iterator[Rule]:
    """Extended attributes by class, kind and who asks; their bounds."""
    names = (
        "user.a",
        "trusted.a",
        "security.a",
        "system.a",
        "other.a",
        "user.",
        "user",
        "a",
        "",
        "user." + "n" * 250,
        "user." + "n" * 251,
    )
    for name, kind, who in product(names, ("file", "dir", "fifo", "link"), (ROOT, ALICE)):
        yield Rule(
            f"xattr: {name[:12]} of {len(name)} of a {kind} by {who}",
            (
                *made_by(ALICE, kind, b"it", 0o755),
                (who, ("setxattr", b"it", name, 0, 0, False)),
                (who, ("setxattr", b"it", name, 9, os.XATTR_CREATE, False)),
                (who, ("setxattr", b"it", name, 9, os.XATTR_REPLACE, False)),
                (who, ("setxattr", b"it", name, 8, os.XATTR_CREATE | os.XATTR_REPLACE, False)),
                (who, ("getxattr", b"it", name, False)),
                (who, ("listxattr", b"it", False)),
                (ROOT, ("listxattr", b"it", False)),
                (who, ("removexattr", b"it", name, False)),
                (who, ("removexattr", b"it", name, False)),
            ),
        )


def of_acl_entries() -> Iterator[Rule]:
    """What each entry allows, and what it does not."""
    rwx = ("read", "write", "search")
    acts: list[Op] = [
        ("raw_open", b"it", os.O_RDONLY, 0),
        ("raw_open", b"it", os.O_WRONLY, 0),
        ("access", b"it", os.X_OK),
        ("truncate", b"it", 2),
        ("listdir", b"it"),
        ("stat", b"it/in"),
        ("mkdir", b"it/new", 0o777),
        ("unlink", b"it/in"),
        ("rename", b"it/in", b"it/new-name", 0),
        ("set_acl", b"it", "access", ((USER_OBJ, 7, NO_ID), (GROUP_OBJ, 7, NO_ID), (OTHER, 7, NO_ID))),
        ("utime", b"it", None, True),
        ("chmod", b"it", 0o777),
    ]
    for tag, kind, bits, mask in product(
        (USER, GROUP, GROUP_OBJ, OTHER), ("file", "dir"), range(8), (7, 5, 0)
    ):
        entries = {
            USER_OBJ: 7,
            USER: bits if tag == USER else None,
            GROUP_OBJ: bits if tag == GROUP_OBJ else 0,
            GROUP: bits if tag == GROUP else None,
            MASK: mask,
            OTHER: bits if tag == OTHER else 0,
        }
        ids = {USER: ALICES, GROUP: TEAM}
        full = tuple((t, p, ids.get(t, NO_ID)) for t, p in entries.items() if p is not None)
        group = ALICES if tag == GROUP_OBJ else 0
        what = [name for at, name in enumerate(rwx) if bits & (4 >> at)]
        yield Rule(
            f"acl: {kind}, entry {tag} {what}, mask {mask}",
            (
                *make(kind, b"it", 0o755),
                *(make("file", b"it/in") if kind == "dir" else []),
                (ROOT, ("chown", b"it", 0, group, True)),
                (ROOT, ("set_acl", b"it", "access", full)),
                (ROOT, ("get_acl", b"it", "access")),
                *[(ALICE, op) for op in acts],
                (ROOT, ("lstat", b"it")),
                (ROOT, ("chmod", b"it", 0o750)),
                (ROOT, ("get_acl", b"it", "access")),
                (ROOT, ("drop_acl", b"it", "access")),
                (ROOT, ("lstat", b"it")),
            ),
        )


def of_wrong_acls() -> Iterator[Rule]:
    """What no file and no directory takes."""
    wrong = {
        "no owner": ((GROUP_OBJ, 7, NO_ID), (OTHER, 7, NO_ID)),
        "a name and no mask": ((USER_OBJ, 7, NO_ID), (USER, 7, 5), (GROUP_OBJ, 7, NO_ID), (OTHER, 7, NO_ID)),
        "unsorted": ((OTHER, 7, NO_ID), (USER_OBJ, 7, NO_ID), (GROUP_OBJ, 7, NO_ID)),
        "unknown tag": ((64, 7, NO_ID),),
        "bits beyond": ((USER_OBJ, 15, NO_ID), (GROUP_OBJ, 7, NO_ID), (OTHER, 7, NO_ID)),
        "empty": (),
    }
    for (name, entries), which, kind in product(
        wrong.items(), ("access", "default"), ("file", "dir", "fifo")
    ):
        yield Rule(
            f"acl: {name}, {which}, of a {kind}",
            (
                *make(kind, b"it", 0o755),
                (ROOT, ("set_acl", b"it", which, entries)),
                (ROOT, ("listxattr", b"it", True)),
                (ROOT, ("lstat", b"it")),
            ),
        )


def of_inherited_acls() -> Iterator[Rule]:
    """What a directory's default gives to what is made in it."""
    inherited = (
        (USER_OBJ, 7, NO_ID),
        (USER, 6, ALICES),
        (GROUP_OBJ, 5, NO_ID),
        (GROUP, 7, TEAM),
        (MASK, 7, NO_ID),
        (OTHER, 1, NO_ID),
    )
    for mode, mask in product((0o777, 0o640, 0o2755, 0), (0, 0o077)):
        yield Rule(
            f"acl: inherited, mode {mode:o}, umask {mask:o}",
            (
                *make("dir", b"d", 0o777),
                (ROOT, ("set_acl", b"d", "default", inherited)),
                (ALICE, ("umask", mask)),
                (ALICE, ("raw_open", b"d/f", CREATE, mode)),
                (ALICE, ("mkdir", b"d/s", mode)),
                (ALICE, ("mknod", b"d/p", stat.S_IFIFO | mode, 0)),
                (ALICE, ("symlink", b"x", b"d/l")),
                (ALICE, ("bind", b"d/b")),
                (ALICE, ("umask", 0o022)),
                *[
                    (ROOT, (look, b"d/" + n, *more))
                    for n in (b"f", b"s", b"p", b"b")
                    for look, *more in (("lstat",), ("get_acl", "access"), ("get_acl", "default"))
                ],
            ),
        )


def granular() -> Iterator[Rule]:
    """POSIX ACLs. For mounts and filesystems with them."""
    yield from of_acl_entries()
    yield from of_wrong_acls()
    yield from of_inherited_acls()


GROUPS: Final = {
    "paths": posixrules.of_paths,
    "sticky": posixrules.of_sticky_directories,
    "rename": posixrules.of_renames,
    "rights": posixrules.of_rights,
    "new": posixrules.of_new_files,
    "set-id": of_set_id_bits,
    "open": of_opens,
    "running": of_running_programs,
    "handle": of_handles,
    "times": of_times,
    "link": of_links,
    "pointers": of_pointers,
    "xattr": of_attributes,
}


def groups() -> dict[str, list[Rule]]:
    """All rules but those of ACLs, by what they are about."""
    return {name: list(rules()) for name, rules in GROUPS.items()}
