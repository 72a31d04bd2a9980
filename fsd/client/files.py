"""The tree by path over HTTP: what `fsd cat`, `ls`, `stat`, `mv` and the copies are made of.

Remote paths are absolute and raw bytes. Answers are the documented JSON objects with one more field: where
a name is not UTF-8, `name_b64`/`path_b64` hold its bytes; `raw_name` and `raw_path` decode either form.
All methods may be called from any thread and raise `FsdError`.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from fsd.client.http import CHUNK, Body, Http, Query, Reply, Tries, encode_path
from fsd.model.errors import Conflict, IntegrityError, Unavailable, UsageError
from fsd.model.limits import LIST_PAGE_MAX
from fsd.model.names import show
from fsd.model.plain import dataclass
from fsd.model.spans import Span, read_spans, total, write_spans
from fsd.model.times import storable

JsonObject = dict[str, Any]


def raw_path(stat: Mapping[str, Any]) -> bytes:
    """The path of a stat object as bytes."""
    return _raw(stat, "path")


def raw_name(stat: Mapping[str, Any]) -> bytes:
    """The name of a stat object as bytes; empty for the root."""
    return _raw(stat, "name")


def raw_target(stat: Mapping[str, Any]) -> bytes:
    """A symlink's target as bytes."""
    return _raw(stat, "target")


def _raw(stat: Mapping[str, Any], field: str) -> bytes:
    try:
        encoded = stat.get(f"{field}_b64")
        if encoded is not None:
            return base64.b64decode(encoded, validate=True)
        return str(stat[field]).encode()
    except (KeyError, ValueError) as exc:
        raise Unavailable(f"an entry in the answer has no {field}") from exc


def json_name(name: bytes) -> str | dict[str, str]:
    """A path or name for a JSON body: a string where it is UTF-8, else `{"b64": …}`."""
    try:
        return name.decode()
    except UnicodeDecodeError:
        return {"b64": base64.b64encode(name).decode()}


def join(parent: bytes, name: bytes) -> bytes:
    """The path of `name` in directory `parent`."""
    return parent.rstrip(b"/") + b"/" + name


@dataclass(frozen=True, slots=True)
class PutOptions:
    """How a file is written. `parents` makes missing directories; `overwrite` False refuses an existing name;
    `if_match` is the revision (`ino:version`) the name must still have. None leaves a field to the server."""

    parents: bool = True
    overwrite: bool = True
    append: bool = False
    mode: int | None = None
    uid: int | None = None
    gid: int | None = None
    mtime_ns: int | None = None
    if_match: str | None = None

    def query(self) -> JsonObject:
        return {
            "parents": int(self.parents),
            "overwrite": int(self.overwrite),
            "append": int(self.append),
            "mode": None if self.mode is None else f"{self.mode & 0o7777:o}",
            "uid": self.uid,
            "gid": self.gid,
            "mtime_ns": None if self.mtime_ns is None else storable(self.mtime_ns),
        }


@dataclass(frozen=True, slots=True)
class FindFilter:
    """What `find` keeps. `name` is a shell pattern over the last component (`*`, `?`, `[…]`); times in ns;
    `tag` is `key` or `key=value`; `kind` as in the stat object."""

    name: bytes | None = None
    kind: str | None = None
    min_size: int | None = None
    max_size: int | None = None
    newer_ns: int | None = None
    older_ns: int | None = None
    tag: str | None = None

    def query(self) -> JsonObject:
        return {
            "name": self.name,
            "type": self.kind,
            "min_size": self.min_size,
            "max_size": self.max_size,
            "newer_ns": self.newer_ns,
            "older_ns": self.older_ns,
            "tag": self.tag,
        }


