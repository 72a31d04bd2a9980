"""Handlers of the file commands by path, which need no mount; `cp` has a module of its own."""

from __future__ import annotations

import base64
import errno
import os
import signal
import threading
from stat import filemode
from types import SimpleNamespace
from typing import Any, Final

from fsd.cli import modes
from fsd.cli.checkpoint_ids import whole_id
from fsd.cli.context import Context, path_bytes, remote_path
from fsd.cli.output import Document, Raw, align, visible
from fsd.cli.several import distinct, each, of_several, paths, sources, tried
from fsd.client.files import Files, FindFilter, join, raw_path
from fsd.client.http import Http
from fsd.client.transfer import base_name, means_into, normal, stat_or_none
from fsd.model.errors import Conflict, FsdError, NotFound, PosixError, UsageError
from fsd.model.limits import GREP_MATCHES
from fsd.model.names import show

KIND_LETTERS: Final = {
    "file": "-",
    "directory": "d",
    "symlink": "l",
    "fifo": "p",
    "socket": "s",
    "char": "c",
    "block": "b",
}


def files(context: Context) -> Files:
    at = state_of(context.args)
    if "checkpoint" in at:
        at["checkpoint"] = whole_id(context, at["checkpoint"])
    return Files(Http(context.data(), context.host), dry_run=bool(context.args.dry_run), at=at)


def state_of(args: SimpleNamespace) -> dict[str, str]:
    """The retained state that --checkpoint or --at-journal names; empty: the live one."""
    checkpoint, entry = getattr(args, "checkpoint", None), getattr(args, "at_journal", None)
    if checkpoint and entry:
        raise UsageError("--checkpoint and --at-journal name two states: give one of them")
    if entry:
        return {"at_journal": f"{entry[0]}:{entry[1]}"}
    return {"checkpoint": checkpoint} if checkpoint else {}


def shown_name(stat: dict[str, Any], field: str = "name") -> str:
    """A name or path of an answer for people: bytes that are no UTF-8 as escapes."""
    encoded = stat.get(f"{field}_b64")
    text = base64.b64decode(encoded).decode("utf-8", "backslashreplace") if encoded else str(stat[field])
    return visible(text).replace("\n", "\\n").replace("\t", "\\t")


def cat(context: Context, args: SimpleNamespace) -> Raw:
    if context.long and (args.offset is None) != (args.length is None):
        raise UsageError("--offset and --length go together")
    if len(paths(args)) > 1 and (args.offset is not None or args.length is not None):
        raise UsageError("--offset and --length are of one file")
    api, out = files(context), context.streams.stdout

    def pour(path: str) -> Document:
        for piece in api.read(remote_path(path), offset=args.offset or 0, length=args.length):
            out.write(piece)
        return Document(None)

    _, _, failed = tried(context, paths(args), pour)
    out.flush()
    if failed is not None:
        raise failed
    return Raw()


def _mode_text(stat: dict[str, Any]) -> str:
    return KIND_LETTERS.get(stat["kind"], "?") + filemode(int(stat["mode"], 8))[1:]


def listing(entries: list[dict[str, Any]], field: str, details: bool) -> str:
    """The text of a listing, one entry a line; directories end with a slash."""
    lines = []
    for entry in entries:
        name = shown_name(entry, field) + ("/" if entry["is_dir"] and not details else "")
        if not details:
            lines.append([name])
            continue
        if entry["kind"] == "symlink":
            name += f" -> {shown_name(entry, 'target')}"
        owner = f"{entry['uid']}:{entry['gid']}"
        lines.append(
            [_mode_text(entry), str(entry["nlink"]), owner, str(entry["size_bytes"]), _when(entry), name]
        )
    return align(lines)


def _when(entry: dict[str, Any]) -> str:
    return str(entry["mtime"])[:19].replace("T", " ")


def ls(context: Context, args: SimpleNamespace) -> Document:
    if args.after is not None and len(paths(args)) > 1:
        raise UsageError("--after is of one directory")
    api = files(context)
    return each(context, args, lambda path: _list(api, args, remote_path(path)), titles=True)


def _list(api: Files, args: SimpleNamespace, path: bytes) -> Document:
    entries: list[dict[str, Any]] = []
    after: str | None = args.after
    while True:
        room = None if args.limit is None else args.limit - len(entries)
        try:
            page = api.page(path, recursive=args.recursive, after=after, **_limit(room))
        except PosixError as exc:
            if exc.errno != errno.ENOTDIR:
                raise
            about = api.stat(path)  # a file lists as itself
            page = {"path": about["path"], "entries": [about], "next_after": None}
        entries += page["entries"]
        after = page.get("next_after")
        if after is None or (args.limit is not None and len(entries) >= args.limit):
            break
    field = "path" if args.recursive else "name"
    found = {"path": page["path"], "entries": entries, "next_after": after}

    def text(value: Any) -> str:
        return listing(value["entries"], field, args.details)

    return Document(found, text=text)


