"""Remote files and trees to the local disk.

A local file is replaced whole: written beside its name, checked for its length, then renamed. Symlinks are
made last, so that nothing is written through one that came with the tree.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from functools import partial

from fsd.client.files import Files, JsonObject, raw_name, raw_path, raw_target
from fsd.client.pool import Workers
from fsd.client.sources import LocalTarget, told
from fsd.client.transfer import (
    CopyOptions,
    CopyResult,
    Meter,
    ProgressFn,
    base_name,
    download_stream,
    means_content,
    means_into,
    normal_source,
)
from fsd.host.files import write_all
from fsd.host.seam import Host
from fsd.model.errors import Conflict, IntegrityError, UsageError
from fsd.model.names import show

__all__ = ["download", "download_stream", "get_file", "get_tree"]


def download(
    files: Files,
    source: bytes,
    target: bytes,
    options: CopyOptions,
    progress: ProgressFn | None = None,
) -> CopyResult:
    """Copy the remote `source` to the local `target`, a tree with `options.recursive`.

    A symlink given as source is followed, unless with `recursive`; those inside a tree are kept.
    """
    where = normal_source(source)
    entry = files.stat(where, follow=not options.recursive)
    is_dir = bool(entry["is_dir"])
    if is_dir and not options.recursive:
        raise UsageError(f"{show(where)} is a directory", hint="copy it with -r")
    if options.append:
        raise UsageError("--append is for copies to the server")
    goal = local_target(target, source if is_dir and means_content(source) else where, recursive=is_dir)
    if options.parents and os.path.dirname(goal):
        with told(goal):
            os.makedirs(os.path.dirname(goal), exist_ok=True)
    result = CopyResult("download", show(where), show(goal))
    meter = Meter(result, progress)
    if is_dir:
        get_tree(files, raw_path(entry), goal, options, meter)
    elif entry["kind"] == "symlink":
        _make_link(entry, goal, options, meter)
    elif entry["kind"] == "file":
        result.revision = get_file(files, entry, goal, options, meter)
    else:
        raise UsageError(
            f"{show(where)} is a {entry['kind']}; only files, symlinks and directories are copied"
        )
    return result


def local_target(target: bytes, source: bytes, *, recursive: bool) -> bytes:
    """Where a copy to the local `target`, as typed, goes; the same rules as for remote targets."""
    if recursive and target and means_content(source):
        return target.rstrip(b"/") or b"/"
    if means_into(target) or (not recursive and os.path.isdir(target)):
        return os.path.join(target.rstrip(b"/") or b"/", base_name(source, "the source"))
    if not target:
        raise UsageError("no local target given")
    # Through a symlink, as cp does: the file it points to is replaced.
    return os.path.realpath(target) if os.path.islink(target) and not recursive else target


def get_file(files: Files, entry: JsonObject, target: bytes, options: CopyOptions, meter: Meter) -> str:
    """Fetch the regular file `entry` (a stat object); the revision fetched."""
    path = raw_path(entry)
    if os.path.lexists(target) and not os.path.islink(target):
        with told(target):
            mode = os.stat(target).st_mode
        if not options.overwrite:
            raise Conflict(f"the local {show(target)} exists")
        if stat.S_ISCHR(mode) or stat.S_ISFIFO(mode):
            _pour(files, path, target, meter)
            meter.did("files", target)
            return str(entry["revision"])
        if stat.S_ISDIR(mode):
            raise Conflict(f"the local {show(target)} is a directory")
    with LocalTarget(target, files.http.host) as local:
        reading = files.reading(path)
        for piece in reading.runs():
            if isinstance(piece, int):
                local.hole(piece)
                continue
            local.write(piece)
            meter.add(len(piece))
        local.finish(
            mode=int(entry["mode"], 8) & (0o7777 if options.owner else 0o777)
            if options.preserve
            else _default_mode(),
            mtime_ns=int(entry["mtime_ns"]) if options.preserve else None,
            owner=(int(entry["uid"]), int(entry["gid"])) if options.owner else None,
            replace=options.overwrite,
        )
    meter.did("files", target)
    return reading.revision or str(entry["revision"])


def _default_mode() -> int:
    """What a new file gets without `preserve`. umask(2) tells only by setting, which other threads notice."""
    with open("/proc/self/status", "rb") as status:
        for line in status:
            if line.startswith(b"Umask:"):
                return 0o666 & ~int(line.split()[1], 8)
    return 0o644


def _pour(files: Files, path: bytes, target: bytes, meter: Meter) -> None:
    with told(target):
        fd = os.open(target, os.O_WRONLY | os.O_CLOEXEC)
    try:
        for piece in files.read(path):
            with told(target):
                write_all(fd, piece)
            meter.add(len(piece))
    finally:
        os.close(fd)


def _make_link(entry: JsonObject, target: bytes, options: CopyOptions, meter: Meter) -> None:
    pointed = raw_target(entry)
    with told(target):
        if os.path.lexists(target):
            if os.path.islink(target) and os.readlink(target) == pointed:
                meter.did("skipped", target)
                return
            if not options.overwrite:
                raise Conflict(f"the local {show(target)} exists")
            os.unlink(target)
        os.symlink(pointed, target)
        if options.owner:
            os.lchown(target, int(entry["uid"]), int(entry["gid"]))
        if options.preserve:
            mtime_ns = int(entry["mtime_ns"])
            os.utime(target, ns=(mtime_ns, mtime_ns), follow_symlinks=False)
    meter.did("symlinks", target)


def get_tree(
    files: Files,
    source: bytes,
    target: bytes,
    options: CopyOptions,
    meter: Meter,
    got: Callable[[bytes, JsonObject, str], None] | None = None,
) -> None:
    """Fetch the tree at the remote directory `source` into the local directory `target`, made if absent.

    `got` is called, on any thread, for each entry that is here now: with its path below `target`, its stat
    object and the revision that was fetched. With it each name is a file of its own; else the names of one
    file are one here too.
    """
    top = files.stat(source)
    directories = [(target, top)]
    links: list[tuple[JsonObject, bytes]] = []
    first: dict[str, bytes] = {}  # a file with several names -> where the first one is
    names: list[tuple[JsonObject, bytes]] = []  # its others
    done: set[bytes] = set()  # where one is that was fetched, and was still the same file
    lost: set[bytes] = set()  # directories that cannot be here, each told once: nothing below is tried
    _make_dir(target, meter)
    with Workers(options.parallel) as workers:
        meter.stopping = workers.stopping
        for entry in files.list(source, recursive=True):
            below = _below(entry, source)
            goal = os.path.join(target, below)
            if os.path.dirname(goal) in lost:
                lost.update((goal,) if entry["is_dir"] else ())
                continue
            if entry["is_dir"]:
                if not meter.tried(raw_path(entry), partial(_make_dir, goal, meter)):
                    lost.add(goal)
                    continue
                directories.append((goal, entry))
            elif entry["kind"] == "symlink":
                links.append((entry, goal))
            elif entry["kind"] == "file":
                if got is None and entry["nlink"] > 1 and first.setdefault(entry["ino"], goal) != goal:
                    names.append((entry, goal))
                    continue
                told_of = partial(got, below, entry) if got is not None else partial(_note, done, entry, goal)
                job = _file_job(files, entry, goal, options, meter, told_of)
                workers.submit(meter.attempt(raw_path(entry), job))
                continue
            else:
                meter.not_copied(raw_path(entry))
                continue
            if got is not None:
                got(below, entry, str(entry["revision"]))
    for entry, goal in names:
        where = first[entry["ino"]]
        there = where if where in done or (options.resume and _is_here(entry, where)) else None
        meter.attempt(raw_path(entry), _name_job(files, entry, goal, there, options, meter))()
    for entry, goal in links:
        meter.attempt(raw_path(entry), _link_job(entry, goal, options, meter))()
    if options.preserve:
        for goal, entry in reversed(directories):
            meter.tried(raw_path(entry), partial(_finish_dir, goal, entry, options))


def _below(entry: JsonObject, source: bytes) -> bytes:
    """The entry's path below `source`, safe to join to a local directory; raises `IntegrityError`."""
    path, prefix = raw_path(entry), source.rstrip(b"/") + b"/"
    below = path[len(prefix) :]
    parts = below.split(b"/")
    if not path.startswith(prefix) or any(p in (b"", b".", b"..") for p in parts) or b"\0" in below:
        raise IntegrityError(f"the server lists {show(path)} below {show(source)}")
    if raw_name(entry) != parts[-1]:
        raise IntegrityError(f"the server names {show(path)} {show(raw_name(entry))}")
    return below


