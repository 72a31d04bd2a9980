"""`fsd recover`: send what an ended mount left behind, without mounting; look after refused changes."""

from __future__ import annotations

import os
import socket
from types import SimpleNamespace
from typing import Any, Final

from fsd import __version__
from fsd.cli.context import Context, remote_path
from fsd.cli.do_mount import place, state_dir
from fsd.cli.output import Document
from fsd.kernel.mountpoint import resolve
from fsd.kernel.options import mount_id
from fsd.model.errors import FsdError, IntegrityError, NotDrained, NotFound
from fsd.model.token import parse
from fsd.remote.hot import HttpRemote, RemoteOptions
from fsd.vfs.open import prepare
from fsd.vfs.open import recover as recover_log
from fsd.vfs.recover import Report
from fsd.vfs.refused import count_refused
from fsd.vfs.types import VolumeOptions

PATIENCE: Final = 60.0  # seconds in which nothing goes through before it gives up


class NoCache:
    """A recovery reads few blobs, each once: nothing to keep."""

    def get(self, digest: bytes) -> bytes | None:
        return None

    def put(self, digest: bytes, data: bytes) -> None:
        return None


def volume_options(context: Context, args: SimpleNamespace) -> VolumeOptions:
    """What the mount at that place was opened with, as far as sending its log needs it."""
    where, subtree = resolve(place(args)), remote_path(args.remote_path)
    file_system = context.data().file_system_id
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


def recover(context: Context, args: SimpleNamespace) -> Document:
    identity, wanted = context.data(), volume_options(context, args)
    if not wanted.state_dir.is_dir():
        raise NotFound(
            f"nothing was left at {args.mount_path}: there is no {wanted.state_dir}",
            hint="give the --state-dir and --remote-path of the mount; `fsd doctor` lists left-overs",
        )
    options = RemoteOptions(identity.endpoint, parse(identity.secret), insecure=context.claim.insecure)
    remote = HttpRemote(options, context.host)
    lock = prepare(wanted)
    try:
        report, _ = recover_log(wanted, context.host, remote, NoCache(), patience=PATIENCE)
        return answer(wanted, args, report)
    finally:
        os.close(lock)


def answer(wanted: VolumeOptions, args: SimpleNamespace, report: Report | None) -> Document:
    """What was done, what is refused; the exit code says whether anything needs a person."""
    refused = count_refused(wanted.state_dir)
    value: dict[str, Any] = {
        "status": "nothing_left" if report is None else "recovered",
        "mount_path": args.mount_path,
        "state_dir": str(wanted.state_dir),
        "sent": {
            "operations": report.operations if report else 0,
            "files": report.files if report else 0,
        },
        "conflicts": report.conflicts if report else 0,
        "superseded": report.kept if report else 0,
        "damaged": report.damaged if report else [],
        "refused": refused,
    }
    error: FsdError | None = None
    if refused:
        value["status"] = "refused"
        error = NotDrained(
            f"the server refused {refused} changes; they are kept in {wanted.state_dir / 'refused'}",
            hint="`fsd recover` with --retry, --export DIR or --discard decides about them",
        )
    elif value["damaged"]:
        error = IntegrityError(
            f"{len(value['damaged'])} files lost bytes when the machine stopped; what is left of the first "
            f"is in {value['damaged'][0]}",
            hint="compare it with the file beside it, then remove one of them",
        )
    return Document(value, error=error)
