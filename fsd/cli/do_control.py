"""Handlers of the control plane: filesystems and their tokens."""

from __future__ import annotations

import os
import time
from types import SimpleNamespace
from typing import Any, Final

from fsd.cli import values
from fsd.cli.context import Context
from fsd.cli.output import Document, columns
from fsd.client.control import Control
from fsd.client.forks import Forks
from fsd.client.http import Http
from fsd.client.identity import Identity
from fsd.model.errors import FsdError, NotFound, NotPermitted, UsageError
from fsd.model.words import counted

WAIT: Final = 600.0
KEY_WAIT: Final = 15.0  # a server's first start writes its admin key within this many seconds


def control(context: Context, identity: Identity) -> Control:
    return Control(Http(identity, context.host))


def create(context: Context, args: SimpleNamespace) -> Document:
    if args.wait:
        _await_key(context, args.admin_key_file)
    api = control(context, context.admin())
    terms = (args.lease_duration, args.renew_after)
    made = api.create(args.display_name, values.labels(args.label) or None, terms=terms)
    error: FsdError | None = None
    if args.wait:
        try:
            api.wait_usable(made["file_system_id"], WAIT)
        except FsdError as exc:
            # The token is shown this once: the answer is printed although waiting failed.
            error = exc
    if context.long:
        made["credentials_stored"] = False
    return Document(made, error=error)


def _await_key(context: Context, path: str | None) -> None:
    """Until the file of the admin key is there: `fsd serve … & fsd create --wait …` meets a server that
    just starts, and the key is made at its first start. Says so; when it does not come the caller's own
    reading tells the error. The connection has its own patience."""
    if path is None or path == "-" or os.path.lexists(path):
        return
    context.say(f"waiting for `fsd serve` to write {path}")
    deadline = context.host.monotonic() + KEY_WAIT
    while not os.path.lexists(path) and context.host.monotonic() < deadline:
        time.sleep(0.05)


def list_all(context: Context, args: SimpleNamespace) -> Document:
    identity = context.admin_or_origin()
    if identity.file_system_id:
        found = _own_and_forks(context, identity, args)
    else:
        label = "=".join(args.label) if args.label else None
        found = control(context, identity).list(args.display_name, label)
    if context.long:
        for row in found["file_systems"]:
            row["has_local_token"] = False
    shown = ("file_system_id", "display_name", "status", "created_at", "labels", "origin_id")
    return Document(found, text=columns(shown, "file_systems"))


def _own_and_forks(context: Context, identity: Identity, args: SimpleNamespace) -> dict[str, Any]:
    """What a token may list: its filesystem, the forks of it, and theirs."""
    own = control(context, identity).describe(identity.file_system_id)
    rows = [own, *Forks(Http(identity, context.host), identity.file_system_id).below()]
    name, label = args.display_name or "", tuple(args.label or ())
    shown = [
        row
        for row in rows
        if name in (row["display_name"] or "") and (not label or row["labels"].get(label[0]) == label[1])
    ]
    return {"region_code": own["region_code"], "file_systems": shown}


def describe(context: Context, args: SimpleNamespace) -> Document:
    named, claim = args.file_system_id, context.claim
    if named and claim.token and not claim.admin_key:
        own = context.admin_or_origin()
        if named != own.file_system_id:
            return Document(_fork_of(context, own, named, args.chain))
    identity, wanted = context.admin_or_owner(named)
    return Document(control(context, identity).describe(wanted, chain=args.chain))


def _fork_of(context: Context, own: Identity, named: str, chain: bool) -> dict[str, Any]:
    """One of the forks that `fsd list` shows to a token of what they were made from."""
    below = Forks(Http(own, context.host), own.file_system_id).below()
    found = next((one for one in below if one["file_system_id"] == named), None)
    if found is None:
        raise NotFound(
            f"no filesystem {named} that this token shows",
            hint=f"it is for {own.file_system_id} and the forks of it (`fsd list`); the admin key shows all",
        )
    if chain:
        raise NotPermitted(
            f"the chain of {named} is shown to its own token and to the admin key",
            hint=f"it was made from {found['origin_id']}; leave --chain out",
        )
    shown = {key: value for key, value in found.items() if key not in ("fs_seq", "layer")}
    return {**shown, "seq": found["fs_seq"], "kind": "native"}


def check(context: Context, args: SimpleNamespace) -> Document:
    """Each step of the way to the filesystem, in order; the first that fails decides the exit code."""
    checks: list[dict[str, str]] = []
    found: dict[str, Any] = {"status": "failed", "profile": "default", "resource": None, "endpoint": None}

    def done(status: str, remote: str, error: FsdError | None = None) -> Document:
        found.update(status=status, remote=remote, checks=checks)
        return Document(found, error=error)

    def passed(name: str, message: str) -> None:
        checks.append({"name": name, "status": "ok", "message": message})

    def failed(name: str, error: FsdError) -> Document:
        checks.append({"name": name, "status": "failed", "message": context.redact(error.message)})
        return done("failed", "unknown" if name == "credentials" else "failed", error)

    try:
        identity, wanted = context.admin_or_owner(args.file_system_id)
    except FsdError as exc:
        return failed("credentials", exc)
    passed("credentials", "admin key" if not identity.file_system_id else "token")
    found.update(resource=wanted, endpoint=identity.endpoint)
    api = control(context, identity)
    try:
        api.ready()
    except FsdError as exc:
        return failed("endpoint", exc)
    passed("endpoint", identity.endpoint)
    try:
        remote = api.check(wanted)
    except FsdError as exc:
        return failed("remote", exc)
    checks.extend(remote["checks"])
    if remote["status"] != "ok":
        bad = next((c for c in remote["checks"] if c["status"] != "ok"), {"name": "remote", "message": ""})
        return done("failed", "failed", FsdError(f"{wanted}: {bad['name']} failed: {bad['message']}"))
    return done("ok", "ok")


