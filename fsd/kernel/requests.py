"""Loads `_requests.c`, which knows of a request what libfuse and pyfuse3 do not pass on. To be imported
before them.

With FUSE_HANDLE_KILLPRIV_V2 the kernel no longer asks for `security.capability` before each write, only
before the first after it was told a file's attributes. What a change of a file takes away it leaves to us:
the set-id bits where the request says so, that attribute always. Built with the package where libfuse's
headers are new enough; without it the kernel is not offered that, and asks and takes away itself.

It also answers what the kernel asks although it was just told: the attributes of a directory after a change
in it, and `security.capability` of a file before the first write after it was told the file's. Two of the
seven requests of a small file cost a read and a write then, and no Python. So do its flush, where there is no
error to be told, and its release, and the read of a small file whose bytes are at hand.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from types import EllipsisType, ModuleType
from typing import Final, NamedTuple

from fsd.kernel.extensions import load

INIT: Final = 26
KILLS: Final = 1
FROM_PAGES: Final = 2
APPENDS: Final = 4
PLACED: Final = 8
EVERY_GROUP: Final = range(1 << 32)
_CAP_FOWNER: Final = 1 << 3
_CAP_FSETID: Final = 1 << 4
_INITIAL: Final = "user:[4026531837]"  # the user namespace all others descend from, on every Linux
# The numbers of chown, fchown, lchown and fchownat.
_CHOWNS: Final = {"x86_64": (92, 93, 94, 260), "aarch64": (55, 54)}.get(os.uname().machine, ())
_LOOKS: Final = 1000


class Change(NamedTuple):
    """A request that changes a file, as the kernel sees it. `kills`: its caller may not keep the set-id bits.
    `from_pages`: of what was stored through a mapping, by whomever. `pid` and `gid` are the caller's.
    `appends`: whether the handle of a write has O_APPEND now, which fcntl may change after its open; None
    where that was not seen."""

    kills: bool
    from_pages: bool
    pid: int
    gid: int
    appends: bool | None = None

    def groups(self) -> Collection[int]:
        """All groups of the caller, who waits for our answer; of one that is not seen from here its own."""
        return {self.gid, *map(int, status(self.pid).get("Groups", "").split())}


def status(pid: int) -> dict[str, str]:
    """What the kernel says of a thread; nothing of one in another namespace of processes."""
    try:
        with open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as file:
            return dict(line.rstrip("\n").split(":", 1) for line in file)
    except OSError:
        return {}


def may_keep_bits(pid: int, uid: int) -> bool:
    """Whether a thread has CAP_FSETID."""
    return _has(pid, uid, _CAP_FSETID)


def acts_as_owner(pid: int, uid: int) -> bool:
    """Whether a thread has CAP_FOWNER."""
    return _has(pid, uid, _CAP_FOWNER)


def _has(pid: int, uid: int, capability: int) -> bool:
    """Whether a thread has a capability where it counts: whoever makes a user namespace has all of them in
    that. Of one that is not seen from here, whether it is root's."""
    held = status(pid).get("CapEff")
    if held is None:
        return uid == 0
    return bool(int(held, 16) & capability) and _initial(pid, uid)


def _initial(pid: int, uid: int) -> bool:
    """Whether a thread's capabilities are those of the whole machine."""
    try:
        return os.readlink(f"/proc/{pid}/ns/user") == _INITIAL
    except OSError:  # a kernel without such namespaces, or one that does not show this one's
        return uid == 0


def changes_owner(pid: int) -> bool | None:
    """Whether a thread that waits for us in the kernel is in chown(2) or its kin; None where that is not
    seen."""
    for _ in range(_LOOKS if _CHOWNS else 0):
        try:
            with open(f"/proc/{pid}/syscall", encoding="ascii") as file:
                number = file.read().partition(" ")[0]
        except OSError:
            return None
        if number != "running\n":  # it is about to wait
            return int(number) in _CHOWNS
        os.sched_yield()
    return None


def _load() -> ModuleType | None:
    found = load("_requests")
    # A checkout that was updated and not set up again has an older one: as good as none.
    return found if hasattr(found, "take_forgotten") else None