def _limit(room: int | None) -> dict[str, int]:
    return {} if room is None else {"limit": max(1, min(room, 1000))}


def stat(context: Context, args: SimpleNamespace) -> Document:
    api = files(context)
    return each(context, args, lambda path: _stat(context, api, path, args.follow), titles=True)


def _stat(context: Context, api: Files, path: str, follow: bool) -> Document:
    answer = api.stat(remote_path(path), follow=follow)
    if context.long:
        # Fields ti prints beside ours. What only its extraction service knows is null.
        answer = {
            **answer,
            "has_mode": True,
            "resource_id": answer["ino"],
            "content_type": None,
            "semantic_text": None,
            "degraded": False,
        }

    def text(value: Any) -> str:
        shown = {k: v for k, v in value.items() if not k.endswith("_b64") and v is not None}
        for name in ("path", "name", "target"):
            if name in shown:
                shown[name] = shown_name(value, name)
        return align([[k, v if isinstance(v, str) else _flat(v)] for k, v in shown.items()])

    return Document(answer, text=text)


def _flat(value: Any) -> str:
    if isinstance(value, dict):
        return " ".join(f"{k}={visible(str(v))}" for k, v in value.items())
    return str(value).lower() if isinstance(value, bool) else str(value)


def _done(answer: dict[str, Any], **more: Any) -> Document:
    """An action's answer; text says only that it is done, by saying nothing."""
    return Document({**answer, **more}, text=lambda _: "")


def mv(context: Context, args: SimpleNamespace) -> Document:
    """To the name that is given, or into the directory of it, as `mv` does. The long spelling, and
    --overwrite of what is not typed as a directory, mean the name."""
    typed, last = sources(args, "from_remote", "to_remote")
    named, target = {one: remote_path(one) for one in typed}, remote_path(last)
    several, exact = len(typed) > 1, context.long or args.overwrite
    if several:
        distinct({one: _own_name(path) for one, path in named.items()})
    api = files(context)
    into = several or not exact or means_into(target)
    there = stat_or_none(api, normal(target), follow=True) if into else None
    into = there is not None and bool(there["is_dir"])
    if several and not into:
        raise UsageError(
            f"several files go into a directory, and {last} is none", hint="make it: `fsd mkdir -p`"
        )

    def one(path: str) -> Document:
        goal = join(normal(target), _own_name(named[path])) if into else target
        answer = api.rename(named[path], goal, overwrite=args.overwrite)
        return _done(answer, source_path=path, target_path=show(goal) if into else last)

    return of_several(context, typed, one) if several else one(typed[0])


def _own_name(path: bytes) -> bytes:
    return base_name(normal(path), "what is renamed")


def rm(context: Context, args: SimpleNamespace) -> Document:
    others = len(paths(args)) - 1
    if args.recursive and not args.force:
        more = f" and {others} more" if others else ""
        context.confirm(f"Remove {args.path}{more} with everything below?", needs_yes=False)
    api = files(context)
    return each(context, args, lambda path: _remove(api, args, path))


def _remove(api: Files, args: SimpleNamespace, path: str) -> Document:
    try:
        answer = api.remove(remote_path(path), recursive=args.recursive)
    except NotFound as exc:
        # Of the path: a filesystem that is gone is told with --force too.
        if not args.force or exc.details.get("errno") != "ENOENT":
            raise
        answer = {"action": "remove", "status": "ok", "removed": 0, "more": False}
    return _done(answer, path=path)


def mkdir(context: Context, args: SimpleNamespace) -> Document:
    api = files(context)

    def make(path: str) -> Document:
        return _done(api.mkdir(remote_path(path), mode=args.mode, parents=args.parents), path=path)

    return each(context, args, make)


def chmod(context: Context, args: SimpleNamespace) -> Document:
    api = files(context)
    return each(context, args, lambda path: _chmod(context, api, args, path))


def _chmod(context: Context, api: Files, args: SimpleNamespace, path: str) -> Document:
    """With -R also what is below, symlinks apart, as chmod does; what has the mode already is left alone."""
    raw, bits = remote_path(path), modes.absolute(args.mode)
    if bits is None or args.recursive:
        top = api.stat(raw, follow=True)
        bits = _changed(args.mode, top)
    answer = api.chmod(raw, bits)
    if not args.recursive:
        return _done(answer, path=path)
    changed = 1
    if top["is_dir"]:
        for entry in api.list(raw, recursive=True):
            if entry["kind"] != "symlink" and (wanted := _changed(args.mode, entry)) != int(entry["mode"], 8):
                context.progress(f"{changed} changed  {entry['path']}")
                answer = api.chmod(raw_path(entry), wanted)
                changed += 1
    return _done(answer, path=path, changed=changed)


def _changed(text: str, stat: dict[str, Any]) -> int:
    bits = modes.absolute(text)
    return modes.applied(text, int(stat["mode"], 8), directory=stat["is_dir"]) if bits is None else bits


