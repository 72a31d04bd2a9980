"""The words between the volume and whoever drives it (the kernel layer, the driver of tests and recovery).

Everything here is used on the volume's one thread, except `Job.run`, which any thread may call.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple, Protocol

from fsd.model.errors import FsdError, Unavailable
from fsd.model.limits import BUFFER_MAX, FLUSH_AGE, IO_TIMEOUT, LEASE_TTL, SEGMENT
from fsd.model.plain import dataclass
from fsd.remote.api import Remote

FAST: Final = "fast"  # commits and what an fsync waits for: keep a worker and a connection free for it
BULK: Final = "bulk"  # loads, hashing, uploads
LOCAL: Final = "local"  # what needs no server: never behind a request that hangs


class Cache(Protocol):
    """What the volume needs of the blob cache: verified bytes by hash. Any thread."""

    def get(self, digest: bytes) -> bytes | None: ...

    def put(self, digest: bytes, data: bytes) -> None: ...


@dataclass(frozen=True, slots=True)
class VolumeOptions:
    """What a volume is opened with. Sizes in bytes, times in seconds.

    `state_dir` is this mount's own directory (`mounts/<id>`), made if absent. `path` is the local mount
    point and `hostname` this machine's name, for the server's record. `remote_path` is the subtree shown.
    `exclusive`: be the only writer there, by a lease that lasts `lease_ttl` when it is not renewed.
    `consistency` "open": whoever is named as asker of an open or a lookup gets what the server has then.
    `durability` is "fsync" or "close". `buffer_size` None: half of the free disk, at most BUFFER_MAX.
    `io_timeout` 0: wait for ever. `file_system` is written into the log, so that a state directory of another
    filesystem is refused.
    """

    state_dir: Path
    mount_id: str
    hostname: str
    path: str
    file_system: str = ""
    remote_path: bytes = b"/"
    read_only: bool = False
    exclusive: bool = False
    lease_ttl: float = LEASE_TTL
    consistency: str = "feed"
    durability: str = "fsync"
    flush_age: float = FLUSH_AGE
    buffer_size: int | None = None
    buffer_max: int = BUFFER_MAX
    io_timeout: float = IO_TIMEOUT
    version: str = "0.1.0"
    segment_size: int = SEGMENT
    acl: bool = False  # POSIX ACLs are shown and inherited; the kernel enforces them


# Hears, while something long goes on, that it does, and what is being done. On whatever thread does it.
Told = Callable[[str], object]


@dataclass(slots=True, eq=False)
class Want:
    """Something a caller waits for. Ends once: `finished`, with `error` set or `result` valid.

    `deadline` is a `host.monotonic()` time at which `Volume.tick` ends it with `Unavailable` (EIO); None:
    never. What it wanted goes on all the same.
    """

    what: str
    deadline: float | None = None
    finished: bool = False
    error: FsdError | None = None
    result: object = None
    late: FsdError | None = None  # what it ends with at its deadline, if not `Unavailable`

    def told(self) -> FsdError:
        """Its error, for one of those who wait to raise. One error may be told to any number, as long as the
        mount lives (a lost lease): it keeps nothing of the calls of those before."""
        assert self.error is not None, "it ended well, or has not ended"
        return self.error.with_traceback(None)

    def end(self, error: FsdError | None = None) -> None:
        """Finish it. A second end changes nothing."""
        if not self.finished:
            self.finished = True
            self.error = error


class Park(Exception):
    """The call cannot be answered yet: wait until `volume.done(want)` (which raises the error it ended with).

    `again` True: then make the same call with the same arguments once more (it may park again). False: the
    wait was all that was left; the call's result is `want.result`.
    """

    def __init__(self, want: Want, *, again: bool = True) -> None:
        super().__init__(want.what)
        self.want = want
        self.again = again


class Job(Protocol):
    """Work for another thread. `run` touches no volume state; its result, or the exception it raised, goes
    to `Volume.finish(job, …)` on the volume's thread. `lane` is FAST, BULK or LOCAL."""

    @property
    def lane(self) -> str: ...

    def run(self, remote: Remote, cache: Cache) -> object: ...


class Invalidation(NamedTuple):
    """What the kernel has to forget. `name` None: attributes and data of inode `ino`, with `attr_only` not
    the data (new attributes make it forget what is old); else the entry `name` of the directory `ino`, with
    `ask` only how long it is good: the next look asks, and mounts on it, or the path of who works there, stay
    where it is what it was. Numbers are the volume's (`root_ino` is the kernel's node 1)."""

    ino: int
    name: bytes | None
    attr_only: bool = False
    ask: bool = False


class Pending(NamedTuple):
    """What only this machine holds. `oldest_s` is how long the oldest of it waits; `first_path` names one
    file of it (relative to the mount); `reason` says why it was not sent ("" while nothing failed)."""

    operations: int
    files: int
    bytes: int
    oldest_s: float
    first_path: builtins.bytes
    reason: str

    @property
    def clean(self) -> bool:
        return self.operations == 0 and self.files == 0


def timed_out(what: str) -> FsdError:
    """What a want that passed its deadline ends with."""
    return Unavailable(f"the server did not answer in time: {what}")