_extension = _load()


def newest() -> Change:
    """The request whose handler is called. To be asked before anything else is done, on the FUSE thread, of a
    connection that answered `seen`."""
    assert _extension is not None, "it is not there"
    operation, bits, pid, gid = _extension.last()
    # One that could not be seen (no descriptor left for a look into libfuse's pipe) rather loses the bits.
    appends = bool(bits & APPENDS) if bits & (APPENDS | PLACED) else None
    return Change(bool(bits & KILLS) or not operation, bool(bits & FROM_PAGES), pid, gid, appends)


def seen(operation: int) -> bool:
    """Whether the request received last was seen, and is this one."""
    return _extension is not None and bool(_extension.last()[0] == operation)


def keep_forgotten() -> None:
    """From now on what the kernel forgets is gathered, at most some thousand inodes, instead of handled one
    by one: a third of the requests of a removal. Only of a connection that does not block."""
    if _extension is not None:
        _extension.keep_forgotten()


def may_wait() -> Callable[[int], None] | None:
    """What allows the next receive to wait for a request itself, or until a descriptor is readable."""
    return getattr(_extension, "may_wait", None)


def answer_here() -> bool:
    """From now on have such questions answered without a handler. `forget_answers` is to be called before
    anything that may change something and is no request. False where the extension is not there, or older."""
    if not hasattr(_extension, "quiet_handle"):
        return False
    assert _extension is not None
    _extension.answer_here()
    return True


def call_directly(
    calls: dict[int, Callable[..., bytes | int | EllipsisType | None]], jobs: Collection[object]
) -> None:
    """From now on call these functions for requests, by the numbers of operations: they give the answer, the
    number of an error (0: none), `...` where they will `answer_late`, or None, and the request goes to its
    handler. What they put into `jobs` is handed out before the next one."""
    if hasattr(_extension, "answer_late"):  # an older one cannot do all of it
        assert _extension is not None
        _extension.call_directly(calls, jobs)


# Answer the request of this number, for which one of them gave `...`: with an error, or 0.
answer_late: Final[Callable[[int, int], None]] = getattr(
    _extension, "answer_late", lambda unique, error: None
)


def forget_answers() -> int:
    """Forget what is known for it; how many questions were answered since the last call."""
    return 0 if _extension is None else int(_extension.forget_answers())


# All names of a directory are in a dict, where None does not exist; of others these bytes are told. (A
# function of Python's around each of these would cost more than they do.)
whole_directory: Final[Callable[[int, dict[bytes, int | None], bytes], None]] = getattr(
    _extension, "whole_directory", lambda nodeid, entries, answer: None
)

# The names, with their directories, that were told not to exist without a handler since the last call.
take_absent: Final[Callable[[], tuple[tuple[int, bytes], ...]]] = getattr(
    _extension, "take_absent", lambda: ()
)


# The kernel is told the attributes of a file that has no capabilities, and may ask for them.
bare_file: Final[Callable[[int], None]] = getattr(_extension, "bare_file", lambda nodeid: None)

# A handler changed a directory: its number, mtime, ctime (ns), links and size; all else is as the kernel was
# told last.
changed_directory: Final[Callable[[int, int, int, int, int], None]] = getattr(
    _extension, "changed_directory", lambda nodeid, mtime, ctime, nlink, size: None
)


def file_bytes(fh: int, data: bytes) -> None:
    """`data` is the whole file that was opened as `fh`, for reading."""
    if _extension is not None:
        _extension.file_bytes(fh, data)


# A flush of this handle has nothing to do or to tell.
quiet_handle: Final[Callable[[int], None]] = getattr(_extension, "quiet_handle", lambda fh: None)

# The handles whose release was answered ahead; None: there are none. To be asked before each handler and
# before anything else that is no request: then it is as if they had been released in their order.
take_released: Final[Callable[[], tuple[int, ...] | None]] = getattr(
    _extension, "take_released", lambda: None
)


def take_forgotten() -> Sequence[tuple[int, int]]:
    """What was gathered: inodes and how many lookups of each. On the FUSE thread."""
    return () if _extension is None else _extension.take_forgotten()
