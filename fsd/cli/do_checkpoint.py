"""Handlers of checkpoints that exist: list, show, compare, read, restore, export, delete, thin."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

from fsd.cli import local
from fsd.cli.checkpoint_ids import whole_id
from fsd.cli.context import Context, remote_path
from fsd.cli.do_files import shown_name
from fsd.cli.output import Document, Raw, align, columns, lines_of, visible
from fsd.client import manifesttree
from fsd.client.contract import Contract
from fsd.client.files import Files
from fsd.client.http import Http
from fsd.client.manifest import Entry, Fetch
from fsd.client.manifest import read as read_manifest
from fsd.client.native import Checkpoints
from fsd.client.policy import of_record as policy_of
from fsd.client.restore import Restore
from fsd.model.errors import FsdError, NotFound, UsageError
from fsd.model.words import counted

_MARKS: Final = {
    "added": "A",
    "removed": "D",
    "modified": "M",
    "attributes": "a",
    "renamed": "R",
    "replaced": "T",
}


def checkpoints(context: Context) -> Checkpoints:
    return Checkpoints(Http(context.data(), context.host))


def list_all(context: Context, args: SimpleNamespace) -> Document:
    api = checkpoints(context)
    found: list[dict[str, Any]] = []
    cursor: str | None = None
    while True:
        room = 1000 if args.limit is None else min(1000, args.limit - len(found))
        page = api.page(thread=args.thread, limit=room, cursor=cursor)
        found += page["checkpoints"]
        cursor = page["next_cursor"]
        if cursor is None or (args.limit is not None and len(found) >= args.limit):
            break
    shown = ("checkpoint_id", "created_at", "reason", "label", "fs_seq", "entries", "thread_id")
    return Document({"checkpoints": found, "next_cursor": cursor}, text=columns(shown, "checkpoints"))


def show(context: Context, args: SimpleNamespace) -> Document:
    """With --files also the entries, with names for their contents (`GET /v1/blobs/…` has the bytes)."""
    name = whole_id(context, args.checkpoint)
    made = checkpoints(context).show(name)
    if args.files:
        made["files"] = _record(context, name)["files"]

    def text(value: Any) -> str:
        rows = [
            [name, "-" if one is None else visible(str(one))]
            for name, one in value.items()
            if name != "files"
        ]
        files = [
            [one["kind"], str(one.get("size", "-")), visible(one["path"])] for one in value.get("files", ())
        ]
        return align(rows) + align(files)

    return Document(made, text=text)


def _record(context: Context, checkpoint: str) -> dict[str, Any]:
    """The checkpoint as the contract gives it, with its files."""
    found = Contract(Http(context.data(), context.host)).call("get", {"id": checkpoint})
    if found is None:
        raise NotFound(f"no checkpoint {checkpoint}", hint="see fsd checkpoint list")
    record: dict[str, Any] = found
    return record


def diff(context: Context, args: SimpleNamespace) -> Document:
    api = checkpoints(context)
    first = whole_id(context, args.first)
    last = None if args.last is None else whole_id(context, args.last)
    if _is_manifest(api, first) or _is_manifest(api, last):
        if last is None:
            raise UsageError("a manifest is compared with another checkpoint", hint="give a second id")
        changes = manifesttree.difference(_entries(context, first), _entries(context, last))
        found = {"from_seq": None, "to_seq": None, "changes": changes}
    else:
        if last is None:
            local.sent_if_it_can_be(context, context.data().file_system_id)
        found = api.difference(first, last)

    def text(value: Any) -> str:
        lines = []
        for one in value["changes"]:
            path = shown_name(one, "path")
            if one["change"] == "renamed":
                path = f"{shown_name(one, 'from')} -> {path}"
            sizes = f"{_size(one['size_before'])} -> {_size(one['size_after'])}"
            lines.append([_MARKS.get(one["change"], "?"), sizes if one["kind"] == "file" else "", path])
        return align(lines)

    return Document(found, text=text)


def _size(size: int | None) -> str:
    return "-" if size is None else str(size)


def _is_manifest(api: Checkpoints, name: str | None) -> bool:
    """Whether it is a checkpoint by contract, which is no state. Raises `NotFound`."""
    if name is None or name.startswith(("seq:", "journal:")):
        return False
    return bool(api.show(name)["kind"] == "manifest")


def _entries(context: Context, checkpoint: str) -> list[Entry]:
    """The entries of a checkpoint of either kind."""
    if checkpoint.startswith(("seq:", "journal:")):
        raise UsageError(f"{checkpoint} cannot be compared with a manifest", hint="give a checkpoint's id")
    return read_manifest(_record(context, checkpoint)["files"])


def _fetch(context: Context) -> Fetch:
    return Contract(Http(context.data(), context.host)).fetch


def cat(context: Context, args: SimpleNamespace) -> Raw:
    name = whole_id(context, args.checkpoint)
    if _is_manifest(checkpoints(context), name):
        entry = manifesttree.file_at(_entries(context, name), remote_path(args.path))
        return _pour(context, manifesttree.read_file(entry, _fetch(context)))
    api = Files(Http(context.data(), context.host), at={"checkpoint": name})
    return _pour(context, api.read(remote_path(args.path)))


def export(context: Context, args: SimpleNamespace) -> Raw:
    if context.streams.stdout_terminal:
        raise UsageError("a tar stream is not for a terminal", hint="write it to a file: … > tree.tar")
    name = whole_id(context, args.checkpoint)
    if _is_manifest(checkpoints(context), name):
        entries = _entries(context, name)
        manifesttree.export(entries, remote_path(args.path), _fetch(context), context.streams.stdout)
        context.streams.stdout.flush()
        return Raw()
    at = {"checkpoint": name}
    return _pour(context, checkpoints(context).export(remote_path(args.path), at))


def _pour(context: Context, pieces: Iterator[bytes]) -> Raw:
    out = context.streams.stdout
    for piece in pieces:
        out.write(piece)
    out.flush()
    return Raw()


# -- going back ----------------------------------------------------------------------------------------


def restore(context: Context, args: SimpleNamespace) -> Document:
    at, path = _state_and_path(args)
    if "checkpoint" in at:
        at["checkpoint"] = whole_id(context, at["checkpoint"])
    if args.to is not None:
        return _restore_here(context, args, at, path)
    raw = None if path is None else remote_path(path)
    what = "the whole tree" if raw in (None, b"/") else path
    if raw == b"/":
        raw = None
    api = checkpoints(context)
    if not args.dry_run:
        context.confirm(f"Replace {what} (what it is now is kept as a checkpoint)?", needs_yes=raw is None)
    own = _drained(context) if not args.dry_run else _sessions(context)
    done = api.restore(at, raw, force=args.force, own=own, dry_run=bool(args.dry_run))
    if not args.dry_run:
        local.seen(context, context.data().file_system_id, done["fs_seq"])
    return Document(done, text=_restored_text)


def _restored_text(value: Any) -> str:
    changes = counted(value["changes"], "change")
    if value.get("dry_run"):
        return f"{changes}\n"
    undo = value["undo_checkpoint_id"]
    back = f"; what it was before: {undo}" if undo else ""
    return f"commit {value['fs_seq']}, {changes}{back}\n"


def _state_and_path(args: SimpleNamespace) -> tuple[dict[str, str], str | None]:
    """With --at-journal the one operand is the path."""
    if args.at_journal is None:
        if args.checkpoint is None:
            raise UsageError("which checkpoint? its id is missing", hint="see fsd checkpoint list")
        if args.path is None and args.checkpoint.startswith(("/", ":/")):
            # Without this it would ask whether to replace the whole tree.
            raise UsageError(
                f"which checkpoint? {args.checkpoint} is a path, and the id comes before it",
                hint=f"see fsd checkpoint list, or fsd history {args.checkpoint}",
            )
        return {"checkpoint": args.checkpoint}, args.path
    if args.checkpoint is not None and (args.path is not None or not args.checkpoint.startswith(("/", ":"))):
        raise UsageError("a checkpoint and --at-journal name two states: give one of them")
    return {"at_journal": f"{args.at_journal[0]}:{args.at_journal[1]}"}, args.path or args.checkpoint


def _drained(context: Context) -> list[int]:
    """Send what the mounts of the filesystem here hold; their sessions, which do not stand in the way of a
    restore from here."""
    local.barrier(context, context.data().file_system_id, undone="nothing was restored")
    return _sessions(context)


def _sessions(context: Context) -> list[int]:
    found = []
    for record in local.mounts_here(context, context.data().file_system_id):
        from fsd.kernel.control_client import request

        try:
            status = request(Path(record.socket), "status", {}, timeout=local.SILENCE)
        except FsdError as exc:
            context.say(f"fsd: the mount at {record.mountpoint} does not answer: {exc.message}")
            continue
        found.append(int(status["mount_session_id"]))
    return found


def _restore_here(context: Context, args: SimpleNamespace, at: dict[str, str], path: str | None) -> Document:
    """Into a local directory: all is fetched and verified before anything there is touched."""
    if path is not None or "checkpoint" not in at:
        raise UsageError(
            "--to takes a whole checkpoint",
            hint="for a path: fsd cp -r --checkpoint ID :/path ./here",
        )
    record = _record(context, at["checkpoint"])
    if args.dry_run:
        return Document({"directory": args.to, "entries": len(record["files"])})
    contract = Contract(Http(context.data(), context.host))
    entries = read_manifest(record["files"])
    work = Restore(entries, policy_of(record), contract.fetch, context.host)
    done = work.run(os.fspath(args.to), replace=args.force)
    made = {
        "checkpoint_id": at["checkpoint"],
        "directory": args.to,
        "files": done.files,
        "directories": done.directories,
        "links": done.links,
        "removed": done.removed,
        "bytes": done.bytes,
    }
    return Document(
        made,
        text=lambda v: f"{counted(v['files'], 'file')}, {counted(v['bytes'], 'byte')} in {v['directory']}\n",
    )


def undelete(context: Context, args: SimpleNamespace) -> Document:
    path = remote_path(args.path)
    own = _sessions(context) if args.no_barrier else _drained(context)
    done = checkpoints(context).undelete(path, own=own, dry_run=bool(args.dry_run))
    if not args.dry_run:
        local.seen(context, context.data().file_system_id, done["fs_seq"])
    return Document(done, text=_restored_text)


def history(context: Context, args: SimpleNamespace) -> Document:
    found = checkpoints(context).history(remote_path(args.path), limit=args.limit, follow=not args.no_follow)
    asked = shown_name(found, "path")
    known = any(one["stat"] is not None for one in found["versions"]) or "moved_to" in found
    if not known and found["next_cursor"] is None:
        raise NotFound(
            f"nothing is called {asked}, now or in any state that is kept",
            hint="`fsd checkpoint list` shows the states; `fsd find --checkpoint ID` looks in one",
        )

    def text(value: Any) -> str:
        lines = []
        for one in value["versions"]:
            stat, state = one["stat"], one["newest"]
            where = (
                "now" if one["live"] else state["checkpoint_id"] or state["entry"] or f"seq:{state['fs_seq']}"
            )
            what = "-" if stat is None else str(stat["size_bytes"])
            when = "absent" if stat is None else str(stat["mtime"])[:19].replace("T", " ")
            if one["live"] and "moved_to" in value:
                when = f"is {shown_name(value, 'moved_to')} now"
            # Of an older server there is none: it knows no other path than the one asked for.
            path = shown_name(one, "path") if "path" in one else asked
            lines.append([where, what, when, "" if path == asked else path, visible(state["label"] or "")])
        return align(lines)

    return Document(found, text=text)


# -- ends ----------------------------------------------------------------------------------------------


def delete(context: Context, args: SimpleNamespace) -> Document:
    api = checkpoints(context)
    name = whole_id(context, args.checkpoint)
    if args.dry_run:
        return Document(api.show(name))
    context.confirm(f"Delete the checkpoint {name}?", needs_yes=True)
    return Document(api.delete(name), text=lambda value: f"{value['checkpoint_id']} deleted\n")


def prune(context: Context, args: SimpleNamespace) -> Document:
    api = checkpoints(context)
    if args.named and args.automatic:
        raise UsageError("--named and --automatic exclude each other")
    named = True if args.named else False if args.automatic else None
    if not args.dry_run:
        planned = api.prune(args.keep, named=named, dry_run=True)
        if planned["deleted"]:
            context.confirm(f"Delete {counted(len(planned['deleted']), 'checkpoint')}?", needs_yes=True)
    done = api.prune(args.keep, named=named, dry_run=bool(args.dry_run))
    done.pop("more", None)
    return Document(done, text=_pruned_text)


def _pruned_text(value: Any) -> str:
    """What a rule does not look at is told: who expects to see it go learns how."""
    kept, apart = value["kept"], value["not_considered"]
    lines = list(value["deleted"]) or [f"nothing to delete, {kept} kept"]
    if apart:
        what = counted(apart, "checkpoint")
        lines.append(f"{what} not looked at: made by somebody, or undo the last hour (--named takes all)")
    return lines_of(lines)
