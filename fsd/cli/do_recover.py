"""`fsd recover`: send what an ended mount left behind, without mounting; look after refused changes."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

from fsd import __version__
from fsd.cli.again import Again
from fsd.cli.context import Context, remote_path
from fsd.cli.do_files import files
from fsd.cli.do_mount import place, state_dir
from fsd.cli.output import Document
from fsd.client.files import FindFilter, raw_path
from fsd.client.http import Http
from fsd.client.leases import Leases, nobody_writes
from fsd.kernel.mountpoint import resolve
from fsd.kernel.options import mount_id
from fsd.model.attrs import ROOT_INO
from fsd.model.errors import (
    FsdError,
    HistoryChanged,
    IntegrityError,
    LeaseLost,
    NotAuthenticated,
    NotDrained,
    NotFound,
    NotPermitted,
    Unavailable,
    UsageError,
)
from fsd.model.token import parse
from fsd.model.words import counted
from fsd.remote.hot import HttpRemote, RemoteOptions
from fsd.vfs import decide
from fsd.vfs.aside import kept
from fsd.vfs.open import give_up, prepare, replaced
from fsd.vfs.open import recover as recover_log
from fsd.vfs.recover import Report
from fsd.vfs.takeout import drop, take_out
from fsd.vfs.types import VolumeOptions

PATIENCE: Final = 60.0  # seconds in which nothing goes through before it gives up


class NoCache:
    """A recovery reads few blobs, each once: nothing to keep."""

    def get(self, digest: bytes) -> bytes | None:
        return None

    def put(self, digest: bytes, data: bytes) -> None:
        return None


def volume_options(context: Context, args: SimpleNamespace) -> VolumeOptions:
    """What the mount at that place was opened with, as far as sending its log needs it. To take files out the
    filesystem's id is enough where there is no token any more."""
    where, subtree = resolve(place(args)), remote_path(args.remote_path)
    file_system = context.claim.file_system_id if without_token(context, args) else None
    if args.export and not context.claim.token and not file_system:
        raise NotAuthenticated(
            "no filesystem token",
            hint="set FSD_TOKEN; where it is lost, --file-system-id says which filesystem's (`fsd doctor` "
            "names it), and files are taken out as far as the log holds them",
        )
    file_system = file_system or context.data().file_system_id
    ident = mount_id(file_system, subtree, where)
    return VolumeOptions(
        state_dir=state_dir(context, args) / "mounts" / ident,
        mount_id=ident,
        hostname=socket.gethostname(),
        path=str(where),
        file_system=file_system,
        remote_path=subtree,
        version=__version__,
    )


def without_token(context: Context, args: SimpleNamespace) -> bool:
    """Whether there is nobody to ask: what the log holds is all that can be taken out."""
    return bool(args.export and not context.claim.token and context.claim.file_system_id)


def recover(context: Context, args: SimpleNamespace) -> Document:
    wanted = volume_options(context, args)
    if not wanted.state_dir.is_dir():
        raise NotFound(
            f"{wanted.file_system} left nothing at {wanted.path}: there is no {wanted.state_dir}",
            hint="give the token, --state-dir and --remote-path of the mount; `fsd doctor` lists left-overs",
        )
    if args.retry + bool(args.export) + args.discard + args.as_conflicts > 1:
        raise UsageError("--retry, --export, --discard and --as-conflicts exclude each other")
    if without_token(context, args):
        lock = prepare(wanted)
        try:
            return not_sent(context, args, wanted, None, NotAuthenticated("no filesystem token"))
        finally:
            os.close(lock)
    identity = context.data()
    options = RemoteOptions(identity.endpoint, parse(identity.secret), insecure=context.claim.insecure)
    remote = HttpRemote(options, context.host)
    lock = prepare(wanted)
    try:
        if args.as_conflicts:
            hint = "try again when it is unmounted; --export DIR takes the files out now"
            leases = Leases(Http(context.data(), context.host))
            nobody_writes(leases, wanted.remote_path, below=True, hint=hint)
        try:
            left = recover_log(
                wanted, context.host, remote, NoCache(), patience=PATIENCE, shared=args.as_conflicts
            )
        except (LeaseLost, HistoryChanged, NotAuthenticated, NotPermitted, Unavailable) as exc:
            return not_sent(context, args, wanted, remote, exc)
        give_up(remote, left.held)
        replaced(remote, left.session)
        decided = decide_about(context, args, wanted)
        return answer(wanted, args, left.report, decided)
    finally:
        os.close(lock)