def _make_dir(path: bytes, meter: Meter) -> None:
    with told(path):
        try:
            os.mkdir(path, 0o700)
        except FileExistsError:
            if not os.path.isdir(path):
                raise
            return
    meter.did("directories", path)


def _finish_dir(path: bytes, entry: JsonObject, options: CopyOptions) -> None:
    with told(path):
        if options.owner:
            os.chown(path, int(entry["uid"]), int(entry["gid"]))
        os.chmod(path, int(entry["mode"], 8) & 0o7777)
        os.utime(path, ns=(int(entry["mtime_ns"]), int(entry["mtime_ns"])))


def _link_job(entry: JsonObject, goal: bytes, options: CopyOptions, meter: Meter) -> Callable[[], None]:
    return lambda: _make_link(entry, goal, options, meter)


def _file_job(
    files: Files,
    entry: JsonObject,
    goal: bytes,
    options: CopyOptions,
    meter: Meter,
    got: Callable[[str], None] | None,
) -> Callable[[], None]:
    def job() -> None:
        if options.resume and _is_here(entry, goal):
            meter.did("skipped", goal)
            return
        try:
            revision = get_file(files, entry, goal, options, meter)
            if got is not None:
                got(revision)
        except Conflict:
            if options.overwrite or not os.path.lexists(goal):
                raise
            meter.did("skipped", goal)

    return job