class Files:
    """One filesystem's tree. With `dry_run` every action is only checked by the server; nothing changes
    (`write` refuses). `at` names a retained state (`checkpoint` or `at_journal`) that is read instead of the
    live one."""

    def __init__(
        self,
        http: Http,
        file_system_id: str | None = None,
        *,
        dry_run: bool = False,
        at: Mapping[str, str] | None = None,
    ) -> None:
        self.http = http
        self.dry_run = dry_run
        self.at = dict(at or {})
        self._base = f"/v1/file-systems/{file_system_id or http.identity.file_system_id}"

    def _route(self, kind: str, path: bytes) -> str:
        if not path.startswith(b"/"):
            raise UsageError(f"a remote path is absolute: {show(path)}", hint="begin it with '/'")
        return f"{self._base}/{kind}/{encode_path(path)}"

    # -- reading -------------------------------------------------------------------------------------

    def stat(self, path: bytes, *, follow: bool = False) -> JsonObject:
        return self.http.json("GET", self._route("stat", path), query={"follow": int(follow), **self.at})

    def page(
        self, path: bytes, *, recursive: bool = False, limit: int = LIST_PAGE_MAX, after: str | None = None
    ) -> JsonObject:
        """One page of a listing: `{path, entries, next_after}`; `next_after` null at the end."""
        query: Query = {"limit": limit, "after": after, "recursive": int(recursive), **self.at}
        return self.http.json("GET", self._route("list", path), query=query)

    def list(self, path: bytes, *, recursive: bool = False) -> Iterator[JsonObject]:
        """All entries, page by page; parents before children."""
        after: str | None = None
        while True:
            page = self.page(path, recursive=recursive, after=after)
            yield from page["entries"]
            after = page.get("next_after")
            if after is None:
                return

    def find_page(
        self, path: bytes, wanted: FindFilter, *, limit: int = LIST_PAGE_MAX, after: str | None = None
    ) -> JsonObject:
        """One page: `{matches, next_after}`; a page may hold no match and yet not be the last."""
        query: Query = {**wanted.query(), "limit": limit, "after": after, **self.at}
        return self.http.json("GET", self._route("find", path), query=query)

    def find(self, path: bytes, wanted: FindFilter, *, limit: int | None = None) -> Iterator[JsonObject]:
        """Matches, at most `limit`."""
        after, left = None, limit
        while left is None or left > 0:
            size = LIST_PAGE_MAX if left is None else min(left, LIST_PAGE_MAX)
            page = self.find_page(path, wanted, limit=size, after=after)
            yield from page["matches"]
            left = None if left is None else left - len(page["matches"])
            after = page.get("next_after")
            if after is None:
                return

    def read(self, path: bytes, *, offset: int = 0, length: int | None = None) -> Iterator[bytes]:
        """The bytes [offset, offset+length) as they arrive, whole or an error, of one state of the file.

        A reply cut short is continued where it ended, as long as the file is still the same one; `Conflict`
        when it changed meanwhile.
        """
        return self.reading(path, offset=offset, length=length).pieces()

    def reading(self, path: bytes, *, offset: int = 0, length: int | None = None) -> Reading:
        """As `read`, with the revision and size it turned out to be of."""
        return Reading(self.http, self._route("files", path), path, offset, length, self.at)

    # -- changing ------------------------------------------------------------------------------------

    def write(
        self,
        path: bytes,
        body: Body,
        options: PutOptions | None = None,
        *,
        key: str | None = None,
        sparse: tuple[int, Sequence[Span]] | None = None,
    ) -> JsonObject:
        """Write a whole file (or append); the stat object of what is there now, durable and visible.
        `sparse`: the file's size, and where in it the body lies. Older servers refuse that with `UsageError`.
        """
        if self.dry_run:
            raise UsageError("a dry run writes nothing")
        opts = options or PutOptions()
        headers = {"Idempotency-Key": key or self.http.new_key(), "Content-Type": "application/octet-stream"}
        if opts.if_match is not None:
            headers["If-Match"] = f'"{check_revision(opts.if_match)}"'
        query = opts.query()
        if body.length is not None:
            query["size"] = body.length
        if sparse is not None:
            query |= {"size": sparse[0], "data": write_spans(sparse[1])}
        return self.http.send("PUT", self._route("files", path), body, query=query, headers=headers)

    def action(self, action: str, **fields: object) -> JsonObject:
        """One of the actions of docs/protocol.md; bytes fields are paths or names, `source` is its `from`."""
        body: JsonObject = {"action": action}
        for name, value in fields.items():
            if value is not None:
                wire = "from" if name == "source" and action != "hardlink" else name
                body[wire] = json_name(value) if isinstance(value, bytes) else value
        if self.dry_run:
            body["dry_run"] = True
        return self.http.json("POST", f"{self._base}/actions", body=body)

    def mkdir(
        self,
        path: bytes,
        *,
        mode: int | None = None,
        parents: bool = False,
        owner: tuple[int, int] | None = None,
    ) -> JsonObject:
        """Make a directory. With `parents` an existing directory is no error. `owner` is (uid, gid), None:
        the parent directory's."""
        uid, gid = owner or (None, None)
        return self.action("mkdir", path=path, mode=_octal(mode), parents=parents, uid=uid, gid=gid)

    def remove(self, path: bytes, *, recursive: bool = False, if_match: str | None = None) -> JsonObject:
        """Remove a file or an empty directory, or with `recursive` a tree, in several steps on the server
        when it is large. Asks on until all is gone. Adds up `removed`."""
        removed = 0
        while True:
            answer = self.action("remove", path=path, recursive=recursive, if_match=if_match)
            removed += int(answer.get("removed", 0))
            if self.dry_run or not answer.get("more"):
                return {**answer, "removed": removed}

    def rename(self, source: bytes, target: bytes, *, overwrite: bool = True) -> JsonObject:
        return self.action("rename", source=source, to=target, overwrite=overwrite)

    def copy(self, source: bytes, target: bytes, *, overwrite: bool = True) -> JsonObject:
        """Copy one file or symlink on the server; no content moves."""
        return self.action("copy", source=source, to=target, overwrite=overwrite)

    def copy_tree(
        self, source: bytes, target: bytes, *, overwrite: bool, resume: bool, after: str | None
    ) -> JsonObject:
        """One step of copying what is in a directory into another, on the server: counts, what failed, and
        `next_after` while there is more."""
        return self.action(
            "copy_tree", source=source, to=target, overwrite=overwrite, resume=resume, after=after
        )

    def chmod(self, path: bytes, mode: int) -> JsonObject:
        return self.action("chmod", path=path, mode=_octal(mode))

    def chown(self, path: bytes, uid: int | None, gid: int | None) -> JsonObject:
        return self.action("chown", path=path, uid=uid, gid=gid)

    def utimens(
        self, path: bytes, *, mtime_ns: int | None = None, atime_ns: int | None = None, follow: bool = True
    ) -> JsonObject:
        times = {"mtime_ns": mtime_ns, "atime_ns": atime_ns}
        given = {name: None if ns is None else storable(ns) for name, ns in times.items()}
        return self.action("utimens", path=path, follow=None if follow else False, **given)

    def symlink(
        self, target: bytes, path: bytes, *, overwrite: bool = False, if_match: str | None = None
    ) -> JsonObject:
        return self.action("symlink", target=target, path=path, overwrite=overwrite, if_match=if_match)

    def hardlink(self, source: bytes, path: bytes) -> JsonObject:
        return self.action("hardlink", source=source, path=path)

    def note_conflict(self, path: bytes, original: bytes, host: str, detail: str) -> JsonObject:
        """Have the record of conflicts list `path` as what was meant for `original`; `host` says whose it is.
        May be repeated. Raises `NotFound` when nothing is there; older servers refuse it."""
        body = {"original": json_name(original), "host": host, "detail": detail}
        return self.http.json("POST", self._route("conflicts", path), body=body)

    def setxattr(self, path: bytes, name: bytes, value: bytes) -> JsonObject:
        return self.action("setxattr", path=path, name=name, value_b64=base64.b64encode(value).decode())

    def removexattr(self, path: bytes, name: bytes) -> JsonObject:
        return self.action("removexattr", path=path, name=name)


