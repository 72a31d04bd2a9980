"""The record of a mount in the runtime directory: how commands find it by path alone.

`<mount id>.json` (0600) is written before mounting and kept after the end, so that `fsd wait-exit` can tell
how it ended. `<mount id>.lock` is held (flock) by the supervisor and the daemon together: it is free only
when both are gone.

Which directory it is depends on the environment, and a command may run in another one than the mount did
(umount(8), cron). So a copy of the record, a pointer, lies in a place that depends on the user alone:
/run/fsd as root, /tmp/fsd-<uid> else. Imports neither pyfuse3 nor trio.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import stat
from pathlib import Path
from typing import Any, Final

from fsd.host import threads
from fsd.host.processes import set_streams
from fsd.host.seam import Host
from fsd.kernel.mountpoint import list_mounts, mounted_at, resolve
from fsd.model.errors import NotFound, NotPermitted, UsageError
from fsd.model.plain import dataclass, field, replace

STARTING: Final = "starting"
MOUNTED: Final = "mounted"
RESTARTING: Final = "restarting"
DETACHED: Final = "detached"  # the kernel's side is gone, the rest is being sent
ENDED: Final = "ended"

# Says nothing about what there is: taken as "absent", a mount would be made twice, or not be found.
_NOT_LOOKED: Final = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)


@dataclass(frozen=True, slots=True)
class Record:
    """What `<mount id>.json` holds. `ended` is {"exit", "pending", "reason"} once the daemon has ended."""

    mount_id: str
    file_system_id: str
    mountpoint: str
    socket: str
    state_dir: str
    log: str
    endpoint: str
    remote_path: str
    runtime_dir: str
    pid: int = 0
    supervisor_pid: int = 0
    state: str = STARTING
    restarts: int = 0
    ended: dict[str, Any] = field(default_factory=dict)
    shown: str = ""  # the retained state it shows, as in a query string; empty: the live one

    @property
    def source(self) -> str:
        return f"fsd:{self.file_system_id}:{self.mount_id}"

    def values(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__match_args__}


def fixed_directory(uid: int) -> Path:
    """Where pointers lie."""
    return Path("/run/fsd") if uid == 0 else Path(f"/tmp/fsd-{uid}")


def _is(fd: int, path: Path) -> bool:
    """Whether `path` is still the open file."""
    try:
        there = os.lstat(path)
    except FileNotFoundError:
        return False
    own = os.fstat(fd)
    return (there.st_dev, there.st_ino) == (own.st_dev, own.st_ino)


class RuntimeDir:
    """One runtime directory. `make` makes and checks it. What is not found in it is looked for through the
    pointers; only files of this user's count."""

    def __init__(self, path: Path, host: Host) -> None:
        self.path = path
        self.host = host

    def make(self) -> None:
        """Make it 0700. Raises `NotPermitted` when it belongs to somebody else."""
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        info = os.lstat(self.path)
        if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.geteuid():
            raise NotPermitted(f"{self.path} is not a directory of yours", hint="remove it, or set TMPDIR")
        if info.st_mode & 0o077:
            os.chmod(self.path, 0o700)

    def log_here(self, mount_id: str) -> None:
        """What this process writes goes to the mount's log from here on. Raises `FsdError`: it cannot."""
        log = self.read(mount_id).log
        try:
            set_streams(log)
        except OSError as exc:
            error = threads.told(exc)
            raise error or UsageError(f"the log {log} cannot be written: {exc.strerror}") from exc

    def record_path(self, mount_id: str) -> Path:
        return self.path / f"{mount_id}.json"

    def socket_path(self, mount_id: str) -> Path:
        return self.path / f"{mount_id}.sock"

    def files(self, mount_id: str) -> list[Path]:
        """What a mount has here; the lock is the last."""
        return [self.path / f"{mount_id}.{kind}" for kind in ("json", "sock", "lock")]

    def home(self, record: Record) -> RuntimeDir:
        """The directory the record's lock and updates are in."""
        return (
            self if Path(record.runtime_dir) == self.path else RuntimeDir(Path(record.runtime_dir), self.host)
        )

    def point(self, record: Record) -> None:
        """Leave a pointer to `record`, and drop those to mounts whose directory is gone."""
        fixed = RuntimeDir(fixed_directory(os.geteuid()), self.host)
        if fixed.path == self.path:
            return
        fixed.make()
        for old in fixed._own_records():
            if not Path(old.runtime_dir).is_dir():
                fixed.record_path(old.mount_id).unlink(missing_ok=True)
        fixed.write(record)

    def write(self, record: Record) -> None:
        target = self.record_path(record.mount_id)
        temporary = target.with_name(f".{target.name}.{self.host.token_bytes(4).hex()}")
        temporary.touch(mode=0o600)
        temporary.write_text(json.dumps(record.values(), indent=1))
        os.rename(temporary, target)

    def update(self, mount_id: str, **changes: Any) -> Record:
        record = replace(self.read(mount_id), **changes)
        self.write(record)
        return record

    def read(self, mount_id: str) -> Record:
        """The record, in this directory or where a pointer leads. Raises `NotFound`."""
        found = self.load(mount_id)
        if found is not None:
            return self._behind(found) or found
        pointer = RuntimeDir(fixed_directory(os.geteuid()), self.host).load(mount_id)
        if pointer is not None and Path(pointer.runtime_dir) != self.path:
            found = self._behind(pointer)
        if found is None:
            raise NotFound(
                f"no record of mount {mount_id} in {self.path}", hint="was it mounted by another user?"
            )
        return found

    def load(self, mount_id: str) -> Record | None:
        """The record in this very directory; None when there is none that can be read and is ours. Raises
        `OSError` where this process could not look: no descriptor or memory left."""
        try:
            with open(self.record_path(mount_id), encoding="utf-8") as file:
                if os.fstat(file.fileno()).st_uid != os.geteuid():
                    return None
                raw = json.load(file)
            known = Record.__match_args__
            return Record(**{name: value for name, value in raw.items() if name in known})
        except OSError as exc:
            if exc.errno in _NOT_LOOKED:
                raise
            return None  # absent, or another user's: for every reader the same
        except (ValueError, TypeError, AttributeError):
            return None  # written by something else: as good as absent

    def _behind(self, found: Record) -> Record | None:
        """What `found` points to, which knows more: a pointer is as the mount began. (The directory of the
        pointers is also some commands' own.) Itself where it is no pointer."""
        if Path(found.runtime_dir) == self.path:
            return found
        return RuntimeDir(Path(found.runtime_dir), self.host).load(found.mount_id)

    def _own_records(self) -> list[Record]:
        try:
            names = sorted(self.path.glob("*.json"))
        except OSError as exc:
            if exc.errno in _NOT_LOOKED:
                raise
            return []
        return [record for name in names if (record := self.load(name.stem)) is not None]

    def records(self) -> list[Record]:
        """Every record, those behind pointers too, by mount point."""
        found = {record.mount_id: self._behind(record) or record for record in self._own_records()}
        for pointer in RuntimeDir(fixed_directory(os.geteuid()), self.host)._own_records():
            real = RuntimeDir(Path(pointer.runtime_dir), self.host).load(pointer.mount_id)
            if real is not None:
                found.setdefault(real.mount_id, real)
        return sorted(found.values(), key=lambda record: record.mountpoint)

    def lock(self, mount_id: str) -> int | None:
        """The family lock's fd, held until every copy of it is closed; None when somebody holds it."""
        path = self.path / f"{mount_id}.lock"
        while True:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if _is(fd, path):
                    return fd
            except BlockingIOError:
                os.close(fd)
                return None
            # Removed (`prune`) between opening and locking: whoever comes next would not see this one.
            os.close(fd)

    def alive(self, mount_id: str) -> bool:
        """Whether a supervisor or daemon of the mount lives."""
        if not (self.path / f"{mount_id}.lock").exists():
            return False
        fd = self.lock(mount_id)
        if fd is None:
            return True
        os.close(fd)
        return False

    def changed(self, mount_id: str) -> float:
        """When the record was last written; 0 when it is gone."""
        try:
            return self.record_path(mount_id).stat().st_mtime
        except OSError:
            return 0.0

    def find(self, path: Path) -> Record:
        """The record of the mount at `path`, of the last one there, or of the one that holds it.

        Raises `NotFound`, `UsageError`.
        """
        place = resolve(path)
        entry = mounted_at(place)
        if entry is not None and entry.ids is not None:
            return self.read(entry.ids[1])
        if entry is not None and entry.fstype.startswith("fuse"):
            raise UsageError(f"{place} is a mount of something else ({entry.fstype}, {entry.source})")
        here = [record for record in self.records() if record.mountpoint == str(place)]
        if here:
            return max(here, key=lambda r: self.home(r).changed(r.mount_id))
        for parent in place.parents:
            entry = mounted_at(parent)
            if entry is not None:
                if entry.ids is not None:
                    return self.read(entry.ids[1])
                break
        raise NotFound(f"nothing is mounted at {place}", hint="`fsd mounts` lists what is mounted here")

    def mounts_of(self, file_system_id: str) -> list[Record]:
        """The live mounts of one filesystem on this machine, as far as this user can see them."""
        found = []
        for entry in list_mounts():
            ids = entry.ids
            if ids is not None and ids[0] == file_system_id:
                try:
                    found.append(self.read(ids[1]))
                except NotFound:
                    continue  # another user's, or of a daemon that is gone: none that can be asked
        return found