def _name_job(
    files: Files, entry: JsonObject, goal: bytes, first: bytes | None, options: CopyOptions, meter: Meter
) -> Callable[[], None]:
    """A further name of the file that was fetched to `first`; fetched again where it cannot have one."""

    def job() -> None:
        again = first is None or (options.resume and _is_here(entry, goal))
        try:
            if first is not None and os.path.lexists(goal):
                if os.path.samestat(os.lstat(first), os.lstat(goal)):  # a symlink to it is no name of it
                    meter.did("skipped", goal)
                    return
                again = again or not options.overwrite
            if first is not None and not again:
                _link_over(first, goal, files.http.host)
                meter.did("files", goal)
                return
        except OSError:  # too many names, a directory in the way, a disk without hard links
            pass
        _file_job(files, entry, goal, options, meter, None)()

    return job


def _note(done: set[bytes], entry: JsonObject, goal: bytes, revision: str) -> None:
    # What was fetched may be another file than was listed under this name, and has not the other names then.
    if revision.partition(":")[0] == entry["ino"]:
        done.add(goal)


def _link_over(first: bytes, goal: bytes, host: Host) -> None:
    """The name is the old file or the linked one at any time."""
    directory, name = os.path.split(goal)
    beside = os.path.join(directory, b"." + name[:200] + b"." + host.token_bytes(6).hex().encode() + b".part")
    os.link(first, beside, follow_symlinks=False)
    try:
        os.rename(beside, goal)
    except OSError:
        os.unlink(beside)
        raise


def _is_here(entry: JsonObject, goal: bytes) -> bool:
    try:
        here = os.lstat(goal)
    except FileNotFoundError:
        return False
    same = (here.st_size, here.st_mtime_ns) == (entry["size_bytes"], int(entry["mtime_ns"]))
    return stat.S_ISREG(here.st_mode) and same
