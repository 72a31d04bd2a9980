"""Refused changes done again by path (`fsd recover --retry`), by the rules for all: content is never dropped.

They were made on what the mount knew when they were refused. What somebody changed since stays, and the
refused content goes beside it under a conflict name, as if it had come late over the mount.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable

from fsd.client.files import Files, PutOptions, join
from fsd.client.http import BytesBody
from fsd.client.sources import LocalFile
from fsd.client.transfer import stat_or_none
from fsd.model.errors import Conflict, FsdError, Unsupported
from fsd.model.limits import BESIDE_TRIES
from fsd.model.names import conflict_name, show
from fsd.model.ops import Content, Create, Rename, Setattr, Setxattr
from fsd.vfs.decide import Kept


class Again:
    """For all refused changes of one mount, in their order. `label` is in the names of what goes beside;
    `beside` are those, as shown."""

    def __init__(self, api: Files, label: str) -> None:
        self._api = api
        self._label = label
        self._placed: dict[int, tuple[bytes, str]] = {}  # by inode: where it was put here, and its revision
        self.beside: list[str] = []

    def do(self, path: bytes, one: Kept) -> None:
        """Raises what the server says, or `Unsupported`."""
        api, op = self._api, one.op
        at = self._placed.get(op.ino, (path, ""))[0] if not isinstance(op, Content | Create) else path
        if isinstance(op, Content):
            self._content(path, one, op)
        elif isinstance(op, Create) and stat.S_ISREG(op.mode):
            self._write(path, op.ino, lambda at, if_match: self._put(at, one, None, if_match), None)
        elif isinstance(op, Create) and stat.S_ISDIR(op.mode):
            api.mkdir(path, mode=op.mode & 0o7777, parents=True)
        elif isinstance(op, Create) and stat.S_ISLNK(op.mode):
            api.symlink(op.target or b"", path)
        elif isinstance(op, Setxattr):
            if op.value is None:
                api.removexattr(at, op.name)
            else:
                api.setxattr(at, op.name, op.value)
        elif isinstance(op, Setattr):
            self._attributes(at, op)
        elif isinstance(op, Rename) and op.ino in self._placed:
            return  # its content was kept under the name it had in the end
        else:
            raise Unsupported(
                f"a {one.kind} cannot be repeated by path", hint="do it yourself, then --discard"
            )

    def _attributes(self, path: bytes, op: Setattr) -> None:
        if op.mode is not None:
            self._api.chmod(path, op.mode)
        if op.uid is not None or op.gid is not None:
            self._api.chown(path, op.uid, op.gid)
        if op.mtime is not None or op.atime is not None:
            self._api.utimens(path, mtime_ns=op.mtime, atime_ns=op.atime)

    def _content(self, path: bytes, one: Kept, op: Content) -> None:
        if one.lacking:
            raise Unsupported(
                f"{one.lacking} bytes of it are nowhere any more: zeros would be in their place",
                hint="--export DIR takes out what is left; put it where it belongs, then --discard",
            )
        placed = self._placed.get(op.ino)
        if placed is not None:
            path, known = placed
        else:
            known = self._base(path, op) or ""
        self._write(path, op.ino, lambda at, if_match: self._put(at, one, op.mtime, if_match), known or None)

    def _base(self, path: bytes, op: Content) -> str | None:
        """The revision the content was made on; None where there was no file."""
        if op.base:
            return f"{op.ino}:{op.base}"
        there = stat_or_none(self._api, path)
        if there is None or there["size_bytes"]:
            return None
        revision = str(there["revision"])
        return revision if revision.startswith(f"{op.ino}:") else None  # its own, which has no content yet

    def _put(self, path: bytes, one: Kept, mtime: int | None, if_match: str | None) -> str:
        options = PutOptions(
            mode=one.mode & 0o7777,
            uid=one.uid,
            gid=one.gid,
            mtime_ns=mtime,
            overwrite=if_match is not None,
            if_match=if_match,
        )
        if one.data is None:
            return str(self._api.write(path, BytesBody(b""), options)["revision"])
        with LocalFile(os.fsencode(one.data)) as local:
            return str(self._api.write(path, local, options)["revision"])

    def _write(
        self, path: bytes, ino: int, put: Callable[[bytes, str | None], str], known: str | None
    ) -> None:
        """Over the revision `known`, or where nothing is; beside it where something else is by now."""
        try:
            self._placed[ino] = path, put(path, known)
            return
        except FsdError as exc:
            if not _in_the_way(exc):
                raise
            gone = known is not None and exc.details.get("revision", 0) is None
        parent, name = os.path.split(path)
        now = self._api.http.host.wall_ns()
        names = [join(parent, conflict_name(name, self._label, now, at)) for at in range(BESIDE_TRIES)]
        for at in [path, *names] if gone else names:
            try:
                self._placed[ino] = at, put(at, None)
            except FsdError as exc:
                if not _in_the_way(exc):
                    raise
                continue
            if at != path:
                self.beside.append(show(at))
            return
        raise Conflict(f"no free conflict name beside {show(path)}")


def _in_the_way(exc: FsdError) -> bool:
    """Whether it says that something else is there."""
    return isinstance(exc, Conflict) or exc.details.get("errno") in ("EEXIST", "EISDIR")