class Reading:
    """One read of a range, over as many requests as it takes. Used once, by one thread."""

    def __init__(
        self,
        http: Http,
        route: str,
        path: bytes,
        offset: int,
        length: int | None,
        query: Mapping[str, str] | None = None,
    ) -> None:
        if offset < 0 or (length is not None and length < 0):
            raise UsageError("an offset or a length is not negative")
        self._http, self._route, self._path, self._query = http, route, path, dict(query or {})
        self._at, self._end = offset, None if length is None else offset + length
        self.revision: str | None = None  # both known after the first piece
        self.size: int | None = None  # of the whole file

    def pieces(self) -> Iterator[bytes]:
        for piece in self._moved(self._body):
            if not isinstance(piece, int):
                yield piece

    def runs(self) -> Iterator[bytes | int]:
        """As `pieces`, with lengths of holes in between where the server tells them."""
        self._query["holes"] = "0"
        return self._moved(self._data)

    def _moved(self, body: Callable[[Reply], Iterator[bytes | int]]) -> Iterator[bytes | int]:
        broken = 0
        while self._end is None or self._at < self._end:
            tries = self._http.tries(0)
            reply = self._http.retried(partial(self._open, tries), tries)
            before = self._at
            try:
                for piece in body(reply):
                    self._at += piece if isinstance(piece, int) else len(piece)
                    yield piece
            except Unavailable:
                # Progress earns another try; standing still does not.
                broken = 0 if self._at > before else broken + 1
                if broken >= 3:
                    raise
            finally:
                reply.close()

    def _open(self, tries: Tries) -> Reply:
        headers = {}
        if self._at or self._end is not None:
            last = "" if self._end is None else str(self._end - 1)
            headers["Range"] = f"bytes={self._at}-{last}"
        if self.revision is not None:
            headers["If-Match"] = f'"{self.revision}"'
        try:
            reply = self._http.open(self._route, query=self._query, headers=headers, patience=tries.patience)
        except Conflict as exc:
            if self.revision is None:
                raise
            raise Conflict(
                f"{show(self._path)} changed while it was read; what arrived is its older half",
                hint="read it again",
            ) from exc
        self._note(reply)
        return reply

    def _note(self, reply: Reply) -> None:
        """Take revision and size from the answer's head; cut the wanted range to the file."""
        revision, size = (reply.header("ETag") or "").strip('"'), reply.header("X-Fsd-Size")
        if not revision or size is None or not (size.isascii() and size.isdigit()):
            reply.close()
            raise Unavailable("the answer is no file of an fsd server")
        if self.revision is not None and self.revision != revision:
            reply.close()
            raise Conflict(f"{show(self._path)} changed while it was read", hint="read it again")
        self.revision, self.size = revision, int(size)
        self._end = self.size if self._end is None else min(self._end, self.size)
        self._at = min(self._at, self._end)

    def _data(self, reply: Reply) -> Iterator[bytes | int]:
        """The answer's data and the holes between; all of it as bytes where the server knows of no holes."""
        text = reply.header("X-Fsd-Data")
        if text is None:
            yield from self._body(reply)
            return
        assert self._end is not None
        try:
            spans = read_spans(text, self._at, self._end)
        except UsageError as exc:
            raise IntegrityError(f"the server tells no ranges of {show(self._path)}: {exc.message}") from exc
        ends = self._end
        body = self._exactly(reply, total(spans))
        held = memoryview(b"")
        for start, end in spans:
            if start > self._at:
                yield start - self._at
            while self._at < end:
                held = held or memoryview(next(body))
                piece, held = held[: end - self._at], held[end - self._at :]
                yield bytes(piece)
        next(body, None)  # raises for bytes that are too many
        if ends > self._at:
            yield ends - self._at

    def _body(self, reply: Reply) -> Iterator[bytes]:
        """The answer's bytes, no more than are wanted; raises `Unavailable` at a body that ends early."""
        assert self._end is not None
        return self._exactly(reply, self._end - self._at)

    def _exactly(self, reply: Reply, left: int) -> Iterator[bytes]:
        for piece in reply.pieces(CHUNK):
            if len(piece) > left:
                raise IntegrityError(f"more bytes arrived than {show(self._path)} has")
            left -= len(piece)
            yield piece
        if left:
            raise Unavailable(f"the body of {show(self._path)} ended {left} bytes early")


def check_revision(text: str) -> str:
    """A revision as typed; raises `UsageError`."""
    ino, _, version = text.strip().strip('"').partition(":")
    if not (ino.isdigit() and version.isdigit()):
        raise UsageError(f"{text!r} is no revision", hint="`fsd stat` prints it: two numbers, ino:version")
    return f"{ino}:{version}"


def _octal(mode: int | None) -> str | None:
    return None if mode is None else f"{mode & 0o7777:o}"
