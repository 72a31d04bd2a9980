"""What a change takes from a file's set-id bits and capabilities: all changes, by all, on any filesystem.

As root, `python -m support.setids DIRECTORY [--thorough]` makes a file for each case, has each of the people
change theirs, and prints what came of it as JSON: the same wherever the rules of a local disk hold.
"""

from __future__ import annotations

import ctypes
import errno
import json
import mmap
import os
import struct
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, Final, NamedTuple

OWNER, MEMBER, STRANGER = 23101, 23102, 23103
TEAM, OTHERS = 23201, 23202
CAPABILITY: Final = "security.capability"
# Version 2, effective: CAP_NET_BIND_SERVICE.
SOME: Final = struct.pack("<5I", 0x02000001, 1 << 10, 0, 0, 0)
MODES: Final = (0o6777, 0o2767, 0o6766, 0o4777, 0o777)
QUICK: Final = ((0o6777, None), (0o2767, None), (0o777, SOME))
SIZE: Final = 5000
STATX_MODE, AT_FDCWD = 2, -100
_FOWNER, _FSETID = 1 << 3, 1 << 4
_KEEPCAPS, _NEWUSER = 8, 0x10000000  # of prctl, of unshare
_libc = ctypes.CDLL(None, use_errno=True)


class Person(NamedTuple):
    """`without`: capabilities of root's that this one lacks; `only`: the one that it has though it is not
    root; `apart`: it has all of them in a user namespace that it made."""

    uid: int
    gid: int
    groups: tuple[int, ...] = ()
    without: int = 0
    only: int = 0
    apart: bool = False


PEOPLE: Final = {
    "root": Person(0, 0),
    "root without CAP_FSETID": Person(0, 0, (), _FSETID),
    "owner": Person(OWNER, OWNER, (TEAM, OTHERS)),
    "owner outside of the group": Person(OWNER, OWNER, (OTHERS,)),
    "member": Person(MEMBER, MEMBER, (TEAM,)),
    "stranger": Person(STRANGER, STRANGER),
    "stranger with CAP_FOWNER": Person(STRANGER, STRANGER, only=_FOWNER),
    "stranger in a namespace": Person(STRANGER, STRANGER, apart=True),
}


def become(person: Person) -> None:
    """For the rest of this process."""
    if person.only:
        _called(_libc.prctl(_KEEPCAPS, 1, 0, 0, 0))
    os.setgroups(person.groups)
    os.setresgid(person.gid, person.gid, person.gid)
    os.setresuid(person.uid, person.uid, person.uid)
    if person.without or person.only:
        head, data = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
        _called(_libc.capget(head, data))
        held = person.only or data[1] & ~person.without
        data[0], data[1] = held, held
        if person.only:
            data[3] = data[4] = 0
        _called(_libc.capset(head, data))
    if person.apart:
        _called(_libc.unshare(_NEWUSER))


def _called(result: int) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


# The changes. `fd` is of a file that root opened for writing before it became who changes it.
def _opened(path: str, flags: int, call: Callable[[int], object]) -> object:
    fd = os.open(path, flags)
    try:
        return call(fd)
    finally:
        os.close(fd)


def _direct(fd: int) -> int:
    with closing(mmap.mmap(-1, 4096)) as page:
        return os.pwrite(fd, page, 4096)


def _mapped(fd: int) -> None:
    with closing(mmap.mmap(fd, SIZE)) as pages:
        pages[10:15] = b"store"
        pages.flush()


def _copied(fd: int) -> object:
    return os.copy_file_range(fd, fd, 100, 0, 1000)


def _punched(fd: int) -> None:
    _called(_libc.fallocate(fd, 3, ctypes.c_long(0), ctypes.c_long(100)))