def ln(context: Context, args: SimpleNamespace) -> Document:
    if args.symbolic:
        return symlink(context, args)
    args.source_path = args.target
    if args.force and _in_the_way(files(context), args):
        return _hardlink_over(context, args)
    return hardlink(context, args)


def _in_the_way(api: Files, args: SimpleNamespace) -> bool:
    """Whether something has the name of a hard link to be. Raises `Conflict` where it is the file itself, or
    a directory."""
    source = api.stat(remote_path(args.source_path))
    try:
        there = api.stat(remote_path(args.link_path))
    except NotFound as exc:
        if exc.details.get("errno") != "ENOENT":
            raise
        return False
    if there["ino"] == source["ino"]:
        raise Conflict(f"{args.source_path} and {args.link_path} are the same file already")
    if source["is_dir"] or there["is_dir"]:
        raise Conflict(f"{args.source_path if source['is_dir'] else args.link_path} is a directory")
    return True


def _hardlink_over(context: Context, args: SimpleNamespace) -> Document:
    """Made beside what is there and renamed over it: the name leads to the one or the other all the time."""
    api, link = files(context), remote_path(args.link_path)
    beside = join(os.path.dirname(link), b".fsd-ln-" + api.http.new_key().encode())
    answer = api.hardlink(remote_path(args.source_path), beside)
    if not api.dry_run:
        try:
            answer = {**api.rename(beside, link), "action": answer["action"]}
        except BaseException:
            try:
                api.remove(beside)
            except FsdError as exc:
                context.say(f"fsd: {show(beside)} was to be renamed and may be left: {exc.message}")
            raise
    return _done(answer, link_path=args.link_path, source_path=args.source_path)


def symlink(context: Context, args: SimpleNamespace) -> Document:
    target, link = path_bytes(args.target), remote_path(args.link_path)
    answer = files(context).symlink(target, link, overwrite=getattr(args, "force", False))
    return _done(answer, link_path=args.link_path, target=args.target)


def hardlink(context: Context, args: SimpleNamespace) -> Document:
    answer = files(context).hardlink(remote_path(args.source_path), remote_path(args.link_path))
    return _done(answer, link_path=args.link_path, source_path=args.source_path)


def find(context: Context, args: SimpleNamespace) -> Document:
    least, most = args.min_size_bytes, args.max_size_bytes
    if least is not None and most is not None and least > most:
        raise UsageError("the smallest size is over the largest: nothing can match")
    first, *others = args.tag or [None]
    wanted = FindFilter(
        name=path_bytes(args.file_name_pattern) if args.file_name_pattern else None,
        kind=args.resource_type,
        min_size=least,
        max_size=most,
        newer_ns=args.newer,
        older_ns=args.older,
        tag=first,
    )
    found = []
    for match in files(context).find(remote_path(args.path), wanted):
        # The server filters by one tag; the others are looked at here.
        if all(_has_tag(match, tag) for tag in others):
            found.append(match)
            if args.limit is not None and len(found) >= args.limit:
                break

    def text(value: Any) -> str:
        return "".join(shown_name(m, "path") + "\n" for m in value["matches"])

    return Document({"path": args.path, "matches": found}, text=text)


def _has_tag(match: dict[str, Any], tag: str) -> bool:
    key, equals, value = tag.partition("=")
    tags = match.get("tags") or {}
    return key in tags and (not equals or tags[key] == value)


def grep(context: Context, args: SimpleNamespace) -> Document:
    from fsd.client import grep as searching

    pattern = searching.compiled(args.pattern, ignore_case=args.ignore_case)
    limit = GREP_MATCHES if args.limit is None else args.limit
    _let_ctrl_c_end_it()
    found = searching.grep(files(context), remote_path(args.path), pattern, limit)
    value = {
        "path": args.path,
        "pattern": args.pattern,
        "matches": found.matches,
        "files_searched": found.files,
        "files_binary": found.binary,
        "truncated": found.truncated,
    }

    def text(value: Any) -> str:
        lines = [f"{shown_name(m, 'path')}:{m['line']}:{visible(m['text'])}\n" for m in value["matches"]]
        more = f"only the first {limit} lines; --limit asks for more\n" if value["truncated"] else ""
        return "".join(lines) + more

    return Document(value, text=text)


def _let_ctrl_c_end_it() -> None:
    """An expression can take for ever, and while one runs no other thread of the interpreter does, the one
    that would handle Ctrl-C neither. There is nothing to tidy up here."""
    here = threading.current_thread() is threading.main_thread()
    if here and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def nothing_to_pack(context: Context, args: SimpleNamespace) -> Document:
    return Document(
        {"status": "nothing_to_pack", "message": "everything is remote: there is nothing to pack"}
    )


def nothing_to_unpack(context: Context, args: SimpleNamespace) -> Document:
    message = "everything is remote: there is nothing to unpack"
    return Document({"status": "nothing_to_unpack", "message": message})
