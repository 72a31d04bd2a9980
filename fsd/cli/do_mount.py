"""Handlers of the mount family: options from flags, then `fsd.kernel`; answers as documents.

What few of them need is imported there: a mount's supervisor keeps for its life what this process has loaded.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

from fsd.cli import leftovers, local
from fsd.cli.checkpoint_ids import whole_id
from fsd.cli.context import Context, remote_path
from fsd.cli.output import Document, Raw, Result, columns, table
from fsd.model.errors import FsdError, NotFound, UsageError
from fsd.model.limits import IO_TIMEOUT, MIB
from fsd.model.plain import replace
from fsd.model.token import parse

if TYPE_CHECKING:
    from fsd.kernel.options import MountOptions

LONG_TIMEOUT: Final = 30.0  # what ti's drain and unmount wait


def place(args: SimpleNamespace) -> Path:
    if not args.mount_path:
        raise UsageError("an empty mount point")
    return Path(args.mount_path)


def _name(where: Path) -> str:
    """A mount point in an answer: absolute, as `mount` and `status` give it. Before what may change the
    working directory."""
    from fsd.kernel.mountpoint import resolve

    return os.fspath(resolve(where))


def _within(context: Context, args: SimpleNamespace) -> float | None:
    """Seconds to wait; None: for ever. A server that is away must not hold a script for ever by default."""
    if args.timeout is None:
        return LONG_TIMEOUT if context.long else IO_TIMEOUT
    return float(args.timeout) or None


def _say(context: Context) -> Callable[[str], None]:
    """Progress of long work: on a terminal only."""
    return context.progress


def state_dir(context: Context, args: SimpleNamespace) -> Path:
    chosen = args.state_dir or getattr(args, "cache_dir", None)
    return Path(os.path.abspath(chosen)) if chosen else context.env.state_root()


def shown_state(args: SimpleNamespace) -> str:
    """The retained state a mount is to show, as in a query string; empty for the live tree."""
    if args.checkpoint and args.at_journal:
        raise UsageError("--checkpoint and --at-journal name two states: give one of them")
    if args.checkpoint:
        return "checkpoint=" + quote(args.checkpoint, safe="")
    if args.at_journal:
        journal, seq = args.at_journal
        return "at_journal=" + quote(f"{journal}:{seq}", safe="")
    return ""


def mount_options(context: Context, args: SimpleNamespace) -> MountOptions:
    """`MountOptions` from the flags."""
    from fsd.kernel.options import CACHE_BYTES, MountOptions

    identity = context.data()
    if args.checkpoint:
        args.checkpoint = whole_id(context, args.checkpoint)
    if bool(args.thread) != args.restore_head:
        raise UsageError("--restore-head and --thread belong together")
    if args.if_empty and not args.restore_head:
        raise UsageError("--if-empty goes with --restore-head")
    if args.thread and (args.read_only or shown_state(args)):
        raise UsageError("a read-only mount cannot restore")
    if args.keep and not args.auto_checkpoint:
        raise UsageError("--keep thins what --auto-checkpoint makes: give that too")
    if args.auto_checkpoint and (args.read_only or shown_state(args)):
        raise UsageError("a mount that changes nothing makes no checkpoints")
    cache = args.cache_size or CACHE_BYTES
    if getattr(args, "read_cache_size_mb", None):
        cache = args.read_cache_size_mb * MIB
    if args.exclusive and (args.read_only or shown_state(args)):
        raise UsageError("an exclusive mount is there to write: it cannot be read-only")
    if args.acl and args.no_xattr:
        raise UsageError("ACLs are kept as extended attributes: --acl and --no-xattr exclude each other")
    durability = args.durability
    if getattr(args, "write_back_cache", None) is False:
        durability = "close"
    return MountOptions(
        mountpoint=place(args),
        token=parse(identity.secret),
        endpoint=identity.endpoint,
        state_dir=state_dir(context, args),
        runtime_dir=context.env.runtime_dir(),
        remote_path=remote_path(args.remote_path),
        read_only=args.read_only or bool(shown_state(args)),
        state=shown_state(args),
        restore_thread=args.thread or "",
        restore_if_empty=args.if_empty,
        auto_checkpoint=args.auto_checkpoint or 0.0,
        keep=args.keep or "",
        durability=durability,
        exclusive=args.exclusive,
        lease_ttl=args.lease_time,
        lease_wait=args.wait,
        consistency=args.consistency,
        xattr=not args.no_xattr,
        acl=args.acl,
        loop=args.loop,
        foreground=args.foreground,
        supervised=not args.no_supervisor,
        io_timeout=args.io_timeout,
        stop_timeout=args.stop_timeout,
        ready_timeout=args.ready_timeout,
        buffer_size=args.buffer_size or 0,
        cache_size=cache,
        insecure=args.insecure,
        host_label=socket.gethostname(),
        notify_socket=context.env.variables.get("NOTIFY_SOCKET"),
        verbose=args.debug,
        host=context.host,
    )


def _name_left_overs(context: Context, options: MountOptions) -> None:
    """What mounts of other places left is not sent by this one: say so, or it is forgotten."""
    from fsd.kernel.mountpoint import resolve

    own = replace(options, mountpoint=resolve(options.mountpoint)).mount_id
    try:
        found = leftovers.find(context, options.state_dir)
    except PermissionError:
        return  # a HOME that is another user's: the mount itself says that nothing can be kept there
    for left in found:
        if left.place.name != own:
            context.say(f"note: {left.told}; {left.command}")


def mount(context: Context, args: SimpleNamespace) -> Result:
    from fsd.kernel import ahead, supervisor

    options = mount_options(context, args)
    begun = ahead.taken(options)
    _name_left_overs(context, options)
    code = supervisor.mount(options, order=begun.order if begun else None)
    if args.foreground or code:
        return Raw(code)
    record = local.runtime(context).find(options.mountpoint)
    answer: dict[str, Any] = {
        "status": "mounted",
        "file_system_id": options.token.file_system_id,
        "mount_path": record.mountpoint,
        "remote_path": args.remote_path,
        "driver": "fuse",
        "endpoint": options.endpoint,
        "pid": record.pid,
        "supervisor_pid": record.supervisor_pid,
        "state_dir": record.state_dir,
        "log_file": record.log,
        "control_socket": record.socket,
    }
    if context.long:
        answer |= {
            "profile": "default",
            "write_back_cache": options.durability == "fsync",
            "mount_profile": "none",
            "local_root": None,
            "pack_paths": [],
        }
    return Document(answer, text=lambda a: f"{a['remote_path']} is mounted on {a['mount_path']}\n")


def _told(action: Callable[[], dict[str, Any]], path: str) -> Document:
    """The answer of a drain or unmount; when it is an error with an answer, both are printed."""
    try:
        answer = action()
    except FsdError as exc:
        if not exc.details.get("status") and "pending" not in exc.details:
            raise
        return Document({**exc.details, "mount_path": path}, error=exc)
    return Document({**answer, "mount_path": path})


def drain(context: Context, args: SimpleNamespace) -> Document:
    from fsd.kernel import unmount as ways

    where, directory = place(args), local.runtime(context)
    within = _within(context, args)
    return _told(lambda: ways.drain(where, directory, within, _say(context)), _name(where))


def unmount(context: Context, args: SimpleNamespace) -> Document:
    from fsd.kernel import unmount as ways
    from fsd.kernel.mountpoint import mounted_at, resolve

    where, directory = place(args), local.runtime(context)
    within, say = _within(context, args), _say(context)
    if args.ignore_absent and mounted_at(resolve(where)) is None:
        return _absent(context, args, within)
    return _told(
        lambda: ways.unmount(where, directory, within, say, context.host, lazy=args.lazy), _name(where)
    )


def _absent(context: Context, args: SimpleNamespace, within: float | None) -> Document:
    """Nothing is mounted there. A daemon that still sends what was written there is waited for: absent must
    not hide that."""
    from fsd.kernel import unmount as ways

    where, directory = place(args), local.runtime(context)
    absent = {"status": "absent", "mount_path": _name(where)}
    try:
        record = directory.find(where)
    except NotFound:
        return Document(absent)
    if not directory.alive(record.mount_id):
        return Document(absent)
    document = _told(
        lambda: ways.wait_exit(where, directory, within, _say(context), context.host), absent["mount_path"]
    )
    return document if document.error else Document(absent)


def wait(context: Context, args: SimpleNamespace) -> Document:
    from fsd.kernel import unmount as ways

    if (args.seq is None) == (args.journal is None):
        raise UsageError("one of --seq and --journal is needed")
    seq = args.seq
    if args.journal is not None:
        from fsd.cli.do_journal import journals

        name, number = args.journal
        page = journals(context).read_page(name, after_seq=number - 1, limit=1) if number else {"entries": []}
        if not page["entries"]:
            raise NotFound(f"the journal {name} has no entry {number}")
        seq = int(page["entries"][0]["fs_seq"])
    where = place(args)
    answer = ways.wait(where, local.runtime(context), seq, _within(context, args), _say(context))
    return Document({"status": "ok", **answer, "mount_path": _name(where)})


def wait_exit(context: Context, args: SimpleNamespace) -> Document:
    from fsd.kernel import unmount as ways

    where, directory = place(args), local.runtime(context)
    return _told(
        lambda: ways.wait_exit(where, directory, _within(context, args), _say(context), context.host),
        _name(where),
    )


def status(context: Context, args: SimpleNamespace) -> Document:
    from fsd.kernel import unmount as ways

    return Document(ways.status(place(args), local.runtime(context)))


def mounts(context: Context, args: SimpleNamespace) -> Document:
    if args.all:
        from fsd.cli.do_control import control
        from fsd.client.http import Http
        from fsd.client.leases import Leases

        identity = context.data()
        found = list(control(context, identity).sessions(identity.file_system_id))
        held = Leases(Http(identity, context.host)).held()
        shown = ("session", "host", "path", "started_at", "last_seen_at", "ended")
        sessions, leases = columns(shown, "sessions"), columns(("kind", "path", "host", "since"), "leases")
        return Document(
            {"sessions": found, "leases": held},
            text=lambda v: sessions(v) + (leases(v) if v["leases"] else ""),
        )
    from fsd.kernel import unmount as ways

    rows = ways.mounts(local.runtime(context))
    return Document(
        {"mounts": rows},
        text=lambda v: table(v["mounts"], ("mount_path", "file_system_id", "remote_path", "state", "pid")),
    )


def conflicts(context: Context, args: SimpleNamespace) -> Document:
    """Copies that lost against another's change, content of an unclean end, and the lost-and-found."""
    from fsd.cli.do_files import shown_name
    from fsd.client.files import raw_path
    from fsd.client.http import Http
    from fsd.client.leases import Leases

    leases = Leases(Http(context.data(), context.host))
    found = sorted(leases.conflicts(remote_path(args.path)), key=raw_path)

    def text(value: Any) -> str:
        lines = []
        for c in value["conflicts"]:
            by = ":".join(part for part in (c["host"], c["mount"]) if part)  # `fsd run` has no mount
            path, original = shown_name(c, "path"), shown_name(c, "original")
            line = f"{c['reason']}  {path}  for {original}  by {by}  {c['at']}  {c['detail']}"
            lines.append(line.replace("\n", "\\n") + "\n")
        return "".join(lines)

    return Document({"path": args.path, "conflicts": found}, text=text)