Change = Callable[[str, int], object]
CHANGES: Final[dict[str, Change]] = {
    "write": lambda path, fd: _opened(path, os.O_WRONLY, lambda own: os.write(own, b"x")),
    "write nothing": lambda path, fd: _opened(path, os.O_WRONLY, lambda own: os.write(own, b"")),
    "append": lambda path, fd: _opened(path, os.O_WRONLY | os.O_APPEND, lambda own: os.write(own, b"x")),
    "two writes": lambda path, fd: _opened(
        path, os.O_RDWR, lambda own: os.pwrite(own, b"x", 1) + os.writev(own, [b"y", b"z"])
    ),
    "write synchronously": lambda path, fd: _opened(
        path, os.O_WRONLY | os.O_DSYNC, lambda own: os.write(own, b"x")
    ),
    "write without pages": lambda path, fd: _opened(path, os.O_RDWR | os.O_DIRECT, _direct),
    "write on another's handle": lambda path, fd: os.pwrite(fd, b"x", 3),
    "truncate another's handle": lambda path, fd: os.ftruncate(fd, 3),
    "copy in": lambda path, fd: _opened(path, os.O_RDWR, _copied),
    "allocate": lambda path, fd: _opened(path, os.O_RDWR, lambda own: os.posix_fallocate(own, 0, SIZE + 1)),
    "punch a hole": lambda path, fd: _opened(path, os.O_RDWR, _punched),
    "store through a mapping": lambda path, fd: _opened(path, os.O_RDWR, _mapped),
    "open for writing": lambda path, fd: _opened(path, os.O_RDWR, lambda own: None),
    "open and empty": lambda path, fd: _opened(path, os.O_WRONLY | os.O_TRUNC, lambda own: None),
    "open, empty, write": lambda path, fd: _opened(
        path, os.O_RDWR | os.O_TRUNC | os.O_CREAT, lambda own: os.write(own, b"x")
    ),
    "truncate": lambda path, fd: os.truncate(path, 7),
    "truncate longer": lambda path, fd: os.truncate(path, SIZE + 7),
    "truncate to the same": lambda path, fd: os.truncate(path, SIZE),
    "truncate a handle": lambda path, fd: _opened(path, os.O_RDWR, lambda own: os.ftruncate(own, 7)),
    "chown to nobody else": lambda path, fd: os.chown(path, -1, -1),
    "chown to the same": lambda path, fd: os.chown(path, OWNER, -1),
    "chown another's handle to nobody else": lambda path, fd: os.chown(fd, -1, -1),
    "chgrp": lambda path, fd: os.chown(path, -1, OTHERS),
    "chown": lambda path, fd: os.chown(path, STRANGER, TEAM),
    "link": lambda path, fd: os.link(path, path + "-2"),
    "rename": lambda path, fd: os.rename(path, path),
    "touch": lambda path, fd: os.utime(path, (1, 1)),
    "chmod": lambda path, fd: os.chmod(path, 0o4755),
    "attribute": lambda path, fd: os.setxattr(path, "user.u", b"x"),
    "read": lambda path, fd: _opened(path, os.O_RDONLY, lambda own: len(os.read(own, 10))),
}
# Of these people, unless all is asked for, only what concerns what they have.
_OF: Final = {
    "stranger with CAP_FOWNER": ("write", "truncate", "chmod", "chown to nobody else"),
    "stranger in a namespace": ("write", "copy in", "allocate", "punch a hole", "open and empty"),
}
# Of no others is anything open beside what the change opens.
_HANDED: Final = tuple(change for change in CHANGES if "another's handle" in change)


def cases(thorough: bool) -> Iterator[tuple[str, str, int, bytes | None]]:
    """(person, change, mode, capability)."""
    every = tuple((mode, capability) for mode in MODES for capability in (None, SOME))
    for who in PEOPLE:
        for change in CHANGES if thorough else _OF.get(who, CHANGES):
            for mode, capability in every if thorough else QUICK:
                yield who, change, mode, capability


def _name(number: int) -> str:
    return f"f{number}"


def _make(path: str, mode: int, capability: bytes | None) -> None:
    fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    os.write(fd, b"o" * SIZE)
    os.fchown(fd, OWNER, TEAM)
    os.fchmod(fd, mode)
    os.close(fd)
    if capability is not None:
        os.setxattr(path, CAPABILITY, capability)


def kept_mode(path: str) -> int:
    """The mode alone, which the kernel tells from what it has where it can."""
    room = ctypes.create_string_buffer(256)
    _called(_libc.statx(AT_FDCWD, os.fsencode(path), 0, STATX_MODE, room))
    return int(struct.unpack_from("<H", room, 28)[0])


def looked_at(path: str) -> list[Any]:
    """Mode, owner and capabilities."""
    info = os.stat(path)
    try:
        capability = os.getxattr(path, CAPABILITY).hex()
    except OSError as exc:
        capability = errno.errorcode[exc.errno or 0]
    return [oct(info.st_mode), info.st_uid, info.st_gid, capability]


def _changed(path: str, change: Change, fd: int) -> list[Any]:
    try:
        done: object = change(path, fd)
    except OSError as exc:
        done = errno.errorcode[exc.errno or 0]
    return [done, oct(kept_mode(path)), oct(os.stat(path).st_mode)]


def _by(person: Person, mine: list[tuple[int, str]], out: int) -> None:
    """What `person` does, in a process of its own; the results into `out`."""
    handles = {number: os.open(_name(number), os.O_RDWR) for number, change in mine if change in _HANDED}
    become(person)
    told = {n: _changed(_name(n), CHANGES[change], handles.get(n, -1)) for n, change in mine}
    with os.fdopen(out, "w") as file:
        json.dump(told, file)


def _children(all_: list[tuple[str, str, int, bytes | None]]) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for who, person in PEOPLE.items():
        mine = [(number, case[1]) for number, case in enumerate(all_) if case[0] == who]
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                os.close(read)
                _by(person, mine, write)
                code = 0
            finally:
                os._exit(code)
        os.close(write)
        with os.fdopen(read) as file:
            text = file.read()
        if os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]):
            raise SystemExit(f"{who}: failed")
        found |= json.loads(text)
    return found


def main() -> None:
    """Makes, changes, looks."""
    os.chdir(sys.argv[1])
    os.umask(0o22)
    os.chmod(".", 0o777)
    all_ = list(cases("--thorough" in sys.argv))
    for number, (_, _, mode, capability) in enumerate(all_):
        _make(_name(number), mode, capability)
    told = _children(all_)
    results = {}
    for number, (who, change, mode, capability) in enumerate(all_):
        what = f"{change}, by {who}, {mode:o}{', with a capability' if capability else ''}"
        results[what] = [*told[str(number)], *looked_at(_name(number))]
    json.dump(results, sys.stdout)


def again(directory: Path, thorough: bool) -> list[list[Any]]:
    """What a directory shows of the files that `main` has left there."""
    return [looked_at(os.fspath(directory / _name(at))) for at in range(len(list(cases(thorough))))]


if __name__ == "__main__":
    main()