def delete(context: Context, args: SimpleNamespace) -> Document:
    """With a token instead of the admin key: a fork of its filesystem."""
    identity, wanted = context.admin_or_origin(), args.file_system_id
    if identity.file_system_id == wanted:
        raise NotPermitted(
            "a filesystem is deleted with the admin key; its token deletes its forks",
            hint="set FSD_ADMIN_KEY and FSD_ENDPOINT",
        )
    if args.cascade and args.detach:
        raise UsageError("--cascade and --detach exclude each other")
    forks = Forks(Http(identity, context.host), identity.file_system_id) if identity.file_system_id else None
    if not (args.yes or context.long):
        about = _about(context, identity, forks, wanted)
        context.confirm(f"Delete {wanted}{about} with all it holds, for good?", needs_yes=True)
    if forks is not None:
        answer = forks.delete(wanted, cascade=args.cascade, detach=args.detach)
    else:
        answer = control(context, identity).delete(wanted, cascade=args.cascade, detach=args.detach)
    if context.long:
        answer = {**answer, "credentials_removed": False, "remote_deletion_state": "accepted"}
    return Document(answer)


def _about(context: Context, identity: Identity, forks: Forks | None, wanted: str) -> str:
    """What a question says of the filesystem, for who has the wrong id at hand."""
    if forks is None:
        found = control(context, identity).describe(wanted)
    else:
        found = next((one for one in forks.below() if one["file_system_id"] == wanted), {})
    if not found:
        return ""
    usage = found["usage"]
    size = f"{counted(usage['file_count'], 'file')}, {counted(usage['storage_bytes'], 'byte')}"
    return f" ({found['display_name']}: {size})" if found["display_name"] else f" ({size})"


def token_create(context: Context, args: SimpleNamespace) -> Document:
    if args.ttl is not None and args.no_expiration:
        raise UsageError("--ttl and --no-expiration exclude each other")
    if context.long and args.ttl is None and not args.no_expiration:
        raise UsageError("one of --ttl and --no-expiration is needed")
    identity, wanted = _admin_for(context, args)
    answer = control(context, identity).create_token(wanted, args.token_name, _whole(args.ttl))
    if context.long:
        answer = {**answer, "credentials_stored": False, "previous_token_note": "earlier tokens stay valid"}
    return Document(answer)


def _whole(seconds: float | None) -> int | None:
    """The server counts in whole seconds; never longer than asked, and at least one."""
    return None if seconds is None else max(1, int(seconds))


def _admin_for(context: Context, args: SimpleNamespace) -> tuple[Identity, str]:
    """The admin key, which alone may deal with tokens, and the filesystem."""
    identity = context.admin()
    return identity, context.admin_or_owner(args.file_system_id)[1]


def token_list(context: Context, args: SimpleNamespace) -> Document:
    identity, wanted = _admin_for(context, args)
    api = control(context, identity)
    if args.limit is not None or args.offset:
        page = api.token_page(
            wanted, include_expired=args.include_expired, offset=args.offset, limit=args.limit or 200
        )
    else:
        found = list(api.tokens(wanted, include_expired=args.include_expired))
        page = {"tokens": found, "next_offset": None}
    shown = ("token_id", "token_name", "scope_kind", "status", "issued_at", "expires_at")
    return Document(page, text=columns(shown, "tokens"))


def _status(context: Context, answer: dict[str, Any]) -> Document:
    if context.long:
        answer = {
            **answer,
            "local_credentials_updated": False,
            "local_credentials_reason": "fsd stores no credentials",
            "cache_convergence_note": "it holds at once on every server",
        }
    return Document(answer)


def token_disable(context: Context, args: SimpleNamespace) -> Document:
    identity, wanted = _admin_for(context, args)
    return _status(context, control(context, identity).disable_token(wanted, args.token_id))


def token_enable(context: Context, args: SimpleNamespace) -> Document:
    identity, wanted = _admin_for(context, args)
    return _status(context, control(context, identity).enable_token(wanted, args.token_id))


def token_delete(context: Context, args: SimpleNamespace) -> Document:
    identity, wanted = _admin_for(context, args)
    context.confirm(f"Delete the token {args.token_id} of {wanted}?", needs_yes=False)
    return _status(context, control(context, identity).delete_token(wanted, args.token_id))


def token_rotate(context: Context, args: SimpleNamespace) -> Document:
    """A new token with the old one's name, then the old one goes. When that fails both hold, and it is
    told."""
    identity, wanted = _admin_for(context, args)
    api = control(context, identity)
    old = next((t for t in api.tokens(wanted, include_expired=True) if t["token_id"] == args.token_id), None)
    if old is None:
        raise NotFound(f"{wanted} has no token {args.token_id}", hint="see `fsd token list`")
    context.confirm(f"Replace the token {args.token_id} of {wanted}?", needs_yes=False)
    made = api.create_token(wanted, old.get("token_name"), _whole(args.ttl))
    error: FsdError | None = None
    try:
        api.delete_token(wanted, args.token_id)
        made["replaced_token_id"] = args.token_id
    except FsdError as exc:
        made["replaced_token_id"] = None
        error = exc
        error.hint = f"the new token holds; the old one does too: `fsd token delete {args.token_id}`"
    return Document(made, error=error)