def not_sent(
    context: Context, args: SimpleNamespace, wanted: VolumeOptions, remote: HttpRemote | None, error: FsdError
) -> Document:
    """What was written and cannot be sent: under a writer lease that somebody else took since
    (`--as-conflicts` sends it), with a token the server does not take any more, to a server that is gone, or
    to one that went back to an older copy of its data and does not have what this was written on; or without
    a token and so without a `remote`.
    Taken out or dropped, else told. Without a server's word files go as far as the log holds them."""
    lost, other = isinstance(error, LeaseLost), isinstance(error, HistoryChanged)
    value: dict[str, Any] = {
        "status": "lease_lost" if lost else "not_sent",
        "mount_path": wanted.path,
        "state_dir": str(wanted.state_dir),
        "reason": error.message,
    }
    if args.export:

        def directories() -> dict[int, bytes]:
            api, top = files(context), wanted.remote_path
            below = api.find(top, FindFilter(kind="directory"))
            found = {int(one["ino"]): raw_path(one)[len(top.rstrip(b"/")) :] for one in below}
            return {**found, int(api.stat(top)["ino"]): b"/"}

        def root_alone() -> dict[int, bytes]:
            return {ROOT_INO: b"/"} if wanted.remote_path == b"/" else {}

        target = Path(args.export).absolute()
        paths = directories if lost else root_alone
        # Content is asked for by its hash, so a service with another history may give what it has; names of
        # directories are asked for by number, and there that may be another one.
        asked = remote if lost or other else None
        taken = take_out(wanted, context.host, asked, NoCache(), paths, target)
        value |= {"exported": taken.files, "not_files": taken.names, "incomplete": taken.incomplete}
    elif args.discard and not isinstance(error, Unavailable):
        context.confirm("Drop everything this mount had not sent, for good?", needs_yes=True)
        drop(wanted, context.host)
        return answer(wanted, args, None, {"status": "discarded", "reason": error.message})
    else:
        if not lost and not other:
            ways = "`--export DIR` takes out what was not sent"
            ways += "" if isinstance(error, Unavailable) else ", `--discard` drops it"
            error.hint = f"{error.hint}; {ways}" if error.hint else ways
        raise error
    hint = "what was taken out is still in the log: `fsd recover` with --discard drops it there"
    if remote is None:
        hint += f"; where the token is gone for good, remove {wanted.state_dir}"
    if taken.incomplete:
        hint += "; of the files in `incomplete` only what was changed could be taken out, the rest are zeros"
    error.hint = hint
    return Document(value, error=error if lost else NotDrained(error.message, hint=hint))


def decide_about(context: Context, args: SimpleNamespace, wanted: VolumeOptions) -> dict[str, Any]:
    """Do with the refused changes what was asked for; what came of it."""
    found = decide.kept(wanted.state_dir)
    if args.export:
        made = decide.export(found, Path(args.export).absolute())
        return {"exported": made.files} | ({"incomplete": made.incomplete} if made.incomplete else {})
    if args.discard and found:
        what = counted(len(found), "change")
        context.confirm(f"Drop {what} that the server refused, for good?", needs_yes=True)
        for one in found:
            decide.discard(one, context.host)
        return {"discarded": len(found)}
    if args.retry and found:
        return _retry(context, args, found)
    return {}


def _retry(context: Context, args: SimpleNamespace, found: list[decide.Kept]) -> dict[str, Any]:
    """Do the refused changes again, in order, by path; those that go through now are dropped here."""
    again, top = Again(files(context), socket.gethostname()), remote_path(args.remote_path).rstrip(b"/")
    done, failed = 0, []
    for one in found:
        try:
            again.do(top + one.path, one)
        except FsdError as exc:
            failed.append({**one.to_json(), "reason": exc.message})
            continue
        decide.discard(one, context.host)
        done += 1
    return {"retried": done, "failed": failed, "beside": again.beside}


def answer(
    wanted: VolumeOptions, args: SimpleNamespace, report: Report | None, decided: dict[str, Any]
) -> Document:
    """What was done, what is refused; the exit code says whether anything needs a person."""
    refused = [one.to_json() for one in decide.kept(wanted.state_dir)]
    value: dict[str, Any] = {
        "status": "nothing_left" if report is None else "recovered",
        "mount_path": wanted.path,
        "state_dir": str(wanted.state_dir),
        "sent": {
            "operations": report.operations if report else 0,
            "files": report.files if report else 0,
        },
        "conflicts": report.conflicts if report else 0,
        "superseded": report.kept if report else 0,
        "damaged": report.damaged if report else [],
        "damaged_logs": [str(path) for path in kept(wanted.state_dir)],
        "refused": refused,
        **decided,
    }
    error: FsdError | None = None
    if refused:
        value["status"] = "refused"
        error = NotDrained(
            f"the server refused {counted(len(refused), 'change')}, kept in {wanted.state_dir / 'refused'}",
            hint="`fsd recover` with --retry, --export DIR or --discard decides about them",
        )
    elif value["damaged"]:
        error = IntegrityError(
            f"{counted(len(value['damaged']), 'file')} lost bytes when the machine stopped; what is left of "
            f"the first is in {value['damaged'][0]}",
            hint="compare it with the file beside it, then remove one of them",
        )
    elif value["damaged_logs"]:
        error = IntegrityError(
            f"a log was damaged and could be read only in part; it is kept in {value['damaged_logs'][-1]}",
            hint="compare what is in the filesystem; when nothing is missed, remove that directory",
        )
    return Document(value, error=error)
