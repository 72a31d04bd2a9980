"""Local files and streams to the server: one, or a tree in parallel.

A file's name appears on the server only with its complete content. Directories are made before what is in
them, their times set last.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from typing import BinaryIO

from fsd.client.files import Files, JsonObject, PutOptions, join, raw_path, raw_target
from fsd.client.pool import Workers
from fsd.client.sources import DataBody, LocalChanged, LocalFile, Metered, StreamBody, local_error, told
from fsd.client.transfer import (
    CopyOptions,
    CopyResult,
    Meter,
    ProgressFn,
    base_name,
    means_content,
    means_into,
    normal,
    remote_target,
    stat_or_none,
)
from fsd.model.errors import Conflict, FsdError, UsageError
from fsd.model.limits import CHANGED_TRIES
from fsd.model.names import show
from fsd.model.times import storable


def upload_stream(
    files: Files,
    stream: BinaryIO,
    target: bytes,
    options: CopyOptions,
    progress: ProgressFn | None = None,
    *,
    name: bytes = b"standard input",
) -> CopyResult:
    """Write all of `stream` (read to its end) to the remote file `target`."""
    if means_into(target):
        raise UsageError(f"{show(target)} names a directory", hint="give the file's name")
    goal = normal(target)
    result = CopyResult("upload", "-", show(goal))
    meter = Meter(result, progress)
    body = Metered(StreamBody(stream, name), meter)
    put = PutOptions(
        parents=options.parents,
        overwrite=options.overwrite,
        append=options.append,
        uid=os.geteuid(),
        gid=os.getegid(),
        if_match=options.if_match,
    )
    result.revision = files.write(goal, body, put)["revision"]
    meter.did("files", goal)
    return result


def upload(
    files: Files,
    source: bytes,
    target: bytes,
    options: CopyOptions,
    progress: ProgressFn | None = None,
) -> CopyResult:
    """Copy the local `source` to the remote `target`, a tree with `options.recursive`.

    A symlink given as source is followed, unless with `recursive`; those inside a tree are kept.
    """
    with told(source):
        found = os.lstat(source) if options.recursive else os.stat(source)
    is_dir = stat.S_ISDIR(found.st_mode)
    if is_dir and not options.recursive:
        raise UsageError(f"{show(source)} is a directory", hint="copy it with -r")
    if is_dir and (options.append or options.if_match):
        raise UsageError("--append and --if-match are for single files")
    if not is_dir and not stat.S_ISREG(found.st_mode) and not stat.S_ISLNK(found.st_mode):
        with told(source), open(source, "rb") as stream:
            return upload_stream(files, stream, target, options, progress, name=source)
    needs_name = not is_dir or (means_into(target) and not means_content(source))
    name = base_name(os.path.abspath(source), "the source") if needs_name else b""
    goal = remote_target(files, target, name, recursive=is_dir)
    result = CopyResult("upload", show(source), show(goal))
    meter = Meter(result, progress)
    if is_dir:
        _Tree(files, source, goal, options, meter).run()
    elif stat.S_ISLNK(found.st_mode):
        _put_link(files, source, goal, options, meter)
    else:
        result.revision = put_file(files, source, goal, options, meter)
    return result


def put_file(
    files: Files, source: bytes, target: bytes, options: CopyOptions, meter: Meter, *, parents: bool = True
) -> str:
    """Write one regular file; its new revision. A file that changes meanwhile is begun again, then told."""
    for attempt in range(1, CHANGED_TRIES + 1):
        with LocalFile(source) as local:
            put = _put_options(local, options, parents=parents and options.parents)
            try:
                answer = _send(files, local, target, put, meter)
            except LocalChanged:
                if attempt == CHANGED_TRIES:
                    raise
                continue
            if not local.changed():
                break
            if options.append or options.if_match is not None or not options.overwrite:
                meter.changed(source)  # done once; once more would be another thing
                break
        if attempt == CHANGED_TRIES:
            meter.changed(source)
    meter.did("files", target)
    return str(answer["revision"])


def _send(files: Files, local: LocalFile, target: bytes, put: PutOptions, meter: Meter) -> JsonObject:
    """Write the file, of a sparse one the data alone where the server knows how."""
    spans = None if put.append else local.data()
    if spans is not None:
        body = Metered(DataBody(local, spans), meter)
        try:
            return files.write(target, body, put, sparse=(local.stat.st_size, spans))
        except UsageError:
            body.take_back()  # perhaps an older server; if it is anything else it is told again
    return files.write(target, Metered(local, meter), put)


def _put_options(local: LocalFile, options: CopyOptions, *, parents: bool) -> PutOptions:
    return PutOptions(
        parents=parents,
        overwrite=options.overwrite,
        append=options.append,
        mode=stat.S_IMODE(local.stat.st_mode) if options.preserve and not options.append else None,
        mtime_ns=local.stat.st_mtime_ns if options.preserve and not options.append else None,
        uid=local.stat.st_uid,
        gid=local.stat.st_gid,
        if_match=options.if_match,
    )


def _put_link(files: Files, source: bytes, target: bytes, options: CopyOptions, meter: Meter) -> None:
    with told(source):
        pointed, mtime_ns = os.readlink(source), os.lstat(source).st_mtime_ns
    made = files.symlink(pointed, target, overwrite=options.overwrite).get("stat") or {}
    if options.preserve and made.get("mtime_ns") != storable(mtime_ns):
        files.utimens(target, mtime_ns=mtime_ns, follow=False)
    meter.did("symlinks", target)


class _Tree:
    """One upload of a local tree. `run` once, on the caller's thread."""

    def __init__(
        self, files: Files, source: bytes, target: bytes, options: CopyOptions, meter: Meter
    ) -> None:
        self.files, self.source, self.target = files, source, target
        self.options, self.meter = options, meter
        self.there: dict[bytes, JsonObject] = {}
        self.directories: list[tuple[bytes, os.stat_result]] = []
        self.linked: dict[tuple[int, int], bytes] = {}  # a file with several names -> where the first goes
        self.names: list[tuple[bytes, bytes, bytes]] = []  # its others: local, remote, that first one
        self.done: dict[bytes, tuple[int, int]] = {}  # where a local file is now -> which file that was

    def run(self) -> None:
        if self.options.resume:
            self._look_there()
        with Workers(self.options.parallel) as workers:
            self.meter.stopping = workers.stopping
            self._walk(workers)
        with Workers(self.options.parallel) as workers:
            self.meter.stopping = workers.stopping
            for source, goal, first in self.names:
                workers.submit(self.meter.attempt(source, self._name_job(source, goal, first)))
        if self.options.preserve:
            with Workers(self.options.parallel) as workers:
                for path, local in self.directories:
                    workers.submit(self.meter.attempt(path, self._finish_job(path, local)))

    def _look_there(self) -> None:
        """What is at the target already, by the path it has below the target as it was given."""
        top = stat_or_none(self.files, self.target, follow=True)
        if top is None or not top["is_dir"]:
            return
        real = raw_path(top)
        for entry in self.files.list(real, recursive=True):
            self.there[join(self.target, raw_path(entry)[len(real.rstrip(b"/")) + 1 :])] = entry

    def _walk(self, workers: Workers) -> None:
        pending = [(self.source, self.target)]
        while pending:
            local, remote = pending.pop()
            try:
                with told(local):
                    found = os.stat(local) if local == self.source else os.lstat(local)
                    with os.scandir(local) as listing:
                        entries = sorted(listing, key=lambda entry: entry.name)
                self._make_directory(local, remote, found)
            except FsdError as exc:
                if exc.retryable or local == self.source:
                    raise
                self.meter.failed(local, exc)
                continue
            below = []
            for entry in entries:
                goal = join(remote, entry.name)
                if entry.is_dir(follow_symlinks=False):
                    below.append((entry.path, goal))
                elif not self._is_further_name(entry, goal):
                    workers.submit(self.meter.attempt(entry.path, self._file_job(entry.path, goal)))
            pending += reversed(below)

    def _is_further_name(self, entry: os.DirEntry[bytes], remote: bytes) -> bool:
        """Whether it is a file that an earlier name brings along; it is linked to that when all is there."""
        try:
            found = entry.stat(follow_symlinks=False)
        except OSError:
            return False  # told by the file's own job
        if not stat.S_ISREG(found.st_mode) or found.st_nlink < 2:
            return False
        first = self.linked.setdefault((found.st_dev, found.st_ino), remote)
        if first == remote:
            return False
        self.names.append((entry.path, remote, first))
        return True

    def _name_job(self, local: bytes, remote: bytes, first: bytes) -> Callable[[], None]:
        """Give the copy of a file's first name this one too; copy it where there is no such copy."""

        def job() -> None:
            there = stat_or_none(self.files, remote)
            # Either name may be another file meanwhile, which an editor put there: then they share nothing.
            same = first in self.done and self.done[first] == _which(local)
            origin = stat_or_none(self.files, first) if same else None
            if origin is None or origin["kind"] != "file":
                self._file_job(local, remote)()
            elif there is None:
                self.files.hardlink(first, remote)
                self.meter.did("files", remote)
            elif there["ino"] == origin["ino"]:
                self.meter.did("skipped", remote)
            elif there["kind"] != "file" or self.options.resume or not self.options.overwrite:
                self._file_job(local, remote)()
            else:
                self._replace(first, remote)

        return job

    def _replace(self, first: bytes, remote: bytes) -> None:
        """The name is the old file or the linked one at any time."""
        mark = self.files.http.host.token_bytes(6).hex().encode()
        beside = join(os.path.dirname(remote), b"." + os.path.basename(remote)[:200] + b"." + mark + b".part")
        self.files.hardlink(first, beside)
        try:
            self.files.rename(beside, remote)
        except FsdError:
            self.files.remove(beside)
            raise
        self.meter.did("files", remote)

    def _make_directory(self, local: bytes, remote: bytes, found: os.stat_result) -> None:
        there = self.there.get(remote)
        if there is None or not there["is_dir"]:
            mode = stat.S_IMODE(found.st_mode) if self.options.preserve else None
            self.files.mkdir(remote, mode=mode, parents=True, owner=(found.st_uid, found.st_gid))
            self.meter.did("directories", remote)
        self.directories.append((remote, found))

    def _finish_job(self, remote: bytes, local: os.stat_result) -> Callable[[], None]:
        mode = stat.S_IMODE(local.st_mode)

        def job() -> None:
            there = self.files.utimens(remote, mtime_ns=local.st_mtime_ns).get("stat") or {}
            if there.get("mode") is not None and int(there["mode"], 8) != mode:
                self.files.chmod(remote, mode)

        return job

    def _file_job(self, local: bytes, remote: bytes) -> Callable[[], None]:
        def job() -> None:
            try:
                found = os.lstat(local)
            except OSError as exc:
                raise local_error(exc, local) from exc
            if self._is_there(local, remote, found):
                self.done[remote] = found.st_dev, found.st_ino
                self.meter.did("skipped", remote)
                return
            try:
                if stat.S_ISLNK(found.st_mode):
                    _put_link(self.files, local, remote, self.options, self.meter)
                elif stat.S_ISREG(found.st_mode):
                    put_file(self.files, local, remote, self.options, self.meter)
                    if _which(local) == (found.st_dev, found.st_ino):
                        self.done[remote] = found.st_dev, found.st_ino
                else:
                    self.meter.not_copied(local)
            except Conflict as exc:
                if self.options.overwrite or isinstance(exc, LocalChanged):
                    raise
                self.meter.did("skipped", remote)

        return job

    def _is_there(self, local: bytes, remote: bytes, found: os.stat_result) -> bool:
        there = self.there.get(remote)
        if there is None:
            return False
        if stat.S_ISLNK(found.st_mode):
            with told(local):
                return there["kind"] == "symlink" and raw_target(there) == os.readlink(local)
        same = (there["size_bytes"], int(there["mtime_ns"])) == (found.st_size, storable(found.st_mtime_ns))
        return stat.S_ISREG(found.st_mode) and there["kind"] == "file" and same


def _which(path: bytes) -> tuple[int, int] | None:
    """Which file is at the local `path`, of all on this machine; None: there is none any more."""
    try:
        found = os.lstat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino
